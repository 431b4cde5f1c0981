"""What a fit tells of points: their indices and their number, for complex values and for
y of several arrays or columns; and what it says if too many of them are outliers."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin
from gnlin._curve_fit._points import by_point, place_of


HUBER = gnlin.losses.Huber(1.345)
W = np.logspace(-2, 5, 50)
IMPEDANCE = {"R0": 10.0, "R": 100.0, "tau": 1e-2, "a": 0.85}
START = {"R0": 5.0, "R": 80.0, "tau": 2e-2, "a": 1.0}


def impedance(p, w):
    return p["R0"] + p["R"] / (1 + (1j * w * p["tau"]) ** p["a"])


def measured():
    """Return values with outliers at the points 10 (both parts) and 40."""
    rng = np.random.default_rng(0)
    with jax.numpy_dtype_promotion("standard"):
        z = np.array(impedance(IMPEDANCE, W))
    s = 0.01 * np.abs(z)
    z = z + s * (rng.normal(size=50) + 1j * rng.normal(size=50))
    z[10] += 30 + 30j
    z[40] += 5j
    return z, s


Z, S = measured()


@pytest.fixture(autouse=True)
def promotion():
    """Let the functions below mix real and complex numbers, as users do."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
def test_outliers_among_complex_values():
    fit = gnlin.curve_fit(impedance, W, Z, START, sigma=S, loss=HUBER)
    assert fit.outliers().tolist() == [10, 40]
    np.testing.assert_array_equal(W[fit.outliers()], W[[10, 40]])
    assert str(fit).endswith("2 outliers, at points 10, 40")
    assert "50 points of 100 numbers, 4 free parameters" in str(fit)
    assert fit.degrees_of_freedom == 96


@pytest.mark.slow
def test_a_worse_minimum_with_many_outliers_warns():
    start = {"R0": 1.0, "R": 50.0, "tau": 1e-1, "a": 1.0}
    with pytest.warns(UserWarning, match=r"\d+ of 50 points are outliers.*`bounds`"):
        bad = gnlin.curve_fit(impedance, W, Z, start, sigma=S, loss=HUBER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bounds = {"tau": (0.0, None)}
        good = gnlin.curve_fit(impedance, W, Z, start, sigma=S, loss=HUBER, bounds=bounds)
    assert good.loss < 0.1 * bad.loss  # 166.7 and 2846
    np.testing.assert_allclose(good.loss, 166.74764, rtol=1e-6)  # SciPy's


def line(p, x):
    return p["a"] + p["b"] * x


def two_lines(p, x):
    return jnp.stack([line(p, x), line(p, 2 * x)], axis=1)


X = np.linspace(0, 4, 40)
NOISE = np.random.default_rng(1).normal(size=(4, 40))


@pytest.mark.parametrize(
    ("known", "loss"),
    [
        (True, HUBER),
        pytest.param(False, gnlin.losses.Tukey(4.685), marks=pytest.mark.slow),
    ],
)
def test_a_tenth_of_outliers_causes_no_warning(known, loss):
    y = 1 + 2 * X + 0.1 * NOISE
    y[:, ::10] += 1.0
    sigma = 0.1 if known else None
    start = {"a": 1.1, "b": 1.9}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = gnlin.curve_fit(line, X, y, start, sigma=sigma, loss=loss)
    found = {tuple(pair) for pair in fit.outliers().tolist()}
    assert found >= {(k, n) for k in range(4) for n in range(0, 40, 10)}


def test_many_data_sets_with_many_outliers():
    y = 1 + 2 * X + 0.1 * NOISE
    y[2, ::3] += 5.0
    with pytest.warns(UserWarning, match="1 of 4 data sets call so many points outliers"):
        gnlin.curve_fit(line, X, y, {"a": 1.0, "b": 2.0}, sigma=0.1, loss=HUBER)


@pytest.mark.slow
def test_points_of_columns_and_of_dictionaries():
    y = np.stack([1 + 2 * X, 1 + 4 * X], axis=1) + 0.1 * NOISE[:2].T
    y[3, 1] += 3
    y[7] += 4
    start = {"a": 1.0, "b": 2.0}
    fit = gnlin.curve_fit(two_lines, X, y, start, sigma=0.1, loss=HUBER)
    assert fit.outliers().tolist() == [3, 7]
    assert "40 points of 80 numbers" in str(fit)

    def apart(p, x):
        both = two_lines(p, x)
        return {"u": both[:, 0], "v": both[:10, 1] + 0j}

    values = {"u": y[:, 0], "v": y[:10, 1] + 0j}
    fit = gnlin.curve_fit(apart, X, values, start, sigma=0.1, loss=HUBER)
    assert {k: v.tolist() for k, v in fit.outliers().items()} == {"u": [7], "v": [3, 7]}
    assert str(fit).endswith("3 outliers, at points 7 of `u`; 3, 7 of `v`")
    assert "50 points of 60 numbers" in str(fit)


def test_places_in_a_flattened_y():
    tree = {"a": np.zeros((3, 2), complex), "b": np.zeros(4), "c": np.zeros(())}
    shapes = {k: np.empty(v.shape, v.dtype) for k, v in tree.items()}
    words = [place_of(entry, shapes)[0] for entry in range(17)]
    expected = [f"at point {n // 4}, {n // 2 % 2} of `a`" for n in range(12)]
    expected += [f"at point {n} of `b`" for n in range(4)] + ["there of `c`"]
    assert words == expected
    flags = np.zeros((2, 17), bool)
    flags[0, [0, 11, 13]] = flags[1, 16] = True
    found = by_point(flags, shapes)
    assert found["a"].tolist() == [[True, False, True], [False, False, False]]
    assert found["b"].tolist() == [[False, True, False, False], [False] * 4]
    assert found["c"].tolist() == [[False], [True]]


@pytest.mark.slow
def test_a_complex_curve_that_is_not_finite_names_the_point():
    x = np.arange(6.0)
    with pytest.warns(
        UserWarning, match=r"at point 0 \(x = 0.0\) and in 1 more of the 12"
    ):
        gnlin.curve_fit(lambda p, x: p * (1 + 1j) / x, x, x * (1 + 1j), 1.0)


def test_a_rate_that_is_not_positive_names_the_point():
    x, y = np.arange(3.0), np.ones((3, 2))
    loss = gnlin.losses.PoissonNLL(log_input=False)
    rates = lambda p, x: jnp.stack([p + x, p + x - 1.5], axis=1)
    with pytest.raises(ValueError, match=r"is -0\.5 at point 0, 1: start elsewhere"):
        gnlin.curve_fit(rates, x, y, 1.0, loss=loss)


@pytest.mark.parametrize("in_parts", [pytest.param(True, marks=pytest.mark.slow), False])
def test_sigma_is_checked_at_each_entry(in_parts):
    x = np.arange(4.0)
    y, sigma = np.stack([x, 2 * x], axis=1) + 0.1, np.ones((4, 2))
    y[0, 0], sigma[0, 0] = np.nan, -1.0  # a missing entry needs no sigma
    curve = lambda p, x: jnp.stack([p * x, 2 * p * x], axis=1)

    def fitted():
        options = {"nan_policy": "omit", "in_parts": in_parts}
        return gnlin.curve_fit(curve, x, y, 1.0, sigma=sigma, **options)

    used = np.isfinite(y)
    slopes = np.stack([x, 2 * x], axis=1)
    exact = np.sum(slopes[used] * y[used]) / np.sum(slopes[used] ** 2)
    np.testing.assert_allclose(fitted().parameters, exact, rtol=1e-10)
    for wrong in (-1.0, 0.0, np.nan, -np.inf):
        sigma[0, 1] = wrong
        with pytest.raises(ValueError, match="`sigma` must be positive"):
            fitted()


@pytest.mark.slow
@pytest.mark.parametrize("in_parts", [True, False])
def test_an_infinite_y_without_x_is_left_out(in_parts):
    x = np.array([1.0, np.nan, 3.0, 4.0])
    y = np.array([2.0, np.inf, 6.0, 8.0])
    options = {"nan_policy": "omit", "in_parts": in_parts}
    fit = gnlin.curve_fit(lambda p, x: p * x, x, y, 1.0, **options)
    np.testing.assert_allclose(fit.parameters, 2, rtol=1e-10)


def of_scipy(x, a, b):
    return a * jnp.exp(-b * x)


def decay(p, x):
    return p["a"] * jnp.exp(-p["b"] * x)


WRONG_ORDERS = {
    "start first": ((decay, {"a": 1.0, "b": 1.0}, X, X), "pass `gnlin.curve_fit.f, x, y"),
    "arrays": (
        (lambda p, x: p[0] * x + p[1], [1.0, 2.0], X, X),
        "pass `gnlin.curve_fit.f, x, y, start",
    ),
    "SciPy's function": ((of_scipy, X, X, [1.0, 1.0]), r"`lambda p, x: f\(x, \*p\)`"),
    "SciPy's order": (
        (lambda x, p: decay(p, x), X, X, {"a": 1.0, "b": 1.0}),
        "the parameters first",
    ),
}


@pytest.mark.parametrize("name", WRONG_ORDERS)
def test_wrong_orders(name):
    arguments, said = WRONG_ORDERS[name]
    with pytest.raises(ValueError, match=said):
        gnlin.curve_fit(*arguments)


ROWS, COLUMNS = np.mgrid[:12, :15].astype(float)


def spot(p, x):
    square = (x["u"] - p["u"]) ** 2 + (x["v"] - 6) ** 2
    return p["height"] * jnp.exp(-square / 8) + 1


def image(x):
    y = np.array(spot({"height": 50.0, "u": 5.3}, x))
    y += np.random.default_rng(0).normal(size=y.shape)
    y[3, 3] += 300
    y[3, 8] += 40
    y[10, 0] -= 30
    return y


def test_each_pixel_of_an_image_is_a_point():
    x, start = {"u": ROWS, "v": COLUMNS}, {"height": 40.0, "u": 5.0}
    y = image(x)
    fit = gnlin.curve_fit(spot, x, y, start, sigma=1.0, loss=HUBER)
    flat = gnlin.curve_fit(
        spot,
        {k: v.ravel() for k, v in x.items()},
        y.ravel(),
        start,
        sigma=1.0,
        loss=HUBER,
    )
    expected = np.unravel_index(flat.outliers(), y.shape)
    np.testing.assert_array_equal(fit.outliers(), expected)
    marked = np.zeros(y.shape, bool)
    marked[fit.outliers()] = True
    assert marked[[3, 3, 10], [3, 8, 0]].all()
    np.testing.assert_array_equal(y[fit.outliers()], y.ravel()[flat.outliers()])
    assert "180 points, 2 free parameters" in str(fit)
    number = len(flat.outliers())
    assert str(fit).count(f"\n\n{number} outliers, at points (3, 3), (3, 8), ") == 1
    np.testing.assert_allclose(fit.aic, flat.aic, rtol=1e-12)


@pytest.mark.slow
def test_pixels_of_many_images():
    x, start = {"u": ROWS, "v": COLUMNS}, {"height": 40.0, "u": 5.0}
    ys = np.stack([image(x), np.array(spot({"height": 50.0, "u": 5.3}, x))])
    fits = gnlin.curve_fit(spot, x, ys, start, sigma=1.0, loss=HUBER)
    one = gnlin.curve_fit(spot, x, ys[0], start, sigma=1.0, loss=HUBER)
    found = fits.outliers()
    assert found[:, 0].tolist() == [0] * len(found)
    np.testing.assert_array_equal(found[:, 1:].T, one.outliers())


def test_rows_stay_points():
    """If x has one value for each row, or a covariance connects the numbers."""
    shapes = np.zeros((4, 3)), np.zeros(4), np.zeros(3)
    flags = np.zeros(12, bool)
    flags[[1, 7]] = True
    rows, numbers = [True, False, True, False], [(0, 1), (2, 1)]
    assert by_point(flags, shapes[0]).tolist() == rows
    for x in (shapes[1], shapes[2], {"u": shapes[0], "v": shapes[1]}, ()):
        assert by_point(flags, shapes[0], x).tolist() == rows
    for x in (shapes[0], {"u": shapes[0], "unit": np.zeros(())}):
        found = by_point(flags, shapes[0], x)
        assert [tuple(row) for row in np.argwhere(found).tolist()] == numbers
    u = np.mgrid[:3, :4].astype(float)
    x, y = {"u": u[0], "v": u[1]}, np.array(u[0] + 2 * u[1])
    y[1, 2] += 9
    plane = lambda p, x: p["a"] * x["u"] + p["b"] * x["v"]
    covariance = 0.01 * (np.eye(12) + 0.1)
    start = {"a": 1.0, "b": 2.0}
    fit = gnlin.curve_fit(plane, x, y, start, sigma=covariance, loss=HUBER)
    assert 1 in fit.outliers()
    assert "3 points of 12 numbers" in str(fit)


def test_one_outlier_is_at_one_point():
    y = 1 + 2 * X + 0.1 * NOISE[0]
    y[7] += 4
    fit = gnlin.curve_fit(line, X, y, {"a": 1.0, "b": 2.0}, sigma=0.1, loss=HUBER)
    assert str(fit).endswith("1 outlier, at point 7")


def test_a_pixel_that_is_not_finite_names_its_own_x():
    x = {"u": ROWS, "v": COLUMNS}
    said = r"at point 3, 4 \(x.u = 3.0, x.v = 4.0\): leave out"
    at = lambda x: jnp.where((x["u"] == 3) & (x["v"] == 4), jnp.inf, 1.0)
    with pytest.warns(UserWarning, match=said):
        gnlin.curve_fit(lambda p, x: p * at(x), x, ROWS, 1.0)
