"""Try several dampings at one linearisation."""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar

from .._common import _tree
from .._common._checks import forwards_only
from .._common._passes import Passes
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from .._linearisation._quadratic import Quadratic
from .._subproblem import AbstractSubproblem, Early
from ..damping import AbstractDamping, Trial
from ._between_bounds import between_bounds
from ._state import Evaluate, increased
from ._termination import rounding_of_loss, rounding_of_outputs


# A step is too long for the linearisation if its second-order correction is longer than
# this part of it (Transtrum and Sethna, 2012, section 4).
_MAX_ACCELERATION = 0.75
# The part of the step over which its second derivative is measured (ibid.), and the least
# second derivative that is not rounding, as a multiple of the outputs' rounding divided
# by the square of that part.
_PART, _ROUNDINGS = 0.1, 20
# After this many trials the damping has outgrown all floating-point numbers.
_MAX_TRIALS = 60


class TrialOutcome(eqx.Module):
    """The result of the trials: the last accepted step that lowers the loss by more than
    rounding, else the first accepted one, else the last one.

    - `num_tried`, `num_inner_steps`, `passes`: totals over all trials.
    """

    damping: Float[Array, ""]
    state: PyTree  # the rule's
    step: PyTree[Array]
    outputs: PyTree[Array]  # after the step
    found: Bool[Array, ""]
    goes_on: Bool[Array, ""]
    num_tried: Int[Array, ""]
    num_inner_steps: Float[Array, ""]
    passes: Passes


def try_dampings(
    objective: AbstractObjective,
    lin: Linearisation,
    evaluate: Evaluate,
    subproblem: AbstractSubproblem,
    rule: AbstractDamping,
    state: PyTree,
    acceleration: bool,
    again: Callable[[Linearisation, Scalar], PyTree[Array]],
    inverse: Callable[[Scalar], Float[Array, "p p"]] | None,
    problem: Quadratic | None,
    is_finite: Bool[Array, ""],
) -> TrialOutcome:
    """Try the dampings of a rule at one linearisation, with one factorisation.

    - `state`: the state of the rule.
    - `acceleration`: whether to add the second-order correction.
    - `again`: a function that solves another linearisation with a damping, for its step.
    - `inverse`: a function that returns the inverse of the damped curvature, for steps
        between bounds. Without it they solve the problem again.
    - `problem`: the linearised problem, if its Jacobian is in memory.
    - `is_finite`: whether the linearisation is finite. If not, nothing is tried.
    """
    dtype = _tree.dtype((lin.point, lin.outputs))
    eps = _tree.eps((lin.point, lin.outputs))
    attainable = subproblem.attainable_decrease().astype(dtype)
    largest = subproblem.largest_curvature().astype(dtype)
    # A smaller damping has no effect, and a larger one allows no step.
    unit = jnp.where(jnp.isfinite(largest) & (largest > 0), largest, 1)
    least = subproblem.least_damping().astype(dtype)
    sensible = jnp.where(jnp.isfinite(least), least, 0), unit / eps**2
    root = objective.root(lin.outputs)
    point_size = subproblem.length(lin.point).astype(dtype)
    loss = objective.value(lin.outputs).astype(dtype)
    rounding = rounding_of_loss(loss, problem, lin.point)
    least_second = jnp.zeros((), dtype)
    if problem is not None:
        least_second = _ROUNDINGS / _PART**2 * rounding_of_outputs(problem, lin.point)

    def attempt(last: TrialOutcome) -> TrialOutcome:
        damping = rule.damping(last.state, subproblem, lin.point).astype(dtype)
        damping = jnp.clip(damping, *sensible)
        held = subproblem.factorised(Early(damping)) if acceleration else subproblem
        answer = held.solve(Early(damping))
        predicted = subproblem.predicted(answer, damping).astype(dtype)
        share = jnp.where(attainable > 0, predicted / attainable, 1)
        length = subproblem.length_of(answer).astype(dtype)
        step, gentle, taken = _tree.cast_like(answer.step, lin.point), True, [answer]
        if lin.box is not None:
            step, predicted = between_bounds(
                objective,
                lin,
                step,
                lambda lin: again(lin, damping),
                None if inverse is None else functools.partial(inverse, damping),
            )
            predicted = predicted.astype(dtype)
        if acceleration:
            bend = _accelerated(root, evaluate, lin, held, damping, step, least_second)
            gentle = (
                subproblem.length_of(bend).astype(dtype) <= _MAX_ACCELERATION * length
            )
            bent = bend.step
            if lin.box is not None:
                bent = lin.box.within(lin.moved(step), bent)
            step, taken = _tree.axpy(0.5, bent, step), [answer, bend]

        y = lin.moved(step)
        outputs = evaluate(y)
        actual = objective.decrease(lin.outputs, outputs).astype(dtype)
        # An approximate step may be uphill. Reject it by an infinite prediction.
        predicted = jnp.where(predicted < -rounding, jnp.inf, predicted)
        ratio = actual / jnp.where(predicted > 0, predicted, 1)
        noise = (predicted <= rounding) & (jnp.abs(actual) <= rounding)
        trial = Trial(
            damping,
            jnp.where(noise, 1, jnp.minimum(ratio, 1)),
            _tree.all_finite((y, outputs)) & gentle,
            length,
            point_size,
            share.astype(dtype),
            noise,
        )
        accepted = trial.accepted & rule.accepts(last.state, trial)
        trial = eqx.tree_at(lambda t: t.accepted, trial, accepted)
        state = rule.after(last.state, trial)
        takes = (accepted & ~noise) | ~last.found
        return TrialOutcome(
            damping=jnp.where(takes, damping, last.damping),
            state=state,
            step=_tree.where(takes, step, last.step),
            outputs=_tree.where(takes, outputs, last.outputs),
            found=last.found | accepted,
            # This also stops at a damping of NaN.
            goes_on=rule.goes_on(state, trial) & (damping < sensible[1]),
            num_tried=last.num_tried + 1,
            num_inner_steps=increased(
                last.num_inner_steps, *(a.num_inner_steps for a in taken)
            ),
            passes=sum((a.passes for a in taken), last.passes).traced(),
        )

    zero = jnp.zeros((), dtype)
    start = TrialOutcome(
        damping=zero,
        state=rule.begin(state, subproblem),
        step=_tree.zeros_like(lin.point),
        outputs=lin.outputs,
        found=jnp.array(False),
        goes_on=is_finite & (subproblem.gradient_norm > 0),
        num_tried=jnp.array(0),
        num_inner_steps=jnp.zeros((), jnp.result_type(float)),
        passes=Passes().traced(),
    )
    goes_on = lambda tried: tried.goes_on & (tried.num_tried < _MAX_TRIALS)
    return forwards_only(jax.lax.while_loop(goes_on, attempt, start))


def _accelerated(root, evaluate, lin, subproblem, damping, velocity, least):
    """Return the second-order correction to a step: the damped least-squares solution for
    the whitened second derivative of the outputs along the step. The derivative is
    computed as a difference of outputs. There is no correction if it is not finite, as
    at the edge of the function's domain, or not above `least`, its rounding."""
    ahead, pushed = evaluate(lin.moved(velocity, _PART)), lin.jvp(velocity)

    def second(ahead, here, pushed):
        change = (ahead - here.astype(ahead.dtype)) / _PART
        return 2 / _PART * (change - pushed.astype(ahead.dtype))

    whitened = root(jax.tree.map(second, ahead, lin.outputs, pushed))
    size = _tree.norm(whitened)
    known = jnp.isfinite(size) & (size > least.astype(size.dtype))
    whitened = jax.tree.map(lambda x: jnp.where(known, x, 0), whitened)
    bent = subproblem.with_residual(whitened)
    answer = bent.solve(Early(damping))
    jvps = lin.jacobian.a_product().jvps
    passes = answer.passes + bent.passes + Passes(jvps=jvps)
    return eqx.tree_at(lambda a: a.passes, answer, passes)
