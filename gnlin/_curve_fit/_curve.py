"""The data set of a fit and the function that is fitted, both flattened to vectors."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Scalar

from .._common._canonical import kind_of, memory_of, Program, program_of
from .._common._complex import in_real_parts
from .._common._precision import full_precision
from .._common._tree import ravel_pytree, Structure
from ._whole_numbers import cast, shaped, whole_numbers, with_floats


# Residuals below this multiple of the rounding of y are noise.
_ROUNDINGS = 100


class Data(NamedTuple):
    """A data set whose y is flattened to m real numbers.

    - `sigma`: the standard deviations of y, or a lower triangular factor of a covariance.
    - `counted`: 1 for each point of the data, 0 for each missing point.
    - `sigma_x`: the standard deviations of x, if x has errors too.
    - `spread`: the estimated scale of the residuals, in units of sigma, by which a robust
        loss divides them if the user gave no `sigma`.
    - `steps`: the steps that were made in fits before this one, if `spread` comes from
        them.
    - `held`: which free parameters are held, as booleans, and their values. A single fit
        holds none, so that its profiles, which hold one, run the same program.
    """

    x: PyTree[Array]
    y: Float[Array, " m"]
    sigma: Float[Array, "..."]
    counted: Float[Array, " m"]
    sigma_x: PyTree[Array] | None = None
    spread: Scalar | None = None
    steps: Scalar | None = None
    held: tuple[PyTree[Array], PyTree[Array]] | None = None

    def with_held(self, free: PyTree[Array]) -> PyTree[Array]:
        """Return the free parameters with the held ones at their values."""
        return free if self.held is None else jax.tree.map(jnp.where, *self.held, free)

    def moved(self, shift: PyTree[Array] | None) -> PyTree[Array]:
        """Return x moved by `shift`, which is in units of `sigma_x`."""
        if self.sigma_x is None:
            return self.x
        return jax.tree.map(lambda x, s, d: x + s * d, self.x, self.sigma_x, shift)


class Curve(eqx.Module):
    """The user's function, with some of its parameters fixed. The free and the fixed ones
    have the structure of all parameters, with `None` in place of the others."""

    f: Callable[[Any, Any], PyTree]
    fixed: PyTree
    # The dtypes of the leaves of x with which `f` is called, if they differ from x's.
    dtypes: tuple[Any, ...] | None = eqx.field(static=True, default=None)

    def __call__(self, free: PyTree, x: PyTree) -> Float[Array, " m"]:
        with full_precision():
            return flat(self.values(free, x))

    def values(self, free: PyTree, x: PyTree) -> PyTree:
        """Return what the user's function returns."""
        x = x if self.dtypes is None else cast(x, self.dtypes)
        return self.f(self.parameters(free), x)

    def parameters(self, free: PyTree) -> PyTree:
        """Return all parameters."""
        return eqx.combine(free, self.fixed)

    def on(self, free: PyTree, x: PyTree) -> "Curve":
        """Trace the curve for arguments of these shapes, so that functions which compute
        the same share one compilation. A function with leaves, such as a model, does so
        already, and is not traced."""
        parameters = self.parameters(free)
        is_plain = jax.tree_util.all_leaves([self.f])
        whole, dtypes = whole_numbers(x), None

        def trace(x):
            if is_plain:
                return program_of(self.f, parameters, x).traced.jaxpr
            return jax.make_jaxpr(self.f)(parameters, x).jaxpr

        with full_precision():
            if whole:
                memory, kind = memory_of(self.f), (whole, kind_of((parameters, x)))
                if kind not in memory:
                    dtypes = with_floats(trace, x, whole)
                    memory[kind] = dtypes, shaped(x, dtypes)
                dtypes, x = memory[kind]
            f = program_of(self.f, parameters, x) if is_plain else self.f
        return Curve(f, self.fixed, dtypes)

    def shapes(self, free: PyTree, x: PyTree) -> PyTree:
        """Return the shapes and types of what the user's function returns."""
        if isinstance(self.f, Program):
            return self.f.outputs
        x = x if self.dtypes is None else shaped(x, self.dtypes)
        return jax.eval_shape(self.f, self.parameters(free), x)

    @property
    def has_loops(self) -> bool:
        """Whether the function has loops of its own."""
        return isinstance(self.f, Program) and self.f.traced.has_loops

    @property
    def num_values(self) -> float:
        """The number of values that the function computes; infinite if it has loops, or
        if it is not known."""
        return self.f.traced.num_values if isinstance(self.f, Program) else math.inf


def flat(values: PyTree) -> Float[Array, " m"]:
    """Flatten a pytree to one vector of real numbers; a complex number becomes two."""
    return ravel_pytree(jax.tree.map(_real, values))[0]


def _real(value: Any) -> Float[Array, "..."]:
    value = in_real_parts(value)
    return value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(float)


def unflattened(values: Float[Array, " m"], like: PyTree) -> PyTree:
    """Invert `flat`: return the values in the structure and shapes of `like`."""
    parts = Structure.of(jax.eval_shape(lambda x: jax.tree.map(_real, x), like))
    pairs = lambda x, part: (
        jax.lax.complex(part[..., 0], part[..., 1]) if jnp.iscomplexobj(x) else part
    )
    return jax.tree.map(pairs, like, parts.unravel(values))


def wholly_missing(value: Array) -> Array:
    """Make both parts of a complex number NaN if one of them is."""
    if not jnp.iscomplexobj(value):
        return value
    return jnp.where(jnp.isnan(value), jnp.nan * (1 + 1j), value)


def broadcast(sigma: Array, like: Any) -> Array:
    """Broadcast to the shape of y, with the same sigma for real and imaginary parts."""
    sigma = jnp.broadcast_to(sigma, like.shape)
    is_complex = jnp.issubdtype(like.dtype, jnp.complexfloating)
    return jax.lax.complex(sigma, sigma) if is_complex else sigma


def rounding(data: Data) -> Scalar:
    """Return the size below which residuals are rounding of y, in units of sigma."""
    eps = jnp.finfo(data.y.dtype).eps
    return _ROUNDINGS * eps * jnp.max(jnp.abs(whitened(data.y, data)))


def whitened(values: Float[Array, " m"], data: Data) -> Float[Array, " m"]:
    """Divide by the standard deviations, or by the factor of the covariance."""
    values = jnp.where(data.counted > 0, values, 0)
    if data.sigma.ndim == 2:
        return jax.scipy.linalg.solve_triangular(data.sigma, values, lower=True)
    values /= data.sigma
    return values if data.spread is None else values / data.spread
