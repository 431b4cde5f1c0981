"""The errors of curves, and of any functions of the parameters, to first order."""

from collections.abc import Callable
from typing import Any, NamedTuple, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, Scalar

from .._common._checks import explains_itself, first_line
from .._linear_algebra._covariance import Covariance
from .._linearisation._linearisation import linearise
from ..losses import TobitNLL
from ..spectra import Estimate
from ._arrays import in_each_leaf
from ._curve import broadcast, flat, unflattened
from ._inputs import surely


if TYPE_CHECKING:
    from ._result import CurveFit


class Band(NamedTuple):
    """A curve, and the ends of its confidence interval at each point."""

    mean: Float[Array, " n"]
    low: Float[Array, " n"]
    high: Float[Array, " n"]


def band(fit: "CurveFit", x: PyTree[Array], quantile: float, sigma: Any) -> Band:
    """Return the curve at x, with an interval of this many standard errors to each side.
    With `sigma` it is the interval of a new measurement."""
    setting, end = fit._setting, fit._end
    given = end.parameters, x
    curve = fit._curve.on(*given)
    like = curve.shapes(*given)
    mean, variance = _curve_and_errors(curve, *given, end.covariance, end.variance)
    if sigma is not None:
        if not isinstance(setting.likelihood, TobitNLL | None):
            raise ValueError(
                "`sigma` of a band is for normal noise: leave it out, draw parameters "
                "from `fit.covariance_matrix` and a new value from its distribution at "
                "each, and take their quantiles (*New counts* in the documentation)."
            )
        variance += (fit.scale * _deviations(sigma, like)) ** 2
    width = quantile * jnp.sqrt(variance)
    return Band(*(unflattened(x, like) for x in (mean, mean - width, mean + width)))


def _deviations(sigma: Any, like: PyTree) -> Float[Array, " m"]:
    """Return the standard deviation of each number of a flattened curve."""
    sigma = np.asarray(sigma) if isinstance(sigma, list) else sigma
    each = in_each_leaf(sigma, like)
    of_leaf = lambda x, s: broadcast(jnp.asarray(s, jnp.finfo(x.dtype).dtype), x)
    try:
        found = flat(jax.tree.map(of_leaf, like, each))
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`sigma` of a band must be one number, or have the structure and the shapes "
            f"of the curve, {jax.tree.map(jnp.shape, like)}."
        ) from error
    if surely(~jnp.all(found >= 0)):
        raise ValueError("`sigma` of a band must not be negative or NaN.")
    return found


@eqx.filter_jit
def _curve_and_errors(curve, free, x, errors: Covariance, variance: Scalar):
    """Return the curve and its variance, given the residuals' variance."""
    lin = linearise(lambda p, _: curve(p, x), free)
    return lin.outputs, errors.variances(lin.matrix(), variance)


def derived(fit: "CurveFit", fn: Callable[[PyTree], PyTree]) -> Estimate:
    """Return a function of the parameters, and its standard error."""
    end = fit._end

    def value(free: PyTree) -> PyTree:
        try:
            return fn(fit._curve.parameters(free))
        except Exception as error:
            if explains_itself(error):
                raise
            raise ValueError(f"`fn` failed: {first_line(error)}.") from error

    lin = linearise(lambda free, _: flat(value(free)), end.parameters)
    errors = jnp.sqrt(end.covariance.variances(lin.matrix(), end.variance))
    like = jax.eval_shape(value, end.parameters)
    return Estimate(unflattened(lin.outputs, like), unflattened(errors, like))
