"""The length of steps across batches, adapted to their effect on the next batch."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree, Scalar

from .._common import _tree
from .._linearisation._objective import AbstractObjective


# Factor by which the weight of earlier steps in the balance decays per batch.
_MEMORY = 0.9
# Factors of the length if the balance is negative, and otherwise.
_SHORTER, _LONGER = 0.8, 1.04
# Factor of the length after a step that is undone.
_MUCH_SHORTER = 0.25
# Shortest length: judged on one batch, noise favours short steps, although it averages
# out over a long run.
_SHORTEST = 0.1
# First length: it is short, because a network that a long step saturates may not recover.
_FIRST = 0.25


class Stride(eqx.Module):
    """The last step, and how much of the next one to take.

    The best step for its own batch may be bad for all others, so the next batch, which it
    has not seen, judges it. A step that increases the loss there by more than it reduced
    the loss of its own batch is undone.
    """

    point: PyTree[Array]  # where the last step started
    won: Float[Array, ""]  # how much it lowered its own batch's loss; 0 without a step
    balance: Float[Array, ""]  # decaying sum of the steps' decreases on the next batch
    length: Float[Array, ""]  # the fraction of a step that is taken

    @staticmethod
    def start(y: PyTree[Array], dtype: jnp.dtype) -> "Stride":
        zero = jnp.zeros((), dtype)
        return Stride(y, zero, zero, jnp.full((), _FIRST, dtype))

    def judged(
        self, objective: AbstractObjective, before: PyTree[Array], now: PyTree[Array]
    ) -> tuple["Stride", Bool[Array, ""]]:
        """Judge the last step by the next batch, with its outputs before and after the
        step. Return the new stride, and whether to undo the step."""
        # A batch that is not finite cannot judge.
        has_moved = (self.won > 0) & jnp.isfinite(objective.value(before))
        gain = objective.decrease(before, now).astype(self.won.dtype)
        gain = jnp.where(jnp.isnan(gain), -jnp.inf, gain)
        back = has_moved & (gain < -self.won)
        balance = _MEMORY * self.balance + jnp.maximum(gain, -self.won)
        factor = jnp.where(balance < 0, _SHORTER, _LONGER)
        factor = jnp.where(back, _MUCH_SHORTER, factor)
        length = jnp.clip(factor * self.length, _SHORTEST, 1)
        return Stride(
            self.point,
            self.won,
            jnp.where(has_moved, balance, self.balance),
            jnp.where(has_moved, length, self.length),
        ), back

    def along(self, y: PyTree[Array], new_y: PyTree[Array]) -> PyTree[Array]:
        """Return the point that is `length` of the way from `y` to `new_y`."""
        return _tree.axpy(self.length, jax.tree.map(jnp.subtract, new_y, y), y)

    def after(self, point: PyTree[Array], won: Scalar) -> "Stride":
        """Return the stride after a step from `point` that lowered the loss by `won`."""
        won = won.astype(self.won.dtype)
        return Stride(point, jnp.where(won > 0, won, 0), self.balance, self.length)
