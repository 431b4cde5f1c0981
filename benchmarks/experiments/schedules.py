"""Early, late or evenly spaced feature updates, at equal numbers of updates.

All runs take the same number of inner steps. At equal numbers of feature updates, only
the distribution of the periods differs. Practitioners learn features first: K = 1, and
then one long period in which the features are frozen (Fort et al. 2020). The reverse
schedule freezes the first features, and updates them at the end. Between these extremes
the periods grow geometrically, shrink geometrically, or are constant. Damping follows the
same schedules, with lambda = 1/(eta K).

Each schedule ends by training a linearised network, and that network is judged: a long
last period is not meant to improve the network itself, whose accuracy is drawn beside it.
Two schedules are compared at the numbers of updates at which both train the linearised
network. A few updates after a long frozen period may not suffice for that.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpy import ndarray
from scipy.optimize import brentq

import gnlin

from .. import thresholds, training
from ..dry_run import Tally
from ..experiment import Experiment, only, Place, Point, Runs, select
from ..figures import band, BLACK, BLUE, figure, GREEN, ORANGE, PURPLE, VERMILION
from ..shortfall import short_of, TRAINED
from ..training import Columns, Images
from ..verdicts import at_ceiling, judge, mean_of_seed, Verdict


STEPS, DAMPING = "K steps", "damping"
WITH = {STEPS: "With K steps", DAMPING: "With damping"}
THROUGHOUT = "K = 1 until trained"
CONSTANT = "constant"
FIRST, GROWING = "features first, then frozen", "growing periods"
LAST, SHRINKING = "frozen first, then features", "shrinking periods"
LINEARISED = "test_accuracy_linearised"


@dataclasses.dataclass(frozen=True)
class SchedulesSettings(Images):
    seeds: int = 8
    updates: tuple[int, ...] = (3, 10, 30, 100)
    """Numbers of feature updates."""
    damped_up_to: int = 30
    """The largest number of feature updates by damping, since each of them solves a
    problem by Newton's method."""
    num_steps: int = 20_000
    """Inner steps of every run: several times as many as K = 1 needs to train."""
    num_train: int | None = 30
    num_looks: int = 10


EMBEDDED = SchedulesSettings()
QUICK = dataclasses.replace(
    EMBEDDED, seeds=2, updates=(3, 10), num_steps=4_000, num_train=20
)
FULL = dataclasses.replace(
    EMBEDDED,
    seeds=8,
    data="cifar10",
    network="lenet",
    num_train=500,
    learning_rate=1e-4,
    num_steps=100_000,
    updates=(3, 10, 30, 100, 300, 1_000),
)
MEDIUM = training.medium(FULL, num_train=100, num_steps=20_000, updates=(3, 10, 30, 100))


#
# The periods of a schedule
#


def growing(num_updates: int, num_steps: int) -> Float[ndarray, " updates"]:
    """Return periods with a constant ratio that start at 1, rounded to whole numbers."""
    powers = np.arange(num_updates)
    excess = lambda ratio: np.sum(ratio**powers) - num_steps
    ratio: Any = 1.0
    if num_updates < num_steps:
        ratio = brentq(excess, 1.0, num_steps ** (1 / (num_updates - 1)))
    ends = np.floor(np.cumsum(ratio**powers) + 0.5)
    return np.diff(ends, prepend=0)


def constant(num_updates: int, num_steps: int) -> Float[ndarray, " updates"]:
    """Return periods that differ by one step at most."""
    ends = np.floor(np.linspace(0, num_steps, num_updates + 1))
    return np.diff(ends)


def features_first(num_updates: int, num_steps: int) -> Float[ndarray, " updates"]:
    """Return periods of 1, and a last one with all other steps."""
    return np.append(np.ones(num_updates - 1), num_steps - num_updates + 1)


SCHEDULES: dict[str, Callable[[int, int], Float[ndarray, " updates"]]] = {
    FIRST: features_first,
    GROWING: growing,
    CONSTANT: constant,
    SHRINKING: lambda *numbers: growing(*numbers)[::-1],
    LAST: lambda *numbers: features_first(*numbers)[::-1],
}
COLOURS = dict(zip(SCHEDULES, (BLUE, GREEN, BLACK, ORANGE, VERMILION), strict=True))


class Scheduled(eqx.Module):
    """A solver with the next of `strengths` as period, or damping, in each outer step."""

    solver: gnlin.authoring.AbstractGaussNewton
    name: str = eqx.field(static=True)
    strengths: Float[Array, " updates"]

    def start(self, *arguments: Any) -> Any:
        return self.solver.start(*arguments)

    def advance(self, objective, lin, evaluate, state):
        strength = self.strengths[state.counts.num_feature_updates]
        now = eqx.tree_at(lambda s: getattr(s, self.name), self.solver, strength)
        return now.advance(objective, lin, evaluate, state)


#
# The runs
#


def points(settings: SchedulesSettings) -> list[Point]:
    found: list[Point] = [{"by": THROUGHOUT}]
    for by, most in ((STEPS, settings.num_steps), (DAMPING, settings.damped_up_to)):
        found += [
            {"by": by, "schedule": schedule, "updates": number}
            for schedule in SCHEDULES
            for number in settings.updates
            if number <= most
        ]
    return found


def train(settings: SchedulesSettings, point: Point, place: Place) -> Columns:
    rate = settings.learning_rate
    if point["by"] == THROUGHOUT:
        return training.descend(
            settings, place, 1, rate, fewest_updates=1, until_trained=True
        )
    number = int(point["updates"])
    if place.rehearsal is not None:
        one = dataclasses.replace(settings, seeds=1)
        alone = dataclasses.replace(place, rehearsal=None)
        attempt = lambda _: Tally(number, train(one, point, alone)["passes"].max())
        place.rehearsal(
            tuple(point.values()), settings.seeds, number, attempt, whole=True
        )
    solver: Any = _solver(settings, point)
    return training.full_batch(settings, place, solver, number)


def _solver(settings: SchedulesSettings, point: Point) -> Scheduled:
    rate = settings.learning_rate
    periods = SCHEDULES[point["schedule"]](int(point["updates"]), settings.num_steps)
    # Pad to one length for all points, so that they share a compiled program.
    left = max(settings.updates) - len(periods)
    periods = jnp.asarray(np.pad(periods, (0, left), mode="edge"))
    if point["by"] == STEPS:
        solver = gnlin.IterativeLinearisation(
            jnp.asarray(1.0), jnp.asarray(rate), method="kernel"
        )
        return Scheduled(solver, "period", periods)
    solver = gnlin.DampedGaussNewton(jnp.asarray(1.0), form="prox-linear", search=None)
    dampings = gnlin.filters.equivalent_damping(periods, rate)
    return Scheduled(solver, "damping", jnp.asarray(dampings))


#
# Verdicts
#


PerUpdates = Float[ndarray, "seeds updates"]


def trained(runs: Runs) -> Bool[ndarray, " seeds"]:
    """Return whether the linearised network of each seed is trained in the end."""
    loss = runs.final("train_loss_linearised")
    return loss <= thresholds.PART_OF_GUESSING * runs.final("guessing_loss")


def accuracy(runs: Runs) -> Float[ndarray, " seeds"]:
    """Return the linearised network's final accuracy; NaN if it is not trained."""
    return np.where(trained(runs), runs.final(LINEARISED), np.nan)


def over_updates(
    all_runs: Sequence[Runs], by: str, schedule: str, of: Callable[[Runs], ndarray]
) -> PerUpdates:
    line = select(all_runs, by=by, schedule=schedule)
    return np.stack([of(runs) for runs in line], axis=1)


def judge_all(settings: SchedulesSettings, all_runs: Sequence[Runs]) -> list[Verdict]:
    verdicts = []
    for by in (STEPS, DAMPING):
        if not select(all_runs, by=by):
            continue
        evenly = over_updates(all_runs, by, CONSTANT, accuracy)
        for schedule, threshold in (
            (FIRST, thresholds.RISES),
            (GROWING, thresholds.RISES),
            (SHRINKING, thresholds.FALLS),
            (LAST, thresholds.FALLS),
        ):
            values = over_updates(all_runs, by, schedule, accuracy)
            both = [
                runs
                for each in (schedule, CONSTANT)
                for runs in select(all_runs, by=by, schedule=each)
            ]
            word = "better" if threshold is thresholds.RISES else "worse"
            verdicts.append(
                judge(
                    f"{WITH[by]}: '{schedule}' is {word} than '{CONSTANT}' at equal "
                    "numbers of feature updates",
                    f"difference in test accuracy, '{schedule}' less '{CONSTANT}', mean "
                    "over the numbers of feature updates at which both are trained",
                    mean_of_seed(values - evenly),
                    threshold,
                    untested=at_ceiling(*values.T, *evenly.T),
                    lacking=short_of(TRAINED, both, trained),
                )
            )
        last, first = (
            over_updates(all_runs, by, schedule, trained) for schedule in (LAST, FIRST)
        )
        verdicts.append(
            judge(
                f"{WITH[by]}: '{LAST}' leaves more networks untrained than '{FIRST}'",
                "difference in the share of untrained networks over the numbers of "
                f"feature updates, '{LAST}' less '{FIRST}'",
                first.mean(axis=1) - last.mean(axis=1),
                thresholds.RISES,
            )
        )
    most = max(settings.updates)
    first = only(all_runs, by=THROUGHOUT)
    throughout = accuracy(first)
    for schedule in (FIRST, CONSTANT):
        last = only(all_runs, by=STEPS, schedule=schedule, updates=most)
        own = accuracy(last)
        verdicts.append(
            judge(
                f"{WITH[STEPS]}: '{schedule}' with {most:,} feature updates is nearly as "
                f"accurate as {THROUGHOUT}",
                f"difference in test accuracy, '{schedule}' less {THROUGHOUT}",
                own - throughout,
                thresholds.NO_LESS_ACCURATE,
                untested=at_ceiling(own, throughout),
                lacking=short_of(TRAINED, [first, last], trained),
            )
        )
    return verdicts


def draw(
    settings: SchedulesSettings, all_runs: Sequence[Runs], out: Path
) -> Mapping[str, str]:
    """Draw the accuracies over the number of feature updates, and the periods of all
    schedules for one number."""
    shown = settings.updates[len(settings.updates) // 2]
    throughout = only(all_runs, by=THROUGHOUT)
    with figure(out / "schedules.png", width=12, height=8.4) as drawing:
        panels = drawing.subplots(2, 2)
        (steps, damping), (network, periods) = panels
        for axes in (damping, network):
            axes.sharey(steps)  # before drawing, so that the limits include all data
        for axes, by, name, title in (
            (steps, STEPS, LINEARISED, "K steps: last linearised network"),
            (damping, DAMPING, LINEARISED, "Damping: last linearised network"),
            (network, STEPS, "test_accuracy", "K steps: network"),
        ):
            final = lambda runs, name=name: runs.final(name)
            for schedule, colour in COLOURS.items():
                line = select(all_runs, by=by, schedule=schedule)
                if not line:
                    continue
                x = np.array([runs.point["updates"] for runs in line])
                values = 100 * over_updates(all_runs, by, schedule, final)
                band(axes, x, values, colour, schedule, "o-")
                few = over_updates(all_runs, by, schedule, trained).mean(axis=0) < 0.5
                axes.plot(x[few], values.mean(axis=0)[few], "x", color=colour, ms=11)
            level = 100 * final(throughout).mean()
            axes.axhline(level, color=PURPLE, linestyle="--", label=THROUGHOUT)
            ends = min(settings.updates) / 1.2, 1.2 * max(settings.updates)
            axes.set(xlim=ends, xscale="log")
            axes.set(xlabel="Feature updates", title=title)
            axes.set_ylabel("Test accuracy (%)")
        steps.legend(fontsize="small")
        for schedule, colour in COLOURS.items():
            of_update = SCHEDULES[schedule](shown, settings.num_steps)
            numbers = np.arange(1, shown + 1)
            periods.plot(numbers, of_update, ".-", color=colour)
        periods.set(yscale="log", xlabel="Feature update", ylabel="Period $K$")
        periods.set_title(f"Periods with {shown:,} feature updates")
    untrained = sum(int(np.sum(~trained(runs))) for runs in all_runs)
    caption = (
        "Test accuracy over the number of feature updates after "
        f"{settings.num_steps:,} inner steps, for five schedules "
        "of the period K and of the damping 1/(eta K). "
        f"Means and ranges over {settings.seeds} seeds; {training.described(settings)}. "
        f"{untrained} of {len(all_runs) * settings.seeds} linearised networks are not "
        "trained; crosses mark where this is true of most."
    )
    return {"schedules": caption}


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="This experiment is not in the paper, whose periods are constant. In S. Fort "
    "et al., *Deep Learning versus Kernel Learning* (2020), a network that is "
    "linearised after a short training does nearly as well as the network that is "
    "trained to the end.",
    grid="updates",
    bounds=(2, 1e6),
    own=training.own,
    rehearsed=True,
    medium=MEDIUM,
)
