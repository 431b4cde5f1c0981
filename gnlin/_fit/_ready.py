"""The state that a run returns, ready for inference."""

from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, ScalarLike

from .._training._statistics import at_the_end, doubt_of_inference, norms_of, over_batches
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
    losses: Any,
) -> tuple[PyTree, ScalarLike, str]:
    """Return the model's state for inference with the parameters that the run returns,
    the loss of the last ones on a full batch, and a sentence with a doubt, or "".

    - `chosen`: the parameters and the state of a callback in place of the last ones.
    - `number`: of the steps so far, for the keys of the passes.
    - `losses`: those of the history.
    """
    parameters, state = chosen or (carry.parameters, carry.model_state)
    if not setting.network.has_state:
        return state, carry.loss, ""
    if chosen is None and carry.before is not None:
        state, loss = at_the_end(setting, carry, stream.example)
        given = "fit", setting, parameters, state, [stream.example], losses
        return state, loss, doubt_of_inference(*given, training=loss)
    state = refreshed(setting, stream, parameters, state, number)
    batches = [_gathered(setting, batch) for batch in stream.some(_COMPARED)]
    network: Any = setting.network
    remedy = "take larger batches, or train on a full batch"
    if not stream.has_all and norms_of(network.frozen.in_training(parameters), state):
        remedy = (
            "take the statistics of the last parameters by `state = "
            "gnlin.predict.batch_statistics(model, state, inputs, batch_size=...)`"
        )
    given = "fit", setting, parameters, state, batches, losses, remedy
    return state, carry.loss, doubt_of_inference(*given)


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
