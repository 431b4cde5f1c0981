"""Dampings, tried at one linearisation until one lowers the loss."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar

from .. import _tree
from .._linearisation import Linearisation
from .._objective import AbstractObjective
from .._passes import Passes
from .._subproblem import AbstractSubproblem
from ..damping import AbstractDamping, Trial
from ..filters import Tikhonov
from ._base import Evaluate, increased
from ._between_bounds import between_bounds


# The loss must fall by this part of what the linearisation predicts (as in MINPACK).
_SUFFICIENT_DECREASE = 1e-4
# An acceleration longer than this part of the step says that the step is too long for
# the linearisation (Transtrum and Sethna, 2012, section 4).
_MAX_ACCELERATION = 0.75
# A change of the loss by less than eps to this power, relatively, says nothing: 3e-13 in
# double precision, 3e-6 in single.
_ROUNDING_POWER = 0.8
# A gradient of fewer roundings than this of |phi| |r| is none.
_GRADIENT_ROUNDINGS = 10
# A step that gains this part of what an undamped one would is not held by the damping.
_NOT_HELD = 0.1
# One that gains this part is next to the undamped one.
_UNDAMPED = 0.9
# Damping at this power of eps, relative to the largest curvature, damps nothing.
_LEAST_POWER = 2.5
# The outputs are known to so many roundings of what the parameters make of them.
_OUTPUT_ROUNDINGS = 10
# The damping then has grown by 2^1830, past all floating-point numbers.
_MAX_TRIALS = 60


class Tried(eqx.Module):
    """The damping tried last, from one factorisation, and what came of it.

    - `num_rejected`, `num_inner_steps`, `passes`: of all dampings, and the passes of the
        factorisation.
    """

    damping: Float[Array, ""]
    state: PyTree  # the rule's
    y: PyTree[Array]
    outputs: PyTree[Array]
    step: PyTree[Array]
    accepted: Bool[Array, ""]
    undamped: Bool[Array, ""]  # it gains nearly what a step without damping would
    converged: Bool[Array, ""]  # the least damped trial was within the tolerances
    idle: Bool[Array, ""]  # near the solution, and nothing to gain but rounding
    near: Bool[Array, ""]  # the gradient, or what there is to gain, is next to nothing
    stalled: Bool[Array, ""]  # and now what is left to gain is below one rounding
    gradient_norm: Float[Array, ""]
    num_rejected: Int[Array, ""]
    num_inner_steps: Float[Array, ""]
    passes: Passes

    @staticmethod
    def nothing(lin: Linearisation, state: PyTree) -> "Tried":
        """Before the first damping."""
        no, count = jnp.array(False), jnp.zeros((), jnp.result_type(float))
        zero = jnp.zeros((), _tree.dtype((lin.point, lin.outputs)))
        return Tried(
            damping=zero,
            state=state,
            y=lin.point,
            outputs=lin.outputs,
            step=_tree.zeros_like(lin.point),
            accepted=no,
            undamped=no,
            converged=no,
            idle=no,
            near=no,
            stalled=no,
            gradient_norm=zero,
            num_rejected=jnp.array(0),
            num_inner_steps=count,
            passes=Passes().traced(),
        )

    @property
    def arrived(self) -> Bool[Array, ""]:
        """There is nothing left, or nothing but rounding."""
        return self.converged | self.stalled | self.idle


def try_dampings(
    objective: AbstractObjective,
    lin: Linearisation,
    evaluate: Evaluate,
    subproblem: AbstractSubproblem,
    rule: AbstractDamping,
    state: PyTree,
    acceleration: bool,
    converged: Callable[..., Bool[Array, ""]],
    again: Callable[[Linearisation, Scalar], PyTree[Array]],
) -> Tried:
    """The dampings of a rule, from one linearisation and one factorisation, until one
    lowers the loss or there is nothing to be gained; none, where a number is not finite.

    - `state`: the rule's.
    - `acceleration`: whether to add the second-order correction.
    - `converged`: the solver's test of a step.
    - `again`: solves the problem at another linearisation with a damping: its step.
    """
    dtype = _tree.dtype((lin.point, lin.outputs))
    eps = _tree.eps((lin.point, lin.outputs))
    gradient = subproblem.gradient()
    attainable = subproblem.attainable_decrease().astype(dtype)
    known = jnp.isfinite(attainable)
    largest = subproblem.largest_curvature().astype(dtype)
    # Below the least it damps nothing, above the most no step is taken at all.
    unit = jnp.where(jnp.isfinite(largest) & (largest > 0), largest, 1)
    sensible = unit * eps**_LEAST_POWER, unit / eps**2
    loss = jnp.abs(objective.value(lin.outputs)).astype(dtype)
    residual = objective.residual(lin.outputs)
    root = objective.root(lin.outputs)
    flat = _slope(objective, lin, subproblem, gradient) <= eps ** (1 / 3)
    least = _least_loss(lin, root).astype(dtype)
    rounding = eps**_ROUNDING_POWER * loss + least
    arrived = loss <= least

    def attempt(last: Tried) -> Tried:
        damping = rule.damping(last.state, subproblem, lin.point).astype(dtype)
        damping = jnp.clip(damping, *sensible)
        held = subproblem.factorised(Tikhonov(damping)) if acceleration else subproblem
        answer = held.solve(Tikhonov(damping))
        predicted = subproblem.predicted(answer, damping)
        length = subproblem.length_of(answer).astype(dtype)
        step, gentle, bend = _tree.cast_like(answer.step, lin.point), True, None
        if lin.box is not None:
            step, predicted = between_bounds(
                objective, lin, step, lambda lin: again(lin, damping)
            )
            predicted = predicted.astype(dtype)
        if acceleration:
            bend = _accelerated(root, evaluate, lin, held, damping, step)
            longest = 0.5 * _MAX_ACCELERATION * length
            gentle = subproblem.length_of(bend).astype(dtype) <= longest
            bent = bend.step
            if lin.box is not None:
                bent = lin.box.within(lin.moved(step), bent)
            step = _tree.axpy(0.5, bent, step)

        y = lin.moved(step)
        outputs = evaluate(y)
        actual = objective.decrease(lin.outputs, outputs).astype(dtype)

        # The step of an approximation may be uphill: it promises more than it ever keeps.
        predicted = jnp.where(predicted < -rounding, jnp.inf, predicted)
        ratio = actual / jnp.where(predicted > 0, predicted, 1)
        # A step can be small because the damping is large: to count as one near the
        # solution it has to gain a good part of what an undamped one would.
        free = (attainable <= rounding) | (predicted >= _NOT_HELD * attainable)
        free = jnp.where(known, free, damping <= largest)
        noise = free & (predicted <= rounding) & (actual >= -rounding)
        accepted = (
            _tree.all_finite((y, outputs))
            & gentle
            & (noise | (ratio > _SUFFICIENT_DECREASE))
        )
        ratio = jnp.where(noise, 1, jnp.clip(ratio, 0, 1))
        first = last.num_rejected == 0
        within = free & converged(y, step, objective.residual(outputs), residual)
        promise = jnp.maximum(predicted, jnp.where(known, attainable, 0))
        little = jnp.where(known | free, promise <= eps**0.5 * loss, False)
        near = jnp.where(first, little | flat | arrived, last.near)
        # The residual's part in the range of phi is rounding: so is the gradient.
        vanished = first & (known | free)
        vanished &= promise <= (_GRADIENT_ROUNDINGS * eps) ** 2 * loss
        taken = (answer,) if bend is None else (answer, bend)
        trial = Trial(damping, ratio, accepted, length)
        return Tried(
            damping=damping,
            state=rule.after(last.state, trial),
            y=y,
            outputs=outputs,
            step=step,
            accepted=accepted,
            undamped=predicted >= _UNDAMPED * attainable,
            converged=jnp.where(first, within | vanished | arrived, last.converged),
            idle=near & accepted & (jnp.abs(actual) <= rounding),
            near=near,
            stalled=near & ~accepted & (predicted <= eps * loss),
            gradient_norm=last.gradient_norm,
            num_rejected=last.num_rejected + jnp.where(accepted, 0, 1),
            num_inner_steps=increased(
                last.num_inner_steps, *(a.num_inner_steps for a in taken)
            ),
            passes=sum((a.passes for a in taken), last.passes).traced(),
        )

    def goes_on(trial: Tried) -> Bool[Array, ""]:
        done = trial.accepted | trial.converged | trial.stalled
        spent = (trial.num_rejected >= _MAX_TRIALS) | (trial.damping >= sensible[1])
        return ~done & ~spent

    gradient_norm = subproblem.gradient_norm.astype(dtype)
    finite = jnp.isfinite(gradient_norm) & jnp.isfinite(loss)
    start = eqx.tree_at(
        lambda t: (t.gradient_norm, t.passes),
        Tried.nothing(lin, state),
        (gradient_norm, (subproblem.passes + Passes(jvps=1)).traced()),
    )
    return jax.lax.while_loop(lambda trial: goes_on(trial) & finite, attempt, start)


def _accelerated(root, evaluate, lin, subproblem, damping, velocity):
    """The second-order correction to a step v: the damped least-squares solution
    for the second directional derivative of the outputs along v, whitened."""

    def along(t):
        if lin.retraction is not None:
            ahead = lambda s: evaluate(lin.moved(velocity, s))
            return jax.jvp(ahead, (t,), (jnp.ones_like(t),))[1]
        y = _tree.axpy(t, velocity, lin.point)
        return jax.jvp(evaluate, (y,), (velocity,))[1]

    zero = jnp.zeros((), _tree.dtype(lin.point))
    _, second = jax.jvp(along, (zero,), (jnp.ones_like(zero),))
    bent = subproblem.with_residual(root(second))
    answer = bent.solve(Tikhonov(damping))
    passes = answer.passes + bent.passes + Passes(jvps=2)
    return eqx.tree_at(lambda a: a.passes, answer, passes)


def _slope(
    objective: AbstractObjective,
    lin: Linearisation,
    subproblem: AbstractSubproblem,
    gradient: PyTree[Array],
) -> Scalar:
    """How far the gradient is from zero, free of units. The smaller of two: the cosine
    between the residual and the range of phi (as MINPACK's gtol), and what a relative
    change of the parameters does to the loss (Dennis and Schnabel, 1983, section 7.2)."""
    dtype = _tree.dtype((lin.point, lin.outputs))
    loss = jnp.abs(objective.value(lin.outputs)).astype(dtype)
    # The residual's norm, of squared error; else the length that has as much loss.
    residual = jnp.sqrt(2 * loss)
    largest = jnp.sqrt(subproblem.largest_curvature()).astype(dtype)
    cosine = subproblem.scaled_gradient_norm().astype(dtype) / (largest * residual)
    gradient = _tree.joined(_tree.cast_like(gradient, lin.point))
    point = _tree.joined(lin.point)
    terms = jax.tree.map(lambda g, x: jnp.abs(g * x), gradient, point)
    sensitivity = _tree.total(terms, dtype)
    return jnp.minimum(cosine, sensitivity / loss)


def _least_loss(
    lin: Linearisation, root: Callable[[PyTree[Array]], PyTree[Array]]
) -> Scalar:
    """The squared error of a residual that is nothing but the outputs' rounding, as much
    as the parameters' makes, with signs that keep equal ones apart."""

    def with_signs(x):
        signs = 1 - 2 * (jnp.arange(x.size, dtype=jnp.int32) % 2)
        return x * signs.reshape(x.shape).astype(x.dtype)

    pushed = root(lin.jvp(jax.tree.map(with_signs, lin.point)))
    size = _OUTPUT_ROUNDINGS * _tree.eps((lin.point, lin.outputs)) * _tree.norm(pushed)
    return 0.5 * size**2
