"""Linear probes, compared with SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from benchmarks.probe import linear_probe


@pytest.mark.exhaustive
def test_a_linear_probe_is_softmax_regression():
    key = jax.random.key(4)
    points = jax.random.normal(key, (60, 2)) + jnp.arange(60.0)[:, None] % 3
    labels = jnp.arange(60) % 3
    constant = jnp.concatenate([points, jnp.ones((60, 1))], axis=1)  # no variance
    train, test = (constant[:40], labels[:40]), (constant[40:], labels[40:])
    found = float(linear_probe(train, test, damping=1e-6))

    mean, deviation = (
        points[:40].mean(0, keepdims=True),
        points[:40].std(0, keepdims=True),
    )
    standard = lambda x: (x - mean) / deviation
    value = jax.value_and_grad(_cross_entropy)
    fit = minimize(
        lambda w: jax.tree.map(
            np.asarray, value(jnp.asarray(w), standard(points[:40]), labels[:40])
        ),
        np.zeros(9),
        jac=True,
    )
    outputs = _outputs(fit.x, standard(points[40:]))
    right = np.argmax(np.asarray(outputs), axis=1) == np.asarray(labels[40:])
    expected = float(np.mean(right))
    assert found == expected


def _outputs(w, x):
    return x @ w[:6].reshape(2, 3) + w[None, 6:]


def _cross_entropy(w, x, labels):
    logits = jax.nn.log_softmax(_outputs(w, x))
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))
