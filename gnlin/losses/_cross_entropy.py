"""Cross-entropy losses for classification."""

import warnings
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Num, Scalar

from .._common import _tree
from .._common._checks import check_less_than_one, is_whole
from ._base import AbstractElementwiseLoss, AbstractLoss, EACH_LOSS, known, Reduction
from ._binomial import binomial_root, binomial_slope
from ._factors import AbstractFactor, SoftmaxFactor


# Probabilities may sum to 1 up to this error, as those that are printed with few digits.
_UNEVEN = 2e-3


def is_label(target: Array) -> bool:
    return jnp.issubdtype(target.dtype, jnp.integer)


def _as_class_weights(given: Any) -> Array | None:
    """Check and convert `class_weights`; traced values are not checked."""
    if given is None or isinstance(given, Tracer):
        return given
    weights = np.asarray(given)
    good = weights.dtype.kind in "iuf" and weights.ndim == 1 and weights.size > 0
    if not (good and np.all(np.isfinite(weights)) and weights.min() >= 0 < weights.max()):
        raise ValueError(
            "`class_weights` must be one number for each class, finite and not negative, "
            f"and not all of them zero, but {given!r} was given."
        )
    return jnp.asarray(weights, float)


class SoftmaxCrossEntropy(AbstractLoss):
    r"""$-\sum_j w_j y_j \log p_j$ with $p = \mathrm{softmax}(f)$, over the outputs' last
    axis of c classes.

    Targets are integer labels, with the outputs' shape without the last axis, or
    probabilities, with the outputs' shape. A warning says if probabilities do not sum to
    1: for labels that do not exclude each other use [`gnlin.SigmoidCrossEntropy`][].
    Counts of the classes are possible, too; they weight a target by its total. A target
    of zeros does not count. An example may be a sequence, with outputs of shape
    `(length, c)`, or an image: it then has many targets, and the mean is over all targets
    that count, not over examples.

    **Arguments:**

    - `label_smoothing`: the probability that is spread evenly over all classes.
    - `reduction`: the `"sum"` or the `"mean"` over targets. By default the mean in
        [`gnlin.fit`][] and the sum in [`gnlin.solve`][].
    - `ignore_index`: a label, such as -1 or the padding's, that marks targets that do not
        count: whatever their outputs, they add nothing to the loss or the mean.
    - `class_weights`: $w$, c numbers, all one by default. In a mean, each target has the
        weight of its class.

    !!! example

        ```python
        tokens, lengths = jnp.array([[1, 0, 2], [2, 2, 0]]), jnp.array([3, 1])
        labels = jnp.where(jnp.arange(3) < lengths[:, None], tokens, -1)
        loss = gnlin.SoftmaxCrossEntropy(ignore_index=-1)
        ```

    ??? cite "Reference"

        The factor of the Hessian: N. N. Schraudolph, *Fast curvature matrix-vector
        products for second-order gradient descent*, Neural Computation 14 (2002);
        F. Dangel, L. Tatzel and P. Hennig, *ViViT*, arXiv:2106.02624, appendix.
    """

    label_smoothing: float = 0.0
    reduction: Reduction | None = None
    ignore_index: int | None = None
    class_weights: Float[Array, " c"] | None = eqx.field(
        default=None, converter=_as_class_weights
    )

    def __check_init__(self):
        check_less_than_one("label_smoothing", self.label_smoothing)
        if self.ignore_index is not None and not is_whole(self.ignore_index):
            raise ValueError(
                "`ignore_index` must be a label, a whole number, but "
                f"{self.ignore_index!r} was given."
            )

    def _of_target(
        self, outputs: Float[Array, "*k c"], target: Num[Array, "..."]
    ) -> tuple[Float[Array, "*k c"], Float[Array, "*k c"], Float[Array, "*k 1"]]:
        """Return the outputs, the target's weighted probabilities, and their sum.

        A label out of range gives NaN, also in the loss. An ignored target gets zero
        probabilities, and zero outputs in case they are NaN.
        """
        num_classes = outputs.shape[-1]
        if is_label(target):
            known = (target >= 0) & (target < num_classes)
            y = jax.nn.one_hot(target, num_classes, dtype=outputs.dtype)
            y = jnp.where(known[..., None], y, jnp.nan)
            y = jnp.where(self._counts(target)[..., None], y, 0)
        else:
            y = target
        if self.label_smoothing != 0:
            even = jnp.sum(y, axis=-1, keepdims=True) / num_classes
            y = (1 - self.label_smoothing) * y + self.label_smoothing * even
        if self.class_weights is not None:
            y = jnp.broadcast_to(self.class_weights.astype(y.dtype), y.shape) * y
        total = jnp.sum(y, axis=-1, keepdims=True)
        return jnp.where(total == 0, 0, outputs), y, total

    def _counts(self, labels: Int[Array, "*k"]) -> Bool[Array, "*k"]:
        if self.ignore_index is None:
            return jnp.ones(labels.shape, bool)
        return labels != self.ignore_index

    def value(self, outputs: Float[Array, "*k c"], target: Num[Array, "..."]) -> Scalar:
        outputs, y, _ = self._of_target(outputs, target)
        log_p, _ = _log_softmax(outputs)
        return -jnp.sum(jnp.where(y == 0, 0, y * log_p))

    def gradient(
        self, outputs: Float[Array, "*k c"], target: Num[Array, "..."]
    ) -> Float[Array, "*k c"]:
        outputs, y, total = self._of_target(outputs, target)
        log_p, top = _log_softmax(outputs)
        p = jnp.exp(log_p)
        # For the likeliest class, t p_k - y_k would cancel. All components sum to zero,
        # so sum those of the other classes instead.
        others = jnp.sum(jnp.where(top, 0, y - total * p), axis=-1, keepdims=True)
        return jnp.where(top, others, total * p - y)

    def factor(
        self, outputs: Float[Array, "*k c"], target: Num[Array, "..."]
    ) -> AbstractFactor:
        outputs, _, total = self._of_target(outputs, target)
        log_p, _ = _log_softmax(outputs)
        return SoftmaxFactor(jnp.exp(0.5 * log_p), total)

    def target_weights(self, target: Num[Array, "..."]) -> Float[Array, "*k"]:
        weights = self.class_weights
        if not is_label(target):
            if weights is None:
                return jnp.ones(target.shape[:-1])
            weights = weights.astype(target.dtype)
            total = jnp.sum(target, axis=-1)
            weighted = _tree.matmul(target, weights)
            return _tree.quotient(weighted, total, total > 0)
        each = jnp.ones(()) if weights is None else weights.at[target].get(mode="clip")
        return jnp.where(self._counts(target), each, 0)

    def check(self, outputs, targets) -> None:
        leaves = jax.tree.leaves(outputs)
        if len(leaves) != 1 or leaves[0].ndim < 2:
            raise ValueError(
                "`gnlin.SoftmaxCrossEntropy` needs a model with one output array, whose "
                f"last axis is over the classes{f'; {EACH_LOSS}' * (len(leaves) > 1)}."
            )
        (shape,) = (leaf.shape for leaf in leaves)
        if not eqx.is_array_like(targets) or isinstance(targets, float | int):
            raise ValueError("The targets must be one array, of labels or probabilities.")
        if shape[-1] == 1:
            raise ValueError(
                "`gnlin.SoftmaxCrossEntropy` needs an output for each class, but the "
                "model has one output: for two classes use "
                "`gnlin.SigmoidCrossEntropy()`, with targets of the outputs' shape."
            )
        given = targets.shape
        weights = self.class_weights
        if weights is not None and weights.shape != shape[-1:]:
            raise ValueError(
                f"`class_weights` must be one for each of the {shape[-1]} classes, but "
                f"there are {weights.size}."
            )
        if is_label(targets):
            if given != shape[:-1]:
                hint = {
                    shape: "; for one-hot labels pass `jnp.argmax(targets, axis=-1)`",
                    (*shape[:-1], 1): ": pass `targets[..., 0]`",
                }.get(given, "")
                raise ValueError(
                    f"Labels must have the shape {shape[:-1]}, of the model's outputs "
                    f"without their last axis, but have {given}{hint}."
                )
            self._check_labels(targets, shape[-1])
        elif jnp.issubdtype(targets.dtype, jnp.floating):
            if given != shape:
                raise ValueError(
                    f"Probabilities must have the shape of the model's outputs, {shape}, "
                    f"but have {given}; labels must be integers."
                )
            _check_probabilities(targets)
        else:
            hint = ": pass `labels.astype(int)`" if targets.dtype == bool else ""
            raise ValueError(
                "The targets must be integer labels or probabilities, but have the dtype "
                f"{targets.dtype}{hint}."
            )

    def _check_labels(self, labels: Array, num_classes: int) -> None:
        for each in known(labels):
            wrong = each[(each < 0) | (each >= num_classes)]
            wrong = wrong[wrong != self.ignore_index]
            if wrong.size == 0:
                continue
            hint = (
                "if it stands for targets that do not count, pass "
                f"`ignore_index={wrong[0]}`"
            )
            if each.min() == 1 and each.max() == num_classes:
                hint = "if they count from 1, subtract 1"
            raise ValueError(
                f"The labels must lie between 0 and {num_classes - 1}, but one is "
                f"{wrong[0]}; {hint}."
            )


def _check_probabilities(targets: Array) -> None:
    """Raise unless known targets are finite and not negative; warn unless they sum to 1,
    or to 0 where a target does not count."""
    for each in known(targets):
        wrong = each[~((each >= 0) & np.isfinite(each))]
        if wrong.size > 0:
            raise ValueError(
                "The targets must be probabilities of the classes, or counts of them, "
                f"finite and not negative, but one is {wrong[0]:g}."
            )
        sums = np.sum(each, axis=-1, dtype=float)
        rounding = max(_UNEVEN, each.shape[-1] * float(jnp.finfo(each.dtype).eps))
        if np.any((sums != 0) & (np.abs(sums - 1) > rounding)):
            # The same words for all batches, so that Python shows them once.
            warnings.warn(
                "The targets of `gnlin.SoftmaxCrossEntropy` do not sum to 1 over the "
                "classes: for labels that do not exclude each other use "
                "`gnlin.SigmoidCrossEntropy()`; if they are counts of the classes, each "
                "target has its total as a weight.",
                stacklevel=3,
            )


class SigmoidCrossEntropy(AbstractElementwiseLoss):
    r"""$-y\log\sigma(f) - (1 - y)\log\sigma(-f)$, summed over outputs: for labels that
    do not exclude each other. Targets are probabilities, with the outputs' shape.

    **Arguments:**

    - `reduction`: as in [`gnlin.authoring.AbstractLoss`][].
    """

    _targets: ClassVar = "probabilities", 0, 1
    reduction: Reduction | None = None

    def elementwise(self, output: Array, target: Array) -> Array:
        # Both terms stay accurate where the other one vanishes.
        softplus = lambda x: jnp.logaddexp(x, 0)
        value = target * softplus(-output) + (1 - target) * softplus(output)
        certain = jnp.isinf(output) & jnp.where(output > 0, target == 1, target == 0)
        return jnp.where(certain, 0, value)

    def derivative(self, output: Array, target: Array) -> Array:
        return binomial_slope(output, target, 1 - target)

    def root(self, output: Array, target: Array) -> Array:
        return binomial_root(output)


def _log_softmax(
    outputs: Float[Array, "*k c"],
) -> tuple[Float[Array, "*k c"], Array]:
    """Return log p, accurate also for the likeliest class, and a mask of that class."""
    likeliest = jnp.argmax(outputs, axis=-1, keepdims=True)
    top = jax.nn.one_hot(likeliest[..., 0], outputs.shape[-1], dtype=bool)
    z = outputs - jnp.take_along_axis(outputs, likeliest, axis=-1)
    others = jnp.sum(jnp.where(top, 0, jnp.exp(z)), axis=-1, keepdims=True)
    return z - jnp.log1p(others), top
