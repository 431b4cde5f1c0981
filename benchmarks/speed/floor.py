"""The limit: what one would write by hand for this one task, in plain jax.numpy.

Nothing here is general or safe. The two passes through the network are written out, the
kernel is formed from each layer's inputs and the signals that come back to it, and LAPACK
solves. A library that comes near these times has little left to gain.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .task import Task


def _passes(parameters: Any, args):
    """Return each layer's inputs, the signals that come back to it, and the residual."""
    inputs, targets = args
    *hidden, last = parameters.layers
    activations, slopes, x = [inputs], [], inputs
    for layer in hidden:
        z = x @ layer.weight.T + layer.bias[None]
        x = jnp.maximum(z, 0)
        activations.append(x)
        slopes.append(z > 0)
    residual = (x @ last.weight.T + last.bias[None] - targets)[:, 0]
    signal = jnp.ones_like(inputs)
    signals = [signal]
    for layer, slope in zip(parameters.layers[:0:-1], slopes[::-1], strict=True):
        signal = jnp.where(slope, signal @ layer.weight, 0)
        signals.insert(0, signal)
    return activations, signals, residual


def _kernel(activations, signals) -> Float[Array, "m m"]:
    """Return the kernel of weights and biases together. A bias is the weight of an input
    1."""
    parts = [(s @ s.T) * (1 + a @ a.T) for a, s in zip(activations, signals, strict=True)]
    return sum(parts[1:], parts[0])


def _minus_pull_back(parameters, activations, signals, v) -> PyTree[Array]:
    weighted = [-v[:, None] * s for s in signals]
    weights = [s.T @ a for a, s in zip(activations, weighted, strict=True)]
    biases = [jnp.sum(s, axis=0) for s in weighted]
    return eqx.tree_at(
        lambda mlp: [
            *(layer.weight for layer in mlp.layers),
            *(layer.bias for layer in mlp.layers),
        ],
        parameters,
        weights + biases,
    )


def damped_step(parameters, args, damping):
    """Return the parameters after the step -phi^T (phi phi^T + lambda I)^-1 r, by a
    Cholesky factorisation."""
    activations, signals, residual = _passes(parameters, args)
    damped = _kernel(activations, signals) + damping * jnp.eye(residual.size)
    factor = jax.scipy.linalg.cho_factor(damped)
    a = jax.scipy.linalg.cho_solve(factor, residual)
    step = _minus_pull_back(parameters, activations, signals, a)
    return jax.tree.map(jnp.add, parameters, step)


def damped_loop():
    """Compile `run(parameters, args, damping, n)`: n steps that compute no loss."""

    @jax.jit
    def run(parameters, args, damping, num_steps):
        def body(_, y):
            return damped_step(y, args, damping)

        return jax.lax.fori_loop(0, num_steps, body, parameters)

    return run


def checked_damped_loop(task: Task, max_steps: int):
    """Compile the same loop with the least that a solver must do: it keeps the loss after
    every step, and ends at the first number that is not finite."""

    @jax.jit
    def run(parameters, args, damping, num_steps):
        def body(carry):
            i, y, _, losses = carry
            y = damped_step(y, args, damping)
            residual = task.residuals(y, args)
            loss = 0.5 * residual @ residual
            finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(y)]
            sound = jnp.isfinite(loss) & jnp.all(jnp.stack(finite))
            return i + 1, y, sound, losses.at[i].set(loss)

        def unfinished(carry):
            i, _, sound, _ = carry
            return (i < num_steps) & sound

        start = jnp.array(0), parameters, jnp.array(True), jnp.full(max_steps, jnp.nan)
        _, y, _, losses = jax.lax.while_loop(unfinished, body, start)
        return y, losses

    return run


def spectrum(parameters, args):
    """Return the layers' factors, eigenvalues, eigenvectors, and the residual in their
    basis."""
    activations, signals, residual = _passes(parameters, args)
    w, u = jnp.linalg.eigh(_kernel(activations, signals))
    return (parameters, activations, signals), w, u, u.T @ residual


def filtered_step(factors, g: Callable[[Array], Array]):
    """Return the step of any filter of the eigenvalues."""
    (parameters, activations, signals), w, u, coefficients = factors
    return _minus_pull_back(parameters, activations, signals, u @ (g(w) * coefficients))


def descent_step(factors, period, learning_rate):
    """Return K steps of gradient descent by one formula, for eigenvalues below 1 /
    eta."""
    return filtered_step(
        factors, lambda w: -jnp.expm1(period * jnp.log1p(-learning_rate * w)) / w
    )


def literal_descent(task: Task):
    """Compile `run(parameters, args, learning_rate, k)`: k steps on the linearised
    network."""

    @jax.jit
    def run(parameters, args, learning_rate, num_steps):
        residual, jvp = jax.linearize(lambda y: task.residuals(y, args), parameters)
        vjp = jax.linear_transpose(jvp, parameters)

        def body(_, step):
            (gradient,) = vjp(residual + jvp(step))
            return jax.tree.map(lambda s, g: s - learning_rate * g, step, gradient)

        zero = jax.tree.map(jnp.zeros_like, parameters)
        return jax.lax.fori_loop(0, num_steps, body, zero)

    return run
