"""What the hidden units of an XOR network learn, over K and over lambda.

The noisy XOR is solved by features along the four corners, and by random features too.
One hidden layer is trained to convergence by K steps on each linearisation, and by
damping at matched strength, lambda = 1/(eta K), from small weights, so that there is
something to learn. Alignment of a unit is `max_c cos(w, c)` over the corners c; its mean
over the units is weighted by how much they count, |output weight| |w|.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy import ndarray
from rich.console import Console
from threadpoolctl import threadpool_limits

import gnlin

from .. import _results
from .._options import Options
from ..data import xor
from ..figures import BLUE, figure
from ..networks.mlp import xor_mlp
from ..verdicts import judge, print_verdicts, rank_correlation, Verdict


NUM_SEEDS, NUM_SEEDS_QUICK = 5, 2
NUM_TRAIN, NUM_TEST = 200, 1000
LEARNING_RATE = 1e-4
"""Times the kernel's largest eigenvalue, 1.5e4 at most, it must stay below 2."""
PERIODS = 10.0 ** np.arange(8)
PERIODS_QUICK = 10.0 ** np.array([3, 5, 7])
NUM_INNER_STEPS = 10**5
"""Of every K, unless that were fewer outer steps than these:"""
FEWEST_STEPS, FEWEST_STEPS_QUICK = 300, 10
NUM_DAMPED_STEPS = 300
CORNERS = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
# From so many steps on the spectrum is cheaper than they are.
_SPECTRUM_PAYS = 1000
_SHOWN = 4
"""Strengths that are drawn."""

BY_PERIOD, BY_DAMPING = "iterative-linearisation", "damped-gauss-newton"


@dataclasses.dataclass(frozen=True)
class Row:
    solver: str
    seed: int
    period: float
    """K, or the one that the damping stands for."""
    damping: float
    train_rmse: float
    test_accuracy: float
    alignment: float
    feature_updates: int


@dataclasses.dataclass(frozen=True)
class Runs:
    """Of one solver, with axes over strengths and seeds."""

    solver: str
    periods: Float[ndarray, " strengths"]
    train_rmse: Float[ndarray, "strengths seeds"]
    test_accuracy: Float[ndarray, "strengths seeds"]
    alignment: Float[ndarray, "strengths seeds"]
    feature_updates: Float[ndarray, "strengths seeds"]
    weights: Float[ndarray, "strengths seeds units 3"]
    """First-layer rows, and the output weight."""

    def rows(self) -> list[Row]:
        return [
            Row(
                self.solver,
                seed,
                float(period),
                float(1 / (LEARNING_RATE * period)),
                float(self.train_rmse[i, seed]),
                float(self.test_accuracy[i, seed]),
                float(self.alignment[i, seed]),
                int(self.feature_updates[i, seed]),
            )
            for i, period in enumerate(self.periods)
            for seed in range(self.alignment.shape[1])
        ]


def run(options: Options) -> None:
    """Train, draw, judge, and write rows, settings and verdicts."""
    start = time.perf_counter()
    num_seeds = options.seeds or (NUM_SEEDS_QUICK if options.quick else NUM_SEEDS)
    periods = PERIODS_QUICK if options.quick else PERIODS
    fewest = FEWEST_STEPS_QUICK if options.quick else FEWEST_STEPS
    console = Console()
    # LAPACK's threads and XLA's wait for each other on matrices as small as these.
    with threadpool_limits(1, user_api="blas"):
        runs = [
            train_all(BY_PERIOD, periods, num_seeds, fewest),
            train_all(BY_DAMPING, periods, num_seeds, fewest),
        ]
    verdicts = [verdict for each in runs for verdict in judge_all(each)]
    print_verdicts(console, verdicts)
    draw(options.out / "xor_features.png", runs)
    rows = [row for each in runs for row in each.rows()]
    seconds = time.perf_counter() - start
    settings: dict[str, Any] = {
        "seeds": num_seeds,
        "quick": options.quick,
        "periods": periods.tolist(),
        "learning_rate": LEARNING_RATE,
        "inner_steps": NUM_INNER_STEPS,
        "fewest_outer_steps": fewest,
        "damped_steps": NUM_DAMPED_STEPS,
        "training_examples": NUM_TRAIN,
        "test_examples": NUM_TEST,
        "network": xor_mlp.__name__,
        "wall_seconds": round(seconds, 1),
    }
    _results.write_run(options.out, "xor_features", rows, verdicts, settings)
    console.print(f"{len(rows)} runs in {seconds:.0f} s.", highlight=False)


def train_all(
    solver: str, periods: Float[ndarray, " strengths"], num_seeds: int, fewest: int
) -> Runs:
    data = tuple(map(jnp.asarray, xor.examples(NUM_TRAIN, seed=0)))
    test = tuple(map(jnp.asarray, xor.examples(NUM_TEST, seed=1)))
    seeds = jnp.arange(num_seeds)
    found = []
    for period in periods.tolist():
        if solver == BY_PERIOD:
            num_steps = max(int(NUM_INNER_STEPS / period), fewest)
            literal = period < _SPECTRUM_PAYS
        else:
            num_steps, literal = NUM_DAMPED_STEPS, False
        strength = jnp.asarray(period)
        columns = _train(solver, seeds, strength, data, test, num_steps, literal)
        found.append(jax.device_get(columns))
    return Runs(
        solver, periods, *(np.stack(column) for column in zip(*found, strict=True))
    )


@eqx.filter_jit
def _train(solver, seeds, period, data, test, num_steps: int, literal: bool):
    def make_solver():
        if solver == BY_DAMPING:
            damping = gnlin.equivalent_damping(period, LEARNING_RATE)
            return gnlin.DampedGaussNewton(damping)
        method = "matrix-free" if literal else "auto"
        return gnlin.IterativeLinearisation(period, LEARNING_RATE, method=method)

    def one(seed):
        model = xor_mlp(jax.random.key(seed))
        solution = gnlin.solve(model, data, make_solver(), max_steps=num_steps)
        return _measure(solution.model, data, test, solution.stats["num_feature_updates"])

    return jax.lax.map(one, seeds)


def _measure(model: eqx.nn.MLP, data, test, feature_updates) -> tuple[Array, ...]:
    first, last = model.layers
    assert last.weight.ndim == 2
    rows, output = first.weight, last.weight[0]
    alignment = gnlin.features.direction_alignment(rows, jnp.asarray(CORNERS))
    share = jnp.abs(output) * jnp.linalg.norm(rows, axis=1)
    residual = jax.vmap(model)(data[0]) - data[1]
    right = jnp.sign(jax.vmap(model)(test[0])) == jnp.sign(test[1])
    return (
        jnp.sqrt(jnp.mean(residual**2)),
        jnp.mean(right),
        jnp.sum(share * alignment) / jnp.sum(share),
        feature_updates,
        jnp.column_stack([rows, output]),
    )


def judge_all(runs: Runs) -> list[Verdict]:
    over = "K" if runs.solver == BY_PERIOD else "1/lambda"
    claim = "as K grows" if runs.solver == BY_PERIOD else "as lambda shrinks"
    accuracy = runs.test_accuracy
    return [
        judge(
            f"Alignment with the corners falls {claim}",
            f"Spearman's correlation of alignment with {over}, a seed",
            rank_correlation(runs.periods, runs.alignment.T),
            below=0,
        ),
        judge(
            f"Accuracy does not fall {claim}",
            f"test accuracy at the largest {over} less that at the smallest, a seed",
            accuracy[-1] - accuracy[0],
            above=-0.01,
        ),
    ]


def draw(path: Path, all_runs: Sequence[Runs]) -> None:
    """A row of planes and one of histograms for each solver."""
    with figure(path, width=11, height=11) as drawing:
        axes = drawing.subplots(2 * len(all_runs), _SHOWN)
        for runs, planes, histograms in zip(all_runs, axes[::2], axes[1::2], strict=True):
            shown = np.linspace(0, len(runs.periods) - 1, _SHOWN).round().astype(int)
            for plane, histogram, i in zip(planes, histograms, shown, strict=True):
                _draw_plane(plane, runs.weights[i, 0])
                plane.set_title(_strength(runs, i))
                _draw_histogram(histogram, runs.weights[i].reshape(-1, 3))
                mean = runs.alignment[i].mean()
                histogram.set_title(f"weighted mean {mean:.3f}", fontsize="medium")
            histograms[0].set_ylabel("Share of the units")
        for axis in axes[-1]:
            axis.set_xlabel("Alignment with a corner")


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


def _strength(runs: Runs, i: int) -> str:
    exponent = round(np.log10(runs.periods[i]))
    if runs.solver == BY_PERIOD:
        return rf"$K = 10^{{{exponent}}}$"
    exponent = round(-np.log10(LEARNING_RATE * runs.periods[i]))
    return rf"$\lambda = 10^{{{exponent}}}$"
