"""By the Schur complement: parameters that are coupled through others only are
eliminated, block by block, and a Cholesky factorisation is made of what is left."""

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, Scalar

from .._common._cost import rates
from .._common._passes import Passes
from .._common._sharding import is_spread
from .._jacobian import AbstractBlock, AbstractJacobian, Cost, Reads, StackedBlock
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ..filters import Tikhonov
from ..preconditioners import inverse_factors
from ._base import AbstractWithGradient, Answer, price_of_squaring
from ._cholesky import damping_of, solve_damped


# Pairs of examples that have their products in memory at once.
_PAIRS = 2**12
# Up to so many columns matrices are multiplied by them.
_FEW_COLUMNS = 8
# Products of many small matrices take so many times as long as a pass, by operation.
_SMALL = 20.0


class Elimination(NamedTuple):
    """Which array is eliminated, and what that takes.

    - `array`: its place among the leaves of the parameters.
    - `num_kept`: the parameters that are not.
    - `operations`: of the products, for each damping.
    - `num_numbers`: that are held at a time.
    """

    array: int
    num_kept: int
    operations: float
    num_numbers: float


def elimination(reads: Sequence[Reads]) -> Elimination | None:
    """Of an array of which each example reads one row at most: its rows are then coupled
    through other arrays only. Of several, the one that leaves the fewest operations."""
    if not reads:
        return None
    sizes = [k * d for k, _, d in reads[0].arrays]
    able = [
        _eliminating(array, reads, sum(sizes) - size)
        for array, size in enumerate(sizes)
        if 0 < size < sum(sizes) and max(each.arrays[array][1] for each in reads) == 1
    ]
    return min(able, key=lambda e: e.operations + e.num_kept**3, default=None)


def _eliminating(array: int, reads: Sequence[Reads], num_kept: int) -> Elimination:
    num_blocks, _, size = reads[0].arrays[array]

    def width(each: Reads) -> int:
        return sum(s * d for k, (_, s, d) in enumerate(each.arrays) if k != array)

    coupled = [each for each in reads if each.arrays[array][1] == 1]
    num = sum(each.num_examples for each in coupled)
    widest = max(map(width, coupled))
    # As if all blocks were read by equally many
    pairs = num * (1 + num / num_blocks) / 2
    return Elimination(
        array,
        num_kept,
        operations=2.0 * (pairs * widest**2 * size + num_blocks * size**3),
        num_numbers=(
            4.0 * num_kept**2
            + 4 * num * widest * size
            + max(each.num_examples * width(each) ** 2 for each in reads)
            + _PAIRS * widest**2
            + 3 * num_blocks * size**2
        ),
    )


class SchurComplement(AbstractWithGradient):
    r"""With the eliminated parameters last, and $V$ of blocks on the diagonal, one for
    each row of their array,

    $$\phi^\top\phi = \begin{pmatrix} U & W \\ W^\top & V \end{pmatrix}, \qquad
    (U_\lambda - W V_\lambda^{-1} W^\top)\,\delta_1 = -g_1 + W V_\lambda^{-1} g_2, \qquad
    V_\lambda\,\delta_2 = -g_2 - W^\top\delta_1.$$

    ??? cite "Reference"

        B. Triggs, P. F. McLauchlan, R. I. Hartley and A. W. Fitzgibbon, *Bundle
        adjustment: a modern synthesis* (2000), section 6.1.
    """

    method: ClassVar[str] = "schur"
    solves_anew: ClassVar[bool] = True
    problem: Quadratic
    array: int = eqx.field(static=True)
    curvature: "_Partitioned"

    def __init__(
        self, problem: Quadratic, array: int, curvature: "_Partitioned", passes: Passes
    ):
        super().__init__(problem, passes)
        self.array = array
        self.curvature = curvature

    @classmethod
    def fits(cls, problem, filter: Filter) -> bool:
        quadratic = isinstance(problem, Quadratic) and isinstance(filter, Tikhonov)
        if not quadratic or is_spread():
            return False
        return elimination(problem.jacobian.reads()) is not None

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        found = elimination(cost.reads)
        if found is None or found.num_numbers * cost.itemsize > cost.memory_budget:
            return math.inf
        once = _SMALL * found.operations * rates().passed
        once += rates().cholesky(found.num_kept)
        # Small singular values are worth the same as elsewhere only where they are cheap:
        # no way resolves them of what is sparse and large.
        price = price_of_squaring(cost, Tikhonov(1.0))
        return cost.all_rows + num_trials * once + price

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "SchurComplement":
        found = elimination(cost.reads)
        assert found is not None  # it fits
        curvature = _Partitioned.of(problem.jacobian, found.array)
        return cls(problem, found.array, curvature, cost.rows)

    def largest_curvature(self) -> Scalar:
        return self.curvature.largest()

    def with_residual(self, residual: PyTree[Array]) -> "SchurComplement":
        problem = self.problem.with_residual(residual)
        return SchurComplement(problem, self.array, self.curvature, Passes())

    def solve(self, filter: Filter) -> Answer:
        damping, curvature = damping_of(filter), self.curvature
        domain = self.problem.jacobian.domain
        leaves = [x.astype(domain.dtype) for x in jax.tree.leaves(self._gradient)]
        g_2 = leaves.pop(self.array).reshape(curvature.eliminated.shape[:2])
        g_1 = jnp.concatenate([x.ravel() for x in leaves])

        inverse = inverse_factors(curvature.eliminated, damping)  # V = L L^T
        halved = curvature.coupling.times(inverse[curvature.read].swapaxes(1, 2))
        half = _einsum("kij,kj->ki", inverse, g_2)
        of_1 = halved.onto(curvature.shapes, half[curvature.read]) - g_1
        complement = curvature.kept - curvature.summed_products(halved)
        delta_1, result = solve_damped(complement, of_1, damping)
        pulled = halved.by(curvature.shapes, delta_1)
        pulled = jnp.zeros_like(half).at[curvature.read].add(pulled)
        delta_2 = -_einsum("kji,kj->ki", inverse, half + pulled)

        shapes = [x.size for k, x in enumerate(domain.leaves) if k != self.array]
        ends = [sum(shapes[: k + 1]) for k in range(len(shapes) - 1)]
        found = jnp.split(delta_1, ends)
        found.insert(self.array, delta_2.ravel())
        return Answer(domain.unravel(jnp.concatenate(found)), result=result)


class _Rows(eqx.Module):
    """Of many examples each a few rows of a matrix with the kept parameters' rows: by
    arrays, n x s x d numbers in each of its own r columns, and which s rows these are."""

    values: list[Float[Array, "n _ _ r"]]
    index: list[Int[Array, "n _"]]

    def at(self, examples: Int[Array, " w"]) -> "_Rows":
        return jax.tree.map(lambda x: x[examples], self)

    def weighted(self, weights: Float[Array, " n"]) -> "_Rows":
        """By example."""
        values = [weights[:, None, None, None] * x for x in self.values]
        return _Rows(values, self.index)

    def reading(self, nums: Sequence[int]) -> "_Rows":
        """The same with more rows of each array, which are zero."""
        pads = [n - x.shape[1] for n, x in zip(nums, self.index, strict=True)]

        def padded(x, num):
            return jnp.pad(x, [(0, 0), (0, num)] + [(0, 0)] * (x.ndim - 2))

        values, index = (
            list(map(padded, each, pads)) for each in (self.values, self.index)
        )
        return _Rows(values, index)

    def times(self, matrices: Float[Array, "n r t"]) -> "_Rows":
        values = [_einsum("nsdr,nrt->nsdt", x, matrices) for x in self.values]
        return _Rows(values, self.index)

    def onto(self, shapes: "_Shapes", x: Float[Array, "n r"]) -> Float[Array, " q"]:
        """The sum of all examples' products with vectors."""
        parts = [
            jnp.zeros(shape, x.dtype).at[rows].add(_einsum("nsdr,nr->nsd", values, x))
            for shape, values, rows in zip(shapes, self.values, self.index, strict=True)
        ]
        return jnp.concatenate([part.ravel() for part in parts])

    def by(self, shapes: "_Shapes", x: Float[Array, " q"]) -> Float[Array, "n r"]:
        """The products of all examples' transposes with a vector."""
        products, start = [], 0
        for shape, values, rows in zip(shapes, self.values, self.index, strict=True):
            part = x[start : start + math.prod(shape)].reshape(shape)
            products.append(_einsum("nsdr,nsd->nr", values, part[rows]))
            start += math.prod(shape)
        return sum(products[1:], products[0])


_Shapes = tuple[tuple[int, int], ...]
"""Of the kept arrays: how many rows, and the entries of one."""

_Blocks = list[list[Float[Array, "_ _ _ _"]]]
"""A matrix between the kept parameters: by two arrays, and by their rows."""


def _no_blocks(shapes: _Shapes, dtype: jnp.dtype) -> _Blocks:
    def zeros(one, other):
        return jnp.zeros((one[0], other[0], one[1], other[1]), dtype)

    return [[zeros(one, other) for other in shapes] for one in shapes]


def _with_products(total: _Blocks, these: _Rows, those: _Rows) -> _Blocks:
    """And the products of each example's rows with its others."""

    def added(block, i, j):
        products = _outer(these.values[i], those.values[j])
        rows, columns = these.index[i][:, :, None], those.index[j][:, None, :]
        return block.at[rows, columns].add(products)

    return [
        [added(block, i, j) for j, block in enumerate(line)]
        for i, line in enumerate(total)
    ]


def _outer(
    these: Float[Array, "n a d r"], those: Float[Array, "n b e r"]
) -> Float[Array, "n a b d e"]:
    """Matrices times transposes: of few columns by columns, as products of many small
    matrices take XLA several times as long inside a loop, on a CPU."""
    if these.shape[-1] > _FEW_COLUMNS:
        return _einsum("nadr,nber->nabde", these, those)
    these, those = these[:, :, None, :, None], those[:, None, :, None, :]
    first, *others = (these[..., k] * those[..., k] for k in range(these.shape[-1]))
    return sum(others, first)


def _dense(blocks: _Blocks) -> Float[Array, "q q"]:
    def flat(block):
        k, j, d, e = block.shape
        return block.transpose(0, 2, 1, 3).reshape(k * d, j * e)

    return jnp.block([[flat(block) for block in line] for line in blocks])


class _Partitioned(eqx.Module):
    """The curvature, by what is kept and what is eliminated.

    - `kept`: $U$.
    - `eliminated`: the blocks of $V$.
    - `coupling`: $W$, by examples: first those that share what they read with most
        others, and those that read the same beside each other.
    - `read`: which eliminated row that is.
    - `num_alike`: how many examples read it.
    - `shapes`: of the kept arrays.
    """

    kept: Float[Array, "q q"]
    eliminated: Float[Array, "k d d"]
    coupling: _Rows
    read: Int[Array, " n"]
    num_alike: Int[Array, " n"]
    shapes: _Shapes = eqx.field(static=True)

    @staticmethod
    def of(jacobian: AbstractJacobian, array: int) -> "_Partitioned":
        dtype, reads = jacobian.domain.dtype, jacobian.reads()
        num_blocks, _, size = reads[0].arrays[array]
        others = [k for k, x in enumerate(jacobian.domain.leaves) if x.size > 0]
        others.remove(array)
        shapes = tuple((k, d) for k, _, d in (reads[0].arrays[i] for i in others))
        most = [max(each.arrays[k][1] for each in reads) for k in others]
        blocks = [_parts(block) for block in jacobian.blocks()]

        kept = _no_blocks(shapes, dtype)
        eliminated = jnp.zeros((num_blocks, size, size), dtype)
        couplings, read = [], []
        for group in range(len(reads)):
            of_group = [blocks[k][group] for k in others]
            values = [x.values.astype(dtype).transpose(0, 2, 3, 1) for x in of_group]
            rows = _Rows(values, [x.index for x in of_group])
            kept = _with_products(kept, rows, rows)
            own = blocks[array][group]
            if own.index.shape[1] == 1:
                row, values = own.index[:, 0], own.values[:, :, 0].astype(dtype)
                squares = _einsum("nci,ncj->nij", values, values)
                eliminated = eliminated.at[row].add(squares)
                couplings.append(rows.times(values).reading(most))
                read.append(row.astype(int))
        coupling = jax.tree.map(lambda *x: jnp.concatenate(x), *couplings)
        read = jnp.concatenate(read)
        num_alike = jnp.zeros(num_blocks, read.dtype).at[read].add(1)
        rank = jnp.argsort(jnp.argsort(-num_alike))
        order = jnp.argsort(rank[read])
        read = read[order]
        return _Partitioned(
            _dense(kept), eliminated, coupling.at(order), read, num_alike[read], shapes
        )

    def largest(self) -> Scalar:
        """The largest entry of the diagonal."""
        of_kept = jnp.max(jnp.diagonal(self.kept))
        return jnp.maximum(
            of_kept, jnp.max(jnp.diagonal(self.eliminated, axis1=1, axis2=2))
        )

    def summed_products(self, rows: _Rows) -> Float[Array, "q q"]:
        r"""$YY^\top$, of rows by the same examples as `coupling`: a sum over pairs of
        examples that read the same row, which are 0, 1, 2 and so on places from each
        other."""
        n = self.read.size
        window = min(n, _PAIRS)

        def with_window(carry):
            distance, start, total = carry
            first = start + jnp.arange(window, dtype=start.dtype)
            second = first + distance
            within = second < n
            first, second = (jnp.minimum(k, n - 1) for k in (first, second))
            alike = within & (self.read[first] == self.read[second])
            # Both halves of the sum have a pair, and half of an example by itself.
            weight = jnp.where(alike, jnp.where(distance == 0, 0.5, 1), 0)
            these = rows.at(first).weighted(weight.astype(self.kept.dtype))
            total = _with_products(total, these, rows.at(second))
            # Only those that share what they read with so many others have one there.
            num_left = jnp.count_nonzero(self.num_alike > distance)
            start = start + window
            done = start >= num_left.astype(start.dtype)
            distance = jnp.where(done, distance + 1, distance)
            return distance, jnp.where(done, 0, start), total

        def is_left(carry):
            return carry[0] < self.num_alike[0]

        zero = jnp.zeros((), self.read.dtype)
        nothing = zero, zero, _no_blocks(self.shapes, self.kept.dtype)
        half = _dense(jax.lax.while_loop(is_left, with_window, nothing)[2])
        return half + half.T


def _parts(block: AbstractBlock) -> list:
    """By groups."""
    return list(block.parts) if isinstance(block, StackedBlock) else [block]


def _einsum(subscripts: str, *operands: Array) -> Array:
    return jnp.einsum(subscripts, *operands, precision=jax.lax.Precision.HIGHEST)
