"""Functions that read the data to which they are fitted, compared with NumPy."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import num_compiled

import gnlin


T = np.linspace(0.0, 10, 8)
RNG = np.random.default_rng(7)
AMPLITUDES = RNG.uniform(0.5, 2, (2, 20))
RATES = np.log([1.0, 0.2])


def basis(rates, xp=jnp):
    return xp.exp(-xp.exp(rates)[None] * T.astype(rates.dtype)[:, None])


Y = basis(RATES, np) @ AMPLITUDES + 0.05 * RNG.normal(size=(8, 20))


def projected(p, x):
    columns = basis(p["rates"])
    return columns @ jnp.linalg.lstsq(columns, x["Y"])[0]


def whole(p, x):
    return basis(p["rates"]) @ p["amplitudes"]


def test_linear_parameters_inside_of_f_are_told():
    with pytest.warns(UserWarning, match=r"as `x\['Y'\]`, .* about 40 degrees") as warned:
        fit = gnlin.curve_fit(projected, {"Y": Y, "t": T}, Y, {"rates": RATES + 0.2})
    assert warned[0].filename == __file__
    assert len(warned) == 1
    # The remedy: the same estimates, and the errors of Kaufman's Jacobian.
    first = np.linalg.lstsq(basis(RATES + 0.2, np), Y, rcond=None)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start = {"rates": RATES + 0.2, "amplitudes": first}
        all_of_them = gnlin.curve_fit(whole, T, Y, start)
    rates = np.asarray(all_of_them.parameters["rates"])
    np.testing.assert_allclose(fit.parameters["rates"], rates, rtol=1e-6)
    columns = basis(rates, np)
    amplitudes = np.linalg.lstsq(columns, Y, rcond=None)[0]
    q, _ = np.linalg.qr(columns)
    slopes = -np.exp(rates) * T[:, None] * columns
    jacobian = np.stack(
        [(s - q @ (q.T @ s)).ravel() for s in slopes.T[:, :, None] * amplitudes[:, None]],
        axis=1,
    )
    variance = np.sum((Y - columns @ amplitudes) ** 2) / (160 - 42)
    expected = np.sqrt(np.diagonal(np.linalg.inv(jacobian.T @ jacobian)) * variance)
    np.testing.assert_allclose(all_of_them.standard_errors["rates"], expected, rtol=1e-6)
    assert all_of_them.degrees_of_freedom == 118
    assert (fit.standard_errors["rates"] < 0.9 * expected).all()


@pytest.mark.slow
def test_a_weighted_projection_of_complex_data_in_a_dictionary():
    waves = lambda p: jax.lax.complex(jnp.cos(p["w"] * T), jnp.sin(p["w"] * T))[:, None]
    z = np.exp(0.5j * T) * (1 + 2j) + 0.05 * RNG.normal(size=8)

    def f(p, x):
        columns, weights = waves(p), jnp.asarray(1 / (1 + T))
        half = jnp.sqrt(weights)[:, None].astype(complex)
        found = jnp.linalg.lstsq(half * columns, half[:, 0] * x["z"])[0]
        return {"z": columns @ found, "other": p["w"] * jnp.ones(3)}

    y = {"z": z, "other": 0.5 + 0.1 * RNG.normal(size=3)}
    with pytest.warns(UserWarning, match=r"as `x\['z'\]`, and computes"):
        gnlin.curve_fit(f, {"z": z}, y, {"w": 0.55})


def autoregression(p, x):
    return p["c"] + p["a"] * jnp.concatenate([jnp.zeros(1), x["y"][:-1]])


def simulated():
    y = np.zeros(200)
    for k in range(1, 200):
        y[k] = 1 + 0.9 * y[k - 1] + 0.3 * RNG.normal()
    return y


@pytest.mark.parametrize(
    "f",
    [
        pytest.param(autoregression, id="forecast"),
        pytest.param(
            lambda p, x: p["c"] + p["a"] * x["t"],
            id="unread column",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda p, x: p["c"] + p["a"] * x["t"] + 0 * jnp.mean(x["y"]),
            id="read in vain",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_functions_with_y_in_x_do_not_warn(f):
    y = simulated()
    x = {"t": np.linspace(0, 1, 200), "y": y}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = gnlin.curve_fit(f, x, y, {"a": 0.5, "c": 0.0})
    if f is autoregression:
        design = np.stack([np.r_[0, y[:-1]], np.ones(200)], 1)
        expected = np.linalg.lstsq(design, y, rcond=None)[0]
        np.testing.assert_allclose(list(fit.parameters.values()), expected, rtol=1e-6)


FUNCTIONS_OF_X = {
    "square": lambda p, x: p["a"] * x**2,
    "root": lambda p, x: p["a"] * jnp.sqrt(x),
    "large trace": lambda p, x: p["a"] * x**3 / jnp.mean(x**2),
    "large diagonal": lambda p, x: p["a"] + 3 * jnp.mean(x) - jnp.cos(30 * x) / 6,
}
# Each reason and each precision
OFTEN = (
    ("square", np.float32),
    ("large trace", np.float64),
    ("large diagonal", np.float64),
)


@pytest.mark.parametrize(
    ("f", "dtype"),
    [
        pytest.param(
            FUNCTIONS_OF_X[case[0]],
            case[1],
            id=f"{case[0]}-{case[1].__name__}",
            marks=() if case in OFTEN else pytest.mark.slow,
        )
        for case in itertools.product(FUNCTIONS_OF_X, [np.float64, np.float32])
    ],
)
def test_a_function_of_x_that_equals_y_is_no_projection(f, dtype):
    """Each value is computed from itself alone, or the diagonal of the derivative, by
    NumPy's differences, is none of a projection."""
    y = np.linspace(0.4, 1.0, 30).astype(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = gnlin.curve_fit(f, y, y, {"a": dtype(1.0)})
    at = lambda x: np.asarray(f({"a": float(fit.parameters["a"])}, x))
    y = y.astype(float)
    slopes = np.stack([at(x) - at(y) for x in y + 1e-4 * np.eye(30)]) / 1e-4
    is_alone = np.count_nonzero(slopes) <= 30
    diagonal = np.diagonal(slopes)
    assert is_alone or diagonal.sum() > 30 or diagonal.max() > 2


def test_a_line_through_equal_arrays_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gnlin.curve_fit(lambda p, x: p["a"] * x + p["b"], T, T, {"a": 0.5, "b": 1.0})


@pytest.mark.slow
def test_missing_values_and_single_precision():
    y = np.asarray(Y, np.float32)
    gap = y.copy()
    gap[3, 5] = np.nan  # the same column of x has no gap
    f = lambda p, x: projected(p, {"Y": x["Y"]})
    start = {"rates": jnp.asarray(RATES + 0.2, jnp.float32)}
    with pytest.warns(UserWarning, match="computes each value from itself"):
        gnlin.curve_fit(f, {"Y": y}, gap, start, nan_policy="omit")


def test_nothing_is_compiled_if_no_array_of_x_is_read_and_equals_y():
    y = simulated()
    x = {"t": np.linspace(0, 1, 200), "y": y, "other": y[::-1].copy()}
    f = lambda p, x: p["c"] + p["a"] * x["t"] + 0 * jnp.sum(x["other"])
    run = lambda: gnlin.curve_fit(f, x, y, {"a": 0.5, "c": 0.0})
    run()
    assert num_compiled(run) == 0


def test_traced_data_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = lambda y: gnlin.curve_fit(projected, {"Y": y}, y, {"rates": RATES + 0.2})
        jax.jit(lambda y: fit(y).parameters)(Y)


@pytest.mark.slow
def test_complex_and_real_arrays_beside_each_other_are_compared_by_their_kind():
    """A complex x beside a real y of its shape, and the other way around."""

    def f(p, x):
        found = p["a"].astype(complex) * x["z"]
        return {"z": found, "r": found.real + 0 * x["r"]}

    z = np.exp(1j * T)
    y = {"z": 2 * z + 0.1 * RNG.normal(size=8), "r": 2 * z.real}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gnlin.curve_fit(f, {"z": z, "r": T}, y, {"a": 1.0})
