"""Full batch against mini-batches with ten times the K and a tenth of the learning rate.

After equal numbers of feature updates both have covered the same time (learning rate
times steps). They are compared look by look.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .. import thresholds, training
from ..experiment import Experiment, only, Place, Point, Runs
from ..figures import band, BLUE, figure, shades, VERMILION
from ..shortfall import untrained
from ..training import Columns, Images
from ..verdicts import at_ceiling, judge, Verdict


FULL_BATCH, MINI_BATCHES = "full batch", "mini-batches"
FACTOR = 10
"""On mini-batches, K and the steps are this many times the full batch's, and the learning
rate is divided by it."""
COLOURS = {FULL_BATCH: BLUE, MINI_BATCHES: VERMILION}


@dataclasses.dataclass(frozen=True)
class Batch(Images):
    periods: tuple[int, ...] = (1, 10, 30, 100, 300, 1_000)
    """Periods of the full batch."""
    batch_size: int | None = 64
    learning_rate: float = 0.1
    num_steps: int = 5_000
    num_looks: int = 50


EMBEDDED = Batch()
QUICK = dataclasses.replace(EMBEDDED, seeds=2, periods=(1, 10), num_steps=40, num_looks=4)
FULL = dataclasses.replace(
    EMBEDDED,
    periods=(1, 10, 100, 1_000, 10_000),
    data="cifar10",
    network="lenet",
    batch_size=256,
    reduction="sum",
    num_train=5_000,
    learning_rate=1e-3,
    num_steps=100_000,
    num_looks=100,
)
MEDIUM = training.medium(
    FULL, periods=(1, 10, 100, 1_000), num_train=1_000, learning_rate=1e-3
)


def points(settings: Batch) -> list[Point]:
    return [
        {"batch": batch, "period": period}
        for batch in (FULL_BATCH, MINI_BATCHES)
        for period in settings.periods
    ]


def train(settings: Batch, point: Point, place: Place) -> Columns:
    settings = dataclasses.replace(settings, num_looks=training.looks(settings)[1])
    period, rate = point["period"], settings.learning_rate
    if point["batch"] == FULL_BATCH:
        settings = dataclasses.replace(settings, batch_size=None)
    else:
        steps = FACTOR * settings.num_steps
        settings = dataclasses.replace(settings, num_steps=steps)
        period, rate = FACTOR * period, rate / FACTOR
    solver = training.descent(period, rate)
    return training.mini_batches(settings, place, solver)


def judge_all(settings: Batch, all_runs: Sequence[Runs]) -> list[Verdict]:
    accuracy = {
        batch: np.array(
            [
                only(all_runs, batch=batch, period=period)["test_accuracy"]
                for period in settings.periods
            ]
        )
        for batch in (FULL_BATCH, MINI_BATCHES)
    }
    apart = np.abs(accuracy[FULL_BATCH] - accuracy[MINI_BATCHES])
    finished = lambda values: training.where_trained(values, *all_runs)
    lacking = untrained(*all_runs)
    finals = [runs.final("test_accuracy") for runs in all_runs]
    return [
        judge(
            "Full batch and mini-batches end with the same test accuracy",
            "absolute difference in final test accuracy, mean over K",
            finished(apart[:, :, -1].mean(axis=0)),
            thresholds.SAME_PICTURE,
            untested=at_ceiling(*finals),
            lacking=lacking,
        ),
        judge(
            "Full batch and mini-batches have the same test accuracy throughout training",
            "absolute difference in test accuracy, mean over K and the course of "
            "training",
            finished(apart.mean(axis=(0, 2))),
            thresholds.SAME_PICTURE,
            lacking=lacking,
        ),
    ]


def draw(settings: Batch, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    colours = shades(len(settings.periods))
    with figure(out / "batch.png", width=13, height=4.6) as drawing:
        *over_steps, over_k = drawing.subplots(1, 3)
        over_steps[1].sharey(over_steps[0])
        for panel, batch in zip(over_steps, COLOURS, strict=True):
            factor = 1 if batch == FULL_BATCH else FACTOR
            for period, colour in zip(settings.periods, colours, strict=True):
                runs = only(all_runs, batch=batch, period=period)
                label = f"K = {factor * period:,}"
                training.draw_band(panel, runs, "test_accuracy", colour, label)
            rate = settings.learning_rate / factor
            panel.set(title=rf"{batch}, $\eta$ = {rate:g}", xlabel="Steps")
            panel.legend(fontsize="small")
        for batch, colour in COLOURS.items():
            finals = 100 * np.array(
                [
                    only(all_runs, batch=batch, period=period).final("test_accuracy")
                    for period in settings.periods
                ]
            )
            band(over_k, settings.periods, finals.T, colour, batch, "o-")
        over_k.set(
            xscale="log", title="At the end", xlabel="Period $K$ on the full batch"
        )
        over_k.legend()
        over_steps[0].set_ylabel("Test accuracy (%)")
    return {
        "batch": "Test accuracy over steps on the full batch and on mini-batches of "
        f"{settings.batch_size}, and its final value over K. On mini-batches K and "
        f"the number of steps are {FACTOR} times larger, and the learning rate is "
        f"{FACTOR} times smaller. Means and ranges over {settings.seeds} seeds; "
        f"{settings.network} on {settings.data}."
    }


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="The paper trains a CNN on CIFAR-10, on the full batch with learning rate "
    "10^-3 and on mini-batches with learning rate 10^-4 and ten times the K. Both "
    "show the same behaviour.",
    grid="periods",
    own=training.own,
    trains_state=lambda settings: True,
    rehearsed=True,
    medium=MEDIUM,
)
