"""The least-squares problems of Moré, Garbow and Hillstrom, with their minima.

These are all 35 problems of J. J. Moré, B. S. Garbow and K. E. Hillstrom, *Testing
unconstrained optimization software*, ACM Trans. Math. Softw. 7 (1981), in their order,
four of them in more than one size. The starts and minima are from there; the minima have
six digits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


Bounds = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Residuals of a vector, and the sums of squares at the known minima: first the
    global one, then local ones. Some minima are at infinity."""

    name: str
    fn: Callable[[Any], Any]
    start: tuple[float, ...]
    minima: tuple[float, ...]
    bounds: Bounds | None = None
    x: float = 0.0
    """Not used: the data are part of the problem."""
    y: float = 0.0

    def residuals(self, b: jax.Array, args: Any = None) -> jax.Array:
        """Return the residuals as one array. `args` are not used."""
        values = self.fn(b)
        parts = values if isinstance(values, tuple) else (values,)
        return jnp.concatenate([jnp.atleast_1d(jnp.asarray(v, b.dtype)) for v in parts])

    def from_far(self, factor: float) -> np.ndarray:
        """Return the start, moved away from zero by a factor. A start at zero is replaced
        by the factor itself in each component, unless the factor is 1."""
        start = np.array(self.start, float)
        far = factor * start
        if not start.any() and factor != 1:
            far = np.full(start.shape, factor)
        return far if self.bounds is None else np.clip(far, *self.bounds)

    def in_a_box(self, minimiser: np.ndarray) -> "Problem":
        """Return the same problem in a box around a minimum. The box keeps every second
        parameter, from the first on, below the minimum by a tenth of its size. The minima
        in the box are not known."""
        size = np.maximum(np.abs(minimiser), 1)
        lower, upper = minimiser - 10 * size, minimiser + 10 * size
        upper[::2] = (minimiser - size / 10)[::2]
        return dataclasses.replace(self, bounds=(lower, upper), minima=())

    def is_minimum(self, sum_of_squares: float) -> bool:
        """Test whether this is one of the minima, to the five digits that the published
        ones surely have."""
        near = np.isclose(sum_of_squares, self.minima, rtol=2e-5, atol=1e-10)
        return bool(np.any(near))


def rosenbrock(x):
    return 10 * (x[1] - x[0] ** 2), 1 - x[0]


def freudenstein_roth(x):
    return (
        -13 + x[0] + ((5 - x[1]) * x[1] - 2) * x[1],
        -29 + x[0] + ((x[1] + 1) * x[1] - 14) * x[1],
    )


def powell_badly_scaled(x):
    return 1e4 * x[0] * x[1] - 1, jnp.exp(-x[0]) + jnp.exp(-x[1]) - 1.0001


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


def gulf(x):
    t = np.arange(1.0, 100.0) / 100
    y = 25 + (-50 * np.log(t)) ** (2 / 3)
    return jnp.exp(-(jnp.abs(y - x[1]) ** x[2]) / x[0]) - t


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


def osborne_1(x):
    y = [844, 908, 932, 936, 925, 908, 881, 850, 818, 784, 751, 718, 685, 658, 628, 603]
    y += [580, 558, 538, 522, 506, 490, 478, 467, 457, 448, 438, 431, 424, 420, 414, 411]
    t = 10 * np.arange(33.0)
    model = x[0] + x[1] * jnp.exp(-t * x[3]) + x[2] * jnp.exp(-t * x[4])
    return np.array([*y, 406]) / 1000 - model


def biggs(x):
    t = np.arange(1.0, 14.0) / 10
    y = np.exp(-t) - 5 * np.exp(-10 * t) + 3 * np.exp(-4 * t)
    model = x[2] * jnp.exp(-t * x[0]) - x[3] * jnp.exp(-t * x[1])
    return model + x[5] * jnp.exp(-t * x[4]) - y


def osborne_2(x):
    y = [1366, 1191, 1112, 1013, 991, 885, 831, 847, 786, 725, 746, 679, 608, 655, 616]
    y += [606, 602, 626, 651, 724, 649, 649, 694, 644, 624, 661, 612, 558, 533, 495, 500]
    y += [423, 395, 375, 372, 391, 396, 405, 428, 429, 523, 562, 607, 653, 672, 708, 633]
    y += [668, 645, 632, 591, 559, 597, 625, 739, 710, 729, 720, 636, 581, 428, 292, 162]
    t = np.arange(65.0) / 10
    peaks = sum(x[k] * jnp.exp(-((t - x[k + 7]) ** 2) * x[k + 4]) for k in (1, 2, 3))
    return np.array([*y, 98, 54]) / 1000 - (x[0] * jnp.exp(-t * x[4]) + peaks)


def watson(x):
    t = np.arange(1.0, 30.0)[:, None] / 29
    j = np.arange(len(x))
    slope = (t ** np.maximum(j - 1, 0) * j) @ x
    value = (t**j) @ x
    return slope - value**2 - 1, x[0], x[1] - x[0] ** 2 - 1


def extended_rosenbrock(x):
    return 10 * (x[1::2] - x[::2] ** 2), 1 - x[::2]


def extended_powell_singular(x):
    a, b, c, d = x[::4], x[1::4], x[2::4], x[3::4]
    return a + 10 * b, 5**0.5 * (c - d), (b - 2 * c) ** 2, 10**0.5 * (a - d) ** 2


def penalty_1(x):
    return 1e-5**0.5 * (x - 1), jnp.sum(x**2) - 0.25


def penalty_2(x):
    n = len(x)
    i = np.arange(2.0, n + 1)
    y = np.exp(i / 10) + np.exp((i - 1) / 10)
    return (
        x[0] - 0.2,
        1e-5**0.5 * (jnp.exp(x[1:] / 10) + jnp.exp(x[:-1] / 10) - y),
        1e-5**0.5 * (jnp.exp(x[1:] / 10) - np.exp(-0.1)),
        jnp.sum((n - np.arange(n)) * x**2) - 1,
    )


def variably_dimensioned(x):
    total = jnp.sum(np.arange(1.0, len(x) + 1) * (x - 1))
    return x - 1, total, total**2


def trigonometric(x):
    i = np.arange(1.0, len(x) + 1)
    return len(x) - jnp.sum(jnp.cos(x)) + i * (1 - jnp.cos(x)) - jnp.sin(x)


def brown_almost_linear(x):
    return x[:-1] + jnp.sum(x) - (len(x) + 1), jnp.prod(x) - 1


def _with_ends(x):
    return jnp.concatenate([jnp.zeros(1), x, jnp.zeros(1)])


def discrete_boundary_value(x):
    n = len(x)
    h, t = 1 / (n + 1), np.arange(1.0, n + 1) / (n + 1)
    y = _with_ends(x)
    return 2 * x - y[:-2] - y[2:] + h**2 * (x + t + 1) ** 3 / 2


def discrete_integral_equation(x):
    n = len(x)
    h, t = 1 / (n + 1), np.arange(1.0, n + 1) / (n + 1)
    cubes = (x + t + 1) ** 3
    below = np.tril(np.ones((n, n)))
    left = (1 - t) * (below @ (t * cubes))
    right = t * ((1 - below) @ ((1 - t) * cubes))
    return x + h * (left + right) / 2


def broyden_tridiagonal(x):
    y = _with_ends(x)
    return (3 - 2 * x) * x - y[:-2] - 2 * y[2:] + 1


def broyden_banded(x):
    n = len(x)
    padded = jnp.pad(x * (1 + x), (5, 1))
    beside = sum(padded[5 + k : 5 + k + n] for k in (-5, -4, -3, -2, -1, 1))
    return x * (2 + 5 * x**2) + 1 - beside


def linear_full_rank(x):
    n, m = len(x), 20
    total = 2 * jnp.sum(x) / m
    return x - total - 1, jnp.full(m - n, -1.0) * (total + 1)


def linear_rank_1(x):
    i, j = np.arange(1.0, 21.0), np.arange(1.0, len(x) + 1)
    return i * (j @ x) - 1


def linear_rank_1_with_zeros(x):
    i, j = np.arange(1.0, 19.0), np.arange(2.0, len(x))
    return i * (j @ x[1:-1]) - 1, jnp.full(2, -1.0)


def chebyquad(x):
    shifted = 2 * x - 1
    before, now, means = jnp.ones_like(x), shifted, []
    for k in range(1, len(x) + 1):
        exact = -1 / (k**2 - 1) if k % 2 == 0 else 0
        means.append(jnp.mean(now) - exact)
        before, now = now, 2 * shifted * now - before
    return jnp.stack(means)


def _chebyquad_start(n):
    return tuple(np.arange(1, n + 1) / (n + 1))


_t10 = np.arange(1, 11) / 11
_BOUNDARY = tuple(_t10 * (_t10 - 1))

_ALL: tuple[tuple[Callable, tuple[float, ...], tuple[float, ...]], ...] = (
    (rosenbrock, (-1.2, 1), (0,)),
    (freudenstein_roth, (0.5, -2), (0, 48.9842)),
    (powell_badly_scaled, (0, 1), (0,)),
    (brown_badly_scaled, (1, 1), (0,)),
    (beale, (1, 1), (0, 0.452009)),
    (jennrich_sampson, (0.3, 0.4), (124.362, 259.580)),
    (helical_valley, (-1, 0, 0), (0,)),
    (bard, (1, 1, 1), (8.21487e-3, 17.4286)),
    (gaussian, (0.4, 1, 0), (1.12793e-8,)),
    (meyer, (0.02, 4000, 250), (87.9458,)),
    (gulf, (5, 2.5, 0.15), (0,)),
    (box, (0, 10, 20), (0, 0.0755887)),
    (powell_singular, (3, -1, 0, 1), (0,)),
    (wood, (-3, -1, -3, -1), (0,)),
    (kowalik_osborne, (0.25, 0.39, 0.415, 0.39), (3.07505e-4, 1.02734e-3)),
    (brown_dennis, (25, 5, -5, -1), (85822.2,)),
    (osborne_1, (0.5, 1.5, -1, 0.01, 0.02), (5.46489e-5,)),
    (biggs, (1, 2, 1, 1, 1, 1), (0, 5.65565e-3)),
    (osborne_2, (1.3, 0.65, 0.65, 0.7, 0.6, 3, 5, 7, 2, 4.5, 5.5), (4.01377e-2,)),
    (watson, (0,) * 6, (2.28767e-3,)),
    (watson, (0,) * 9, (1.39976e-6,)),
    (watson, (0,) * 12, (4.72238e-10,)),
    (extended_rosenbrock, (-1.2, 1) * 5, (0,)),
    (extended_powell_singular, (3, -1, 0, 1) * 3, (0,)),
    (penalty_1, (1, 2, 3, 4), (2.24997e-5,)),
    (penalty_1, tuple(range(1, 11)), (7.08765e-5,)),
    (penalty_2, (0.5,) * 4, (9.37629e-6,)),
    (penalty_2, (0.5,) * 10, (2.93660e-4,)),
    (variably_dimensioned, tuple(1 - np.arange(1, 11) / 10), (0,)),
    (trigonometric, (0.1,) * 10, (0, 2.79506e-5)),
    (brown_almost_linear, (0.5,) * 10, (0, 1)),
    (discrete_boundary_value, _BOUNDARY, (0,)),
    (discrete_integral_equation, _BOUNDARY, (0,)),
    (broyden_tridiagonal, (-1,) * 10, (0,)),
    (broyden_banded, (-1,) * 10, (0,)),
    (linear_full_rank, (1,) * 5, (15,)),
    (linear_rank_1, (1,) * 5, (20 * 19 / (2 * 41),)),
    (linear_rank_1_with_zeros, (1,) * 5, ((20**2 + 3 * 20 - 6) / (2 * 37),)),
    (chebyquad, _chebyquad_start(8), (3.51687e-3,)),
    (chebyquad, _chebyquad_start(9), (0,)),
    (chebyquad, _chebyquad_start(10), (6.50395e-3, 4.77271e-3)),
)

PROBLEMS = tuple(
    Problem(f"{fn.__name__}-{len(start)}", fn, tuple(map(float, start)), minima)
    for fn, start, minima in _ALL
)
FACTORS = (1.0, 10.0, 100.0)
"""The factors by which the starts are moved away from zero."""


def sparse_ones(n: int) -> tuple[Problem, ...]:
    """Return the problems that are defined for any number of parameters, and whose
    residuals each read only a few of them. `n` is a multiple of 4. The sum of squares is
    zero at the minimum."""
    t = np.arange(1, n + 1) / (n + 1)
    starts = {
        extended_rosenbrock: np.tile([-1.2, 1.0], n // 2),
        extended_powell_singular: np.tile([3.0, -1.0, 0.0, 1.0], n // 4),
        discrete_boundary_value: t * (t - 1),
        broyden_tridiagonal: np.full(n, -1.0),
        broyden_banded: np.full(n, -1.0),
    }
    return tuple(
        Problem(f"{fn.__name__}-{n}", fn, tuple(start.tolist()), (0.0,))
        for fn, start in starts.items()
    )
