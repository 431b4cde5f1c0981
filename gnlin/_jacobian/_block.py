"""Blocks: the part of the Jacobian that belongs to one array of parameters."""

import abc
import math
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._common._tree import einsum, gram, matmul, on_one_cpu, promoted, summed, tensordot


class AbstractBlock(eqx.Module):
    r"""The columns of $\phi$ that belong to one array of parameters."""

    @property
    @abc.abstractmethod
    def num_rows(self) -> int:
        """The number of rows, m."""

    @abc.abstractmethod
    def rows(self) -> Float[Array, "m ..."]:
        """Return the block as a dense array."""

    # By default these are computed from the dense rows.

    def gram_with(self, other: "AbstractBlock") -> Float[Array, "m k"]:
        """Return inner products with the rows of another block of the same parameters."""
        return Rows(self.rows()).gram_with(other)

    def merged(self, num_outputs: int) -> "AbstractBlock":
        """Return the block with all outputs of an example in one row: inner products of
        such rows are traces over the outputs."""
        return Rows(self.rows()).merged(num_outputs)

    def of_output(self, k: int | Int[Array, ""], num_outputs: int) -> "AbstractBlock":
        """Return the rows of the k-th output of each example."""
        return Rows(self.rows()).of_output(k, num_outputs)

    def squared_rows(self) -> Float[Array, " m"]:
        """Return the squared norms of the rows."""
        return Rows(self.rows()).squared_rows()

    @abc.abstractmethod
    def squared_columns(self) -> Float[Array, "..."]:
        """Return the squared norms of the columns."""

    def row_grams(self) -> Float[Array, "k d d"]:
        r"""Return diagonal blocks of $\phi^\top\phi$, one for each row of parameters."""
        rows = self.rows()
        rows = rows.reshape(*rows.shape[:2], -1)
        return einsum("mki,mkj->kij", rows, rows)

    @abc.abstractmethod
    def push_forward(self, tangent: Float[Array, "..."]) -> Float[Array, " m"]:
        r"""Return $\phi v$."""

    @abc.abstractmethod
    def pull_back(self, a: Float[Array, " m"]) -> Float[Array, "..."]:
        r"""Return $\phi^\top a$."""

    @abc.abstractmethod
    def transformed(self, transform: Callable[[Array], Array]) -> "AbstractBlock":
        """Return the block with a linear function, which acts on each example separately,
        applied to each column."""

    def scaled(self, scale: Float[Array, "..."]) -> "AbstractBlock":
        """Return the block with its columns divided by `scale`."""
        return Rows(self.rows()).scaled(scale)


# On a CPU, XLA's product of rows of at least `_LONG` entries leaves the caches. Summing
# it over slices of `_SLICE` columns takes between 0.25 and 0.8 of the time.
_LONG = 2**16
_SLICE = 2**11


class Rows(AbstractBlock):
    """A block stored as a dense array: one row for each output."""

    array: Float[Array, "m ..."]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[1:]

    @property
    def num_rows(self) -> int:
        return self.array.shape[0]

    def rows(self) -> Float[Array, "m ..."]:
        return self.array

    def gram_with(self, other: AbstractBlock) -> Float[Array, "m k"]:
        if isinstance(other, StackedBlock):
            return other.gram_with(self).T
        num_columns = math.prod(self.shape)  # `reshape(m, -1)` fails for 0 columns
        a, b = (x.reshape(x.shape[0], num_columns) for x in (self.array, other.rows()))

        def product(a, b):
            return gram(a) if other is self else matmul(a, b.T)

        # On several devices, columns may be divided between them.
        if num_columns < _LONG or not on_one_cpu():
            return product(a, b)

        def add(k, total):
            start = k * _SLICE
            slices = (
                jax.lax.dynamic_slice_in_dim(x, start, _SLICE, axis=1) for x in (a, b)
            )
            return total + product(*slices)

        num_slices, num_left = divmod(num_columns, _SLICE)
        first = num_columns - num_left
        left = product(a[:, first:], b[:, first:])
        return jax.lax.fori_loop(0, num_slices, add, left)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of the parameters, first those of o and then those of q, where a row
        is an o x q matrix. A vector has q = 1."""
        return tuple(range(len(self.shape)))

    @property
    def num_left(self) -> int:
        """o; see `axes`."""
        return self.shape[0] if len(self.shape) > 1 else math.prod(self.shape)

    def partial_traces(self) -> tuple[Float[Array, "o o"], Float[Array, "q q"]]:
        r"""Return $\sum_m J_m J_m^\top$ and $\sum_m J_m^\top J_m$ of rows as matrices."""
        a = self._as_matrices()
        return einsum("moq,mpq->op", a, a), einsum("moq,mor->qr", a, a)

    def weighted_squares(
        self,
        left: Float[Array, "o o"],
        right: Float[Array, "q q"],
        weights: Float[Array, "o q"],
    ) -> Float[Array, " m"]:
        """Return the weighted sums of squares of each row in the basis of `left` and
        `right`."""
        a = einsum("moq,op,qr->mpr", self._as_matrices(), left, right)
        return einsum("mpr,pr->m", a**2, weights)

    def _as_matrices(self) -> Float[Array, "m o q"]:
        num_right = math.prod(self.shape[1:])
        return self.array.reshape(self.num_rows, self.num_left, num_right)

    def merged(self, num_outputs: int) -> "Rows":
        n = self.num_rows // num_outputs
        return Rows(self.array.reshape(n, num_outputs, *self.shape))

    def of_output(self, k: int | Int[Array, ""], num_outputs: int) -> "Rows":
        return Rows(self.merged(num_outputs).array[:, k])

    def squared_rows(self) -> Float[Array, " m"]:
        return jnp.sum(self.array**2, axis=tuple(range(1, self.array.ndim)))

    def squared_columns(self) -> Float[Array, "..."]:
        return einsum("m...,m...->...", self.array, self.array)

    def push_forward(self, tangent: Float[Array, "..."]) -> Float[Array, " m"]:
        return tensordot(self.array, tangent, tangent.ndim)

    def pull_back(self, a: Float[Array, " m"]) -> Float[Array, "..."]:
        return tensordot(a, self.array, 1).astype(self.array.dtype)

    def transformed(self, transform: Callable[[Array], Array]) -> "Rows":
        columns = self.array.reshape(self.array.shape[0], math.prod(self.shape))
        new = jax.vmap(transform, 1, 1)(columns).astype(self.array.dtype)
        return Rows(new.reshape(new.shape[0], *self.shape))

    def scaled(self, scale: Float[Array, "..."]) -> "Rows":
        return Rows(self.array / jnp.asarray(scale)[None])


class StackedBlock(AbstractBlock):
    """Stacked blocks of the same array of parameters; their kinds may differ."""

    parts: Sequence[AbstractBlock]

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    def rows(self) -> Float[Array, "m ..."]:
        return jnp.concatenate(promoted([part.rows() for part in self.parts]))

    def gram_with(self, other: AbstractBlock) -> Float[Array, "m k"]:
        others = other.parts if isinstance(other, StackedBlock) else [other]
        products: dict[tuple[int, int], Array] = {}
        for i, part in enumerate(self.parts):
            for j, another in enumerate(others):
                mirrored = other is self and j < i
                products[i, j] = products[j, i].T if mirrored else part.gram_with(another)

        rows, columns = range(len(self.parts)), range(len(others))
        return jnp.block(promoted([[products[i, j] for j in columns] for i in rows]))

    def merged(self, num_outputs: int) -> "StackedBlock":
        return StackedBlock([part.merged(num_outputs) for part in self.parts])

    def of_output(self, k: int | Int[Array, ""], num_outputs: int) -> "StackedBlock":
        return StackedBlock([part.of_output(k, num_outputs) for part in self.parts])

    def squared_rows(self) -> Float[Array, " m"]:
        return jnp.concatenate(promoted([part.squared_rows() for part in self.parts]))

    def squared_columns(self) -> Float[Array, "..."]:
        return summed(part.squared_columns() for part in self.parts)

    def row_grams(self) -> Float[Array, "k d d"]:
        return summed(part.row_grams() for part in self.parts)

    def push_forward(self, tangent: Float[Array, "..."]) -> Float[Array, " m"]:
        pushed = [part.push_forward(tangent) for part in self.parts]
        return jnp.concatenate(promoted(pushed))

    def pull_back(self, a: Float[Array, " m"]) -> Float[Array, "..."]:
        ends = np.cumsum([part.num_rows for part in self.parts])[:-1]
        pairs = zip(self.parts, jnp.split(a, ends), strict=True)
        return summed(b.pull_back(x) for b, x in pairs)

    def transformed(self, transform: Callable[[Array], Array]) -> AbstractBlock:
        raise NotImplementedError("Transform the blocks of each group instead.")

    def scaled(self, scale: Float[Array, "..."]) -> "StackedBlock":
        return StackedBlock([part.scaled(scale) for part in self.parts])
