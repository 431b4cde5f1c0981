"""A Jacobian by other variables."""

from collections.abc import Sequence

import jax
from jaxtyping import Array, Float, PyTree

from .._passes import Passes
from .._tree import Structure
from ._at_hand import AtHand
from ._base import AbstractJacobian, Cost, Reads
from ._block import AbstractBlock


class Scaled(AbstractJacobian):
    r"""$\phi D^{-1}$, with a diagonal $D$ of the parameters' structure."""

    inner: AbstractJacobian
    scale: PyTree[Array]

    def __init__(self, inner: AbstractJacobian, scale: PyTree[Array]):
        self.inner = inner
        self.scale = scale
        self.domain = inner.domain
        self.codomain = inner.codomain
        self.memory_budget = inner.memory_budget

    def _unscaled(self, vector: PyTree[Array]) -> PyTree[Array]:
        return jax.tree.map(lambda x, d: (x / d).astype(x.dtype), vector, self.scale)

    def mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self.inner.mv(self._unscaled(vector))

    def rmv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self._unscaled(self.inner.rmv(vector))

    def curvature_mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self._unscaled(self.inner.curvature_mv(self._unscaled(vector)))

    def reads(self) -> tuple[Reads, ...]:
        return self.inner.reads()

    def a_product(self) -> Passes:
        return self.inner.a_product()

    def blocks(self, wanted: Sequence[int] | None = None) -> Sequence[AbstractBlock]:
        scales = jax.tree.leaves(self.scale)
        chosen = range(len(scales)) if wanted is None else wanted
        pairs = zip(self.inner.blocks(wanted), (scales[k] for k in chosen), strict=True)
        return [block.scaled(d) for block, d in pairs]

    def gram_with(self, other: AbstractJacobian) -> Float[Array, "m k"]:
        here = AtHand.of(self, self.blocks())
        return here.gram_with(here if other is self else other)

    def at_hand(self) -> "Scaled":
        return Scaled(self.inner.at_hand(), self.scale)

    def transformed(self, matrices: PyTree[Array], codomain: Structure) -> "Scaled":
        return Scaled(self.inner.transformed(matrices, codomain), self.scale)

    def block_bytes(self) -> list[int]:
        if self.is_sparse:
            return self.inner.block_bytes()
        m, _ = self.shape
        return [m * x.size * x.dtype.itemsize for x in self.domain.leaves]

    def within(self, memory_budget: int) -> "Scaled":
        return Scaled(self.inner.within(memory_budget), self.scale)

    def cost(self) -> Cost:
        cost = self.inner.cost()
        if self.is_sparse:
            return cost
        m, p = cost.shape
        return cost._replace(
            gram=cost.rows,
            gram_operations=2.0 * float(m) ** 2 * p,
            num_bytes=m * self.domain.nbytes,  # the scaled rows themselves
            memory_budget=self.memory_budget,
        )
