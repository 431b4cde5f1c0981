"""Hyperparameters that change from one outer step to the next."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import (
    as_float,
    as_scalar,
    check_exponent,
    check_fraction,
    check_takes,
    check_up_to_one,
    fraction,
    is_traced,
    nan_unless,
    nonnegative,
    positive,
)


Schedule = Callable[[Int[Array, ""]], ScalarLike]
"""A function of the number of outer steps so far, such as an optax schedule."""


def is_period(period: ScalarLike) -> Bool[Array, ""]:
    """Whether a number of inner steps is whole and at least 1, or infinite."""
    period = jnp.asarray(as_float(period))
    return (period >= 1) & ((period == jnp.floor(period)) | jnp.isinf(period))


def rounded(value: ScalarLike) -> Array:
    """Return the whole number nearest to a schedule's value of at least 0.5, or infinity;
    NaN for other values, which are no number of steps."""
    value = jnp.asarray(as_float(value), float)
    return nan_unless(value >= 0.5, jnp.maximum(jnp.round(value), 1))


def value_at(
    value: Any,  # ScalarLike | Schedule
    num_steps: Int[Array, ""],
    within: Callable[[ScalarLike], Bool[Array, ""]],
) -> ScalarLike:
    """Return a constant, or a schedule's value at an outer step; NaN if out of range."""
    value = returned_at(value, num_steps)
    return nan_unless(within(value), value)


def returned_at(value: Any, num_steps: Int[Array, ""]) -> Any:
    """Return a constant, or a schedule's value at an outer step, whatever it is."""
    if callable(value):
        check_takes("schedule(num_steps)", value, 1)
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix dtypes
            value = value(num_steps)
        array_like = eqx.is_array_like(value) and not jnp.iscomplexobj(value)
        if not array_like or jnp.shape(value) != ():
            what = f"the shape {jnp.shape(value)}" if array_like else repr(value)
            raise ValueError(f"A schedule must return one number, but returned {what}.")
    return value


# Of the settings that may be schedules: what they must be, and the test of it.
_RANGES = {
    "period": ("a whole number of at least 1", is_period),
    "learning_rate": ("positive and finite", positive),
    "momentum": ("at least 0 and less than 1", lambda x: (x >= 0) & (x < 1)),
    "damping": ("at least 0 and finite", nonnegative),
    "tolerance": ("between 0 and 1", fraction),
}


def out_of_range(solver: Any, num_steps: int) -> str:
    """Return a clause that names a solver's setting whose value at an outer step is out
    of its range, with the value; or "" if there is none that can be named.

    - `num_steps`: the number of outer steps before that step.
    """
    found: Any
    for name, (must_be, within) in _RANGES.items():
        value = getattr(solver, name, None)
        is_schedule = callable(value)
        if not (is_schedule or eqx.is_array_like(value)) or is_traced(value):
            continue
        found = returned_at(value, jnp.asarray(num_steps))
        if is_schedule and name == "period":
            must_be, within = "at least 0.5", lambda x: ~jnp.isnan(rounded(x))
        if is_traced(found):
            continue
        if not within(jnp.asarray(as_float(found))):
            return f"`{name}` is {float(found):.6g}, and must be {must_be}"
    return ""


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
