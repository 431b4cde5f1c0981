"""Damped systems by a factorisation that is made once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import each_pair

import gnlin


FILTER = gnlin.filters.Tikhonov(0.3)


def problem(shape, dtype=float, rest=False):
    rng = np.random.default_rng(0)
    a, b = (
        jnp.asarray(x, dtype) for x in (rng.normal(size=shape), rng.normal(size=shape[0]))
    )
    lin = gnlin.linearise(lambda y, _: a @ y + b, jnp.zeros(shape[1], dtype))
    quadratic = gnlin.SumOfSquares().expand(lin)
    if rest:
        quadratic = gnlin.Quadratic(
            quadratic.jacobian, quadratic.residual, jnp.ones(shape[1], dtype)
        )
    return quadratic, np.asarray(a, float), np.asarray(b, float)


@pytest.mark.parametrize(
    ("method", "dtype", "shape"),
    each_pair(
        ["kernel", "curvature", "svd", "matrix-free"],
        [jnp.float32, jnp.float64],
        [(7, 3), (3, 7), (4, 4), (1, 1)],
    ),
)
def test_other_residuals_by_the_same_factorisation(shape, dtype, method):
    quadratic, a, b = problem(shape, dtype)
    ready = gnlin.choose(quadratic, FILTER, method=method).factorised(FILTER)
    other = jnp.cos(jnp.arange(shape[0], dtype=dtype))
    system = a.T @ a + 0.3 * np.eye(shape[1])
    tolerance = 1e-4 if dtype == jnp.float32 else 1e-9
    for held, residual in ((ready, b), (ready.with_residual(other), np.asarray(other))):
        expected = -np.linalg.solve(system, a.T @ residual)
        step = held.solve(FILTER).step
        np.testing.assert_allclose(step, expected, rtol=tolerance, atol=tolerance)
        assert step.dtype == dtype


@pytest.mark.parametrize("method", ["kernel", "curvature"])
def test_with_a_rest(method):
    quadratic, a, b = problem((4, 6), rest=True)
    ready = gnlin.choose(quadratic, FILTER, method=method).factorised(FILTER)
    expected = -np.linalg.solve(a.T @ a + 0.3 * np.eye(6), a.T @ b + 1)
    np.testing.assert_allclose(ready.solve(FILTER).step, expected, rtol=1e-9)


@pytest.mark.parametrize("method", ["kernel", "curvature"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["jacobian", "residual"])
def test_what_is_not_finite_comes_out_as_nan(where, bad, method):
    a, b = jnp.eye(3), jnp.ones(3)
    if where == "jacobian":
        a = a.at[0, 0].set(bad)
    else:
        b = b.at[0].set(bad)
    lin = gnlin.linearise(lambda y, _: a @ y + b, jnp.zeros(3))
    ready = gnlin.choose(gnlin.SumOfSquares().expand(lin), FILTER, method=method)
    for each in (ready, ready.factorised(FILTER)):
        assert not np.all(np.isfinite(each.solve(FILTER).step))


@pytest.mark.parametrize("method", ["kernel", "curvature"])
def test_what_is_factorised_is_not_factorised_again(method):
    quadratic, _, _ = problem((4, 4))
    way = gnlin.choose(quadratic, FILTER, method=method)
    program = lambda way: str(jax.make_jaxpr(lambda: way.solve(FILTER).step)())
    assert "cholesky" in program(way)
    assert "cholesky" not in program(way.factorised(FILTER))
