"""Functions without a derivative, which would end as converged where they start."""

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import gnlin


START = jnp.array([1.0, 0.5, 0.2])
WHOLE = {
    "int": lambda p: jnp.round(100 * p).astype(int),
    "bool": lambda p: p > 1,
    "a part": lambda p: {"a": p - 1, "b": (10 * p).astype(int)},
    "and back": lambda p: {"a": p - 1, "b": (10 * p).astype(int).astype(p.dtype)},
}
FLAT = {
    "round": lambda p: jnp.round(100 * p),
    "sign": jnp.sign,
    "stop_gradient": lambda p: jax.lax.stop_gradient(jnp.exp(p)),
    "count": lambda p: jnp.sum(p > 0.3, keepdims=True).astype(float),
    "cond": lambda p: jax.lax.cond(p[0] > 0, jnp.round, jnp.floor, p),
    "and back": lambda p: (100 * p).astype(int).astype(float),
}
SOLVERS = gnlin.LevenbergMarquardt(), gnlin.GaussNewton(method="matrix-free")


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_are_refused_through_optimistix(name):
    residuals = lambda p, _: WHOLE[name](p)
    for start in (START, START.astype(jnp.float32)):
        with pytest.raises(ValueError, match=r"of dtype (int|bool).*compute with floats"):
            optx.least_squares(residuals, gnlin.LevenbergMarquardt(), start)


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("solver", SOLVERS)
def test_functions_without_a_derivative_are_refused(name, solver):
    residuals = lambda p, _: FLAT[name](p)
    message = "no derivative with respect to any parameter|compute with floats"
    with pytest.raises(ValueError, match=message):
        optx.least_squares(residuals, solver, START)
    with pytest.raises(ValueError, match=message):
        gnlin.solve(START, gnlin.Residuals(residuals), solver)


@pytest.mark.slow
def test_a_flat_part_is_allowed():
    """Compared with the closed form: the flat part does not pull."""
    groups = {
        "data": gnlin.Residuals(lambda p, _: p - 3.0),
        "flat": gnlin.Residuals(lambda p, _: jnp.ones(2)),
    }
    solver = gnlin.LevenbergMarquardt()
    found = optx.least_squares(gnlin.Groups(groups), solver, START).value
    np.testing.assert_allclose(found, 3.0, rtol=1e-9)
    assert not gnlin.linearise(lambda p, _: jnp.round(p), START).matrix().any()


def test_data_may_be_whole_numbers():
    counts = jnp.array([3, 5, 8])
    solver = gnlin.LevenbergMarquardt()
    found = optx.least_squares(
        lambda p, y: p - y.astype(p.dtype), solver, START, counts
    ).value
    np.testing.assert_allclose(found, counts, rtol=1e-9)


def test_a_curve_of_whole_numbers_is_refused():
    t = jnp.linspace(0, 4, 50)
    y = 250 * jnp.exp(-1.3 * t)
    counts = lambda p, t: jnp.round(p[0] * jnp.exp(-p[1] * t))
    for curve in (lambda p, t: counts(p, t).astype(int), lambda p, t: counts(p, t) > 1):
        for in_parts in (False, True):
            with pytest.raises(ValueError, match="must be of floats, but is of dtype"):
                gnlin.curve_fit(curve, t, y, START[:2], in_parts=in_parts)
    with pytest.raises(ValueError, match="no derivative with respect to any parameter"):
        gnlin.curve_fit(counts, t, y, START[:2])
