"""The share of a batch's step that is taken, judged by the next batch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin
from gnlin._solver._stride import Stride


class Told:
    """An objective that returns prescribed values."""

    def __init__(self, gain):
        self.gain = gain

    def value(self, outputs):
        return jnp.zeros(())

    def decrease(self, before, now):
        return jnp.asarray(self.gain)


def literal(gains, wons):
    """The same rule in plain Python."""
    length, balance, told = 0.25, 0.0, []
    for gain, won in zip(gains, wons, strict=True):
        gain = -np.inf if np.isnan(gain) else gain
        back = won > 0 and gain < -won
        if won > 0:
            balance = 0.9 * balance + max(gain, -won)
            length *= 0.25 if back else (0.8 if balance < 0 else 1.04)
            length = min(max(length, 0.1), 1.0)
        told.append((back, length))
    return told


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_rule(dtype, unchecked):
    rng = np.random.default_rng(0)
    gains = rng.normal(0.3, 1.0, 200)
    gains[[3, 60]] = np.nan, -np.inf
    wons = np.abs(rng.normal(size=200))
    wons[[5, 70]] = 0.0
    y = jnp.zeros(2, dtype)
    stride = Stride.start(y, jnp.dtype(dtype))
    for gain, won, told in zip(gains, wons, literal(gains, wons), strict=True):
        stride = stride.after(y, jnp.asarray(won))
        stride, back = stride.judged(Told(gain), y, y)
        assert (bool(back), float(stride.length)) == (told[0], pytest.approx(told[1]))


def line(y, x):
    return y * x


def fitted(targets, solver, model=line, inputs=None):
    """Train on batches of one example each, in this order."""
    inputs = np.ones(len(targets)) if inputs is None else inputs
    batches = [
        (np.full((1, 1), x), np.full((1, 1), t))
        for x, t in zip(inputs, targets, strict=True)
    ]
    start = model, jnp.zeros(1)
    return gnlin.fit(start, batches, solver, steps=len(batches), progress=False)


def test_a_step_that_raises_the_next_loss_is_reverted():
    # The first batch asks for a step of 1, and gets a quarter of it. It gains less by
    # this than the second batch, which asks for -3, loses.
    result = fitted([1.0, -3.0], gnlin.GaussNewton())
    # The second step is -3 from zero. A quarter of a quarter is below the least share.
    assert jnp.allclose(result.model[1], -0.3)
    assert result.stats["num_rejected_steps"] == 1
    assert result.stats["num_accepted_steps"] == 1


def test_best_parameters_after_a_reverted_step():
    # The second batch takes the first one's step back, and is the best one. The others
    # are far off, until the run has diverged.
    targets = [2.0, -1.6, *[1000.0] * 8]
    with pytest.warns(UserWarning, match="diverged"):
        result = fitted(targets, gnlin.GaussNewton())
    assert result.history["loss"][1] == pytest.approx(1.28)
    np.testing.assert_array_equal(result.model[1], 0.0)


def test_a_step_that_lowers_the_next_loss_is_kept():
    result = fitted([1.0, 1.0], gnlin.GaussNewton())
    assert jnp.allclose(result.model[1], 0.25 + 0.75 * 0.25 * 1.04)
    assert result.stats["num_rejected_steps"] == 0
    history = result.history
    assert np.allclose(history["step_norm"], [0.25, 0.75 * 0.25 * 1.04])


def test_full_steps_by_one_argument():
    result = fitted([1.0, -3.0], gnlin.GaussNewton(search=None))
    assert jnp.allclose(result.model[1], -3.0)


def test_a_nan_on_the_next_batch_reverts_the_step():
    # Past 1/8 the second batch takes the square root of a negative number.
    def curved(y, x):
        return jnp.where(x[0] > 0, y, jnp.sqrt(0.125 - y))

    result = fitted([1.0, 1.0], gnlin.DampedGaussNewton(0.1), curved, [1.0, -1.0])
    assert jnp.all(jnp.isfinite(result.model[1]))
    assert float(result.model[1][0]) < 0.125


def test_a_network_on_batches():
    key = jax.random.key(0)
    model = eqx.nn.MLP(2, 1, 4, 1, key=key)
    x = jax.random.normal(key, (20, 2))
    solver = gnlin.TruncatedGaussNewton(0.1)
    result = gnlin.fit(
        model,
        (x, jnp.sum(x, 1, keepdims=True)),
        solver,
        batch_size=5,
        epochs=8,
        key=key,
        progress=False,
    )
    assert result.history["loss"][-1] < result.history["loss"][0]


@pytest.mark.slow
def test_levenberg_marquardt_does_not_scale_on_batches():
    x = np.random.default_rng(0).normal(size=(64, 3)) * [1.0, 10.0, 0.1]
    model = eqx.nn.MLP(3, 1, 8, 1, jnp.tanh, key=jax.random.key(0))

    def trained(**scaling):
        solver = gnlin.LevenbergMarquardt(**scaling)
        result = gnlin.fit(
            model, (x, x[:, :1]), solver, batch_size=16, steps=4, progress=False
        )
        return result.history["loss"]

    np.testing.assert_array_equal(trained(), trained(scaling="identity"))


@pytest.mark.exhaustive
def test_scales_on_batches_between_bounds():
    """On a face the problem is solved again with the scales of the batch."""
    x = np.random.default_rng(0).normal(size=(64, 3))
    model = eqx.nn.MLP(3, 1, 8, 1, jnp.tanh, dtype=float, key=jax.random.key(0))
    solver = gnlin.LevenbergMarquardt(scaling="root", bounds=(-0.6, 0.6))
    result = gnlin.fit(
        model, (x, x[:, :1]), solver, batch_size=16, steps=16, progress=False
    )
    arrays = jax.tree.leaves(eqx.filter(result.model, eqx.is_inexact_array))
    assert max(np.max(np.abs(array)) for array in arrays) <= 0.6
    assert result.history["loss"][-1] < 0.1 * result.history["loss"][0]


@pytest.mark.exhaustive
def test_default_damping_on_sampled_points_and_on_batches():
    """For an ordinary differential equation the default damping is 1e-8. It is much
    larger if a batch size selects the data."""

    def decay(u, t):
        value, rate = jax.jvp(u, (t,), (jnp.ones(()),))
        return rate + value

    anywhere = lambda key: jax.random.uniform(key, (32,), float)
    start = gnlin.Residuals(lambda u, t: u(t) - 1, jnp.zeros(4))
    net = eqx.nn.MLP("scalar", "scalar", 8, 1, jnp.tanh, key=jax.random.key(0))
    net = jax.tree.map(lambda x: x.astype(float) if eqx.is_array(x) else x, net)

    def trained(batch_size=None, **damping):
        groups = {"equation": gnlin.Residuals(decay, anywhere), "start": start}
        solver = gnlin.LevenbergMarquardt(**damping)
        sizes = None if batch_size is None else {"start": batch_size}
        return gnlin.fit(net, groups, solver, steps=60, batch_size=sizes, progress=False)

    found, same = trained(), trained(damping=1e-8)
    np.testing.assert_allclose(found.history["loss"], same.history["loss"], rtol=1e-6)
    t = jnp.linspace(0, 1, 50)
    np.testing.assert_allclose(jax.vmap(found.model)(t), jnp.exp(-t), atol=1e-4)
    ratio = trained(2).history["damping"][0] / found.history["damping"][0]
    np.testing.assert_allclose(ratio, 1e5 * (1 + (48 / 32) ** 2), rtol=0.5)
