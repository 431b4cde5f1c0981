"""`curve_fit`, the function that users call to fit a curve."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, PyTree

from .._common import _tree
from .._common._checks import (
    as_scalar,
    check_callable,
    check_count,
    check_flag,
    check_one_of,
    is_traced,
)
from .._common._warn import warn
from .._linearisation._bounds import check_start
from .._linearisation._recognised import check_not_one
from .._linearisation._retraction import check_still, Retraction
from .._solver import AbstractGaussNewton, as_solver, LevenbergMarquardt
from .._solver._termination import STANDS_STILL
from .._training._messages import result_name
from .._training._solution import History
from ..damping import Nielsen
from ..losses import AbstractLoss, SquaredError
from ._arrays import as_x, unstacked, warn_of_rounding
from ._curve import Curve, Data
from ._hidden import hidden
from ._in_parts import check_in_parts, fitted_in_parts, read_in_parts
from ._inputs import data_of, errors_of_x, surely, with_x
from ._likelihood import (
    as_loss,
    check_rates,
    check_targets,
    in_one_row,
    is_likelihood,
    is_linear,
    without_empty,
)
from ._parameters import as_start, check_shared, limits, parted
from ._problem import FitSettings, flat_box
from ._program import fitted
from ._result import CurveFit
from ._rounds import in_rounds, unless
from ._statistics import Fitted
from ._values import as_y


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
    in_parts: bool = False,
) -> CurveFit:
    r"""Fit the parameters of a function to data, with standard errors.

    Minimises $\sum_i\rho((y_i - f(\theta, x)_i)/\sigma_i)$, where $\rho$ is the `loss`:
    $\rho(r) = \frac12 r^2$ by default. The fit is compiled once for each `f` and set of
    shapes. A new `f` that computes the same, such as a lambda made in a loop, is not
    compiled again, even if it closes over different arrays; a different Python number in
    it compiles again.

    The result can be differentiated, for example with respect to `y` by `jax.jacfwd` or
    `jax.jacrev`. The implicit function theorem gives the derivative of the minimum, also
    if parameters are at their bounds.

    **Arguments:**

    - `f`: a function `f(parameters, x)` of JAX operations, which returns all of y at
        once. If it is complex, the real and imaginary parts are fitted.
    - `x`: a pytree of arrays, which is passed to `f`. A data frame becomes a dictionary
        of its columns. Whole numbers become floats, unless `f` needs them as such (for
        indices or seeds), or floats cannot hold them.
    - `y`: the data, of the shape that `f` returns; or `None` if `x` yields parts of the
        data, tuples `(x, y)` or `(x, y, sigma)`. With one more leading axis than
        `f` returns, `y` is several data sets: one program fits them all, and every
        result has this axis too. They have the same x and the same bounds.
    - `start`: the first parameters: a pytree of numbers and arrays, such as a dictionary.
        With several data sets, each may have its own start, on a leading axis of every
        parameter, unless `f` returns the shape of y for all starts at once. It is then
        one fit of all of them together.
    - `solver`: any least-squares solver of gnlin. With a `retraction`, standard errors
        are those of the parameters on their curved space. For likelihoods, and for
        several data sets with bounds or with an `f` that has loops, the default uses a
        damping rule with few trials, [`gnlin.damping.Nielsen`][].
    - `sigma`: the standard deviations of y, as one number or in the structure and shapes
        of `y` (of one data set or of all; an n x 1 array is one number for each of n data
        sets); or the m x m covariance of y. For m data sets of m points add an axis to
        the covariance, `covariance[None]`. Its rows are in the order of the flattened y,
        in which the keys of a dictionary are sorted and a complex number is its real and
        then its imaginary part. By default all standard deviations are equal and unknown.
        A point of infinite `sigma` is left out, whatever its y.
    - `sigma_x`: the standard deviations of x, if x was measured too: one number, or a
        pytree like `x`, with 0 for an exact x. The true x are then fitted as well, with
        $\frac12((x - x_i)/\sigma_{x,i})^2$ added to the objective (orthogonal distance
        regression), and returned as `fit.x`. This needs squared error and `sigma`, and
        suits up to some hundreds of points, since the Jacobian is dense.
    - `absolute_sigma`: whether `sigma` and `sigma_x` are known absolutely. By default
        they are known up to a common factor, which is estimated from the residuals, as in
        SciPy. With a robust loss, standard errors always come from the residuals.
    - `bounds`: `{name: (lower, upper)}` if `start` is a dictionary, with a dictionary
        inside where `start` has one, or a pair `(lower, upper)` of numbers or of pytrees
        like `start`. `None` or an infinite number means no bound. Both may also be
        entries in a list of bounds for an array. An array of bounds for a list with as
        many leaves holds a number for each leaf.
    - `fixed`: the names of parameters that stay at their start, if it is a dictionary;
        `"peak.width"` is the entry `"width"` of the dictionary `"peak"` inside. Equal
        bounds fix a single entry of an array.
    - `loss`: [`gnlin.SquaredError`][], a robust loss, or a negative log-likelihood. The
        robust losses are [`gnlin.losses.Huber`][], [`gnlin.losses.PseudoHuber`][],
        [`gnlin.losses.LogCosh`][], [`gnlin.losses.Cauchy`][], [`gnlin.losses.Arctan`][]
        and [`gnlin.losses.Tukey`][]. Their `delta` is in units of `sigma`, or, without
        `sigma`, of a scale estimated by the residuals' median absolute deviation. The
        likelihoods of each point are [`gnlin.losses.PoissonNLL`][],
        [`gnlin.losses.BinomialNLL`][], [`gnlin.losses.NegativeBinomialNLL`][],
        [`gnlin.losses.TobitNLL`][], which needs `sigma`, or your own
        [`gnlin.authoring.AbstractLoss`][]. With a likelihood the covariance is the
        inverse of the curvature $\sum_i J_i^\top\rho''_i J_i$, without an estimated
        factor; $\rho''$ is the expected second derivative for gnlin's counts and
        successes, and the observed one for other losses.
    - `starts`: the number of starts: `start` and points of a Sobol sequence between the
        bounds, which must be finite. The best fit is returned. If a
        warning says that it has not converged, continue by `start=fit.parameters`.
    - `nan_policy`: what to do with points whose `x` or `y` is NaN: `"raise"` an error, or
        `"omit"` the points and their rows and columns of a covariance. One of several
        data sets without any point has NaN as parameters.
    - `max_steps`: the maximum number of outer steps. If the scale of a robust loss is
        estimated, this limits their sum over the rounds, of which the first, by squared
        error, takes at most half.
    - `in_parts`: whether to read x and y in parts, for data that do not fit in memory.
        They may then be `numpy.memmap`s, and `f` must compute each point from its own x,
        since it is called for some of the points at a time. See
        "[Millions of points](../fits.md#millions-of-points)".

    **Returns:** a [`gnlin.CurveFit`][], which prints as a report.

    **Raises:** `ValueError` for arguments that make no sense. It warns if the run has not
    converged, or if the data do not determine all parameters.

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
    check_one_of("nan_policy", nan_policy, ("raise", "omit"))
    loss = as_loss(loss, sigma, sigma_x)
    absolute_sigma |= is_likelihood(loss)
    if solver.bounds is not None:
        raise ValueError("Pass `bounds` to `curve_fit` instead of to the solver.")
    start = jax.tree.map(as_start, start)
    free, kept = parted(start, fixed)
    curve, bounds = Curve(f, kept), limits(bounds, start)
    # Arrays, so that looser refits, and other numbers of steps, run the same program.
    solver = dataclasses.replace(solver, bounds=bounds, rtol=as_scalar(solver.rtol))
    most = np.asarray(min(max_steps, np.iinfo(np.int32).max))
    check_flag("in_parts", in_parts)
    if in_parts or y is None:
        if sigma_x is not None or starts is not None:
            raise ValueError("A fit in parts takes neither `sigma_x` nor `starts`.")
        program, parts = read_in_parts(curve, x, y, sigma, free)
        check_in_parts(solver, loss, parts)
        few = as_x(parts.example[0])
        check_rates(loss, curve.on(free, few), free, few)
        check_start(bounds, free)
        flat = is_linear(loss, np.zeros(1))
        setting = FitSettings(program, solver, loss, most, absolute_sigma, is_flat=flat)
        end, found = fitted_in_parts(setting, parts, free, nan_policy)
        return _as_curve_fit(setting, curve, free, None, end, found)
    warn_of_rounding(x=x, y=y)
    x, sigma_x = errors_of_x(as_x(x), sigma_x, sigma)
    values = as_y(curve, free, x, y)
    if loss.is_quadratic and [v.shape for v in jax.tree.leaves(values.tree)] == [()]:
        check_not_one(values.tree, free)
    each_start = unstacked(free) if values.has_starts else [free]
    first = each_start[0]
    x, values = with_x(curve, first, x, values, nan_policy)
    data, axes = data_of(x, values, sigma, sigma_x, nan_policy)
    if is_likelihood(loss):
        loss = in_one_row(loss, values.of_one())
        check_targets(loss, data, axes, values.tree)
        loss, data = without_empty(loss, data)
    many, number = values.many, len(data.y)
    if many:
        check_shared(bounds, free, number, values.has_starts)
    if many and not values.has_starts:
        free = jax.tree.map(lambda s: jnp.broadcast_to(s, (number, *s.shape)), free)
    for one in each_start:
        check_start(bounds, one)
    if solver.retraction is not None:
        Retraction.of(solver.retraction, first)  # raises an error if it does not fit
        check_still(solver.retraction, solver.admissible(first))
    if starts is not None:
        free = _sobol(starts, first, free, bounds, many)

    program = curve.on(first, x)
    check_rates(loss, program, first, x)
    solver = _for_fits(
        solver, loss, wait=many and (program.has_loops or bounds is not None)
    )
    flat = is_linear(loss, data.y)
    setting = FitSettings(program, solver, loss, most, absolute_sigma, axes, flat)
    if setting.is_robust and sigma is None:
        data, end, found = in_rounds(setting, data, free, starts is not None)
    else:
        end, found = fitted(setting, data, free, starts is not None)
    return _as_curve_fit(setting, curve, first, data, end, found)


def _as_curve_fit(
    setting: FitSettings,
    curve: Curve,
    start: PyTree,
    data: Data | None,
    end: Fitted,
    found: dict[str, Any],
) -> CurveFit:
    """Build the result from the end of a run and the public fields, which were `found`,
    and warn the user if something is wrong with the fit."""
    if found["history"] is not None:
        found |= {"history": History(found["history"])}
    if setting.many or is_traced(end.loss):
        failed = end.is_empty
        if is_traced(end.loss):  # No warning can be given, so a failed fit returns NaN.
            failed |= jnp.isnan(end.loss)
        free = jax.tree.map(lambda p: unless(failed, p, jnp.nan), end.parameters)
        found |= {"parameters": eqx.combine(free, found["parameters"])}
    unseen = hidden(setting, data, start, end)
    is_lost = unseen.stuck or unseen.missing.any()
    if is_lost and result_name(found["result"]) == "successful":
        found |= {"result": STANDS_STILL}
    known = {"_curve": curve, "_start": start, "_setting": setting, "_data": data}
    fit = CurveFit(**found, **known, _end=end, _hidden=unseen)
    if said := fit.complaint():
        warn(said)
    return fit


def _for_fits(solver: Any, loss: Any, *, wait: bool) -> AbstractGaussNewton:
    """Return the solver; if it is the default, with settings that suit fits.

    With a loss other than squared error, the default would stop conjugate gradients early
    in large fits, as it does for networks. A fit of 30 spots on an image, with Poisson's
    likelihood, takes 13 exact steps, and 156 with early stops.

    The longest step of a likelihood may lead to a worse minimum. Of 1,350 fits of nine
    curves, 95 ended above the best minimum that was found, and with Nielsen's rule 49, in
    about as many steps.

    - `wait`: whether data sets wait for the one with the most trials at each step, and
      trials are expensive. With a rule of few trials, a fit of a differential equation to
      200 patients takes less than half of the time. Fits of 1,000 exponentials, 1,000
      Michaelis-Menten curves and 500 pairs of peaks between bounds take a quarter to a
      third.
    """
    if not isinstance(solver, LevenbergMarquardt) or solver.form != "quadratic":
        return solver
    if not isinstance(loss, SquaredError) and solver.method == "auto":
        solver = dataclasses.replace(solver, scaling=solver.scaling or "root")
    if (wait or is_likelihood(loss)) and solver.damping is None:
        solver = dataclasses.replace(solver, damping=Nielsen())
    return solver


def _sobol(number: int, first: PyTree, starts: PyTree, bounds: Any, many: bool) -> PyTree:
    """Return `number` starts of each data set: its own, and points between the bounds."""
    check_count("starts", number)
    with jax.ensure_compile_time_eval():  # known bounds also if the data are traced
        box = flat_box(bounds, first)
        low, high = box.lower, box.upper
        is_unbounded = ~jnp.all(jnp.isfinite(low) & jnp.isfinite(high))
    if surely(is_unbounded):
        raise ValueError(
            "`starts` are drawn between the bounds: give each free parameter a finite "
            "lower and upper bound."
        )
    from scipy.stats.qmc import Sobol  # slow to import

    sequence = Sobol(low.size, scramble=False).fast_forward(1)  # the first is a corner
    drawn = sequence.random(number - 1) if number > 1 else np.zeros((0, low.size))
    points = low[None] + jnp.asarray(drawn, low.dtype) * (high - low)[None]
    points = jax.vmap(_tree.Structure.of(first).unravel)(points)

    def of_one(start):
        both = lambda s, others: jnp.concatenate([s[None], others])
        return jax.tree.map(both, start, points)

    return jax.vmap(of_one)(starts) if many else of_one(starts)
