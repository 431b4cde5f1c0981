"""Fits of functions with loops, such as solutions of differential equations, reuse the
solver's last linearisation. Their results are those of the same function without a loop.
"""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
import scipy.optimize

import gnlin
from gnlin._curve_fit import _program


NUM_STEPS = 8


def decay(p, x, *, loops):
    """Return p[0] exp(-p[1] x) + max(p[2], 0) by Euler's method."""

    def step(y, _):
        return y - x / NUM_STEPS * p[1] * y, None

    y = p[0] * jnp.ones_like(x)
    if loops:
        y, _ = jax.lax.scan(step, y, length=NUM_STEPS)
    else:
        for _ in range(NUM_STEPS):
            y, _ = step(y, None)
    return y + (jnp.maximum(p[2], 0) if len(p) > 2 else 0)


looped = functools.partial(decay, loops=True)
unrolled = functools.partial(decay, loops=False)


def data(num_points=30, noise=0.02, true=(2.0, 1.5)):
    x = np.linspace(0.0, 2.0, num_points)
    y = np.asarray(unrolled(np.array(true), x))
    return x, y + noise * np.random.default_rng(0).normal(size=num_points)


def both(*args, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fits = [gnlin.curve_fit(f, *args, **settings) for f in (looped, unrolled)]
    return fits


def check_equal(one, other, rtol=1e-6):
    for name in (
        "parameters",
        "standard_errors",
        "covariance_matrix",
        "reduced_chi_squared",
        "at_bound",
        "multipliers",
        "residuals",
        "deviance",
        "aic",
        "scale",
    ):
        ours, theirs = (jax.tree.leaves(getattr(fit, name)) for fit in (one, other))
        for a, b in zip(ours, theirs, strict=True):
            largest = np.max(np.abs(np.nan_to_num(b)), initial=0)
            np.testing.assert_allclose(a, b, rtol, 1e-9 * largest, err_msg=name)
    assert int(one.num_steps) == int(other.num_steps)
    assert str(one).splitlines()[0] == str(other).splitlines()[0]


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        slow({"sigma": 0.02}),
        {"max_steps": 2},  # ends before the minimum, at a point not linearised
        slow({"bounds": ([0.0, 0.0], [1.8, np.inf])}),
        slow({"loss": gnlin.losses.Huber(2.0), "sigma": 0.02}),
        slow({"loss": gnlin.losses.Huber(2.0)}),
        slow({"sigma": 0.02, "sigma_x": 0.01}),
        slow({"bounds": ([0.0, 0.0], [9.0, 9.0]), "starts": 4}),
        slow({"solver": gnlin.DampedGaussNewton(1e-6)}),
    ],
)
def test_as_without_a_loop(settings):
    check_equal(*both(*data(), np.array([1.0, 1.0]), **settings))


@pytest.mark.slow
def test_counts():
    x = np.linspace(0.0, 2.0, 30)
    y = np.random.default_rng(0).poisson(np.asarray(unrolled(np.array([40.0, 0.5]), x)))
    settings = {"loss": gnlin.losses.PoissonNLL(log_input=False)}
    check_equal(*both(x, y, np.array([30.0, 0.3]), **settings))


def test_against_scipy():
    x, y = data()
    fit = gnlin.curve_fit(looped, x, y, np.array([1.0, 1.0]))
    by_scipy = lambda x, *p: np.asarray(unrolled(np.array(p), x))
    best, covariance = scipy.optimize.curve_fit(by_scipy, x, y, [1.0, 1.0])
    np.testing.assert_allclose(fit.parameters, best, rtol=1e-6)
    np.testing.assert_allclose(fit.covariance_matrix, covariance, rtol=1e-4)


@pytest.mark.slow
def test_a_parameter_on_a_plateau_is_not_determined():
    x, y = data(true=(2.0, 1.5, 0.0))
    # max(p[2], 0) has a derivative of a half at 0, where the parameter has no effect on
    # one side; below, it has none at all.
    for start in ([1.0, 1.0, -3.0], [1.0, 1.0, 1e-3]):
        check_equal(*both(x, y, np.array(start)))


@pytest.mark.slow
def test_single_precision():
    x, y = (a.astype(np.float32) for a in data())
    one, other = both(x, y, np.array([1.0, 1.0], np.float32))
    np.testing.assert_allclose(one.parameters, other.parameters, rtol=1e-5)
    np.testing.assert_allclose(one.standard_errors, other.standard_errors, rtol=1e-3)


def test_intervals():
    one, other = both(*data(), np.array([1.0, 1.0]))
    ours, theirs = (fit.confidence_intervals() for fit in (one, other))
    np.testing.assert_allclose(ours.low, theirs.low, rtol=1e-5)
    np.testing.assert_allclose(ours.high, theirs.high, rtol=1e-5)


def test_functions_that_are_never_finite():
    one, other = both(*data(), np.array([1e308, -1e308]))
    check_equal(one, other)
    assert np.all(np.isnan(one.standard_errors))


@pytest.mark.slow
def test_copies_of_the_function(monkeypatch):
    """The first program has those of the solver, and a second one is not needed."""
    found, first = [], _program._first

    def f(p, x):
        step = lambda y, _: (jnp.tanh(y) - x * p[1] * y, None)
        return jax.lax.scan(step, p[0] * jnp.ones_like(x), length=NUM_STEPS)[0]

    def spied(*args):
        text = eqx.filter_jit(_program._run_first).lower(*args).as_text()
        found.append(text.count("stablehlo.tanh "))
        return first(*args)

    monkeypatch.setattr(_program, "_first", spied)
    monkeypatch.setattr(_program, "_second", None)
    x = np.linspace(0.0, 0.3, 30)
    true = np.array([2.0, 1.5])
    y = np.asarray(f(true, x)) + 1e-3 * np.random.default_rng(0).normal(size=30)
    fit = gnlin.curve_fit(f, x, y, np.array([1.9, 1.4]))
    assert np.all(np.abs(fit.parameters - true) <= 5 * fit.standard_errors)
    assert found == [2]  # of the trials and of the linearisation


def noisy(p, x, size=1e-5):
    """Return a curve with an error that the derivative does not know, like that of a
    differential equation solved to a tolerance."""
    error = size * jnp.sin(x * jnp.sum(p) / size)
    return looped(p, x) + jax.lax.stop_gradient(error)


@pytest.mark.slow
def test_a_run_that_stands_still_close_to_the_minimum_has_converged():
    x, y = data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = gnlin.curve_fit(noisy, x, y, np.array([1.0, 1.0]))
    exact = gnlin.curve_fit(looped, x, y, np.array([1.0, 1.0]))
    assert fit.result == optx.RESULTS.successful
    away = (fit.parameters - exact.parameters) / exact.standard_errors
    # The distance from the minimum is estimated well.
    errors = np.sqrt(np.diag(exact.covariance_matrix))
    correlation = exact.covariance_matrix / np.outer(errors, errors)
    length = np.linalg.solve(np.linalg.cholesky(correlation), away)
    np.testing.assert_allclose(fit._end.distance, np.linalg.norm(length), rtol=0.3)
    assert "to within 0.006 standard errors" in str(fit)
    assert float(exact._end.distance) < 1e-9
    assert "within" not in str(exact)
    # Data sets at once are judged alike.
    f = functools.partial(noisy, size=3e-6)
    both = gnlin.curve_fit(f, x, np.stack([y, y + 0.001 * x]), np.array([1.0, 1.0]))
    assert np.all(both.result == optx.RESULTS.successful)


def test_a_run_that_stands_still_elsewhere_has_not():
    x, y = data()
    rough = lambda p, x: noisy(p, x) + jax.lax.stop_gradient(0.1 * jnp.sin(1e3 * p[0]))
    with pytest.warns(UserWarning, match="stands still"):
        fit = gnlin.curve_fit(rough, x, y, np.array([1.0, 1.0]))
    assert fit.result == optx.RESULTS.stagnation
    assert float(fit._end.distance) > 1e-2
    # A step that does not move ends it: it would linearise at the same point ten times.
    lengths = fit.history["step_norm"]
    size = np.linalg.norm(fit.parameters)
    assert np.sum(lengths < 1e-16 * size) <= 2


def test_a_distance_of_rounding_is_not_told():
    """Residuals of an exact curve and their noise are both rounding."""
    x, _ = data()
    for f in (looped, unrolled):
        fit = gnlin.curve_fit(f, x, unrolled(jnp.array([2.0, 1.5]), x), np.ones(2))
        assert "within" not in str(fit)
        assert str(fit).startswith("converged in")
