"""Literal steps of gradient descent, or of an optimiser, on the linearised problem."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import as_float, forwards_only
from ..filters import Nesterov
from ._base import Descent
from ._spaces import AbstractSpace, Linearised


class Descended(NamedTuple):
    """The state after a number of steps, in the coordinates of a space."""

    z: PyTree[Array]
    velocity: PyTree[Array]
    num_steps: Scalar  # a float, because it may exceed 2^31
    diverged: Bool[Array, ""]


def at_rest(space: AbstractSpace) -> Descended:
    """Return the state before the first step, at the linearisation point."""
    zero = space.zero()
    return Descended(zero, zero, jnp.zeros((), float), jnp.array(False))


def descend(
    problem: Linearised,
    filter: Descent,
    period: ScalarLike,
    damping: ScalarLike,
    start: Descended | None = None,
) -> Descended:
    r"""Take `period` steps of a filter, from the linearisation point or from `start`, the
    state after fewer steps, on
    $L(f + \phi\delta) + g_0^\top\delta + \frac\lambda2\lVert\delta\rVert^2$.

    Heavy ball (Polyak, 1964): $v \leftarrow \mu v - \eta g$, $z \leftarrow z + v$;
    Nesterov (1983): $z \leftarrow z + \mu v - \eta g$ with the new $v$.
    """
    zero = problem.space.zero()
    dtype = _tree.dtype(zero)
    eta = jnp.asarray(filter.learning_rate, dtype)
    mu = jnp.asarray(getattr(filter, "momentum", 0.0), dtype)
    period = jnp.asarray(as_float(period), float)

    def advance(z, velocity, g):
        velocity = _tree.axpy(-eta, g, _tree.scale(mu, velocity))
        if isinstance(filter, Nesterov):
            z = _tree.axpy(-eta, g, _tree.axpy(mu, velocity, z))
        else:
            z = _tree.axpy(1, velocity, z)
        return z, velocity

    def body(carry):
        k, z, velocity, _ = carry
        g = problem.gradient(z, damping)
        grown = ~(_tree.norm(g) <= largest)
        return k + 1, *advance(z, velocity, g), grown

    gradient = problem.first_gradient()
    # A gradient that has grown by 1/eps counts as divergence.
    largest = _tree.norm(gradient) / jnp.finfo(dtype).eps
    if start is None:
        k, z, velocity = jnp.ones((), period.dtype), *advance(zero, zero, gradient)
        grown = jnp.array(False)
    else:
        z, velocity, k, grown = start
    end = jax.lax.while_loop(
        lambda carry: (carry[0] < period) & ~carry[3], body, (k, z, velocity, grown)
    )
    k, z, velocity, grown = forwards_only(end)
    return Descended(z, velocity, k, grown | ~_tree.all_finite(z))


class Optimised(NamedTuple):
    step: PyTree[Array]
    optimiser_state: Any
    diverged: Bool[Array, ""]


def optimise(
    problem: Linearised,
    point: PyTree[Array],
    period: ScalarLike,
    optimiser: Any,
    optimiser_state: PyTree,
    damping: ScalarLike,
) -> Optimised:
    """Take `period` steps of an optax optimiser from a point. The optimiser is passed the
    parameters, not the steps from the linearisation point."""

    def body(carry):
        k, step, state = carry
        g = problem.gradient(step, damping)
        updates, state = updated(optimiser, g, state, _tree.axpy(1, step, point))
        return k + 1, _tree.axpy(1, updates, step), state

    period = jnp.asarray(as_float(period), float)
    start = jnp.zeros((), period.dtype), problem.space.zero(), optimiser_state

    def unfinished(carry):
        k, step, _ = carry
        return (k < period) & _tree.all_finite(step)

    _, step, state = forwards_only(jax.lax.while_loop(unfinished, body, start))
    return Optimised(step, state, ~_tree.all_finite(step))


def updated(
    optimiser: Any, gradient: PyTree[Array], state: PyTree, y: PyTree[Array]
) -> tuple[PyTree[Array], PyTree]:
    """Return an optax optimiser's updates and new state."""
    # Optax mixes dtypes when it divides by powers of its step count.
    with jax.numpy_dtype_promotion("standard"):
        return optimiser.update(gradient, state, y)
