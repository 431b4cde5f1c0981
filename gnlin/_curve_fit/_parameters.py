"""The start of a fit, the parameters that are fixed, and the bounds, in one form."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from .._common._checks import check_names
from .._common._words import name_of
from .._linearisation._bounds import like, pair_of_scipy
from ._arrays import as_floats


def as_start(value: Any) -> Array:
    """Convert one leaf of `start`, a number or an array, to a finite array."""
    value = as_floats(value, "start")
    if not isinstance(value, Tracer) and not np.all(np.isfinite(value)):
        raise ValueError(f"`start` must be finite, but {value} was given.")
    return value


def parted(start: PyTree[Array], fixed: Iterable[str]) -> tuple[PyTree, PyTree]:
    """Split the parameters into the free ones and the fixed ones. Both have the structure
    of all, with `None` in place of the others."""
    if not jax.tree.leaves(start):
        raise ValueError(f"`start` must hold a parameter, but {start!r} was given.")
    if isinstance(fixed, Mapping):
        raise ValueError(
            "`fixed` must be names of parameters, which stay at their values in `start`, "
            f"but the dictionary {fixed!r} was given: pass the names, and put the values "
            "into `start`."
        )
    fixed = [fixed] if isinstance(fixed, str) else list(fixed)
    if fixed and not isinstance(start, Mapping):
        raise ValueError(
            "`fixed` needs parameters in a dictionary: for others, make the lower and "
            "upper bounds equal."
        )
    leaves = jax.tree_util.tree_leaves_with_path(start)
    known = dict.fromkeys(name for path, _ in leaves for name in _names(path))
    for name in fixed:
        if name not in known and str(name).partition("[")[0] in known:
            raise ValueError(
                f"`fixed` names whole arrays, but {name!r} was given: fix one entry by "
                "equal bounds, as the second of three at 5 by "
                "`bounds={name: ([None, 5, None], [None, 5, None])}`."
            )
    check_names(fixed, known, "to be fixed")
    is_free = lambda path, _: not any(name in fixed for name in _names(path))
    free, kept = eqx.partition(start, jax.tree_util.tree_map_with_path(is_free, start))
    if not jax.tree.leaves(free):
        raise ValueError("All parameters are fixed: there is nothing to fit.")
    return free, kept


def _names(path: tuple) -> list[str]:
    """Return the names of the entries that a leaf is in, such as `a` and `a.width`."""
    return [name_of(path[:k]) for k in range(1, len(path) + 1)]


def among(names: str | Iterable[str] | None, known: tuple[str, ...]) -> np.ndarray:
    """Return which entries of the parameters are named: by themselves, as `heights[2]`,
    or by an array or a dictionary that holds them. `None` names all.

    - `known`: the names of all entries.
    """
    if names is None:
        return np.ones(len(known), bool)
    if isinstance(names, bytes | Mapping) or not isinstance(names, Iterable):
        raise ValueError(
            "`names` must be a name, or a sequence of names, of parameters, but "
            f"{names!r} was given."
        )
    given = [names] if isinstance(names, str) else list(names)
    holders = [_holders(name) for name in known]
    check_names(given, dict.fromkeys(itertools.chain(*holders)), "that is free")
    return np.array([any(name in given for name in each) for each in holders])


def _holders(entry: str) -> list[str]:
    """Return the names of what an entry is in, such as `a`, `a.b` and `a.b[0]`."""
    ends = [place for place, letter in enumerate(entry) if place and letter in ".["]
    return [entry[:end] for end in [*ends, len(entry)]]


def limits(bounds: Any, start: PyTree) -> Any:
    """Return the bounds `(lower, upper)` of the parameters, for a solver."""
    if bounds is None:
        return None
    if isinstance(bounds, Mapping):
        if not isinstance(start, Mapping):
            raise ValueError(
                "`bounds` by name need parameters in a dictionary: pass a pair "
                "`(lower, upper)`."
            )
        bounds = _ends(bounds, start)
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ValueError(
            "`bounds` must be a dictionary `{name: (lower, upper)}`, or a pair "
            f"`(lower, upper)`, but {bounds!r} was given{pair_of_scipy(bounds)}."
        )
    ends = zip(bounds, (-np.inf, np.inf), strict=True)
    bounds = tuple(like(start, bound, none, by_leaf=True) for bound, none in ends)
    return jax.tree.map(lambda b: as_floats(b, "bounds"), bounds)


def check_shared(
    bounds: Any, start: PyTree[Array], number: int, has_starts: bool
) -> None:
    """Raise an error if bounds have an axis over data sets, of this number.

    - `has_starts`: whether `start` has that axis, too.
    """
    shapes = [leaf.shape[has_starts:] for leaf in jax.tree.leaves(start)]
    for bound in jax.tree.leaves(bounds):
        has_axis = bound.shape[:1] == (number,) and bound.shape[1:] in shapes
        if has_axis and bound.shape not in ((), *shapes):
            raise ValueError(
                "All data sets have the same `bounds`, but an array of bounds has an "
                "axis over them: where each has its own, take `jax.vmap(lambda y, low, "
                "high: gnlin.curve_fit(f, x, y, start, bounds=(low, high)).parameters)`."
            )


def _ends(bounds: Mapping, start: Mapping) -> tuple[dict, dict]:
    """Return the lower ends and the upper ends of bounds by name."""
    check_names(bounds, start, "to have bounds")
    lower, upper = {}, {}
    for name, pair in bounds.items():
        if isinstance(pair, Mapping) and isinstance(start[name], Mapping):
            pair = _ends(pair, start[name])
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(
                f"The bounds of {name!r} must be a pair `(lower, upper)`, but {pair!r} "
                "was given."
            )
        lower[name], upper[name] = pair
    return lower, upper
