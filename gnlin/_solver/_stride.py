"""How much of a batch's step to take, by what the last steps did to the batches after
theirs."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree, Scalar

from .._common import _tree
from .._linearisation._objective import AbstractObjective


# Of what the last steps won and lost, so much counts again one batch later.
_MEMORY = 0.9
# Where they have lost, in sum, the next step is shorter, and else longer.
_SHORTER, _LONGER = 0.8, 1.04
# After a step that is taken back.
_MUCH_SHORTER = 0.25
# One batch ahead a short step always looks best: of noise a long run averages over.
_SHORTEST = 0.1
# Nothing is known of the first, and a saturated network may not come back.
_FIRST = 0.25


class Stride(eqx.Module):
    """The last step, and how much of the next one to take.

    A step that makes the most of its own batch may be a bad one for all the others: the
    next batch, which it has not seen, judges it. One that loses more there than it had
    won on its own is taken back.
    """

    point: PyTree[Array]  # where it started
    won: Float[Array, ""]  # by it, on its own batch; 0 where none was taken
    balance: Float[Array, ""]  # of the last steps, on the batches after theirs
    length: Float[Array, ""]  # the part of a step that is taken

    @staticmethod
    def start(y: PyTree[Array], dtype: jnp.dtype) -> "Stride":
        zero = jnp.zeros((), dtype)
        return Stride(y, zero, zero, jnp.full((), _FIRST, dtype))

    def judged(
        self, objective: AbstractObjective, before: PyTree[Array], now: PyTree[Array]
    ) -> tuple["Stride", Bool[Array, ""]]:
        """By the next batch, whose outputs were `before` that step and are `now`: and
        whether it is to be taken back."""
        # A batch whose data are no numbers is no judge.
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
        """As far from `y` to `new_y` as a step is taken."""
        return _tree.axpy(self.length, jax.tree.map(jnp.subtract, new_y, y), y)

    def after(self, point: PyTree[Array], won: Scalar) -> "Stride":
        """A step from there."""
        won = won.astype(self.won.dtype)
        return Stride(point, jnp.where(won > 0, won, 0), self.balance, self.length)
