"""Data that are read in parts: arrays, memory maps, or the user's iterable of parts."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from .._common._complex import check_real
from ._arrays import arrays_of, columns_of


# About this many bytes of data are on the device at once.
_PART_BYTES = 2**24
# Points at which the function is called to see whether they are independent.
_FEW = 8


class Part(NamedTuple):
    """Some points. The leading axes of all arrays are over blocks and points.

    - `sigma`: like y; one number; or `None` if the errors are unknown.
    - `num_points`: the number of points; those after them are padding.
    """

    x: PyTree
    y: PyTree
    sigma: PyTree
    num_points: int


class Parts:
    """The data of a fit, which can be read any number of times."""

    def __init__(self, x: Any, y: Any, sigma: Any, block_size: Callable[[Any, Any], int]):
        """`x` yields tuples `(x, y)` or `(x, y, sigma)` if `y` is `None`. `block_size`
        returns the number of points in a block, given `(x, y)` of the first points."""
        self._parts, self._sigma, is_whole = x, sigma, y is not None
        if is_whole:
            self._parts = [(columns_of(x), arrays_of(y), arrays_of(sigma))]
            self._sigma = None
        else:
            if not callable(x) and (not isinstance(x, Iterable) or iter(x) is x):
                raise ValueError(
                    "Without `y`, `x` must yield the parts `(x, y)` of the data, and be "
                    "iterable any number of times: pass a list, or a function without "
                    f"arguments that returns an iterator, in place of {x!r}."
                )
            if sigma is not None and np.ndim(sigma) > 0:
                raise ValueError(
                    "`x` yields the data: let it yield `(x, y, sigma)`, and leave "
                    "`sigma` out, or pass one number."
                )
        firsts = list(itertools.islice(self._given(), 2))
        if not firsts:
            raise ValueError("There is no data: `x` and `y` have no points.")
        # The first part of a stream may be shorter than the others.
        longest = max(_num(y) for _, y, _ in firsts)
        x, y, sigma = first = firsts[0]
        self.has_sigma = sigma is not None
        rows = jax.tree.map(lambda v: v[:_FEW], (x, y))
        self.example = jax.tree.map(np.asarray, rows)
        leaves = jax.tree.leaves(first)
        each = sum(leaf.nbytes / len(leaf) for leaf in leaves if np.ndim(leaf))
        most = max(1, _PART_BYTES // each) if is_whole else np.inf
        num = int(min(longest, most))
        block = min(block_size(*self.example), num)
        # A part that is a whole number of blocks is not copied.
        smaller = range(block, block // 2, -1)
        self.block = next((size for size in smaller if num % size == 0), block)
        self.size = -(-num // self.block) * self.block
        self.num_points: int | None = None  # known after the first pass
        self.starts: list[int] = []  # the first point of each part

    def _given(self) -> Iterator[tuple]:
        """Yield the data as given: all arrays, or the user's parts."""
        parts: Any = self._parts() if callable(self._parts) else self._parts
        for part in parts:
            if not isinstance(part, tuple | list) or len(part) not in (2, 3):
                raise ValueError(
                    "`x` must yield tuples `(x, y)` or `(x, y, sigma)`, but yields a "
                    f"{type(part).__name__}."
                )
            if len(part) == 3 and self._sigma is not None:
                raise ValueError(
                    "`x` yields `(x, y, sigma)`: leave the argument `sigma` out."
                )
            x, y, sigma = (*part, self._sigma)[:3]
            points = columns_of(x), arrays_of(y), arrays_of(sigma)
            _check_lengths(*points)
            check_real("`sigma`", points[2])
            if _num(points[1]) > 0:  # A part of a filtered file may have no points.
                yield points

    def __iter__(self) -> Iterator[Part]:
        seen, self.starts = 0, []
        for x, y, sigma in self._given():
            for start in range(0, _num(y), self.size):
                self.starts.append(seen + start)
                cut = functools.partial(self._cut, start=start)
                x_, y_, sigma_ = (jax.tree.map(cut, part) for part in (x, y, sigma))
                yield Part(x_, y_, sigma_, min(_num(y) - start, self.size))
            seen += _num(y)
        if self.num_points not in (None, seen):
            raise ValueError(
                f"`x` yielded {self.num_points:,} points in the first pass, and "
                f"{seen:,} in a later one: each pass must see the same data."
            )
        self.num_points = seen

    def _cut(self, value: Any, start: int) -> Any:
        """Return the rows of one part in blocks. The last row fills up the last block."""
        if np.ndim(value) == 0:
            return value
        rows = value[start : start + self.size]
        missing = self.size - len(rows)
        if missing:
            rows = np.concatenate([rows, np.repeat(np.asarray(rows[-1:]), missing, 0)])
        return rows.reshape(-1, self.block, *rows.shape[1:])


def _num(y: PyTree) -> int:
    return len(jax.tree.leaves(y)[0])


def _check_lengths(x: PyTree, y: PyTree, sigma: PyTree) -> None:
    """Check that all arrays have one leading axis."""
    arrays = {"x": jax.tree.leaves(x), "y": jax.tree.leaves(y)}
    arrays["sigma"] = [s for s in jax.tree.leaves(sigma) if np.ndim(s)]
    shapes = {np.shape(v) for leaves in arrays.values() for v in leaves}
    if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
        said = ", ".join(
            f"`{name}` has {[np.shape(v) for v in leaves]}"
            for name, leaves in arrays.items()
            if leaves
        )
        raise ValueError(
            "Data in parts need a leading axis over the points on every array, of one "
            f"length, but {said}."
        )
    one_number = jax.tree.structure(sigma) == jax.tree.structure(0) and not np.ndim(sigma)
    same = jax.tree.map(np.shape, sigma) == jax.tree.map(np.shape, y)
    if sigma is not None and not one_number and not same:
        raise ValueError(
            "`sigma` of data in parts must be one number, or have the structure and "
            f"shapes of `y`, {jax.tree.map(np.shape, y)}, but has "
            f"{jax.tree.map(np.shape, sigma)}."
        )
