"""Where a point moves on a curved space: by a function, row by row."""

import contextlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._common import _tree
from .._common._checks import check_callable


class Retraction(eqx.Module):
    """By arrays of parameters: a function of one row and its step, to the row that it
    leads to; `None` where they are added.

    - `whole`: which arrays are one row by themselves, such as a single pose.
    """

    fns: list[Callable[[Array, Array], Array] | None]
    whole: list[bool] = eqx.field(static=True)

    @staticmethod
    def of(given: Any, y: PyTree[Array]) -> "Retraction":
        """From a function for all arrays, or a tree with the parameters' structure."""

        def spread(fn, part):
            return jax.tree.map(lambda _: fn, part)

        none = lambda x: x is None
        try:
            tree = jax.tree.map(spread, given, y, is_leaf=none)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "`retraction` must be a function of a row of parameters and its step, or "
                f"have the parameters' structure, {jax.tree.map(jnp.shape, y)}, but is "
                f"{given!r}."
            ) from error
        fns = jax.tree.leaves(tree, is_leaf=none)
        pairs = zip(fns, jax.tree.leaves(y), strict=True)
        return Retraction(fns, [fn is not None and _is_a_row(fn, x) for fn, x in pairs])

    def moved(self, y: PyTree[Array], step: PyTree[Array]) -> PyTree[Array]:
        """A step further."""

        def each(fn, whole, x, d):
            if fn is None:
                return _tree.axpy(1, d, x)
            move = fn if whole else jax.vmap(fn)
            return move(x, d.astype(x.dtype)).astype(x.dtype)

        leaves, structure = jax.tree.flatten(y)
        steps = jax.tree.leaves(step)
        return structure.unflatten(list(map(each, self.fns, self.whole, leaves, steps)))

    def tangents(self, y: PyTree[Array]) -> list[Float[Array, "k d d"] | None]:
        """The derivatives of rows by their steps, where these are zero."""

        def each(fn, whole, x):
            if fn is None:
                return None
            rows = x[None] if whole else x
            by_step = jax.vmap(jax.jacfwd(fn, argnums=1))(rows, jnp.zeros_like(rows))
            size = rows[0].size
            return by_step.reshape(-1, size, size)

        return list(map(each, self.fns, self.whole, jax.tree.leaves(y)))


def _is_a_row(fn: Any, x: Array) -> bool:
    """Whether an array is one row by itself: it has one axis, and the function is not of
    its entries one by one, such as angles."""
    check_callable("retraction", fn, "a function of a row and its step", "lambda y, d:")
    if x.ndim == 0:
        raise ValueError(
            "`retraction` moves rows of arrays, and a parameter is a number: pass `None` "
            "for it."
        )
    row = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    if x.ndim == 1:
        with contextlib.suppress(Exception):  # of a function of the whole array
            if _returned(fn, row) == row.shape:
                return False
        row = jax.ShapeDtypeStruct(x.shape, x.dtype)
    found = _returned(fn, row)
    if found != row.shape:
        returned = "no array" if found is None else f"the shape {found}"
        raise ValueError(
            f"`retraction` must return a row of the shape {row.shape}, as it is given "
            f"one and its step, but returned {returned}."
        )
    return x.ndim == 1


def _returned(fn: Any, row: jax.ShapeDtypeStruct) -> tuple[int, ...] | None:
    return getattr(jax.eval_shape(fn, row, row), "shape", None)
