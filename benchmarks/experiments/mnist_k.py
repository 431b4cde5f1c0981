"""Accuracy during training on handwritten digits, for K from 1 to 1,000 and infinity.

The problem of K = infinity is solved directly, so that it has no curve over steps. Each
seed draws its own test images; together they cover all 1,797.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
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
from ..verdicts import at_ceiling, judge, Verdict


ALIKE = 100
"""All K up to here are claimed to end alike."""


@dataclasses.dataclass(frozen=True)
class MnistK(Images):
    seeds: int = 10
    periods: tuple[float, ...] = (1.0, 10.0, 100.0, 1000.0, math.inf)
    network: str = "digits-cnn"
    batch_size: int | None = 64
    learning_rate: float = 0.005
    num_steps: int = 16_000
    num_looks: int = 160


EMBEDDED = MnistK()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=2,
    periods=(1.0, 10.0, math.inf),
    num_train=100,
    num_steps=30,
    num_looks=6,
)
FULL = dataclasses.replace(
    EMBEDDED,
    data="mnist",
    network="lenet-mnist",
    batch_size=256,
    reduction="sum",
    learning_rate=1e-4,
    num_steps=200_000,
    num_looks=2_000,
)
MEDIUM = training.medium(FULL)


def points(settings: MnistK) -> list[Point]:
    return [{"period": period} for period in settings.periods]


def train(settings: MnistK, point: Point, place: Place) -> Columns:
    if math.isinf(point["period"]):
        return train_endlessly(settings, place)
    solver = training.descent(point["period"], settings.learning_rate)
    return training.mini_batches(settings, place, solver)


def levelling(runs: Runs, period: float) -> Float[ndarray, " seeds"]:
    """Return how much faster the accuracy rises per look in the first half of a period
    than in the second, mean over periods. It is the accuracy of the linearised network,
    which is the one being trained."""
    looks = int(period // runs["inner_steps"][0, 0])
    accuracy = runs["test_accuracy_linearised"]
    # The look at the end of a period is the first on the new linearisation.
    starts = np.arange(looks - 1, accuracy.shape[1] - looks, looks)
    middles, ends = starts + looks // 2, starts + looks - 1
    first = (accuracy[:, middles] - accuracy[:, starts]) / (looks // 2)
    second = (accuracy[:, ends] - accuracy[:, middles]) / (looks - 1 - looks // 2)
    return (first - second).mean(axis=1)


def judge_all(settings: MnistK, all_runs: Sequence[Runs]) -> list[Verdict]:
    finite = [period for period in settings.periods if period < math.inf]
    of = {k: only(all_runs, period=k) for k in finite}
    final = {k: runs.final("test_accuracy") for k, runs in of.items()}

    def alike(claim, periods):
        return judge(
            claim,
            "range over K of the mean final test accuracy",
            training.where_trained(
                np.stack([final[k] for k in periods], axis=1), *(of[k] for k in periods)
            )
            if len(periods) > 1
            else [],
            thresholds.WITHIN_MNIST,
            statistic=lambda finals: float(np.ptp(finals.mean(axis=0))),
            untested=at_ceiling(*(final[k] for k in periods)),
            lacking=untrained(*(of[k] for k in periods)),
        )

    verdicts = [
        alike(
            f"All K up to {ALIKE} end with the same test accuracy",
            [k for k in finite if k <= ALIKE],
        ),
        alike("All finite K end within 0.4 % of each other", finite),
    ]
    first, longest = min(finite, default=1), max(finite, default=1)
    every = math.ceil(settings.num_steps / settings.num_looks)
    if first < longest and 4 * every <= longest <= settings.num_steps // 2:
        of_longest = levelling(of[longest], longest)
        trained = lambda values: training.where_trained(values, of[first], of[longest])
        lacking = untrained(of[first], of[longest])
        look = int(longest // every) - 2  # the last before the first feature update
        verdicts += [
            judge(
                f"With K = {longest:,.0f} accuracy levels off before each feature update",
                "rise in accuracy of the linearised network per evaluation, first half "
                f"of a period less second half, mean over periods; K = {longest:,.0f} "
                f"less K = {first:g} in the same steps",
                trained(of_longest - levelling(of[first], longest)),
                thresholds.RISES,
                lacking=lacking,
            ),
            judge(
                f"{longest:,.0f} steps on the linearised network learn less than as many "
                "steps on the network",
                "difference in test accuracy just before the first feature "
                f"update, linearised network less network with K = {first:g}",
                trained(
                    of[longest]["test_accuracy_linearised"][:, look]
                    - of[first]["test_accuracy"][:, look]
                ),
                thresholds.FALLS,
                lacking=lacking,
            ),
        ]
    if math.inf in settings.periods and finite:
        endless = solved_accuracy(only(all_runs, period=math.inf))
        verdicts.append(
            judge(
                "K = infinity ends less accurate than every finite K",
                "difference in final test accuracy, K = infinity (linearised network) "
                "less the worst finite K",
                training.where_trained(
                    endless - np.min(list(final.values()), axis=0), *of.values()
                ),
                thresholds.FALLS,
                lacking=untrained(*of.values()),
            )
        )
    return verdicts


def draw(settings: MnistK, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    finite = [period for period in settings.periods if period < math.inf]
    colours = shades(len(finite))
    with figure(out / "mnist_k.png", width=11, height=4.6) as drawing:
        network, linearised = drawing.subplots(1, 2, sharey=True)
        for period, colour in zip(finite, colours, strict=True):
            runs, label = only(all_runs, period=period), f"K = {period:,.0f}"
            training.draw_band(network, runs, "test_accuracy", colour, label)
            name = "test_accuracy_linearised"
            training.draw_band(linearised, runs, name, colour, label)
        for panel in (network, linearised) if finite else ():
            training.mark_updates(panel, only(all_runs, period=max(finite)))
        if math.inf in settings.periods and finite:
            end = 100 * solved_accuracy(only(all_runs, period=math.inf))
            steps = only(all_runs, period=finite[0])["inner_steps"].mean(axis=0)
            flat = np.tile(end[np.isfinite(end)], (2, 1)).T
            if len(flat):
                label = r"K = $\infty$, solved"
                band(linearised, steps[[0, -1]], flat, VERMILION, label, "--")
        network.set(title="The network", xlabel="Steps", ylabel="Test accuracy (%)")
        linearised.set(title="The linearised network", xlabel="Steps")
        linearised.legend()
    return {
        "mnist_k": "Test accuracy over steps of the network and of the linearised "
        "network, which is the one being trained; right after a feature update the "
        f"two are the same. Means and ranges over {settings.seeds} seeds, each with "
        f"its own test images; {training.described(settings)}. For K = infinity the "
        "problem is solved by L-BFGS until no entry of the mean loss's gradient "
        f"exceeds {TOLERANCE:g}."
    }


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="The paper trains a CNN on MNIST with learning rate 10^-4. All K up to 100 "
    "give the same curves, K = 1,000 levels off before each feature update, and all "
    "K except infinity end within 0.4 %.",
    grid="periods",
    own=training.own,
    trains_state=lambda settings: math.inf not in settings.periods,
    rehearsed=True,
    medium=MEDIUM,
)
