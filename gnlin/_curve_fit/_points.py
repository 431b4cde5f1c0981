"""The user's points: rows of y, or its numbers if each has an x of its own, as the pixels
of an image have. In the flattened y a point may be several numbers, such as the real and
the imaginary part of a complex number."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from .._common._words import name_of


Index = tuple[int, ...]


def num_of(like: PyTree, x: PyTree = None) -> tuple[int, int]:
    """Return how many points, and how many real numbers, y has.

    - `like`: the shapes and types of y of one data set, here and below.
    - `x`: x; or `None` if the numbers of a row belong together in any case.
    """
    leaves = jax.tree.leaves(like)
    points = sum(math.prod(_shape_of_points(leaf, x)) for leaf in leaves)
    return points, sum(map(_num_numbers, leaves))


def by_point(
    flags: Bool[Array | np.ndarray, "*sets m"], like: PyTree, x: PyTree = None
) -> PyTree:
    """Return, in the structure of y, which points have a marked number in the flattened
    y."""
    leaves, structure = jax.tree.flatten(like)
    end, found = 0, []
    for leaf in leaves:
        begin, end = end, end + _num_numbers(leaf)
        shape = _shape_of_points(leaf, x)
        of_each = (end - begin) // max(math.prod(shape), 1)
        part = flags[..., begin:end].reshape(*flags.shape[:-1], *shape, of_each)
        found.append(part.any(axis=-1))
    return structure.unflatten(found)


def total(flags: PyTree[np.ndarray]) -> int:
    """Return the number of marked points."""
    return sum(int(np.sum(leaf)) for leaf in jax.tree.leaves(flags))


def listed(flags: PyTree[np.ndarray], most: int) -> str:
    """Return the indices of marked points in words, at most so many for each array of
    y."""

    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(flags):
        if leaf.any():
            rows = np.argwhere(leaf).tolist()
            words = [str(row[0] if len(row) == 1 else tuple(row)) for row in rows]
            more = ", ..." if len(words) > most else ""
            of = f" of `{name_of(path)}`" if path else ""
            found.append(", ".join(words[:most]) + more + of)
    return "; ".join(found)


def place_of(entry: int, like: PyTree) -> tuple[str, Index, Index]:
    """Return where an entry of the flattened y is: in words, its index in its array, and
    the shape of this array."""
    named = jax.tree_util.tree_leaves_with_path(like)
    ends = np.cumsum([_num_numbers(leaf) for _, leaf in named])
    which = int(np.searchsorted(ends, entry, side="right"))
    path, leaf = named[which]
    inside = entry - (int(ends[which]) - _num_numbers(leaf))
    index = np.unravel_index(inside // _num_parts(leaf), leaf.shape)
    index = tuple(map(int, index))
    words = f"at point {', '.join(map(str, index))}" if index else "there"
    words += f" of `{name_of(path)}`" if path else ""
    return words, index, leaf.shape


def _shape_of_points(leaf: jax.ShapeDtypeStruct, x: PyTree) -> Index:
    """Return the leading axes of an array of y that are over points: all of them if all
    arrays of x have its shape, and else the first."""
    of_x = {np.shape(value) for value in jax.tree.leaves(x)} - {()}
    return (leaf.shape if of_x == {leaf.shape} else leaf.shape[:1]) or (1,)


def _num_parts(leaf: jax.ShapeDtypeStruct) -> int:
    return 2 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else 1


def _num_numbers(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * _num_parts(leaf)
