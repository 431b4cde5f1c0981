"""K inner steps of gradient descent at one linearisation point, for K up to 10^8."""

from collections.abc import Iterator

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

import gnlin

from . import cross_entropy_steps, floor
from .oracle import relative_error
from .report import Comparison, Figure, find, Row, timed_row
from .task import quintic, Task
from .timing import alternate, Case, Timing


PERIODS = tuple(10**k for k in range(9))
LEARNING_RATE = 1e-5
MAX_LITERAL = 10**5
"""More literal steps than this would take minutes."""


def comparisons(quick: bool) -> Iterator[Comparison]:
    task = quintic(width=50, num_examples=20)
    alone, outer = by_formula(task, 15 if quick else 45)
    yield Comparison("K inner steps on a spectrum at hand", alone, "K = 1")
    last = find(outer, "gnlin", lambda row: row.variant == f"K = {PERIODS[-1]:,}")
    figure = Figure("outer step, K = 10^8 over K = 1", "<= 1.2", last.ratio)
    yield Comparison(
        "K inner steps, the whole outer step", outer, "K = 1", figures=[figure]
    )
    literal = literally(task, 10**3 if quick else MAX_LITERAL)
    yield Comparison("K inner steps, one by one", literal, "K = 1")
    entropy = cross_entropy_steps.rows(10**4 if quick else PERIODS[-1], 3)
    title = "K inner steps on cross-entropy, the whole outer step; digits MLP, m = 500"
    yield Comparison(title, entropy, "the first of each")


def by_formula(task: Task, num_rounds: int) -> tuple[list[Row], list[Row]]:
    """Return rows of the step alone, and of the whole outer step. Ratios are to K = 1."""
    return (
        _against_one_step(task, "K steps, spectrum at hand", _spectral(task), num_rounds),
        _against_one_step(task, "K steps, outer step", _outer(task), num_rounds),
    )


def literally(task: Task, largest: int) -> list[Row]:
    """Measure the same number of steps taken one by one. Ratios are to K = 1."""
    run = floor.literal_descent(task)
    cases = [
        _case(
            "literal steps",
            period,
            lambda k=period: run(task.parameters, task.args, LEARNING_RATE, k),
            max_rounds=None if period <= 1000 else 1,
        )
        for period in PERIODS
        if period <= largest
    ]
    return _against_one_step(task, "K steps, literally", cases, 5)


def _spectral(task: Task) -> list[Case]:
    residuals = task.per_example()
    spectrum = jax.jit(lambda y, args: gnlin.linearise(residuals, y, args).spectrum())(
        task.parameters, task.args
    )
    factors = jax.jit(floor.spectrum)(task.parameters, task.args)
    step = jax.jit(lambda spectrum, k: spectrum.step(_descent(k)))
    limit = jax.jit(lambda factors, k: floor.descent_step(factors, k, LEARNING_RATE))
    return [
        case
        for period in PERIODS
        for case in (
            _case("gnlin", period, lambda k=period: step(spectrum, float(k))),
            _case("hand-written", period, lambda k=period: limit(factors, float(k))),
        )
    ]


def _outer(task: Task) -> list[Case]:
    residuals = task.per_example()

    @jax.jit
    def step(y, args, k):
        return gnlin.linearise(residuals, y, args).spectrum().step(_descent(k))

    @jax.jit
    def limit(y, args, k):
        return floor.descent_step(floor.spectrum(y, args), k, LEARNING_RATE)

    y, args = task.parameters, task.args
    return [
        case
        for period in PERIODS
        for case in (
            _case("gnlin", period, lambda k=period: step(y, args, float(k))),
            _case("hand-written", period, lambda k=period: limit(y, args, float(k))),
        )
    ]


def _descent(period) -> gnlin.filters.GradientDescent:
    return gnlin.filters.GradientDescent(period, LEARNING_RATE)


def _case(library: str, period: int, run, max_rounds: int | None = None) -> Case:
    # The variant states the period. `_against_one_step` reads it from there.
    return Case(
        library,
        f"K = {period:,}",
        run,
        step=lambda: np.asarray(ravel_pytree(run())[0]),
        max_rounds=max_rounds,
    )


def _against_one_step(
    task: Task, name: str, cases: list[Case], num_rounds: int
) -> list[Row]:
    timings = alternate(cases, num_rounds)
    first: dict[str, Timing] = {}
    rows = []
    for timing in timings:
        case = timing.case
        reference = first.setdefault(case.library, timing)
        period = float(case.variant.removeprefix("K = ").replace(",", ""))
        assert case.step is not None
        error = relative_error(case.step(), task.oracle.descent(period, LEARNING_RATE))
        rows.append(
            timed_row(f"{name}: {task.name}", timing, reference, step_error=error)
        )
    return rows
