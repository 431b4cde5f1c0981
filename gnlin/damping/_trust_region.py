"""The best step of at most some length, and the damping with which it has that length."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Scalar, ScalarLike

from .._common._checks import as_scalar, check_finite_positive, nan_unless, positive
from .._subproblem import AbstractSubproblem
from ..filters import Tikhonov
from ._base import AbstractDamping, Trial


# A ratio below the first shrinks a trust region, and one from the second on enlarges it.
_POOR, _GOOD = 0.25, 0.75
# The next radius, divided by the length of a poor step and of a failing one.
_POORER, _FAILED = 0.5, 0.25
# Relative tolerance between the length of a step and the radius.
_WITHIN = 0.1
# The most solutions per trial; two or three are usual.
_MOST_SOLUTIONS = 20
# The smallest damping to try without a usable guess, as a part of the upper bound (Moré,
# 1978, section 5).
_LEAST_PART = 1e-3


class _Region(eqx.Module):
    radius: Float[Array, ""]  # negative before the first trial
    damping: Float[Array, ""]  # of the last trial


class TrustRegion(AbstractDamping):
    r"""A trust region: the step is the best one with $\lVert D\delta\rVert \le \Delta$.
    The damping is found such that the step's length is the radius $\Delta$ within a
    tenth, unless the undamped step is shorter. The next radius is twice the length of a
    good step, half that of a poor step, or a quarter of a failing one.

    Each trial takes a few solutions of the subproblem. They are cheap if its spectrum is
    in memory, and expensive by conjugate gradients.

    **Arguments:**

    - `factor`: the first radius, divided by $\lVert Dy\rVert$ unless that is 0. MINPACK
        uses 100. With 1, 52 of NIST's 54 fits are solved.

    ??? cite "Reference"

        J. J. Moré, *The Levenberg-Marquardt algorithm: implementation and theory* (1978),
        sections 3 to 5, without the interpolation after a failing step.
    """

    num_trials: ClassVar[int] = 10

    factor: ScalarLike = eqx.field(default=1.0, converter=as_scalar)

    def __check_init__(self):
        check_finite_positive("factor", self.factor)

    def init(self, dtype: jnp.dtype) -> _Region:
        return _Region(jnp.array(-1, dtype), jnp.array(0, dtype))

    def damping(self, state, subproblem, y) -> Scalar:
        radius = self._radius(state, subproblem.length(y))
        return _damping_for_length(subproblem, radius, state.damping)

    def _radius(self, state: _Region, size: Scalar) -> Scalar:
        """Return the radius of the next trial at a point of this size."""
        dtype = state.radius.dtype
        factor = nan_unless(positive(self.factor), self.factor).astype(dtype)
        first = factor * jnp.where(size > 0, size, 1).astype(dtype)
        return jnp.where(state.radius < 0, first, state.radius)

    def after(self, state: _Region, trial: Trial) -> _Region:
        poor, good = trial.ratio < _POOR, trial.ratio >= _GOOD
        # A step whose factorisation failed has no length.
        known = jnp.isfinite(trial.length)
        length = jnp.where(known, trial.length, self._radius(state, trial.size))
        # The first radius is a guess: replace it by the length of the first step.
        fair = jnp.where(state.radius < 0, length, state.radius)
        radius = jnp.select(
            [~trial.accepted, poor, good],
            [_FAILED * length, _POORER * length, 2 * length],
            fair,
        )
        return _Region(radius, trial.damping)


class _Search(eqx.Module):
    damping: Float[Array, ""]  # to try next
    tried: Float[Array, ""]  # the last damping
    length: Float[Array, ""]  # the step's with that damping
    low: Float[Array, ""]
    high: Float[Array, ""]
    num_solutions: Int[Array, ""]


def _damping_for_length(
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
