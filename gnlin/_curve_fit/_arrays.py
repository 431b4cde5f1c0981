"""Conversion of what users pass, such as lists and data frames, to arrays."""

import datetime
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._common import _tree
from .._common._checks import to_jax
from .._common._warn import warn


_TIMES = datetime.date, datetime.time, datetime.timedelta


def as_x(x: PyTree[Any]) -> PyTree[Array]:
    """Convert x to a pytree of arrays."""
    of_leaf = lambda path, v: as_array(v, f"x{jax.tree_util.keystr(path)}")
    return jax.tree_util.tree_map_with_path(of_leaf, columns_of(x))


def columns_of(x: PyTree[Any]) -> PyTree[Any]:
    """Convert a data frame to a dictionary of its columns, and anything else as
    `arrays_of` does."""
    return arrays_of(_tree.columns(x))


def arrays_of(values: PyTree[Any]) -> PyTree[Any]:
    """Convert lists of numbers, and series and frames of pandas, to arrays. Arrays, such
    as memory maps, are returned without being read."""

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


def in_each_leaf(value: Any, tree: PyTree) -> PyTree:
    """Return a number, or an array, as a pytree like `tree`, and a pytree unchanged."""
    is_leaf = jax.tree.structure(value) == jax.tree.structure(0)
    return jax.tree.map(lambda _: value, tree) if is_leaf else value


def unstacked(tree: PyTree[Array]) -> list[PyTree[Array]]:
    """Return the entries along the leading axis of all arrays, each as a pytree."""
    number = len(jax.tree.leaves(tree)[0])
    return [jax.tree.map(lambda v, k=k: v[k], tree) for k in range(number)]


def as_array(value: Any, name: str) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            f"`{name}` is a masked array, whose mask would be lost: pass "
            f"`{name}.filled(np.nan)` as floating-point numbers, and "
            '`nan_policy="omit"`.'
        )
    try:
        return to_jax(value)
    except (TypeError, ValueError) as error:
        known = np.asarray(value, None if isinstance(value, np.ndarray) else object)
        first = known.ravel()[0] if known.size else None
        if known.dtype.kind in "mM" or isinstance(first, _TIMES):
            raise ValueError(
                f"`{name}` holds dates or times: pass numbers, such as days, which for a "
                f'NumPy array are `({name} - {name}[0]) / np.timedelta64(1, "D")`.'
            ) from error
        if isinstance(first, str) and not isinstance(value, str):
            raise ValueError(
                f"`{name}` holds text: convert numbers by `np.asarray({name}, float)`, "
                "and categories to indices by "
                f"`np.unique({name}, return_inverse=True)[1]`."
            ) from error
        if known.dtype == object and hasattr(value, "dtype"):
            raise ValueError(
                f"`{name}` is an array of Python objects: convert them to numbers by "
                f"`np.asarray({name}, float)`, or `pandas.to_numeric`."
            ) from error
        of_model = callable(value) * (
            " (of a network, the arrays from `eqx.partition`; `gnlin.solve` trains it as "
            "it is)"
        )
        given = f"an array of {known.dtype}" if hasattr(value, "dtype") else repr(value)
        raise ValueError(
            f"`{name}` must hold numbers or arrays{of_model}, but {given} was given."
        ) from error


# Rounding errors up to this part of the range of the data cause no warning.
_MOST_ROUNDED = 1e-4


def warn_of_rounding(**data: PyTree[Any]) -> None:
    """Warn the user if single precision loses too much of an array, such as dates that
    are counted from a time long ago.

    - `data`: x and y, by their names.
    """
    single = jax.dtypes.canonicalize_dtype(float)
    if single.itemsize == 8:
        return
    named = [(k, v) for k in data for v in jax.tree.leaves(columns_of(data[k]))]
    for name, value in named:
        is_real = isinstance(value, np.ndarray) and value.dtype.kind in "iuf"
        if not is_real or single.itemsize >= value.dtype.itemsize:
            continue
        value = value.astype(float)
        value = value[np.abs(value) < np.finfo(single).max]
        if value.size < 2:
            continue
        error, span = np.max(np.abs(value - value.astype(single))), np.ptp(value)
        if error > _MOST_ROUNDED * span > 0:
            warn(
                f"`gnlin.curve_fit`: single precision rounds `{name}` by {error:.2g}, "
                f"and its range is {span:.2g}: subtract an offset before the call, or "
                "set `jax_enable_x64`."
            )


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
