"""Least-squares problems of the literature whose minima are known.

J. J. Moré, B. S. Garbow and K. E. Hillstrom, *Testing unconstrained optimization
software*, ACM Trans. Math. Softw. 7 (1981); the numbers are theirs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np


class Classical(NamedTuple):
    residuals: Callable
    start: tuple[float, ...]
    minima: tuple[float, ...]  # of the sum of squares: the global one, and local ones


def rosenbrock(x):
    return 10 * (x[1] - x[0] ** 2), 1 - x[0]


def freudenstein_roth(x):
    return (
        -13 + x[0] + ((5 - x[1]) * x[1] - 2) * x[1],
        -29 + x[0] + ((x[1] + 1) * x[1] - 14) * x[1],
    )


def brown_badly_scaled(x):
    return x[0] - 1e6, x[1] - 2e-6, x[0] * x[1] - 2


def beale(x):
    values = zip((1, 2, 3), (1.5, 2.25, 2.625), strict=True)
    return tuple(y - x[0] * (1 - x[1] ** i) for i, y in values)


def jennrich_sampson(x):
    i = np.arange(1.0, 11.0)
    return 2 + 2 * i - (jnp.exp(i * x[0]) + jnp.exp(i * x[1]))


def helical_valley(x):
    turn = jnp.arctan2(x[1], x[0]) / (2 * np.pi)
    return 10 * (x[2] - 10 * turn), 10 * (jnp.hypot(x[0], x[1]) - 1), x[2]


def bard(x):
    y = [14, 18, 22, 25, 29, 32, 35, 39, 37, 58, 73, 96, 134, 210, 439]
    u = np.arange(1.0, 16.0)
    v = 16 - u
    return np.array(y) / 100 - (x[0] + u / (v * x[1] + np.minimum(u, v) * x[2]))


def gaussian(x):
    half = [0.0009, 0.0044, 0.0175, 0.0540, 0.1295, 0.2420, 0.3521]
    y = np.array([*half, 0.3989, *half[::-1]])
    t = (8 - np.arange(1.0, 16.0)) / 2
    return x[0] * jnp.exp(-x[1] * (t - x[2]) ** 2 / 2) - y


def meyer(x):
    y = [34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744]
    y += [8261, 7030, 6005, 5147, 4427, 3820, 3307, 2872]
    t = 45 + 5 * np.arange(1.0, 17.0)
    return x[0] * jnp.exp(x[1] / (t + x[2])) - np.array(y, float)


def box(x):
    t = np.arange(1.0, 11.0) / 10
    return jnp.exp(-t * x[0]) - jnp.exp(-t * x[1]) - x[2] * (np.exp(-t) - np.exp(-10 * t))


def powell_singular(x):
    return (
        x[0] + 10 * x[1],
        5**0.5 * (x[2] - x[3]),
        (x[1] - 2 * x[2]) ** 2,
        10**0.5 * (x[0] - x[3]) ** 2,
    )


def wood(x):
    return (
        10 * (x[1] - x[0] ** 2),
        1 - x[0],
        90**0.5 * (x[3] - x[2] ** 2),
        1 - x[2],
        10**0.5 * (x[1] + x[3] - 2),
        10**-0.5 * (x[1] - x[3]),
    )


def kowalik_osborne(x):
    y = [1957, 1947, 1735, 1600, 844, 627, 456, 342, 323, 235, 246]
    u = np.array([4, 2, 1, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625])
    return np.array(y) / 1e4 - x[0] * (u**2 + u * x[1]) / (u**2 + u * x[2] + x[3])


def brown_dennis(x):
    t = np.arange(1.0, 21.0) / 5
    first = x[0] + t * x[1] - np.exp(t)
    return first**2 + (x[2] + x[3] * np.sin(t) - np.cos(t)) ** 2


PROBLEMS = (
    Classical(rosenbrock, (-1.2, 1), (0,)),
    Classical(freudenstein_roth, (0.5, -2), (0, 48.9842)),
    Classical(brown_badly_scaled, (1, 1), (0,)),
    Classical(beale, (1, 1), (0,)),
    Classical(jennrich_sampson, (0.3, 0.4), (124.362,)),
    Classical(helical_valley, (-1, 0, 0), (0,)),
    Classical(bard, (1, 1, 1), (8.21487e-3,)),
    Classical(gaussian, (0.4, 1, 0), (1.12793e-8,)),
    Classical(meyer, (0.02, 4000, 250), (87.9458,)),
    Classical(box, (0, 10, 20), (0,)),
    Classical(powell_singular, (3, -1, 0, 1), (0,)),
    Classical(wood, (-3, -1, -3, -1), (0,)),
    Classical(kowalik_osborne, (0.25, 0.39, 0.415, 0.39), (3.07505e-4,)),
    Classical(brown_dennis, (25, 5, -5, -1), (85822.2,)),
)
NUM_RESIDUALS, NUM_PARAMETERS = 20, 4


def padded(residuals: Callable) -> Callable:
    """With parameters that nothing depends on, and residuals of zero, so that all
    problems are of one shape."""

    def fn(y):
        r = jnp.asarray(residuals(y), y.dtype)
        return jnp.pad(r, (0, NUM_RESIDUALS - r.size))

    return fn


def start(problem: Classical, far: float = 1.0) -> np.ndarray:
    """Its usual start, or so many times as far from zero."""
    y = far * np.array(problem.start, float)
    return np.pad(y, (0, NUM_PARAMETERS - y.size))
