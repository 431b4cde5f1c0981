"""Likelihoods that have no maximum, because they rise as parameters go to infinity."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from .._common import _tree
from ..losses import TobitNLL
from ._curve import Data
from ._problem import flat_box, Posed


if TYPE_CHECKING:
    from ._result import CurveFit

# Only parameters whose standard error exceeds this multiple of their value are tested.
_ASKED = 10
# At a maximum, a step by a standard error raises the loss by 1/2. If it changes the loss
# by less than this number, there is no maximum.
_FLAT = 1e-3


def escaping(fit: "CurveFit") -> np.ndarray:
    """Return 1 for each free parameter that may rise without end while the likelihood
    does not fall, -1 if it may fall without end, and else 0. The other parameters are
    held, or follow it according to the covariance.

    At the end of such a run the curvature is nearly zero, so that the standard error is
    huge, and a step of that size does not change the loss."""
    setting, end, data = fit._setting, fit._end, fit._data
    found = np.zeros(end.covariance.determined.shape, int)
    if setting.likelihood is None or data is None:
        return found
    each = jax.vmap if setting.many else lambda f, in_axes: f
    best = each(lambda p: _tree.ravel_pytree(p)[0], in_axes=0)(end.parameters)
    known = each(lambda f: _tree.matmul(f, f.T), in_axes=0)(end.covariance.factor)
    errors = np.sqrt(np.asarray(jnp.diagonal(known, axis1=-2, axis2=-1)))
    asked = np.isfinite(errors) & (errors > _ASKED * np.abs(best))
    if not asked.any():
        return found
    one = jax.tree.map(lambda p: p[0], end.parameters) if setting.many else end.parameters
    unravel = _tree.Structure.of(one).unravel

    def tells_nothing(data: Data, start: Array, step: Array) -> Bool[Array, ""]:
        posed = Posed.of(setting, data)
        outputs = lambda flat: posed.outputs(posed.variables(unravel(flat)))
        here, there = outputs(start), outputs(start + step)
        fall = posed.loss.decrease(here, there, posed.target)
        # A rate that moves by less than 1 is only close to 0, where its range ends.
        is_far = jnp.max(jnp.abs(there - here)) > 1
        box = flat_box(setting.solver.bounds, unravel(start))
        return (jnp.abs(fall) <= _FLAT) & is_far & ~box.is_left(start, step)

    are_own = data.sigma.ndim == 2 or not isinstance(setting.likelihood, TobitNLL)
    of_data = Data(x=None, y=0, sigma=0 if are_own else None, counted=0)  # type: ignore
    tested = each(tells_nothing, in_axes=(of_data, 0, 0))
    units = jnp.asarray(np.where(asked, errors, 1))
    for k in np.flatnonzero(asked.reshape(-1, asked.shape[-1]).any(axis=0)):
        alone = jnp.zeros_like(best).at[..., k].set(units[..., k])
        for step in (alone, known[..., k] / units[..., k, None]):
            for sign in (-1, 1):
                flat = np.asarray(tested(data, best, sign * step)) & asked[..., k]
                found[..., k] = np.where(flat, sign, found[..., k])
    return found
