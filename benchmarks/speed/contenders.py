"""Who runs to a given loss: each with the settings among which the best is chosen."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
import optimistix as optx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

import gnlin

from . import opponents


RATES = (0.01, 0.03, 0.1, 0.003, 0.001, 0.0003)
DAMPINGS = (0.1, 0.01)
MOMENTUM = 0.9
MOST_NEWTON_STEPS = 300


def squared_error(outputs, targets) -> Float[Array, ""]:
    return 0.5 * jnp.sum((outputs - targets) ** 2)


def cross_entropy(outputs, labels) -> Float[Array, ""]:
    each = optax.softmax_cross_entropy_with_integer_labels
    return jnp.mean(each(outputs, labels))


OURS = {
    squared_error: gnlin.SquaredError(),
    cross_entropy: gnlin.SoftmaxCrossEntropy(reduction="mean"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A network, several starts, data, and the training loss at which a run ends."""

    name: str
    model: PyTree
    starts: list[PyTree[Array]]
    data: tuple[Array, Array]
    loss: Callable[[Array, Array], Float[Array, ""]]
    target: float
    most_steps: int
    """Of a first-order method."""
    says: str = ""

    def outputs(self, parameters: PyTree[Array], inputs: Array) -> Array:
        return jax.vmap(eqx.combine(parameters, self.model))(inputs)

    def value(self, parameters: PyTree[Array], data) -> Float[Array, ""]:
        inputs, targets = data
        return self.loss(self.outputs(parameters, inputs), targets)

    def residuals(self, parameters: PyTree[Array], data) -> Float[Array, " m"]:
        inputs, targets = data
        return jnp.ravel(self.outputs(parameters, inputs) - targets)


@dataclasses.dataclass(frozen=True, eq=False)
class Contender:
    library: str
    variant: str
    settings: tuple[str, ...]
    most_steps: int
    run: Callable[[str, PyTree[Array], int], Any]
    """`run(setting, start, n)`: arrays, of at most n steps."""
    find: Callable[[str, PyTree[Array], int], int | None]
    """The steps to the target, if they are at most n."""
    note: str = ""


def num_parameters(problem: Problem) -> int:
    return ravel_pytree(problem.starts[0])[0].size


def small(problem: Problem) -> bool:
    """Whether a p x p matrix is."""
    return num_parameters(problem) < 100


def of_regression(problem: Problem) -> list[Contender]:
    field = [
        levenberg_marquardt(problem),
        damped(problem),
        truncated(problem),
        *first_order(problem),
        lbfgs(problem),
        optimistix(problem),
        scipy(problem),
    ]
    return [*field, by_cholesky(problem), jaxopt(problem)] if small(problem) else field


def of_classification(problem: Problem) -> list[Contender]:
    return [truncated(problem), *first_order(problem), lbfgs(problem)]


#
# gnlin
#


def levenberg_marquardt(problem: Problem) -> Contender:
    solvers = {
        "": gnlin.LevenbergMarquardt(0.0, 0.0),
        '"identity"': gnlin.LevenbergMarquardt(0.0, 0.0, scaling="identity"),
    }
    return _ours(problem, "LevenbergMarquardt", solvers)


def by_cholesky(problem: Problem) -> Contender:
    """Of the p x p matrix: with squared conditions, in less time than by an SVD."""
    solver = gnlin.LevenbergMarquardt(0.0, 0.0, scaling="identity", method="curvature")
    solvers = {'"identity", "curvature"': solver}
    return _ours(problem, "LevenbergMarquardt", solvers)


def damped(problem: Problem) -> Contender:
    solvers = {f"{d:g}": gnlin.DampedGaussNewton(d, 0.0, 0.0) for d in DAMPINGS}
    return _ours(problem, "DampedGaussNewton", solvers)


def truncated(problem: Problem) -> Contender:
    scale = 1.0 if problem.loss is squared_error else 0.1
    solvers = {
        f"0.1, damping {scale * d:g}": gnlin.TruncatedGaussNewton(
            0.1, scale * d, 0.0, 0.0
        )
        for d in DAMPINGS
    }
    return _ours(problem, "TruncatedGaussNewton", solvers)


def _ours(problem: Problem, variant: str, solvers: Mapping[str, Any]) -> Contender:
    def run(setting, start, num_steps):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`gnlin.solve` stopped")
            return gnlin.solve(
                eqx.combine(start, problem.model),
                problem.data,
                solvers[setting],
                loss=OURS[problem.loss],
                max_steps=num_steps,
            ).history.loss

    def find(setting, start, most_steps):
        del most_steps  # each number of steps is another program
        reached = np.asarray(run(setting, start, MOST_NEWTON_STEPS)) <= problem.target
        return int(np.argmax(reached)) if reached.any() else None

    return Contender("gnlin", variant, tuple(solvers), MOST_NEWTON_STEPS, run, find)


#
# Gradients
#


def first_order(problem: Problem) -> list[Contender]:
    """Adam and momentum; the rates of the latter as of a mean over the examples."""
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
    """The whole loop compiled. The loss is that of the gradient: one step late."""

    @jax.jit
    def program(rate, start, data, most_steps):
        optimiser = optax.with_extra_args_support(make(rate))
        value_of = functools.partial(problem.value, data=data)

        def step(carry):
            y, state, _, count = carry
            value, gradient = jax.value_and_grad(value_of)(y)
            updates, state = optimiser.update(
                gradient, state, y, value=value, grad=gradient, value_fn=value_of
            )
            # Once there it stays.
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


#
# Least squares
#


class _Until(optx.AbstractGaussNewton):
    """optimistix's Levenberg-Marquardt, which ends at a loss and nowhere else."""

    rtol: float
    atol: float
    norm: Callable[[PyTree], Array]
    descent: optx.AbstractDescent
    search: optx.AbstractSearch
    verbose: Callable[..., None]
    target: float

    def __init__(self, linear_solver: lx.AbstractLinearSolver, target: float):
        plain = optx.LevenbergMarquardt(0.0, 0.0, linear_solver=linear_solver)
        self.rtol = self.atol = 0.0
        self.norm = plain.norm
        self.descent = plain.descent
        self.search = plain.search
        self.verbose = plain.verbose
        self.target = target

    def terminate(self, fn, y, args, options, state, tags):
        there = state.f_info.as_min() <= self.target
        return there & ~state.first_step, optx.RESULTS.successful


def optimistix(problem: Problem) -> Contender:
    """Its own QR where that is feasible."""
    linear: dict[str, Any] = {"Normal(CG)": opponents.CG}
    if small(problem):
        linear["QR"] = lx.QR()
    most_steps = 5_000

    def run(setting, start, num_steps):
        del num_steps
        solver = _Until(linear[setting], problem.target)
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

    return Contender("optimistix", "LM", tuple(linear), most_steps, run, find)


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
    note = ", of which each evaluates once; a loop in Python"
    return Contender("SciPy", "", settings, most_steps, run, find, note)
