"""Fits of a million to a hundred million points: time, memory, and the same answer."""

import importlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
import scipy.optimize

import gnlin

from .report import Comparison, Row, timed_row
from .timing import alternate, Case


NUMS, MANY, FEW = (10**6, 10**7), 10**8, 10**4
PART = 10**6
TRUE = np.array([3.0, 0.4, 0.15, 1.0, -0.5])
START = np.array([2.0, 0.45, 0.2, 0.5, 0.0])
SAME = 1e-5
"""The answer counts as the same up to this difference of the worst parameter, relative to
SciPy's."""
TOLERANCE = 1e-8


def peak(p, x, numpy: Any = jnp):
    """A Gaussian peak on a straight line."""
    return p[0] * numpy.exp(-0.5 * ((x - p[1]) / p[2]) ** 2) + p[3] + p[4] * x


def comparisons(quick: bool) -> Iterator[Comparison]:
    for num in (FEW,) if quick else NUMS:
        title = f"A fit of five parameters to {num:,} points"
        yield Comparison(title, fitted(num), "gnlin")
    if not quick:
        title = f"A fit of five parameters to {MANY:,} points, made as they are read"
        yield Comparison(title, made_as_read(), "gnlin")


def fitted(num: int) -> list[Row]:
    x, y = data(0, num)
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.npy" for name in "xy"}
        np.save(files["x"], x)
        np.save(files["y"], y)
        maps = [np.load(file, mmap_mode="r") for file in files.values()]

        def read():
            for start in range(0, num, PART):
                yield tuple(np.array(one[start : start + PART]) for one in maps)

        exact, _ = by_scipy(x, y, ftol=1e-14, xtol=1e-14, gtol=1e-14)
        runs = {
            ("gnlin", "in parts"): lambda: by_gnlin(x, y, in_parts=True),
            ("gnlin", "in parts, a memory map"): lambda: by_gnlin(*maps, in_parts=True),
            ("gnlin", "parts from a generator"): lambda: by_gnlin(read, None),
            ("SciPy", "curve_fit, lm"): lambda: by_scipy(x, y)[0],
            ("SciPy", "curve_fit, lm, jac="): lambda: by_scipy(x, y, jac=slopes)[0],
            ("optimistix", "LM, Normal(Cholesky)"): lambda: by_optimistix(x, y),
            **by_nlsq(x, y),
            # This run comes last, because the process keeps its memory.
            ("gnlin", "all at once"): lambda: by_gnlin(x, y),
        }
        return rows(f"{num:,} points", runs, exact)


def made_as_read() -> list[Row]:
    def made():
        for start in range(0, MANY, PART):
            yield data(start, PART, MANY)

    runs = {("gnlin", "parts from a generator"): lambda: by_gnlin(made, None)}
    return rows(f"{MANY:,} points", runs, None)


def rows(
    task: str, runs: dict[tuple[str, str], Callable], exact: np.ndarray | None
) -> list[Row]:
    found: dict[tuple[str, str], np.ndarray] = {}

    def case(name, run):
        def kept():
            found[name] = np.asarray(run())
            return found[name]

        library, variant = name
        return Case(library, variant, kept)

    timings = alternate([case(*item) for item in runs.items()], 1)
    return [
        timed_row(
            task,
            timing,
            timings[0],
            tolerance=SAME,
            **error_of(found[timing.case.library, timing.case.variant], exact),
        )
        for timing in timings
    ]


def error_of(parameters: np.ndarray, exact: np.ndarray | None) -> dict[str, float]:
    if exact is None:
        return {}
    return {"step_error": float(np.max(np.abs(parameters / exact - 1)))}


def data(start: int, num: int, of: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return `num` of `of` points, from `start` on. The noise is drawn for each part."""
    x = np.arange(start, start + num) / (of or num)
    noise = np.random.default_rng(start).standard_normal(num)
    return x, peak(TRUE, x, np) + 0.2 * noise


def by_gnlin(x: Any, y: Any, **options: Any) -> np.ndarray:
    return np.asarray(gnlin.curve_fit(peak, x, y, START, **options).parameters)


def by_scipy(x: np.ndarray, y: np.ndarray, **options: Any) -> tuple:
    def f(x, *p):
        return peak(p, x, np)

    return scipy.optimize.curve_fit(f, x, y, START, method="lm", **options)[:2]


def slopes(x: np.ndarray, *p: float) -> np.ndarray:
    """Return the Jacobian, derived by hand."""
    far = (x - p[1]) / p[2]
    bell = np.exp(-0.5 * far**2)
    of_middle = p[0] * bell * far / p[2]
    return np.stack([bell, of_middle, of_middle * far, np.ones_like(x), x], axis=1)


def by_optimistix(x: np.ndarray, y: np.ndarray) -> Any:
    """Fit by optimistix, which gives no standard errors."""
    solver = optx.LevenbergMarquardt(
        TOLERANCE, TOLERANCE, linear_solver=lx.Normal(lx.Cholesky())
    )
    return _optimistix(solver, jnp.asarray(x), jnp.asarray(y))


@jax.jit(static_argnums=0)
def _optimistix(solver: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    residuals = lambda p, data: peak(p, data[0]) - data[1]
    return optx.least_squares(residuals, solver, jnp.asarray(START), (x, y)).value


def by_nlsq(x: np.ndarray, y: np.ndarray) -> dict[tuple[str, str], Callable]:
    """Return the runs of nlsq if it is installed, which needs Python 3.12."""
    try:
        nlsq: Any = importlib.import_module("nlsq")
    except ImportError:
        return {}

    def f(x, a, b, c, d, e):
        return peak((a, b, c, d, e), x)

    return {
        ("nlsq", "curve_fit"): lambda: nlsq.curve_fit(f, x, y, p0=START)[0],
        ("nlsq", "curve_fit_large"): lambda: nlsq.curve_fit_large(f, x, y, p0=START)[0],
    }
