"""`gnlin.curve_fit` on many data sets at once, with bounds, beside SciPy's one by one."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import scipy.optimize

import gnlin

from . import fits
from .report import Comparison, Figure, Row, timed_row
from .small_fits import logistic_curves, residuals
from .start import compiling
from .timing import alternate, Case


NUM_FITS, NUM_BY_SCIPY = 500, 20
SOLVED = 1e-4
"""The relative error of the worst parameter up to which all fits count as solved."""
LOWER, UPPER = (-10.0, -10.0, 0.0, -3.0), (10.0, 10.0, 20.0, 3.0)


def comparisons(quick: bool) -> Iterator[Comparison]:
    num_fits, rounds = (50, 3) if quick else (NUM_FITS, 15)
    rows = fitted(num_fits, rounds)
    _, ours, scipys = rows
    figures = [
        Figure(
            f"{num_fits} bounded fits with their errors over unbounded ones by hand",
            "<= 3",
            None if quick else ours.ratio,
        ),
        Figure(
            "SciPy's time, one after the other, over gnlin's",
            ">= 20",
            None if quick else (scipys.ratio or 0.0) / (ours.ratio or 1.0),
        ),
    ]
    title = f"{num_fits} curves of four parameters: fits, bounds, standard errors"
    yield Comparison(title, rows, "gnlin", figures=figures)
    first, later = waited_for(1 if quick else 5)
    figures = [
        Figure("seconds of a first fit of three parameters", "<= 2", first[0].seconds),
        Figure("seconds of a later one", "<= 0.005", later[0].seconds),
    ]
    title = "One fit of three parameters: the first call, compiling included"
    yield Comparison(title, first, "gnlin", figures=figures[:1])
    yield Comparison("The same: later calls", later, "gnlin", figures=figures[1:])


def waited_for(num_rounds: int) -> tuple[list[Row], list[Row]]:
    """Time a first call and a later one, beside optimistix, which computes no standard
    errors."""
    x = jnp.linspace(0, 4, 50)
    start = {"a": 1.0, "rate": 0.5, "c": 0.0}

    def decay(p, x):
        return p["a"] * jnp.exp(-p["rate"] * x) + p["c"]

    y = decay({"a": 2.0, "rate": 0.7, "c": 0.3}, x) + 0.01 * jnp.sin(40 * x)
    solver = optx.LevenbergMarquardt(1e-8, 1e-8)
    misfit = lambda p, data: decay(p, data[0]) - data[1]

    def by_optimistix():
        return optx.least_squares(misfit, solver, start, (x, y)).value

    cases = [
        Case("gnlin", "curve_fit", lambda: _parts(gnlin.curve_fit(decay, x, y, start))),
        Case("optimistix", "LevenbergMarquardt, no errors", by_optimistix),
    ]
    later = alternate(cases, 3 * num_rounds)
    name = "a fit of three parameters"
    return (
        compiling(name, cases, num_rounds),
        [timed_row(name, timing, later[0]) for timing in later],
    )


def _parts(fit: gnlin.CurveFit):
    return fit.parameters, fit.standard_errors


def fitted(num_fits: int, num_rounds: int) -> list[Row]:
    starts, (xs, ys), solutions = logistic_curves(num_fits)
    x, bounds = xs[0], (jnp.array(LOWER), jnp.array(UPPER))
    hand = jax.jit(jax.vmap(fits.methods()[0].make(residuals, 1e-10)))

    def curve(p, x):
        return residuals(p, (x, jnp.zeros_like(x)))

    def by_gnlin():
        return _parts(gnlin.curve_fit(curve, x, ys, starts[0], bounds=bounds))

    def by_scipy():
        def model(x, low, high, slope, middle):
            return low + (high - low) / (1 + np.exp(-slope * (x - middle)))

        start, where = np.asarray(starts[0]), (LOWER, UPPER)
        return [
            scipy.optimize.curve_fit(model, np.asarray(x), y, start, bounds=where)[0]
            for y in np.asarray(ys[:NUM_BY_SCIPY])
        ]

    part = min(NUM_BY_SCIPY, num_fits) / num_fits
    cases = [
        Case(fits.LIMIT, "LM, Cholesky, no bounds", lambda: hand(starts, (xs, ys))),
        Case("gnlin", "curve_fit", by_gnlin),
        Case(
            "SciPy",
            "curve_fit",
            by_scipy,
            count=lambda _: part,  # type: ignore[arg-type]
            max_rounds=3,
            note=f"{NUM_BY_SCIPY} of them, times {1 / part:.0f}",
        ),
    ]
    timings = alternate(cases, num_rounds)
    ends = hand(starts, (xs, ys)).parameters, by_gnlin()[0], np.stack(by_scipy())
    rows = []
    for timing, end in zip(timings, ends, strict=True):
        error = np.max(np.abs(end / solutions[: len(end)] - 1))
        rows.append(
            timed_row(
                f"{num_fits} fits",
                timing,
                timings[0],
                step_error=float(error),
                tolerance=SOLVED,
            )
        )
    return rows
