"""A normal prior of the parameters: a group of residuals beside those of the data."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import check_finite_positive, check_scalar, nan_unless, positive
from .._linearisation._group_loss import GroupLoss
from .._linearisation._objective import BatchLoss, counted
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
