"""One damped step with many more residuals than parameters: a regression through tanh."""

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
from jaxtyping import Array, Float

import gnlin

from . import opponents
from .oracle import relative_error
from .report import Comparison, explained, Row, timed_row
from .timing import alternate, Case, Timing


DAMPING = 1.0
GRID = (10**3, 10), (10**5, 10), (10**7, 10), (10**4, 200), (10**5, 200), (20_000, 2000)
IN_THE_PICTURE = (10**7, 10), (10**5, 200)
QUICK = (10**3, 10), (5000, 50)

LIMIT = "hand-written"
WHY_NOT_FIRST = (
    "it judges the step, by its loss and its size, and goes through the data once more"
)
SVD_IS_CHEAP = 50_000
WHY_NOT_FIRST_IF_SMALL = "singular values, for their accuracy, where they cost no more"
CG_TOLERANCE = 1e-8
SOMAX_TOLERANCE = 3e-7
"""The tolerance for a gradient that is a mean. Below it, somax's conjugate gradients do
not stop."""
BLOCK = 1000
"""The number of rows of the Jacobian that the limit holds at a time, which fit in the
cache."""
MOST_WORK = 5 * 10**9
"""An orthogonal factorisation is run only up to this number of multiplications, m p^2."""


def comparisons(quick: bool) -> Iterator[Comparison]:
    for m, p in QUICK if quick else GRID:
        problem = Problem(m, p)
        title = f"One damped step; {problem.name}"
        bars = title if (m, p) in IN_THE_PICTURE else None
        yield Comparison(title, one_step(problem, _num_rounds(m, p, quick)), bars=bars)


def _num_rounds(m: int, p: int, quick: bool) -> int:
    if m * p >= 4 * 10**7:
        return 1
    return 3 if quick or m * p >= 10**6 else 15


class Problem:
    """Residuals `tanh(x @ w) - y`. The features' sizes go from 1 down to 0.01."""

    def __init__(self, num_outputs: int, num_parameters: int):
        m, p = num_outputs, num_parameters
        random = np.random.default_rng(0)
        x = random.standard_normal((m, p)) * np.geomspace(1, 0.01, p)
        truth = random.standard_normal(p) / np.sqrt(p)
        y = np.tanh(x @ truth) + 0.1 * random.standard_normal(m)
        self.name = f"m = {m:,}, p = {p:,}"
        self.shape = m, p
        self.parameters = jnp.asarray(truth / 2)
        self.args = jnp.asarray(x), jnp.asarray(y)

    @staticmethod
    def residuals(w, args) -> Float[Array, " m"]:
        x, y = args
        return jnp.tanh(x @ w) - y

    @functools.cached_property
    def _by_numpy(self):
        """Return the inputs, the slopes of tanh, and the residual."""
        x, y = map(np.asarray, self.args)
        outputs = np.tanh(x @ np.asarray(self.parameters))
        return x, 1 - outputs**2, outputs - y

    @functools.cached_property
    def curvature(self) -> np.ndarray:
        x, slope, _ = self._by_numpy
        curvature = np.zeros((x.shape[1], x.shape[1]))
        for block, s in zip(_blocks(x), _blocks(slope), strict=True):
            curvature += (block * s[:, None] ** 2).T @ block
        return curvature

    def gradient(self, step: np.ndarray) -> np.ndarray:
        """Return the gradient of the damped linearised problem after a step, without
        forming the Jacobian."""
        x, slope, residual = self._by_numpy
        return x.T @ (slope * (slope * (x @ step) + residual)) + DAMPING * step

    @functools.cached_property
    def exact_step(self) -> np.ndarray:
        """Solve the normal equations by NumPy, refined by the problem's own gradient."""
        damped = self.curvature + DAMPING * np.eye(self.shape[1])
        step = np.zeros(self.shape[1])
        for _ in range(3):
            step = step - np.linalg.solve(damped, self.gradient(step))
        return step

    def linear_residual(self, step: np.ndarray) -> float:
        start = np.linalg.norm(self.gradient(np.zeros_like(step)))
        return float(np.linalg.norm(self.gradient(step)) / start)


def _blocks(x: np.ndarray) -> list[np.ndarray]:
    return np.array_split(x, max(1, len(x) // 10_000))


def one_step(problem: Problem, num_rounds: int) -> list[Row]:
    """Time each library in one compiled call. The first row is the limit."""
    m, p = problem.shape
    cg = lx.Normal(lx.CG(rtol=CG_TOLERANCE, atol=CG_TOLERANCE))
    can_wait = m * p**2 <= MOST_WORK
    cases = [
        _limit(problem, "in blocks", _in_blocks),
        _limit(problem, "at once", _at_once),
        _gnlin(problem),
        _optimistix(problem, "LM, Normal(CG)", cg),
        _optimistix(problem, "LM, Normal(Cholesky)", lx.Normal(lx.Cholesky())),
        _jaxopt(problem, "LM, CG"),
        _jaxopt(problem, "LM, Cholesky", materialize_jac=True, solver="cholesky"),
        _scipy(problem, "trf, lsmr", method="trf", tr_solver="lsmr", x_scale="jac"),
        *_somax(problem),
    ]
    dear = {
        ("optimistix", "LM, default (QR)"): lambda: _optimistix(
            problem, "LM, default (QR)", None
        ),
        ("jaxopt", "LM, QR"): lambda: _jaxopt(
            problem, "LM, QR", materialize_jac=True, solver="qr"
        ),
        ("SciPy", "trf, exact"): lambda: _scipy(
            problem, "trf, exact", method="trf", tr_solver="exact"
        ),
        ("SciPy", "lm"): lambda: _scipy(problem, "lm", method="lm"),
    }
    if can_wait:
        cases += [make() for make in dear.values()]
    timings = alternate(cases, num_rounds)
    why = WHY_NOT_FIRST_IF_SMALL if m * p**2 <= SVD_IS_CHEAP else WHY_NOT_FIRST
    rows = explained([_row(problem, timing, timings[0]) for timing in timings], why)
    if not can_wait:
        reason = f"an orthogonal factorisation of {m:,} x {p:,} takes minutes"
        rows += [skipped(problem, *what, reason) for what in dear]
    if not any(row.library == "somax" for row in rows):
        rows.append(skipped(problem, "somax", "", "python-somax is not installed"))
    return rows


def _row(problem: Problem, timing: Timing, limit: Timing) -> Row:
    if timing.case.step is None:
        return timed_row(problem.name, timing, limit)
    step = timing.case.step() - np.asarray(problem.parameters)
    return timed_row(
        problem.name,
        timing,
        limit,
        step_error=relative_error(step, problem.exact_step),
        linear_residual=problem.linear_residual(step),
    )


def skipped(problem: Problem, library: str, variant: str, reason: str) -> Row:
    return Row(problem.name, library, variant, note=f"skipped: {reason}")


#
# The limit
#


def _limit(problem: Problem, variant: str, step: Callable) -> Case:
    run = jax.jit(step)
    return _case(problem, LIMIT, variant, lambda: run(problem.parameters, *problem.args))


def _at_once(w, x, y):
    jacobian, residual = _rows(w, x, y)
    return _solved(w, jacobian.T @ jacobian, jacobian.T @ residual)


def _in_blocks(w, x, y):
    m, p = x.shape
    num_blocks = max(1, m // BLOCK)
    if m % num_blocks:
        raise ValueError(f"{m} rows are not a whole number of blocks of {BLOCK}.")

    def add(sums, block):
        curvature, gradient = sums
        jacobian, residual = _rows(w, *block)
        return (curvature + jacobian.T @ jacobian, gradient + jacobian.T @ residual), None

    blocks = x.reshape(num_blocks, -1, p), y.reshape(num_blocks, -1)
    start = jnp.zeros((p, p)), jnp.zeros(p)
    sums, _ = jax.lax.scan(add, start, blocks)
    return _solved(w, *sums)


def _rows(w, x, y):
    outputs = jnp.tanh(x @ w)
    return x * (1 - outputs**2)[:, None], outputs - y


def _solved(w, curvature, gradient):
    factor = jax.scipy.linalg.cho_factor(curvature + DAMPING * jnp.eye(w.size))
    return w - jax.scipy.linalg.cho_solve(factor, gradient)


#
# The libraries
#


def _case(
    problem: Problem,
    library: str,
    variant: str,
    run: Callable[[], Any],
    parameters: Callable[[Any], Any] = lambda output: output,
    note: str = "",
) -> Case:
    last = []

    def kept():
        output = run()
        last[:] = [parameters(output)]
        return output

    return Case(library, variant, kept, step=lambda: np.asarray(last[0]), note=note)


def _gnlin(problem: Problem) -> Case:
    solver = gnlin.DampedGaussNewton(DAMPING, search=None)

    @jax.jit
    def run(w, args):
        solution = gnlin.solve(Regression(w), args, solver, max_steps=1)
        return solution.model.weights

    return _case(
        problem,
        "gnlin",
        "DampedGaussNewton",
        lambda: run(problem.parameters, problem.args),
        note="the default",
    )


class Regression(eqx.Module):
    """The same problem as a model of one example."""

    weights: Float[Array, " p"]

    def __call__(self, x: Float[Array, " p"]) -> Float[Array, ""]:
        return jnp.tanh(x @ self.weights)


def _optimistix(problem: Problem, variant: str, linear_solver: Any) -> Case:
    settings = {} if linear_solver is None else {"linear_solver": linear_solver}
    solver = optx.LevenbergMarquardt(rtol=0.0, atol=0.0, **settings)
    program: Any = eqx.filter_jit(opponents.optimistix_once)

    def run():
        return program(problem.residuals, solver, problem.parameters, problem.args)

    note = "its first step: damping 1; without the new loss"
    return _case(problem, "optimistix", variant, run, note=note)


def _jaxopt(problem: Problem, variant: str, **settings) -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import jaxopt
        from jaxopt.linear_solve import solve_cg

    if "solver" not in settings:
        settings["solver"] = functools.partial(solve_cg, tol=CG_TOLERANCE)
    relative = DAMPING / float(np.max(np.diag(problem.curvature)))
    solver = jaxopt.LevenbergMarquardt(
        problem.residuals, damping_parameter=relative, **settings
    )
    starts = []
    update = jax.jit(opponents.promoting(solver.update))

    def run():
        if not starts:
            start = jax.jit(opponents.promoting(solver.init_state))
            starts.append(start(problem.parameters, problem.args))
        return update(problem.parameters, starts[0], problem.args)

    note = "an update, without its start"
    return _case(problem, "jaxopt", variant, run, lambda end: end.params, note)


def _scipy(problem: Problem, variant: str, **settings: Any) -> Case:
    from scipy.optimize import least_squares

    value = jax.jit(problem.residuals)
    of_example = jax.grad(lambda w, example: problem.residuals(w, example))
    jacobian = jax.jit(jax.vmap(of_example, in_axes=(None, 0)))
    exact: Any = lambda w: np.asarray(jacobian(w, problem.args))

    def run():
        return least_squares(
            lambda w: np.asarray(value(w, problem.args)),
            np.asarray(problem.parameters),
            exact,
            ftol=1e-15,
            xtol=1e-15,
            gtol=1e-15,
            max_nfev=3,
            **settings,
        )

    return Case(
        "SciPy",
        variant,
        run,
        count=lambda result: result.nfev - 1,
        note="its trust region: other steps",
    )


def _somax(problem: Problem) -> list[Case]:
    """Return somax's steps if it is installed. Its loss is a mean, so that its damping is
    divided by m."""
    try:
        somax: Any = importlib.import_module("somax")
    except ImportError:
        return []
    m, p = problem.shape
    x, y = problem.args

    def predict(w, x):
        return jnp.tanh(x @ w)

    def case(variant: str, method: Any) -> Case:
        state = method.init(problem.parameters)
        program = jax.jit(method.step)
        batch = {"x": x, "y": y}
        key = jax.random.key(0)
        run = lambda: program(problem.parameters, batch, state, key)
        return _case(problem, "somax", variant, run, lambda end: end[0])

    settings: dict[str, Any] = {"predict_fn": predict, "lam0": DAMPING / m}
    by_cg = somax.sgn_mse(
        **settings,
        tol=SOMAX_TOLERANCE,
        maxiter=10 * p,
        stabilise_every=0,
        warm_start=False,
    )
    return [
        case("sgn_mse (CG)", by_cg),
        case("ggn_direct_mse", somax.methods.ggn_direct_mse(**settings)),
    ]
