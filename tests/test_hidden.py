"""Parameters whose derivative is zero although the curve depends on them."""

import itertools
import pickle
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from problems import num_compiled

import gnlin


TOTAL = np.linspace(0.1, 10, 30)
WORDS = "has not converged: the derivative of `f` by `{}` is zero although `f` depends on"


def closed(protein, constant, total=TOTAL):
    """Bound ligand at equilibrium, the root of (P - c)(L - c) = K c."""
    every = protein + total + constant
    return (every - (every**2 - 4 * protein * total) ** 0.5) / 2


Y = closed(2.0, 0.5) + 0.01 * np.random.default_rng(0).normal(size=30)


def by_bisection(p, total):
    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        is_left = (p["P"] - middle) * (total - middle) > p["K"] * middle
        return jnp.where(is_left, middle, low), jnp.where(is_left, high, middle)

    first = jnp.zeros_like(total), jnp.minimum(total, p["P"])
    return jax.lax.fori_loop(0, 60, halve, first)[0]


def by_root_find(p, total):
    def root(total):
        gap = lambda c, _: (p["P"] - c) * (total - c) - p["K"] * c
        low, high = jnp.zeros(()), jnp.minimum(total, p["P"])
        solver = optx.Bisection(rtol=1e-12, atol=1e-12)
        options = {"lower": low, "upper": high}
        found = optx.root_find(gap, solver, high / 2, options=options, throw=False)
        return found.value

    return jax.vmap(root)(total)


@pytest.mark.slow
def test_a_root_by_bisection_has_no_derivative():
    start = {"P": 3.0, "K": 1.0}
    with pytest.warns(UserWarning, match=WORDS.format("K")) as warned:
        fit = gnlin.curve_fit(by_bisection, TOTAL, Y, start)
    assert warned[0].filename == __file__
    assert len(warned) == 1
    assert fit.result == optx.RESULTS.stagnation
    assert "not determined" not in str(fit)
    assert "not fitted: its derivative is zero" in str(fit)
    assert fit.undetermined() == []
    assert np.isinf(fit.standard_errors["K"])
    loaded = pickle.loads(pickle.dumps(fit))
    assert loaded.reason == fit.reason


def test_roots_by_bisection_are_named_if_no_parameter_has_a_derivative():
    words = "roots found by bisection .* take roots by `optimistix.root_find`"
    with pytest.raises(ValueError, match=words):
        gnlin.curve_fit(by_bisection, TOTAL, Y, {"P": 2.0, "K": 1.0}, fixed=["P"])


@pytest.mark.slow
def test_the_same_root_by_optimistix_has_the_errors_of_the_closed_formula():
    start = {"P": 3.0, "K": 1.0}
    fit = gnlin.curve_fit(by_root_find, TOTAL, Y, start)
    formula = lambda p, total: closed(p["P"], p["K"], total)
    expected = gnlin.curve_fit(formula, TOTAL, Y, start)
    for name in start:
        error = expected.standard_errors[name]
        np.testing.assert_allclose(fit.standard_errors[name], error, rtol=1e-5)
        far = abs(fit.parameters[name] - expected.parameters[name])
        assert far < 1e-4 * error


@pytest.mark.parametrize(
    ("f", "start"),
    [
        (lambda p, x: p["a"] + jnp.where(x < p["K"], 1.0, 0.0), {"a": 0.0, "K": 5.0}),
        pytest.param(
            *(lambda p, x: p["a"] + jnp.round(1000 * p["K"]) * x, {"a": 0.0, "K": 0.5}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda p, x: p["a"] + x * jax.lax.stop_gradient(p["K"]),
            {"a": 0.0, "K": 0.0},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_jumps_and_stopped_gradients(f, start):
    x = np.linspace(0, 10, 500)
    with pytest.warns(UserWarning, match=WORDS.format("K")):
        gnlin.curve_fit(f, x, 1 + 0.1 * np.cos(50 * x), start)


@pytest.mark.parametrize(
    "f",
    [
        pytest.param(f, id=name, marks=() if name == "knot" else pytest.mark.slow)
        for name, f in {
            "none": lambda p, x: p["a"] * x + 0 * p["K"],
            "clip": lambda p, x: p["a"] * x + jnp.clip(p["K"], 0.0, 1.0),
            "two plateaus": lambda p, x: p["a"] * x + jnp.clip(p["K"], 0.9, 1.0),
            "ramp": lambda p, x: p["a"] * x + jnp.clip(100 * (x - p["K"]), 0.0, 1.0),
            "knot": lambda p, x: p["a"] * x + jax.nn.relu(x - p["K"]),
        }.items()
    ],
)
def test_a_plateau_is_still_undetermined(f):
    x = np.linspace(0, 1, 20)
    with pytest.warns(UserWarning, match="do not determine all parameters: moving K by"):
        fit = gnlin.curve_fit(f, x, 2 * x + 0.1 * np.cos(9 * x), {"a": 1.0, "K": 5.0})
    assert fit.result == optx.RESULTS.successful


@pytest.mark.parametrize("spacing", [0.01, pytest.param(1 / 29, marks=pytest.mark.slow)])
def test_a_change_point_between_distant_x(spacing):
    x = np.arange(0, 1, spacing)
    y = np.where(x < 0.6, 1.0, 2.0) + 0.01 * np.cos(50 * x)
    f = lambda p, x: jnp.where(x < p["c"], p["a"], p["b"])
    with pytest.warns(UserWarning, match=WORDS.format("c")):
        fit = gnlin.curve_fit(f, x, y, {"a": 1.0, "b": 1.5, "c": 0.5})
    assert fit.result == optx.RESULTS.stagnation
    for name, is_in in {"a": x < 0.5, "b": x >= 0.5}.items():
        np.testing.assert_allclose(fit.parameters[name], y[is_in].mean(), rtol=1e-6)


X = np.linspace(0, 1, 30)
FALLING = 1 - 0.5 * X + 0.05 * np.cos(40 * X)
RISING = 1 + 0.5 * X + 0.05 * np.cos(40 * X)
SYMMETRIC = {
    "square": (lambda p, x: p["a"] + p["b"] ** 2 * x, FALLING, True),
    "square, lower beside it": (lambda p, x: p["a"] + p["b"] ** 2 * x, RISING, False),
    "cosine": (lambda p, x: p["a"] * jnp.cos(p["b"] * x), 2 * np.cos(X), False),
    "kink": (lambda p, x: p["a"] + jax.nn.relu(p["b"]) * x, FALLING, True),
    "kink, lower beside it": (
        lambda p, x: p["a"] + jax.nn.relu(p["b"]) * x,
        RISING,
        False,
    ),
}


# Each function, each precision and each verdict
OFTEN = (
    ("square", np.float64),
    ("square, lower beside it", np.float64),
    ("cosine", np.float32),
    ("kink", np.float64),
    ("kink, lower beside it", np.float64),
)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.slow)
        for case in itertools.product(SYMMETRIC, [np.float64, np.float32])
    ],
)
def test_a_derivative_of_zero_at_one_point_is_no_missing_one(name, dtype):
    """The references are the losses of NumPy around the start, with the best `a`."""
    f, y, is_minimum = SYMMETRIC[name]
    start = {"a": dtype(1.0), "b": dtype(0.0)}
    words = (
        "the minimum, though" if is_minimum else "this point only, and .* lower beside"
    )
    with pytest.warns(UserWarning, match="`b` is zero at " + words) as warned:
        fit = gnlin.curve_fit(f, X.astype(dtype), y.astype(dtype), start)
    assert len(warned) == 1
    assert fit.result == optx.RESULTS.successful
    assert fit.undetermined() == []
    assert "its derivative is zero here" in str(fit)
    assert fit.parameters["b"] == 0

    def loss(b):
        shape = [np.asarray(f({"a": a, "b": b}, X), float) for a in (0.0, 1.0)]
        unit, rest = shape[1] - shape[0], y - shape[0]
        return np.sum((rest - unit * (unit @ rest) / (unit @ unit)) ** 2)

    lowest = min(loss(b) for b in np.linspace(-0.1, 0.1, 21))
    assert (lowest >= loss(0.0) - 1e-12) == is_minimum


def test_a_saddle_without_any_derivative_is_no_minimum():
    """The product of two zeros, and a square whose loss is lower beside its start. A
    square at its minimum has converged."""
    product = lambda p, x: p["a"] * p["b"] * x
    start = {"a": 0.0, "b": 0.0}
    with pytest.warns(UserWarning, match="made no step, because the grad") as warned:
        fit = gnlin.curve_fit(product, X, RISING, start)
    assert len(warned) == 1
    assert fit.result == optx.RESULTS.stagnation
    with pytest.warns(UserWarning, match="`gnlin.solve` made no step: the grad"):
        gnlin.solve(start, gnlin.Residuals(lambda p, _: product(p, X) - RISING))
    square = lambda p, x: p["b"] ** 2 * x
    for y, words, has_converged in (
        (RISING, "lower beside it: start it elsewhere", False),
        (FALLING - 2, "zero at the minimum, though not beside it", True),
    ):
        with pytest.warns(UserWarning, match=words):
            fit = gnlin.curve_fit(square, X, y, {"b": 0.0})
        assert fit.converged == has_converged


@pytest.mark.slow
def test_a_function_that_raises_at_distant_parameters():
    """Small moves tell what they can."""

    def f(p, x):
        step = jax.lax.stop_gradient(p["K"])
        step = eqx.error_if(step, jnp.abs(step - 1) > 0.05, "far")
        return p["a"] * x + step

    with pytest.warns(UserWarning, match=WORDS.format("K")):
        gnlin.curve_fit(f, X, RISING, {"a": 1.0, "K": 1.0})


@pytest.mark.slow
def test_a_column_of_length_one_is_no_column_of_zero():
    f = lambda p, x: x * (p["a"] + p["b"])
    with pytest.warns(UserWarning, match="do not determine"):
        gnlin.curve_fit(f, np.ones(1), np.ones(1), {"a": 0.5, "b": 0.2}, sigma=1.0)


def test_bounds_and_names():
    """The parameters start at their bounds, and one of three has a derivative."""
    f = lambda p, x: p["a"] * x + jax.lax.stop_gradient(p["b"]) * jnp.round(1e6 * p["c"])
    x, start = np.linspace(0, 1, 20), {"a": 1.0, "b": 1.0, "c": 1.0}
    bounds = {"b": (0.5, 1.0), "c": (1.0, 2.0)}
    words = "by `b` and `c` is zero although `f` depends on them"
    with pytest.warns(UserWarning, match=words):
        gnlin.curve_fit(f, x, 2e6 + x + 0.1 * np.cos(9 * x), start, bounds=bounds)


def test_nothing_is_compiled_or_evaluated_if_no_column_is_zero():
    formula = lambda p, total: closed(p["P"], p["K"], total)
    run = lambda: gnlin.curve_fit(formula, TOTAL, Y, {"P": 3.0, "K": 1.0})
    run()
    assert num_compiled(run) == 0


@pytest.mark.slow
def test_traced_fits_return_as_before():
    start = {"P": 3.0, "K": 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = lambda y: gnlin.curve_fit(by_bisection, TOTAL, y, start)
        errors = jax.jit(lambda y: fit(y).standard_errors)(Y)
    assert np.isinf(errors["K"])


@pytest.mark.slow
def test_functions_with_a_backward_mode_only():
    @jax.custom_vjp
    def flat(k):
        return jnp.round(1000 * k)

    flat.defvjp(lambda k: (flat(k), None), lambda _, g: (0 * g,))
    x = np.linspace(0, 1, 20)
    f = lambda p, x: p["a"] * x + flat(p["K"])
    with pytest.warns(UserWarning, match=WORDS.format("K")):
        gnlin.curve_fit(f, x, 2 * x + 0.1 * np.cos(9 * x), {"a": 1.0, "K": 0.5})
