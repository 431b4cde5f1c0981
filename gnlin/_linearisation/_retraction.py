"""Retractions: how parameters on a curved space move along a step."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from .._common import _tree
from .._common._checks import check_callable, first_line, is_own, is_traced
from .._common._quickly import quickly


class Retraction(eqx.Module):
    """A map from parameters and a step to new parameters, row by row.

    - `fns`: for each array of parameters, a function `(row, step) -> new row`, or `None`
        if steps are added.
    - `whole`: for each array, whether it is a single row, such as one pose.
    """

    fns: list[Callable[[Array, Array], Array] | None]
    whole: list[bool] = eqx.field(static=True)

    @staticmethod
    def of(given: Any, y: PyTree[Array]) -> "Retraction":
        """Return the retraction of a function, or of a prefix tree of functions. What is
        not trained is `None` in both trees."""
        fns = []

        def spread(fn, part):
            fns.extend(fn for _ in jax.tree.leaves(part))

        try:
            is_leaf = lambda x: x is None or callable(x)
            jax.tree.map(spread, given, y, is_leaf=is_leaf)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "`retraction` must be a function of a row of parameters and its step, or "
                f"have the parameters' structure, {jax.tree.map(jnp.shape, y)}, but is "
                f"{given!r}."
            ) from error
        pairs = zip(fns, jax.tree.leaves(y), strict=True)
        return Retraction(fns, [fn is not None and _is_a_row(fn, x) for fn, x in pairs])

    def moved(self, y: PyTree[Array], step: PyTree[Array]) -> PyTree[Array]:
        """Return the parameters moved by a step."""

        def each(fn, whole, x, d):
            if fn is None:
                return _tree.axpy(1, d, x)
            move = fn if whole else jax.vmap(fn)
            return move(x, d.astype(x.dtype)).astype(x.dtype)

        leaves, structure = jax.tree.flatten(y)
        steps = jax.tree.leaves(step)
        return structure.unflatten(list(map(each, self.fns, self.whole, leaves, steps)))

    def flaw(self, y: PyTree[Array]) -> str:
        """Return a sentence if a step of zero moves parameters near y, or has no
        derivative there; else ""."""
        near = self.moved(y, jax.tree.map(lambda x: jnp.full_like(x, 1e-2), y))
        still = self.moved(near, _tree.zeros_like(y))
        slopes = [slope for slope in self.tangents(near) if slope is not None]
        if not (_tree.all_finite((still, slopes)) and all(map(jnp.any, slopes))):
            return (
                "`retraction` must be finite for a step of zero, and its derivative must "
                "be finite and not zero: if it takes the norm of the step, take the root "
                "of `jnp.where(square > 0, square, 1)`, and the limit of a quotient by "
                "another `jnp.where`."
            )
        change = _tree.norm(jax.tree.map(jnp.subtract, still, near))
        if not change > _tree.eps(y) ** 0.5 * _tree.norm(y):
            return ""
        return (
            "`retraction` must return the row itself for a step of zero, but moves it by "
            f"{float(change):.3g}: apply the step to the row."
        )

    def tangents(self, y: PyTree[Array]) -> list[Float[Array, "k d d"] | None]:
        """Return the derivatives of new rows with respect to steps, at zero steps."""

        def each(fn, whole, x):
            if fn is None:
                return None
            rows = x[None] if whole else x
            by_step = jax.vmap(jax.jacfwd(fn, argnums=1))(rows, jnp.zeros_like(rows))
            size = rows[0].size
            return by_step.reshape(-1, size, size)

        return list(map(each, self.fns, self.whole, jax.tree.leaves(y)))


def flaw_of(given: Any, y: PyTree[Array]) -> str:
    """Return a flaw of the retraction that a solver was given, if any, or ""."""
    return "" if given is None else Retraction.of(given, y).flaw(y)


def check_fits(given: Any, y: PyTree[Array]) -> None:
    """Raise an error if the retraction does not fit the parameters, or if it takes the
    step before the row, judged at rows of its own since those of y may be traced."""
    retraction = Retraction.of(given, y)
    for fn, whole, x in zip(
        retraction.fns, retraction.whole, jax.tree.leaves(y), strict=True
    ):
        if fn is not None and _is_swapped(fn, x.shape if whole else x.shape[1:], x.dtype):
            raise ValueError(
                "`retraction` is called as `retraction(row, step)`, but a small step "
                "moves a row by little only in `retraction(step, row)`: exchange its "
                "arguments."
            )


def check_still(given: Any, start: PyTree[Array]) -> None:
    """Raise an error unless a step of zero keeps a start, which one step of zero has led
    to. Traced starts are not checked."""
    if given is None or is_traced((given, start)):
        return
    check_fits(given, start)
    again = not_moved(given, start)
    if is_traced(again):  # the function closes over traced arrays
        return
    if not _tree.all_finite((start, again)):
        raise ValueError(
            "`retraction` must be finite for a step of zero, but is not for the start: "
            "if it takes the norm of the step, take the root of "
            "`jnp.where(square > 0, square, 1)`, and the limit of a quotient by another "
            "`jnp.where`."
        )
    for x, y in zip(*map(jax.tree.leaves, (start, again)), strict=True):
        change, size = jnp.max(jnp.abs(y - x)), jnp.max(jnp.abs(x))
        if change > jnp.finfo(x.dtype).eps ** 0.5 * size:
            raise ValueError(
                "`retraction` must return the row itself for a step of zero, but a "
                f"second such step moves the start by {float(change):.3g}: apply the "
                "step to the row."
            )


@eqx.filter_jit
def not_moved(given: Any, y: PyTree[Array]) -> PyTree[Array]:
    """Return the parameters that a step of zero leads to."""
    return Retraction.of(given, y).moved(y, _tree.zeros_like(y))


def _is_a_row(fn: Any, x: Array) -> bool:
    """Whether an array is a single row: it has one axis, and `fn` does not act on each
    entry by itself (as it would for angles)."""
    check_callable("retraction", fn, "a function of a row and its step", "lambda y, d:")
    if x.ndim == 0:
        raise ValueError(
            "`retraction` moves rows of arrays, but a parameter is a scalar: pass `None` "
            "for it."
        )
    if _only_adds(fn, jax.ShapeDtypeStruct(x.shape, x.dtype)):
        raise ValueError(
            "`retraction` only adds the step to the row, as `jaxlie.manifold.rplus` does "
            "to plain arrays: make the rotation of the row inside it, or leave it out."
        )
    row = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    if x.ndim == 1:
        whole = jax.ShapeDtypeStruct(x.shape, x.dtype)
        with contextlib.suppress(Exception):  # `fn` may need the whole array
            if _returned(fn, row) == row.shape and _acts_on_entries(fn, whole):
                return False
        row = whole
    try:
        found = _returned(fn, row)
    except (AssertionError, IndexError, TypeError, ValueError) as error:
        if is_own(error):
            raise
        raise ValueError(
            f"`retraction` is called on one row, of the shape {row.shape} of an array of "
            f"the shape {x.shape}, and a step of the same shape, but failed "
            f"({first_line(error)}): use as many entries of the step as it needs, pass "
            "`None` for arrays that it does not move, and a single parameter of several "
            "axes `x` as `x[None]`."
        ) from error
    if found != row.shape:
        returned = "no array" if found is None else f"the shape {found}"
        raise ValueError(
            f"`retraction` must return a row of the shape {row.shape}, like the row and "
            f"the step that it is given, but returned {returned}."
        )
    return x.ndim == 1


def _returned(fn: Any, row: jax.ShapeDtypeStruct) -> tuple[int, ...] | None:
    return getattr(jax.eval_shape(fn, row, row), "shape", None)


def _acts_on_entries(fn: Any, row: jax.ShapeDtypeStruct) -> bool:
    """Whether each entry of the result depends only on the same entries of the row and of
    the step, judged by derivatives along some of the entries."""
    try:
        with jax.ensure_compile_time_eval():
            number = jnp.arange(row.size)
            point = (0.1 + 0.05 * jnp.sin(number)).astype(row.dtype)
            step = (0.01 * jnp.cos(number)).astype(row.dtype)
            for chosen in (number == 0, number % 2 == 0, number < row.size // 2):
                along = chosen.astype(row.dtype)
                _, change = jax.jvp(fn, (point, step), (along, 2 * along))
                if jnp.any(~chosen & (change != 0)):
                    return False
    except Exception:  # `fn` may need single entries, or have no such derivative
        return True
    return True


def _is_swapped(fn: Any, shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether a small step moves rows by little if it is the first argument, but not if
    it is the second."""
    try:
        with jax.ensure_compile_time_eval():
            angles = np.arange(2 * math.prod(shape)).reshape(2, *shape)
            rows = (0.1 + 0.05 * np.sin(angles)).astype(dtype)
            return not _moves_little(fn, rows, True) and bool(
                _moves_little(fn, rows, False)
            )
    except Exception:  # `fn` may fail on such rows, or close over traced arrays
        return False


@functools.partial(quickly, is_brief=True)
def _moves_little(fn: Any, rows: Array, row_first: bool) -> Bool[Array, ""]:
    """Whether small steps move rows by little. A first step may move them far, onto the
    space of rows, but not all to the same row. The step is not zero, where a faulty
    retraction may divide by its norm."""
    step = 1e-4 * jnp.cos(rows)

    def move(rows: Array, _: None) -> tuple[Array, Array]:
        # A loop compiles `fn` once.
        pair = (rows, step) if row_first else (step, rows)
        rows = jax.vmap(fn)(*pair).astype(rows.dtype)
        return rows, rows

    _, (first, second) = jax.lax.scan(move, rows, length=2)
    small = 1e-2 * jnp.max(jnp.abs(first))
    is_little = jnp.max(jnp.abs(second - first)) <= small
    return is_little & (jnp.max(jnp.abs(first[1] - first[0])) > small)


def _only_adds(fn: Any, row: jax.ShapeDtypeStruct) -> bool:
    with contextlib.suppress(Exception):  # `fn` may need a row and not the whole array
        program = jax.make_jaxpr(fn)(row, row).jaxpr
        return [str(e.primitive) for e in program.eqns] == ["add"]
    return False
