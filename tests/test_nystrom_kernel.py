"""A kernel of lower rank from random products, compared with the same in NumPy."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from problems import damped_step, drawn, each_once, least_squares

import gnlin
from gnlin.filters import Tikhonov


def sines(y, matrix):
    return jnp.sin(matrix @ y) + 0.5


def data(shape, dtype: Any = np.float64):
    matrix = np.random.default_rng(0).normal(size=shape) * np.geomspace(1, 0.01, shape[1])
    return jnp.linspace(-0.5, 0.5, shape[1], dtype=dtype), jnp.asarray(matrix, dtype)


def expanded(y, matrix, **settings):
    lin = gnlin.linearise(sines, y, matrix, **settings)
    return gnlin.authoring.Quadratic(lin.jacobian, lin.outputs)


def by_hand(jacobian, residual, rank, damping, seed=0):
    """Compute equation (7) of arXiv:2505.12149 literally. The approximation depends only
    on the span of the probes."""
    m = len(jacobian)
    probes = np.asarray(jax.random.normal(jax.random.key(seed), (m, min(rank, m))), float)
    kernel = jacobian @ jacobian.T
    sketch = kernel @ probes
    low = sketch @ np.linalg.pinv(probes.T @ sketch, rcond=1e-12) @ sketch.T
    return -jacobian.T @ np.linalg.solve(low + damping * np.eye(m), residual)


SHAPES = [(30, 8), (8, 30), (9, 9), (1, 6), (6, 1)]


@pytest.mark.parametrize(("shape", "rank"), each_once(SHAPES, [1, 4, 100]))
def test_a_step_is_the_formula(shape, rank):
    @jax.jit
    def run(y, matrix):
        method = gnlin.methods.NystromKernel(rank, seed=3)
        way = gnlin.authoring.choose(expanded(y, matrix), Tikhonov(0.1), method=method)
        answer = way.solve(Tikhonov(0.1))
        found = answer.step, answer.decrease, way.gradient_norm
        return found, jax.jacobian(sines)(y, matrix), sines(y, matrix)

    (step, found_decrease, norm), *known = run(*data(shape))
    jacobian, r = map(np.asarray, known)
    expected = by_hand(jacobian, r, rank, 0.1, seed=3)
    size = np.abs(expected).max()
    np.testing.assert_allclose(step, expected, atol=1e-8 * size)
    decrease = 0.5 * r @ r - 0.5 * np.sum((r + jacobian @ expected) ** 2)
    assert found_decrease is not None
    np.testing.assert_allclose(found_decrease, decrease, rtol=1e-7)
    np.testing.assert_allclose(norm, np.linalg.norm(jacobian.T @ r))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param((30, 8), np.float32, marks=pytest.mark.slow),
        ((8, 30), np.float64),
    ],
)
def test_full_rank_gives_the_damped_step(shape, dtype):
    y, matrix = data(shape, dtype)
    solver = gnlin.DampedGaussNewton(0.1, method=gnlin.methods.NystromKernel(shape[0]))
    found = optx.least_squares(sines, solver, y, matrix, max_steps=1, throw=False)
    start, dense = (np.asarray(x, float) for x in (y, matrix))
    angles = dense @ start
    step = damped_step(np.sin(angles) + 0.5, np.cos(angles)[:, None] * dense, 0.1)
    tolerance = 1e-3 if dtype == np.float32 else 1e-9
    np.testing.assert_allclose(found.value - y, step, atol=tolerance * np.abs(step).max())


def test_an_array_too_large_for_the_budget_is_passed_through_instead():
    counts, method = [], gnlin.methods.NystromKernel(5)

    @jax.jit
    def run(y, matrix):
        steps = []
        for memory_budget in (2**31, 300):
            problem = expanded(y, matrix, memory_budget=memory_budget)
            way = gnlin.authoring.choose(problem, Tikhonov(0.1), method=method)
            steps.append(way.solve(Tikhonov(0.1)).step)
            counts.append(way.passes.number())
        return steps

    np.testing.assert_allclose(*run(*data((30, 8))), rtol=1e-9)
    assert counts[0] != counts[1] == 2 * 5 + 1


def test_one_approximation_serves_for_several_residuals():
    filter, method = Tikhonov(0.1), gnlin.methods.NystromKernel(5)

    @jax.jit
    def steps(y, matrix, other):
        problem = expanded(y, matrix)
        way = gnlin.authoring.choose(problem, filter, method=method)
        another = problem.with_residual(other)
        anew = gnlin.authoring.choose(another, filter, method=method)
        return [x.solve(filter).step for x in (way.with_residual(other), anew)]

    found = steps(*data((30, 8)), np.cos(np.arange(30.0)))
    np.testing.assert_allclose(*found, rtol=1e-12)


@pytest.mark.parametrize("damping", [0.1, 1e-5])
def test_single_precision_at_little_damping(damping):
    """At full rank, rounding is not divided by the damping."""

    @jax.jit
    def run(y, matrix):
        method = gnlin.methods.NystromKernel(40)
        way = gnlin.authoring.choose(
            expanded(y, matrix), Tikhonov(damping), method=method
        )
        step = way.solve(Tikhonov(damping)).step
        return step, jax.jacobian(sines)(y, matrix), sines(y, matrix)

    found = run(*data((40, 200), np.float32))
    step, jacobian, r = (np.asarray(x, float) for x in found)
    kernel = jacobian @ jacobian.T + damping * np.eye(40)
    expected = -jacobian.T @ np.linalg.solve(kernel, r)
    error = np.linalg.norm(step - expected)
    assert error < 1e-3 * np.linalg.norm(expected)


@pytest.mark.slow
def test_a_step_uphill_raises_the_damping():
    """The probes see too few of 50 equal eigenvalues. With little damping the step is far
    too long, and the linearised loss itself rises along it."""
    matrix, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(50, 50)))

    def residuals(y, matrix):
        return matrix @ y + 0.1 * jnp.sin(3 * y) - 1

    y, method = jnp.zeros(50), gnlin.methods.NystromKernel(1)

    @jax.jit
    def decrease(y, matrix):
        lin = gnlin.linearise(residuals, y, matrix)
        problem = gnlin.authoring.Quadratic(lin.jacobian, lin.outputs)
        way = gnlin.authoring.choose(problem, Tikhonov(1e-3), method=method)
        return way.solve(Tikhonov(1e-3)).decrease

    assert decrease(y, jnp.asarray(matrix)) < 0
    solver = gnlin.LevenbergMarquardt(method=method)
    found = optx.least_squares(residuals, solver, y, jnp.asarray(matrix), throw=False)
    assert found.result == optx.RESULTS.successful
    assert found.stats["num_accepted_steps"] >= found.stats["num_steps"] - 3
    assert np.linalg.norm(residuals(found.value, matrix)) < 1e-10


def network(width=40, depth=1):
    return drawn(eqx.nn.MLP, 2, 3, width, depth, jnp.tanh)


X = np.random.default_rng(1).normal(size=(40, 2))
LABELS = (X > 0).sum(axis=1)
ONE_HOT = np.eye(3)[LABELS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (gnlin.SoftmaxCrossEntropy(), LABELS),
        (gnlin.losses.Huber(delta=0.1), ONE_HOT),
    ],
)
def test_a_general_loss(loss, targets):
    """The rank is full, and there are layers. Huber's gradient is not in the range of the
    curvature."""
    solvers = (
        gnlin.DampedGaussNewton(0.1, method=method, search=None)
        for method in ("kernel", gnlin.methods.NystromKernel(120))
    )
    one, two = (
        gnlin.solve(network(), (X, targets), solver, loss=loss, max_steps=1).loss
        for solver in solvers
    )
    np.testing.assert_allclose(one, two, rtol=1e-9)


@pytest.mark.slow
def test_a_network_is_trained_with_momentum():
    method = gnlin.methods.NystromKernel(60)
    solver = gnlin.DampedGaussNewton(1.0, momentum=0.5, method=method)
    solution = gnlin.solve(network(16, 2), (X, ONE_HOT), solver, max_steps=40)
    assert solution.loss < 0.1 * solution.history.loss[0]


def test_without_damping_there_is_no_step():
    solver = gnlin.DampedGaussNewton(0.0, method=gnlin.methods.NystromKernel(20))
    model = drawn(eqx.nn.Linear, 2, 3)
    with pytest.warns(UserWarning, match="linear solve"):
        solution = gnlin.solve(model, (X, jnp.ones((40, 3))), solver, max_steps=3)
    assert solution.result == optx.RESULTS.singular


def test_zero_and_nonfinite_residuals():
    solver = gnlin.DampedGaussNewton(0.1, method=gnlin.methods.NystromKernel(2))
    residuals = lambda y, matrix: matrix @ y - 1
    y, broken = jnp.ones(2), np.diag([np.nan, 1.0])
    solution = least_squares(residuals, solver, y, jnp.eye(2), max_steps=5)
    assert solution.result == optx.RESULTS.successful
    np.testing.assert_array_equal(solution.value, y)
    solution = least_squares(residuals, solver, y, jnp.asarray(broken), max_steps=5)
    assert solution.result == optx.RESULTS.nonfinite
    np.testing.assert_array_equal(solution.value, y)


MAKE: Any = gnlin.methods.NystromKernel


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: gnlin.methods.NystromKernel(0),
            "`rank` must be a whole number of at least 1",
        ),
        (lambda: MAKE(2.5), "`rank` must be a whole number"),
        (lambda: MAKE(2, seed="a"), "`seed` must be a whole number"),
        (
            lambda: gnlin.DampedGaussNewton(1.0, method=MAKE),
            "a `gnlin.methods.NystromKernel` or a solver of lineax here",
        ),
        (
            lambda: gnlin.DampedGaussNewton(
                1.0, method=gnlin.methods.NystromKernel(3), form="prox-linear"
            ),
            "is for quadratic problems",
        ),
        (
            lambda: gnlin.GaussNewton(method=gnlin.methods.NystromKernel(3)),
            "`method` must be one of",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
