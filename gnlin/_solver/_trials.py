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
from .._subproblem import AbstractSubproblem, Answer, Early
from ..damping import AbstractDamping, Trial
from ._base import Evaluate, increased
from ._between_bounds import between_bounds
from ._corrections import corrected
from ._termination import rounding_of_loss, rounding_of_outputs


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
    most_corrections: int,
    again: Callable[[Linearisation, Scalar], PyTree[Array]],
    inverse: Callable[[Scalar], Float[Array, "p p"]] | None,
    problem: Quadratic | None,
    is_finite: Bool[Array, ""],
) -> TrialOutcome:
    """Try the dampings of a rule at one linearisation, with one factorisation.

    - `state`: the state of the rule.
    - `most_corrections`: how often a step may be corrected for the curvature of the
        model.
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
    point_size = subproblem.length(lin.point).astype(dtype)
    loss = objective.value(lin.outputs).astype(dtype)
    rounding = rounding_of_loss(loss, problem, lin.point)
    of_outputs = jnp.zeros((), dtype)
    if problem is not None:
        of_outputs = rounding_of_outputs(problem, lin.point)

    def attempt(last: TrialOutcome) -> TrialOutcome:
        damping = rule.damping(last.state, subproblem, lin.point).astype(dtype)
        damping = jnp.clip(damping, *sensible)
        held = subproblem
        if most_corrections > 0:
            held = subproblem.factorised(Early(damping))
        answer = held.solve(Early(damping))
        predicted = subproblem.predicted(answer, damping).astype(dtype)
        share = jnp.where(attainable > 0, predicted / attainable, 1)
        length = subproblem.length_of(answer).astype(dtype)
        step = _tree.cast_like(answer.step, lin.point)
        if lin.box is not None:
            step, predicted = between_bounds(
                objective,
                lin,
                step,
                lambda lin: again(lin, damping),
                None if inverse is None else functools.partial(inverse, damping),
            )
            predicted = predicted.astype(dtype)

        def solve(residual: PyTree[Array]) -> tuple[Answer, Scalar]:
            other = held.with_residual(residual)
            answer = other.solve(Early(damping))
            answer = eqx.tree_at(lambda a: a.passes, answer, answer.passes + other.passes)
            return answer, subproblem.length_of(answer)

        now = corrected(
            objective,
            lin,
            evaluate,
            step,
            length,
            predicted,
            (rounding, of_outputs),
            solve,
            most_corrections,
        )
        step, outputs, actual = now.step, now.outputs, now.actual
        y = lin.moved(step)
        # An approximate step may be uphill. Reject it by an infinite prediction.
        predicted = jnp.where(predicted < -rounding, jnp.inf, predicted)
        ratio = actual / jnp.where(predicted > 0, predicted, 1)
        noise = (predicted <= rounding) & (jnp.abs(actual) <= rounding)
        trial = Trial(
            damping,
            jnp.where(noise, 1, jnp.minimum(ratio, 1)),
            _tree.all_finite((y, outputs)) & now.trusted,
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
                last.num_inner_steps, answer.num_inner_steps, now.num_inner_steps
            ),
            passes=(last.passes + answer.passes + now.passes).traced(),
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
