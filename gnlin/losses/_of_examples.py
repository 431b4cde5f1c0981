"""Losses with a number of their own for each target, such as the number of its trials:
these numbers become part of the targets, with which examples are drawn and split."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ._base import (
    AbstractLoss,
    check_shapes,
    in_targets,
    numbers_of,
    Reduction,
    with_numbers,
)


class Numbered(NamedTuple):
    """Targets, and the loss's number for each of them."""

    targets: PyTree[Array]
    numbers: Array


def _of_each_example(name: str) -> Callable:
    """Return a method of `OfExamples`, whose last argument is the target of one example:
    it calls the loss's method of this name with the example's number in the loss."""

    def method(self: "OfExamples", *args):
        *outputs, target = args
        loss = with_numbers(self.loss, target.numbers)
        return getattr(loss, name)(*outputs, target.targets)

    return method


class OfExamples(AbstractLoss):
    """A loss whose numbers differ between examples. They are part of the targets, which
    must be `Numbered`.

    - `loss`: the loss, without its numbers.
    """

    loss: AbstractLoss
    reduction: Reduction | None = None

    value = _of_each_example("value")
    gradient = _of_each_example("gradient")
    factor = _of_each_example("factor")
    decrease = _of_each_example("decrease")
    plain = _of_each_example("plain")
    target_weights = _of_each_example("target_weights")
    left_out = _of_each_example("left_out")

    @property
    def has_observed_factor(self) -> bool:
        return self.loss.has_observed_factor

    def check(self, outputs, targets) -> None:
        if not isinstance(targets, Numbered):
            raise ValueError(
                f"The `{self.loss._of_each}` of the loss has the shape of the training "
                f"targets, and says nothing about other data: {in_targets(self.loss)}."
            )
        check_shapes(outputs, targets.targets)
        loss, targets = with_numbers(self.loss, targets.numbers), targets.targets
        # All values as one example, whose numbers these are
        of_one = lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
        loss.check(
            jax.tree.map(of_one, outputs), jax.tree.map(lambda t: t[None], targets)
        )


def loss_beside(loss: AbstractLoss, data: tuple) -> tuple[AbstractLoss, tuple]:
    """Return a loss and data, `(inputs, targets, weights)`, such that the loss's numbers,
    if they have the shape of all targets, are part of these."""
    inputs, targets, weights = data
    loss, targets = beside_targets(loss, targets)
    return loss, (inputs, targets, weights)


def beside_targets(
    loss: AbstractLoss,
    targets: PyTree[Array],
    outputs: Callable[[], PyTree[jax.ShapeDtypeStruct]] | None = None,
) -> tuple[AbstractLoss, PyTree]:
    """Return a loss and targets, as above.

    - `outputs`: a function that returns the shapes of all outputs, if `targets` are
        `None` for zeros.
    """
    numbers = numbers_of(loss)
    if numbers is None or jnp.ndim(numbers) == 0:
        return loss, targets
    like: Any = targets if targets is not None or outputs is None else outputs()
    leaves = jax.tree.leaves(like)
    if len(leaves) != 1 or leaves[0].shape != jnp.shape(numbers):
        return loss, targets
    if targets is None:
        targets = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    stripped = with_numbers(loss, jnp.zeros((), jnp.asarray(numbers).dtype))
    reduction: Any = loss.reduction
    return OfExamples(loss=stripped, reduction=reduction), Numbered(targets, numbers)
