"""Classification accuracy."""

import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike, Scalar

from ._base import check_between
from ._cross_entropy import is_label


def accuracy(
    outputs: ArrayLike, targets: ArrayLike, *, ignore_index: int | None = None
) -> Scalar:
    """Return the fraction of targets whose class is the most likely one.

    **Arguments:**

    - `outputs`: the outputs of many examples, with classes along the last axis. With the
        shape `(n, 1)` or `(n,)` there are two classes: positive outputs are the second.
    - `targets`: integer labels, with the outputs' shape without the last axis (one label
        for each position of a sequence), or probabilities, with the outputs' shape. Where
        one output stands for two classes, labels may have the outputs' shape too.
    - `ignore_index`: a label that does not count. Negative labels never count.

    **Returns:** a number between 0 and 1, or NaN if no target counts, or if the outputs
    of one that counts are NaN.

    !!! example

        ```python
        outputs = jnp.array([[0.1, 2.0], [3.0, 1.0]])
        gnlin.losses.accuracy(outputs, jnp.array([1, 1]))  # 0.5
        ```
    """
    if any(len(jax.tree.leaves(x)) != 1 for x in (outputs, targets)):
        raise ValueError("`accuracy` needs one array of outputs, and one of targets.")
    outputs, targets = jnp.asarray(outputs), jnp.asarray(targets)
    probabilities = outputs.ndim > 0 and targets.shape == outputs.shape
    labels = is_label(targets) and targets.shape == outputs.shape[:-1] != outputs.shape
    if not (probabilities or labels):
        raise ValueError(
            f"With outputs of the shape {outputs.shape}, targets must be integer labels "
            f"of the shape {outputs.shape[:-1]}, or probabilities of the outputs' shape, "
            f"but are {targets.dtype.name} of the shape {targets.shape}."
        )
    if outputs.shape[-1] == 1 or (probabilities and outputs.ndim == 1):
        outputs = jnp.stack([jnp.zeros_like(outputs), outputs], axis=-1)
        targets = targets.reshape(outputs.shape[:-1])
        if not is_label(targets):
            targets = (targets.astype(outputs.dtype) > 0.5).astype(int)
        labels = True
    likeliest = jnp.argmax(outputs, axis=-1)
    known = ~jnp.any(jnp.isnan(outputs), axis=-1)
    counts = jnp.ones(likeliest.shape, bool)
    if labels:
        counts = targets >= 0
        if ignore_index is not None:
            counts &= targets != ignore_index
        num_classes = outputs.shape[-1]
        check_between("labels", jnp.where(counts, targets, 0), 0, num_classes - 1)
        right = likeliest == targets.astype(likeliest.dtype)
    else:
        own = jnp.take_along_axis(targets, likeliest[..., None], axis=-1)
        right = own[..., 0] == jnp.max(targets, axis=-1)
    right = jnp.where(known, right.astype(float), jnp.nan)
    return jnp.mean(right, where=counts)
