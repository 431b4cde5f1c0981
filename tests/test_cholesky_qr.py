"""Cholesky factorisations that do not square the condition number, compared with singular
values."""

import math
from functools import partial

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


@partial(jax.jit, static_argnames="method")
def solved(a, b, damping, method="cholesky-qr"):
    return ready(a, b, method).solve(InexactTikhonov(damping))


@jax.jit
def at_the_least_damping(a, b, size):
    """Return what is computed there: the damping, the step and the decrease."""
    held = ready(a, b)
    least = jnp.maximum(held.least_damping(size), 1e-37)
    return least, held.solve(InexactTikhonov(least)).step, held.attainable_decrease(least)


def by_singular_values(a, b, damping):
    u, s, vt = np.linalg.svd(a.astype(float), full_matrices=False)
    return -(vt.T * (s / (s**2 + damping))) @ (u.T @ b)


def objective(a, b, damping, step):
    a, b, step = (x.astype(float) for x in (a, b, np.asarray(step)))
    return np.sum((a @ step + b) ** 2) + damping * np.sum(step**2)


@pytest.mark.parametrize("power", [0, -4, -10, -16, -20, -24])
def test_as_by_singular_values_down_to_tiny_dampings(power):
    a, b = ill_conditioned()
    damping = 10.0**power
    expected = by_singular_values(a, b, damping)
    answer = solved(a, b, damping)
    least = objective(a, b, damping, expected)
    assert objective(a, b, damping, answer.step) <= (1 + 1e-6) * least
    error = np.linalg.norm(answer.step - expected) / np.linalg.norm(expected)
    assert error < 1e-4
    left = np.sum((a @ np.asarray(answer.step) + b) ** 2)
    np.testing.assert_allclose(answer.decrease, 0.5 * (np.sum(b**2) - left), rtol=1e-5)
    np.testing.assert_allclose(answer.damped_norm, np.linalg.norm(answer.step))
    if power <= -20:  # where the curvature is rounding
        squared = solved(a, b, damping, "curvature").step
        assert not objective(a, b, damping, squared) <= 2 * least


@pytest.mark.parametrize("part", [0.5, 1.5, 0.9 / EPS**0.5, 1.1 / EPS**0.5])
def test_on_both_sides_of_the_shift(part):
    """The plain factorisation is used where it is as accurate."""
    a, b = ill_conditioned()

    @jax.jit
    def shift(a, b):
        held = ready(a, b)
        return held.shift * held.unit**2

    damping = part * float(shift(a, b))
    expected = by_singular_values(a, b, damping)
    step = solved(a, b, damping).step
    assert np.linalg.norm(step - expected) < 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("power", [0, -4, -8, -10])
def test_single_precision(power):
    a, b = ill_conditioned(np.float32, 1e-5)
    damping = 10.0**power
    expected = by_singular_values(a, b, damping)
    step = solved(a, b, np.float32(damping)).step
    assert step.dtype == jnp.float32
    least = objective(a, b, damping, expected)
    assert objective(a, b, damping, step) <= 1.01 * least


def test_the_attainable_decrease():
    """A part of the residual lies outside the range of the Jacobian."""
    a, b = ill_conditioned(smallest=1e-10)
    outside = np.random.default_rng(1).normal(size=M)
    found = at_the_least_damping(a, b + outside, 1e9)[2]
    u, _, _ = np.linalg.svd(a, full_matrices=False)
    expected = 0.5 * np.sum((u.T @ (b + outside)) ** 2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_attainable_decrease_with_a_rest():
    a, b = ill_conditioned(smallest=1e-2)
    attainable = jax.jit(lambda rest: ready(a, b, rest=rest).attainable_decrease(1e-20))
    assert np.isfinite(attainable(np.zeros(P)))
    assert attainable(np.ones(P)) == np.inf


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (1, 1)])
@pytest.mark.parametrize("zeros", [0, 1])
def test_rank_deficient_problems(shape, zeros):
    """Two columns are equal, or one is zero; or there are more parameters than rows."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=shape), rng.normal(size=shape[0])
    a[:, -1] = 0 if zeros else a[:, 0]
    step = solved(a, b, 1e-6).step
    system = a.T @ a + 1e-6 * np.eye(shape[1])
    expected = -np.linalg.solve(system, a.T @ b)
    np.testing.assert_allclose(step, expected, rtol=1e-6, atol=1e-8)


def test_a_zero_jacobian_has_no_step():
    none = np.zeros((M, P))
    np.testing.assert_array_equal(solved(none, np.ones(M), 1e-3).step, np.zeros(P))
    assert at_the_least_damping(none, np.ones(M), 1e-3)[2] == 0


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_what_is_not_finite_reaches_no_factorisation(bad):
    a, b = ill_conditioned()
    a[3, 2] = bad
    assert np.isnan(jax.jit(lambda a, b: ready(a, b).gradient_norm)(a, b))
    assert np.all(np.isnan(solved(a, b, 1.0).step))


def test_derivatives_of_a_step_under_vmap():
    a, b = ill_conditioned(smallest=1e-2)
    residuals = np.stack([b, np.cos(b)])
    first = lambda b: solved(a, b, 1e-2).step[0]
    found, gradients = jax.jit(jax.vmap(jax.value_and_grad(first)))(residuals)
    expected = by_singular_values(a, np.eye(M), 1e-2)[0]
    np.testing.assert_allclose(found, residuals @ expected, rtol=1e-9)
    np.testing.assert_allclose(gradients, [expected, expected], rtol=1e-8)


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


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "largest"), [(jnp.float32, 2), (jnp.float64, 1e-4)])
def test_parameters_that_the_data_do_not_determine_stay(dtype, largest):
    """Only sums of two parameters matter, and the data are noisy: rounding must not
    become steps, which would separate the two. The sums reach 800."""
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.normal(size=(80, 24)), dtype)
    b = jnp.asarray(rng.normal(size=80), dtype)
    solution = optx.least_squares(
        lambda y, _: jnp.tanh(a @ (y[:24] + y[24:]) / 10) - b,
        gnlin.LevenbergMarquardt(method="cholesky-qr"),
        jnp.full(48, 0.1, dtype),
        max_steps=60,
        throw=False,
    )
    assert np.max(np.abs(solution.value[:24] - solution.value[24:])) < largest


@pytest.mark.slow
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
    for name in ("mean", "a", "b"):
        assert np.max(np.abs(solution.value[name])) < 5, name


@pytest.mark.parametrize("unit", [1e-15, 1e13])
def test_units_in_single_precision(unit):
    a, b = ill_conditioned(np.float32, 1e-2)
    a, b = a * np.float32(unit), b * np.float32(unit)
    step = at_the_least_damping(a, b, np.float32(1e6))[1]
    left = np.linalg.norm(a.astype(float) @ np.asarray(step, float) + b)
    assert left < 0.01 * np.linalg.norm(b)


def test_the_least_damping_is_in_the_units_of_the_curvature():
    """In single precision the curvature's rounding underflows here."""
    a, b = ill_conditioned(np.float32, 1e-2)
    least = at_the_least_damping(a * np.float32(1e-17), b, np.float32(1e20))[0]
    assert least < 1e-30


@pytest.mark.parametrize(("dtype", "smallest"), [(np.float64, 1e-10), (np.float32, 1e-4)])
def test_small_columns_keep_their_digits_beside_large_ones(dtype, smallest):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(M, P)) * np.geomspace(1, smallest, P)
    y = rng.normal(size=P) / np.geomspace(1, smallest, P)
    a, b = a.astype(dtype), (-a @ y).astype(dtype)
    step = at_the_least_damping(a, b, dtype(1e30))[1]
    left = np.linalg.norm(a.astype(float) @ np.asarray(step, float) + b)
    assert left < 1e-3 * np.linalg.norm(b)


def test_a_fit_of_monomials_ends_at_rounding():
    """Without singular values that are squared, Levenberg-Marquardt meets data that the
    model can meet. The curvature would leave more than 1e-9."""
    x = np.linspace(0, 1, 100)
    y = np.exp(-3 * x) * np.sin(9 * x)
    powers = np.vander(x, 21)
    solution = optx.least_squares(
        lambda c, _: powers @ c - y,
        gnlin.LevenbergMarquardt(),
        jnp.zeros(21),
        max_steps=60,
        throw=False,
    )
    assert np.linalg.norm(powers @ solution.value - y) < 1e-11
