"""A normal prior of the parameters: a group of residuals beside those of the data."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import check_finite_positive, check_scalar, nan_unless, positive
from .._jacobian import WithPrior
from .._linearisation._objective import (
    AbstractObjective,
    BatchLoss,
    counted,
    GroupLoss,
    GroupLosses,
    objective_of,
)
from ..losses import AbstractLoss, SquaredError


class Prior(eqx.Module):
    r"""A normal prior of the parameters about zero.

    - `deviation`: its standard deviation $s$.
    - `weight`: the factor of $\frac12\lVert\theta\rVert^2$ beside the loss of a batch.
    """

    deviation: Scalar
    weight: Scalar

    @staticmethod
    def of(
        deviation: ScalarLike, loss: AbstractLoss, data: tuple, share: float = 1.0
    ) -> "Prior":
        """Return the prior beside a reduced loss of all data.

        - `share`: the fraction of all examples that a batch has.
        """
        check_scalar("prior", deviation)
        check_finite_positive("prior", deviation)
        _, targets, weights = data
        part: ScalarLike = share
        targets = jax.tree.map(jnp.asarray, targets)
        deviation = nan_unless(positive(deviation), deviation)
        if loss.reduction == "mean":
            counts = counted(loss, targets).astype(deviation.dtype)
            total = jnp.sum(counts) if weights is None else _tree.matmul(weights, counts)
            part = 1 / total
        return Prior(deviation, part / deviation**2)

    def beside(
        self, objective: BatchLoss, parameters: PyTree[jax.ShapeDtypeStruct]
    ) -> GroupLoss:
        """Return the objective of the data with that of the prior."""
        targets = _tree.zeros_like(parameters)
        own = BatchLoss(SquaredError(), parameters, targets, factor=self.weight)
        parts = {"data": objective, "prior": own}
        return GroupLoss(parts=parts, is_sample=objective.is_sample)


def function_beside(
    prior: Prior | None, fn: Callable[[Any, Any], Any], has_state: bool = False
) -> Callable[[Any, Any], Any]:
    """Return a function that computes the data's outputs, and the prior's if there is
    one."""
    return fn if prior is None else WithPrior(fn, has_state)


def outputs_of_data(prior: Prior | None, outputs: PyTree) -> PyTree:
    """Return the data's part of the outputs of `function_beside`."""
    return outputs if prior is None else outputs["data"]


def objective_beside(
    prior: Prior | None,
    loss: AbstractLoss | GroupLosses,
    outputs: PyTree[jax.ShapeDtypeStruct],
    data: tuple,
    **options: Any,
) -> AbstractObjective:
    """Return the objective of the outputs of `function_beside`; `options` are those of
    `objective_of`."""
    of_data = objective_of(loss, outputs_of_data(prior, outputs), data, **options)
    if prior is None:
        return of_data
    assert isinstance(of_data, BatchLoss)  # groups have no prior
    return prior.beside(of_data, outputs["prior"])
