"""Parameters whose derivative is zero although the curve depends on them."""

from typing import NamedTuple, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar

from .._common._checks import is_traced
from .._common._tree import ravel_pytree, Structure
from .._common._words import how_many
from .._linearisation._linearisation import linearise
from .._training._messages import NO_GRADIENT
from ._advice import either, elsewhere
from ._curve import Data
from ._problem import FitSettings, flat_box, Posed
from ._statistics import Fitted


if TYPE_CHECKING:
    from ._result import CurveFit

# Parts of a parameter's size by which it is moved, smallest first.
_MOVES = np.array([1e-4, -1e-4, 1e-2, -1e-2, 0.1, -0.1, 1, -1])
# The first ones are small. A derivative at these points is one beside the end of the fit.
_NUM_SMALL = 4
# Halvings of the first move that changes the curve. They end next to where the change
# begins: a ramp at the edge of a plateau, as of `jnp.clip`, has a derivative there.
_HALVINGS = 20

# A change of the curve, or of the loss, counts only above this multiple of its rounding.
_ROUNDINGS = 100

# The most parameters that a message names.
_MOST_NAMES = 5


class Hidden(NamedTuple):
    """Free parameters whose derivative is exactly zero where the fit ended.

    - `missing`: whether it is zero at other values too although the curve differs there.
    - `vanishing`: whether it is not zero beside the end, as of `b**2` at 0.
    - `falling`: whether, in addition, the loss is lower there.
    - `stuck`: whether the fit is still at its start, the derivative by each parameter is
        zero there, and it is not known to be a minimum.
    """

    missing: Bool[np.ndarray, " k"]
    vanishing: Bool[np.ndarray, " k"]
    falling: Bool[np.ndarray, " k"]
    stuck: bool = False


def hidden(
    setting: FitSettings, data: Data | None, start: PyTree[Array], end: Fitted
) -> Hidden:
    """Return which free parameters of one data set in memory have a derivative of zero,
    and why.

    The curve is evaluated only if a column of the Jacobian seems to be zero, and after
    the compiled fit, whose program does not grow."""
    flags = end.covariance.determined
    none = Hidden(*np.zeros((3, *flags.shape), bool))
    # Steps of a retraction are not differences of parameters.
    is_refused = setting.many or setting.solver.retraction is not None
    if data is None or is_refused or is_traced((end, data, setting)):
        return none
    # A parameter that is a part of an undetermined direction has entries in the factor.
    found = ~np.asarray(flags) & ~np.any(np.asarray(end.covariance.factor), axis=-1)
    asked = np.flatnonzero(found)
    if not asked.size:
        return none
    best, first = (np.asarray(ravel_pytree(tree)[0]) for tree in (end.parameters, start))
    sizes = np.maximum(np.abs(best), np.abs(first))
    steps = np.diag(np.where(sizes > 0, sizes, 1).astype(best.dtype))[asked]
    for number in (len(_MOVES), _NUM_SMALL):
        try:
            seen = _seen_along(setting, data, end.parameters, jnp.asarray(steps), number)
            *seen, are_zero = [np.asarray(flags) for flags in seen]
        except eqx.EquinoxRuntimeError:  # `f` may raise errors at other parameters.
            continue
        for flags, of_asked in zip(none[:3], seen, strict=True):
            flags[asked] = of_asked
        is_at_start = np.array_equal(best, first) and bool(end.loss != 0)
        is_minimum = none.vanishing.any() and not none.falling.any()
        all_are_zero = found.all() and are_zero.all()
        return none._replace(stuck=is_at_start and all_are_zero and not is_minimum)
    return none


class _Search(NamedTuple):
    """What is known of one parameter.

    - `low`, `high`: moves at which the curve is the same, and at which it differs.
    - `flags`: what `look` returns at each move: first at 0, then at `_MOVES`, and then at
        halvings.
    """

    index: Int[Array, ""]
    low: Scalar
    high: Scalar
    flags: Bool[Array, "moves 3"]


@eqx.filter_jit
def _seen_along(
    setting: FitSettings,
    data: Data,
    parameters: PyTree[Array],
    steps: Float[Array, "c k"],
    number: int | Array,
) -> tuple[Bool[Array, " c"], ...]:
    """Return what `Hidden` has for each of c parameters, from so many moves."""
    posed, structure = Posed.of(setting, data), Structure.of(parameters)
    best, box = ravel_pytree(parameters)[0], flat_box(setting.solver.bounds, parameters)
    # An index beyond the last move gives the last one.
    moves = jnp.asarray(np.append(0, _MOVES), best.dtype)
    here = posed.at(parameters)
    eps = _ROUNDINGS * jnp.finfo(here.dtype).eps
    least = eps * jnp.max(jnp.abs(here))
    least_fall = eps * jnp.abs(posed.loss.value(here, posed.target))

    def look(step: Float[Array, " k"], move: Scalar) -> Bool[Array, "3"]:
        """Whether the curve differs and has a derivative, and whether the loss falls."""
        point = jnp.clip(best + move * step, box.lower, box.upper)
        along = lambda t, _: posed.at(structure.unravel(point + t * step))
        lin = linearise(along, jnp.zeros((), best.dtype))
        slope, change = lin.matrix(), jnp.abs(lin.outputs - here)
        fall = posed.loss.decrease(here, lin.outputs, posed.target)
        differs = jnp.any(jnp.isfinite(change) & (change > least))
        has_slope = jnp.any(jnp.isfinite(slope) & (slope != 0))
        return jnp.stack([differs, has_slope, fall > least_fall])

    def is_open(s: _Search) -> Bool[Array, ""]:
        differs, has_slope, _ = jnp.any(s.flags, axis=0)
        last = jnp.where(differs, number + _HALVINGS, number)
        goes_on = (s.index <= _NUM_SMALL) | ~has_slope
        return (s.index <= last) & ~s.flags[0, 1] & goes_on

    def after(s: _Search, step: Float[Array, " k"]) -> _Search:
        has_differed = jnp.any(s.flags[:, 0])
        halves = has_differed & (s.index > _NUM_SMALL)
        move = jnp.where(halves, (s.low + s.high) / 2, moves[s.index])
        found = look(step, move)
        return _Search(
            index=s.index + 1,
            low=jnp.where(halves & ~found[0], move, s.low),
            high=jnp.where(found[0] & (halves | ~has_differed), move, s.high),
            flags=s.flags.at[s.index].set(found),
        )

    def of_one(step: Float[Array, " k"]) -> tuple[Bool[Array, ""], ...]:
        zero = jnp.zeros((), best.dtype)
        flags = jnp.zeros((moves.size + _HALVINGS, 3), bool)
        first = _Search(jnp.array(0), zero, zero, flags)
        s = jax.lax.while_loop(is_open, lambda s: after(s, step), first)
        differs, has_slope, _ = jnp.any(s.flags, axis=0)
        _, is_beside, falls = jnp.any(s.flags[: _NUM_SMALL + 1], axis=0)
        vanishing = is_beside & ~s.flags[0, 1]
        return differs & ~has_slope, vanishing, vanishing & falls, ~s.flags[0, 1]

    return jax.lax.map(of_one, steps)


def of_zero_derivative(fit: "CurveFit") -> str:
    """Return a sentence if the derivative by a parameter is missing, or ""."""
    if not fit._hidden.missing.any():
        return ""
    names, it, _ = _named(fit, fit._hidden.missing)
    return (
        f"the derivative of `f` by {names} is zero although `f` depends on "
        f"{it}, as on a root found by bisection, or through a comparison or rounding: "
        "take roots by `optimistix.root_find` or `jax.lax.custom_root`, which "
        "differentiate them implicitly, and replace jumps by smooth functions"
    )


def of_no_step(fit: "CurveFit") -> str:
    """Return a sentence if the fit has no derivative at all at its start, or ""."""
    if not fit._hidden.stuck:
        return ""
    return of_vanishing_derivative(fit) or f"it made no step, because {NO_GRADIENT}"


def of_vanishing_derivative(fit: "CurveFit") -> str:
    """Return a sentence if the derivative by a parameter is zero only here, or ""."""
    if not fit._hidden.vanishing.any():
        return ""
    if fit._hidden.falling.any():
        names, it, _ = _named(fit, fit._hidden.falling)
        return (
            f"the derivative of `f` by {names} is zero at this point only, and the loss "
            f"is lower beside it: start {it} elsewhere"
        )
    names, _, its = _named(fit, fit._hidden.vanishing)
    other = "fit a parameter by which `f` has a derivative there, such as `c` in place of"
    start = elsewhere(fit, "start elsewhere if you expect another minimum")
    return (
        f"the derivative of `f` by {names} is zero at the minimum, though not beside it, "
        f"so that {its} not known: {either(start, f'{other} `b**2`')}"
    )


def _named(fit: "CurveFit", which: Bool[np.ndarray, " k"]) -> tuple[str, str, str]:
    """Return the names of parameters, and the words that stand for them."""
    names = [f"`{fit.names[k]}`" for k in np.flatnonzero(which)]
    is_one = len(names) == 1
    if len(names) > _MOST_NAMES:
        names[_MOST_NAMES:] = [how_many(len(names) - _MOST_NAMES, "other")]
    it = "it" if is_one else "them"
    its = "its standard error is" if is_one else "their standard errors are"
    return " and ".join(names), it, its
