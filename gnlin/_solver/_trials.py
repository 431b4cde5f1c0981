"""Try several dampings at one linearisation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar

from .._common import _tree
from .._common._checks import forwards_only, nan_unless
from .._common._passes import Passes
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from .._subproblem import AbstractSubproblem, Answer, InexactTikhonov
from ..damping import AbstractDamping, Trial
from ._between_bounds import between_bounds
from ._scaling import Measured
from ._state import carried, Detour, Evaluate
from ._termination import rounding_of_loss, rounding_of_outputs


# A step is too long for the linearisation if its second-order correction is longer than
# this part of it (Transtrum and Sethna, 2012, section 4).
_MAX_ACCELERATION = 0.75
# The part of the step over which its second derivative is measured (ibid.), and the least
# second derivative that is not rounding, as a multiple of the outputs' rounding divided
# by the square of that part.
_PART, _ROUNDINGS = 0.1, 20
# On a detour the loss may rise by at most its value divided by eps and by this number.
# Beyond that, the rounding of predictions exceeds a hundredth of the loss.
_FAR = 100
# After this many trials the damping has outgrown all floating-point numbers.
_MAX_TRIALS = 60


class TrialOutcome(eqx.Module):
    """The result of the trials: the last accepted step that lowers the loss by more than
    rounding, else the first accepted one, else the last one.

    - `leaves`, `detour`: whether a detour begins, and its step, which is `None` for a
        rule without detours.
    - `num_tried`, `num_inner_steps`, `passes`: totals over all trials.
    """

    damping: Float[Array, ""]
    state: PyTree  # the rule's
    step: PyTree[Array]
    outputs: PyTree[Array]  # after the step
    found: Bool[Array, ""]
    goes_on: Bool[Array, ""]
    leaves: Bool[Array, ""]
    detour: PyTree[Array] | None
    num_tried: Int[Array, ""]
    num_inner_steps: Float[Array, ""]
    passes: Passes


class Proposal(eqx.Module):
    """A step to try, and what the linearisation predicts of it.

    - `predicted`: the predicted decrease of the objective.
    - `length`: the step's length in the damped variables, before it was bent or cut.
    - `gentle`: whether the second-order correction is short enough.
    """

    damping: Float[Array, ""]
    step: PyTree[Array]
    predicted: Float[Array, ""]
    length: Float[Array, ""]
    gentle: Bool[Array, ""]
    num_inner_steps: Float[Array, ""]
    passes: Passes


@dataclasses.dataclass
class Trials:
    """The dampings of a rule at one linearisation, tried with one factorisation.

    - `lin`: the linearisation. Its parameters may be in one array.
    - `as_tree`: a function that unravels them.
    - `subproblem`: the linearised problem, ready to be solved for any damping.
    - `on_face`: a function that solves the problem of a linearisation on a face of the
        box with a damping, and returns the step.
    - `inverse`: a function that inverts the curvature with a damping, if that is cheap.
    - `evaluate`: a function that returns the outputs at another point.
    - `memory`: the solver's memory, with the `state` of the rule.
    - `acceleration`: whether to add the second-order correction.

    All trials share some numbers:

    - `attainable`: the predicted decrease of the undamped step.
    - `least_damping`, `largest_damping`: the limits of the dampings.
    - `point_size`: the length of the point in the damped variables.
    - `rounding`: the rounding of the loss.
    - `least_second`: the rounding of the second derivative along a step.
    - `loss`: the loss at the linearisation.
    - `before`: the loss where the detour left, or `loss` if there is no detour.
    """

    objective: AbstractObjective
    lin: Linearisation
    as_tree: Callable[[PyTree[Array]], PyTree[Array]]
    measured: Measured
    subproblem: AbstractSubproblem
    on_face: Callable[[Scalar, Linearisation], PyTree[Array]]
    inverse: Callable[[Scalar], Float[Array, "p p"]] | None
    evaluate: Evaluate
    rule: AbstractDamping
    memory: Any
    acceleration: bool

    def __post_init__(self):
        lin, subproblem = self.lin, self.subproblem
        problem = self.measured.in_memory
        self.dtype = dtype = _tree.dtype((lin.point, lin.outputs))
        self.eps = _tree.eps((lin.point, lin.outputs))
        largest = subproblem.largest_curvature().astype(dtype)
        # A smaller damping has no effect, and a larger one allows no step.
        unit = jnp.where(jnp.isfinite(largest) & (largest > 0), largest, 1)
        size = subproblem.length(lin.point).astype(dtype)
        least = subproblem.least_damping(size).astype(dtype)
        least = jnp.where(jnp.isfinite(least), least, 0)
        if not self.objective.is_quadratic:
            # Where a loss is nearly linear it has a gradient, but hardly any curvature.
            # Dampings are then compared with the one that makes the step as long as the
            # point.
            slope = subproblem.gradient_norm.astype(dtype) / jnp.where(size > 0, size, 1)
            slope = jnp.where(jnp.isfinite(slope), slope, 0)
            least = jnp.fmax(least, self.eps**2 * slope)
            unit = jnp.fmax(unit, slope)
        loss = self.objective.value(lin.outputs).astype(dtype)
        before = loss
        if self.detour is not None:
            before = self.objective.value(self.detour.outputs).astype(dtype)
            before = jnp.where(self.detour.is_on, before, loss)
        least_second = jnp.zeros((), dtype)
        if problem is not None and self.acceleration:
            outputs = rounding_of_outputs(problem, lin.point)
            least_second = _ROUNDINGS / _PART**2 * outputs
        self.attainable = subproblem.attainable_decrease(least).astype(dtype)
        self.least_damping, self.largest_damping = least, unit / self.eps**2
        self.point_size, self.least_second = size, least_second
        self.rounding = rounding_of_loss(before, problem, lin.point)
        self.loss, self.before = loss, before

    @property
    def detour(self) -> Detour | None:
        """Where a detour left, if the linearisation may be on one."""
        return self.memory.detour if self.rule.detours else None

    @property
    def is_finite(self) -> Bool[Array, ""]:
        """Whether the linearisation is finite. If not, nothing is tried."""
        return jnp.isfinite(self.subproblem.gradient_norm) & jnp.isfinite(self.loss)

    def begun(self) -> TrialOutcome:
        """Return the outcome before the first trial."""
        lin, subproblem = self.lin, self.subproblem
        zero, nowhere = jnp.zeros((), self.dtype), _tree.zeros_like(lin.point)
        return TrialOutcome(
            damping=zero,
            state=self.rule.begin(self.memory.state, subproblem),
            step=nowhere,
            outputs=lin.outputs,
            leaves=jnp.array(False),
            detour=None if self.detour is None else nowhere,
            found=jnp.array(False),
            goes_on=self.is_finite & (subproblem.gradient_norm > 0),
            num_tried=jnp.array(0),
            num_inner_steps=jnp.zeros((), jnp.result_type(float)),
            passes=Passes().traced(),
        )

    def proposed(self, last: TrialOutcome) -> Proposal:
        """Return the next step to try."""
        lin, subproblem, dtype = self.lin, self.subproblem, self.dtype
        damping = self.rule.damping(last.state, subproblem, lin.point)
        damping = jnp.asarray(damping, dtype)
        damping = nan_unless(damping >= 0, damping)
        damping = jnp.clip(damping, self.least_damping, self.largest_damping)
        filter = InexactTikhonov(damping)
        held = subproblem.factorised(filter) if self.acceleration else subproblem
        answer = held.solve(filter)
        predicted = subproblem.predicted(answer, damping).astype(dtype)
        length = subproblem.length_of(answer).astype(dtype)
        step, gentle, taken = _tree.cast_like(answer.step, lin.point), True, [answer]
        if lin.box is not None:
            again, inverse = functools.partial(self.on_face, damping), self.inverse
            inverse = None if inverse is None else functools.partial(inverse, damping)
            decrease = self.measured.problem.decrease
            step, predicted = between_bounds(decrease, lin, step, again, inverse)
            predicted = predicted.astype(dtype)
        part = jnp.asarray(self.rule.part(last.state), dtype)
        # This is exact for the undamped step. For a damped one, or one that is cut at a
        # bound, it is too large, but by less than a factor of two.
        step, length = _tree.scale(part, step), part * length
        predicted *= part * (2 - part)
        if self.acceleration:
            bend = self._bend(held, damping, step)
            gentle = (
                subproblem.length_of(bend).astype(dtype) <= _MAX_ACCELERATION * length
            )
            # An undamped step cannot have a shorter correction, so it goes without one.
            undamped = damping <= self.least_damping
            bent = _tree.where(gentle | ~undamped, bend.step, _tree.zeros_like(bend.step))
            gentle |= undamped
            if lin.box is not None:
                bent = lin.box.within(lin.moved(step), bent)
            step, taken = _tree.axpy(0.5, bent, step), [answer, bend]
        num_inner_steps = sum(jnp.asarray(a.num_inner_steps, float) for a in taken)
        return Proposal(
            damping,
            step,
            predicted,
            length,
            jnp.asarray(gentle),
            jnp.asarray(num_inner_steps),
            sum((a.passes for a in taken), Passes()).traced(),
        )

    def _bend(
        self, subproblem: AbstractSubproblem, damping: Scalar, velocity: PyTree[Array]
    ) -> Answer:
        """Return the second-order correction to a step: the damped least-squares solution
        for the whitened second derivative of the outputs along the step. The derivative
        is computed as a difference of outputs. There is no correction if it is not
        finite, as at the edge of the function's domain, or only its rounding."""
        lin, least = self.lin, self.least_second
        ahead, pushed = self.evaluate(lin.moved(velocity, _PART)), lin.jvp(velocity)

        def second(ahead, here, pushed):
            change = (ahead - here.astype(ahead.dtype)) / _PART
            return 2 / _PART * (change - pushed.astype(ahead.dtype))

        second_derivative = jax.tree.map(second, ahead, lin.outputs, pushed)
        whitened = self.objective.root(lin.outputs)(second_derivative)
        size = _tree.norm(whitened)
        known = jnp.isfinite(size) & (size > least.astype(size.dtype))
        whitened = jax.tree.map(lambda x: jnp.where(known, x, 0), whitened)
        bent = subproblem.with_residual(whitened)
        answer = bent.solve(InexactTikhonov(damping))
        jvps = lin.jacobian.a_product().jvps
        passes = answer.passes + bent.passes + Passes(jvps=jvps)
        return eqx.tree_at(lambda a: a.passes, answer, passes)

    def judged(
        self, last: TrialOutcome, proposal: Proposal, outputs: PyTree[Array]
    ) -> tuple[TrialOutcome, Bool[Array, ""]]:
        """Return the outcome after a trial with these outputs, and whether its step is
        the one to take so far."""
        lin, rule = self.lin, self.rule
        damping, step, predicted = proposal.damping, proposal.step, proposal.predicted
        fallen, rounding = self.before - self.loss, self.rounding
        attainable, predicted = self.attainable + fallen, predicted + fallen
        share = jnp.where(attainable > 0, predicted / attainable, 1)
        before = jnp.where(self.before > 0, self.before, jnp.inf)
        part = predicted / jnp.minimum(attainable, before)
        actual = self.objective.decrease(lin.outputs, outputs).astype(self.dtype)
        if self.detour is not None:  # The sum of two decreases would cancel.
            loss = self.objective.value(outputs).astype(self.dtype)
            actual = jnp.where(self.detour.is_on, self.before - loss, actual)
        # An approximate step may be uphill. Reject it by an infinite prediction.
        predicted = jnp.where(predicted < -rounding, jnp.inf, predicted)
        ratio = actual / jnp.where(predicted > 0, predicted, 1)
        noise = (predicted <= rounding) & (jnp.abs(actual) <= rounding)
        trial = Trial(
            damping=damping,
            ratio=jnp.where(noise, 1, jnp.minimum(ratio, 1)),
            accepted=_tree.all_finite((lin.moved(step), outputs)) & proposal.gentle,
            length=proposal.length,
            size=self.point_size,
            share=share.astype(self.dtype),
            noise=noise,
            part=jnp.where(attainable > 0, part, 1).astype(self.dtype),
            on_detour=jnp.array(False) if self.detour is None else self.detour.is_on,
            in_roundings=jnp.where(rounding > 0, predicted / rounding, jnp.inf),
            of_loss=jnp.where(self.before > 0, predicted / before, jnp.inf),
        )
        accepted = trial.accepted & rule.accepts(last.state, trial)
        trial = eqx.tree_at(lambda t: t.accepted, trial, accepted)
        what = f"The state that `after` of {type(rule).__name__} returns"
        state = carried(what, rule.after(last.state, trial), "`init`", last.state)
        takes = (accepted & ~noise) | ~last.found
        leaves, detour = last.leaves, last.detour
        if self.detour is not None:
            is_detour = rule.is_detour(last.state)
            resolved = -actual * _FAR * self.eps <= self.loss
            leaves, takes = is_detour & accepted & resolved, takes & ~is_detour
            detour = _tree.where(leaves, step, last.detour)
        # This also stops at a damping of NaN.
        goes_on = rule.goes_on(state, trial) & (damping < self.largest_damping)
        num_tried = last.num_tried + 1
        outcome = TrialOutcome(
            damping=jnp.where(takes, damping, last.damping),
            state=state,
            step=_tree.where(takes, step, last.step),
            outputs=_tree.where(takes, outputs, last.outputs),
            found=last.found | accepted,
            goes_on=goes_on & (num_tried < _MAX_TRIALS),
            leaves=leaves,
            detour=detour,
            num_tried=num_tried,
            num_inner_steps=last.num_inner_steps + proposal.num_inner_steps,
            passes=(last.passes + proposal.passes).traced(),
        )
        return outcome, takes


def try_dampings(trials: Trials) -> TrialOutcome:
    """Try the dampings of a rule at one linearisation."""

    def attempt(last: TrialOutcome) -> TrialOutcome:
        proposal = trials.proposed(last)
        outputs = trials.evaluate(trials.lin.moved(proposal.step))
        outcome, _ = trials.judged(last, proposal, outputs)
        return outcome

    goes_on = lambda tried: tried.goes_on
    return forwards_only(jax.lax.while_loop(goes_on, attempt, trials.begun()))
