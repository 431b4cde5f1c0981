"""What a message advises, which depends on the arguments that the fit was given."""

from typing import TYPE_CHECKING

import equinox as eqx
import jax
import numpy as np

from ._curve import rounding
from ._problem import flat_box


if TYPE_CHECKING:
    from ._result import CurveFit

# Losses that differ by less than this part belong to one minimum.
_ALIKE = 1e-3
# Values at most this part of the distance between the bounds apart are one, and values
# farther apart than the second part are two.
_CLOSE, _FAR = 1e-6, 1e-2


def either(*ways: str) -> str:
    """Join ways out by "or"; empty ones were tried already, and are left out."""
    *first, last = filter(None, ways)
    return f"{', '.join(first)}, or {last}" if first else last


def elsewhere(fit: "CurveFit", words: str = "start elsewhere") -> str:
    """Advise another start, or nothing if the best of many starts was taken."""
    return "" if num_starts(fit) > 1 else words


def bounded(fit: "CurveFit", which: np.ndarray | bool = True, words: str = "") -> str:
    """Advise bounds, or narrower ones if there are some already.

    - `which`: the free parameters that need bounds; all by default.
    - `words`: what the bounds are to do.
    """
    are_bounded = np.isfinite(_box(fit)).any(axis=0) & which
    return f"set {'narrower ' * bool(are_bounded.any())}`bounds`{words}"


def many_starts(fit: "CurveFit") -> str:
    """Advise `starts`, which are drawn between finite bounds; or more of them."""
    if num_starts(fit) > 1:
        return "pass more `starts`"
    is_box = bool(np.isfinite(_box(fit)).all())
    return "pass `starts`" if is_box else "pass `starts` and finite `bounds`"


def known_noise(fit: "CurveFit") -> str:
    """Advise errors of the data, or that those that were given are absolute; nothing for
    a robust loss, whose scale depends on the residuals."""
    if fit._setting.is_robust:
        return ""
    is_given = fit._data is not None and (
        fit._data.sigma_x is not None or bool(np.any(np.asarray(fit._data.sigma) != 1))
    )
    sigma = "" if is_given else "`sigma` and "
    absolute = ", if `sigma` is in the units of y" if is_given else ""
    return f"pass {sigma}`absolute_sigma=True`{absolute}"


def num_starts(fit: "CurveFit") -> int:
    return 1 if fit.losses is None else fit.losses.size


def starts_at_best(fit: "CurveFit") -> int:
    """Return how many of the starts of one data set reached the best loss."""
    assert fit._data is not None  # fits in parts have one start
    losses, of_one = np.asarray(fit.losses), float(rounding(fit._data))
    is_square = fit._setting.likelihood is None
    # The loss that rounding of y alone may leave
    least = float(fit._end.num_points) * (0.5 * of_one**2 if is_square else of_one)
    most = losses[0] + _ALIKE * abs(losses[0]) + least
    return int(np.sum(losses <= most))


def different_ends(fit: "CurveFit") -> int:
    """Return at how many different parameters the starts reached the best loss. Two
    values differ if they are a standard error or `_FAR` apart."""
    best = slice(starts_at_best(fit))
    free = jax.tree.map(
        lambda p: p is None, fit._curve.fixed, is_leaf=lambda p: p is None
    )
    of_all, errors = (
        [np.asarray(p) for p in jax.tree.leaves(eqx.filter(tree, free))]
        for tree in (fit.ends, fit.standard_errors)
    )
    flat = np.concatenate([p.reshape(len(p), -1) for p in of_all], axis=1)[best]
    low, high = _box(fit)
    width = high - low
    error = np.concatenate([np.ravel(e) for e in errors])
    apart = np.clip(np.nan_to_num(error, nan=np.inf), _CLOSE * width, _FAR * width)
    found: list[np.ndarray] = []
    for point in flat:
        if all(np.any(np.abs(point - other) > apart) for other in found):
            found.append(point)
    return len(found)


def at_the_start(fit: "CurveFit") -> str:
    """Say where the curve was evaluated."""
    number = num_starts(fit)
    return f"at one of {number} starts" if number > 1 else "at the start"


def _box(fit: "CurveFit") -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds of the free parameters of one data set, flat."""
    box = flat_box(fit._setting.solver.bounds, fit._end.parameters)
    return np.asarray(box.lower), np.asarray(box.upper)
