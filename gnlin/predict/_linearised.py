"""A model linearised on its training data and on other inputs."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, PyTree

from .._common import _tree
from .._common._checks import check_count, check_flag
from .._common._tree import Structure
from .._linearisation._linearisation import Linearisation, linearise
from .._linearisation._objective import BatchLoss
from .._training._data import as_batch, as_inputs
from .._training._model import make_network, Network, partition
from .._training._residuals import refuse_groups
from ..losses import AbstractLoss
from ..losses._base import check_loss
from ..losses._of_examples import loss_beside


class LinearisedModel(eqx.Module):
    """A linearised model with its training data.

    - `train`: the linearisation on the training inputs.
    - `objective`: the loss on the training data.
    - `from_zero`: whether the outputs at the linearisation point count as zero.
    - `about`: the mean of the prior, if it is not the linearisation point.
    - `start`: where the linearised model starts, if not there.
    """

    network: Network
    train: Linearisation
    objective: BatchLoss
    from_zero: bool = eqx.field(static=True)
    about: PyTree[Array] | None
    start: PyTree[Array] | None

    @staticmethod
    def of(
        model: PyTree,
        data: Any,
        loss: AbstractLoss,
        filter_spec: PyTree | Callable[[Any], bool],
        memory_budget: int,
        from_zero: bool,
        about: PyTree | None = None,
        starts_there: bool = True,
    ) -> "LinearisedModel":
        check_loss(loss)
        check_flag("from_zero", from_zero)
        check_count("memory_budget", memory_budget)
        refuse_groups(data)
        batch = as_batch(data)
        parameters, network = make_network(model, filter_spec)
        if about is not None:
            about = _parameters_of(about, parameters, filter_spec)
        start = about if starts_there else None
        fixed = memory_budget, from_zero, start
        train = _linearise(network, parameters, batch[0], *fixed)
        objective = _loss_on(train, loss, batch)
        return LinearisedModel(network, train, objective, from_zero, about, start)

    def on(self, inputs: PyTree | None) -> Linearisation:
        """Linearise on other inputs; `None` for the training inputs."""
        if inputs is None:
            return self.train
        fixed = self.train.jacobian.memory_budget, self.from_zero, self.start
        return _linearise(self.network, self.train.point, as_inputs(inputs), *fixed)

    def moved(self) -> PyTree[Array]:
        """Return the parameters relative to the mean of the prior, or to zero."""
        point, about = self.train.point, self.about
        return point if about is None else _tree.axpy(-1, about, point)

    def on_data(self, data: Any) -> tuple[Linearisation, BatchLoss]:
        """Linearise on the inputs of other data; also return their loss."""
        batch = as_batch(data)
        on = self.on(batch[0])
        return on, _loss_on(on, self.objective.loss, batch)


def _loss_on(on: Linearisation, loss: AbstractLoss, batch: tuple) -> BatchLoss:
    """Return the loss of a batch, after a check of its targets."""
    outputs = Structure.of(on.outputs).tree
    loss, batch = loss_beside(loss, batch)
    loss.check(outputs, batch[1])
    return BatchLoss(loss, outputs, *batch[1:])


def check_finite(numbers: PyTree[Array]) -> None:
    """Raise if some of the numbers are not finite, unless they are traced."""
    finite = _tree.all_finite(numbers)
    if not isinstance(finite, Tracer) and not finite:
        raise ValueError(
            "The model's outputs, its Jacobian or the data are not finite: nothing can "
            "be predicted from them."
        )


def _parameters_of(
    model: PyTree, like: PyTree[Array], filter_spec: PyTree | Callable[[Any], bool]
) -> PyTree[Array]:
    parameters, _ = partition(model, filter_spec)
    if not _tree.alike(parameters, like):
        raise ValueError(
            "`about` must be a model of the same structure and shapes as `model`, such "
            "as `model` before training."
        )
    return parameters


@eqx.filter_jit
def _linearise(
    network: Network,
    parameters: PyTree[Array],
    inputs: PyTree[Array],
    memory_budget: int,
    from_zero: bool,
    about: PyTree[Array] | None,
) -> Linearisation:
    args = network.args(inputs, None, None)
    lin = linearise(network.function(), parameters, args, memory_budget=memory_budget)
    if from_zero:
        return lin.with_outputs(jax.tree.map(jnp.zeros_like, lin.outputs))
    return lin if about is None else lin.with_outputs(lin(about))
