"""Many fits at once, as of the pixels of a map: how each of them ends, pixels without
data or without signal, and the options and shapes that a map needs."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from scipy.optimize import least_squares

import gnlin


TIMES = np.arange(1, 17) * 10.0
START = {"S0": 800.0, "T2": 60.0, "c": 10.0}
BOUNDS = {"S0": (0, 5000), "T2": (1, 1000), "c": (0, 200)}


def decay(p, t):
    return p["S0"] * jnp.exp(-t / p["T2"]) + p["c"]


def as_single(tree):
    return jax.tree.map(np.float32, tree)


def pixels(number):
    rng = np.random.default_rng(0)
    s, t, c = (
        rng.uniform(*ends, (number, 1)) for ends in ((300, 1500), (20, 150), (0, 30))
    )
    return s * np.exp(-TIMES / t) + c + 5 * rng.normal(size=(number, TIMES.size))


def by_scipy(y):
    def residual(p):
        return p[0] * np.exp(-TIMES / p[1]) + p[2] - y

    box = ([0, 1, 0], [5000, 1000, 200])
    ends = {"xtol": 1e-12, "ftol": 1e-12, "gtol": 1e-12, "x_scale": [1000, 100, 10]}
    return least_squares(residual, list(START.values()), bounds=box, **ends)


@pytest.mark.parametrize("bounds", [BOUNDS, None])
def test_in_single_precision_a_batch_ends_where_rounding_hides_what_is_left(bounds):
    y = pixels(400).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fits = gnlin.curve_fit(
            decay, np.float32(TIMES), y, as_single(START), bounds=bounds
        )
    assert fits.loss.dtype == jnp.float32
    assert fits.converged.all()
    assert np.max(fits.num_steps) <= 16  # In double precision 12.
    if bounds is None:
        return
    errors = np.stack([fits.standard_errors[name] for name in START], axis=1)
    found = np.stack([fits.parameters[name] for name in START], axis=1)
    for k in range(0, 400, 40):
        away = np.abs(by_scipy(y[k].astype(float)).x - found[k])
        assert np.all((away < 1e-3 * errors[k]) | np.isnan(errors[k]))


def test_in_single_precision_a_single_fit_ends_in_as_many_steps():
    y = pixels(20).astype(np.float32)
    x, start = np.float32(TIMES), as_single(START)
    for k in (0, 7):
        single = gnlin.curve_fit(decay, x, y[k], start, bounds=BOUNDS)
        assert single.reason.startswith("converged")
        assert single.num_steps <= 10


@pytest.mark.parametrize(
    ("dtype", "bounds", "many"),
    [
        (np.float64, BOUNDS, True),
        (np.float64, None, False),
        (np.float32, BOUNDS, False),
        (np.float32, None, True),
    ],
)
def test_data_that_are_zero_do_not_determine_the_shape_of_the_curve(dtype, bounds, many):
    y = np.zeros((2, TIMES.size) if many else TIMES.size, dtype)
    if many:
        y[1] = 1000 * np.exp(-TIMES / 50) + 10
    start = jax.tree.map(dtype, START)
    with pytest.warns(UserWarning, match="not determine all parameters") as caught:
        fit = gnlin.curve_fit(decay, dtype(TIMES), y, start, bounds=bounds)
    assert len(caught) == 1
    # At S0 = 0 the derivative by T2 is exactly zero.
    assert np.all(np.isinf(np.atleast_1d(fit.standard_errors["T2"])[0]))
    assert np.all(fit.converged)
    assert np.all(np.abs(np.atleast_1d(fit.parameters["S0"])[0]) < 1e-12)
    if many:
        assert np.isfinite(fit.standard_errors["T2"][1])
        np.testing.assert_allclose(fit.parameters["T2"][1], 50, rtol=1e-4)


def test_a_system_of_equations_as_residuals_from_zero_has_errors():
    equations = lambda p, x: jnp.stack([p["a"] ** 2 - 2.0, p["a"] * p["b"] - 3.0])
    start = {"a": 1000.0, "b": 1e-3}
    with pytest.warns(UserWarning, match="no more points than parameters"):
        fit = gnlin.curve_fit(equations, np.zeros(2), np.zeros(2), start)
    np.testing.assert_allclose(fit.parameters["b"], 3 / 2**0.5, rtol=1e-9)
    assert not fit.undetermined()


def test_the_warning_names_what_tells_the_data_sets_apart():
    y = pixels(6)
    y[2] = np.nan
    with pytest.warns(UserWarning, match="data sets") as caught:
        fits = gnlin.curve_fit(
            decay, TIMES, y, START, bounds=BOUNDS, nan_policy="omit", max_steps=4
        )
    (said,) = (str(one.message) for one in caught)
    assert "1 of 6 data sets have no data, and NaN as parameters" in said
    assert "have not converged (see `fit.converged`)" in said
    assert "standard_errors" not in said
    assert isinstance(fits.converged, np.ndarray)
    np.testing.assert_array_equal(
        fits.converged, np.asarray(fits.result == optx.RESULTS.successful)
    )
    assert not fits.converged[2]
    assert np.isnan(fits.parameters["T2"][2])
    others = np.delete(np.arange(6), 2)
    assert np.all(np.isfinite(fits.parameters["T2"][others]))
    of_one = jax.vmap(
        lambda y: gnlin.curve_fit(decay, TIMES, y, START, nan_policy="omit").parameters
    )
    np.testing.assert_array_equal(np.isnan(of_one(y)["T2"]), np.arange(6) == 2)


def test_one_noise_for_each_data_set():
    y, noise = pixels(5), np.arange(1.0, 6.0)[:, None]
    known = {"absolute_sigma": True, "bounds": BOUNDS}
    fits = gnlin.curve_fit(decay, TIMES, y, START, sigma=noise, **known)
    whole = np.broadcast_to(noise, y.shape)
    same = gnlin.curve_fit(decay, TIMES, y, START, sigma=whole, **known)
    for name in START:
        np.testing.assert_array_equal(
            fits.standard_errors[name], same.standard_errors[name]
        )
    for k in (0, 4):
        j = by_scipy(y[k]).jac / noise[k]
        expected = np.sqrt(np.diag(np.linalg.inv(j.T @ j)))[1]
        if not any(side[k] for side in fits.at_bound.values()):
            assert fits.standard_errors["T2"][k] == pytest.approx(expected, rel=1e-3)
    with pytest.raises(ValueError, match=r"or \(5, 1\) for one number of each data set"):
        gnlin.curve_fit(decay, TIMES, y, START, sigma=noise[:, 0])
    columns = lambda p, t: jnp.stack([decay(p, t), decay(p, t)], axis=1)
    with pytest.raises(ValueError, match=r"shape of `y`, \(16, 2\), or be"):
        gnlin.curve_fit(columns, TIMES, np.ones((16, 2)), START, sigma=np.ones((16, 1)))


def test_bounds_of_each_data_set_are_for_vmap():
    y = pixels(5)
    low = {"S0": np.zeros(5), "T2": np.full(5, 1.0), "c": np.zeros(5)}
    high = {"S0": np.full(5, 5e3), "T2": np.array([1e3, 60.0, 1e3, 70.0, 1e3])}
    high["c"] = np.full(5, 200.0)
    each = lambda y, low, high: (
        gnlin.curve_fit(decay, TIMES, y, START, bounds=(low, high)).parameters
    )
    with pytest.raises(ValueError, match=r"All data sets have the same `bounds`.*vmap"):
        each(y, low, high)
    found = jax.vmap(each)(y, low, high)
    for k in (0, 1):
        ends = [{name: end[name][k] for name in START} for end in (low, high)]
        alone = gnlin.curve_fit(decay, TIMES, y[k], START, bounds=tuple(ends))
        for name in START:
            np.testing.assert_allclose(
                found[name][k], alone.parameters[name], rtol=1e-6, atol=1e-9
            )


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((4, 5, 16), r"one leading axis, by `y.reshape\(-1, 16\)`"),
        ((16, 5), r"must be the first one, as of `y.T`"),
        ((16, 4, 5), r"as of `y.reshape\(16, -1\).T`"),
    ],
)
def test_the_axes_of_an_image(shape, match):
    with pytest.raises(ValueError, match=match):
        gnlin.curve_fit(decay, TIMES, np.ones(shape), START)


def test_the_best_start_may_not_have_converged():
    y = pixels(1)[0]
    with pytest.warns(UserWarning, match=r"the best of 3 starts has not converged, so "):
        fit = gnlin.curve_fit(
            decay, TIMES, y, START, bounds=BOUNDS, starts=3, max_steps=2
        )
    more = gnlin.curve_fit(decay, TIMES, y, fit.parameters, bounds=BOUNDS)
    assert more.converged
    np.testing.assert_allclose(more.loss, by_scipy(y).cost, rtol=1e-9)
