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
"""Conjugate gradients on the normal equations, by which optimistix avoids m + p rows."""


def promoting(fn: Callable) -> Callable:
    """Wrap a function of jaxopt or optax, whose arithmetic mixes dtypes, so that it works
    even if JAX is configured to refuse this."""

    @functools.wraps(fn)
    def call(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return fn(*args, **kwargs)

    return call


def _silent(**kwargs) -> None:
    del kwargs


class OptimistixParts(optx.AbstractGaussNewton):
    """optimistix's Gauss-Newton methods, put together from their parts. Its tolerances
    are zero, so that none ends before its last step."""

    descent: optx.AbstractDescent
    search: optx.AbstractSearch
    rtol: float = 0.0
    atol: float = 0.0
    norm: Callable[[PyTree], Array] = optx.max_norm
    verbose: Callable[..., None] = _silent


def optimistix_damped(linear_solver: lx.AbstractLinearSolver) -> OptimistixParts:
    """Return damped Gauss-Newton with lambda = 1 throughout. optimistix's own
    Levenberg-Marquardt lowers lambda as it goes, which is different work."""
    return OptimistixParts(
        descent=optx.DampedNewtonDescent(linear_solver), search=optx.LearningRate(1.0)
    )


def optimistix_solution(fn, solver, max_steps, y, args) -> optx.Solution:
    """Make N iterations of a solver, which are N linear solves, of which it uses N -
    1."""
    return optx.least_squares(fn, solver, y, args, max_steps=max_steps, throw=False)


def optimistix_once(fn, solver, y, args) -> PyTree[Array]:
    """Return the point that a solver's first iteration proposes. This takes one linear
    solve, by the stepwise interface."""

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
    """Return `run(n)`, which makes n updates. It excludes the start, which forms a p x p
    matrix.

    jaxopt's damping is relative to the largest diagonal entry of phi^T phi.
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

        first = solver.update(v, state, args)  # its types differ from the start's
        return jax.lax.fori_loop(1, num_steps, update, first).params

    return lambda num_steps: run(flat, start, task.args, num_steps)


def scipy_trf(task: Task, max_steps: int, tr_solver: Any) -> Callable[[], Any]:
    """Return a run by SciPy. Its trust region adapts, so that its steps are different
    ones, and only the times can be compared."""
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
