"""The reason why a fit ended, in words, and the warning for its user."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, PyTree

from .._common import _tree
from .._common._quickly import quickly
from .._common._words import how_many
from .._training._messages import in_words, result_name, why_it_ended
from ..losses import BinomialNLL
from ._advice import (
    bounded,
    either,
    elsewhere,
    known_noise,
    many_starts,
    num_starts,
    starts_at_best,
)
from ._curve import Data
from ._hidden import of_no_step, of_vanishing_derivative, of_zero_derivative
from ._likelihood import as_given
from ._not_finite import of_extreme_squares, what_is_not_finite
from ._own_values import of_own_values
from ._points import place_of, total
from ._problem import FitSettings, flat_box, Posed
from ._residuals import ignored, num_points, outlying, points
from ._statistics import NEAR
from ._undetermined import bent, described, FLAT


if TYPE_CHECKING:
    from ._result import CurveFit

# A robust loss that ignores more than this part of the points may fit the wrong ones.
_MOST = 0.5
# More outliers than this part probably mean a worse minimum. Cauchy noise has 14 %.
_MOST_OUTLYING = 0.25
# A larger distance to the minimum, in standard errors, is told. Beyond `NEAR` the run has
# converged by its gradient, and the distance is one of rounding or of a kink.
_FAR = 1e-3
# The most undetermined directions that a message describes.
_MOST_DIRECTIONS = 3
# The most parameters that a message names, if the likelihood has no maximum.
_MOST_NAMES = 5


def reason(fit: "CurveFit") -> str:
    """Return why the run ended, in words."""
    if fit._setting.many or isinstance(fit.chi_squared, Tracer):
        return ""
    converged = f"converged in {how_many(int(fit.num_steps), 'step')}"
    if _FAR < (distance := float(fit._end.distance)) <= NEAR:
        converged += f", to within {distance:.1g} standard errors"
    return _without_maximum(fit) or _at_edge(fit) or _failure(fit) or converged


def _failure(fit: "CurveFit") -> str:
    """Return why the fit of one data set has not converged, or an empty string."""
    name, steps = result_name(fit.result), int(fit.num_steps)
    if failure := (of_extreme_squares(fit) or of_zero_derivative(fit) or of_no_step(fit)):
        return failure
    if name == "successful" and not int(fit._end.nonfinite.point) >= 0:
        return ""
    if fit._setting.is_flat and name in ("nonlinear_max_steps_reached", "stagnation"):
        return _of_no_curvature(fit)
    if name == "nonlinear_max_steps_reached":
        if steps < fit._setting.max_steps:
            return f"interrupted after {how_many(steps, 'step')}"
        ways = either("raise `max_steps`", elsewhere(fit, "start closer"))
        return f"{in_words(name, steps)}: {ways}"
    if cause := what_is_not_finite(fit):
        return cause
    if name == "stagnation" and fit._setting.curve.has_loops:
        distance = float(fit._end.distance)
        where = ": the steps are small and the gradient is not"
        if np.isfinite(distance):
            where = f", an estimated {distance:.1g} standard errors from the minimum"
        return (
            f"it stands still{where}. `f` has loops, such as the solution of a "
            "differential equation: lower the tolerances at which they end"
        )
    return why_it_ended(fit.result).rstrip(".")


def _of_no_curvature(fit: "CurveFit") -> str:
    name = type(as_given(fit._setting.loss)).__name__
    return (
        f"the loss `{name}` has no curvature, so that each step is a gradient step and "
        "there are no standard errors: round the kinks of the loss, as by "
        "`jax.nn.softplus`"
    )


def are_determined(fit: "CurveFit") -> np.ndarray:
    """Whether each data set determines all parameters."""
    return np.all(np.asarray(fit._end.covariance.determined), axis=-1)


def _are_separated(fit: "CurveFit") -> np.ndarray:
    """Whether the likelihood of each data set reaches 1 only at infinity. This happens if
    all trials of each point end alike, and as the curve predicts. If the data were read
    in parts, y is unknown here and the loss alone decides, since no curve meets so many
    shares exactly."""
    loss, least = fit._setting.likelihood, np.finfo(fit._end.loss.dtype).eps
    if not isinstance(loss, BinomialNLL):
        return np.zeros(np.shape(fit._end.loss), bool)
    are_sure = np.asarray(fit._end.loss) <= least
    if fit._data is not None:
        y, counted = map(np.asarray, (fit._data.y, fit._data.counted))
        alike = (y == 0) | (y == np.asarray(loss.trials)) | (counted == 0)
        are_sure &= alike.all(axis=-1)
    return np.asarray(are_sure)


def _without_maximum(fit: "CurveFit") -> str:
    """Return why the likelihood of one data set has no maximum, or an empty string."""
    if _are_separated(fit):
        return (
            "the curve separates successes from failures, so that the likelihood has no "
            f"maximum: {bounded(fit)}, or use fewer parameters"
        )
    ways, words = escaping(fit), {1: "rises", -1: "falls"}
    if not ways.any():
        return ""
    which = [
        f"`{name}` {words[way]}"
        for name, way in zip(fit.names, ways.tolist(), strict=True)
        if way
    ]
    if len(which) > _MOST_NAMES + 1:
        which[_MOST_NAMES:] = [f"{len(which) - _MOST_NAMES} others do so, too,"]
    return (
        f"the likelihood has no maximum, and {' and '.join(which)} without end, as for a "
        "group whose counts are all 0, whose trials all end alike, or whose values are "
        f"all censored: {bounded(fit, ways != 0)}, or use fewer parameters"
    )


def _at_edge(fit: "CurveFit") -> str:
    """Return what to do if the fit of one data set ended where a rate is zero, or ""."""
    if (point := int(fit._end.edge)) < 0:
        return ""
    place = f"at point {point}"
    if fit._data is not None:
        place, *_ = place_of(point, fit._like_y())
    bounds = bounded(fit, words=" that keep the rate positive")
    return (
        f"the rate falls to 0 {place}, where the count is 0. The fit ends somewhere on "
        f"this edge, and its errors mean nothing: {bounds}, or let `f` return the "
        "logarithm of the rate, and use `gnlin.losses.PoissonNLL()`"
    )


def some_directions(fit: "CurveFit", separator: str) -> str:
    """Describe some of the directions in which the parameters do not change the curve."""
    found = fit.undetermined()
    more = len(found) - _MOST_DIRECTIONS
    others = [how_many(more, "other direction")] if more > 0 else []
    return separator.join([*found[:_MOST_DIRECTIONS], *others])


def complaint(fit: "CurveFit") -> str:
    """Return the warning that the user should see, or an empty string."""
    if isinstance(fit.chi_squared, Tracer):
        return ""
    if fit._setting.many:
        return _complaint_of_many(fit)
    if why := _without_maximum(fit) or _at_edge(fit):
        return f"`gnlin.curve_fit`: {why}."
    if failure := _failure(fit):
        if fit.losses is not None:
            starts = how_many(fit.losses.size, "start")
            return (
                f"`gnlin.curve_fit`: the best of {starts} has not converged, so that its "
                f"errors are not those of a minimum ({failure}): continue from it by "
                "`start=fit.parameters`."
            )
        return f"`gnlin.curve_fit` has not converged: {failure}."
    if fit._setting.is_robust:
        are_all = bool(np.isnan(fit._end.variance))
        if are_all or _part(fit, ignored) > _MOST:
            which = "all points" if are_all else _some(fit, ignored)
            ways = either(elsewhere(fit, "start closer"), "raise the loss's `delta`")
            return (
                f"`gnlin.curve_fit`: the loss ignores {which}, because they are far "
                f"from the curve: {ways}."
            )
        if _part(fit, outlying) > _MOST_OUTLYING:
            return f"`gnlin.curve_fit`: {_of_outliers(fit)}"
    if not fit._end.covariance.is_whole:
        return (
            "`gnlin.curve_fit`: the standard errors are too small, because they leave "
            "out the negative curvature of the loss, which is too large: use "
            "`fit.confidence_intervals()`."
        )
    if vanishing := of_vanishing_derivative(fit):
        return f"`gnlin.curve_fit`: {vanishing}."
    if not are_determined(fit):
        where = f"moving {some_directions(fit, '; or ')} does not change the curve"
        if fit._setting.likelihood is not None:
            where += ", or the likelihood between the bounds"
        return (
            "`gnlin.curve_fit`: the data do not determine all parameters: "
            f"{where}: {either('fix one of them', 'pass more points', elsewhere(fit))}."
        )
    if bend := _of_bent(fit):
        return f"`gnlin.curve_fit`: {bend}."
    if own := of_own_values(fit):
        return f"`gnlin.curve_fit`: {own}."
    if fit._setting.is_estimated and not float(fit.degrees_of_freedom) > 0:
        return (
            "`gnlin.curve_fit`: there are no more points than parameters, so the errors "
            f"cannot be estimated: {either(known_noise(fit), 'pass more points')}."
        )
    return ""


def _of_bent(fit: "CurveFit") -> str:
    """Return a sentence if the curve is far from linear within the errors, or ""."""
    setting, data = fit._setting, fit._data
    is_plain = setting.solver.retraction is None and not setting.is_robust
    if data is None or data.sigma_x is not None or setting.likelihood or not is_plain:
        return ""
    if (step := bent(setting, data, fit._end)) is None:
        return ""
    (way,) = described(step[None], fit._start, fit._end.parameters)
    return (
        "within the standard errors the curve is far from linear, as at a minimum where "
        f"two solutions meet, in the direction of {way}, so that these errors mean "
        "nothing: use `fit.confidence_intervals()`"
    )


def _of_outliers(fit: "CurveFit") -> str:
    """Say what many outliers mean, and what has not been tried yet."""
    some = f"{_some(fit, outlying)} are outliers"
    most = num_starts(fit)
    if most == 1:
        return (
            f"{some}, so that this is probably not the best minimum: "
            f"{either('start closer', many_starts(fit))}. If it is, `f` misses a part of "
            "the data."
        )
    number = starts_at_best(fit)
    some += f" at the best minimum of {most} starts, and {number} of them ended there"
    if number > 1:
        return f"{some}: `f` may miss a part of the data."
    return f"{some}, so that there may be a better one: {many_starts(fit)}."


def _part(fit: "CurveFit", of: Callable) -> np.ndarray:
    """Return the part of the numbers of y that have a property, of each data set."""
    return np.sum(of(fit), axis=-1) / np.maximum(fit._end.num_points, 1)


def _some(fit: "CurveFit", of: Callable) -> str:
    """Return in words how many points of one data set have a property."""
    return f"{total(points(fit, of(fit)))} of {how_many(num_points(fit), 'point')}"


def _complaint_of_many(fit: "CurveFit") -> str:
    end, are_separated = fit._end, _are_separated(fit)
    are_empty = np.asarray(end.is_empty)
    which = {
        "have no data, and NaN as parameters": are_empty,
        "have not converged (see `fit.converged`)": ~fit.converged & ~are_empty,
        "do not determine all parameters (see infinite `fit.standard_errors`)": (
            ~are_determined(fit) & ~are_empty
        ),
        "have successes that the curve separates from failures, so that their "
        "likelihood has no maximum": are_separated,
        "have a likelihood without a maximum, so that a parameter may go to infinity": (
            np.any(escaping(fit) != 0, axis=-1) & ~are_separated
        ),
        "end where a rate falls to 0, so that their errors mean nothing": (
            np.asarray(end.edge) >= 0
        ),
        "have a large negative curvature, which the standard errors leave out": (
            ~np.asarray(end.covariance.is_whole)
        ),
        "have a loss that ignores most points, because they are far from the curve": (
            _part(fit, ignored) > _MOST
        ),
        "call so many points outliers that this is probably not their best minimum": (
            _part(fit, outlying) > _MOST_OUTLYING
        ),
    }
    said = [
        f"{flags.sum()} of {flags.size} data sets {what}"
        for what, flags in which.items()
        if flags.any()
    ]
    return f"`gnlin.curve_fit`: {', and '.join(said)}." if said else ""


# Only parameters whose standard error exceeds this multiple of their value are tested.
_ASKED = 10


def escaping(fit: "CurveFit") -> np.ndarray:
    """Return 1 for each free parameter that may rise without end while the likelihood
    does not fall, -1 if it may fall without end, and else 0. The other parameters are
    held, or follow it according to the covariance.

    At the end of such a run the curvature is nearly zero, so that the standard error is
    huge, and a step of that size does not change the loss."""
    setting, end, data = fit._setting, fit._end, fit._data
    found = np.zeros(end.covariance.determined.shape, int)
    if setting.likelihood is None or data is None:
        return found
    # Each operation of JAX would be compiled on its own.
    rows = (*found.shape[:-1], -1)
    leaves = [np.reshape(leaf, rows) for leaf in jax.tree.leaves(end.parameters)]
    best, factor = np.concatenate(leaves, axis=-1), np.asarray(end.covariance.factor)
    known = factor @ factor.swapaxes(-1, -2)
    errors = np.sqrt(np.diagonal(known, axis1=-2, axis2=-1))
    asked = np.isfinite(errors) & (errors > _ASKED * np.abs(best))
    if not asked.any():
        return found
    units = np.where(asked, errors, 1)
    for k in np.flatnonzero(asked.reshape(-1, asked.shape[-1]).any(axis=0)):
        alone = np.zeros_like(best)
        alone[..., k] = units[..., k]
        for step in (alone, known[..., k] / units[..., k, None]):
            for sign in (-1, 1):
                flat = _are_flat(setting, fit._start, data, best, sign * step)
                flat = np.asarray(flat) & asked[..., k]
                found[..., k] = np.where(flat, sign, found[..., k])
    return found


@quickly
def _are_flat(
    setting: FitSettings,
    like: PyTree[Array],
    data: Data,
    best: Float[Array, "*n k"],
    step: Float[Array, "*n k"],
) -> Bool[Array, "*n"]:
    """Whether the likelihood of each data set hardly changes by a step that changes the
    curve.

    - `like`: parameters in their structure.
    """
    unravel = _tree.Structure.of(like).unravel

    def is_flat(data: Data, start: Array, step: Array) -> Bool[Array, ""]:
        posed = Posed.of(setting, data)
        here, there = (posed.at(unravel(flat)) for flat in (start, start + step))
        fall = posed.loss.decrease(here, there, posed.target)
        # A rate that moves by less than 1 is only close to 0, where its range ends.
        is_far = jnp.max(jnp.abs(there - here)) > 1
        box = flat_box(setting.solver.bounds, unravel(start))
        return (jnp.abs(fall) <= FLAT) & is_far & ~box.is_left(start, step)

    each = jax.vmap(is_flat, in_axes=(setting.axes, 0, 0)) if setting.many else is_flat
    return each(data, best, step)
