"""Equinox models: full batch, one compiled program."""

import warnings
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PyTree

from . import _tree
from ._checks import check_count, check_flag
from ._data import as_batch, not_finite
from ._linearisation import linearise
from ._losses import AbstractLoss, check_loss, SquaredError
from ._model import check_stateless, partition, predict
from ._objective import BatchLoss
from ._per_example import PerExample
from ._sharding import (
    automatic,
    choosing,
    everywhere,
    keep,
    mesh_of,
    on_mesh,
    places,
    spread,
)
from ._solver import (
    AbstractGaussNewton,
    as_solver,
    check_divergence,
    LevenbergMarquardt,
    result_name,
    State,
    statistics,
    Watch,
    why_it_ended,
)


Model = TypeVar("Model")

# The history of so many steps is made ready at once.
_MOST_ROWS = 4096


class History(eqx.Module):
    """What happened, one row an outer step.

    The first `num_steps` rows are filled. Rows of steps that were not made are cut off
    where the number of steps is known, and NaN where it is not (under `jax.jit` or
    `jax.vmap`).

    **Attributes:**

    - `loss`: after the step. One entry longer than the others: `loss[0]` is the loss
        before the first step.
    - `gradient_norm`: 2-norm of the loss's gradient at the linearisation point.
    - `step_norm`: 2-norm of the step; 0 where none was taken.
    - `damping`: of the step; 0 for a solver without one.
    - `num_inner_steps`: steps on the subproblem.
    """

    loss: Float[Array, " points"]
    gradient_norm: Float[Array, " steps"]
    step_norm: Float[Array, " steps"]
    damping: Float[Array, " steps"]
    num_inner_steps: Float[Array, " steps"]

    def __repr__(self) -> str:
        return f"History(steps={self.gradient_norm.shape})"


class Solution(eqx.Module, Generic[Model]):
    """What [`gnlin.solve`][] returns.

    **Attributes:**

    - `model`: the trained model: the last finite one, or the best, if the run diverged.
    - `result`: an `optimistix.RESULTS`. `successful` if it has converged,
        `nonlinear_max_steps_reached` if `max_steps` came first, `stagnation` if steps
        were next to nothing where the gradient is not, `nonfinite` or
        `nonlinear_divergence` if the run ended early.
    - `history`: a [`gnlin.History`][].
    - `stats`: `num_steps`, `max_steps`, `num_feature_updates`, `num_inner_steps`,
        `num_jvps` and `num_vjps` (passes of the whole batch through the model, tangent
        and transposed), `num_accepted_steps`, `num_rejected_steps`.
    """

    model: Model
    result: optx.RESULTS
    history: History
    stats: dict[str, Any]

    def __repr__(self) -> str:
        num_steps, loss = self.stats["num_steps"], self.history.loss
        if isinstance(num_steps, Tracer) or jnp.ndim(num_steps) > 0:
            return f"Solution({type(self.model).__name__}, history={self.history})"
        name = result_name(self.result)
        return (
            f"Solution({type(self.model).__name__}, {name} after {int(num_steps)} steps, "
            f"loss {float(loss[0]):.4g} -> {float(loss[int(num_steps)]):.4g})"
        )


def solve(
    model: Model,
    data: tuple[PyTree, ...],
    solver: AbstractGaussNewton | Any = LevenbergMarquardt(),
    *,
    loss: AbstractLoss = SquaredError(),
    max_steps: int = 256,
    divergence: float | None = 100.0,
    filter_spec: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
    throw: bool = False,
) -> Solution[Model]:
    r"""Train an Equinox model on a full batch by a solver of this library.

    The whole run is one compiled program, and may be part of a larger one: it works
    under `jax.jit` and `jax.vmap`, over a solver's hyperparameters and over models.

    **Arguments:**

    - `model`: any callable pytree, such as an `equinox.nn.MLP`, from one input to one
        output, a pytree of floating-point arrays; or a pair `(fn, parameters)` with
        `fn(parameters, x)`, of which the parameters are trained. Those in half precision
        are trained in single, and handed back as they came.
    - `data`: `(inputs, targets)`, pytrees of arrays with a leading axis over n examples,
        or `(inputs, targets, weights)` with n weights of the examples in the loss.
    - `solver`: any solver of gnlin, of which [`gnlin.LevenbergMarquardt`][] needs no
        number; or an optimiser of optax.
    - `loss`: of the outputs, on the targets: [`gnlin.SquaredError`][], by default summed
        over the examples, [`gnlin.SoftmaxCrossEntropy`][], or another
        [`gnlin.AbstractLoss`][].
    - `max_steps`: the most outer steps, each of them one feature update.
    - `divergence`: a loss of more than so many times what it was at the start, for five
        steps in a row, ends the run, which hands back the best model; `None` for no
        such end.
    - `filter_spec`: which leaves to train, as for `equinox.partition`: a function of a
        leaf, or a pytree of booleans. The default trains all floating-point arrays.
    - `throw`: whether to raise if the run ends in non-finite numbers, diverges or stands
        still. If not, it warns, and `solution.result` says so. Reaching `max_steps` does
        neither.

    **Returns:** a [`gnlin.Solution`][].

    **Raises:** `ValueError` if there is no data or no trainable parameter, if the
    examples' numbers or the shapes do not match, or if a trainable leaf is not real.

    !!! example

        ```python
        model = eqx.nn.MLP(1, 1, 50, 4, key=jax.random.key(0))
        x = jnp.linspace(-1, 1, 20)[:, None]
        solution = gnlin.solve(model, (x, jnp.sin(3 * x)))
        solution.model, solution.history.loss, solution.stats["num_feature_updates"]
        ```
    """
    solver = as_solver(solver)
    check_count("max_steps", max_steps)
    check_flag("throw", throw)
    check_divergence(divergence)
    check_loss(loss)
    inputs, targets, weights = as_batch(data)
    mesh = mesh_of((model, data))
    check_stateless(model)
    parameters, frozen = partition(automatic(model), filter_spec)
    fn = PerExample(eqx.Partial(predict, frozen))
    with choosing():
        if not loss.is_quadratic:  # which has no values of targets to check
            outputs = eqx.filter_eval_shape(fn, parameters, inputs)
            loss.check(outputs, targets)
        fixed = solver, loss, fn, (inputs, targets, weights), divergence
        where = places(parameters, (inputs, targets, weights))
        parameters, result, history, stats, far = _run(
            fixed, parameters, int(max_steps), where
        )
    model = frozen.with_parameters(parameters)
    stats = {**stats, "max_steps": max_steps}
    solution = on_mesh(Solution(model, result, history, stats), mesh)
    if not isinstance(stats["num_steps"], Tracer):
        solution = _without_unused_rows(solution)
        if not throw:
            _warn(solution, divergence if bool(far) else None, (inputs, targets))
    return _throw(solution) if throw else solution


def _run(fixed, parameters, max_steps, places):
    """All steps: in one program, and where there are many in several runs of it, so that
    the history takes memory as it is filled."""
    # As a part of another program it is one run: nobody can ask for more of it.
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((fixed, parameters)))
    # 3 and 3.0 are equal, and not the same program.
    types = tuple(map(type, jax.tree.leaves(fixed)))
    sizes = max_steps, max_steps if traced else min(max_steps, _MOST_ROWS), types
    carry, rows, first_loss = _steps(fixed, parameters, None, sizes, places)
    parts = [rows]
    if not isinstance(carry.num_steps, Tracer):
        while not bool(_is_over(carry, max_steps)):
            carry, rows, _ = _steps(fixed, None, carry, sizes, places)
            parts.append(rows)
    rows = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    state = carry.state
    result = optx.RESULTS.where(
        (state.result == optx.RESULTS.successful) & ~state.terminate,
        optx.RESULTS.nonlinear_max_steps_reached,
        state.result,
    )
    far = False if carry.watch is None else carry.watch.diverges
    result = optx.RESULTS.where(far, optx.RESULTS.nonlinear_divergence, result)
    history = History(
        loss=jnp.concatenate([first_loss[None], rows.loss]),
        gradient_norm=rows.gradient_norm,
        step_norm=rows.step_norm,
        damping=rows.damping,
        num_inner_steps=rows.num_inner_steps,
    )
    stats = {"num_steps": carry.num_steps, **statistics(state.counts)}
    return carry.y, result, history, stats, far


class _Carry(NamedTuple):
    y: PyTree[Array]
    state: State
    num_steps: Int[Array, ""]
    watch: Watch | None


def _is_over(carry: _Carry, max_steps: int) -> Bool[Array, ""]:
    state = carry.state
    over = state.terminate | (state.result != optx.RESULTS.successful)
    if carry.watch is not None:
        over |= carry.watch.diverges
    return over | (carry.num_steps >= max_steps)


@eqx.filter_jit
def _steps(fixed, parameters, carry, sizes, places):
    """The first steps from some parameters, or more of them."""
    max_steps, num_rows, _ = sizes
    solver, loss, fn, (inputs, targets, weights), divergence = fixed

    def evaluate(y):
        return fn(y, inputs)

    # Here, because evaluating the model's shapes takes longer than many a run, and is
    # done once a compilation.
    point = parameters if carry is None else carry.y
    outputs = jax.eval_shape(evaluate, point)
    loss.check(outputs, targets)
    objective = BatchLoss(loss, outputs, targets, weights)
    start = solver.start(point, outputs)
    first_loss = jnp.zeros((), start.report.loss.dtype)
    if carry is None:
        watch = None
        first_loss = objective.value(evaluate(point)).astype(first_loss.dtype)
        if divergence is not None:
            watch = Watch.start(objective, point, outputs, first_loss)
        carry = _Carry(point, start, jnp.array(0), watch)
    rows = jax.tree.map(lambda x: jnp.full(num_rows, jnp.nan, x.dtype), start.report)
    begun = carry.num_steps

    def full(carry):
        return carry.num_steps - begun >= num_rows

    def step(carry_and_rows):
        (y, state, num_steps, watch), rows = carry_and_rows
        lin = linearise(fn, y, inputs)
        with spread(places):
            y, state = solver.advance(objective, lin, evaluate, state)
        y = keep(y, places.carry)
        index = num_steps - begun
        rows = jax.tree.map(lambda r, x: r.at[index].set(x), rows, state.report)
        if watch is not None:
            watch = watch.look(y, state.report.loss, divergence)
        return _Carry(y, state, num_steps + 1, watch), rows

    # As far as the steps go by themselves, and then a look at the gradient: in a loop of
    # its own, so that under `jax.vmap` not every step takes one.
    def stretch(carry_and_rows):
        def goes_on(carry_and_rows):
            carry, _ = carry_and_rows
            pauses = carry.state.pausing | _is_over(carry, max_steps)
            return ~pauses & ~full(carry)

        carry, rows = jax.lax.while_loop(goes_on, step, carry_and_rows)
        state = solver.judged(objective, evaluate, carry.y, carry.state)
        return carry._replace(state=state), rows

    def unfinished(carry_and_rows):
        carry, _ = carry_and_rows
        return ~_is_over(carry, max_steps) & ~full(carry)

    carry, rows = jax.lax.while_loop(unfinished, stretch, (carry, rows))
    if carry.watch is not None:
        # Where the run diverges its best point is its last.
        diverges = carry.watch.diverges
        carry = carry._replace(y=_tree.where(diverges, carry.watch.y, carry.y))
    carry = carry._replace(y=keep(carry.y, places.carry))
    others = everywhere((rows, first_loss), places.mesh)
    return carry, *others


def _without_unused_rows(solution: Solution) -> Solution:
    num_steps = int(solution.stats["num_steps"])
    history = jax.tree.map(lambda rows: rows[:num_steps], solution.history)
    history = eqx.tree_at(
        lambda h: h.loss, history, solution.history.loss[: num_steps + 1]
    )
    return eqx.tree_at(lambda s: s.history, solution, history)


def _failed(solution: Solution):
    ended_well = (solution.result == optx.RESULTS.successful) | (
        solution.result == optx.RESULTS.nonlinear_max_steps_reached
    )
    return ~ended_well


def _warn(solution: Solution, factor: float | None, data: tuple[PyTree, PyTree]) -> None:
    """If it has failed; `factor` as for `why_it_ended`."""
    if bool(_failed(solution)):
        num_steps, max_steps = (
            int(solution.stats[name]) for name in ("num_steps", "max_steps")
        )
        warnings.warn(
            f"`gnlin.solve` stopped at step {num_steps} of at most {max_steps}: "
            f"{why_it_ended(solution.result, factor)} {not_finite(*data)}".rstrip(),
            stacklevel=3,
        )


def _throw(solution: Solution) -> Solution:
    return solution.result.error_if(solution, _failed(solution))
