"""Solvers on losses other than squared error, compared with dense linear algebra, SciPy's
minimisers and literal steps."""

import dataclasses
import functools
import math
import sys
import warnings
from typing import NamedTuple

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest
import scipy.linalg
import scipy.optimize
from problems import each_once, updated

import gnlin
from gnlin._linearisation._objective import BatchLoss
from gnlin._subproblem import choose, problem_of
from gnlin.filters import (
    Damped,
    GradientDescent,
    GradientFlow,
    HeavyBall,
    Nesterov,
    PseudoInverse,
    Tikhonov,
)


#
# One small problem for each loss
#


class Quartic(gnlin.authoring.AbstractElementwiseLoss):
    """A user-defined loss that defines only its value in each output."""

    reduction: str = "sum"

    def elementwise(self, output, target):
        return (output - target) ** 4 / 4


class Problem(NamedTuple):
    loss: gnlin.authoring.AbstractLoss
    targets: np.ndarray
    scale: float = 1.0  # of the model's last layer


_generator = np.random.default_rng(0)
X = _generator.normal(size=(7, 3))
REAL = _generator.normal(size=(7, 4))
LABELS = _generator.integers(0, 4, 7)
OUTLIERS = REAL.copy()
OUTLIERS[0], OUTLIERS[3, 1] = 100, -50

SOFTMAX = Problem(gnlin.SoftmaxCrossEntropy(), LABELS)
SATURATED = Problem(gnlin.SoftmaxCrossEntropy(), LABELS, 80.0)
HUBER = Problem(gnlin.losses.Huber(reweighted=0), OUTLIERS)
POISSON = Problem(gnlin.losses.PoissonNLL(), _generator.poisson(2, (7, 4)).astype(float))
LOG_COSH = Problem(gnlin.losses.LogCosh(0.5), REAL)
SMOOTHED = Problem(gnlin.SoftmaxCrossEntropy(0.1), LABELS)
PROBLEMS = {
    "softmax": SOFTMAX,
    "softmax, saturated": SATURATED,
    "huber, outliers": HUBER,
    "poisson": POISSON,
    "a user's function of each output": Problem(Quartic(), REAL),
}


class Net(eqx.Module):
    """A network of 44 parameters in one array, which is quick to compile, with 28
    outputs."""

    w: jax.Array

    def __call__(self, x):
        hidden = jnp.tanh(self.w[:15].reshape(5, 3) @ x + self.w[15:20])
        return self.w[20:40].reshape(4, 5) @ hidden + self.w[40:]


def start(scale=1.0):
    w = np.random.default_rng(1).uniform(-0.6, 0.6, 44)
    w[20:] *= scale
    return w


def outputs_at(w):
    return jax.vmap(Net(w))(jnp.asarray(X))


@functools.cache
def compiled(loss):
    """Return functions for the sum over examples at w: f, dL/df, phi, d2L/df2 and dL/dw;
    and L and dL/df at any f. All come from automatic differentiation of the value."""

    def value(f, targets):
        return jnp.sum(jax.vmap(loss.value)(f.reshape(7, -1), targets))

    def everything(w, targets):
        predict = lambda w: outputs_at(w).ravel()
        f = predict(w)
        gradient = jax.grad(lambda w: value(predict(w), targets))(w)
        hessian = jax.hessian(value)(f, targets)
        return f, jax.grad(value)(f, targets), jax.jacfwd(predict)(w), hessian, gradient

    return jax.jit(everything), jax.jit(jax.value_and_grad(value))


class Dense:
    """A problem linearised at a point, in dense matrices."""

    def __init__(self, problem, w=None):
        self.w = start(problem.scale) if w is None else np.asarray(w)
        self.targets = jnp.asarray(problem.targets)
        everything, self._value_and_gradient = compiled(problem.loss)
        parts = map(np.asarray, everything(jnp.asarray(self.w), self.targets))
        self.outputs, self.residual, self.jacobian, self.hessian, self.gradient = parts
        self.curvature = self.jacobian.T @ self.hessian @ self.jacobian

    def value(self, outputs):
        return float(self._value_and_gradient(outputs, self.targets)[0])

    def loss_gradient(self, outputs):
        return self._value_and_gradient(outputs, self.targets)[1]

    def true_loss(self, step):
        return self.value(np.asarray(outputs_at(self.w + step)).ravel())

    def linearised_loss(self, step, damping=0.0):
        """Return L(f + phi delta) + damping/2 |delta|^2, and its gradient."""
        f = self.outputs + self.jacobian @ step
        value, gradient = self._value_and_gradient(f, self.targets)
        value = float(value) + 0.5 * damping * step @ step
        return value, self.jacobian.T @ np.asarray(gradient) + damping * step

    def remaining(self, step, damping=0.0):
        """Return the gradient of the linearised problem relative to the initial one."""
        _, gradient = self.linearised_loss(step, damping)
        return np.linalg.norm(gradient) / np.linalg.norm(self.gradient)

    def damped_step(self, damping):
        damped = self.curvature + damping * np.eye(self.w.size)
        return -np.linalg.solve(damped, self.gradient)


@functools.cache
def dense(name):
    return Dense(PROBLEMS[name])


# Most programs here take longer to compile than to run, so they run operation by
# operation.
op_by_op = jax.disable_jit


def solve(problem, solver, max_steps=1, *, data=None, w=None, compiled=False):
    """Return (step, solution), without warnings about the end of the run."""
    data = (X, problem.targets) if data is None else data
    w = start(problem.scale) if w is None else w
    with warnings.catch_warnings(), op_by_op(not compiled):
        warnings.simplefilter("ignore", UserWarning)
        solution = gnlin.solve(
            Net(jnp.asarray(w)), data, solver, loss=problem.loss, max_steps=max_steps
        )
    return np.asarray(solution.model.w) - w, solution


def result_is(solution, name):
    return bool(solution.result == getattr(optx.RESULTS, name))


def near(actual, expected, rtol, least=0.0):
    """Compare in the norm, relative to that of `expected` but at least to `least`."""
    error = np.linalg.norm(np.asarray(actual) - expected)
    return error <= rtol * max(np.linalg.norm(expected), least)


def assert_close(actual, expected, rtol):
    error = np.linalg.norm(np.asarray(actual) - expected) / np.linalg.norm(expected)
    assert near(actual, expected, rtol), f"{error:.1e} > {rtol:.1e}"


#
# The second-order expansion
#


@pytest.mark.parametrize(
    "name",
    [
        "softmax, saturated",
        "huber, outliers",
        "a user's function of each output",
    ],
)
def test_the_whitened_linearisation(name):
    """The loss is a weighted mean."""
    problem, oracle = PROBLEMS[name], dense(name)
    mean = dataclasses.replace(problem.loss, reduction="mean")

    def run(w, vector, targets, weights):
        lin = gnlin.linearise(gnlin.PerExample(lambda w, x: Net(w)(x)), w, jnp.asarray(X))
        objective = BatchLoss(mean, jax.eval_shape(lambda: lin.outputs), targets, weights)
        quadratic = objective.expand(lin)
        white, rest = quadratic.jacobian, quadratic.rest
        rest = jnp.zeros_like(w) if rest is None else rest
        product = white.rmv(white.mv(vector))
        return product, quadratic.gradient(), rest, white.as_matrix()

    vector = np.random.default_rng(1).normal(size=oracle.w.size)
    weights = np.array([1.0, 2.0, 0.0, 0.5, 1.0, 3.0, 0.5])
    w, *arrays = map(jnp.asarray, (oracle.w, vector, oracle.targets, weights))
    product, gradient, rest, matrix = jax.jit(run)(w, *arrays)
    each = np.repeat(weights / weights.sum(), 4)
    curvature = oracle.jacobian.T @ (each[:, None] * oracle.hessian) @ oracle.jacobian
    matrix, rest = np.asarray(matrix), np.asarray(rest)
    assert_close(product, curvature @ vector, 1e-11)
    assert_close(gradient, oracle.jacobian.T @ (each * oracle.residual), 1e-12)
    np.testing.assert_allclose(
        matrix.T @ matrix, curvature, rtol=1e-9, atol=1e-12 * np.abs(curvature).max()
    )
    steep = name in ("huber, outliers", "softmax, saturated")
    assert bool(np.any(rest != 0)) == steep


#
# One quadratic step
#


def literal_quadratic(oracle, period, eta, momentum=0.0, nesterov=False, damping=0.0):
    """Take steps on g delta + delta C delta / 2 + damping |delta|^2 / 2."""
    delta = np.zeros_like(oracle.gradient)
    velocity = np.zeros_like(delta)
    for _ in range(period):
        gradient = oracle.gradient + oracle.curvature @ delta + damping * delta
        velocity = momentum * velocity - eta * gradient
        ahead = momentum * velocity - eta * gradient
        delta = delta + (ahead if nesterov else velocity)
    return delta


def quadratic_flow(oracle, time, damping=0.0):
    p = oracle.gradient.size
    system = np.zeros((p + 1, p + 1))
    system[:p, :p] = -oracle.curvature - damping * np.eye(p)
    system[:p, p] = -oracle.gradient
    return scipy.linalg.expm(time * system)[:p, p]


# In units of the largest eigenvalue, which depends on the problem.
FILTERS = {
    "damped": (
        lambda unit: Tikhonov(0.05 * unit),
        lambda o, unit: o.damped_step(0.05 * unit),
    ),
    "damped nesterov": (
        lambda unit: Damped(Nesterov(40, 0.3 / unit, 0.8), 0.1 * unit),
        lambda o, unit: literal_quadratic(o, 40, 0.3 / unit, 0.8, True, 0.1 * unit),
    ),
    "flow": (
        lambda unit: GradientFlow(9 / unit),
        lambda o, unit: quadratic_flow(o, 9 / unit),
    ),
}
BY_METHOD = {
    "svd": list(FILTERS),
    "eigh": ["flow"],
    "kernel": ["damped"],
    "curvature": ["damped"],
    "matrix-free": ["damped", "damped nesterov"],
}


@pytest.mark.slow
def test_every_filter_by_every_method():
    """The gradient has a part that the curvature does not reach."""
    problem, oracle = SATURATED, dense("softmax, saturated")

    @jax.jit
    def run(w, targets, unit):
        fn = gnlin.PerExample(lambda w, x: Net(w)(x))
        lin = gnlin.linearise(fn, w, jnp.asarray(X))
        objective = BatchLoss(problem.loss, jax.eval_shape(lambda: lin.outputs), targets)
        quadratic = objective.expand(lin)
        answers = {}
        for method, names in BY_METHOD.items():
            one = FILTERS[names[0]][0](unit)
            subproblem = choose(quadratic, one, len(names), method)
            steps = {n: subproblem.solve(FILTERS[n][0](unit)).step for n in names}
            answers[method] = steps, subproblem.gradient_norm, subproblem.gradient()
        return answers

    unit = np.linalg.eigvalsh(oracle.curvature)[-1]
    for method, (steps, norm, gradient) in run(oracle.w, oracle.targets, unit).items():
        np.testing.assert_allclose(norm, np.linalg.norm(oracle.gradient), rtol=1e-9)
        assert_close(gradient, oracle.gradient, 1e-9)
        for filter, step in steps.items():
            expected = FILTERS[filter][1](oracle, unit)
            assert near(step, expected, 1e-8), (method, filter)


def test_gauss_newton_is_the_pseudo_inverse():
    """A softmax's singular Hessian, with more parameters than outputs."""
    solver = gnlin.GaussNewton(method="matrix-free", search=None)
    step, _ = solve(SOFTMAX, solver, compiled=True)
    assert_close(step, pseudo_inverse_step(dense("softmax")), 1e-6)


def pseudo_inverse_step(oracle):
    return -np.linalg.pinv(oracle.curvature, rcond=1e-10) @ oracle.gradient


SOLVERS = {
    "damped": (gnlin.DampedGaussNewton(0.3, search=None), lambda o: o.damped_step(0.3)),
    "gauss-newton": (
        gnlin.GaussNewton(search=None),
        pseudo_inverse_step,
    ),
    "filtered": (
        gnlin.methods.FilteredGaussNewton(Damped(GradientFlow(3.0), 0.5), search=None),
        lambda o: quadratic_flow(o, 3.0, 0.5),
    ),
    "descent": (
        gnlin.IterativeLinearisation(40, 0.02, 0.8, nesterov=True, form="quadratic"),
        lambda o: literal_quadratic(o, 40, 0.02, 0.8, nesterov=True),
    ),
    "damped, marquardt": (
        gnlin.DampedGaussNewton(0.3, scaling="marquardt", search=None),
        lambda o: (
            -np.linalg.solve(
                o.curvature + 0.3 * np.diag(np.diag(o.curvature)), o.gradient
            )
        ),
    ),
    # The kernel fits into the budget, but the Jacobian does not.
    "spectrum in chunks": (
        gnlin.methods.FilteredGaussNewton(
            GradientFlow(3.0), method="eigh", memory_budget=8000, search=None
        ),
        lambda o: quadratic_flow(o, 3.0),
    ),
}


def with_exhaustive(cases, *names):
    """Return the cases as parameters with their names, of which some are exhaustive."""
    mark = lambda name: pytest.mark.exhaustive if name in names else ()
    return [
        pytest.param(*case, id=name, marks=mark(name)) for name, case in cases.items()
    ]


@pytest.mark.parametrize(
    ("solver", "expected"), with_exhaustive(SOLVERS, "spectrum in chunks")
)
def test_a_quadratic_step_of_each_solver(solver, expected):
    step, solution = solve(HUBER, solver)
    assert result_is(solution, "nonlinear_max_steps_reached")
    oracle = dense("huber, outliers")
    assert_close(step, expected(oracle), 1e-7)
    np.testing.assert_allclose(
        [*solution.history.loss, solution.loss],
        [oracle.value(oracle.outputs), oracle.true_loss(step)],
        rtol=1e-10,
    )
    np.testing.assert_allclose(
        solution.history.gradient_norm, np.linalg.norm(oracle.gradient), rtol=1e-9
    )


class Split(Net):
    def __call__(self, x):
        f = super().__call__(x)
        return {"one": f[0], "more": f[1:]}


@pytest.mark.parametrize(
    "form", ["quadratic", pytest.param("prox-linear", marks=pytest.mark.exhaustive)]
)
def test_outputs_may_be_a_tree(form):
    split = {"one": OUTLIERS[:, 0], "more": OUTLIERS[:, 1:]}
    model, oracle = Split(jnp.asarray(start())), dense("huber, outliers")
    solver = gnlin.DampedGaussNewton(0.3, form=form, search=None)
    with op_by_op(form == "quadratic"):
        solution = gnlin.solve(model, (X, split), solver, loss=HUBER.loss, max_steps=1)
    step = np.asarray(solution.model.w) - start()
    if form == "quadratic":
        assert_close(step, oracle.damped_step(0.3), 1e-8)
    else:
        assert oracle.remaining(step, 0.3) <= 1e-9


@pytest.mark.parametrize(
    "solver",
    [
        gnlin.GaussNewton(method="matrix-free", search=None),
        pytest.param(
            gnlin.TruncatedGaussNewton(0.1, method="matrix-free", search=None),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["gauss-newton", "truncated"],
)
def test_outliers_without_damping(solver):
    """A loss that grows linearly in the parameters has no minimum. It is left alone, as
    by the other methods, or at least no step is taken."""
    step, _ = solve(HUBER, solver)
    assert np.linalg.norm(step) < 1e6


def test_truncated_gauss_newton_stops_where_it_says():
    oracle = dense("huber, outliers")
    for tolerance in (0.7, 1e-5):
        solver = gnlin.TruncatedGaussNewton(tolerance, damping=0.3, search=None)
        step, solution = solve(HUBER, solver)
        expected, count = textbook(oracle, tolerance, 0.3)
        assert count == int(solution.history.num_inner_steps[0])
        assert_close(step, expected, 1e-7)


def textbook(oracle, tolerance, damping):
    """Return (step, number of iterations) of conjugate gradients."""
    step = np.zeros_like(oracle.gradient)
    residual = direction = -oracle.gradient
    for k in range(200):
        if np.linalg.norm(residual) <= tolerance * np.linalg.norm(oracle.gradient):
            return step, k
        product = oracle.curvature @ direction + damping * direction
        alpha = residual @ residual / (direction @ product)
        step = step + alpha * direction
        new = residual - alpha * product
        direction = new + (new @ new) / (residual @ residual) * direction
        residual = new
    raise AssertionError("The textbook's iteration has not ended.")


#
# Levenberg-Marquardt
#

LM_PROBLEMS = {
    "softmax": (SMOOTHED, {}),
    "poisson, prox-linear": (POISSON, {"form": "prox-linear"}),
}


@pytest.mark.parametrize(
    ("problem", "options"), with_exhaustive(LM_PROBLEMS, "poisson, prox-linear")
)
def test_levenberg_marquardt_descends_to_a_stationary_point(problem, options):
    step, solution = solve(
        problem, gnlin.LevenbergMarquardt(**options), 400, compiled=True
    )
    losses = np.append(solution.history.loss, solution.loss)
    assert np.all(np.isfinite(losses))
    moved = np.asarray(solution.history.step_norm) > 0
    rounding = 1e-12 * np.abs(losses[0])
    assert np.all(np.diff(losses)[moved] <= rounding)
    assert np.all(np.diff(losses)[~moved] == 0)
    before, after = Dense(problem), Dense(problem, np.asarray(solution.model.w))
    assert np.linalg.norm(after.gradient) < 1e-3 * np.linalg.norm(before.gradient)
    np.testing.assert_allclose(losses[0], before.value(before.outputs), rtol=1e-10)
    final = after.value(after.outputs)
    np.testing.assert_allclose(losses[-1], final, rtol=1e-9, atol=1e-12)
    assert np.any(step)


class FourSquares(gnlin.authoring.AbstractElementwiseLoss):
    """Squared error in other units: four times the value."""

    reduction: str = "sum"

    def elementwise(self, output, target):
        return 2 * (output - target) ** 2


@pytest.mark.slow
def test_accelerated_steps_do_not_depend_on_the_unit_of_the_loss():
    """Nor on whether squared error is gnlin's own class."""
    solver = gnlin.LevenbergMarquardt()
    plain, _ = solve(Problem(gnlin.SquaredError(), REAL), solver)
    disguised, _ = solve(Problem(FourSquares(), REAL), solver)
    assert_close(disguised, plain, 1e-7)


#
# The prox-linear form: the loss itself on the linearised model
#


def minimised(oracle, damping):
    found = scipy.optimize.minimize(
        lambda step: oracle.linearised_loss(step, damping),
        np.zeros_like(oracle.w),
        jac=True,
        method="L-BFGS-B",
        options={"ftol": 1e-16, "gtol": 1e-10, "maxiter": 5000, "maxfun": 10000},
    )
    return found.x


@pytest.mark.parametrize(
    "name", ["softmax", pytest.param("huber, outliers", marks=pytest.mark.exhaustive)]
)
def test_damped_prox_linear_matches_scipys_minimiser(name):
    """The steps are on p parameters; below they are on m coefficients."""
    problem, oracle = PROBLEMS[name], dense(name)

    @jax.jit
    def run(w, targets, damping):
        fn = gnlin.PerExample(lambda w, x: Net(w)(x))
        lin = gnlin.linearise(fn, w, jnp.asarray(X))
        objective = BatchLoss(problem.loss, jax.eval_shape(lambda: lin.outputs), targets)
        itself = problem_of("prox-linear", objective, lin)
        subproblem = choose(itself, Tikhonov(damping), method="matrix-free")
        answer = subproblem.solve(Tikhonov(damping))
        return answer.step, answer.decrease, subproblem.gradient_norm

    for damping in (0.1, 3.0):
        step, decrease, norm = run(oracle.w, oracle.targets, damping)
        np.testing.assert_allclose(norm, np.linalg.norm(oracle.gradient), rtol=1e-9)
        # The problem is strongly convex, so this bounds the distance.
        assert oracle.remaining(np.asarray(step), damping) <= 1e-9
        assert_close(step, minimised(oracle, damping), 1e-4)
        fall = oracle.value(oracle.outputs)
        fall -= oracle.linearised_loss(np.asarray(step))[0]
        np.testing.assert_allclose(decrease, fall, rtol=1e-9)


PROX = gnlin.DampedGaussNewton(0.3, form="prox-linear", method="kernel", search=None)


def test_damped_gauss_newton_in_the_prox_linear_form():
    oracle = dense("softmax")
    step, solution = solve(SOFTMAX, PROX, compiled=True)
    assert oracle.remaining(step, 0.3) <= 1e-9
    norm = np.linalg.norm(oracle.gradient)
    np.testing.assert_allclose(solution.history.gradient_norm, norm, rtol=1e-9)
    np.testing.assert_allclose(solution.loss, oracle.true_loss(step), rtol=1e-10)
    assert solution.stats["num_inner_steps"] >= 1


@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_truncated_prox_linear_reaches_its_tolerance(damping):
    """The minimum is zero without damping, since the model has more parameters than
    outputs. At large residuals there is a slope to follow, but no curvature."""
    oracle, nums_steps = dense("huber, outliers"), []
    for tolerance in (0.7, 0.1, 1e-2):
        solver = gnlin.TruncatedGaussNewton(
            tolerance, damping, form="prox-linear", search=None
        )
        step, solution = solve(HUBER, solver, compiled=True)
        norm = np.linalg.norm(oracle.gradient)
        np.testing.assert_allclose(solution.history.gradient_norm, norm, rtol=1e-10)
        assert oracle.remaining(step, damping) <= tolerance * (1 + 1e-9)
        nums_steps.append(int(solution.stats["num_inner_steps"]))
    assert 1 <= nums_steps[0] <= nums_steps[1] < nums_steps[2]


def nesterov_sgd(learning_rate, momentum):
    return optax.sgd(learning_rate, momentum, nesterov=True)


def adamw(learning_rate):
    return optax.adamw(learning_rate, weight_decay=0.1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _literal_optax(build, loss, numbers, period, damping, state, linearised):
    w, outputs, jacobian, targets = linearised
    value = lambda f: jnp.sum(jax.vmap(loss.value)(f.reshape(7, -1), targets))
    optimiser = build(*numbers)

    def body(_, carry):
        parameters, state = carry
        step = parameters - w
        gradient = jacobian.T @ jax.grad(value)(outputs + jacobian @ step)
        gradient += damping * step
        updates, state = updated(optimiser, gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state

    return jax.lax.fori_loop(0, period, body, (w, state))


def literal_optax(
    oracle, build, *numbers, period, damping=0.0, state=None, problem=SOFTMAX
):
    """Steps of an optimiser, `build(*numbers)`, on L(f + phi delta) + damping/2
    |delta|^2, which it sees as a function of the parameters: (step, state)."""
    linearised = oracle.w, oracle.outputs, oracle.jacobian, oracle.targets
    linearised = tuple(map(jnp.asarray, linearised))
    state = build(*numbers).init(linearised[0]) if state is None else state
    w, state = _literal_optax(
        build, problem.loss, numbers, period, damping, state, linearised
    )
    return np.asarray(w) - oracle.w, state


@pytest.mark.parametrize(
    ("method", "build"), [("kernel", optax.sgd), ("matrix-free", nesterov_sgd)]
)
def test_descent_on_the_loss_itself_matches_optax(method, build):
    """This holds for steps on m coefficients and on p parameters."""
    settings = {"damping": 0.5, "method": method, "nesterov": build is nesterov_sgd}
    solver = gnlin.IterativeLinearisation(12, 0.05, 0.9, **settings)
    step, _ = solve(SOFTMAX, solver)
    numbers = {"period": 12, "damping": 0.5}
    expected, _ = literal_optax(dense("softmax"), build, 0.05, 0.9, **numbers)
    assert_close(step, expected, 1e-11)


@pytest.mark.slow
def test_python_numbers_and_the_automatic_method():
    solver = gnlin.IterativeLinearisation(20, 0.002, 0.5)
    step, solution = solve(POISSON, solver)
    expected, _ = literal_optax(
        dense("poisson"), optax.sgd, 0.002, 0.5, period=20, problem=POISSON
    )
    assert_close(step, expected, 1e-11)
    assert float(solution.stats["num_inner_steps"]) == 20


OPTIMISERS = {"adam": (optax.adam, True, 0.3), "adamw, kept": (adamw, False, 0.0)}


@pytest.mark.parametrize(
    ("build", "restart", "damping"), with_exhaustive(OPTIMISERS, "adamw, kept")
)
def test_any_optimiser_on_each_linearised_model(build, restart, damping):
    solver = gnlin.IterativeLinearisation(
        7, optimiser=build(0.02), restart=restart, damping=damping
    )
    _, solution = solve(SOFTMAX, solver, 2)
    w, state = start(), None
    for _ in range(2):
        step, state = literal_optax(
            Dense(SOFTMAX, w), build, 0.02, period=7, damping=damping, state=state
        )
        w = w + step
        state = None if restart else state
    np.testing.assert_allclose(solution.model.w, w, rtol=1e-9, atol=1e-10)
    assert float(solution.stats["num_inner_steps"]) == 14
    assert int(solution.stats["num_feature_updates"]) == 2


@pytest.mark.slow
def test_a_period_of_one_that_keeps_its_state_is_the_optimiser_itself():
    optimiser = optax.adam(0.05)
    solver = gnlin.IterativeLinearisation(1, optimiser=optimiser, restart=False)
    _, solution = solve(SOFTMAX, solver, 3)
    labels = jnp.asarray(LABELS)

    @jax.jit
    def step(w, state):
        value = lambda w: jnp.sum(jax.vmap(SOFTMAX.loss.value)(outputs_at(w), labels))
        updates, state = updated(optimiser, jax.grad(value)(w), state, w)
        return optax.apply_updates(w, updates), state

    w = jnp.asarray(start())
    state = optimiser.init(w)
    for _ in range(3):
        w, state = step(w, state)
    np.testing.assert_allclose(solution.model.w, w, rtol=1e-9)


def test_an_optimiser_on_the_quadratic_form():
    solver = gnlin.IterativeLinearisation(20, optimiser=optax.sgd(0.1), form="quadratic")
    step, _ = solve(SOFTMAX, solver)
    assert_close(step, literal_quadratic(dense("softmax"), 20, 0.1), 1e-9)


def test_an_optimiser_reports_the_whole_gradient():
    """The gradient at an outlier is not in the range of the Hessian."""
    solver = gnlin.IterativeLinearisation(2, optimiser=optax.sgd(1e-3), form="quadratic")
    _, solution = solve(HUBER, solver)
    expected = np.linalg.norm(dense("huber, outliers").gradient)
    np.testing.assert_allclose(solution.history.gradient_norm[0], expected, rtol=1e-12)


@pytest.mark.exhaustive
def test_flow_is_a_hundred_thousand_small_steps():
    period, eta, damping = 10**5, 1e-4, 0.01
    solver = gnlin.IterativeLinearisation(period, eta, method="flow", damping=damping)
    step, solution = solve(SOFTMAX, solver, compiled=True)
    expected = many_steps(dense("softmax"), period, eta, damping)
    assert_close(step, expected, 1e-4)
    assert float(solution.stats["num_inner_steps"]) == period


@functools.cache
def many_steps(oracle, period, eta, damping):
    """Take literal steps on the coefficients of delta = phi^T a."""
    kernel = jnp.asarray(oracle.jacobian @ oracle.jacobian.T)

    @jax.jit
    def run(outputs, kernel):
        def body(_, a):
            return a - eta * (oracle.loss_gradient(outputs + kernel @ a) + damping * a)

        return jax.lax.fori_loop(0, period, body, jnp.zeros_like(outputs))

    return oracle.jacobian.T @ np.asarray(run(jnp.asarray(oracle.outputs), kernel))


@pytest.mark.exhaustive
def test_an_unfinished_flow_is_not_a_success(monkeypatch):
    monkeypatch.setattr(sys.modules["gnlin._subproblem._flow"], "_MAX_STEPS", 2)
    solver = gnlin.IterativeLinearisation(
        10**6,
        1e-2,
        method="flow",
        memory_budget=10**6,  # another program
    )
    _, solution = solve(SOFTMAX, solver, compiled=True)
    assert result_is(solution, "nonlinear_divergence")


@pytest.mark.parametrize(
    ("damping", "remaining", "settings"),
    [
        (0.3, 1e-9, {"method": "kernel", "momentum": 0.9}),
        pytest.param(0.0, 0.1, {"method": "auto"}, marks=pytest.mark.exhaustive),
    ],
    ids=["momentum, kernel", "undamped"],
)
def test_steps_without_an_end_are_the_minimiser(damping, remaining, settings):
    """At large residuals there is a slope to follow, but no curvature."""
    solver = gnlin.IterativeLinearisation(math.inf, 0.05, damping=damping, **settings)
    step, solution = solve(HUBER, solver, compiled=True)
    assert dense("huber, outliers").remaining(step, damping) <= remaining
    assert int(solution.stats["num_steps"]) == 1
    assert damping == 0 or result_is(solution, "successful")


@pytest.mark.exhaustive
def test_a_traced_period_may_be_infinite():
    solver = gnlin.IterativeLinearisation(jnp.asarray(jnp.inf), 0.05, damping=0.3)
    step, _ = solve(SOFTMAX, solver)
    assert dense("softmax").remaining(step, 0.3) <= 1e-6


@pytest.mark.exhaustive
def test_gauss_newton_on_the_loss_itself():
    problem = SOFTMAX._replace(loss=gnlin.SoftmaxCrossEntropy(0.2))
    oracle = Dense(problem)
    step, _ = solve(
        problem, gnlin.GaussNewton(form="prox-linear", search=None), compiled=True
    )
    assert oracle.remaining(step) <= 1e-9
    # The shortest step: it is in the range of phi^T
    _, _, vt = np.linalg.svd(oracle.jacobian)
    rank = np.linalg.matrix_rank(oracle.jacobian)
    assert np.linalg.norm(vt[rank:] @ step) <= 1e-8 * np.linalg.norm(step)


#
# Squared error, with gnlin's class and in disguise
#


class Disguised(gnlin.authoring.AbstractElementwiseLoss):
    """Squared error as a user might write it."""

    reduction: str = "sum"

    def elementwise(self, output, target):
        return 0.5 * (output - target) ** 2


class Masked(eqx.Module):
    """A model of up to 8 parameters, of which the mask removes some."""

    w: jax.Array
    mask: jax.Array

    def __call__(self, x):
        w = self.w * self.mask
        return jnp.tanh(w[:6].reshape(2, 3) @ x) + w[6:]


def masked(seed, num_examples, num_parameters):
    """Return a problem of that size, (w, mask, x, y, weights). Of 6 examples the
    superfluous ones have weight zero, so that one program serves all sizes."""
    generator = np.random.default_rng(seed)
    x, y = generator.normal(size=(6, 3)), generator.normal(size=(6, 2))
    mask = generator.permutation(np.arange(8) < num_parameters).astype(float)
    weights = generator.permutation(np.arange(6) < num_examples).astype(float)
    return tuple(map(jnp.asarray, (generator.normal(size=8), mask, x, y, weights)))


sizes = st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 8)


class Linear(NamedTuple):
    """The parts of a problem that `literal_quadratic` and `quadratic_flow` need."""

    gradient: np.ndarray
    curvature: np.ndarray

    def damped_step(self, damping):
        return -np.linalg.solve(self.curvature + damping * np.eye(8), self.gradient)


ALIKE = {
    "damped": (Tikhonov(0.3), lambda o: o.damped_step(0.3), 1e-8),
    "exact": (
        PseudoInverse(),
        lambda o: -np.linalg.pinv(o.curvature, rcond=1e-12) @ o.gradient,
        1e-5,
    ),
    "damped nesterov": (
        Damped(Nesterov(30, 0.02, 0.7), 0.3),
        lambda o: literal_quadratic(o, 30, 0.02, 0.7, True, 0.3),
        1e-9,
    ),
    "flow": (GradientFlow(3.0), lambda o: quadratic_flow(o, 3.0), 1e-4),
}


@jax.jit
def in_every_form(w, mask, x, y, weights):
    """Return the steps of the filters above on disguised squared error, by form, and the
    true residuals and Jacobian."""
    fn = gnlin.PerExample(lambda w, x: Masked(w, mask)(x))
    lin = gnlin.linearise(fn, w, x)
    shapes = jax.eval_shape(lambda: lin.outputs)
    objective = BatchLoss(Disguised(), shapes, y, weights)
    ways = (
        ("quadratic", "auto", ["damped", "exact"]),
        ("prox-linear", "kernel", ["damped", "damped nesterov", "flow"]),
        ("prox-linear", "matrix-free", ["exact", "damped nesterov"]),
    )
    steps = {}
    for form, method, names in ways:
        itself = problem_of(form, objective, lin)
        subproblem = choose(itself, Tikhonov(0.3), len(names), method)
        for name in names:
            steps[form, method, name] = subproblem.solve(ALIKE[name][0]).step
        if form == "prox-linear" and method == "matrix-free":
            step = subproblem.to_tolerance(1e-10, 0.3).step
            steps[form, "truncated", "damped"] = step
    each = jnp.repeat(weights, 2)
    jacobian = jax.jacfwd(lambda w: fn(w, x))(w).reshape(12, 8)
    return steps, each * (lin.outputs - y).ravel(), each[:, None] * jacobian


@pytest.mark.slow
@hypothesis.given(*sizes)
def test_squared_error_in_disguise(seed, n, p):
    """The general code handles any shape: tall, wide, one example, one parameter."""
    steps, residual, jacobian = in_every_form(*masked(seed, n, p))
    residual, jacobian = np.asarray(residual), np.asarray(jacobian)
    oracle = Linear(jacobian.T @ residual, jacobian.T @ jacobian)
    for (form, method, name), step in steps.items():
        _, expected, rtol = ALIKE[name]
        assert near(step, expected(oracle), rtol, 1e-3), (form, method, name)


@pytest.mark.exhaustive
def test_levenberg_marquardt_in_disguise():
    solver = gnlin.LevenbergMarquardt(form="prox-linear")
    step, _ = solve(Problem(Disguised(), REAL), solver)
    plain = gnlin.LevenbergMarquardt(damping=1e-3, scaling="identity", acceleration=False)
    known, _ = solve(Problem(gnlin.SquaredError(), REAL), plain)
    assert_close(step, known, 1e-7)


def test_squared_error_has_one_form():
    problem = Problem(gnlin.SquaredError(), REAL)
    solver = gnlin.TruncatedGaussNewton(0.1, 0.3, form="prox-linear", search=None)
    step, _ = solve(problem, solver)
    expected, _ = textbook(Dense(problem), 0.1, 0.3)
    assert_close(step, expected, 1e-8)


#
# The order of the examples
#


@hypothesis.settings(max_examples=4)
@hypothesis.given(st.permutations(range(7)))
def test_the_order_of_the_examples_does_not_matter(order):
    step, _ = solve(SOFTMAX, PROX, compiled=True)
    order = np.array(order)
    data = X[order], LABELS[order]
    shuffled, _ = solve(SOFTMAX, PROX, data=data, compiled=True)
    assert_close(shuffled, step, 1e-8)


#
# Line searches
#

ARMIJO = optx.BacktrackingArmijo()


SEARCHING = {
    "gauss-newton": (gnlin.GaussNewton(search=ARMIJO), pseudo_inverse_step),
    "truncated": (
        gnlin.TruncatedGaussNewton(0.1, search=ARMIJO),
        lambda o: textbook(o, 0.1, 0.0)[0],
    ),
}


@pytest.mark.parametrize(("solver", "full_step"), with_exhaustive(SEARCHING, "truncated"))
def test_a_search_keeps_the_loss_from_rising(solver, full_step):
    _, solution = solve(SOFTMAX, solver, 6, compiled=True)
    losses = np.append(solution.history.loss, solution.loss)
    assert len(losses) == 7
    assert np.all(np.diff(losses) < 0)
    assert losses[-1] < 0.5 * losses[0]
    # The first full step would have raised the loss.
    oracle = dense("softmax")
    step = full_step(oracle)
    assert oracle.true_loss(step) > losses[0]
    halves = np.log2(np.linalg.norm(step) / solution.history.step_norm[0])
    np.testing.assert_allclose(halves, np.round(halves), atol=1e-6)
    assert np.round(halves) >= 1


@pytest.mark.exhaustive
def test_a_search_takes_a_full_step_that_is_good_enough():
    step, solution = solve(SOFTMAX, gnlin.DampedGaussNewton(10.0, search=ARMIJO), 3)
    w = start()
    for k in range(3):
        oracle = Dense(SOFTMAX, w)
        np.testing.assert_allclose(
            solution.history.loss[k], oracle.value(oracle.outputs), rtol=1e-9
        )
        w = w + oracle.damped_step(10.0)
    assert_close(step, w - start(), 1e-8)


#
# Numbers that are not finite
#

NOT_FINITE = {
    "damped": gnlin.DampedGaussNewton(0.3, search=None),
    "damped, prox-linear": PROX,
    "descent": gnlin.IterativeLinearisation(3, 0.05),
}


@pytest.mark.slow
@pytest.mark.parametrize("solver", NOT_FINITE.values(), ids=NOT_FINITE)
def test_data_that_are_not_finite(solver):
    x, w = X.copy(), start()
    x[2, 1] = np.nan
    with (
        pytest.warns(UserWarning, match=r"[Nn]on-?finite|is not finite"),
        op_by_op(solver is not PROX),
    ):
        solution = gnlin.solve(
            Net(jnp.asarray(w)), (x, LABELS), solver, loss=SOFTMAX.loss, max_steps=1
        )
    assert result_is(solution, "nonfinite")
    np.testing.assert_array_equal(solution.model.w, w)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "solver"),
    [
        (LOG_COSH, gnlin.LevenbergMarquardt()),
        (HUBER, gnlin.DampedGaussNewton(0.3, search=None)),
    ],
    ids=["log-cosh", "huber"],
)
def test_targets_that_are_not_finite(problem, solver):
    targets = REAL.copy()
    targets[1, 2] = np.nan
    step, solution = solve(problem, solver, data=(X, targets))
    assert np.isnan(solution.history.loss[0])
    assert result_is(solution, "nonfinite")
    assert not np.any(step)


@pytest.mark.exhaustive
def test_steps_that_diverge_are_not_taken():
    """Poisson's loss has an unbounded gradient."""
    for eta in (1.0, 1e200):
        solver = gnlin.IterativeLinearisation(15, eta, method="matrix-free")
        step, solution = solve(POISSON, solver, 5)
        diverged = result_is(solution, "nonlinear_divergence")
        assert diverged or result_is(solution, "nonfinite")
        assert not np.any(step)
        assert int(solution.stats["num_steps"]) == 1
        np.testing.assert_allclose(solution.loss, solution.history.loss[0])
    solver = gnlin.IterativeLinearisation(15, 1e-3, method="matrix-free")
    step, solution = solve(POISSON, solver, 2)
    assert result_is(solution, "nonlinear_max_steps_reached")
    assert solution.loss < solution.history.loss[1] < solution.history.loss[0]


def test_cross_entropy_ends_where_the_numbers_do():
    """Its gradient is bounded, and its steps have the requested length."""
    step, solution = solve(SOFTMAX, gnlin.IterativeLinearisation(15, 1e308), 10)
    diverged = result_is(solution, "nonlinear_divergence")
    assert diverged or result_is(solution, "nonfinite")
    assert np.all(np.isfinite(step))
    assert np.all(np.isfinite([*solution.history.loss, solution.loss]))


def test_the_quadratic_form_diverges_by_name():
    solver = gnlin.IterativeLinearisation(40, 1e3, 0.8, nesterov=True, form="quadratic")
    step, solution = solve(HUBER, solver)
    assert result_is(solution, "nonlinear_divergence")
    assert not np.any(step)


def test_outliers_beside_a_perfect_fit():
    targets = np.array(outputs_at(start()))
    targets[0] += 100
    solver = gnlin.IterativeLinearisation(
        20, 0.02, form="quadratic", method="matrix-free"
    )
    step, solution = solve(HUBER, solver, data=(X, targets))
    expected = literal_quadratic(Dense(Problem(HUBER.loss, targets)), 20, 0.02)
    assert result_is(solution, "nonlinear_max_steps_reached")
    assert_close(step, expected, 1e-9)


class SoftmaxByValue(gnlin.authoring.AbstractLoss):
    reduction: str = "sum"

    def value(self, outputs, target):
        return jax.nn.logsumexp(outputs) - outputs[target]


@pytest.mark.parametrize(
    "scale",
    [30.0, pytest.param(600.0, marks=pytest.mark.exhaustive)],
)
def test_saturated_outputs_of_a_user_defined_loss(scale):
    oracle = Dense(Problem(gnlin.SoftmaxCrossEntropy(), LABELS, scale))
    own = Problem(SoftmaxByValue(), LABELS, scale)
    solver = gnlin.DampedGaussNewton(10.0, search=None)
    step, solution = solve(own, solver, compiled=True)
    np.testing.assert_allclose(
        solution.history.gradient_norm, np.linalg.norm(oracle.gradient), rtol=1e-6
    )
    assert_close(step, oracle.damped_step(10.0), 1e-6)


#
# Sweeps, and single precision
#


@pytest.mark.exhaustive
def test_a_sweep_of_cross_entropy_is_one_program():
    build = lambda eta: gnlin.IterativeLinearisation(jnp.asarray(100), eta)
    values, num_traces = [1e-3, 1e-2, 1e-1], []

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def run(value, w):
        num_traces.append(0)
        data, loss = (X, LABELS), SOFTMAX.loss
        return gnlin.solve(Net(w), data, build(value), loss=loss, max_steps=1).model.w

    w = start()
    together = run(jnp.asarray(values), w)
    run(jnp.asarray(values[::-1]), w)
    assert len(num_traces) == 1
    for value, other in zip(values, together, strict=True):
        step, _ = solve(SOFTMAX, build(value), compiled=True)
        assert_close(other - w, step, 1e-8)
    assert not np.allclose(together[0], together[1])


@pytest.mark.slow
def test_single_precision():
    """Outputs are saturated."""
    data, w = (np.float32(X), LABELS), np.float32(start(SATURATED.scale))
    step, solution = solve(SATURATED, PROX, data=data, w=w, compiled=True)
    assert step.dtype == solution.history.loss.dtype == np.float32
    # To 10 eps^(2/3), and the rounding of a check in double precision
    assert dense("softmax, saturated").remaining(np.float64(step), 0.3) <= 1e-3


#
# Filters: Nesterov's, and any filter with damping
#


@jax.jit
def literal_nesterov(w, period, eta, momentum, damping):
    """Run optax on theta w theta / 2 - theta + damping theta^2 / 2."""
    optimiser = optax.sgd(eta, momentum, nesterov=True)

    def body(_, carry):
        theta, state = carry
        updates, state = optimiser.update((w + damping) * theta - 1, state)
        return theta + updates, state

    zero = jnp.zeros_like(w)
    return jax.lax.fori_loop(0, period, body, (zero, optimiser.init(zero)))[0]


@jax.jit
def nesterov_filters(w, period, eta, momentum, damping):
    filter = Nesterov(period, eta, momentum)
    return filter(w), Damped(filter, damping)(w)


@hypothesis.given(
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
    st.integers(1, 60),
    st.floats(0, 0.99),
    st.floats(1e-3, 1e3),
    st.floats(0, 0.3),
)
def test_nesterov_matches_optax(fractions, period, momentum, eta, damping):
    """This holds at zero, and at any eigenvalue for which it converges."""
    stable = 2 * (1 + momentum) / (1 + 2 * momentum)
    w = 0.69 * stable / eta * np.append(fractions, 0.0)
    damping = damping * stable / eta
    numbers = jnp.asarray(period), eta, momentum
    plain, with_damping = nesterov_filters(w, *numbers, damping)
    np.testing.assert_allclose(
        plain, literal_nesterov(w, *numbers, 0.0), rtol=1e-10, atol=1e-12 * eta * period
    )
    np.testing.assert_allclose(
        with_damping,
        literal_nesterov(w, *numbers, damping),
        rtol=1e-10,
        atol=1e-12 * eta * period,
    )


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_where_nesterov_converges(momentum):
    threshold = 2 * (1 + momentum) / (1 + 2 * momentum)
    np.testing.assert_allclose(Nesterov(1, 1.0, momentum).largest_stable(), threshold)
    eta = 0.3
    w = np.array([0.5, 0.99, 1.01, 2.0, 0.0]) * threshold / eta
    numbers = eta, momentum, 0.0
    many, _ = nesterov_filters(w, jnp.asarray(10**5), *numbers)
    np.testing.assert_allclose(many[:2], 1 / w[:2], rtol=1e-9)
    assert np.all(np.abs(many[2:4]) > 1e10)
    np.testing.assert_allclose(many[4], eta * 10**5 / (1 - momentum), rtol=1e-3)
    few, _ = nesterov_filters(w, jnp.asarray(50), *numbers)
    expected = literal_nesterov(w, jnp.asarray(50), *numbers)
    np.testing.assert_allclose(few, expected, rtol=1e-9)
    endless, _ = nesterov_filters(w, jnp.asarray(math.inf), *numbers)
    np.testing.assert_allclose(endless[:2], 1 / w[:2], rtol=1e-15)
    assert np.all(np.isposinf(endless[2:4]))
    assert endless[4] == 0


@hypothesis.given(st.integers(1, 10**9), st.floats(0, 0.99))
def test_nesterov_at_any_period_is_never_nan(period, momentum):
    w = np.array([1e-300, 1e-8, 0.5, 10.0, 1e300])
    value, _ = nesterov_filters(w, jnp.asarray(period), 1.0, momentum, 0.0)
    assert not np.any(np.isnan(value))
    assert np.all(np.isfinite(value[:3]))


def test_nesterov_without_momentum_is_gradient_descent():
    w = np.linspace(0.0, 1.9, 5)
    by_descent = jax.jit(lambda period, w: GradientDescent(period, 1.0)(w))
    for period in (1, 5, 1000):
        nesterov, _ = nesterov_filters(w, jnp.asarray(period), 1.0, 0.0, 0.0)
        descent = by_descent(jnp.asarray(period), w)
        np.testing.assert_allclose(nesterov, descent, rtol=1e-10)


def test_a_damped_filter_is_that_of_larger_eigenvalues():
    w = jnp.asarray([0.0, 1e-3, 0.5, 2.0])
    filters = Tikhonov(0.2), PseudoInverse(), GradientFlow(2.0), HeavyBall(9, 0.3, 0.5)

    @jax.jit
    def run(w):
        for_each = lambda damping: [Damped(f, damping)(w) for f in filters]
        both = [[f(w + damping) for f in filters] for damping in (0.7, 0.0)]
        return [for_each(0.7), for_each(0.0)], both

    (damped, undamped), (shifted, plain) = run(w)
    np.testing.assert_allclose(damped, shifted, rtol=1e-15)
    np.testing.assert_allclose(undamped, plain, rtol=1e-14)


def test_damped_descent_is_descent_with_the_penalty():
    w = np.array([0.0, 1e-3, 0.5, 2.0])
    g = np.zeros_like(w)
    for _ in range(25):
        g = g - 0.3 * (w * g - 1 + 0.7 * g)
    filter = Damped(GradientDescent(25, 0.3), 0.7)
    np.testing.assert_allclose(filter(jnp.asarray(w)), g, rtol=1e-12)


#
# Errors
#

nan, inf = math.nan, math.inf
IL = gnlin.IterativeLinearisation
MISTAKES = {
    "form": [
        lambda: gnlin.GaussNewton(form="linear"),
        lambda: gnlin.DampedGaussNewton(1.0, form="proxlinear"),
        lambda: gnlin.TruncatedGaussNewton(0.1, form=""),
        lambda: gnlin.LevenbergMarquardt(form=None),
        lambda: gnlin.methods.FilteredGaussNewton(Tikhonov(1.0), form="full"),
        lambda: IL(1, 0.1, form="newton"),
    ],
    "method": [
        lambda: IL(1, 0.1, method="kernel", form="quadratic"),
        lambda: IL(1, 0.1, method="curvature"),
        lambda: IL(1, 0.1, method="newton"),
        lambda: gnlin.GaussNewton(method="kernel", form="prox-linear"),
        lambda: gnlin.GaussNewton(method="flow"),
        lambda: gnlin.TruncatedGaussNewton(0.1, method="kernel", form="prox-linear"),
    ],
    'form="prox-linear"': [
        *(
            lambda m=m: gnlin.DampedGaussNewton(1.0, form="prox-linear", method=m)
            for m in ("svd", "eigh", "curvature")
        ),
        lambda: gnlin.GaussNewton(form="prox-linear", method="svd"),
        lambda: gnlin.LevenbergMarquardt(form="prox-linear", method="eigh"),
        lambda: gnlin.methods.FilteredGaussNewton(
            GradientFlow(1.0), form="prox-linear", method="svd"
        ),
        lambda: gnlin.DampedGaussNewton(1.0, scaling="more", form="prox-linear"),
        lambda: gnlin.LevenbergMarquardt(scaling="marquardt", form="prox-linear"),
    ],
    "acceleration": [
        lambda: gnlin.LevenbergMarquardt(acceleration=True, form="prox-linear"),
    ],
    "learning_rate": [
        lambda: IL(1),
        lambda: IL(1, 0.1, optimiser=optax.sgd(0.1)),
        lambda: IL(1, -0.1),
        lambda: IL(1, inf),
    ],
    "optimiser": [
        lambda: IL(1, restart=False, optimiser=None, learning_rate=0.1),
        lambda: IL(1, optimiser="adam"),
        lambda: IL(1, optimiser=0.1),
        lambda: IL(1, optimiser=optax.adam),
        lambda: IL(1, optimiser=optax.sgd(0.1), momentum=0.9),
        lambda: IL(1, optimiser=optax.sgd(0.1), nesterov=True),
        *(
            lambda m=m: IL(1, optimiser=optax.sgd(0.1), method=m)
            for m in ("svd", "eigh", "kernel", "flow")
        ),
    ],
    "momentum": [
        lambda: IL(1, 0.1, 1.0, nesterov=True),
        lambda: Nesterov(1, 0.1, 1.0),
        lambda: Nesterov(1, 0.1, nan),
        lambda: Nesterov(1, 0.1, -0.5),
    ],
    "period": [lambda: Nesterov(0, 0.1, 0.5), lambda: Nesterov(1.5, 0.1, 0.5)],
    "damping": [
        *(lambda v=v: IL(1, 0.1, damping=v) for v in (-1.0, nan, inf)),
        *(lambda v=v: Damped(GradientFlow(1.0), v) for v in (-1.0, nan, inf)),
    ],
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "build"), [(name, build) for name in MISTAKES for build in MISTAKES[name]]
)
def test_errors_of_hyperparameters(name, build):
    with pytest.raises(ValueError, match=f"`[^`]*{name}|{name}[^`]*`") as caught:
        build()
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert ". " not in message


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: IL(9, 0.1, method="svd"), 'cannot be used for .* `form="quadratic"`'),
        (lambda: IL(9, 0.1, method="eigh"), 'cannot be used for .* `form="quadratic"`'),
        (
            lambda: gnlin.GaussNewton(rcond=0.1, form="prox-linear"),
            'use `form="quadratic"`',
        ),
        (
            lambda: gnlin.methods.FilteredGaussNewton(jnp.ones_like, form="prox-linear"),
            'use `form="quadratic"`',
        ),
        (
            lambda: gnlin.methods.FilteredGaussNewton(
                Damped(GradientFlow(1.0), 1.0), method="x"
            ),
            "must be one of",
        ),
    ],
)
def test_errors_of_solvers_that_do_not_support_a_loss(build, words):
    with pytest.raises(ValueError, match=words):
        solve(SOFTMAX, build())


def test_the_filter_of_an_optimiser():
    with pytest.raises(ValueError, match="no spectral filter"):
        IL(3, optimiser=optax.adam(0.1)).filter()


class Slope(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return (x @ self.w)[None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "dtype", "start"),
    each_once(
        ["svd", "curvature", "matrix-free"], [np.float32, np.float64], [15.0, 30.0, 40.0]
    ),
)
def test_a_large_count_is_not_an_outlier(dtype, method, start):
    """The gradient and the curvature are equally large, so each step has length one."""
    data = dtype(np.ones((4, 1))), dtype(np.ones((4, 1)))
    model = Slope(jnp.asarray([start], dtype))
    solver = gnlin.DampedGaussNewton(1.0, method=method, search=None)
    solution = gnlin.solve(
        model, data, solver, loss=gnlin.losses.PoissonNLL(), max_steps=3
    )
    assert float(solution.model.w[0]) == pytest.approx(start - 3, rel=1e-6)


REGRESSIONS = {
    "huber": (gnlin.losses.Huber(), lambda f, rng: f + rng.standard_t(1.5, f.shape)),
    "poisson": (
        gnlin.losses.PoissonNLL(),
        lambda f, rng: rng.poisson(np.exp(3 + 0.3 * f)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "damping"),
    [
        ("huber", np.float64, 0.0),
        pytest.param("poisson", np.float32, 1e-6, marks=pytest.mark.slow),
    ],
)
def test_a_regression_of_few_parameters_by_newton(name, dtype, damping):
    """The problem is tall with tiny damping: the linearised problem is the problem
    itself."""
    loss, draw = REGRESSIONS[name]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 5)).astype(dtype)
    y = np.asarray(draw(x @ np.ones((5, 1)), rng), dtype)

    def value(w):
        each = jax.vmap(loss.value)(
            jnp.asarray(x, float) @ w[:, None], jnp.asarray(y, float)
        )
        return jnp.sum(each)

    known = scipy.optimize.minimize(
        jax.jit(jax.value_and_grad(value)), np.zeros(5), jac=True, options={"gtol": 1e-9}
    )
    solver = gnlin.DampedGaussNewton(damping, form="prox-linear", search=None)
    model = Slope(jnp.zeros(5, dtype))
    solution = gnlin.solve(model, (x, y), solver, loss=loss, max_steps=6)
    rtol = 1e-3 if dtype == np.float32 else 1e-6
    np.testing.assert_allclose(solution.model.w, known.x, rtol=rtol, atol=rtol)
    assert not result_is(solution, "nonlinear_divergence")
    assert np.all(solution.history.num_inner_steps < 100)
