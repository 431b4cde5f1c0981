"""Test accuracy against damping: a convolutional network, each problem solved.

`lambda |theta - theta_s|^2` is added to the mean loss of each linearised problem. On the
full batch that is minimised by Newton's method, on mini-batches by so many steps of Adam,
which must be many: with few of them it is they that damp.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool
from numpy import ndarray

import gnlin

from .. import thresholds, training
from ..experiment import Experiment, only, Place, Point, Runs
from ..figures import band, BLUE, figure, VERMILION
from ..training import Columns, Images
from ..verdicts import judge, slope, Verdict


@dataclasses.dataclass(frozen=True)
class LambdaSweepCNN(Images):
    seeds: int = 8
    dampings: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    num_updates: int = 30
    """On the full batch."""
    period: int = 50_000
    """On mini-batches, Adam's steps on each linearised problem."""
    network: str = "digits-cnn"
    num_train: int | None = 50
    learning_rate: float = 1e-3
    """Of Adam."""
    num_looks: int = 30


EMBEDDED = LambdaSweepCNN()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=2,
    dampings=(1e-4, 1e-2, 1.0),
    num_train=20,
    num_updates=3,
    num_looks=3,
)
FULL = dataclasses.replace(
    EMBEDDED,
    dampings=(1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0),
    data="cifar10",
    network="lenet",
    num_train=None,
    batch_size=256,
    num_steps=1_000_000,
    num_looks=100,
)


def points(settings: LambdaSweepCNN) -> list[Point]:
    return [{"damping": damping} for damping in settings.dampings]


def train(settings: LambdaSweepCNN, point: Point, place: Place) -> Columns:
    if settings.batch_size is None:
        # Of lambda / 2 |theta - theta_s|^2, and of the sum.
        damping = 2 * point["damping"] * len(training.load(settings, place, 0).train[1])
        solver = gnlin.DampedGaussNewton(
            jnp.asarray(damping), form="prox-linear", search=None
        )
        return training.full_batch(settings, place, solver, settings.num_updates)
    solver = gnlin.IterativeLinearisation(
        settings.period,
        optimiser=optax.adam(settings.learning_rate),
        damping=2 * point["damping"],  # of lambda / 2 |theta - theta_s|^2
    )
    callbacks = lambda draw, model: [training.TrainAccuracy(draw.train)]
    return training.mini_batches(settings, place, solver, callbacks)


def finals(settings: LambdaSweepCNN, all_runs: Sequence[Runs], name: str) -> ndarray:
    """Axes over dampings and seeds."""
    return np.array([only(all_runs, damping=x).final(name) for x in settings.dampings])


def finished(settings: LambdaSweepCNN, all_runs) -> Bool[ndarray, " dampings"]:
    """Where the training accuracy is within 1 % of the best, up to the first that is not:
    beyond it the steps are too few."""
    train = finals(settings, all_runs, "train_accuracy").mean(axis=1)
    short = train < train.max() - 0.01
    return (np.cumsum(short) == 0) | (np.arange(len(train)) <= np.argmax(train))


def judge_all(settings: LambdaSweepCNN, all_runs: Sequence[Runs]) -> list[Verdict]:
    usable = finished(settings, all_runs)
    accuracy = finals(settings, all_runs, "test_accuracy").T[:, usable]
    x = np.log10(np.asarray(settings.dampings)[usable])
    return [
        judge(
            "More damping generalises better",
            "slope of the final test accuracy in log10 lambda, where training has "
            "finished (within 1 % of the best training accuracy), a seed",
            slope(x, accuracy),
            thresholds.RISES,
        )
    ]


def draw(
    settings: LambdaSweepCNN, all_runs: Sequence[Runs], out: Path
) -> Mapping[str, str]:
    with figure(out / "lambda_sweep_cnn.png", width=7.5, height=5) as drawing:
        axes = drawing.subplots()
        for name, colour in (("test_accuracy", BLUE), ("train_accuracy", VERMILION)):
            values = 100 * finals(settings, all_runs, name)
            label = name.replace("_", " ").replace("train", "training")
            band(axes, settings.dampings, values.T, colour, label, "o-")
        axes.set(xscale="log", xlabel=r"Damping $\lambda$", ylabel="Final accuracy (%)")
        axes.legend()
    solved = f"by Newton's method, {settings.num_updates} of them"
    if settings.batch_size is not None:
        solved = (
            f"by {settings.period:,} steps of Adam (learning rate "
            f"{settings.learning_rate:g}), {settings.num_steps:,} steps in all"
        )
    return {
        "lambda_sweep_cnn": "Final accuracy against damping, each linearised problem "
        f"solved {solved}. {training.described(settings)}; means and ranges of "
        f"{settings.seeds} seeds."
    }


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="CNN on CIFAR-10, cross-entropy, Adam on each linearised problem: more damping "
    "generalises better.",
    grid="dampings",
    any_task=True,
)
