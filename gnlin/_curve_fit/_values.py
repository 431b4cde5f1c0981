"""The meaning of y: one data set or several, by the shapes that the curve returns."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._common import _tree
from .._common._canonical import of_one_example
from .._common._checks import check_takes, explains_itself, first_line
from ._arrays import as_array
from ._curve import Curve, flat, wholly_missing


class Values(NamedTuple):
    """y as given, and the meaning of its leading axis.

    - `many`: whether the leading axis is over data sets.
    - `has_starts`: whether each data set has its own start.
    """

    tree: PyTree[Array]
    many: bool
    has_starts: bool = False

    def of_one(self) -> PyTree:
        """Return arrays, or their shapes and types, like those of one data set."""
        return of_one_example(self.tree) if self.many else self.tree

    def flat(self) -> Float[Array, "*sets m"]:
        """Return y as one vector, or as one vector for each data set."""
        return jax.vmap(flat)(self.tree) if self.many else flat(self.tree)


def as_y(curve: Curve, free: PyTree, x: PyTree, y: PyTree) -> Values:
    """Decide whether y is one data set or several, by the shapes that `f` returns."""
    out = _outputs(curve, free, x)
    if isinstance(y, list | tuple | float | int):
        same = jax.tree.structure(y) == jax.tree.structure(out)
        if not same or not jax.tree.leaves(y):
            y = as_array(y, "y")
    tree = jax.tree.map(lambda v: wholly_missing(as_array(v, "y")), y)

    def readings() -> Iterator[tuple[Any, Values]]:
        yield out, Values(tree, many=False)
        if _may_be_many(tree):
            if _lengths(free) == _lengths(tree):
                of_one = _outputs(curve, of_one_example(free), x)
                yield of_one, Values(tree, True, has_starts=True)
            yield out, Values(tree, many=True)

    for found, values in readings():
        if _shapes(found) == _shapes(values.of_one()):
            _check_kind(found, values)
            return values
    _refuse(curve, free, x, tree, out)


def _outputs(curve: Curve, free: PyTree, x: PyTree) -> Any:
    """Return the shapes of `f(parameters, x)`, or the error that it raises."""
    try:
        return curve.on(free, x).shapes(free, x)
    except Exception as error:
        return error


def _lengths(tree: PyTree) -> set[tuple[int, ...]]:
    """Return the lengths of the leading axes; `()` for a number, which has none."""
    return {leaf.shape[:1] for leaf in jax.tree.leaves(tree)}


def _may_be_many(y: PyTree[Array]) -> bool:
    """Whether the leading axis of y may be over data sets."""
    lengths = _lengths(y)
    return len(lengths) == 1 and lengths != {()}


def _check_kind(found: PyTree, values: Values) -> None:
    """Check that the curve returns more than a number, and real values for a real y."""
    tree = values.tree
    if values.many and _shapes(found)[1] == [()]:
        raise ValueError(
            "`f(start, x)` is one number, and `y` has the shape "
            f"{jax.tree.leaves(tree)[0].shape}: return a value for each point, for "
            "example by `jnp.broadcast_to`."
        )
    for pair in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        if not jnp.issubdtype(jnp.result_type(pair[0]), jnp.inexact):
            raise ValueError(
                "`f(start, x)` must be of floats, but is of dtype "
                f"{jnp.result_type(pair[0])}: whole numbers and booleans have no "
                "derivative, so compute with floats."
            )
        of_f, of_y = ("complex" if jnp.iscomplexobj(v) else "real" for v in pair)
        if of_f != of_y:
            raise ValueError(
                f"`f(start, x)` is {of_f}, and `y` is {of_y}: both must be of the same "
                "kind."
            )


def _refuse(curve: Curve, free: PyTree, x: PyTree, tree: PyTree, out: Any) -> NoReturn:
    """Raise an error that says why y does not have the shapes of the curve.

    - `tree`: y.
    - `out`: the shapes that `f` returns, or the error that it raises.
    """
    # What `f` returns if the call was `curve_fit(f, start, x, y)`
    in_other_order = Curve(lambda parameters, _: curve.f(x, tree), curve.fixed)
    found, start = _outputs(in_other_order, free, x), curve.parameters(free)
    if _shapes(found) == _shapes(start) and _tree.size(x) < _tree.size(start):
        raise ValueError(
            "`f(start, x)` does not have the shapes of `y`, but would have if the "
            "arguments were in another order: pass `gnlin.curve_fit(f, x, y, start)`."
        )
    in_order_of_scipy = Curve(lambda parameters, x: curve.f(x, parameters), curve.fixed)
    swapped = _outputs(in_order_of_scipy, free, x)
    if _shapes(swapped) == _shapes(tree) and _shapes(out) != _shapes(x):
        raise ValueError(
            "`f(start, x)` does not have the shapes of `y`, but `f(x, start)` has: `f` "
            "must take the parameters first, `f(parameters, x)`."
        )
    if _may_be_many(tree):
        lengths = _lengths(tree)
        of_one_set = _shapes(of_one_example(tree))
        are_all = _lengths(free) == _lengths(curve.fixed) == lengths
        of_one = Curve(curve.f, of_one_example(curve.fixed))
        if are_all and _shapes(_outputs(of_one, of_one_example(free), x)) == of_one_set:
            raise ValueError(
                "A fixed parameter has one value for all data sets, but in `start` each "
                "has its own: pass one value, or fit each data set separately."
            )
        of_some = _of_one_set(free, *lengths)
        if _shapes(_outputs(curve, of_some, x)) == of_one_set:
            raise ValueError(
                "Each parameter in `start` needs a leading axis over the data sets, of "
                f"the length {len(jax.tree.leaves(tree)[0])}, or none of them, but their "
                f"shapes are {jax.tree.map(jnp.shape, free)}."
            )
    if isinstance(out, Exception):
        check_takes(
            "f(parameters, x)",
            curve.f,
            2,
            ": for a function in the form of SciPy pass `lambda p, x: f(x, *p)`",
        )
        if explains_itself(out):
            raise out
        remedy = ""
        # A column of a DataFrame with missing values holds floats.
        if "Indexer must have integer" in str(out):
            remedy = "; convert the index by `.astype(int)` in `f`"
        raise ValueError(
            "`f(parameters, x)` failed (it must take these two arguments and use JAX's "
            f"operations): {first_line(out)}{remedy}."
        ) from out
    (structure, of_y), (of_curve, found) = _shapes(tree), _shapes(out)
    hint = ""
    if structure != of_curve and of_y == found:
        hint = ": return the values in the structure of `y`, such as the array itself"
    elif structure == of_curve and [shape[::-1] for shape in of_y] == found:
        hint = ": transpose one of them, by `.T`"
    elif structure == of_curve and (hint := _of_sets(of_y, found)):
        pass
    elif [_long(shape) for shape in of_y] == [_long(shape) for shape in found]:
        hint = ": flatten the one with more axes, by `.ravel()`"
    raise ValueError(
        "`f(start, x)` must have the shapes of `y`, "
        f"{_tree.shapes_in_words(tree)}, but has {_tree.shapes_in_words(out)}{hint}."
    )


def _of_sets(of_y: list, of_curve: list) -> str:
    """Return how to give y one leading axis over data sets, if it has several, or has it
    last; or ""."""
    pairs = [
        (y, one)
        for y, one in zip(of_y, of_curve, strict=True)
        if one and len(y) > len(one) and math.prod(y) > math.prod(one)
    ]
    if len(pairs) < len(of_y):
        return ""
    if all(y[-len(one) :] == one for y, one in pairs):
        rows = ", ".join(map(str, pairs[0][1]))
        return f": give data sets one leading axis, by `y.reshape(-1, {rows})`"
    first, one = pairs[0]
    if all(y[: len(one)] == one and len(one) == 1 for y, one in pairs):
        how = "y.T" if len(first) == 2 else f"y.reshape({one[0]}, -1).T"
        return f": the axis over data sets must be the first one, as of `{how}`"
    return ""


def _of_one_set(free: PyTree, number: tuple[int, ...]) -> PyTree:
    """Return the parameters of one data set, if only some of `free` have an axis over
    data sets, or if all have one of a wrong length."""
    lengths = _lengths(free)
    axes = lengths if len(lengths) == 1 else {number}

    def of_one(leaf):
        is_of_sets = leaf.ndim > 0 and leaf.shape[:1] in axes
        return jax.ShapeDtypeStruct(leaf.shape[is_of_sets:], leaf.dtype)

    return jax.tree.map(of_one, free)


def _long(shape: tuple[int, ...] | None) -> list[int]:
    """Return the lengths of the axes that are longer than 1."""
    return [length for length in shape or () if length != 1]


def _shapes(tree: PyTree) -> tuple[Any, list]:
    """Return the structure of a pytree, and the shape of each leaf that has one."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [getattr(leaf, "shape", None) for leaf in leaves]
