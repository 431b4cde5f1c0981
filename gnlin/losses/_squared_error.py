"""Squared error."""

from typing import ClassVar

from jaxtyping import Array, PyTree, Scalar

from ._base import AbstractElementwiseLoss, Reduction, total_of_each
from ._factors import AbstractFactor, IdentityFactor


class SquaredError(AbstractElementwiseLoss):
    r"""$\frac12\sum_j (f_j - y_j)^2$. Its damped curvature is exactly
    $\phi^\top\phi + \lambda I$.

    **Arguments:**

    - `reduction`: as in [`gnlin.authoring.AbstractLoss`][].
    """

    reduction: Reduction | None = None
    is_quadratic: ClassVar[bool] = True

    def elementwise(self, output: Array, target: Array) -> Array:
        return 0.5 * (output - target) ** 2

    def derivative(self, output: Array, target: Array) -> Array:
        return output - target

    def factor(self, outputs: PyTree[Array], target: PyTree[Array]) -> AbstractFactor:
        return IdentityFactor()

    def plain(self, outputs: PyTree[Array], target: PyTree[Array]) -> PyTree[Array]:
        return self.gradient(outputs, target)

    def decrease(self, outputs, new_outputs, target) -> Scalar:
        # (|r|^2 - |r'|^2) / 2 without cancellation
        each = lambda f, g, y: 0.5 * (f - g) * ((f - y) + (g - y))
        return total_of_each(each, outputs, new_outputs, target)
