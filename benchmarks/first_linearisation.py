"""K = infinity: the network linearised at its initialisation, the loss minimised.

By L-BFGS, until no entry of the gradient of the mean loss is larger than a tolerance. On
classes that a hyperplane separates there is no minimum, but what is learnt has settled.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree
from scipy.optimize import minimize

import gnlin

from .experiment import Place
from .training import Columns, Draw, Images, load, NETWORKS


TOLERANCE = 1e-4
MOST_STEPS = 5_000


def train_endlessly(settings: Images, place: Place) -> Columns:
    """Of all seeds, at one look. `finished` says whether the tolerance was reached."""
    make_model = NETWORKS[settings.network]
    runs = [
        _minimise(make_model(jax.random.key(seed)), load(settings, place, seed))
        for seed in range(settings.seeds)
    ]
    return {name: np.array([[run[name]] for run in runs]) for name in runs[0]}


def _minimise(model: PyTree, draw: Draw) -> dict[str, float]:
    parameters, frozen = eqx.partition(model, eqx.is_inexact_array)
    start, unravel = ravel_pytree(parameters)

    def linearised(moved, inputs):
        fn = lambda y: jax.vmap(eqx.combine(unravel(y), frozen))(inputs)
        outputs, change = jax.jvp(fn, (start,), (moved,))
        return outputs + change

    @jax.jit
    def loss_and_gradient(moved, images, labels):
        loss = lambda moved: jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(
                linearised(moved, images), labels
            )
        )
        return jax.value_and_grad(loss)(moved)

    found = minimize(
        lambda moved: tuple(map(np.asarray, loss_and_gradient(moved, *draw.train))),
        np.zeros(start.size),
        jac=True,
        method="L-BFGS-B",
        options={"gtol": TOLERANCE, "ftol": 0, "maxiter": MOST_STEPS, "maxfun": 10**6},
    )

    def accuracy(data):
        images, labels = data
        outputs = jax.jit(linearised)(jnp.asarray(found.x), images)
        return float(gnlin.accuracy(outputs, labels))

    residual = float(np.abs(found.jac).max())
    return {
        "inner_steps": float(found.nit),
        "train_loss": float(found.fun),
        "gradient": residual,
        "finished": float(residual <= TOLERANCE),
        "train_accuracy_linearised": accuracy(draw.train),
        "validation_accuracy_linearised": accuracy(draw.validation),
        "test_accuracy_linearised": accuracy(draw.test),
    }
