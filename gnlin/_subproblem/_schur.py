"""Schur complements: parameters that are coupled only through others are eliminated block
by block, and a Cholesky factorisation solves for the others."""

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Scalar

from .._common import _tree
from .._common._cost import rates
from .._common._passes import Passes
from .._common._sharding import is_sharded
from .._common._tree import einsum, ravel_pytree, Structure, summed
from .._jacobian import AbstractJacobian, Cost, Gathered, Reads
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ..filters import Tikhonov
from ..preconditioners import inverse_factors
from ._base import AbstractMethod, Answer, price_of_squaring
from ._cholesky import Factorised
from ._sparse import parts_of


# Number of pairs of examples whose products are in memory at once.
_PAIRS = 2**12
# Up to this many columns, products of small matrices are summed column by column.
_FEW_COLUMNS = 8
# Time of an operation in products of small matrices, over its time in a pass.
_SMALL = 20.0


class Elimination(NamedTuple):
    """The elimination of one array of parameters, and its cost.

    - `array`: the index of the array among the leaves of the parameters.
    - `num_kept`: the number of parameters that are not eliminated.
    - `operations`: the operations of the products, for each damping.
    - `num_numbers`: the most numbers in memory at a time.
    """

    array: int
    num_kept: int
    operations: float
    num_numbers: float


def elimination(reads: Sequence[Reads]) -> Elimination | None:
    """Return the cheapest elimination of an array of which each example reads at most one
    row, so that its rows are coupled only through other arrays; `None` if there is no
    such array, or if groups store entries of an array in rows of different lengths."""
    rows = {tuple((k, d) for k, _, d in each.arrays) for each in reads}
    if len(rows) != 1:
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
    # This assumes that all blocks are read by equally many examples.
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


class SchurComplement(AbstractMethod):
    r"""The damped step by a Schur complement. With the eliminated parameters last, and a
    block-diagonal $V$ with one block for each row of their array,

    $$\phi^\top\phi = \begin{pmatrix} U & W \\ W^\top & V \end{pmatrix}, \qquad
    (U_\lambda - W V_\lambda^{-1} W^\top)\,\delta_1 = -g_1 + W V_\lambda^{-1} g_2, \qquad
    V_\lambda\,\delta_2 = -g_2 - W^\top\delta_1.$$

    ??? cite "Reference"

        B. Triggs, P. F. McLauchlan, R. I. Hartley and A. W. Fitzgibbon, *Bundle
        adjustment: a modern synthesis* (2000), section 6.1.
    """

    method: ClassVar[str] = "schur"
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
        if not super().fits(problem, filter) or is_sharded():
            return False
        return elimination(problem.jacobian.reads()) is not None

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        found = elimination(cost.reads)
        if found is None or not cost.holds(found.num_numbers):
            return math.inf
        once = _SMALL * found.operations * rates().passed
        once += rates().cholesky(found.num_kept)
        # No way resolves small singular values of a large sparse Jacobian, and so their
        # accuracy counts only if an SVD is cheap.
        price = price_of_squaring(cost, Tikhonov(1.0))
        return cost.all_rows + num_trials * once + price

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "SchurComplement":
        found = elimination(cost.reads)
        assert found is not None  # as `fits` has checked
        curvature = _Partitioned.of(problem.jacobian, found.array)
        return cls(problem, found.array, curvature, cost.rows)

    def largest_curvature(self) -> Scalar:
        of_kept = jnp.diagonal(self.curvature.kept)
        of_eliminated = jnp.diagonal(self.curvature.eliminated, axis1=1, axis2=2)
        return jnp.maximum(jnp.max(of_kept), jnp.max(of_eliminated))

    def solve(self, filter: Filter) -> Answer:
        damping, curvature = self.damping_of(filter), self.curvature
        domain = self.problem.jacobian.domain
        leaves = [x.astype(domain.dtype) for x in jax.tree.leaves(self._gradient)]
        shape = curvature.eliminated.shape[:2]
        g_2 = leaves.pop(self.array).reshape(shape)
        g_1 = jnp.concatenate([x.ravel() for x in leaves])

        inverse = inverse_factors(curvature.eliminated, damping)  # V = L L^T
        transposed = inverse[curvature.read].swapaxes(1, 2)
        halved = [_times(block, transposed) for block in curvature.coupling]
        half = einsum("kij,kj->ki", inverse, g_2)
        of_examples = half[curvature.read].ravel()
        right = jnp.concatenate([x.pull_back(of_examples).ravel() for x in halved]) - g_1
        complement = curvature.kept - curvature.summed_products(halved)
        complement, right = _tree.promoted((complement, right))
        delta_1, result = Factorised.of(complement, damping).solve(right)
        found = Structure.of(leaves).unravel(delta_1)
        of_examples = summed(map(Gathered.push_forward, halved, found))
        of_examples = of_examples.reshape(-1, shape[1])
        half = half.at[curvature.read].add(of_examples)
        delta_2 = -einsum("kji,kj->ki", inverse, half)
        found.insert(self.array, delta_2)
        return Answer(domain.unravel(ravel_pytree(found)[0]), result=result)


_Coupling = Sequence[Gathered]
"""A q x r matrix for each of n examples, of the q kept parameters: its r columns as the
rows of one block for each kept array."""

_Blocks = list[list[Float[Array, "_ _ _ _"]]]
"""A q x q matrix in blocks, one for each two arrays, by their rows, then columns."""


def _times(block: Gathered, matrices: Float[Array, "n r t"]) -> Gathered:
    """Multiply each example's matrix by another one from the right."""
    return _with_values(block, einsum("nrsd,nrt->ntsd", block.values, matrices))


def _with_values(block: Gathered, values: Float[Array, "n r s d"]) -> Gathered:
    return Gathered(values, block.index, block.shape)


def _at(examples: Int[Array, " w"], coupling: _Coupling) -> _Coupling:
    return jax.tree.map(lambda x: x[examples], coupling)


def _padded(block: Gathered, num_read: int) -> Gathered:
    """Add rows of zeros up to a number of rows that each example reads."""
    more = (0, num_read - block.index.shape[1])
    values = jnp.pad(block.values, [(0, 0), (0, 0), more, (0, 0)])
    return Gathered(values, jnp.pad(block.index, [(0, 0), more]), block.shape)


def _no_blocks(like: _Coupling, dtype: jnp.dtype) -> _Blocks:
    def zeros(one, other):
        (k, _, d), (j, _, e) = one.reads, other.reads
        return jnp.zeros((k, j, d, e), dtype)

    return [[zeros(one, other) for other in like] for one in like]


def _with_products(total: _Blocks, these: _Coupling, those: _Coupling) -> _Blocks:
    """Add the products of each example's two matrices, the second transposed."""

    def added(block, one, other):
        products = _outer(one.values, other.values)
        return block.at[one.index[:, :, None], other.index[:, None, :]].add(products)

    return [
        [added(block, one, other) for block, other in zip(line, those, strict=True)]
        for line, one in zip(total, these, strict=True)
    ]


def _outer(
    these: Float[Array, "n r a d"], those: Float[Array, "n r b e"]
) -> Float[Array, "n a b d e"]:
    """Multiply many matrices by transposes of others. With few columns the products are
    sums over columns: on a CPU, inside a loop, XLA's own take several times as long."""
    num_columns = these.shape[1]
    if num_columns > _FEW_COLUMNS:
        return einsum("nrad,nrbe->nabde", these, those)
    these, those = these[:, :, :, None, :, None], those[:, :, None, :, None, :]
    first, *others = (these[:, k] * those[:, k] for k in range(num_columns))
    return sum(others, first)


def _dense(blocks: _Blocks) -> Float[Array, "q q"]:
    def flat(block):
        k, j, d, e = block.shape
        return block.transpose(0, 2, 1, 3).reshape(k * d, j * e)

    return jnp.block([[flat(block) for block in line] for line in blocks])


class _Partitioned(eqx.Module):
    """The curvature, partitioned into kept and eliminated parameters.

    - `kept`: $U$.
    - `eliminated`: the blocks of $V$.
    - `coupling`: $W$, by examples. Examples that read the same eliminated row are
        adjacent; the rows that most examples read come first.
    - `read`: the eliminated row that each example reads.
    - `num_alike`: the number of examples that read this row.
    """

    kept: Float[Array, "q q"]
    eliminated: Float[Array, "k d d"]
    coupling: _Coupling
    read: Int[Array, " n"]
    num_alike: Int[Array, " n"]

    @staticmethod
    def of(jacobian: AbstractJacobian, array: int) -> "_Partitioned":
        dtype, reads = jacobian.domain.dtype, jacobian.reads()
        num_blocks, _, size = reads[0].arrays[array]
        others = [k for k in range(len(reads[0].arrays)) if k != array]
        most = [max(each.arrays[k][1] for each in reads) for k in others]

        eliminated = jnp.zeros((num_blocks, size, size), dtype)
        groups = list(zip(*map(parts_of, jacobian.blocks()), strict=True))
        kept = _no_blocks([groups[0][k] for k in others], dtype)
        couplings, read = [], []
        for group in groups:
            rows = [_with_values(x, x.values.astype(dtype)) for x in group]
            own = rows.pop(array)
            kept = _with_products(kept, rows, rows)
            if own.index.shape[1] == 1:
                row, values = own.index[:, 0], own.values[:, :, 0]
                squares = einsum("nci,ncj->nij", values, values)
                eliminated = eliminated.at[row].add(squares)
                pairs = zip(rows, most, strict=True)
                couplings.append([_padded(_times(x, values), num) for x, num in pairs])
                read.append(row.astype(int))
        coupling = jax.tree.map(lambda *x: jnp.concatenate(x), *couplings)
        read = jnp.concatenate(read)
        num_alike = jnp.zeros(num_blocks, read.dtype).at[read].add(1)
        rank = jnp.argsort(jnp.argsort(-num_alike))
        order = jnp.argsort(rank[read])
        coupling, read = _at(order, coupling), read[order]
        return _Partitioned(_dense(kept), eliminated, coupling, read, num_alike[read])

    def summed_products(self, rows: _Coupling) -> Float[Array, "q q"]:
        r"""Return $YY^\top$ for $Y$ in the order of `coupling`: a sum over pairs of
        examples that read the same row, first of those 0 places apart, then 1, 2, ..."""
        n = self.read.size
        window = min(n, _PAIRS)

        def with_window(carry):
            distance, start, total = carry
            first = start + jnp.arange(window, dtype=start.dtype)
            second = first + distance
            within = second < n
            first, second = (jnp.minimum(k, n - 1) for k in (first, second))
            alike = within & (self.read[first] == self.read[second])
            # The transpose is added below; an example's product with itself counts half.
            weight = jnp.where(alike, jnp.where(distance == 0, 0.5, 1), 0)
            weight = weight.astype(self.kept.dtype)[:, None, None, None]
            these = [_with_values(x, weight * x.values) for x in _at(first, rows)]
            total = _with_products(total, these, _at(second, rows))
            num_left = jnp.count_nonzero(self.num_alike > distance)
            start = start + window
            done = start >= num_left.astype(start.dtype)
            distance = jnp.where(done, distance + 1, distance)
            return distance, jnp.where(done, 0, start), total

        def is_left(carry):
            return carry[0] < self.num_alike[0]

        zero = jnp.zeros((), self.read.dtype)
        nothing = zero, zero, _no_blocks(rows, self.kept.dtype)
        half = _dense(jax.lax.while_loop(is_left, with_window, nothing)[2])
        return half + half.T
