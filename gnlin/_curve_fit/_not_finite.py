"""Where the curve, or its derivative, is not finite, and how a fit says so."""

from typing import NamedTuple, TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._common._words import how_many, name_of
from ._points import num_of, place_of


if TYPE_CHECKING:
    from ._result import CurveFit


class NonFinite(NamedTuple):
    """Where the curve, or its derivative, is not finite.

    - `point`: the first such entry of the outputs; -1 if there is none.
    - `number`: how many such entries there are.
    - `of_curve`: whether the curve itself is not finite there, or only a derivative.
    """

    point: Int[Array, ""]
    number: Int[Array, ""]
    of_curve: Bool[Array, ""]

    @staticmethod
    def of(outputs: Float[Array, " m"], jacobian: Float[Array, "m k"]) -> "NonFinite":
        of_curve = ~jnp.isfinite(outputs)
        of_any = ~jnp.all(jnp.isfinite(jacobian), axis=1)
        either = jnp.where(jnp.any(of_curve), of_curve, of_any)
        point = jnp.where(jnp.any(either), jnp.argmax(either), -1)
        return NonFinite(point, jnp.sum(either), jnp.any(of_curve))


def what_is_not_finite(fit: "CurveFit") -> str:
    """Return why a fit failed whose curve, or its derivative, is not finite."""
    where, data = fit._end.nonfinite, fit._data
    entry, number = int(where.point), int(where.number)
    if data is None:
        points = how_many(f"{number:,}", "point")
        what = "`f`" if where.of_curve else "the derivative of `f`"
        return (
            f"{what} is not finite at {points}, first at point {entry:,}: "
            "leave out points where it is not, or start elsewhere"
        )
    if where.of_curve and number == data.y.size:
        return (
            "`f` is not finite at the start: start elsewhere, set bounds, or let a "
            "solver that `f` calls take more steps"
        )
    place = _place(fit, entry, data.x)
    if number > 1:
        points, numbers = num_of(fit._like_y(), data.x)
        others = f"at {how_many(number - 1, 'other')}"
        if points != numbers:
            others = f"in {number - 1} more of the {numbers} numbers of `f`"
        place += f" and {others}"
    if where.of_curve:
        return (
            f"`f` is not finite at the start {place}: leave out points where `f` is not "
            "defined, start elsewhere, or let a solver that `f` calls take more steps"
        )
    return (
        f"the derivative of `f` by {_by(fit, entry, data.x)} is not finite {place}, "
        "although `f` is: leave this point out, or rewrite `f` so that no intermediate "
        "value is infinite there and no root or power of 0 is taken"
    )


def _place(fit: "CurveFit", entry: int, x: PyTree[Array]) -> str:
    """Describe an entry of the flattened y by its index in y and its x."""
    place, index, shape = place_of(entry, fit._like_y())
    own = lambda value: index if jnp.shape(value) == shape else index[:1]
    values = [
        f"{'.'.join(['x', *filter(None, [name_of(path)])])} = {value[own(value)]}"
        for path, value in jax.tree_util.tree_leaves_with_path(x)
        if index and jnp.shape(value)[:1] == shape[:1]
    ]
    return place + (f" ({', '.join(values)})" if values else "")


def _by(fit: "CurveFit", entry: int, x: PyTree[Array]) -> str:
    """Name the parameters by which an entry of `f` has a derivative that is not finite.
    Each is differentiated separately: in a joint derivative, a zero for one parameter may
    become NaN because of another."""
    leaves, structure = jax.tree.flatten(fit._end.parameters)

    def slopes(k: int) -> np.ndarray:
        def value(leaf):
            free = structure.unflatten([*leaves[:k], leaf, *leaves[k + 1 :]])
            return fit._setting.curve(free, x)[entry]

        return np.ravel(jax.jacfwd(value)(leaves[k]))

    found = ~np.isfinite(np.concatenate([slopes(k) for k in range(len(leaves))]))
    named = [f"`{name}`" for name, is_so in zip(fit.names, found, strict=True) if is_so]
    return " and ".join(named) or "its parameters"
