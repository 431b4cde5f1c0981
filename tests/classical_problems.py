"""The small classical problems, padded to one shape."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from benchmarks.data import classical


NAMES = (
    "rosenbrock-2",
    "freudenstein_roth-2",
    "brown_badly_scaled-2",
    "beale-2",
    "jennrich_sampson-2",
    "helical_valley-3",
    "bard-3",
    "gaussian-3",
    "meyer-3",
    "box-3",
    "powell_singular-4",
    "wood-4",
    "kowalik_osborne-4",
    "brown_dennis-4",
)
PROBLEMS = tuple(problem for problem in classical.PROBLEMS if problem.name in NAMES)
NUM_RESIDUALS, NUM_PARAMETERS = 20, 4


def padded(problem: classical.Problem) -> Callable:
    """Return the residuals, padded with zeros, of padded parameters, so that all problems
    have one shape."""

    def fn(y):
        r = problem.residuals(y)
        return jnp.pad(r, (0, NUM_RESIDUALS - r.size))

    return fn


def start(problem: classical.Problem, far: float = 1.0) -> np.ndarray:
    """Return the usual start, multiplied by `far`."""
    y = problem.from_far(far)
    return np.pad(y, (0, NUM_PARAMETERS - y.size))
