"""A fit as a least-squares problem for a solver, and its bounds."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .._common._tree import ravel_pytree
from .._linear_algebra._covariance import rounded
from .._linearisation._bounds import Box
from .._linearisation._retraction import Retraction
from .._solver import AbstractGaussNewton
from ..losses import AbstractElementwiseLoss
from ..losses._robust import AbstractRobust
from ._curve import Curve, Data, whitened
from ._likelihood import is_likelihood, Likelihood


class FitSettings(NamedTuple):
    """The settings of a fit: everything but its data and its start.

    - `max_steps`: an array, so that another number does not compile the fit again.
    - `axes`: the axes of the fields of the data over data sets, if there are several.
    - `is_flat`: whether the loss has no curvature, so that the parameters have no errors.
    """

    curve: Curve
    solver: AbstractGaussNewton
    loss: AbstractElementwiseLoss
    max_steps: Int[Array | np.ndarray, ""]
    absolute_sigma: bool
    axes: Data | None = None
    is_flat: bool = False

    @property
    def many(self) -> bool:
        """Whether there are several data sets."""
        return self.axes is not None

    @property
    def likelihood(self) -> AbstractElementwiseLoss | None:
        """The loss if it is a negative log-likelihood, else `None`."""
        return self.loss if is_likelihood(self.loss) else None

    @property
    def is_robust(self) -> bool:
        return isinstance(self.loss, AbstractRobust)

    def moved(self, parameters: PyTree[Array], step: Float[Array, " k"]) -> PyTree[Array]:
        """Return the free parameters, moved by a step."""
        flat, unravel = ravel_pytree(parameters)
        if self.solver.retraction is None:
            return unravel((flat + step).astype(flat.dtype))
        retraction = Retraction.of(self.solver.retraction, parameters)
        return retraction.moved(parameters, unravel(step))

    def nearby(self, parameters: PyTree[Array], start: PyTree[Array]) -> PyTree[Array]:
        """Return the free parameters, moved by a few roundings within the bounds."""
        y, first = (ravel_pytree(x)[0] for x in (parameters, start))
        box, step = flat_box(self.solver.bounds, parameters), rounded(y, first)
        step = jnp.where((step < box.lower - y) | (step > box.upper - y), -step, step)
        return self.moved(parameters, jnp.clip(step, box.lower - y, box.upper - y))

    def tangents(self, parameters: PyTree[Array]) -> Float[Array, "k k"] | None:
        """Return the derivative of `moved` by the step, or `None` if steps are added."""
        if self.solver.retraction is None:
            return None
        flat = lambda step: ravel_pytree(self.moved(parameters, step))[0]
        return jax.jacfwd(flat)(jnp.zeros_like(ravel_pytree(parameters)[0]))

    @property
    def is_estimated(self) -> bool:
        """Whether the factor of the covariance is estimated from the residuals. For a
        robust loss it depends on their distribution, even if sigma is absolute."""
        return not self.absolute_sigma or self.is_robust

    @property
    def knows_noise(self) -> bool:
        """Whether the squared residuals are in units of a known noise."""
        return self.likelihood is None and not self.is_estimated


def flat_box(bounds: Any, y: PyTree[Array]) -> Box:
    """Return the bounds of the flattened parameters, which are infinite where there are
    none."""
    box = Box.of((None, None) if bounds is None else bounds, y)
    return Box(ravel_pytree(box.lower)[0], ravel_pytree(box.upper)[0])


class Posed(NamedTuple):
    """A fit as a least-squares problem with the residuals `outputs - target`.

    - `loss`: the loss of outputs and target; a likelihood ignores missing points.
    - `counted`: 1, or 0 for missing points.
    """

    curve: Curve
    data: Data
    loss: AbstractElementwiseLoss
    target: Array
    counted: Array

    @staticmethod
    def of(setting: FitSettings, data: Data) -> "Posed":
        # Each x with an error is a variable too. Its shift, in units of sigma_x, is one
        # more residual.
        shift = _no_shift(data)
        target = _joined(whitened(data.y, data), shift)
        counted = _joined(data.counted, jax.tree.map(jnp.ones_like, shift))
        loss = setting.loss
        if setting.likelihood is not None:
            loss = Likelihood(loss=loss, counted=counted)
        return Posed(setting.curve, data, loss, target, counted)

    def variables(self, parameters: PyTree) -> PyTree:
        """Return the variables of the problem, with x as it was given."""
        return {"curve": parameters, "x": _no_shift(self.data)}

    def at(self, parameters: PyTree, _: Any = None) -> Array:
        """Return the outputs at these parameters, with x as it was given."""
        return self.outputs(self.variables(parameters))

    def outputs(self, variables: PyTree, _: Any = None) -> Array:
        """Return the outputs. Here and above, the second argument is for the inputs that
        solvers pass, and is not used."""
        x = self.data.moved(variables["x"])
        free = self.data.with_held(variables["curve"])
        values = whitened(self.curve(free, x), self.data)
        return _joined(values, variables["x"])


def _no_shift(data: Data) -> PyTree[Array]:
    return jax.tree.map(jnp.zeros_like, data.sigma_x)


def _joined(values: Float[Array, " m"], shift: PyTree[Array] | None) -> Array:
    """Append the residuals of x, if x has errors, to the values of y."""
    others = [s.ravel().astype(values.dtype) for s in jax.tree.leaves(shift)]
    return jnp.concatenate([values, *others])
