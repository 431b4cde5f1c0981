"""Triggered feature updates, compared with the best fixed period.

On the data of `k-sweep`, fixed periods over six decades are compared with iterative
linearisation that updates when the kernel has drifted too far, when the loss does not
fall as predicted, or when either happens. They are compared at equal numbers of feature
updates and at equal test accuracy. The fixed period is the best one in hindsight.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy import ndarray

import gnlin

from .. import thresholds, training
from ..adaptive_linearisation import AdaptiveLinearisation
from ..experiment import Experiment, only, Place, Point, Runs, select
from ..figures import BLACK, BLUE, figure, GREEN, ORANGE, VERMILION
from ..training import Columns, Images
from ..verdicts import at_ceiling, judge, Verdict


FIXED = "fixed period"
DEFAULT = "ratio 0.25"
TRIGGERS: dict[str, tuple[float | None, float | None]] = {
    "drift 0.1": (0.1, None),
    "drift 0.5": (0.5, None),
    "drift 1 or ratio 0.25": (1.0, 0.25),
    DEFAULT: (None, 0.25),
}
"""Largest drift of the kernel, and smallest ratio of actual to predicted decrease."""
COLOURS = dict(zip(TRIGGERS, (ORANGE, GREEN, BLUE, VERMILION), strict=True))
SHARE = 0.98
"""Share of the best fixed period's final accuracy that is to be reached."""


@dataclasses.dataclass(frozen=True)
class Adaptive(Images):
    seeds: int = 9
    periods: tuple[float, ...] = tuple(np.round(10 ** np.arange(1, 7, 0.5)).tolist())
    longest: int = 10**6
    """The longest period that a trigger allows."""
    num_updates: int = 24
    """Feature updates of a run on the full batch; mini-batches have `num_steps`."""
    after: int = 10
    """Number of feature updates after which accuracies are compared."""
    num_train: int | None = 50


EMBEDDED = Adaptive()
QUICK = dataclasses.replace(EMBEDDED, seeds=2, periods=(1e2, 1e4), num_updates=3)
FULL = dataclasses.replace(
    EMBEDDED,
    data="cifar10",
    network="lenet",
    num_train=None,
    batch_size=256,
    learning_rate=1e-5,
    reduction="sum",
    num_steps=500_000,
    num_looks=200,
    after=100,
)
MEDIUM = training.medium(FULL, periods=(10.0, 100.0, 1e3, 1e4), longest=10_000)


def points(settings: Adaptive) -> list[Point]:
    fixed = [{"solver": FIXED, "period": period} for period in settings.periods]
    return [*fixed, *({"solver": name} for name in TRIGGERS)]


def train(settings: Adaptive, point: Point, place: Place) -> Columns:
    if settings.batch_size is not None:
        return training.mini_batches(settings, place, _solver(settings, point))
    solver = _solver(settings, point, method="flow")
    return training.full_batch(settings, place, solver, settings.num_updates)


def _solver(
    settings: Adaptive, point: Point, **how: Any
) -> gnlin.IterativeLinearisation | AdaptiveLinearisation:
    """Return the solver of a point; `how` is passed on to `IterativeLinearisation`."""
    rate = settings.learning_rate
    if point["solver"] != FIXED:
        descent = gnlin.IterativeLinearisation(settings.longest, rate, **how)
        trigger = TRIGGERS[str(point["solver"])]
        return AdaptiveLinearisation(descent, *trigger)
    period: Any = point["period"]
    # On the full batch the period is traced: all periods share a compiled program.
    period = int(period) if settings.batch_size is not None else jnp.asarray(period)
    return gnlin.IterativeLinearisation(period, rate, **how)


def accuracy_after(runs: Runs, num_updates: int) -> Float[ndarray, " seeds"]:
    """Return the accuracy at the last look with at most this many feature updates; NaN
    if the first look already has more."""
    seen = np.sum(runs["feature_updates"] <= num_updates, axis=1)
    accuracy = runs["test_accuracy"][np.arange(len(seen)), seen - 1]
    return np.where(seen > 0, accuracy, np.nan)


def aim(fixed: Sequence[Runs]) -> float:
    """Return the accuracy to be reached."""
    return SHARE * max(float(runs.final("test_accuracy").mean()) for runs in fixed)


def quickest(fixed: Sequence[Runs]) -> Runs:
    """Return the runs of the fixed period that reaches `aim` after the fewest updates,
    on average over the seeds."""
    return min(fixed, key=lambda runs: training.updates_to(runs, aim(fixed)).mean())


def judge_all(settings: Adaptive, all_runs: Sequence[Runs]) -> list[Verdict]:
    fixed, default = select(all_runs, solver=FIXED), only(all_runs, solver=DEFAULT)
    best, target = quickest(fixed), aim(fixed)
    of_best, own = (training.updates_to(runs, target) for runs in (best, default))
    ratio = np.log2(of_best / own)

    def mean_after(runs):
        mean = accuracy_after(runs, settings.after).mean()
        return -np.inf if np.isnan(mean) else mean

    ahead = max(fixed, key=mean_after)
    difference = accuracy_after(default, settings.after)
    difference -= accuracy_after(ahead, settings.after)
    return [
        judge(
            f"A trigger ({DEFAULT}) reaches the accuracy with fewer feature updates",
            f"log2 of the ratio of feature updates to {target:.1%} test accuracy, "
            f"quickest fixed period (K = {best.point['period']:.3g}) over trigger",
            ratio,
            thresholds.RISES,
        ),
        judge(
            f"After {settings.after} feature updates the trigger is as accurate as the "
            "best fixed period",
            f"difference in test accuracy after {settings.after} feature updates, "
            f"trigger less K = {ahead.point['period']:.3g}, the best fixed period",
            difference,
            thresholds.TRIGGER_AS_ACCURATE,
            untested=at_ceiling(
                accuracy_after(ahead, settings.after),
                accuracy_after(default, settings.after),
            ),
        ),
    ]


def draw(settings: Adaptive, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    """Draw test accuracy over feature updates, and the periods that the triggers
    chose."""
    import matplotlib

    colours = matplotlib.colormaps["Greys"]
    fixed = select(all_runs, solver=FIXED)
    with figure(out / "adaptive.png", width=11, height=4.6) as drawing:
        accuracy, chosen = drawing.subplots(1, 2)
        for runs in fixed[::2]:
            period = float(runs.point["period"] or 0)
            colour = colours(0.25 + 0.6 * np.log10(period) / 6)
            updates, mean = _means(runs)
            label = f"K = {period:.3g}"
            accuracy.plot(updates, mean, color=colour, label=label, linewidth=1)
        for name, colour in COLOURS.items():
            runs = only(all_runs, solver=name)
            accuracy.plot(*_means(runs), color=colour, label=name)
            chosen.plot(*_periods(runs), color=colour, label=name)
        best = quickest(fixed).point["period"]
        label = f"quickest fixed period, K = {best:.3g}"
        chosen.axhline(best, color=BLACK, linestyle="--", linewidth=1, label=label)
        accuracy.set(xscale="log", xlabel="Feature updates", ylabel="Test accuracy (%)")
        chosen.set(xscale="log", yscale="log", xlabel="Feature updates")
        chosen.set_ylabel("Period $K$ (geometric mean over seeds)")
        accuracy.legend(fontsize="x-small")
        chosen.legend(fontsize="small")
    caption = (
        "Left: test accuracy over feature updates, with fixed periods K (grey) and with "
        "triggers. Right: the periods that the triggers chose, which are the inner "
        f"steps per feature update between two evaluations. Means over {settings.seeds} "
        f"seeds; {training.described(settings)}."
    )
    return {"adaptive": caption}


def _means(runs: Runs) -> tuple[ndarray, ndarray]:
    return runs["feature_updates"].mean(axis=0), 100 * runs["test_accuracy"].mean(axis=0)


def _periods(runs: Runs) -> tuple[ndarray, ndarray]:
    """Return the mean number of feature updates at each look, and the geometric mean of
    inner steps per update since the previous look; the latter is NaN if some seed made no
    update in between."""
    steps = np.diff(runs["inner_steps"], axis=1, prepend=0)
    updates = np.diff(runs["feature_updates"], axis=1, prepend=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        periods = np.where((updates > 0) & (steps > 0), steps / updates, np.nan)
    return runs["feature_updates"].mean(axis=0), np.exp(np.log(periods).mean(axis=0))


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="The paper names this as future work: feature updates that are triggered when "
    "the kernel or the model has moved far enough may give the same accuracy with "
    "fewer updates.",
    grid="periods",
    steps="",
    own=training.own,
    trains_state=training.on_mini_batches,
    rehearsed=True,
    medium=MEDIUM,
)
