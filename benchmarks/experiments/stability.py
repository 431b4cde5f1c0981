"""The learning rates and values of K at which training diverges.

A run has diverged if its numbers are not finite, if its training loss ends above that
before training, or if its outputs have become constant. A learning rate that is only too
small to train the network is stable.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

import gnlin

from .. import thresholds, training
from ..experiment import Experiment, only, Place, Point, Runs
from ..figures import BLACK, figure
from ..training import Columns, Images
from ..verdicts import judge, slope, Verdict


ROUNDING = 1e-6
"""Outputs are constant if their loss equals that of the best constant outputs up to this
part, as after the death of all units."""
NOISE = 0.01
"""The part by which the loss may end above its start, since that of a batch is noisy."""


@dataclasses.dataclass(frozen=True)
class Stability(Images):
    seeds: int = 9
    periods: tuple[int, ...] = (1, 3, 10, 30, 100, 300, 1_000, 3_000)
    learning_rates: tuple[float, ...] = tuple(
        float(f"{rate:.3g}") for rate in np.logspace(-3, 0, 10)
    )
    num_train: int | None = 50
    num_steps: int = 3_000
    fewest_updates: int = 10
    num_looks: int = 2


EMBEDDED = Stability()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=2,
    periods=(1, 10, 100),
    learning_rates=(1e-4, 1e-2, 1.0),
    num_steps=20,
    fewest_updates=2,
)
FULL = dataclasses.replace(
    EMBEDDED,
    periods=(1, 2, 5, 10, 100, 1_000, 20_000),
    learning_rates=(1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3),
    data="cifar10",
    network="lenet",
    num_train=None,
    batch_size=256,
    reduction="sum",
    num_steps=100_000,
)
MEDIUM = training.medium(FULL, periods=(1, 10, 100, 1_000), num_steps=2_000)


def points(settings: Stability) -> list[Point]:
    return [
        {"period": period, "learning_rate": rate}
        for period in settings.periods
        for rate in settings.learning_rates
    ]


def train(settings: Stability, point: Point, place: Place) -> Columns:
    columns = _train(settings, point, place)
    first = training.first_losses(settings, place)
    return columns | {"first_train_loss": first[:, None]}


def _train(settings: Stability, point: Point, place: Place) -> Columns:
    period, rate = point["period"], point["learning_rate"]
    if settings.batch_size is not None:
        solver = training.descent(period, rate)
        return training.mini_batches(settings, place, solver)
    # Only literal steps can diverge: gradient flow is stable at any learning rate.
    solver = gnlin.IterativeLinearisation(
        jnp.asarray(float(period)), jnp.asarray(rate), method=training.literal(period)
    )
    num_updates = max(settings.num_steps // period, settings.fewest_updates)
    return training.full_batch(settings, place, solver, num_updates)


def diverged(runs: Runs) -> Bool[ndarray, " seeds"]:
    loss, guessing = runs.final("train_loss"), runs.final("guessing_loss")
    # The kept table has no such column; there, networks begin near the loss of guessing.
    first = runs.columns.get("first_train_loss", runs["guessing_loss"])[:, -1]
    falls = loss < (1 + NOISE) * first
    constant = np.abs(loss - guessing) <= ROUNDING * guessing
    return ~(runs.final("stable").astype(bool) & falls & ~constant)


def table(settings: Stability, all_runs) -> Bool[ndarray, "periods rates seeds"]:
    """Return which runs diverge."""
    return np.array(
        [
            [
                diverged(only(all_runs, period=period, learning_rate=rate))
                for rate in settings.learning_rates
            ]
            for period in settings.periods
        ]
    )


def largest_stable(settings: Stability, all_runs) -> Float[ndarray, "seeds periods"]:
    """Return the largest learning rate below the first that diverges: one step below the
    grid if the smallest one diverges, and NaN if none does."""
    found = table(settings, all_runs)
    rates = _with_one_below(settings.learning_rates)
    num_stable = np.argmax(found, axis=1)
    return np.where(found.any(axis=1), rates[num_stable], np.nan).T


def _with_one_below(rates: Sequence[float]) -> Float[ndarray, " rates_and_one"]:
    ratio = rates[1] / rates[0] if len(rates) > 1 else 10.0
    return np.array([rates[0] / ratio, *rates])


def judge_all(settings: Stability, all_runs: Sequence[Runs]) -> list[Verdict]:
    largest = np.log10(largest_stable(settings, all_runs))
    against = largest[:, 1:] - largest[:, :1]
    known = np.isfinite(largest).all(axis=1)
    several = len(settings.periods) > 1
    where_known = lambda values: np.where(known, values, np.nan)
    periods = np.log10(settings.periods)
    rate = "log10 of the largest stable learning rate"
    first, last = (f"K = {settings.periods[i]:,}" for i in (0, -1))
    most = 10 ** (thresholds.HARDLY_ON_K.below * (periods[-1] - periods[0]))
    return [
        judge(
            f"{last} diverges at learning rates at which {first} is stable",
            f"difference in {rate}, {last} less {first}",
            where_known(against[:, -1]) if several else [],
            thresholds.FALLS,
        ),
        judge(
            f"A tenth of the largest stable learning rate of {first} is stable for every "
            "K",
            f"difference in {rate}, smallest over all larger K less {first}",
            where_known(against.min(axis=1)) if several else [],
            thresholds.TENTH_IS_STABLE,
        ),
        judge(
            f"From {first} to {last} the largest stable learning rate changes by at most "
            f"a factor of {most:.2g} (not a claim of the paper)",
            f"slope of {rate} in log10 K",
            where_known(slope(periods, largest)) if len(periods) > 2 else [],
            thresholds.HARDLY_ON_K,
        ),
    ]


def draw(settings: Stability, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    share = table(settings, all_runs).mean(axis=2)
    with figure(out / "stability.png", width=8, height=5) as drawing:
        axes = drawing.subplots()
        look = {"cmap": "cividis", "vmin": 0, "vmax": 1, "origin": "lower"}
        image = axes.imshow(share.T, aspect="auto", **look)
        axes.set_xticks(
            range(len(settings.periods)), [f"{k:,}" for k in settings.periods]
        )
        rates = [f"{rate:.2g}" for rate in settings.learning_rates]
        axes.set_yticks(range(len(rates)), rates)
        axes.set(xlabel="Period $K$", ylabel=r"Learning rate $\eta$")
        axes.grid(visible=False)
        logs = np.log10(largest_stable(settings, all_runs)).mean(axis=0)
        known = np.log10(_with_one_below(settings.learning_rates))
        height = np.interp(logs, known, np.arange(-1, len(known) - 1))
        axes.set_ylim(bottom=np.fmin.reduce(height, initial=0) - 0.5)
        label = "largest stable rate, mean over seeds"
        axes.plot(height, "o-", color="white", markeredgecolor=BLACK, label=label)
        axes.set_facecolor("#888888")  # below the grid, where the line goes on
        look = {"frameon": True, "framealpha": 1, "facecolor": BLACK}
        axes.legend(loc="lower right", labelcolor="white", **look)
        drawing.colorbar(image, label="Share of the seeds that diverge")
    longer = ""
    if settings.batch_size is None:
        longer = f", or {settings.fewest_updates} feature updates if these are longer"
    return {
        "stability": "Share of the runs that diverge, by learning rate and K (the "
        "column `diverged` of the table): a run diverges if its numbers are not finite "
        "(then `stable` is false), if its training loss ends more than "
        f"{NOISE:.0%} above {_start(all_runs)}, or if its outputs have become constant, "
        f"which is a loss within {ROUNDING:g} of that of the best constant outputs. The "
        f"loss is summed over the images. A run takes {settings.num_steps:,} steps"
        f"{longer}. {settings.seeds} seeds; {training.described(settings)}."
    }


def _start(all_runs: Sequence[Runs]) -> str:
    """Say with what the last loss is compared (see `diverged`)."""
    if all("first_train_loss" in runs.columns for runs in all_runs):
        return "that before training"
    return "that of the best constant outputs, near which training begins"


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    derived=lambda runs: {"diverged": diverged(runs)},
    paper="The paper trains a CNN on CIFAR-10. A learning rate of 10^-4 diverges above "
    "K = 5, and 10^-5 is stable up to K = 20,000, so the largest stable learning "
    "rate falls as K grows, but by at most a factor of ten.",
    grid="periods",
    own=training.own,
    trains_state=training.on_mini_batches,
    bounds=(1, 1e5),  # the steps are taken one by one
    rehearsed=True,
    medium=MEDIUM,
)
