"""A Jacobian in memory."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._common._complex import check_real
from .._common._passes import Passes
from .._common._tree import ravel_pytree, Structure, summed
from ._base import AbstractJacobian, gram_of, multiplied
from ._block import AbstractBlock, Rows
from ._cost import Cost


# Largest size, in bytes, at which a Jacobian is always treated as one matrix.
_SMALL = 2**22


class AtHand(AbstractJacobian):
    """A Jacobian whose blocks, one for each array of parameters, are in memory, so that
    products need no passes through the function."""

    _blocks: Sequence[AbstractBlock]

    @staticmethod
    def of(jacobian: AbstractJacobian, blocks: Sequence[AbstractBlock]) -> "AtHand":
        """Return blocks of `jacobian` as a Jacobian in memory."""
        return AtHand(jacobian.domain, jacobian.codomain, jacobian.memory_budget, blocks)

    @staticmethod
    def of_columns(jacobian: AbstractJacobian, columns: Float[Array, "p m"]) -> "AtHand":
        """Return the Jacobian with these columns, which are the rows of an array."""
        rows = jax.vmap(jacobian.domain.unravel)(columns.T)
        return AtHand.of(jacobian, [Rows(x) for x in jax.tree.leaves(rows)])

    def mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self.codomain.unravel(self.push_forward(vector))

    def rmv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self.pull_back(ravel_pytree(vector)[0])

    def push_forward(self, tangent: PyTree[Array]) -> Float[Array, " m"]:
        check_real("A vector that a Jacobian multiplies", tangent)
        leaves = map(jnp.asarray, jax.tree.leaves(tangent))
        pairs = zip(self._blocks, leaves, strict=True)
        pushed = summed(block.push_forward(v) for block, v in pairs)
        return pushed.astype(self.codomain.dtype)

    def pull_back(self, cotangent: Float[Array, " m"]) -> PyTree[Array]:
        check_real("A vector that a Jacobian multiplies", cotangent)
        pairs = zip(self._blocks, self.domain.leaves, strict=True)
        pulled = [block.pull_back(cotangent).astype(x.dtype) for block, x in pairs]
        return self.domain.treedef.unflatten(pulled)

    def of_one_array(self) -> "AtHand":
        m, _ = self.shape
        is_small = m * self.domain.nbytes <= _SMALL  # factored blocks save nothing
        if not (is_small or all(isinstance(block, Rows) for block in self._blocks)):
            return self
        matrix = self.as_matrix()
        domain = Structure.of(matrix[0])
        return AtHand(domain, self.codomain, self.memory_budget, [Rows(matrix)])

    def a_product(self) -> Passes:
        return Passes()

    def blocks(self, wanted: Sequence[int] | None = None) -> Sequence[AbstractBlock]:
        return self._blocks if wanted is None else [self._blocks[k] for k in wanted]

    def gram_with(self, other: AbstractJacobian) -> Float[Array, "m k"]:
        if not other.fits():
            return super().gram_with(other)
        return gram_of(self._blocks, other.blocks())

    def at_hand(self) -> "AtHand":
        return self

    def transformed(self, matrices: PyTree[Array], codomain: Structure) -> "AtHand":
        def transform(column: Float[Array, " m"]) -> Float[Array, " m"]:
            return ravel_pytree(multiplied(matrices, self.codomain.unravel(column)))[0]

        blocks = [block.transformed(transform) for block in self._blocks]
        return dataclasses.replace(self, codomain=codomain, _blocks=blocks)

    def block_bytes(self) -> list[int]:
        return [0 for _ in self._blocks]  # already in memory

    def cost(self) -> Cost:
        m, p = self.shape
        num_bytes = sum(x.nbytes for x in jax.tree.leaves(self._blocks))
        numbers = num_bytes / self.domain.dtype.itemsize
        return Cost(
            shape=(m, p),
            itemsize=self.domain.dtype.itemsize,
            rows=Passes(),
            gram=Passes(),
            one_pass=2.0 * numbers,
            gram_operations=2.0 * float(m) ** 2 * p,
            num_bytes=num_bytes,
            memory_budget=self.memory_budget,
        )
