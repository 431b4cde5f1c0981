"""A Jacobian by the steps of a retraction."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._passes import Passes
from .._tree import promoted, Structure
from ._at_hand import AtHand
from ._base import AbstractJacobian, Cost, Reads
from ._block import AbstractBlock
from ._gathered import Gathered
from ._rows import Rows
from ._stack import Stack


class Turned(AbstractJacobian):
    r"""$\phi T$, with a $T$ of a block for each row of some arrays of parameters."""

    inner: AbstractJacobian
    matrices: list[Float[Array, "k d d"] | None]

    def __init__(
        self, inner: AbstractJacobian, matrices: list[Float[Array, "k d d"] | None]
    ):
        self.inner = inner
        self.matrices = matrices
        self.domain = inner.domain
        self.codomain = inner.codomain
        self.memory_budget = inner.memory_budget

    def _by(self, vector: PyTree[Array], subscripts: str) -> PyTree[Array]:
        def each(matrix, x):
            if matrix is None:
                return x
            rows = x.reshape(matrix.shape[:2])
            return _einsum(subscripts, matrix, rows).reshape(x.shape).astype(x.dtype)

        leaves, structure = jax.tree.flatten(vector)
        return structure.unflatten(list(map(each, self.matrices, leaves)))

    def mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self.inner.mv(self._by(vector, "kij,kj->ki"))

    def rmv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self._by(self.inner.rmv(vector), "kji,kj->ki")

    def reads(self) -> tuple[Reads, ...]:
        return self.inner.reads()

    def a_product(self) -> Passes:
        return self.inner.a_product()

    def blocks(self, wanted: Sequence[int] | None = None) -> Sequence[AbstractBlock]:
        chosen = range(len(self.matrices)) if wanted is None else wanted
        matrices = [self.matrices[k] for k in chosen]
        return list(map(_turned, self.inner.blocks(wanted), matrices))

    def gram_with(self, other: AbstractJacobian) -> Float[Array, "m k"]:
        here = AtHand.of(self, self.blocks())
        return here.gram_with(here if other is self else other)

    def at_hand(self) -> "Turned":
        return Turned(self.inner.at_hand(), self.matrices)

    def transformed(self, matrices: PyTree[Array], codomain: Structure) -> "Turned":
        return Turned(self.inner.transformed(matrices, codomain), self.matrices)

    def block_bytes(self) -> list[int]:
        if self.is_sparse:
            return self.inner.block_bytes()
        m, _ = self.shape
        return [m * x.size * x.dtype.itemsize for x in self.domain.leaves]

    def within(self, memory_budget: int) -> "Turned":
        return Turned(self.inner.within(memory_budget), self.matrices)

    def cost(self) -> Cost:
        cost = self.inner.cost()
        if self.is_sparse:
            return cost
        m, p = cost.shape
        return cost._replace(
            gram=cost.rows,
            gram_operations=2.0 * float(m) ** 2 * p,
            num_bytes=m * self.domain.nbytes,
            memory_budget=self.memory_budget,
            in_parts=False,
        )


def _turned(block: AbstractBlock, matrix: Float[Array, "k d d"] | None) -> AbstractBlock:
    if matrix is None:
        return block
    if isinstance(block, Stack):
        return Stack([_turned(part, matrix) for part in block.parts])
    if isinstance(block, Gathered) and block.values.shape[-1] == matrix.shape[-1]:
        values = _einsum("ncsd,nsde->ncse", block.values, matrix[block.index])
        return Gathered(values.astype(block.values.dtype), block.index, block.shape)
    rows = block.rows()
    turned = _einsum("mkd,kde->mke", rows.reshape(-1, *matrix.shape[:2]), matrix)
    return Rows(turned.reshape(rows.shape).astype(rows.dtype))


def _einsum(subscripts: str, *operands: Array) -> Array:
    precise = jax.lax.Precision.HIGHEST
    return jnp.einsum(subscripts, *promoted(operands), precision=precise)
