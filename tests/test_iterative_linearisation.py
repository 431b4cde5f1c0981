"""Iterative linearisation, compared with K literal steps on the linearised model."""

import math
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest
from problems import (
    as_jax,
    descent_step,
    gauss_newton_step,
    least_squares,
    literal_loop,
    sines,
    sines_data,
    sines_numpy,
)

import gnlin
from gnlin.filters import GradientDescent, HeavyBall


def with_literal_steps(period, learning_rate, momentum=0.0):
    return lambda r, jacobian, k: descent_step(
        r, jacobian, period, learning_rate, momentum
    )


TALL, WIDE = (7, 3), (3, 7)


@pytest.mark.parametrize(
    ("method", "momentum", "shape"),
    [
        ("svd", 0.0, TALL),
        ("eigh", 0.0, WIDE),
        ("eigh", 0.9, TALL),
        ("matrix-free", 0.9, WIDE),
    ],
)
def test_k_literal_steps(shape, momentum, method):
    y, args = sines_data(shape)
    for period in (1, 2, 7, 1000):
        solver = gnlin.IterativeLinearisation(
            jnp.asarray(period), 0.05, momentum, method=method
        )
        solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=2)
        expected = literal_loop(with_literal_steps(period, 0.05, momentum), y, args, 2)
        np.testing.assert_allclose(solution.value, expected, rtol=1e-9)
        assert float(solution.stats["num_inner_steps"]) == 2 * period
        assert int(solution.stats["num_feature_updates"]) == 2


@pytest.mark.parametrize("shape", [(1, 3), (5, 1)])
def test_one_residual_or_one_parameter(shape):
    y, args = sines_data(shape)
    solver = gnlin.IterativeLinearisation(50, 0.05)
    solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=1)
    expected = literal_loop(with_literal_steps(50, 0.05), y, args, 1)
    np.testing.assert_allclose(solution.value, expected, rtol=1e-10, atol=1e-12)


def test_a_hundred_thousand_literal_steps():
    y, args = sines_data((7, 3))
    r, jacobian = sines_numpy(y, args)

    @jax.jit
    def literal(learning_rate):
        def step(_, delta):
            return delta - learning_rate * (jacobian.T @ (r + jacobian @ delta))

        return jax.lax.fori_loop(0, 10**5, step, jnp.zeros(3))

    for learning_rate in (1e-5, 0.05):
        expected = y + literal(learning_rate)
        for method in ("svd", "eigh", "matrix-free"):
            solver = gnlin.IterativeLinearisation(10**5, learning_rate, method=method)
            solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=1)
            np.testing.assert_allclose(solution.value, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("method", "momentum"),
    [("matrix-free", 0.5), ("auto", 0.0)],
)
def test_python_numbers_and_few_literal_steps(method, momentum):
    y, args = sines_data((7, 3))
    for period in (1, 3):
        solver = gnlin.IterativeLinearisation(period, 0.05, momentum, method=method)
        solution = least_squares(
            lambda y, args: sines(y, args), solver, *as_jax((y, args)), max_steps=2
        )
        expected = literal_loop(with_literal_steps(period, 0.05, momentum), y, args, 2)
        np.testing.assert_allclose(solution.value, expected, rtol=1e-11)
        # The first gradient takes a transposed pass, each further step one pass of either
        # kind, and the loss of the linearised model after several steps a tangent pass.
        taken = [float(solution.stats[name]) / 2 for name in ("num_jvps", "num_vjps")]
        literal, spectral = [period if period > 1 else 0, period], [3, 0]
        assert taken in {"matrix-free": [literal], "svd": [spectral]}.get(
            method, [literal, spectral]
        )


def test_heavy_ball_matches_optax():
    momentum = 0.95
    y, args = as_jax(sines_data((7, 3)))
    lin = gnlin.linearise(sines, y, args)
    optimiser = optax.sgd(0.05, momentum)

    @jax.jit
    def step(carry, _):
        y, state = carry
        gradient = jax.grad(lambda y: 0.5 * jnp.sum(lin(y) ** 2))(y)
        updates, state = optimiser.update(gradient, state)
        return (optax.apply_updates(y, updates), state), None

    (expected, _), _ = jax.lax.scan(step, (y, optimiser.init(y)), length=300)
    for method in ("svd", "matrix-free"):
        solver = gnlin.IterativeLinearisation(300, 0.05, momentum, method=method)
        solution = least_squares(sines, solver, y, args, max_steps=1)
        np.testing.assert_allclose(solution.value, expected, rtol=1e-11)


#
# Infinite periods
#


@pytest.mark.parametrize(
    ("period", "momentum", "shape"),
    [(math.inf, 0.9, TALL), (jnp.asarray(jnp.inf), 0.0, WIDE)],
)
def test_an_infinite_period_is_one_feature_update(period, momentum, shape):
    y, args = sines_data(shape)
    solver = gnlin.IterativeLinearisation(period, 0.05, momentum)
    solution = least_squares(sines, solver, *as_jax((y, args)))
    expected = y + gauss_newton_step(*sines_numpy(y, args))
    np.testing.assert_allclose(solution.value, expected, rtol=1e-10)
    assert solution.result == optx.RESULTS.successful
    assert int(solution.stats["num_feature_updates"]) == 1
    assert np.isinf(solution.stats["num_inner_steps"])


def test_an_infinite_period_does_not_hide_a_learning_rate_that_diverges():
    y, args = as_jax(sines_data((7, 3)))
    for momentum in (0.0, 0.9):
        solver = gnlin.IterativeLinearisation(math.inf, 50.0, momentum)
        solution = least_squares(sines, solver, y, args)
        assert solution.result == optx.RESULTS.nonlinear_divergence
        np.testing.assert_array_equal(solution.value, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("period", "shape"), [(math.inf, TALL), (jnp.asarray(jnp.inf), WIDE)]
)
def test_an_infinite_period_ends_without_a_spectrum(period, shape):
    y, args = sines_data(shape)
    solver = gnlin.IterativeLinearisation(period, 0.05, method="matrix-free")
    solution = least_squares(sines, solver, *as_jax((y, args)))
    expected = y + gauss_newton_step(*sines_numpy(y, args))
    np.testing.assert_allclose(solution.value, expected, rtol=1e-7)
    assert int(solution.stats["num_feature_updates"]) == 1
    solver = gnlin.IterativeLinearisation(period, 50.0, method="matrix-free")
    solution = least_squares(sines, solver, *as_jax((y, args)))
    assert solution.result == optx.RESULTS.nonlinear_divergence


#
# Divergence
#


@pytest.mark.parametrize(
    ("method", "momentum", "period"),
    [("svd", 0.5, 10**8 + 1), ("eigh", 0.0, 10**8)],
)
def test_divergence_is_reported_before_the_step_is_taken(method, period, momentum):
    y, args = as_jax(sines_data((7, 3)))
    _, jacobian = sines_numpy(*jax.tree.map(np.asarray, (y, args)))
    edge = 2 * (1 + momentum) / np.linalg.norm(jacobian, 2) ** 2
    for learning_rate, stable in ((0.999 * edge, True), (1.001 * edge, False)):
        solver = gnlin.IterativeLinearisation(
            jnp.asarray(period), learning_rate, momentum, method=method
        )
        solution = least_squares(sines, solver, y, args, max_steps=1)
        if stable:
            assert solution.result == optx.RESULTS.nonlinear_max_steps_reached
            assert int(solution.stats["num_accepted_steps"]) == 1
        else:
            assert solution.result == optx.RESULTS.nonlinear_divergence
            np.testing.assert_array_equal(solution.value, y)
            assert int(solution.stats["num_rejected_steps"]) == 1
            assert int(solution.stats["num_accepted_steps"]) == 0


def test_divergence_of_literal_steps():
    y, args = as_jax(sines_data((7, 3)))
    solver = gnlin.IterativeLinearisation(10**5, 50.0, method="matrix-free")
    solution = least_squares(sines, solver, y, args)
    assert solution.result == optx.RESULTS.nonlinear_divergence
    np.testing.assert_array_equal(solution.value, y)


def test_divergence_is_thrown_by_name():
    y, args = as_jax(sines_data((7, 3)))
    solver = gnlin.IterativeLinearisation(10**8, 50.0)
    with pytest.raises(RuntimeError, match="diverge"):
        optx.least_squares(sines, solver, y, args)


def test_a_few_steps_too_long_are_taken_as_asked():
    """Growth in a short run does not prove divergence, so the steps are taken as
    requested."""
    y, args = sines_data((7, 3))
    for method in ("svd", "matrix-free"):
        solver = gnlin.IterativeLinearisation(3, 2.0, method=method)
        solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=1)
        expected = literal_loop(with_literal_steps(3, 2.0), y, args, 1)
        np.testing.assert_allclose(solution.value, expected, rtol=1e-10)


#
# The filter
#


def test_filter():
    solver = gnlin.IterativeLinearisation(10, 0.1)
    assert isinstance(solver.filter(), GradientDescent)
    assert solver.filter().period == 10
    assert solver.filter(3).period == 3
    solver = gnlin.IterativeLinearisation(10, 0.1, 0.9)
    assert isinstance(solver.filter(), HeavyBall)
    assert solver.filter().momentum == 0.9


STEPS = [1, 2, 10, 100]


def test_the_path_of_the_inner_steps():
    momentum = 0.5
    y, args = sines_data((7, 3))
    r, jacobian = sines_numpy(y, args)
    solver = gnlin.IterativeLinearisation(10, 0.05, momentum)

    @jax.jit
    def path(y, args, steps):
        spectrum = gnlin.linearise(sines, y, args).spectrum()
        return jax.vmap(lambda k: spectrum.step(solver.filter(k)))(steps)

    steps = path(*as_jax((y, args)), jnp.asarray(STEPS))
    for k, step in zip(STEPS, steps, strict=True):
        expected = descent_step(r, jacobian, k, 0.05, momentum)
        np.testing.assert_allclose(step, expected, rtol=1e-10, atol=1e-12)
    one = least_squares(sines, solver, *as_jax((y, args)), max_steps=1)
    np.testing.assert_allclose(y + steps[2], one.value, rtol=1e-10)


@pytest.mark.parametrize("method", ["eigh", "matrix-free"])
def test_a_zero_residual_is_where_descent_stays(method):
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)))
    solver = gnlin.IterativeLinearisation(7, 0.01, method=method)
    solution = least_squares(lambda y, a: a @ (y - 1), solver, jnp.ones(3), matrix)
    assert solution.result == optx.RESULTS.successful
    np.testing.assert_array_equal(solution.value, jnp.ones(3))


def test_a_period_is_the_same_number_as_a_float():
    """Steps are taken one by one if that is cheaper, also for a period that is a
    float."""
    periods = [gnlin.IterativeLinearisation(k, 0.1).period for k in (50, 50.0, math.inf)]
    assert periods == [50, 50, math.inf]
    assert [type(k) for k in periods] == [int, int, float]


def test_many_literal_steps_are_announced():
    """They are traced only, since they would take minutes."""
    model = (lambda w, x: w @ x), jnp.ones((3, 2))
    data, loss = (jnp.ones((5, 2)), jnp.zeros(5, int)), gnlin.SoftmaxCrossEntropy()

    def traced(**settings):
        solver = gnlin.IterativeLinearisation(10**6, 1e-5, **settings)
        run = lambda data: gnlin.solve(model, data, solver, loss=loss, max_steps=1).loss
        return jax.eval_shape(run, data)

    with pytest.warns(UserWarning, match='takes 1,000,000 steps one by one .*"flow"'):
        traced()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced(method="flow")
        traced(form="quadratic")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "most"),
    [
        pytest.param("auto", 1.02, id="auto"),
        pytest.param("eigh", 30.0, id="eigenvalues"),
    ],
)
def test_many_steps_in_single_precision(method, most):
    """Squares of small singular values are rounding there. The loss of the linearised
    model is compared with the formula in double precision; rounding made it 260 times as
    large by eigenvalues, which `auto` took, and larger than before the steps."""
    model = eqx.nn.MLP(1, 1, 20, 2, jnp.tanh, key=jax.random.key(0), dtype=jnp.float32)
    x = np.linspace(-2, 2, 20, dtype=np.float32)[:, None]
    y = jnp.asarray(np.sin(2 * x))
    solver = gnlin.IterativeLinearisation(10**8, 1e-3, method=method)
    trained = gnlin.solve(model, (x, y), solver, max_steps=1).model
    weights = jax.tree.map(jnp.subtract, *eqx.filter((trained, model), eqx.is_array))
    arrays, rest = eqx.partition(model, eqx.is_array)
    fn = lambda arrays: jax.vmap(eqx.combine(arrays, rest))(jnp.asarray(x))
    outputs, change = jax.jvp(fn, (arrays,), (weights,))
    loss = float(0.5 * np.sum((outputs + change - y) ** 2))

    rows = [np.reshape(a, (20, -1)) for a in jax.tree.leaves(jax.jacrev(fn)(arrays))]
    u, s, _ = np.linalg.svd(np.concatenate(rows, axis=1).astype(float))
    left = (1 - 1e-3 * s**2) ** 1e8 * (u.T @ np.asarray(outputs - y, float)[:, 0])
    expected = 0.5 * np.sum(left**2)
    assert expected / 1.02 < loss < most * expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "period"),
    [
        ("auto", 10**30),
        ("flow", 1e30),
        ("flow", 10**400),
    ],
)
def test_a_huge_period_is_an_infinite_one(method, period):
    def run(period):
        solver = gnlin.IterativeLinearisation(period, 0.1, method=method)
        line = lambda p, x: p[0] * x + p[1], jnp.ones(2)
        x = jnp.linspace(0.0, 1.0, 10)
        return gnlin.solve(line, (x, 2 * x), solver, max_steps=2).model[1]

    np.testing.assert_allclose(run(period), run(math.inf), atol=1e-8)


#
# Schedules
#


def growing(k):
    return 10 * (k + 1)


def falling(k):
    return 0.1 * 0.5**k


@pytest.mark.parametrize("method", ["svd", "matrix-free"])
def test_schedules_are_literal_steps(method):
    y, args = sines_data(TALL)
    solver = gnlin.IterativeLinearisation(growing, falling, 0.5, method=method)
    solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=4)
    expected = literal_loop(
        lambda r, jacobian, k: descent_step(r, jacobian, growing(k), falling(k), 0.5),
        *(y, args, 4),
    )
    np.testing.assert_allclose(solution.value, expected, rtol=1e-9)
    assert float(solution.stats["num_inner_steps"]) == 10 + 20 + 30 + 40


@pytest.mark.slow
def test_schedules_of_optax_in_single_precision():
    y, args = jax.tree.map(jnp.float32, as_jax(sines_data(TALL)))
    eta = optax.exponential_decay(0.1, 1, 0.5)
    scheduled = gnlin.IterativeLinearisation(growing, eta)
    solution = least_squares(sines, scheduled, y, args, max_steps=3)
    for k in range(3):
        constant = gnlin.IterativeLinearisation(growing(k), falling(k))
        y = least_squares(sines, constant, y, args, max_steps=1).value
    np.testing.assert_allclose(solution.value, y, rtol=1e-5)


def test_a_schedule_across_batches():
    """One linearisation has one inner step, the next one three, and the last one six."""
    period = lambda k: jnp.array([1, 3, 6])[k]
    eta = lambda k: jnp.array([0.02, 0.01, 0.005])[k]
    model = (lambda p, x: jnp.sin(p @ x)), jnp.array([0.3, -0.2])
    random = np.random.default_rng(0)
    x, targets = random.normal(size=(40, 2)), random.normal(size=40)
    solver = gnlin.IterativeLinearisation(period, eta)
    batches = [(x[4 * i : 4 * i + 4], targets[4 * i : 4 * i + 4]) for i in range(10)]
    loss = gnlin.SquaredError("sum")
    result = gnlin.fit(model, batches, solver, loss=loss, epochs=1)
    p, at = np.array([0.3, -0.2]), 0
    for k, number in enumerate([1, 3, 6]):
        start = p
        for x_now, y_now in batches[at : at + number]:
            slope = np.cos(x_now @ start)[:, None] * x_now
            outputs = np.sin(x_now @ start) + slope @ (p - start)
            p = p - [0.02, 0.01, 0.005][k] * slope.T @ (outputs - y_now)
        at += number
    np.testing.assert_allclose(result.model[1], p, rtol=1e-10)
    assert int(result.stats["num_feature_updates"]) == 3


def test_bad_schedules():
    y, args = as_jax(sines_data(TALL))
    for period, eta in ((lambda k: 2 - k, 0.1), (0.4, lambda k: 0.1), (3, lambda k: -k)):
        if not callable(period):
            period = lambda k, period=period: period
        solver = gnlin.IterativeLinearisation(period, eta)
        solution = least_squares(sines, solver, y, args, max_steps=5)
        assert solution.result == optx.RESULTS.nonfinite
    solver = gnlin.IterativeLinearisation(lambda k: [k], 0.1)
    with pytest.raises(ValueError, match="A schedule must return one number"):
        least_squares(sines, solver, y, args, max_steps=2)
    solver_without = gnlin.IterativeLinearisation(lambda: 3, 0.1)
    with pytest.raises(ValueError, match=r"called as `schedule\(num_steps\)`"):
        least_squares(sines, solver_without, y, args, max_steps=2)
    with pytest.raises(ValueError, match=r"solver\.at\(number\)\.filter\(\)"):
        solver.filter()


@pytest.mark.slow
def test_the_filter_of_a_schedule():
    solver = gnlin.IterativeLinearisation(growing, falling)
    w = jnp.array([0.0, 1.0, 5.0])
    np.testing.assert_allclose(solver.at(2).filter()(w), GradientDescent(30, 0.025)(w))
    constant = gnlin.IterativeLinearisation(10, 0.1)
    assert constant.at(2) is constant
