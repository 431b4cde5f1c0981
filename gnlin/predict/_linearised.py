"""A model linearised on its training data, and on whatever else it is asked about."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, PyTree

from .._checks import check_count, check_flag
from .._data import as_batch, as_inputs
from .._linearisation import Linearisation, linearise
from .._losses import AbstractLoss, check_loss
from .._model import make_network, Network
from .._objective import AbstractObjective, objective_of
from .._tree import Structure


class LinearisedModel(eqx.Module):
    """- `train`: its linearisation on the training inputs.
    - `objective`: the loss on the training data.
    - `from_zero`: whether the outputs at the linearisation point count as zero.
    """

    network: Network
    loss: AbstractLoss
    train: Linearisation
    objective: AbstractObjective
    from_zero: bool = eqx.field(static=True)
    memory_budget: int = eqx.field(static=True)

    @staticmethod
    def of(
        model: PyTree,
        data: Any,
        loss: AbstractLoss,
        filter_spec: PyTree | Callable[[Any], bool],
        memory_budget: int,
        from_zero: bool,
    ) -> "LinearisedModel":
        check_loss(loss)
        check_flag("from_zero", from_zero)
        check_count("memory_budget", memory_budget)
        batch = as_batch(data)
        parameters, network = make_network(model, filter_spec)
        train = _linearise(network, parameters, batch[0], memory_budget, from_zero)
        outputs = Structure.of(train.outputs).tree
        loss.check(outputs, batch[1])
        objective = objective_of(loss, outputs, batch)
        fixed = from_zero, memory_budget
        return LinearisedModel(network, loss, train, objective, *fixed)

    def on(self, inputs: PyTree | None) -> Linearisation:
        """On other inputs; `None` for those of training."""
        if inputs is None:
            return self.train
        point = self.train.point
        return _linearise(
            self.network, point, as_inputs(inputs), self.memory_budget, self.from_zero
        )

    def objective_on(self, data: Any) -> AbstractObjective:
        """The loss on other data."""
        batch = as_batch(data)
        outputs = Structure.of(self.on(batch[0]).outputs).tree
        self.loss.check(outputs, batch[1])
        return objective_of(self.loss, outputs, batch)


def check_finite(numbers: PyTree[Array]) -> None:
    """What predictions are made of, where it is known."""
    leaves = jax.tree.leaves(numbers)
    if any(isinstance(x, Tracer) for x in leaves):
        return
    if not all(bool(jnp.all(jnp.isfinite(x))) for x in leaves):
        raise ValueError(
            "The model's outputs, its Jacobian or the data are not finite: nothing can "
            "be predicted from them."
        )


@eqx.filter_jit
def _linearise(
    network: Network,
    parameters: PyTree[Array],
    inputs: PyTree[Array],
    memory_budget: int,
    from_zero: bool,
) -> Linearisation:
    args = network.args(inputs, None, None)
    lin = linearise(network.function(), parameters, args, memory_budget=memory_budget)
    return (
        lin.with_outputs(jax.tree.map(jnp.zeros_like, lin.outputs)) if from_zero else lin
    )
