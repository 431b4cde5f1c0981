"""The user's functions multiply matrices in full precision, unless JAX is set
otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from jax.extend.core import primitives
from problems import equations

import gnlin


x = jnp.linspace(-1.0, 1.0, 12, dtype=jnp.float32)
y = jnp.tanh(2 * x)
start = jnp.array([[0.5], [1.0]], jnp.float32)
solver = gnlin.DampedGaussNewton(1.0)


def of_point(w, point):
    """One product of matrices, and the setting in which it is traced."""
    seen.append(jax.config.jax_default_matmul_precision)
    return jnp.tanh(jnp.stack([point, jnp.ones_like(point)])[None] @ w)[0, 0]


seen: list[str | None] = []

runs = {
    "a model": lambda: gnlin.solve((of_point, start), (x, y), solver, max_steps=1),
    "residuals": lambda: gnlin.solve(
        start,
        gnlin.Residuals(lambda w, xy: of_point(w, xy[0]) - xy[1], (x, y)),
        solver,
        max_steps=1,
    ),
    "batches": lambda: gnlin.fit(
        (of_point, start), (x, y), solver, batch_size=4, steps=1, progress=False
    ),
    "a curve": lambda: gnlin.curve_fit(
        lambda w, x: jax.vmap(lambda one: of_point(w, one))(x), x, y, start
    ),
    "a kernel": lambda: gnlin.TangentKernel((of_point, start))(x),
}


@pytest.mark.parametrize(
    ("name", "asked"), [*((name, None) for name in runs), ("a kernel", "tensorfloat32")]
)
@pytest.mark.filterwarnings("ignore:.*max_steps")
def test_the_setting_in_which_a_function_is_traced(name, asked):
    seen.clear()
    with jax.default_matmul_precision(asked):
        runs[name]()
    assert set(seen) == {asked or "highest"}
    assert jax.config.jax_default_matmul_precision is None


def test_products_of_a_run_have_full_precision():
    def run(w):
        return gnlin.solve((of_point, w), (x, y), max_steps=2).loss

    program = jax.make_jaxpr(run)(start).jaxpr
    found = [e for e in equations(program) if e.primitive is primitives.dot_general_p]
    full = jax.lax.Precision.HIGHEST
    assert len(found) > 2
    assert all(e.params["precision"] in (full, (full, full)) for e in found)
    np.testing.assert_array_less(run(start), 0.1)


@pytest.mark.slow
def test_many_rows_in_single_precision():
    # max(m, p) eps would exceed the quotient of the singular values.
    m = 400_000
    x = np.random.default_rng(0).uniform(0, 1, m).astype(np.float32)
    powers = np.arange(5)
    y = (x[:, None] ** powers).sum(axis=1) + np.sin(1e4 * x) / 10
    y = y.astype(np.float32)

    def line(c, x):
        return jnp.polyval(c[::-1], x)

    start = jnp.zeros(5, jnp.float32)
    fit = gnlin.curve_fit(line, jnp.asarray(x), jnp.asarray(y), start)
    matrix = x.astype(float)[:, None] ** powers
    exact, (chi_squared,), *_ = np.linalg.lstsq(matrix, y.astype(float), rcond=None)
    inverse = np.linalg.inv(matrix.T @ matrix) * chi_squared / (m - 5)
    errors = np.sqrt(np.diagonal(inverse))
    np.testing.assert_allclose(fit.standard_errors, errors, rtol=1e-2)
    np.testing.assert_array_less(np.abs(np.asarray(fit.parameters) - exact), 0.2 * errors)

    def residuals(c, data):
        return line(c, data[0]) - data[1]

    data = jnp.asarray(x), jnp.asarray(y)
    solver = gnlin.GaussNewton(method="svd")
    found = optx.least_squares(residuals, solver, start, data).value
    np.testing.assert_array_less(np.abs(np.asarray(found) - exact), 0.2 * errors)
