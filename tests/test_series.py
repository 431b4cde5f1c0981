"""Likelihoods of time series, whose values are one example, and errors from the observed
information, as the documentation has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from jax.flatten_util import ravel_pytree

import gnlin


class Gaussian(gnlin.authoring.AbstractLoss):
    reduction: str | None = None

    def value(self, outputs, target):
        mean, log_sigma = outputs
        return jnp.sum(0.5 * ((target - mean) / jnp.exp(log_sigma)) ** 2 + log_sigma)

    def factor(self, outputs, target):
        mean, log_sigma = outputs
        root = jnp.exp(-log_sigma), 2**0.5 * jnp.ones_like(mean)
        return gnlin.authoring.DiagonalFactor(jnp.stack(root))


class OfTwo(gnlin.authoring.AbstractLoss):
    """A loss that a user takes for that of one time."""

    reduction: str | None = None

    def value(self, outputs, target):
        return 0.5 * (outputs[0] ** 2 * jnp.exp(-outputs[1]) + outputs[1])


def test_a_loss_of_one_time_for_a_group_of_all():
    group = gnlin.Residuals(lambda p, _: p["a"] * jnp.ones((300, 2)), loss=OfTwo())
    said = (
        r"one example \(a group without data is one\), but returns the shape \(2,\) for "
        r"outputs of the shape \(300, 2\): sum over all"
    )
    with pytest.raises(ValueError, match=said):
        gnlin.solve({"a": jnp.array(0.0)}, group)


def variances(om, al, be, series, first):
    """Return the conditional variances of GARCH(1, 1), by a loop."""
    values = [first]
    for y in series[:-1]:
        values.append(om + al * y**2 + be * values[-1])
    return np.array(values)


def test_garch_is_scipys():
    """The minimum of a loss that is written as a loop, by Nelder and Mead."""
    rng, noise = np.random.default_rng(3), np.zeros(400)
    variance = 1.0
    for k in range(400):
        noise[k] = np.sqrt(variance) * rng.normal()
        variance = 0.1 + 0.2 * noise[k] ** 2 + 0.7 * variance
    series, first = jnp.asarray(noise), float(np.var(noise))

    def f(p, _=None):
        om, al, be = jnp.exp(p["om"]), jax.nn.sigmoid(p["al"]), jax.nn.sigmoid(p["be"])
        step = lambda v, y: (om + al * y**2 + be * v, v)
        _, values = jax.lax.scan(step, jnp.asarray(first), series)
        return jnp.stack([jnp.zeros_like(values), 0.5 * jnp.log(values)])

    start = {"om": jnp.array(-2.0), "al": jnp.array(-2.0), "be": jnp.array(1.0)}
    group = gnlin.Residuals(f, targets=series, loss=Gaussian())
    solution = gnlin.solve(start, group)
    assert solution.reason.endswith("converged")

    def loss(q):
        om, al, be = np.exp(q[0]), 1 / (1 + np.exp(-q[1])), 1 / (1 + np.exp(-q[2]))
        v = variances(om, al, be, noise, first)
        return 0.5 * np.sum(noise**2 / v + np.log(v))

    best = [float(solution.model[name]) for name in ("om", "al", "be")]
    np.testing.assert_allclose(solution.loss, loss(best), rtol=1e-12)
    options = {"xatol": 1e-6, "fatol": 1e-10, "maxiter": 1000}
    found = scipy.optimize.minimize(
        loss, [-2.0, -2.0, 1.0], method="Nelder-Mead", options=options
    )
    np.testing.assert_allclose(best, found.x, atol=1e-4)
    assert solution.loss <= found.fun * (1 + 1e-12)


def test_errors_with_the_curvature_of_the_curve():
    """Those of the fit are 1 / sqrt(sum of f'^2), and the observed ones have also the
    second derivatives times the residuals, in closed form."""
    x = np.linspace(0.5, 2.0, 8)
    y = np.exp(0.3 * x) + 0.3 * np.cos(9 * x)
    f = lambda p, x: jnp.exp(p["k"] * x)
    fit = gnlin.curve_fit(f, x, y, {"k": 0.0}, sigma=np.ones(8), absolute_sigma=True)
    k = float(fit.parameters["k"])
    curve = np.exp(k * x)
    expected = np.sum(x**2 * curve**2)
    np.testing.assert_allclose(fit.standard_errors["k"], expected**-0.5, rtol=1e-8)
    observed = expected - np.sum((y - curve) * x**2 * curve)
    assert abs(observed / expected - 1) > 1e-3
    flat, unravel = ravel_pytree(fit.parameters)
    negative = lambda q: 0.5 * jnp.sum((f(unravel(q), x) - y) ** 2)
    information = jax.jit(jax.hessian(negative))(flat)
    errors = unravel(jnp.sqrt(jnp.diagonal(jnp.linalg.inv(information))))
    np.testing.assert_allclose(errors["k"], observed**-0.5, rtol=1e-10)
