"""The Jacobian with respect to linearly transformed parameters."""

import abc
from collections.abc import Sequence

from jaxtyping import Array, Float, PyTree

from .._common._passes import Passes
from ._at_hand import AtHand
from ._base import AbstractJacobian
from ._block import AbstractBlock
from ._cost import Cost, Reads


class ChangeOfVariables(AbstractJacobian):
    r"""$\phi T$, where $T$ is block-diagonal: one block for each array of parameters."""

    inner: AbstractJacobian

    def __init__(self, inner: AbstractJacobian):
        self.inner = inner
        self.domain = inner.domain
        self.codomain = inner.codomain
        self.memory_budget = inner.memory_budget

    @abc.abstractmethod
    def of(self, inner: AbstractJacobian) -> "ChangeOfVariables":
        """Return the same change of variables of another Jacobian."""

    @abc.abstractmethod
    def mapped(self, vector: PyTree[Array]) -> PyTree[Array]:
        r"""Return $T v$."""

    @abc.abstractmethod
    def mapped_back(self, vector: PyTree[Array]) -> PyTree[Array]:
        r"""Return $T^\top v$."""

    @abc.abstractmethod
    def block(self, inner: AbstractBlock, k: int) -> AbstractBlock:
        r"""Return the k-th block of $\phi T$, given the k-th block of $\phi$."""

    def mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self.inner.mv(self.mapped(vector))

    def rmv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self.mapped_back(self.inner.rmv(vector))

    def curvature_mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self.mapped_back(self.inner.curvature_mv(self.mapped(vector)))

    def reads(self) -> tuple[Reads, ...]:
        return self.inner.reads()

    def a_product(self) -> Passes:
        return self.inner.a_product()

    def blocks(self, wanted: Sequence[int] | None = None) -> Sequence[AbstractBlock]:
        chosen = range(len(self.domain.leaves)) if wanted is None else wanted
        return list(map(self.block, self.inner.blocks(wanted), chosen))

    def summed(self, of_blocks, part_bytes):
        def of_inner(blocks: Sequence[AbstractBlock]):
            return of_blocks(list(map(self.block, blocks, range(len(blocks)))))

        return self.inner.summed(of_inner, part_bytes)

    def gram_with(self, other: AbstractJacobian) -> Float[Array, "m k"]:
        here = AtHand.of(self, self.blocks())
        return here.gram_with(here if other is self else other)

    def at_hand(self) -> "ChangeOfVariables":
        return self.of(self.inner.at_hand())

    def transformed(self, matrices, codomain) -> "ChangeOfVariables":
        return self.of(self.inner.transformed(matrices, codomain))

    def block_bytes(self) -> list[int]:
        if self.is_sparse:
            return self.inner.block_bytes()
        m, _ = self.shape
        return [m * x.size * x.dtype.itemsize for x in self.domain.leaves]

    def within(self, memory_budget: int) -> "ChangeOfVariables":
        return self.of(self.inner.within(memory_budget))

    def cost(self) -> Cost:
        cost = self.inner.cost()
        if self.is_sparse:
            return cost
        m, p = cost.shape
        return cost._replace(
            gram=cost.rows,
            gram_operations=2.0 * float(m) ** 2 * p,
            num_bytes=m * self.domain.nbytes,  # blocks are dense after the change
            memory_budget=self.memory_budget,
        )
