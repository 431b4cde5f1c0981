"""Where a point moves on a curved space: by a function, row by row."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from . import _tree
from ._checks import check_callable


class Retraction(eqx.Module):
    """By arrays of parameters: a function of one row and its step, to the row that it
    leads to; `None` where they are added."""

    fns: list[Callable[[Array, Array], Array] | None]

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
        for fn, x in zip(fns, jax.tree.leaves(y), strict=True):
            if fn is not None:
                _check(fn, x)
        return Retraction(fns)

    def moved(self, y: PyTree[Array], step: PyTree[Array]) -> PyTree[Array]:
        """A step further."""

        def each(fn, x, d):
            if fn is None:
                return _tree.axpy(1, d, x)
            return jax.vmap(fn)(x, d.astype(x.dtype)).astype(x.dtype)

        leaves, structure = jax.tree.flatten(y)
        steps = jax.tree.leaves(step)
        return structure.unflatten(list(map(each, self.fns, leaves, steps)))

    def tangents(self, y: PyTree[Array]) -> list[Float[Array, "k d d"] | None]:
        """The derivatives of rows by their steps, where these are zero."""

        def each(fn, x):
            if fn is None:
                return None
            by_step = jax.vmap(jax.jacfwd(fn, argnums=1))(x, jnp.zeros_like(x))
            size = x[0].size
            return by_step.reshape(-1, size, size)

        return list(map(each, self.fns, jax.tree.leaves(y)))


def _check(fn: Any, x: Array) -> None:
    check_callable("retraction", fn, "a function of a row and its step", "lambda y, d:")
    if x.ndim == 0:
        raise ValueError(
            "`retraction` moves rows of arrays, and a parameter is a number: pass `None` "
            "for it."
        )
    row = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    found = jax.eval_shape(fn, row, row)
    if getattr(found, "shape", None) != row.shape:
        raise ValueError(
            f"`retraction` must return a row of the shape {row.shape}, as it is given "
            f"one and its step, but returned {found}."
        )
