"""The damped step of wide problems: 10^3 to 10^7 parameters, 20 to 2,000 outputs."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

from . import damped_step
from .report import Comparison, Figure, find, Row, timed_row
from .task import DAMPING, quintic, Task
from .timing import alternate, Case, Timing


# (width, outputs): with four hidden layers a width w makes 3 w^2 + 6 w + 1 parameters.
SIZES = (
    (18, 20),
    (50, 20),
    (50, 200),
    (182, 20),
    (182, 200),
    (182, 2000),
    (576, 20),
    (576, 200),
    (576, 2000),
    (1825, 20),
    (1825, 200),
)
QUICK = ((18, 20), (50, 20))
IN_THE_PICTURE = ((50, 20), (182, 200), (576, 200))
LARGEST = 10**6
"""The ratio to the limit is promised up to this number of parameters."""
MAX_PRODUCT = 10**8
"""Conjugate gradients of other libraries are run up to this value of p m."""


def comparisons(quick: bool) -> Iterator[Comparison]:
    for width, num_outputs in QUICK if quick else SIZES:
        task = quintic(width, num_outputs)
        rows = damped(task)
        figures = []
        if task.num_parameters <= 1.01 * LARGEST:
            ratio = find(rows, "gnlin", lambda row: True).ratio
            what = f"damped step over the limit, {task.name}"
            figures = [Figure(what, "<= 1.3", ratio)]
        title = f"One damped step in a compiled loop; {task.name}"
        shown = quick or (width, num_outputs) in IN_THE_PICTURE
        bars = task.name if shown else None
        yield Comparison(title, rows, bars=bars, figures=figures)
        jax.clear_caches()


def damped(task: Task) -> list[Row]:
    """Time the damped step. The first row is the limit, which computes its loss and tests
    that everything is finite, as a solver must."""
    work = task.num_parameters * task.num_outputs
    num_steps = int(np.clip(10**9 // work, 5, damped_step.NUM_STEPS))
    rounds = int(np.clip(10**9 // work, 3, 15))
    cases = [
        damped_step.limit(task, num_steps),
        damped_step.gnlin_loop(task, "auto", num_steps),
    ]
    if work <= MAX_PRODUCT:
        cases += damped_step.optimistix_loops(task, max(5, num_steps // 10))
    timings = alternate(cases, rounds)
    rows = solved_rows(f"damped step: {task.name}", task, timings)
    if work > MAX_PRODUCT:
        reason = "minutes of conjugate gradients a step"
        rows.append(damped_step.skipped(task, "optimistix", "LM, Normal(CG)", reason))
    p, m = task.num_parameters, task.num_outputs
    for library, variant, num_rows in (
        ("optimistix", "LM, default (QR)", m + p),
        ("jaxopt", "LM, Cholesky", p),
    ):
        num_bytes = 8 * num_rows * p / 2**30
        reason = f"a matrix of {num_rows:,} x {p:,}, {num_bytes:,.2g} GiB"
        rows.append(damped_step.skipped(task, library, variant, reason))
    return rows


def solved_rows(title: str, task: Task, timings: Sequence[Timing]) -> list[Row]:
    """Return rows with the linear residuals that were reached. Ratios are to the
    first."""
    residual_of = linear_residual(task)
    return [
        timed_row(title, timing, timings[0], linear_residual=residual_of(timing.case))
        for timing in timings
    ]


def linear_residual(task: Task):
    """Return a function that computes |phi^T phi s + phi^T r + lambda s| / |phi^T r|. It
    uses products with phi, because phi itself would not fit in memory."""
    flat, unravel = ravel_pytree(task.parameters)

    @jax.jit
    def relative(step, y, args):
        residual, push = jax.linearize(lambda v: task.residuals(unravel(v), args), y)
        pull = jax.linear_transpose(push, y)
        (left,), (gradient,) = pull(residual + push(step)), pull(residual)
        norm = jax.numpy.linalg.norm
        return norm(left + DAMPING * step) / norm(gradient)

    def of(case: Case) -> float:
        assert case.step is not None
        return float(relative(case.step(), flat, task.args))

    return of
