"""A block: the part of the Jacobian that belongs to one array of parameters."""

import abc
from collections.abc import Callable

import equinox as eqx
from jaxtyping import Array, Float, Int

from .._common._tree import einsum


class AbstractBlock(eqx.Module):
    r"""The columns of $\phi$ that belong to one array of parameters."""

    @property
    @abc.abstractmethod
    def num_rows(self) -> int:
        """The number of rows, m."""

    @abc.abstractmethod
    def rows(self) -> Float[Array, "m ..."]:
        """Return the block as a dense array."""

    @abc.abstractmethod
    def gram_with(self, other: "AbstractBlock") -> Float[Array, "m k"]:
        """Return inner products with the rows of another block of the same parameters."""

    @abc.abstractmethod
    def merged(self, num_outputs: int) -> "AbstractBlock":
        """Return the block with all outputs of an example in one row: inner products of
        such rows are traces over the outputs."""

    @abc.abstractmethod
    def of_output(self, k: int | Int[Array, ""], num_outputs: int) -> "AbstractBlock":
        """Return the rows of the k-th output of each example."""

    @abc.abstractmethod
    def squared_rows(self) -> Float[Array, " m"]:
        """Return the squared norms of the rows."""

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

    @abc.abstractmethod
    def scaled(self, scale: Float[Array, "..."]) -> "AbstractBlock":
        """Return the block with its columns divided by `scale`."""
