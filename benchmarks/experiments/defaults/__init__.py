"""Untuned `gnlin.fit` on ordinary networks, compared with Adam at its best rate.

Seven networks are trained by `gnlin.fit` without a solver, on mini-batches and on the
full batch, and by Adam at five rates, of which the best on the *test* examples counts.
Adam makes as many passes through the model as `gnlin.fit` on mini-batches, and in a
second comparison twice as many. The final test accuracies or errors are compared.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from matplotlib.ticker import NullFormatter
from numpy import ndarray

from ... import thresholds
from ..._results import write_whole
from ...experiment import Columns, Experiment, only, Place, Point, Runs, Settings
from ...figures import band, BLACK, BLUE, figure, GREEN
from ...verdicts import judge, Verdict
from .adam import run_adam
from .runs import BATCH_SIZE, run_task
from .tasks import Task, TASKS


LEVEL = 0.01
"""A run has levelled off if its second half improves the metric by at most this part."""


@dataclasses.dataclass(frozen=True)
class Defaults(Settings):
    seeds: int = 6
    """At least six are needed to decide that no run diverges."""
    tasks: tuple[str, ...] = tuple(TASKS)
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
    """Rates of Adam."""
    epochs: int | None = None
    """Epochs on mini-batches; `None` for the task's own number."""
    full_batch_steps: int = 40
    num_looks: int = 20


EMBEDDED = Defaults()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=2,
    tasks=("regression",),
    rates=(1e-3, 1e-2),
    epochs=1,
    full_batch_steps=3,
    num_looks=2,
)
FULL = dataclasses.replace(EMBEDDED, seeds=20)


def points(settings: Defaults) -> list[Point]:
    return [{"task": name} for name in settings.tasks]


def train(settings: Defaults, point: Point, place: Place) -> Columns:
    """Train one task. The columns `fit_*` come from mini-batches, `full_*` from the full
    batch, and `adam_*`, with axes over seeds, rates and looks, from Adam."""
    task = TASKS[point["task"]]
    # Use JAX's default precision, as for a user who sets nothing.
    with jax.enable_x64(False):
        fit = _of_seeds(
            settings,
            lambda seed: run_task(
                task, seed, epochs=settings.epochs, num_looks=settings.num_looks
            ),
        )
        full = {}
        if task.full_batch:
            full = _of_seeds(
                settings,
                lambda seed: run_task(
                    task,
                    seed,
                    batch_size=None,
                    epochs=settings.full_batch_steps,
                    num_looks=settings.num_looks,
                ),
            )
        # Adam makes two passes a step; half of its looks cover as many as `fit` makes.
        num_steps = int(np.ceil(fit["passes"].max() / 2))
        adam = run_adam(
            task,
            settings.each_seed,
            settings.rates,
            2 * num_steps,
            num_looks=2 * settings.num_looks,
        )
    named = {"fit": fit, "full": full, "adam": adam}
    columns = {f"{k}_{name}": x for k, of in named.items() for name, x in of.items()}
    for name in ("adam_steps", "adam_seconds"):
        columns[name] = np.full(settings.seeds, columns[name])
    return {name: np.asarray(x) for name, x in columns.items()}


def _of_seeds(settings: Defaults, run: Any) -> dict[str, ndarray]:
    runs = [run(seed) for seed in settings.each_seed]
    return {name: np.stack([figures[name] for figures in runs]) for name in runs[0]}


#
# Statistics of the runs
#


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The final test scores on one task, one for each seed."""

    task: Task
    fit: Float[ndarray, " seeds"]
    full: Float[ndarray, " seeds"] | None
    """Scores on the full batch, if it is run."""
    adam: Float[ndarray, " seeds"]
    """Scores of Adam after as many passes as `fit` makes, at the best rate."""
    rate: float
    longer: Float[ndarray, " seeds"]
    """Scores of Adam after twice as many passes, at the rate that is best then."""
    longer_rate: float
    num_diverged: int
    """Number of diverged runs of `fit`, on mini-batches and on the full batch."""

    @property
    def shortfall(self) -> Float[ndarray, " seeds"]:
        """Return how much worse `fit` is than Adam, relatively; negative if better."""
        return self.task.sign * (self.adam - self.fit) / self.adam.mean()

    @property
    def as_good(self) -> bool:
        return bool(self.shortfall.mean() <= thresholds.FIT_TOLERANCE)


def outcome(settings: Defaults, runs: Runs) -> Outcome:
    task = TASKS[runs.point["task"]]
    half = _best(settings, task, runs["adam_test_scores"][..., settings.num_looks - 1])
    end = _best(settings, task, runs["adam_test_scores"][..., -1])
    scores = runs["fit_score"], runs.columns.get("full_score")
    return Outcome(task, *scores, *half, *end, int(_diverged(runs).sum()))


def _diverged(runs: Runs) -> Float[ndarray, " seeds"]:
    """Return the number of diverged runs of `fit` for each seed."""
    kinds = [name for name in ("fit_diverged", "full_diverged") if name in runs.columns]
    return np.sum([runs[name].astype(float) for name in kinds], axis=0)


def _best(settings: Defaults, task: Task, scores: Float[ndarray, "seeds rates"]):
    """Return the scores at the rate that is best on average, and that rate."""
    mean = np.nan_to_num(task.sign * scores.mean(axis=0), nan=-np.inf)
    index = int(np.argmax(mean))
    return scores[:, index], settings.rates[index]


def judge_all(settings: Defaults, all_runs: Sequence[Runs]) -> list[Verdict]:
    found = [outcome(settings, runs) for runs in all_runs]
    diverged = np.sum([_diverged(runs) for runs in all_runs], axis=0)
    share = np.mean([o.shortfall <= thresholds.FIT_TOLERANCE for o in found], axis=0)
    return [
        *(
            judge(
                f"{o.task.name}: untuned gnlin.fit is as good as Adam at its best rate",
                "relative difference in final test "
                + (
                    "accuracy, Adam less gnlin.fit"
                    if o.task.higher_is_better
                    else "error, gnlin.fit less Adam"
                ),
                o.shortfall,
                thresholds.AS_GOOD_AS_ADAM,
            )
            for o in found
        ),
        judge(
            "Untuned gnlin.fit is as good as Adam at its best rate on most tasks",
            f"share of the tasks on which it is at most {thresholds.FIT_TOLERANCE:.0%} "
            "worse",
            share,
            thresholds.ON_MOST_TASKS,
        ),
        judge(
            "No run diverges",
            "number of runs of gnlin.fit that diverge",
            diverged,
            thresholds.NONE,
        ),
    ]


#
# The table and the figure
#

HEADER = (
    "task",
    "fit",
    "full batch",
    "Adam",
    "rate",
    "Adam, twice the passes",
    "as good",
    "steps",
    "passes",
    "Adam's steps",
    "seconds",
    "Adam's seconds",
    "levelled off",
    "diverged",
)


def markdown(settings: Defaults, all_runs: Sequence[Runs]) -> str:
    """Return a table with a row for each task. It shows the test accuracy in per cent, or
    the mean squared error: the mean over the seeds, and half of their range."""
    rows = [HEADER, ("---",) * len(HEADER)]
    found = [outcome(settings, runs) for runs in all_runs]
    rows += [_row(runs, o) for runs, o in zip(all_runs, found, strict=True)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    number = sum(o.as_good for o in found)
    lines += [
        "",
        f"gnlin.fit is as good as Adam or better on {number} of {len(found)} tasks.",
    ]
    return "\n".join(lines) + "\n"


def _row(runs: Runs, found: Outcome) -> tuple[str, ...]:
    task = found.task
    # Half of the steps of Adam cover as many passes as `fit` makes.
    steps, seconds = runs["adam_steps"].mean() / 2, runs["adam_seconds"].mean() / 2
    return (
        task.name,
        _shown(task, found.fit),
        "" if found.full is None else _shown(task, found.full),
        _shown(task, found.adam),
        f"{found.rate:g}",
        f"{_shown(task, found.longer)} ({found.longer_rate:g})",
        "yes" if found.as_good else "no",
        f"{runs['fit_steps'].mean():,.0f}",
        f"{runs['fit_passes'].mean():,.0f}",
        f"{steps:,.0f}",
        # The first seed includes the compilation.
        f"{np.median(runs['fit_seconds']):.3g}",
        f"{seconds:.3g}",
        "yes" if _levelled(task, runs["fit_test_scores"]) else "no",
        str(found.num_diverged),
    )


def _shown(task: Task, values: Float[ndarray, " seeds"]) -> str:
    spread = np.ptp(values) / 2
    if task.higher_is_better:
        return f"{100 * values.mean():.1f} ± {100 * spread:.1f}"
    return f"{values.mean():.3f} ± {spread:.3f}"


def _levelled(task: Task, scores: Float[ndarray, "seeds looks"]) -> bool:
    """Return whether the second half of a run improves the score by at most `LEVEL`."""
    half, end = scores[:, scores.shape[1] // 2].mean(), scores[:, -1].mean()
    return bool(task.sign * (end - half) <= LEVEL * abs(end))


def draw(settings: Defaults, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    """Draw the test metric over passes, and write the table as Markdown."""
    text = markdown(settings, all_runs)
    write_whole(out / "defaults.md", lambda part: part.write_text(text, encoding="utf-8"))
    with figure(out / "defaults.png", width=12, height=6) as drawing:
        all_axes = drawing.subplots(2, 4).flat
        for axes, name in zip(all_axes, settings.tasks, strict=False):
            _draw_task(settings, axes, only(all_runs, task=name))
        handles, labels = drawing.axes[0].get_legend_handles_labels()
        for empty in drawing.axes[len(settings.tasks) :]:
            empty.set_axis_off()
        drawing.axes[-1].legend(handles, labels, loc="center")
    caption = (
        "Test error, or squared error for regression, over passes through the model on "
        f"{BATCH_SIZE} examples, for untuned gnlin.fit and for Adam. Adam has the one "
        f"of {len(settings.rates)} rates that ends with the best score on the same test "
        f"examples. Means and ranges over {settings.seeds} seeds."
    )
    return {"defaults": caption}


def _draw_task(settings: Defaults, axes: Any, runs: Runs) -> None:
    task, found = TASKS[runs.point["task"]], outcome(settings, runs)
    num_train = len(task.data(0).train[1])
    adam = runs["adam_test_scores"][:, settings.rates.index(found.longer_rate)]
    passes = 2 * runs["adam_steps"].mean()
    curves = [
        (adam, passes, BLACK, "Adam, best rate"),
        (runs["fit_test_scores"], runs["fit_passes"].mean(), BLUE, "fit, mini-batches"),
    ]
    if found.full is not None:
        passes = runs["full_passes"].mean() * num_train / BATCH_SIZE
        curves.append((runs["full_test_scores"], passes, GREEN, "fit, full batch"))
    for scores, passes, colour, label in curves:
        errors = 1 - scores if task.higher_is_better else scores
        looks = np.linspace(0, passes, scores.shape[1] + 1)[1:]
        band(axes, looks, np.maximum(errors, 1e-4), colour, label)
    axes.set(title=task.name, xscale="log", yscale="log", xlabel="Passes")
    axes.xaxis.set_minor_formatter(NullFormatter())  # labels would overlap
    axes.set_ylabel("Test error" if task.higher_is_better else "Squared error")


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="This experiment is not in the paper. It tests whether `gnlin.fit` trains "
    "ordinary networks without any tuning.",
    grid="rates",
    steps="",
    runs_at_a_point=lambda settings: 2 + len(settings.rates),
)
