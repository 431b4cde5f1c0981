"""The compiled part of a fit: the run to the minimum, and the statistics there."""

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
from .._common._quickly import quickly
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

    - `parameters`: the free parameters.
    - `residuals`: y - f, in units of sigma; Pearson's residuals with a likelihood.
    - `at_bound`: -1 if a parameter is held at its lower bound, 1 at its upper, else 0.
    - `pull`: the derivative of the loss with respect to each parameter.
    - `variance`: the estimated factor of the covariance.
    - `bend`: the mean second derivative of the loss, which is 1 for squared error.
    - `noise`: the estimated standard deviation of the residuals, in units of sigma.
    - `nonfinite`: where the curve or its derivative is not finite.
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
    x: PyTree[Array] | None = None  # the fitted x, if x has errors
    losses: Float[Array, " starts"] | None = None  # of all starts, in ascending order

    def factor(self, setting: FitSettings) -> Scalar:
        """Return the factor of the covariance. For a robust loss it depends on the
        distribution of the residuals, so it is estimated even if sigma is absolute."""
        known = setting.absolute_sigma and not isinstance(setting.loss, AbstractRobust)
        return jnp.ones_like(self.variance) if known else self.variance


def fitted(
    setting: FitSettings,
    data: Data,
    start: PyTree[Array],
    levels: tuple[Any, ...] = (),
    held: tuple[PyTree[Array], PyTree[Array]] | None = None,
) -> tuple[Fitted, dict[str, Any]]:
    """Run a fit; return its end, and the results in the structure of the parameters.

    - `levels`: nested `jax.vmap` axes of the data, the start and the bounds, outermost
        first: a level for several data sets, then one for several starts, of which the
        best is chosen. Up to 64 starts of one data set run one after the other instead,
        by the program of a single fit, because another program takes longer to compile.
    - `held`: the held parameters of a single fit, as in `Data`.
    """
    inside = is_traced([jnp.zeros(()), *jax.tree.leaves((setting, data, start))])
    if levels == _OF_STARTS and not inside:
        number = len(jax.tree.leaves(start)[0])
        if number <= _FEW_STARTS:
            each = [jax.tree.map(lambda s, k=k: s[k], start) for k in range(number)]
            return _best_of([fitted(setting, data, one) for one in each])
    alone = not levels and not inside
    if alone:
        data = data._replace(held=_none_held(start) if held is None else held)
    program = _program(alone, alone and setting.curve.has_loops)
    try:
        return program(setting, data, start, levels)
    except eqx.EquinoxRuntimeError as error:
        error.add_note(
            "`f` raised this at parameters that the fit tried. Let it return numbers "
            "that are not finite instead, by `throw=False` of diffrax's `diffeqsolve`: "
            "the fit then takes a shorter step."
        )
        raise


# The levels of one data set with several starts. Up to this many starts run one after the
# other: 32 starts of three parameters take 54 ms, not 12, but save 6 s of compilation.
_OF_STARTS = ((None, 0, None),)
_FEW_STARTS = 64


def _none_held(start: PyTree[Array]) -> tuple[PyTree[Array], PyTree[Array]]:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, bool), start), start


def _best_of(
    ends: list[tuple[Fitted, dict[str, Any]]],
) -> tuple[Fitted, dict[str, Any]]:
    losses = jnp.stack([end.loss for end, _ in ends])
    losses = jnp.where(jnp.isnan(losses), jnp.inf, losses)
    end, parts = ends[int(jnp.argmin(losses))]
    return end._replace(losses=jnp.sort(losses), history=None), parts


@functools.cache
def _program(alone: bool, has_loops: bool) -> Callable:
    """Return the compiled program. A single fit takes longer to compile than to run."""
    if alone:
        return quickly(_all_fitted, has_loops=has_loops)
    return eqx.filter_jit(_all_fitted)


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
    """Choose the start of least loss, for each data set."""

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
        # Scaled so that the curvature is 1, the residuals are Pearson's.
        root, unscaled = loss.root(outputs, target), moved
        jacobian, moved = root[:, None] * jacobian, lambda y: root * unscaled(y)
        outputs *= root
        residuals = -jnp.where(root > 0, pull / jnp.where(root > 0, root, 1), 0)
    expected = outputs + residuals
    is_seen = seen(moved, parameters, start, outputs, expected, jacobian, bounds)
    if data.sigma_x is not None:  # Project out what a shift of x can compensate.
        q, _ = jnp.linalg.qr(others)
        jacobian -= _tree.matmul(q, _tree.matmul(q.T, jacobian))
    errors = covariance(jacobian, ~blocked, is_seen)
    num_points, num_free = jnp.sum(data.counted), errors.rank.astype(target.dtype)
    if data.spread is not None:  # of a robust loss: back to units of sigma
        residuals = data.spread * residuals
    chi_squared = _tree.dot(residuals, residuals)
    variance = bend = noise = jnp.ones_like(chi_squared)
    if isinstance(loss, SquaredError):
        variance = chi_squared / (num_points - num_free)
        noise = jnp.sqrt(variance)
    elif isinstance(loss, AbstractRobust):
        derivative = lambda outputs: loss.derivative(outputs, target)
        ones = jnp.ones_like(lin.outputs)
        slopes = counted * jax.jvp(derivative, (lin.outputs,), (ones,))[1]
        sums = jnp.sum(slopes), _tree.dot(slopes, slopes)
        variance = robust_variance(_tree.dot(pull, pull), sums, num_points, num_free)
        bend = sums[0] / num_points
        noise = spread(residuals, counted)
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


# Ratio of median absolute deviation to standard deviation in a normal distribution.
_MAD = 0.6744897501960817


def spread(residuals: Float[Array, " m"], counted: Float[Array, " m"]) -> Scalar:
    """Estimate the residuals' standard deviation by their median absolute deviation."""
    return jnp.nanmedian(jnp.where(counted > 0, jnp.abs(residuals), jnp.nan)) / _MAD
