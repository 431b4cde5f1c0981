"""Conversion of what users pass, such as lists and data frames, to arrays."""

import datetime
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree


_TIMES = datetime.date, datetime.time, datetime.timedelta


def as_x(x: PyTree[Any]) -> PyTree[Array]:
    """Convert x to a pytree of arrays."""
    return jax.tree.map(lambda value: as_array(value, "x"), columns_of(x))


def columns_of(x: PyTree[Any]) -> PyTree[Any]:
    """Return a data frame as a dictionary of its columns, and the others as by
    `arrays_of`."""

    def of_one(value):
        if hasattr(value, "columns") and hasattr(value, "to_numpy"):
            return {str(name): value[name] for name in value.columns}
        return value

    return arrays_of(jax.tree.map(of_one, x))


def arrays_of(values: PyTree[Any]) -> PyTree[Any]:
    """Return lists of numbers, and series and frames of pandas, as arrays. Arrays are not
    read."""

    def of_one(value):
        if isinstance(value, list):
            return np.asarray(value)
        return value.to_numpy() if hasattr(value, "to_numpy") else value

    return jax.tree.map(of_one, values, is_leaf=_is_of_numbers)


def _is_of_numbers(value: Any) -> bool:
    """Whether this is a list of numbers, or of such lists of one shape."""
    if not isinstance(value, list):
        return False
    if all(isinstance(v, int | float | complex | np.number | np.bool_) for v in value):
        return True
    return all(map(_is_of_numbers, value)) and len(set(map(np.shape, value))) == 1


def as_array(value: Any, name: str) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            f"`{name}` is a masked array, whose mask would be lost: pass "
            f"`{name}.filled(np.nan)` as floating-point numbers, and "
            '`nan_policy="omit"`.'
        )
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        known = np.asarray(value, None if isinstance(value, np.ndarray) else object)
        first = known.ravel()[0] if known.size else None
        if known.dtype.kind in "mM" or isinstance(first, _TIMES):
            raise ValueError(
                f"`{name}` holds dates or times: pass numbers, such as days, which for a "
                f'NumPy array are `({name} - {name}[0]) / np.timedelta64(1, "D")`.'
            ) from error
        of_model = " (for a model, those from `eqx.partition`)" * callable(value)
        given = f"an array of {known.dtype}" if hasattr(value, "dtype") else repr(value)
        raise ValueError(
            f"`{name}` must hold numbers or arrays{of_model}, but {given} was given."
        ) from error


def as_floats(value: Any, name: str) -> Array:
    """Convert a number or an array to an array of floats."""
    value = as_array(value, name)
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise ValueError(
            f"`{name}` must be real: pass the real and the imaginary part separately."
        )
    # An explicit dtype avoids a weak type, which would trigger a second compilation.
    kind = value.dtype if jnp.issubdtype(value.dtype, jnp.floating) else float
    return jnp.asarray(value, kind)
