"""Parameters whose derivative is zero although the curve depends on them."""

from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from .._common._tree import ravel_pytree, Structure
from .._common._words import how_many
from .._linearisation._linearisation import linearise
from ._curve import Data
from ._problem import FitSettings, flat_box, Posed
from ._statistics import Fitted


if TYPE_CHECKING:
    from ._result import CurveFit

# Parts of a parameter's size by which it is moved. They are small, because on a plateau,
# as of `jnp.clip`, a derivative of zero is right, and only a large move leaves it.
_MOVES = np.array([1e-4, -1e-4, 1e-2, -1e-2])

# A change of the curve by less than this multiple of its rounding is none.
_ROUNDINGS = 100

# The most parameters that a message names.
_MOST_NAMES = 5


def hidden(
    setting: FitSettings, data: Data | None, start: PyTree[Array], end: Fitted
) -> Bool[np.ndarray, " k"]:
    """Return which free parameters of one data set have a derivative of exactly zero, but
    change the curve if they move a little.

    The curve is evaluated only if a column of the Jacobian seems to be zero, and after
    the compiled fit, whose program does not grow."""
    found = ~np.asarray(end.covariance.determined)
    # Steps of a retraction are not differences of parameters.
    is_refused = setting.many or setting.solver.retraction is not None
    if data is None or is_refused or not found.any():
        return found & False
    # A parameter that is a part of an undetermined direction has entries here.
    found &= ~np.any(np.asarray(end.covariance.factor), axis=-1)
    asked = np.flatnonzero(found)
    if not asked.size:
        return found
    best, first = (np.asarray(ravel_pytree(tree)[0]) for tree in (end.parameters, start))
    sizes = np.maximum(np.abs(best), np.abs(first))
    sizes = np.where(sizes > 0, sizes, 1)
    steps = _MOVES[:, None, None] * np.diag(sizes)[asked]
    box = flat_box(setting.solver.bounds, end.parameters)
    moved = np.clip(best + steps.astype(best.dtype), box.lower, box.upper)
    try:
        are_flat, change = _seen_from(setting, data, end.parameters, jnp.asarray(moved))
    except eqx.EquinoxRuntimeError:  # `f` may raise errors at other parameters.
        return found & False
    found[asked] = np.asarray(are_flat)[asked] & np.asarray(change)
    return found


@eqx.filter_jit
def _seen_from(
    setting: FitSettings,
    data: Data,
    parameters: PyTree[Array],
    moved: Float[Array, "n c k"],
) -> tuple[Bool[Array, " k"], Bool[Array, " c"]]:
    """Whether the curve has no derivative by each parameter, and whether it differs at
    any of n moved parameters, of c each."""
    posed, unravel = Posed.of(setting, data), Structure.of(parameters).unravel
    lin = linearise(posed.outputs, posed.variables(parameters))
    columns = lin.matrix()[:, : moved.shape[-1]]
    least = _ROUNDINGS * jnp.finfo(columns.dtype).eps * jnp.max(jnp.abs(lin.outputs))

    def differs(flat: Float[Array, " k"]) -> Bool[Array, ""]:
        change = jnp.abs(posed.outputs(posed.variables(unravel(flat))) - lin.outputs)
        return jnp.any(jnp.isfinite(change) & (change > least))

    each = jax.lax.map(differs, moved.reshape(-1, moved.shape[-1]))
    return jnp.all(columns == 0, axis=0), jnp.any(each.reshape(moved.shape[:2]), axis=0)


def of_zero_derivative(fit: "CurveFit") -> str:
    """Return a sentence if there are such parameters, or ""."""
    if fit._hidden is None or not fit._hidden.any():
        return ""
    names = [f"`{fit.names[k]}`" for k in np.flatnonzero(fit._hidden)]
    it = "it" if len(names) == 1 else "them"
    if len(names) > _MOST_NAMES:
        names[_MOST_NAMES:] = [how_many(len(names) - _MOST_NAMES, "other")]
    return (
        f"the derivative of `f` by {' and '.join(names)} is zero although `f` depends on "
        f"{it}, as on a root found by bisection, or through a comparison or rounding: "
        "take roots by `optimistix.root_find` or `jax.lax.custom_root`, which "
        "differentiate them implicitly, and replace jumps by smooth functions"
    )
