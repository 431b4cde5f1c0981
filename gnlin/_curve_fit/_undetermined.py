"""Whether each parameter affects the curve, and where the curve is not finite."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._common._tree import ravel_pytree
from .._linearisation._bounds import Box


# A parameter has no effect if, moved by its standard error, it changes the curve by less
# than this part of the change that the linearisation predicts.
_UNMOVED = 1e-6
# Only parameters whose standard error exceeds this part of their value are tested.
_ASKED = 0.1


def seen(
    outputs_at: Callable[[PyTree[Array]], Array],
    parameters: PyTree[Array],
    start: PyTree[Array],
    outputs: Float[Array, " m"],
    target: Float[Array, " m"],
    jacobian: Float[Array, "m k"],
    bounds: Any,
) -> Bool[Array, " k"]:
    """Whether each parameter affects the curve; independent of the parameters' units.

    A parameter has no effect if a change by its whole value, or by its start, changes the
    residuals by less than their rounding. It also has none if the curve stays constant
    when the parameter moves by its standard error and the others are held: the
    linearisation predicts a change of the size of the noise, but on a plateau there is
    none. This second test evaluates the curve, so it is made only for parameters whose
    standard error exceeds a tenth of their value.
    """
    everything = parameters, start, outputs, target, jacobian, bounds
    everything = jax.lax.stop_gradient(everything)
    parameters, start, outputs, target, jacobian, bounds = everything
    y, unravel = ravel_pytree(parameters)
    first, _ = ravel_pytree(start)
    eps = jnp.finfo(outputs.dtype).eps
    norms = jnp.linalg.norm(jacobian, axis=0)
    units = jnp.where(norms > 0, norms, 1)
    size = jnp.hypot(jnp.linalg.norm(outputs), jnp.linalg.norm(target))
    own = jnp.maximum(jnp.abs(y), jnp.abs(first))
    is_rounding = (first != 0) & (norms * own <= eps * size)
    num_others = max(outputs.size - y.size, 1)
    noise = jnp.linalg.norm(target - outputs) / num_others**0.5
    errors = jnp.maximum(noise, eps**0.5 * size) / units
    # A smaller step may change the curve by rounding alone.
    steps = jnp.maximum(errors, eps**0.5 * jnp.abs(y))
    asked = (steps > _ASKED * own) & (norms > 0) & ~is_rounding

    def stays(step):
        moved = unravel(y + step)
        change = jnp.linalg.norm(outputs_at(moved) - outputs)
        promised = jnp.sum(jnp.abs(step) * norms)
        return (change <= _UNMOVED * promised) & _is_inside(bounds, moved)

    def of_all():
        moves = jnp.concatenate([-jnp.diag(steps), jnp.diag(steps)])
        return jnp.any(jax.lax.map(stays, moves).reshape(2, -1), axis=0)

    stay = jax.lax.cond(jnp.any(asked), of_all, lambda: jnp.zeros(y.size, bool))
    return ~is_rounding & ~(asked & stay)


def _is_inside(bounds: Any, y: PyTree[Array]) -> Bool[Array, ""]:
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
