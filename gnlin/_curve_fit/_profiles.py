"""Confidence intervals from the profile likelihood."""

from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._common import _tree
from .._linearisation._bounds import Box
from ._curve import Data, rounding
from ._program import fitted


if TYPE_CHECKING:
    from ._result import CurveFit


# Relative tolerance at which an end of an interval counts as found.
_NEAR = 1e-5
_MOST_REFITS = 30
# The search for an end stops this many standard errors from the best fit.
_FARTHEST = 1e4
# If a parameter's standard error is larger than this multiple of its value, and the loss
# there this many times smaller or larger than predicted, its ends are sought by
# bisection in units of its value.
_ASTRAY = 1e3


def profiles(fit: "CurveFit", data: Data, quantile: float) -> tuple[PyTree, PyTree]:
    """Return the lower and upper ends of all intervals.

    Each end is found by the secant method on the square root of the loss's rise, which is
    nearly linear in the parameter. All ends are refitted at the same time."""
    setting, end = fit._setting, fit._end
    best, unravel = _tree.ravel_pytree(end.parameters)
    k, dtype = best.size, best.dtype
    errors = jnp.sqrt(jnp.diagonal(fit.covariance_matrix))
    known = np.asarray(jnp.isfinite(errors) & (errors > 0) & (end.at_bound == 0))
    none = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan), setting.fixed)
    of_all = lambda e: eqx.combine(unravel(jnp.asarray(e, dtype)), none)
    assert fit.residuals is not None  # fits in parts have no profiles
    is_exact = jnp.max(jnp.abs(fit.residuals)) <= rounding(data)
    if is_exact and setting.is_estimated:  # The loss rises in units of rounding.
        width = jnp.where(end.at_bound == 0, quantile * errors, jnp.nan)
        return of_all(best - width), of_all(best + width)
    low, high = (jnp.full(k, s * jnp.inf, dtype) for s in (-1, 1))
    if setting.solver.bounds is not None:
        box = Box.of(setting.solver.bounds, end.parameters)
        low, high = (_tree.ravel_pytree(b)[0] for b in (box.lower, box.upper))
    factor = end.factor(setting)
    which = np.concatenate([np.arange(k), np.arange(k)])
    sign = np.concatenate([-np.ones(k), np.ones(k)])
    # The end of the last refit of each row, where its next refit starts.
    latest = np.tile(np.asarray(best), (2 * k, 1))
    found, distance = ~known[which], np.zeros(2 * k)

    def risen(at: np.ndarray) -> None:
        """Refit with one parameter of each row held at the value given, and note how far
        the loss has risen, as a square root, in standard errors. The refits run the
        program of the fit, because one program for all takes longer to compile."""
        for row in np.flatnonzero(~found):
            latest[row, which[row]] = at[row]
            start = unravel(jnp.asarray(latest[row], dtype))
            one = unravel(jnp.zeros(k, dtype).at[which[row]].set(1))
            held = jax.tree.map(lambda x: x != 0, one), start
            refit, _ = fitted(setting, data, start, held=held)
            rise = float(2 * (refit.loss - end.loss) / (end.bend * factor))
            distance[row] = np.inf if np.isnan(rise) else max(rise, 0.0) ** 0.5
            if np.isfinite(rise):
                latest[row] = np.asarray(_tree.ravel_pytree(refit.parameters)[0])

    centre, unit = np.asarray(best)[which], np.asarray(jnp.where(known, errors, 1))[which]
    reach = np.where(
        sign < 0, centre - np.asarray(low)[which], np.asarray(high)[which] - centre
    )
    # Brackets of the ends, and the steps between them, in standard errors.
    near, far = np.zeros(2 * k), np.full(2 * k, np.inf)
    step = np.full(2 * k, quantile)
    astray = np.zeros(2 * k, bool)
    for number in range(_MOST_REFITS):
        step = np.minimum(step, reach / unit)
        risen(centre + sign * step * unit)
        found |= np.abs(distance - quantile) <= _NEAR * quantile
        found |= (distance < quantile) & (step >= np.minimum(reach / unit, _FARTHEST))
        if found.all():
            break
        if number == 0:
            is_huge = (unit > _ASTRAY * np.abs(centre)) & (centre != 0)
            off = (distance > _ASTRAY * quantile) | (_ASTRAY * distance < quantile)
            astray = is_huge & off & ~found
            unit = np.where(astray, np.abs(centre), unit)
            latest[astray] = np.asarray(best)
            if astray.any():
                continue
        below = distance < quantile
        near, far = np.where(below, step, near), np.where(below, far, step)
        with np.errstate(all="ignore"):
            secant = step * quantile / distance
        widest = 4 * np.maximum(near, quantile)
        middle = np.where(np.isinf(far), widest, 0.5 * (near + far))
        inside = (secant > near) & (secant < np.minimum(far, widest)) & ~astray
        step = np.where(found, step, np.where(inside, secant, middle))
    met = np.abs(distance - quantile) <= 1e-3 * quantile
    met |= np.isfinite(reach) & (step >= reach / unit)  # at a bound
    ends = np.where(met, centre + sign * step * unit, sign * np.inf)
    ends = np.where(known[which], ends, np.nan)
    return of_all(ends[:k]), of_all(ends[k:])
