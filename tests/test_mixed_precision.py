"""With a kernel in lower precision, the step is as accurate as requested."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from jax.flatten_util import ravel_pytree
from problems import damped_step, drawn, least_squares, numbers

import gnlin


def network(dtype=float):
    return drawn(eqx.nn.MLP, 3, 2, 24, 1, activation=jnp.tanh, dtype=dtype)


def first_step(model, data, solver, loss=None):
    solution = gnlin.solve(
        model, data, solver, loss=loss or gnlin.SquaredError(), max_steps=1
    )
    return numbers(solution.model) - numbers(model), solution


X = np.random.default_rng(1).normal(size=(15, 3))
Y = np.stack([np.sin(X[:, 0]), X[:, 1] * X[:, 2]], axis=1)


@functools.cache
def residual_and_jacobian():
    parameters, frozen = eqx.partition(network(), eqx.is_inexact_array)
    flat, unravel = ravel_pytree(parameters)

    @jax.jit
    def both(v):
        fn = lambda v: jax.vmap(eqx.combine(unravel(v), frozen))(X).ravel()
        return fn(v), jax.jacobian(fn)(v)

    outputs, jacobian = map(np.asarray, both(flat))
    return outputs - Y.ravel(), jacobian


@pytest.mark.parametrize(
    ("dtype", "damping", "memory_budget"),
    [
        ("float32", 1e-4, 2**31),
        ("bfloat16", 1e-4, 3000),
        (jnp.float16, 0.1, 3000),
    ],
)
def test_the_step_matches_double_precision(dtype, damping, memory_budget):
    exact = damped_step(*residual_and_jacobian(), damping)
    solver = gnlin.DampedGaussNewton(
        damping,
        method=gnlin.methods.MixedPrecision(dtype, 1e-11),
        memory_budget=memory_budget,
    )
    step, solution = first_step(network(), (X, Y), solver)
    assert solution.result != optx.RESULTS.singular
    np.testing.assert_allclose(step, exact, atol=1e-7 * np.linalg.norm(exact))
    assert float(solution.history.num_inner_steps[0]) > 0


@pytest.mark.slow
def test_a_coarse_tolerance_takes_fewer_refinements():
    steps = []
    for tolerance in (1e-2, 1e-11):
        solver = gnlin.DampedGaussNewton(
            0.1, method=gnlin.methods.MixedPrecision("bfloat16", tolerance)
        )
        _, solution = first_step(network(), (X, Y), solver)
        steps.append(float(solution.history.num_inner_steps[0]))
    assert steps[0] < steps[1]


@pytest.mark.slow
def test_a_general_loss():
    model = eqx.nn.Linear(3, 4, dtype=float, key=jax.random.key(0))
    labels = jnp.arange(15) % 4
    loss = gnlin.SoftmaxCrossEntropy()
    exact, _ = first_step(model, (X, labels), gnlin.DampedGaussNewton(0.1), loss)
    solver = gnlin.DampedGaussNewton(0.1, method=gnlin.methods.MixedPrecision())
    step, _ = first_step(model, (X, labels), solver, loss)
    np.testing.assert_allclose(step, exact, atol=1e-7 * np.linalg.norm(exact))


@pytest.mark.slow
def test_single_parameters_with_a_bfloat16_kernel():
    model, data = network(jnp.float32), (X.astype("f4"), Y.astype("f4"))
    exact, _ = first_step(network(), (X, Y), gnlin.DampedGaussNewton(0.5))
    solver = gnlin.DampedGaussNewton(
        0.5, method=gnlin.methods.MixedPrecision("bfloat16", 1e-5)
    )
    step, _ = first_step(model, data, solver)
    np.testing.assert_allclose(step, exact, atol=1e-3 * np.linalg.norm(exact))


def residuals(y, args):
    return args @ y - 1


@pytest.mark.parametrize("shape", [(9, 5), (1, 6)])
def test_shapes_and_ranks(shape):
    matrix = np.random.default_rng(0).normal(size=shape)
    matrix[:, -1] = matrix[:, 0]
    solver = gnlin.DampedGaussNewton(0.1, method=gnlin.methods.MixedPrecision())
    y = jnp.zeros(shape[1])
    solution = optx.least_squares(
        residuals, solver, y, jnp.asarray(matrix), max_steps=1, throw=False
    )
    damped = matrix.T @ matrix + 0.1 * np.eye(shape[1])
    expected = np.linalg.solve(damped, matrix.T @ np.ones(shape[0]))
    np.testing.assert_allclose(solution.value, expected, rtol=1e-7, atol=1e-9)


def test_zero_and_nonfinite_residuals():
    solver = gnlin.DampedGaussNewton(0.1, method=gnlin.methods.MixedPrecision())
    y, broken = jnp.ones(2), np.diag([np.nan, 1.0])
    solution = least_squares(residuals, solver, y, jnp.eye(2), max_steps=5)
    assert solution.result == optx.RESULTS.successful
    np.testing.assert_array_equal(solution.value, y)
    solution = least_squares(residuals, solver, y, jnp.asarray(broken), max_steps=5)
    assert solution.result != optx.RESULTS.successful
    np.testing.assert_array_equal(solution.value, y)


def test_an_unmet_tolerance_is_not_a_success():
    generator = np.random.default_rng(0)
    u, _ = np.linalg.qr(generator.normal(size=(8, 8)))
    matrix = jnp.asarray(u @ np.diag(np.geomspace(1, 1e-9, 8)) @ u.T)
    precision = gnlin.methods.MixedPrecision("float32", 1e-300)
    solver = gnlin.DampedGaussNewton(1e-14, method=precision)
    solution = optx.least_squares(
        residuals, solver, jnp.zeros(8), matrix, max_steps=1, throw=False
    )
    assert solution.result not in (optx.RESULTS.successful,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: gnlin.methods.MixedPrecision("float64"),
            "`kernel_dtype` must be",
        ),
        (lambda: gnlin.methods.MixedPrecision("int8"), "`kernel_dtype` must be"),
        (lambda: gnlin.methods.MixedPrecision(3), "`kernel_dtype` must be"),
        (
            lambda: gnlin.methods.MixedPrecision(tolerance=0.0),
            "`tolerance` must lie strictly between 0 and 1",
        ),
        *(
            (
                lambda given=given: gnlin.DampedGaussNewton(1.0, method=given),
                "must be one of .* `gnlin.methods.MixedPrecision`, .* or a .* of lineax",
            )
            for given in (True, "float32", gnlin.methods.MixedPrecision)
        ),
        (
            lambda: gnlin.DampedGaussNewton(
                1.0, method=gnlin.methods.MixedPrecision(), form="prox-linear"
            ),
            "is for quadratic problems",
        ),
        (
            lambda: gnlin.GaussNewton(method=gnlin.methods.MixedPrecision()),
            "`method` must be one of",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


LINE = np.linspace(-1, 1, 20)[:, None]
OUTLIERS = 3 * LINE + 1 + 50 * (np.arange(20) % 5 == 0)[:, None]


def huber_step(damping):
    solver = gnlin.DampedGaussNewton(damping, method=gnlin.methods.MixedPrecision())
    data, loss = (LINE, OUTLIERS), gnlin.losses.Huber(5.0)
    return first_step(drawn(eqx.nn.Linear, 1, 1), data, solver, loss)[0]


def test_a_gradient_that_the_curvature_does_not_reach():
    slope, start = numbers(drawn(eqx.nn.Linear, 1, 1))
    jacobian = np.concatenate([LINE, np.ones_like(LINE)], axis=1)
    residual = (slope * LINE + start - OUTLIERS)[:, 0]
    curved = jacobian[np.abs(residual) < 5]
    gradient = jacobian.T @ np.clip(residual, -5, 5)
    exact = -np.linalg.solve(curved.T @ curved + 1e-4 * np.eye(2), gradient)
    np.testing.assert_allclose(huber_step(1e-4), exact, rtol=1e-3)


def test_an_unreached_gradient_with_tiny_damping_is_reported_as_failure():
    with pytest.warns(UserWarning, match="linear solve"):
        step = huber_step(1e-12)
    np.testing.assert_array_equal(step, 0)


@pytest.mark.parametrize("kernel_dtype", ["float32", "bfloat16"])
def test_the_default_serves_in_single_precision(kernel_dtype):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(40, 60)).astype(np.float32)
    data = x, draw.normal(size=(40, 1)).astype(np.float32)
    method = gnlin.methods.MixedPrecision(kernel_dtype)
    fn = lambda w, data: data[0] @ w - data[1][:, 0]
    for damping in (10.0, 0.1):
        found = least_squares(
            fn,
            gnlin.DampedGaussNewton(jnp.float32(damping), method=method),
            jnp.zeros(60, jnp.float32),
            jax.tree.map(jnp.asarray, data),
            max_steps=1,
        )
        assert found.result == optx.RESULTS.nonlinear_max_steps_reached
        kernel = x.astype(float) @ x.T.astype(float) + damping * np.eye(40)
        expected = x.T @ np.linalg.solve(kernel, data[1][:, 0])
        error = np.linalg.norm(np.asarray(found.value) - expected)
        assert error < 2e-3 * np.linalg.norm(expected)
