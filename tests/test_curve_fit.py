"""Fits, compared with SciPy, NIST's certified standard errors and explicit formulas."""

import contextlib
import dataclasses
import datetime
import functools
import math
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optimistix as optx
import pandas as pd
import pytest
import scipy.optimize
import scipy.stats
from problems import decay, decay_numpy as plain, num_compiled

import gnlin
from benchmarks.data import nist
from gnlin._common import _quickly
from gnlin._curve_fit._curve import Curve
from gnlin._linear_algebra._covariance import covariance


X = np.linspace(0, 4, 50)
NOISE = 0.05 * np.random.default_rng(0).normal(size=50)
SIGMA = 0.05 * (1 + X)
START = {"a": 1.0, "rate": 0.5, "c": 0.0}


Y = plain(X, 2.5, 0.5, 1.3) + NOISE

# A fit by this solver compiles in two thirds of the time of one by the default. Tests of
# how data and parameters are read use it.
QUICK = {"solver": gnlin.GaussNewton()}


def values(tree):
    return np.array([float(v) for v in jax.tree.leaves(tree)])


def of_scipy(y=Y, **options):
    return scipy.optimize.curve_fit(plain, X, y, [1, 0, 0.5], ftol=1e-14, **options)


def covariance_of(size):
    distance = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
    return 0.05**2 * 0.5**distance


@pytest.mark.parametrize(
    ("sigma", "absolute_sigma"),
    [
        (None, False),
        pytest.param(0.1, True, marks=pytest.mark.slow),
        pytest.param(SIGMA, False, marks=pytest.mark.slow),
        (covariance_of(50), True),
    ],
)
def test_values_and_covariance_are_scipys(sigma, absolute_sigma):
    options = {"absolute_sigma": absolute_sigma}
    fit = gnlin.curve_fit(decay, X, Y, START, sigma=sigma, **options)
    of_each = np.full(50, sigma) if np.ndim(sigma) == 0 and sigma else sigma
    parameters, covariance = of_scipy(sigma=of_each, **options)
    np.testing.assert_allclose(values(fit.parameters), parameters, rtol=1e-6)
    np.testing.assert_allclose(fit.covariance_matrix, covariance, rtol=1e-4)
    errors = np.sqrt(np.diagonal(covariance))
    np.testing.assert_allclose(values(fit.standard_errors), errors, rtol=1e-4)
    block = fit.covariance["a"]["rate"]
    np.testing.assert_allclose(block, fit.covariance_matrix[0, 2], rtol=1e-12)
    correlation = covariance[0, 1] / errors[0] / errors[1]
    np.testing.assert_allclose(fit.correlation["a"]["c"], correlation, rtol=1e-4)
    residual = Y - plain(X, *parameters)
    whitened = np.linalg.solve(
        np.linalg.cholesky(covariance_of(50) if np.ndim(sigma) == 2 else np.eye(50)),
        residual / (1 if sigma is None or np.ndim(sigma) == 2 else np.asarray(sigma)),
    )
    np.testing.assert_allclose(fit.chi_squared, whitened @ whitened, rtol=1e-8)
    assert fit.degrees_of_freedom == 47
    if absolute_sigma:
        criteria = whitened @ whitened + 3 * np.array([2, np.log(50)])
        np.testing.assert_allclose([fit.aic, fit.bic], criteria, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Eckerle4", "Thurber"])
def test_nists_standard_errors(name):
    """Reached to 6.5 digits of the 11 certified ones. Thurber's fit converges linearly,
    and ends when its loss no longer distinguishes two steps."""
    problem = nist.load(name)
    fit = gnlin.curve_fit(problem.model, problem.x, problem.y, problem.starts[1])
    np.testing.assert_allclose(fit.standard_errors, problem.standard_errors, rtol=3e-7)


def test_a_parameter_at_a_bound_and_a_fixed_one():
    bounds = {"rate": (0.0, 0.5), "a": (None, 10.0)}
    fit = gnlin.curve_fit(decay, X, Y, START, sigma=1.0, bounds=bounds, fixed=["c"])
    assert fit.parameters["rate"] == 0.5
    assert fit.parameters["c"] == 0.0
    shape = np.exp(-0.5 * X)
    a = shape @ Y / (shape @ shape)
    np.testing.assert_allclose(fit.parameters["a"], a, rtol=1e-8)
    variance = np.sum((Y - a * shape) ** 2) / 49
    error = np.sqrt(variance / (shape @ shape))
    np.testing.assert_allclose(fit.standard_errors["a"], error, rtol=1e-8)
    assert np.isnan(fit.standard_errors["rate"])
    assert fit.standard_errors["c"] == 0
    assert values(fit.at_bound).tolist() == [0, 0, 1]
    # The derivative of the objective by differences
    step = 1e-6
    loss = lambda rate: 0.5 * np.sum((Y - a * np.exp(-rate * X)) ** 2)
    slope = (loss(0.5 + step) - loss(0.5 - step)) / (2 * step)
    np.testing.assert_allclose(fit.multipliers["rate"], slope, rtol=1e-5)
    report = str(fit)
    assert "at its upper bound, multiplier" in report
    assert "2 free parameters, 1 of them at a bound" in report
    assert "fixed" in report
    # Both are fitted parameters, although one has come to its bound.
    misfit = 50 * np.log(49 * variance / 50)
    expected = [misfit + 4, misfit + 2 * np.log(50)]
    np.testing.assert_allclose([fit.aic, fit.bic], expected, rtol=1e-8)
    # The parameter at its bound has no covariance with others.
    expected = [[float(fit.standard_errors["a"]) ** 2, 0], [0, 0]]
    np.testing.assert_allclose(fit.covariance_matrix, expected, rtol=1e-8, atol=0)
    found = fit.derived(lambda p: p["a"] * jnp.exp(p["c"]) + p["c"])
    np.testing.assert_allclose(found, [a, error], rtol=1e-8)


def test_a_parameter_at_a_bound_beside_undetermined_ones():
    """The direction of the others is by a factorisation without the parameter."""
    jacobian = np.random.default_rng(0).normal(size=(20, 5))
    jacobian[:, 4] = -2 * jacobian[:, 1]

    @jax.jit
    def run(free):
        found = covariance(
            jnp.asarray(jacobian), free, jnp.ones(5, bool), jnp.array(20.0)
        )
        return found, found.matrix(jnp.ones(()))

    for held in ([2], [1], [0, 1]):
        free = ~np.isin(np.arange(5), held)
        found, matrix = jax.tree.map(np.asarray, run(free))
        np.testing.assert_array_equal(found.factor[np.array(held)], 0)
        determined = np.isin(np.arange(5), [1, 4], invert=True) | (1 in held)
        assert found.determined.tolist() == determined.tolist()
        assert found.rank == np.linalg.matrix_rank(jacobian[:, free])
        norms = np.linalg.norm(found.directions, axis=1)
        assert np.sum(norms > 0) == (1 not in held)
        which = np.flatnonzero(free & determined)
        exact = np.linalg.pinv(jacobian[:, free].T @ jacobian[:, free])
        of_free = np.isin(np.flatnonzero(free), which)
        np.testing.assert_allclose(
            matrix[np.ix_(which, which)],
            exact[np.ix_(of_free, of_free)],
            rtol=1e-10,
        )
    direction = np.asarray(run(np.arange(5) != 2)[0].directions)
    (row,) = direction[np.linalg.norm(direction, axis=1) > 0]
    np.testing.assert_allclose(row / row[1], [0, 1, 0, 0, 0.5], atol=1e-12)


def test_derived_quantities_have_the_derivatives_error():
    fit = gnlin.curve_fit(decay, X, Y, START)

    def fn(p):
        return {
            "half life": jnp.log(2) / p["rate"],
            "ends": p["a"] * jnp.ones(2) + p["c"],
        }

    value, error = fit.derived(fn)
    a, c, rate = values(fit.parameters)
    covariance = np.asarray(fit.covariance_matrix)
    expected = np.log(2) / rate**2 * covariance[2, 2] ** 0.5
    np.testing.assert_allclose(error["half life"], expected, rtol=1e-9)
    np.testing.assert_allclose(value["ends"], [a + c] * 2)
    slope = np.array([1.0, 1.0, 0.0])
    np.testing.assert_allclose(error["ends"], [(slope @ covariance @ slope) ** 0.5] * 2)


@functools.cache
def fit_of_a_product(dtype=np.float64):
    x = np.arange(5, dtype=dtype)
    y = np.array([1, 3.1, 4.9, 7, 9.1], dtype)
    start = {"a": dtype(1), "b": dtype(2), "c": dtype(0)}
    f = lambda p, x: p["a"] * p["b"] * x + p["c"]
    with pytest.warns(UserWarning, match="do not determine"):
        fit = gnlin.curve_fit(f, x, y, start, **QUICK)
    slope, cut = np.polyfit(x, y, 1)
    return fit, x, slope * x + cut, np.sum((y - slope * x - cut) ** 2) / 3


@pytest.mark.slow
def test_a_derived_quantity_may_be_determined_where_its_parameters_are_not():
    fit, *_, variance = fit_of_a_product()
    _, error = fit.derived(lambda p: {"product": p["a"] * p["b"], "a": p["a"]})
    assert np.isinf(error["a"])
    np.testing.assert_allclose(error["product"], np.sqrt(variance / 10), rtol=1e-6)
    with pytest.raises(ValueError, match="`fn` must be a function of the parameters"):
        fit.derived("a")
    _, of_both = fit.derived(lambda p: jax.lax.complex(p["a"] * p["b"], p["a"]))
    assert of_both.real == error["product"]
    assert np.isinf(of_both.imag)
    with pytest.raises(ValueError, match="`fn` failed: it needs the value of an array"):
        fit.derived(lambda p: np.log(p["a"]))
    assert fit.derived(lambda p: 3) == (3, 0)


@pytest.mark.parametrize(
    "dtype", [pytest.param(np.float32, marks=pytest.mark.slow), np.float64]
)
def test_a_determined_quantity_beside_undetermined_parameters(dtype):
    with jax.enable_x64(dtype == np.float64):
        fit, x, of_line, variance = fit_of_a_product(dtype)
        _, error = fit.derived(lambda p: p)
        np.testing.assert_allclose(error["c"], fit.standard_errors["c"], rtol=1e-4)
        assert np.isinf(error["a"])
        assert np.isinf(error["b"])
        mean, low, high = fit.band(x)
        # A line by SciPy has the same band.
        np.testing.assert_allclose(mean, of_line, rtol=1e-4)
        of_x = variance * (1 / 5 + (x - 2.0) ** 2 / 10)
        width = scipy.stats.t.ppf(0.975, 3) * np.sqrt(of_x)
        np.testing.assert_allclose((high - low) / 2, width, rtol=1e-3)


@pytest.mark.slow
def test_a_band_is_finite_at_the_data_of_a_curve_of_low_rank():
    with jax.enable_x64(False):
        x = np.linspace(0, 5, 30, dtype=np.float32)
        powers = lambda p, x: sum(p[k] * x**k for k in range(9))
        y = np.sin(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit = gnlin.curve_fit(powers, x, y, np.zeros(9, np.float32))
        assert np.isfinite(fit.band(x).high).all()


@pytest.mark.slow
def test_a_band_is_infinite_where_the_data_do_not_determine_the_curve():
    x = {"x": X, "other": np.zeros(50)}
    f = lambda p, x: (p["a"] + p["b"]) * x["x"] + p["b"] * x["other"]
    with pytest.warns(UserWarning, match=r"moving a by -?1 and b by -?1 does not change"):
        fit = gnlin.curve_fit(f, x, 2 * X + NOISE, {"a": 1, "b": 3}, **QUICK)
    assert np.all(np.isinf(values(fit.standard_errors)))
    assert "not determined" in str(fit)
    assert fit.degrees_of_freedom == 49
    new = np.linspace(0, 1, 50)
    _, low, high = fit.band({"x": np.ones(50), "other": new})
    error = fit.scale / np.linalg.norm(X) * scipy.stats.t.ppf(0.975, 49)
    np.testing.assert_allclose((high - low)[0], 2 * error, rtol=1e-8)
    assert high[-1] == -low[-1] == np.inf


def test_a_band_for_measurements_of_any_structure():
    """For each measurement, its own deviation is added to that of the curve."""

    def f(p, x):
        turn = p["a"] * jnp.cos(p["rate"] * x), p["a"] * jnp.sin(p["rate"] * x)
        return {"both": jax.lax.complex(*turn), "size": p["a"] * jnp.ones_like(x)}

    y = {"both": 2.5 * np.exp(0.5j * X) + NOISE, "size": 2.5 + NOISE[::-1]}
    known = {"sigma": 0.05, "absolute_sigma": True}
    fit = gnlin.curve_fit(f, X, y, {"a": 2.0, "rate": 0.4}, **known, **QUICK)
    sigma = {"both": SIGMA, "size": 0.1}
    curve, new = fit.band(X), fit.band(X, sigma=sigma)
    for name, own in (("both", SIGMA), ("size", np.full(50, 0.1))):
        widths = [np.asarray(band.high[name] - band.mean[name]) for band in (curve, new)]
        for part in (np.real, np.imag) if name == "both" else (np.real,):
            old, all_ = map(part, widths)
            np.testing.assert_allclose(all_, np.hypot(old, 1.959964 * own), rtol=1e-6)
    for wrong in ({"both": SIGMA}, np.ones(3), {"both": SIGMA, "size": np.ones(3)}):
        with pytest.raises(ValueError, match="`sigma` of a band must be one number, or"):
            fit.band(X, sigma=wrong)
    with pytest.raises(ValueError, match="must not be negative"):
        fit.band(X, sigma=-1.0)


def test_the_bands_are_the_derivatives_formula():
    fit = gnlin.curve_fit(decay, X, Y, START, sigma=SIGMA)
    x = np.array([0.0, 1.0, 7.0])
    a, c, rate = values(fit.parameters)
    slopes = np.stack([np.exp(-rate * x), np.ones(3), -a * x * np.exp(-rate * x)], 1)
    covariance = np.asarray(fit.covariance_matrix)
    error = np.sqrt(np.einsum("ni,ij,nj->n", slopes, covariance, slopes))
    quantile = scipy.stats.t.ppf(0.95, 47)
    mean, low, high = fit.band(x, 0.9)
    np.testing.assert_allclose(mean, plain(x, a, c, rate), rtol=1e-12)
    np.testing.assert_allclose(high - mean, quantile * error, rtol=1e-8)
    np.testing.assert_allclose(mean - low, quantile * error, rtol=1e-8)
    wide = fit.band(x, 0.9, sigma=0.05 * (1 + x))
    of_new = np.hypot(error, fit.scale * 0.05 * (1 + x))
    np.testing.assert_allclose(wide.high - mean, quantile * of_new, rtol=1e-8)


def test_profiles_match_separate_refits():
    fit = gnlin.curve_fit(decay, X, Y, START)
    low, high = fit.confidence_intervals(0.95)
    best, _ = of_scipy()
    least = np.sum((Y - plain(X, *best)) ** 2)
    allowed = least * (1 + scipy.stats.f.ppf(0.95, 1, 47) / 47)
    for k, name in enumerate(("a", "c", "rate")):

        def rise(value, k=k):
            def residuals(others):
                return Y - plain(X, *np.insert(others, k, value))

            start = np.delete(best, k)
            refit = scipy.optimize.least_squares(residuals, start, xtol=1e-14, ftol=1e-14)
            return 2 * refit.cost - allowed

        error = float(fit.standard_errors[name])
        ends = (best[k] - 6 * error, best[k]), (best[k], best[k] + 6 * error)
        roots = [scipy.optimize.brentq(rise, *end, xtol=1e-10) for end in ends]
        found = float(low[name]), float(high[name])
        np.testing.assert_allclose(found, roots, rtol=1e-4)


@pytest.mark.slow
def test_profiles_of_exact_data_with_known_noise():
    """The ends are where chi-squared has risen by its quantile, also from zero."""
    rate = lambda p, x: jnp.exp(-p * x)
    fit = gnlin.curve_fit(
        rate, X, np.exp(-X), 0.7, sigma=0.4, absolute_sigma=True, **QUICK
    )
    allowed = scipy.stats.chi2.ppf(0.95, 1)
    rise = lambda p: np.sum((np.exp(-p * X) - np.exp(-X)) ** 2) / 0.4**2 - allowed
    roots = [scipy.optimize.brentq(rise, *ends) for ends in ((0.1, 1), (1, 9))]
    np.testing.assert_allclose(fit.confidence_intervals(), roots, rtol=1e-5)


@pytest.mark.slow
def test_an_interval_without_an_end():
    """The rate is so large that the curve has vanished before the second point."""
    x = np.array([0.0, 1.0, 2.0, 3.0])
    y = np.array([1.0, 0.02, -0.02, 0.01])
    fit = gnlin.curve_fit(
        lambda p, x: jnp.exp(-p * x), x, y, 3.0, sigma=0.02, absolute_sigma=True
    )
    low, high = fit.confidence_intervals()
    assert np.isfinite(low)
    assert high == np.inf


@pytest.mark.slow
def test_outliers_have_no_influence():
    y = Y.copy()
    y[[3, 20, 40]] += [3.0, -4.0, 5.0]
    robust = gnlin.curve_fit(decay, X, y, START, loss=gnlin.losses.Huber(1.345))
    clean = gnlin.curve_fit(decay, X, Y, START)
    error = values(clean.standard_errors)
    distance = np.abs(values(robust.parameters) - values(clean.parameters))
    assert np.all(distance < 2 * error)
    assert "Huber's sandwich" in str(robust)
    assert robust.outliers().tolist() == [3, 20, 40]
    assert "3 outliers, at points 3, 20, 40" in str(robust)
    # Another model has another scale, so its criteria would be in other units.
    assert np.isnan([robust.aic, robust.bic]).all()
    assert "AIC" not in str(robust)
    # The scale is that of the noise, not of the outliers.
    np.testing.assert_allclose(robust.scale, 0.05, rtol=0.3)
    np.testing.assert_allclose(
        np.asarray(robust.residuals)[[3, 20, 40]], [3, -4, 5], atol=0.3
    )
    np.testing.assert_allclose(values(robust.standard_errors), error, rtol=0.5)


def line(p, x):
    return p["a"] + p["b"] * x


LINE = {"a": 0.0, "b": 1.0}


def noisy_lines(number, size=100, seed=3):
    """Draw lines with one point in ten that is ten times as far off."""
    generator = np.random.default_rng(seed)
    errors = 0.3 * generator.normal(size=(number, size))
    errors[generator.random(errors.shape) < 0.1] *= 10
    x = np.linspace(-1, 1, size)
    return x, 1 + 2 * x + errors


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"sigma": 0.3, "absolute_sigma": True}])
def test_standard_errors_of_a_robust_loss_are_the_spread_of_its_fits(options):
    """Use 400 data sets, whose spread is known to 4 %."""
    x, ys = noisy_lines(400)
    fits = gnlin.curve_fit(line, x, ys, LINE, loss=gnlin.losses.Huber(1.345), **options)
    for name in LINE:
        spread, told = fits.parameters[name].std(), fits.standard_errors[name].mean()
        np.testing.assert_allclose(told, spread, rtol=0.12)


def test_information_criteria_are_likelihoods():
    """Take the noise's density, normal or Huber's, without its constant factor, at
    SciPy's estimate."""
    x = np.linspace(-1, 1, 12)
    y = 1 + 0.2 * x + 0.1 * np.random.default_rng(6).normal(size=12)
    y[3] += 0.6
    options = {"absolute_sigma": True, "loss": gnlin.losses.Huber(1.5)}
    fit = gnlin.curve_fit(line, x, y, LINE, sigma=0.1, **options)
    reference = scipy.optimize.least_squares(
        lambda p: (y - p[0] - p[1] * x) / 0.1,
        [1.0, 0.2],
        loss="huber",
        f_scale=1.5,
        **{"xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15},
    )
    a, b = values(fit.parameters)
    np.testing.assert_allclose([a, b], reference.x, rtol=1e-5)
    r = np.abs(y - a - b * x) / 0.1
    deviance = np.sum(np.where(r < 1.5, r**2, 3 * r - 1.5**2))
    np.testing.assert_allclose(fit.aic, deviance + 4, rtol=1e-9)
    np.testing.assert_allclose(fit.bic, deviance + 2 * np.log(12), rtol=1e-9)
    # The scatter of a robust fit comes from the residuals, so the interval is Student's.
    width = scipy.stats.t.ppf(0.975, 10) * fit.standard_errors["a"]
    band = fit.band(np.zeros(1))
    np.testing.assert_allclose(band.high - band.mean, width, rtol=1e-9)
    two = np.where(np.arange(12) < 2, 0.1, np.inf)
    with pytest.warns(UserWarning, match="cannot be estimated: pass more points"):
        gnlin.curve_fit(line, x, y, LINE, sigma=two, **options)


@pytest.mark.slow
def test_a_loss_that_ignores_all_points_at_the_start():
    """All points are far from the start. Without sigma the scale is estimated, and the
    fit gets to the points; with a small sigma it cannot move, and warns."""
    x, (y,) = noisy_lines(1)
    loss, far = gnlin.losses.Tukey(4.685), {"a": -99.0, "b": 0.0}
    fit = gnlin.curve_fit(line, x, y, far, loss=loss)
    near = gnlin.curve_fit(line, x, y, {"a": 1.0, "b": 2.0}, loss=loss)
    np.testing.assert_allclose(values(fit.parameters), values(near.parameters), rtol=1e-4)
    with pytest.warns(UserWarning, match="the loss ignores all points"):
        gnlin.curve_fit(line, x, y, far, loss=loss, sigma=0.3)


@pytest.mark.slow
def test_a_loss_that_ignores_most_points():
    """From a steep line, Tukey's loss sees only the few points that this line happens to
    cross, and the best line through those few has tiny standard errors."""
    x, (y,) = noisy_lines(1)
    options = {"loss": gnlin.losses.Tukey(4.685), "sigma": 0.1}
    with pytest.warns(UserWarning, match=r"ignores \d+ of 100 points.*start closer"):
        fit = gnlin.curve_fit(line, x, y, {"a": 1.0, "b": 40.0}, **options)
    assert abs(fit.parameters["b"] - 2) > 10


@pytest.mark.slow
def test_a_loss_that_ignores_most_points_of_one_data_set():
    x, (y,) = noisy_lines(1)
    options = {"loss": gnlin.losses.Tukey(4.685), "sigma": 0.1}
    starts = {"a": np.ones(2), "b": np.array([2.0, 40.0])}
    with pytest.warns(UserWarning, match="1 of 2 data sets have a loss that ignores"):
        gnlin.curve_fit(line, x, np.stack([y, y]), starts, **options)


@pytest.mark.slow
def test_profiles_of_a_line_are_its_standard_errors():
    x, (y,) = noisy_lines(1, 2000)
    fit = gnlin.curve_fit(line, x, y, LINE, loss=gnlin.losses.Cauchy(2.0))
    low, high = fit.confidence_intervals(0.95)
    width = (values(high) - values(low)) / 2 / 1.96
    np.testing.assert_allclose(width, values(fit.standard_errors), rtol=0.02)


@pytest.mark.slow
def test_robust_losses_have_the_units_of_squared_error():
    x = np.linspace(-1, 1, 200)
    y = 1 + 2 * x + 0.3 * np.random.default_rng(5).normal(size=200)
    plain, robust = (
        gnlin.curve_fit(line, x, y, LINE, loss=loss)
        for loss in (gnlin.SquaredError(), gnlin.losses.Huber(1.345))
    )
    np.testing.assert_allclose(robust.scale, plain.scale, rtol=0.1)
    np.testing.assert_allclose(robust.chi_squared, plain.chi_squared, rtol=0.02)
    for kind in ({}, {"sigma": 1.0}):
        a, b = (fit.band(x[:3], **kind) for fit in (plain, robust))
        np.testing.assert_allclose(b.high - b.mean, a.high - a.mean, rtol=0.15)


def line_and_wave(p, x):
    return p["a"] * jnp.exp(-p["rate"] * x["t"]) + p["b"] * jnp.sin(x["phase"])


def of_odr(function, x, y, sigma, sigma_x, start, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It is said to be leaving SciPy.
        from scipy.odr import Model, ODR, RealData

        data = RealData(x, y, sx=sigma_x, sy=sigma)
        tight = {"sstol": 1e-15, "partol": 1e-15, **options}
        return ODR(data, Model(function), start, **tight).run()


def test_errors_in_x_match_odrpack():
    rng = np.random.default_rng(2)
    phase = rng.uniform(0, 6, 50)
    given = {"t": X + 0.1 * rng.normal(size=50), "phase": phase}
    y = 2 * np.exp(-0.7 * X) + np.sin(phase) + NOISE
    start = {"a": 1.0, "b": 0.5, "rate": 0.5}
    of_x = {"t": 0.1, "phase": np.full(50, 0.05)}
    fit = gnlin.curve_fit(line_and_wave, given, y, start, sigma=0.05, sigma_x=of_x)

    def function(p, x):
        return p[0] * np.exp(-p[2] * x[0]) + p[1] * np.sin(x[1])

    both = np.stack([given["t"], phase]), y, np.full(50, 0.05)
    sigma_x = np.stack([np.full(50, 0.1), of_x["phase"]])
    known = of_odr(function, *both, sigma_x, [1.0, 0.5, 0.5])
    np.testing.assert_allclose(values(fit.parameters), known.beta, rtol=1e-5)
    np.testing.assert_allclose(values(fit.standard_errors), known.sd_beta, rtol=1e-4)
    np.testing.assert_allclose(fit.chi_squared, known.sum_square, rtol=1e-8)
    np.testing.assert_allclose(fit.reduced_chi_squared, known.res_var, rtol=1e-8)
    np.testing.assert_allclose(fit.covariance_matrix / fit.scale**2, known.cov_beta, 1e-4)
    found = np.stack([fit.x["t"], fit.x["phase"]])
    np.testing.assert_allclose(found, known.xplus, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fit.residuals * 0.05, -known.eps, rtol=1e-3, atol=1e-6)
    exact = {"t": 0.1, "phase": 0.0}
    fit = gnlin.curve_fit(line_and_wave, given, y, start, sigma=0.05, sigma_x=exact)
    np.testing.assert_array_equal(fit.x["phase"], phase)
    assert np.max(np.abs(fit.x["t"] - given["t"])) > 0.01


@pytest.mark.slow
def test_errors_in_x_with_bounds_and_fixed_parameters():
    x = X + 0.1 * np.random.default_rng(1).normal(size=50)
    both = {"sigma": 0.05, "sigma_x": 0.1}
    free = gnlin.curve_fit(decay, x, Y, START, **both)
    top = float(free.parameters["rate"]) - 0.1
    held = {**START, "rate": top}
    bounded = gnlin.curve_fit(
        decay, x, Y, {**START, "rate": 0.2}, bounds={"rate": (0, top)}, **both
    )
    fixed = gnlin.curve_fit(decay, x, Y, held, fixed=["rate"], **both)
    assert bounded.at_bound["rate"] == 1
    for name in ("a", "c"):
        np.testing.assert_allclose(bounded.parameters[name], fixed.parameters[name], 1e-6)
        errors = bounded.standard_errors[name], fixed.standard_errors[name]
        np.testing.assert_allclose(*errors, rtol=1e-5)
    function = lambda p, x: plain(x, p[0], p[1], top)
    errors = np.full(50, 0.05), np.full(50, 0.1)
    known = of_odr(function, x, Y, *errors, [1.0, 0.0])
    np.testing.assert_allclose(fixed.parameters["a"], known.beta[0], rtol=1e-5)
    np.testing.assert_allclose(fixed.standard_errors["a"], known.sd_beta[0], rtol=1e-4)
    mean, low, high = free.band(X[:3])
    assert np.all((low < mean) & (mean < high))


@pytest.mark.slow
def test_profiles_and_starts_with_errors_in_x():
    """At the ends of an interval ODRPACK's best fit is worse by the expected amount."""
    x, y = X[::4] + 0.1 * np.random.default_rng(1).normal(size=13), Y[::4]
    fit = gnlin.curve_fit(
        decay,
        x,
        y,
        START,
        sigma=0.05,
        sigma_x=0.1,
        absolute_sigma=True,
        bounds={"a": (0.0, 10.0), "rate": (0.0, 10.0), "c": (-5.0, 5.0)},
        starts=4,
    )
    assert fit.losses.shape == (4,)
    errors, function = (np.full(13, 0.05), np.full(13, 0.1)), lambda p, x: plain(x, *p)
    best = of_odr(function, x, y, *errors, values(fit.parameters))
    np.testing.assert_allclose(fit.chi_squared, best.sum_square, rtol=1e-8)
    for ends in fit.confidence_intervals(0.95):
        for k, end in enumerate(values(ends)):
            held = best.beta.copy()
            held[k] = end
            free = [int(j != k) for j in range(3)]
            worse = of_odr(function, x, y, *errors, held, ifixb=free)
            rise = worse.sum_square - best.sum_square
            np.testing.assert_allclose(rise, scipy.stats.norm.ppf(0.975) ** 2, rtol=1e-3)


@pytest.mark.slow
def test_errors_in_x_of_many_data_sets_and_in_single_precision():
    x = X + 0.1 * np.random.default_rng(1).normal(size=50)
    both = {"sigma": 0.05, "sigma_x": 0.1}
    fit = gnlin.curve_fit(decay, x, Y, START, **both)
    many = gnlin.curve_fit(decay, x, np.stack([Y + 1, Y]), START, **both)
    assert many.x.shape == (2, 50)
    np.testing.assert_allclose(many.parameters["rate"][1], fit.parameters["rate"], 1e-6)
    errors = many.standard_errors["rate"][1], fit.standard_errors["rate"]
    np.testing.assert_allclose(*errors, rtol=1e-5)
    single = gnlin.curve_fit(
        decay,
        jnp.asarray(x, jnp.float32),
        jnp.asarray(Y, jnp.float32),
        {k: jnp.float32(v) for k, v in START.items()},
        **both,
    )
    assert single.x.dtype == jnp.float32
    np.testing.assert_allclose(values(single.parameters), values(fit.parameters), 1e-3)
    np.testing.assert_allclose(
        single.standard_errors["a"], fit.standard_errors["a"], 1e-2
    )


def check_fit_of(kept, fit):
    """Compare with SciPy's fit of the points that are kept."""
    parameters, covariance = scipy.optimize.curve_fit(
        plain, X[kept], Y[kept], [1, 0, 0.5], SIGMA[kept], ftol=1e-14
    )
    np.testing.assert_allclose(values(fit.parameters), parameters, rtol=1e-6)
    np.testing.assert_allclose(fit.covariance_matrix, covariance, rtol=1e-4)
    assert fit.degrees_of_freedom == int(kept.sum()) - 3


def test_inside_jit():
    @jax.jit
    def run(y):
        fit = gnlin.curve_fit(decay, X, y, START)
        return fit.parameters, fit.standard_errors, fit.result._value

    fit = gnlin.curve_fit(decay, X, Y, START)
    parameters, errors, _ = run(Y)
    np.testing.assert_allclose(values(parameters), values(fit.parameters), rtol=1e-8)
    np.testing.assert_allclose(values(errors), values(fit.standard_errors), rtol=1e-6)
    # A missing value that is traced is not left out, and no warning can be given.
    parameters, _, result = run(np.where(X[3] == X, np.nan, Y))
    assert result == optx.RESULTS.nonfinite._value
    assert np.all(np.isnan(values(parameters)))
    several = lambda y: gnlin.curve_fit(decay, X, y, START, fixed=["c"]).parameters
    shapes = jax.eval_shape(several, np.stack([Y, Y]))
    assert [x.shape for x in jax.tree.leaves(shapes)] == [(2,), (2,), (2,)]


def test_a_fit_under_jit_in_a_loop_is_compiled_once():
    """The parameters have the type of a start that is not weak."""
    fit = jax.jit(
        lambda y, start: gnlin.curve_fit(decay, X, y, start, **QUICK).parameters
    )
    start = {name: jnp.asarray(value, float) for name, value in START.items()}
    start = fit(jnp.asarray(Y), start)
    assert num_compiled(lambda: fit(jnp.asarray(Y), start)) == 0


@pytest.mark.slow
def test_what_needs_the_numbers_of_a_fit_inside_jit():
    def run(method, y, *given, **options):
        fit = gnlin.curve_fit(decay, X, y, START, sigma=0.05, **options)
        return getattr(fit, method)(*given)

    for method, *given in (
        ("band", X),
        ("confidence_intervals",),
        ("runs_test",),
        ("undetermined",),
    ):
        with pytest.raises(ValueError, match=f"`{method}` needs .* cannot be traced"):
            jax.eval_shape(lambda y, of=(method, given): run(of[0], y, *of[1]), Y)
    with pytest.raises(ValueError, match="`outliers` needs the numbers of the fit"):
        jax.eval_shape(lambda y: run("outliers", y, loss=gnlin.losses.Huber(1.0)), Y)
    band = jax.eval_shape(lambda y: run("band", y, X, absolute_sigma=True), Y)
    assert band.low.shape == (50,)


def test_fixed_with_values():
    with pytest.raises(ValueError, match="put the values into `start`"):
        gnlin.curve_fit(decay, X, Y, START, fixed={"c": 0.3})


def test_missing_values():
    y = Y.copy()
    y[[7, 30]] = np.nan
    fit = gnlin.curve_fit(decay, X, y, START, sigma=SIGMA, nan_policy="omit")
    check_fit_of(np.isfinite(y), fit)
    y[20] = np.inf
    infinite = np.where(np.isfinite(y), SIGMA, np.inf)
    check_fit_of(np.isfinite(y), gnlin.curve_fit(decay, X, y, START, sigma=infinite))


@pytest.mark.slow
def test_missing_values_with_a_covariance():
    covariance = covariance_of(50)
    covariance[7] = covariance[:, 7] = np.nan
    y = np.stack([Y, 2 * Y])
    y[:, 7] = y[1, 30] = np.nan
    options = {"sigma": covariance, "absolute_sigma": True, "nan_policy": "omit"}
    both = gnlin.curve_fit(decay, X, y, START, **options)
    for k in range(2):
        kept = np.isfinite(y[k])
        sigma = covariance[np.ix_(kept, kept)]
        without = gnlin.curve_fit(
            decay, X[kept], y[k, kept], START, sigma=sigma, absolute_sigma=True
        )
        found = jax.tree.map(lambda x, k=k: x[k], both.parameters)
        np.testing.assert_allclose(values(found), values(without.parameters), 1e-6)
        np.testing.assert_allclose(
            both.covariance_matrix[k], without.covariance_matrix, rtol=1e-6
        )
        assert both.degrees_of_freedom[k] == without.degrees_of_freedom


def test_a_missing_x_is_a_missing_point():
    x, y, sigma = X.copy(), Y.copy(), SIGMA.copy()
    x[[7, 30]], y[7], sigma[30] = np.nan, np.nan, np.nan
    fit = gnlin.curve_fit(decay, x, y, START, sigma=sigma, nan_policy="omit")
    check_fit_of(np.isfinite(x), fit)


@pytest.mark.slow
def test_a_missing_x_that_other_points_read():
    """Another x in its place would change the curve at its neighbours."""
    x = np.sin(np.arange(40.0)) + 0.1 * np.arange(40.0)
    blur = lambda p, x: p["a"] * x + p["b"] * (jnp.roll(x, 1) + jnp.roll(x, -1))
    y = x + 0.5 * (np.roll(x, 1) + np.roll(x, -1))
    start = {"a": 1.0, "b": 1.0}
    x[20] = np.nan
    with pytest.raises(ValueError, match="`f` also reads at other points"):
        gnlin.curve_fit(blur, x, y, start, nan_policy="omit")
    flat = lambda p, x: blur(p, x)[:, None] * jnp.ones((1, 2))
    with pytest.raises(ValueError, match="`f` also reads at other points"):
        gnlin.curve_fit(flat, x, np.stack([y, y], 1), start, nan_policy="omit")
    # As the error says: any value in its place, and no y where it is read.
    x[20], y[19:22] = 0.0, np.nan
    fit = gnlin.curve_fit(blur, x, y, start, nan_policy="omit", **QUICK)
    np.testing.assert_allclose(values(fit.parameters), [1, 0.5])


@pytest.mark.slow
def test_a_complex_number_with_one_nan_part_is_missing():
    w = np.linspace(0.1, 10, 40)
    z = 2 / (1 + 0.7j * w)
    z[3] = np.nan  # NumPy's imaginary part is 0

    def relaxing(p, w):
        size = jax.lax.complex(p["g"], 0.0)
        return size / jax.lax.complex(jnp.ones_like(w), w * p["tau"])

    start = {"g": 1.0, "tau": 1.0}
    fit = gnlin.curve_fit(relaxing, w, z, start, sigma=0.02 + 0 * w, nan_policy="omit")
    np.testing.assert_allclose(values(fit.parameters), [2, 0.7])
    band = fit.band(w[:3])
    np.testing.assert_allclose(band.mean, relaxing(fit.parameters, w[:3]))
    assert band.low.shape == (3,)


def two_lines(p, x):
    return jnp.stack([p["a"] + p["b"] * x, p["a"] - p["b"] * x], axis=1)


@pytest.mark.slow
def test_sigma_is_of_the_shape_of_y():
    x = np.linspace(-1, 1, 30)
    y = np.array(two_lines({"a": 1.0, "b": 2.0}, x)) + 0.1 * np.sin(9 * x)[:, None]
    sigma = np.stack([0.1 + 0 * x, 10 + 0 * x], axis=1)
    fit = gnlin.curve_fit(two_lines, x, y, LINE, sigma=sigma)
    alone = gnlin.curve_fit(line, x, y[:, 0], LINE, sigma=0.1)
    np.testing.assert_allclose(values(fit.parameters), values(alone.parameters), 1e-3)
    with pytest.raises(ValueError, match="`sigma` must be one number, have the shape"):
        gnlin.curve_fit(two_lines, x, y, LINE, sigma=sigma.T)


@pytest.mark.slow
def test_a_covariance_that_is_symmetric_to_single_precision():
    """A product of three factors is symmetric to their rounding only."""
    rng = np.random.default_rng(0)
    half = (1e-3 * (np.eye(50) + rng.normal(size=(50, 50)) / 14)).astype(np.float32)
    given = half @ (np.diag(np.linspace(0.5, 2, 50)).astype(np.float32) @ half.T)
    assert not np.array_equal(given, given.T)
    x, start = X.astype(np.float32), {k: np.float32(v) for k, v in START.items()}
    fit = gnlin.curve_fit(decay, x, Y.astype(np.float32), start, sigma=given, **QUICK)
    exact, _ = of_scipy(sigma=given.astype(float))
    np.testing.assert_allclose(values(fit.parameters), exact, rtol=1e-3)


@pytest.mark.slow
def test_sigma_of_a_dictionary_of_values():
    def both(p, x):
        return {"sum": p["a"] + p["b"] * x, "slope": p["b"] * jnp.ones(3)}

    x = np.linspace(-1, 1, 30)
    y = {"sum": 1 + 2 * x + 0.1 * np.sin(9 * x), "slope": np.array([1.9, 2.0, 2.4])}
    each = {"sum": 0.1, "slope": np.array([0.1, 0.1, 1.0])}
    fit = gnlin.curve_fit(both, x, y, LINE, sigma=each)
    flat = np.concatenate([each["slope"], np.full(30, 0.1)])  # in the order of leaves
    same = gnlin.curve_fit(both, x, y, LINE, sigma=flat)
    np.testing.assert_allclose(values(fit.parameters), values(same.parameters))


@pytest.mark.slow
def test_units_in_which_all_is_small():
    """All numbers are below the absolute tolerance."""
    scale = 1e-20
    times = {"a": 1.0, "length": 1.0, "c": 0.0}

    def by_length(p, x):
        return p["a"] * jnp.exp(-x / p["length"]) + p["c"]

    start = {name: scale * value for name, value in times.items()}
    fit = gnlin.curve_fit(by_length, scale * X, scale * Y, start)
    plainly = gnlin.curve_fit(by_length, X, Y, times)
    found = values(fit.parameters) / scale
    np.testing.assert_allclose(found, values(plainly.parameters), rtol=1e-5)


@pytest.mark.slow
def test_bounds_as_scipy_has_them():
    """Bounds may be lists for an array, and arrays for a list."""

    def f(p, x):
        return p[0] * jnp.exp(-p[1] * x) + p[2]

    expected = of_scipy()[0][[0, 2, 1]]
    for start, bounds in (
        (np.ones(3), ([0, 0, 0], [9, 9, 9])),
        ([1.0, 1.0, 1.0], (np.zeros(3), 9)),
    ):
        fit = gnlin.curve_fit(f, X, Y, start, bounds=bounds)
        np.testing.assert_allclose(np.asarray(fit.parameters), expected, rtol=1e-5)


@pytest.mark.slow
def test_data_that_are_met_exactly():
    fit = gnlin.curve_fit(line, X, 1 + 2 * X, LINE)
    low, high = fit.confidence_intervals()
    np.testing.assert_allclose(values(low), [1, 2])
    np.testing.assert_allclose(values(high), [1, 2])


@pytest.mark.slow
def test_an_interval_that_ends_at_a_bound():
    x, y = np.array([0.0, 1.0, 2.0]), np.array([1.0, 0.4, 0.3])

    def f(p, x):
        return jnp.exp(-p["rate"] * x) + p["c"]

    start, bounds = {"rate": 1.0, "c": 0.1}, {"c": (0.0, 0.2)}
    fit = gnlin.curve_fit(f, x, y, start, bounds=bounds)
    with pytest.warns(UserWarning, match="end of rate lies where c is at its lower bou"):
        low, high = fit.confidence_intervals()
    assert low["c"] == 0.0
    assert high["c"] == 0.2


@pytest.mark.slow
def test_starts_of_many_data_sets():
    x = np.linspace(0, 10, 100)
    ys = np.stack([2 * np.sin(3 * x + 0.5), np.sin(5 * x)])
    fits = gnlin.curve_fit(
        lambda p, x: p["size"] * jnp.sin(p["rate"] * x + p["phase"]),
        x,
        ys + 0.1 * np.random.default_rng(0).normal(size=ys.shape),
        {"size": 1.0, "rate": 1.0, "phase": 0.0},
        bounds={"size": (0, 5), "rate": (0, 10), "phase": (-3, 3)},
        starts=64,
    )
    np.testing.assert_allclose(fits.parameters["rate"], [3, 5], atol=0.02)


@pytest.mark.slow
def test_many_data_sets_of_which_some_determine_nothing():
    one_point = np.where(np.arange(len(Y)) == 0, Y, np.nan)
    with pytest.warns(UserWarning, match="1 of 2 data sets do not determine all"):
        fits = gnlin.curve_fit(line, X, [Y, one_point], LINE, nan_policy="omit")
    assert repr(fits).endswith("1 do not determine all parameters)")


@pytest.mark.parametrize(
    ("f", "x"),
    [
        (line, list(np.arange(4.0, dtype=np.float32))),
        pytest.param(line, [0.0, 1, 2, 3], marks=pytest.mark.slow),
        pytest.param(
            lambda p, x: line(p, x["t"][:, 0] + x["t"][:, 1]),
            {"t": [[0, 0.0], [1, 0], [1, 1], [1, 2]]},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_lists_of_numbers(f, x):
    start = {name: np.float32(value) for name, value in LINE.items()}
    with jax.numpy_dtype_promotion("standard"):
        fit = gnlin.curve_fit(f, x, [1, 2, 3, 4.1], start, **QUICK)
    np.testing.assert_allclose(values(fit.parameters), [0.98, 1.03], rtol=1e-6)


def test_equal_minima_at_different_parameters_are_counted():
    """A product has a minimum for each sign of its factors, and a sum of squares one for
    each sign of each; the parameters at each loss are those of its own start."""
    f = lambda p, x: p["a"][0] * jnp.exp(-(p["a"][1] ** 2) * x) + p["c"]
    start = {"a": np.array([1.0, 0.5]), "c": 0.0}
    y = 2 * np.exp(-0.8 * X) + NOISE
    options = {"bounds": {"a": (-3.0, 3.0)}, "fixed": ["c"], "starts": 8}
    fit = gnlin.curve_fit(f, X, y, start, **options)
    number = np.sum(fit.losses < fit.losses[0] + 1e-9)
    assert f"{number} of 8 starts reached the best loss" in str(fit)
    assert ", at 2 different values of the parameters; the worst" in str(fit)
    rates = fit.ends["a"][:number, 1]
    np.testing.assert_allclose(np.abs(rates), np.abs(rates[0]), rtol=1e-5)
    assert {-1, 1} == set(np.sign(rates))
    for k in range(8):
        at = {"a": fit.ends["a"][k], "c": fit.ends["c"][k]}
        loss = 0.5 * np.sum((f(at, X) - y) ** 2)
        np.testing.assert_allclose(loss, fit.losses[k], rtol=1e-9)
    options["bounds"] = {"a": ([-3.0, 0.0], 3.0)}
    assert "different" not in str(gnlin.curve_fit(f, X, y, start, **options))
    many = gnlin.curve_fit(f, X, np.stack([y, y]), start, **options)
    assert many.ends["a"].shape == (2, 8, 2)
    for k in range(2):
        np.testing.assert_allclose(many.ends["a"][k, 0], many.parameters["a"][k])


@pytest.mark.slow
def test_starts_that_reach_the_best_loss_are_counted():
    """The losses differ by rounding: they are zero or negative."""
    f = lambda p, x: jnp.exp(-p["a"] * x) + p["b"]
    bounds = dict.fromkeys("ab", (-2.0, 2.0))
    fit = gnlin.curve_fit(f, X, np.exp(-X) + 0.5, LINE, bounds=bounds, starts=4, **QUICK)
    assert "4 of 4 starts reached the best loss" in str(fit)
    negative = dataclasses.replace(fit, losses=np.array([-5, -5 + 1e-9, -4]))
    assert "2 of 3 starts reached the best loss" in str(negative)
    not_finite = dataclasses.replace(fit, losses=np.full(4, np.nan))
    assert "starts reached" not in str(not_finite)


def test_many_data_sets_at_once():
    scales = np.array([1.0, 2.0, 0.5, 3.0])
    ys = scales[:, None] * Y
    start = {name: value + 0.1 * scales for name, value in START.items()}
    fits = gnlin.curve_fit(decay, X, ys, start, sigma=SIGMA)
    for k, scale in enumerate(scales):
        one = gnlin.curve_fit(decay, X, scale * Y, START, sigma=SIGMA)
        of_one = jax.tree.map(lambda leaf, k=k: leaf[k], fits.parameters)
        np.testing.assert_allclose(values(of_one), values(one.parameters), rtol=1e-6)
        errors = jax.tree.map(lambda leaf, k=k: leaf[k], fits.standard_errors)
        np.testing.assert_allclose(values(errors), values(one.standard_errors), rtol=1e-5)
    assert repr(fits) == "CurveFit(4 data sets, 4 of them converged)"
    assert fits.history is None
    assert fits._setting.solver.damping is None  # nothing waits for expensive trials


@pytest.mark.slow
def test_many_starts_find_the_global_minimum():
    """The frequency of a sine has a local minimum at each wrong value."""
    x = np.linspace(0, 10, 60)
    y = 2 * np.sin(3.3 * x + 0.4)

    def sine(p, x):
        return p["a"] * jnp.sin(p["w"] * x + p["phase"])

    start = {"a": 1.0, "w": 1.0, "phase": 0.0}
    bounds = {"a": (0.1, 5.0), "w": (0.5, 6.0), "phase": (-3.2, 3.2)}
    fit = gnlin.curve_fit(sine, x, y, start, bounds=bounds, starts=32)
    np.testing.assert_allclose(values(fit.parameters), [2.0, 0.4, 3.3], rtol=1e-6)
    assert fit.losses.shape == (32,)
    assert fit.losses[-1] > 1
    assert "of 32 starts reached the best loss" in str(fit)


@pytest.mark.slow
def test_starts_and_missing_values_inside_a_compiled_function():
    bounds = {"a": (0.0, 9.0), "rate": (0.0, 5.0), "c": (-1.0, 2.0)}
    given = {"bounds": bounds, "starts": 3, "nan_policy": "omit"}

    @jax.jit
    def parameters(y):
        return gnlin.curve_fit(decay, X, y, START, **given, **QUICK).parameters

    np.testing.assert_allclose(values(parameters(Y)), of_scipy()[0], rtol=1e-5)
    kept = X[3] != X
    known, _ = scipy.optimize.curve_fit(plain, X[kept], Y[kept], [1, 0, 0.5], ftol=1e-14)
    found = parameters(np.where(kept, Y, np.nan))
    np.testing.assert_allclose(values(found), known, rtol=1e-5)


@pytest.mark.slow
def test_complex_values_and_arrays():
    w = np.linspace(0.1, 3, 20)

    def response(p, w):
        return p[0].astype(complex) / jax.lax.complex(jnp.full(20, p[1]), w)

    w = jnp.asarray(w)
    y = response(jnp.array([2.0, 0.7]), w)
    fit = gnlin.curve_fit(response, w, y, np.array([1.0, 1.0]))
    np.testing.assert_allclose(fit.parameters, [2.0, 0.7], rtol=1e-8)
    assert fit.covariance.shape == (2, 2)
    assert fit.names == ("p[0]", "p[1]")


@pytest.mark.slow
def test_in_single_precision():
    fit = gnlin.curve_fit(
        decay,
        jnp.asarray(X, jnp.float32),
        jnp.asarray(Y, jnp.float32),
        {k: jnp.float32(v) for k, v in START.items()},
    )
    parameters, covariance = of_scipy()
    np.testing.assert_allclose(values(fit.parameters), parameters, rtol=1e-4)
    np.testing.assert_allclose(fit.covariance_matrix, covariance, rtol=1e-3)


@pytest.mark.slow
def test_by_an_xla_that_lacks_the_options_to_compile_quickly(monkeypatch):
    quick = gnlin.curve_fit(decay, X, Y, START)
    monkeypatch.setitem(_quickly._EMITTERS, "xla_of_another_version", True)
    _quickly.are_known.cache_clear()
    assert not _quickly.are_known()
    other = gnlin.curve_fit(lambda p, x: decay(p, x), X, Y, START)
    _quickly.are_known.cache_clear()
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-8)
    jax.tree.map(assert_close, quick.parameters, other.parameters)
    jax.tree.map(assert_close, quick.standard_errors, other.standard_errors)


def test_one_program_for_all_numbers():
    traces = []

    def traced(p, x):
        traces.append(x)
        return decay(p, x)

    bounds = {"rate": (0.0, 5.0), "a": (None, 10.0)}
    options = {"sigma": 0.1, "bounds": bounds, "fixed": ["c"]}
    gnlin.curve_fit(traced, X, Y, START, **options, **QUICK)
    before = len(traces)
    start = {"a": 2.0, "rate": 1.0, "c": 0.3}
    options |= {"sigma": 0.2, "bounds": {"rate": (0.1, 4.0), "a": (None, 9.0)}}
    run = lambda: gnlin.curve_fit(traced, X, Y + 1, start, **options, **QUICK)
    assert num_compiled(run) == 0
    assert len(traces) == before


def names_compiled(call):
    """Return the names of the programs that a call compiles."""
    names = []

    def note(event, *_, **about):
        if "backend_compile" in event:
            names.append(about.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    return names


def with_a_loop(p, x):
    """Use a loop of unknown length, as in the solution of a differential equation."""
    most = jnp.max(x) + 5
    step = lambda s: (s[0] + 1, s[1] * jnp.exp(-p["rate"] * x / most))
    begin = jnp.zeros_like(most), jnp.ones_like(x)
    _, decayed = jax.lax.while_loop(lambda s: s[0] < most, step, begin)
    return p["a"] * decayed + p["c"]


@pytest.mark.slow
def test_profiles_and_starts_are_by_the_program_of_the_fit():
    bounds = {"a": (0.0, 9.0), "rate": (0.0, 5.0), "c": (-1.0, 2.0)}
    given = lambda p, x: with_a_loop(p, x)
    fit = gnlin.curve_fit(given, X, Y, START, bounds=bounds)
    others = names_compiled(fit.confidence_intervals)
    many = lambda: gnlin.curve_fit(given, X, Y, START, bounds=bounds, starts=4)
    others += names_compiled(many)
    more = lambda: gnlin.curve_fit(given, X, Y, START, bounds=bounds, starts=65)
    others += names_compiled(more)
    assert not [name for name in others if "fitted" in name]
    of_another = lambda: gnlin.curve_fit(lambda p, x: 2 * decay(p, x), X, Y, START)
    assert [name for name in names_compiled(of_another) if "fitted" in name]
    interval, plain = fit.confidence_intervals(), gnlin.curve_fit(decay, X, Y, START)
    for ends, others in zip(interval, plain.confidence_intervals(), strict=True):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), ends, others
        )


@pytest.mark.slow
def test_messages_for_loops_that_end_early_or_raise():
    def rough(p, x):
        """Add small steps, as a loop that takes one more iteration does."""
        found = with_a_loop(p, x)
        return found + 1e-5 * jnp.sin(1e7 * jax.lax.stop_gradient(found))

    with pytest.warns(UserWarning, match="lower the tolerances"):
        gnlin.curve_fit(rough, X, Y, START)

    def raising(p, x):
        return eqx.error_if(decay(p, x), p["rate"] > 0, "too far")

    with pytest.raises(Exception, match="too far") as raised:
        gnlin.curve_fit(raising, X, Y, START | {"rate": -0.1})
    assert "throw=False" in raised.value.__notes__[0]


def written_anew(shift):
    return lambda p, x: jax.nn.relu(p["a"]) * jnp.exp(-p["rate"] * x) + shift


@pytest.mark.slow
def test_a_redefined_function_is_not_compiled_again():
    start = {"a": 1.0, "rate": 0.5}
    fits = []

    def run(f):
        fits.append(gnlin.curve_fit(f, X, Y, start, **QUICK))
        fits[-1].band(X[:7])

    shifts = [{n: np.full(n, shift) for n in (7, 50)} for shift in (0.5, 1.0)]

    def shifted(by):
        return lambda p, x: written_anew(by[x.size])(p, x)

    run(shifted(shifts[0]))
    assert num_compiled(lambda: run(shifted(shifts[1]))) == 0
    expected, _ = scipy.optimize.curve_fit(
        lambda x, a, rate: plain(x, a, 1.0, rate), X, Y, [1, 0.5], ftol=1e-14
    )
    np.testing.assert_allclose(values(fits[1].parameters), expected, rtol=1e-6)


def test_another_max_steps_compiles_nothing():
    fits = []

    def run(most):
        fits.append(gnlin.curve_fit(decay, X, Y, START, max_steps=most))

    run(256)
    assert num_compiled(lambda: run(1000)) == 0
    assert fits[0].num_steps == fits[1].num_steps == len(fits[1].history.loss) > 2
    with pytest.warns(UserWarning, match="all 2 steps were made"):
        assert not [name for name in names_compiled(lambda: run(2)) if "fitted" in name]
    assert len(fits[2].history.loss) == 2
    history = lambda y: gnlin.curve_fit(decay, X, y, START, max_steps=2).history
    assert {rows.shape for rows in jax.eval_shape(history, Y).values()} == {(2,)}


def with_slope(slope):
    """The exponential of minus a number, with a user-defined derivative."""
    decaying = jax.custom_jvp(lambda k: jnp.exp(-k))
    decaying.defjvp(lambda k, d: (decaying(*k), -slope * jnp.exp(-k[0]) * d[0]))
    return lambda p, x: p["c"] + decaying(p["rate"] * x)


@pytest.mark.slow
def test_functions_with_other_derivatives_are_other_programs():
    start = {"c": 0.0, "rate": 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, two = (
            gnlin.curve_fit(with_slope(slope), X, Y, start, max_steps=1)
            for slope in (1.0, 0.5)
        )
    assert abs(one.parameters["rate"] - two.parameters["rate"]) > 1e-3


def orthogonal(p, x):
    return p[0] * jnp.cos(x) + p[1] * jnp.sin(x)


@pytest.mark.slow
@pytest.mark.parametrize("derivative", [jax.jacfwd, jax.jacrev])
def test_derivatives_where_singular_values_are_equal(derivative):
    x = np.linspace(0, 2 * np.pi, 17)[:-1]
    y = 2 * np.cos(x) - np.sin(x) + 0.1 * np.cos(5 * x)

    def found(y):
        fit = gnlin.curve_fit(orthogonal, x, y, jnp.ones(2), **QUICK)
        return fit.parameters, fit.standard_errors

    of_parameters, of_errors = jax.jit(derivative(found))(y)
    expected = np.stack([np.cos(x), np.sin(x)]) / 8
    np.testing.assert_allclose(of_parameters, expected, atol=1e-12)
    residual = y - 8 * expected.T @ (expected @ y)
    error = np.sqrt(residual @ residual / 14 / 8)
    along = residual / (14 * 8 * error)
    np.testing.assert_allclose(of_errors, np.stack([along, along]), atol=1e-12)


@pytest.mark.slow
def test_derivatives_of_the_deviance():
    """At the minimum, the loss changes as with the parameters held; at a bound, by the
    multiplier."""

    def found(y, most):
        fit = gnlin.curve_fit(
            decay, X, y, START, sigma=SIGMA, bounds={"rate": (0, most)}, **QUICK
        )
        return fit.deviance, (fit.residuals, fit.multipliers["rate"])

    of_both = jax.jacrev(found, argnums=(0, 1), has_aux=True)
    (of_y, of_bound), (residuals, multiplier) = jax.jit(of_both)(jnp.asarray(Y), 0.8)
    np.testing.assert_allclose(of_y, 2 * residuals / SIGMA, rtol=1e-9)
    np.testing.assert_allclose(of_bound, 2 * multiplier, rtol=1e-9)


@pytest.mark.slow
def test_second_derivatives_with_several_parameters_at_bounds():
    """Each parameter is the root of its point, or its bound."""

    def first(y):
        bounds = 0.0, np.array([9.0, 1.1, 1.2])
        fit = gnlin.curve_fit(
            lambda p, x: p**2, np.zeros(3), y, np.ones(3), bounds=bounds
        )
        return fit.parameters[0]

    found = jax.jit(jax.jacfwd(jax.grad(first)))(jnp.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(found, np.diag([-0.25, 0, 0]), rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_many_undetermined_directions_are_a_short_warning():
    f = lambda p, x: jnp.sum(p["a"]) * jnp.ones_like(x)
    with pytest.warns(UserWarning, match="; or 6 other directions does not") as warned:
        fit = gnlin.curve_fit(f, X, Y, {"a": np.ones(10)}, **QUICK)
    assert len(str(warned[0].message)) < 500
    assert len(fit.undetermined()) == 9
    assert "not determined: " in str(fit)
    assert "; 6 other directions" in str(fit)


def test_a_covariance_that_single_precision_does_not_hold():
    tiny = 1e-44 * (np.eye(50) + 0.5)
    x, y, start = (jnp.asarray(v, jnp.float32) for v in (X, 1e-20 * Y, 1e-20))
    with pytest.raises(ValueError, match="definite in float32: take other units of y"):
        gnlin.curve_fit(lambda p, x: p * jnp.exp(-x), x, y, start, sigma=tiny)


def _on_the_sphere(row, step):
    return (row + step) / jnp.linalg.norm(row + step)


def _by_two_angles(p):
    sin = jnp.sin(p["polar"])
    first, second = sin * jnp.cos(p["azimuth"]), sin * jnp.sin(p["azimuth"])
    return jnp.stack([first, second, jnp.cos(p["polar"])])


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [gnlin.SquaredError(), gnlin.losses.PoissonNLL()], ids=["squared", "counts"]
)
def test_errors_along_a_retraction(loss):
    """A unit vector has the errors that two angles have."""
    rng = np.random.default_rng(0)
    sensors = rng.normal(size=(40, 3))
    field = 2 * sensors @ np.array([0.36, 0.48, 0.8]) + 0.05 * rng.normal(size=40)
    y = field if isinstance(loss, gnlin.SquaredError) else rng.poisson(np.exp(field))
    retraction = {"direction": _on_the_sphere, "size": None}
    by_steps = gnlin.curve_fit(
        lambda p, x: p["size"] * x @ p["direction"],
        sensors,
        y,
        {"direction": np.array([1.0, 0, 0]), "size": 1.0},
        gnlin.GaussNewton(retraction=retraction),
        loss=loss,
    )
    by_angles = gnlin.curve_fit(
        lambda p, x: p["size"] * x @ _by_two_angles(p),
        sensors,
        y,
        {"polar": 1.0, "azimuth": 1.0, "size": 1.0},
        loss=loss,
        **QUICK,
    )
    expected = by_angles.derived(lambda p: (_by_two_angles(p), p["size"]))
    found = by_steps.derived(lambda p: (p["direction"], p["size"]))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    errors = by_steps.standard_errors
    np.testing.assert_allclose(errors["direction"], expected[1][0], rtol=1e-5)
    assert by_steps.degrees_of_freedom == 37
    bands = (fit.band(sensors[:5]) for fit in (by_steps, by_angles))
    for one, other in zip(*bands, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert not by_steps.undetermined()
    with pytest.raises(ValueError, match="a `retraction` would move: take"):
        by_steps.confidence_intervals()


@pytest.mark.slow
def test_an_undetermined_rotation():
    """Points on the axis of a rotation do not determine its angle."""

    def turned(q, step):  # a quaternion, by half of the angles in three entries
        half = jnp.concatenate([jnp.ones(1), 0.5 * step[:3]])
        (a, *u), (b, *v) = q, half / jnp.linalg.norm(half)
        u, v = jnp.stack(u), jnp.stack(v)
        return jnp.concatenate([(a * b - u @ v)[None], a * v + b * u + jnp.cross(u, v)])

    def rotated(p, x):
        u = jnp.broadcast_to(p["q"][1:], x.shape)
        turn = 2 * jnp.cross(u, jnp.cross(u, x) + p["q"][0] * x)
        return x + turn + p["shift"][None]

    x = np.outer(np.linspace(1, 2, 20), [0, 0, 1])
    y = x + 0.01 * np.random.default_rng(1).normal(size=x.shape)
    start = {"q": np.array([1.0, 0, 0, 0]), "shift": np.zeros(3)}
    solver = gnlin.GaussNewton(retraction={"q": turned, "shift": None})
    with pytest.warns(UserWarning, match=r"do not determine all parameters.*q\[3\] by"):
        fit = gnlin.curve_fit(rotated, x, y, start, solver)
    assert fit.degrees_of_freedom == 60 - 5
    assert np.isinf(fit.standard_errors["q"][3])
    assert np.all(np.isfinite(fit.standard_errors["shift"]))
    turned_point = fit.derived(lambda p: rotated(p, jnp.asarray(x[:1])))
    assert np.all(np.isfinite(turned_point.standard_error))


def test_what_a_retraction_does_not_go_with():
    f, solver = lambda p, x: x @ p, gnlin.LevenbergMarquardt(retraction=_on_the_sphere)
    x, start = np.eye(3), np.array([1.0, 0, 0])
    with pytest.raises(ValueError, match="does not stay between `bounds`: pass only"):
        gnlin.curve_fit(f, x, x[1], start, solver, bounds=(0.0, 1.0))
    with pytest.raises(ValueError, match="leave the `retraction` out"):
        gnlin.curve_fit(f, x, x[1], start, solver, in_parts=True)
    wrong = dataclasses.replace(solver, retraction={"q": _on_the_sphere})
    with pytest.raises(ValueError, match="or have the parameters' structure"):
        gnlin.curve_fit(f, x, x[1], start, wrong)


@pytest.mark.slow
def test_derivatives_with_a_retraction_are_an_error():
    def fitted(y):
        turn = lambda row, step: row + jnp.sin(step)
        solver = gnlin.LevenbergMarquardt(retraction=turn)
        f = lambda p, x: p[0] * jnp.exp(-p[1] * x)
        return gnlin.curve_fit(f, X, y, np.ones(2), solver=solver).parameters

    with pytest.raises(ValueError, match="no derivatives with a `retraction`: use"):
        jax.eval_shape(jax.jacfwd(fitted), jnp.asarray(Y))


@pytest.mark.slow
def test_derivatives_at_a_bound():
    """A parameter at a bound moves with it; the others move with the bound and the
    data."""
    derivative, loss = jax.jacrev, gnlin.losses.PseudoHuber(0.1)

    def values(y, most):  # a number as `sigma`, within a compiled function
        bounds = {"rate": (0.0, most)}
        fit = gnlin.curve_fit(decay, X, y, START, sigma=0.05, bounds=bounds, loss=loss)
        return jnp.stack([fit.parameters[name] for name in ("a", "c", "rate")])

    @jax.jit
    def derivatives(y, most):
        of_both = derivative(values, argnums=(0, 1))(y, most)
        return *of_both, derivative(values)(y, most)

    compiled = jax.jit(values)
    found = lambda y, most: np.asarray(compiled(y, most))
    y, most, h = jnp.asarray(Y), 0.8, 1e-5
    of_y, of_bound, of_y_alone = derivatives(y, most)
    step = h * (np.arange(50) == 9)
    expected = (found(y + step, most) - found(y - step, most)) / (2 * h)
    np.testing.assert_allclose(of_y[:, 9], expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(of_y_alone, of_y, rtol=1e-9, atol=1e-12)
    expected = (found(y, most + h) - found(y, most - h)) / (2 * h)
    np.testing.assert_allclose(of_bound, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_derivatives_of_many_data_sets_and_by_values_that_f_closes_over():
    def rates(y, unit):
        f = lambda p, x: decay(p, unit * x)
        return gnlin.curve_fit(f, X, y, START).parameters["rate"]

    @jax.jit
    def derivatives(y, unit):
        of_y, of_unit = jax.jacrev(rates, argnums=(0, 1))(y, unit)
        return of_y, of_unit, rates(y, unit), jax.grad(rates)(y[1], unit)

    of_y, of_unit, expected, alone = derivatives(jnp.stack([Y, 2 * Y]), 1.0)
    np.testing.assert_allclose(of_unit, -expected, rtol=1e-6)
    np.testing.assert_allclose(of_y[1, 1], alone, rtol=1e-5)


@pytest.mark.slow
def test_an_undetermined_direction_has_no_derivative():
    def sums(y):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            f = lambda p, x: (p["a"] + p["b"]) * x
            fit = gnlin.curve_fit(f, X, y, {"a": 1.0, "b": 2.0})
        return fit.parameters["a"], fit.parameters["b"]

    a, b = jax.jacfwd(sums)(jnp.asarray(Y))
    np.testing.assert_allclose(a, X / (2 * X @ X), rtol=1e-8)
    np.testing.assert_allclose(a, b, rtol=1e-8)


@pytest.mark.slow
def test_a_parameter_with_an_effect_below_rounding_is_reported():
    """This holds for any start; the others' errors are as if it were fixed."""
    sign = np.where(np.arange(50) % 3 == 0, 1, -1)

    def nearly_a_line(p, x):
        return p["a"] * x + 1e-16 * sign * jnp.sin(p["b"])

    for b in (0.0, 1.0):
        with pytest.warns(UserWarning, match="`gnlin.curve_fit`"):
            fit = gnlin.curve_fit(nearly_a_line, X, 2 * X + NOISE, {"a": 1.0, "b": b})
        assert np.isinf(fit.standard_errors["b"])
        assert fit.undetermined() == ["b by 1"]
        alone = gnlin.curve_fit(lambda p, x: p * x, X, 2 * X + NOISE, 1.0)
        np.testing.assert_allclose(fit.standard_errors["a"], alone.standard_errors)


@pytest.mark.parametrize(
    ("unit", "rate", "said"),
    [(1, 5.0, "a by 1; or rate by 1"), (1e-18, 5e-17, "a by 1; or rate by 1e-17")],
)
def test_a_plateau_is_reported(unit, rate, said):
    x = np.arange(36.0, 86)
    y, start = 371 + np.cos(x), {"a": 1.0, "rate": rate, "c": 300.0}
    with pytest.warns(UserWarning, match=f"moving {said} does not change"):
        fit = gnlin.curve_fit(decay, x / unit, y, start)
    assert np.isinf([fit.standard_errors["a"], fit.standard_errors["rate"]]).all()
    expected = np.std(y, ddof=1) / np.sqrt(50)
    np.testing.assert_allclose(fit.standard_errors["c"], expected, rtol=1e-6)


def test_a_parameter_of_zero_can_be_determined():
    x = np.linspace(-1, 1, 21)
    y = 3 + 0.1 * np.cos(7 * x)  # the slope of an even function is 1e-17
    for scale in (1.0, 1e-12, 1e12):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            start = {"a": 1.0, "b": 1.0 / scale}
            f = lambda p, x: p["a"] + x["unit"] * p["b"] * x["t"]
            fit = gnlin.curve_fit(
                f, {"t": x, "unit": np.full(21, scale)}, y, start, **QUICK
            )
        assert np.isfinite(values(fit.standard_errors)).all()


@pytest.mark.slow
def test_a_derivative_that_is_not_finite_is_placed_and_named():
    x = np.array([1.0, 2, 0, 3])
    y = np.array([0.4, 0.7, 0, 0.8])
    hill = lambda p, x: p["a"] / (1 + (p["k"] / x) ** p["n"])
    start = {"a": 1.0, "k": 1.0, "n": 2.0}
    said = r"derivative of `f` by `k` and `n` is not finite at point 2 \(x = 0.0\)"
    with pytest.warns(UserWarning, match=said):
        fit = gnlin.curve_fit(hill, x, y, start, **QUICK)
    assert np.isnan(values(fit.standard_errors)).all()
    assert fit.degrees_of_freedom == 1
    assert "error unknown" in str(fit)


def test_where_f_is_not_finite():
    def f(p, x):
        return {"one": p * jnp.sin(x["t"]), "two": p * jnp.log(x["t"])}

    x = {"t": np.arange(3.0)}
    y = {"one": np.zeros(3), "two": np.ones(3)}
    said = r"not finite at the start at point 0 of `two` \(x.t = 0.0\): leave out"
    with pytest.warns(UserWarning, match=said):
        gnlin.curve_fit(f, x, y, 1.0, **QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [None, {"k": (0.0, 10.0)}], ids=["loops", "bounds"])
def test_many_fits_whose_trials_are_expensive_take_few(bounds):
    """All data sets wait for the one with the most trials at each step."""

    def integrated(p, x):
        def step(y, h):
            return y - h * p["k"] * y, y

        return p["a"] * jax.lax.scan(step, jnp.ones(()), x)[1]

    def exact(p, x):
        return p["a"] * (1 - 0.1 * p["k"]) ** jnp.arange(30.0)

    f = integrated if bounds is None else exact
    x = np.full(30, 0.1)
    truth = ((1.0, 0.5), (2.0, 3.0), (0.3, 1.0))
    ys = np.stack([a * (1 - 0.1 * k) ** np.arange(30.0) for a, k in truth])
    start = {"a": 1.0, "k": 6.0}
    fits = gnlin.curve_fit(f, x, ys, start, bounds=bounds)
    np.testing.assert_allclose(fits.parameters["k"], [0.5, 3, 1], rtol=1e-6)
    assert isinstance(fits._setting.solver.damping, gnlin.damping.Nielsen)


def test_a_curve_that_is_not_finite_has_no_errors():
    """Its Jacobian is finite, as that of a solver that gives up and fills in `inf`."""

    def f(p, t):
        return jnp.where((p["k"] >= 2) & (t > 3), jnp.inf, p["a"] * jnp.exp(-p["k"] * t))

    t = np.linspace(0, 4, 20)
    y = 2.5 * np.exp(-1.3 * t)
    with pytest.warns(UserWarning, match="let a solver that `f` calls take more steps"):
        fit = gnlin.curve_fit(f, t, y, {"a": 1.0, "k": 3.0}, sigma=0.01, **QUICK)
    assert np.isnan(values(fit.standard_errors)).all()
    assert np.isnan(values(fit.confidence_intervals().low)).all()
    assert "error unknown" in str(fit)


@pytest.mark.slow
def test_a_list_of_complex_arrays_is_no_array():
    s = 1j * np.linspace(0.0, 4.0, 9)
    y = np.abs(3 / (0.7 + s))

    def f(p, parts):
        return p["g"] / jnp.abs(jax.lax.complex(p["k"], 0.0) + jnp.concatenate(parts))

    fit = gnlin.curve_fit(f, [s[:3], s[3:]], y, {"g": 1.0, "k": 1.0})
    np.testing.assert_allclose(values(fit.parameters), [3, 0.7], rtol=1e-8)
    np.testing.assert_allclose(fit.band([s[:1], s[5:6]]).mean, y[[0, 5]], rtol=1e-8)


def test_fewer_points_than_parameters():
    with pytest.warns(UserWarning, match="do not determine all parameters"):
        fit = gnlin.curve_fit(decay, X[:2], Y[:2], START, **QUICK)
    assert fit.result == optx.RESULTS.successful


def test_as_many_points_as_parameters():
    sigma = np.where(np.isin(np.arange(50), [0, 20, 49]), 1.0, np.inf)
    with pytest.warns(UserWarning, match="no more points than parameters"):
        fit = gnlin.curve_fit(decay, X, Y, START, sigma=sigma)
    assert "error unknown" in str(fit)


def test_a_run_that_has_not_converged_says_so():
    with pytest.warns(UserWarning, match="all 2 steps were made: raise `max_steps`"):
        gnlin.curve_fit(decay, X, Y, START, max_steps=2)


@pytest.mark.parametrize(
    ("dtype", "size", "said"),
    [
        (float, 1e-200, "underflow in double precision: take smaller units of y\\.$"),
        (float, 1e200, "overflow"),
        pytest.param(
            *(np.float32, 1e-25, "underflow in single precision: .* of y, or use double"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_squares_that_underflow_or_overflow(dtype, size, said):
    x, y = X.astype(dtype), (size * (2 + NOISE)).astype(dtype)
    start = {"a": dtype(size), "rate": dtype(1), "c": dtype(size)}
    with pytest.warns(UserWarning, match=f"the residuals' squares {said}"):
        fit = gnlin.curve_fit(decay, x, y, start)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(fit.confidence_intervals().low["rate"])


@pytest.mark.slow
def test_squares_that_underflow_during_the_run():
    """The loss of the start is not zero, and the rate is not changed at all."""
    x, size = X.astype(np.float32), np.float32(1e-19)
    start = {"a": size, "rate": np.float32(1), "c": size / 10}
    with pytest.warns(UserWarning, match="squares underflow in single precision"):
        gnlin.curve_fit(decay, x, size * Y.astype(np.float32), start)


@pytest.mark.parametrize(
    ("dtype", "unit", "said"),
    [
        (
            np.float32,
            1e-22,
            "underflow in single precision: take larger units of `rate`",
        ),
        (float, 1e-170, "underflow in double precision: take larger units of `rate`\\.$"),
        (
            np.float32,
            1e22,
            "overflow in single precision: take smaller units of `rate`",
        ),
    ],
)
def test_squares_of_a_derivative_beyond_the_range(dtype, unit, said):
    """The run does not see that the rate has an effect, so it is not at the minimum."""
    start = {"a": dtype(1), "rate": dtype(0.5) / dtype(unit), "c": dtype(0)}
    x = dtype(unit) * X.astype(dtype)
    said = f"has not converged: the squares of the derivative of `f` by `rate` {said}"
    with pytest.warns(UserWarning, match=said):
        fit = gnlin.curve_fit(decay, x, Y.astype(dtype), start)
    assert "by `rate`" in fit.reason
    assert np.isnan(fit.standard_errors["rate"])


def test_the_picture():
    matplotlib.use("Agg")
    fit = gnlin.curve_fit(decay, X, Y, START, sigma=SIGMA)
    ax = fit.plot()
    assert len(ax.lines) >= 2
    assert ax.get_legend() is not None


def test_bounds_and_fixed_parameters_within_dictionaries():
    """There are two decays, each a dictionary. SciPy fits the same parameters, flat."""

    def two(p, x):
        return decay({**p["fast"], "c": p["c"]}, x) + decay({**p["slow"], "c": 0.0}, x)

    y = Y + np.asarray(decay({"a": 0.5, "rate": 4.0, "c": 0.0}, X))
    start = {"fast": {"a": 1.0, "rate": 2.0}, "slow": {"a": 1.0, "rate": 0.5}, "c": 0.0}
    start |= {"held": start["fast"]}
    bounds = {"slow": {"rate": (0.0, 0.9)}, "fast": {"a": (None, 5.0), "rate": (0, 9)}}
    fit = gnlin.curve_fit(
        two, X, y, start, bounds=bounds, fixed=["fast.rate", "held"], **QUICK
    )
    flat = scipy.optimize.least_squares(
        lambda p: plain(X, p[0], p[3], 2.0) + plain(X, p[1], 0.0, p[2]) - y,
        [1.0, 1.0, 0.5, 0.0],
        bounds=([-np.inf, -np.inf, 0.0, -np.inf], [5.0, np.inf, 0.9, np.inf]),
        **{"xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15},
    )
    assert fit.parameters["fast"]["rate"] == 2.0
    assert fit.parameters["held"] == start["held"]
    assert fit.standard_errors["fast"]["rate"] == 0
    assert fit.names == ("c", "fast.a", "slow.a", "slow.rate")
    fast, slow = fit.parameters["fast"], fit.parameters["slow"]
    np.testing.assert_allclose([fast["a"], slow["rate"]], flat.x[[0, 2]], rtol=1e-5)


@pytest.mark.slow
def test_one_entry_of_an_array_is_fixed_by_equal_bounds():
    f = lambda p, x: jnp.polyval(p["c"], x)
    ends = [None, 1.0, None]
    fit = gnlin.curve_fit(f, X, Y, {"c": np.ones(3)}, bounds={"c": (ends, ends)}, **QUICK)
    matrix = np.stack([X**2, np.ones(50)], axis=1)
    (square, constant), *_ = np.linalg.lstsq(matrix, Y - X)
    np.testing.assert_allclose(fit.parameters["c"], [square, 1, constant], rtol=1e-6)


class Solved(eqx.Module):
    """Like the solution of a differential equation, whose description is long."""

    ys: jax.Array


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma": 0.0}, "`sigma` must be positive at every point"),
        ({"sigma": np.full(50, np.nan)}, "`sigma` must be positive at every point"),
        ({"sigma": np.inf}, "all of `sigma` is infinite"),
        ({"sigma": np.ones(7)}, "`sigma` must be one number, have the shape of `y`"),
        ({"sigma": -np.eye(50)}, "must be positive definite"),
        # The last two points are one, up to rounding and in another unit.
        (
            {
                "sigma": np.diag(np.r_[np.ones(48), 1, 4 + 4e-15])
                + np.diag(np.r_[np.zeros(48), 2], 1)
                + np.diag(np.r_[np.zeros(48), 2], -1)
            },
            "must not be singular",
        ),
        (
            {
                "f": lambda p, x: {"b": decay(p, x), "a": jax.lax.complex(p["a"], x)},
                "y": {"b": Y, "a": 1j * Y},
                "sigma": np.eye(50),
            },
            "be the 150 x 150 covariance of the flattened `y` .of a dictionary in the "
            "order of the sorted keys. .with the real and the imaginary part of each",
        ),
        ({"sigma": 1e-10 * np.tril(covariance_of(50))}, "be symmetric and finite"),
        ({"x": 1j * X, "sigma_x": 0.1}, "`x` must be real: pass the real and the"),
        (
            {
                "start": {"a": np.ones(2), "rate": np.ones(2), "c": np.zeros(2)},
                "y": np.stack([Y, Y]),
                "fixed": ["c"],
            },
            "A fixed parameter has one value for all data sets",
        ),
        (
            {"start": {**START, "a": np.ones(2)}, "y": np.stack([Y, Y])},
            "Each parameter in `start` needs a leading axis over the data sets, of the "
            r"length 2, or none of them, but their shapes are {'a': \(2,\), 'c': \(\)",
        ),
        (
            {
                "start": {"a": np.ones(3), "rate": np.ones(3), "c": np.zeros(3)},
                "y": np.stack([Y, Y]),
            },
            "Each parameter in `start` needs a leading axis over the data sets, of the "
            "length 2, or none of them",
        ),
        ({"sigma_x": -0.1}, "`sigma_x` must be finite, and positive, or 0"),
        ({"sigma_x": 0.1}, "`sigma_x` needs `sigma`, because data do not determine"),
        ({"sigma_x": np.ones(7)}, "`sigma_x` must be one number, or have the shape"),
        ({"sigma_x": {"t": 1.0}}, "`sigma_x` must be one number, or have the structure"),
        (
            {"sigma_x": 0.1, "loss": gnlin.losses.Huber(1.0)},
            "`sigma_x` needs squared error",
        ),
        ({"bounds": {"rate": (1.0, 2.0)}}, "start of the parameter .*rate.* is 0.5"),
        ({"bounds": {"rate": (2.0, 1.0)}}, "lower bound of the parameter .*rate"),
        ({"bounds": {"speed": (0, 1)}}, "no parameter 'speed' to have bounds"),
        ({"bounds": {"rate": 1.0}}, "bounds of 'rate' must be a pair"),
        ({"bounds": 1.0}, "`bounds` must be a dictionary"),
        ({"fixed": ["speed"]}, "no parameter 'speed' to be fixed"),
        ({"fixed": ["a", "c", "rate"]}, "All parameters are fixed"),
        ({"loss": "huber"}, "`loss` must be one of gnlin's"),
        ({"nan_policy": "propagate"}, "`nan_policy` must be"),
        ({"starts": 8}, "`starts` are drawn between the bounds"),
        ({"start": {"a": np.nan, "rate": 1.0, "c": 0.0}}, "`start` must be finite"),
        ({"start": {"a": "one"}}, "`start` must hold numbers or arrays"),
        ({"start": {}}, "`start` must hold a parameter"),
        ({"start": {"a": jnp.exp}}, "the arrays from `eqx.partition`; `gnlin.solve`"),
        ({"f": lambda p, x: p["c"]}, "is one number, and `y` has the shape \\(50,\\)"),
        (
            {"f": lambda p, x: jax.lax.complex(p["c"] * x, x)},
            "is complex, and `y` is real",
        ),
        ({"y": 1j * Y}, "is real, and `y` is complex"),
        ({"y": np.array([object()] * 50)}, "`y` is an array of Python objects"),
        ({"x": {"name": np.array(["a"] * 50)}}, r"`x\['name'\]` holds text"),
        ({"y": np.ma.masked_less(Y, 0.5)}, "`y` is a masked array, .*y.filled.np.nan"),
        ({"x": np.ma.masked_less(X, 0.5)}, "`x` is a masked array, whose mask would be"),
        ({"x": np.datetime64("2020-01-01") + np.arange(50)}, "`x` holds dates or times"),
        ({"x": [datetime.date(2020, 1, 1 + k % 9) for k in range(50)]}, "holds dates"),
        ({"x": np.array(["a"] * 50)}, "`x` holds text: convert numbers by"),
        ({"y": ["1.5"] * 50}, "`y` holds text: convert numbers by"),
        ({"x": np.where(X[3] == X, np.nan, X)}, "`x` has a missing value"),
        ({"sigma": {"a": 1.0}}, "`sigma` must be one number, have the shape of `y`"),
        (
            {"f": lambda x, p: p[0] * x + p[1], "start": np.ones(2)},
            "`f` must take the parameters first",
        ),
        ({"f": lambda x, p: decay(p, x)}, "`f` must take the parameters first"),
        (
            {"f": lambda p, x: Solved(p["a"] * x)},
            r"shapes of `y`, \(50,\), but has those of a Solved .return its arrays",
        ),
        (
            {"f": lambda x, a, b: a * x},
            "arguments are .x, a, b.: for .* `lambda p, x: f.x",
        ),
        ({"solver": "lm"}, "`solver` must be one of gnlin's"),
        (
            {"start": {"a": {"b": 1.0}}, "fixed": ["a.c"]},
            "no parameter 'a.c' to be fixed",
        ),
        (
            {"start": {"a": {"b": np.ones(2)}}, "fixed": ["a.b[1]"]},
            r"'a.b\[1\]' was given: fix one entry by equal bounds",
        ),
        (
            {
                "f": lambda p, x: p["a"]["b"] * x,
                "start": {"a": {"b": 1.0}},
                "bounds": {"a": {"b": 2}},
            },
            "bounds of 'b' must be a pair",
        ),
        ({"starts": 0, "bounds": (-9.0, 9.0)}, "`starts` must be a whole number"),
        ({"solver": gnlin.LevenbergMarquardt(bounds=(0, 1))}, "Pass `bounds` to"),
    ],
)
def test_errors_of_arguments(options, message, unchecked):
    given = {"f": decay, "x": X, "y": Y, "start": START, **options}
    with pytest.raises(ValueError, match=message):
        gnlin.curve_fit(**given)


class OwnError(ValueError):
    pass


def _failing(error):
    def f(p, x):
        raise error

    return f


@pytest.mark.parametrize("kind", [ValueError, TypeError, RuntimeError, OwnError])
def test_an_error_of_the_functions_own_is_passed_on(kind):
    """The message is not replaced by one about axes or about the call."""
    f, parameters = _failing(kind("mine")), {"a": jnp.array(1.0)}
    for run in (
        lambda: gnlin.curve_fit(f, X, Y, {"a": 1.0}),
        lambda: gnlin.solve((f, parameters), (X, Y)),
        lambda: gnlin.fit((f, parameters), (X, Y), steps=1),
        lambda: gnlin.solve(parameters, gnlin.Residuals(f, X)),
    ):
        with pytest.raises(kind, match=r"^mine"):
            run()


def test_a_name_that_is_not_there():
    with pytest.raises(KeyError, match="'a'"):
        gnlin.curve_fit(decay, X, Y, {"b": 1.0})


@pytest.mark.parametrize(
    "f",
    [
        lambda p, x: p["a"] * np.exp(x),
        lambda p, x: math.exp(p["a"]) * x,
        lambda p, x: float(p["a"]) * x,
        lambda p, x: x if p["a"] > 0 else -x,
        lambda p, x: p["a"] * x + jnp.arange(3)[p["a"][None] > 0].sum(),
        lambda p, x: x * [1.0, 2.0][p["a"].astype(int)],
    ],
)
def test_a_function_that_needs_the_values_of_arrays(f):
    """NumPy's and Python's functions raise one sentence, whatever the function is for."""
    y0 = {"a": jnp.array(1.0)}
    for run in (
        lambda: gnlin.curve_fit(f, X, Y, y0),
        lambda: gnlin.solve((f, y0), (X, Y)),
        lambda: gnlin.solve(y0, gnlin.Residuals(f, X)),
    ):
        with pytest.raises(ValueError, match=r"`jnp.exp` for `np.exp`.*`if`") as error:
            run()
        assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_data_frame_is_its_columns():
    frame = pd.DataFrame({"t": X, "shift": 0.0})
    of_columns = lambda p, x: decay(p, x["t"] + x["shift"])
    fit = gnlin.curve_fit(of_columns, frame, pd.Series(Y), START, sigma=pd.Series(SIGMA))
    expected = gnlin.curve_fit(decay, X, Y, START, sigma=SIGMA)
    np.testing.assert_allclose(
        fit.covariance_matrix, expected.covariance_matrix, rtol=1e-8
    )
    matplotlib.use("Agg")
    (curve,) = (drawn for drawn in fit.plot().lines if drawn.get_label() == "fit")
    np.testing.assert_allclose(curve.get_xdata()[[0, -1]], X[[0, -1]])
    np.testing.assert_allclose(fit.band(frame[:5]).mean, expected.band(X[:5]).mean)
    both = pd.DataFrame({"t": X, "shift": 1e-3 * X**2})
    of_both = gnlin.curve_fit(of_columns, both, Y, START)
    with pytest.raises(ValueError, match="`plot` draws one data set over one x that is"):
        of_both.plot()


@pytest.mark.slow
def test_a_point_of_infinite_sigma_is_left_out():
    loss = gnlin.losses.Huber(1.345)
    sigma, wrong = SIGMA.copy(), Y.copy()
    sigma[[4, 20]], wrong[[4, 20]] = np.inf, 50.0
    fit = gnlin.curve_fit(decay, X, wrong, START, sigma=sigma, loss=loss)
    known = np.isfinite(sigma)
    some = X[known], Y[known]
    fewer = gnlin.curve_fit(decay, *some, START, sigma=sigma[known], loss=loss)
    np.testing.assert_allclose(
        values(fit.parameters), values(fewer.parameters), rtol=1e-6
    )
    np.testing.assert_allclose(fit.covariance_matrix, fewer.covariance_matrix, rtol=1e-5)
    assert fit.degrees_of_freedom == 45
    assert fit.residuals[4] == 0
    two = gnlin.curve_fit(
        decay, X, np.stack([wrong, wrong]), START, sigma=sigma, loss=loss
    )
    np.testing.assert_allclose(two.standard_errors["a"], fit.standard_errors["a"], 1e-6)


@pytest.mark.slow
def test_numbers_of_a_pair_are_trained():
    start = {"a": 1, "b": 0.5}
    f = lambda p, x: p["a"] * jnp.exp(-p["b"] * x)
    _, found = gnlin.solve((f, start), (X, Y - 0.5)).model
    expected, _ = scipy.optimize.curve_fit(
        lambda x, a, b: plain(x, a, 0.0, b), X, Y - 0.5, [1.0, 0.5]
    )
    np.testing.assert_allclose(values(found), expected, rtol=1e-4)


@pytest.mark.slow
def test_a_number_in_a_model_is_not_trained():
    net = {"net": eqx.nn.Sequential([eqx.nn.Linear(1, 1, key=jax.random.key(0))])}
    net |= {"drop": eqx.nn.Dropout(0.5), "scale": 1.0}
    f = lambda p, x: p["scale"] * p["net"](x[None])[0]
    _, found = gnlin.solve((f, net), (X, Y), max_steps=3).model
    assert found["drop"].p == 0.5
    assert isinstance(found["drop"].p, float)
    assert found["scale"] != 1.0


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (Y[:7], r"must have the shapes of `y`, \(7,\), but has \(50,\)\.$"),
        (Y[:, None], r"\(50, 1\), but has \(50,\): flatten the one with more axes"),
        (np.where(X > 3, np.nan, Y), "`y` has a missing value"),
        (np.where(X > 3, np.inf, Y), "`y` must be finite"),
        (np.full(50, np.nan), "`y` has a missing value"),
        ((Y, Y[:7]), "`y` must hold numbers or arrays"),
        (
            Y.astype(object),
            r"`y` is an array of Python objects: .*`np.asarray\(y, float\)`",
        ),
        (pd.Series(Y, dtype=object), "`y` is an array of Python objects: .*to_numeric"),
    ],
)
def test_errors_of_data(y, message):
    with pytest.raises(ValueError, match=message):
        gnlin.curve_fit(decay, X, y, START)


def test_the_remedy_for_other_shapes_pairs_the_right_points():
    both = lambda p, x: jnp.stack([decay(p, x), decay(p, x)], axis=1)
    with pytest.raises(ValueError, match=r"but has \(50, 2\): transpose one of them"):
        gnlin.curve_fit(both, X, np.stack([Y, Y]), START)
    with pytest.raises(ValueError, match="return the values in the structure of `y`"):
        gnlin.curve_fit(lambda p, x: [decay(p, x)], X, Y, START)
    other = lambda p, x: decay(p, x).reshape(2, 25)
    with pytest.raises(ValueError, match=r"but has \(2, 25\)\.$"):
        gnlin.curve_fit(other, X, Y.reshape(5, 10), START)


def test_an_index_that_is_no_whole_number_is_told():
    x = {"t": X, "group": np.where(X > 3, np.nan, 0.0)}
    f = lambda p, x: p["height"][x["group"]] * x["t"]
    with pytest.raises(ValueError, match=r"convert the index by `.astype\(int\)`"):
        gnlin.curve_fit(f, x, Y, {"height": np.ones(2)}, nan_policy="omit")


def test_predictions_of_a_fit_name_what_works():
    fit = gnlin.curve_fit(decay, X, Y, START)
    with pytest.raises(ValueError, match=r"`fit\.band` or `fit\.derived`"):
        gnlin.predict.posterior(fit, (X, Y), noise=0.1)


def test_no_error_of_a_start_for_each_data_set_hides_the_shapes():
    """Seven values might be data sets, one for each entry of the start, but `f` fails."""
    with pytest.raises(ValueError, match="must have the shapes of `y`, \\(7,\\), but"):
        gnlin.curve_fit(lambda p, x: p[0] * x + p[1], X, np.ones(7), np.ones(7))


@pytest.mark.parametrize(
    ("num_train", "dtype"),
    [(5, jnp.float32), (60, jnp.float64)],
)
def test_the_variance_of_predictions(num_train, dtype):
    """Compare on both sides with the formula in dense Jacobians."""
    model = eqx.nn.MLP(2, 2, 5, 1, dtype=dtype, key=jax.random.key(0))
    rng = np.random.default_rng(0)
    x, new = (rng.normal(size=(n, 2)).astype(dtype) for n in (num_train, 7))

    @eqx.filter_jit
    def run(model, x, new):
        train, test = (gnlin.features.linearise_model(model, part) for part in (x, new))
        variance = gnlin.predict.predictive_variance(test, train, 0.3, 2.0)
        return variance, train.matrix(), test.matrix()

    found, phi, phi_new = run(model, x, new)
    assert found.dtype == dtype
    found, phi, phi_new = (np.asarray(a, float) for a in (found, phi, phi_new))
    inverse = np.linalg.inv(phi.T @ phi + 0.3 * np.eye(phi.shape[1]))
    expected = 2.0 * np.diagonal(phi_new @ inverse @ phi_new.T)
    rtol = 1e-9 if dtype == jnp.float64 else 1e-5
    np.testing.assert_allclose(found.reshape(-1), expected, rtol=rtol)
    assert found.shape == (7, 2)


@pytest.mark.parametrize("by_kernels", [False, True])
def test_the_variance_at_the_data_does_not_cancel(by_kernels, monkeypatch):
    """In single precision, with more parameters than outputs and little noise, compare
    with K (K + damping)^-1 in double precision."""
    if by_kernels:
        module = "gnlin.predict._eigenbasis._singular_values_pay"
        monkeypatch.setattr(module, lambda cost: False)
    x = np.random.default_rng(0).normal(size=(12, 16)).astype(np.float32)

    def variance(damping):
        lin = gnlin.linearise(lambda y, x: x @ y, jnp.ones(16, jnp.float32), x)
        return gnlin.predict.predictive_variance(lin, lin, damping, damping)

    dampings = np.array([1e-2, 1e-4, 1e-6], np.float32)
    found = jax.jit(jax.vmap(variance))(dampings)
    kernel = x.astype(float) @ x.T.astype(float)
    for each, damping in zip(found, dampings, strict=True):
        damped = kernel + float(damping) * np.eye(12)
        expected = float(damping) * np.diagonal(np.linalg.solve(damped, kernel))
        np.testing.assert_allclose(each, expected, rtol=1e-3)


def test_data_without_valid_points():
    nothing = np.full(50, np.nan)
    with pytest.raises(ValueError, match="There is no data: all of `y` is missing"):
        gnlin.curve_fit(decay, X, nothing, START, nan_policy="omit")


def test_predictions_of_another_model():
    two = (gnlin.linearise(lambda y, _: y**2, jnp.ones(n)) for n in (3, 4))
    with pytest.raises(ValueError, match="parameters of the same shapes"):
        gnlin.predict.predictive_variance(*two, 0.1)


def test_without_damping_there_is_no_prior():
    lin = gnlin.linearise(lambda y, _: y**2, jnp.ones(3))
    with pytest.raises(ValueError, match="`damping` must be greater than 0"):
        gnlin.predict.predictive_variance(lin, lin, 0.0)


@pytest.mark.slow
def test_a_square_sigma_of_as_many_data_sets_as_points():
    """It is a standard deviation for each point, inside a compiled function too. The
    covariance of all data sets has one more axis."""
    n = 12
    x = np.linspace(0, 3, n)
    covariance = 0.01 * (1 + np.eye(n))
    noise = (
        np.random.default_rng(7).normal(size=(n, n)) @ np.linalg.cholesky(covariance).T
    )
    ys = 2 * np.exp(-0.7 * x) + noise
    model = lambda p, x: p[0] * jnp.exp(-p[1] * x)

    def fitted(sigma):
        return gnlin.curve_fit(model, x, ys, np.ones(2), sigma=sigma, **QUICK).parameters

    def of_scipy(sigmas):
        f = lambda x, a, b: a * np.exp(-b * x)
        pairs = zip(ys, sigmas, strict=True)
        each = [scipy.optimize.curve_fit(f, x, y, [1, 1], sigma=s)[0] for y, s in pairs]
        return np.stack(each)

    found = jax.jit(fitted)(covariance)
    np.testing.assert_allclose(found, of_scipy(covariance), rtol=1e-5)
    shared = fitted(covariance[None])
    np.testing.assert_allclose(shared, of_scipy([covariance] * n), rtol=1e-5)


@pytest.mark.parametrize(
    "sigma",
    [
        np.array([[2, 1, 1], [1, 2, 1], [1, 1, 2]]),
        np.array([[1, 2, 3], [1, 2, 3], [1, 2, 4]]),
        np.array([[1, 1, np.inf], [1, 1, 1], [np.inf, 1, 1]]),
        1e-9 * np.array([[1, 0.1, 0.2], [0.5, 2, 0.3], [0.1, 0.1, 3]]),
    ],
)
def test_a_square_sigma_of_whole_or_infinite_or_small_numbers(sigma):
    x = np.arange(3.0)
    ys = 1 + x + np.array([[0.1, 0, -0.1], [0, 0.2, 0], [0.1, 0.1, 0]])
    said = contextlib.nullcontext()
    if np.array_equal(sigma, sigma.T) and np.isfinite(sigma).all():
        said = pytest.warns(UserWarning, match="standard deviation of each point")
    f = lambda p, x: p[0] + p[1] * x
    with said:
        fit = gnlin.curve_fit(f, x, ys, np.ones(2), sigma=sigma, **QUICK)
    for found, y, s in zip(fit.parameters, ys, sigma, strict=True):
        expected = np.polyfit(x, y, 1, w=1 / s)[::-1]
        np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_starts_inside_a_compiled_function_need_bounds():
    def losses(y):
        wave = lambda p, x: jnp.sin(p * x)
        return gnlin.curve_fit(wave, X, y, jnp.array(0.5), starts=8).losses

    with pytest.raises(ValueError, match="between the bounds"):
        jax.jit(losses)(Y)


@pytest.mark.slow
def test_data_that_single_precision_rounds_away():
    x = 2460000.5 + np.linspace(0, 0.5, 40)
    y = 1 + x - x[0]
    of_first = lambda p, x: line(p, x - x[0])
    with jax.enable_x64(False):
        with pytest.warns(UserWarning, match="single precision rounds `x` by 0.12"):
            gnlin.curve_fit(of_first, x, y, LINE, **QUICK)
        gnlin.curve_fit(of_first, x - x[0], y, LINE, **QUICK)
        # Large whole numbers as y are no reason to warn, however they are stored.
        whole = 1_000_000_000 * np.arange(1, 41)
        for given in (whole, whole.astype(">i8"), whole.tolist()):
            fit = gnlin.curve_fit(of_first, np.arange(40.0), given, LINE, **QUICK)
            np.testing.assert_allclose(values(fit.parameters), 1e9, rtol=1e-5)
        large = np.arange(2, 42, dtype=np.uint64) * 1_000_003
        scaled = lambda p, x: line(p, 1e-6 * x.astype(float))
        gnlin.curve_fit(scaled, large, y, LINE, **QUICK)
        with pytest.raises(ValueError, match="`y` has a missing value"):
            gnlin.curve_fit(line, x - x[0], np.full(40, np.nan), LINE)


@pytest.mark.slow
def test_a_cubic_over_thousands_of_channels_in_single_precision():
    with jax.enable_x64(False):
        x = np.arange(4096)
        y = 1 + x / 8192 + 2 * (x / 4096) ** 2 - (x / 4096) ** 3
        cubic = lambda p, x: p[0] + p[1] * x + p[2] * x**2 + p[3] * x**3
        fit = gnlin.curve_fit(cubic, x, y, np.zeros(4))
        expected = [1, 1 / 8192, 2 / 4096**2, -1 / 4096**3]
        np.testing.assert_allclose(fit.parameters, expected, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heights", "kind", "in_parts"),
    [
        (
            lambda p, of: jax.nn.one_hot(of, 2, dtype=float) @ p["heights"],
            np.uint8,
            False,
        ),
        (lambda p, of: p["heights"][of], np.int64, True),
    ],
)
def test_indices_in_x_stay_whole_numbers_and_others_do_not_wrap(heights, kind, in_parts):
    def curve(p, x):
        large = (x["t"] - 20) ** 12 / 1e19
        return heights(p, x["of"]) * jnp.exp(-p["rate"] * (x["t"] - 3)) + p["b"] * large

    of, t = np.tile([0, 1], 30).astype(np.int8), np.arange(60.0)
    x = {"of": of, "t": t.astype(kind)}
    y = np.array([2.0, 3.0])[of] * np.exp(-0.2 * (t - 3)) + 2e-19 * (t - 20) ** 12
    start = {"heights": np.ones(2), "rate": 0.1, "b": 1.0}
    options = {"in_parts": True} if in_parts else QUICK
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = gnlin.curve_fit(curve, x, y, start, **options)
    np.testing.assert_allclose(fit.parameters["heights"], [2, 3], rtol=1e-8)
    np.testing.assert_allclose(fit.parameters["rate"], 0.2, rtol=1e-8)
    np.testing.assert_allclose(fit.band(x).mean, y, rtol=1e-8)


def by_hash(p, x):
    return p[(x * jnp.uint32(2654435761)) >> jnp.uint32(31)]


def by_bits(p, x):
    return jnp.unpackbits(x[:, None], axis=1, count=2).astype(float) @ p


def by_seed(p, x):
    return p[0] + p[1] * jax.vmap(lambda k: jax.random.normal(jax.random.key(k)))(x)


def by_name(p, x):
    return jnp.where(x == 2**24 + 1, p[1], p[0])


def by_bin(p, x):
    return p[jnp.floor(x / 10).astype(int)]


@pytest.mark.parametrize(
    ("f", "x"),
    [
        (by_hash, np.arange(12, dtype=np.uint32) * 357_913_941),
        (by_bits, np.arange(4, dtype=np.uint8) << 6),
        (by_seed, np.arange(6)),
        (by_name, 2**24 + np.arange(2)),
        (by_bin, np.arange(20)),
    ],
    ids=["hash", "bits", "seeds", "names", "bins"],
)
def test_a_function_that_needs_whole_numbers_gets_them(f, x):
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        expected, x = jnp.array([1.5, 4]), jnp.asarray(x)
        y = f(expected, x)
        curve = Curve(f, None).on(expected, x)
        np.testing.assert_allclose(curve.values(expected, x), y)


def test_columns_of_whole_numbers_that_a_function_joins():
    def f(p, x):
        warnings.warn("an old function", DeprecationWarning, stacklevel=2)
        both = jnp.concatenate([x["u"], x["v"]])
        return p[0] + p[1] * both**3 / 1e9

    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        x = {"u": jnp.arange(2000), "v": jnp.arange(2000, 4000)}
        p = jnp.array([1.0, 2.0])
        with pytest.warns(DeprecationWarning, match="an old function"):
            found = Curve(f, None).on(p, x).values(p, x)
        y = 1 + 2e-9 * np.arange(4000.0) ** 3
        np.testing.assert_allclose(found, y, rtol=1e-5)


@pytest.mark.slow
def test_two_columns_that_must_become_floats_together():
    """`jax.lax.sub` takes arrays of one dtype only, and bytes would wrap."""
    i, j = np.arange(20, dtype=np.uint8), np.arange(20, dtype=np.uint8)[::-1].copy()
    f = lambda p, x: p["a"] * jax.lax.sub(x["i"], x["j"]) + p["b"]
    y = 0.1 * (i.astype(float) - j) + 2
    with jax.numpy_dtype_promotion("standard"):
        fit = gnlin.curve_fit(f, {"i": i, "j": j}, y, {"a": 1.0, "b": 0.0}, **QUICK)
    np.testing.assert_allclose(list(fit.parameters.values()), [0.1, 2], rtol=1e-6)


@pytest.mark.slow
def test_a_model_with_whole_numbers_as_x():
    class Bowl(eqx.Module):
        middle: jax.Array
        bottom: np.ndarray

        def __call__(self, p, x):
            return p["slope"] * (x - self.middle) ** 2 + self.bottom

    x = np.arange(40, dtype=np.uint8)
    y = 0.5 * (x - 25.0) ** 2 + x
    bowl = Bowl(jnp.array(25.0), np.arange(40.0))
    fit = gnlin.curve_fit(bowl, x, y, {"slope": 1.0}, **QUICK)
    np.testing.assert_allclose(fit.parameters["slope"], 0.5, rtol=1e-8)


def steep_fit():
    """A fit whose loss rises like a sixth power at the ends of the interval."""
    steep = lambda p, x: p["a"] + 10 * p["a"] ** 3 + 0 * x
    y = np.array([1.0, -1.0] * 5)
    return gnlin.curve_fit(
        steep, np.arange(10.0), y, {"a": 0.5}, bounds={"a": (-2, 2)}, **QUICK
    )


@pytest.mark.slow
def test_an_interval_where_the_loss_rises_steeply():
    interval = steep_fit().confidence_intervals()
    rise = scipy.stats.f.ppf(0.95, 1, 9) / 9  # relative to the least sum of squares
    end = scipy.optimize.brentq(lambda a: (a + 10 * a**3) ** 2 - rise, 0, 2)
    for found, expected in ((interval.low, -end), (interval.high, end)):
        np.testing.assert_allclose(found["a"], expected, rtol=1e-4)


@pytest.mark.slow
def test_an_end_that_is_not_found_is_told(monkeypatch):
    monkeypatch.setattr("gnlin._curve_fit._profiles._MOST_REFITS", 2)
    fit, words = steep_fit(), "interval of a was not found: it lies between"
    with pytest.warns(UserWarning, match=words) as told:
        interval = fit.confidence_intervals()
    assert np.isnan(interval.low["a"])
    assert told[0].filename == __file__


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beyond", "words"),
    [
        (lambda f, far: jnp.where(far, jnp.inf, f), "is not finite beyond 6"),
        (lambda f, far: eqx.error_if(f, far, "too far"), "raises an error beyond 6"),
    ],
)
def test_an_interval_where_f_is_not_finite(beyond, words):
    """The lower end is found, although its search passes such a place."""

    def f(p, x):
        found = jnp.exp(-jnp.exp(p["logk"]) * x)
        found = jnp.where(p["logk"] < 1.75, jnp.nan, found)
        return beyond(found, p["logk"] > 6)

    x, y = np.linspace(1, 5, 10), 1e-3 * np.random.default_rng(0).normal(size=10)
    options = {"sigma": 1e-3, "absolute_sigma": True}
    fit = gnlin.curve_fit(f, x, y, {"logk": 2.0}, **options)
    with pytest.warns(UserWarning, match=f"of logk was not found: `f` {words}"):
        interval = fit.confidence_intervals()
    assert np.isnan(interval.high["logk"])
    misfit = lambda k: np.sum((y - np.exp(-np.exp(k) * x)) ** 2) / 1e-6
    rise = lambda k: misfit(k) - fit.chi_squared - scipy.stats.chi2.ppf(0.95, 1)
    expected = scipy.optimize.brentq(rise, 1.75, fit.parameters["logk"])
    np.testing.assert_allclose(interval.low["logk"], expected, rtol=1e-6)


@pytest.mark.slow
def test_intervals_of_many_points_in_single_precision():
    """The rise of the loss is known to a hundredth only."""
    t = np.linspace(0, 4, 100_000, dtype=np.float32)
    noise = 0.15 * np.random.default_rng(0).normal(size=t.size)
    y = (2.5 * np.exp(-1.3 * t) + 0.4 + noise).astype(np.float32)
    model = lambda p, t: p["height"] * jnp.exp(-p["rate"] * t) + p["background"]
    start = {name: jnp.float32(1) for name in ("height", "rate", "background")}
    fit = gnlin.curve_fit(model, t, y, start)
    interval = fit.confidence_intervals()
    for name, value in fit.parameters.items():
        for end, sign in ((interval.low, -1), (interval.high, 1)):
            in_errors = (end[name] - value) / fit.standard_errors[name]
            np.testing.assert_allclose(in_errors, sign * 1.96, rtol=0.01)


@pytest.mark.slow
def test_a_report_has_the_ten_largest_correlations():
    quintic = lambda p, x: jnp.polyval(p["c"], x)
    x = np.linspace(0, 1, 30)
    fit = gnlin.curve_fit(quintic, x, np.cos(3 * x), {"c": np.zeros(6)}, **QUICK)
    text = str(fit)
    assert text.count(", c[") == 10
    assert "and 5 smaller ones" in text


def test_derivatives_of_errors_beside_a_parameter_at_its_bound():
    x = np.linspace(0, 4, 20)
    y = 2.5 * np.exp(-1.3 * x) + 0.5 + 0.05 * np.cos(9 * x)
    curve = lambda p, x: p["a"] * jnp.exp(-p["rate"] * x) + p["c"]
    start, bounds = {"a": 1.0, "rate": 0.5, "c": 0.1}, ({}, {"c": 0.4})

    def errors(y):
        fit = gnlin.curve_fit(curve, x, y, start, bounds=bounds)
        return jnp.stack([fit.standard_errors[name] for name in ("a", "rate")])

    step = 1e-4 * np.sin(np.arange(20.0))
    change = (errors(y + step) - errors(y - step)) / 2
    np.testing.assert_allclose(jax.jacrev(errors)(y) @ step, change, rtol=1e-5)
