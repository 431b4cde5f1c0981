"""The end of a fit, and the statistics there: the errors of the parameters, the noise."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar

from .._common import _tree
from .._common._tree import ravel_pytree
from .._linear_algebra._covariance import Covariance, covariance
from .._solver._termination import STANDS_STILL
from ..losses import SquaredError
from ..losses._base import has_observed_root
from ..losses._robust import AbstractRobust, reweighted
from ._likelihood import Likelihood
from ._not_finite import NonFinite
from ._problem import FitSettings, flat_box, Posed
from ._undetermined import Totals


# A run that stands still within this part of a standard error of the minimum has
# converged, as in MINUIT, whose limit is 0.014. The tolerances with which a differential
# equation is solved rarely allow a gradient of zero.
NEAR = 1e-2


class Fitted(NamedTuple):
    """The end of a fit, as its methods need it.

    - `parameters`: the free parameters.
    - `at_bound`: -1 if a parameter is held at its lower bound, 1 at its upper, else 0.
    - `multipliers`: the derivative of the loss by parameters at a bound, else 0.
    - `variance`: the factor of the covariance, estimated or 1.
    - `bend`: the mean second derivative of the loss, which is 1 for squared error.
    - `noise`: the estimated standard deviation of the residuals, in units of sigma.
    - `distance`: the estimated distance to the minimum, in standard errors: the length of
        the next Gauss-Newton step, in the metric of the covariance.
    - `nonfinite`: where the curve or its derivative is not finite.
    - `edge`: a point whose rate has fallen to 0, or -1.
    - `is_open`: whether the curve must still be evaluated to know if each parameter
        affects it.
    - `is_doubtful`: whether another Jacobian must still be evaluated to know if all
        singular values of this one are known.
    """

    parameters: PyTree[Array]
    loss: Scalar
    at_bound: Int[Array, " k"]
    multipliers: Float[Array, " k"]
    covariance: Covariance
    num_points: Scalar
    variance: Scalar
    bend: Scalar
    noise: Scalar
    distance: Scalar
    nonfinite: NonFinite
    edge: int | Int[Array, ""] = -1
    is_open: bool | Bool[Array, ""] = False
    is_doubtful: bool | Bool[Array, ""] = False

    def judged(self, setting: FitSettings, result: optx.RESULTS) -> optx.RESULTS:
        """Return how the run ended, given the result of the solver."""
        if setting.is_flat:  # The minimum lies at kinks, which no derivative tells.
            is_still = result == optx.RESULTS.successful
            result = optx.RESULTS.where(is_still, STANDS_STILL, result)
        has_converged = (result == STANDS_STILL) & (self.distance <= NEAR)
        result = optx.RESULTS.where(has_converged, optx.RESULTS.successful, result)
        return optx.RESULTS.where(self.is_empty, optx.RESULTS.nonfinite, result)

    @property
    def is_empty(self) -> Bool[Array, "*sets"]:
        """Whether all points are missing, as in one of several data sets."""
        return jnp.asarray(self.num_points == 0)


def as_fitted(
    setting: FitSettings,
    parameters: PyTree[Array],
    start: PyTree[Array],
    loss: Scalar,
    slope: PyTree[Array],
    jacobian: Float[Array, "n k"],
    is_seen: Array,
    totals: Totals,
    nonfinite: NonFinite,
    concave: Float[Array, "k k"] | None = None,
    tangents: Float[Array, "k k"] | None = None,
    nearby: Float[Array, "n k"] | None = None,
) -> tuple[Fitted, dict[str, Any]]:
    """Return the end of a run, and the statistics by their names in `CurveFit`.

    - `start`: the parameters before the first step.
    - `slope`: the derivative of the loss by each parameter.
    - `jacobian`: the Jacobian of the residuals, or its triangular factor.
    - `is_seen`: whether each parameter affects the curve.
    - `concave`: the negative part of the loss's curvature, which `jacobian` leaves out,
        with its sign changed.
    - `tangents`: the derivative of the parameters by the steps of a retraction. All
        Jacobians are then with respect to these steps.
    - `nearby`: the Jacobian of the residuals at parameters that differ by rounding.
    """
    y, pull = ravel_pytree(parameters)[0], ravel_pytree(slope)[0]
    unravel = _tree.Structure.of(parameters).unravel
    box = flat_box(setting.solver.bounds, parameters)
    if setting.solver.bounds is not None:
        curvature = _tree.column_norms(jacobian) ** 2
        y = box.reached(y, ravel_pytree(start)[0], pull, curvature)
        parameters = unravel(y)
    held = box.blocked(y, pull)
    # A curve that is not finite may have a finite Jacobian, but the fit has no errors.
    jacobian = jnp.where(jnp.isfinite(totals.chi_squared), jacobian, jnp.nan)
    if setting.is_flat:
        jacobian = jnp.full_like(jacobian, jnp.nan)
    number, chi_squared = totals.num_points, totals.chi_squared
    free = ~held if tangents is None else jnp.any(tangents != 0, axis=0)
    known = covariance(jacobian, free, is_seen, number, nearby)
    if concave is not None:
        known = known.less(concave)
    if tangents is not None:
        known = known.moved_by(tangents)
    num_free = known.rank.astype(number.dtype)
    dof = number - num_free
    # A parameter at a bound was fitted, too, unless its bounds are equal.
    num_fitted = num_free + jnp.sum(held & (box.lower < box.upper), dtype=dof.dtype)
    variance = bend = noise = jnp.ones_like(number)
    misfit = 2 * (loss - totals.saturated)  # -2 log(likelihood)
    if isinstance(setting.loss, SquaredError):
        variance = chi_squared / dof
        noise = jnp.sqrt(variance)
        is_known = setting.absolute_sigma
        misfit = chi_squared if is_known else number * jnp.log(chi_squared / number)
    elif setting.is_robust:
        variance = _robust_variance(totals, num_free)
        bend, noise = totals.slopes / number, totals.noise / number
    variance = jnp.where(dof > 0, variance, jnp.inf)
    if not setting.is_estimated:
        variance = jnp.ones_like(number)
    distance = jnp.linalg.norm(_tree.matmul(pull, known.factor)) / jnp.sqrt(variance)
    end = Fitted(
        parameters,
        loss,
        at_bound=jnp.where(held, jnp.where(y >= box.upper, 1, -1), 0),
        multipliers=jnp.where(held, pull, 0),
        covariance=known,
        num_points=number,
        variance=variance,
        bend=bend,
        noise=jnp.where(dof > 0, noise, jnp.inf),
        distance=jnp.where(jnp.isfinite(variance), distance, jnp.inf),
        nonfinite=nonfinite,
    )
    extreme = known.extreme
    of_extreme = extreme[:, None] | extreme[None]
    matrix = jnp.where(of_extreme, jnp.nan, known.matrix(variance))
    # The variance of a parameter at its bound is zero, where roots have no derivative.
    roots = jnp.sqrt(jnp.where(held, 1, jnp.diagonal(matrix)))
    errors, outer = jnp.where(held, jnp.nan, roots), roots[:, None] * roots[None, :]
    correlation = jnp.where(jnp.eye(held.size, dtype=bool), 1.0, matrix / outer)
    correlation = jnp.where(held[:, None] | held[None], jnp.nan, correlation)
    zeros = _tree.zeros_like(setting.curve.fixed)
    in_structure = lambda values: eqx.combine(unravel(values), zeros)
    return end, {
        "parameters": setting.curve.parameters(parameters),
        "standard_errors": in_structure(errors),
        "covariance": _blocks(in_structure, matrix),
        "covariance_matrix": matrix,
        "correlation": _blocks(in_structure, correlation),
        "chi_squared": chi_squared,
        "deviance": 2 * loss,
        "reduced_chi_squared": chi_squared / dof,
        "degrees_of_freedom": dof,
        "scale": jnp.ones_like(noise) if setting.absolute_sigma else end.noise,
        "at_bound": jax.tree.map(lambda x: x.astype(int), in_structure(end.at_bound)),
        "multipliers": in_structure(end.multipliers),
        "aic": misfit + 2 * num_fitted,
        "bic": misfit + jnp.log(number) * num_fitted,
        **dict.fromkeys(("residuals", "x", "losses", "ends")),  # of some fits only
    }


def _blocks(
    in_structure: Callable[[Array], PyTree[Array]], matrix: Float[Array, "k k"]
) -> PyTree[Array]:
    """Return a block of the matrix for each pair of leaves.

    - `in_structure`: returns a vector in the structure of all parameters, with zeros for
        the fixed ones.
    """

    def of_leaf(rows):
        each = jax.vmap(in_structure)(rows.reshape(-1, rows.shape[-1]))
        return jax.tree.map(lambda x: x.reshape(rows.shape[:-1] + x.shape[1:]), each)

    return jax.tree.map(of_leaf, jax.vmap(in_structure, -1, -1)(matrix))


def _robust_variance(totals: Totals, num_free: Scalar) -> Scalar:
    r"""Return the factor of $(J^\top J)^{-1}$ in the covariance for a robust loss $\rho$.
    For squared error it would be $\chi^2/(n-k)$.

    ??? cite "Reference"

        P. J. Huber, *Robust statistics* (1981), section 7.6, equation 6.5.
    """
    number, mean = totals.num_points, totals.slopes / totals.num_points
    scatter = totals.squared_slopes / number - mean**2
    correction = 1 + num_free / number * scatter / mean**2
    return correction**2 * totals.pull / (number - num_free) / mean**2


class Misfit(NamedTuple):
    """The outputs at a point, compared with the data.

    - `residuals`: in units of sigma; with a likelihood Pearson's, in units in which the
        loss has the curvature 1.
    - `pull`: the derivative of the loss by each output.
    - `root`: the root of the loss's curvature. Where a robust loss has no curvature, it
        is the root for the parabola that touches the loss.
    - `reduced`: `pull` divided by `root`.
    - `concave`: the size of the negative part of the curvature, for a likelihood whose
        `root` covers the positive part only; else `None`.
    """

    residuals: Float[Array, " m"]
    pull: Float[Array, " m"]
    root: Float[Array, " m"]
    reduced: Float[Array, " m"]
    totals: Totals
    concave: Float[Array, " m"] | None

    @staticmethod
    def of(posed: Posed, outputs: Float[Array, " m"], *, has_noise: bool) -> "Misfit":
        """`has_noise`: whether to estimate the noise."""
        target, counted, dot = posed.target, posed.counted, _tree.dot
        loss = reweighted(posed.loss, 0.0, every=True)
        residuals, number = target - outputs, jnp.sum(posed.data.counted)
        noise = spread(residuals, counted) if has_noise else jnp.zeros_like(number)
        pull = counted * loss.derivative(outputs, target)
        root = counted * loss.root(outputs, target)
        slopes, concave = root**2, None

        def second() -> Float[Array, " m"]:
            derivative = lambda outputs: loss.derivative(outputs, target)
            return counted * jax.jvp(derivative, (outputs,), (jnp.ones_like(outputs),))[1]

        if isinstance(loss, Likelihood) and has_observed_root(loss.loss):
            concave = jnp.maximum(-second(), 0)
        if isinstance(loss, AbstractRobust):
            slopes = second()
            root = jnp.where(root > 0, root, counted * loss.root_of_weight(residuals))
        reduced = _tree.quotient(pull, root, root > 0)
        if isinstance(loss, Likelihood):
            outputs, residuals = root * outputs, -reduced
        expected = outputs + residuals
        totals = Totals(
            number,
            chi_squared=dot(residuals, residuals),
            outputs=dot(outputs, outputs),
            targets=dot(expected, expected),
            pull=dot(pull, pull),
            slopes=jnp.sum(slopes),
            squared_slopes=dot(slopes, slopes),
            noise=jnp.where(number > 0, number * noise, 0),
            saturated=jnp.sum(loss.saturated(target)),
        )
        return Misfit(residuals, pull, root, reduced, totals, concave)


# Ratio of median absolute deviation to standard deviation in a normal distribution.
_MAD = 0.6744897501960817


def spread(
    residuals: Float[Array, "*sets m"], counted: Float[Array, "*sets m"]
) -> Float[Array, "*sets"]:
    """Estimate the residuals' standard deviation by their median absolute deviation."""
    sizes = jnp.where(counted > 0, jnp.abs(residuals), jnp.nan)
    return jnp.nanmedian(sizes, axis=-1) / _MAD
