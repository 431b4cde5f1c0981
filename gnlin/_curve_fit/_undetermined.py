"""Whether each parameter affects the curve, and where the curve is not finite."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar

from .._common._tree import ravel_pytree
from .._linearisation._bounds import Box


# A parameter has no effect if, moved by its standard error, it changes the curve by less
# than this part of the change that the linearisation predicts.
UNMOVED = 1e-6
# Only parameters whose standard error exceeds this part of their value are tested.
_ASKED = 0.1


class Doubts(NamedTuple):
    """What speaks against each parameter having an effect on the curve.

    - `is_rounding`: whether a change by its whole value, or by its start, changes the
        residuals by less than their rounding.
    - `asked`: whether its standard error exceeds a tenth of its value. The linearisation
        then predicts a change of the size of the noise when it moves by its error and the
        others are held; on a plateau there is none, which only the curve itself can tell.
    - `steps`: that error.
    - `promised`: the norm of the change of the curve that the linearisation predicts.
    """

    is_rounding: Bool[Array, " k"]
    asked: Bool[Array, " k"]
    steps: Float[Array, " k"]
    promised: Float[Array, " k"]


def doubts(
    parameters: PyTree[Array],
    start: PyTree[Array],
    norms: Float[Array, " k"],
    size: Scalar,
    noise: Scalar,
) -> Doubts:
    """Return the doubts, which do not depend on the parameters' units.

    - `norms`: of the Jacobian's columns.
    - `size`: the norm of the outputs and the target together.
    - `noise`: the standard deviation of the residuals.
    """
    y, first = (ravel_pytree(x)[0] for x in (parameters, start))
    eps = jnp.finfo(norms.dtype).eps
    own = jnp.maximum(jnp.abs(y), jnp.abs(first))
    is_rounding = (first != 0) & (norms * own <= eps * size)
    units = jnp.where(norms > 0, norms, 1)
    errors = jnp.maximum(noise, eps**0.5 * size) / units
    # A smaller step may change the curve by rounding alone.
    steps = jnp.maximum(errors, eps**0.5 * jnp.abs(y))
    asked = (steps > _ASKED * own) & (norms > 0) & ~is_rounding
    return Doubts(is_rounding, asked, steps, steps * norms)


def seen(
    outputs_at: Callable[[PyTree[Array]], Array],
    parameters: PyTree[Array],
    start: PyTree[Array],
    outputs: Float[Array, " m"],
    target: Float[Array, " m"],
    jacobian: Float[Array, "m k"],
    bounds: Any,
) -> Bool[Array, " k"]:
    """Whether each parameter affects the curve. The curve is evaluated only where the
    linearisation leaves it open."""
    everything = parameters, start, outputs, target, jacobian, bounds
    everything = jax.lax.stop_gradient(everything)
    parameters, start, outputs, target, jacobian, bounds = everything
    y, unravel = ravel_pytree(parameters)
    size = jnp.hypot(jnp.linalg.norm(outputs), jnp.linalg.norm(target))
    noise = jnp.linalg.norm(target - outputs) / max(outputs.size - y.size, 1) ** 0.5
    norms = jnp.linalg.norm(jacobian, axis=0)
    found = doubts(parameters, start, norms, size, noise)

    def stays(step):
        moved = unravel(y + step)
        change = jnp.linalg.norm(outputs_at(moved) - outputs)
        promised = jnp.sum(jnp.abs(step) * norms)
        return (change <= UNMOVED * promised) & is_inside(bounds, moved)

    def of_all():
        moves = jnp.concatenate([-jnp.diag(found.steps), jnp.diag(found.steps)])
        return jnp.any(jax.lax.map(stays, moves).reshape(2, -1), axis=0)

    nowhere = jnp.zeros(y.size, bool)
    stay = jax.lax.cond(jnp.any(found.asked), of_all, lambda: nowhere)
    return ~found.is_rounding & ~(found.asked & stay)


def is_inside(bounds: Any, y: PyTree[Array]) -> Bool[Array, ""]:
    if bounds is None:
        return jnp.array(True)
    box = Box.of(bounds, y)
    inside = jax.tree.map(
        lambda x, low, high: jnp.all((low <= x) & (x <= high)), y, box.lower, box.upper
    )
    return jnp.all(jnp.stack(jax.tree.leaves(inside)))


class NonFinite(NamedTuple):
    """Where the curve, or its derivative, is not finite.

    - `point`: the first such entry of the outputs; -1 if there is none.
    - `number`: how many such entries there are.
    - `of_curve`: whether the curve itself is not finite there, or only a derivative.
    """

    point: Int[Array, ""]
    number: Int[Array, ""]
    of_curve: Bool[Array, ""]

    @staticmethod
    def of(outputs: Float[Array, " m"], jacobian: Float[Array, "m k"]) -> "NonFinite":
        of_curve = ~jnp.isfinite(outputs)
        of_any = ~jnp.all(jnp.isfinite(jacobian), axis=1)
        either = jnp.where(jnp.any(of_curve), of_curve, of_any)
        point = jnp.where(jnp.any(either), jnp.argmax(either), -1)
        return NonFinite(point, jnp.sum(either), jnp.any(of_curve))
