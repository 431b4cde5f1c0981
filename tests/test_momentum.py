"""SPRING's momentum and the grid along the step, compared with dense formulas."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from problems import as_jax, least_squares, SHAPES, sines, sines_data, sines_numpy

import gnlin


def pulled_step(r, jacobian, damping, towards):
    p = jacobian.shape[1]
    left = jacobian.T @ jacobian + damping * np.eye(p)
    return np.linalg.solve(left, damping * towards - jacobian.T @ r)


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("svd", "one residual"),
        ("kernel", "wide"),
        ("curvature", "tall"),
        ("matrix-free", "one parameter"),
        pytest.param("svd", "tall", marks=pytest.mark.exhaustive),
        pytest.param("auto", "square", marks=pytest.mark.exhaustive),
    ],
)
def test_damped_towards_a_part_of_the_last_step(method, shape):
    y, args = sines_data(SHAPES[shape])
    expected, step = y, np.zeros_like(y)
    for _ in range(3):
        step = pulled_step(*sines_numpy(expected, args), 0.5, 0.8 * step)
        expected = expected + step
    solver = gnlin.DampedGaussNewton(0.5, momentum=0.8, method=method)
    solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=3)
    np.testing.assert_allclose(solution.value, expected, rtol=1e-7, atol=1e-9)


def test_zero_momentum_has_no_effect():
    y, args = sines_data((7, 3))
    ends = [
        least_squares(sines, solver, *as_jax((y, args)), max_steps=4).value
        for solver in (
            gnlin.DampedGaussNewton(0.5),
            gnlin.DampedGaussNewton(0.5, momentum=0.0),
        )
    ]
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-12)


@pytest.mark.exhaustive
def test_other_units_and_another_loss():
    x = jax.random.normal(jax.random.key(1), (15, 3))
    net = eqx.nn.MLP(3, 4, 6, 1, jnp.tanh, key=jax.random.key(0))
    solver = gnlin.DampedGaussNewton(1.0, momentum=0.5, scaling="marquardt")
    data, loss = (x, jnp.arange(15) % 4), gnlin.SoftmaxCrossEntropy()
    solution = gnlin.solve(net, data, solver, loss=loss, max_steps=15)
    assert solution.loss < 0.5 * solution.history.loss[0]


@pytest.mark.exhaustive
def test_across_batches_and_resumed(tmp_path):
    x = jnp.linspace(-1, 1, 40)[:, None]
    net = eqx.nn.MLP(1, 1, 8, 1, jnp.tanh, key=jax.random.key(0))
    settings = {"batch_size": 10, "progress": False}
    solver, data = gnlin.DampedGaussNewton(0.1, momentum=0.9), (x, jnp.sin(3 * x))
    whole = gnlin.fit(net, data, solver, steps=8, **settings)
    gnlin.fit(net, data, solver, steps=5, checkpoint=tmp_path, **settings)
    again = gnlin.fit(
        net, data, solver, steps=8, checkpoint=tmp_path, resume=True, **settings
    )
    np.testing.assert_array_equal(whole.history.loss, again.history.loss)


def test_the_best_of_a_grid():
    y, args = sines_data((7, 3), size=2.0)
    r, jacobian = sines_numpy(y, args)
    direction = -np.linalg.solve(jacobian.T @ jacobian + 1e-3 * np.eye(3), jacobian.T @ r)
    parts = 0.5 ** np.arange(11.0)
    losses = [np.sum(sines_numpy(y + part * direction, args)[0] ** 2) for part in parts]
    expected = y + parts[np.argmin(losses)] * direction
    solver = gnlin.DampedGaussNewton(1e-3, search=gnlin.methods.GridSearch(10))
    solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=1)
    np.testing.assert_allclose(solution.value, expected, rtol=1e-9)


def test_a_grid_without_a_decrease():
    solver = gnlin.GaussNewton(search=gnlin.methods.GridSearch(3))
    solution = least_squares(
        lambda y, _: jnp.stack([y, y**0 * 1.0]), solver, jnp.zeros(())
    )
    assert solution.result == optx.RESULTS.successful
    assert float(solution.value) == 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gnlin.DampedGaussNewton(1.0, momentum=1.0), "`momentum` must"),
        (lambda: gnlin.DampedGaussNewton(1.0, momentum=-0.1), "`momentum` must"),
        (
            lambda: gnlin.DampedGaussNewton(1.0, momentum=0.5, form="prox-linear"),
            "no `momentum`",
        ),
        (lambda: gnlin.methods.GridSearch(0), "`num_halvings` must"),
        (lambda: gnlin.GaussNewton(search="grid"), "a `gnlin.methods.GridSearch`"),
    ],
)
def test_mistakes(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("method", ["curvature", "matrix-free"])
def test_the_curvature_along_the_gradient(method):
    y, args = sines_data((7, 3))
    r, jacobian = sines_numpy(y, args)
    lin = gnlin.linearise(sines, *as_jax((y, args)))
    problem = gnlin._linearisation._objective.SumOfSquares().expand(lin)
    kind, towards = gnlin.filters.Tikhonov(0.5), jnp.ones(3)
    way = gnlin._subproblem.way_of(problem, kind, 1, method)
    ready = lambda problem: gnlin._subproblem.choose(problem, kind, 1, method)
    found = gnlin._subproblem.pulled(problem, towards, way, ready)
    g = jacobian.T @ r
    np.testing.assert_allclose(
        found.curvature_along_gradient(), np.sum((jacobian @ g) ** 2) / (g @ g)
    )


@pytest.mark.slow
def test_momentum_with_scales_where_the_problem_is_matrix_free():
    """The scales are other variables, in which the pull is another one."""
    x = np.linspace(0, 1, 80)
    data = {"k": np.arange(80), "x": x}
    group = gnlin.Residuals(
        lambda p, d: p - jnp.sin(3 * d["x"]), data, select=lambda d: d["k"]
    )
    found = {}
    for scaling in ("identity", "marquardt"):
        solver = gnlin.DampedGaussNewton(
            0.1, scaling=scaling, momentum=0.5, memory_budget=1500
        )
        found[scaling] = gnlin.solve(jnp.zeros(80), group, solver, max_steps=5).model
    # All columns have length 1.
    np.testing.assert_allclose(*found.values(), atol=1e-6)
