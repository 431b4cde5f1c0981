"""Implicit derivatives of a minimum, also with bounds, a retraction or a likelihood."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from jaxtyping import Array, Float, PyTree

from .._common import _tree
from .._linear_algebra import _lapack
from .._linearisation._bounds import Box
from .._linearisation._linearisation import linearised
from .._linearisation._objective import SumOfSquares
from .._linearisation._recognised import recognised
from .._linearisation._retraction import Retraction


# A step counts as moving nothing if it moves a row by less than this multiple of eps.
_IDLE = 1e3


class _Inverse(eqx.Module):
    """The pseudo-inverse of a matrix, and the structures that it maps between."""

    matrix: Float[Array, "p q"]
    domain: _tree.Structure = eqx.field(static=True)
    codomain: _tree.Structure = eqx.field(static=True)


class LeastNorm(lx.AbstractLinearSolver[_Inverse]):
    """The solution of least norm, after rows and columns are scaled to a largest entry of
    one, so that the rank does not depend on the parameters' units."""

    def init(self, operator: lx.AbstractLinearOperator, options: dict) -> _Inverse:
        matrix = operator.as_matrix()
        of_rows = _tree.quotient(1, jnp.max(jnp.abs(matrix), axis=1))
        scaled = of_rows[:, None] * matrix
        of_columns = _tree.quotient(1, jnp.max(jnp.abs(scaled), axis=0))
        u, w, vt = _lapack.svd(scaled * of_columns[None])
        rounding = len(w) * jnp.finfo(w.dtype).eps * jnp.max(w, initial=0)
        inverse = _tree.quotient(1, w, w > rounding)
        inverse = _tree.matmul(vt.T * inverse[None], u.T)
        inverse = of_columns[:, None] * inverse * of_rows[None]
        shapes = operator.out_structure(), operator.in_structure()
        return _Inverse(inverse, *map(_tree.Structure.of, shapes))

    def compute(self, state: _Inverse, vector: PyTree[Array], options: dict):
        flat = _tree.matmul(state.matrix, _tree.ravel_pytree(vector)[0])
        return state.codomain.unravel(flat), lx.RESULTS.successful, {}

    def transpose(self, state: _Inverse, options: dict) -> tuple[_Inverse, dict]:
        return _Inverse(state.matrix.T, state.codomain, state.domain), {}

    def conj(self, state: _Inverse, options: dict) -> tuple[_Inverse, dict]:
        return state, {}  # parameters are real

    def assume_full_rank(self) -> bool:
        return False


class ImplicitAdjoint(optx.ImplicitAdjoint):
    r"""Derivatives of a minimum with bounds, a retraction or a likelihood by the implicit
    function theorem, for `optimistix.least_squares(..., adjoint=...)`.

    `optimistix.ImplicitAdjoint`, the default there, differentiates
    $\nabla L(\theta) = 0$. At a bound the gradient is not zero: a parameter at a bound
    that descent would cross moves with the bound, and the others move as if it were
    fixed. A parameter at a bound with zero gradient counts as free. With a retraction the
    gradient along the manifold stays zero; the manifold itself counts as constant, and
    so does the retraction. Second and further derivatives are right, too.

    A likelihood in [`gnlin.Residuals`][] is differentiated too. optimistix's class needs
    a sum of squares, and raises an error.

    If the function has forward mode only, differentiate the minimum by `jax.jacfwd` or
    `jax.jvp`.

    In a direction that the data do not determine, such as a common shift of all poses of
    a graph, optimistix's class raises an error. Here the derivative is the one of least
    norm, in units of the parameters that make the largest entries of the curvature's rows
    and columns one, so that it does not depend on the parameters' own units: the minimum
    of $(y_0 - 1000\,y_1 - d)^2$ has the derivative (0.5, -0.0005) by $d$.

    **Arguments:**

    - `linear_solver`: a linear solver of lineax, as in `optimistix.ImplicitAdjoint`. The
        default takes a singular value decomposition of the p x p matrix. If the data
        determine all of many parameters, `lineax.LU()` is faster.

    !!! example

        ```python
        def minimum(args):
            solver = gnlin.LevenbergMarquardt(bounds=(0.0, 1.0))
            adjoint = gnlin.methods.ImplicitAdjoint()
            return optx.least_squares(residuals, solver, y0, args, adjoint=adjoint).value

        jax.jacfwd(minimum)(args)
        ```

    ??? cite "Reference"

        J. Nocedal and S. Wright, *Numerical optimization* (2006), section 12.8, on the
        sensitivity of a solution with active constraints.
    """

    linear_solver: lx.AbstractLinearSolver = LeastNorm()

    def apply(self, primal_fn, rewrite_fn, inputs, tags):
        _, solver, *_ = inputs
        if not (hasattr(solver, "bounds") and hasattr(solver, "retraction")):
            return super().apply(primal_fn, rewrite_fn, inputs, tags)
        if solver.retraction is None:
            return super().apply(primal_fn, _stationary, inputs, tags)
        end, rest = super().apply(primal_fn, _constant, inputs, tags)
        here = jax.lax.stop_gradient(end)
        return _along_manifold(here, inputs, self.linear_solver), rest


def _slope(
    fn: Any, args: Any, solver: Any, y: Any, as_point: Callable = lambda y: y
) -> Any:
    """Return the gradient of the objective, by either mode of differentiation."""
    posed = recognised(fn, as_point(y), args)
    plain = (lambda y, args: fn(y, args)[0]), args, SumOfSquares()
    outputs, inputs, objective = plain if posed is None else posed
    at = (lambda y, inputs: outputs(as_point(y), inputs)), y, inputs
    lin, _ = linearised(*at, False, solver.memory_budget)
    return lin.vjp(objective.gradient(lin.outputs))


def _stationary(optimum, _, inputs):
    """Return a value that is zero at the optimum, with an invertible derivative there."""
    fn, solver, _, args, *_ = inputs
    return held_at_bounds(_slope(fn, args, solver, optimum), solver.bounds, optimum)


def held_at_bounds(slope: PyTree[Array], bounds: Any, optimum: PyTree[Array]) -> Any:
    """Return the slope; for a parameter that a bound holds, the distance to the bound."""
    if bounds is None:
        return slope
    box, here = Box.of(bounds, optimum), jax.lax.stop_gradient(optimum)
    blocked = box.blocked(here, jax.lax.stop_gradient(slope))

    def each(is_blocked, y, now, low, high, g):
        return jnp.where(is_blocked, y - jnp.where(now <= low, low, high), g)

    return jax.tree.map(each, blocked, optimum, here, box.lower, box.upper, slope)


def _constant(optimum, _, inputs):
    """Return a value by which the optimum has no derivative."""
    return optimum


# Remove a type checker's wrapper, because optimistix requires plain functions.
_stationary = getattr(_stationary, "__wrapped__", _stationary)
_constant = getattr(_constant, "__wrapped__", _constant)


@eqx.filter_custom_jvp
def _along_manifold(end: PyTree[Array], inputs: Any, linear_solver: Any) -> PyTree[Array]:
    r"""Return the minimum `end`, with its derivatives along the manifold of a retraction.

    A step $s$ at the point $y$ moves it by $T(y)s$, and the gradient with respect to the
    step is $T(y)^\top\nabla L$. It stays zero where the minimum moves. So the derivative
    of $y$ is $T(y)s$, where $s$ solves
    $\partial_y(T^\top\nabla L)\,T s + \partial_\theta(T^\top\nabla L) = 0$.
    This holds at all minima, so it can be differentiated again. It takes only first
    derivatives with respect to the step, since retractions may lack others at zero.
    """
    return end


@_along_manifold.def_jvp
def _(primals: tuple, tangents: tuple) -> tuple[PyTree[Array], PyTree[Array]]:
    _, inputs, linear_solver = primals
    y = _along_manifold(*primals)  # further derivatives move this point as well
    still, idle = _tree.zeros_like(y), _idle(jax.lax.stop_gradient(y), inputs)
    slope = lambda inputs: _slope_after(still, (y, inputs, idle))
    _, change = eqx.filter_jvp(slope, (inputs,), (tangents[1],))
    operator = lx.JacobianLinearOperator(_slope_after, still, (y, inputs, idle))
    step = lx.linear_solve(operator, _tree.scale(-1, change), linear_solver).value
    return y, _moved_by(step, y, inputs)


def _slope_after(step: PyTree[Array], at: tuple) -> PyTree[Array]:
    """Return the gradient with respect to steps after the point moved along a tangent,
    plus the part of the step that moves nothing, which has to stay zero."""
    y, inputs, idle = at
    fn, solver, _, args, *_ = inputs
    retraction = Retraction.of(solver.retraction, y)
    point = jax.tree.map(jnp.add, y, _moved_by(step, y, inputs))
    further = lambda step: retraction.moved(point, step)
    slope = _slope(fn, args, solver, _tree.zeros_like(y), further)

    def each(idle, slope, step):
        if idle is None:
            return slope
        rows = step.reshape(len(idle), -1)
        return slope + jax.vmap(_tree.matmul)(idle, rows).reshape(slope.shape)

    leaves, structure = jax.tree.flatten(slope)
    return structure.unflatten(map(each, idle, leaves, jax.tree.leaves(step)))


def _moved_by(step: PyTree[Array], y: PyTree[Array], inputs: Any) -> PyTree[Array]:
    """Return the tangent at a point along which a step moves it."""
    _, solver, *_ = inputs
    moved = lambda step: Retraction.of(solver.retraction, y).moved(y, step)
    return jax.jvp(moved, (_tree.zeros_like(y),), (step,))[1]


def _idle(y: PyTree[Array], inputs: Any) -> list[Float[Array, "k d d"] | None]:
    """Return for each row the projection onto the steps that do not move it."""
    _, solver, *_ = inputs

    def each(tangent):
        if tangent is None:
            return None
        identity = jnp.eye(tangent.shape[-1], dtype=tangent.dtype)
        smallest = _IDLE * jnp.finfo(tangent.dtype).eps
        inverse = lambda t: jnp.linalg.pinv(t, rtol=smallest)
        return jax.vmap(lambda t: identity - _tree.matmul(inverse(t), t))(tangent)

    return list(map(each, Retraction.of(solver.retraction, y).tangents(y)))
