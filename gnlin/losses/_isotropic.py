"""Robust losses of vectors, such as the error of a point in an image."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Scalar

from .._common import _tree
from .._common._checks import check_whole
from ._base import AbstractLoss, as_outputs, check_shapes, Reduction
from ._factors import IsotropicFactor
from ._robust import AbstractRobust


class Isotropic(AbstractLoss):
    r"""A robust loss $\rho(\lVert r\rVert)$ of the length of residual vectors. Unlike
    the sum of $\rho(r_i)$ over the components, it does not depend on the direction.

    If one component of a vector is wrong, all of them get less weight, as for the error
    of a point in an image. [`gnlin.losses.PseudoHuber`][] of the length of an image's
    gradients is smoothed total variation.

    **Arguments:**

    - `loss`: a robust loss, such as [`gnlin.losses.Huber`][].
    - `axis`: the axis of an example's outputs along which the residuals form a vector.
    - `reduction`: as in [`gnlin.authoring.AbstractLoss`][].

    **Raises:** `ValueError` if the loss is not robust, or has a `reduction` of its own;
    also if the outputs do not have this axis.

    !!! example

        ```python
        def gradients(image, _=None):
            down, right = jnp.diff(image, axis=0), jnp.diff(image, axis=1)
            return jnp.stack([down[:, :-1], right[:-1]], axis=-1)

        loss = gnlin.losses.Isotropic(gnlin.losses.PseudoHuber(1e-2))
        smooth = gnlin.Residuals(gradients, loss=loss, weight=0.2)
        ```

    ??? cite "References"

        B. Triggs et al., *Bundle adjustment: a modern synthesis* (2000), section 4.3.

        C. R. Vogel and M. E. Oman, *Iterative methods for total variation denoising*,
        SIAM J. Sci. Comput. 17 (1996).
    """

    loss: AbstractRobust
    axis: int = eqx.field(default=-1, static=True)
    reduction: Reduction | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        if not isinstance(self.loss, AbstractRobust):
            raise ValueError(
                "`loss` must be a robust loss, such as `gnlin.losses.Huber(0.1)`, but "
                f"{self.loss!r} was given."
            )
        if self.loss.reduction is not None:
            raise ValueError(
                "Pass `reduction` to `gnlin.losses.Isotropic`, and not to its `loss`."
            )
        check_whole("axis", self.axis)

    def as_arguments(self) -> "Isotropic":
        return eqx.tree_at(lambda own: own.loss, self, self.loss.as_arguments())

    def value(self, outputs: PyTree[Array], target: PyTree[Array]) -> Scalar:
        _, size = self._polar(outputs, target)
        each = jax.tree.map(lambda s: self.loss.elementwise(s, jnp.zeros_like(s)), size)
        return _tree.total(each, _tree.dtype(outputs))

    def gradient(self, outputs: PyTree[Array], target: PyTree[Array]) -> PyTree[Array]:
        direction, size = self._polar(outputs, target)
        pull = jax.tree.map(lambda s: self.loss.derivative(s, jnp.zeros_like(s)), size)
        return jax.tree.map(jnp.multiply, pull, direction)

    def factor(self, outputs: PyTree[Array], target: PyTree[Array]) -> IsotropicFactor:
        direction, size = self._polar(outputs, target)
        along = jax.tree.map(lambda s: self.loss.root(s, jnp.zeros_like(s)), size)
        across = jax.tree.map(self.loss.root_of_weight, size)
        unit = jnp.asarray(self.loss.unit, _tree.dtype(along))
        return IsotropicFactor(direction, along, across, self.axis, unit)

    def plain(self, outputs: PyTree[Array], target: PyTree[Array]) -> PyTree[Array]:
        def scaled(output, target):
            size = _length(output - target, self.axis)
            root = self.loss.plain(size, jnp.zeros_like(size))
            normal = root > 0  # it is 0 if its square underflows, and then is the length
            ratio = jnp.where(normal, root, 1) / jnp.where(normal, size, 1)
            return ratio * (output - target)

        return jax.tree.map(scaled, outputs, as_outputs(target, outputs))

    def check(self, outputs, targets) -> None:
        check_shapes(outputs, targets)
        shapes = [leaf.shape[1:] for leaf in jax.tree.leaves(outputs)]
        if any(not -len(shape) <= self.axis < len(shape) for shape in shapes):
            raise ValueError(
                f"The outputs of an example have the shape {shapes[0]}, without the axis "
                f"{self.axis} of `gnlin.losses.Isotropic`: pass another `axis`, or the "
                "robust loss itself."
            )

    def _polar(
        self, outputs: PyTree[Array], target: PyTree[Array]
    ) -> tuple[PyTree[Array], PyTree[Array]]:
        """Return the residuals' directions and lengths."""
        target = as_outputs(target, outputs)
        residual = jax.tree.map(jnp.subtract, outputs, target)
        size = jax.tree.map(lambda r: _length(r, self.axis), residual)
        return jax.tree.map(lambda r, s: r / jnp.where(s > 0, s, 1), residual, size), size


def _length(residual: Array, axis: int) -> Array:
    """Return the 2-norm along an axis, of length 1 in the result, or NaN if the residual
    is not finite. The derivative of the length 0 is 0."""
    unit = jnp.max(jnp.abs(residual), axis=axis, keepdims=True)
    unit = jax.lax.stop_gradient(jnp.where(unit > 0, unit, 1))
    square = jnp.sum((residual / unit) ** 2, axis=axis, keepdims=True)
    root = jnp.sqrt(jnp.where(square == 0, 1, square))
    return jnp.where(square == 0, 0, unit * root)
