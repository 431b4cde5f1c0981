"""Test error against damping: a quintic, many initialisations, damped Gauss-Newton.

Every initialisation is trained at every damping, for a fixed number of outer steps, in
one compiled program. Runs that end with a training RMSE over 2.5 are counted and left
out, as in the paper.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpy import ndarray
from rich.console import Console
from threadpoolctl import threadpool_limits

import gnlin

from .. import _results
from .._options import Options
from ..data import quintic
from ..figures import BLACK, BLUE, figure, GREEN, VERMILION
from ..networks.mlp import quintic_mlp
from ..verdicts import judge, print_verdicts, slope, Verdict


NUM_SEEDS, NUM_SEEDS_QUICK = 100, 4
DAMPINGS = np.logspace(-3, 3, 24)
DAMPINGS_QUICK = np.logspace(-3, 3, 5)
MAX_STEPS, MAX_STEPS_QUICK = 200, 10
NUM_TRAIN, NUM_TEST = 20, 1000
LARGEST_TRAIN_RMSE = 2.5
NUM_GROUPS = 10
"""Of initialisations, in each of which there is a best and a worst."""
# As many runs at once: more wait for the slowest of them, fewer for each other's kernels.
_BATCH = 4
_SHOWN = 10
"""Learnt functions a damping."""

PerRun = Float[ndarray, "seeds dampings"]


@dataclasses.dataclass(frozen=True)
class Row:
    seed: int
    damping: float
    train_rmse: float
    test_rmse: float
    roughness: float
    """Root mean square of the learnt function's second derivative."""
    dropped: bool


@dataclasses.dataclass(frozen=True)
class Sweep:
    dampings: Float[ndarray, " dampings"]
    train: PerRun
    test: PerRun
    roughness: PerRun
    functions: Float[ndarray, "seeds dampings points"]

    @property
    def dropped(self) -> Bool[ndarray, "seeds dampings"]:
        return ~(self.train <= LARGEST_TRAIN_RMSE)

    @property
    def finished(self) -> Bool[ndarray, " dampings"]:
        """Beyond the damping of the least training error the steps are too few, and their
        error is that of runs cut short."""
        return self.dampings <= self.dampings[np.argmin(self.train.mean(axis=0))]

    def kept(self, values: PerRun) -> PerRun:
        """NaN where a run was dropped."""
        return np.where(self.dropped, np.nan, values)

    def rows(self) -> list[Row]:
        columns = self.train, self.test, self.roughness, self.dropped
        return [
            Row(seed, float(damping), *(column[seed, i].item() for column in columns))
            for seed in range(len(self.train))
            for i, damping in enumerate(self.dampings)
        ]


def run(options: Options) -> None:
    """Sweep, draw, judge, and write rows, settings and verdicts."""
    start = time.perf_counter()
    num_seeds = options.seeds or (NUM_SEEDS_QUICK if options.quick else NUM_SEEDS)
    dampings = DAMPINGS_QUICK if options.quick else DAMPINGS
    max_steps = MAX_STEPS_QUICK if options.quick else MAX_STEPS
    sweep = train_all(num_seeds, dampings, max_steps)
    verdicts = judge_all(sweep)

    console = Console()
    print_verdicts(console, verdicts)
    draw(options.out / "lambda_sweep.png", sweep)
    _results.write_csv(options.out / "lambda_sweep.csv", sweep.rows())
    _results.write_csv(options.out / "verdicts.csv", verdicts)
    seconds = time.perf_counter() - start
    settings: dict[str, Any] = {
        "seeds": num_seeds,
        "quick": options.quick,
        "dampings": dampings.tolist(),
        "max_steps": max_steps,
        "training_examples": NUM_TRAIN,
        "test_examples": NUM_TEST,
        "network": quintic_mlp.__name__,
        "num_runs": sweep.train.size,
        "num_dropped": int(sweep.dropped.sum()),
        "judged_up_to": float(sweep.dampings[sweep.finished][-1]),
        "wall_seconds": round(seconds, 1),
    }
    _results.write_run(options.out, "lambda_sweep", sweep.rows(), verdicts, settings)
    console.print(
        f"{sweep.train.size} runs in {seconds:.0f} s; {sweep.dropped.sum()} dropped, "
        f"with a training RMSE over {LARGEST_TRAIN_RMSE}.",
        highlight=False,
    )


def train_all(
    num_seeds: int, dampings: Float[ndarray, " dampings"], max_steps: int
) -> Sweep:
    """All runs, in one compiled program."""
    train = jax.tree.map(jnp.asarray, quintic.examples(NUM_TRAIN))
    test = jax.tree.map(jnp.asarray, quintic.examples(NUM_TEST))
    seeds = jnp.repeat(jnp.arange(num_seeds), len(dampings))
    all_dampings = jnp.tile(jnp.asarray(dampings), num_seeds)

    @jax.jit
    def sweep(runs, train, test):
        one = lambda run: _run(run, train, test, max_steps)
        return jax.lax.map(one, runs, batch_size=_BATCH)

    # LAPACK's threads and XLA's wait for each other on matrices as small as these.
    with threadpool_limits(1, user_api="blas"):
        columns = jax.device_get(sweep((seeds, all_dampings), train, test))
    shape = num_seeds, len(dampings)
    train_rmse, test_rmse, roughness, functions = (
        np.reshape(x, (*shape, *x.shape[1:])) for x in columns
    )
    return Sweep(dampings, train_rmse, test_rmse, roughness, functions)


def _run(run, train, test, max_steps: int) -> tuple[Array, ...]:
    seed, damping = run
    model = quintic_mlp(jax.random.key(seed))
    solver = gnlin.DampedGaussNewton(damping)
    model = gnlin.solve(model, train, solver, max_steps=max_steps).model
    fitted, learnt = jax.vmap(model)(train[0]), jax.vmap(model)(test[0])
    spacing = test[0][1, 0] - test[0][0, 0]
    second = jnp.diff(learnt[:, 0], 2) / spacing**2
    return (
        _rms(fitted - train[1]),
        _rms(learnt - test[1]),
        _rms(second),
        learnt[:, 0],
    )


def _rms(x: Array) -> Array:
    return jnp.sqrt(jnp.mean(x**2))


def judge_all(sweep: Sweep) -> list[Verdict]:
    """The paper's claim in four numbers: slopes in log10 of damping, over the dampings at
    which the runs have finished training."""
    finished = sweep.finished
    x = np.log10(sweep.dampings[finished])
    error = np.log10(sweep.kept(sweep.test)[:, finished])
    roughness = np.log10(sweep.kept(sweep.roughness)[:, finished])
    groups = np.array_split(error, min(NUM_GROUPS, len(error)))
    with np.errstate(all="ignore"):
        worst = np.array([_or_nan(np.nanmax, group) for group in groups])
        best = np.array([_or_nan(np.nanmin, group) for group in groups])
    unit = "of log10 test RMSE, in log10 lambda"
    return [
        judge(
            "The mean error falls as lambda grows",
            f"slope {unit}, a seed",
            slope(x, error),
            below=0,
        ),
        judge(
            "The worst error falls as lambda grows",
            f"slope {unit}, of the worst of each of {len(groups)} groups of seeds",
            slope(x, worst),
            below=0,
        ),
        judge(
            "The best error stays",
            f"slope {unit}, of the best of each of {len(groups)} groups of seeds",
            slope(x, best),
            above=-0.05,
            below=0.05,
        ),
        judge(
            "Functions get smoother as lambda grows",
            "slope of log10 RMS second derivative, in log10 lambda, a seed",
            slope(x, roughness),
            below=0,
        ),
    ]


def _or_nan(extreme, group: PerRun) -> Float[ndarray, " dampings"]:
    missing = np.isnan(group).all(axis=0)
    return np.where(missing, np.nan, extreme(np.where(missing, 0, group), axis=0))


def draw(path: Path, sweep: Sweep) -> None:
    """Errors against damping, and learnt functions at four of them."""
    shown = np.linspace(0, len(sweep.dampings) - 1, 4).round().astype(int)
    x, y = quintic.examples(NUM_TEST)
    points = quintic.examples(NUM_TRAIN)
    with figure(path, width=11, height=7) as drawing:
        grid = drawing.add_gridspec(2, 4)
        axes = drawing.add_subplot(grid[:, :2])
        kept = sweep.kept(sweep.test)
        dampings = np.broadcast_to(sweep.dampings, kept.shape)
        axes.plot(dampings.ravel(), kept.ravel(), ".", color="#BBBBBB", markersize=3)
        for name, of, colour in (
            ("worst", np.nanmax, VERMILION),
            ("mean", np.nanmean, BLUE),
            ("best", np.nanmin, GREEN),
        ):
            some = ~np.isnan(kept).all(axis=0)
            axes.plot(
                sweep.dampings[some], of(kept[:, some], axis=0), color=colour, label=name
            )
        if not sweep.finished.all():
            unfinished = sweep.dampings[~sweep.finished]
            label = "too strong for so many steps"
            axes.axvspan(unfinished[0], unfinished[-1], color="#F0F0F0", label=label)
        axes.set(xscale="log", yscale="log")
        axes.set(xlabel=r"Damping $\lambda$", ylabel="Test RMSE")
        axes.set_title(f"{len(kept)} initialisations, {sweep.dropped.sum()} runs dropped")
        axes.legend()
        for i, index in enumerate(shown):
            panel = drawing.add_subplot(grid[i // 2, 2 + i % 2])
            usable = np.nonzero(~sweep.dropped[:, index])[0][:_SHOWN]
            for seed in usable:
                panel.plot(x, sweep.functions[seed, index], color=BLUE, linewidth=0.8)
            panel.plot(x, y, "--", color=BLACK, linewidth=1)
            panel.plot(*points, "o", color=BLACK, markersize=3)
            panel.set(ylim=(-6, 6))
            panel.set_title(rf"$\lambda = {sweep.dampings[index]:.3g}$")
