"""Hyperparameters that change from one outer step to the next."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import (
    as_scalar,
    check_exponent,
    check_fraction,
    check_takes,
    check_up_to_one,
    is_traced,
    nan_unless,
)


Schedule = Callable[[Int[Array, ""]], ScalarLike]
"""A function of the number of outer steps so far, such as an optax schedule."""


def value_at(
    value: ScalarLike | Schedule,
    num_steps: Int[Array, ""],
    within: Callable[[ScalarLike], Bool[Array, ""]],
) -> ScalarLike:
    """Return a constant, or a schedule's value at an outer step; NaN if out of range."""
    if callable(value):
        check_takes("schedule(num_steps)", value, 1)
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix dtypes
            value = value(num_steps)
        array_like = eqx.is_array_like(value) and not jnp.iscomplexobj(value)
        if not array_like or jnp.shape(value) != ():
            what = f"the shape {jnp.shape(value)}" if array_like else repr(value)
            raise ValueError(f"A schedule must return one number, but returned {what}.")
    return nan_unless(within(value), value)


class EisenstatWalker(eqx.Module):
    r"""The forcing sequence of Eisenstat and Walker for the tolerance of
    [`gnlin.TruncatedGaussNewton`][].

    $$\beta_k = \gamma\,(\lVert g_k\rVert / \lVert g_{k-1}\rVert)^\alpha$$

    with $g$ the gradient: the tolerance is loose far from the solution and tight near it.
    As the paper advises, $\beta_k$ is at least $\gamma\beta_{k-1}^\alpha$ while that is
    above 0.1.

    **Arguments:**

    - `initial`: $\beta_0$.
    - `gamma`: $\gamma$, positive and at most 1.
    - `exponent`: $\alpha$, above 1 and at most 2.
    - `maximum`: the largest tolerance.
    - `minimum`: the smallest tolerance; the default is near rounding.

    ??? cite "Reference"

        S. C. Eisenstat and H. F. Walker, *Choosing the forcing terms in an inexact Newton
        method*, SIAM J. Sci. Comput. 17 (1996), equation (2.6).
    """

    initial: ScalarLike = eqx.field(default=0.5, converter=as_scalar)
    gamma: ScalarLike = eqx.field(default=0.9, converter=as_scalar)
    exponent: ScalarLike = eqx.field(default=2.0, converter=as_scalar)
    maximum: ScalarLike = eqx.field(default=0.9, converter=as_scalar)
    minimum: ScalarLike = eqx.field(default=1e-12, converter=as_scalar)

    def __repr__(self) -> str:
        return _tree.in_words(self)

    def __check_init__(self):
        for name in ("initial", "maximum", "minimum"):
            check_fraction(name, getattr(self, name))
        limits = self.minimum, self.maximum
        if not is_traced(limits) and not np.less_equal(*limits):
            raise ValueError(
                f"`minimum` must be at most `maximum`, but {self.minimum} and "
                f"{self.maximum} were given."
            )
        check_up_to_one("gamma", self.gamma)
        check_exponent("exponent", self.exponent)

    def next_tolerance(
        self, tolerance: Scalar, gradient_norm: Scalar, previous_norm: Scalar
    ) -> Scalar:
        """Return $\\beta_k$, given $\\beta_{k-1}$, $|g_k|$ and $|g_{k-1}|$."""
        gamma, exponent, minimum, maximum = (
            jnp.asarray(x, tolerance.dtype)
            for x in (self.gamma, self.exponent, self.minimum, self.maximum)
        )
        safe = jnp.where(previous_norm > 0, previous_norm, 1)
        forcing = gamma * (gradient_norm / safe) ** exponent
        safeguard = gamma * tolerance**exponent
        forcing = jnp.where(safeguard > 0.1, jnp.maximum(forcing, safeguard), forcing)
        return jnp.clip(forcing, minimum, maximum)
