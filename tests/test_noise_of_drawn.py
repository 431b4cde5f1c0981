"""Points that a group draws for each step, with and without noise, compared with the true
parameters and with least squares in NumPy on all points that were drawn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin


# The features of a network have such a spectrum.
SCALES = 1 / np.arange(1.0, 61.0) ** 2
TRUE = np.random.default_rng(0).normal(size=60)
STEPS, SIZE = 150, 40


def draw(key, noise):
    of_points, of_noise = jax.random.split(key)
    x = SCALES[None] * jax.random.normal(of_points, (SIZE, 60))
    return {"x": x, "y": x @ TRUE + noise * jax.random.normal(of_noise, (SIZE,))}


def trained(noise, damping=None):
    group = gnlin.Residuals(
        lambda w, d: jnp.dot(w, d["x"]) - d["y"], functools.partial(draw, noise=noise)
    )
    solver = gnlin.LevenbergMarquardt(damping=damping)
    return gnlin.fit(jnp.zeros(60), group, solver, steps=STEPS, progress=False)


def error(w):
    """Return the root of the mean squared error of predictions."""
    return np.linalg.norm(SCALES * (np.asarray(w) - TRUE))


def by_least_squares(noise):
    """Return the error of least squares on the points of ten steps."""
    drawn = [draw(jax.random.key(k), noise) for k in range(10)]
    x, y = (np.concatenate([np.asarray(d[name]) for d in drawn]) for name in "xy")
    return error(np.linalg.lstsq(x, y)[0])


@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_noise_of_drawn_points_is_found(noise):
    found, of_ten = trained(noise), by_least_squares(noise)
    assert error(found.model) < of_ten < error(trained(noise, 1e-8).model)
    assert found.history["damping"][-1] > 1e3 * found.history["damping"][0]


def test_without_noise_the_least_damping_stays():
    plain, fixed = trained(0.0), trained(0.0, 1e-8)
    assert error(plain.model) < 1e-6
    np.testing.assert_array_equal(plain.model, fixed.model)
    np.testing.assert_allclose(plain.history["damping"][-1], plain.history["damping"][0])
