"""A small network, its data in batches, and literal training loops in NumPy."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from problems import numbers as numbers, updated

import gnlin


X = jax.random.normal(jax.random.key(1), (12, 3))
T = jnp.stack([jnp.sin(X[:, 0] + X[:, 1]), X[:, 2] * X[:, 0]], axis=1)
LABELS = jnp.argmax(X, axis=1) % 2
BATCHES = [(X[i : i + 4], T[i : i + 4]) for i in (0, 4, 8)]
LABELLED = [(X[i : i + 4], LABELS[i : i + 4]) for i in (0, 4, 8)]

# This is cheap to compile, and shared by most tests.
DESCENT = gnlin.IterativeLinearisation(3, 0.05)


def network(seed=0, width=3):
    return eqx.nn.MLP(3, 2, width, 1, activation=jnp.tanh, key=jax.random.key(seed))


def fit(model=None, data=(X, T), solver=DESCENT, **arguments):
    """Train on half the sum of squares for two epochs of three batches, unless told
    otherwise."""
    defaults = {"progress": False, "loss": gnlin.SquaredError(reduction="sum")}
    if isinstance(data, tuple):
        defaults["batch_size"] = 4
    if "steps" not in arguments:
        defaults["epochs"] = 2
    model = network() if model is None else model
    return gnlin.fit(model, data, solver, **{**defaults, **arguments})


_PARAMETERS, _STATIC = eqx.partition(network(), eqx.is_inexact_array)
START, _UNRAVEL = ravel_pytree(_PARAMETERS)


@jax.jit
def outputs(flat, x):
    """Return the outputs of `network` for all its parameters in one vector."""
    return jax.vmap(eqx.combine(_UNRAVEL(flat), _STATIC))(x)


_jacobian = jax.jit(jax.jacobian(outputs))


def dense(flat, x):
    """(outputs, Jacobian) as a vector and a matrix."""
    rows = _jacobian(jnp.asarray(flat), x)
    return np.ravel(outputs(flat, x)), np.reshape(rows, (-1, len(flat)))


def squared_error(f, targets):
    """Return (value, gradient, Hessian) with respect to the outputs."""
    r = np.ravel(f) - np.ravel(targets)
    return 0.5 * r @ r, r, np.eye(r.size)


def cross_entropy(f, labels):
    f, labels = np.reshape(f, (len(labels), -1)), np.asarray(labels)
    z = f - f.max(axis=1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    hessian = np.zeros((f.size, f.size))
    for i, q in enumerate(p):
        block = slice(i * q.size, (i + 1) * q.size)
        hessian[block, block] = np.diag(q) - np.outer(q, q)
    value = -np.sum(np.log(p[np.arange(len(labels)), labels]))
    return value, np.ravel(p - np.eye(f.shape[1])[labels]), hessian


def outer_steps(step, batches, num_steps, flat=START):
    """Return (parameters, losses) of literal steps `step(r, J)`, batch by batch."""
    flat, losses = np.asarray(flat), []
    for k in range(num_steps):
        x, targets = batches[k % len(batches)]
        f, jacobian = dense(flat, x)
        loss, r, _ = squared_error(f, targets)
        losses.append(loss)
        flat = flat + step(r, jacobian)
    return flat, np.array(losses)


@functools.partial(jax.jit, static_argnums=0)
def _updated(optimiser, gradient, state, flat):
    updates, state = updated(optimiser, gradient, state, flat)
    return optax.apply_updates(flat, updates), state


def inner_steps(
    optimiser,
    period,
    batches,
    num_steps,
    *,
    restart=True,
    damping=0.0,
    loss=squared_error,
    quadratic=False,
    dense=dense,
    flat=START,
):
    """(parameters, theta_s, losses) of optax on L(f(theta_s) + J (theta - theta_s))."""
    flat = point = np.asarray(flat)
    state, losses = optimiser.init(flat), []
    for k in range(num_steps):
        x, targets = batches[k % len(batches)]
        f, jacobian = dense(point, x)
        delta = flat - point
        value, gradient, _ = loss(f + jacobian @ delta, targets)
        losses.append(value)
        if quadratic:
            _, at_point, hessian = loss(f, targets)
            gradient = at_point + hessian @ jacobian @ delta
        gradient = jacobian.T @ gradient + damping * delta
        flat, state = _updated(optimiser, gradient, state, flat)
        flat = np.asarray(flat)
        if (k + 1) % period == 0:
            point = flat
            state = optimiser.init(flat) if restart else state
    return flat, point, np.array(losses)


class Echo(eqx.Module):
    """A model that returns its inputs, whatever its parameter."""

    idle: jax.Array

    def __call__(self, x):
        return x + 0 * self.idle


def batches_drawn(num_examples, batch_size, num_steps, key):
    """Return the examples of each step. Example i has the loss 2^i, so that the sum of a
    batch identifies its examples."""
    powers = 2.0 ** jnp.arange(num_examples, dtype=float)
    data = jnp.sqrt(2 * powers), jnp.zeros(num_examples)
    with pytest.warns(UserWarning, match="the gradient is exactly zero"):
        history = fit(
            Echo(jnp.asarray(0.0)), data, batch_size=batch_size, steps=num_steps, key=key
        ).history
    sums = [round(loss) for loss in history["loss"]]
    return [[i for i in range(num_examples) if total >> i & 1] for total in sums]


class Normalised(eqx.Module):
    """A network with batch normalisation."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key, momentum=0.5):
        first, last = jax.random.split(key)
        self.first = eqx.nn.Linear(3, 2, key=first)
        self.norm = eqx.nn.BatchNorm(2, "batch", momentum=momentum, mode="batch")
        self.last = eqx.nn.Linear(2, 2, key=last)

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(jnp.tanh(x)), state


class Dropped(eqx.Module):
    """A network with dropout."""

    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key):
        first, last = jax.random.split(key)
        self.first = eqx.nn.Linear(3, 4, key=first)
        self.dropout = eqx.nn.Dropout(0.5)
        self.last = eqx.nn.Linear(4, 2, key=last)

    def __call__(self, x, *, key):
        return self.last(self.dropout(jnp.tanh(self.first(x)), key=key))
