"""Sparse factorisations, for examples that read few parameters and couple them weakly."""

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Scalar, ScalarLike

from .._common import _tree
from .._common._cost import rates
from .._common._passes import Passes
from .._common._sharding import is_sharded
from .._common._tree import ravel_pytree
from .._jacobian import AbstractBlock, AbstractJacobian, Cost, Reads, StackedBlock
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ..filters import Tikhonov
from ._base import AbstractMethod, Answer, price_of_squaring


# Least seconds for an entry of the system, as in graphs that are nearly chains.
_ENTRY = 7e-8
# Seconds for an operation of KLU, which has few products of dense blocks.
_OPERATION = 2e-9


class SparseLU(AbstractMethod):
    r"""The damped step by a sparse factorisation. With the unknown
    $u = -(r + \phi\,\delta)$ besides the step, the system contains the entries of the
    Jacobian, and no products of them:

    $$\begin{pmatrix} I & \phi \\ \phi^\top & -\lambda I \end{pmatrix}
    \begin{pmatrix} u \\ \delta \end{pmatrix} = \begin{pmatrix} -r \\ g_0 \end{pmatrix}.$$

    ??? cite "Reference"

        Å. Björck, *Numerical methods for least squares problems* (1996), section 7.7; its
        factorisation: T. A. Davis and E. Palamadai Natarajan, *Algorithm 907: KLU, a
        direct sparse solver for circuit simulation problems*, ACM Trans. Math. Softw. 37
        (2010).
    """

    method: ClassVar[str] = "sparse"
    residuals_are_dear: ClassVar[bool] = True
    problem: Quadratic
    entries: "_Entries"

    def __init__(self, problem: Quadratic, entries: "_Entries", passes: Passes):
        super().__init__(problem, passes)
        self.entries = entries

    @classmethod
    def fits(cls, problem, filter: Filter) -> bool:
        if not super().fits(problem, filter) or is_sharded() or not has_factorisation():
            return False
        return problem.jacobian.is_sparse

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        num_entries, core = _size(cost.reads)
        operations = math.inf
        if len(cost.reads) == 1:
            operations = cost.reads[0].factor_operations
        filled = min(float(core) ** 2, operations)
        if not cost.holds(num_entries + filled):
            return math.inf
        factor = min(rates().cholesky(core), _OPERATION * operations)
        once = _ENTRY * num_entries + factor
        # The damping is at least rounding, and so this is no more accurate than squaring.
        price = price_of_squaring(cost, Tikhonov(1.0))
        return cost.all_rows + num_trials * once + price

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "SparseLU":
        return cls(problem, _Entries.of(problem.jacobian), cost.rows)

    def largest_curvature(self) -> Scalar:
        return self.entries.largest_column()

    def solve(self, filter: Filter) -> Answer:
        domain, rest = self.problem.jacobian.domain, self.problem.rest
        rest = jnp.zeros(domain.size, domain.dtype) if rest is None else rest
        above, below = -self.problem.flat_residual(), ravel_pytree(rest)[0]
        step = self.entries.solved(self.damping_of(filter), above, below)
        return Answer(domain.unravel(step.astype(domain.dtype)))


def has_factorisation() -> bool:
    """Whether KLU is installed and can be used: on a CPU, in double precision."""
    there = importlib.util.find_spec("klujax") is not None
    double = jnp.result_type(float) == jnp.float64
    return there and double and jax.default_backend() == "cpu"


def _size(reads: Sequence[Reads]) -> tuple[int, int]:
    """Estimate the number of entries of the system, and the size of the largest dense
    matrix in its factorisation.

    In a graph with v nodes and e edges, at most 2 (e - v) nodes remain when those with up
    to two neighbours are eliminated, which is cheap. In the best order a sixth of them
    are neighbours at a time (F. V. Fomin and K. Høie, *Pathwidth of cubic graphs and
    exact algorithms*, 2006), and perhaps a third in a good order.
    """
    num_rows = sum(k for k, _, _ in reads[0].arrays)
    widest = max(d for _, _, d in reads[0].arrays)
    num_edges, num_entries = 0, sum(k * d for k, _, d in reads[0].arrays)
    for each in reads:
        together = sum(s for _, s, _ in each.arrays)
        num_edges += each.num_examples * together * (together - 1) // 2
        read = sum(s * d for _, s, d in each.arrays)
        num_entries += each.num_examples * each.num_outputs * (2 * read + 1)
    core = min(max(2 * (num_edges - num_rows) // 3, 0), num_rows)
    return num_entries, core * widest


def dense_seconds(reads: Sequence[Reads]) -> float:
    """Return KLU's seconds for a factorisation in which no parameter is eliminated
    cheaply; 0 if some are, since graphs such as grids then take far less than the bound
    of `_size`."""
    _, core = _size(reads)
    if core < sum(k * d for k, _, d in reads[0].arrays):
        return 0.0
    operations = reads[0].factor_operations if len(reads) == 1 else math.inf
    return _OPERATION * min(float(core) ** 3 / 3, operations)


class _Entries(eqx.Module):
    """Nonzero entries of the Jacobian in COO format, without duplicates. The entries of a
    row that an example reads a second time are zero, in columns beyond the last."""

    values: Float[Array, " k"]
    row: Int[Array, " k"]
    column: Int[Array, " k"]
    shape: tuple[int, int] = eqx.field(static=True)

    @staticmethod
    def of(jacobian: AbstractJacobian) -> "_Entries":
        m, p = jacobian.shape
        first, beyond, found = 0, p, []
        for block, leaf in zip(jacobian.blocks(), jacobian.domain.leaves, strict=True):
            first_row = 0
            parts = parts_of(block)
            for part in parts:
                found.append(_of_block(part, first_row, first, beyond))
                first_row += part.num_rows
            first += leaf.size
            beyond += max(math.prod(part.values.shape[2:]) for part in parts)
        values, row, column = map(jnp.concatenate, zip(*found, strict=True))
        return _Entries(values.astype(jnp.float64), row, column, (m, beyond))

    def largest_column(self) -> Scalar:
        """Return the largest squared norm of a column."""
        zeros = jnp.zeros(self.shape[1], self.values.dtype)
        return jnp.max(zeros.at[self.column].add(self.values**2))

    def solved(
        self, damping: ScalarLike, above: Float[Array, " m"], below: Float[Array, " p"]
    ) -> Float[Array, " p"]:
        """Return the step; NaN if an input is not finite. KLU is never given NaN, nor a
        singular matrix, for which it raises: the damping is at least the rounding of the
        largest column. The matrix does not depend on the right-hand side, so that
        `jax.vmap` over right-hand sides factorises it once."""
        m, n = self.shape
        dtype = self.values.dtype
        rounding = jnp.finfo(dtype).eps * self.largest_column()
        rounding = jnp.where(rounding > 0, rounding, 1)
        damping = jnp.maximum(jnp.asarray(damping, dtype), rounding)
        zeros = jnp.zeros(n - below.size, dtype)
        right = jnp.concatenate([above.astype(dtype), below.astype(dtype), zeros])
        sound = _tree.all_finite((self.values, damping))
        values = jnp.where(sound, self.values, 0)
        lower = jnp.full(n, jnp.where(sound, -damping, 1))
        places = jnp.arange(m + n, dtype=self.row.dtype)
        row = jnp.concatenate([self.row, m + self.column, places])
        column = jnp.concatenate([m + self.column, self.row, places])
        matrix = jnp.concatenate([values, values, jnp.ones(m, dtype), lower])
        finite = sound & _tree.all_finite(right)
        found = _factorisation()(row, column, matrix, jnp.where(finite, right, 0))
        return jnp.where(finite, found[m : m + below.size], jnp.nan)


def parts_of(block: AbstractBlock) -> list:
    """Return a block's parts, one for each group of examples."""
    return list(block.parts) if isinstance(block, StackedBlock) else [block]


def _of_block(
    block: Any, first_row: int, first_column: int, beyond: int
) -> tuple[Array, Array, Array]:
    """Return the values, rows and columns of a block's entries."""
    values, again = block.distinct()
    n, c, s, d = values.shape
    row = first_row + jnp.arange(n * c).reshape(n, c, 1, 1)
    places = jnp.arange(s * d).reshape(s, d)
    column = block.index.astype(int)[:, :, None] * d + places[None, :1]
    column = jnp.where(again[:, :, None], beyond + places[None], first_column + column)
    every = [values, row, column[:, None]]
    values, row, column = (jnp.broadcast_to(x, values.shape).ravel() for x in every)
    return values, row, column


@functools.cache
def _factorisation() -> Callable[..., Array]:
    """Import KLU. The import sets JAX to double precision and to the CPU for the whole
    process; restore both settings."""
    before = {name: jax.config.values[name] for name in _TURNED}
    import klujax

    for name, value in before.items():
        jax.config.update(name, value)
    return klujax.solve


_TURNED = "jax_enable_x64", "jax_platform_name"
