"""A line search over a grid of step lengths."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree, Scalar

from .._common import _tree
from .._common._checks import check_count
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from ._state import Evaluate


class Found(NamedTuple):
    """The result of a line search.

    - `length`: the fraction of the step to take.
    - `outputs`: the outputs at the new point.
    - `any`: whether an acceptable fraction was found.
    """

    length: Scalar
    outputs: PyTree[Array]
    any: Bool[Array, ""]


class GridSearch(eqx.Module):
    """A line search that tries the whole step, a half of it, a quarter and so on, and
    takes the fraction with the lowest loss. If none lowers the loss, it takes no step.

    **Arguments:**

    - `num_halvings`: $k$, where the shortest fraction tried is $2^{-k}$.

    !!! example

        ```python
        solver = gnlin.DampedGaussNewton(1e-8, search=gnlin.methods.GridSearch())
        ```

    ??? cite "Reference"

        J. Müller and M. Zeinhofer, *Achieving high accuracy with PINNs via energy natural
        gradient descent*, ICML (2023), section 4.
    """

    num_halvings: int = eqx.field(static=True, default=30)

    def __check_init__(self):
        check_count("num_halvings", self.num_halvings)

    def along(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        direction: PyTree[Array],
    ) -> Found:
        """Return the fraction of `direction` with the lowest loss."""

        def attempt(best: tuple, length: Scalar) -> tuple:
            outputs = evaluate(lin.moved(direction, length))
            outputs = _tree.cast_like(outputs, lin.outputs)
            gain = objective.decrease(lin.outputs, outputs).astype(dtype)
            found = length, outputs, gain
            return _tree.where(gain > best[2], found, best), None

        dtype = _tree.dtype(direction)
        lengths = 0.5 ** jnp.arange(self.num_halvings + 1, dtype=dtype)
        zero = jnp.zeros((), dtype)
        start = zero, lin.outputs, zero
        (length, outputs, gain), _ = jax.lax.scan(attempt, start, lengths)
        return Found(length, outputs, gain > 0)
