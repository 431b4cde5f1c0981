"""Normal distributions of the outputs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, ScalarLike

from .._common._checks import check_finite_nonnegative, check_fraction, check_scalar


class Gaussian(NamedTuple):
    """A normal distribution of each output, without their correlations.

    - `mean`, `variance`: in the structure of the outputs.
    """

    mean: PyTree[Array]
    variance: PyTree[Array]

    @property
    def standard_deviation(self) -> PyTree[Array]:
        """The square root of the variance, in the structure of the outputs."""
        return jax.tree.map(jnp.sqrt, self.variance)

    def interval(
        self, confidence: float = 0.95, noise: ScalarLike = 0.0
    ) -> tuple[PyTree[Array], PyTree[Array]]:
        """Return the ends `(low, high)` of a central interval about the mean. With the
        standard deviation of the `noise` it is the interval of a new measurement."""
        check_fraction("confidence", confidence)
        check_scalar("noise", noise)
        check_finite_nonnegative("noise", noise)
        factor = jax.scipy.special.ndtri(0.5 + 0.5 * confidence)

        def width(variance: Array) -> Array:
            whole = variance + jnp.asarray(noise, variance.dtype) ** 2
            return factor.astype(variance.dtype) * jnp.sqrt(whole)

        widths = jax.tree.map(width, self.variance)
        low = jax.tree.map(jnp.subtract, self.mean, widths)
        return low, jax.tree.map(jnp.add, self.mean, widths)
