r"""Rules by which Levenberg-Marquardt's damping follows from how well its trials went.

```python
solver = gnlin.LevenbergMarquardt(damping=gnlin.damping.TrustRegion())
```

A fixed damping, or one that follows a schedule, is [`gnlin.DampedGaussNewton`][]'s.
"""

import abc
from typing import ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar, ScalarLike

from ._common import _tree
from ._common._checks import (
    as_scalar,
    check_count,
    check_finite_positive,
    check_fraction,
    nan_unless,
    positive,
)
from ._subproblem import AbstractSubproblem
from .filters import Tikhonov


__all__ = ["AbstractDamping", "LongestStep", "Nielsen", "Trial", "TrustRegion"]


class Trial(eqx.Module):
    r"""What came of a damping, for a rule to judge.

    - `damping`: $\lambda$.
    - `ratio`: of the decrease of the loss to the predicted one, at most 1.
    - `accepted`: whether the step may be taken.
    - `length`, `size`: $\lVert D\delta\rVert$, as the step is damped, and
        $\lVert Dy\rVert$ of the point.
    - `share`: of what the undamped step is predicted to gain, the part that this one is.
        It is 0 where the former is not known.
    - `noise`: whether both the decrease and the predicted one are below the rounding of
        the loss.
    """

    damping: Float[Array, ""]
    ratio: Float[Array, ""]
    accepted: Bool[Array, ""]
    length: Float[Array, ""]
    size: Float[Array, ""]
    share: Float[Array, ""]
    noise: Bool[Array, ""]


_State = TypeVar("_State")


# The loss must fall by this part of what is predicted, as in MINPACK.
_SUFFICIENT = 1e-4
# A step that lowers the loss by less, or more, of what was predicted asks for more, or
# less damping.
_POOR, _GOOD = 0.25, 0.75


class AbstractDamping(eqx.Module, Generic[_State]):
    r"""How the damping is found, and how it changes from trial to trial.

    A rule of your own has a state, any pytree. It says what the state is before the first
    trial of a run, which damping to try, and what the state is after a trial. It may also
    say which steps are accepted and when the trials at a linearisation end; the accepted
    step with the least damping is then taken.

    - `num_trials`: roughly, how many dampings are tried at one linearisation. For many,
        a decomposition that serves them all is worth its price.
    """

    num_trials: ClassVar[int] = 2

    def __repr__(self) -> str:
        return _tree.in_words(self)

    @abc.abstractmethod
    def init(self, dtype: jnp.dtype) -> _State:
        """The state before the first trial."""

    @abc.abstractmethod
    def damping(
        self, state: _State, subproblem: AbstractSubproblem, y: PyTree[Array]
    ) -> Scalar:
        r"""The next $\lambda$ to try, from the point `y`."""

    @abc.abstractmethod
    def after(self, state: _State, trial: Trial) -> _State:
        """The state after a trial."""

    def accepts(self, state: _State, trial: Trial) -> Bool[Array, ""]:
        """Whether a step that could be taken is good enough; `state` is the one before
        the trial."""
        return trial.ratio > _SUFFICIENT

    def goes_on(self, state: _State, trial: Trial) -> Bool[Array, ""]:
        """Whether another damping is tried at this linearisation; `state` is the one
        after the trial."""
        return ~trial.accepted


class _Changing(eqx.Module):
    damping: Float[Array, ""]  # negative before the first trial
    growth: Float[Array, ""]  # if the next trial fails


# Nielsen's factor at most; and after a step that was predicted as well as this, which
# damping only holds up: with a tenth NIST's fits take 15 steps in the median and not 17,
# and the classical problems 22 and not 26.5. With a hundredth it is 12.5 for NIST's, and
# some networks are a decade of loss behind after 25 steps.
_LESS = 1 / 3
_EXACT, _MUCH_LESS = 0.98, 1 / 10


class Nielsen(AbstractDamping[_Changing]):
    r"""A damping that a good step lowers, by up to a factor of 3, and that failing ones
    raise, by 2, 4, 8 and so on.

    $$\lambda \leftarrow \lambda\,\max\!\left(\tfrac13,\ 1 - (2\rho - 1)^3\right),$$

    with $\rho$ the ratio of the decrease to the predicted one; and, which is not
    Nielsen's, a tenth of $\lambda$ from $\rho = 0.98$ on.

    **Arguments:**

    - `initial`: the first $\lambda$, relative to the curvature along the gradient.

    ??? cite "Reference"

        H. B. Nielsen, *Damping parameter in Marquardt's method*, IMM-REP-1999-05.
    """

    initial: ScalarLike = eqx.field(default=1e-3, converter=as_scalar)

    def __check_init__(self):
        check_finite_positive("initial", self.initial)

    def init(self, dtype: jnp.dtype) -> _Changing:
        return _Changing(jnp.array(-1, dtype), jnp.array(2, dtype))

    def damping(
        self, state: _Changing, subproblem: AbstractSubproblem, y: PyTree[Array]
    ) -> Scalar:
        return _or_first(state.damping, self.initial, subproblem)

    def after(self, state: _Changing, trial: Trial) -> _Changing:
        factor = jnp.where(trial.accepted, _nielsens(trial.ratio), state.growth)
        growth = jnp.where(trial.accepted, 2, 2 * state.growth)
        return _Changing(trial.damping * factor, growth)


def _nielsens(ratio: Scalar) -> Scalar:
    """The factor of the damping after a step."""
    shrink = jnp.maximum(_LESS, 1 - (2 * ratio - 1) ** 3)
    return jnp.where(ratio >= _EXACT, _MUCH_LESS, shrink)


def _or_first(
    damping: Scalar, initial: ScalarLike, subproblem: AbstractSubproblem
) -> Scalar:
    """The damping, or the first one where there has been none: relative to the curvature
    along the gradient."""

    def first():
        curvature = subproblem.curvature_along_gradient().astype(damping.dtype)
        # Where the gradient vanishes there is no step to damp.
        safe = jnp.where(positive(curvature), curvature, 1)
        return nan_unless(positive(initial), initial).astype(damping.dtype) * safe

    return jax.lax.cond(damping < 0, first, lambda: damping)


# The search ends when the edge is known to this factor,
_RESOLUTION = 1.5
# or when all but so little of what the undamped step is predicted to gain, or of the next
# step's length, is there: a step that gains 0.999 of it may still be many times as long.
# On Burgers' equation (p = 941) a loss of 1e-12 after a hundred steps becomes 1e-14.
_UNDAMPED = 1 - 1e-6
# A step that is predicted to gain all that any can promises too much, in a long valley:
# a smaller part of it will do. With the same ratio everywhere Burgers' equation is at
# 1.4e-14 after a hundred steps, and with this at 7e-16 (a ratio of 0.075 throughout has
# 6e-16); networks and NIST's fits do not change.
_ALL, _PART_OF_ALL = 0.99, 0.3
# The first move from the last damping is by this factor, the next by its square, and so
# on, up to a factor that leaves some precision.
_MOVE, _LARGEST_MOVE = 3.0, 1e8
# So many times as many trials, where the first steps are too short to gain anything.
_LONG_WAY = 2
# A step is no longer than this multiple of the last one (without such a limit BoxBOD of
# NIST's ends on a plateau), or than this part of the point, if that is more.
_GROWTH, _SHORT = 3.0, 1e-3


class _Edge(eqx.Module):
    damping: Float[Array, ""]  # to try next; negative before the first trial
    low: Float[Array, ""]  # the largest that has failed at this linearisation; or 0
    high: Float[Array, ""]  # the smallest that has been accepted; or infinity
    move: Float[Array, ""]
    number: Int[Array, ""]  # of trials at this linearisation
    length: Float[Array, ""]  # of the last step; negative before the first trial
    # Of the step that is taken: its length, and the damping to begin with after it
    next_length: Float[Array, ""]
    next_damping: Float[Array, ""]
    real: Bool[Array, ""]  # whether a step that gains something has been found


class LongestStep(AbstractDamping[_Edge]):
    r"""The longest step that keeps its promise: the least damping at which the loss still
    falls by a part $\rho$ of what is predicted, found anew at each linearisation.

    From one factorisation each trial costs a product and an evaluation. The search begins
    where Nielsen's rule would, and moves away by factors of 3, 9, 81 and so on until a
    step fails (or one is accepted). It then halves the interval, in logarithms, until its
    ends are within a factor of 1.5. A step is at most three times as long as the last,
    unless that is less than a thousandth of the point.

    A step that is predicted to gain all that any step can is one in a long valley, and
    promises too much: of such a step $0.3\,\rho$ suffices.

    **Arguments:**

    - `ratio`: $\rho$, between 0 and 1.
    - `num_trials`: the most dampings tried at a linearisation, once one is accepted.
    - `initial`: the first $\lambda$, relative to the curvature along the gradient.

    ??? cite "Reference"

        J. Webb, S. Jerad and C. Cartis, arXiv:2607.02194 (2026): the rule, for sketched
        problems, with a ratio of 0.075.
    """

    ratio: ScalarLike = eqx.field(default=0.25, converter=as_scalar)
    num_trials: int = eqx.field(default=10, static=True, kw_only=True)  # type: ignore
    initial: ScalarLike = eqx.field(default=1e-3, converter=as_scalar, kw_only=True)

    def __check_init__(self):
        check_fraction("ratio", self.ratio)
        check_count("num_trials", self.num_trials)
        check_finite_positive("initial", self.initial)

    def init(self, dtype: jnp.dtype) -> _Edge:
        zero, one = jnp.zeros((), dtype), jnp.ones((), dtype)
        none = jnp.zeros((), int)
        no = jnp.array(False)
        return _Edge(-one, zero, jnp.inf * one, _MOVE * one, none, -one, zero, zero, no)

    def damping(
        self, state: _Edge, subproblem: AbstractSubproblem, y: PyTree[Array]
    ) -> Scalar:
        return _or_first(state.damping, self.initial, subproblem)

    def accepts(self, state: _Edge, trial: Trial) -> Bool[Array, ""]:
        longest = _GROWTH * jnp.where(state.length < 0, trial.length, state.length)
        longest = jnp.maximum(longest, _SHORT * trial.size)
        ratio = jnp.asarray(self.ratio, trial.ratio.dtype)
        ratio *= jnp.where(trial.share > _ALL, _PART_OF_ALL, 1)
        return (trial.ratio >= ratio) & (trial.length <= longest)

    def after(self, state: _Edge, trial: Trial) -> _Edge:
        good = trial.accepted
        low = jnp.where(good, state.low, trial.damping)
        high = jnp.where(good, trial.damping, state.high)
        grows = trial.length * _UNDAMPED > state.next_length
        saturated = jnp.isfinite(state.high) & ~grows
        # Of steps that gain nothing the first is taken, which is short.
        taken = good & (~trial.noise | jnp.isinf(state.high))
        # A damping that damps nothing stays: far below, rounding would decide.
        stays = trial.noise | saturated | (trial.share >= _UNDAMPED)
        factor = jnp.where(stays, 1, _nielsens(trial.ratio))
        next_length = jnp.where(taken, trial.length, state.next_length)
        next_damping = jnp.where(taken, trial.damping * factor, state.next_damping)
        number = state.number + 1
        # Where only steps that gain nothing have been found, it may be a long way.
        real = jnp.isfinite(high) & (state.real | taken & ~trial.noise)
        most = jnp.where(real, self.num_trials, _LONG_WAY * self.num_trials)
        spent = (number >= most) | (high <= _RESOLUTION * low)
        spent |= good & ((trial.share >= _UNDAMPED) | saturated)
        found = jnp.isfinite(high) & spent
        between = (low > 0) & jnp.isfinite(high)
        move = jnp.where(good, 1 / state.move, state.move)
        damping = jnp.where(between, jnp.sqrt(low) * jnp.sqrt(high), trial.damping * move)
        move = jnp.minimum(state.move**2, _LARGEST_MOVE)
        move = jnp.where(number > 1, move, state.move)
        length = jnp.where(state.length < 0, trial.length, state.length)
        # At the next linearisation the search begins anew.
        return _Edge(
            jnp.where(found, next_damping, damping),
            jnp.where(found, 0, low),
            jnp.where(found, jnp.inf, high),
            jnp.where(found, _MOVE, move),
            jnp.where(found, 0, number),
            jnp.where(found, next_length, length),
            next_length,
            next_damping,
            real & ~found,
        )

    def goes_on(self, state: _Edge, trial: Trial) -> Bool[Array, ""]:
        return state.number > 0


# By how much a radius shrinks after a step that was poor, and one that was not taken.
_POORER, _FAILED = 0.5, 0.25
# A step is as long as the radius within this part of it,
_WITHIN = 0.1
# which takes two or three solutions, and no more than these.
_MOST_SOLUTIONS = 20
# Damping at this power of eps, relative to the largest curvature, damps nothing.
_LEAST_POWER = 2.5
# Where there is nothing to start from, the damping is at least this part of its bound
# (Moré, 1978, section 5).
_LEAST_PART = 1e-3


class _Region(eqx.Module):
    radius: Float[Array, ""]  # negative before the first trial
    damping: Float[Array, ""]  # of the last trial


class TrustRegion(AbstractDamping[_Region]):
    r"""The damping at which the step is as long as a radius $\Delta$, within a tenth: the
    step is the best with $\lVert D\delta\rVert \le \Delta$, and undamped where that one
    is shorter. The radius is twice the step's length after a good step, and a half or a
    quarter of it after a poor or a failing one.

    Each trial takes a few solutions, which are next to free where the spectrum is at
    hand, and dear by conjugate gradients.

    **Arguments:**

    - `factor`: the first radius, relative to $\lVert Dy\rVert$ (or the radius itself,
        where that is 0). MINPACK's is 100; with 1 all of NIST's fits are solved.

    ??? cite "Reference"

        J. J. Moré, *The Levenberg-Marquardt algorithm: implementation and theory* (1978),
        sections 3 to 5; without the interpolation of a failing step's factor.
    """

    num_trials: ClassVar[int] = 10

    factor: ScalarLike = eqx.field(default=1.0, converter=as_scalar)

    def __check_init__(self):
        check_finite_positive("factor", self.factor)

    def init(self, dtype: jnp.dtype) -> _Region:
        return _Region(jnp.array(-1, dtype), jnp.array(0, dtype))

    def damping(
        self, state: _Region, subproblem: AbstractSubproblem, y: PyTree[Array]
    ) -> Scalar:
        dtype = state.radius.dtype
        factor = nan_unless(positive(self.factor), self.factor).astype(dtype)
        size = subproblem.length(y).astype(dtype)
        first = factor * jnp.where(size > 0, size, 1)
        radius = jnp.where(state.radius < 0, first, state.radius)
        return _where_as_long(subproblem, radius, state.damping)

    def after(self, state: _Region, trial: Trial) -> _Region:
        poor, good = trial.ratio < _POOR, trial.ratio >= _GOOD
        # The first radius is large: what it should have been is known now.
        fair = jnp.where(state.radius < 0, trial.length, state.radius)
        radius = jnp.select(
            [~trial.accepted, poor, good],
            [_FAILED * trial.length, _POORER * trial.length, 2 * trial.length],
            fair,
        )
        return _Region(radius, trial.damping)


class _Search(eqx.Module):
    damping: Float[Array, ""]  # to try next
    tried: Float[Array, ""]
    length: Float[Array, ""]  # of the step at what has been tried
    low: Float[Array, ""]
    high: Float[Array, ""]
    num_solutions: Int[Array, ""]


def _where_as_long(
    subproblem: AbstractSubproblem, radius: Scalar, guess: Scalar
) -> Scalar:
    """Hebden's iteration: 1 / |D delta| is next to linear in the damping, so its secants
    lead to 1 / Delta; between bounds, as Moré keeps it."""
    dtype = radius.dtype

    def length(damping: Scalar) -> Scalar:
        long = subproblem.length_of(subproblem.solve(Tikhonov(damping))).astype(dtype)
        # A factorisation that fails for lack of damping: the step is too long.
        return jnp.where(jnp.isfinite(long), long, jnp.inf)

    def inside(damping: Scalar, low: Scalar, high: Scalar) -> Scalar:
        middle = jnp.maximum(_LEAST_PART * high, jnp.sqrt(low * high))
        return jnp.where((damping > low) & (damping < high), damping, middle)

    largest = subproblem.largest_curvature().astype(dtype)
    least = jnp.finfo(dtype).eps ** _LEAST_POWER * largest
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
