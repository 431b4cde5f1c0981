"""Test accuracy over K, from gradient descent to one solved problem after another.

Every K gets the same number of inner steps, but no fewer than so many feature updates.
On the full batch few steps are taken literally, more of them with the kernel, and from
10^4 on as gradient flow for the time K eta, whose error against literal steps is measured
and written down. Damped Gauss-Newton (next to no damping) and truncated Gauss-Newton
stand beside them, on the same axes; other learning rates on a coarser grid of K.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import optax

import gnlin

from .. import thresholds, training
from ..experiment import Experiment, only, Place, Point, Runs, select
from ..figures import band, BLACK, BLUE, figure, GREEN, ORANGE, PURPLE, SKY, VERMILION
from ..training import Columns, Images
from ..verdicts import judge, Verdict


DESCENT = "iterative linearisation"
DAMPED, TRUNCATED = "damped Gauss-Newton", "truncated Gauss-Newton"
SOLVED = "each problem by Adam"
STATISTICS = {
    "finally": lambda runs: runs.final("test_accuracy"),
    "at optimal early stopping": training.optimally_stopped,
}
SMALL = 1e4
"""K up to here is claimed to be like K = 1."""


@dataclasses.dataclass(frozen=True)
class KSweep(Images):
    periods: tuple[float, ...] = tuple(
        np.unique(
            np.concatenate([[1, 2, 4, 8, 16, 30, 60], np.round(np.logspace(2, 8, 18))])
        ).tolist()
    )
    other_learning_rates: tuple[float, ...] = (1e-4, 1e-2)
    every: int = 3
    """Of the periods, so many apart, at the other learning rates."""
    num_steps: int = 20_000
    fewest_updates: int = 20
    damping: float = 1e-5
    """That of the longest period, 1/(eta K)."""
    tolerance: float = 0.1
    baseline_steps: int = 20
    adam_steps: int = 20_000
    """On each linearised problem, as the paper's truncated Gauss-Newton."""
    num_train: int | None = 50


EMBEDDED = KSweep()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=2,
    periods=(1.0, 100.0, 1e6),
    other_learning_rates=(1e-4,),
    every=2,
    num_steps=200,
    fewest_updates=2,
    baseline_steps=2,
    adam_steps=20,
)
FULL = dataclasses.replace(
    EMBEDDED,
    data="cifar10",
    network="lenet",
    num_train=None,
    batch_size=256,
    reduction="sum",
    learning_rate=1e-5,
    other_learning_rates=(1e-6, 1e-4),
    num_steps=500_000,
    baseline_steps=2_000,
    adam_steps=200_000,
    damping=1e-2,
    num_looks=100,
)


def points(settings: KSweep) -> Sequence[Point]:
    def at(learning_rate, periods):
        return [
            {"solver": DESCENT, "learning_rate": learning_rate, "period": period}
            for period in periods
        ]

    found = at(settings.learning_rate, settings.periods)
    found += [{"solver": name} for name in (DAMPED, TRUNCATED, SOLVED)]
    for learning_rate in settings.other_learning_rates:
        found += at(learning_rate, settings.periods[:: settings.every])
    return found


def train(settings: KSweep, point: Point, place: Place) -> Columns:
    if point["solver"] != DESCENT:
        solver = _baseline(settings, point["solver"])
        if settings.batch_size is None:
            return training.full_batch(settings, place, solver, settings.baseline_steps)
        if point["solver"] != SOLVED:
            steps = min(settings.baseline_steps, settings.num_steps)
            settings = dataclasses.replace(settings, num_steps=steps)
        return training.mini_batches(settings, place, solver)
    period, learning_rate = point["period"], point["learning_rate"]
    if settings.batch_size is not None:
        solver = training.descent(period, learning_rate)
        return training.mini_batches(settings, place, solver)
    fewest = settings.fewest_updates
    return training.descend(settings, place, period, learning_rate, fewest_updates=fewest)


def _baseline(settings: KSweep, name: str) -> gnlin.AbstractGaussNewton:
    if name == DAMPED:
        return gnlin.DampedGaussNewton(settings.damping, form="prox-linear", search=None)
    if name == SOLVED:
        adam = optax.adam(1e-3)
        return gnlin.IterativeLinearisation(settings.adam_steps, optimiser=adam)
    return gnlin.TruncatedGaussNewton(settings.tolerance, form="prox-linear", search=None)


def _flow_error(settings: KSweep) -> float:
    """Of as many steps as the longest period that is not gradient flow."""
    data = training.load(settings, Place(), 0).train
    model = training.model_of(settings)(jax.random.key(0))
    return training.flow_error(
        model, data, training.LOSS, settings.learning_rate, int(training.FLOW_FROM)
    )


def _descents(settings: KSweep, all_runs: Sequence[Runs]) -> list[Runs]:
    return select(all_runs, solver=DESCENT, learning_rate=settings.learning_rate)


def judge_all(settings: KSweep, all_runs: Sequence[Runs]) -> list[Verdict]:
    """By the paper's statistic, optimal early stopping, and by the final accuracy."""
    verdicts = []
    for which, of in STATISTICS.items():
        by_k = {runs.point["period"]: of(runs) for runs in _descents(settings, all_runs)}
        first, last = by_k[min(by_k)], by_k[max(by_k)]
        small = [by_k[k] - first for k in by_k if min(by_k) < k <= SMALL]
        verdicts += [
            judge(
                f"K up to {SMALL:g} is like K = 1, {which}",
                "difference of mean test accuracies from that of K = 1, the largest of "
                "all K",
                np.stack(small, axis=1) if small else [],
                thresholds.LIKE_FIRST,
                statistic=lambda apart: float(np.abs(apart.mean(axis=0)).max()),
            ),
            judge(
                f"K = {max(by_k):g} is worse than K = 1, {which}",
                "test accuracy of the one less that of the other, a seed",
                last - first,
                thresholds.FALLS,
            ),
            judge(
                f"K = {max(by_k):g} approaches truncated Gauss-Newton, {which}",
                "test accuracy of the one less that of each problem solved by "
                f"{settings.adam_steps:,} steps of Adam, a seed",
                last - of(only(all_runs, solver=SOLVED)),
                thresholds.REACHED_BY_TRUNCATED,
            ),
        ]
    return verdicts


def draw(settings: KSweep, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    """Test accuracy over inner steps, over feature updates, and in the end over K."""
    import matplotlib

    colours = matplotlib.colormaps["viridis"]
    descents = _descents(settings, all_runs)
    looks = {
        DAMPED: {"color": BLACK, "linestyle": "--"},
        TRUNCATED: {"color": VERMILION, "linestyle": "-."},
        SOLVED: {"color": PURPLE, "linestyle": ":"},
    }
    with figure(out / "k_sweep.png", width=13, height=4.8) as drawing:
        over_steps, over_updates, over_k = drawing.subplots(1, 3, sharey=True)
        for runs in descents[:: max(1, len(descents) // 8)]:
            period = runs.point["period"]
            colour = colours(np.log10(period) / 8.5)
            accuracy = 100 * runs["test_accuracy"]
            steps = runs["inner_steps"].mean(axis=0)
            updates = runs["feature_updates"].mean(axis=0)
            band(over_steps, steps, accuracy, colour)
            label = f"K = {period:.3g}"
            over_updates.plot(updates, accuracy.mean(axis=0), color=colour, label=label)
        for name, look in looks.items():
            runs = only(all_runs, solver=name)
            accuracy = 100 * runs["test_accuracy"].mean(axis=0)
            updates = runs["feature_updates"].mean(axis=0)
            over_updates.plot(updates, accuracy, label=name, **look)
            over_k.axhline(accuracy[-1], **look)
        rates = (settings.learning_rate, *settings.other_learning_rates)
        for rate, colour in zip(rates, (BLUE, ORANGE, GREEN, SKY), strict=False):
            of_rate = select(all_runs, solver=DESCENT, learning_rate=rate)
            periods = [runs.point["period"] for runs in of_rate]
            finals = 100 * np.array([runs.final("test_accuracy") for runs in of_rate])
            label = rf"$\eta$ = {rate:g}"
            band(over_k, periods, finals.T, colour, label, "o-")
        over_steps.set(xscale="log", xlabel="Inner steps", ylabel="Test accuracy (%)")
        over_updates.set(xscale="log", xlabel="Feature updates")
        over_k.set(xscale="log", xlabel="Period $K$", title="In the end")
        over_updates.legend(fontsize="x-small")
        over_k.legend(fontsize="small")
    caption = (
        "Test accuracy over inner steps and over feature updates (learning rate "
        f"{settings.learning_rate:g}), and in the end over K; means and ranges of "
        f"{settings.seeds} seeds. {training.described(settings)}; "
        f"{settings.num_steps:,} inner steps. Damping {settings.damping:g}, tolerance "
        f"{settings.tolerance:g}, {settings.baseline_steps:,} steps."
    )
    if settings.batch_size is None:
        caption += (
            f" At least {settings.fewest_updates} feature updates. From K = "
            f"{training.FLOW_FROM:g} on the steps are gradient flow, which "
            f"ends {_flow_error(settings):.1e} of a step from 10,000 literal ones."
        )
    else:
        caption += " A longer K than that is one linearisation."
    return {"k_sweep": caption}


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="CNN on CIFAR-10: K up to 10^4 is like K = 1; beyond it is erratic; at 10^8 "
    "worse, approaching truncated Gauss-Newton.",
    grid="periods",
    any_task=True,
)
