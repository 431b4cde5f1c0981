"""Functions that read the data to which they are fitted."""

from typing import Any, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._common._canonical import are_read, Program
from .._common._words import how_many
from ._curve import Curve, rounding


if TYPE_CHECKING:
    from ._result import CurveFit

# The number of random directions along which y is changed.
_PROBES = 16
# The mean of the estimated traces counts as positive above this multiple of its error.
# For a forecast from earlier values the trace is zero.
_SURELY = 5
# Entries on the diagonal of a projection lie between 0 and 1. Estimates may lie outside
# by as much as this.
_OUTSIDE = 1
# If a curve computes each value from this value alone, the products agree between the
# directions. Otherwise they differ by more than this part of their squares.
_ALIKE = 1e-3


def of_own_values(fit: "CurveFit") -> str:
    """Return a sentence if `f` computes values of y from these values themselves, as if
    it fitted parameters of its own, or "". Forecasts from earlier values do not, and an
    exact fit, such as a line through x = y, has no errors.

    The curve is evaluated only if it reads an array of x that equals one of y."""
    data, setting = fit._data, fit._setting
    if data is None or data.sigma_x is not None or setting.many:
        return ""
    y, missing = np.asarray(data.y), np.asarray(data.counted) == 0
    leaves = jax.tree_util.tree_leaves_with_path(data.x)
    end, number = 0, len(leaves)
    for which, like in enumerate(jax.tree.leaves(fit._like_y())):
        begin, end = end, end + like.size * (1 + jnp.iscomplexobj(like))
        for place, (path, x) in enumerate(leaves):
            if x.shape != like.shape or x.dtype != like.dtype:
                continue
            row: Any = np.ascontiguousarray(x).ravel()  # NumPy, which has less overhead
            same = row.view(row.real.dtype) == y[begin:end]
            if not x.size or not np.all(same | missing[begin:end]):
                continue
            f = setting.curve.f  # its last arguments are the arrays of x
            if isinstance(f, Program) and not are_read(f.traced.jaxpr)[place - number]:
                continue
            assert fit.residuals is not None  # the data are in memory
            if not np.max(np.abs(fit.residuals)) > rounding(data):
                return ""
            given = setting.curve, fit._end.parameters, data.x
            probes = (np.asarray(a, float) for a in _probed(*given, place, which))
            if (trace := _degrees(*probes)) > 0:
                name = f"x{jax.tree_util.keystr(path)}"
                degrees = how_many(max(round(trace), 1), "degree")
                return (
                    f"`f` reads `y`, as `{name}`, and computes each value from itself, "
                    f"which uses up about {degrees} of freedom that are not counted: the "
                    "standard errors, `degrees_of_freedom`, `aic` and `bic` are wrong, "
                    "so pass what `f` fits to `y` inside, such as linear amplitudes, as "
                    "parameters in `start`"
                )
    return ""


def _degrees(traces: np.ndarray, sums: np.ndarray, squares: np.ndarray) -> float:
    """Return the estimated trace if the derivative may be a projection, or 0. A function
    of x that happens to equal y is none: it computes each value from this value alone,
    or its derivative has a diagonal that no projection has."""
    means = sums / _PROBES
    variances = np.maximum(squares / _PROBES - means**2, 0)
    if np.sum(variances) <= _ALIKE * np.sum(means**2):
        return 0.0
    outside = np.maximum(means - 1, -means)
    if np.any(outside > np.maximum(_OUTSIDE, _SURELY * (variances / _PROBES) ** 0.5)):
        return 0.0
    mean, error = float(np.mean(traces)), np.std(traces) / _PROBES**0.5
    # A projection is never negative along any direction.
    is_positive = mean > 0.5 and (np.min(traces) > 0 or mean > _SURELY * error)
    return mean if is_positive and mean <= sums.size else 0.0


@eqx.filter_jit
def _probed(
    curve: Curve, free: PyTree, x: PyTree[Array], place: int, which: int
) -> tuple[Float[Array, " probes"], Float[Array, "..."], Float[Array, "..."]]:
    """Return estimates of the trace of the derivative of an array of the curve by one of
    x: products of random signs with the change of the curve along them. Return also
    the sums over the probes of the products of each point, which estimate the diagonal,
    and of their squares.

    ??? cite "Reference"

        M. F. Hutchinson, *A stochastic estimator of the trace of the influence matrix
        for Laplacian smoothing splines*, Commun. Stat. Simul. Comput. 18 (1989).
    """
    leaves, structure = jax.tree.flatten(x)
    here = jax.tree.leaves(curve.values(free, x))[which]
    eps = jnp.finfo(here.dtype).eps
    width = eps ** (1 / 3) * jnp.sqrt(jnp.mean(jnp.abs(leaves[place]) ** 2))

    def along(sums, key: Array):
        signs = jax.random.rademacher(key, here.shape, here.real.dtype)
        moved = leaves.copy()
        moved[place] = leaves[place] + (width * signs).astype(leaves[place].dtype)
        there = jax.tree.leaves(curve.values(free, structure.unflatten(moved)))
        products = signs * (there[which] - here).real / width
        return (sums[0] + products, sums[1] + products**2), jnp.sum(products)

    none = jnp.zeros_like(here.real)
    keys = jax.random.split(jax.random.key(0), _PROBES)
    (sums, squares), traces = jax.lax.scan(along, (none, none), keys)
    return traces, sums, squares
