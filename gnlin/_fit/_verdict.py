"""What is said of the end of a run on batches."""

import numpy as np

from .._common._history import History
from .._training._ending import explains_little, group_at_fault
from .._training._step import Carry, checked_outputs, StepSettings
from ._stream import ArrayStream, IterableStream


# After this many epochs and steps, a run on batches is judged by what it explains.
_EPOCHS_JUDGED, _STEPS_JUDGED = 10, 100


def doubt_of_model(
    setting: StepSettings,
    stream: ArrayStream | IterableStream,
    carry: Carry,
    epoch: int,
    history: History,
) -> str:
    """Return a sentence if the model explains little of the targets, or "". A run on
    batches is judged by its best epoch, if it was not short."""
    if not isinstance(stream, ArrayStream):
        return ""
    given = "fit", setting, stream.example
    if not setting.streaming:
        if not carry.solver_state.is_over:
            return ""
        return explains_little(*given, float(carry.loss), "start elsewhere")
    if epoch < _EPOCHS_JUDGED or len(history.loss) < _STEPS_JUDGED:
        return ""
    known = ~np.isnan(history.loss)  # a batch in which no target counts has no loss
    epochs, losses = history["epoch"][known].astype(int), history.loss[known]
    numbers = np.bincount(epochs)
    best = np.min(np.bincount(epochs, losses)[numbers > 0] / numbers[numbers > 0])
    return explains_little(*given, float(best), "train for longer")


def data_at_fault(
    setting: StepSettings,
    stream: ArrayStream | IterableStream,
    carry: Carry,
    number: int,
    row: dict[str, float],
) -> str:
    """Return a sentence that names the data that are not finite, or the group whose loss
    is not, or "".

    - `number`, `row`: the number of the last step, and its row of the history.
    """
    model = carry.parameters, carry.model_state
    check = lambda batch: checked_outputs(setting, *model, batch)
    return stream.at_fault(check) or group_at_fault(
        setting, carry, stream.example, number, row
    )
