"""Cholesky factorisations that do not square the condition number, compared with singular
values."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import gnlin
from gnlin._subproblem import way_of
from gnlin._subproblem._base import InexactTikhonov


M, P = 60, 24
EPS = float(np.finfo(float).eps)
ANY = InexactTikhonov(0.0, worth=math.inf)


def ill_conditioned(dtype=float, smallest=1e-13):
    """Return a matrix whose singular values fall evenly, and a residual that has a part
    in each of their directions."""
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.normal(size=(M, P)))
    v, _ = np.linalg.qr(rng.normal(size=(P, P)))
    s = np.geomspace(1, smallest, P)
    return ((u * s) @ v.T).astype(dtype), (u @ rng.normal(size=P)).astype(dtype)


def ready(a, b, method="cholesky-qr", rest=None):
    zero = jnp.zeros(a.shape[1], a.dtype)
    lin = gnlin.linearise(lambda y, _: jnp.asarray(a) @ y + b, zero)
    problem = gnlin.authoring.SumOfSquares().expand(lin)
    if rest is not None:
        problem = gnlin.authoring.Quadratic(problem.jacobian, problem.residual, rest)
    return gnlin.authoring.choose(problem, InexactTikhonov(1.0), method=method)


def objective(a, b, damping, step):
    a, b, step = (x.astype(float) for x in (a, b, np.asarray(step)))
    return np.sum((a @ step + b) ** 2) + damping * np.sum(step**2)


@pytest.mark.parametrize("power", [0, -4, -10, -16, -20, -24])
def test_as_by_singular_values_down_to_tiny_dampings(power):
    a, b = ill_conditioned()
    u, s, vt = np.linalg.svd(a, full_matrices=False)
    damping = 10.0**power
    expected = -vt.T @ (s / (s**2 + damping) * (u.T @ b))
    answer = ready(a, b).solve(InexactTikhonov(damping))
    least = objective(a, b, damping, expected)
    assert objective(a, b, damping, answer.step) <= (1 + 1e-6) * least
    error = np.linalg.norm(answer.step - expected) / np.linalg.norm(expected)
    assert error < 1e-4
    if power <= -20:  # where the curvature is rounding
        squared = ready(a, b, "curvature").solve(InexactTikhonov(damping)).step
        assert not objective(a, b, damping, squared) <= 2 * least


@pytest.mark.parametrize("part", [0.5, 1.5, 0.9 / EPS**0.5, 1.1 / EPS**0.5])
def test_on_both_sides_of_the_shift(part):
    """The plain factorisation is used where it is as accurate."""
    a, b = ill_conditioned()
    u, s, vt = np.linalg.svd(a, full_matrices=False)
    held = ready(a, b)
    damping = part * float(held.shift * held.unit**2)
    expected = -vt.T @ (s / (s**2 + damping) * (u.T @ b))
    step = held.solve(InexactTikhonov(damping)).step
    assert np.linalg.norm(step - expected) < 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("power", [0, -4, -8, -10])
def test_single_precision(power):
    a, b = ill_conditioned(np.float32, 1e-5)
    u, s, vt = np.linalg.svd(a.astype(float), full_matrices=False)
    damping = 10.0**power
    expected = -vt.T @ (s / (s**2 + damping) * (u.T @ b))
    step = ready(a, b).solve(InexactTikhonov(jnp.float32(damping))).step
    assert step.dtype == jnp.float32
    least = objective(a, b, damping, expected)
    assert objective(a, b, damping, step) <= 1.01 * least


@pytest.mark.parametrize("power", [0, -8, -16, -24])
def test_the_predicted_decrease_is_that_of_the_linear_model(power):
    a, b = ill_conditioned()
    answer = ready(a, b).solve(InexactTikhonov(10.0**power))
    left = np.sum((a @ np.asarray(answer.step) + b) ** 2)
    expected = 0.5 * (np.sum(b**2) - left)
    np.testing.assert_allclose(answer.decrease, expected, rtol=1e-5)
    np.testing.assert_allclose(answer.damped_norm, np.linalg.norm(answer.step))


def test_the_attainable_decrease():
    """A part of the residual lies outside the range of the Jacobian."""
    a, b = ill_conditioned(smallest=1e-10)
    outside = np.random.default_rng(1).normal(size=M)
    held = ready(a, b + outside)
    found = held.attainable_decrease(held.least_damping(1e9))
    u, _, _ = np.linalg.svd(a, full_matrices=False)
    expected = 0.5 * np.sum((u.T @ (b + outside)) ** 2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_attainable_decrease_with_a_rest():
    a, b = ill_conditioned(smallest=1e-2)
    none, some = jnp.zeros(P), jnp.ones(P)
    least = jnp.array(1e-20)
    assert jnp.isfinite(ready(a, b, rest=none).attainable_decrease(least))
    assert ready(a, b, rest=some).attainable_decrease(least) == jnp.inf


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (5, 5), (1, 1)])
@pytest.mark.parametrize("zeros", [0, 1])
def test_rank_deficient_problems(shape, zeros):
    """Two columns are equal, or one is zero; or there are more parameters than rows."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=shape), rng.normal(size=shape[0])
    a[:, -1] = 0 if zeros else a[:, 0]
    step = ready(a, b).solve(InexactTikhonov(1e-6)).step
    system = a.T @ a + 1e-6 * np.eye(shape[1])
    expected = -np.linalg.solve(system, a.T @ b)
    np.testing.assert_allclose(step, expected, rtol=1e-6, atol=1e-8)


def test_a_zero_jacobian_has_no_step():
    held = ready(np.zeros((5, 3)), np.ones(5))
    np.testing.assert_array_equal(held.solve(InexactTikhonov(1e-3)).step, np.zeros(3))
    assert held.attainable_decrease(jnp.array(1e-20)) == 0


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_what_is_not_finite_reaches_no_factorisation(bad):
    a, b = ill_conditioned()
    a[3, 2] = bad
    held = ready(a, b)
    assert jnp.isnan(held.gradient_norm)
    assert jnp.all(jnp.isnan(held.solve(InexactTikhonov(1.0)).step))


def test_derivatives_of_a_step():
    a, b = ill_conditioned(smallest=1e-2)

    def first(method, b):
        return ready(jnp.asarray(a), b, method).solve(InexactTikhonov(1e-2)).step[0]

    gradient = jax.grad(first, argnums=1)
    found, expected = (gradient(method, b) for method in ("cholesky-qr", "svd"))
    np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_under_vmap():
    a, b = ill_conditioned(smallest=1e-2)
    residuals = jnp.stack([jnp.asarray(b), jnp.cos(jnp.asarray(b))])
    solve = lambda b: ready(jnp.asarray(a), b).solve(InexactTikhonov(1e-3)).step
    steps = jax.vmap(solve)(residuals)
    for step, residual in zip(steps, residuals, strict=True):
        np.testing.assert_allclose(step, solve(residual), rtol=1e-9)


@pytest.mark.parametrize(
    ("shape", "filter", "budget", "expected"),
    [
        ((300, 100), ANY, 2**31, "cholesky-qr"),
        ((20_000, 100), ANY, 2**31, "cholesky-qr"),
        ((8_192, 1_361), ANY, 2**31, "cholesky-qr"),
        ((8_192, 3_481), ANY, 2**31, "cholesky-qr"),
        ((16_384, 5_121), ANY, 2**31, "cholesky-qr"),
        ((30, 3), ANY, 2**31, "svd"),
        ((100, 300), InexactTikhonov(1.0, worth=math.inf), 2**31, "kernel"),
        ((300, 100), gnlin.filters.PseudoInverse(), 2**31, "svd"),
        ((300, 100), gnlin.filters.Tikhonov(0.0), 2**31, "svd"),
        ((300, 100), ANY, 8 * 300 * 150, "svd"),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_when_auto_takes_it(shape, filter, budget, expected, backend, monkeypatch):
    """It holds two matrices of the Jacobian's size, needs some damping, and is for at
    least as many residuals as parameters."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    found = []

    def shown(a):
        lin = gnlin.linearise(
            lambda y, _: a @ y, jnp.zeros(shape[1]), memory_budget=budget
        )
        problem = gnlin.authoring.SumOfSquares().expand(lin)
        found.append(way_of(problem, filter, 10, "auto").method)
        return lin.outputs

    jax.eval_shape(shown, jax.ShapeDtypeStruct(shape, float))
    if (backend, shape) == ("gpu", (30, 3)):
        expected = "cholesky-qr"  # singular values take longer to start there
    assert (found[0] == "cholesky-qr") == (expected == "cholesky-qr")
    assert backend == "gpu" or found[0] == expected


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_parameters_that_the_data_do_not_determine_stay(dtype):
    """Only sums of two parameters matter, and the data are noisy: rounding must not
    become steps."""
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.normal(size=(80, 24)), dtype)
    b = jnp.asarray(rng.normal(size=80), dtype)

    def end(method):
        solution = optx.least_squares(
            lambda y, _: jnp.tanh(a @ (y[:24] + y[24:]) / 10) - b,
            gnlin.LevenbergMarquardt(method=method),
            jnp.full(48, 0.1, dtype),
            max_steps=60,
            throw=False,
        )
        return float(jnp.max(jnp.abs(solution.value)))

    assert end("cholesky-qr") < 3 * end("svd")


def test_levels_of_factors_that_overlap():
    """The mean of an additive model and its levels are determined up to two sums."""
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 20, 300), rng.integers(0, 25, 300)
    t = jnp.asarray(rng.uniform(0, 2, 300))
    y = jnp.asarray(rng.normal(size=300))

    def residuals(p, _):
        peak = p["height"] * jnp.exp(-p["rate"] * t**2)
        return p["mean"] + p["a"][first] + p["b"][second] + peak - y

    start = {
        "mean": jnp.array(0.1),
        "a": jnp.full(20, 0.1),
        "b": jnp.full(25, 0.1),
        "height": jnp.array(1.0),
        "rate": jnp.array(1.0),
    }
    solver = gnlin.LevenbergMarquardt()
    solution = optx.least_squares(residuals, solver, start, max_steps=60, throw=False)
    largest = [
        float(jnp.max(jnp.abs(solution.value[name]))) for name in ("mean", "a", "b")
    ]
    assert max(largest) < 5


@pytest.mark.parametrize("unit", [1e-15, 1e13])
def test_units_in_single_precision(unit):
    a, b = ill_conditioned(np.float32, 1e-2)
    a, b = a * np.float32(unit), b * np.float32(unit)
    held = ready(a, b)
    least = jnp.maximum(held.least_damping(1e6), 1e-37)
    step = held.solve(InexactTikhonov(least)).step
    left = np.linalg.norm(a.astype(float) @ np.asarray(step, float) + b)
    assert left < 0.01 * np.linalg.norm(b)


def test_the_least_damping_is_in_the_units_of_the_curvature():
    """In single precision the curvature's rounding underflows here."""
    a, b = ill_conditioned(np.float32, 1e-2)
    assert ready(a * np.float32(1e-17), b).least_damping(1e20) < 1e-30


@pytest.mark.parametrize(("dtype", "smallest"), [(np.float64, 1e-10), (np.float32, 1e-4)])
def test_small_columns_keep_their_digits_beside_large_ones(dtype, smallest):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(200, 40)) * np.geomspace(1, smallest, 40)
    y = rng.normal(size=40) / np.geomspace(1, smallest, 40)
    a, b = a.astype(dtype), (-a @ y).astype(dtype)
    held = ready(a, b)
    step = held.solve(InexactTikhonov(held.least_damping(1e30))).step
    left = np.linalg.norm(a.astype(float) @ np.asarray(step, float) + b)
    assert left < 1e-3 * np.linalg.norm(b)


def test_a_fit_of_monomials_ends_at_rounding():
    """Without singular values that are squared, Levenberg-Marquardt meets data that the
    model can meet."""
    x = jnp.linspace(0, 1, 100)
    y = jnp.exp(-3 * x) * jnp.sin(9 * x)

    def residuals(c, _):
        return jnp.polyval(c, x) - y

    def end(method):
        solver = gnlin.LevenbergMarquardt(method=method)
        solution = optx.least_squares(
            residuals, solver, jnp.zeros(21), max_steps=60, throw=False
        )
        return float(jnp.linalg.norm(residuals(solution.value, None)))

    assert end("cholesky-qr") < 1e-11
    assert end("auto") < 1e-11
    assert end("curvature") > 1e-9
