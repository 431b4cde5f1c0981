"""Robust fits whose scale is estimated count and limit the steps of all their rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import num_compiled

import gnlin


HUBER = gnlin.losses.Huber(1.345)
X = np.linspace(0, 4, 60)
START = {"a": 20.0, "k": 0.1}


def decay(p, x):
    return p["a"] * jnp.exp(-p["k"] * x)


def data(seed=0):
    y = 2 * np.exp(-1.3 * X) + 0.05 * np.random.default_rng(seed).normal(size=60)
    y[7] += 2
    return y


def literally(y):
    """Return the steps of each round and the last fit, by separate fits."""
    fit = gnlin.curve_fit(decay, X, y, START)
    fits, start = [fit], START
    for _ in range(5):
        residuals = y - np.asarray(decay(fit.parameters, X))
        scale = np.median(np.abs(residuals)) / 0.6744897501960817
        fit = gnlin.curve_fit(decay, X, y, start, sigma=scale, loss=HUBER)
        fits.append(fit)
        start = fit.parameters
    return [int(fit.num_steps) for fit in fits], fits


@pytest.mark.slow
def test_steps_of_all_rounds_are_counted():
    y = data()
    each, fits = literally(y)
    fit = gnlin.curve_fit(decay, X, y, START, loss=HUBER)
    total = sum(each)
    assert fit.num_steps == total > 2 * each[0]
    assert str(fit).startswith(f"converged in {total} steps: 60 points")
    np.testing.assert_allclose(fit.parameters["a"], fits[-1].parameters["a"], rtol=1e-9)
    history = fit.history
    for name in ("step", "num_feature_updates"):
        np.testing.assert_array_equal(history[name], np.arange(1, total + 1))
    losses = np.concatenate([f.history["loss"] for f in fits])
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-6)
    # The profiles run the program of the last round.
    fit.confidence_intervals(names="a")
    assert num_compiled(lambda: fit.confidence_intervals(names="k")) == 0


@pytest.mark.parametrize("most", [1, 3, 15, 30])
def test_max_steps_limits_their_sum(most):
    y = data()
    each, _ = literally(y)
    assert most < sum(each)
    with pytest.warns(UserWarning, match="not converged: (all|the only)"):
        fit = gnlin.curve_fit(decay, X, y, START, loss=HUBER, max_steps=most)
    assert fit.num_steps == len(fit.history["loss"]) == most
    words = "the only step was" if most == 1 else f"all {most} steps were"
    assert str(fit).startswith(f"{words} made: raise `max_steps`")
    # The first loss is that of the start, and the end is no worse.
    loss = lambda p: np.sum((y - np.asarray(decay(p, X))) ** 2)
    assert loss(fit.parameters) < loss(START)


@pytest.mark.slow
def test_one_step_is_not_several():
    y = np.asarray(1 + 2 * X)
    line = lambda p, x: p["a"] + p["b"] * x
    start = {"a": 1.0, "b": 2.0}
    fit = gnlin.curve_fit(line, X, y, start, loss=HUBER, sigma=1.0)
    assert str(fit).startswith("converged in 1 step: 60 points, 2 free parameters")


@pytest.mark.slow
def test_steps_of_many_data_sets():
    ys = np.stack([data(0), data(1)])
    alone = [gnlin.curve_fit(decay, X, y, START, loss=HUBER) for y in ys]
    fits = gnlin.curve_fit(decay, X, ys, START, loss=HUBER)
    each = [int(fit.num_steps) for fit in alone]
    np.testing.assert_allclose(fits.num_steps, each, atol=2)  # rounding may differ
    with pytest.warns(UserWarning, match="2 of 2 data sets have not converged"):
        fits = gnlin.curve_fit(decay, X, ys, START, loss=HUBER, max_steps=20)
    assert fits.num_steps.tolist() == [20, 20]


@pytest.mark.slow
def test_steps_of_starts():
    y, bounds = data(), {"a": (0, 30), "k": (0, 5)}
    options = {"loss": HUBER, "bounds": bounds, "starts": 4}
    fit = gnlin.curve_fit(decay, X, y, START, **options)
    single = gnlin.curve_fit(decay, X, y, START, loss=HUBER, bounds=bounds)
    np.testing.assert_allclose(fit.parameters["k"], single.parameters["k"], rtol=1e-6)
    most = int(fit.num_steps) // 2
    with pytest.warns(UserWarning, match="best of 4 starts has not converged.*all"):
        few = gnlin.curve_fit(decay, X, y, START, max_steps=most, **options)
    assert few.num_steps == most
    # The last rounds have no steps left, and do not return to a start.
    np.testing.assert_allclose(few.parameters["k"], fit.parameters["k"], rtol=0.02)


@pytest.mark.slow
def test_rounds_go_on_until_the_scale_is_settled():
    # Eight of 25 points are outliers. The scale moves by 1.5 % after five rounds.
    rng = np.random.default_rng(8)
    x = np.column_stack([np.ones(25), rng.normal(size=25)])
    y = x @ [1, 2] + rng.standard_t(2, size=25)
    y[:8] += 12
    fit = gnlin.curve_fit(lambda p, x: x @ p, x, y, np.zeros(2), loss=HUBER)
    p = np.linalg.lstsq(x, y, rcond=None)[0]
    for _ in range(3000):  # reweighted least squares, with the scale of each step
        scale = np.median(np.abs(y - x @ p)) / 0.674489750196
        weight = np.sqrt(np.minimum(1, 1.345 * scale / np.abs(y - x @ p)))
        p = np.linalg.lstsq(weight[:, None] * x, weight * y, rcond=None)[0]
    np.testing.assert_allclose(fit.scale, scale, rtol=2e-3)
    assert np.all(np.abs(fit.parameters - p) < 2e-3 * fit.standard_errors)


@pytest.mark.slow
def test_inside_jit():
    y = data()
    outside = gnlin.curve_fit(decay, X, y, START, loss=HUBER)

    @jax.jit
    def inside(y):
        fit = gnlin.curve_fit(decay, X, y, START, loss=HUBER, max_steps=100)
        return fit.num_steps, fit.history, fit.parameters

    steps, history, parameters = inside(y)
    made = int(outside.num_steps)
    np.testing.assert_allclose(steps, made, atol=2)
    loss = np.asarray(history["loss"])
    assert loss.shape == (int(steps),)
    np.testing.assert_allclose(loss[:20], outside.history["loss"][:20], rtol=1e-6)
    np.testing.assert_allclose(history["step"], np.arange(1, steps + 1))
    np.testing.assert_allclose(parameters["k"], outside.parameters["k"], rtol=1e-8)


@pytest.mark.slow
def test_in_single_precision():
    with jax.enable_x64(False):
        fit = gnlin.curve_fit(decay, X, data(), START, loss=HUBER)
    double = gnlin.curve_fit(decay, X, data(), START, loss=HUBER)
    assert fit.num_steps == len(fit.history["loss"]) > 10
    np.testing.assert_allclose(fit.parameters["k"], double.parameters["k"], rtol=1e-4)
