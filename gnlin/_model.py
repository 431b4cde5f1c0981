"""An Equinox model as trainable parameters and the rest."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from ._linearisation import check_parameters
from ._per_example import PerExample


def partition(
    model: PyTree, filter_spec: PyTree | Callable[[Any], bool]
) -> tuple[PyTree, PyTree]:
    """(parameters, frozen), as `equinox.partition`; checked."""
    parameters, frozen = eqx.partition(model, filter_spec)
    leaves = [leaf for leaf in jax.tree.leaves(parameters) if eqx.is_array(leaf)]
    if sum(leaf.size for leaf in leaves) == 0:
        raise ValueError(
            "The model has no trainable array: `filter_spec` selects none of its leaves."
        )
    if len(leaves) < len(jax.tree.leaves(parameters)):
        raise ValueError(
            "`filter_spec` selects leaves of the model that are not arrays; only "
            "floating-point arrays can be trained."
        )
    check_parameters(parameters)
    if not callable(model):
        raise ValueError("The model must be callable, on one example's input.")
    return parameters, frozen


def predict(frozen: PyTree, parameters: PyTree, x: PyTree) -> PyTree[Array]:
    """The output of the model that `partition` has taken apart."""
    return eqx.combine(parameters, frozen)(x)


class Network(eqx.Module):
    """A model as a function of its parameters, a batch of inputs, keys and its state.

    Without a state the examples are independent, and the function is a
    [`gnlin.PerExample`][]; with one, such as the statistics of batch normalisation, it is
    of the whole batch, and returns the new state beside the outputs.
    """

    frozen: PyTree
    takes_key: bool = eqx.field(static=True)
    has_state: bool = eqx.field(static=True)
    axis_name: str = eqx.field(static=True)

    def function(self) -> Callable[[PyTree, Any], Any]:
        """`fn(parameters, args)`, with `args` from `args`."""
        if self.has_state:
            return eqx.Partial(_apply_with_state, self)
        return PerExample(eqx.Partial(_apply, self))

    def args(self, inputs: PyTree, keys: Array | None, state: PyTree) -> tuple:
        keys = keys if self.takes_key else None
        return (inputs, keys, state) if self.has_state else (inputs, keys)

    def in_inference(self) -> "Network":
        """Without dropout, and with the statistics that training has gathered."""
        frozen = eqx.nn.inference_mode(self.frozen)
        return Network(frozen, self.takes_key, self.has_state, self.axis_name)


def make_network(
    model: PyTree,
    filter_spec: PyTree | Callable[[Any], bool],
    state: PyTree = None,
    axis_name: str = "batch",
) -> tuple[PyTree, Network]:
    """(parameters, the function of them)."""
    parameters, frozen = partition(model, filter_spec)
    if state is None and _has_state(model):
        raise ValueError(
            "The model has state, such as batch normalisation's: make it by "
            "`model, state = equinox.nn.make_with_state(Model)(...)`, and pass `state`."
        )
    if state is not None and not _has_state(model):
        raise ValueError("The model has no state: leave `state` out.")
    return parameters, Network(frozen, _takes_key(model), state is not None, axis_name)


def _apply(network: Network, parameters: PyTree, example: tuple) -> PyTree[Array]:
    x, key = example
    model = eqx.combine(parameters, network.frozen)
    return model(x, key=key) if network.takes_key else model(x)


def _apply_with_state(
    network: Network, parameters: PyTree, args: tuple
) -> tuple[PyTree[Array], PyTree]:
    inputs, keys, state = args
    model = eqx.combine(parameters, network.frozen)

    def one(x, key, state):
        return model(x, state, key=key) if network.takes_key else model(x, state)

    batched = jax.vmap(
        one, axis_name=network.axis_name, in_axes=(0, 0, None), out_axes=(0, None)
    )
    try:
        return batched(inputs, keys, state)
    except NameError as error:  # JAX's, of an axis that is not there
        if "axis name" not in str(error):
            raise
        raise ValueError(
            "The model normalises over another axis than "
            f"{network.axis_name!r}: pass its `axis_name`."
        ) from error


def _has_state(model: PyTree) -> bool:
    index = lambda x: isinstance(x, eqx.nn.StateIndex)
    return any(map(index, jax.tree.leaves(model, is_leaf=index)))


def _takes_key(model: Any) -> bool:
    try:
        return "key" in inspect.signature(model).parameters
    except (TypeError, ValueError):
        return False
