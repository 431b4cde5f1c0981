"""Alignment of the kernel with the first, and with the last, as training goes on."""

import dataclasses
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


EARLY = 0.2
"""The share of the steps in which the kernel is claimed to change fastest."""


@dataclasses.dataclass(frozen=True)
class KernelDrift(Images):
    seeds: int = 10
    periods: tuple[int, ...] = (1, 100, 1_000)
    num_train: int | None = 50
    reduction: Literal["sum", "mean"] = "sum"
    num_steps: int = 4_000
    num_looks: int = 80
    num_kernel: int = 20
    """Training images of the kernel."""


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
    """On mini-batches or not: the kernels are taken at evenly spaced looks, and what is
    kept is how they are aligned."""

    def callbacks(draw, model):
        images = draw.train[0][: settings.num_kernel]
        kernel = lambda model: gnlin.TangentKernel(model)(images)
        return [training.Snapshots("kernels", kernel, model, settings)]

    solver = training.descent(point["period"], settings.learning_rate)
    columns = training.mini_batches(settings, place, solver, callbacks)
    kernels = columns.pop("kernels")
    num_looks = kernels.shape[1] - 1
    before = {
        "alignment_with_first": [0] * num_looks,
        "alignment_with_last": [num_looks] * num_looks,
        "alignment_with_before": range(num_looks),
    }
    return columns | {
        name: np.array([_alignment(of_seed, list(others)) for of_seed in kernels])
        for name, others in before.items()
    }


@jax.jit
def _aligned(pair):
    return gnlin.features.kernel_alignment(*pair)


def _alignment(kernels: ndarray, others: list[int]) -> list[float]:
    """Of each kernel but the first with another."""
    pairs = enumerate(others, start=1)
    return [float(_aligned((kernels[i], kernels[j]))) for i, j in pairs]


def early_share(runs: Runs) -> Float[ndarray, " seeds"]:
    """Of all the kernel's change, look by look, what happens early."""
    change = 1 - runs["alignment_with_before"]
    early = round(EARLY * change.shape[1])
    return change[:, :early].sum(axis=1) / change.sum(axis=1)


def judge_all(settings: KernelDrift, all_runs: Sequence[Runs]) -> list[Verdict]:
    return [
        judge(
            f"With K = {period:,} the kernel changes fastest early",
            f"share of its change (1 - alignment, summed over looks) in the first "
            f"{EARLY:.0%} of the steps, a seed",
            training.where_trained(
                early_share(only(all_runs, period=period)),
                only(all_runs, period=period),
            ),
            thresholds.FASTEST_EARLY,
        )
        for period in settings.periods
    ]


def draw(settings: KernelDrift, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    colours = shades(len(settings.periods))
    # Before the first step the first kernel is itself, and the last as far as in the end.
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
    any_task=True,
)
