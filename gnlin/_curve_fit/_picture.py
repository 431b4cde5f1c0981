"""The plot of a fit."""

from typing import Any, TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from .._common._checks import import_pyplot
from ..losses import BinomialNLL, TobitNLL
from ._curve import Data


if TYPE_CHECKING:
    from ._result import CurveFit


def plot(fit: "CurveFit", data: Data, ax: Any, confidence: float, num_points: int) -> Any:
    plt = import_pyplot("plot")
    leaves, structure = jax.tree.flatten(data.x)
    y, counted = np.asarray(data.y), np.asarray(data.counted) > 0
    along = [k for k, leaf in enumerate(leaves) if _varies(leaf, y.shape)]
    if fit._setting.many or len(along) != 1:
        raise ValueError(
            "`plot` draws one data set over one x that is real and has the shape of y: "
            "draw others by `fit.band(x)`."
        )
    (which,) = along
    x = np.asarray(leaves[which])
    kind = x.dtype if np.issubdtype(x.dtype, np.floating) else float
    fine = jnp.linspace(x.min(), x.max(), num_points, dtype=kind)

    def drawn(k, leaf):
        """Return the plotted x, or a leaf of x that is constant over the points."""
        if k == which:
            return fine
        constant = jnp.shape(leaf) == y.shape
        return jnp.broadcast_to(leaf[0], fine.shape) if constant else leaf

    fine_x = structure.unflatten([drawn(k, leaf) for k, leaf in enumerate(leaves)])
    loss = fit._setting.loss
    mean, low, high = map(loss.mean, fit.band(fine_x, confidence))
    if isinstance(loss, BinomialNLL):
        trials = np.broadcast_to(np.asarray(loss.trials), y.shape)
        y = np.where(trials > 0, y / np.where(trials > 0, trials, 1), np.nan)
    if ax is None:
        _, ax = plt.subplots()
    sigma = np.asarray(data.sigma)
    if sigma.ndim == 2:  # the norms of a factor's rows are the standard deviations
        sigma = np.linalg.norm(sigma, axis=1)
    bars = bars_of_x = None
    is_of_y = isinstance(fit._setting.likelihood, TobitNLL | None)
    if is_of_y and (sigma.size > 1 or fit._setting.absolute_sigma):
        bars = np.broadcast_to(float(fit.scale) * sigma, y.shape)[counted]
    if data.sigma_x is not None:
        sigma_x = np.asarray(jax.tree.leaves(data.sigma_x)[which])
        bars_of_x = float(fit.scale) * sigma_x[counted]
    style: Any = {"fmt": ".", "color": "black", "label": "data"}
    ax.errorbar(x[counted], y[counted], bars, bars_of_x, **style)
    ax.plot(fine, mean, color="C0", label="fit")
    label = f"{100 * confidence:g} % confidence"
    ax.fill_between(fine, low, high, color="C0", alpha=0.25, linewidth=0, label=label)
    ax.legend()
    return ax


def _varies(leaf: Any, shape: tuple[int, ...]) -> bool:
    is_row = jnp.shape(leaf) == shape and len(shape) == 1
    return is_row and not jnp.iscomplexobj(leaf) and bool(np.any(leaf != leaf[0]))
