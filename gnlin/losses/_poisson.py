"""The Poisson loss for counts."""

import math
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy
from jaxtyping import Array, Scalar

from .._common._checks import check_flag
from ._base import (
    AbstractElementwiseLoss,
    cdf_of_counts,
    Reduction,
    stirling_rest,
    total_of_each,
    xlogx,
)


class PoissonNLL(AbstractElementwiseLoss):
    r"""Poisson's negative log-likelihood of counts $y$ at the rate $\mu = e^f$,
    $\mu - y\log\mu$, minus its smallest value for that count, $y - y\log y$, so that a
    perfect fit has the loss zero (half the deviance). The curvature is the expected one:
    $\mu$ with respect to $f$, or $1/\mu$ with respect to the rate.

    **Arguments:**

    - `reduction`: as in [`gnlin.authoring.AbstractLoss`][].
    - `log_input`: whether the outputs are logarithms of the rate. If not, they are the
        rate itself, and the loss is NaN if it is not positive.

    !!! example

        ```python
        counts = jnp.array([12, 7, 5, 1, 2])
        rate = lambda p, x: p["height"] * jnp.exp(-p["rate"] * x) + 0.1
        loss = gnlin.losses.PoissonNLL(log_input=False)
        fit = gnlin.curve_fit(rate, x, counts, {"height": 10.0, "rate": 1.0}, loss=loss)
        ```

    ??? cite "Reference"

        P. McCullagh and J. A. Nelder, *Generalized linear models* (1989), chapter 6.
    """

    _targets: ClassVar = "counts", 0.0, math.inf
    reduction: Reduction | None = None
    log_input: bool = eqx.field(default=True, static=True)

    def __check_init__(self):
        check_flag("log_input", self.log_input)

    def elementwise(self, output: Array, target: Array) -> Array:
        # Close to a large count its terms, such as y log y, would cancel.
        some = target > 0
        y, least = jnp.where(some, target, 1), target - xlogx(target)
        if self.log_input:
            change = output - jnp.log(y)
            near = some & (jnp.abs(change) < 1)
            change = jnp.where(near, change, 0)
            closer = target * (jnp.expm1(change) - change)
            return jnp.where(near, closer, jnp.exp(output) - target * output - least)
        rate = jnp.where(output > 0, output, jnp.nan)
        change = (rate - y) / y
        near = some & (jnp.abs(change) < 0.5)
        change = jnp.where(near, change, 0)
        closer = target * (change - jnp.log1p(change))
        return jnp.where(near, closer, rate - xlogy(target, rate) - least)

    def mean(self, output: Array) -> Array:
        return jnp.exp(output) if self.log_input else output

    def cdf(self, output, target):
        from scipy.stats import poisson  # slow to import

        return cdf_of_counts(poisson(np.asarray(self.mean(jnp.asarray(output)))), target)

    def saturated(self, target: Array) -> Array:
        return -stirling_rest(target)

    def decrease(self, outputs, new_outputs, target) -> Scalar:
        def each(f, g, y):
            if self.log_input:
                near = jnp.abs(g - f) < 1
                closer = jnp.exp(f) * jnp.expm1(jnp.where(near, g - f, 0))
                return y * (g - f) - jnp.where(near, closer, jnp.exp(g) - jnp.exp(f))
            valid = (f > 0) & (g > 0)
            change = xlogy(y, g) - xlogy(y, f)
            near = jnp.abs(g - f) < f
            closer = y * jnp.log1p(jnp.where(near & valid, (g - f) / f, 0))
            change = jnp.where(near, closer, change)
            return jnp.where(valid, change - (g - f), jnp.nan)

        return total_of_each(each, outputs, new_outputs, target)

    def derivative(self, output: Array, target: Array) -> Array:
        return jnp.exp(output) - target if self.log_input else 1 - target / output

    def root(self, output: Array, target: Array) -> Array:
        return jnp.exp(0.5 * output) if self.log_input else output**-0.5
