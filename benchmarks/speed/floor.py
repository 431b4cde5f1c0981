"""The limit: what one would write by hand for this one task, in plain jax.numpy.

Nothing general is in here, and no safety: per-example gradients, the kernel summed leaf
by leaf, LAPACK, update. A library that comes near it leaves little to gain.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .task import Task


def _rows_kernel_residual(task: Task, parameters, args):
    inputs, _ = args
    rows = jax.vmap(jax.grad(task.forward), in_axes=(None, 0))(parameters, inputs)
    residual = task.residuals(parameters, args)
    blocks = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(rows)]
    kernel = functools.reduce(jnp.add, [b @ b.T for b in blocks])
    return rows, kernel, residual


def _minus_pull_back(rows: PyTree[Array], a: Array) -> PyTree[Array]:
    return jax.tree.map(lambda leaf: -jnp.tensordot(a, leaf, axes=1), rows)


def damped_step(task: Task, parameters, args, damping):
    """phi^T (phi phi^T + lambda I)^-1 r, by a Cholesky factorisation."""
    rows, kernel, residual = _rows_kernel_residual(task, parameters, args)
    damped = kernel + damping * jnp.eye(residual.size)
    factor = jax.scipy.linalg.cho_factor(damped)
    step = _minus_pull_back(rows, jax.scipy.linalg.cho_solve(factor, residual))
    return jax.tree.map(jnp.add, parameters, step)


def damped_loop(task: Task):
    """`run(parameters, args, damping, n)`: n steps, with no look at where they lead."""

    @jax.jit
    def run(parameters, args, damping, num_steps):
        def body(_, y):
            return damped_step(task, y, args, damping)

        return jax.lax.fori_loop(0, num_steps, body, parameters)

    return run


def checked_damped_loop(task: Task, max_steps: int):
    """The same, with the least that a solver must do: the loss after every step, kept,
    and an end at the first number that is not finite."""

    @jax.jit
    def run(parameters, args, damping, num_steps):
        def body(carry):
            i, y, _, losses = carry
            y = damped_step(task, y, args, damping)
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


def spectrum(task: Task, parameters, args):
    """Rows, eigenvalues, eigenvectors, and the residual in them."""
    rows, kernel, residual = _rows_kernel_residual(task, parameters, args)
    w, u = jnp.linalg.eigh(kernel)
    return rows, w, u, u.T @ residual


def descent_step(factors, period, learning_rate):
    """K steps of gradient descent by one formula, for eigenvalues below 1 / eta."""
    rows, w, u, coefficients = factors
    g = -jnp.expm1(period * jnp.log1p(-learning_rate * w)) / w
    return _minus_pull_back(rows, u @ (g * coefficients))


def literal_descent(task: Task):
    """`run(parameters, args, learning_rate, k)`: k steps on the linearised network."""

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
