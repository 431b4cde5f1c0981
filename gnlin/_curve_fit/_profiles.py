"""Confidence intervals from the profile likelihood."""

from typing import Any, NamedTuple, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, PyTree

from .._common import _tree
from .._common._checks import as_scalar
from .._common._progress import Bar
from .._common._warn import warn
from .._common._words import by_name, how_many, rounded
from ._curve import Data, rounding
from ._problem import flat_box
from ._program import fitted


if TYPE_CHECKING:
    from ._result import CurveFit


# Relative tolerance at which an end of an interval counts as found.
_NEAR = 1e-5
# After the last refit, a bracket of this relative width is accepted, too: the loss may be
# known only to rounding.
_ROUGHLY = 1e-3
# The relative tolerance of refits, times the square root of the number of points. It may
# leave a decrease of 1e-5 of the noise's variance. Refits of 22 parameters then take half
# the steps, and the ends differ by 1e-9 of the intervals.
_RTOL = 3e-3
_MOST_REFITS = 30
# The most steps of all refits for one end, and the same as a multiple of the fit's steps,
# if that is more. For a stiff equation with 11 parameters most ends took 4 to 20 steps,
# and one at a bound 60. Where `f` is hardly finite, each refit may go on for hundreds.
_MOST_STEPS, _MORE_STEPS = 200, 10
# One refit takes at most this part of the steps that are left, or this part of all steps
# if that is more. Far beyond an end, refits may take hundreds, and tell nothing about it.
_PART, _LEAST_PART = 4, 10
# A place whose refit was cut short is tried again from this part of the way to it.
_CLOSE = 0.9
# The search for an end stops this many standard errors from the best fit.
_FARTHEST = 1e4
# If a parameter's standard error is larger than this multiple of its value, and the rise
# of the loss there differs from the prediction by more than this factor, the ends are
# found by bisection in units of the value.
_ASTRAY = 1e3
# The most ends at bounds of other parameters that a warning describes.
_MOST_ENDS = 4


class Interval(NamedTuple):
    """The ends of confidence intervals, in the structure of the parameters."""

    low: PyTree
    high: PyTree

    def __str__(self) -> str:
        """The known ends by their names, with all the digits that their distance
        leaves."""

        def both(low: Any, high: Any) -> str:
            ends = f"{rounded(low, high - low)} to {rounded(high, high - low)}"
            return "" if np.isnan(low) and np.isnan(high) else ends

        return by_name(both, *self)


class _Refit(NamedTuple):
    """A fit with one parameter held.

    - `distance`: the square root of the loss's rise, in standard errors.
    - `start`: the start of the next refit.
    - `num_steps`: how many steps it took.
    - `fault`: what is wrong there, or "".
    - `is_cut`: whether it was cut short, so that `distance` is an upper bound.
    - `sides`: -1 for other parameters that have come to their lower bound, 1 to their
        upper, else 0.
    """

    distance: float
    start: np.ndarray
    num_steps: int = 0
    fault: str = ""
    is_cut: bool = False
    sides: Any = ()


def profiles(
    fit: "CurveFit", data: Data, quantile: float, asked: Bool[np.ndarray, " k"]
) -> Interval:
    """Return the intervals of the parameters that are asked for, and NaN for the others.

    Each end is found by the secant method on the square root of the loss's rise, which is
    nearly linear in a parameter that is not at a bound."""
    setting, end = fit._setting, fit._end
    flat, unravel = _tree.ravel_pytree(end.parameters)
    best, dtype = np.asarray(flat), flat.dtype
    errors = np.sqrt(np.diagonal(np.asarray(fit.covariance_matrix)))
    is_inner = np.asarray(end.at_bound) == 0
    none = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan), setting.curve.fixed)
    of_all = lambda e: eqx.combine(unravel(jnp.asarray(e, dtype)), none)
    assert fit.residuals is not None  # fits in parts have no profiles
    is_exact = jnp.max(jnp.abs(fit.residuals)) <= rounding(data)
    if is_exact and setting.is_estimated:  # The loss rises in units of rounding.
        width = np.where(is_inner & asked, quantile * errors, np.nan)
        return Interval(of_all(best - width), of_all(best + width))
    box = flat_box(setting.solver.bounds, end.parameters)
    unit_of_loss = float(end.bend * end.variance)
    # At a bound the loss has a slope. If the loss were linear, the end would be at this
    # distance times the quantile.
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = np.abs(np.asarray(end.multipliers))
        if_linear = 0.5 * quantile * unit_of_loss / slopes

    rtol: Any = as_scalar(max(setting.solver.rtol, _RTOL / fit.residuals.size**0.5))
    loosely = eqx.tree_at(lambda s: s.solver.rtol, setting, rtol)

    def risen(k: int, value: float, start: np.ndarray, most: int) -> _Refit:
        """Refit with parameter `k` held at a value, in at most so many steps. The refits
        run the program of the fit, because one program for all takes longer to
        compile."""
        start = start.copy()
        start[k] = value
        marks = unravel(jnp.zeros_like(flat).at[k].set(1))
        values = unravel(jnp.asarray(start))
        held = jax.tree.map(lambda x: x != 0, marks), values
        try:
            one = data._replace(held=held)
            refit, found = fitted(loosely, one, values, num_steps=most)
            num_steps = int(found["num_steps"])
        except eqx.EquinoxRuntimeError:
            return _Refit(np.inf, start, fault="`f` raises an error")
        rise = float(2 * (refit.loss - end.loss) / unit_of_loss)
        if refit.nonfinite.of_curve or np.isnan(rise):
            what = "`f`" if refit.nonfinite.of_curve else "the loss"
            return _Refit(np.inf, start, num_steps, f"{what} is not finite")
        if np.isfinite(rise):
            start = np.array(_tree.ravel_pytree(refit.parameters)[0])
        sides = np.where(is_inner, np.asarray(refit.at_bound), 0)
        sides[k] = 0
        distance, is_cut = max(rise, 0.0) ** 0.5, num_steps >= most
        return _Refit(distance, start, num_steps, is_cut=is_cut, sides=sides)

    def told(k: int, sign: int, value: float, refit: _Refit) -> float:
        """Return an end, and note which bounds of other parameters hold there."""
        others = [
            f"{fit.names[j]} is at its {'upper' if refit.sides[j] > 0 else 'lower'} bound"
            for j in np.flatnonzero(refit.sides)
        ]
        if others:
            end = "upper" if sign > 0 else "lower"
            where = " and ".join(others)
            bounded.append(f"The {end} end of {fit.names[k]} lies where {where}")
        return value

    def between(near: float, far: float, bound: float, unit: float) -> str:
        """Say where an end lies, with the bound if no refit has passed the end."""
        far = bound if np.isinf(far) else far
        if np.isinf(far):
            return f"it lies {'above' if far > 0 else 'below'} {rounded(near, unit)}"
        low, high = (rounded(end, unit) for end in sorted((near, far)))
        return f"it lies between {low} and {high}"

    def end_of(k: int, sign: int) -> float:
        centre, unit, start = float(best[k]), float(errors[k]), best
        bound = float((box.upper if sign > 0 else box.lower)[k])
        reach = sign * (bound - centre)
        if not is_inner[k]:
            if reach == 0:
                return centre
            unit = if_linear[k]
        if not (np.isfinite(unit) and unit > 0):
            return np.nan
        # A bracket of the end, and the step into it, in standard errors. Beyond `cut` a
        # refit was cut short above the target, and may in truth be below it.
        near, far, cut, step = 0.0, np.inf, np.inf, quantile
        value, fault, refit = centre, "", _Refit(0.0, start)
        last_step, last_distance, is_astray = 0.0, 0.0, False
        left = most_steps
        for number in range(_MOST_REFITS):
            step = min(step, reach / unit)
            is_at_bound = step >= reach / unit
            value = bound if is_at_bound else centre + sign * step * unit
            part = max(left // _PART, most_steps // _LEAST_PART, 1)
            refit = risen(k, value, start, min(left, part))
            left -= refit.num_steps
            bar.note(done, f"{fit.names[k]}, refit {number + 1}")
            distance, is_below = refit.distance, refit.distance < quantile
            if is_below and is_at_bound:
                return bound
            if is_below and step >= _FARTHEST:
                return sign * np.inf
            if abs(distance - quantile) <= _NEAR * quantile and not refit.is_cut:
                return told(k, sign, value, refit)
            is_huge = number == 0 and left > 0 and unit > _ASTRAY * abs(centre) > 0
            if is_huge and not 1 / _ASTRAY <= distance / quantile <= _ASTRAY:
                is_astray, unit = True, abs(centre)
                continue
            is_unknown = refit.is_cut and not is_below
            if is_below:  # A refit that is above may have ended at another minimum.
                near, start = step, refit.start
            elif is_unknown:
                cut = step
            else:
                far, fault = step, refit.fault
            if left <= 0 or near >= (1 - _NEAR) * far:  # The loss jumps here.
                break
            if near >= _CLOSE * cut:
                cut = np.inf
            ceiling, secant = min(far, cut), np.inf
            if not is_unknown:
                slope = (distance - last_distance) / (step - last_step)
                secant = step + (quantile - distance) / slope if slope > 0 else np.inf
                last_step, last_distance = step, distance
            widest = 4 * max(near, quantile)
            middle = widest if np.isinf(ceiling) else 0.5 * (near + ceiling)
            # Bisect from time to time, because secants may narrow a bracket slowly.
            is_inside = near < secant < min(ceiling, widest) and not is_astray
            halves = np.isfinite(ceiling) and number % 3 == 2
            step = secant if is_inside and not halves else middle
        is_faulty = fault and far < reach / unit  # A bound itself may be such a place.
        if near >= (1 - _ROUGHLY) * far and not is_faulty:
            return told(k, sign, value, refit)
        if is_faulty and left > 0:
            why = f"{fault} beyond {rounded(centre + sign * far * unit, unit)}"
        else:
            passed = centre + sign * far * unit
            why = between(centre + sign * near * unit, passed, bound, unit)
            if left <= 0:
                why = f"its refits took all their {most_steps} steps, and {why}"
        lost.append(
            f"An end of the confidence interval of {fit.names[k]} was not found: {why}."
        )
        return np.nan

    most_steps = max(_MOST_STEPS, _MORE_STEPS * int(fit.num_steps))
    lost: list[str] = []
    bounded: list[str] = []
    low, high = np.full((2, best.size), np.nan)
    wanted = [(k, sign) for k in np.flatnonzero(asked).tolist() for sign in (-1, 1)]
    done = 0
    with Bar(len(wanted), True, "end") as bar:
        try:
            for k, sign in wanted:
                (low if sign < 0 else high)[k] = end_of(k, sign)
                done += 1
        except KeyboardInterrupt:
            k, sign = wanted[done]
            lost.append(
                f"`confidence_intervals` was interrupted after {done} of "
                f"{how_many(len(wanted), 'end')}. The others are NaN, from the "
                f"{'upper' if sign > 0 else 'lower'} end of {fit.names[k]} on."
            )
    if len(bounded) > _MOST_ENDS + 1:
        bounded[_MOST_ENDS:] = [f"so do {len(bounded) - _MOST_ENDS} others"]
    if bounded:
        lost.append(f"{'; '.join(bounded)}. With wider bounds it may be elsewhere.")
    if lost:
        warn(" ".join(lost))
    return Interval(of_all(low), of_all(high))
