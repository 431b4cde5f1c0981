"""What the hidden units of an XOR network learn, over K and over lambda.

The noisy XOR is solved by features along the four corners, and by random features too.
One hidden layer is trained to convergence by K steps on each linearisation, and by
damping at matched strength, lambda = 1/(eta K), from small weights, so that there is
something to learn. Alignment of a unit is `max_c cos(w, c)` over the corners c; its mean
over the units is weighted by how much they count, |output weight| |w|.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy import ndarray

import gnlin

from ..data import xor
from ..experiment import Columns, Experiment, Place, Point, Runs, select, Settings
from ..figures import BLUE, figure
from ..networks.mlp import xor_mlp
from ..verdicts import judge, rank_correlation, Verdict


CORNERS = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
# From so many steps on the spectrum is cheaper than they are.
_SPECTRUM_PAYS = 1000
_SHOWN = 4
"""Strengths that are drawn."""

BY_PERIOD, BY_DAMPING = "iterative-linearisation", "damped-gauss-newton"


@dataclasses.dataclass(frozen=True)
class XorFeatures(Settings):
    seeds: int = 5
    periods: tuple[float, ...] = tuple((10.0 ** np.arange(8)).tolist())
    """K, and what the dampings stand for."""
    learning_rate: float = 1e-4
    """Times the kernel's largest eigenvalue, 1.5e4 at most, it must stay below 2."""
    num_steps: int = 10**5
    """Inner steps of every K, but no fewer than so many feature updates:"""
    fewest_updates: int = 300
    damped_steps: int = 300
    num_train: int = 200
    num_test: int = 1000


EMBEDDED = XorFeatures()
QUICK = dataclasses.replace(EMBEDDED, seeds=2, periods=(1e3, 1e5, 1e7), fewest_updates=10)
FULL = dataclasses.replace(
    EMBEDDED, seeds=20, num_steps=10**6, fewest_updates=3000, damped_steps=3000
)


def points(settings: XorFeatures) -> list[Point]:
    return [
        {"solver": solver, "period": period}
        for solver in (BY_PERIOD, BY_DAMPING)
        for period in settings.periods
    ]


def train(settings: XorFeatures, point: Point, place: Place) -> Columns:
    data = tuple(map(jnp.asarray, xor.examples(settings.num_train, seed=0)))
    test = tuple(map(jnp.asarray, xor.examples(settings.num_test, seed=1)))
    period: Any = point["period"]
    damping = gnlin.filters.equivalent_damping(
        jnp.asarray(period), settings.learning_rate
    )
    num_steps = settings.damped_steps
    solver = gnlin.DampedGaussNewton(damping, search=None)
    if point["solver"] == BY_PERIOD:
        num_steps = max(int(settings.num_steps / period), settings.fewest_updates)
        method = "matrix-free" if period < _SPECTRUM_PAYS else "auto"
        solver = gnlin.IterativeLinearisation(
            jnp.asarray(period), settings.learning_rate, method=method
        )
    found = _train(jnp.arange(settings.seeds), solver, data, test, num_steps)
    return {"damping": np.full(settings.seeds, damping), **jax.device_get(found)}


@eqx.filter_jit
def _train(seeds, solver, data, test, num_steps: int):
    def one(seed):
        model = xor_mlp(jax.random.key(seed))
        solution = gnlin.solve(model, data, solver, max_steps=num_steps, divergence=None)
        return _measure(solution.model, data, test, solution.stats["num_feature_updates"])

    return jax.lax.map(one, seeds)


def _measure(model: eqx.nn.MLP, data, test, feature_updates) -> dict[str, Array]:
    first, last = model.layers
    assert last.weight.ndim == 2
    rows, output = first.weight, last.weight[0]
    alignment = gnlin.features.direction_alignment(rows, jnp.asarray(CORNERS))
    share = jnp.abs(output) * jnp.linalg.norm(rows, axis=1)
    residual = jax.vmap(model)(data[0]) - data[1]
    right = jnp.sign(jax.vmap(model)(test[0])) == jnp.sign(test[1])
    return {
        "train_rmse": jnp.sqrt(jnp.mean(residual**2)),
        "test_accuracy": jnp.mean(right),
        "alignment": jnp.sum(share * alignment) / jnp.sum(share),
        "feature_updates": feature_updates,
        # First-layer rows, and the output weight.
        "weights": jnp.column_stack([rows, output]),
    }


def judge_all(settings: XorFeatures, all_runs: Sequence[Runs]) -> list[Verdict]:
    return [
        verdict
        for solver in (BY_PERIOD, BY_DAMPING)
        for verdict in _judge(settings, solver, select(all_runs, solver=solver))
    ]


def _judge(settings: XorFeatures, solver: str, all_runs: Sequence[Runs]) -> list[Verdict]:
    over = "K" if solver == BY_PERIOD else "1/lambda"
    claim = "as K grows" if solver == BY_PERIOD else "as lambda shrinks"
    alignment = np.array([runs["alignment"] for runs in all_runs])
    last, first = all_runs[-1]["test_accuracy"], all_runs[0]["test_accuracy"]
    return [
        judge(
            f"Alignment with the corners falls {claim}",
            f"Spearman's correlation of alignment with {over}, a seed",
            rank_correlation(np.array(settings.periods), alignment.T),
            below=0,
        ),
        judge(
            f"Accuracy does not fall {claim}",
            f"test accuracy at the largest {over} less that at the smallest, a seed",
            last - first,
            above=-0.01,
        ),
    ]


def draw(settings: XorFeatures, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    """A row of planes and one of histograms for each solver."""
    num_shown = min(_SHOWN, len(settings.periods))
    shown = np.linspace(0, len(settings.periods) - 1, num_shown).round().astype(int)
    with figure(out / "xor_features.png", width=11, height=11) as drawing:
        axes = drawing.subplots(4, num_shown, squeeze=False)
        for solver, planes, histograms in zip(
            (BY_PERIOD, BY_DAMPING), axes[::2], axes[1::2], strict=True
        ):
            of_solver = select(all_runs, solver=solver)
            for plane, histogram, i in zip(planes, histograms, shown, strict=True):
                runs = of_solver[i]
                _draw_plane(plane, runs["weights"][0])
                plane.set_title(_strength(runs))
                _draw_histogram(histogram, runs["weights"].reshape(-1, 3))
                mean = runs["alignment"].mean()
                histogram.set_title(f"weighted mean {mean:.3f}", fontsize="medium")
            histograms[0].set_ylabel("Share of the units")
        for axis in axes[-1]:
            axis.set_xlabel("Alignment with a corner")
    caption = (
        "The hidden units' weights of one seed, coloured by output weight, and their "
        f"alignment with a corner, weighted by how much they count, of {settings.seeds} "
        "seeds: above over K, below over damping at matched strength. 2-50-1 network on "
        f"{settings.num_train} noisy XOR points; learning rate "
        f"{settings.learning_rate:g}, {settings.num_steps:,} inner steps, and at least "
        f"{settings.fewest_updates:,} feature updates; {settings.damped_steps:,} damped "
        "steps."
    )
    return {"xor_features": caption}


def _draw_plane(axes, weights: Float[ndarray, "units 3"]) -> None:
    largest = np.abs(weights[:, 2]).max()
    axes.scatter(
        *weights[:, :2].T,
        c=weights[:, 2],
        cmap="coolwarm",
        vmin=-largest,
        vmax=largest,
        s=14,
    )
    span = 1.1 * np.abs(weights[:, :2]).max()
    axes.set(xlim=(-span, span), ylim=(-span, span), aspect="equal")


def _draw_histogram(axes, weights: Float[ndarray, "units 3"]) -> None:
    alignment = gnlin.features.direction_alignment(
        jnp.asarray(weights[:, :2]), jnp.asarray(CORNERS)
    )
    share = np.abs(weights[:, 2]) * np.linalg.norm(weights[:, :2], axis=1)
    bins = np.linspace(np.sqrt(0.5), 1, 16).tolist()
    axes.hist(np.asarray(alignment), bins, weights=share / share.sum(), color=BLUE)


def _strength(runs: Runs) -> str:
    if runs.point["solver"] == BY_PERIOD:
        return f"$K = ${_power(float(runs.point['period'] or 0))}"
    return rf"$\lambda = ${_power(runs['damping'][0])}"


def _power(x: float) -> str:
    exponent = np.log10(x)
    if abs(exponent - round(exponent)) < 1e-6:
        return f"$10^{{{round(exponent)}}}$"
    return f"{x:.3g}"


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="One hidden layer on noisy XOR, to convergence: alignment with the corners "
    "falls as K grows or lambda shrinks; accuracy does not.",
    grid="periods",
)
