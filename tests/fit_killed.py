"""Trains several models, one after the other, with checkpoints; made to be killed.

    python fit_killed.py <folder>

Trains what has not been trained yet, tells each step, and leaves a
`<folder>/<name>.npz` of each.
"""

import os
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import gnlin


DRAW = np.random.default_rng(0)
IMAGES = DRAW.normal(size=(96, 12)).astype(np.float32)
LABELS = np.argmax(IMAGES @ DRAW.normal(size=(12, 4)), axis=1)
TARGETS = np.eye(4, dtype=np.float32)[LABELS]
VALIDATION = IMAGES[:40] + 1, LABELS[:40]


def network():
    return eqx.nn.MLP(12, 4, 8, 1, activation=jnp.tanh, key=jax.random.key(1))


class Normalised(eqx.Module):
    layers: list
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        keys = jax.random.split(key)
        self.layers = [
            eqx.nn.Linear(12, 8, key=keys[0]),
            eqx.nn.Linear(8, 4, key=keys[1]),
        ]
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.3)

    def __call__(self, x, state, *, key):
        x, state = self.norm(self.layers[0](x), state)
        return self.layers[1](self.dropout(jnp.tanh(x), key=key)), state


def noisy(x, key):
    return x + 0.1 * jax.random.normal(key, x.shape)


def batches(epoch):
    draw = np.random.default_rng(epoch)
    for _ in range(5):
        chosen = draw.integers(96, size=16)
        yield IMAGES[chosen], TARGETS[chosen]


def momentum():
    return {
        "model": network(),
        "data": (IMAGES, LABELS),
        "solver": gnlin.IterativeLinearisation(7, 3e-3, 0.9),
        "loss": gnlin.SoftmaxCrossEntropy(),
        "batch_size": 20,
        "steps": 400,
        "augment": noisy,
        "validation": VALIDATION,
        "validate_every": 15,
        "metrics": {"accuracy": gnlin.losses.accuracy},
    }


def adam():
    """Adam with early stopping."""
    return {
        "model": network(),
        "data": (IMAGES, LABELS),
        "solver": gnlin.IterativeLinearisation(
            5, optimiser=optax.adam(3e-3), restart=False
        ),
        "loss": gnlin.SoftmaxCrossEntropy(reduction="mean"),
        "batch_size": 20,
        "epochs": 300,
        "validation": VALIDATION,
        "callbacks": gnlin.callbacks.EarlyStop(patience=20),
    }


def levenberg_marquardt():
    return {
        "model": network(),
        "data": (IMAGES, TARGETS),
        "solver": gnlin.LevenbergMarquardt(scaling="identity", acceleration=False),
        "batch_size": 10,
        "steps": 200,
        "curvature_batch_size": 15,
    }


def full_batch():
    return {
        "model": network(),
        "data": (IMAGES, TARGETS, np.linspace(0, 1, 96)),
        "solver": gnlin.DampedGaussNewton(lambda step: 30 / (1 + step), scaling="more"),
        "epochs": 200,
        "validation": (IMAGES, TARGETS),
        "validate_every": 4,
    }


def normalised():
    model, state = eqx.nn.make_with_state(Normalised)(jax.random.key(2))
    return {
        "model": model,
        "state": state,
        "data": (IMAGES, LABELS),
        "solver": gnlin.IterativeLinearisation(3, 3e-3, 0.5),
        "loss": gnlin.SoftmaxCrossEntropy(),
        "batch_size": 20,
        "epochs": 80,
        "validation": VALIDATION,
    }


def iterable():
    return {
        "model": network(),
        "data": batches,
        "solver": gnlin.TruncatedGaussNewton(
            gnlin.methods.EisenstatWalker(), damping=1.0
        ),
        "epochs": 40,
    }


CASES = [momentum, adam, levenberg_marquardt, full_batch, normalised, iterable]


class Tell(gnlin.callbacks.Callback):
    def __init__(self, name):
        self.name = name

    def on_start(self, run):
        print(self.name, "starts", run.step, flush=True)

    def on_step(self, run):
        print(self.name, "trains", run.step, flush=True)
        time.sleep(0.002)  # otherwise it might finish before it is killed


def train(case, folder):
    arguments = case()
    early = arguments.pop("callbacks", None)
    result = gnlin.fit(
        **arguments,
        callbacks=[Tell(case.__name__)] + ([early] if early else []),
        checkpoint=gnlin.Checkpoint(folder / case.__name__, every_steps=7),
        resume=True,
        key=jax.random.key(3),
        progress=False,
    )
    tree = result.model, result.state, result.linearisation_point
    arrays = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    columns = dict(result.history)
    made = folder / f"{case.__name__}.unfinished"
    with made.open("wb") as file:
        np.savez(file, *arrays, **columns, reason=np.array(result.reason))
    os.replace(made, made.with_suffix(".npz"))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for case in CASES:
        if not (folder / f"{case.__name__}.npz").exists():
            train(case, folder)
