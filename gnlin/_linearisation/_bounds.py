"""Bounds on the parameters."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, PyTree

from .._common import _tree
from .._common._checks import check_names
from .._common._sharding import is_here


class Box(eqx.Module):
    """All points between `lower` and `upper`, which have the parameters' structure."""

    lower: PyTree[Array]
    upper: PyTree[Array]

    @staticmethod
    def of(bounds: Any, y: PyTree[Array]) -> "Box":
        """Return the box of a pair `(lower, upper)`. Each bound is a number, `None`, or a
        prefix tree of the parameters with such leaves."""
        check_pair(bounds)
        lower = _spread(like(y, bounds[0], -np.inf), y, -jnp.inf, "lower")
        upper = _spread(like(y, bounds[1], np.inf), y, jnp.inf, "upper")
        return Box(lower, upper)

    def clip(self, y: PyTree[Array]) -> PyTree[Array]:
        """Return the nearest point in the box. Entries are NaN if their lower bound is
        above the upper one, since traced bounds cannot be checked earlier."""

        def each(x, low, high):
            return jnp.where(low <= high, jnp.clip(x, low, high), jnp.nan)

        return jax.tree.map(each, y, self.lower, self.upper)

    def moved(self, y: PyTree[Array], step: PyTree[Array]) -> PyTree[Array]:
        """Return `y + step` clipped to the box, with exact values at the bounds."""

        def each(x, low, high, d):
            inside = jnp.where(d <= low - x, low, x + d.astype(x.dtype))
            return jnp.where(d >= high - x, high, inside)

        return jax.tree.map(each, y, self.lower, self.upper, step)

    def reached(
        self,
        y: PyTree[Array],
        start: PyTree[Array],
        slope: PyTree[Array],
        curvature: PyTree[Array],
    ) -> PyTree[Array]:
        """Return y, with parameters that only approach a bound set to the bound. The
        distance of such a parameter from the bound is below the rounding of its distance
        at the start, and two steps of Newton's method in this parameter would cover it.
        """

        def each(x, low, high, first, g, c):
            eps = jnp.finfo(x.dtype).eps

            def is_next(bound, pull):
                room = jnp.abs(x - bound)
                is_near = jnp.isfinite(bound) & (room <= eps * jnp.abs(first - bound))
                return is_near & (pull > 0) & (2 * pull >= c * room)

            at_low, at_high = is_next(low, g), is_next(high, -g)
            return jnp.where(at_low, low, jnp.where(at_high, high, x))

        return jax.tree.map(each, y, self.lower, self.upper, start, slope, curvature)

    def blocked(self, y: PyTree[Array], slope: PyTree[Array]) -> PyTree[Array]:
        """Return which parameters are at a bound that descent along `-slope` would cross,
        or have equal bounds."""

        def each(x, low, high, g):
            return (x <= low) & ((g > 0) | (low == high)) | (x >= high) & (g < 0)

        return jax.tree.map(each, y, self.lower, self.upper, slope)

    def without(self, blocked: PyTree[Array], y: PyTree[Array]) -> "Box":
        """Return the box with `blocked` parameters fixed at their values in `y`."""

        def narrowed(limits):
            return jax.tree.map(jnp.where, blocked, y, limits)

        return Box(narrowed(self.lower), narrowed(self.upper))

    def within(self, y: PyTree[Array], step: PyTree[Array]) -> PyTree[Array]:
        """Return the step with zeros for parameters that are at a bound."""

        def each(x, low, high, d):
            return jnp.where((low < x) & (x < high), d, 0)

        return jax.tree.map(each, y, self.lower, self.upper, step)

    def is_left(self, y: PyTree[Array], step: PyTree[Array]) -> Bool[Array, ""]:
        """Whether a step leaves the box."""

        def each(x, low, high, d):
            return jnp.any((d < low - x) | (d > high - x))

        beyond = jax.tree.map(each, y, self.lower, self.upper, step)
        return jnp.any(jnp.stack(jax.tree.leaves(beyond)))

    def followed(
        self, y: PyTree[Array], step: PyTree[Array]
    ) -> tuple[PyTree[Array], PyTree[Array]]:
        """Return the point where a step reaches the first bound, and which parameters
        are at a bound there."""

        def part(x, low, high, d):
            room = jnp.where(d < 0, x - low, high - x)
            beyond = jnp.abs(d) > room
            return jnp.where(beyond, room / jnp.where(beyond, jnp.abs(d), 1), 1)

        parts = jax.tree.map(part, y, self.lower, self.upper, step)
        least = [jnp.min(x, initial=1) for x in _tree.joined(parts)]
        length = jnp.min(jnp.stack(_tree.promoted(least)))
        reached = jax.tree.map(lambda x: (x <= length.astype(x.dtype)) & (x < 1), parts)

        def end(x, low, high, d, ends):
            moved = jnp.clip(x + length.astype(x.dtype) * d, low, high)
            return jnp.where(ends, jnp.where(d < 0, low, high), moved)

        ys = jax.tree.map(end, y, self.lower, self.upper, step, reached)
        return ys, reached


def like(y: PyTree[Array], bound: Any, none: float, *, by_leaf: bool = False) -> Any:
    """Return a bound in the form of the parameters.

    - Where the parameters are an array, a list of numbers and `None`, or of such lists,
      becomes an array of their shape, with `none` in the place of `None`.
    - Where the parameters are a list or a tuple, a list or an array that holds a number
      for each leaf takes its structure.
    - Other bounds are returned unchanged.

    `by_leaf` decides on an array with a number for each leaf that has the shape of each
    leaf, too: whether these are bounds of leaves, or the array is the bound of each leaf.
    """
    if isinstance(y, Mapping) and isinstance(bound, Mapping):
        names = bound.keys() & y.keys()
        each = {k: like(y[k], bound[k], none, by_leaf=by_leaf) for k in names}
        return {**bound, **each}
    is_list = isinstance(bound, list | tuple)
    if is_list and isinstance(y, Array | np.ndarray):
        try:
            return _stacked(bound, y.shape, none)
        except ValueError:  # `_spread` says which shapes the bounds must have.
            return bound
    if not isinstance(y, list | tuple):
        return bound
    if is_list and len(bound) == len(y):
        entries = jax.tree.structure(y, is_leaf=lambda entry: entry is not y)
        pairs = zip(y, bound, strict=True)
        return entries.unflatten([like(*pair, none, by_leaf=by_leaf) for pair in pairs])
    leaves, structure = jax.tree.flatten(y)
    row = (len(leaves),)
    is_prefix = not (is_list or by_leaf) and all(jnp.shape(x) == row for x in leaves)
    if _shape(bound) != row or is_prefix:
        return bound
    return structure.unflatten(list(bound))


def _shape(bound: Any) -> tuple[int, ...] | None:
    """Return the shape of a number, of an array or of a list of numbers and `None`, else
    `None`."""
    if not isinstance(bound, list | tuple):
        return np.shape(bound) if eqx.is_array_like(bound) else None
    are_numbers = all(b is None or _shape(b) == () for b in bound)
    return (len(bound),) if are_numbers else None


def _stacked(bound: Any, shape: tuple[int, ...], none: float) -> Any:
    """Return a list of bounds, whose rows may be lists and arrays, as an array."""
    if not isinstance(bound, list | tuple):
        bound = none if bound is None else bound
        if np.shape(bound) not in ((), shape):
            raise ValueError("The rows have different shapes.")
        is_jax = isinstance(bound, Array)
        return (jnp if is_jax else np).broadcast_to(bound, shape)
    if shape[:1] != (len(bound),):
        raise ValueError("The array has another length.")
    rows = [_stacked(row, shape[1:], none) for row in bound]
    # NumPy keeps known bounds known within a trace, but cannot read traced ones.
    is_jax = any(isinstance(row, Array) for row in rows)
    return (jnp if is_jax else np).stack(rows)


def pair_of_scipy(bounds: Any) -> str:
    """Return what to pass in place of a `scipy.optimize.Bounds`, or ""."""
    is_scipys = hasattr(bounds, "lb") and hasattr(bounds, "ub")
    return ": pass `(bounds.lb, bounds.ub)`" * is_scipys


def check_pair(bounds: Any) -> None:
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ValueError(
            "`bounds` must be a pair `(lower, upper)` of numbers, or of trees of the "
            f"parameters' structure, but {bounds!r} was given{pair_of_scipy(bounds)}."
        )
    if isinstance(bounds, list) and all(isinstance(bound, tuple) for bound in bounds):
        raise ValueError(
            f"`bounds` is {bounds!r}, which may mean a pair for each parameter, as in "
            "`scipy.optimize.minimize`: pass a tuple, `(lower, upper)`."
        )
    _check_order(*bounds)


def _check_order(lower: PyTree[Any], upper: PyTree[Any]) -> None:
    """Raise `ValueError` if a concrete lower bound is above its upper bound."""

    def known(bound):
        leaves = jax.tree_util.tree_leaves_with_path(bound)
        return {path: np.asarray(value) for path, value in leaves if _is_known(value)}

    lows, highs = known(lower), known(upper)
    for path in lows.keys() | highs.keys():
        # Either bound may be given for a prefix of this path.
        parts = [path[:k] for k in range(len(path) + 1)]
        below, above = ([k for k in parts if k in v][-1:] for v in (lows, highs))
        if not below or not above:
            continue
        low, high = lows[below[0]], highs[above[0]]
        # The entries of a list have longer paths than an array beside it.
        first = low if len(below[0]) < len(above[0]) else high
        are_alike = low.ndim == 0 or low.shape == high.shape
        if first.ndim == 0 or (below == above and are_alike):
            _refuse_empty(low, high, _of_parameter(path))


def _is_known(value: Any) -> bool:
    is_number = isinstance(value, float | int | np.ndarray | np.generic | Array)
    return is_number and not isinstance(value, Tracer) and is_here(value)


def _of_parameter(path: Any) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return f" of the parameter `{name}`" if name else ""


def _refuse_empty(low: np.ndarray, high: np.ndarray, of: str) -> None:
    low, high = np.broadcast_arrays(low, high)
    if np.all(low <= high):
        return
    k = np.argmin(low <= high)
    raise ValueError(
        f"The lower bound{of} must not be above the upper one, but "
        f"{low.flat[k]:g} and {high.flat[k]:g} were given."
    )


def check_start(bounds: Any, y: PyTree[Array]) -> None:
    """Raise `ValueError` if the start is not finite, the bounds are invalid, or the start
    is outside them. Traced values are not checked."""
    given = jax.tree.leaves((bounds, y))
    if any(isinstance(x, Tracer) or not is_here(x) for x in given):
        return
    leaves = jax.tree_util.tree_leaves_with_path(y)
    for path, x in leaves:
        is_finite = np.isfinite(x)
        if not np.all(is_finite):
            raise ValueError(
                f"The start{_of_parameter(path)} must be finite, but holds "
                f"{np.asarray(x)[~is_finite][0]}: start elsewhere, or leave the "
                "parameter out by `filter_spec`."
            )
    if bounds is None:
        return
    box = Box.of(bounds, y)
    lowers, uppers = jax.tree.leaves(box.lower), jax.tree.leaves(box.upper)
    for (path, x), low, high in zip(leaves, lowers, uppers, strict=True):
        of = _of_parameter(path)
        x, low, high = map(np.asarray, (x, low, high))
        _refuse_empty(low, high, of)
        inside = (low <= x) & (x <= high)
        if not np.all(inside):
            k = np.argmin(inside)
            raise ValueError(
                f"The start{of} must lie within its bounds, but is {x.flat[k]:g}, not "
                f"between {low.flat[k]:g} and {high.flat[k]:g}."
            )


def _spread(
    bound: PyTree[ArrayLike | None], y: PyTree[Array], none: float, which: str
) -> PyTree[Array]:
    """Broadcast a bound to the parameters; those without a bound get `none`."""
    if isinstance(bound, Mapping) and isinstance(y, Mapping):
        check_names(bound, y, f"to have a {which} bound")
        return {k: _spread(bound.get(k), part, none, which) for k, part in y.items()}

    def each(limit, part):
        return jax.tree.map(lambda x: spread(none if limit is None else limit, x), part)

    def spread(limit, x):
        if jnp.shape(limit) not in ((), x.shape):
            raise ValueError
        return jnp.broadcast_to(jnp.asarray(limit, x.dtype), x.shape)

    try:
        return jax.tree.map(each, bound, y, is_leaf=lambda x: x is None)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The {which} bounds must be a number, or have the parameters' structure and "
            f"shapes, {jax.tree.map(jnp.shape, y)}, but have the shapes "
            f"{jax.tree.map(np.shape, bound)}."
        ) from error
