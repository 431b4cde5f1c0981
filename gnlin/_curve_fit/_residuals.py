"""What the residuals tell: outliers, and whether neighbours deviate alike."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from .._common._quickly import quickly
from ..losses import AbstractElementwiseLoss
from ..losses._robust import AbstractRobust
from ._curve import Data
from ._likelihood import is_known
from ._points import by_point, total
from ._problem import Posed


if TYPE_CHECKING:
    from ._result import CurveFit

# The least residual of an outlier, in standard deviations of the noise.
_OUTLYING = 3


def points(fit: "CurveFit", flags: Bool[np.ndarray, "*sets m"]) -> PyTree[np.ndarray]:
    """Return, in the structure of y, which points have a marked number. The numbers of a
    row are one point if a covariance connects them."""
    data, axes = fit._data, fit._setting.axes
    assert data is not None
    are_own = axes is not None and axes.sigma == 0
    is_covariance = data.sigma.ndim - are_own == 2
    return by_point(flags, fit._like_y(), None if is_covariance else data.x)


def num_points(fit: "CurveFit") -> int:
    """Return the number of points of one data set that have a number in the fit."""
    assert fit._data is not None
    return total(points(fit, np.asarray(fit._data.counted) > 0))


def outliers(fit: "CurveFit") -> PyTree:
    """Return the indices of points that are outliers of a robust loss, in the structure
    of y."""

    def indices(flags: np.ndarray) -> np.ndarray | tuple[np.ndarray, ...]:
        if fit._setting.many:
            return np.argwhere(flags)
        return np.flatnonzero(flags) if flags.ndim == 1 else np.nonzero(flags)

    return jax.tree.map(indices, points(fit, outlying(fit)))


def outlying(fit: "CurveFit") -> Bool[np.ndarray, "*sets m"]:
    """Return which numbers of y are outliers of a robust loss."""
    noise = np.asarray(fit._end.noise)[..., None]
    is_far = lambda size, pull: (size > _OUTLYING * noise) & (pull < size / 3)
    return _where_robust(fit, is_far)


def ignored(fit: "CurveFit") -> Bool[np.ndarray, "*sets m"]:
    """Return which numbers of y have no weight in a robust loss, although the curve
    misses them."""
    return _where_robust(fit, lambda size, pull: (size != 0) & (pull == 0))


def _where_robust(fit: "CurveFit", holds: Callable) -> Bool[np.ndarray, "*sets m"]:
    """Return for which numbers of y a condition holds: for none if the loss is not
    robust, or the data were read in parts.

    - `holds`: takes the sizes of the residuals, and of the loss's derivatives by them, in
        units of sigma.
    """
    loss, data = fit._setting.loss, fit._data
    if data is None or not isinstance(loss, AbstractRobust):
        return np.zeros((*np.shape(fit._end.loss), 1), bool)
    residuals = np.asarray(fit.residuals)
    unit = np.asarray(1.0 if data.spread is None else data.spread)[..., None]
    pulls = unit * np.asarray(_derivative(loss, residuals / unit))
    return holds(np.abs(residuals), np.abs(pulls))


@quickly
def _derivative(loss: AbstractRobust, residuals: Array) -> Array:
    return loss.derivative(residuals, jnp.zeros(()))


def signs_along_x(fit: "CurveFit", data: Data) -> np.ndarray:
    """Return the signs of the residuals, which are sorted by x if x is one vector."""
    signs, leaves = np.sign(np.asarray(fit.residuals)), jax.tree.leaves(data.x)
    order = np.arange(signs.size)
    if len(leaves) == 1 and leaves[0].shape == signs.shape:
        order = np.argsort(np.asarray(leaves[0]), kind="stable")
    loss = fit._setting.likelihood
    if loss is not None:
        if not is_known(loss):
            raise ValueError(
                "`runs_test` needs the distribution of y: define `cdf` of "
                f"`{type(loss).__name__}`, or look at `fit.residuals`."
            )
        posed, uniform = Posed.of(fit._setting, data), np.zeros(signs.size)
        uniform[order] = np.random.default_rng(0).uniform(size=signs.size)
        f, y = map(np.asarray, (posed.at(fit._end.parameters), posed.target))
        signs = np.asarray(data.counted) * signs_of(loss, f, y, uniform)
    return signs[order]


def runs_test(signs: np.ndarray) -> float:
    """Return the two-sided p-value for the number of runs of equal signs, by the normal
    approximation with a correction for continuity.

    ??? cite "Reference"

        A. Wald and J. Wolfowitz, *On a test whether two samples are from the same
        population*, Ann. Math. Statist. 11 (1940).
    """
    signs = signs[signs != 0]
    above, below = int(np.sum(signs > 0)), int(np.sum(signs < 0))
    number = above + below
    if above == 0 or below == 0 or number < 3:
        return math.nan
    runs = 1 + int(np.sum(signs[1:] != signs[:-1]))
    mean = 1 + 2 * above * below / number
    variance = (mean - 1) * (mean - 2) / (number - 1)
    far = max(abs(runs - mean) - 0.5, 0) / math.sqrt(variance)
    return math.erfc(far / math.sqrt(2))


def signs_of(
    loss: AbstractElementwiseLoss, f: np.ndarray, y: np.ndarray, uniform: np.ndarray
) -> np.ndarray:
    """Return the signs of randomised quantile residuals, which are random under the true
    model also for small counts and censored values (Dunn and Smyth, 1996).

    - `uniform`: random numbers between 0 and 1.
    """
    low, high = loss.cdf(f, y)
    return np.sign(low + (high - low) * uniform - 0.5)
