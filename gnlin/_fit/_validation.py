"""The evaluation of validation data."""

import math
from collections.abc import Callable, Iterator

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PyTree

from .._common._canonical import split
from .._training._model import Network
from .._training._step import all_checked, Carry, Shapes, StepSettings
from ._step import Compiled, evaluate, with_shared_network
from ._stream import ArrayStream, make_stream


# Number of examples that are evaluated together if there is no batch size.
_VALIDATION_BATCH = 1000


class Validation:
    """Validation data, and the loss and metrics to evaluate on them.

    - `fault`: a sentence that names data that are not finite, once the loss is not.
    """

    def __init__(
        self, setting: StepSettings, carry: Carry, data, metrics, linearised: bool
    ):
        assert isinstance(setting.network, Network)  # groups have no validation
        inference = eqx.nn.inference_mode(setting.network)
        setting = setting._replace(network=inference, augment=None, prior=None)
        self._structure = carry
        names = ["loss", *metrics]
        self.columns = [f"validation_{name}" for name in names]
        if linearised:
            self.columns += [f"validation_{name}_linearised" for name in names]
        if isinstance(data, Iterator):
            raise ValueError(
                "`validation` is an iterator, which can be iterated only once: pass a "
                "list, a loader, or a function of the epoch that returns an iterable."
            )
        self._stream = make_stream(data, None, None, "validation")
        trained = carry.parameters, carry.model_state
        outputs = all_checked(setting, *trained, self._stream.at_hand())
        example = self._stream.example
        for name, metric in metrics.items():
            _check_metric(name, metric, outputs, example[1])
        if not inference.takes_key:  # validation has no keys
            setting = with_shared_network(setting, carry.parameters, self._stream)
        self._fixed = setting, tuple(metrics.values()), linearised
        self._batch_size = setting.batch_size
        self.fault = ""

    def look(self, arrays: list[Array], state: PyTree, epoch: int) -> dict[str, float]:
        """Return the means of the loss and metrics for the arrays of a carry, and the
        model's state for inference."""
        if isinstance(self._stream, ArrayStream):
            batches = _chunks(self._stream.example, self._batch_size)
        else:
            batches = (batch.data for batch in self._stream.epoch(epoch, 0))
        sums = []
        for batch in batches:
            changing = self._structure, state, batch
            look = Compiled(evaluate, self._fixed, *changing)
            ((sum_,),) = look(arrays, split(state)[0], split(batch)[0])
            sums.append(sum_)
        weight, number, *figures = np.sum([np.asarray(x) for x in sums], axis=0)
        per_look = 1 + len(self._fixed[1])  # the loss and each metric
        totals = [weight if i % per_look == 0 else number for i in range(len(figures))]
        means = [
            float(figure / total) if total > 0 else math.nan
            for figure, total in zip(figures, totals, strict=True)
        ]
        if not (self.fault or math.isfinite(means[0])):
            self.fault = self._stream.at_fault(lambda _: None)
        return dict(zip(self.columns, means, strict=True))


def _check_metric(name: str, metric: Callable, outputs: Shapes, targets: PyTree) -> None:
    try:
        found = jax.eval_shape(metric, outputs, targets)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise ValueError(
            f"The metric {name!r} is compiled, so it cannot use NumPy, Python's `float` "
            "or boolean indices: use `jax.numpy` and `jnp.where`."
        ) from error
    if getattr(found, "shape", None) != ():
        what = f"a {type(found).__name__}"
        if hasattr(found, "shape"):
            what = f"an array of the shape {found.shape}"
        raise ValueError(
            f"The metric {name!r} must return one number, the mean over the examples, "
            f"but returns {what}."
        )


def _chunks(data: tuple, batch_size: int | None) -> Iterator[tuple]:
    """Yield parts of the data, one at a time, so that no second copy is held."""
    num_examples = jax.tree.leaves(data[0])[0].shape[0]
    size = batch_size or _VALIDATION_BATCH
    size = max(size, min(_VALIDATION_BATCH, num_examples) // 4)
    for i in range(0, num_examples, size):
        yield jax.tree.map(lambda x, i=i: x[i : i + size], data)
