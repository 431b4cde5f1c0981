"""The state that a run returns, ready for inference."""

from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, ScalarLike

from .._training._statistics import (
    at_the_end,
    doubt_of_batches,
    doubt_of_full_batch,
    Losses,
    losses_on,
    norms_of,
    over_batches,
)
from .._training._step import Carry, StepSettings
from ._stream import ArrayStream, Batch, gather, IterableStream


Stream = ArrayStream | IterableStream

# Statistics are means over batches of at most this many examples, drawn in an epoch's
# order, or over one batch. More examples would change them by little, and a pass over an
# epoch for each validation might take longer than the steps.
_MOST_EXAMPLES = 10_000
# Number of batches on which training and inference mode are compared.
_COMPARED = 3


def refreshed(
    setting: StepSettings,
    stream: Stream,
    parameters: PyTree,
    state: PyTree,
    number: int,
) -> PyTree:
    """Return the model's state with the running statistics of batch normalisation at
    these parameters, if all data are at hand.

    - `number`: of the steps so far, for the keys of the passes.
    """
    network: Any = setting.network
    if not (network.has_state and stream.has_all):
        return state
    size = len(jax.tree.leaves(_gathered(setting, stream.first())[0])[0])
    some = stream.some(max(_MOST_EXAMPLES // size, 1))
    inputs = _inputs(setting, (_gathered(setting, batch) for batch in some), number)
    return over_batches(network, parameters, state, inputs)


def ready(
    setting: StepSettings,
    stream: Stream,
    carry: Carry,
    chosen: tuple[PyTree, PyTree] | None,
    number: int,
    first: float,
) -> tuple[PyTree, ScalarLike, str]:
    """Return the model's state for inference with the parameters that the run returns,
    the loss of the last ones on a full batch, and a sentence with a doubt, or "".

    - `chosen`: the parameters and the state of a callback in place of the last ones.
    - `number`: of the steps so far, for the keys of the passes.
    - `first`: the first loss of the run.
    """
    if not setting.network.has_state:
        state = carry.model_state if chosen is None else chosen[1]
        return state, carry.loss, ""
    if chosen is None and carry.before is not None:
        state, loss = at_the_end(setting, carry, stream.example)
        losses = losses_on(setting, carry.parameters, state, stream.example, loss)
        return state, loss, doubt_of_full_batch("fit", losses, first)
    parameters, state = chosen or (carry.parameters, carry.model_state)
    state = refreshed(setting, stream, parameters, state, number)
    batches = [_gathered(setting, batch) for batch in stream.some(_COMPARED)]
    losses = _mean_losses(setting, parameters, state, batches)
    network: Any = setting.network
    norms = norms_of(network.frozen.in_training(parameters), state)
    can_refresh = bool(norms) and not stream.has_all
    if losses is not None and can_refresh:
        # What would the statistics of the last parameters be worth?
        inputs = _inputs(setting, batches, number)
        with_last = over_batches(network, parameters, state, inputs)
        fresh = _mean_losses(setting, parameters, with_last, batches)
        assert fresh is not None
        training = min(float(losses.training), float(fresh.inference))
        losses = losses._replace(training=training)
    doubt = doubt_of_batches(losses, first, is_refreshed=not can_refresh)
    return state, carry.loss, doubt


def _mean_losses(
    setting: StepSettings, parameters: PyTree, state: PyTree, batches: list[tuple]
) -> Losses | None:
    each = [losses_on(setting, parameters, state, data) for data in batches]
    known = [losses for losses in each if losses is not None]
    if len(known) < len(each):
        return None
    return Losses(*(sum(x) / len(x) for x in zip(*known, strict=True)))


def _gathered(setting: StepSettings, batch: Batch) -> tuple:
    size = setting.batch_size or 0
    return gather(batch.data, batch.order, jnp.int32(batch.index), size, size)


def _inputs(
    setting: StepSettings, batches: Iterable[tuple], number: int
) -> Iterator[tuple[PyTree, Any]]:
    """Yield the inputs of batches, with the keys of steps after `number`."""
    for i, (inputs, *_) in enumerate(batches):
        yield _augmented(setting, inputs, jnp.int32(number + i))


@eqx.filter_jit
def _augmented(setting: StepSettings, inputs: PyTree, number: Array) -> tuple:
    augmented, keys, _ = setting.args(inputs, number, None)
    return augmented, keys
