"""Whether neighbouring points deviate alike."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..losses import BinomialNLL, NegativeBinomialNLL, PoissonNLL, TobitNLL
from ._likelihood import in_units_of_y


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


def is_known(loss: Any) -> bool:
    """Whether the distribution of y is known."""
    return isinstance(loss, PoissonNLL | BinomialNLL | NegativeBinomialNLL | TobitNLL)


def signs_of(
    loss: Any, outputs: np.ndarray, y: np.ndarray, uniform: np.ndarray
) -> np.ndarray:
    """Return the signs of randomised quantile residuals, which are random under the true
    model also for small counts and censored values.

    - `uniform`: random numbers between 0 and 1.

    ??? cite "Reference"

        P. K. Dunn and G. K. Smyth, *Randomized quantile residuals*, J. Comput. Graph.
        Stat. 5 (1996).
    """
    low, high = _probabilities(loss, outputs, y)
    return np.sign(low + (high - low) * uniform - 0.5)


def _probabilities(
    loss: Any, outputs: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities of a value below y, and of one not above y. For a censored
    value these are the ends of the range that it may be in."""
    from scipy.stats import binom, nbinom, norm, poisson  # slow to import

    if isinstance(loss, TobitNLL):
        at, side = norm.cdf(y - outputs), np.asarray(loss.censored)
        return np.where(side < 0, 0, at), np.where(side > 0, 1, at)
    mean = np.asarray(in_units_of_y(loss, jnp.asarray(outputs)))
    if isinstance(loss, PoissonNLL):
        of_y = poisson(mean)
    elif isinstance(loss, BinomialNLL):
        of_y = binom(np.asarray(loss.trials), mean)
    else:
        spread = loss.dispersion
        of_y = nbinom(1 / spread, 1 / (1 + spread * mean))
    return of_y.cdf(np.ceil(y) - 1), of_y.cdf(y)
