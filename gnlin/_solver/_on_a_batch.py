"""Levenberg-Marquardt across batches: a damping that stays, or follows the loss at drawn
points, and steps pulled towards the last one."""

import dataclasses
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, Float, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from .._linearisation._quadratic import Quadratic
from .._subproblem import (
    AbstractSubproblem,
    InexactTikhonov,
    problem_of,
    ProxLinear,
    pulled,
)
from ..damping import AbstractDamping
from ..filters import Tikhonov
from ._scaling import Measured
from ._state import Evaluate, Update
from ._stepping import step_taken, take_step


if TYPE_CHECKING:
    from ._levenberg_marquardt import LevenbergMarquardt


# The damping divided by the curvature along the first gradient, and the part of the last
# step that a step is pulled towards.
_DAMPING_ACROSS, _MOMENTUM = 1e-3, 0.8
# The least damping for squared residuals at points drawn for each step, such as those of
# a differential equation, which have no noise. The relative errors for the heat equation
# and Poisson's in five dimensions are 1e-5 and 1.6e-5; with 1e-3 they are 2e-3 and 6e-4,
# and with 1e-10 1e-6 and 1e-4. The same damping with noise triples a regression's error.
_DAMPING_OF_DRAWN = 1e-8
# The batch sizes at which the damping is doubled, and the pull is halved. With less
# damping or more pull ReLU networks die on batches of one example.
_FEW_TO_DAMP, _FEW_TO_PULL = 48, 2
# The factor of the damping after a batch whose problem could not be solved, or on which
# no part of the step lowers the loss. If inputs are not scaled, classes may be so certain
# at the start that the first curvature is 1e-12 of a later one.
_MORE_DAMPING = 10
# The tolerance of conjugate gradients, and their most iterations.
_TOLERANCE_ACROSS, _MOST_ITERATIONS = 0.01, 20


class MemoryAcross(eqx.Module):
    scale: Float[Array, " p"] | None
    curvature: Float[Array, ""]  # along the first gradient; not positive before it
    step: PyTree[Array]  # the last step
    # For drawn points only: the loss of the first batch, times the growth of the
    # curvature, and whether some step has not carried over to the batch after it
    first_loss: Float[Array, ""]
    is_noisy: Bool[Array, ""]

    @staticmethod
    def start(
        scale: Float[Array, " p"] | None, y: PyTree[Array], dtype: jnp.dtype
    ) -> "MemoryAcross":
        zero = jnp.zeros((), dtype)
        return MemoryAcross(scale, zero, _tree.zeros_like(y), zero, jnp.array(False))


def step_on_a_batch(
    solver: "LevenbergMarquardt",
    objective: AbstractObjective,
    lin: Linearisation,
    evaluate: Evaluate,
    memory: MemoryAcross,
) -> Update:
    """Take one step on one batch, with one damping. A step that is too long is shortened
    on its own batch, or by the stride after the next batch."""
    num_examples = objective.num_examples()
    momentum = _MOMENTUM * num_examples / (num_examples + _FEW_TO_PULL)
    towards = _tree.scale(momentum, memory.step)
    subproblem, scale = _pulled(solver, objective, lin, towards, memory.scale)

    def along() -> Scalar:
        return subproblem.curvature_along_gradient().astype(memory.curvature.dtype)

    curvature = jax.lax.cond(memory.curvature > 0, lambda: memory.curvature, along)
    unit = jnp.where(curvature > 0, curvature, 1)
    first_loss = memory.first_loss
    if damps_as_drawn(solver, objective):
        loss = objective.value(lin.outputs).astype(first_loss.dtype)
        first_loss = jnp.where(first_loss > 0, first_loss, loss)
        relative = _damping_of_drawn(loss, first_loss, memory.is_noisy)
    else:
        relative = _relative_damping(solver, num_examples)
    damping = jnp.asarray(relative, unit.dtype) * unit
    answer = subproblem.solve(InexactTikhonov(damping))
    # The damping may be too small for a factorisation in this precision.
    solved = answer.result == optx.RESULTS.successful
    failed = ~(solved & _tree.all_finite(answer.step))
    failed &= jnp.isfinite(subproblem.gradient_norm)
    step = _tree.where(failed, _tree.zeros_like(answer.step), answer.step)
    result = optx.RESULTS.where(failed, optx.RESULTS.successful, answer.result)
    answer = eqx.tree_at(lambda a: (a.step, a.result), answer, (step, result))

    def again(lin: Linearisation) -> PyTree[Array]:
        held, _ = _pulled(solver, objective, lin, towards, memory.scale)
        return held.solve(InexactTikhonov(damping)).step

    # A batch that is not finite must not set the curvature for all others.
    curvature = jnp.where(jnp.isfinite(curvature), curvature, 0)
    update = take_step(
        objective,
        lin,
        evaluate,
        subproblem,
        answer,
        search="auto",
        damping=damping,
        again=again,
    )
    # A step that is pulled towards the last one may lead uphill with any damping.
    more = failed | (update.stuck & ~_tree.any_nonzero(memory.step))
    grown = _MORE_DAMPING * curvature
    more &= jnp.isfinite(grown)
    curvature = jnp.where(more, grown, curvature)
    step = step_taken(update, lin)
    if damps_as_drawn(solver, objective):  # Only the least damping grows.
        first_loss = jnp.where(more, _MORE_DAMPING * first_loss, first_loss)
        first_loss = jnp.where(jnp.isfinite(first_loss), first_loss, 0)
    memory = MemoryAcross(scale, curvature, step, first_loss, memory.is_noisy)
    return dataclasses.replace(update, memory=memory)


def _pulled(
    solver: "LevenbergMarquardt",
    objective: AbstractObjective,
    lin: Linearisation,
    towards: PyTree[Array],
    scale: Float[Array, " p"] | None,
) -> tuple[AbstractSubproblem, Float[Array, " p"] | None]:
    """Return the subproblem of one batch, with a solution that is pulled towards a
    step, and the state of the scales."""
    problem, kind = problem_of(solver.form, objective, lin), Tikhonov(1.0)
    way, scaling, method = solver.planned(objective, problem, kind, 1)
    rows = problem.jacobian.cost().rows
    measured = Measured.of(problem, scaling, scale, rows)

    def ready(problem: Quadratic | ProxLinear) -> AbstractSubproblem:
        subproblem = measured.chosen(problem, kind, 1, method)
        if not way.stops_early:
            return subproblem
        tolerance = solver.tolerance
        tolerance = _TOLERANCE_ACROSS if tolerance is None else tolerance
        return subproblem.truncated(tolerance, _MOST_ITERATIONS)

    return pulled(measured.problem, towards, way, ready), measured.memory


def damps_as_drawn(solver: "LevenbergMarquardt", objective: AbstractObjective) -> bool:
    """Whether the damping is the one for points that are drawn for each step."""
    is_drawn = objective.is_quadratic and objective.is_drawn
    return solver.damping is None and is_drawn


def _damping_of_drawn(
    loss: Scalar, first_loss: Scalar, is_noisy: Bool[Array, ""]
) -> Scalar:
    """Return lambda divided by the curvature along the first gradient, at drawn points.

    With noise the loss levels off, and the damping with it. Without noise it falls to the
    least damping with the loss, also if a step has not carried over. If the run begins
    with a trained network, the loss does not fall far, and the damping stays after a step
    that does not carry over; for the heat equation the error is then 6 % larger.
    """
    share = jnp.where(first_loss > 0, jnp.minimum(loss / first_loss, 1), 0)
    noisy = jnp.where(is_noisy, _DAMPING_ACROSS * share, 0)
    return jnp.maximum(jnp.where(jnp.isfinite(noisy), noisy, 0), _DAMPING_OF_DRAWN)


def _relative_damping(solver: "LevenbergMarquardt", num_examples: Scalar) -> ScalarLike:
    """Return lambda divided by the curvature along the first gradient, on batches."""
    if isinstance(solver.damping, AbstractDamping):
        raise ValueError(
            f"{solver.damping} cannot be used across batches, where the damping stays "
            "constant: pass a number, relative to the curvature along the first "
            "gradient, or use one batch of all data."
        )
    if solver.damping is None:
        return _DAMPING_ACROSS * (1 + (_FEW_TO_DAMP / num_examples) ** 2)
    return solver.damping
