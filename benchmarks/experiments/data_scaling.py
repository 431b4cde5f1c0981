"""Final test error against the number of training examples, from K = 1 to K = infinity.

For K = infinity one linearised problem is solved. Its error is the linearised network's,
because this network is trained. Each seed draws its own images, and a smaller training
set is a subset of a larger one.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from .. import thresholds, training
from ..experiment import Experiment, only, Place, Point, Runs
from ..figures import band, figure, shades, VERMILION
from ..shortfall import untrained
from ..solved import solved_accuracy, TOLERANCE, train_endlessly
from ..training import Columns, Images
from ..verdicts import judge, slope, Verdict


@dataclasses.dataclass(frozen=True)
class DataScaling(Images):
    seeds: int = 10
    sizes: tuple[int, ...] = (50, 100, 200, 400, 800, 1150)
    periods: tuple[float, ...] = (1.0, 10.0, 100.0, math.inf)
    batch_size: int | None = 64
    learning_rate: float = 0.05
    num_steps: int = 6_000
    num_looks: int = 20


EMBEDDED = DataScaling()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=2,
    sizes=(50, 100, 200),
    periods=(1.0, 10.0, math.inf),
    num_steps=20,
    num_looks=2,
)
FULL = dataclasses.replace(
    EMBEDDED,
    sizes=(500, 1_000, 2_000, 5_000, 10_000, 20_000, 45_000),
    periods=(1.0, 1e3, 1e4, 1e5, math.inf),
    data="cifar10",
    network="lenet",
    batch_size=256,
    reduction="sum",
    learning_rate=1e-5,
    num_steps=1_000_000,
    num_looks=20,
)
MEDIUM = training.medium(
    FULL, sizes=(500, 1_000, 2_000, 5_000), periods=(1.0, 1e2, 1e3, math.inf)
)


def points(settings: DataScaling) -> list[Point]:
    return [
        {"period": period, "num_train": size}
        for period in settings.periods
        for size in settings.sizes
    ]


def train(settings: DataScaling, point: Point, place: Place) -> Columns:
    settings = dataclasses.replace(settings, num_train=point["num_train"])
    if math.isinf(point["period"]):
        return train_endlessly(settings, place)
    solver = training.descent(point["period"], settings.learning_rate)
    return training.mini_batches(settings, place, solver)


def errors(
    settings: DataScaling,
    all_runs: Sequence[Runs],
    period: float,
    stop: Callable[[Runs], Float[ndarray, " seeds"]] = training.optimally_stopped,
) -> Float[ndarray, "seeds sizes"]:
    """Return the test errors at optimal early stopping, which is the paper's statistic,
    or at the solution if K is infinite; NaN if training has not finished."""

    def stopped(runs):
        return training.where_trained(stop(runs), runs)

    accuracy = stopped if math.isfinite(period) else solved_accuracy
    found = [
        accuracy(only(all_runs, period=period, num_train=size)) for size in settings.sizes
    ]
    # The logarithm needs a positive error: count one wrong image in ten thousand.
    return np.maximum(1 - np.stack(found, axis=1), 1e-4)


def judge_all(settings: DataScaling, all_runs: Sequence[Runs]) -> list[Verdict]:
    x, first = np.log10(settings.sizes), min(settings.periods)
    found = {k: np.log10(errors(settings, all_runs, k)) for k in settings.periods}

    def lacking(*periods, sizes=settings.sizes):
        runs = [
            only(all_runs, period=period, num_train=size)
            for period in periods
            for size in sizes
            if period < math.inf
        ]
        return untrained(*runs)

    verdicts = [
        judge(
            f"With more data, the error for K = {period:g} falls as fast as for K = "
            f"{first:g}",
            f"difference in the slope of log10 test error in log10 n, K = {period:g} "
            f"less K = {first:g}",
            slope(x, found[period]) - slope(x, found[first]),
            thresholds.SCALES_ALIKE,
            lacking=lacking(first, period),
        )
        for period in settings.periods
        if first < period < math.inf
    ]
    if math.inf in settings.periods:
        stop = training.early_stopped
        by_validation = np.log10(errors(settings, all_runs, first, stop))
        larger = f"K = infinity has a larger error than K = {first:g}"
        largest = f"n = {max(settings.sizes):,}"
        ratio = (
            "log10 of the ratio of test errors, K = infinity at its solution (1 - "
            f"test_accuracy_linearised) over K = {first:g} (1 - test_accuracy) at its "
            "look with the largest"
        )
        verdicts += [
            judge(
                "With more data, the error for K = infinity falls more slowly than for "
                f"K = {first:g}",
                "difference in the slope of log10 test error in log10 n, K = infinity "
                f"less K = {first:g}",
                slope(x, found[math.inf]) - slope(x, found[first]),
                thresholds.RISES,
                lacking=lacking(first),
            ),
            judge(
                f"{larger} at {largest}",
                f"{ratio} test_accuracy",
                (found[math.inf] - found[first])[:, -1],
                thresholds.RISES,
                lacking=lacking(first, sizes=settings.sizes[-1:]),
            ),
            judge(
                f"{larger}, stopped early on validation images, at {largest}",
                f"{ratio} validation_accuracy",
                (found[math.inf] - by_validation)[:, -1],
                thresholds.RISES,
                lacking=lacking(first, sizes=settings.sizes[-1:]),
            ),
        ]
    return verdicts


def draw(settings: DataScaling, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    finite = [period for period in settings.periods if period < math.inf]
    colours = shades(len(finite))
    with figure(out / "data_scaling.png", width=7.5, height=5.2) as drawing:
        axes = drawing.subplots()
        for period in settings.periods:
            ours = period in finite
            colour = colours[finite.index(period)] if ours else VERMILION
            label = f"K = {period:,.0f}" if ours else r"K = $\infty$"
            values = 100 * errors(settings, all_runs, period)
            band(axes, settings.sizes, values, colour, label, "o-")
        axes.set(xscale="log", yscale="log", xlabel="Training examples $n$")
        axes.set_ylabel("Test error (%)")
        low, high = axes.get_ylim()
        ticks = [tick for tick in (1, 2, 3, 5, 10, 20, 30, 50, 80) if low < tick < high]
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.set_yticks([], minor=True)
        axes.legend()
    return {
        "data_scaling": "Test error at optimal early stopping against the number of "
        "training examples, for several K. K = infinity is not stopped early: its "
        "problem is solved by L-BFGS until no entry of the mean loss's gradient exceeds "
        f"{TOLERANCE:g}. "
        f"Means and ranges over {settings.seeds} seeds, each with its own images; "
        f"{settings.network} on {settings.data}, mini-batches of "
        f"{settings.batch_size}."
    }


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="The paper trains a CNN on subsets of CIFAR-10 to convergence, with learning "
    "rate 10^-5 (10^-3 for K = infinity). Every finite K scales with the data like "
    "K = 1, and K = infinity scales worse.",
    grid="periods",
    own=training.own,
    trains_state=lambda settings: math.inf not in settings.periods,
    rehearsed=True,
    medium=MEDIUM,
)
