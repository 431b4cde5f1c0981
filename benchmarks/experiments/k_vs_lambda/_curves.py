"""How well the two curves agree."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpy import ndarray

from ...experiment import Runs


DESCENT, DAMPED = "iterative-linearisation", "damped-gauss-newton"
SOLVERS = (DESCENT, DAMPED)
CLOSE = 0.05
"""Of the range of the curves: what they differ by where they agree."""
ALIKE = 0.1
"""Where the largest eigenvalue is less of lambda, 1 - exp(-x) and x / (1 + x) differ by
less than 5 %, and the filters are one by construction."""

PerStrength = Float[ndarray, " strengths"]


def eigenvalues(kernel: Float[Array, "n c n c"]) -> Float[Array, " m"]:
    m = kernel.shape[0] * kernel.shape[1]
    return jnp.linalg.eigvalsh(kernel.reshape(m, m))


def num_diverged(runs: Runs) -> ndarray:
    """Of each strength."""
    return np.sum(runs["stable"] == 0, axis=0)


def where_stable(runs: Runs, values: PerStrength) -> PerStrength:
    """NaN at the strengths at which a run diverged."""
    return np.where(num_diverged(runs) == 0, values, np.nan)


def mean_error(runs: Runs) -> PerStrength:
    return where_stable(runs, runs["test_error"].mean(axis=0))


def _usable(a: Runs, b: Runs) -> Bool[ndarray, " strengths"]:
    return (num_diverged(a) == 0) & (num_diverged(b) == 0)


def _range(a: Runs, b: Runs) -> float:
    """That the two curves of mean error span."""
    usable = _usable(a, b)
    span = np.ptp([mean_error(a)[usable], mean_error(b)[usable]]) if usable.any() else 0
    return float(span) or np.nan


def errors_where_tested(a: Runs, b: Runs) -> Float[ndarray, "seeds 2 strengths"]:
    """Test errors of both; NaN where a run diverged, and where the filters are one by
    construction."""
    largest = np.maximum(a["largest_eigenvalue"], b["largest_eigenvalue"]).max(axis=0)
    tested = _usable(a, b) & (largest > ALIKE * a["damping"][0])
    return np.where(tested, np.stack([a["test_error"], b["test_error"]], axis=1), np.nan)


def share_agreeing(errors: Float[ndarray, "seeds 2 strengths"]) -> float:
    """Of the strengths that are tested, those in the longest stretch without a gap at
    which the mean curves agree."""
    means = errors.mean(axis=0)
    tested = np.isfinite(means).all(axis=0)
    if not tested.any():
        return np.nan
    close = np.abs(means[0] - means[1]) <= CLOSE * np.ptp(means[:, tested])
    return len(range(*_longest(close).indices(len(close)))) / tested.sum()


def agreeing(a: Runs, b: Runs) -> tuple[float, float] | None:
    """The range of damping, of all without a gap the one with the most strengths, in
    which the mean curves agree; `None` if they do so nowhere."""
    apart = np.abs(mean_error(a) - mean_error(b)) / _range(a, b)
    dampings = a["damping"][0][_longest(apart <= CLOSE)]
    return (float(dampings.min()), float(dampings.max())) if len(dampings) else None


def _longest(close: Bool[ndarray, " strengths"]) -> slice:
    """Stretch without a gap; the first of several."""
    best, start = slice(0, 0), None
    for i, here in enumerate([*close, False]):
        if here and start is None:
            start = i
        if not here and start is not None:
            if i - start > best.stop - best.start:
                best = slice(start, i)
            start = None
    return best
