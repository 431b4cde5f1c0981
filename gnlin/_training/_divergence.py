"""Decide whether a run diverges."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar

from .._common import _tree
from .._common._checks import check_finite_positive
from .._linearisation._objective import AbstractObjective


# A run diverges when its loss is far above its start for this many steps in a row.
_MOST_FAR = 5


class Watch(eqx.Module):
    """A guard against divergence: the best point so far, and the number of steps in a row
    whose loss was far above the first loss."""

    first: Float[Array, ""]  # loss
    size: Float[Array, ""]  # of the first loss, which may be negative
    best: Float[Array, ""]  # loss
    y: PyTree[Array]  # the point with the best loss
    num_far: Int[Array, ""]

    @staticmethod
    def start(
        objective: AbstractObjective, y: PyTree[Array], outputs: PyTree, loss: Scalar
    ) -> "Watch":
        """Start at the first point. The size of a tiny first loss is raised to a part of
        the loss of zero outputs, if that is finite; `outputs` holds arrays, or only their
        shapes."""
        unit = jnp.abs(objective.value(_tree.zeros_like(outputs))).astype(loss.dtype)
        # Poisson's loss of a rate has the logarithm of 0 there, for example.
        unit = jnp.where(jnp.isfinite(unit), unit, 0)
        floor = jnp.finfo(loss.dtype).eps ** 0.5 * unit
        return Watch(loss, jnp.maximum(jnp.abs(loss), floor), loss, y, jnp.array(0))

    def look(self, y: PyTree[Array], loss: Scalar, factor: float) -> "Watch":
        """Return the watch after a further point, whose loss may be NaN."""
        better = loss < self.best
        # A loss of zero, such as that of a batch whose targets are met, cannot be the
        # unit.
        unset = (self.size == 0) & jnp.isfinite(loss)
        first = jnp.where(unset, loss, self.first)
        size = jnp.where(unset, jnp.abs(loss), self.size)
        best = jnp.where(better, loss, self.best), _tree.where(better, y, self.y)
        new = Watch(first, size, *best, self.num_far)
        far = new.is_far(loss, factor)
        return new._replaced(jnp.where(far, self.num_far + 1, 0))

    def is_far(self, loss: Scalar, factor: float) -> Bool[Array, ""]:
        """Whether a loss is more than `factor` times the first loss, or NaN."""
        return ~(loss - self.first <= (factor - 1) * self.size)

    def ended_if(self, diverged: Bool[Array, ""]) -> "Watch":
        """Return the watch of a run that has also diverged in another way."""
        return self._replaced(jnp.where(diverged, _MOST_FAR, self.num_far))

    def _replaced(self, num_far: Int[Array, ""]) -> "Watch":
        return eqx.tree_at(lambda w: w.num_far, self, num_far)

    @property
    def diverges(self) -> Bool[Array, ""]:
        return self.num_far >= _MOST_FAR


def check_divergence(divergence: object) -> None:
    if divergence is None:
        return
    check_finite_positive("divergence", divergence)
    if divergence <= 1:  # type: ignore[operator]
        raise ValueError(
            "`divergence`, the largest allowed multiple of the first loss, must be more "
            f"than 1 or `None`, but {divergence} was given."
        )
