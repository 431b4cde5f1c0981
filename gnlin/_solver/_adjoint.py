"""Implicit derivatives of a minimum, also with bounds, a retraction or a likelihood."""

from collections.abc import Callable

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


class _Inverse(eqx.Module):
    """The pseudo-inverse of a matrix, and the structures that it maps between."""

    matrix: Float[Array, "p q"]
    domain: _tree.Structure = eqx.field(static=True)
    codomain: _tree.Structure = eqx.field(static=True)


class _LeastNorm(lx.AbstractLinearSolver[_Inverse]):
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
    gradient along the manifold is zero.

    A likelihood in [`gnlin.Residuals`][] is differentiated too. optimistix's class needs
    a sum of squares, and raises an error.

    If the function has forward mode only, differentiate the minimum by `jax.jacfwd` or
    `jax.jvp`.

    In a direction that the data do not determine, such as a common shift of all poses of
    a graph, the derivative is zero. optimistix's class raises an error there.

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

    linear_solver: lx.AbstractLinearSolver = _LeastNorm()

    def apply(self, primal_fn, rewrite_fn, inputs, tags):
        _, solver, *_ = inputs
        if hasattr(solver, "bounds") and hasattr(solver, "retraction"):
            rewrite_fn = _stationary
        return super().apply(primal_fn, rewrite_fn, inputs, tags)


def _stationary(optimum, _, inputs):
    """Return a value that is zero at the optimum, with an invertible derivative there."""
    fn, solver, _, args, *_ = inputs
    here = jax.lax.stop_gradient(optimum)

    def slope_at(y, as_point=lambda y: y):
        """Return the gradient of the objective, by either mode of differentiation."""
        posed = recognised(fn, as_point(y), args)
        plain = (lambda y, args: fn(y, args)[0]), args, SumOfSquares()
        outputs, inputs, objective = plain if posed is None else posed
        at = (lambda y, inputs: outputs(as_point(y), inputs)), y, inputs
        lin, _ = linearised(*at, False, solver.memory_budget)
        return lin.vjp(objective.gradient(lin.outputs))

    if solver.retraction is not None:
        retraction = Retraction.of(solver.retraction, here)
        return _along(slope_at, retraction, here, optimum)
    slope = slope_at(optimum)
    if solver.bounds is None:
        return slope
    box = Box.of(solver.bounds, optimum)
    blocked = box.blocked(here, jax.lax.stop_gradient(slope))

    def each(is_blocked, y, now, low, high, g):
        return jnp.where(is_blocked, y - jnp.where(now <= low, low, high), g)

    return jax.tree.map(each, blocked, optimum, here, box.lower, box.upper, slope)


# Remove a type checker's wrapper, because optimistix requires a plain function.
_stationary = getattr(_stationary, "__wrapped__", _stationary)


def _along(
    slope_at: Callable, retraction: Retraction, here: PyTree[Array], y: PyTree[Array]
) -> PyTree[Array]:
    """Return the gradient along the manifold at `here`, plus the part of `y - here` that
    is normal to the manifold, which has to stay zero."""
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.subtract, y, here))
    tangents = retraction.tangents(here)

    def led_to(tangents, rows):
        return jax.vmap(_tree.matmul)(tangents, rows)

    def step_of(tangent, change):
        if tangent is None:
            return change
        rows = change.reshape(len(tangent), -1)
        return led_to(jnp.linalg.pinv(tangent), rows)

    def as_leaves(rows):
        parts = [x.reshape(leaf.shape) for x, leaf in zip(rows, leaves, strict=True)]
        return structure.unflatten(parts)

    steps = list(map(step_of, tangents, leaves))
    slopes = slope_at(steps, lambda s: retraction.moved(here, as_leaves(s)))

    def each(tangent, change, step, slope):
        if tangent is None:
            return slope
        normal = change.reshape(step.shape) - led_to(tangent, step)
        return led_to(tangent, slope) + normal

    return as_leaves(list(map(each, tangents, leaves, steps, slopes)))
