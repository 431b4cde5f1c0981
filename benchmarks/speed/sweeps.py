"""1,000 whole runs over seeds and dampings: one compiled program, beside a loop."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

import gnlin

from . import floor
from .report import Comparison, Figure, Row, timed_row
from .task import DAMPING, quintic, Task
from .timing import alternate, Case


NUM_SEEDS = 20
NUM_DAMPINGS = 50
NUM_STEPS = 5
TOGETHER = "one program"
LOOP = "a loop over the compiled run"
SMALL = 5
"""At this width, most of a run's time is the call and its many small operations."""
BOUND = "a run is its steps, as by hand, and its many small operations"


def comparisons(quick: bool) -> Iterator[Comparison]:
    sizes = (4, 10) if quick else (NUM_SEEDS, NUM_DAMPINGS)
    rounds, together = (1, (10,)) if quick else (3, (4, 20, 100))
    published = grid_of(quintic(50, 20), *sizes)
    rows = whole_runs(published, rounds, NUM_STEPS, (1, *together), note=BOUND)
    yield _comparison(published, rows, [_figure(published, rows)])
    if quick:
        return
    small = grid_of(quintic(SMALL, 20), *sizes)
    rows = whole_runs(small, rounds, NUM_STEPS, (1, *together), "kernel")
    yield _comparison(small, rows)


def _comparison(grid, rows, figures=()) -> Comparison:
    title = f"{grid.name} of {NUM_STEPS} outer steps, time a run; {grid.task.name}"
    return Comparison(title, rows, "the loop", figures=figures)


def _figure(grid: "Grid", rows: Sequence[Row]) -> Figure:
    best = min(
        row.ratio for row in rows if row.variant.startswith(TOGETHER) and row.ratio
    )
    what = f"{grid.name}: a loop over the compiled run, over one program"
    return Figure(what, ">= 5", 1 / best)


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """Every seed with every damping. The networks are made beforehand."""

    task: Task
    starts: PyTree[Array]
    """The parameters, with a leading axis over seeds."""
    runs: tuple[np.ndarray, np.ndarray]
    """The seed and the damping of each run."""

    @property
    def name(self) -> str:
        return f"{len(self.runs[0]):,} runs"


def grid_of(task: Task, num_seeds: int, num_dampings: int) -> Grid:
    def start(seed):
        model = eqx.nn.MLP(1, 1, task.model.width_size, 4, key=jax.random.key(seed))
        return eqx.filter(model, eqx.is_inexact_array)

    starts = jax.jit(jax.vmap(start))(jnp.arange(num_seeds))
    starts = jax.tree.map(lambda x: x.astype(float), starts)
    dampings = np.logspace(-1, 3, num_dampings)
    runs = (
        np.repeat(np.arange(num_seeds), num_dampings),
        np.tile(dampings, num_seeds),
    )
    return Grid(task, starts, runs)


def whole_runs(
    grid: Grid,
    num_rounds: int,
    num_steps: int,
    batch_sizes: Sequence[int],
    method: Any = "auto",
    note: str = "",
) -> list[Row]:
    """Time the runs. The error is the median relative difference between the last losses
    and the losses of the loop, which is the first row."""
    run = functools.partial(_last_loss, grid.task, num_steps, method)
    loop = _in_python(grid, LOOP, jax.jit(run), "one call a run")
    cases = [
        loop,
        _by_hand(grid, num_steps),
        _in_python(grid, "a loop over gnlin.solve", run, "looks at its arguments"),
        *(_one_program(grid, run, size, note) for size in batch_sizes),
    ]
    expected = np.asarray(loop.run())
    timings = alternate(cases, num_rounds)
    return [
        timed_row(
            f"whole runs: {grid.task.name}",
            timing,
            timings[0],
            **_accuracy(timing.case, expected),
        )
        for timing in timings
    ]


def _accuracy(case: Case, expected: np.ndarray) -> dict[str, float]:
    if case.library != "gnlin":
        return {}
    losses = np.asarray(case.run())
    return {"step_error": float(np.median(np.abs(losses / expected - 1)))}


def _by_hand(grid: Grid, num_steps: int) -> Case:
    """Return the steps of all runs as one program. No loop over runs can be faster."""
    num_runs = len(grid.runs[0])
    all_steps = num_runs * num_steps
    run = floor.checked_damped_loop(grid.task, all_steps)
    y, args = grid.task.parameters, grid.task.args
    return Case(
        "hand-written",
        "the same steps in one run, with no call",
        lambda: run(y, args, DAMPING, all_steps),
        count=lambda _: num_runs,
        note="what a loop has besides its calls",
    )


def _last_loss(
    task: Task, num_steps: int, method: Any, parameters: PyTree[Array], damping: Any
) -> Float[Array, ""]:
    model = eqx.combine(parameters, task.model)
    solver = gnlin.DampedGaussNewton(damping, search=None, method=method)
    return gnlin.solve(model, task.args, solver, max_steps=num_steps).loss


def _in_python(grid: Grid, variant: str, run, note: str) -> Case:
    starts = [
        jax.tree.map(lambda x, i=i: x[i], grid.starts) for i in np.unique(grid.runs[0])
    ]
    pairs = [(starts[seed], jnp.asarray(d)) for seed, d in zip(*grid.runs, strict=True)]
    return Case(
        "gnlin",
        variant,
        lambda: jnp.stack([run(*pair) for pair in pairs]),
        count=len,
        note=note,
    )


def _one_program(grid: Grid, run: Callable, batch_size: int, note: str) -> Case:
    @jax.jit
    def program(starts, runs):
        def one(pair):
            seed, damping = pair
            return run(jax.tree.map(lambda x: x[seed], starts), damping)

        if batch_size == 1:
            return jax.lax.map(one, runs)
        return jax.lax.map(one, runs, batch_size=batch_size)

    runs = jax.tree.map(jnp.asarray, grid.runs)
    how = "one after another" if batch_size == 1 else f"{batch_size} at once"
    return Case(
        "gnlin",
        f"{TOGETHER}, {how}",
        lambda: program(grid.starts, runs),
        count=len,
        note=note,
    )
