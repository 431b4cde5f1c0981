"""Every kind of solver trains classifiers of handwritten digits: in single precision, on
mini-batches, with cross-entropy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest

import gnlin
from benchmarks.data import digits
from benchmarks.networks.cnn import smooth_digits_cnn


LOSS = gnlin.SoftmaxCrossEntropy(reduction="mean")
ARMIJO = optx.BacktrackingArmijo()
SOLVERS = {
    "damped": (gnlin.DampedGaussNewton(0.3, search=ARMIJO), 32, 6),
    "adaptive": (
        gnlin.LevenbergMarquardt(scaling="identity", acceleration=False),
        256,
        10,
    ),
    "truncated": (
        gnlin.TruncatedGaussNewton(0.1, damping=0.3, search=ARMIJO),
        32,
        6,
    ),
    "iterative linearisation": (
        gnlin.IterativeLinearisation(10, optimiser=optax.adam(5e-3), restart=False),
        32,
        20,
    ),
}


def mlp(key):
    return eqx.nn.MLP(64, 10, 32, 1, activation=jnp.tanh, key=key)


NETWORKS = {"MLP": (mlp, True, 0.96), "CNN": (smooth_digits_cnn, False, 0.98)}


def single(tree):
    """Its floating-point arrays in single precision."""

    def cast(x):
        return jnp.asarray(x, jnp.float32 if eqx.is_inexact_array_like(x) else None)

    return jax.tree.map(lambda x: cast(x) if eqx.is_array_like(x) else x, tree)


def train(network, solver, seed):
    """Test accuracy after training, and the run."""
    make, flat, _ = NETWORKS[network]
    solver, batch_size, epochs = SOLVERS[solver]
    key = jax.random.key(seed)
    data, test = single(digits.classification(flat))
    result = gnlin.fit(
        single(make(key)),
        data,
        solver,
        loss=LOSS,
        batch_size=batch_size,
        epochs=epochs,
        key=key,
    )
    images, labels = test
    outputs = jax.vmap(result.model)(images)
    assert outputs.dtype == jnp.float32
    return float(gnlin.accuracy(outputs, labels)), result


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_digits_are_learnt(network, solver):
    accuracy, result = train(network, solver, seed=3)
    assert accuracy >= NETWORKS[network][2]
    assert result.result == optx.RESULTS.nonlinear_max_steps_reached
    loss = result.history["loss"]
    assert np.all(np.isfinite(loss))
    assert np.mean(loss[-10:]) < 0.1 * loss[0]
