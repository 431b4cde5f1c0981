"""Tasks that need learned features in theory: K = 1 to infinity over the sample size.

The classes are signs of a polynomial in a few of many inputs. Without learning features a
network needs about as many examples as there are functions of that degree; if it learns
them, it needs a multiple of the number of inputs. The claims are judged at the largest
sample that is smaller than the number of functions. For K = infinity one linearised
problem is solved.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from .. import thresholds, training
from ..data.teachers import NUM_INPUTS, TEACHERS
from ..experiment import Experiment, only, Place, Point, Runs
from ..figures import band, BLACK, figure, shades, VERMILION
from ..solved import solved_accuracy, TOLERANCE, train_endlessly
from ..training import Columns, Images
from ..verdicts import judge, Verdict


@dataclasses.dataclass(frozen=True)
class Provable(Images):
    seeds: int = 12
    tasks: tuple[str, ...] = tuple(TEACHERS)
    network: str = "teacher-mlp"
    sizes: tuple[int, ...] = (200, 400, 1_000, 2_000, 4_000)
    """There are 435 functions of degree 2, and 4,060 of degree 3."""
    periods: tuple[float, ...] = (1.0, 300.0, math.inf)
    batch_size: int | None = 64
    learning_rate: float = 0.2
    num_steps: int = 4_000
    num_looks: int = 20


EMBEDDED = Provable()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=2,
    tasks=("staircase",),
    sizes=(100, 200),
    periods=(1.0, math.inf),
    num_steps=100,
    num_looks=4,
)
FULL = dataclasses.replace(
    EMBEDDED,
    seeds=20,
    sizes=(200, 400, 1_000, 2_000, 4_000, 8_000, 16_000),
    periods=(1.0, 10.0, 100.0, 1_000.0, math.inf),
    num_steps=60_000,
)


def points(settings: Provable) -> list[Point]:
    return [
        {"task": task, "period": period, "num_train": size}
        for task in settings.tasks
        for period in settings.periods
        for size in settings.sizes
    ]


def train(settings: Provable, point: Point, place: Place) -> Columns:
    settings = dataclasses.replace(
        settings, data=point["task"], num_train=point["num_train"]
    )
    if math.isinf(point["period"]):
        return train_endlessly(settings, place)
    solver = training.descent(point["period"], settings.learning_rate)
    return training.mini_batches(settings, place, solver)


def errors(
    settings: Provable, all_runs: Sequence[Runs], task: str, period: float
) -> Float[ndarray, "seeds sizes"]:
    """Return the test errors at the best validation accuracy, or at the solution if K is
    infinite; NaN if the problem is not solved."""
    accuracy = training.early_stopped if math.isfinite(period) else solved_accuracy
    found = [
        accuracy(only(all_runs, task=task, period=period, num_train=size))
        for size in settings.sizes
    ]
    return 1 - np.stack(found, axis=1)


def judge_all(settings: Provable, all_runs: Sequence[Runs]) -> list[Verdict]:
    verdicts = []
    for task in settings.tasks:
        teacher = TEACHERS[task]
        at = sum(size < teacher.num_functions for size in settings.sizes) - 1
        for period in settings.periods:
            finite = math.isfinite(period)
            verdicts.append(
                judge(
                    f"{teacher.title}: K = {_shown(period)} "
                    f"{'succeeds' if finite else 'fails'} at n = {settings.sizes[at]:,}",
                    "test error",
                    errors(settings, all_runs, task, period)[:, at],
                    thresholds.SUCCEEDS if finite else thresholds.FAILS,
                )
            )
    return verdicts


def _shown(period: float) -> str:
    return f"{period:,.0f}" if math.isfinite(period) else "infinity"


def draw(settings: Provable, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    finite = [period for period in settings.periods if math.isfinite(period)]
    colours = dict(zip(finite, shades(len(finite)), strict=True)) | {math.inf: VERMILION}
    width = 1.5 + 4 * len(settings.tasks)
    with figure(out / "provable_features.png", width=width, height=4.6) as drawing:
        panels = drawing.subplots(1, len(settings.tasks), sharey=True, squeeze=False)[0]
        for panel, task in zip(panels, settings.tasks, strict=True):
            teacher = TEACHERS[task]
            for period in settings.periods:
                values = 100 * errors(settings, all_runs, task, period)
                known = np.isfinite(values).all(axis=1)
                label = f"K = {_shown(period)}"
                band(panel, settings.sizes, values[known], colours[period], label, "o-")
            for number, name in (
                (NUM_INPUTS, "inputs"),
                (teacher.num_functions, "functions of this degree"),
            ):
                panel.axvline(number, color=BLACK, linestyle=":", linewidth=1)
                panel.text(number, 4, f" {name}", rotation=90, va="bottom", fontsize=8)
            panel.set(xscale="log", xlabel="Training examples $n$", title=teacher.title)
            panel.set_ylim(-2, 53)
        panels[0].set_ylabel("Test error (%)")
        panels[-1].legend(fontsize="small")
    return {
        "provable_features": "Test error, stopped early at the best validation "
        "accuracy, over the number of training examples. Dotted lines mark the "
        "number of inputs and the number of functions of the polynomial's degree. "
        "The network has one hidden layer of 128 units. For K = infinity the "
        "problem is solved by L-BFGS until no entry of the mean loss's gradient "
        f"exceeds {TOLERANCE:g}. Means and ranges over {settings.seeds} seeds, each "
        "with its own data."
    }


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="This experiment is not in the paper, whose tasks a linearised network can "
    "learn too. In theory, a network without learned features needs as many "
    "examples as there are functions of the polynomial's degree, and a network with "
    "them needs about as many as there are inputs.",
    grid="periods",
    rehearsed=True,
)
