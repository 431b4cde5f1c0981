"""The network, large K, K = infinity, and regression with the trained network's kernel.

The experiment asks whether the kernel after training generalises as the network does, and
whether its evidence shows this. The task is digits by squared error. All linear problems
are solved in closed form.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree
from numpy import ndarray

import gnlin

from .. import thresholds, training
from ..experiment import Experiment, only, Place, Point, Runs
from ..figures import band, BLACK, BLUE, figure, GREEN, ORANGE, VERMILION
from ..training import Columns, Images, Labelled
from ..verdicts import at_ceiling, judge, Verdict


LOSS = gnlin.SquaredError()
NOISE = 0.1
"""The noise at which the maximisation of the evidence starts."""
REGIMES = {
    "network": ("the network, K = 1", BLACK),
    "large_k": ("large K", BLUE),
    "after_kernel": ("regression, kernel after training", GREEN),
    "first_kernel": ("regression, initial kernel", ORANGE),
    "endless": ("K = infinity", VERMILION),
}


@dataclasses.dataclass(frozen=True)
class Regimes(Images):
    seeds: int = 8
    sizes: tuple[int, ...] = (30, 60, 120)
    period: int = 1_000
    num_steps: int = 30_000
    share_of_stable: float = 0.05
    """The learning rate, as a share of the largest stable one on the first linearised
    problem."""


EMBEDDED = Regimes()
QUICK = dataclasses.replace(
    EMBEDDED, seeds=2, sizes=(20, 30), period=100, num_steps=1_000
)
FULL = dataclasses.replace(EMBEDDED, seeds=20, sizes=(50, 100, 200, 400, 800))


def points(settings: Regimes) -> list[Point]:
    return [{"num_train": size} for size in settings.sizes]


def train(settings: Regimes, point: Point, place: Place) -> Columns:
    settings = dataclasses.replace(settings, num_train=point["num_train"])
    runs = [_of_seed(settings, place, seed) for seed in settings.each_seed]
    return {name: np.array([[run[name]] for run in runs]) for name in runs[0]}


def as_regression(labelled: Labelled) -> tuple[Array, Array]:
    """Return classes as one-hot targets, less their mean of 0.1."""
    images, labels = labelled
    return images, jax.nn.one_hot(labels, training.NUM_CLASSES, dtype=images.dtype) - 0.1


def largest_eigenvalue(model: PyTree, images: Array) -> Array:
    """Return the largest eigenvalue of the tangent kernel. The largest stable learning
    rate is 2 divided by it."""
    kernel = gnlin.TangentKernel(model)(images)
    m = len(images) * training.NUM_CLASSES
    return jnp.linalg.norm(kernel.reshape(m, m), 2)


def rmse(model: PyTree, data: tuple[Array, Array]) -> float:
    images, targets = data
    return float(jnp.sqrt(jnp.mean((jax.vmap(model)(images) - targets) ** 2)))


def _of_seed(settings: Regimes, place: Place, seed: int) -> dict[str, float]:
    train, _, (test_images, test_labels) = training.load(settings, place, seed)
    data = images, targets = as_regression(train)
    start = training.model_of(settings)(jax.random.key(seed))
    rate = settings.share_of_stable * 2 / largest_eigenvalue(start, images)
    models: dict[str, Any] = {
        "network": descended(start, data, 1, rate, settings.num_steps),
        "large_k": descended(start, data, settings.period, rate, settings.num_steps),
    }
    found = {}

    def look(name: str, outputs: Array) -> None:
        found[f"{name}_error"] = 1 - float(gnlin.losses.accuracy(outputs, test_labels))

    for name, model in models.items():
        found[f"{name}_train_rmse"] = rmse(model, data)
        look(name, jax.vmap(model)(test_images))
    look("endless", gnlin.predict.gradient_flow(start, data)(test_images))
    kernels = {"first_kernel": start, "after_kernel": models["network"]}
    for name, model in kernels.items():
        posterior = gnlin.predict.posterior(model, data, noise=NOISE, from_zero=True)
        posterior = posterior.tuned()
        look(name, posterior(test_images).mean)
        found[f"{name}_evidence"] = float(posterior.log_evidence()) / targets.size
    return found


def descended(
    start: PyTree, data: tuple[Array, Array], period: int, rate: Array, num_steps: int
) -> PyTree:
    """Train by `num_steps` gradient steps, `period` of them on each linearised problem. A
    run that diverges raises no error."""
    solver = gnlin.IterativeLinearisation(
        period, rate, method="matrix-free" if period == 1 else "eigh"
    )
    updates = max(num_steps // period, 1)
    return gnlin.solve(
        start, data, solver, loss=LOSS, max_steps=updates, throw=False
    ).model


def finished(runs: Runs) -> ndarray:
    """Return whether both networks of each seed are fitted."""
    rmses = [runs.final(f"{name}_train_rmse") for name in ("network", "large_k")]
    return np.max(rmses, axis=0) < thresholds.FITTED_DIGITS


def errors(settings: Regimes, all_runs: Sequence[Runs], name: str) -> ndarray:
    """Return the errors by seed and size; NaN where training has not finished."""
    columns = []
    for size in settings.sizes:
        runs = only(all_runs, num_train=size)
        columns.append(np.where(finished(runs), runs.final(f"{name}_error"), np.nan))
    return np.stack(columns, axis=1)


def judge_all(settings: Regimes, all_runs: Sequence[Runs]) -> list[Verdict]:
    by_name = {name: errors(settings, all_runs, name) for name in REGIMES}

    def less(a: str, b: str) -> Float[ndarray, " seeds"]:
        return np.mean(by_name[a] - by_name[b], axis=1)

    gained = np.stack(
        [
            only(all_runs, num_train=size).final("after_kernel_evidence")
            - only(all_runs, num_train=size).final("first_kernel_evidence")
            for size in settings.sizes
        ],
        axis=1,
    )
    won = by_name["first_kernel"] - by_name["after_kernel"]
    agrees = np.where(np.isnan(won), np.nan, np.sign(gained) == np.sign(won))
    return [
        judge(
            "Regression with the kernel after training generalises as well as the "
            "network",
            "difference in test error, regression with the kernel after training less "
            "network, mean over training set sizes",
            less("after_kernel", "network"),
            thresholds.LIKE_FIRST,
            untested=at_ceiling(1 - by_name["after_kernel"], 1 - by_name["network"]),
        ),
        judge(
            "Training improves the kernel",
            "difference in test error of regression, kernel after training less initial "
            "kernel, mean over training set sizes",
            less("after_kernel", "first_kernel"),
            thresholds.FALLS,
        ),
        judge(
            f"K = {settings.period:,} learns features that K = infinity lacks",
            f"difference in test error, K = {settings.period:,} less K = infinity, mean "
            "over training set sizes",
            less("large_k", "endless"),
            thresholds.FALLS,
        ),
        judge(
            "Of the two kernels, the one with more evidence has the lower test error",
            "share of the training set sizes for which this holds",
            np.mean(agrees, axis=1),
            thresholds.HALF_AGREES,
        ),
    ]


def draw(settings: Regimes, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    with figure(out / "regimes.png", width=10, height=4.2) as drawing:
        left, right = drawing.subplots(1, 2)
        for name, (label, colour) in REGIMES.items():
            values = 100 * errors(settings, all_runs, name)
            known = np.isfinite(values).all(axis=1)
            if name == "large_k":
                label = f"K = {settings.period:,}"
            if known.any():
                band(left, settings.sizes, values[known], colour, label, "o-")
        left.set(xscale="log", xlabel="Training images $n$", ylabel="Test error (%)")
        left.set_xticks(settings.sizes, [f"{size:,}" for size in settings.sizes])
        left.minorticks_off()
        if left.get_legend_handles_labels()[0]:
            left.legend(fontsize="small")
        markers = "osD^v"
        for size, marker in zip(settings.sizes, markers, strict=False):
            runs = only(all_runs, num_train=size)
            for name in ("first_kernel", "after_kernel"):
                label, colour = REGIMES[name]
                right.plot(
                    runs.final(f"{name}_evidence"),
                    100 * runs.final(f"{name}_error"),
                    marker,
                    color=colour,
                    markersize=5,
                    label=label if size == settings.sizes[0] else None,
                )
        right.set(xlabel="Log evidence per target", ylabel="Test error (%)")
        right.legend(fontsize="small")
    return {
        "regimes": "Left: test error over the number of training images; means and "
        f"ranges over {settings.seeds} seeds, each with its own images. A seed is "
        "left out if one of its networks has a training RMSE of "
        f"{thresholds.FITTED_DIGITS:g} or more. K = infinity and the regressions "
        "have closed forms, and the regressions use the noise that maximises the "
        "evidence. Right: test error of the regressions over their evidence, with "
        "one kind of marker for each number of images."
    }


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="This experiment is not in the paper. Kernels after training are studied by "
    "P. Long, *Properties of the After Kernel* (2021), and on larger networks by S. "
    "Fort et al. (2020).",
    grid="sizes",
)
