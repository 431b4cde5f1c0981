"""Counts."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy
from jaxtyping import Array, PyTree, Scalar

from .. import _tree
from ._base import AbstractElementwiseLoss, as_outputs, check_between, Reduction


class PoissonNLL(AbstractElementwiseLoss):
    r"""Poisson's negative log-likelihood of counts $y$ at the rate $e^f$,
    $e^f - y f$, less its least value for that count, $y - y\log y$: so a perfect fit has
    the loss zero (half the deviance).

    **Arguments:**

    - `reduction`: over the examples, `"sum"` or `"mean"`; by default the mean in
        [`gnlin.fit`][], the sum in [`gnlin.solve`][].
    """

    reduction: Reduction | None = None

    def elementwise(self, output: Array, target: Array) -> Array:
        return jnp.exp(output) - target * output - (target - xlogy(target, target))

    def decrease(
        self, outputs: PyTree[Array], new_outputs: PyTree[Array], target: PyTree[Array]
    ) -> Scalar:
        def each(f, g, y):
            return jnp.sum(y * (g - f) - jnp.exp(f) * jnp.expm1(g - f))

        target = as_outputs(target, outputs)
        parts = jax.tree.map(each, outputs, new_outputs, target)
        return _tree.total(parts, _tree.dtype(outputs))

    def derivative(self, output: Array, target: Array) -> Array:
        return jnp.exp(output) - target

    def root(self, output: Array, target: Array) -> Array:
        return jnp.exp(0.5 * output)

    def check(self, outputs, targets: PyTree[Array]) -> None:
        super().check(outputs, targets)
        check_between("counts", targets, 0.0, np.inf)
