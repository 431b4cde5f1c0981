"""A curve's parameters from data: what the user calls."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, PyTree

from .. import _tree
from .._bounds import Box, check_start
from .._checks import check_count, check_flag
from .._losses import AbstractLoss, AbstractRobust, SquaredError
from .._solver import AbstractGaussNewton, LevenbergMarquardt
from ._program import Curve, Data, Fitted, fitted, flat, Setting, with_bounds
from ._result import CurveFit, made


# Rounds of a robust loss after one of squared error, each with the scale that the last
# one's residuals have.
_ROUNDS = 5
# The median absolute deviation of a normal distribution, over its standard deviation.
_MAD = 0.6744897501960817


def curve_fit(
    f: Callable[[Any, Any], PyTree],
    x: PyTree[ArrayLike],
    y: PyTree[ArrayLike],
    start: PyTree[ArrayLike],
    solver: AbstractGaussNewton = LevenbergMarquardt(),
    *,
    sigma: ArrayLike | None = None,
    absolute_sigma: bool = False,
    bounds: Any = None,
    fixed: Iterable[str] = (),
    loss: AbstractLoss = SquaredError(),
    starts: int | None = None,
    nan_policy: str = "raise",
    max_steps: int = 1000,
) -> CurveFit:
    r"""Fit a function's parameters to data: their values, and how well they are known.

    Minimises $\sum_i\rho((y_i - f(\theta, x)_i)/\sigma_i)$, with $\rho(r) = \frac12 r^2$
    unless a `loss` says otherwise. One compiled program for each `f` and all shapes.

    **Arguments:**

    - `f`: `f(parameters, x)`, all of y at once, in any JAX operations; complex ones have
        their real and imaginary parts fitted.
    - `x`: passed on, a pytree of arrays.
    - `y`: what `f` should be. With one axis more than `f` returns: several data sets,
        fitted in one program; all results then have this axis in front.
    - `start`: a pytree of numbers and arrays, such as a dictionary; or an array. Of
        several data sets each may have its own, on a leading axis.
    - `solver`: any least-squares solver of gnlin.
    - `sigma`: the standard deviations of y, in one of its shapes or as one number; or
        their m x m covariance. By default all are 1, and unknown.
    - `absolute_sigma`: whether `sigma` is known, and not only up to a factor, which else
        is estimated from the residuals, as SciPy has it.
    - `bounds`: of a dictionary `{name: (lower, upper)}`; else `(lower, upper)`, numbers
        or trees of `start`'s structure, as solvers have them. Infinite ones, and `None`,
        are none.
    - `fixed`: names of those of a dictionary that stay as they are.
    - `loss`: [`gnlin.SquaredError`][], or a robust one, [`gnlin.Huber`][],
        [`gnlin.PseudoHuber`][], [`gnlin.LogCosh`][], [`gnlin.Cauchy`][],
        [`gnlin.Arctan`][] or [`gnlin.Tukey`][], whose `delta` is in units of `sigma`;
        without `sigma` of a scale that is estimated, by the median absolute deviation of
        the residuals.
    - `starts`: so many starts, this one and others between the bounds, which are to be
        finite: points of a Sobol sequence. All run in one program; the best is returned.
    - `nan_policy`: what to do with NaN in `y`: `"raise"` an error, or `"omit"` them.
    - `max_steps`: the most outer steps.

    **Returns:** a [`gnlin.CurveFit`][], which prints as a report.

    **Raises:** `ValueError` in one sentence, for what cannot be meant. It warns if the
    run has not converged, or if the data do not determine all parameters.

    !!! example

        ```python
        def decay(p, x):
            return p["a"] * jnp.exp(-p["rate"] * x) + p["c"]

        start = {"a": 1.0, "rate": 0.5, "c": 0.0}
        fit = gnlin.curve_fit(decay, x, y, start, bounds={"rate": (0.0, jnp.inf)})
        print(fit)
        fit.parameters["rate"], fit.standard_errors["rate"]
        ```
    """
    check_count("max_steps", max_steps)
    check_flag("absolute_sigma", absolute_sigma)
    if nan_policy not in ("raise", "omit"):
        raise ValueError(
            f'`nan_policy` must be "raise" or "omit", but {nan_policy!r} was given.'
        )
    if not isinstance(loss, SquaredError | AbstractRobust):
        raise ValueError(
            "`loss` must be `gnlin.SquaredError()` or a robust one, such as "
            f"`gnlin.Huber(2.0)`, but {loss!r} was given; for others use `gnlin.solve`."
        )
    if solver.bounds is not None:
        raise ValueError("Pass `bounds` to `curve_fit`, and not to the solver.")
    start = jax.tree.map(_as_floats, start)
    free, kept = _parted(start, fixed)
    curve = Curve(f, tuple(kept))
    x = jax.tree.map(jnp.asarray, x)
    y, axes_of_start = _several(curve, free, kept, x, y)
    many = y.ndim == 2
    data, axes_of_data = _data(x, y, sigma, nan_policy)
    of_each = [free] if axes_of_start is None else _unstacked(free, y.shape[0])
    limits = _limits(bounds, start, kept)
    for one in of_each:
        check_start(limits, one)
    solver = with_bounds(solver, limits)
    levels = ((axes_of_data, axes_of_start, None),) if many else ()
    if starts is not None:
        free = _sobol(starts, of_each, limits)
        free = jax.tree.map(lambda s: s if many else s[0], free)
        levels = ((axes_of_data, 0, None),) * many + ((None, 0, None),)

    setting = Setting(curve, solver, loss, max_steps, kept, absolute_sigma, many)
    if isinstance(loss, AbstractRobust) and sigma is None:
        first = setting._replace(loss=SquaredError())
        end, parts = fitted(first, data, free, levels)
        for _ in range(_ROUNDS):
            data = data._replace(sigma=_spread(data, end))
            end, parts = fitted(setting, data, free, levels)
    else:
        end, parts = fitted(setting, data, free, levels)
    fit = made(setting, data, end, parts)
    complaint = fit.complaint()
    if complaint:
        warnings.warn(complaint, stacklevel=2)
    return fit


def _as_floats(value: ArrayLike) -> Array:
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise ValueError(
            "`start` must be real: fit real and imaginary parts as two parameters."
        )
    # Of no weak type: that of a Python number would be compiled apart.
    kind = value.dtype if jnp.issubdtype(value.dtype, jnp.floating) else float
    return jnp.asarray(
        np.asarray(value) if not isinstance(value, Tracer) else value, kind
    )


def _parted(start: PyTree, fixed: Iterable[str]) -> tuple[PyTree, dict]:
    """Those that are free, and the others."""
    names = [fixed] if isinstance(fixed, str) else list(fixed)
    if not names:
        return start, {}
    if not isinstance(start, Mapping):
        raise ValueError(
            "`fixed` is for parameters with names, in a dictionary; of others make the "
            "lower and the upper bound equal."
        )
    unknown = [name for name in names if name not in start]
    if unknown:
        raise ValueError(
            f"There is no parameter {unknown[0]!r} to be fixed, but "
            f"{', '.join(map(repr, start))}."
        )
    free = {k: value for k, value in start.items() if k not in names}
    if not free:
        raise ValueError("All parameters are fixed: there is nothing to fit.")
    return free, {k: start[k] for k in start if k in names}


def _unstacked(tree: PyTree[Array], number: int) -> list[PyTree[Array]]:
    return [jax.tree.map(lambda s, k=k: s[k], tree) for k in range(number)]


def _limits(bounds: Any, start: PyTree, kept: dict) -> Any:
    """`(lower, upper)` of those that are free, for a solver."""
    if bounds is None:
        return None
    if isinstance(bounds, Mapping):
        if not isinstance(start, Mapping):
            raise ValueError(
                "`bounds` by names are for parameters in a dictionary: pass a pair "
                "`(lower, upper)`."
            )
        unknown = [name for name in bounds if name not in start]
        if unknown:
            raise ValueError(
                f"There is no parameter {unknown[0]!r} to have bounds, but "
                f"{', '.join(map(repr, start))}."
            )
        for name, pair in bounds.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ValueError(
                    f"The bounds of {name!r} must be a pair `(lower, upper)`, but "
                    f"{pair!r} was given."
                )
        bounds = tuple({name: pair[k] for name, pair in bounds.items()} for k in (0, 1))
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ValueError(
            "`bounds` must be a dictionary `{name: (lower, upper)}`, or a pair "
            f"`(lower, upper)`, but {bounds!r} was given."
        )
    if isinstance(start, Mapping):
        bounds = tuple(
            {k: v for k, v in b.items() if k not in kept} if isinstance(b, Mapping) else b
            for b in bounds
        )
    return jax.tree.map(_as_floats, tuple(bounds))


def _several(
    curve: Curve, free: PyTree, kept: dict, x: PyTree, y: PyTree
) -> tuple[Array, int | None]:
    """y as numbers in a row, or in one for each data set; and the axis of their starts,
    if each has its own."""
    given = jnp.asarray(y) if isinstance(y, list | tuple | float | int) else y
    given = jax.tree.map(jnp.asarray, given)

    def shapes(free):
        try:
            out = jax.eval_shape(lambda p: curve.f(curve.merged(p, kept), x), free)
        except (TypeError, ValueError):
            return None
        return jax.tree.structure(out), [o.shape for o in jax.tree.leaves(out)]

    structure, of_y = jax.tree.structure(given), [v.shape for v in jax.tree.leaves(given)]
    if shapes(free) == (structure, of_y):
        return flat(given), None
    numbers = {shape[:1] for shape in of_y}
    of_one = structure, [shape[1:] for shape in of_y]
    if len(numbers) == 1 and numbers != {()}:
        (number,) = numbers.pop()
        own = all(s.shape[:1] == (number,) for s in jax.tree.leaves(free))
        first = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), free)
        if own and shapes(first) == of_one:
            return jax.vmap(flat)(given), 0
        if shapes(free) == of_one:
            return jax.vmap(flat)(given), None
    found = jax.eval_shape(lambda p: curve.f(curve.merged(p, kept), x), free)
    raise ValueError(
        "`f(start, x)` must have the shapes of `y`, "
        f"{jax.tree.map(jnp.shape, given)}, but has "
        f"{jax.tree.map(lambda o: o.shape, found)}."
    )


def _data(
    x: PyTree, y: Float[Array, "*sets m"], sigma: Any, nan_policy: str
) -> tuple[Data, Any]:
    """The data, and which of it is of one data set."""
    missing = jnp.isnan(y)
    known = not isinstance(y, Tracer)
    if known and not bool(jnp.all(jnp.isfinite(y) | missing)):
        raise ValueError("`y` must be finite, but has an infinite value.")
    if known and nan_policy == "raise" and bool(jnp.any(missing)):
        raise ValueError(
            '`y` has a missing value (NaN): leave it out, or pass `nan_policy="omit"`.'
        )
    counted = jnp.where(missing, 0, 1).astype(y.dtype)
    many = y.ndim == 2
    axes: Any = Data(*((None, 0, None, 0) if many else (None,) * 4))  # type: ignore[arg-type]
    if sigma is None:
        one = jnp.ones(y.shape[:-1], y.dtype)
        axes = axes._replace(sigma=0 if many else None)
        return Data(x, jnp.where(missing, 0, y), one, counted), axes
    given = np.asarray(sigma, y.dtype) if not isinstance(sigma, Tracer) else sigma
    m = y.shape[-1]
    if given.shape == (m, m) and not (many and y.shape[0] == m):
        if not np.all(np.isfinite(given)) or not np.allclose(given, given.T):
            raise ValueError("`sigma`, a covariance, must be symmetric and finite.")
        try:
            factor = np.linalg.cholesky(given)
        except np.linalg.LinAlgError as error:
            raise ValueError(
                "`sigma`, a covariance, must be positive definite."
            ) from error
        if known and bool(jnp.any(missing)):
            raise ValueError(
                "With a covariance as `sigma` no value of `y` may be missing: leave its "
                "row and column out."
            )
        return Data(x, y, jnp.asarray(factor), counted), axes
    if not isinstance(given, Tracer) and not np.all((given > 0) & np.isfinite(given)):
        raise ValueError("`sigma` must be positive and finite, at every point.")
    given = jnp.asarray(given)
    try:
        each = given.reshape(-1) if given.size == m else given
        each = jnp.broadcast_to(each, y.shape if many and given.ndim == 2 else (m,))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`sigma` must be one number, have the shape of `y`, or be the {m} x {m} "
            f"covariance, but has the shape {given.shape}."
        ) from error
    return Data(x, jnp.where(missing, 0, y), each, counted), axes._replace(
        sigma=0 if each.ndim == 2 else None
    )


def _sobol(number: int, starts: list[PyTree], limits: Any) -> PyTree:
    """Of each data set its start, and others between the bounds."""
    check_count("starts", number)
    first = starts[0]
    box = None if limits is None else Box.of(limits, first)
    flat_box = (
        None
        if box is None
        else [_tree.ravel_pytree(b)[0] for b in (box.lower, box.upper)]
    )
    if flat_box is None or not all(bool(jnp.all(jnp.isfinite(b))) for b in flat_box):
        raise ValueError(
            "`starts` are drawn between the bounds: give each parameter that is free a "
            "finite lower and upper one."
        )
    low, high = flat_box
    # Its first point is a corner.
    sequence = scipy.stats.qmc.Sobol(low.size, scramble=False).fast_forward(1)
    drawn = sequence.random(number - 1) if number > 1 else np.zeros((0, low.size))
    points = low[None] + jnp.asarray(drawn, low.dtype) * (high - low)[None]
    unravel = _tree.Structure.of(first).unravel

    def of_one(start):
        return jax.vmap(unravel)(
            jnp.concatenate([_tree.ravel_pytree(start)[0][None], points])
        )

    return jax.tree.map(lambda *s: jnp.stack(s), *map(of_one, starts))


def _spread(data: Data, end: Fitted) -> Array:
    """The residuals' scale: their median absolute deviation, over that of the normal
    distribution."""

    def of_one(data, residuals):
        size = jnp.where(data.counted > 0, jnp.abs(residuals), jnp.nan)
        spread = jnp.nanmedian(size) / _MAD * data.sigma
        # Where most points are met exactly there is none.
        least = jnp.finfo(spread.dtype).eps * jnp.max(jnp.abs(data.y))
        return jnp.maximum(spread, jnp.where(least > 0, least, 1))

    if data.y.ndim == 1:
        return of_one(data, end.residuals)
    each = jax.vmap(lambda y, s, c, r: of_one(Data(None, y, s, c), r))
    return each(data.y, data.sigma, data.counted, end.residuals)
