"""Parameters that the data do not determine."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree, Scalar

from .._common import _tree
from .._common._tree import ravel_pytree
from ._problem import FitSettings, flat_box


# A parameter has no effect if, moved by its standard error, it changes the curve by less
# than this part of the change that the linearisation predicts.
UNMOVED = 1e-6
# Only parameters whose standard error exceeds this part of their value are tested.
_ASKED = 0.1
# The most parameters that the description of a direction names.
_MOST = 4


class Doubts(NamedTuple):
    """Reasons to doubt that each parameter affects the curve.

    - `is_rounding`: whether a change by its whole value, or by its start, changes the
        residuals by less than their rounding.
    - `asked`: whether its standard error exceeds a tenth of its value. If the parameter
        moves by this error and the others are held, the linearisation predicts a change
        of the size of the noise. On a plateau there is no change, which only the curve
        itself shows.
    - `steps`: this standard error.
    - `promised`: the norm of the change of the curve that the linearisation predicts.
    """

    is_rounding: Bool[Array, " k"]
    asked: Bool[Array, " k"]
    steps: Float[Array, " k"]
    promised: Float[Array, " k"]


class Totals(NamedTuple):
    """Plain sums over the points, in units of sigma, or, with a likelihood, in units in
    which the loss has the curvature 1.

    - `num_points`: the number of entries of y that are not missing.
    - `chi_squared`: the squared residuals.
    - `squares`: the squared outputs and the squared targets.
    - `pull`: the squared derivatives of the loss.
    - `slopes`, `squared_slopes`: its second derivatives, and their squares.
    - `noise`: estimates of the noise, times their numbers of points; or 0.
    - `saturated`: the log-likelihoods of a perfect fit, where the loss is zero.
    """

    num_points: Scalar
    chi_squared: Scalar
    squares: Scalar
    pull: Scalar
    slopes: Scalar
    squared_slopes: Scalar
    noise: Scalar
    saturated: Scalar


def doubts(
    parameters: PyTree[Array],
    start: PyTree[Array],
    jacobian: Float[Array, "n k"],
    totals: Totals,
) -> Doubts:
    """Return the doubts, which do not depend on the parameters' units."""
    y, first = (ravel_pytree(x)[0] for x in (parameters, start))
    norms, size = _tree.column_norms(jacobian), jnp.sqrt(totals.squares)
    noise = jnp.sqrt(totals.chi_squared / jnp.maximum(totals.num_points - y.size, 1))
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
    setting: FitSettings,
    outputs_at: Callable[[PyTree[Array]], Array],
    parameters: PyTree[Array],
    start: PyTree[Array],
    outputs: Float[Array, " m"],
    jacobian: Float[Array, "m k"],
    totals: Totals,
) -> Bool[Array, " k"]:
    """Whether each parameter affects the curve. The curve is evaluated only where the
    linearisation does not tell."""
    parameters, start, outputs, jacobian, totals, bounds = jax.lax.stop_gradient(
        (parameters, start, outputs, jacobian, totals, setting.solver.bounds)
    )
    if setting.solver.retraction is not None:  # Entries do not tell how large a turn is.
        start = _tree.zeros_like(start)
    found = doubts(parameters, start, jacobian, totals)
    y, box = ravel_pytree(parameters)[0], flat_box(bounds, parameters)

    def stays(step_and_promised):
        step, promised = step_and_promised
        change = jnp.linalg.norm(outputs_at(setting.moved(parameters, step)) - outputs)
        return (change <= UNMOVED * promised) & ~box.is_left(y, step)

    def of_all():
        steps = jnp.concatenate([-jnp.diag(found.steps), jnp.diag(found.steps)])
        either = jax.lax.map(stays, (steps, jnp.tile(found.promised, 2)))
        return jnp.any(either.reshape(2, -1), axis=0)

    nowhere = jnp.zeros(y.size, bool)
    stay = jax.lax.cond(jnp.any(found.asked), of_all, lambda: nowhere)
    return ~found.is_rounding & ~(found.asked & stay)


def described(
    directions: np.ndarray, names: tuple[str, ...], start: PyTree, end: PyTree
) -> list[str]:
    """Describe directions of the parameters, as in "a by 1 and b by -2". The parameter
    that moves most moves by 1, or by the size of its start."""
    starts, ends = (np.abs(ravel_pytree(p)[0]) for p in (start, end))
    steps, units = _sizes(starts), _sizes(np.maximum(starts, ends))
    found = []
    for direction in directions:
        sizes = np.abs(direction / units)
        most = np.argmax(sizes)
        if not sizes[most] > 0:
            continue
        moves = direction / direction[most] * steps[most]
        moving = np.flatnonzero(sizes > 1e-6 * sizes[most])
        shown = np.sort(moving[np.argsort(-sizes[moving], kind="stable")[:_MOST]])
        parts = [f"{names[k]} by {moves[k]:.3g}" for k in shown]
        parts += ["others by less"] * (len(moving) > len(shown))
        found.append(" and ".join(parts))
    return found


def _sizes(values: np.ndarray) -> np.ndarray:
    """Return powers of ten below the values; 1 for 0 and values of an ordinary size."""
    is_ordinary = (values == 0) | ((values > 1e-3) & (values < 1e3))
    return 10 ** np.floor(np.log10(np.where(is_ordinary, 1, values)))
