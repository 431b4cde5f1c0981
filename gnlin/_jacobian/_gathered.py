"""Rows that read few of the parameters."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .._passes import Passes
from .._tree import promoted, Structure
from ._at_hand import AtHand
from ._base import Cost
from ._block import AbstractBlock
from ._by_passes import forward_is_cheaper
from ._rows import Rows


class Selected(eqx.Module):
    """A function of one example that reads only some rows of each array of parameters:
    `fn(y[select(example)], example)`."""

    fn: Callable[[Any, Any], PyTree[Array]]
    select: Callable[[Any], PyTree[Array]]

    def __call__(self, y, example):
        return self.fn(gathered(y, self.select(example)), example)


def gathered(y: PyTree[Array], index: PyTree[Array]) -> PyTree[Array]:
    return jax.tree.map(lambda array, rows: array[rows], y, index)


class Gathered(AbstractBlock):
    """In each row the entries of a few rows of the array of parameters; the rest of it is
    zero, and not held.

    - `values`: by those rows and their entries.
    - `index`: which rows.
    - `shape`: of the array of parameters.
    """

    values: Float[Array, "m s d"]
    index: Int[Array, "m s"]
    shape: tuple[int, ...] = eqx.field(static=True)

    @property
    def num_rows(self) -> int:
        return self.values.shape[0]

    @property
    def _flat(self) -> tuple[int, int]:
        return self.shape[0], math.prod(self.shape[1:])

    def rows(self) -> Float[Array, "m ..."]:
        zeros = jnp.zeros((self.num_rows, *self._flat), self.values.dtype)
        every = jnp.arange(self.num_rows)[:, None]
        return zeros.at[every, self.index].add(self.values).reshape(-1, *self.shape)

    def gram_with(self, other: AbstractBlock) -> Float[Array, "m k"]:
        return Rows(self.rows()).gram_with(other)

    def squared_columns(self) -> Float[Array, "..."]:
        return self._scattered(self._distinct() ** 2)

    def row_grams(self) -> Float[Array, "k d d"]:
        values = self._distinct()
        zeros = jnp.zeros((*self._flat, self._flat[1]), values.dtype)
        return zeros.at[self.index].add(values[..., :, None] * values[..., None, :])

    def _distinct(self) -> Float[Array, "m s d"]:
        """Of what is read twice the first has the sum of both, the second nothing."""
        same = self.index[:, :, None] == self.index[:, None, :]
        sums = jnp.einsum("mst,mtd->msd", same.astype(self.values.dtype), self.values)
        first = jnp.argmax(same, axis=2) == jnp.arange(self.index.shape[1])[None]
        return jnp.where(first[..., None], sums, 0)

    def push_forward(self, tangent: Float[Array, "..."]) -> Float[Array, " m"]:
        values, tangent = promoted((self.values, tangent))
        return jnp.sum(values * tangent.reshape(self._flat)[self.index], axis=(1, 2))

    def pull_back(self, a: Float[Array, " m"]) -> Float[Array, "..."]:
        a, values = promoted((a, self.values))
        return self._scattered((a[:, None, None] * values).astype(self.values.dtype))

    def _scattered(self, values: Float[Array, "m s d"]) -> Float[Array, "..."]:
        zeros = jnp.zeros(self._flat, values.dtype)
        return zeros.at[self.index].add(values).reshape(self.shape)

    def transformed(self, transform: Callable[[Array], Array]) -> "Gathered":
        # The rows of an example read the same.
        columns = self.values.reshape(self.num_rows, math.prod(self.values.shape[1:]))
        new = jax.vmap(transform, 1, 1)(columns).astype(self.values.dtype)
        return Gathered(new.reshape(self.values.shape), self.index, self.shape)

    def astype(self, dtype: jnp.dtype) -> "Gathered":
        return Gathered(self.values.astype(dtype), self.index, self.shape)


class Sparse(AtHand):
    """The Jacobian of examples that read few parameters each, in memory: its rows by what
    they read, from as many passes as one example has outputs or reads entries."""

    num_passes: Passes = eqx.field(static=True)

    @property
    def is_sparse(self) -> bool:
        return True

    @staticmethod
    def of_examples(
        fn: Selected,
        y: PyTree[Array],
        examples: PyTree[Array],
        outputs: Structure,
        memory_budget: int,
    ) -> "Sparse":
        index = jax.vmap(fn.select)(examples)
        chosen = jax.vmap(gathered, in_axes=(None, 0))(y, index)
        of_one = Structure.of(jax.tree.map(lambda x: x[0], chosen))
        n = jax.tree.leaves(examples)[0].shape[0]
        num_outputs = outputs.size // n
        forward = forward_is_cheaper(num_outputs, of_one.size)
        derivative = jax.jacfwd if forward else jax.jacrev
        every = jax.vmap(derivative(fn.fn))(chosen, examples)
        # By outputs, then by parameters; an output's rows are those of all examples.
        by_output = outputs.treedef.flatten_up_to(every)
        blocks = []
        for k, (leaf, rows) in enumerate(
            zip(Structure.of(y).leaves, jax.tree.leaves(index), strict=True)
        ):
            reads = rows.reshape(n, -1)
            shape = reads.shape[1], math.prod(leaf.shape[1:])
            values = [
                jax.tree.leaves(part)[k].reshape(n, -1, *shape) for part in by_output
            ]
            index_of_rows = [
                jnp.broadcast_to(reads[:, None], (*x.shape[:2], shape[0])) for x in values
            ]
            blocks.append(
                Gathered(
                    jnp.concatenate([x.reshape(-1, *shape) for x in values]),
                    jnp.concatenate([x.reshape(-1, shape[0]) for x in index_of_rows]),
                    leaf.shape,
                )
            )
        passes = Passes(jvps=of_one.size) if forward else Passes(vjps=num_outputs)
        return Sparse(Structure.of(y), outputs, memory_budget, blocks, passes)

    def _like(self, other: AtHand) -> "Sparse":
        fixed = other.domain, other.codomain, other.memory_budget
        return Sparse(*fixed, other.blocks(), self.num_passes)

    def transformed(self, matrices: PyTree[Array], codomain: Structure) -> "Sparse":
        return self._like(super().transformed(matrices, codomain))

    def within(self, memory_budget: int) -> "Sparse":
        return self._like(super().within(memory_budget))

    def cost(self) -> Cost:
        return super().cost()._replace(rows=self.num_passes, gram=self.num_passes)
