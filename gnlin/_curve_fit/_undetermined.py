"""Parameters that the data do not determine."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree, Scalar

from .._common import _tree
from .._common._quickly import quickly
from .._common._tree import ravel_pytree
from .._common._words import how_many, name_of, names_of
from .._linear_algebra._covariance import Covariance
from ._curve import Data
from ._problem import FitSettings, flat_box, Posed


# A parameter has no effect if, moved by its standard error, it changes the curve by less
# than this part of the change that the linearisation predicts.
UNMOVED = 1e-6
# At a maximum of a likelihood, a step by a standard error lowers its logarithm by 1/2. If
# that changes by less than this number, the likelihood is flat.
FLAT = 1e-3
# Outputs below this multiple of the rounding of the first ones are zero.
_ROUNDINGS = 100
# Only parameters whose standard error exceeds this part of their value are tested.
_ASKED = 0.1
# If a standard error exceeds this multiple of its value, the curve is evaluated there. It
# is bent if it changes, in both directions, by more than the second multiple of the
# prediction.
_EXCEEDS, _BENT = 10, 1e3
# The most parts of a direction that its description names, if there are few arrays.
_MOST = 4
# Moves below this part of the largest one are rounding.
_UNMOVING = 1e-6
# So many entries of an array are described together if they move alike.
_FEWEST_ALIKE = 3


class Doubts(NamedTuple):
    """Reasons to doubt that each parameter affects the curve.

    - `is_lost`: whether a change by its whole value, or by its start, changes the
        residuals by less than their rounding; or whether, by its curvature, a likelihood
        is flat between the parameter's bounds, as on a plateau.
    - `asked`: whether its standard error exceeds a tenth of its value. If the parameter
        moves by this error and the others are held, the linearisation predicts a change
        of the size of the noise. On a plateau there is no change, which only the curve
        itself shows.
    - `steps`: this standard error.
    - `promised`: the norm of the change of the curve that the linearisation predicts.
    """

    is_lost: Bool[Array, " k"]
    asked: Bool[Array, " k"]
    steps: Float[Array, " k"]
    promised: Float[Array, " k"]


class Totals(NamedTuple):
    """Plain sums over the points, in units of sigma, or, with a likelihood, in units in
    which the loss has the curvature 1.

    - `num_points`: the number of entries of y that are not missing.
    - `chi_squared`: the squared residuals.
    - `outputs`, `targets`: the squared outputs, and the squared targets.
    - `pull`: the squared derivatives of the loss.
    - `slopes`, `squared_slopes`: its second derivatives, and their squares.
    - `noise`: estimates of the noise, times their numbers of points; or 0.
    - `saturated`: the log-likelihoods of a perfect fit, where the loss is zero.
    """

    num_points: Scalar
    chi_squared: Scalar
    outputs: Scalar
    targets: Scalar
    pull: Scalar
    slopes: Scalar
    squared_slopes: Scalar
    noise: Scalar
    saturated: Scalar


def doubts(
    setting: FitSettings,
    parameters: PyTree[Array],
    start: PyTree[Array],
    jacobian: Float[Array, "n k"],
    totals: Totals,
) -> Doubts:
    """Return the doubts, which do not depend on the parameters' units."""
    given = parameters, start, jacobian, totals, setting.solver.bounds
    parameters, start, jacobian, totals, bounds = jax.lax.stop_gradient(given)
    y, first = (ravel_pytree(x)[0] for x in (parameters, start))
    norms, size = _tree.column_norms(jacobian), jnp.sqrt(totals.outputs + totals.targets)
    noise = jnp.sqrt(totals.chi_squared / jnp.maximum(totals.num_points - y.size, 1))
    eps = jnp.finfo(norms.dtype).eps
    own = jnp.maximum(jnp.abs(y), jnp.abs(first))
    # If all of y is zero, the outputs that are left may be rounding of the first ones.
    first_size = jnp.linalg.norm(jnp.where(jnp.isfinite(norms), norms, 0) * own)
    is_zero = (totals.targets == 0) & (size <= _ROUNDINGS * eps * first_size)
    size = jnp.where(is_zero, first_size, size)
    is_lost = (first != 0) & (norms * own <= eps * size)
    units = jnp.where(norms > 0, norms, 1)
    if setting.likelihood is not None and bounds is not None:
        box = flat_box(bounds, parameters)
        is_lost |= 0.5 * (norms * (box.upper - box.lower)) ** 2 <= FLAT
    errors = jnp.maximum(noise, eps**0.5 * size) / units
    # A smaller step may change the curve by rounding alone.
    steps = jnp.maximum(errors, eps**0.5 * jnp.abs(y))
    asked = (steps > _ASKED * own) & (norms > 0) & ~is_lost
    return Doubts(is_lost, asked, steps, steps * norms)


def seen(
    setting: FitSettings,
    outputs_at: Callable[[PyTree[Array]], Array],
    parameters: PyTree[Array],
    outputs: Float[Array, " m"],
    found: Doubts,
) -> Bool[Array, " k"]:
    """Whether each parameter affects the curve, which is evaluated only if a parameter is
    asked for."""
    parameters, outputs, bounds = jax.lax.stop_gradient(
        (parameters, outputs, setting.solver.bounds)
    )
    y, box = ravel_pytree(parameters)[0], flat_box(bounds, parameters)

    def stays(step_and_promised):
        step, promised = step_and_promised
        change = jnp.linalg.norm(outputs_at(setting.moved(parameters, step)) - outputs)
        return (change <= UNMOVED * promised) & ~box.is_left(y, step)

    def of_all():
        steps = jnp.concatenate([-jnp.diag(found.steps), jnp.diag(found.steps)])
        either = jax.lax.map(stays, (steps, jnp.tile(found.promised, 2)))
        return jnp.any(either.reshape(2, -1), axis=0)

    nowhere = jnp.zeros(y.size, bool)
    stay = jax.lax.cond(jnp.any(found.asked), of_all, lambda: nowhere)
    return ~found.is_lost & ~(found.asked & stay)


def bent(setting: FitSettings, data: Data, end: Any) -> np.ndarray | None:
    """Return a step by one standard error, or to the bounds, that changes the curve far
    more than the linearisation predicts, or `None`. There is one at a minimum where a
    singular value vanishes. The curve is evaluated only if an error exceeds its parameter
    by much.

    - `end`: the `Fitted` of one data set, fitted by squared error.
    """
    parameters = end.parameters
    best = np.asarray(ravel_pytree(parameters)[0])
    factor = np.asarray(end.covariance.factor) * np.sqrt(np.asarray(end.variance))
    errors = np.linalg.norm(factor, axis=-1)
    asked = np.flatnonzero(np.isfinite(errors) & (errors > _EXCEEDS * np.abs(best)))
    if not asked.size:
        return None
    steps = factor[asked] @ factor.T / errors[asked, None]
    steps = np.concatenate([steps, -steps])
    box = flat_box(setting.solver.bounds, parameters)
    room = np.where(steps > 0, np.asarray(box.upper), np.asarray(box.lower)) - best
    room = np.divide(room, steps, where=steps != 0, out=np.full_like(room, np.inf))
    parts = np.clip(np.min(room, axis=1), 0, 1)
    changes = np.asarray(_changes(setting, data, parameters, parts[:, None] * steps))
    predicted = parts * np.sqrt(np.asarray(end.variance))
    # A change that is not finite tells nothing.
    is_bent = (changes > _BENT * predicted) & np.isfinite(changes)
    found = np.flatnonzero(np.all(is_bent.reshape(2, -1), axis=0))
    return steps[found[np.argmax(errors[asked[found]])]] if found.size else None


@quickly
def _changes(
    setting: FitSettings, data: Data, parameters: PyTree[Array], steps: Any
) -> Float[Array, " s"]:
    """Return the norm of the change of the curve by each step."""
    posed = Posed.of(setting, data)
    at = lambda step: posed.at(setting.moved(parameters, step))
    here = at(jnp.zeros_like(steps[0]))
    return jax.lax.map(lambda step: jnp.linalg.norm(at(step) - here), steps)


def apart(known: Covariance) -> np.ndarray:
    """Return a basis of the directions that do not change the curve, in which each one
    moves few parameters: their reduced echelon form, in units in which the columns of the
    Jacobian have length 1. A parameter without any effect is a direction by itself. These
    come first, in the order of the parameters."""
    directions = np.asarray(known.directions)
    units = np.where(np.isinf(known.units), 1, known.units)
    scaled, rounding = directions * units, float(known.rounding)
    scaled = scaled[np.any(scaled != 0, axis=1)]
    if not scaled.size or not np.all(np.isfinite(scaled)):
        return directions
    from scipy.linalg import qr, solve_triangular  # slow to import

    # The pivots are the parameters that the directions span best.
    factors: Any = qr(scaled, mode="economic", pivoting=True)
    _, r, order = factors
    sizes = np.abs(np.diagonal(r))
    rank = int(np.sum(sizes > rounding * sizes[0]))
    reduced = np.zeros((rank, len(order)), scaled.dtype)
    reduced[:, order[:rank]] = np.eye(rank)
    reduced[:, order[rank:]] = solve_triangular(r[:rank, :rank], r[:rank, rank:])
    reduced[np.abs(reduced) <= rounding] = 0
    are_many = np.sum(reduced != 0, axis=1) > 1
    return reduced[np.lexsort((order[:rank], are_many))] / units


def described(directions: np.ndarray, start: PyTree, end: PyTree) -> list[str]:
    """Describe directions of the parameters, as in "a by 1 and b by -2", or "c by -1 and
    all 200 of fe by 1". The parameter that moves most moves by 1, or by the size of its
    start."""
    starts, ends = (np.abs(ravel_pytree(p)[0]) for p in (start, end))
    steps, units = _sizes(starts), _sizes(np.maximum(starts, ends))
    arrays, names = _arrays(start), names_of(end)
    found = []
    for direction in directions:
        sizes = np.abs(direction / units)
        if not np.max(sizes) > 0:
            continue
        # Choose the sign with which most of the largest moves, up to rounding, are up.
        rounding = np.finfo(sizes.dtype).eps ** 0.5
        most = np.flatnonzero(sizes >= (1 - rounding) * np.max(sizes))
        is_up = direction[most] > 0
        first = most[np.argmax(is_up == (2 * np.sum(is_up) >= most.size))]
        moves = direction / direction[first] * steps[first]
        sizes = np.where(sizes > _UNMOVING * np.max(sizes), sizes, 0)
        parts, largest = [], []
        for array, has_axes, places in arrays:
            of_array = _parts(places, array, names, moves, sizes)
            if has_axes and of_array:
                largest.append(max(of_array, key=lambda part: part.weight))
            parts += of_array
        found.append(_joined(parts, largest))
    return found


class _Part(NamedTuple):
    """Entries of one array that move alike, or one of them.

    - `place`: the first of them, in the order of all parameters.
    - `weight`: their number times the largest move.
    """

    words: str
    number: int
    place: int
    weight: float


def _arrays(tree: PyTree) -> list[tuple[str, bool, np.ndarray]]:
    """Return the name of each array, whether it is not one number, and the places of its
    entries."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    ends = np.cumsum([np.size(leaf) for _, leaf in named])
    return [
        (name_of(path) or "p", np.ndim(leaf) > 0, np.arange(end - np.size(leaf), end))
        for (path, leaf), end in zip(named, ends, strict=True)
    ]


def _parts(
    places: np.ndarray, array: str, names: tuple[str, ...], moves: np.ndarray, sizes: Any
) -> list[_Part]:
    """Return the entries of an array that move, together where they move alike.

    - `moves`, `sizes`: of all parameters; the sizes are 0 for those that do not move.
    """
    moving = places[sizes[places] > 0]
    moving = moving[np.argsort(moves[moving], kind="stable")]
    values, alike = moves[moving], np.finfo(moves.dtype).eps ** 0.5
    is_other = np.diff(values) > alike * np.abs(values[1:])
    parts = []
    for group in np.split(moving, np.flatnonzero(is_other) + 1):
        if 0 < len(group) < _FEWEST_ALIKE:
            parts += [
                _Part(f"{names[k]} by {moves[k]:.3g}", 1, k, sizes[k]) for k in group
            ]
        elif group.size:
            of = f"{len(group)} of {len(places)}"
            of = f"all {len(group)}" if len(group) == len(places) else of
            words = f"{of} of {array} by {moves[group[0]]:.3g}"
            weight = len(group) * max(sizes[group])
            parts.append(_Part(words, len(group), min(group), weight))
    return parts


def _joined(parts: list[_Part], largest: list[_Part]) -> str:
    """Describe the parts that move most, among them the `largest` one of each array, and
    count the others."""
    number = max(_MOST, len(largest) + 2)
    order = lambda part: (part not in largest, -part.weight, part.place)
    parts = sorted(parts, key=order)
    words = [part.words for part in sorted(parts[:number], key=lambda part: part.place)]
    if others := sum(part.number for part in parts[number:]):
        words.append(how_many(others, "other"))
    return " and ".join(words)


def _sizes(values: np.ndarray) -> np.ndarray:
    """Return powers of ten below the values; 1 for 0 and values of an ordinary size."""
    is_ordinary = (values == 0) | ((values > 1e-3) & (values < 1e3))
    return 10 ** np.floor(np.log10(np.where(is_ordinary, 1, values)))
