"""The cost of a rejected trial of Levenberg-Marquardt, relative to an accepted step."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx

import gnlin

from .report import Comparison, Figure, Row, timed_row
from .task import quintic, Task
from .timing import alternate, Case


DAMPINGS = (1e3, 1e-3, 1e-8, 1e-12, 1e-16)
"""Initial dampings, relative to the curvature. The smaller they are, the more trials are
rejected."""
ACCEPTED = "accepted step"
REJECTED = "rejected trial"
_NUDGE = 1e-9

_SOLVERS: dict[str, dict[str, Any]] = {
    "default": {},
    "acceleration=False": {"acceleration": False},
    'scaling="identity"': {"scaling": "identity"},
}


def comparisons(quick: bool) -> Iterator[Comparison]:
    task = quintic(width=50, num_examples=20)
    num_repeats, num_rounds = (10, 5) if quick else (50, 15)
    for name, options in _SOLVERS.items():
        rows, cost = against_accepted(task, name, options, num_repeats, num_rounds)
        figure = Figure(
            f"{REJECTED} over an {ACCEPTED}, {task.name}, {name}", "<= 0.2", cost
        )
        title = (
            f"Outer steps of LevenbergMarquardt, {name}, in a compiled loop; {task.name}"
        )
        required = [figure] if not options else []
        yield Comparison(title, rows, "one without a rejection", figures=required)


def against_accepted(
    task: Task, name: str, options: dict[str, Any], num_repeats: int, num_rounds: int
) -> tuple[list[Row], float]:
    """Return a row for each damping and two for the line through them, and the line's
    slope over its value at no rejection."""
    run = _outer_steps(task, options, num_repeats)
    y, args = task.parameters, task.args
    rejected = [float(run(y, args, damping)[0]) / num_repeats for damping in DAMPINGS]
    cases = [
        Case(
            "gnlin",
            f"{name}, damping {damping:.0e}",
            lambda damping=damping: run(y, args, damping),
            count=lambda _: num_repeats,
            note=f"{number:g} rejected",
        )
        for damping, number in zip(DAMPINGS, rejected, strict=True)
    ]
    timings = alternate(cases, num_rounds)
    by_round = zip(*(timing.seconds for timing in timings), strict=True)
    lines = [line(rejected, seconds) for seconds in by_round]
    step, trial = (statistics.median(values) for values in zip(*lines, strict=True))
    cost = statistics.median(slope / start for start, slope in lines)
    heading = f"rejected trials: {task.name}"
    rows = [timed_row(heading, timing, timings[0]) for timing in timings]
    note = "of the line through all"
    rows += [
        Row(heading, "gnlin", f"{name}, {ACCEPTED}", step, 1.0, note=f"start {note}"),
        Row(heading, "gnlin", f"{name}, {REJECTED}", trial, cost, note=f"slope {note}"),
    ]
    return rows, cost


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return the value at zero and the slope of the least-squares line."""
    slope, start = np.polyfit(x, y, 1)
    return float(start), float(slope)


def _outer_steps(task: Task, options: dict[str, Any], num_repeats: int):
    """Compile a loop that repeats one outer step, each time from a slightly different
    start, so that the compiler cannot move it out of the loop. It returns the total
    number of rejected trials, and where the last step ends."""
    residuals = task.per_example()

    @jax.jit
    def run(y, args, damping):
        solver = gnlin.LevenbergMarquardt(damping=damping, method="eigh", **options)

        def body(i, carry):
            rejected, _ = carry
            start = jax.tree.map(lambda x: x * (1 + _NUDGE * i), y)
            solution = optx.least_squares(
                residuals, solver, start, args, max_steps=1, throw=False
            )
            return rejected + solution.stats["num_rejected_steps"], solution.value

        return jax.lax.fori_loop(0, num_repeats, body, (jnp.array(0), y))

    return run
