"""Equinox models: full batch, one compiled program."""

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
from jaxtyping import Array, Bool, Int, Key, PyTree

from ._common._checks import as_key, check_count, check_flag, forwards_only, is_traced
from ._common._progress import Bar
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
from ._linearisation._objective import GroupLosses, objective_of
from ._solver import (
    AbstractGaussNewton,
    as_solver,
    check_divergence,
    LevenbergMarquardt,
    result_name,
    row_of,
    statistics,
)
from ._training._data import as_batch, not_finite
from ._training._model import make_network, Network
from ._training._residuals import (
    as_groups,
    GroupNetwork,
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
    NO_GRADIENT,
    on_host,
    Solution,
)
from ._training._step import (
    advanced,
    begin,
    Carry,
    checked_outputs,
    columns_of,
    key_of_steps,
    StepSettings,
    why_it_failed,
)
from .losses import AbstractLoss, SquaredError
from .losses._base import check_loss


# The history of so many steps is made ready at once.
_MOST_ROWS = 4096
# Parameters times examples, up to which steps are quick
_SMALL = 2**17
# Of a run of the program at first, and by how much that grows while it takes less than so
# many seconds, after which Ctrl-C is heard
_FIRST_STEPS, _GROWTH, _SECONDS = 8, 8, 0.5
_WELL = "successful", "nonlinear_max_steps_reached"
# A run that has ended well, or has made at least so many steps, and has so many times the
# loss of its start, has come to nothing.
_LOOKED_BACK, _WORSE = 10, 2.0


def solve(
    model: Model,
    data: tuple[PyTree, ...] | GroupsByName | Groups | Sequence[Residuals] | Residuals,
    solver: AbstractGaussNewton | Any = LevenbergMarquardt(),
    *,
    loss: AbstractLoss = SquaredError(),
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
    r"""Train an Equinox model on a full batch by a solver of this library.

    The whole run is one compiled program, and may be part of a larger one: it works
    under `jax.jit` and `jax.vmap`, over a solver's hyperparameters and over models.

    **Arguments:**

    - `model`: any callable pytree, such as an `equinox.nn.MLP`, from one input to one
        output, a pytree of floating-point arrays; or a pair `(fn, parameters)` with
        `fn(parameters, x)`, of which the parameters are trained, Python's floats in
        dictionaries and lists too. Those in half precision are trained in single, and
        handed back as they came. A `key` argument, if it has one (for dropout), is given
        a key of its own for each example and step.
    - `data`: `(inputs, targets)`, pytrees of arrays with a leading axis over n examples,
        or `(inputs, targets, weights)` with n weights of the examples in the loss. Or
        groups of [`gnlin.Residuals`][], in a dictionary, a list, or a single one: they
        have their own functions of the model, and losses; a column of the history,
        `"loss/..."`, is of each.
    - `solver`: any solver of gnlin, of which [`gnlin.LevenbergMarquardt`][] needs no
        number; or an optimiser of optax.
    - `loss`: of the outputs, on the targets: [`gnlin.SquaredError`][], by default summed
        over the examples, [`gnlin.SoftmaxCrossEntropy`][], or another
        [`gnlin.authoring.AbstractLoss`][].
    - `max_steps`: the most outer steps, each of them one feature update.
    - `key`: of dropout; `jax.random.key(0)` by default. What is drawn is the same for
        all that one step does, and another for the next: such a run never converges.
    - `state`: the model's state (as from `equinox.nn.make_with_state`), if it has one.
        The linearisation includes the statistics of the batch.
    - `divergence`: a loss of more than so many times what it was at the start, for five
        steps in a row, ends the run, which hands back the best model; `None` for no
        such end.
    - `filter_spec`: which leaves to train, as for `equinox.partition`: a function of a
        leaf, or a pytree of booleans. The default trains all floating-point arrays.
    - `axis_name`: of the batch, as the model's batch normalisation was given it.
    - `part_size`: how many examples (of each group) have their activations in memory at
        once; those of the rest are made anew in each product, at some 4/3 of its time.
        `None` for all of them.
    - `history`: whether to keep a row of each step. Of many small runs under `jax.vmap`
        it takes longer than the steps.
    - `progress`: whether to draw a bar, where there is a terminal, of a run that takes
        longer than a second.
    - `throw`: whether to raise if the run ends in non-finite numbers, diverges or stands
        still. If not, it warns, and `solution.result` says so. Reaching `max_steps` does
        neither.

    **Returns:** a [`gnlin.Solution`][]. Ctrl-C ends a run after the steps of about a
    second, with the best model so far; not one that is part of a compiled program.

    **Raises:** `ValueError` if there is no data or no trainable parameter, if the
    examples' numbers or the shapes do not match, or if a trainable leaf is not real.

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
    if groups is None:
        batch = as_batch(data)
        parameters, network = make_network(
            model, filter_spec, state, axis_name, part_size
        )
    else:
        refuse_for_groups(loss=loss, state=state, key=key)
        refuse_samplers(groups)
        parameters, network, batch, losses = of_groups(
            model, groups, filter_spec, part_size=part_size
        )
    check_start(solver.bounds, parameters)
    parameters = solver.between_bounds(parameters)
    where = places((parameters, state), batch)
    ours = network
    if mesh is None and not is_traced((network, parameters, batch)):
        ours = network.canonical(parameters, batch[0])
    setting = StepSettings(solver, losses, ours, key, divergence, places=where)
    with choosing():
        if not losses.is_quadratic:  # which has no values of targets to check
            checked_outputs(setting, parameters, state, batch)
        start = parameters, state
        with Bar(max_steps, progress) as bar:
            (carry, num_steps), rows, result, loss_now, is_interrupted = _run(
                setting, batch, start, max_steps, history, bar
            )
    if history:
        rows["step"] = rows["num_feature_updates"]  # each of which is one
    rows = {name: rows[name] for name in (*COLUMNS, *rows) if name in rows}
    stats = {"num_steps": num_steps, **statistics(carry.solver_state.counts)}
    reason = complaint = doubt = ""
    if not is_traced((num_steps, loss_now, rows)):
        stats, loss_now = on_host((stats, loss_now))
        num_steps = stats["num_steps"]
        rows = {name: np.asarray(x)[:num_steps] for name, x in rows.items()}
        ended, why = result_name(result), ""
        if ended not in _WELL:
            why = why_it_failed(setting, carry)
            where = not_finite(*batch) if groups is None else where_not_finite(groups)
            complaint = (
                f"`gnlin.solve` stopped at step {num_steps} of at most {max_steps}: "
                f"{why} {where}".rstrip()
            )
        reason = in_words(ended, num_steps, why)
        if is_interrupted:
            carry, loss_now = _best(carry, loss_now)
            reason = f"step {num_steps}: interrupted"
            complaint = f"`gnlin.solve` was interrupted after step {num_steps}."
        elif ended in _WELL and history and num_steps > 0:
            first, long = float(rows["loss"][0]), num_steps >= _LOOKED_BACK
            if loss_now > _WORSE * abs(first) and (long or ended == "successful"):
                doubt = (
                    f"`gnlin.solve` made {num_steps} steps, and the loss has risen from "
                    f"{first:.4g} to {loss_now:.4g}: use `gnlin.LevenbergMarquardt()`, "
                    "more damping, a smaller learning rate or fewer inner steps."
                )
            if first != 0 and not np.any(rows["gradient_norm"]):
                doubt = f"`gnlin.solve` made no step: {NO_GRADIENT}"
    solution = Solution(
        model=network.frozen.with_parameters(carry.parameters),
        state=carry.model_state,
        loss=loss_now,
        result=result,
        reason=reason,
        history=History(rows),
        stats={**stats, "max_steps": max_steps},
    )
    solution = on_mesh(solution, mesh)
    if doubt or (complaint and (is_interrupted or not throw)):
        warnings.warn(doubt or complaint, stacklevel=2)
    if throw:
        well = [result == getattr(optx.RESULTS, name) for name in _WELL]
        return result.error_if(solution, ~functools.reduce(jnp.logical_or, well))
    return solution


def _takes_long(start: tuple, data: tuple) -> bool:
    """Whether a step takes more than a call of a program. What does not is begun in the
    program of its first steps, of which there are as many as there is memory for."""
    parameters, _ = start
    sizes = [x.size for x in jax.tree.leaves(parameters)]
    lengths = [len(x) for x in jax.tree.leaves(data) if jnp.ndim(x)]
    return sum(sizes) * max(lengths, default=1) > _SMALL


def _best(carry: Carry, loss: float) -> tuple[Carry, float]:
    """Of a run that was interrupted, its best point and the loss there."""
    if carry.watch is None or not float(carry.watch.best) < loss:
        return carry, loss
    return carry._replace(parameters=carry.watch.y), float(carry.watch.best)


class _Now(NamedTuple):
    carry: Carry
    num_steps: Int[Array, ""]


class _Run(NamedTuple):
    """As far as it came."""

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
    """All steps, in several runs of one program: between them the history's memory grows,
    a bar is drawn, and Ctrl-C is heard."""
    leaves = jax.tree.leaves((setting, data, start))
    # 3 and 3.0 are equal, and not the same program.
    types = tuple(map(type, leaves))

    def whole() -> _Run:
        sizes = max_steps, max_steps, history, types
        run = _steps(setting, data, start, sizes, jnp.array(max_steps))
        return _Run(*run, is_interrupted=False)

    # As a part of another program it is one run: nobody can ask for more of it. What that
    # program closes over is not traced, but all that it makes is.
    if is_traced([jnp.zeros(()), *leaves]):
        return whole()
    num_rows = min(max_steps, _MOST_ROWS)
    sizes = max_steps, num_rows, history, types
    now, most, parts, is_interrupted = start, num_rows, [], False
    if _takes_long(start, data):
        now, most = _begun(setting, data, start, types), min(_FIRST_STEPS, num_rows)
        if is_traced(now):
            return whole()
    try:
        while not parts or not _is_over(parts[-1][0], max_steps):
            began = time.monotonic()
            part = _steps(setting, data, now, sizes, jnp.array(most))
            # What the model closes over is, as under `jax.vmap`.
            if is_traced(part):
                is_whole = num_rows == max_steps
                return _Run(*part, is_interrupted=False) if is_whole else whole()
            now = jax.block_until_ready(part[0])
            seconds = time.monotonic() - began
            parts.append(part)
            if seconds < _SECONDS:
                most = min(_GROWTH * most, num_rows)
            elif len(parts) > 1:  # the first is compiled
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
    """Before the first step."""
    parameters, state = start
    outputs = checked_outputs(setting, parameters, state, data)
    return _Now(begin(setting, parameters, state, outputs), jnp.array(0))


@eqx.filter_jit
def _steps(setting: StepSettings, data: tuple, now: tuple, sizes: tuple, most: Array):
    """From some parameters and a model's state, or from where another such run ended: so
    many steps at most."""
    max_steps, num_rows, history, _ = sizes
    inputs, places = data[0], setting.places
    # Here, because evaluating the model's shapes takes longer than many a run, and is
    # done once a compilation.
    begins = not isinstance(now, _Now)
    parameters, state = now if begins else (now.carry.parameters, now.carry.model_state)
    outputs = checked_outputs(setting, parameters, state, data)
    is_random = setting.is_random(parameters, setting.args(inputs, 0, state))
    objective = objective_of(setting.loss, outputs, data)
    if begins:
        now = _Now(begin(setting, parameters, state, outputs), jnp.array(0))
    begun = now.num_steps

    def kept(carry):
        ours = keep((carry.parameters, carry.model_state), places.carry)
        return carry._replace(parameters=ours[0], model_state=ours[1])

    row = row_of(now.carry.solver_state)
    row |= dict.fromkeys(columns_of(objective.names).values(), row["loss"])
    row = row if history else {}
    rows = jax.tree.map(lambda x: jnp.full(num_rows, jnp.nan, x.dtype), row)

    def step(now_and_rows):
        (carry, num_steps), rows = now_and_rows
        args = setting.args(inputs, num_steps, carry.model_state)
        carry, row, moved = advanced(
            setting, objective, outputs, args, carry, num_steps, is_random=is_random
        )
        # No row of a step that was not made
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
