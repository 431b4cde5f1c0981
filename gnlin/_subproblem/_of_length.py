"""The damping with which a step has a given length."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Scalar

from .._common._checks import nan_unless
from ..filters import Tikhonov
from ._base import AbstractSubproblem


# Relative tolerance between the length of a step and the radius.
_WITHIN = 0.1
# The most solutions per trial; two or three are usual.
_MOST_SOLUTIONS = 20
# The smallest damping to try without a usable guess, as a part of the upper bound (Moré,
# 1978, section 5).
_LEAST_PART = 1e-3


class _Search(eqx.Module):
    damping: Float[Array, ""]  # to try next
    tried: Float[Array, ""]  # the last damping
    length: Float[Array, ""]  # the step's with that damping
    low: Float[Array, ""]
    high: Float[Array, ""]
    num_solutions: Int[Array, ""]


def damping_for_length(
    subproblem: AbstractSubproblem, radius: Scalar, guess: Scalar
) -> Scalar:
    """Return the damping at which |D delta| is the radius, by Hebden's iteration with
    Moré's bounds: secants of 1 / |D delta|, which is nearly linear in the damping."""
    dtype = radius.dtype

    def length(damping: Scalar) -> Scalar:
        long = subproblem.length_of(subproblem.solve(Tikhonov(damping))).astype(dtype)
        # The factorisation has failed for lack of damping, so the step is too long.
        return jnp.where(jnp.isfinite(long), long, jnp.inf)

    def inside(damping: Scalar, low: Scalar, high: Scalar) -> Scalar:
        middle = jnp.maximum(_LEAST_PART * high, jnp.sqrt(low * high))
        return jnp.where((damping > low) & (damping < high), damping, middle)

    least = subproblem.least_damping(radius).astype(dtype)
    # |D delta| is at most |D^-1 g| / lambda.
    most = subproblem.scaled_gradient_norm().astype(dtype) / radius

    def closer(last: _Search) -> _Search:
        damping, long = last.damping, length(last.damping)
        slope = (1 / long - 1 / last.length) / (damping - last.tried)
        secant = damping + (1 / radius - 1 / long) / slope
        low = jnp.where(long > radius, damping, last.low)
        high = jnp.where(long > radius, last.high, damping)
        number = last.num_solutions + 1
        return _Search(inside(secant, low, high), damping, long, low, high, number)

    def apart(search: _Search) -> Bool[Array, ""]:
        far = jnp.abs(search.length - radius) > _WITHIN * radius
        return far & (search.num_solutions < _MOST_SOLUTIONS)

    guess, undamped = inside(guess, least, most), length(least)
    start = _Search(guess, least, undamped, least, most, jnp.array(1))
    reaches = undamped > (1 + _WITHIN) * radius
    found = jax.lax.while_loop(lambda search: reaches & apart(search), closer, start)
    return nan_unless(radius > 0, jnp.where(reaches, found.tried, least))
