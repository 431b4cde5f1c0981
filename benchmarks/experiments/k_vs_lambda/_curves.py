"""How well the two curves agree, and by how much they part."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpy import ndarray

from ...experiment import Runs
from ...verdicts import interval


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


def _both(
    a: Runs, b: Runs, name: str, where: Bool[ndarray, " strengths"]
) -> Float[ndarray, "seeds 2 strengths"]:
    return np.where(where, np.stack([a[name], b[name]], axis=1), np.nan)


def where_tested(
    a: Runs, b: Runs, name: str = "test_error"
) -> Float[ndarray, "seeds 2 strengths"]:
    """Of both; NaN where a run diverged, and where the filters are one by
    construction."""
    largest = np.maximum(a["largest_eigenvalue"], b["largest_eigenvalue"]).max(axis=0)
    tested = _usable(a, b) & (largest > ALIKE * a["damping"][0])
    return _both(a, b, name, tested)


def share_agreeing(errors: Float[ndarray, "seeds 2 strengths"]) -> float:
    """Of the strengths that are tested, those in the longest stretch without a gap at
    which the mean curves agree."""
    means = errors.mean(axis=0)
    tested = np.isfinite(means).all(axis=0)
    if not tested.any():
        return np.nan
    close = np.abs(means[0] - means[1]) <= CLOSE * np.ptp(means[:, tested])
    return len(range(*_longest(close).indices(len(close)))) / tested.sum()


def excess(
    a: Runs, b: Runs, name: str = "test_error"
) -> Float[ndarray, "seeds strengths"]:
    """log10 of the first's over the second's, where that is tested."""
    with np.errstate(divide="ignore"):
        return -np.diff(np.log10(where_tested(a, b, name)), axis=1)[:, 0]


def more_dead(a: Runs, b: Runs) -> Float[ndarray, "seeds strengths"]:
    """The share of the first's hidden units that are dead less that of the second's."""
    return -np.diff(where_tested(a, b, "dead"), axis=1)[:, 0]


def mean_of_seed(values: Float[ndarray, "seeds strengths"]) -> Float[ndarray, " seeds"]:
    """Over what is known."""
    known = np.isfinite(values)
    number = known.sum(axis=1)
    total = np.where(known, values, 0).sum(axis=1)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def ratio(errors: Float[ndarray, "seeds 2 strengths"]) -> PerStrength:
    """Of the means."""
    means = errors.mean(axis=0)
    return means[0] / means[1]


def largest_ratio(errors: Float[ndarray, "seeds 2 strengths"]) -> float:
    known = ratio(errors)[np.isfinite(ratio(errors))]
    return float(known.max()) if len(known) else np.nan


def agreeing(a: Runs, b: Runs) -> tuple[float, float] | None:
    """The range of damping, of all without a gap the one with the most strengths, in
    which the mean curves agree; `None` if they do so nowhere."""
    low, high = _ends(a["damping"][0], _both(a, b, "test_error", _usable(a, b)))
    return None if np.isnan(low) else (low, high)


def intervals_of_ends(a: Runs, b: Runs) -> list[tuple[float, float]]:
    """Of that range's ends, over the seeds; NaN where in a resample nothing agrees."""
    errors = _both(a, b, "test_error", _usable(a, b))
    dampings = a["damping"][0]
    return [interval(errors, lambda x, i=i: _ends(dampings, x)[i]) for i in (0, 1)]


def _ends(
    dampings: PerStrength, errors: Float[ndarray, "seeds 2 strengths"]
) -> tuple[float, float]:
    means = errors.mean(axis=0)
    known = means[np.isfinite(means)]
    span = np.ptp(known) if len(known) else 0
    found = dampings[_longest(np.abs(means[0] - means[1]) <= CLOSE * span)]
    if span == 0 or len(found) == 0:
        return np.nan, np.nan
    return float(found.min()), float(found.max())


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
