"""A search along a step by a grid of its parts."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree, Scalar

from .._common import _tree
from .._common._checks import check_count
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from ._base import Evaluate


class Found(NamedTuple):
    """What a search along a step has found.

    - `length`: the part of the step to take.
    - `outputs`: where that leads to.
    - `any`: whether there is a part to take.
    """

    length: Scalar
    outputs: PyTree[Array]
    any: Bool[Array, ""]


class GridSearch(eqx.Module):
    """A search that tries a step and its halves, quarters and so on, and takes the one
    whose loss is the least; none, if that of no part is less than where it started.

    **Arguments:**

    - `num_halvings`: the shortest part is $2^{-k}$ of the step.

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
        """The best part of a direction."""

        def longest(best: tuple, length: Scalar) -> tuple:
            outputs = evaluate(lin.moved(direction, length))
            outputs = _tree.cast_like(outputs, lin.outputs)
            gain = objective.decrease(lin.outputs, outputs).astype(dtype)
            found = length, outputs, gain
            return _tree.where(gain > best[2], found, best), None

        dtype = _tree.dtype(direction)
        lengths = 0.5 ** jnp.arange(self.num_halvings + 1, dtype=dtype)
        none = jnp.zeros((), dtype)
        (length, outputs, gain), _ = jax.lax.scan(
            longest, (none, lin.outputs, none), lengths
        )
        return Found(length, outputs, gain > 0)
