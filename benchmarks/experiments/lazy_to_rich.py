"""From lazy to rich training: the claims over scales of initialisation and widths.

The wider a network is, or the larger its initial parameters, the less its kernel changes
in training (Chizat, Oyallon and Bach 2019); in the limit the network is its own
linearisation. There the disadvantage of K = infinity should vanish. The claims about K
and lambda should hold everywhere. The task is digits by squared error, for which
K = infinity and each damped step have closed forms.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree
from numpy import ndarray

import gnlin

from .. import thresholds, training
from ..experiment import Experiment, only, Place, Point, Runs
from ..figures import band, BLACK, BLUE, figure, ORANGE, VERMILION
from ..networks.mlp import scaled
from ..training import Columns, Images
from ..verdicts import at_ceiling, judge, slope, Verdict
from .regimes import as_regression, descended, largest_eigenvalue, LOSS, rmse


TRAINED = {
    "network": ("K = 1", BLACK),
    "large_k": ("large K", BLUE),
    "damped": (r"damping $1/(\eta K)$", ORANGE),
}
ENDLESS = "K = $\\infty$", VERMILION
AXES = {"scale": "Scale of the initial parameters", "width": "Hidden units"}


@dataclasses.dataclass(frozen=True)
class LazyToRich(Images):
    seeds: int = 8
    scales: tuple[float, ...] = (0.3, 0.55, 1.0, 1.8, 3.0)
    """Scales of the initial parameters, relative to Equinox's."""
    widths: tuple[int, ...] = (20, 40, 160, 640)
    width: int = 40
    """The width at which the scale varies."""
    period: int = 1_000
    num_train: int | None = 50
    num_steps: int = 60_000
    share_of_stable: float = 0.05
    """The learning rate, as a share of the largest stable one on the first linearised
    problem. Scales below 1 have the learning rate of scale 1, since a small kernel
    grows."""


EMBEDDED = LazyToRich()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=2,
    scales=(0.5, 1.0, 2.0),
    widths=(20, 40, 80),
    period=100,
    num_train=20,
    num_steps=1_000,
)
FULL = dataclasses.replace(
    EMBEDDED, seeds=20, widths=(20, 40, 160, 640, 2_560), num_train=200
)


def points(settings: LazyToRich) -> list[Point]:
    scaled: list[Point] = [
        {"width": settings.width, "scale": scale} for scale in settings.scales
    ]
    others: list[Point] = [{"width": width, "scale": 1.0} for width in settings.widths]
    return scaled + [point for point in others if point not in scaled]


def make_model(
    key: Key[Array, ""], width: int, scale: float | Float[Array, ""]
) -> eqx.nn.MLP:
    """Return a 64-width-10 network whose parameters are `scale` times Equinox's."""
    model = eqx.nn.MLP(64, training.NUM_CLASSES, width_size=width, depth=1, key=key)
    return scaled(model, scale)


def train(settings: LazyToRich, point: Point, place: Place) -> Columns:
    runs = [_of_seed(settings, point, place, seed) for seed in settings.each_seed]
    return {name: np.array([[run[name]] for run in runs]) for name in runs[0]}


def _of_seed(
    settings: LazyToRich, point: Point, place: Place, seed: int
) -> dict[str, float]:
    train, _, (test_images, test_labels) = training.load(settings, place, seed)
    data = images, _ = as_regression(train)
    start = make_model(jax.random.key(seed), point["width"], point["scale"])
    usual = make_model(jax.random.key(seed), point["width"], 1.0)
    largest = [largest_eigenvalue(model, images) for model in (start, usual)]
    rate = settings.share_of_stable * 2 / jnp.maximum(*largest)
    by_descent = lambda period: descended(start, data, period, rate, settings.num_steps)
    models: dict[str, PyTree] = {
        "network": by_descent(1),
        "large_k": by_descent(settings.period),
        "damped": _damped(start, data, settings, rate),
    }
    wrong = lambda outputs: 1 - float(gnlin.losses.accuracy(outputs, test_labels))
    first_kernel = gnlin.TangentKernel(start)(images)
    found = {
        "endless_error": wrong(gnlin.predict.gradient_flow(start, data)(test_images))
    }
    for name, model in models.items():
        kernel = gnlin.TangentKernel(model)(images)
        found[f"{name}_train_rmse"] = rmse(model, data)
        found[f"{name}_error"] = wrong(jax.vmap(model)(test_images))
        found[f"{name}_drift"] = 1 - float(
            gnlin.features.kernel_alignment(kernel, first_kernel)
        )
    return found


def _damped(start, data, settings: LazyToRich, rate: Array) -> PyTree:
    """Train by damping of the same strength as large K, with one step for each of its
    feature updates."""
    damping = gnlin.filters.equivalent_damping(settings.period, rate)
    solver = gnlin.DampedGaussNewton(damping, search=None)
    updates = max(settings.num_steps // settings.period, 1)
    return gnlin.solve(
        start, data, solver, loss=LOSS, max_steps=updates, throw=False
    ).model


def along(settings: LazyToRich, axis: str) -> list[Point]:
    """Return the points at which only `axis` varies, in ascending order."""
    other, fixed = ("width", settings.width) if axis == "scale" else ("scale", 1.0)
    found = [point for point in points(settings) if point[other] == fixed]
    return sorted(found, key=lambda point: point[axis])


def by_point(
    settings: LazyToRich, all_runs: Sequence[Runs], axis: str, name: str
) -> Float[ndarray, "seeds points"]:
    """Return values by seed and point; NaN if one of a seed's networks is not fitted."""
    columns = []
    for point in along(settings, axis):
        runs = only(all_runs, **point)
        rmses = [runs.final(f"{solver}_train_rmse") for solver in TRAINED]
        fitted = np.max(rmses, axis=0) < thresholds.FITTED_DIGITS
        columns.append(np.where(fitted, runs.final(name), np.nan))
    return np.stack(columns, axis=1)


def judge_all(settings: LazyToRich, all_runs: Sequence[Runs]) -> list[Verdict]:
    verdicts = []
    for axis, lazier in (
        ("scale", "as the initialisation grows"),
        ("width", "as the network gets wider"),
    ):
        of = lambda name, axis=axis: by_point(settings, all_runs, axis, name)
        x = np.log10([point[axis] for point in along(settings, axis)])
        behind = of("endless_error") - of("network_error")
        apart = {name: of(f"{name}_error") - of("network_error") for name in TRAINED}
        apart["by damping"] = of("damped_error") - of("large_k_error")
        whole = lambda values: np.where(
            np.isfinite(values).all(axis=1, keepdims=True), values, np.nan
        )
        largest = lambda values: float(np.abs(values.mean(axis=0)).max())
        verdicts += [
            judge(
                f"K = infinity falls behind K = 1 by less {lazier}",
                f"slope in log10 {axis} of the difference in test error, K = infinity "
                "less K = 1",
                slope(x, behind),
                thresholds.FALLS,
            ),
            judge(
                f"The kernel changes less {lazier}",
                f"slope in log10 {axis} of (1 - alignment of the final with the initial "
                "kernel), K = 1",
                slope(x, of("network_drift")),
                thresholds.FALLS,
            ),
            judge(
                f"K = {settings.period:,} has the test error of K = 1 at every {axis}",
                f"absolute difference in mean test error, K = {settings.period:,} less "
                f"K = 1, largest over the {axis}s",
                whole(apart["large_k"]),
                thresholds.LIKE_FIRST,
                untested=at_ceiling(1 - of("network_error"), 1 - of("large_k_error")),
                statistic=largest,
            ),
            judge(
                f"Damping of 1/(eta K) has the test error of K = {settings.period:,} at "
                f"every {axis}",
                "absolute difference in mean test error, damping less K = "
                f"{settings.period:,}, largest over the {axis}s",
                whole(apart["by damping"]),
                thresholds.LIKE_FIRST,
                untested=at_ceiling(1 - of("damped_error"), 1 - of("large_k_error")),
                statistic=largest,
            ),
        ]
    return verdicts


def draw(settings: LazyToRich, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    with figure(out / "lazy_to_rich.png", width=11, height=8) as drawing:
        panels: Any = drawing.subplots(2, len(AXES), sharey="row", sharex="col")
        for (errors, drifts), (axis, label) in zip(panels.T, AXES.items(), strict=True):
            x = [point[axis] for point in along(settings, axis)]
            of = lambda name, axis=axis: by_point(settings, all_runs, axis, name)
            for name, (solver, colour) in TRAINED.items():
                if name == "large_k":
                    solver = f"K = {settings.period:,}"
                band(errors, x, 100 * of(f"{name}_error"), colour, solver, "o-")
                band(drifts, x, of(f"{name}_drift"), colour, solver, "o-")
            solver, colour = ENDLESS
            band(errors, x, 100 * of("endless_error"), colour, solver, "o-")
            drifts.set(xscale="log", xlabel=label)
            drifts.set_xticks(x, [f"{value:g}" for value in x])
            drifts.set_xticks([], minor=True)
        panels[0, 0].set_ylabel("Test error (%)")
        panels[1, 0].set_ylabel("1 - alignment with the initial kernel")
        panels[0, 0].legend()
    return {
        "lazy_to_rich": "Test error and change of the kernel of the training images, "
        f"over the scale of the initial parameters (for a 64-{settings.width}-10 "
        "network) and over the width (for scale 1). The data are "
        f"{settings.num_train} training images of digits, with squared error. "
        f"Damped Gauss-Newton takes as many steps as K = {settings.period:,} has "
        "feature updates; K = infinity has a closed form. Means and ranges over "
        f"{settings.seeds} seeds, each with its own images. A seed is left out if "
        f"one of its networks has a training RMSE of {thresholds.FITTED_DIGITS:g} "
        "or more."
    }


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="This experiment is not in the paper, whose networks have one initialisation "
    "and one width. See L. Chizat, E. Oyallon and F. Bach, *On Lazy Training in "
    "Differentiable Programming* (2019).",
    grid="scales",
)
