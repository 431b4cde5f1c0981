"""What of a fit is compiled: the run, and what its end says of the parameters."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, Int, PyTree, Scalar

from .. import _tree
from .._checks import is_traced
from .._linearisation import linearise
from .._losses import AbstractRobust, SquaredError
from .._tree import ravel_pytree
from .._uncertainty import Covariance, covariance, robust_variance
from ._curve import Data
from ._likelihood import Likelihood
from ._posed import at_bounds, Posed, Setting, with_bounds
from ._run import run
from ._seen import NonFinite, seen
from ._structure import in_structure


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

    def factor(self, setting: Setting) -> Scalar:
        """Of the covariance. That of a robust loss depends on how the residuals are
        distributed, and is estimated from them even where sigma is absolute."""
        known = setting.absolute_sigma and not isinstance(setting.loss, AbstractRobust)
        return jnp.ones_like(self.variance) if known else self.variance


def fitted(
    setting: Setting,
    data: Data,
    start: PyTree[Array],
    levels: tuple[Any, ...] = (),
    held: tuple[PyTree[Array], PyTree[Array]] | None = None,
) -> tuple[Fitted, dict[str, Any]]:
    """The end of a run, and what it is in the parameters' structure.

    - `levels`: of what to map over, one in the other: axes of the data, the start and the
        bounds. One more than is for several data sets is over starts, of which the best
        is chosen. Few starts are run one after another, by the program of a fit by
        itself: to compile another takes longer.
    - `held`: of a fit by itself, as `Data` has it.
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
    quickly = alone and _is_known()
    program = _program(quickly, quickly and setting.curve.has_loops)
    try:
        return program(setting, data, start, levels)
    except eqx.EquinoxRuntimeError as error:
        error.add_note(
            "`f` raised this at parameters that the fit tried. Let it return numbers "
            "that are not finite instead, by `throw=False` of diffrax's `diffeqsolve`: "
            "the fit then takes a shorter step."
        )
        raise
    except ValueError as error:
        if not quickly or "compiler_options" not in str(error):
            raise
        # `f` closes over what is being differentiated.
        return _program(False, False)(setting, data, start, levels)


# The levels of one data set with several starts
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


# The older of XLA's two ways to write loops for the CPU. A fit by itself is compiled for
# longer than it runs: so in half of the time, and it runs as long.
_QUICKLY = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# Of a function with loops, such as the solution of a differential equation, XLA otherwise
# spends half of the time on moving what does not change out of loops within loops.
_OF_LOOPS = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


@functools.cache
def _is_known() -> bool:
    """Whether this version of XLA has these options."""
    options = _QUICKLY | _OF_LOOPS
    try:
        jax.jit(jnp.negative, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


@functools.cache
def _program(quickly: bool, has_loops: bool) -> Callable:
    if not quickly:
        return eqx.filter_jit(_all_fitted)
    options: Any = _QUICKLY | (_OF_LOOPS if has_loops else {})
    return eqx.filter_jit(_all_fitted, compiler_options=options)


def _all_fitted(
    setting: Setting, data: Data, start: PyTree[Array], levels: tuple[Any, ...]
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
    setting: Setting, data: Data, start: PyTree[Array], *, history: bool
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
