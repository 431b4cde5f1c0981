"""A curve's parameters from data: what the user calls."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PyTree

from .. import _tree
from .._bounds import Box, check_start
from .._checks import check_callable, check_count, check_flag
from .._losses import AbstractLoss, AbstractRobust, SquaredError
from .._solver import AbstractGaussNewton, as_solver, LevenbergMarquardt
from ._curve import Curve, Data
from ._given import as_start, as_x, data_of, errors_of_x, limits, parted, several, with_x
from ._likelihood import as_loss, check_rates, check_targets, in_one_row, Likelihood
from ._posed import Setting, with_bounds
from ._program import Fitted, fitted, spread
from ._result import CurveFit, made


# Rounds of a robust loss after one of squared error, each with the scale that the last
# one's residuals have.
_ROUNDS = 5


def curve_fit(
    f: Callable[[Any, Any], PyTree],
    x: Any,
    y: Any,
    start: PyTree,
    solver: AbstractGaussNewton | Any = LevenbergMarquardt(),
    *,
    sigma: Any = None,
    sigma_x: PyTree[ArrayLike] | None = None,
    absolute_sigma: bool = False,
    bounds: Any = None,
    fixed: Iterable[str] = (),
    loss: AbstractLoss = SquaredError(),
    starts: int | None = None,
    nan_policy: str = "raise",
    max_steps: int = 256,
) -> CurveFit:
    r"""Fit a function's parameters to data: their values, and how well they are known.

    Minimises $\sum_i\rho((y_i - f(\theta, x)_i)/\sigma_i)$, with $\rho(r) = \frac12 r^2$
    unless a `loss` says otherwise. The program is compiled once for each `f` and all
    shapes; another `f` that computes the same, such as a lambda made in a loop, is not
    compiled again. It may close over other arrays, but not over other Python numbers.

    Derivatives of what is returned, as by `jax.jacfwd` or `jax.jacrev` with respect to
    `y`, are those of the minimum (by the implicit function theorem), also where a
    parameter is at its bound.

    **Arguments:**

    - `f`: `f(parameters, x)`, all of y at once, in any JAX operations; complex ones have
        their real and imaginary parts fitted.
    - `x`: passed on, a pytree of arrays; a data frame as a dictionary of its columns.
    - `y`: what `f` should be. With one axis more than `f` returns: several data sets,
        fitted in one program; all results then have this axis in front.
    - `start`: a pytree of numbers and arrays, such as a dictionary; or an array. Of
        several data sets each may have its own, on a leading axis.
    - `solver`: any least-squares solver of gnlin.
    - `sigma`: the standard deviations of y, in its structure and shapes (of one data set,
        or of all), or as one number; or their m x m covariance. By default all are 1, and
        unknown. A point is left out where it is infinite.
    - `sigma_x`: the standard deviations of x, if they were measured, too: one number, or
        in the structure of `x`, with 0 for what is exact. The true ones are then fitted
        as well, with $\frac12((x - x_i)/\sigma_{x,i})^2$ added (orthogonal distance
        regression); they are `fit.x`. Of squared error only, and for up to some hundreds
        of points: the Jacobian is dense.
    - `absolute_sigma`: whether `sigma` (and `sigma_x`) is known, and not only up to a
        factor, which else is estimated from the residuals, as SciPy has it. The standard
        errors of a robust loss depend on how the residuals are distributed, and are
        estimated from them in either case.
    - `bounds`: of a dictionary `{name: (lower, upper)}`; else `(lower, upper)`, numbers
        or trees of `start`'s structure, as solvers have them. Infinite ones, and `None`,
        are none.
    - `fixed`: names of those of a dictionary that stay as they are.
    - `loss`: [`gnlin.SquaredError`][], or a robust one, [`gnlin.Huber`][],
        [`gnlin.PseudoHuber`][], [`gnlin.LogCosh`][], [`gnlin.Cauchy`][],
        [`gnlin.Arctan`][] or [`gnlin.Tukey`][], whose `delta` is in units of `sigma`;
        without `sigma` of a scale that is estimated, by the median absolute deviation of
        the residuals. Or a negative log-likelihood of each point, whose sum is minimised:
        [`gnlin.PoissonNLL`][], [`gnlin.BinomialNLL`][], [`gnlin.NegativeBinomialNLL`][],
        [`gnlin.TobitNLL`][], which needs `sigma`, or a [`gnlin.AbstractLoss`][] of your
        own. Then the covariance is the inverse of the curvature
        $\sum_i J_i^\top\rho''_i J_i$ and no factor is estimated. The second derivative
        $\rho''$ is the expected one of gnlin's counts and successes, the observed one of
        other losses.
    - `starts`: so many starts, this one and others between the bounds, which are to be
        finite: points of a Sobol sequence. Up to 64 run by the program of a fit by
        itself, more in one of their own; the best is returned.
    - `nan_policy`: what to do with points whose `x` or `y` is NaN: `"raise"` an error, or
        `"omit"` them, with their rows and columns of a covariance.
    - `max_steps`: the most outer steps.

    **Returns:** a [`gnlin.CurveFit`][], which prints as a report.

    **Raises:** `ValueError` in one sentence, for what cannot be meant. It warns if the
    run has not converged, or if the data do not determine all parameters.

    !!! example

        ```python
        def decay(p, x):
            return p["a"] * jnp.exp(-p["rate"] * x) + p["c"]

        measured = 2 * jnp.exp(-x) + 0.01 * jnp.cos(100 * x)
        start = {"a": 1.0, "rate": 0.5, "c": 0.0}
        fit = gnlin.curve_fit(decay, x, measured, start, bounds={"rate": (0.0, jnp.inf)})
        print(fit)
        fit.parameters["rate"], fit.standard_errors["rate"]
        ```

    ??? cite "Reference"

        `sigma_x`: P. T. Boggs, R. H. Byrd and R. B. Schnabel, *A stable and efficient
        algorithm for nonlinear orthogonal distance regression*, SIAM J. Sci. Stat.
        Comput. 8 (1987).
    """
    solver = as_solver(solver)
    check_callable("f", f, "a function of the parameters and x", "lambda p, x: p * x")
    check_count("max_steps", max_steps)
    check_flag("absolute_sigma", absolute_sigma)
    if nan_policy not in ("raise", "omit"):
        raise ValueError(
            f'`nan_policy` must be "raise" or "omit", but {nan_policy!r} was given.'
        )
    loss = as_loss(loss, sigma, sigma_x)
    if solver.bounds is not None:
        raise ValueError("Pass `bounds` to `curve_fit`, and not to the solver.")
    start = jax.tree.map(as_start, start)
    free, kept = parted(start, fixed)
    curve = Curve(f, tuple(kept))
    x, sigma_x = errors_of_x(as_x(x), sigma_x)
    x, values = with_x(x, several(curve, free, kept, x, y), nan_policy)
    data, axes_of_data = data_of(x, values, sigma, sigma_x, nan_policy)
    if isinstance(loss, Likelihood):
        absolute_sigma, loss = True, in_one_row(loss, values.of_one())
        check_targets(loss, data, axes_of_data, values.tree)
    many, axis_of_start = values.many, values.axis_of_start
    of_each = [free] if axis_of_start is None else _unstacked(free, len(data.y))
    box = limits(bounds, start, kept)
    for one in of_each:
        check_start(box, one)
    solver = with_bounds(solver, box)
    levels = ((axes_of_data, axis_of_start, None),) if many else ()
    if starts is not None:
        if many and axis_of_start is None:
            of_each *= len(data.y)
        free = _sobol(starts, of_each, box)
        free = jax.tree.map(lambda s: s if many else s[0], free)
        levels = ((axes_of_data, 0, None),) * many + ((None, 0, None),)

    program = curve.on(of_each[0], kept, x)
    check_rates(loss, lambda: program(of_each[0], kept, x))
    setting = Setting(program, solver, loss, max_steps, kept, absolute_sigma, many)
    if isinstance(loss, AbstractRobust) and sigma is None:
        first = setting._replace(loss=SquaredError())
        end, parts = fitted(first, data, free, levels)
        for _ in range(_ROUNDS):
            data = data._replace(spread=_spread(data, end))
            end, parts = fitted(setting, data, free, levels)
    else:
        end, parts = fitted(setting, data, free, levels)
    fit = made(setting, curve, data, end, parts)
    complaint = fit.complaint()
    if complaint:
        warnings.warn(complaint, stacklevel=2)
    return fit


def _unstacked(tree: PyTree[Array], number: int) -> list[PyTree[Array]]:
    return [jax.tree.map(lambda s, k=k: s[k], tree) for k in range(number)]


def _sobol(number: int, starts: list[PyTree], limits: Any) -> PyTree:
    """Of each data set its start, and others between the bounds."""
    check_count("starts", number)
    first = starts[0]
    box = Box.of((None, None) if limits is None else limits, first)
    low, high = (_tree.ravel_pytree(b)[0] for b in (box.lower, box.upper))
    if not bool(jnp.all(jnp.isfinite(low) & jnp.isfinite(high))):
        raise ValueError(
            "`starts` are drawn between the bounds: give each parameter that is free a "
            "finite lower and upper one."
        )
    from scipy.stats.qmc import Sobol  # dear to import

    # Its first point is a corner.
    sequence = Sobol(low.size, scramble=False).fast_forward(1)
    drawn = sequence.random(number - 1) if number > 1 else np.zeros((0, low.size))
    points = low[None] + jnp.asarray(drawn, low.dtype) * (high - low)[None]
    unravel = _tree.Structure.of(first).unravel

    def of_one(start):
        return jax.vmap(unravel)(
            jnp.concatenate([_tree.ravel_pytree(start)[0][None], points])
        )

    return jax.tree.map(lambda *s: jnp.stack(s), *map(of_one, starts))


def _spread(data: Data, end: Fitted) -> Array:
    """That of the residuals, in units of sigma, of each data set."""
    # Where most points are met exactly there is none.
    least = jnp.finfo(data.y.dtype).eps * jnp.max(jnp.abs(data.y), axis=-1)
    least = jnp.where(least > 0, least, 1)
    of_each = spread if data.y.ndim == 1 else jax.vmap(spread)
    return jnp.maximum(of_each(end.residuals, data.counted), least)
