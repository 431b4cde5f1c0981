r"""Rules that adapt Levenberg-Marquardt's damping to the success of its trials.

```python
solver = gnlin.LevenbergMarquardt(damping=gnlin.damping.TrustRegion())
```

For a fixed damping or a schedule use [`gnlin.DampedGaussNewton`][].
"""

import abc
import dataclasses
from typing import ClassVar, Generic, TypeVar

import equinox as eqx
import jax.numpy as jnp
from equinox import AbstractVar
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar, ScalarLike

from ._common import _tree
from ._common._checks import (
    as_scalar,
    check_count,
    check_finite_positive,
    check_flag,
    check_fraction,
    nan_unless,
    positive,
)
from ._subproblem import AbstractSubproblem, damping_for_length


__all__ = ["AbstractDamping", "LongestStep", "Nielsen", "Trial", "TrustRegion"]


class Trial(eqx.Module):
    r"""The outcome of a trial with one damping, for a rule to judge.

    - `damping`: $\lambda$.
    - `ratio`: the decrease of the loss divided by the predicted decrease, at most 1.
    - `accepted`: whether the step may be taken.
    - `length`, `size`: $\lVert D\delta\rVert$ and $\lVert Dy\rVert$, with $D$ the scaling
        of the damping.
    - `share`: the predicted decrease divided by the one predicted for the undamped step;
        0 if the latter is unknown.
    - `noise`: whether both the decrease and its prediction are below the rounding of the
        loss.
    - `part`: the predicted decrease divided by the largest possible one, which is that of
        the undamped step or the loss itself, whichever is smaller.
    - `on_detour`: whether the linearisation is on a detour. The decreases are then
        counted from the point where the detour left.
    """

    damping: Float[Array, ""]
    ratio: Float[Array, ""]
    accepted: Bool[Array, ""]
    length: Float[Array, ""]
    size: Float[Array, ""]
    share: Float[Array, ""]
    noise: Bool[Array, ""]
    part: Float[Array, ""]
    on_detour: Bool[Array, ""]


_State = TypeVar("_State")


# The smallest ratio of an accepted step, as in MINPACK.
_SUFFICIENT = 1e-4
# A ratio below the first shrinks a trust region, and one from the second on enlarges it.
_POOR, _GOOD = 0.25, 0.75


class AbstractDamping(eqx.Module, Generic[_State]):
    r"""A rule that chooses the damping of each trial.

    A subclass keeps a state, which is any pytree, and defines `init`, `damping` and
    `after`. It may also override `begin`, which sees each linearisation once, and
    `accepts` and `goes_on`, which decide whether a step is accepted and whether to try
    another damping at the same linearisation. The last accepted step that lowers the loss
    by more than rounding is taken.

    - `num_trials`: the approximate number of dampings tried at one linearisation. If it
        is large, a decomposition that serves all of them is worth its cost.
    - `detours`: whether some trials are the start of a detour (`is_detour`).
    """

    num_trials: ClassVar[int] = 2
    detours: ClassVar[bool] = False

    def __repr__(self) -> str:
        return _tree.in_words(self)

    @abc.abstractmethod
    def init(self, dtype: jnp.dtype) -> _State:
        """Return the state before the first trial of a run."""

    def begin(self, state: _State, subproblem: AbstractSubproblem) -> _State:
        """Return the state before the first trial at a linearisation."""
        return state

    @abc.abstractmethod
    def damping(
        self, state: _State, subproblem: AbstractSubproblem, y: PyTree[Array]
    ) -> Scalar:
        r"""Return the next $\lambda$ to try at the point `y`."""

    @abc.abstractmethod
    def after(self, state: _State, trial: Trial) -> _State:
        """Return the state after a trial."""

    def accepts(self, state: _State, trial: Trial) -> Bool[Array, ""]:
        """Whether a trial's step is good enough, with the `state` before the trial."""
        return trial.ratio > _SUFFICIENT

    def goes_on(self, state: _State, trial: Trial) -> Bool[Array, ""]:
        """Whether to try another damping here, with the `state` after the trial."""
        return ~trial.accepted

    def is_detour(self, state: _State) -> Bool[Array, ""]:
        """Whether the next trial, if it is accepted, is the start of a detour. The next
        linearisation is then at its point, and the step taken so far is kept. If some
        trial there lowers the loss of that step as well as it has to, it is the next
        step, and otherwise the detour is forgotten."""
        return jnp.array(False)


class _Kept(eqx.Module):
    damping: Float[Array, ""]  # to try next; negative before the first trial


_KeptState = TypeVar("_KeptState", bound=_Kept)


class _AbstractFromFirst(AbstractDamping[_KeptState]):
    """A rule whose state holds the next damping."""

    initial: AbstractVar[ScalarLike]

    def begin(self, state: _KeptState, subproblem: AbstractSubproblem) -> _KeptState:
        damping = state.damping
        curvature = subproblem.curvature_along_gradient().astype(damping.dtype)
        safe = jnp.where(positive(curvature), curvature, 1)
        initial = nan_unless(positive(self.initial), self.initial)
        first = jnp.where(damping < 0, initial.astype(damping.dtype) * safe, damping)
        return eqx.tree_at(lambda s: s.damping, state, first)

    def damping(self, state, subproblem, y) -> Scalar:
        return state.damping


class _Changing(_Kept):
    growth: Float[Array, ""]  # factor of the damping if the next trial fails


# The smallest factor of the damping in Nielsen's rule.
_LESS = 1 / 3
# The factor once the ratio is at least the first number. With 1/10 the median is 15 steps
# on NIST's fits and 22 on the classical problems, instead of 17 and 26.5 without. With
# 1/100 NIST's take 12.5, but some networks are a decade of loss behind after 25 steps.
_EXACT, _MUCH_LESS = 0.98, 1 / 10


class Nielsen(_AbstractFromFirst[_Changing]):
    r"""A damping that falls by a factor of up to 3 after a good step, and rises by
    factors of 2, 4, 8 and so on after failing steps.

    $$\lambda \leftarrow \lambda\,\max\!\left(\tfrac13,\ 1 - (2\rho - 1)^3\right),$$

    with $\rho$ the decrease divided by the predicted decrease. As an addition to
    Nielsen's rule, $\lambda$ is divided by 10 if $\rho \ge 0.98$.

    **Arguments:**

    - `initial`: the first $\lambda$, divided by the curvature along the gradient.

    ??? cite "Reference"

        H. B. Nielsen, *Damping parameter in Marquardt's method*, IMM-REP-1999-05.
    """

    initial: ScalarLike = eqx.field(default=1e-3, converter=as_scalar)

    def __check_init__(self):
        check_finite_positive("initial", self.initial)

    def init(self, dtype: jnp.dtype) -> _Changing:
        return _Changing(jnp.array(-1, dtype), jnp.array(2, dtype))

    def after(self, state: _Changing, trial: Trial) -> _Changing:
        factor = jnp.where(trial.accepted, _nielsen_factor(trial.ratio), state.growth)
        growth = jnp.where(trial.accepted, 2, 2 * state.growth)
        return _Changing(trial.damping * factor, growth)


def _nielsen_factor(ratio: Scalar) -> Scalar:
    """Return the factor of the damping after an accepted step."""
    shrink = jnp.maximum(_LESS, 1 - (2 * ratio - 1) ** 3)
    return jnp.where(ratio >= _EXACT, _MUCH_LESS, shrink)


# The search ends when the largest failing and the smallest accepted damping are within
# this factor.
_RESOLUTION = 1.5
# It also ends when a step has this share of the undamped step's predicted decrease, or
# when less damping no longer lengthens it, to within this factor. On Burgers' equation
# with 941 parameters the loss after a hundred steps is 1e-14, and 1e-12 with 0.999.
_UNDAMPED = 1 - 1e-6
# A step with more than the first share only has to reach the second part of `ratio`. On
# Burgers' equation the loss after a hundred steps is 7e-16, 1.4e-14 without this rule,
# and 6e-16 with a ratio of 0.075 throughout. Networks and NIST's fits do not change.
_ALL, _PART_OF_ALL = 0.99, 0.3
# The first factor between two dampings, and the largest one. The factor is squared from
# trial to trial.
_MOVE, _LARGEST_MOVE = 3.0, 1e8
# Multiple of `num_trials` allowed while no step lowers the loss by more than rounding.
_LONG_WAY = 2
# The longest step, as a multiple of the last one or, if that is longer, as a part of the
# point. Without a limit NIST's BoxBOD ends on a plateau.
_GROWTH, _SHORT = 3.0, 1e-3
# A detour is tried if the step has less than this part of the largest possible decrease,
# and if the detour's own prediction leaves less of it than this number of such steps
# would.
_SLOW, _WORTH = 0.6, 3
# The damping of a detour is divided by its boldness, which begins at the first number and
# is multiplied by the others after a detour that came back, one that did not, and a step
# without one. Below the last number no detour is tried.
_BOLD, _BOLDER, _LESS_BOLD, _RECOVERS, _TIMID = 4.0, 2.0, 0.25, 1.1, 2.0
_BOLDEST = 1e8
# A detour is lost after this number of failing trials.
_MOST_ON_DETOUR = 4


class _Edge(_Kept):
    low: Float[Array, ""]  # largest failing damping at this linearisation, or 0
    high: Float[Array, ""]  # smallest accepted damping at this linearisation, or infinity
    move: Float[Array, ""]  # factor to the next damping while `low` or `high` is missing
    number: Int[Array, ""]  # trials at this linearisation
    length: Float[Array, ""]  # of the last step taken; negative before the first trial
    next_length: Float[Array, ""]  # of the step to take at this linearisation
    next_damping: Float[Array, ""]  # where the search begins at the next linearisation
    real: Bool[Array, ""]  # whether some step lowers the loss by more than rounding
    gain: Float[Array, ""]  # part of the largest possible decrease that was taken
    boldness: Float[Array, ""]  # factor between the damping and that of a detour
    leaves: Bool[Array, ""]  # whether the next trial is the start of a detour


class LongestStep(_AbstractFromFirst[_Edge]):
    r"""The longest reliable step: the smallest damping at which the loss still falls by
    $\rho$ times the predicted decrease. It is searched for at each linearisation.

    All trials share one factorisation; each costs a product and an evaluation. The search
    begins at the damping of Nielsen's rule, and moves away from it by factors of 3, 9, 81
    and so on, until the trials change from accepted to failing or the reverse. It then
    bisects the interval, in logarithms, until its ends are within a factor of 1.5. A step
    is at most three times as long as the last one, or a thousandth of the point if that
    is longer.

    For a step with 99 % of the undamped step's predicted decrease $0.3\,\rho$ suffices:
    such steps lie in long valleys, where predictions are too optimistic.

    If steps have become slow, because the loss falls only along a narrow curved valley,
    the search leaves the valley. A last trial with a much smaller damping is a *detour*:
    its loss may be far above, since the curvature of the model throws it off in the
    directions of large eigenvalues. But there the next linearisation is precise, and one
    step usually leads back into the valley, further down. If it does not, the detour is
    forgotten. Each detour adapts how bold the next one is.

    **Arguments:**

    - `ratio`: $\rho$, between 0 and 1.
    - `num_trials`: the most dampings tried at a linearisation, once one is accepted.
    - `initial`: the first $\lambda$, divided by the curvature along the gradient.
    - `detours`: whether to try detours.

    ??? cite "Reference"

        J. Webb, S. Jerad and C. Cartis, arXiv:2607.02194 (2026): the rule, for sketched
        problems, with a ratio of 0.075.
    """

    ratio: ScalarLike = eqx.field(default=0.25, converter=as_scalar)
    num_trials: int = eqx.field(default=10, static=True, kw_only=True)  # type: ignore
    initial: ScalarLike = eqx.field(default=1e-3, converter=as_scalar, kw_only=True)
    detours: bool = eqx.field(default=True, static=True, kw_only=True)  # type: ignore

    def __check_init__(self):
        check_fraction("ratio", self.ratio)
        check_count("num_trials", self.num_trials)
        check_flag("detours", self.detours)
        check_finite_positive("initial", self.initial)

    def init(self, dtype: jnp.dtype) -> _Edge:
        zero, one = jnp.zeros((), dtype), jnp.ones((), dtype)
        none, no = jnp.zeros((), int), jnp.array(False)
        return _Edge(
            damping=-one,
            low=zero,
            high=jnp.inf * one,
            move=_MOVE * one,
            number=none,
            length=-one,
            next_length=zero,
            next_damping=zero,
            real=no,
            gain=zero,
            boldness=_BOLD * one,
            leaves=no,
        )

    def accepts(self, state: _Edge, trial: Trial) -> Bool[Array, ""]:
        longest = _GROWTH * jnp.where(state.length < 0, trial.length, state.length)
        longest = jnp.maximum(longest, _SHORT * trial.size)
        ratio = jnp.asarray(self.ratio, trial.ratio.dtype)
        ratio *= jnp.where(trial.share > _ALL, _PART_OF_ALL, 1)
        accepted = (trial.ratio >= ratio) & (trial.length <= longest)
        if not self.detours:
            return accepted
        worth = 1 - trial.part < (1 - state.gain) ** _WORTH
        return jnp.where(state.leaves, worth, accepted)

    def is_detour(self, state: _Edge) -> Bool[Array, ""]:
        return state.leaves

    def after(self, state: _Edge, trial: Trial) -> _Edge:
        good = trial.accepted
        low = jnp.where(good, state.low, trial.damping)
        high = jnp.where(good, trial.damping, state.high)
        grows = trial.length * _UNDAMPED > state.next_length
        saturated = jnp.isfinite(state.high) & ~grows
        # If all decreases are rounding, take the first step, which is short.
        taken = good & (~trial.noise | jnp.isinf(state.high))
        # Keep a damping that has no effect: far below it, rounding would decide.
        stays = trial.noise | saturated | (trial.share >= _UNDAMPED)
        factor = jnp.where(stays, 1, _nielsen_factor(trial.ratio))
        next_length = jnp.where(taken, trial.length, state.next_length)
        next_damping = jnp.where(taken, trial.damping * factor, state.next_damping)
        gain = jnp.where(taken, trial.ratio * trial.part, state.gain)
        number = state.number + 1
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
        on = _Edge(
            damping=damping,
            low=low,
            high=high,
            move=move,
            number=number,
            length=length,
            next_length=next_length,
            next_damping=next_damping,
            real=real,
            gain=gain,
            boldness=state.boldness,
            leaves=jnp.array(False),
        )
        # Once the search is over, the next linearisation begins another.
        over = dataclasses.replace(
            self.init(low.dtype),
            damping=next_damping,
            length=next_length,
            next_damping=next_damping,
            boldness=state.boldness,
        )
        if not self.detours:
            return _tree.where(found, over, on)
        return self._with_detours(state, trial, found, over, on)

    def _with_detours(
        self, state: _Edge, trial: Trial, found: Bool[Array, ""], over: _Edge, on: _Edge
    ) -> _Edge:
        """Return the state after a trial: `over` if the search has `found` the step here,
        else `on`, unless a detour begins or ends."""
        replace = dataclasses.replace
        back = trial.on_detour & found
        lost = trial.on_detour & jnp.isinf(on.high) & (on.number >= _MOST_ON_DETOUR)
        slow = found & ~trial.on_detour & (on.gain < _SLOW)
        leaves = slow & (state.boldness >= _TIMID)
        cases = [back, lost, slow & ~leaves]
        factor = jnp.select(cases, [_BOLDER, _LESS_BOLD, _RECOVERS], 1.0)
        boldness = jnp.clip(state.boldness * factor, 1, _BOLDEST)
        length = jnp.where(found, over.length, on.length)
        over = replace(over, length=length, boldness=boldness.astype(length.dtype))
        start = replace(on, damping=on.high / state.boldness, leaves=leaves)
        new = _tree.where(leaves, start, _tree.where(found | lost, over, on))
        after_start = replace(
            over,
            damping=state.next_damping,
            next_damping=state.next_damping,
            length=jnp.where(trial.accepted, trial.length, state.next_length),
            boldness=state.boldness,
        )
        return _tree.where(state.leaves, after_start, new)

    def goes_on(self, state: _Edge, trial: Trial) -> Bool[Array, ""]:
        return state.number > 0


# The next radius, divided by the length of a poor step and of a failing one.
_POORER, _FAILED = 0.5, 0.25


class _Region(eqx.Module):
    radius: Float[Array, ""]  # negative before the first trial
    damping: Float[Array, ""]  # of the last trial


class TrustRegion(AbstractDamping[_Region]):
    r"""A trust region: the step is the best one with $\lVert D\delta\rVert \le \Delta$.
    The damping is found such that the step's length is the radius $\Delta$ within a
    tenth, unless the undamped step is shorter. The next radius is twice the length of a
    good step, half that of a poor step, or a quarter of a failing one.

    Each trial takes a few solutions of the subproblem. They are cheap if its spectrum is
    in memory, and expensive by conjugate gradients.

    **Arguments:**

    - `factor`: the first radius, divided by $\lVert Dy\rVert$ unless that is 0. MINPACK
        uses 100; with 1 all of NIST's fits are solved.

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
        dtype = state.radius.dtype
        factor = nan_unless(positive(self.factor), self.factor).astype(dtype)
        size = subproblem.length(y).astype(dtype)
        first = factor * jnp.where(size > 0, size, 1)
        radius = jnp.where(state.radius < 0, first, state.radius)
        return damping_for_length(subproblem, radius, state.damping)

    def after(self, state: _Region, trial: Trial) -> _Region:
        poor, good = trial.ratio < _POOR, trial.ratio >= _GOOD
        # The first radius is a guess: replace it by the length of the first step.
        fair = jnp.where(state.radius < 0, trial.length, state.radius)
        radius = jnp.select(
            [~trial.accepted, poor, good],
            [_FAILED * trial.length, _POORER * trial.length, 2 * trial.length],
            fair,
        )
        return _Region(radius, trial.damping)
