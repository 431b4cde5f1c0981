"""Other libraries' steps on the same task, each at the best setting found for it."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from .task import Task


CG = lx.Normal(lx.CG(rtol=1e-10, atol=1e-10))
"""Conjugate gradients on the normal equations: optimistix's way around its m + p rows."""


def promoting(fn: Callable) -> Callable:
    """What is compiled of jaxopt and optax: their own arithmetic mixes dtypes, which JAX
    may have been told to refuse."""

    @functools.wraps(fn)
    def call(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return fn(*args, **kwargs)

    return call


def _silent(**kwargs) -> None:
    del kwargs


class OptimistixParts(optx.AbstractGaussNewton):
    """optimistix's Gauss-Newton methods, as the parts that they are put together from;
    tolerances of zero: none ends before its last step."""

    descent: optx.AbstractDescent
    search: optx.AbstractSearch
    rtol: float = 0.0
    atol: float = 0.0
    norm: Callable[[PyTree], Array] = optx.max_norm
    verbose: Callable[..., None] = _silent


def optimistix_damped(linear_solver: lx.AbstractLinearSolver) -> OptimistixParts:
    """Damped Gauss-Newton with lambda = 1 throughout: its own Levenberg-Marquardt lowers
    lambda as it goes, which is other work."""
    return OptimistixParts(
        descent=optx.DampedNewtonDescent(linear_solver), search=optx.LearningRate(1.0)
    )


def optimistix_solution(fn, solver, max_steps, y, args) -> optx.Solution:
    """N iterations of one of its solvers: N linear solves, of which it uses N - 1."""
    return optx.least_squares(fn, solver, y, args, max_steps=max_steps, throw=False)


def optimistix_once(fn, solver, y, args) -> PyTree[Array]:
    """Where its first iteration proposes to go: one linear solve, by its stepwise
    interface."""

    def with_aux(y, args):
        return fn(y, args), None

    no_tags: frozenset[object] = frozenset()
    struct = jax.eval_shape(lambda: fn(y, args))
    state = solver.init(with_aux, y, args, {}, struct, None, no_tags)
    _, state, _ = solver.step(with_aux, y, args, {}, state, no_tags)
    return state.y_eval


def _flat(task: Task):
    flat, unravel = ravel_pytree(task.parameters)

    def residuals(v, args):
        return task.residuals(unravel(v), args)

    return flat, residuals


def jaxopt(task: Task, damping: float, **settings) -> Callable[[int], Array]:
    """`run(n)`: n of its updates, without its start, which forms a p x p matrix.

    Its damping is relative to the largest diagonal entry of phi^T phi.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import jaxopt as jo
        from jaxopt.linear_solve import solve_cg

    flat, residuals = _flat(task)
    jacobian = jax.jit(jax.jacrev(residuals))(flat, task.args)
    relative = damping / float(jnp.max(jnp.sum(jacobian**2, axis=0)))
    if not settings.get("materialize_jac"):
        settings["solver"] = functools.partial(solve_cg, tol=1e-10)
    solver = jo.LevenbergMarquardt(residuals, damping_parameter=relative, **settings)
    start = jax.jit(promoting(solver.init_state))(flat, task.args)

    @jax.jit
    @promoting
    def run(v, state, args, num_steps):
        def update(_, carry):
            return solver.update(*carry, args)

        first = solver.update(v, state, args)  # its types are not those of the start
        return jax.lax.fori_loop(1, num_steps, update, first).params

    return lambda num_steps: run(flat, start, task.args, num_steps)


def scipy_trf(task: Task, max_steps: int, tr_solver: Any) -> Callable[[], Any]:
    """Its trust region adapts, so a step of it is another one; only its time is ours."""
    from scipy.optimize import least_squares

    flat, residuals = _flat(task)
    value, jacobian = jax.jit(residuals), jax.jit(jax.jacrev(residuals))
    exact: Any = lambda v: np.asarray(jacobian(v, task.args))
    never: Any = None

    def run():
        return least_squares(
            lambda v: np.asarray(value(v, task.args)),
            np.asarray(flat),
            exact,
            method="trf",
            tr_solver=tr_solver,
            ftol=never,
            xtol=never,
            gtol=1e-15,
            max_nfev=max_steps,
        )

    return run
