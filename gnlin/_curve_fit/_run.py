"""The run to the minimum, and the derivative of the minimum."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import optimistix as optx
from jaxtyping import Array, Int, PyTree

from .._common._history import of_full_batch
from .._common._sharding import choosing
from .._jacobian import AtOnce
from .._linearisation._linearisation import linearise
from .._solver import AbstractGaussNewton
from .._solver._adjoint import held_at_bounds, LeastNorm
from .._training._full_batch import steps_inside
from .._training._step import Kept, StepSettings
from ..losses._of_examples import loss_beside
from ._curve import Data
from ._problem import FitSettings, Posed


class Run(NamedTuple):
    variables: PyTree[Array]
    history: Any
    result: optx.RESULTS
    num_steps: Int[Array, ""]
    kept: Kept | None


def _for_variables(solver: AbstractGaussNewton) -> AbstractGaussNewton:
    """Return the solver of the parameters for all variables. Steps of x are added, and
    have no bounds."""
    bounds, curved = solver.bounds, solver.retraction
    if bounds is not None:
        bounds = tuple({"curve": bound} for bound in bounds)
    if curved is not None:
        curved = {"curve": curved, "x": None}
    return dataclasses.replace(solver, bounds=bounds, retraction=curved)


def run(
    setting: FitSettings,
    data: Data,
    start: PyTree[Array],
    *,
    num_rows: int,
    keeps: bool = False,
) -> Run:
    """Run the solver to the minimum, which is differentiated by the implicit function
    theorem. If the data do not determine all parameters, the derivative is the one of
    least norm, as by `gnlin.methods.ImplicitAdjoint`.

    - `num_rows`: the rows of the history; 0 for no history.
    - `keeps`: whether to return the last linearisation.
    """
    adjoint = optx.ImplicitAdjoint(LeastNorm())
    inputs = setting, data, start, num_rows, keeps
    variables, rest = adjoint.apply(_minimum, _stationary, inputs, frozenset())
    return Run(variables, *rest)


def _minimum(inputs: Any) -> tuple[PyTree[Array], tuple]:
    setting, data, start, num_rows, keeps, *_ = inputs
    left = setting.max_steps if data.steps is None else setting.max_steps - data.steps
    posed, solver = Posed.of(setting, data), _for_variables(setting.solver)
    loss, batch = loss_beside(
        posed.loss.as_arguments().reduced("sum"), (None, posed.target[None], None)
    )
    network: Any = _AsNetwork(posed)
    steps = StepSettings(solver, loss, network, keeps=keeps)
    variables = solver.admissible(posed.variables(start))
    with choosing():
        end = steps_inside(steps, batch, (variables, None), left, num_rows)
    carry, num_steps = end.now
    history = of_full_batch(end.rows) if num_rows else None
    return carry.parameters, (history, end.result, num_steps, carry.kept)


class _AsNetwork(eqx.Module):
    """A fit as a network for a full-batch run. The data set is one example without
    inputs, whose outputs are the curve."""

    posed: Posed
    takes_key: ClassVar[bool] = False
    has_state: ClassVar[bool] = False

    def function(self) -> AtOnce:
        return AtOnce(self.posed.outputs)

    def args(self, *_: Any) -> None:
        return None

    def drawn(self, data: tuple, _: Any) -> tuple:
        return data


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
