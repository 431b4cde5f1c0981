"""Solvers that do not adapt, at ordinary settings, and the default of `fit` all train
ordinary networks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin


SOLVERS = {
    **{f"truncated {t}": gnlin.TruncatedGaussNewton(t) for t in (0.5, 0.1, 0.03, 0.01)},
    **{f"damped {d}": gnlin.DampedGaussNewton(d) for d in (1.0, 0.1, 0.01, 0.001)},
}
# These bars were fixed before any run; nearest neighbours reach 0.95.
BAR = 0.8
NUM_STEPS = 40


def settings():
    for name, solver in SOLVERS.items():
        yield pytest.param(solver, None, id=f"{name}, full batch")
        yield pytest.param(solver, 100, id=f"{name}, mini-batches")


@pytest.fixture(scope="module")
def digits():
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    return (images[:1347], labels[:1347]), (images[1347:], labels[1347:])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("solver", "batch_size"), list(settings()))
def test_digits_are_learnt(digits, solver, batch_size):
    train, (images, labels) = digits
    key = jax.random.key(0)
    model = eqx.nn.MLP(64, 10, 16, 1, jnp.tanh, dtype=jnp.float32, key=key)
    result = gnlin.fit(
        model,
        train,
        solver,
        loss=gnlin.SoftmaxCrossEntropy(),
        batch_size=batch_size,
        steps=NUM_STEPS,
        key=key,
        progress=False,
    )
    accuracy = float(gnlin.losses.accuracy(jax.vmap(result.model)(images), labels))
    assert accuracy > BAR


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    dense: eqx.nn.Linear

    def __init__(self, key):
        cell, dense = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(8, 24, dtype=jnp.float32, key=cell)
        self.dense = eqx.nn.Linear(24, 10, dtype=jnp.float32, key=dense)

    def __call__(self, x):
        start = jnp.zeros(24, x.dtype)
        step = lambda h, row: (self.cell(row, h), None)
        last, _ = jax.lax.scan(step, start, x.reshape(8, 8))
        return self.dense(last)


def dense(key):
    return eqx.nn.MLP(64, 10, 32, 2, jnp.tanh, dtype=jnp.float32, key=key)


# (network, batch size, steps): the first three are solved exactly, the last one by
# products.
UNTUNED = {
    "dense, batches of 8": (dense, 8, 300),
    "dense, batches of 16": (dense, 16, 200),
    "recurrent, batches of 8": (Recurrent, 8, 400),
    "recurrent, batches of 128": (Recurrent, 128, 150),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("network", "batch_size", "steps"), UNTUNED.values(), ids=UNTUNED
)
def test_digits_are_learnt_without_a_solver(digits, network, batch_size, steps):
    train, (images, labels) = digits
    key = jax.random.key(0)
    result = gnlin.fit(
        network(key),
        train,
        loss=gnlin.SoftmaxCrossEntropy(),
        batch_size=batch_size,
        steps=steps,
        key=key,
        progress=False,
    )
    accuracy = float(gnlin.losses.accuracy(jax.vmap(result.model)(images), labels))
    assert accuracy > BAR
