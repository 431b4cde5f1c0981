"""The Tobit loss for censored values."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.special import log_ndtr
from jaxtyping import Array, Int

from .._common._checks import one_array
from ._base import AbstractElementwiseLoss, Reduction


def _as_sides(given: Any) -> Array:
    """Check and convert `censored`; traced values are not checked."""
    if isinstance(given, Tracer):
        return given
    known = one_array("`censored`", given)
    is_number = known.dtype.kind in "iuf"
    wrong = known[~np.isin(known, (-1, 0, 1))] if is_number else known.ravel()
    if wrong.size > 0:
        hint = ": multiply the flags by 1 or -1" * (known.dtype.kind == "b")
        raise ValueError(
            "`censored` must hold 0 for a measured value, 1 for a value above its limit "
            f"and -1 for a value below its limit, but one is {wrong[0]}{hint}."
        )
    return jnp.asarray(known, int)


class TobitNLL(AbstractElementwiseLoss):
    r"""The negative log-likelihood of normally distributed values, some of which are
    censored: for these, y is a limit, and the true value lies above or below it.

    With $z = f - y$ in units of the standard deviation, the loss is $\frac12 z^2$ for a
    measured value, $-\log\Phi(z)$ for a value above its limit, and $-\log\Phi(-z)$ for a
    value below its limit. It is convex; the curvature is the observed one.

    **Arguments:**

    - `censored`: 0 for each measured value, 1 if the true value is above y, -1 if it is
        below: one number for each value, in the shape of y in [`gnlin.curve_fit`][],
        and of the targets elsewhere. In the shape of one example's targets, they are
        those of each example.
    - `reduction`: as in [`gnlin.authoring.AbstractLoss`][].

    In [`gnlin.curve_fit`][] the standard deviation is `sigma`, which must be given and is
    not estimated; elsewhere it is 1.

    !!! example

        ```python
        measured = jnp.array([1.9, 1.5, 1.4, 1.0, 1.0])  # the last two are below 1
        line = lambda p, x: p["a"] + p["b"] * x
        loss = gnlin.losses.TobitNLL(jnp.array([0, 0, 0, -1, -1]))
        fit = gnlin.curve_fit(
            line, x, measured, {"a": 0.0, "b": 0.0}, sigma=0.1, loss=loss
        )
        ```

    ??? cite "Reference"

        J. Tobin, *Estimation of relationships for limited dependent variables*,
        Econometrica 26 (1958).
    """

    _of_each: ClassVar = "censored"
    censored: Int[Array, "..."] = eqx.field(converter=_as_sides)
    reduction: Reduction | None = None

    def elementwise(self, output: Array, target: Array) -> Array:
        side, z = self._sides(output), output - target
        return jnp.where(side == 0, 0.5 * z**2, -log_ndtr(side * z))

    def derivative(self, output: Array, target: Array) -> Array:
        side, z = self._sides(output), output - target
        return jnp.where(side == 0, z, -side * _hazard(side * z)[0])

    def root(self, output: Array, target: Array) -> Array:
        side = self._sides(output)
        hazard, excess = _hazard(side * (output - target))
        curvature = jnp.maximum(hazard * excess, 0)
        return jnp.where(side == 0, 1, jnp.sqrt(curvature))

    def cdf(self, output, target):
        from scipy.stats import norm  # slow to import

        at, side = norm.cdf(target - output), np.asarray(self.censored)
        return np.where(side < 0, 0, at), np.where(side > 0, 1, at)

    def _sides(self, output: Array) -> Array:
        sides = jnp.asarray(self.censored).astype(output.dtype)
        return jnp.broadcast_to(sides, output.shape)


# Beyond this many standard deviations (by bits of precision), use the series in 1/z.
_FAR = {32: 10.0, 64: 30.0}


def _hazard(z: Array) -> tuple[Array, Array]:
    r"""Return $h = \varphi(z)/\Phi(z)$ and $h + z$, which vanishes as z falls."""
    far = _FAR.get(jnp.finfo(z.dtype).bits, 10.0)
    near = jnp.maximum(z, -far)
    log_density = -0.5 * near**2 - 0.5 * jnp.log(2 * jnp.pi).astype(z.dtype)
    hazard = jnp.exp(log_density - log_ndtr(near))
    inverse = -1 / jnp.minimum(z, -far)
    series = inverse * (1 - 2 * inverse**2 + 10 * inverse**4 - 74 * inverse**6)
    excess = jnp.where(z < -far, series, hazard + near)
    return jnp.where(z < -far, excess - z, hazard), excess
