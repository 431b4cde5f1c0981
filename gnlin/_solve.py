"""Equinox models: full batch, one compiled program."""

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

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
from ._solver import AbstractGaussNewton, as_solver, statistics


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


class Solution(eqx.Module):
    """What [`gnlin.solve`][] returns.

    **Attributes:**

    - `model`: the trained model: the last finite one, whatever happened.
    - `result`: an `optimistix.RESULTS`. `successful` if it has converged,
        `nonlinear_max_steps_reached` if `max_steps` came first, `nonfinite` or
        `nonlinear_divergence` if the run ended early.
    - `history`: a [`gnlin.History`][].
    - `stats`: `num_steps`, `max_steps`, `num_feature_updates`, `num_inner_steps`,
        `num_jvps` and `num_vjps` (passes of the whole batch through the model, tangent
        and transposed), `num_accepted_steps`, `num_rejected_steps`.
    """

    model: PyTree
    result: optx.RESULTS
    history: History
    stats: dict[str, Any]


def solve(
    model: PyTree,
    data: tuple[PyTree, ...],
    solver: AbstractGaussNewton | Any,
    *,
    loss: AbstractLoss = SquaredError(),
    max_steps: int = 256,
    filter_spec: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
    throw: bool = False,
) -> Solution:
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
    - `solver`: any solver of gnlin, or an optimiser of optax.
    - `loss`: of the outputs, on the targets: [`gnlin.SquaredError`][], by default summed
        over the examples, [`gnlin.SoftmaxCrossEntropy`][], or another
        [`gnlin.AbstractLoss`][].
    - `max_steps`: the most outer steps, each of them one feature update.
    - `filter_spec`: which leaves to train, as for `equinox.partition`: a function of a
        leaf, or a pytree of booleans. The default trains all floating-point arrays.
    - `throw`: whether to raise if the run ends in non-finite numbers or diverges. If
        not, it warns, and `solution.result` says so. Reaching `max_steps` does neither.

    **Returns:** a [`gnlin.Solution`][].

    **Raises:** `ValueError` if there is no data or no trainable parameter, if the
    examples' numbers or the shapes do not match, or if a trainable leaf is not real.

    !!! example

        ```python
        model = eqx.nn.MLP(1, 1, 50, 4, key=jax.random.key(0))
        x = jnp.linspace(-1, 1, 20)[:, None]
        solution = gnlin.solve(model, (x, jnp.sin(3 * x)), gnlin.DampedGaussNewton(1.0))
        solution.model, solution.history.loss, solution.stats["num_feature_updates"]
        ```
    """
    solver = as_solver(solver)
    check_count("max_steps", max_steps)
    check_flag("throw", throw)
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
        parameters, result, history, stats = _run(
            solver,
            loss,
            fn,
            parameters,
            inputs,
            targets,
            weights,
            int(max_steps),
            places(parameters, (inputs, targets, weights)),
        )
    model = frozen.with_parameters(parameters)
    stats = {**stats, "max_steps": max_steps}
    solution = on_mesh(Solution(model, result, history, stats), mesh)
    if not isinstance(stats["num_steps"], Tracer):
        solution = _without_unused_rows(solution)
        if not throw:
            _warn(solution, (inputs, targets))
    return _throw(solution) if throw else solution


@eqx.filter_jit
def _run(solver, loss, fn, parameters, inputs, targets, weights, max_steps, places):
    def evaluate(y):
        return fn(y, inputs)

    # Here, because evaluating the model's shapes takes longer than many a run, and is
    # done once a compilation.
    outputs = jax.eval_shape(evaluate, parameters)
    loss.check(outputs, targets)
    objective = BatchLoss(loss, outputs, targets, weights)
    start = solver.start(parameters, outputs)
    rows = jax.tree.map(lambda x: jnp.full(max_steps, jnp.nan, x.dtype), start.report)
    carry = parameters, start, jnp.array(0), rows

    def unfinished(carry):
        _, state, num_steps, _ = carry
        going = ~state.terminate & (state.result == optx.RESULTS.successful)
        return going & (num_steps < max_steps)

    def step(carry):
        y, state, num_steps, rows = carry
        lin = linearise(fn, y, inputs)
        with spread(places):
            y, state = solver.advance(objective, lin, evaluate, state)
        y = keep(y, places.carry)
        rows = jax.tree.map(lambda r, x: r.at[num_steps].set(x), rows, state.report)
        return y, state, num_steps + 1, rows

    y, state, num_steps, rows = jax.lax.while_loop(unfinished, step, carry)
    result = optx.RESULTS.where(
        (state.result == optx.RESULTS.successful) & ~state.terminate,
        optx.RESULTS.nonlinear_max_steps_reached,
        state.result,
    )
    first_loss = objective.value(evaluate(parameters)).astype(rows.loss.dtype)
    history = History(
        loss=jnp.concatenate([first_loss[None], rows.loss]),
        gradient_norm=rows.gradient_norm,
        step_norm=rows.step_norm,
        damping=rows.damping,
        num_inner_steps=rows.num_inner_steps,
    )
    stats = {"num_steps": num_steps, **statistics(state.counts)}
    others = everywhere((result, history, stats), places.mesh)
    return keep(y, places.carry), *others


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


def _warn(solution: Solution, data: tuple[PyTree, PyTree]) -> None:
    if bool(_failed(solution)):
        message = optx.RESULTS[solution.result].splitlines()[0]
        warnings.warn(
            f"`gnlin.solve` stopped at step {int(solution.stats['num_steps'])} of at "
            f"most {solution.stats['max_steps']}: {message} `solution.model` is the last "
            f"finite one. {not_finite(*data)}".rstrip(),
            stacklevel=3,
        )


def _throw(solution: Solution) -> Solution:
    return solution.result.error_if(solution, _failed(solution))
