"""The loss and the score of a task, which follow from its targets.

Targets that are whole numbers are classes: the loss is the cross-entropy, and the score
is the accuracy. Other targets are values: the loss is the squared error, and the score is
the share of the variance that is explained, which is 1 for perfect outputs and 0 for
outputs no better than the mean of the training targets.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Scalar, ScalarLike
from scipy import optimize, special

import gnlin

from .thresholds import TRAINED_LOSS


def are_classes(targets: ArrayLike) -> bool:
    return jnp.issubdtype(jnp.asarray(targets).dtype, jnp.integer)


def as_values(targets: Array, num_classes: int) -> Array:
    """Return classes as one-hot vectors with zero mean, and values as they are."""
    if not are_classes(targets):
        return targets
    return jax.nn.one_hot(targets, num_classes, dtype=float) - 1 / num_classes


def loss_of(
    targets: ArrayLike, reduction: Literal["sum", "mean"] = "sum"
) -> gnlin.authoring.AbstractLoss:
    if are_classes(targets):
        return gnlin.SoftmaxCrossEntropy(reduction=reduction)
    return gnlin.SquaredError(reduction=reduction)


def mean_loss(outputs: Array, targets: Array) -> Scalar:
    """Return the mean loss over examples, and over the tokens of sequences."""
    if are_classes(targets):
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()
    return jnp.sum((outputs - targets) ** 2) / (2 * len(targets))


def number_of(targets: ArrayLike) -> int:
    """Return the number of losses over which the mean is taken."""
    return jnp.size(targets) if are_classes(targets) else len(jnp.asarray(targets))


def guessing_loss(loss: gnlin.authoring.AbstractLoss, targets: ArrayLike) -> float:
    """Return the least summed loss of outputs that are the same for all examples."""
    targets = np.asarray(targets)
    mean = targets.mean(axis=0)
    if loss.is_quadratic:
        return float(np.sum((targets - mean) ** 2) / 2)
    if targets.dtype.kind in "iu":
        shares = np.unique(targets, return_counts=True)[1] / targets.size
        return float(targets.size * special.entr(shares).sum())
    return float(len(targets) * np.sum(special.entr(mean) + special.entr(1 - mean)))


def least_loss(
    loss: gnlin.authoring.AbstractLoss, targets: ArrayLike, shape: tuple[int, ...]
) -> float:
    """Return the least summed loss of any outputs of this shape. If its first axis is 1,
    the outputs are the same for all examples."""
    targets = jnp.asarray(targets)

    @jax.jit
    def value(flat):
        outputs = jnp.broadcast_to(flat.reshape(shape), (len(targets), *shape[1:]))
        return jnp.sum(jax.vmap(loss.value)(outputs, targets))

    found = optimize.minimize(
        lambda flat: tuple(map(np.asarray, jax.value_and_grad(value)(flat))),
        np.zeros(np.prod(shape)),
        jac=True,
        method="L-BFGS-B",
        options={"gtol": 1e-10, "ftol": 1e-15, "maxiter": 2_000},
    )
    return float(found.fun)


def trained_loss(targets: Array) -> float | Scalar:
    """Return the mean loss at which runs that are compared at equal training loss end.
    For values, it is a share of the loss of outputs that equal the mean target."""
    if are_classes(targets):
        return TRAINED_LOSS
    return TRAINED_LOSS * spread(targets) / 2


def spread(targets: Array) -> float | Scalar:
    """Return the variance of values, summed over the outputs, or 1 for classes."""
    if are_classes(targets):
        return 1.0
    return jnp.sum((targets - targets.mean(axis=0, keepdims=True)) ** 2) / len(targets)


def score(
    outputs: Array, targets: Array, spread: ScalarLike, least: float = 0.0
) -> Scalar:
    """Return the score, for the spread of the training targets. Values that are worse
    than the mean have the score `least`; where the best of several outputs is chosen, it
    is minus infinity, so that these differ."""
    if are_classes(targets):
        return gnlin.losses.accuracy(outputs, targets)
    unexplained = jnp.sum((outputs - targets) ** 2) / len(targets) / spread
    return jnp.maximum(1 - unexplained, least)


@dataclasses.dataclass(frozen=True)
class Score:
    """The score as a metric of outputs and targets, for use in `gnlin.fit`."""

    spread: float

    def __call__(self, outputs: Array, targets: Array) -> Scalar:
        return score(outputs, targets, self.spread)
