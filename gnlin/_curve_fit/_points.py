"""The user's points, which are rows of y. In the flattened y a point may be several
numbers, such as the real and the imaginary part of a complex number."""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, PyTree

from .._common._words import name_of


def num_of(like: PyTree) -> tuple[int, int]:
    """Return how many points, and how many real numbers, y has.

    - `like`: the shapes and types of y of one data set, here and below.
    """
    leaves = jax.tree.leaves(like)
    return sum(map(_num_rows, leaves)), sum(map(_num_numbers, leaves))


def by_point(flags: Bool[np.ndarray, "*sets m"], like: PyTree) -> PyTree[np.ndarray]:
    """Return, in the structure of y, which points have a marked number in the flattened
    y."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([_num_numbers(leaf) for leaf in leaves])[:-1]
    parts = zip(np.split(flags, ends, axis=-1), leaves, strict=True)
    sets = flags.shape[:-1]

    def of_leaf(part, leaf):
        rows = _num_rows(leaf)
        return part.reshape(*sets, rows, part.shape[-1] // max(rows, 1)).any(axis=-1)

    return structure.unflatten([of_leaf(*pair) for pair in parts])


def total(flags: PyTree[np.ndarray]) -> int:
    """Return the number of marked points."""
    return sum(int(np.sum(leaf)) for leaf in jax.tree.leaves(flags))


def listed(points: PyTree[np.ndarray], most: int) -> str:
    """Return indices of points in words, at most so many for each array of y."""

    def each() -> Iterator[str]:
        for path, indices in jax.tree_util.tree_leaves_with_path(points):
            if indices.size > 0:
                more = ", ..." if indices.size > most else ""
                of = f" of `{name_of(path)}`" if path else ""
                yield ", ".join(map(str, indices[:most])) + more + of

    return "; ".join(each())


def place_of(entry: int, like: PyTree) -> tuple[str, int | None, tuple[int, ...]]:
    """Return where an entry of the flattened y is: in words, its point, and the shape of
    its array."""
    named = jax.tree_util.tree_leaves_with_path(like)
    ends = np.cumsum([_num_numbers(leaf) for _, leaf in named])
    which = int(np.searchsorted(ends, entry, side="right"))
    path, leaf = named[which]
    inside = entry - (int(ends[which]) - _num_numbers(leaf))
    index = np.unravel_index(inside // _num_parts(leaf), leaf.shape)
    words = f"at point {', '.join(map(str, index))}" if index else "there"
    words += f" of `{name_of(path)}`" if path else ""
    return words, int(index[0]) if index else None, leaf.shape


def _num_rows(leaf: jax.ShapeDtypeStruct) -> int:
    return leaf.shape[0] if leaf.shape else 1


def _num_parts(leaf: jax.ShapeDtypeStruct) -> int:
    return 2 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else 1


def _num_numbers(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * _num_parts(leaf)
