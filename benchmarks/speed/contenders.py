"""The programs that run to a given loss, each with several settings to choose from."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import gnlin

from .least_squares import jaxopt, optimistix, scipy
from .opponents import promoting
from .problem import Contender, cross_entropy, Problem, small, squared_error


RATES = (0.01, 0.03, 0.1, 0.003, 0.001, 0.0003)
DAMPINGS = (0.1, 0.01)
MOMENTUM = 0.9

OURS = {
    squared_error: gnlin.SquaredError(reduction="sum"),
    cross_entropy: gnlin.SoftmaxCrossEntropy(reduction="mean"),
}


def of_regression(problem: Problem) -> list[Contender]:
    field = [
        levenberg_marquardt(problem),
        damped(problem),
        truncated(problem),
        *first_order(problem),
        lbfgs(problem),
        *optimistix(problem),
        scipy(problem),
    ]
    return [*field, by_cholesky(problem), jaxopt(problem)] if small(problem) else field


def of_classification(problem: Problem) -> list[Contender]:
    return [truncated(problem), *first_order(problem), lbfgs(problem)]


#
# gnlin
#


def levenberg_marquardt(problem: Problem) -> Contender:
    dense: Any = {"method": "svd" if small(problem) else "eigh"}
    solvers = {
        f'"{scaling}"': gnlin.LevenbergMarquardt(0.0, 0.0, scaling=scaling, **dense)
        for scaling in ("more", "identity")
    }
    return _ours(problem, "LevenbergMarquardt", solvers)


def by_cholesky(problem: Problem) -> Contender:
    """Return Levenberg-Marquardt by a Cholesky factorisation of the p x p matrix, which
    is faster than an SVD but squares the condition number."""
    solver = gnlin.LevenbergMarquardt(0.0, 0.0, scaling="identity", method="curvature")
    solvers = {'"identity", "curvature"': solver}
    return _ours(problem, "LevenbergMarquardt", solvers)


def damped(problem: Problem) -> Contender:
    solvers = {
        f"{d:g}": gnlin.DampedGaussNewton(d, rtol=0.0, atol=0.0, search=None)
        for d in DAMPINGS
    }
    return _ours(problem, "DampedGaussNewton", solvers)


def truncated(problem: Problem) -> Contender:
    pairs, method = ((0.1, 0.1), (0.1, 0.01)), "auto"
    if problem.loss is not squared_error:
        # "auto" would form a Jacobian with thousands of rows.
        pairs, method = ((0.3, 0.03), (0.1, 0.1)), "matrix-free"
    solvers = {
        f"{tolerance:g}, damping {d:g}": gnlin.TruncatedGaussNewton(
            tolerance, d, rtol=0.0, atol=0.0, search=None, method=method
        )
        for tolerance, d in pairs
    }
    return _ours(problem, "TruncatedGaussNewton", solvers)


def _ours(problem: Problem, variant: str, solvers: Mapping[str, Any]) -> Contender:
    most = problem.most_newton_steps

    def run(setting, start, num_steps):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`gnlin.solve` stopped")
            solution = gnlin.solve(
                eqx.combine(start, problem.model),
                problem.data,
                solvers[setting],
                loss=OURS[problem.loss],
                max_steps=num_steps,
            )
        return np.append(solution.history.loss, solution.loss)

    def find(setting, start, most_steps):
        # Each number of steps compiles another program, so count within one long run.
        del most_steps
        reached = np.asarray(run(setting, start, most)) <= problem.target
        return int(np.argmax(reached)) if reached.any() else None

    return Contender("gnlin", variant, tuple(solvers), most, run, find)


#
# Gradients
#


def first_order(problem: Problem) -> list[Contender]:
    """Return Adam and momentum. The learning rates of momentum refer to the mean of the
    loss over the examples."""
    share = 1.0
    if problem.loss is squared_error:
        share = 1 / len(problem.data[1])
    rates = {f"{rate:g}": rate for rate in RATES}
    adam, sgd = optax.adam, lambda rate: optax.sgd(share * rate, MOMENTUM, nesterov=True)
    return [
        _descent(problem, "Adam", rates, adam),
        _descent(problem, "SGD, momentum 0.9", rates, sgd),
    ]


def lbfgs(problem: Problem) -> Contender:
    return _descent(problem, "L-BFGS, zoom", {"": 0.0}, lambda _: optax.lbfgs())


def _descent(problem: Problem, variant: str, settings, make: Callable) -> Contender:
    """Return an optimiser as one compiled loop. It tests the loss that comes with the
    gradient, and so ends one step late."""

    @jax.jit
    @promoting
    def program(rate, start, data, most_steps):
        optimiser = optax.with_extra_args_support(make(rate))
        value_of = functools.partial(problem.value, data=data)

        def step(carry):
            y, state, _, count = carry
            value, gradient = jax.value_and_grad(value_of)(y)
            updates, state = optimiser.update(
                gradient, state, y, value=value, grad=gradient, value_fn=value_of
            )
            # Keep the parameters once the target is reached.
            there = value <= problem.target
            new = optax.apply_updates(y, updates)
            y = jax.tree.map(lambda a, b: jnp.where(there, a, b), y, new)
            return y, state, value, count + 1

        def unfinished(carry):
            _, _, value, count = carry
            return (value > problem.target) & (count <= most_steps)

        first = start, optimiser.init(start), jnp.array(jnp.inf), jnp.array(0)
        _, _, value, count = jax.lax.while_loop(unfinished, step, first)
        return value, count - 1

    def run(setting, start, most_steps):
        return program(settings[setting], start, problem.data, most_steps)

    def find(setting, start, most_steps):
        value, count = run(setting, start, most_steps)
        return int(count) if value <= problem.target else None

    return Contender("optax", variant, tuple(settings), problem.most_steps, run, find)
