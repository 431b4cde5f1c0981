"""The Jacobian with respect to steps along a retraction."""

import jax
from jaxtyping import Array, Float, PyTree

from .._common._tree import einsum
from ._base import AbstractJacobian
from ._block import AbstractBlock
from ._change_of_variables import ChangeOfVariables
from ._gathered import Gathered
from ._rows import Rows
from ._stacked_block import StackedBlock


class Retracted(ChangeOfVariables):
    r"""$\phi T$, where $T$ has a $d \times d$ block for each row of some arrays."""

    matrices: list[Float[Array, "k d d"] | None]

    def __init__(
        self, inner: AbstractJacobian, matrices: list[Float[Array, "k d d"] | None]
    ):
        super().__init__(inner)
        self.matrices = matrices

    def of(self, inner: AbstractJacobian) -> "Retracted":
        return Retracted(inner, self.matrices)

    def mapped(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self._by(vector, "kij,kj->ki")

    def mapped_back(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self._by(vector, "kji,kj->ki")

    def _by(self, vector: PyTree[Array], subscripts: str) -> PyTree[Array]:
        def each(matrix, x):
            if matrix is None:
                return x
            rows = x.reshape(matrix.shape[:2])
            return einsum(subscripts, matrix, rows).reshape(x.shape).astype(x.dtype)

        leaves, structure = jax.tree.flatten(vector)
        return structure.unflatten(list(map(each, self.matrices, leaves)))

    def block(self, inner: AbstractBlock, k: int) -> AbstractBlock:
        return _retracted_block(inner, self.matrices[k])


def _retracted_block(
    block: AbstractBlock, matrix: Float[Array, "k d d"] | None
) -> AbstractBlock:
    if matrix is None:
        return block
    if isinstance(block, StackedBlock):
        return StackedBlock([_retracted_block(part, matrix) for part in block.parts])
    if isinstance(block, Gathered) and block.values.shape[-1] == matrix.shape[-1]:
        values = einsum("ncsd,nsde->ncse", block.values, matrix[block.index])
        return Gathered(values.astype(block.values.dtype), block.index, block.shape)
    rows = block.rows()
    turned = einsum("mkd,kde->mke", rows.reshape(-1, *matrix.shape[:2]), matrix)
    return Rows(turned.reshape(rows.shape).astype(rows.dtype))
