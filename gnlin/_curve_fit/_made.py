"""A `CurveFit`, made from the end of a run."""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._common._checks import is_traced
from .._solver._termination import STANDS_STILL
from .._training._messages import result_name
from .._training._solution import History
from ._curve import Curve, Data
from ._hidden import hidden
from ._problem import FitSettings
from ._result import CurveFit
from ._statistics import Fitted


def as_curve_fit(
    setting: FitSettings,
    curve: Curve,
    start: PyTree,
    data: Data | None,
    end: Fitted,
    found: dict[str, Any],
) -> CurveFit:
    """Build the result from the end of a run and the public fields, which were `found`.
    This function warns the caller of `curve_fit` if something is wrong with the fit."""
    steps, history = found["num_steps"], found["history"]
    if history is not None and not is_traced((steps, history)):
        columns = {name: np.asarray(x)[: int(steps)] for name, x in history.items()}
        found |= {"history": History(columns)}
    failed = end.is_empty if setting.many else None
    if is_traced(end.loss):  # No warning can be given, so a failed fit returns NaN.
        failed = jnp.isnan(end.loss) | end.is_empty
    if failed is not None:
        nan = lambda p: jnp.where(
            jnp.expand_dims(failed, range(failed.ndim, p.ndim)), jnp.nan, p
        )
        free = jax.tree.map(nan, end.parameters)
        found |= {"parameters": eqx.combine(free, found["parameters"])}
    unseen = None
    if not setting.many and not is_traced((end, data, setting)):
        unseen = hidden(setting, data, start, end)
        if unseen.missing.any() and result_name(found["result"]) == "successful":
            found |= {"result": STANDS_STILL}
    known = {"_curve": curve, "_start": start, "_setting": setting, "_data": data}
    fit = CurveFit(**found, **known, _end=end, _hidden=unseen)
    if said := fit.complaint():
        warnings.warn(said, stacklevel=3)
    return fit
