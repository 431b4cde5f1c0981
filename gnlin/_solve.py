"""Full-batch training of a model in one compiled program."""

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, Bool, Int, Key, PyTree, ScalarLike

from ._common._checks import as_key, check_count, check_flag, forwards_only, is_traced
from ._common._progress import Bar
from ._common._quickly import quickly
from ._common._sharding import (
    automatic,
    choosing,
    everywhere,
    keep,
    mesh_of,
    on_mesh,
    places,
)
from ._linearisation._bounds import check_start
from ._linearisation._objective import GroupLosses
from ._solver import (
    AbstractGaussNewton,
    as_solver,
    check_divergence,
    LevenbergMarquardt,
    result_name,
)
from ._training._data import as_batch, not_finite
from ._training._doubts import after_full_batch
from ._training._group_network import GroupNetwork
from ._training._model import make_network, Network
from ._training._prior import Prior
from ._training._residuals import (
    as_groups,
    Groups,
    GroupsByName,
    of_groups,
    refuse_for_groups,
    refuse_samplers,
    Residuals,
    where_not_finite,
)
from ._training._solution import (
    COLUMNS,
    History,
    in_words,
    Model,
    on_host,
    Solution,
)
from ._training._step import (
    advanced,
    begin,
    Carry,
    checked_outputs,
    columns_of,
    group_not_finite,
    key_of_steps,
    StepSettings,
    why_it_failed,
)
from .losses import AbstractLoss, SquaredError
from .losses._base import check_loss


# Rows of the history that are allocated at a time.
_MOST_ROWS = 4096
# Up to these numbers of parameters times examples, steps are fast, and a run takes less
# time than its compilation.
_SMALL, _SHORT = 2**17, 2**21
# Steps of the first call of the program, and the factor by which this number grows as
# long as a call takes less than `_SECONDS`. Ctrl-C is noticed between calls.
_FIRST_STEPS, _GROWTH, _SECONDS = 8, 8, 0.5
_WELL = "successful", "nonlinear_max_steps_reached"


def solve(
    model: Model,
    data: tuple[PyTree, ...] | GroupsByName | Groups | Sequence[Residuals] | Residuals,
    solver: AbstractGaussNewton | Any = LevenbergMarquardt(),
    *,
    loss: AbstractLoss = SquaredError(),
    prior: ScalarLike | None = None,
    max_steps: int = 256,
    key: Key[Array, ""] | None = None,
    state: PyTree = None,
    divergence: float | None = 100.0,
    filter_spec: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
    axis_name: str = "batch",
    part_size: int | None = None,
    history: bool = True,
    progress: bool = True,
    throw: bool = False,
) -> Solution[Model]:
    r"""Train a model on a full batch.

    The whole run is one compiled program, and works under `jax.jit` and `jax.vmap`, both
    over a solver's hyperparameters and over models.

    **Arguments:**

    - `model`: any callable pytree, such as an `equinox.nn.MLP`, that maps one input to
        one output, a pytree of floating-point arrays. Or a pair `(fn, parameters)` with
        `fn(parameters, x)`, where Python floats in dictionaries and lists are trained
        too. Parameters in half precision are trained in single precision, and returned
        in half precision. If the model takes a `key` (for dropout), each example gets its
        own key in each step.
    - `data`: `(inputs, targets)`, pytrees of arrays with a leading axis over n examples,
        or `(inputs, targets, weights)` with n weights of the examples in the loss. Or
        groups of residuals: one [`gnlin.Residuals`][], or a dictionary or list of them,
        with their own functions of the model and losses. The history's columns
        `"loss/..."` hold the loss of each group.
    - `solver`: any solver of gnlin, such as [`gnlin.LevenbergMarquardt`][], which needs
        no tuning; or an optimiser from optax.
    - `loss`: [`gnlin.SquaredError`][], [`gnlin.SoftmaxCrossEntropy`][] or another
        [`gnlin.authoring.AbstractLoss`][]; by default summed over examples.
    - `prior`: the standard deviation $s$ of a normal prior of each trained parameter
        about zero, which is weight decay: $\frac{1}{2 s^2}\lVert\theta\rVert^2$ is added
        to the sum of the loss over all examples, and both are divided by the number of
        targets if the loss is a mean. For squared error, $s$ is in units of the noise's
        standard deviation. [`gnlin.predict.posterior`][] takes the prior from the
        solution. The history has the two parts as `"loss/data"` and `"loss/prior"`.
    - `max_steps`: maximum number of outer steps, each of which is one feature update.
    - `key`: the key for dropout; `jax.random.key(0)` by default. All evaluations within a
        step use the same keys, and the next step uses others, so that such a run never
        converges.
    - `state`: the model's state (from `equinox.nn.make_with_state`), if it has one. The
        linearisation includes the statistics of the batch.
    - `divergence`: end the run and return the best model if the loss is more than this
        multiple of its initial value for five steps in a row; `None` for no such limit.
    - `filter_spec`: the leaves to train, as for `equinox.partition`: a function of a
        leaf, or a pytree of booleans. The default trains all floating-point arrays.
    - `axis_name`: the `axis_name` of the model's batch normalisation.
    - `part_size`: how many examples (of each group) have their activations in memory at
        once. Each product recomputes the others' activations, which takes about 4/3 of
        the time. `None` means all examples.
    - `history`: whether to record each step. With many small runs under `jax.vmap`,
        recording takes longer than the steps.
    - `progress`: whether to show a progress bar in a terminal, for runs longer than a
        second.
    - `throw`: whether to raise an error if the run becomes non-finite, diverges or
        stagnates. If not, a warning is issued, and `solution.result` says so. Reaching
        `max_steps` causes neither.

    **Returns:** a [`gnlin.Solution`][]. Ctrl-C ends a run within about a second and
    returns the best model so far, unless the run is part of a larger compiled program.

    **Raises:** `ValueError` if there is no data or no trainable parameter, if numbers of
    examples or shapes do not match, or if a trainable leaf is not real.

    !!! example

        ```python
        model = eqx.nn.MLP(1, 1, 50, 4, jnp.tanh, key=jax.random.key(0))
        x = jnp.linspace(-1, 1, 20)[:, None]
        solution = gnlin.solve(model, (x, jnp.sin(3 * x)))
        solution.model, solution.loss, solution.stats["num_feature_updates"]
        ```
    """
    solver = as_solver(solver)
    check_count("max_steps", max_steps)
    if part_size is not None:
        check_count("part_size", part_size)
    check_flag("history", history)
    check_flag("progress", progress)
    check_flag("throw", throw)
    check_divergence(divergence)
    check_loss(loss)
    if key is not None:
        key = key_of_steps(as_key(key))
    max_steps, groups, mesh = int(max_steps), as_groups(data), mesh_of((model, data))
    model, state = automatic((model, state))
    network: Network | GroupNetwork
    losses: AbstractLoss | GroupLosses = loss
    of_prior = None
    if groups is None:
        batch = as_batch(data)
        of_prior = Prior.of(prior, losses.reduced("sum"), batch)
        parameters, network = make_network(
            model, filter_spec, state, axis_name, part_size
        )
    else:
        refuse_for_groups(loss=loss, state=state, key=key, prior=prior)
        refuse_samplers(groups)
        parameters, network, batch, losses = of_groups(
            model, groups, filter_spec, part_size=part_size
        )
    check_start(solver.bounds, parameters)
    parameters = solver.between_bounds(parameters)
    compiled = network
    if mesh is None and not is_traced((network, parameters, batch)):
        compiled = network.canonical(parameters, batch[0])
    placed = places((parameters, state), batch)
    setting = StepSettings(
        solver, losses, compiled, key, divergence, places=placed, prior=of_prior
    )
    with choosing():
        if not losses.is_quadratic:  # squared error accepts targets of any value
            checked_outputs(setting, parameters, state, batch)
        start = parameters, state
        with Bar(max_steps, progress) as bar:
            (carry, num_steps), rows, result, loss_now, is_interrupted = _run(
                setting, batch, start, max_steps, history, bar
            )
    if history:
        rows["step"] = rows["num_feature_updates"]  # every step is a feature update
    rows = {name: rows[name] for name in (*COLUMNS, *rows) if name in rows}
    stats = {"num_steps": num_steps, **carry.solver_state.counts.by_name()}
    reason = complaint = doubt = ""
    if not is_traced((num_steps, loss_now, rows)):
        stats, loss_now = on_host((stats, loss_now))
        num_steps = stats["num_steps"]
        rows = {name: np.asarray(x)[:num_steps] for name, x in rows.items()}
        ended, why = result_name(result), ""
        if ended not in _WELL:
            why = why_it_failed(setting, carry)
            row = {name: x[-1] for name, x in rows.items() if len(x)}
            given = not_finite(*batch) if groups is None else where_not_finite(groups)
            given = given or group_not_finite(row)
            complaint = (
                f"`gnlin.solve` stopped at step {num_steps} of at most {max_steps}: "
                f"{why} {given}".rstrip()
            )
        reason = in_words(ended, num_steps, why)
        if is_interrupted:
            carry, loss_now = _best(carry, loss_now)
            reason = f"step {num_steps}: interrupted"
            complaint = f"`gnlin.solve` was interrupted after step {num_steps}."
        elif ended in _WELL and history:
            found = rows["loss"], rows["gradient_norm"]
            converged = ended == "successful"
            doubt = after_full_batch(*found, float(loss_now), converged=converged)
    solution = Solution(
        model=network.frozen.with_parameters(carry.parameters),
        state=carry.model_state,
        loss=loss_now,
        result=result,
        reason=reason,
        history=History(rows),
        stats={**stats, "max_steps": max_steps},
        prior=None if of_prior is None else of_prior.deviation,
    )
    solution = on_mesh(solution, mesh)
    if doubt or (complaint and (is_interrupted or not throw)):
        warnings.warn(doubt or complaint, stacklevel=2)
    if throw:
        well = [result == getattr(optx.RESULTS, name) for name in _WELL]
        return result.error_if(solution, ~functools.reduce(jnp.logical_or, well))
    return solution


def _size(start: tuple, data: tuple) -> int:
    """Return the number of parameters times that of examples."""
    parameters, _ = start
    sizes = [x.size for x in jax.tree.leaves(parameters)]
    lengths = [len(x) for x in jax.tree.leaves(data) if jnp.ndim(x)]
    return sum(sizes) * max(lengths, default=1)


def _best(carry: Carry, loss: float) -> tuple[Carry, float]:
    """Return an interrupted run's best point, and the loss at that point."""
    if carry.watch is None or not float(carry.watch.best) < loss:
        return carry, loss
    return carry._replace(parameters=carry.watch.y), float(carry.watch.best)


class _Now(NamedTuple):
    carry: Carry
    num_steps: Int[Array, ""]


class _Run(NamedTuple):
    """The end of a run, or of a part of it."""

    now: _Now
    rows: dict[str, Any]
    result: optx.RESULTS
    loss: Array
    is_interrupted: bool


def _run(
    setting: StepSettings,
    data: tuple,
    start: tuple,
    max_steps: int,
    history: bool,
    bar: Bar,
) -> _Run:
    """Make all steps, in several calls of one program. Between calls, more history is
    allocated, the progress bar is updated and Ctrl-C is noticed."""
    leaves = jax.tree.leaves((setting, data, start))
    # Part of the cache key: 3 == 3.0, but they need different programs.
    types = tuple(map(type, leaves))

    def whole() -> _Run:
        sizes = max_steps, max_steps, history, types
        run = _steps(setting, data, start, sizes, jnp.array(max_steps))
        return _Run(*run, is_interrupted=False)

    # Inside another compiled program, make all steps in one call. The new array is traced
    # there, even if all leaves are constants that the program closes over.
    if is_traced([jnp.zeros(()), *leaves]):
        return whole()
    num_rows = min(max_steps, _MOST_ROWS)
    sizes = max_steps, num_rows, history, types
    now, most, parts, is_interrupted = start, num_rows, [], False
    size = _size(start, data)
    steps = _steps_quickly if size <= _SHORT else _steps
    # If steps are fast, a single call initialises the run and makes all steps for which
    # history is allocated.
    if size > _SMALL:
        now, most = _begun(setting, data, start, types), min(_FIRST_STEPS, num_rows)
        if is_traced(now):
            return whole()
    try:
        while not parts or not _is_over(parts[-1][0], max_steps):
            began = time.monotonic()
            part: Any = steps(setting, data, now, sizes, jnp.array(most))
            # The model may close over traced arrays, for example under `jax.vmap`.
            if is_traced(part):
                is_whole = num_rows == max_steps
                return _Run(*part, is_interrupted=False) if is_whole else whole()
            now = jax.block_until_ready(part[0])
            seconds = time.monotonic() - began
            parts.append(part)
            if seconds < _SECONDS:
                most = min(_GROWTH * most, num_rows)
            elif len(parts) > 1:  # the first call includes compilation
                most = max(most // _GROWTH, 1)
            bar.show(now.num_steps, now.carry.loss)
    except KeyboardInterrupt:
        if not parts:
            raise
        is_interrupted = True
    states, histories, results, losses = zip(*parts, strict=True)
    made = np.diff([0, *(int(state.num_steps) for state in states)])
    histories = jax.device_get(histories)
    rows = {
        name: np.concatenate([h[name][:n] for h, n in zip(histories, made, strict=True)])
        for name in histories[0]
    }
    return _Run(states[-1], rows, results[-1], losses[-1], is_interrupted)


def _is_over(now: _Now, max_steps: int) -> Bool[Array, ""]:
    state = now.carry.solver_state
    over = state.terminate | (state.result != optx.RESULTS.successful)
    return over | (now.num_steps >= max_steps)


@eqx.filter_jit
def _begun(setting: StepSettings, data: tuple, start: tuple, types: tuple) -> _Now:
    """Return the state before the first step."""
    parameters, state = start
    outputs = checked_outputs(setting, parameters, state, data)
    return _Now(begin(setting, parameters, state, outputs), jnp.array(0))


def _all_steps(setting: StepSettings, data: tuple, now: tuple, sizes: tuple, most: Array):
    """Make at most `most` steps, from the end `now` of another call (a `_Now`), or from
    `now = (parameters, model state)`."""
    max_steps, num_rows, history, _ = sizes
    inputs, places = data[0], setting.places
    # Inside the program, so that the model is traced for its shapes once per compilation:
    # this can take longer than a run.
    begins = not isinstance(now, _Now)
    parameters, state = now if begins else (now.carry.parameters, now.carry.model_state)
    outputs = checked_outputs(setting, parameters, state, data)
    is_random = setting.is_random(parameters, setting.args(inputs, 0, state))
    objective = setting.objective(outputs, data)
    if begins:
        now = _Now(begin(setting, parameters, state, outputs), jnp.array(0))
    begun = now.num_steps

    def kept(carry):
        ours = keep((carry.parameters, carry.model_state), places.carry)
        return carry._replace(parameters=ours[0], model_state=ours[1])

    row = now.carry.solver_state.row()
    row |= dict.fromkeys(columns_of(objective.names).values(), row["loss"])
    row = row if history else {}
    rows = jax.tree.map(lambda x: jnp.full(num_rows, jnp.nan, x.dtype), row)

    def step(now_and_rows):
        (carry, num_steps), rows = now_and_rows
        args = setting.args(inputs, num_steps, carry.model_state)
        carry, row, moved = advanced(
            setting, objective, outputs, args, carry, num_steps, is_random=is_random
        )
        # An index out of range drops the row of a step that was not made.
        at = jnp.where(moved, num_steps - begun, num_rows)
        rows = {k: r.at[at].set(row[k], mode="drop") for k, r in rows.items()}
        return _Now(kept(carry), num_steps + jnp.where(moved, 1, 0)), rows

    def goes_on(now_and_rows):
        now, _ = now_and_rows
        return ~_is_over(now, max_steps) & (now.num_steps - begun < most)

    now, rows = jax.lax.while_loop(goes_on, step, (now, rows))
    carry, rows = kept(forwards_only(now.carry)), forwards_only(rows)
    ended = carry.solver_state
    result = optx.RESULTS.where(
        (ended.result == optx.RESULTS.successful) & ~ended.terminate,
        optx.RESULTS.nonlinear_max_steps_reached,
        ended.result,
    )
    others = everywhere((rows, result, carry.loss), places.mesh)
    return now._replace(carry=carry), *others


_steps = eqx.filter_jit(_all_steps)
_steps_quickly = quickly(_all_steps, has_loops=True)
