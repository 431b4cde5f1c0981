"""Classes: cross-entropy with the softmax or the logistic function."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, Scalar

from .._checks import check_less_than_one
from ._base import AbstractElementwiseLoss, AbstractLoss, check_between, Reduction
from ._factors import AbstractFactor, SoftmaxFactor


class SoftmaxCrossEntropy(AbstractLoss):
    r"""$-\sum_j y_j \log p_j$ with $p = \mathrm{softmax}(f)$, over the outputs' last axis
    of c classes (and summed over the others, if there are any).

    Targets are integer labels, of the outputs' shape without the last axis, or
    probabilities, of the outputs' shape.

    **Arguments:**

    - `label_smoothing`: the part of the probability that is spread evenly over all
        classes.
    - `reduction`: over the examples, `"sum"` or `"mean"`.

    ??? cite "Reference"

        The factor of the Hessian: N. N. Schraudolph, *Fast curvature matrix-vector
        products for second-order gradient descent*, Neural Computation 14 (2002);
        F. Dangel, L. Tatzel and P. Hennig, *ViViT*, arXiv:2106.02624, appendix.
    """

    label_smoothing: float = 0.0
    reduction: Reduction = "sum"

    def __check_init__(self):
        check_less_than_one("label_smoothing", self.label_smoothing)

    def _probabilities(
        self, outputs: Float[Array, "*k c"], target: Num[Array, "..."]
    ) -> Float[Array, "*k c"]:
        """Of the target. A label that is no class is NaN, and so is the loss."""
        num_classes = outputs.shape[-1]
        if jnp.issubdtype(target.dtype, jnp.integer):
            known = (target >= 0) & (target < num_classes)
            certain = jax.nn.one_hot(target, num_classes, dtype=outputs.dtype)
            certain = jnp.where(known[..., None], certain, jnp.nan)
        else:
            certain = target
        if self.label_smoothing == 0:
            return certain
        total = jnp.sum(certain, axis=-1, keepdims=True)
        even = total / num_classes
        return (1 - self.label_smoothing) * certain + self.label_smoothing * even

    def value(self, outputs: Float[Array, "*k c"], target: Num[Array, "..."]) -> Scalar:
        y = self._probabilities(outputs, target)
        log_p, _ = _log_softmax(outputs)
        return -jnp.sum(jnp.where(y == 0, 0, y * log_p))

    def gradient(
        self, outputs: Float[Array, "*k c"], target: Num[Array, "..."]
    ) -> Float[Array, "*k c"]:
        y = self._probabilities(outputs, target)
        log_p, top = _log_softmax(outputs)
        p = jnp.exp(log_p)
        total = jnp.sum(y, axis=-1, keepdims=True)
        # t p_k - y_k of the likeliest class without a difference of nearly equal numbers:
        # of both, what the other classes have.
        others = jnp.sum(jnp.where(top, 0, y - total * p), axis=-1, keepdims=True)
        return jnp.where(top, others, total * p - y)

    def factor(
        self, outputs: Float[Array, "*k c"], target: Num[Array, "..."]
    ) -> AbstractFactor:
        y = self._probabilities(outputs, target)
        log_p, _ = _log_softmax(outputs)
        return SoftmaxFactor(jnp.exp(0.5 * log_p), jnp.sum(y, axis=-1, keepdims=True))

    def check(self, outputs, targets) -> None:
        leaves = jax.tree.leaves(outputs)
        if len(leaves) != 1 or leaves[0].ndim < 2:
            raise ValueError(
                "`gnlin.SoftmaxCrossEntropy` needs a model with one output array, whose "
                "last axis is over the classes."
            )
        (shape,) = (leaf.shape for leaf in leaves)
        if not eqx.is_array_like(targets) or isinstance(targets, float | int):
            raise ValueError("The targets must be one array, of labels or probabilities.")
        given = targets.shape
        if jnp.issubdtype(targets.dtype, jnp.integer):
            if given != shape[:-1]:
                raise ValueError(
                    f"Labels must have the shape {shape[:-1]}, of the model's outputs "
                    f"without their last axis, but have {given}."
                )
            check_between("labels", targets, 0, shape[-1] - 1)
        elif jnp.issubdtype(targets.dtype, jnp.floating):
            if given != shape:
                raise ValueError(
                    f"Probabilities must have the shape of the model's outputs, {shape}, "
                    f"but have {given}; labels must be integers."
                )
            check_between("probabilities", targets, 0, np.inf)
        else:
            raise ValueError(
                "The targets must be integer labels or probabilities, but have the dtype "
                f"{targets.dtype}."
            )


class SigmoidCrossEntropy(AbstractElementwiseLoss):
    r"""$-y\log\sigma(f) - (1 - y)\log\sigma(-f)$ of each output by itself: for several
    labels that do not exclude each other. Targets are probabilities, of the outputs'
    shape.

    **Arguments:**

    - `reduction`: over the examples, `"sum"` or `"mean"`.
    """

    reduction: Reduction = "sum"

    def elementwise(self, output: Array, target: Array) -> Array:
        # Each in a form that stays exact where the other vanishes.
        wrong = (1 - target) * jnp.maximum(output, 0) - target * jnp.minimum(output, 0)
        return wrong + jnp.log1p(jnp.exp(-jnp.abs(output)))

    def derivative(self, output: Array, target: Array) -> Array:
        sigmoid = jax.nn.sigmoid
        return (1 - target) * sigmoid(output) - target * sigmoid(-output)

    def root(self, output: Array, target: Array) -> Array:
        # sqrt(sigma(f) sigma(-f)) = 1 / (2 cosh(f / 2))
        x = jnp.abs(output)
        return jnp.exp(-0.5 * x) / (1 + jnp.exp(-x))

    def check(self, outputs, targets) -> None:
        super().check(outputs, targets)
        check_between("probabilities", targets, 0, 1)


def _log_softmax(
    outputs: Float[Array, "*k c"],
) -> tuple[Float[Array, "*k c"], Array]:
    """log p, of the likeliest class too to full relative precision; and which that is."""
    likeliest = jnp.argmax(outputs, axis=-1, keepdims=True)
    top = jnp.arange(outputs.shape[-1]) == likeliest
    z = outputs - jnp.take_along_axis(outputs, likeliest, axis=-1)
    others = jnp.sum(jnp.where(top, 0, jnp.exp(z)), axis=-1, keepdims=True)
    return z - jnp.log1p(others), top
