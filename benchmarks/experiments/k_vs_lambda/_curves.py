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


def difference(a: Runs, b: Runs) -> Float[ndarray, " seeds"]:
    """Of test error, without its sign, relative to the range of the mean curves: the mean
    over the strengths at which every run is stable."""
    usable = _usable(a, b)
    if not usable.any():
        return np.full(len(a["test_error"]), np.nan)
    apart = np.abs(a["test_error"] - b["test_error"])[:, usable]
    return apart.mean(axis=1) / _range(a, b)


def agreeing(a: Runs, b: Runs) -> tuple[float, float] | None:
    """The range of damping, of all without a gap the one with the most strengths, in
    which the mean curves agree; `None` if they do so nowhere."""
    apart = np.abs(mean_error(a) - mean_error(b)) / _range(a, b)
    best, start = slice(0), None
    for i, close in enumerate([*(apart <= CLOSE), False]):
        if close and start is None:
            start = i
        if not close and start is not None:
            if i - start > best.stop - (best.start or 0):
                best = slice(start, i)
            start = None
    dampings = a["damping"][0][best]
    return (float(dampings.min()), float(dampings.max())) if len(dampings) else None
