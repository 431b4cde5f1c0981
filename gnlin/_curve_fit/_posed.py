"""A fit as a problem for a solver, and its bounds."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from .. import _tree
from .._bounds import Box
from .._losses import AbstractElementwiseLoss
from .._solver import AbstractGaussNewton
from .._tree import ravel_pytree
from ._curve import Curve, Data, whitened
from ._likelihood import Counted, Likelihood


class Setting(NamedTuple):
    """What a fit was asked for, but its data and its start."""

    curve: Curve
    solver: AbstractGaussNewton
    loss: AbstractElementwiseLoss
    max_steps: int
    fixed: dict
    absolute_sigma: bool
    many: bool  # data sets


def with_bounds(solver: AbstractGaussNewton, bounds: Any) -> AbstractGaussNewton:
    return eqx.tree_at(lambda s: s.bounds, solver, bounds, is_leaf=lambda x: x is None)


class Posed(NamedTuple):
    """A fit as least squares: residuals are `outputs` less `target`.

    - `given`: what the outputs depend on, besides the variables.
    - `loss`: of the outputs on the target; without missing points if it is a likelihood.
    - `counted`: 1, and 0 for missing points.
    """

    curve: Curve
    given: tuple[Data, dict]
    loss: AbstractElementwiseLoss
    target: Array
    counted: Array

    @staticmethod
    def of(setting: "Setting", data: Data) -> "Posed":
        # The x's that have errors are variables, too, in units of these, and residuals.
        shift = no_shift(data)
        target = _joined(whitened(data.y, data), shift)
        counted = _joined(data.counted, jax.tree.map(jnp.ones_like, shift))
        loss = setting.loss
        if isinstance(loss, Likelihood):
            loss = Counted(loss=loss, counted=counted)
        return Posed(setting.curve, (data, setting.fixed), loss, target, counted)

    def outputs(self, variables: PyTree, given: tuple[Data, dict]) -> Array:
        data, fixed = given
        x = data.moved(variables["x"])
        free = data.with_held(variables["curve"])
        values = whitened(self.curve(free, fixed, x), data)
        return _joined(values, variables["x"])


def no_shift(data: Data) -> PyTree[Array]:
    return jax.tree.map(jnp.zeros_like, data.sigma_x)


def _joined(values: Float[Array, " m"], shift: PyTree[Array] | None) -> Array:
    """Of y, and then of the x's, if they have errors."""
    others = [s.ravel().astype(values.dtype) for s in jax.tree.leaves(shift)]
    return jnp.concatenate([values, *others])


def at_bounds(
    bounds: Any, y: PyTree[Array], slope: PyTree[Array]
) -> tuple[Int[Array, " k"], Bool[Array, " k"]]:
    if bounds is None:
        none = jnp.zeros(_tree.size(y), int)
        return none, none != 0
    box = Box.of(bounds, y)
    blocked, _ = ravel_pytree(box.blocked(y, slope))
    upper, _ = ravel_pytree(jax.tree.map(lambda x, high: x >= high, y, box.upper))
    side = jnp.where(upper, 1, -1)
    return jnp.where(blocked, side, 0), blocked.astype(bool)
