"""The run to the minimum, and the derivative of the minimum."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Int, PyTree, Scalar

from .._common import _tree
from .._common._tree import ravel_pytree
from .._linear_algebra import _lapack
from .._solve import solve
from .._solver import AbstractGaussNewton
from .._training._full_batch import Most
from ._curve import Data
from ._problem import FitSettings, flat_box, Posed, with_bounds


class Run(NamedTuple):
    variables: PyTree[Array]
    loss: Scalar
    history: Any
    result: optx.RESULTS
    num_steps: Int[Array, ""]


def _of_variables(bounds: Any) -> Any:
    """Return the bounds of all variables. There are no bounds on x."""
    return None if bounds is None else tuple({"curve": b} for b in bounds)


def _for_variables(solver: AbstractGaussNewton) -> AbstractGaussNewton:
    """Return the solver of the parameters for all variables. Steps of x are added."""
    if solver.retraction is not None:
        retraction = {"curve": solver.retraction, "x": None}
        solver = dataclasses.replace(solver, retraction=retraction)
    return with_bounds(solver, _of_variables(solver.bounds))


@eqx.filter_custom_jvp
def run(setting: FitSettings, data: Data, start: PyTree[Array], *, num_rows: int) -> Run:
    """Run the solver to the minimum. This function is differentiated by the implicit
    function theorem, not through the steps.

    - `num_rows`: the rows of the history; 0 for no history.
    """
    most: Any = Most(setting.max_steps, num_rows)
    posed = Posed.of(setting, data)
    # For `solve` the data set is one example without inputs, whose outputs are the curve.
    solution = solve(
        (eqx.Partial(Posed.outputs, posed), posed.variables(start)),
        (jnp.zeros(1), posed.target[None]),
        _for_variables(setting.solver),
        loss=posed.loss,
        max_steps=most,
        divergence=None,
        history=num_rows > 0,
    )
    _, variables = solution.model
    return Run(
        variables,
        solution.loss,
        dict(solution.history) if num_rows else None,
        solution.result,
        solution.stats["num_steps"],
    )


@run.def_jvp
def _(primals: tuple, tangents: tuple, *, num_rows: int) -> tuple[Run, Run]:
    """Differentiate the minimum: the gradient stays zero, and parameters at a bound stay
    there. If the data do not determine all parameters, the derivative is the one of least
    norm, after the parameters are scaled by the root of the curvature's diagonal. The
    history has no derivative."""
    setting, data, start = primals
    if setting.solver.retraction is not None:
        raise ValueError(
            "`gnlin.curve_fit` has no derivatives with a `retraction`: use "
            "`optimistix.least_squares(..., adjoint=gnlin.methods.ImplicitAdjoint())`."
        )
    end = run(setting, data, start, num_rows=num_rows)
    here, unravel = ravel_pytree(end.variables)

    def gradient_and_loss(flat, given):
        posed = Posed.of(*given)
        outputs = lambda flat: posed.outputs(unravel(flat))
        values, target = outputs(flat), posed.target
        pull = posed.counted * posed.loss.derivative(values, target)
        gradient = _tree.matmul(jax.jacfwd(outputs)(flat).T, pull)
        return gradient, posed.loss.value(values, target)

    given, changes = primals[:2], tangents[:2]
    (slope, _), (change, of_loss) = eqx.filter_jvp(
        lambda *given: gradient_and_loss(here, given), given, changes
    )
    curvature = jax.jacfwd(lambda flat: gradient_and_loss(flat, given)[0])(here)

    def box(bounds):
        return flat_box(_of_variables(bounds), end.variables)

    bounds = setting.solver.bounds
    held = box(bounds).blocked(here, slope)

    def ends(bounds):
        of_all = box(bounds)
        nearest = jnp.where(here >= of_all.upper, of_all.upper, of_all.lower)
        return jnp.where(held, nearest, 0)

    _, at_ends = eqx.filter_jvp(ends, (bounds,), (changes[0].solver.bounds,))
    at_ends = jnp.zeros_like(here) if at_ends is None else at_ends
    if change is None:  # only the start is differentiated
        change, of_loss = jnp.zeros_like(here), jnp.zeros_like(end.loss)
    change += _tree.matmul(curvature, at_ends)
    moved = jnp.where(held, at_ends, -_solved(curvature, change, ~held))
    nothing = jax.tree.map(lambda _: None, end)
    of_loss += _tree.dot(slope, moved)  # at a bound the slope is not zero
    return end, nothing._replace(variables=unravel(moved), loss=of_loss)


def _solved(matrix: Array, right: Array, free: Array) -> Array:
    """Solve the linear system of the free parameters by eigenvalues. If it is singular,
    return the solution of least norm, in units of the diagonal's root. Its derivatives
    need none of the eigenvalues, which may be equal."""
    matrix = 0.5 * (matrix + matrix.T)
    units = jnp.sqrt(jnp.abs(jnp.diagonal(jax.lax.stop_gradient(matrix))))
    units = jnp.where(free & (units > 0), units, 1)
    both = free[:, None] & free[None, :]
    scaled = jnp.where(both, matrix / (units[:, None] * units[None]), 0)
    w, u = _lapack.eigh(jax.lax.stop_gradient(scaled))
    least = w.size * jnp.finfo(w.dtype).eps * jnp.max(jnp.abs(w))
    inverse = _tree.quotient(1, w, jnp.abs(w) > least)
    inverse = jnp.where(jnp.isnan(w), jnp.nan, inverse)
    product = lambda x: _tree.matmul(scaled, x)
    solve = lambda _, b: _tree.matmul(u, inverse * _tree.matmul(u.T, b))
    right = jnp.where(free, right / units, 0)
    found = jax.lax.custom_linear_solve(product, right, solve, symmetric=True)
    return found / units
