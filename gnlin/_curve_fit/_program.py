"""What of a fit is compiled: the run, and what its end says of the parameters."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, Int, PyTree, Scalar

from .._common import _tree
from .._common._checks import is_traced
from .._common._tree import ravel_pytree
from .._linearisation._linearisation import linearise
from ..losses import SquaredError
from ..losses._robust import AbstractRobust
from ..predict._variance import Covariance, covariance, robust_variance
from ._curve import Data
from ._likelihood import Likelihood
from ._problem import at_bounds, FitSettings, Posed, with_bounds
from ._run import run
from ._structure import in_structure
from ._undetermined import NonFinite, seen


class Fitted(NamedTuple):
    """The end of a run.

    - `parameters`: those that are free.
    - `residuals`: y - f, in units of sigma; Pearson's of a likelihood.
    - `at_bound`: -1 at a lower bound that the way down leads beyond, 1 at an upper.
    - `pull`: the loss's derivative along each parameter, to be held by a multiplier.
    - `variance`: the covariance's factor, as estimated.
    - `bend`: the loss's mean second derivative, 1 of squared error.
    - `noise`: the residuals' standard deviation in units of sigma, as estimated.
    - `nonfinite`: where the curve or its derivative is no finite number.
    """

    parameters: PyTree[Array]
    loss: Scalar
    chi_squared: Scalar
    residuals: Float[Array, " m"]
    at_bound: Int[Array, " k"]
    pull: Float[Array, " k"]
    covariance: Covariance
    num_points: Scalar
    num_free: Scalar
    variance: Scalar
    bend: Scalar
    noise: Scalar
    nonfinite: NonFinite
    history: Any
    result: optx.RESULTS
    num_steps: Int[Array, ""]
    x: PyTree[Array] | None = None  # as fitted, if they have errors
    losses: Float[Array, " starts"] | None = None  # of all starts, the best first

    def factor(self, setting: FitSettings) -> Scalar:
        """Of the covariance. That of a robust loss depends on how the residuals are
        distributed, and is estimated from them even where sigma is absolute."""
        known = setting.absolute_sigma and not isinstance(setting.loss, AbstractRobust)
        return jnp.ones_like(self.variance) if known else self.variance


def fitted(
    setting: FitSettings, data: Data, start: PyTree[Array], levels: tuple[Any, ...] = ()
) -> tuple[Fitted, dict[str, Any]]:
    """The end of a run, and what it is in the parameters' structure.

    - `levels`: of what to map over, one in the other: axes of the data, the start and the
        bounds. One more than is for several data sets is over starts, of which the best
        is chosen.
    """
    inside = is_traced([jnp.zeros(()), *jax.tree.leaves((setting, data, start))])
    quickly = not levels and not inside and _is_known()
    try:
        return _program(quickly)(setting, data, start, levels)
    except ValueError as error:
        if not quickly or "compiler_options" not in str(error):
            raise
        # `f` closes over what is being differentiated.
        return _program(False)(setting, data, start, levels)


# The older of XLA's two ways to write loops for the CPU. A fit by itself is compiled for
# longer than it runs: so in half of the time, and it runs as long.
_QUICKLY = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


@functools.cache
def _is_known() -> bool:
    """Whether this version of XLA has these options."""
    try:
        jax.jit(jnp.negative, compiler_options=_QUICKLY).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


@functools.cache
def _program(quickly: bool) -> Callable:
    options: Any = {"compiler_options": _QUICKLY} if quickly else {}
    return eqx.filter_jit(_all_fitted, **options)


def _all_fitted(
    setting: FitSettings, data: Data, start: PyTree[Array], levels: tuple[Any, ...]
) -> tuple[Fitted, dict[str, Any]]:

    def one(data, start, bounds):
        solver = with_bounds(setting.solver, bounds)
        alone = not levels
        return _fitted(setting._replace(solver=solver), data, start, history=alone)

    for of_level in reversed(levels):
        one = jax.vmap(one, in_axes=of_level)
    end = one(data, start, setting.solver.bounds)
    if len(levels) > setting.many:
        end = _best(end, setting.many)
    structured = lambda end: in_structure(setting, end)
    return end, jax.vmap(structured)(end) if setting.many else structured(end)


def _best(end: Fitted, many: bool) -> Fitted:
    """Of all starts, of each data set."""

    def of_one(end: Fitted) -> Fitted:
        losses = jnp.where(jnp.isnan(end.loss), jnp.inf, end.loss)
        chosen = jax.tree.map(lambda x: x[jnp.argmin(losses)], end)
        return chosen._replace(losses=jnp.sort(losses))

    return jax.vmap(of_one)(end) if many else of_one(end)


def _fitted(
    setting: FitSettings, data: Data, start: PyTree[Array], *, history: bool
) -> Fitted:
    bounds = setting.solver.bounds
    end = run(setting, data, start, history=history)
    posed, variables = Posed.of(setting, data), end.variables
    target, counted, parameters = posed.target, posed.counted, variables["curve"]
    loss = posed.loss
    lin = linearise(posed.outputs, variables, posed.given)
    matrix = lin.matrix()
    pull = counted * loss.derivative(lin.outputs, target)
    slope = lin.jacobian.domain.unravel(_tree.matmul(matrix.T, pull))["curve"]
    at_bound, blocked = at_bounds(bounds, parameters, slope)
    jacobian, others = jnp.split(matrix, [blocked.size], axis=1)
    nonfinite = NonFinite.of(lin.outputs, jacobian)
    moved = lambda y: posed.outputs(variables | {"curve": y}, posed.given)
    outputs, residuals = lin.outputs, target - lin.outputs
    if isinstance(setting.loss, Likelihood):
        # In units in which the curvature is 1, residuals are Pearson's.
        root = loss.root(outputs, target)
        jacobian, moved = root[:, None] * jacobian, _scaled(root, moved)
        outputs *= root
        residuals = -jnp.where(root > 0, pull / jnp.where(root > 0, root, 1), 0)
    of_seen = parameters, start, outputs, outputs + residuals, jacobian, bounds
    is_seen = seen(moved, *of_seen)
    if data.sigma_x is not None:  # What the x's cannot make up for is left.
        q, _ = jnp.linalg.qr(others)
        jacobian -= _tree.matmul(q, _tree.matmul(q.T, jacobian))
    errors = covariance(jacobian, ~blocked, is_seen)
    num_points, num_free = jnp.sum(data.counted), errors.rank.astype(target.dtype)
    if isinstance(setting.loss, Likelihood):
        chi_squared = _tree.dot(residuals, residuals)
        variance = bend = noise = jnp.ones_like(chi_squared)
    elif isinstance(loss, SquaredError):
        chi_squared = _tree.dot(residuals, residuals)
        variance = chi_squared / (num_points - num_free)
        bend, noise = jnp.ones_like(variance), jnp.sqrt(variance)
    else:
        derivative = lambda outputs: loss.derivative(outputs, target)
        ones = jnp.ones_like(lin.outputs)
        slopes = counted * jax.jvp(derivative, (lin.outputs,), (ones,))[1]
        variance = robust_variance(pull, slopes, counted, num_free)
        bend = jnp.sum(slopes) / num_points
        residuals = residuals if data.spread is None else data.spread * residuals
        noise = spread(residuals, counted)
        chi_squared = _tree.dot(residuals, residuals)
    return Fitted(
        parameters,
        end.loss,
        chi_squared,
        residuals[: data.y.size],
        at_bound,
        ravel_pytree(slope)[0],
        errors,
        num_points,
        num_free,
        jnp.where(num_points > num_free, variance, jnp.inf),
        bend,
        jnp.where(num_points > num_free, noise, jnp.inf),
        nonfinite,
        end.history,
        end.result,
        end.num_steps,
        None if data.sigma_x is None else data.moved(variables["x"]),
    )


def _scaled(root: Array, outputs_at: Callable[[PyTree], Array]) -> Callable:
    return lambda y: root * outputs_at(y)


# The median absolute deviation of a normal distribution, over its standard deviation.
_MAD = 0.6744897501960817


def spread(residuals: Float[Array, " m"], counted: Float[Array, " m"]) -> Scalar:
    """Their standard deviation, by their median absolute deviation."""
    return jnp.nanmedian(jnp.where(counted > 0, jnp.abs(residuals), jnp.nan)) / _MAD
