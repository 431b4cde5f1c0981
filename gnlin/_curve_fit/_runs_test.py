"""A test of whether neighbouring points deviate in the same direction."""

import math

import numpy as np

from ..losses import AbstractElementwiseLoss


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


def is_known(loss: AbstractElementwiseLoss) -> bool:
    """Whether the distribution of y is known."""
    return type(loss).cdf is not AbstractElementwiseLoss.cdf


def signs_of(
    loss: AbstractElementwiseLoss, f: np.ndarray, y: np.ndarray, uniform: np.ndarray
) -> np.ndarray:
    """Return the signs of randomised quantile residuals, which are random under the true
    model also for small counts and censored values.

    - `uniform`: random numbers between 0 and 1.

    ??? cite "Reference"

        P. K. Dunn and G. K. Smyth, *Randomized quantile residuals*, J. Comput. Graph.
        Stat. 5 (1996).
    """
    low, high = loss.cdf(f, y)
    return np.sign(low + (high - low) * uniform - 0.5)
