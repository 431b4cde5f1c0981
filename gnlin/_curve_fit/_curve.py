"""A data set, and the function that is fitted to it, as numbers in one row."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, Scalar

from .._tree import ravel_pytree
from .._written_anew import Program, program_of


class Data(NamedTuple):
    """A data set, its y as m numbers.

    - `sigma`: of each, or a lower triangular factor of their covariance.
    - `counted`: 1, and 0 for those that are missing.
    - `sigma_x`: of each x, if those have errors, too.
    - `spread`: of the residuals, in units of sigma, if a robust loss is in units of that.
    - `held`: which of the free parameters are held, as booleans, and the values at which.
        Of a fit by itself none are; those of its profiles are then the same program.
    """

    x: PyTree[Array]
    y: Float[Array, " m"]
    sigma: Float[Array, "..."]
    counted: Float[Array, " m"]
    sigma_x: PyTree[Array] | None = None
    spread: Scalar | None = None
    held: tuple[PyTree[Array], PyTree[Array]] | None = None

    def with_held(self, free: PyTree[Array]) -> PyTree[Array]:
        """Those that are held in their place."""
        return free if self.held is None else jax.tree.map(jnp.where, *self.held, free)

    def moved(self, shift: PyTree[Array] | None) -> PyTree[Array]:
        """The x's, so many of their standard deviations further."""
        if self.sigma_x is None:
            return self.x
        return jax.tree.map(lambda x, s, d: x + s * d, self.x, self.sigma_x, shift)


class Curve(eqx.Module):
    """A function of the free parameters, as a user's function of all of them."""

    f: Callable[[Any, Any], PyTree]
    names: tuple[str, ...] = eqx.field(static=True)  # of those that are fixed

    def __call__(self, free: PyTree, fixed: dict, x: PyTree) -> Float[Array, " m"]:
        return flat(self.f(self.merged(free, fixed), x))

    def on(self, free: PyTree, fixed: dict, x: PyTree) -> "Curve":
        """The same, of such arrays only: compiled once for all functions that compute
        the same of them. A function with leaves, such as a model, is known by these."""
        if jax.tree.leaves(self.f) != [self.f]:
            return self
        return Curve(program_of(self.f, self.merged(free, fixed), x), self.names)

    def shapes(self, free: PyTree, fixed: dict, x: PyTree) -> PyTree:
        """Those of what the user's function returns."""
        if isinstance(self.f, Program):
            return self.f.outputs
        return jax.eval_shape(self.f, self.merged(free, fixed), x)

    @property
    def has_loops(self) -> bool:
        """Whether the function has loops of its own."""
        return isinstance(self.f, Program) and self.f.traced.has_loops

    def merged(self, free: PyTree, fixed: dict) -> PyTree:
        return {**free, **fixed} if self.names else free


def flat(values: PyTree) -> Float[Array, " m"]:
    """As real numbers in one row."""

    def real(value):
        value = jnp.asarray(value)
        if jnp.iscomplexobj(value):
            value = jnp.stack([value.real, value.imag], axis=-1)
        return value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(float)

    return ravel_pytree(jax.tree.map(real, values))[0]


def unflattened(values: Float[Array, " m"], like: PyTree) -> PyTree:
    """Such numbers in the shapes of what they were."""
    leaves, structure = jax.tree.flatten(like)
    sizes = [2 * x.size if jnp.iscomplexobj(x) else x.size for x in leaves]
    parts = jnp.split(values, np.cumsum(sizes)[:-1])

    def shaped(part, x):
        if jnp.iscomplexobj(x):
            part = jax.lax.complex(part[::2], part[1::2])
        return part.reshape(x.shape)

    return structure.unflatten(
        [shaped(*pair) for pair in zip(parts, leaves, strict=True)]
    )


def whitened(values: Float[Array, " m"], data: Data) -> Float[Array, " m"]:
    """In units of what is known of each."""
    if data.sigma.ndim == 2:
        values = jnp.where(data.counted > 0, values, 0)
        return jax.scipy.linalg.solve_triangular(data.sigma, values, lower=True)
    values = jnp.where(data.counted > 0, values, 0) / data.sigma
    return values if data.spread is None else values / data.spread
