"""A residual network with K = 1 and large K, without and with batch normalisation.

The learning rates, and the statistic of the claim on stability, were set on 2026-11-29,
after runs at lower rates that trained neither network.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import thresholds, training
from ..experiment import Experiment, only, Place, Point, Runs
from ..figures import BLUE, figure, VERMILION
from ..shortfall import untrained
from ..training import Columns, Images
from ..verdicts import at_ceiling, judge, Verdict


PLAIN, NORMALISED = "plain", "normalised and augmented"
COLOURS = BLUE, VERMILION


@dataclasses.dataclass(frozen=True)
class ResNets(Images):
    seeds: int = 8
    periods: tuple[int, ...] = (1, 20)
    """Periods of the plain network."""
    normalised_periods: tuple[int, ...] = (1, 20)
    network: str = "narrow-resnet18"
    batch_size: int | None = 64
    learning_rate: float = 0.02
    normalised_learning_rate: float = 0.05
    augmentation: training.Augmentation = "shift"
    """Augmentation of the normalised network's images."""
    num_steps: int = 2_500
    num_looks: int = 25


EMBEDDED = ResNets()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=1,
    periods=(1, 3),
    normalised_periods=(1, 3),
    num_steps=6,
    num_looks=2,
)
FULL = dataclasses.replace(
    EMBEDDED,
    periods=(1, 1_000_000),
    normalised_periods=(1, 100_000),
    data="cifar10",
    network="resnet18",
    batch_size=256,
    reduction="sum",
    learning_rate=7e-7,
    normalised_learning_rate=1e-5,
    augmentation="flip-and-crop",
    num_steps=10_000_000,
    num_looks=200,
)


def points(settings: ResNets) -> Sequence[Point]:
    return [{"network": PLAIN, "period": k} for k in settings.periods] + [
        {"network": NORMALISED, "period": k} for k in settings.normalised_periods
    ]


def train(settings: ResNets, point: Point, place: Place) -> Columns:
    if point["network"] == NORMALISED:
        settings = dataclasses.replace(
            settings,
            network=f"{settings.network}-bn",
            learning_rate=settings.normalised_learning_rate,
        )
    else:
        settings = dataclasses.replace(settings, augmentation="none")
    solver = training.descent(point["period"], settings.learning_rate)
    return training.mini_batches(settings, place, solver)


def both(settings: ResNets, all_runs: Sequence[Runs], network: str) -> list[Runs]:
    """Return the runs of the smallest and of the largest period."""
    of = settings.periods if network == PLAIN else settings.normalised_periods
    return [only(all_runs, network=network, period=k) for k in (min(of), max(of))]


def judge_all(settings: ResNets, all_runs: Sequence[Runs]) -> list[Verdict]:
    best, final = training.optimally_stopped, lambda runs: runs.final("test_accuracy")
    verdicts = []
    for network in (PLAIN, NORMALISED):
        first, last = both(settings, all_runs, network)
        verdicts.append(
            judge(
                f"The {network} network reaches about the same accuracy with large K",
                "difference in the best test accuracy of a run, K = "
                f"{last.point['period']:,} less K = {first.point['period']:,}",
                training.where_trained(best(last) - best(first), first),
                thresholds.NO_LESS_ACCURATE,
                untested=at_ceiling(best(first), best(last)),
                lacking=untrained(first),
            )
        )
    shortest, longest = zip(
        *(both(settings, all_runs, network) for network in (PLAIN, NORMALISED)),
        strict=True,
    )
    plain, normalised = (
        final(first) - final(last) for first, last in zip(shortest, longest, strict=True)
    )
    verdicts.append(
        judge(
            "With batch normalisation, training with large K is less stable",
            "final test accuracy that large K loses, normalised network less plain "
            "network",
            training.where_trained(normalised - plain, *shortest),
            thresholds.RISES,
            lacking=untrained(*shortest),
        )
    )
    return verdicts


def draw(settings: ResNets, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    with figure(out / "resnet.png", width=11, height=4.6) as drawing:
        panels = drawing.subplots(1, 2, sharey=True)
        for panel, network in zip(panels, (PLAIN, NORMALISED), strict=True):
            for runs, colour in zip(
                both(settings, all_runs, network), COLOURS, strict=True
            ):
                label = f"K = {runs.point['period']:,}"
                training.draw_band(panel, runs, "test_accuracy", colour, label)
            panel.set(title=network.capitalize(), xlabel="Steps")
            panel.legend()
        panels[0].set_ylabel("Test accuracy (%)")
    return {
        "resnet": "Test accuracy of a ResNet-18 over steps, without and with batch "
        "normalisation and augmentation. The normalised network is tested with the "
        "batch statistics of the linearisation points, which are up to K steps old. "
        f"Means and ranges over {settings.seeds} seeds; "
        f"{training.described(settings)}."
    }


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="The paper trains a ResNet-18 on CIFAR-10, without normalisation and "
    "augmentation (learning rate 7 x 10^-7, K = 10^6) and with both (10^-5, K = "
    "10^5). Large K reaches about the same accuracy as K = 1, but is far less "
    "stable with batch normalisation.",
    grid="periods",
    rehearsed=True,
)
