"""What tuning gains over the default of `gnlin.fit` on mini-batches of three sizes.

Each setting of the grid has a trial on a seed that is not judged. For each number of
steps, the setting with the lowest training loss and the one with the best validation
score are then run on the judged seeds, beside the default.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Float
from matplotlib.ticker import NullFormatter
from numpy import ndarray

import gnlin

from .. import thresholds
from ..experiment import Columns, Experiment, only, Place, Point, Runs, Settings
from ..figures import BLUE, figure, GREEN, ORANGE
from ..verdicts import judge, Verdict
from .defaults.runs import fitted, has_diverged, mean_loss, score
from .defaults.tasks import Task, TASKS


DEFAULT = "default"
GRID: dict[str, Any] = {
    DEFAULT: gnlin.LevenbergMarquardt(),
    **{f"LM {d:g}": gnlin.LevenbergMarquardt(damping=d) for d in (1e-5, 1e-4, 1e-2)},
    **{f"damped {d:g}": gnlin.DampedGaussNewton(d) for d in (1e-4, 1e-3, 1e-2, 1e-1)},
    **{f"truncated {b:g}": gnlin.TruncatedGaussNewton(b) for b in (0.1, 0.5)},
    **{f"Adam {rate:g}": optax.adam(rate) for rate in (1e-3, 3e-3, 1e-2)},
}
"""The settings, by name: Levenberg-Marquardt with other dampings (relative to the
curvature along the first gradient), damped and truncated Gauss-Newton, and Adam."""

TRIAL_SEED = 10_000
"""The seed of the trials."""
LOWEST = 1e-6
"""A lower training loss counts as this: single precision resolves no other."""


@dataclasses.dataclass(frozen=True)
class Tuning(Settings):
    seeds: int = 6
    """At least six are needed to decide that no run diverges."""
    tasks: tuple[str, ...] = ("MLP, tanh", "MLP, dropout", "regression")
    batch_sizes: tuple[int, ...] = (16, 128, 1024)
    steps: tuple[int, ...] = (20, 100, 400)
    """The numbers of steps at which runs are compared."""
    most_examples: int = 60_000
    """A run ends at the last of these numbers up to which it sees so many examples."""
    long_batch: int = 128
    long_steps: int = 1000
    """With this batch size, the default goes on for so many steps."""


EMBEDDED = Tuning()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=2,
    tasks=("regression",),
    batch_sizes=(16,),
    steps=(2, 4),
    long_batch=16,
    long_steps=6,
)
FULL = dataclasses.replace(EMBEDDED, seeds=20, tasks=tuple(TASKS), most_examples=500_000)


def points(settings: Tuning) -> list[Point]:
    return [
        {"task": task, "batch_size": size}
        for task in settings.tasks
        for size in settings.batch_sizes
    ]


def looks_at(settings: Tuning, batch_size: int) -> tuple[int, ...]:
    """Return the numbers of steps at which runs of a batch size are compared."""
    return tuple(n for n in settings.steps if n * batch_size <= settings.most_examples)


def train(settings: Tuning, point: Point, place: Place) -> Columns:
    """Train one task on batches of one size.

    The columns `default_*` have a look more where the default goes on. `lowest_loss` and
    `best_score` are of the chosen settings, and `lowest` and `best` their numbers in the
    grid.
    """
    task, size = TASKS[point["task"]], point["batch_size"]
    looks = looks_at(settings, size)
    longer = (*looks, settings.long_steps) if size == settings.long_batch else looks
    run = functools.partial(run_setting, task, batch_size=size)
    with jax.enable_x64(False):  # as for a user who sets nothing
        trials = [run(name, TRIAL_SEED, looks=looks) for name in GRID]
        losses = np.array([trial["loss"] for trial in trials])
        scores = np.array([task.sign * trial["validation"] for trial in trials])
        lowest = np.argmin(losses, axis=0)
        best = np.argmax(np.nan_to_num(scores, nan=-np.inf), axis=0)
        names, seeds = list(GRID), settings.each_seed
        default = [run(DEFAULT, seed, looks=longer) for seed in seeds]
        again = {
            names[number]: [run(names[number], seed, looks=looks) for seed in seeds]
            for number in {*lowest.tolist(), *best.tolist()}
        }
    columns = {f"default_{k}": np.array([d[k] for d in default]) for k in default[0]}

    def chosen(numbers: ndarray, column: str) -> Float[ndarray, "seeds looks"]:
        runs = [again[names[number]] for number in numbers]
        values = [[of[column][i] for of in one] for i, one in enumerate(runs)]
        return np.array(values).T

    each = np.ones((len(seeds), 1))
    padded = {
        "lowest_loss": chosen(lowest, "loss"),
        "best_score": chosen(best, "test"),
        "lowest": lowest * each,
        "best": best * each,
        "steps": np.array(longer) * each,
    }
    width = len(longer)
    return columns | {
        name: np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=np.nan)
        for name, x in padded.items()
    }


class _Looks(gnlin.callbacks.Callback):
    """Records the losses and scores after given numbers of steps."""

    def __init__(self, task: Task, data: Any, looks: Sequence[int]):
        self.task, self.data, self.looks = task, data, looks
        self.found: list[tuple[float, float, float]] = []

    def on_step(self, run: Any) -> None:
        if run.step in self.looks:
            given = self.task, run.model, run.model_state
            loss = mean_loss(*given, self.data.train)
            validation = score(*given, self.data.validation)
            self.found.append((loss, validation, score(*given, self.data.test)))


def run_setting(
    task: Task, name: str, seed: int, *, batch_size: int, looks: Sequence[int]
) -> dict[str, Any]:
    """Train a task with a setting of the grid. Return the training loss, the validation
    and test scores at the looks, and whether the run diverged. After that, the loss is
    infinite and the scores are NaN."""
    data, start = task.data(seed), task.start(seed)
    first_loss = mean_loss(task, *start, data.train)
    seen = _Looks(task, data, looks)
    result = fitted(
        task,
        start,
        data.train,
        GRID[name],
        key=jax.random.key(seed),
        batch_size=batch_size,
        steps=max(looks),
        callbacks=[seen],
    )
    missing = len(looks) - len(seen.found)
    found = np.array([*seen.found, *[(np.inf, np.nan, np.nan)] * missing])
    return {
        "loss": np.maximum(found[:, 0], LOWEST),
        "validation": found[:, 1],
        "test": found[:, 2],
        "diverged": float(has_diverged(result, first_loss, found[-1, 0])),
    }


#
# Statistics of the runs
#


def excess(runs: Runs, look: int) -> Float[ndarray, " seeds"]:
    """Return log10 of the default's training loss, divided by that of the setting whose
    trial had the lowest."""
    ratio = runs["default_loss"][:, look] / runs["lowest_loss"][:, look]
    return np.log10(ratio)


def shortfall(runs: Runs, look: int) -> Float[ndarray, " seeds"]:
    """Return how much lower the default's test accuracy is than that of the setting whose
    trial had the best validation score."""
    return runs["best_score"][:, look] - runs["default_test"][:, look]


def judge_all(settings: Tuning, all_runs: Sequence[Runs]) -> list[Verdict]:
    verdicts = []
    for size in settings.batch_sizes:
        at_size = [runs for runs in all_runs if runs.point["batch_size"] == size]
        for look, steps in enumerate(looks_at(settings, size)):
            where = f"Batches of {size:,}, {steps} steps"
            excesses = [excess(runs, look) for runs in at_size]
            accuracies = [
                shortfall(runs, look)
                for runs in at_size
                if TASKS[runs.point["task"]].higher_is_better
            ]
            ratio = "log10 of the default's training loss over the best setting's"
            verdicts += [
                judge(
                    f"{where}: on average, the default's loss is close to the best",
                    f"{ratio}, mean over the tasks",
                    np.mean(excesses, axis=0),
                    thresholds.NEAR_BEST_SETTING,
                ),
                judge(
                    f"{where}: on each task, the default's loss is close to the best",
                    f"{ratio}, median over the seeds of the task where it is largest",
                    np.transpose(excesses),
                    thresholds.WORST_OF_TASKS,
                    statistic=_largest_median,
                ),
            ]
            if accuracies:
                verdicts.append(
                    judge(
                        f"{where}: the default is as accurate as the best setting",
                        "test accuracy of the best setting less the default's, mean over "
                        "the tasks",
                        np.mean(accuracies, axis=0),
                        thresholds.HALF_A_POINT,
                    )
                )
    long = [r for r in all_runs if r.point["batch_size"] == settings.long_batch]
    rise = [np.log10(r["default_loss"][:, -1] / r["default_loss"][:, 1]) for r in long]
    diverged = np.sum([runs["default_diverged"] for runs in all_runs], axis=0)
    return [
        *verdicts,
        judge(
            f"Batches of {settings.long_batch:,}: {settings.long_steps:,} steps end no "
            f"higher than {settings.steps[1]}",
            "log10 of the ratio of the training losses, largest over the tasks",
            np.max(rise, axis=0) if rise else [],
            thresholds.FALLS,
        ),
        judge(
            "No run of the default diverges",
            "number of runs that diverge",
            diverged,
            thresholds.NONE,
        ),
    ]


def _largest_median(values: Float[ndarray, "seeds tasks"]) -> float:
    return float(np.max(np.median(values, axis=0)))


#
# The figure
#


def draw(settings: Tuning, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    """Draw the excess of each task, with the name of the best setting."""
    sizes, names = settings.batch_sizes, list(GRID)
    with figure(out / "tuning.png", width=12, height=4.6) as drawing:
        panels = drawing.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        for panel, size in zip(panels, sizes, strict=True):
            looks = looks_at(settings, size)
            for row, task in enumerate(settings.tasks):
                runs = only(all_runs, task=task, batch_size=size)
                for look, colour in zip(range(len(looks)), _COLOURS, strict=False):
                    height = row + 0.27 * (look - (len(looks) - 1) / 2)
                    values = 10 ** excess(runs, look)
                    best = names[int(runs["lowest"][0, look])]
                    label = f"{looks[look]} steps" if row == 0 else None
                    heights = np.full(len(values), height)
                    panel.plot(values, heights, ".", color=colour, label=label)
                    panel.annotate(
                        best,
                        (1.01, height),
                        xycoords=("axes fraction", "data"),
                        fontsize=6,
                        va="center",
                    )
            for bound, look in ((1.0, "-"), (1.5, "--"), (3.0, ":")):
                panel.axvline(bound, color="grey", linestyle=look, linewidth=1)
            panel.set(
                title=f"Batches of {size:,}",
                xscale="log",
                xlabel="Training loss over the best setting's",
            )
            panel.set_xticks(_RATIOS, [f"{ratio:g}" for ratio in _RATIOS])
            panel.xaxis.set_minor_formatter(NullFormatter())  # labels would overlap
        panels[0].set_yticks(range(len(settings.tasks)), settings.tasks)
        panels[0].invert_yaxis()
        handles, labels = panels[0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    caption = (
        "The training loss of the default divided by that of the best setting, whose "
        f"name stands at the right. A point is one of {settings.seeds} seeds. The best "
        f"setting is the one of {len(GRID)} with the lowest loss in a trial on another "
        "seed. The lines are at ratios of 1, 1.5 and 3."
    )
    return {"tuning": caption}


_COLOURS = ORANGE, BLUE, GREEN
_RATIOS = 0.5, 1, 1.5, 2, 3


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="The paper makes no such claim. This asks what a user loses who sets nothing.",
    grid="batch_sizes",
    steps="",
    bounds=(1, 1024),
    runs_at_a_point=lambda settings: 1 + 2 * len(settings.steps),
)
