"""Numbers that are not finite, or whose squares are not, and how a fit says so."""

from typing import NamedTuple, TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._common._words import how_many, name_of
from .._training._messages import result_name
from ._advice import at_the_start, bounded, either, elsewhere
from ._curve import rounding
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


def of_extreme_squares(fit: "CurveFit") -> str:
    """Return a sentence if the squares of the residuals underflow, or those of the
    derivative by a parameter underflow or overflow; or "". Steps are computed from these
    squares, so such a parameter stays at its start."""
    if _underflows(fit):
        return _out_of_range(fit, "the residuals' squares underflow", "smaller", "y")
    known = jax.tree.map(np.asarray, fit._end.covariance)  # less overhead than in JAX
    extreme = known.extreme
    if not extreme.any() or not np.isfinite(fit._end.loss):
        return ""
    which = int(np.argmax(extreme))
    is_small = known.units[which] < 1
    does, units = ("underflow", "larger") if is_small else ("overflow", "smaller")
    name = f"`{fit.names[which]}`"
    what = f"the squares of the derivative of `f` by {name} {does}"
    return _out_of_range(fit, what, units, name)


def _underflows(fit: "CurveFit") -> bool:
    """Whether the loss is zero only because the squares of the residuals underflow."""
    if fit._setting.likelihood is not None or float(fit._end.loss) != 0:
        return False
    if fit._data is None or fit.residuals is None or not np.any(fit._data.y):
        # The data were read in parts, or they are all zero and a curve that reaches them
        # is a success, however small the rounding that is left.
        return result_name(fit.result) == "stagnation"
    return bool(np.max(np.abs(fit.residuals)) > rounding(fit._data))


def _out_of_range(fit: "CurveFit", what: str, units: str, quantity: str) -> str:
    """Say that the range of floating-point numbers is too small, and what helps."""
    is_single = fit._end.loss.dtype == np.float32
    precision = "single" if is_single else "double"
    other = ", or use double precision" if is_single else ""
    return f"{what} in {precision} precision: take {units} units of {quantity}{other}"


def what_is_not_finite(fit: "CurveFit") -> str:
    """Return why a fit failed if the curve, its derivative or the loss is not finite, or
    an empty string."""
    where, data = fit._end.nonfinite, fit._data
    entry, number = int(where.point), int(where.number)
    if entry < 0:
        is_faulty = result_name(fit.result) == "nonfinite"
        return _why_loss_is_not_finite(fit) if is_faulty else ""
    if data is None:
        points = how_many(f"{number:,}", "point")
        what = "`f`" if where.of_curve else "the derivative of `f`"
        return (
            f"{what} is not finite at {points}, first at point {entry:,}: "
            "leave out points where it is not, or start elsewhere"
        )
    ways = elsewhere(fit), bounded(fit)
    more_steps = "let a solver that `f` calls take more steps"
    if where.of_curve and number == data.y.size:
        return f"`f` is not finite {at_the_start(fit)}: {either(*ways, more_steps)}"
    place = _place(fit, entry, data.x)
    if number > 1:
        points, numbers = num_of(fit._like_y(), data.x)
        others = f"at {how_many(number - 1, 'other')}"
        if points != numbers:
            others = f"in {number - 1} more of the {numbers} numbers of `f`"
        place += f" and {others}"
    if where.of_curve:
        leave_out = "leave out points where `f` is not defined"
        ways = either(leave_out, *ways, more_steps)
        return f"`f` is not finite {at_the_start(fit)} {place}: {ways}"
    return (
        f"the derivative of `f` by {_by(fit, entry, data.x)} is not finite {place}, "
        "although `f` is: leave this point out, or rewrite `f` so that no intermediate "
        "value is infinite there and no root or power of 0 is taken"
    )


def _why_loss_is_not_finite(fit: "CurveFit") -> str:
    """Return why the loss of a curve that is finite is not, or an empty string."""
    loss, likelihood = float(fit._end.loss), fit._setting.likelihood
    if likelihood is not None and not np.isfinite(loss):
        is_log = getattr(likelihood, "log_input", False)
        rate = "pass `log_input=False` if `f` is a rate" if is_log else ""
        ways = either(rate, elsewhere(fit), bounded(fit))
        return f"the loss is not finite {at_the_start(fit)}: {ways}"
    if not loss <= np.finfo(np.float64).max ** 0.5:
        ways = either(elsewhere(fit, "start closer"), "take larger units of y")
        return f"the residuals' squares overflow: {ways}"
    return ""


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
