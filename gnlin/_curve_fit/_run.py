"""The run to the minimum, and the derivative of the minimum."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Int, PyTree

from .._linearisation._linearisation import linearise
from .._solve import solve
from .._solver import AbstractGaussNewton
from .._solver._adjoint import held_at_bounds, LeastNorm
from .._training._full_batch import Most
from ._curve import Data
from ._problem import FitSettings, Posed


class Run(NamedTuple):
    variables: PyTree[Array]
    history: Any
    result: optx.RESULTS
    num_steps: Int[Array, ""]


def _for_variables(solver: AbstractGaussNewton) -> AbstractGaussNewton:
    """Return the solver of the parameters for all variables. Steps of x are added, and
    have no bounds."""
    bounds, curved = solver.bounds, solver.retraction
    if bounds is not None:
        bounds = tuple({"curve": bound} for bound in bounds)
    if curved is not None:
        curved = {"curve": curved, "x": None}
    return dataclasses.replace(solver, bounds=bounds, retraction=curved)


def run(setting: FitSettings, data: Data, start: PyTree[Array], *, num_rows: int) -> Run:
    """Run the solver to the minimum, which is differentiated by the implicit function
    theorem. If the data do not determine all parameters, the derivative is the one of
    least norm, as by `gnlin.methods.ImplicitAdjoint`.

    - `num_rows`: the rows of the history; 0 for no history.
    """
    inputs, adjoint = (setting, data, start, num_rows), optx.ImplicitAdjoint(LeastNorm())
    variables, rest = adjoint.apply(_minimum, _stationary, inputs, frozenset())
    return Run(variables, *rest)


def _minimum(inputs: Any) -> tuple[PyTree[Array], tuple]:
    setting, data, start, num_rows, *_ = inputs
    left = setting.max_steps if data.steps is None else setting.max_steps - data.steps
    most: Any = Most(left, num_rows)
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
    history = dict(solution.history) if num_rows else None
    return solution.model[1], (history, solution.result, solution.stats["num_steps"])


def _stationary(variables: PyTree[Array], _: Any, inputs: Any) -> PyTree[Array]:
    """Return a value that is zero at the minimum, with an invertible derivative there."""
    setting, data, *_ = inputs
    posed = Posed.of(setting, data)
    if setting.solver.retraction is not None:
        raise ValueError(
            "`gnlin.curve_fit` has no derivatives with a `retraction`: use "
            "`optimistix.least_squares(..., adjoint=gnlin.methods.ImplicitAdjoint())`."
        )
    lin = linearise(posed.outputs, variables)
    slope = lin.vjp(posed.loss.derivative(lin.outputs, posed.target))
    return held_at_bounds(slope, _for_variables(setting.solver).bounds, variables)


# Remove a type checker's wrapper, because optimistix requires plain functions.
_minimum = getattr(_minimum, "__wrapped__", _minimum)
_stationary = getattr(_stationary, "__wrapped__", _stationary)
