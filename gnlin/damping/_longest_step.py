"""The longest step that keeps a part of its predicted decrease, and detours."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, ScalarLike

from .._common import _tree
from .._common._checks import (
    as_scalar,
    check_count,
    check_finite_positive,
    check_flag,
    check_fraction,
    is_zero,
    unless_zero,
)
from .._subproblem import AbstractSubproblem
from ._base import AbstractFromFirst, Kept, Trial
from ._nielsen import nielsen_factor


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
# The first damping, after the undamped step has been halved this often in a run. Runs of
# six reactors take up to 21 halvings.
_FIRST, _MOST_HALVINGS = 1e-3, 24
# The longest part of the undamped step, as a multiple of the point. With three, a fit of
# three points that no exponential meets ends at a straight line.
_FARTHEST = 1.5
# The longest step, as a multiple of the last one or, if that is longer, as a part of the
# point. Without a limit NIST's BoxBOD ends on a plateau.
_GROWTH, _SHORT = 3.0, 1e-3
# The next step is shortened if this one has the first share of the undamped step's
# predicted decrease, which is at most the second part of the loss, and is then no shorter
# than the third part. With 1e-2, Lanczos1 of NIST's fits takes two steps more, and
# without the second condition five.
_NEARLY_ALL, _LITTLE, _SHORTEST = 0.99, 1e-3, 0.25
# A detour is tried if the step has less than this part of the largest possible decrease,
# and if the detour's own prediction leaves less of it than this number of such steps
# would. On eleven fits of networks the loss after 80 steps is lower by 2.2 decades in the
# geometric mean than without detours, and by 1.9 with a part of 0.3. Two to six steps
# make no difference.
_SLOW, _WORTH = 0.6, 3
# The damping of a detour is divided by its boldness, which begins at the first number. It
# is multiplied by the next three after a detour that came back, after one that was lost,
# and after a slow step without one. Below the last number no detour is tried. On a
# network for the heat equation it rises to thousands. A first number of 16 makes no
# difference.
_BOLD, _BOLDER, _LESS_BOLD, _RECOVERS, _TIMID = 4.0, 2.0, 0.25, 1.1, 2.0
_BOLDEST = 1e8
# A detour is lost after this number of failing trials, in which the damping grows to two
# thousand times the first one. Without such a limit the damping of the run itself would
# be lost, too.
_MOST_ON_DETOUR = 4


class _Edge(Kept):
    low: Float[Array, ""]  # largest failing damping at this linearisation, or 0
    high: Float[Array, ""]  # smallest accepted damping at this linearisation, or infinity
    move: Float[Array, ""]  # factor to the next damping while `low` or `high` is missing
    number: Int[Array, ""]  # trials at this linearisation
    length: Float[Array, ""]  # of the last step taken; negative before the first trial
    next_length: Float[Array, ""]  # of the step to take here, at first `length`
    next_damping: Float[Array, ""]  # where the search begins at the next linearisation
    real: Bool[Array, ""]  # whether some step lowers the loss by more than rounding
    gain: Float[Array, ""]  # part of the largest possible decrease that was taken
    boldness: Float[Array, ""]  # factor between the damping and that of a detour
    leaves: Bool[Array, ""]  # whether the next trial is the start of a detour
    is_over: Bool[Array, ""]  # whether the search at this linearisation is
    part: Float[Array, ""]  # of the step, to try next
    next_part: Float[Array, ""]  # of the first step at the next linearisation
    halvings: Int[Array, ""]  # of the undamped step, in the whole run


class LongestStep(AbstractFromFirst):
    r"""The longest reliable step: the smallest damping at which the loss still falls by
    $\rho$ times the predicted decrease. It is searched for at each linearisation.

    All trials share one factorisation; each costs a product and an evaluation. The search
    begins at the damping of Nielsen's rule, and moves away from it by factors of 3, 9, 81
    and so on, until the trials change from accepted to failing or the reverse. It then
    bisects the interval, in logarithms, until its ends are within a factor of 1.5. A step
    is at most three times as long as the last one, or a thousandth of the point if that
    is longer. After a longer step the damping grows by about the factor by which the step
    was too long. A step of at least two thirds of the longest length ends the
    search.

    For a step with 99 % of the undamped step's predicted decrease, and for a part of that
    step, $0.3\,\rho$ suffices: such steps lie in long valleys, where predictions are too
    optimistic.

    At a minimum with large residuals the loss may be more curved than the linearised
    problem, so that undamped steps go past it, each to the other side. If one falls short
    of its prediction for that reason, the next one is shortened accordingly.

    If steps have become slow, because the loss falls only along a narrow curved valley,
    the search leaves the valley. A last trial with a much smaller damping is a *detour*:
    its loss may be far above, since the curvature of the model throws it off in the
    directions of large eigenvalues. But there the next linearisation is precise, and one
    step usually leads back into the valley, further down. If it does not, the detour is
    forgotten. Each detour adapts how bold the next one is.

    **Arguments:**

    - `ratio`: $\rho$, between 0 and 1.
    - `num_trials`: the most dampings tried at a linearisation, once one is accepted.
    - `initial`: the first $\lambda$, divided by the curvature along the gradient. With 0,
        which may not be traced, a run tries the undamped step, half of it, a quarter and
        so on, at most 1.5 times as long as the point or three times as long as the last
        step. After 24 halvings in all it goes on with 0.001.
    - `detours`: whether to try detours.

    ??? cite "References"

        J. Webb, S. Jerad and C. Cartis, arXiv:2607.02194 (2026): the rule, for sketched
        problems, with a ratio of 0.075.

        R. M. Chamberlain, M. J. D. Powell, C. Lemarechal and H. C. Pedersen, *The
        watchdog technique for forcing convergence in algorithms for constrained
        optimization*, Math. Programming Studies 16 (1982): a step may raise the loss if
        the next one makes up for it.
    """

    ratio: ScalarLike = eqx.field(default=0.25, converter=as_scalar)
    num_trials: int = eqx.field(default=10, static=True, kw_only=True)  # type: ignore
    initial: ScalarLike = eqx.field(default=_FIRST, converter=unless_zero, kw_only=True)
    detours: bool = eqx.field(default=True, static=True, kw_only=True)  # type: ignore

    def __check_init__(self):
        check_fraction("ratio", self.ratio)
        check_count("num_trials", self.num_trials)
        check_flag("detours", self.detours)
        if not is_zero(self.initial):
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
            next_length=-one,
            next_damping=-one,
            real=no,
            gain=zero,
            boldness=_BOLD * one,
            leaves=no,
            is_over=no,
            part=one,
            next_part=one,
            halvings=none,
        )

    def begin(self, state: _Edge, subproblem: AbstractSubproblem) -> Kept:
        another = dataclasses.replace(
            self.init(state.length.dtype),
            damping=state.next_damping,
            length=state.next_length,
            next_length=state.next_length,
            next_damping=state.next_damping,
            boldness=state.boldness,
            part=state.next_part,
            next_part=state.next_part,
            halvings=state.halvings,
        )
        if not is_zero(self.initial):
            return super().begin(another, subproblem)
        begun = dataclasses.replace(self, initial=_FIRST).begin(state, subproblem)
        damping = jnp.where(state.halvings < _MOST_HALVINGS, 0, begun.damping)
        return dataclasses.replace(begun, damping=damping, next_damping=begun.damping)

    def part(self, state: _Edge) -> ScalarLike:
        return state.part

    def _excess(self, state: _Edge, trial: Trial) -> Float[Array, ""]:
        """Return the length of a step over the largest length."""
        longest = _GROWTH * jnp.where(state.length < 0, trial.length, state.length)
        longest = jnp.maximum(longest, _SHORT * trial.size)
        return trial.length / jnp.where(longest == 0, 1, longest)

    def accepts(self, state: _Edge, trial: Trial) -> Bool[Array, ""]:
        ratio = jnp.asarray(self.ratio, trial.ratio.dtype)
        fits, is_lenient = self._excess(state, trial) <= 1, trial.share > _ALL
        if is_zero(self.initial):
            is_undamped = state.damping == 0
            longest = jnp.maximum(_FARTHEST * trial.size, _GROWTH * state.length)
            near = (trial.length <= longest) | (trial.size == 0) & (state.length < 0)
            near &= ~trial.noise | (state.part == 1)
            fits = jnp.where(is_undamped, near, fits)
            is_lenient |= is_undamped
        accepted = fits & (trial.ratio >= jnp.where(is_lenient, _PART_OF_ALL, 1) * ratio)
        if not self.detours:
            return accepted
        worth = 1 - trial.part < (1 - state.gain) ** _WORTH
        return jnp.where(state.leaves, worth, accepted)

    def is_detour(self, state: _Edge) -> Bool[Array, ""]:
        return state.leaves

    def after(self, state: _Edge, trial: Trial) -> _Edge:
        good, excess = trial.accepted, self._excess(state, trial)
        low = jnp.where(good, state.low, trial.damping)
        high = jnp.where(good, trial.damping, state.high)
        grows = trial.length * _UNDAMPED > state.next_length
        saturated = jnp.isfinite(state.high) & ~grows
        # If all decreases are rounding, take the first step, which is short.
        taken = good & (~trial.noise | jnp.isinf(state.high))
        # Keep a damping that has no effect: far below it, rounding would decide.
        stays = trial.noise | saturated | (trial.share >= _UNDAMPED)
        factor = jnp.where(stays, 1, nielsen_factor(trial.ratio))
        next_length = jnp.where(taken, trial.length, state.next_length)
        next_damping = jnp.where(taken, trial.damping * factor, state.next_damping)
        gain = jnp.where(taken, trial.ratio * trial.part, state.gain)
        next_part = jnp.where(taken, self._next_part(state, trial), state.next_part)
        number = state.number + 1
        real = jnp.isfinite(high) & (state.real | taken & ~trial.noise)
        most = jnp.where(real, self.num_trials, _LONG_WAY * self.num_trials)
        spent = (number >= most) | (high <= _RESOLUTION * low)
        spent |= good & ((trial.share >= _UNDAMPED) | saturated | (state.part < 1))
        spent |= good & (excess * _RESOLUTION >= 1)  # nearly as long as it may be
        if self.num_trials == 1:  # Trials are expensive.
            # A quadratic falls at most m times as far if the damping is divided by m. If
            # that is rounding, too, the second trial would change nothing.
            spent |= good & (trial.in_roundings * state.move <= 1)
        found = jnp.isfinite(high) & spent
        between = (low > 0) & jnp.isfinite(high)
        # At large dampings the length is proportional to 1 / damping. The step is then
        # nearly the longest, and ends the search: NIST's fits take a fifth fewer trials.
        shorter = jnp.minimum(excess * _RESOLUTION**0.5, _LARGEST_MOVE)
        shorter = jnp.fmax(state.move, shorter)
        move = jnp.where(good, 1 / state.move, shorter)
        damping = jnp.where(between, jnp.sqrt(low) * jnp.sqrt(high), trial.damping * move)
        move = jnp.minimum(state.move**2, _LARGEST_MOVE)
        move = jnp.where(number > 1, move, state.move)
        is_first = (state.length < 0) & jnp.isfinite(trial.length)
        length = jnp.where(is_first, trial.length, state.length)
        searched = dataclasses.replace(
            state,
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
            part=jnp.ones_like(state.part),
            next_part=next_part,
            is_over=found,
        )
        if self.detours:
            searched = self._with_detours(state, trial, searched)
        if is_zero(self.initial):
            undamped = _tree.where(good, self._taken(state, trial), self._halved(state))
            searched = _tree.where(state.damping == 0, undamped, searched)
        return searched

    def _next_part(self, state: _Edge, trial: Trial) -> Float[Array, ""]:
        """Return the part of the next step at which the loss is lowest, if the loss has
        the same curvature along the two steps."""
        part = state.part
        # The linearised problem predicts part * (2 - part) of the largest decrease. With
        # a curvature that is `curvature` times as large, the loss falls by
        # part * (2 - curvature * part) of it.
        curvature = (2 - trial.ratio * (2 - part)) / part
        best = jnp.clip(1 / curvature, _SHORTEST, 1)
        is_undamped = trial.share >= _NEARLY_ALL * part * (2 - part)
        is_at_the_end = (trial.of_loss < _LITTLE) & (trial.length < state.length)
        return jnp.where(is_undamped & is_at_the_end, best, 1)

    def _taken(self, state: _Edge, trial: Trial) -> _Edge:
        """Return the state after a part of the undamped step that is taken."""
        return dataclasses.replace(
            state,
            next_length=trial.length,
            next_damping=-jnp.ones_like(state.next_damping),
            is_over=jnp.array(True),
        )

    def _halved(self, state: _Edge) -> _Edge:
        """Return the state after a part of the undamped step that fails."""
        halvings = state.halvings + 1
        goes_on = halvings < _MOST_HALVINGS
        return dataclasses.replace(
            state,
            damping=jnp.where(goes_on, 0, state.next_damping),
            part=jnp.where(goes_on, 0.5 * state.part, 1),
            halvings=halvings,
        )

    def _with_detours(self, state: _Edge, trial: Trial, searched: _Edge) -> _Edge:
        """Return the state after a trial, `searched` if no detour begins or ends."""
        replace, found = dataclasses.replace, searched.is_over
        back = trial.on_detour & found
        lost = trial.on_detour & jnp.isinf(searched.high)
        lost &= searched.number >= _MOST_ON_DETOUR
        slow = found & ~trial.on_detour & (searched.gain < _SLOW)
        leaves = slow & (state.boldness >= _TIMID)
        cases = [back, lost, slow & ~leaves]
        factor = jnp.select(cases, [_BOLDER, _LESS_BOLD, _RECOVERS], 1.0)
        boldness = jnp.clip(state.boldness * factor, 1, _BOLDEST)
        searched = replace(
            searched,
            damping=jnp.where(leaves, searched.high / state.boldness, searched.damping),
            boldness=boldness.astype(state.boldness.dtype),
            leaves=leaves,
            is_over=(found | lost) & ~leaves,
        )
        # The start of a detour is the last trial. What the search has found stays.
        next_length = jnp.where(trial.accepted, trial.length, state.next_length)
        started = replace(state, next_length=next_length, is_over=jnp.array(True))
        return _tree.where(state.leaves, started, searched)

    def goes_on(self, state: _Edge, trial: Trial) -> Bool[Array, ""]:
        return ~state.is_over
