"""Test accuracy over K, from gradient descent to one solved problem after another.

Handwritten digits with softmax cross-entropy, full batch. Every K gets the same number of
inner steps, but no fewer than so many feature updates. Few steps are taken literally,
more of them with the kernel, and from 10^4 on as gradient flow for the time K eta, whose
error against literal steps is measured and written down. Damped Gauss-Newton (next to no
damping) and truncated Gauss-Newton stand beside them, on the same axes.
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
from rich.progress import track
from threadpoolctl import threadpool_limits

import gnlin

from .. import _results
from .._options import Options
from ..data import digits
from ..figures import BLACK, figure, VERMILION
from ..networks.mlp import digits_mlp
from ..verdicts import judge, print_verdicts, Verdict


NUM_SEEDS, NUM_SEEDS_QUICK = 5, 2
PER_CLASS = 5
LEARNING_RATE = 1e-3
PERIODS = np.unique(
    np.concatenate([[1, 2, 4, 8, 16, 30, 60], np.round(np.logspace(2, 8, 18))])
)
PERIODS_QUICK = np.array([1.0, 100.0, 1e6])
NUM_INNER_STEPS, NUM_INNER_STEPS_QUICK = 20_000, 200
FEWEST_UPDATES, FEWEST_UPDATES_QUICK = 20, 2
NUM_LOOKS = 24
"""At the test data in a run, evenly spaced in the logarithm of its feature updates."""
SMALL = 1e4
"""K up to here is claimed to be like K = 1."""

DAMPED, TRUNCATED = "damped Gauss-Newton", "truncated Gauss-Newton"
BASELINES = {
    DAMPED: gnlin.DampedGaussNewton(1e-3, form="prox-linear"),
    TRUNCATED: gnlin.TruncatedGaussNewton(0.1, form="prox-linear"),
}
LOSS = gnlin.SoftmaxCrossEntropy()


@dataclasses.dataclass(frozen=True)
class Row:
    """One look."""

    solver: str
    period: float | None
    seed: int
    feature_updates: int
    inner_steps: float
    train_loss: float
    train_accuracy: float
    test_accuracy: float


@dataclasses.dataclass(frozen=True)
class Curves:
    """Of one solver and K: axes over seeds and looks."""

    solver: str
    period: float | None
    updates: Float[ndarray, " looks"]
    inner_steps: Float[ndarray, "seeds looks"]
    train_loss: Float[ndarray, "seeds looks"]
    train_accuracy: Float[ndarray, "seeds looks"]
    test_accuracy: Float[ndarray, "seeds looks"]

    @property
    def final(self) -> Float[ndarray, " seeds"]:
        return self.test_accuracy[:, -1]

    def rows(self) -> list[Row]:
        return [
            Row(
                self.solver,
                self.period,
                seed,
                int(updates),
                float(self.inner_steps[seed, i]),
                float(self.train_loss[seed, i]),
                float(self.train_accuracy[seed, i]),
                float(self.test_accuracy[seed, i]),
            )
            for seed in range(len(self.train_loss))
            for i, updates in enumerate(self.updates)
        ]


def run(options: Options) -> None:
    """Train, draw, judge, and write rows, settings and verdicts."""
    start = time.perf_counter()
    num_seeds = options.seeds or (NUM_SEEDS_QUICK if options.quick else NUM_SEEDS)
    periods = PERIODS_QUICK if options.quick else PERIODS
    num_inner = NUM_INNER_STEPS_QUICK if options.quick else NUM_INNER_STEPS
    fewest = FEWEST_UPDATES_QUICK if options.quick else FEWEST_UPDATES
    console = Console()
    # LAPACK's threads and XLA's wait for each other on matrices as small as these.
    with threadpool_limits(1, user_api="blas"):
        curves = [
            by_period(float(period), num_seeds, num_inner, fewest)
            for period in track(periods, "K", console=console)
        ]
        curves += [baseline(name, num_seeds, fewest) for name in BASELINES]
        error = flow_error()
    verdicts = judge_all(curves)
    print_verdicts(console, verdicts)
    draw(options.out / "k_sweep.png", curves)
    rows = [row for each in curves for row in each.rows()]
    seconds = time.perf_counter() - start
    settings: dict[str, Any] = {
        "seeds": num_seeds,
        "quick": options.quick,
        "periods": periods.tolist(),
        "learning_rate": LEARNING_RATE,
        "inner_steps": num_inner,
        "fewest_feature_updates": fewest,
        "baselines": {name: repr(solver) for name, solver in BASELINES.items()},
        "training_examples": PER_CLASS * digits.NUM_CLASSES,
        "network": digits_mlp.__name__,
        "flow_against_literal_steps": error,
        "wall_seconds": round(seconds, 1),
    }
    _results.write_run(options.out, "k_sweep", rows, verdicts, settings)
    console.print(
        f"{num_seeds * len(curves)} runs in {seconds:.0f} s. One linearised problem by "
        f"gradient flow ends {error:.1e} of the step from 10,000 literal steps.",
        highlight=False,
        soft_wrap=True,
    )


def by_period(period: float, num_seeds: int, num_inner: int, fewest: int) -> Curves:
    solver = gnlin.IterativeLinearisation(
        jnp.asarray(period), LEARNING_RATE, method=_method(period)
    )
    num_updates = max(round(num_inner / period), fewest)
    return train_curves("iterative linearisation", period, solver, num_updates, num_seeds)


def baseline(name: str, num_seeds: int, num_updates: int) -> Curves:
    return train_curves(name, None, BASELINES[name], num_updates, num_seeds)


def _method(period: float) -> Any:
    if period < 30:
        return "matrix-free"
    return "kernel" if period < SMALL else "flow"


def train_curves(name, period, solver, num_updates: int, num_seeds: int) -> Curves:
    updates = np.unique(np.round(np.geomspace(1, num_updates, NUM_LOOKS)))
    padded = np.pad(updates, (0, NUM_LOOKS - len(updates)), mode="edge")
    data, test = _data()
    found = _train_all(solver, jnp.arange(num_seeds), jnp.asarray(padded), data, test)
    columns = (np.asarray(column)[:, : len(updates)] for column in found)
    return Curves(name, period, updates, *columns)


def _data() -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Five images of each class, and all others to test."""

    def labelled(pixels, one_hot):
        return jnp.asarray(pixels), jnp.argmax(jnp.asarray(one_hot), axis=1)

    train, test = digits.examples(PER_CLASS)
    return labelled(*train), labelled(*test)


@eqx.filter_jit
def _train_all(solver, seeds, looks, data, test) -> tuple[Array, ...]:
    return jax.lax.map(lambda seed: _train(solver, seed, looks, data, test), seeds)


def _train(solver, seed, looks, data, test) -> tuple[Array, ...]:
    """Inner steps, training loss, training and test accuracy, at each look."""
    (inputs, labels), (test_inputs, test_labels) = data, test
    model = digits_mlp(jax.random.key(seed))
    parameters, frozen = eqx.partition(model, eqx.is_inexact_array)
    fn = gnlin.PerExample(lambda y, x: eqx.combine(y, frozen)(x))
    outputs = jax.eval_shape(fn, parameters, inputs)
    objective = gnlin.BatchLoss(LOSS, outputs, labels)
    evaluate = lambda y: fn(y, inputs)

    def step(carry):
        y, state = carry
        lin = gnlin.linearise(fn, y, inputs)
        y, new = solver.advance(objective, lin, evaluate, state)
        return y, new

    def until(carry, updates):
        def unfinished(carry):
            _, state = carry
            return state.counts.num_feature_updates < updates

        y, state = jax.lax.while_loop(unfinished, step, carry)
        fitted = fn(y, inputs)
        measured = (
            state.counts.num_inner_steps,
            objective.value(fitted),
            gnlin.accuracy(fitted, labels),
            gnlin.accuracy(fn(y, test_inputs), test_labels),
        )
        return (y, state), measured

    start = parameters, solver.start(parameters, outputs)
    return jax.lax.scan(until, start, looks)[1]


def flow_error(num_steps: int = 10_000) -> float:
    """How far gradient flow ends from literal steps on the first linearised problem,
    relative to the step."""
    (inputs, labels), _ = _data()
    model = digits_mlp(jax.random.key(0))

    def end(method):
        solver = gnlin.IterativeLinearisation(num_steps, LEARNING_RATE, method=method)
        data = inputs, labels
        return gnlin.solve(model, data, solver, loss=LOSS, max_steps=1).model

    literal, flow = end("kernel"), end("flow")
    moved = gnlin.features.distance(literal, model)
    return float(gnlin.features.distance(flow, literal) / moved)


def judge_all(curves: Sequence[Curves]) -> list[Verdict]:
    by_k = {c.period: c.final for c in curves if c.period is not None}
    by_name = {c.solver: c.final for c in curves if c.period is None}
    first, last = by_k[min(by_k)], by_k[max(by_k)]
    small = np.mean([by_k[k] for k in by_k if 1 < k <= SMALL], axis=0)
    return [
        judge(
            f"K up to {SMALL:g} ends like K = 1",
            "mean final test accuracy of those K less that of K = 1, a seed",
            small - first,
            above=-0.02,
            below=0.02,
        ),
        judge(
            f"K = {max(by_k):g} ends worse than K = 1",
            "final test accuracy of the one less that of the other, a seed",
            last - first,
            below=0,
        ),
        judge(
            f"K = {max(by_k):g} approaches truncated Gauss-Newton",
            "final test accuracy of the one less that of the other, a seed",
            last - by_name[TRUNCATED],
            above=-0.03,
            below=0.03,
        ),
    ]


def draw(path: Path, curves: Sequence[Curves]) -> None:
    """Test accuracy over inner steps, over feature updates, and in the end over K."""
    import matplotlib

    colours = matplotlib.colormaps["viridis"]
    descents = [c for c in curves if c.period is not None]
    others = {c.solver: c for c in curves if c.period is None}
    looks = {
        DAMPED: {"color": BLACK, "linestyle": "--"},
        TRUNCATED: {"color": VERMILION, "linestyle": "-."},
    }
    with figure(path, width=13, height=4.6) as drawing:
        over_steps, over_updates, over_k = drawing.subplots(1, 3, sharey=True)
        shown = descents[:: max(1, len(descents) // 8)]
        for c in shown:
            assert c.period is not None
            colour = colours(np.log10(c.period) / 8.5)
            accuracy = 100 * c.test_accuracy.mean(axis=0)
            label = f"K = {c.period:.3g}"
            over_steps.plot(c.inner_steps.mean(axis=0), accuracy, color=colour)
            over_updates.plot(c.updates, accuracy, color=colour, label=label)
        for name, c in others.items():
            accuracy = 100 * c.test_accuracy.mean(axis=0)
            over_updates.plot(c.updates, accuracy, label=name, **looks[name])
            mean = 100 * c.final.mean()
            over_k.axhline(mean, label=name, **looks[name])
        periods = [c.period for c in descents]
        finals = 100 * np.array([c.final for c in descents])
        over_k.plot(periods, finals.mean(axis=1), "o-", color="#0072B2")
        over_k.fill_between(
            periods, finals.min(axis=1), finals.max(axis=1), alpha=0.2, linewidth=0
        )
        over_steps.set(xscale="log", xlabel="Inner steps", ylabel="Test accuracy (%)")
        over_updates.set(xscale="log", xlabel="Feature updates")
        over_k.set(xscale="log", xlabel="Period $K$")
        over_k.set_title(f"In the end; mean and range of {finals.shape[1]} seeds")
        over_updates.legend(fontsize="x-small")
