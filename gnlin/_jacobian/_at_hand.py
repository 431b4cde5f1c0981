"""A Jacobian in memory."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._passes import Passes
from .._sharding import by_columns, is_spread
from .._tree import matmul, promoted, ravel_pytree, Structure
from ._base import AbstractJacobian, Cost, gram_of, multiplied
from ._block import AbstractBlock
from ._rows import Rows


# Bytes of a small matrix.
_SMALL = 2**22


class AtHand(AbstractJacobian):
    """Blocks, one for each array of parameters: a product takes no pass."""

    _blocks: Sequence[AbstractBlock]

    @staticmethod
    def of(jacobian: AbstractJacobian, blocks: Sequence[AbstractBlock]) -> "AtHand":
        """Blocks of a Jacobian, for what it is from and to."""
        fixed = jacobian.domain, jacobian.codomain, jacobian.memory_budget
        return AtHand(*fixed, blocks)

    @staticmethod
    def of_columns(jacobian: AbstractJacobian, columns: Float[Array, "p m"]) -> "AtHand":
        """By its columns, one below the other."""
        rows = jax.vmap(jacobian.domain.unravel)(columns.T)
        return AtHand.of(jacobian, [Rows(x) for x in jax.tree.leaves(rows)])

    def mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self.codomain.unravel(self.push_forward(vector))

    def rmv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self.pull_back(ravel_pytree(vector)[0])

    def push_forward(self, tangent: PyTree[Array]) -> Float[Array, " m"]:
        leaves = map(jnp.asarray, jax.tree.leaves(tangent))
        pairs = zip(self._blocks, leaves, strict=True)
        parts = [block.push_forward(v) for block, v in pairs]
        return functools.reduce(jnp.add, promoted(parts)).astype(self.codomain.dtype)

    def pull_back(self, cotangent: Float[Array, " m"]) -> PyTree[Array]:
        pairs = zip(self._blocks, self.domain.leaves, strict=True)
        pulled = [block.pull_back(cotangent).astype(x.dtype) for block, x in pairs]
        return self.domain.treedef.unflatten(pulled)

    @property
    def is_matrix(self) -> bool:
        """Whether it is nothing but a matrix, or so small that it may be one: factors of
        layers save nothing there."""
        m, _ = self.shape
        is_small = m * self.domain.nbytes <= _SMALL
        return is_small or all(isinstance(block, Rows) for block in self._blocks)

    def of_one_array(self) -> "AtHand":
        """By parameters in one array, in `ravel_pytree` order."""
        matrix = self.as_matrix()
        domain = Structure.of(matrix[0])
        fixed = domain, self.codomain, self.memory_budget
        return AtHand(*fixed, [Rows(matrix)])

    def a_product(self) -> Passes:
        return Passes()

    def blocks(self, wanted: Sequence[int] | None = None) -> Sequence[AbstractBlock]:
        return self._blocks if wanted is None else [self._blocks[k] for k in wanted]

    def gram_with(self, other: AbstractJacobian) -> Float[Array, "m k"]:
        if other is not self or not is_spread():
            return gram_of(self._blocks, other.blocks())
        # Summed over leaves on each device, then once over devices.
        rows = [block.rows() for block in self._blocks]
        parts = [by_columns(x.reshape(x.shape[0], -1)) for x in rows if x.size > 0]
        each = [matmul(part, part.swapaxes(1, 2)) for part in parts]
        return jnp.sum(functools.reduce(jnp.add, promoted(each)), axis=0)

    def at_hand(self) -> "AtHand":
        return self

    def transformed(self, matrices: PyTree[Array], codomain: Structure) -> "AtHand":
        def transform(column: Float[Array, " m"]) -> Float[Array, " m"]:
            return ravel_pytree(multiplied(matrices, self.codomain.unravel(column)))[0]

        blocks = [block.transformed(transform) for block in self._blocks]
        return AtHand(self.domain, codomain, self.memory_budget, blocks)

    def block_bytes(self) -> list[int]:
        return [0 for _ in self._blocks]  # it is there

    def within(self, memory_budget: int) -> "AtHand":
        return AtHand(self.domain, self.codomain, memory_budget, self._blocks)

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
