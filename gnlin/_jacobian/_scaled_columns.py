"""The Jacobian with respect to scaled parameters."""

import jax
from jaxtyping import Array, PyTree

from ._base import AbstractJacobian
from ._block import AbstractBlock
from ._change_of_variables import ChangeOfVariables


class ScaledColumns(ChangeOfVariables):
    r"""$\phi D^{-1}$, where `scale` is the diagonal of $D$, as a pytree of parameters."""

    scale: PyTree[Array]

    def __init__(self, inner: AbstractJacobian, scale: PyTree[Array]):
        super().__init__(inner)
        self.scale = scale

    def of(self, inner: AbstractJacobian) -> "ScaledColumns":
        return ScaledColumns(inner, self.scale)

    def mapped(self, vector: PyTree[Array]) -> PyTree[Array]:
        return jax.tree.map(lambda x, d: (x / d).astype(x.dtype), vector, self.scale)

    def mapped_back(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self.mapped(vector)

    def block(self, inner: AbstractBlock, k: int) -> AbstractBlock:
        return inner.scaled(jax.tree.leaves(self.scale)[k])
