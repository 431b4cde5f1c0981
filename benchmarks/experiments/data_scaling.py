"""Final test error against the number of training examples, from K = 1 to K = infinity.

K = infinity is one linearised problem, trained for as many steps as the others take; its
error is that of the linearised network, which is what has been trained.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .. import training
from ..experiment import Experiment, only, Place, Point, Runs
from ..figures import band, figure, shades, VERMILION
from ..training import Columns, Images
from ..verdicts import judge, slope, Verdict


@dataclasses.dataclass(frozen=True)
class DataScaling(Images):
    sizes: tuple[int, ...] = (50, 100, 200, 400, 800, 1300)
    periods: tuple[float, ...] = (1.0, 10.0, 100.0, math.inf)
    batch_size: int | None = 64
    learning_rate: float = 0.05
    endless_learning_rate: float = 0.05
    """Of K = infinity; the first K is run at it as well."""
    num_steps: int = 6_000
    num_looks: int = 4


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
    sizes=(500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000),
    periods=(1.0, 1e3, 1e4, 1e5, math.inf),
    data="cifar10",
    network="lenet",
    batch_size=256,
    learning_rate=1e-5,
    endless_learning_rate=1e-3,
    num_steps=1_000_000,
    num_looks=20,
)


def points(settings: DataScaling) -> list[Point]:
    curves = [(period, _rate(settings, period)) for period in settings.periods]
    also = min(settings.periods), settings.endless_learning_rate
    if math.inf in settings.periods and also not in curves:
        curves.append(also)
    return [
        {"period": period, "learning_rate": rate, "num_train": size}
        for period, rate in curves
        for size in settings.sizes
    ]


def _rate(settings: DataScaling, period: float) -> float:
    endless = math.isinf(period)
    return settings.endless_learning_rate if endless else settings.learning_rate


def train(settings: DataScaling, point: Point, place: Place) -> Columns:
    data, test = training.load(settings, place)
    data = training.subset(data, point["num_train"])
    solver = training.descent(point["period"], point["learning_rate"])
    return training.mini_batches(settings, (data, test), solver, place)


def errors(
    settings: DataScaling,
    all_runs: Sequence[Runs],
    period: float,
    rate: float | None = None,
) -> np.ndarray:
    """Axes over seeds and sizes; by default at the learning rate of the period."""
    rate = _rate(settings, period) if rate is None else rate
    name = "test_accuracy" + ("_linearised" if math.isinf(period) else "")
    finals = [
        only(all_runs, period=period, learning_rate=rate, num_train=size).final(name)
        for size in settings.sizes
    ]
    # For the logarithm; of ten thousand images one is wrong.
    return np.maximum(1 - np.stack(finals, axis=1), 1e-4)


def judge_all(settings: DataScaling, all_runs: Sequence[Runs]) -> list[Verdict]:
    x = np.log10(settings.sizes)
    first = min(settings.periods)

    def exponents(period, rate=None):
        return slope(x, np.log10(errors(settings, all_runs, period, rate)))

    base = exponents(first)
    verdicts = [
        judge(
            f"K = {period:g} scales like K = {first:g}",
            "slope of log10 error in log10 n less that of K = 1, a seed",
            exponents(period) - base,
            above=-0.1,
            below=0.1,
        )
        for period in settings.periods
        if first < period < math.inf
    ]
    if math.inf in settings.periods:
        rate = settings.endless_learning_rate
        largest = {
            period: np.log10(errors(settings, all_runs, period, rate)[:, -1])
            for period in (first, math.inf)
        }
        verdicts += [
            judge(
                "K = infinity scales worse",
                "slope of log10 error in log10 n less that of K = 1, a seed",
                exponents(math.inf) - exponents(first, rate),
                above=0,
            ),
            judge(
                f"K = infinity is worse at n = {max(settings.sizes):,}",
                "log10 of its error over that of K = 1, a seed",
                largest[math.inf] - largest[first],
                above=0,
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
        axes.set(xscale="log", yscale="log", xlabel="Training images $n$")
        axes.set_ylabel("Test error (%)")
        low, high = axes.get_ylim()
        ticks = [tick for tick in (1, 2, 3, 5, 10, 20, 30, 50, 80) if low < tick < high]
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.set_yticks([], minor=True)
        axes.legend()
    return {
        "data_scaling": "Test error against the number of training images, for several "
        f"K; mini-batches of {settings.batch_size}, {settings.num_steps:,} steps at "
        f"learning rate {settings.learning_rate:g} (K = infinity: "
        f"{settings.endless_learning_rate:g}), {settings.network} on "
        f"{settings.data}, the same images for all seeds; means and ranges of "
        f"{settings.seeds} seeds."
    }


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="CNN on subsets of CIFAR-10, to convergence, learning rate 10^-5 (10^-3 for "
    "K = infinity): every finite K scales like K = 1, K = infinity scales worse.",
    grid="periods",
)
