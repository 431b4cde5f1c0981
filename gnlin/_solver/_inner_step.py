"""Iterative linearisation across batches: each batch is for one inner step, and the
linearisation point is kept for K of them."""

import dataclasses
from collections.abc import Callable
from typing import Any, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Int, PyTree

from .._common import _tree
from .._common._checks import as_float
from .._common._passes import Passes
from .._linearisation._linearisation import linearised
from .._linearisation._objective import AbstractObjective
from .._subproblem import Momentum, updated
from ._state import Report, State


if TYPE_CHECKING:
    from ._iterative_linearisation import IterativeLinearisation


class Stream(eqx.Module):
    """The memory between the inner steps on one batch and on the next."""

    point: PyTree[Array]  # theta_s
    inner: PyTree  # the optimiser's state, or the velocity
    num_steps: Int[Array, ""]  # inner steps since the linearisation


def optimiser_of(solver: "IterativeLinearisation") -> Any:
    """Return the optimiser that takes the inner steps."""
    if solver.learning_rate is None:
        return solver.optimiser
    return Momentum(solver.learning_rate, solver.momentum, solver.nesterov)


def inner_step(
    solver: "IterativeLinearisation",
    objective: AbstractObjective,
    fn: Callable[[Any, Any], Any],
    y: PyTree[Array],
    args: PyTree,
    state: State,
    has_aux: bool,
) -> tuple[PyTree[Array], State, PyTree[Array], Any]:
    """Take one inner step on one batch, as `advance_stream` does."""
    stream: Stream = state.memory
    in_period = jnp.where(stream.num_steps > 0, 1, 0)
    solver = solver.at(state.counts.num_feature_updates - in_period)
    # One forward, one tangent and one transposed pass; no tangent pass if K = 1.
    lin, aux = linearised(fn, stream.point, args, has_aux, solver.memory_budget)
    if isinstance(solver.period, int | float) and solver.period == 1:
        outputs, passes = lin.outputs, Passes(vjps=1)
        gradient = lin.vjp(objective.gradient(outputs))
    else:
        delta = jax.tree.map(jnp.subtract, y, stream.point)
        change, passes = lin.jvp(delta), Passes(1, 1)
        outputs = _tree.axpy(1, change, lin.outputs)
        if solver.form == "quadratic" and not objective.is_quadratic:
            curved = objective.curvature(lin.outputs)(change)
            cotangent = _tree.axpy(1, curved, objective.gradient(lin.outputs))
        else:
            cotangent = objective.gradient(outputs)
        gradient = _tree.axpy(solver.damping_now(), delta, lin.vjp(cotangent))
    loss = objective.value(outputs)

    optimiser = optimiser_of(solver)
    updates, inner = updated(optimiser, gradient, stream.inner, y, loss)
    new_y = solver.admissible(_tree.axpy(1, updates, y))
    finite = _tree.all_finite((new_y, loss))
    new_y = _tree.where(finite, new_y, y)
    num_steps = stream.num_steps + 1
    renew = num_steps.astype(float) >= jnp.asarray(as_float(solver.period), float)
    point = _tree.where(renew, new_y, stream.point)
    if solver.restart:
        inner = _tree.where(renew, optimiser.init(new_y), inner)
    begins = jnp.where(stream.num_steps == 0, 1, 0)
    stream = Stream(point, inner, jnp.where(renew, 0, num_steps))

    dtype = state.report.loss.dtype
    one = jnp.ones((), float)
    report = Report(
        loss.astype(dtype),
        _tree.norm(gradient).astype(dtype),
        jnp.where(finite, _tree.norm(updates), 0).astype(dtype),
        solver.damping_now().astype(dtype),
        one,
    )
    taken, refused = jnp.where(finite, 1, 0), jnp.where(finite, 0, 1)
    counts = state.counts.plus(begins, 1, passes.jvps, passes.vjps, taken, refused)
    result = optx.RESULTS.where(finite, optx.RESULTS.successful, optx.RESULTS.nonfinite)
    state = dataclasses.replace(
        state, memory=stream, report=report, counts=counts, result=result
    )
    return new_y, state, outputs, aux


def check_optimiser(optimiser, momentum, nesterov, method) -> None:
    if not is_optimiser(optimiser):
        raise ValueError(
            "`optimiser` must be one of optax's, such as `optax.adam(1e-3)`, but "
            f"{optimiser!r} was given."
        )
    if (isinstance(momentum, float | int) and momentum != 0) or nesterov:
        raise ValueError(
            "`momentum` and `nesterov` cannot be used with an `optimiser`: pass "
            "`optax.sgd(learning_rate, momentum, nesterov)`."
        )
    if method not in ("auto", "matrix-free"):
        raise ValueError(
            'With an `optimiser` the `method` must be "auto" or "matrix-free", but '
            f"{method!r} was given."
        )


def is_optimiser(x: Any) -> bool:
    """Whether an object is an optax optimiser. Solvers of optimistix have `init`, too,
    but `step` in place of `update`."""
    return not isinstance(x, type) and hasattr(x, "init") and hasattr(x, "update")
