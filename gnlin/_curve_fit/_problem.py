"""A fit as a least-squares problem for a solver, and its bounds."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._common import _tree
from .._common._tree import ravel_pytree
from .._linearisation._bounds import Box
from .._solver import AbstractGaussNewton
from ..losses import AbstractElementwiseLoss
from ..losses._robust import AbstractRobust
from ._curve import Curve, Data, whitened
from ._likelihood import Likelihood


class FitSettings(NamedTuple):
    """The settings of a fit: everything but its data and its start."""

    curve: Curve
    solver: AbstractGaussNewton
    loss: AbstractElementwiseLoss
    max_steps: int
    fixed: PyTree[Array]
    absolute_sigma: bool
    many: bool  # whether there are several data sets

    @property
    def is_estimated(self) -> bool:
        """Whether the factor of the covariance is estimated from the residuals. For a
        robust loss it depends on their distribution, even if sigma is absolute."""
        return not self.absolute_sigma or isinstance(self.loss, AbstractRobust)


def with_bounds(solver: AbstractGaussNewton, bounds: Any) -> AbstractGaussNewton:
    return eqx.tree_at(lambda s: s.bounds, solver, bounds, is_leaf=lambda x: x is None)


class Posed(NamedTuple):
    """A fit as a least-squares problem with the residuals `outputs - target`.

    - `given`: the data and the fixed parameters, on which the outputs depend too.
    - `loss`: the loss of outputs and target; a likelihood ignores missing points.
    - `counted`: 1, or 0 for missing points.
    """

    curve: Curve
    given: tuple[Data, PyTree[Array]]
    loss: AbstractElementwiseLoss
    target: Array
    counted: Array

    @staticmethod
    def of(setting: "FitSettings", data: Data) -> "Posed":
        # Each x with an error is a variable too. Its shift, in units of sigma_x, is one
        # more residual.
        shift = no_shift(data)
        target = _joined(whitened(data.y, data), shift)
        counted = _joined(data.counted, jax.tree.map(jnp.ones_like, shift))
        loss = setting.loss
        if isinstance(loss, Likelihood):
            loss = Likelihood(loss=loss.loss, counted=counted)
        return Posed(setting.curve, (data, setting.fixed), loss, target, counted)

    def variables(self, parameters: PyTree) -> PyTree:
        """Return the variables of the problem, with x as it was given."""
        data, _ = self.given
        return {"curve": parameters, "x": no_shift(data)}

    def outputs(self, variables: PyTree, given: tuple[Data, PyTree]) -> Array:
        data, fixed = given
        x = data.moved(variables["x"])
        free = data.with_held(variables["curve"])
        values = whitened(self.curve(free, fixed, x), data)
        return _joined(values, variables["x"])


def no_shift(data: Data) -> PyTree[Array]:
    return jax.tree.map(jnp.zeros_like, data.sigma_x)


def _joined(values: Float[Array, " m"], shift: PyTree[Array] | None) -> Array:
    """Append the residuals of x, if x has errors, to the values of y."""
    others = [s.ravel().astype(values.dtype) for s in jax.tree.leaves(shift)]
    return jnp.concatenate([values, *others])


def at_bounds(
    bounds: Any, y: PyTree[Array], slope: PyTree[Array]
) -> tuple[Int[Array, " k"], Bool[Array, " k"]]:
    """Return for each parameter -1 if it is held at its lower bound, 1 at its upper, and
    0 elsewhere; and whether it is held."""
    if bounds is None:
        none = jnp.zeros(_tree.size(y), int)
        return none, none != 0
    box = Box.of(bounds, y)
    blocked, _ = ravel_pytree(box.blocked(y, slope))
    upper, _ = ravel_pytree(jax.tree.map(lambda x, high: x >= high, y, box.upper))
    side = jnp.where(upper, 1, -1)
    return jnp.where(blocked, side, 0), blocked.astype(bool)
