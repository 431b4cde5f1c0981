"""Whether the probabilities of classes are calibrated."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Scalar

from .._common import _tree
from .._common._checks import check_count, import_pyplot
from ._base import check_between
from ._cross_entropy import is_label


def expected_calibration_error(
    probabilities: ArrayLike, labels: ArrayLike, *, num_bins: int = 15
) -> Scalar:
    r"""Return the expected calibration error (ECE) of the probabilities of classes.

    The confidence of a prediction is the probability of its most likely class. With the
    examples in bins $B_k$ of equal width by confidence, the error is

    $$\sum_k \frac{|B_k|}{n}\,\bigl|\mathrm{acc}(B_k) - \mathrm{conf}(B_k)\bigr|,$$

    where acc is the share of right predictions in a bin, and conf their mean confidence.

    **Arguments:**

    - `probabilities`: the probabilities of many examples, with classes along the last
        axis, as from [`gnlin.predict.Posterior.probabilities`][] or `jax.nn.softmax`.
        With the shape `(n, 1)` or `(n,)` they are the second class's of two.
    - `labels`: integer labels, with the shape of the probabilities without the last axis.
        Negative labels do not count.
    - `num_bins`: the number of bins. The error depends on it, above all for few examples.

    **Returns:** a number between 0 and 1, or NaN if no label counts.

    **Raises:** `ValueError` if the shapes do not fit, or if a probability is not between
    0 and 1, as outputs before the softmax may be.

    !!! example

        ```python
        probabilities = jnp.array([[0.1, 0.9], [0.8, 0.2]])
        gnlin.losses.expected_calibration_error(probabilities, jnp.array([1, 1]))  # 0.45
        ```

    ??? cite "Reference"

        C. Guo, G. Pleiss, Y. Sun and K. Weinberger, *On Calibration of Modern Neural
        Networks*, ICML (2017), equation 3.
    """
    number, right, confidence = _sums(probabilities, labels, num_bins)
    return jnp.sum(jnp.abs(right - confidence)) / jnp.sum(number)


def reliability_diagram(
    probabilities: ArrayLike, labels: ArrayLike, *, num_bins: int = 15, ax: Any = None
) -> Any:
    """Draw the accuracy against the confidence in each bin, with the standard error of
    the accuracy, and the share of the examples in each bin. A point below the diagonal is
    a bin of overconfident predictions.

    This needs matplotlib. The arguments are those of
    [`gnlin.losses.expected_calibration_error`][], and `ax`, the axes to draw on (by
    default new ones), which are returned.

    !!! example

        ```python
        probabilities = jnp.array([[0.1, 0.9], [0.8, 0.2]])
        gnlin.losses.reliability_diagram(probabilities, jnp.array([1, 1]))
        ```
    """
    plt = import_pyplot("reliability_diagram")
    sums = np.asarray(_sums(probabilities, labels, num_bins), float)
    share, full = sums[0] / sums[0].sum(), sums[0] > 0
    number, right, confidence = sums[:, full]
    accuracy, error = right / number, np.abs(sums[1] - sums[2]).sum() / number.sum()
    if ax is None:
        _, ax = plt.subplots()
    left = np.arange(num_bins) / num_bins
    style: Any = {"color": "C0", "alpha": 0.25, "label": "share of examples"}
    ax.bar(left, share, 1 / num_bins, align="edge", **style)
    ax.plot([0, 1], [0, 1], color="black", linewidth=1)
    spread = np.sqrt(accuracy * (1 - accuracy) / number)
    label = f"accuracy (ECE {100 * error:.1f} %)"
    ax.errorbar(confidence / number, accuracy, spread, fmt="o", color="C0", label=label)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    ax.legend()
    return ax


def _sums(
    probabilities: ArrayLike, labels: ArrayLike, num_bins: int
) -> Float[Array, "3 bins"]:
    """Return the number of examples in each bin, the number of right predictions among
    them, and the sum of their confidences. Bin k holds the confidences in
    (k/bins, (k+1)/bins]."""
    check_count("num_bins", num_bins)
    p, labels = jnp.asarray(probabilities), jnp.asarray(labels)
    p = p.astype(_tree.at_least_single(p))  # half precision cannot count
    if p.ndim == 1 or p.shape[-1:] == (1,):  # of the second of two classes
        p, labels = p.ravel(), labels.ravel().astype(float)
        p = jnp.stack([1 - p, p], axis=1)
        check_between("labels", jnp.maximum(labels, 0), 0, 1)
        labels = jnp.where(labels < 0, -1, jnp.where(labels > 0.5, 1, 0))
    if not is_label(labels) or labels.shape != p.shape[:-1]:
        raise ValueError(
            f"With probabilities of the shape {jnp.shape(probabilities)}, labels must be "
            f"integers, one for each example, but are {labels.dtype.name} of the shape "
            f"{labels.shape}."
        )
    check_between("probabilities", p, 0, 1)
    check_between("labels", jnp.maximum(labels, 0), 0, p.shape[-1] - 1)
    confidence, likeliest = jnp.max(p, axis=-1), jnp.argmax(p, axis=-1)
    right = likeliest == labels.astype(likeliest.dtype)
    each = jnp.stack([jnp.ones_like(confidence), right.astype(p.dtype), confidence])
    each = jnp.where((labels >= 0)[None], each, 0)
    bins = jnp.clip(jnp.ceil(confidence * num_bins).astype(int) - 1, 0, num_bins - 1)
    sums = jnp.zeros((3, num_bins), p.dtype)
    return sums.at[:, bins.ravel()].add(each.reshape(3, -1))
