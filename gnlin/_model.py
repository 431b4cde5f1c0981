"""An Equinox model as trainable parameters and the rest."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from ._linearisation import check_parameters


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
