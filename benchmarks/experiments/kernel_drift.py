"""Alignment of the kernel with the first, and with the last, as training goes on.

The rotation of the kernel is measured in equal parts of the training, as the angle
between the kernels at the ends of each. A sum over looks would depend on the number of
looks: the sum of 1 - cos, which is quadratic in the angle, falls to a tenth with ten
times as many.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from jaxtyping import Float
from numpy import ndarray

import gnlin

from .. import thresholds, training
from ..experiment import Experiment, only, Place, Point, Runs
from ..figures import band, figure, shades
from ..training import Columns, Images
from ..verdicts import judge, Verdict


PARTS = 5
"""Number of equal parts of the training; the claim is that the kernel changes fastest in
the first."""
ANGLES = tuple(f"angle_{part}" for part in range(1, PARTS + 1))


@dataclasses.dataclass(frozen=True)
class KernelDrift(Images):
    seeds: int = 10
    periods: tuple[int, ...] = (1, 100, 1_000)
    num_train: int | None = 50
    reduction: Literal["sum", "mean"] = "sum"
    num_steps: int = 4_000
    num_looks: int = 80
    num_kernel: int = 20
    """Number of training images for the kernel."""


EMBEDDED = KernelDrift()
QUICK = dataclasses.replace(EMBEDDED, seeds=2, periods=(1, 10), num_steps=50, num_looks=5)
FULL = dataclasses.replace(
    EMBEDDED,
    periods=(1, 1_000, 100_000),
    data="cifar10",
    network="lenet",
    num_train=None,
    batch_size=256,
    learning_rate=1e-5,
    num_steps=1_000_000,
    num_kernel=30,
    num_looks=100,
)


def points(settings: KernelDrift) -> list[Point]:
    return [{"period": period} for period in settings.periods]


def train(settings: KernelDrift, point: Point, place: Place) -> Columns:
    """Train, on mini-batches or not. The kernels are computed at evenly spaced looks, and
    only their alignments are kept."""

    def callbacks(draw, model, state):
        images = draw.train[0][: settings.num_kernel]
        kernel = lambda model, state: gnlin.TangentKernel(model, state=state)(images)
        return [training.Snapshots("kernels", kernel, (model, state), settings)]

    solver = training.descent(point["period"], settings.learning_rate)
    columns = training.mini_batches(settings, place, solver, callbacks)
    kernels = columns.pop("kernels")
    num_looks = kernels.shape[1] - 1
    ends = np.linspace(0, num_looks, PARTS + 1).round().astype(int)
    turned = np.array([_angles(of_seed[ends]) for of_seed in kernels])
    return columns | {
        "alignment_with_first": _alignment(kernels, 0),
        "alignment_with_last": _alignment(kernels, num_looks),
        **{name: turned[:, [part]] for part, name in enumerate(ANGLES)},
    }


@jax.jit
def _aligned(pair):
    return gnlin.features.kernel_alignment(*pair)


def _alignment(kernels: ndarray, other: int) -> Float[ndarray, "seeds looks"]:
    """The alignment of each kernel but the first with another."""
    return np.array([[float(_aligned((k, of[other]))) for k in of[1:]] for of in kernels])


def _angles(kernels: ndarray) -> list[float]:
    """The angle between each kernel and the next."""
    pairs = itertools.pairwise(kernels.astype(float))
    return [float(np.arccos(np.clip(_aligned(pair), -1, 1))) for pair in pairs]


def angles(runs: Runs) -> Float[ndarray, "seeds parts"]:
    return np.concatenate([runs[name] for name in ANGLES], axis=1)


def judge_all(settings: KernelDrift, all_runs: Sequence[Runs]) -> list[Verdict]:
    verdicts = []
    for period in settings.periods:
        runs = only(all_runs, period=period)
        turned = angles(runs)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log2(turned[:, 0] / turned[:, 1:].max(axis=1))
            share = turned[:, 0] / turned.sum(axis=1)
        verdicts += [
            judge(
                f"With K = {period:,} the kernel changes fastest early",
                f"log2 of the angle by which it turns in the first {1 / PARTS:.0%} of "
                f"the steps over the largest in any other {1 / PARTS:.0%}, a seed",
                training.where_trained(ratio, runs),
                thresholds.RISES,
            ),
            judge(
                f"With K = {period:,} most of its change is early",
                f"share of the first {1 / PARTS:.0%} of the steps in the sum of the "
                f"angles of all {PARTS} parts, a seed",
                training.where_trained(share, runs),
                thresholds.FASTEST_EARLY,
            ),
        ]
    return verdicts


def draw(settings: KernelDrift, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    colours = shades(len(settings.periods))
    # Before the first step: the first kernel aligns with itself, the last as in the end.
    panels_of = {
        "alignment_with_first": ("With the first kernel", lambda end: np.ones_like(end)),
        "alignment_with_last": ("With the last kernel", lambda end: end),
    }
    with figure(out / "kernel_drift.png", width=11, height=4.6) as drawing:
        panels = drawing.subplots(1, 2, sharey=True)
        for panel, (name, (title, at_start)) in zip(
            panels, panels_of.items(), strict=True
        ):
            for period, colour in zip(settings.periods, colours, strict=True):
                runs, label = only(all_runs, period=period), f"K = {period:,}"
                end = runs["alignment_with_first"][:, -1:]
                steps = np.concatenate([[0], runs["inner_steps"].mean(axis=0)])
                values = np.concatenate([at_start(end), runs[name]], axis=1)
                band(panel, steps, values, colour, label)
            panel.set(title=title, xlabel="Inner steps")
        panels[0].set_ylabel("Centred kernel alignment")
        panels[0].legend()
    return {
        "kernel_drift": "Centred alignment of the kernel of "
        f"{settings.num_kernel} training images with the kernel before training, and "
        f"with that after it. {training.described(settings)}, learning rate "
        f"{settings.learning_rate:g}; means and ranges of {settings.seeds} seeds."
    }


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="After Fort et al. (2020): the kernel changes fastest early in training.",
    grid="periods",
    own=training.own,
    rehearsed=True,
)
