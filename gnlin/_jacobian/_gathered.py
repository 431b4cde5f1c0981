"""Jacobians in which each example reads only a few of the parameters."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._common._passes import Passes
from .._common._tree import einsum, matmul, promoted, Structure
from .._linear_algebra import _lapack
from ._at_hand import AtHand
from ._block import AbstractBlock, StackedBlock
from ._by_passes import is_by_forward
from ._cost import Cost, Reads
from ._directions import Direction


class Selected(eqx.Module):
    """A function of one example that reads only some rows of each array of parameters:
    `fn(y[select(example)], example)`, with the index applied array by array."""

    fn: Callable[[Any, Any], PyTree[Array]]
    select: Callable[[Any], PyTree[Array]]

    def __call__(self, y, example):
        return self.fn(gathered(y, self.select(example)), example)


def gathered(y: PyTree[Array], index: PyTree[Array]) -> PyTree[Array]:
    """Return the rows of each array. A row that does not exist, which traced indices may
    ask for, is NaN, so that it ends a run instead of changing another row."""
    options = {"mode": "fill", "fill_value": jnp.nan, "wrap_negative_indices": False}
    return jax.tree.map(lambda array, rows: array.at[rows].get(**options), y, index)


class Gathered(AbstractBlock):
    """A block that stores, for each example, only its columns for the s rows of the array
    of parameters that it reads.

    - `values`: the entries: n examples, c outputs, s rows, d entries of a row. If single
        entries of the array are read, not whole rows, they count as rows with d = 1.
    - `index`: the indices of the rows.
    - `shape`: the shape of the array of parameters.
    """

    values: Float[Array, "n c s d"]
    index: Int[Array, "n s"]
    shape: tuple[int, ...] = eqx.field(static=True)

    @property
    def num_rows(self) -> int:
        n, c, *_ = self.values.shape
        return n * c

    @property
    def _flat(self) -> tuple[int, int]:
        """The number of rows in the array of parameters, and of entries in a row."""
        size = self.values.shape[-1]
        return math.prod(self.shape) // max(size, 1), size

    @property
    def reads(self) -> tuple[int, int, int]:
        """The entry of `Reads.arrays` for this block."""
        num_rows, size = self._flat
        return num_rows, self.index.shape[1], size

    def rows(self) -> Float[Array, "m ..."]:
        n, c, *_ = self.values.shape
        zeros = jnp.zeros((n, c, *self._flat), self.values.dtype)
        example, output = jnp.arange(n)[:, None, None], jnp.arange(c)[None, :, None]
        full = zeros.at[example, output, self.index[:, None]].add(self.values)
        return full.reshape(-1, *self.shape)

    def squared_columns(self) -> Float[Array, "..."]:
        values, _ = self.distinct()
        return self._scattered(jnp.sum(values**2, axis=1)).reshape(self.shape)

    def row_grams(self) -> Float[Array, "k d d"]:
        (values, _), size = self.distinct(), math.prod(self.shape[1:])
        if values.shape[-1] == size:
            return self._scattered(einsum("ncsi,ncsj->nsij", values, values))
        if values.shape[-1] > size:  # an array of one axis that is read as one row
            return super().row_grams()
        # Single entries are stored: take the pairs that lie in one row of parameters.
        row, place = jnp.divmod(self.index, size)
        same = row[:, :, None] == row[:, None, :]
        products = einsum("ncs,nct->nst", values[..., 0], values[..., 0])
        grams = jnp.zeros((self.shape[0], size, size), values.dtype)
        at = row[:, :, None], place[:, :, None], place[:, None, :]
        return grams.at[at].add(jnp.where(same, products, 0))

    def push_forward(self, tangent: Float[Array, "..."]) -> Float[Array, " m"]:
        read = tangent.reshape(self._flat)[self.index]
        return einsum("ncsd,nsd->nc", self.values, read).ravel()

    def pull_back(self, a: Float[Array, " m"]) -> Float[Array, "..."]:
        by_example = a.reshape(self.values.shape[:2])
        pulled = einsum("nc,ncsd->nsd", by_example, self.values)
        return self._scattered(pulled.astype(self.values.dtype)).reshape(self.shape)

    def _scattered(self, parts: Float[Array, "n s ..."]) -> Float[Array, "k ..."]:
        zeros = jnp.zeros((self._flat[0], *parts.shape[2:]), parts.dtype)
        return zeros.at[self.index].add(parts)

    def distinct(self) -> tuple[Float[Array, "n c s d"], Bool[Array, "n s"]]:
        """Return `values` without duplicates, and where the duplicates are: the first
        occurrence of an index holds the sum, each later one is zero."""
        same = self.index[:, :, None] == self.index[:, None, :]
        sums = einsum("nst,nctd->ncsd", same.astype(self.values.dtype), self.values)
        before = jnp.tri(self.index.shape[1], k=-1, dtype=bool)
        again = jnp.any(same & before[None], axis=2)
        return jnp.where(again[:, None, :, None], 0, sums), again

    def transformed(self, transform: Callable[[Array], Array]) -> "Gathered":
        columns = self.values.reshape(self.num_rows, math.prod(self.values.shape[2:]))
        new = jax.vmap(transform, 1, 1)(columns).astype(self.values.dtype)
        n, _, *rest = self.values.shape
        new = new.reshape(n, new.shape[0] // n, *rest)
        return Gathered(new, self.index, self.shape)

    def scaled(self, scale: Float[Array, "..."]) -> "Gathered":
        read = jnp.broadcast_to(scale, self.shape).reshape(self._flat)[self.index]
        values = (self.values / read[:, None]).astype(self.values.dtype)
        return Gathered(values, self.index, self.shape)


def in_few_rows(blocks: Sequence[AbstractBlock]) -> Sequence[AbstractBlock]:
    r"""Return blocks with the same $\phi^\top\phi$ in which no example has more rows than
    it reads entries: an example's own rows are replaced by their triangular factor."""
    stacked = [block.parts for block in blocks if isinstance(block, StackedBlock)]
    if stacked and len(stacked) == len(blocks):
        groups = map(in_few_rows, zip(*stacked, strict=True))
        return [StackedBlock(parts) for parts in zip(*groups, strict=True)]
    each = [block for block in blocks if isinstance(block, Gathered)]
    widths = [math.prod(block.values.shape[2:]) for block in each]
    if len(each) < len(blocks) or each[0].values.shape[1] <= sum(widths):
        return blocks
    rows = [block.values.reshape(*block.values.shape[:2], -1) for block in each]
    # One after the other: in jax 0.10 and 0.11, several batches of factorisations may
    # wait for each other forever.
    triangles = jax.lax.map(_triangle, jnp.concatenate(promoted(rows), axis=2))

    def of_block(block: Gathered, part: Float[Array, "n d e"]) -> Gathered:
        values = part.reshape(*part.shape[:2], *block.values.shape[2:])
        return Gathered(values, block.index, block.shape)

    parts = jnp.split(triangles, np.cumsum(widths)[:-1], axis=2)
    return list(map(of_block, each, parts))


@jax.custom_jvp
def _triangle(rows: Float[Array, "c d"]) -> Float[Array, "d d"]:
    """Return the triangular factor R of the rows A = Q R."""
    return _lapack.qr(rows)[1]


@_triangle.defjvp
def _(primals, tangents):
    # Of R, only R^T R = A^T A is used, and its derivative is the one of R by Q^T dA. This
    # needs no inverse of R, which may be singular.
    (rows,), (change,) = primals, tangents
    q, triangle = _lapack.qr(rows)
    return triangle, matmul(q.T, change)


class Sparse(AtHand):
    """A Jacobian in memory whose blocks are [`Gathered`][]. Making it takes as many
    passes as one example has outputs, or reads entries, whichever is fewer."""

    num_passes: Passes = eqx.field(static=True)
    factor_operations: float = eqx.field(static=True, default=math.inf)

    def reads(self) -> tuple[Reads, ...]:
        blocks = [block for block in self._blocks if isinstance(block, Gathered)]
        n, c, *_ = blocks[0].values.shape
        arrays = tuple(block.reads for block in blocks)
        return (Reads(n, c, arrays, self.factor_operations),)

    @staticmethod
    def of_examples(
        fn: Selected,
        y: PyTree[Array],
        examples: PyTree[Array],
        outputs: Structure,
        memory_budget: int,
        jac: Direction | None,
    ) -> "Sparse":
        index = jax.vmap(fn.select)(examples)
        chosen = jax.vmap(gathered, in_axes=(None, 0))(y, index)
        of_one = Structure.of(jax.tree.map(lambda x: x[0], chosen))
        n = jax.tree.leaves(examples)[0].shape[0]
        num_outputs = outputs.size // n
        forward = is_by_forward(jac, (num_outputs, of_one.size))
        derivative = jax.jacfwd if forward else jax.jacrev
        jacobians = jax.vmap(derivative(fn.fn))(chosen, examples)
        by_output = outputs.treedef.flatten_up_to(jacobians)
        blocks = []
        leaves = zip(Structure.of(y).leaves, jax.tree.leaves(index), strict=True)
        for k, (leaf, reads) in enumerate(leaves):
            reads = reads.reshape(n, -1)
            shape = reads.shape[1], math.prod(leaf.shape[1:])
            values = [
                jax.tree.leaves(part)[k].reshape(n, out.size // n, *shape)
                for part, out in zip(by_output, outputs.leaves, strict=True)
            ]
            if len(values) > 1:
                # Outputs are ordered by array first, then by example.
                reads = jnp.concatenate(
                    [jnp.repeat(reads, x.shape[1], 0) for x in values]
                )
                values = [jnp.concatenate([x.reshape(-1, 1, *shape) for x in values])]
            blocks.append(Gathered(values[0], reads, leaf.shape))
        passes = Passes(jvps=of_one.size) if forward else Passes(vjps=num_outputs)
        return Sparse(Structure.of(y), outputs, memory_budget, blocks, passes)

    def at_hand(self) -> "Sparse":
        return dataclasses.replace(self, num_passes=Passes())

    def cost(self) -> Cost:
        passes = self.num_passes
        return super().cost()._replace(rows=passes, gram=passes, reads=self.reads())
