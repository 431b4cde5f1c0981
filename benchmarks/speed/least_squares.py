"""Other libraries' least-squares solvers, run to a given loss."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
from jax.flatten_util import ravel_pytree

from . import opponents
from .problem import Contender, Problem, small


class _Until(opponents.OptimistixParts):
    """optimistix's Levenberg-Marquardt, which ends only at a given loss."""

    target: float = 0.0

    def terminate(self, fn, y, args, options, state, tags):
        there = state.f_info.as_min() <= self.target
        return there & ~state.first_step, optx.RESULTS.successful


def optimistix(problem: Problem) -> list[Contender]:
    """Return LM by conjugate gradients and, where feasible, by optimistix's own QR."""
    field = [_optimistix(problem, "Normal(CG)", opponents.CG)]
    return [*field, _optimistix(problem, "QR", lx.QR())] if small(problem) else field


def _optimistix(problem: Problem, name: str, linear: Any) -> Contender:
    most_steps = 5_000

    def run(setting, start, num_steps):
        del setting, num_steps
        plain = optx.LevenbergMarquardt(0.0, 0.0, linear_solver=linear)
        solver = _Until(descent=plain.descent, search=plain.search, target=problem.target)
        solution = optx.least_squares(
            problem.residuals,
            solver,
            start,
            problem.data,
            max_steps=most_steps,
            throw=False,
        )
        return solution.value, solution.stats["num_steps"]

    def find(setting, start, most):
        value, count = run(setting, start, most)
        return (
            int(count) if problem.value(value, problem.data) <= problem.target else None
        )

    return Contender("optimistix", f"LM, {name}", ("",), most_steps, run, find)


def jaxopt(problem: Problem) -> Contender:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import jaxopt as jo

    most_steps = 2_000
    _, unravel = ravel_pytree(problem.starts[0])
    residuals = lambda v, data: problem.residuals(unravel(v), data)
    solver = jo.LevenbergMarquardt(
        residuals, tol=0.0, materialize_jac=True, solver="cholesky"
    )

    @jax.jit
    @opponents.promoting
    def program(v, data, most):
        def unfinished(carry):
            _, state, count = carry
            return (0.5 * jnp.sum(state.residual**2) > problem.target) & (count < most)

        def step(carry):
            v, state, count = carry
            v, state = solver.update(v, state, data)
            return v, state, count + 1

        first = solver.update(v, solver.init_state(v, data), data)
        return jax.lax.while_loop(unfinished, step, (*first, jnp.array(1)))

    def run(setting, start, most):
        del setting
        return program(ravel_pytree(start)[0], problem.data, most)

    def find(setting, start, most):
        v, _, count = run(setting, start, most)
        reached = problem.value(unravel(v), problem.data) <= problem.target
        return int(count) if reached else None

    return Contender("jaxopt", "LM, Cholesky", ("",), most_steps, run, find)


def scipy(problem: Problem) -> Contender:
    from scipy.optimize import least_squares

    _, unravel = ravel_pytree(problem.starts[0])
    fn = lambda v, data: problem.residuals(unravel(v), data)
    residuals, jacobian = jax.jit(fn), jax.jit(jax.jacrev(fn))
    most_steps = 1_000

    class _There(Exception):
        pass

    def run(setting, start, num_steps):
        del num_steps
        count = 0

        def looked_at(v):
            nonlocal count
            found = np.asarray(residuals(v, problem.data))
            count += 1
            if 0.5 * found @ found <= problem.target:
                raise _There
            return found

        exact: Any = lambda v: np.asarray(jacobian(v, problem.data))
        never: Any = None
        first = np.asarray(ravel_pytree(start)[0])
        options: Any = {"method": setting.split(",")[0], "max_nfev": most_steps}
        if "lsmr" in setting:
            options["tr_solver"] = "lsmr"
        tolerances = {"ftol": never, "xtol": never, "gtol": 1e-15}
        if setting == "lm":
            tolerances = dict.fromkeys(tolerances, 1e-15)
        try:
            least_squares(looked_at, first, exact, **tolerances, **options)
        except _There:
            return np.array(count)
        return np.array(-1)

    def find(setting, start, most):
        count = int(run(setting, start, most))
        return count if count > 0 else None

    settings = ("trf", "lm") if small(problem) else ("trf, lsmr",)
    note = " that evaluate, in a loop in Python"
    return Contender("SciPy", "", settings, most_steps, run, find, note)
