"""The Jacobian in other variables: scaled ones, or steps along a retraction."""

import abc
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._common import _tree
from .._common._passes import Passes
from .._common._tree import einsum
from ._at_hand import AtHand
from ._base import AbstractJacobian
from ._block import AbstractBlock, Rows, StackedBlock
from ._cost import Cost, Reads
from ._gathered import Gathered


# An entry of a product counts as rounding below this many eps of its terms' sizes.
_ROUNDINGS = 10


class ChangeOfVariables(AbstractJacobian):
    r"""$\phi T$, where $T$ is block-diagonal: one block for each array of parameters.

    - `inner`: $\phi$.
    - `change`: the arrays that define $T$.
    """

    inner: AbstractJacobian
    change: PyTree[Array]

    @classmethod
    def of(cls, inner: AbstractJacobian, change: Any) -> "ChangeOfVariables":
        return cls(inner.domain, inner.codomain, inner.memory_budget, inner, change)

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

    def in_turn(self, array: Array) -> tuple["ChangeOfVariables", Array]:
        inner, array = self.inner.in_turn(array)
        return self.of(inner, self.change), array

    def at_hand(self) -> "ChangeOfVariables":
        return self.of(self.inner.at_hand(), self.change)

    def transformed(self, matrices, codomain) -> "ChangeOfVariables":
        return self.of(self.inner.transformed(matrices, codomain), self.change)

    def block_bytes(self) -> list[int]:
        return self.inner.block_bytes() if self.is_sparse else super().block_bytes()

    def bytes_at_once(self) -> int:
        return self.inner.bytes_at_once()

    def cost(self) -> Cost:
        cost = self.inner.cost()
        if self.is_sparse:
            return cost._replace(reads=self.reads())
        m, p = cost.shape
        return cost._replace(
            gram=self._gram_passes(cost.rows),
            gram_operations=2.0 * float(m) ** 2 * p,
            num_bytes=m * self.domain.nbytes,  # blocks are dense after the change
        )


class ScaledColumns(ChangeOfVariables):
    r"""$\phi D^{-1}$; `change` is the diagonal of $D$, as a pytree of parameters."""

    def mapped(self, vector: PyTree[Array]) -> PyTree[Array]:
        return jax.tree.map(lambda x, d: (x / d).astype(x.dtype), vector, self.change)

    def mapped_back(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self.mapped(vector)

    def block(self, inner: AbstractBlock, k: int) -> AbstractBlock:
        return inner.scaled(jax.tree.leaves(self.change)[k])


class Retracted(ChangeOfVariables):
    r"""$\phi T$, where $T$ has a $d \times d$ block for each row of some arrays.
    `change` holds the blocks of each array, or `None` for an array that $T$ leaves."""

    change: list[Float[Array, "k d d"] | None]

    def at_hand(self) -> AbstractJacobian:
        if self.is_sparse:
            return super().at_hand()
        # Products with these blocks agree with their columns, in which rounding is zero.
        is_stacked = lambda block: isinstance(block, StackedBlock)
        blocks = (Rows(b.rows()) if is_stacked(b) else b for b in self.blocks())
        return AtHand.of(self, list(blocks))

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
        return structure.unflatten(list(map(each, self.change, leaves)))

    def block(self, inner: AbstractBlock, k: int) -> AbstractBlock:
        return _retracted_block(inner, self.change[k])

    def reads(self) -> tuple[Reads, ...]:
        def of_array(array, matrix):
            # A step moves whole rows, even where an example reads single entries.
            _, num_read, _ = array
            return array if matrix is None else (len(matrix), num_read, matrix.shape[1])

        def of_group(each: Reads) -> Reads:
            arrays = tuple(map(of_array, each.arrays, self.change))
            known = each.factor_operations if arrays == each.arrays else math.inf
            return each._replace(arrays=arrays, factor_operations=known)

        return tuple(map(of_group, self.inner.reads()))


def _retracted_block(
    block: AbstractBlock, matrix: Float[Array, "k d d"] | None
) -> AbstractBlock:
    if matrix is None:
        return block
    if isinstance(block, StackedBlock):
        return StackedBlock([_retracted_block(part, matrix) for part in block.parts])
    if isinstance(block, Gathered):
        values, size = block.values, matrix.shape[-1]
        if values.shape[-1] == size:
            index, chosen = block.index, matrix[block.index]
        else:  # single entries
            index, place = jnp.divmod(block.index, size)
            chosen = matrix[index, place][:, :, None]
        turned = einsum("ncsd,nsde->ncse", values, chosen)
        return Gathered(turned.astype(values.dtype), index, block.shape)
    whole = block.rows()
    rows = whole.reshape(-1, *matrix.shape[:2])
    product = lambda a, b: einsum("mkd,kde->mke", a, b)
    # An entry that is rounding, such as by a rotation of a point on its axis, is set to
    # zero. A column of them would be solved for like any other, or be scaled up.
    turned, terms = product(rows, matrix), product(jnp.abs(rows), jnp.abs(matrix))
    least = _ROUNDINGS * _tree.eps(turned) * terms
    rounding = jnp.where(jnp.abs(turned) <= least, turned, 0)
    turned -= jax.lax.stop_gradient(rounding)
    return Rows(turned.reshape(whole.shape).astype(rows.dtype))
