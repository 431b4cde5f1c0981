"""Damped systems that reuse one factorisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import each_pair

import gnlin
from gnlin._subproblem._prox_linear import ProxLinear


FILTER = gnlin.filters.Tikhonov(0.3)


def numbers(shape):
    rng = np.random.default_rng(0)
    return rng.normal(size=shape), rng.normal(size=shape[0])


def problem(shape, dtype=float, rest=False):
    a, b = (jnp.asarray(x, dtype) for x in numbers(shape))
    lin = gnlin.linearise(lambda y, _: a @ y + b, jnp.zeros(shape[1], dtype))
    quadratic = gnlin.authoring.SumOfSquares().expand(lin)
    if rest:
        quadratic = gnlin.authoring.Quadratic(
            quadratic.jacobian, quadratic.residual, jnp.ones(shape[1], dtype)
        )
    return quadratic


@pytest.mark.parametrize(
    ("method", "dtype", "shape"),
    each_pair(
        ["kernel", "curvature", "cholesky-qr", "svd", "matrix-free"],
        [jnp.float32, jnp.float64],
        [(7, 3), (3, 7), (4, 4), (1, 1)],
    ),
)
def test_other_residuals_by_the_same_factorisation(shape, dtype, method):
    a, b = numbers(shape)
    other = np.cos(np.arange(shape[0]))

    @jax.jit
    def steps(other):
        quadratic = problem(shape, dtype)
        ready = gnlin.authoring.choose(quadratic, FILTER, method=method).factorised(
            FILTER
        )
        both = ready, ready.with_residual(other)
        return [held.solve(FILTER).step for held in both]

    system = a.T @ a + 0.3 * np.eye(shape[1])
    tolerance = 1e-4 if dtype == jnp.float32 else 1e-9
    found = steps(jnp.asarray(other, dtype))
    for step, residual in zip(found, (b, other), strict=True):
        expected = -np.linalg.solve(system, a.T @ residual)
        np.testing.assert_allclose(step, expected, rtol=tolerance, atol=tolerance)
        assert step.dtype == dtype


@pytest.mark.parametrize("method", ["kernel", "curvature", "cholesky-qr"])
def test_with_a_rest(method):
    @jax.jit
    def step():
        quadratic = problem((4, 6), rest=True)
        ready = gnlin.authoring.choose(quadratic, FILTER, method=method).factorised(
            FILTER
        )
        return ready.solve(FILTER).step

    a, b = numbers((4, 6))
    expected = -np.linalg.solve(a.T @ a + 0.3 * np.eye(6), a.T @ b + 1)
    np.testing.assert_allclose(step(), expected, rtol=1e-9)


@functools.partial(jax.jit, static_argnums=0)
def steps_of(method, a, b):
    lin = gnlin.linearise(lambda y, _: a @ y + b, jnp.zeros(3))
    ready = gnlin.authoring.choose(
        gnlin.authoring.SumOfSquares().expand(lin), FILTER, method=method
    )
    return [each.solve(FILTER).step for each in (ready, ready.factorised(FILTER))]


@pytest.mark.parametrize("method", ["kernel", "curvature", "cholesky-qr"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["jacobian", "residual"])
def test_nonfinite_input_gives_nan(where, bad, method):
    a, b = jnp.eye(3), jnp.ones(3)
    if where == "jacobian":
        a = a.at[0, 0].set(bad)
    else:
        b = b.at[0].set(bad)
    for step in steps_of(method, a, b):
        assert not np.all(np.isfinite(step))


@pytest.mark.parametrize("method", ["kernel", "curvature", "cholesky-qr"])
def test_factorisations_are_reused(method):
    way = gnlin.authoring.choose(problem((4, 4)), FILTER, method=method)
    program = lambda way: str(jax.make_jaxpr(lambda: way.solve(FILTER).step)())
    assert "cholesky" in program(way)
    assert "cholesky" not in program(way.factorised(FILTER))


@pytest.mark.parametrize("method", ["kernel", "curvature", "cholesky-qr"])
def test_a_filter_without_damping_is_refused_by_the_methods_name(method):
    ready = gnlin.authoring.choose(problem((7, 3)), FILTER, method=method)
    with pytest.raises(ValueError, match=f"{method!r} cannot be used for `GradientFlow`"):
        ready.solve(gnlin.filters.GradientFlow(1.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["kernel", "curvature", "svd", "matrix-free", "prox-linear"]
)
def test_the_curvature_along_the_gradient_in_any_units(method):
    """The squares of the gradient under- or overflow in single precision."""
    a, b = (jnp.asarray(x, jnp.float32) for x in numbers((7, 3)))

    def along(b, scale):
        lin = gnlin.linearise(lambda y, _: scale * (a @ y + b), jnp.zeros_like(a[0]))
        objective = gnlin.authoring.SumOfSquares()
        if method == "prox-linear":
            problem = ProxLinear(lin.jacobian, lin.outputs, objective)
            ready = gnlin.authoring.choose(problem, FILTER, method="matrix-free")
        else:
            ready = gnlin.authoring.choose(objective.expand(lin), FILTER, method=method)
        return ready.curvature_along_gradient() / scale / scale

    def formula(b):
        gradient = a.T @ b
        return jnp.sum((a @ gradient) ** 2) / jnp.sum(gradient**2)

    found = jax.jit(jax.value_and_grad(along))
    value, derivative = formula(b), jax.grad(formula)(b)
    for scale in (1e-12, 1.0, 1e12):
        here, slope = found(b, jnp.float32(scale))
        np.testing.assert_allclose(here, value, rtol=1e-4)
        np.testing.assert_allclose(slope, derivative, rtol=1e-3, atol=1e-4)
    here, slope = found(0 * b, jnp.float32(1))
    assert here == 0
    np.testing.assert_array_equal(slope, np.zeros(7))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["kernel", "curvature", "cholesky-qr", "svd"])
def test_the_largest_curvature_is_near_the_largest_eigenvalue(method):
    """Also where the gradient is zero, or along a small eigenvalue."""
    a = jnp.diag(jnp.array([1.0, 1e-3]))
    for residual in (jnp.zeros(2), jnp.array([0.0, 1.0])):
        quadratic = gnlin.authoring.Quadratic(
            gnlin.linearise(lambda y, _: a @ y, jnp.ones(2)).jacobian, residual
        )
        ready = gnlin.authoring.choose(quadratic, FILTER, method=method)
        np.testing.assert_allclose(ready.largest_curvature(), 1)


def test_a_method_of_your_own_without_a_name_refuses_a_filter():
    class Dense(gnlin.authoring.AbstractMethod):
        @classmethod
        def of(cls, problem, cost):
            return cls(problem.at_hand(), cost.rows)

        def solve(self, filter):
            return gnlin.authoring.Answer(self.gradient(), self.damping_of(filter))

    ready = gnlin.authoring.choose(problem((3, 2)), FILTER, method=Dense)
    with pytest.raises(ValueError, match="'Dense' cannot be used for `GradientFlow`"):
        ready.solve(gnlin.filters.GradientFlow(1.0))
