"""A check of the rows of parameters that the examples of a group read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from ._group_network import failed


def check_selection(
    name: str, select: Callable[[Any], Any], data: Any, parameters: PyTree[Array]
) -> None:
    """Raise `ValueError` if the `select` of a group fails, or selects invalid rows of
    concrete data."""
    if callable(data):
        data = jax.eval_shape(data, jax.random.key(0))
    unknown = Tracer | jax.ShapeDtypeStruct
    known = not any(isinstance(x, unknown) for x in jax.tree.leaves(data))
    select_all = jax.vmap(select)
    try:
        rows = jax.eval_shape(select_all, data)
        if known:
            with jax.ensure_compile_time_eval():  # concrete even while tracing
                rows = select_all(data)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        what = f"`select` of the group {name!r} is called with one example"
        raise failed(what, error) from error
    structure = jax.tree.structure(parameters)
    if jax.tree.structure(rows) != structure:
        raise ValueError(
            f"`select` of the group {name!r} must return the structure of the model's "
            f"trained arrays, {structure}, but returns {jax.tree.structure(rows)}."
        )
    leaves = jax.tree.leaves(rows), jax.tree.leaves(parameters)
    for chosen, array in zip(*leaves, strict=True):
        if not jnp.issubdtype(chosen.dtype, jnp.integer) or array.ndim == 0:
            raise ValueError(
                f"`select` of the group {name!r} must return whole numbers, the rows of "
                f"each array, but for an array of the shape {array.shape} it returns "
                f"numbers of dtype {chosen.dtype}."
            )
        if not isinstance(chosen, Array) or isinstance(chosen, Tracer):
            continue
        chosen = np.asarray(chosen)
        bad = np.flatnonzero((chosen < 0) | (chosen >= array.shape[0]))
        if bad.size > 0:
            wrong, each = chosen.ravel()[bad[0]], max(1, chosen.size // len(chosen))
            raise ValueError(
                f"Example {bad[0] // each} of the group {name!r} selects row {wrong} of "
                f"an array that has {array.shape[0]} rows."
            )
