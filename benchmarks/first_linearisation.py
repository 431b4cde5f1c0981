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
from jaxtyping import Array, Float, PyTree
from numpy import ndarray
from scipy.optimize import minimize

import gnlin

from .experiment import Place, Runs
from .training import Columns, Draw, Images, Labelled, load, model_of


TOLERANCE = 1e-4
MOST_STEPS = 5_000


def train_endlessly(settings: Images, place: Place) -> Columns:
    """Of all seeds, at one look. `finished` says whether the tolerance was reached."""
    make_model = model_of(settings)
    runs = [
        _minimise(make_model(jax.random.key(seed)), load(settings, place, seed))
        for seed in range(settings.seeds)
    ]
    return {name: np.array([[run[name]] for run in runs]) for name in runs[0]}


def solved_accuracy(runs: Runs) -> Float[ndarray, " seeds"]:
    """The linearised network's test accuracies; NaN where the problem is not solved."""
    finished = runs.final("finished") > 0
    return np.where(finished, runs.final("test_accuracy_linearised"), np.nan)


def _minimise(model: PyTree, draw: Draw) -> dict[str, float]:
    size = ravel_pytree(eqx.filter(model, eqx.is_inexact_array))[0].size
    found = minimize(
        lambda moved: tuple(
            map(np.asarray, _loss_and_gradient(moved, model, draw.train))
        ),
        np.zeros(size),
        jac=True,
        method="L-BFGS-B",
        options={"gtol": TOLERANCE, "ftol": 0, "maxiter": MOST_STEPS, "maxfun": 10**6},
    )
    accuracy = lambda data: float(_accuracy(found.x, model, data))
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


def _linearised(moved, model: PyTree, inputs: Array) -> Array:
    parameters, frozen = eqx.partition(model, eqx.is_inexact_array)
    start, unravel = ravel_pytree(parameters)
    fn = lambda y: jax.vmap(eqx.combine(unravel(y), frozen))(inputs)
    outputs, change = jax.jvp(fn, (start,), (moved,))
    return outputs + change


@eqx.filter_jit
def _loss_and_gradient(moved, model: PyTree, data: Labelled) -> tuple[Array, Array]:
    images, labels = data

    def loss(moved):
        outputs = _linearised(moved, model, images)
        return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()

    return jax.value_and_grad(loss)(jnp.asarray(moved))


@eqx.filter_jit
def _accuracy(moved, model: PyTree, data: Labelled) -> Array:
    images, labels = data
    return gnlin.accuracy(_linearised(jnp.asarray(moved), model, images), labels)
