"""K = 1 against very large K with augmented images: the network and its linearisation.

Stochastic gradient descent runs on mini-batches of randomly changed images. At regular
intervals a look records the test accuracy of the network and of the linearised network,
linear probes of its layers, and its first filters. `linear-probe` and `filters` draw and
judge the same runs.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float
from numpy import ndarray

import gnlin

from .. import thresholds, training
from ..experiment import Experiment, only, Place, Point, Runs
from ..figures import BLUE, figure, VERMILION
from ..networks.cnn import ConvNet
from ..probe import linear_probe
from ..shortfall import untrained
from ..training import Columns, Images, Labelled
from ..verdicts import at_ceiling, judge, Verdict


PROBED_LAYERS = 1, 2
COLOURS = BLUE, VERMILION
SHARE = 0.2
"""The claim is that large K ends where K = 1 is after this share of its steps."""


@dataclasses.dataclass(frozen=True)
class LargeK(Images):
    seeds: int = 8
    periods: tuple[int, ...] = (1, 2000)
    network: str = "wide-filtered-digits-cnn"
    batch_size: int | None = 64
    learning_rate: float = 0.005
    """At twice this rate the linearised training diverges late, after 10 to 20
    updates."""
    num_steps: int = 48_000
    num_looks: int = 48
    augmentation: training.Augmentation = "shift"
    num_probed: int = 100
    """Number of training images for a probe; with a thousand it would be at its ceiling
    from the start."""
    num_filters: int = 3
    """Number of filters of the first layer that are stored."""


EMBEDDED = LargeK()
QUICK = dataclasses.replace(
    EMBEDDED, seeds=2, periods=(1, 10), num_steps=30, num_looks=10
)
FULL = dataclasses.replace(
    EMBEDDED,
    periods=(1, 5_000_000),
    data="cifar10",
    network="lenet",
    batch_size=256,
    learning_rate=1e-5,
    reduction="sum",
    num_steps=50_000_000,
    num_looks=200,
    num_probed=10_000,
    augmentation="flip-and-crop",
)
MEDIUM = training.medium(FULL, periods=(1, 1_000), num_looks=40, num_probed=1_000)


def points(settings: LargeK) -> list[Point]:
    return [{"period": period} for period in settings.periods]


def train(settings: LargeK, point: Point, place: Place) -> Columns:
    solver = training.descent(point["period"], settings.learning_rate)

    def callbacks(draw, model, state):
        images, labels = draw.train
        few = slice(settings.num_probed)
        probed = (images[few], labels[few]), draw.test
        measures = {
            f"probe_{layer}": functools.partial(probe, layer=layer, data=probed)
            for layer in PROBED_LAYERS
        }
        filters = lambda model, state: model.convolutions[0].weight[
            : settings.num_filters
        ]
        return [
            gnlin.callbacks.Measure(measures, "validation"),
            training.Snapshots("filters", filters, (model, state), settings),
        ]

    return training.mini_batches(settings, place, solver, callbacks)


def probe(model: ConvNet, layer: int, data: tuple[Labelled, Labelled]) -> Array:
    """Return the test accuracy of a linear classifier of a layer's pooled activations."""
    dtype = model.convolutions[0].weight.dtype
    activations = jax.vmap(lambda image: model.features(image.astype(dtype), layer))
    (images, labels), (test_images, test_labels) = data
    return linear_probe(
        (activations(images), labels), (activations(test_images), test_labels)
    )


def ends(settings: LargeK, all_runs: Sequence[Runs]) -> tuple[Runs, Runs]:
    """Return the runs of the shortest and of the longest period."""
    first, last = min(settings.periods), max(settings.periods)
    return only(all_runs, period=first), only(all_runs, period=last)


def share_of_the_way(
    values: Float[ndarray, "seeds looks"], end: Float[ndarray, " seeds"]
) -> Float[ndarray, " seeds"]:
    """Return the share of the steps after which `values` first reach `end`; 1 if they
    never do, and NaN if a run has diverged. The first look is before any step."""
    reached = values >= end[:, None]
    share = np.argmax(reached, axis=1) / (reached.shape[1] - 1)
    share = np.where(reached.any(axis=1), share, 1.0)
    return np.where(np.isfinite(values[:, -1] + end), share, np.nan)


def judge_all(settings: LargeK, all_runs: Sequence[Runs]) -> list[Verdict]:
    first, last = ends(settings, all_runs)
    name, other = f"K = {last.point['period']:,}", f"K = {first.point['period']}"
    stopped = training.early_stopped
    finished = lambda values: training.where_trained(values, first, last)
    lacking = untrained(first, last)
    return [
        judge(
            f"{name} ends nearly as accurate as {other}",
            f"difference in final test accuracy, {name} less {other}",
            finished(last.final("test_accuracy") - first.final("test_accuracy")),
            thresholds.NO_LESS_ACCURATE,
            untested=at_ceiling(*(runs.final("test_accuracy") for runs in (first, last))),
            lacking=lacking,
        ),
        judge(
            f"Stopped early, {name} is nearly as accurate as {other}",
            f"difference in test accuracy at the best validation accuracy, {name} less "
            f"{other}",
            finished(stopped(last) - stopped(first)),
            thresholds.NO_LESS_ACCURATE,
            untested=at_ceiling(stopped(first), stopped(last)),
            lacking=lacking,
        ),
        judge(
            "8 to 12 feature updates suffice",
            f"number of feature updates after which {name} is within 1 % of "
            f"early-stopped {other} (one more than the run has if it never is)",
            finished(training.updates_to(last, stopped(first) - 0.01)),
            thresholds.ENOUGH_UPDATES,
            lacking=lacking,
        ),
    ]


def caption(settings: LargeK, all_runs: Sequence[Runs]) -> str:
    updates = ends(settings, all_runs)[1].final("feature_updates").mean()
    return (
        f"{settings.seeds} seeds; {training.described(settings)}, augmented by "
        f"{settings.augmentation}; the longest K makes {updates:.0f} feature updates."
    )


def draw(settings: LargeK, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    """Draw the accuracies of the network and of its linearisation over steps."""
    with figure(out / "large_k_augmented.png", width=11, height=4.6) as drawing:
        network, linearised = drawing.subplots(1, 2, sharey=True)
        for runs, colour in zip(ends(settings, all_runs), COLOURS, strict=True):
            label = f"K = {runs.point['period']:,}"
            training.draw_band(network, runs, "test_accuracy", colour, label)
            name = "test_accuracy_linearised"
            training.draw_band(linearised, runs, name, colour, label)
        for panel in (network, linearised):
            training.mark_updates(panel, ends(settings, all_runs)[1])
        network.set(title="The network", ylabel="Test accuracy (%)", xlabel="Steps")
        linearised.set(title="The linearised network", xlabel="Steps")
        network.legend()
    about = caption(settings, all_runs)
    return {
        "large_k_augmented": "Test accuracy over steps of the network and of the "
        "linearised network, which are the same right after a feature update; means "
        f"and ranges over the seeds. {about}"
    }


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="The paper trains a CNN on CIFAR-10 by SGD with augmentation. It reaches 82.3 "
    "% with K = 1 and 81.4 % with K = 5 x 10^6, for which 8 to 12 feature updates "
    "suffice.",
    grid="periods",
    rehearsed=True,
    medium=MEDIUM,
)
