"""Robust fits whose scale is estimated, by rounds of fits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from .._common._checks import is_traced
from .._common._history import COUNTS
from .._common._quickly import quickly
from ..losses import SquaredError
from ._curve import Data
from ._inputs import surely
from ._problem import FitSettings
from ._program import fitted
from ._statistics import Fitted, spread


# The least number of robust fits after a first fit by squared error, and the largest. In
# between they go on until the scale changes by less than the third number: of eight fits
# of 25 points, 8 of them outliers, two need more than five. A traced scale cannot be
# compared, and has the least number. Each fit takes its scale from the residuals of the
# fit before it. The first begins at the user's start, and the others where the one before
# ended: a loss that ignores points far off may ignore all of them at the start, and then
# two scales would alternate.
_ROUNDS, _MOST_ROUNDS, _SETTLED = 5, 50, 1e-4


def in_rounds(
    setting: FitSettings, data: Data, start: PyTree[Array], has_starts: bool
) -> tuple[Data, Fitted, dict[str, Any]]:
    """Return the data with the scale, the end of the last round, and the fields of
    `CurveFit`, with the steps of all rounds.

    - `has_starts`: whether each round begins at all of several starts.
    """
    # The first fit leaves steps for the loss, because outliers may keep it from ending.
    half = np.asarray(setting.max_steps // 2)
    squared = setting._replace(loss=SquaredError(), max_steps=half)
    end, found = fitted(squared, data, start, has_starts)
    none = jnp.zeros_like(_as_steps(found))
    scale = jnp.ones(())
    for number in range(_MOST_ROUNDS):
        made, before = _as_steps(found), scale
        scale = _scale(data.y, data.counted, found["residuals"])
        if number >= _ROUNDS:
            moves = jnp.abs(scale - before) > _SETTLED * before
            if not surely(jnp.any(moves)):
                break
        is_over = made >= int(setting.max_steps)
        # Without steps, a round would end at one of the starts.
        may_not_move = has_starts and number > 0 and not surely(~jnp.any(is_over))
        if may_not_move:
            scale = unless(is_over, scale, data.spread)
        data = data._replace(spread=scale, steps=made)
        new_end, new = fitted(setting, data, start, has_starts)
        of_both = _of_both(found, new)
        if may_not_move:
            choose = functools.partial(unless, is_over)
            new_end, new = jax.tree.map(choose, (new_end, new), (end, found))
        end, found = new_end, new | of_both
        if not has_starts:
            start = end.parameters
    # The scale differs between models, so their losses cannot be compared.
    found |= dict.fromkeys(("aic", "bic"), jnp.full_like(found["aic"], jnp.nan))
    # The profiles run the same program, without a limit on their sum.
    return data._replace(steps=none), end, found


def _as_steps(found: dict[str, Any]) -> Int[Array, "*sets"]:
    # An explicit dtype avoids a weak type, which would trigger a second compilation.
    return jnp.asarray(found["num_steps"], int)


def unless(is_over: Bool[Array, "*sets"], new: Any, old: Any) -> Array:
    """Return the new values, and the old ones of data sets without steps that are
    left."""
    axes = range(is_over.ndim, jnp.ndim(new))
    return jnp.where(jnp.expand_dims(is_over, axes), old, new)


def _of_both(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the number of steps, and the history, of two runs one after the other."""
    made, history = before["num_steps"], after["history"]
    num_steps = made + after["num_steps"]
    if history is None:
        return {"num_steps": num_steps}
    inside = is_traced((made, history))
    numpy: Any = jnp if inside else np  # NumPy has less overhead per operation
    made, rows = made if inside else int(made), np.arange(len(history["loss"]))
    joined = {}
    for name, new in history.items():
        old = before["history"][name]
        old = numpy.pad(old, (0, rows.size - len(old)))
        if name in COUNTS:
            new = new + numpy.max(numpy.where(rows < made, old, 0))
        joined[name] = numpy.where(rows < made, old, numpy.roll(new, made))
    return {"num_steps": num_steps, "history": joined}


@quickly
def _scale(y: Array, counted: Array, residuals: Array) -> Array:
    """Estimate the standard deviation of each data set's residuals, in units of sigma."""
    # The estimate is zero if the curve meets most points exactly.
    least = jnp.finfo(y.dtype).eps * jnp.max(jnp.abs(y), axis=-1)
    least = jnp.where(least > 0, least, 1)
    return jnp.maximum(spread(residuals, counted), least)
