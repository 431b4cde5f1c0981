"""The method that "auto" chooses, beside every other method."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import gnlin

from ..data import digits
from ..networks.cnn import digits_cnn
from ..networks.mlp import digits_mlp
from ..networks.transformer import transformer
from .report import Comparison, Figure, Row, timed_row
from .task import cast, in_double
from .timing import alternate, Case, ratio


NUM_STEPS = 1
"""The number of steps of solvers that take the same step by every method."""
ADAPTING_STEPS, MOST_STEPS = 10, 60
"""Levenberg-Marquardt's steps depend on the method. The other methods have to reach the
loss that "auto" reaches in `ADAPTING_STEPS`, within `MOST_STEPS`."""
ALLOWED, NEVER = 1.5, 3.0
""""auto" may take at most `ALLOWED` times as long as the fastest method, except in 5 % of
the rows, and never more than `NEVER` times as long."""
_SAME = 1e-3
"""A method counts as accurate if the relative error of its step is at most this, or at
most twice the error of "auto". For conjugate gradients to a tolerance, the decrease of
the loss may fall behind "auto" by ten times this share."""
_UNSOLVED = 0.1
"""If no method has a relative error of at most this, the exact step is lost in rounding.
The row is then shown, but does not count."""
_TOO_MANY = 4_000
"""A method is not tried if its matrix is larger than this, because a spectrum would take
minutes."""
_MOST_EXACT = 1_100
"""The exact step is computed only if the smaller side is at most this."""
_MOST_BY_PRODUCTS = 1_000
"""Gauss-Newton by products is tried only if the smaller side is at most this."""


SQUARED = gnlin.SquaredError()


@dataclasses.dataclass(frozen=True)
class Problem:
    name: str
    model: Any
    data: tuple[jax.Array, jax.Array]
    loss: gnlin.authoring.AbstractLoss = SQUARED

    @property
    def shape(self) -> tuple[int, int]:
        parameters = eqx.filter(self.model, eqx.is_inexact_array)
        inputs, targets = self.data
        m = targets.size
        if isinstance(self.loss, gnlin.SoftmaxCrossEntropy):
            m = 10 * inputs.shape[0]
        return m, sum(x.size for x in jax.tree.leaves(parameters))


SPECTRAL, DIRECT, FREE = ("svd", "eigh"), ("kernel", "curvature"), ("matrix-free",)
ADAPTING, MANY = "Levenberg-Marquardt", "10^6 steps"

SOLVERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "Gauss-Newton": (gnlin.GaussNewton, (*SPECTRAL, *FREE)),
    "damped, 1": (
        lambda method: gnlin.DampedGaussNewton(1.0, method=method),
        (*SPECTRAL, *DIRECT, *FREE),
    ),
    "damped, 1e-4": (
        lambda method: gnlin.DampedGaussNewton(1e-4, method=method),
        (*SPECTRAL, *DIRECT, *FREE),
    ),
    ADAPTING: (
        lambda method: gnlin.LevenbergMarquardt(method=method),
        (*SPECTRAL, *DIRECT, *FREE),
    ),
    "truncated, 0.5": (
        lambda method: gnlin.TruncatedGaussNewton(0.5, 1.0, method=method),
        ("dense", *FREE),
    ),
    "truncated, 1e-4": (
        lambda method: gnlin.TruncatedGaussNewton(1e-4, 1.0, method=method),
        ("dense", *FREE),
    ),
    "10 steps": (
        lambda method: gnlin.IterativeLinearisation(10, 1e-4, method=method),
        (*SPECTRAL, "kernel", *FREE),
    ),
    MANY: (
        lambda method: gnlin.IterativeLinearisation(10**6, 1e-6, method=method),
        (*SPECTRAL, "kernel", *FREE),
    ),
}


def comparisons(quick: bool) -> Iterator[Comparison]:
    """Yield a table for each problem, so that finished measurements are shown and
    kept."""
    factors: list[float] = []
    problems = list(_problems())
    for problem in problems[:2] if quick else problems:
        rows: list[Row] = []
        for name in SOLVERS:
            if name == MANY and not isinstance(problem.loss, gnlin.SquaredError):
                continue  # every method would take literal steps, for many minutes
            some, factor = _compared(problem, name, 2 if quick else 5)
            rows.extend(some)
            if factor is not None:
                factors.append(factor)
            # Hundreds of compiled programs would use up the process's memory mappings.
            jax.clear_caches()
        last = problem is problems[1 if quick else -1]
        figures = _figures(factors) if last else ()
        title = f"{problem.name}: every solver by every method"
        yield Comparison(title, rows, '"auto"', figures=figures)


def _figures(factors: Sequence[float]) -> list[Figure]:
    among = f'"auto" over the fastest, {len(factors)} problems'
    beyond = float(np.mean(np.array(factors) > ALLOWED))
    return [
        Figure(f"{among}: rows beyond {ALLOWED:g}", "<= 0.05", beyond),
        Figure(f"{among}: the worst row", f"<= {NEVER:g}", max(factors)),
    ]


def _compared(
    problem: Problem, name: str, num_rounds: int
) -> tuple[list[Row], float | None]:
    """Return a row for each method, and how many times as long "auto" takes as the
    fastest method that is as accurate, or `None` if no method is."""
    make, methods = SOLVERS[name]
    tried = ["auto", *(x for x in methods if _is_sensible(problem, name, x))]
    solvers = {method: make(method=method) for method in tried}
    steps = dict.fromkeys(tried, NUM_STEPS)
    if name == ADAPTING:
        steps, said = _steps_to_the_same_loss(problem, solvers)
    else:
        said = _how_far(problem, name, solvers)
    timed = [method for method in tried if steps[method] is not None]
    cases = [_case(problem, solvers[x], x, steps[x] or 1) for x in timed]
    timings = alternate(cases, num_rounds)
    m, p = problem.shape
    task = f"auto: {problem.name}, m = {m:,}, p = {p:,}; {name}"
    rows, factors = [], []
    for timing, method in zip(timings, timed, strict=True):
        words, as_far = said[method]
        row = timed_row(task, timing, timings[0])
        rows.append(dataclasses.replace(row, note=f"{task}; {words}"))
        if as_far:
            factors.append(ratio(timings[0], timing))
    return rows, max(factors, default=None)


def _steps_to_the_same_loss(problem: Problem, solvers: dict[str, Any]):
    """Count the steps that each method takes to the loss of "auto" after
    `ADAPTING_STEPS`, or `None` if it does not reach it. Also describe this in words."""
    reached = _losses(problem, solvers["auto"], ADAPTING_STEPS)
    aim = 1.01 * np.nanmin(reached)
    steps: dict[str, int | None] = {}
    said = {}
    for method, solver in solvers.items():
        losses = _losses(problem, solver, MOST_STEPS)
        there = np.flatnonzero(losses <= aim)
        steps[method] = int(there[0]) if there.size else None
        said[method] = f"{steps[method]} steps to a loss of {aim:.6g}", True
    return steps, said


def _losses(problem: Problem, solver: Any, max_steps: int) -> np.ndarray:
    """Return the loss before the first step, and after each step."""
    solution = gnlin.solve(
        problem.model, problem.data, solver, loss=problem.loss, max_steps=max_steps
    )
    return np.append(solution.history.loss, solution.loss)


def _how_far(problem: Problem, name: str, solvers: dict[str, Any]):
    """Describe each method's result in words, and say whether it is as accurate as
    "auto"."""
    start = float(_loss(problem))
    ends = {x: _case(problem, s, x, NUM_STEPS).run() for x, s in solvers.items()}
    losses = {method: float(end[1]) for method, end in ends.items()}
    if name.startswith("truncated"):
        most = losses["auto"] + 10 * _SAME * abs(start - losses["auto"])
        return {x: (f"loss {loss:.6g}", loss <= most) for x, loss in losses.items()}
    steps = {method: _difference(end[0], problem.model) for method, end in ends.items()}
    exact = _exact_step(problem, name)
    exact = steps["auto"] if exact is None else exact
    errors = {
        method: float(np.linalg.norm(step - exact) / np.linalg.norm(exact))
        for method, step in steps.items()
    }
    solved = min(errors.values()) <= _UNSOLVED
    most = max(_SAME, 2 * errors["auto"]) if solved else -1.0
    return {
        method: (f"loss {losses[method]:.6g}, step off by {error:.1e}", error <= most)
        for method, error in errors.items()
    }


def _exact_step(problem: Problem, name: str) -> np.ndarray | None:
    """Compute the step by singular values in double precision, unless this takes
    minutes."""
    quadratic = isinstance(problem.loss, gnlin.SquaredError)
    literal = name.endswith("steps") and not quadratic
    if literal or min(problem.shape) > _MOST_EXACT:
        return None
    make, _ = SOLVERS[name]
    double = dataclasses.replace(
        problem, model=in_double(problem.model), data=in_double(problem.data)
    )
    model, _ = _case(double, make(method="svd"), "svd", NUM_STEPS).run()
    return _difference(model, double.model)


def _difference(now: Any, then: Any) -> np.ndarray:
    now, then = (
        ravel_pytree(eqx.filter(x, eqx.is_inexact_array))[0] for x in (now, then)
    )
    return np.asarray(now, float) - np.asarray(then, float)


def _is_sensible(problem: Problem, name: str, method: str) -> bool:
    m, p = problem.shape
    quadratic = isinstance(problem.loss, gnlin.SquaredError)
    if name == "Gauss-Newton" and method in FREE and min(m, p) > _MOST_BY_PRODUCTS:
        return False
    if name.endswith("steps"):
        literal = name == MANY and (method in FREE or method == "kernel")
        if literal or (method in SPECTRAL and not quadratic):
            return False
    if method == "svd":
        return min(m, p) * max(m, p) ** 0.5 < 3e4
    side = {"kernel": m, "curvature": p, "eigh": min(m, p)}.get(method, 0)
    return side <= _TOO_MANY


def _case(problem: Problem, solver: Any, method: str, max_steps: int) -> Case:
    @eqx.filter_jit
    def run(model, data):
        solution = gnlin.solve(
            model, data, solver, loss=problem.loss, max_steps=max_steps, divergence=None
        )
        return eqx.filter(solution.model, eqx.is_array), _value(
            problem.loss, solution.model, data
        )

    return Case("gnlin", method, lambda: run(problem.model, problem.data))


def _loss(problem: Problem) -> jax.Array:
    return _value(problem.loss, problem.model, problem.data)


def _value(loss: gnlin.authoring.AbstractLoss, model: Any, data: Any) -> jax.Array:
    inputs, targets = data
    fn, parameters = model if isinstance(model, tuple) else (lambda m, x: m(x), model)
    outputs = jax.vmap(lambda x: fn(parameters, x))(inputs)
    return jnp.sum(jax.vmap(loss.value)(outputs, targets))


#
# Problems
#


def _problems() -> Iterator[Problem]:
    for n, dtype in ((10, float), (1_000, float), (100_000, jnp.float32)):
        yield _decay(n, dtype)
    for n, dtype in ((20, float), (500, jnp.float32)):
        yield _wave(n, dtype)
    for n, dtype in ((100, float), (256, jnp.float32)):
        yield _digits("MLP", digits_mlp, n, dtype)
    yield _digits("CNN", digits_cnn, 64, jnp.float32)
    yield _digits("transformer", transformer, 64, jnp.float32)
    yield _digits("linear", lambda key: eqx.nn.Linear(64, 10, key=key), 1_000, float)
    yield _large()


def _decay(n: int, dtype: Any) -> Problem:
    """Return the fit of an exponential with four parameters."""
    x = jnp.linspace(0, 5, n, dtype=dtype)[:, None]
    fn = lambda p, x: p[0] * jnp.exp(-p[1] * x) + p[2] + p[3] * x
    truth = jnp.array([2.0, 1.3, 0.5, 0.1], dtype)
    noise = 0.01 * jax.random.normal(jax.random.key(0), x.shape, dtype)
    start = jnp.array([1.7, 1.0, 0.3, 0.0], dtype)
    name = f"decay, {jnp.dtype(dtype).name}"
    return Problem(name, (fn, start), (x, fn(truth, x) + noise))


def _wave(n: int, dtype: Any) -> Problem:
    x = jnp.linspace(-1, 1, n, dtype=dtype)[:, None]
    model = cast(eqx.nn.MLP(1, 1, 50, 3, jnp.tanh, key=jax.random.key(1)), dtype)
    return Problem(f"wave, {jnp.dtype(dtype).name}", model, (x, jnp.sin(5 * x)))


def _large() -> Problem:
    key = jax.random.key(3)
    x = jax.random.normal(key, (50, 64))
    model = in_double(eqx.nn.MLP(64, 1, 256, 2, jnp.tanh, key=key))
    return Problem("wide MLP", model, (x.astype(float), jnp.sin(x[:, :1]).astype(float)))


def _digits(name: str, make: Callable, n: int, dtype: Any) -> Problem:
    model = cast(make(jax.random.key(2)), dtype)
    images, labels = (x[:n] for x in _images())
    images = images.astype(dtype).reshape((n, *_INPUTS.get(name, (64,))))
    loss = gnlin.SoftmaxCrossEntropy()
    label = f"{name} on digits, {jnp.dtype(dtype).name}"
    return Problem(label, model, (images, labels), loss)


_INPUTS = {"CNN": (1, 8, 8), "transformer": (1, 8, 8)}


def _images() -> tuple[jax.Array, jax.Array]:
    (images, labels), _ = digits.classification()
    return jnp.asarray(images), jnp.asarray(labels)
