"""Test error against damping: a quintic, many initialisations, damped Gauss-Newton.

Every initialisation is trained at every damping, for a fixed number of outer steps, in
one compiled program. Runs that end with a training RMSE over 2.5 are counted and left
out, as in the paper.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpy import ndarray

import gnlin

from ..data import quintic
from ..experiment import Columns, Experiment, Place, Point, Runs, Settings
from ..figures import BLACK, BLUE, figure, GREEN, VERMILION
from ..networks.mlp import quintic_mlp
from ..verdicts import judge, slope, Verdict


LARGEST_TRAIN_RMSE = 2.5
# As many runs at once: more wait for the slowest of them, fewer for each other's kernels.
_BATCH = 4
_SHOWN = 10
"""Learnt functions a damping."""

PerRun = Float[ndarray, "seeds dampings"]


@dataclasses.dataclass(frozen=True)
class LambdaSweep(Settings):
    seeds: int = 100
    dampings: tuple[float, ...] = tuple(np.logspace(-3, 3, 24).tolist())
    num_steps: int = 200
    """Outer steps."""
    num_train: int = 20
    num_test: int = 1000
    num_groups: int = 10
    """Of initialisations, in each of which there is a best and a worst."""


EMBEDDED = LambdaSweep()
QUICK = dataclasses.replace(
    EMBEDDED, seeds=4, dampings=tuple(np.logspace(-3, 3, 5).tolist()), num_steps=10
)
FULL = dataclasses.replace(EMBEDDED, num_steps=2000)


def points(settings: LambdaSweep) -> list[Point]:
    """One, of all dampings: they share a compiled program."""
    return [{}]


def train(settings: LambdaSweep, point: Point, place: Place) -> Columns:
    data = jax.tree.map(jnp.asarray, quintic.examples(settings.num_train))
    test = jax.tree.map(jnp.asarray, quintic.examples(settings.num_test))
    shape = settings.seeds, len(settings.dampings)
    dampings = np.broadcast_to(settings.dampings, shape)
    seeds = jnp.repeat(jnp.arange(settings.seeds), len(settings.dampings))

    @jax.jit
    def sweep(runs, data, test):
        one = lambda run: _run(run, data, test, settings.num_steps)
        return jax.lax.map(one, runs, batch_size=_BATCH)

    found = sweep((seeds, jnp.asarray(dampings.ravel())), data, test)
    columns = {
        name: np.reshape(x, (*shape, *x.shape[1:]))
        for name, x in jax.device_get(found).items()
    }
    dropped = ~(columns["train_rmse"] <= LARGEST_TRAIN_RMSE)
    return {"damping": dampings, **columns, "dropped": dropped}


def _run(run, data, test, num_steps: int) -> dict[str, Array]:
    seed, damping = run
    model = quintic_mlp(jax.random.key(seed))
    solver = gnlin.DampedGaussNewton(damping, search=None)
    model = gnlin.solve(model, data, solver, max_steps=num_steps, divergence=None).model
    fitted, learnt = jax.vmap(model)(data[0]), jax.vmap(model)(test[0])
    spacing = test[0][1, 0] - test[0][0, 0]
    second = jnp.diff(learnt[:, 0], 2) / spacing**2
    return {
        "train_rmse": _rms(fitted - data[1]),
        "test_rmse": _rms(learnt - test[1]),
        "roughness": _rms(second),
        "functions": learnt[:, 0],
    }


def _rms(x: Array) -> Array:
    return jnp.sqrt(jnp.mean(x**2))


@dataclasses.dataclass(frozen=True)
class Sweep:
    dampings: Float[ndarray, " dampings"]
    train: PerRun
    test: PerRun
    roughness: PerRun
    """Root mean square of the learnt function's second derivative."""
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


def sweep_of(all_runs: Sequence[Runs]) -> Sweep:
    (runs,) = all_runs
    names = "train_rmse", "test_rmse", "roughness", "functions"
    return Sweep(runs["damping"][0], *(runs[name] for name in names))


def judge_all(settings: LambdaSweep, all_runs: Sequence[Runs]) -> list[Verdict]:
    """The paper's claim in four numbers: slopes in log10 of damping, over the dampings at
    which the runs have finished training."""
    sweep = sweep_of(all_runs)
    finished = sweep.finished
    x = np.log10(sweep.dampings[finished])
    error = np.log10(sweep.kept(sweep.test)[:, finished])
    roughness = np.log10(sweep.kept(sweep.roughness)[:, finished])
    groups = np.array_split(error, min(settings.num_groups, len(error)))
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


def draw(settings: LambdaSweep, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    """Errors against damping, and learnt functions at four of them."""
    sweep = sweep_of(all_runs)
    shown = np.linspace(0, len(sweep.dampings) - 1, 4).round().astype(int)
    x, y = quintic.examples(settings.num_test)
    fitted = quintic.examples(settings.num_train)
    with figure(out / "lambda_sweep.png", width=11, height=7) as drawing:
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
            panel.plot(*fitted, "o", color=BLACK, markersize=3)
            panel.set(ylim=(-6, 6))
            panel.set_title(rf"$\lambda = {sweep.dampings[index]:.3g}$")
    last = sweep.dampings[sweep.finished][-1]
    caption = (
        f"Test RMSE against damping, of {settings.seeds} initialisations: every run, and "
        f"the worst, the mean and the best; {sweep.dropped.sum()} of "
        f"{sweep.dropped.size} runs with a training RMSE over {LARGEST_TRAIN_RMSE} are "
        f"dropped. Beside it up to {_SHOWN} of the learnt functions at each of four "
        "dampings, with the quintic (dashed) and the training points. A 5-layer network "
        f"on {settings.num_train} points, damped Gauss-Newton, {settings.num_steps:,} "
        f"outer steps; judged up to a damping of {last:.3g}."
    )
    return {"lambda_sweep": caption}


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="A 5-layer network on 20 points of a quintic, exact damped Gauss-Newton, many "
    "initialisations: mean and worst test error fall as lambda grows, the best stays; "
    "functions get smoother.",
    grid="dampings",
    runs_at_a_point=lambda settings: len(settings.dampings),
)
