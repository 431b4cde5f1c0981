"""The steps of a full-batch run, in one compiled program that is called several times."""

import math
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, Int

from .._common import _tree
from .._common._canonical import Program
from .._common._checks import forwards_only, is_traced
from .._common._history import columns_of
from .._common._progress import Bar
from .._common._quickly import quickly
from .._common._sharding import everywhere, keep
from ._step import advanced, begin, Carry, checked_outputs, Shapes, StepSettings


# Numbers of history rows that are allocated: the fewest, the factor from one number to
# the next (each compiles a program of its own), and the most at a time.
_FEWEST_ROWS, _MORE_ROWS, _MOST_ROWS = 1024, 4, 4096
# Limits on the number of parameters times examples. Up to the first one, steps are fast.
# Up to the second one, a run takes less time than its compilation.
_SMALL, _SHORT = 2**17, 2**21
# A run is brief if its number of steps is at most this number divided by the number of
# parameters times examples, and by the number of values that the model computes. Without
# optimisations it takes at most 0.3 s longer, and its compilation 1.3 to 2.4 s less.
_BRIEF = 2**22
# Steps of the first call of the program, and the factor by which this number grows as
# long as a call takes less than `_SECONDS`. Ctrl-C is noticed between calls.
_FIRST_STEPS, _GROWTH, _SECONDS = 1, 8, 0.5


def rows_for(max_steps: int) -> int:
    """Return the number of rows to allocate, which is the same for similar
    `max_steps`."""
    num_rows = _FEWEST_ROWS
    while num_rows < max_steps:
        num_rows *= _MORE_ROWS
    return num_rows


class _Now(NamedTuple):
    carry: Carry
    num_steps: Int[Array, ""]


class FullBatchRun(NamedTuple):
    """The end of a run, or of a part of it."""

    now: _Now
    rows: dict[str, Any]
    result: optx.RESULTS
    loss: Array
    is_interrupted: bool


def steps_inside(
    setting: StepSettings,
    data: tuple,
    start: tuple,
    max_steps: int | Int[Array, ""],
    num_rows: int,
) -> FullBatchRun:
    """Make all steps inside another compiled program.

    - `num_rows`: the number of rows of the history; 0 for no history.
    """
    sizes = num_rows, _types(jax.tree.leaves((setting, data, start)))
    number = jnp.array(max_steps)
    run = _steps(setting, data, start, None, sizes, number, number)
    return FullBatchRun(*run, is_interrupted=False)


def _types(leaves: list[Any]) -> tuple[type, ...]:
    """Return a part of the cache key: 3 == 3.0, but they need different programs."""
    return tuple(map(type, leaves))


def run(
    setting: StepSettings,
    data: tuple,
    start: tuple,
    max_steps: int,
    history: bool,
    bar: Bar,
) -> FullBatchRun:
    """Make all steps, in several calls of one program. Between calls, more history is
    allocated, the progress bar is updated and Ctrl-C is noticed."""
    leaves = jax.tree.leaves((setting, data, start))
    types = _types(leaves)

    def whole() -> FullBatchRun:
        num_rows = max_steps if history else 0
        return steps_inside(setting, data, start, max_steps, num_rows)

    # Inside another compiled program, make all steps in one call. The new array is traced
    # there, even if all leaves are constants that the program closes over.
    if is_traced([jnp.zeros(()), *leaves]):
        return whole()
    num_rows = min(rows_for(max_steps), _MOST_ROWS)
    sizes = num_rows if history else 0, types
    now: Any = start
    outputs, parts, is_interrupted = None, [], False
    most, left = num_rows, max_steps
    lengths = [len(x) for x in jax.tree.leaves(data) if jnp.ndim(x)]
    size = _tree.size(start[0]) * max(lengths, default=1)
    steps = _steps_quickly if size <= _SHORT else _steps
    if lengths and size * max_steps <= _BRIEF:
        num_values = max(lengths) * _num_values(setting)
        steps = _steps_briefly if num_values * max_steps <= _BRIEF else steps
    # If steps are fast, a single call initialises the run and makes all steps for which
    # history is allocated. The function of a group without data may be slow.
    if size > _SMALL or not lengths:
        now, outputs = _begun(setting, data, start, types)
        most = _FIRST_STEPS
        if is_traced(now):
            return whole()
    try:
        while left > 0 and (not parts or not now.carry.solver_state.is_over):
            began = time.monotonic()
            number = jnp.array(min(most, left)), jnp.array(left)
            part: Any = steps(setting, data, now, outputs, sizes, *number)
            # The model may close over traced arrays, for example under `jax.vmap`.
            if is_traced(part):
                if most < max_steps:
                    return whole()
                now, rows, *others = part
                rows = {name: x[:max_steps] for name, x in rows.items()}
                return FullBatchRun(now, rows, *others, is_interrupted=False)
            parts.append(part)  # kept if Ctrl-C is pressed while it is computed
            now = jax.block_until_ready(part[0])
            left = max_steps - int(now.num_steps)
            seconds = time.monotonic() - began
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
    return FullBatchRun(states[-1], rows, results[-1], losses[-1], is_interrupted)


def _num_values(setting: StepSettings) -> float:
    """Return the number of values that the network computes of one example; infinite if
    it has loops, or if it is not known."""
    is_program = lambda x: isinstance(x, Program)
    leaves = jax.tree.leaves(setting.network, is_leaf=is_program)
    programs = list(filter(is_program, leaves))
    return sum(x.traced.num_values for x in programs) if programs else math.inf


@eqx.filter_jit
def _begun(
    setting: StepSettings, data: tuple, start: tuple, types: tuple
) -> tuple[_Now, Shapes]:
    """Return the state before the first step, and the shapes of the outputs."""
    parameters, state = start
    outputs = checked_outputs(setting, parameters, state, data)
    return _Now(begin(setting, parameters, state, outputs), jnp.array(0)), outputs


def _all_steps(
    setting: StepSettings,
    data: tuple,
    now: tuple,
    outputs: Shapes | None,
    sizes: tuple,
    most: Array,
    left: Array,
):
    """Make at most `most` of the steps that are `left`, from the end `now` of another
    call (a `_Now`) with the shapes of the outputs, or from `now = (parameters, model
    state)`."""
    num_rows, _ = sizes
    inputs, places = data[0], setting.places
    # These lines are inside the program, so that the model is traced for its shapes only
    # once per compilation. The tracing can take longer than a run.
    begins = not isinstance(now, _Now)
    parameters, state = now if begins else (now.carry.parameters, now.carry.model_state)
    if outputs is None:
        outputs = checked_outputs(setting, parameters, state, data)
    objective = setting.objective(outputs, data)
    if begins:
        now = _Now(begin(setting, parameters, state, outputs), jnp.array(0))
    begun = now.num_steps

    def kept(carry):
        ours = keep((carry.parameters, carry.model_state), places.carry)
        return carry._replace(parameters=ours[0], model_state=ours[1])

    row = now.carry.solver_state.row()
    row |= dict.fromkeys(columns_of(setting.names).values(), row["loss"])
    row = row if num_rows else {}
    rows = jax.tree.map(lambda x: jnp.full(num_rows, jnp.nan, x.dtype), row)

    def step(now_and_rows):
        (carry, num_steps), rows = now_and_rows
        args = setting.args(inputs, num_steps, carry.model_state)
        carry, row, moved = advanced(setting, objective, args, carry, num_steps)
        # An index out of range drops the row of a step that was not made.
        at = jnp.where(moved, num_steps - begun, num_rows)
        rows = {k: r.at[at].set(row[k], mode="drop") for k, r in rows.items()}
        return _Now(kept(carry), num_steps + jnp.where(moved, 1, 0)), rows

    def goes_on(now_and_rows):
        now, _ = now_and_rows
        return ~now.carry.solver_state.is_over & (now.num_steps - begun < most)

    now, rows = jax.lax.while_loop(goes_on, step, (now, rows))
    carry, rows = forwards_only(now.carry), forwards_only(rows)
    if carry.watch is not None:
        is_last = now.num_steps - begun >= left
        carry = carry.after_all_steps(setting.divergence, is_last)
    carry = kept(carry)
    ended = carry.solver_state
    unfinished = optx.RESULTS.nonlinear_max_steps_reached
    result = optx.RESULTS.where(ended.is_over, ended.result, unfinished)
    others = everywhere((rows, result, carry.loss), places.mesh)
    return now._replace(carry=carry), *others


_steps = eqx.filter_jit(_all_steps)
_steps_quickly = quickly(_all_steps, has_loops=True)
_steps_briefly = quickly(_all_steps, has_loops=True, is_brief=True)
