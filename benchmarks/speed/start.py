"""The wait before a first step: compiling a run, and imports."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optimistix as optx

import gnlin

from . import floor, opponents
from .report import Comparison, Figure, Row, timed_row
from .task import DAMPING, quintic, Task
from .timing import alternate, Case, Timing


NUM_STEPS = 10


def comparisons(quick: bool) -> Iterator[Comparison]:
    task = quintic(width=50, num_examples=20)
    cases = [_by_hand(task), *_ours(task), _optimistix(task)]
    cases = cases[:2] if quick else [*cases, _jaxopt(task)]
    rows = compiling(task.name, cases, 1 if quick else 5)
    yield Comparison(f"Tracing and compiling a run; {task.name}", rows, "hand-written")
    rows = against_dependencies(1 if quick else 9)
    figure = Figure("import gnlin over its dependencies", "<= 1.2", rows[1].ratio)
    yield Comparison("Import", rows, "the dependencies", figures=[figure])


#
# Compiling
#


def compiling(task: str, cases: Sequence[Case], num_rounds: int) -> list[Row]:
    """Measure the first call minus the second, each time with all compiled programs
    cleared."""
    seconds: list[list[float]] = [[] for _ in cases]
    for i in range(num_rounds):
        order = list(enumerate(cases))
        for k, case in order if i % 2 == 0 else reversed(order):
            jax.clear_caches()
            first, second = _clock(case.run), _clock(case.run)
            seconds[k].append(first - second)
    timings = [
        Timing(case, tuple(each), 0.0) for case, each in zip(cases, seconds, strict=True)
    ]
    return [timed_row(f"compiling: {task}", each, timings[0]) for each in timings]


def _clock(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _by_hand(task: Task) -> Case:
    arrays = task.parameters, task.args

    loop = floor.checked_damped_loop(task, NUM_STEPS)
    return Case(
        "hand-written",
        "with loss and finiteness",
        lambda: loop(*arrays, DAMPING, NUM_STEPS),
    )


def _ours(task: Task) -> list[Case]:
    solvers = {
        "DampedGaussNewton": gnlin.DampedGaussNewton(DAMPING, search=None),
        "LevenbergMarquardt": gnlin.LevenbergMarquardt(),
        "TruncatedGaussNewton": gnlin.TruncatedGaussNewton(0.1, DAMPING, search=None),
    }
    return [
        Case(
            "gnlin",
            name,
            lambda solver=solver: (
                gnlin.solve(task.model, task.args, solver, max_steps=NUM_STEPS).loss
            ),
        )
        for name, solver in solvers.items()
    ]


def _optimistix(task: Task) -> Case:
    solver = optx.LevenbergMarquardt(0.0, 0.0, linear_solver=opponents.CG)
    run = lambda: opponents.optimistix_solution(
        task.residuals, solver, NUM_STEPS, task.parameters, task.args
    )
    return Case("optimistix", "LM, Normal(CG)", lambda: run().value)


def _jaxopt(task: Task) -> Case:
    run = opponents.jaxopt(task, DAMPING)
    return Case("jaxopt", "LM, CG", lambda: run(NUM_STEPS), note="its start not counted")


#
# Imports
#


def against_dependencies(num_rounds: int) -> list[Row]:
    """Time each import in a new interpreter. The interpreter's own start is included."""
    cases = [
        _importing("equinox, lineax, optimistix"),
        _importing("gnlin"),
        _importing("optimistix"),
        _importing("jaxopt"),
    ]
    timings = alternate(cases, num_rounds)
    return [timed_row("import", timing, timings[0]) for timing in timings]


def _importing(modules: str) -> Case:
    def run():
        command = [sys.executable, "-W", "ignore", "-c", f"import {modules}"]
        subprocess.run(command, check=True)
        return jnp.zeros(())

    return Case("import", modules, run)
