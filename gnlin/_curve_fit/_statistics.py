"""The end of a fit, and the statistics there: the errors of the parameters, the noise."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, Int, PyTree, Scalar

from .._common import _tree
from .._common._tree import ravel_pytree
from ..losses import SquaredError
from ..losses._robust import AbstractRobust
from ._covariance import Covariance, covariance
from ._likelihood import Likelihood
from ._not_finite import NonFinite
from ._problem import at_bounds, FitSettings, Posed
from ._undetermined import Totals


class Fitted(NamedTuple):
    """The end of a run.

    - `parameters`: the free parameters.
    - `at_bound`: -1 if a parameter is held at its lower bound, 1 at its upper, else 0.
    - `pull`: the derivative of the loss with respect to each parameter.
    - `variance`: the estimated factor of the covariance.
    - `bend`: the mean second derivative of the loss, which is 1 for squared error.
    - `noise`: the estimated standard deviation of the residuals, in units of sigma.
    - `residuals`: y - f, in units of sigma; Pearson's residuals with a likelihood. `None`
        if the data were read in parts.
    - `nonfinite`: where the curve or its derivative is not finite.
    """

    parameters: PyTree[Array]
    loss: Scalar
    chi_squared: Scalar
    at_bound: Int[Array, " k"]
    pull: Float[Array, " k"]
    covariance: Covariance
    num_points: Scalar
    num_free: Scalar
    variance: Scalar
    bend: Scalar
    noise: Scalar
    residuals: Any
    nonfinite: NonFinite
    history: Any
    result: optx.RESULTS
    num_steps: Int[Array, ""]
    x: PyTree[Array] | None = None  # the fitted x, if x has errors
    losses: Float[Array, " starts"] | None = None  # of all starts, in ascending order

    def factor(self, setting: FitSettings) -> Scalar:
        """Return the factor of the covariance."""
        return self.variance if setting.is_estimated else jnp.ones_like(self.variance)


def as_fitted(
    setting: FitSettings,
    parameters: PyTree[Array],
    slope: PyTree[Array],
    jacobian: Float[Array, "n k"],
    is_seen: Array,
    totals: Totals,
    **others: Any,
) -> Fitted:
    """Return the end of a run.

    - `slope`: the derivative of the loss by each parameter.
    - `jacobian`: of the residuals, or its triangular factor.
    - `is_seen`: whether each parameter affects the curve.
    - `others`: the fields that are no statistics.
    """
    at_bound, blocked = at_bounds(setting.solver.bounds, parameters, slope)
    number = totals.num_points
    # A curve that is not finite may have a finite Jacobian, but the fit has no errors.
    jacobian = jnp.where(jnp.isfinite(totals.chi_squared), jacobian, jnp.nan)
    errors = covariance(jacobian, ~blocked, is_seen, number)
    num_free = errors.rank.astype(number.dtype)
    variance = bend = noise = jnp.ones_like(number)
    if isinstance(setting.loss, SquaredError):
        variance = totals.chi_squared / (number - num_free)
        noise = jnp.sqrt(variance)
    elif isinstance(setting.loss, AbstractRobust):
        variance = _robust_variance(totals, num_free)
        bend, noise = totals.slopes / number, totals.noise / number
    return Fitted(
        parameters=parameters,
        chi_squared=totals.chi_squared,
        at_bound=at_bound,
        pull=ravel_pytree(slope)[0],
        covariance=errors,
        num_points=number,
        num_free=num_free,
        variance=jnp.where(number > num_free, variance, jnp.inf),
        bend=bend,
        noise=jnp.where(number > num_free, noise, jnp.inf),
        **others,
    )


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
    """The outputs at a point beside the data.

    - `outputs`, `residuals`: in units of sigma; with a likelihood in units in which the
        loss has the curvature 1, so that the residuals are Pearson's.
    - `pull`: the derivative of the loss by each output.
    - `root`: the root of the loss's curvature. Where a robust loss is straight, it is
        that of the parabola that touches it.
    - `reduced`: `pull` divided by `root`.
    """

    outputs: Float[Array, " m"]
    residuals: Float[Array, " m"]
    pull: Float[Array, " m"]
    root: Float[Array, " m"]
    reduced: Float[Array, " m"]
    totals: Totals

    @staticmethod
    def of(posed: Posed, outputs: Float[Array, " m"], *, has_noise: bool) -> "Misfit":
        """`has_noise`: whether to estimate the noise."""
        target, counted, loss, dot = posed.target, posed.counted, posed.loss, _tree.dot
        residuals, number = target - outputs, jnp.sum(posed.given[0].counted)
        noise = spread(residuals, counted) if has_noise else jnp.zeros_like(number)
        pull = counted * loss.derivative(outputs, target)
        root = counted * loss.root(outputs, target)
        slopes = root**2
        if isinstance(loss, AbstractRobust):
            derivative = lambda outputs: loss.derivative(outputs, target)
            ones = jnp.ones_like(outputs)
            slopes = counted * jax.jvp(derivative, (outputs,), (ones,))[1]
            root = jnp.where(root > 0, root, counted * loss.root_of_weight(residuals))
        reduced = jnp.where(root > 0, pull / jnp.where(root > 0, root, 1), 0)
        if isinstance(loss, Likelihood):
            outputs, residuals = root * outputs, -reduced
        expected = outputs + residuals
        totals = Totals(
            number,
            chi_squared=dot(residuals, residuals),
            squares=dot(outputs, outputs) + dot(expected, expected),
            pull=dot(pull, pull),
            slopes=jnp.sum(slopes),
            squared_slopes=dot(slopes, slopes),
            noise=jnp.where(number > 0, number * noise, 0),
        )
        return Misfit(outputs, residuals, pull, root, reduced, totals)


# Ratio of median absolute deviation to standard deviation in a normal distribution.
_MAD = 0.6744897501960817


def spread(residuals: Float[Array, " m"], counted: Float[Array, " m"]) -> Scalar:
    """Estimate the residuals' standard deviation by their median absolute deviation."""
    return jnp.nanmedian(jnp.where(counted > 0, jnp.abs(residuals), jnp.nan)) / _MAD
