"""A fit as a picture."""

from typing import Any, TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from .._losses import TobitNLL
from ._likelihood import in_units_of_y, Likelihood, shown


if TYPE_CHECKING:
    from ._result import CurveFit


def plot(fit: "CurveFit", ax: Any, confidence: float, num_points: int) -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "`plot` needs matplotlib: install it with `pip install matplotlib`."
        ) from error
    data = fit._data
    leaves = jax.tree.leaves(data.x)
    one = len(leaves) == 1 and leaves[0].ndim == 1 and leaves[0].shape == data.y.shape
    if fit._setting.many or not one:
        raise ValueError("`plot` draws one data set, of y over an x of one axis.")
    x, y = np.asarray(leaves[0]), np.asarray(data.y)
    counted = np.asarray(data.counted) > 0
    fine = jnp.linspace(x.min(), x.max(), num_points, dtype=leaves[0].dtype)
    structure = jax.tree.structure(data.x)
    band, loss = fit.band(structure.unflatten([fine]), confidence), fit._setting.loss
    mean, low, high = (in_units_of_y(loss, end) for end in band)
    y = shown(loss, y)
    if ax is None:
        _, ax = plt.subplots()
    sigma = np.asarray(data.sigma)
    if sigma.ndim == 2:  # a factor of the covariance
        sigma = np.linalg.norm(sigma, axis=1)
    bars = None
    is_of_y = not isinstance(loss, Likelihood) or isinstance(loss.loss, TobitNLL)
    if is_of_y and (sigma.size > 1 or fit._setting.absolute_sigma):
        bars = np.broadcast_to(float(fit.scale) * sigma, y.shape)[counted]
    of_x = [
        float(fit.scale) * np.asarray(s)[counted] for s in jax.tree.leaves(data.sigma_x)
    ]
    ax.errorbar(x[counted], y[counted], bars, *of_x, fmt=".", color="black", label="data")
    ax.plot(fine, mean, color="C0", label="fit")
    label = f"{100 * confidence:g} % confidence"
    ax.fill_between(fine, low, high, color="C0", alpha=0.25, linewidth=0, label=label)
    ax.legend()
    return ax
