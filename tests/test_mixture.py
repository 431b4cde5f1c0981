"""A mixture of normal distributions by the outer products of the scores, compared with
expectation maximisation in NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Linear, Scores

import gnlin


RNG = np.random.default_rng(0)
CENTRES = np.array([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]])
POINTS = np.concatenate([0.5 * RNG.normal(size=(100, 2)) + c for c in CENTRES])


class Mixture(eqx.Module):
    logits: jax.Array
    means: jax.Array
    log_scales: jax.Array

    def __call__(self, x):
        z = (x[None] - self.means) * jnp.exp(-self.log_scales)
        each = -0.5 * jnp.sum(z**2 + jnp.log(2 * jnp.pi) + 2 * self.log_scales, axis=1)
        return jax.nn.logsumexp(jax.nn.log_softmax(self.logits) + each)


def by_expectation_maximisation(x, means, num_steps):
    """Return the negative log-likelihood, from unit variances and equal weights."""
    weights, variances = np.full(3, 1 / 3), np.ones((3, 2))
    for _ in range(num_steps):
        z = (x[:, None] - means) ** 2 / variances
        each = weights * np.exp(-0.5 * np.sum(z + np.log(2 * np.pi * variances), axis=2))
        total = np.sum(each, axis=1)
        share = each / total[:, None]
        number = np.sum(share, axis=0)
        weights, means = number / len(x), share.T @ x / number[:, None]
        squares = share[:, :, None] * (x[:, None] - means) ** 2
        variances = np.sum(squares, axis=0) / number[:, None]
    return -np.sum(np.log(total))


@pytest.mark.parametrize("seed", [None, 0])
def test_a_mixture_converges_by_scores_to_expectation_maximisation(seed):
    means = 0.7 * CENTRES + 0.5
    if seed is not None:
        means = np.random.default_rng(seed).choice(POINTS, 3, replace=False)
    start = Mixture(jnp.zeros(3), jnp.asarray(means), jnp.zeros((3, 2)))
    data = jnp.asarray(POINTS), jnp.zeros(300)
    found = gnlin.solve(start, data, loss=Scores(), max_steps=60)
    best = by_expectation_maximisation(POINTS, means, 500)
    assert "converged" in found.reason
    np.testing.assert_allclose(found.loss, best, rtol=1e-9)


def test_the_warning_of_a_linear_loss_names_root():
    start = Mixture(jnp.zeros(3), jnp.asarray(CENTRES), jnp.zeros((3, 2)))
    data = jnp.asarray(POINTS), jnp.zeros(300)
    with pytest.warns(UserWarning, match=r"a mixture, let `root\(output, target\)`"):
        gnlin.solve(start, data, loss=Linear(), max_steps=1)
