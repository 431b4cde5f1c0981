"""What of a fit is compiled: the run, and what its end says of the parameters."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar

from .. import _lapack, _tree
from .._bounds import Box
from .._checks import is_traced
from .._linearisation import linearise
from .._losses import AbstractElementwiseLoss, SquaredError
from .._solve import solve
from .._solver import AbstractGaussNewton
from .._tree import ravel_pytree
from .._uncertainty import Covariance, covariance, robust_variance
from .._written_anew import Program, program_of


class Data(NamedTuple):
    """A data set, its y as m numbers.

    - `sigma`: of each, or a lower triangular factor of their covariance.
    - `counted`: 1, and 0 for those that are missing.
    - `sigma_x`: of each x, if those have errors, too.
    - `spread`: of the residuals, in units of sigma, if a robust loss is in units of that.
    """

    x: PyTree[Array]
    y: Float[Array, " m"]
    sigma: Float[Array, "..."]
    counted: Float[Array, " m"]
    sigma_x: PyTree[Array] | None = None
    spread: Scalar | None = None

    def moved(self, shift: PyTree[Array] | None) -> PyTree[Array]:
        """The x's, so many of their standard deviations further."""
        if self.sigma_x is None:
            return self.x
        return jax.tree.map(lambda x, s, d: x + s * d, self.x, self.sigma_x, shift)


class Curve(eqx.Module):
    """A function of the free parameters, as a user's function of all of them."""

    f: Callable[[Any, Any], PyTree]
    names: tuple[str, ...] = eqx.field(static=True)  # of those that are fixed

    def __call__(self, free: PyTree, fixed: dict, x: PyTree) -> Float[Array, " m"]:
        return flat(self.f(self.merged(free, fixed), x))

    def on(self, free: PyTree, fixed: dict, x: PyTree) -> "Curve":
        """The same, of such arrays only: compiled once for all functions that compute
        the same of them. A function with leaves, such as a model, is known by these."""
        if jax.tree.leaves(self.f) != [self.f]:
            return self
        return Curve(program_of(self.f, self.merged(free, fixed), x), self.names)

    def shapes(self, free: PyTree, fixed: dict, x: PyTree) -> PyTree:
        """Those of what the user's function returns."""
        if isinstance(self.f, Program):
            return self.f.outputs
        return jax.eval_shape(self.f, self.merged(free, fixed), x)

    def merged(self, free: PyTree, fixed: dict) -> PyTree:
        return {**free, **fixed} if self.names else free


def flat(values: PyTree) -> Float[Array, " m"]:
    """As real numbers in one row."""

    def real(value):
        value = jnp.asarray(value)
        if jnp.iscomplexobj(value):
            value = jnp.stack([value.real, value.imag], axis=-1)
        return value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(float)

    return ravel_pytree(jax.tree.map(real, values))[0]


def unflattened(values: Float[Array, " m"], like: PyTree) -> PyTree:
    """Such numbers in the shapes of what they were."""
    leaves, structure = jax.tree.flatten(like)
    sizes = [2 * x.size if jnp.iscomplexobj(x) else x.size for x in leaves]
    parts = jnp.split(values, np.cumsum(sizes)[:-1])

    def shaped(part, x):
        if jnp.iscomplexobj(x):
            part = jax.lax.complex(part[::2], part[1::2])
        return part.reshape(x.shape)

    return structure.unflatten(
        [shaped(*pair) for pair in zip(parts, leaves, strict=True)]
    )


def whitened(values: Float[Array, " m"], data: Data) -> Float[Array, " m"]:
    """In units of what is known of each."""
    if data.sigma.ndim == 2:
        values = jnp.where(data.counted > 0, values, 0)
        return jax.scipy.linalg.solve_triangular(data.sigma, values, lower=True)
    values = jnp.where(data.counted > 0, values, 0) / data.sigma
    return values if data.spread is None else values / data.spread


class Fitted(NamedTuple):
    """The end of a run.

    - `parameters`: those that are free.
    - `residuals`: y - f, in units of sigma.
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
    nonfinite: "_NonFinite"
    history: Any
    result: optx.RESULTS
    num_steps: Int[Array, ""]
    x: PyTree[Array] | None = None  # as fitted, if they have errors
    losses: Float[Array, " starts"] | None = None  # of all starts, the best first

    def factor(self, setting: "Setting") -> Scalar:
        """Of the covariance. That of a robust loss depends on how the residuals are
        distributed, and is estimated from them even where sigma is absolute."""
        known = setting.absolute_sigma and isinstance(setting.loss, SquaredError)
        return jnp.ones_like(self.variance) if known else self.variance


class Setting(NamedTuple):
    """What a fit was asked for, but its data and its start."""

    curve: Curve
    solver: AbstractGaussNewton
    loss: AbstractElementwiseLoss
    max_steps: int
    fixed: dict
    absolute_sigma: bool
    many: bool  # data sets


def fitted(
    setting: Setting, data: Data, start: PyTree[Array], levels: tuple[Any, ...] = ()
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
    structured = lambda end: _in_structure(setting, end)
    return end, jax.vmap(structured)(end) if setting.many else structured(end)


def _best(end: Fitted, many: bool) -> Fitted:
    """Of all starts, of each data set."""

    def of_one(end: Fitted) -> Fitted:
        losses = jnp.where(jnp.isnan(end.loss), jnp.inf, end.loss)
        chosen = jax.tree.map(lambda x: x[jnp.argmin(losses)], end)
        return chosen._replace(losses=jnp.sort(losses))

    return jax.vmap(of_one)(end) if many else of_one(end)


def with_bounds(solver: AbstractGaussNewton, bounds: Any) -> AbstractGaussNewton:
    return eqx.tree_at(lambda s: s.bounds, solver, bounds, is_leaf=lambda x: x is None)


class _Posed(NamedTuple):
    """A fit as least squares: residuals are `outputs` less `target`.

    - `given`: what the outputs depend on, besides the variables.
    - `counted`: 1, and 0 for missing points.
    """

    curve: Curve
    given: tuple[Data, dict]
    target: Array
    counted: Array

    @staticmethod
    def of(setting: "Setting", data: Data) -> "_Posed":
        # The x's that have errors are variables, too, in units of these, and residuals.
        shift = _no_shift(data)
        target = _joined(whitened(data.y, data), shift)
        counted = _joined(data.counted, jax.tree.map(jnp.ones_like, shift))
        return _Posed(setting.curve, (data, setting.fixed), target, counted)

    def outputs(self, variables: PyTree, given: tuple[Data, dict]) -> Array:
        data, fixed = given
        x = data.moved(variables["x"])
        values = whitened(self.curve(variables["curve"], fixed, x), data)
        return _joined(values, variables["x"])


def _no_shift(data: Data) -> PyTree[Array]:
    return jax.tree.map(jnp.zeros_like, data.sigma_x)


class _Run(NamedTuple):
    variables: PyTree[Array]
    loss: Scalar
    history: Any
    result: optx.RESULTS
    num_steps: Int[Array, ""]


@eqx.filter_custom_jvp
def _run(setting: Setting, data: Data, start: PyTree[Array], *, history: bool) -> _Run:
    """The steps to the minimum, whose derivative is that of the minimum and not that of
    the steps."""
    posed, bounds = _Posed.of(setting, data), setting.solver.bounds
    of_all = None if bounds is None else tuple({"curve": b} for b in bounds)
    # `solve` takes real inputs.
    (data, fixed), complex_again = _as_real(posed.given)
    # One example, of which the residuals are the outputs.
    inputs = jax.tree.map(lambda x: jnp.asarray(x)[None], (data, fixed))
    solution = solve(
        (
            lambda variables, given: posed.outputs(variables, complex_again(given)),
            {"curve": start, "x": _no_shift(data)},
        ),
        (inputs, posed.target[None]),
        with_bounds(setting.solver, of_all),
        loss=setting.loss,
        max_steps=setting.max_steps,
        divergence=None,
        history=history,
    )
    _, variables = solution.model
    return _Run(
        variables,
        solution.loss,
        dict(solution.history) if history else None,
        solution.result,
        solution.stats["num_steps"],
    )


@_run.def_jvp
def _(primals: tuple, tangents: tuple, *, history: bool) -> tuple[_Run, _Run]:
    """The gradient stays zero, and what is at a bound stays there (the implicit function
    theorem). A direction that the data do not determine has no derivative: zero."""
    setting, data, start = primals
    run = _run(setting, data, start, history=history)
    here, unravel = ravel_pytree(run.variables)

    def gradient(flat, given):
        posed = _Posed.of(*given)
        outputs = lambda flat: posed.outputs(unravel(flat), posed.given)
        pull = posed.counted * given[0].loss.derivative(outputs(flat), posed.target)
        return _tree.matmul(jax.jacfwd(outputs)(flat).T, pull)

    given, changes = primals[:2], tangents[:2]
    of_given = lambda *given: gradient(here, given)
    slope, change = eqx.filter_jvp(of_given, given, changes)
    curvature = jax.jacfwd(gradient)(here, given)
    bounds, parameters = setting.solver.bounds, run.variables["curve"]
    held, at_ends = jnp.zeros(here.size, bool), jnp.zeros_like(here)
    if bounds is not None:
        side, blocked = _at_bounds(bounds, parameters, unravel(slope)["curve"])
        held = held.at[: side.size].set(blocked)

        def ends(bounds):
            box = Box.of(bounds, parameters)
            low, high = (ravel_pytree(b)[0] for b in (box.lower, box.upper))
            return jnp.where(blocked, jnp.where(side > 0, high, low), 0)

        _, moved = eqx.filter_jvp(ends, (bounds,), (changes[0].solver.bounds,))
        if moved is not None:
            at_ends = at_ends.at[: side.size].set(moved)
    change = 0 if change is None else change  # where only the start is differentiated
    change += _tree.matmul(curvature, at_ends)
    moved = jnp.where(held, at_ends, -_solved(curvature, change, ~held))
    nothing = jax.tree.map(lambda _: None, run)
    return run, nothing._replace(variables=unravel(moved))


def _solved(matrix: Array, right: Array, free: Array) -> Array:
    """By eigenvalues, of what is free; the least solution in units of the diagonal where
    the matrix is singular."""
    matrix = 0.5 * (matrix + matrix.T)
    units = jnp.sqrt(jnp.abs(jnp.diagonal(matrix)))
    units = jnp.where(free & (units > 0), units, 1)
    both = free[:, None] & free[None, :]
    w, u = _lapack.eigh(jnp.where(both, matrix / (units[:, None] * units[None]), 0))
    least = w.size * jnp.finfo(w.dtype).eps * jnp.max(jnp.abs(w))
    inverse = jnp.where(jnp.abs(w) > least, 1 / jnp.where(w == 0, 1, w), 0)
    inverse = jnp.where(jnp.isnan(w), jnp.nan, inverse)
    right = jnp.where(free, right / units, 0)
    return _tree.matmul(u, inverse * _tree.matmul(u.T, right)) / units


def _as_real(tree: PyTree[Array]) -> tuple[PyTree[Array], Callable[[PyTree], PyTree]]:
    """Complex arrays as their real and imaginary parts; and the way back."""
    leaves, structure = jax.tree.flatten(tree)
    are_complex = [jnp.iscomplexobj(x) for x in leaves]

    def parts(x):
        return (jnp.real(x), jnp.imag(x)) if jnp.iscomplexobj(x) else x

    def whole(part, is_complex):
        return jax.lax.complex(*part) if is_complex else part

    def back(tree):
        return structure.unflatten(
            list(map(whole, structure.flatten_up_to(tree), are_complex))
        )

    return structure.unflatten(list(map(parts, leaves))), back


def _fitted(
    setting: Setting, data: Data, start: PyTree[Array], *, history: bool
) -> Fitted:
    loss, bounds = setting.loss, setting.solver.bounds
    run = _run(setting, data, start, history=history)
    posed, variables = _Posed.of(setting, data), run.variables
    target, counted, parameters = posed.target, posed.counted, variables["curve"]
    lin = linearise(posed.outputs, variables, posed.given)
    matrix = lin.matrix()
    pull = counted * loss.derivative(lin.outputs, target)
    slope = lin.jacobian.domain.unravel(_tree.matmul(matrix.T, pull))["curve"]
    at_bound, blocked = _at_bounds(bounds, parameters, slope)
    jacobian, others = jnp.split(matrix, [blocked.size], axis=1)
    nonfinite = _NonFinite.of(lin.outputs, jacobian)
    moved = lambda y: posed.outputs(variables | {"curve": y}, posed.given)
    seen = _seen(moved, parameters, start, lin.outputs, target, jacobian, bounds)
    if data.sigma_x is not None:  # What the x's cannot make up for is left.
        q, _ = jnp.linalg.qr(others)
        jacobian -= _tree.matmul(q, _tree.matmul(q.T, jacobian))
    errors = covariance(jacobian, ~blocked, seen)
    residuals = target - lin.outputs
    num_points, num_free = jnp.sum(data.counted), errors.rank.astype(target.dtype)
    if isinstance(loss, SquaredError):
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
        run.loss,
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
        run.history,
        run.result,
        run.num_steps,
        None if data.sigma_x is None else data.moved(variables["x"]),
    )


# A parameter is not seen that, moved so far that the residuals should change by their
# noise, changes them by less than this part of it.
_UNMOVED = 1e-6
_ASKED = 0.1


def _seen(
    outputs_at: Callable[[PyTree[Array]], Array],
    parameters: PyTree[Array],
    start: PyTree[Array],
    outputs: Float[Array, " m"],
    target: Float[Array, " m"],
    jacobian: Float[Array, "m k"],
    bounds: Any,
) -> Bool[Array, " k"]:
    """Whether each parameter makes a difference to the curve, in any units.

    One does not if all of its value, or of its start, changes the residuals by less than
    their rounding. Nor does one that is moved by its standard error (with the others
    held) while the curve stays as it is: the linearisation promises a change of the size
    of the noise, and on a plateau there is none. This is asked of parameters whose
    standard error is more than a tenth of them; of these only, since it evaluates the
    curve.
    """
    everything = parameters, start, outputs, target, jacobian, bounds
    everything = jax.lax.stop_gradient(everything)
    parameters, start, outputs, target, jacobian, bounds = everything
    y, unravel = ravel_pytree(parameters)
    first, _ = ravel_pytree(start)
    eps = jnp.finfo(outputs.dtype).eps
    norms = jnp.linalg.norm(jacobian, axis=0)
    units = jnp.where(norms > 0, norms, 1)
    size = jnp.hypot(jnp.linalg.norm(outputs), jnp.linalg.norm(target))
    own = jnp.maximum(jnp.abs(y), jnp.abs(first))
    is_rounding = (first != 0) & (norms * own <= eps * size)
    num_others = max(outputs.size - y.size, 1)
    noise = jnp.linalg.norm(target - outputs) / num_others**0.5
    errors = jnp.maximum(noise, eps**0.5 * size) / units
    # Moved by less, the curve may change by nothing but rounding.
    steps = jnp.maximum(errors, eps**0.5 * jnp.abs(y))
    asked = (steps > _ASKED * own) & (norms > 0) & ~is_rounding

    def stays(step):
        moved = unravel(y + step)
        change = jnp.linalg.norm(outputs_at(moved) - outputs)
        promised = jnp.sum(jnp.abs(step) * norms)
        return (change <= _UNMOVED * promised) & _is_inside(bounds, moved)

    def of_all():
        one_by_one = jnp.diag(steps)
        down, up = jax.lax.map(stays, jnp.concatenate([-one_by_one, one_by_one])).reshape(
            2, -1
        )
        return down | up

    stay = jax.lax.cond(jnp.any(asked), of_all, lambda: jnp.zeros(y.size, bool))
    return ~is_rounding & ~(asked & stay)


def _is_inside(bounds: Any, y: PyTree[Array]) -> Bool[Array, ""]:
    if bounds is None:
        return jnp.array(True)
    box = Box.of(bounds, y)
    inside = jax.tree.map(
        lambda x, low, high: jnp.all((low <= x) & (x <= high)), y, box.lower, box.upper
    )
    return jnp.all(jnp.stack(jax.tree.leaves(inside)))


class _NonFinite(NamedTuple):
    """Where the curve, or its derivative, is no finite number.

    - `point`: the first such entry of the outputs; -1 if there is none.
    - `number`: how many such entries there are.
    - `of_curve`: whether it is the curve itself; else a derivative.
    """

    point: Int[Array, ""]
    number: Int[Array, ""]
    of_curve: Bool[Array, ""]

    @staticmethod
    def of(outputs: Float[Array, " m"], jacobian: Float[Array, "m k"]) -> "_NonFinite":
        of_curve = ~jnp.isfinite(outputs)
        of_any = ~jnp.all(jnp.isfinite(jacobian), axis=1)
        either = jnp.where(jnp.any(of_curve), of_curve, of_any)
        point = jnp.where(jnp.any(either), jnp.argmax(either), -1)
        return _NonFinite(point, jnp.sum(either), jnp.any(of_curve))


# The median absolute deviation of a normal distribution, over its standard deviation.
_MAD = 0.6744897501960817


def spread(residuals: Float[Array, " m"], counted: Float[Array, " m"]) -> Scalar:
    """Their standard deviation, by their median absolute deviation."""
    return jnp.nanmedian(jnp.where(counted > 0, jnp.abs(residuals), jnp.nan)) / _MAD


def _joined(values: Float[Array, " m"], shift: PyTree[Array] | None) -> Array:
    """Of y, and then of the x's, if they have errors."""
    others = [s.ravel().astype(values.dtype) for s in jax.tree.leaves(shift)]
    return jnp.concatenate([values, *others])


def _at_bounds(
    bounds: Any, y: PyTree[Array], slope: PyTree[Array]
) -> tuple[Int[Array, " k"], Bool[Array, " k"]]:
    if bounds is None:
        none = jnp.zeros(_tree.size(y), int)
        return none, none != 0
    box = Box.of(bounds, y)
    blocked, _ = ravel_pytree(box.blocked(y, slope))
    upper, _ = ravel_pytree(jax.tree.map(lambda x, high: x >= high, y, box.upper))
    side = jnp.where(upper, 1, -1)
    return jnp.where(blocked, side, 0), blocked.astype(bool)


def _in_structure(setting: Setting, end: Fitted) -> dict[str, Any]:
    matrix = end.covariance.matrix(end.factor(setting))
    errors = jnp.sqrt(jnp.diagonal(matrix))
    held = end.at_bound != 0
    errors = jnp.where(held, jnp.nan, errors)
    outer = errors[:, None] * errors[None, :]
    correlation = jnp.where(jnp.eye(held.size, dtype=bool), 1.0, matrix / outer)
    correlation = jnp.where(held[:, None] | held[None], jnp.nan, correlation)
    dof = end.num_points - end.num_free
    residual = end.chi_squared / end.num_points
    likelihood = end.num_points * jnp.log(residual)
    every = _Every(setting, end.parameters)
    return {
        "parameters": every.parameters,
        "standard_errors": every.vector(errors),
        "covariance": every.blocks(matrix),
        "covariance_matrix": matrix,
        "correlation": every.blocks(correlation),
        "reduced_chi_squared": end.chi_squared / dof,
        "degrees_of_freedom": dof,
        "scale": jnp.ones_like(end.noise) if setting.absolute_sigma else end.noise,
        "at_bound": jax.tree.map(lambda x: x.astype(int), every.vector(end.at_bound)),
        "multipliers": every.vector(jnp.where(held, end.pull, 0)),
        "aic": likelihood + 2 * end.num_free,
        "bic": likelihood + jnp.log(end.num_points) * end.num_free,
    }


class _Every:
    """All parameters: what is of those that are free in their structure, with zeros for
    those that are fixed."""

    def __init__(self, setting: Setting, free: PyTree[Array]):
        merged, fixed = setting.curve.merged, setting.fixed
        self.parameters = merged(free, fixed)
        self.like = _tree.Structure.of(self.parameters)
        is_free = merged(
            jax.tree.map(lambda x: np.ones(x.shape, bool), free),
            jax.tree.map(lambda x: np.zeros(x.shape, bool), fixed),
        )
        flags = [flag.ravel() for flag in jax.tree.leaves(is_free)]
        self.places = np.flatnonzero(np.concatenate(flags))

    def vector(self, values: Array) -> PyTree[Array]:
        zeros = jnp.zeros(self.like.size, values.dtype)
        return self.like.unravel(zeros.at[self.places].set(values))

    def blocks(self, matrix: Array) -> PyTree[Array]:
        """One for each two leaves."""
        zeros = jnp.zeros((self.like.size, matrix.shape[0]), matrix.dtype)
        rows = jax.vmap(self.vector)(zeros.at[self.places].set(matrix))
        ends = np.cumsum([leaf.size for leaf in self.like.leaves])

        def of(leaf, end):
            some = slice(end - leaf.size, end)
            return jax.tree.map(
                lambda row: row[some].reshape(leaf.shape + row.shape[1:]), rows
            )

        pairs = zip(self.like.leaves, ends, strict=True)
        return self.like.treedef.unflatten([of(*pair) for pair in pairs])
