"""One array of parameters' part of the Jacobian."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class AbstractBlock(eqx.Module):
    r"""The columns of $\phi$ that belong to one array of parameters."""

    @property
    @abc.abstractmethod
    def num_rows(self) -> int:
        """m."""

    @abc.abstractmethod
    def rows(self) -> Float[Array, "m ..."]:
        """The block itself."""

    @abc.abstractmethod
    def gram_with(self, other: "AbstractBlock") -> Float[Array, "m k"]:
        """Its rows' inner products with those of another block by the same parameters."""

    def gram(self) -> Float[Array, "m m"]:
        """Its rows' inner products."""
        return self.gram_with(self)

    @abc.abstractmethod
    def merged(self, num_outputs: int) -> "AbstractBlock":
        """With the outputs of an example beside each other, as one row: inner products
        then are traces over outputs."""

    @abc.abstractmethod
    def of_output(self, k: int | Int[Array, ""], num_outputs: int) -> "AbstractBlock":
        """The rows of one output of each example."""

    @abc.abstractmethod
    def squared_rows(self) -> Float[Array, " m"]:
        """The squared norms of its rows."""

    @abc.abstractmethod
    def squared_columns(self) -> Float[Array, "..."]:
        """The squared norms of its columns."""

    def row_grams(self) -> Float[Array, "k d d"]:
        r"""By each row of the array of parameters, its part of $\phi^\top\phi$."""
        rows = self.rows()
        rows = rows.reshape(*rows.shape[:2], -1)
        precise = jax.lax.Precision.HIGHEST
        return jnp.einsum("mki,mkj->kij", rows, rows, precision=precise)

    @abc.abstractmethod
    def push_forward(self, tangent: Float[Array, "..."]) -> Float[Array, " m"]:
        r"""$\phi v$."""

    @abc.abstractmethod
    def pull_back(self, a: Float[Array, " m"]) -> Float[Array, "..."]:
        r"""$\phi^\top a$."""

    @abc.abstractmethod
    def transformed(self, transform: Callable[[Array], Array]) -> "AbstractBlock":
        """With each column transformed, linearly and each example by itself."""

    @abc.abstractmethod
    def scaled(self, scale: Float[Array, "..."]) -> "AbstractBlock":
        """With each column divided by something."""

    @abc.abstractmethod
    def astype(self, dtype: jnp.dtype) -> "AbstractBlock":
        """In another precision."""
