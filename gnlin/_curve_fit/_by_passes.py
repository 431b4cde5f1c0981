"""Levenberg-Marquardt on data that do not fit in memory. At each point, sums over the
data give the loss to second order."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, Bool, PyTree, Scalar

from .._common import _tree
from .._common._quickly import quickly
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from .._solver import LevenbergMarquardt, print_row, State
from .._solver._trials import Proposal, TrialOutcome, Trials
from ..damping import LongestStep, TrustRegion
from ._sums import Sums


class HalfSquares(AbstractObjective):
    """Half the sum of squares of a residual, plus a rest. The rest is a constant of the
    linearised problem, and differs from point to point."""

    is_sample: bool = eqx.field(static=True, default=False)

    @property
    def is_quadratic(self) -> bool:
        return True

    def value(self, outputs: PyTree[Array]) -> Scalar:
        residual = outputs["residual"]
        return 0.5 * _tree.dot(residual, residual) + outputs["rest"]

    def decrease(self, outputs: PyTree[Array], new_outputs: PyTree[Array]) -> Scalar:
        old, new = outputs["residual"], new_outputs["residual"]
        of_residual = 0.5 * _tree.dot(old - new, old + new)
        return of_residual + (outputs["rest"] - new_outputs["rest"])

    def gradient(self, outputs: PyTree[Array]) -> PyTree[Array]:
        return outputs | {"rest": jnp.ones_like(outputs["rest"])}

    def curvature(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree]:
        return lambda v: self.whitened(v)[1]

    def residual(self, outputs: PyTree[Array]) -> PyTree[Array]:
        return jnp.sqrt(2 * jnp.abs(self.value(outputs)))

    def whitened(self, outputs: PyTree[Array]) -> tuple[None, PyTree, None]:
        return None, outputs | {"rest": jnp.zeros_like(outputs["rest"])}, None


class Minimum(NamedTuple):
    """The end of a run.

    - `last`: the sums at this point.
    - `rows`: the history.
    """

    y: PyTree[Array]
    last: Sums
    result: optx.RESULTS
    rows: dict[str, np.ndarray]


def minimise(
    solver: LevenbergMarquardt,
    sums: Callable[[PyTree[Array]], Sums],
    y: PyTree[Array],
    max_steps: int,
    show: Callable[[int, float], None],
) -> Minimum:
    """Minimise a loss that one pass over the data expands to second order.

    Each trial is one pass, and an accepted one is the next linearisation. There is
    therefore no search for a longer step, and the default rule is a trust region, which
    takes the fewest passes. Steps have no second-order correction, and no detours. Ctrl-C
    ends a run that has made a step, as `max_steps` does.

    - `sums`: a function that makes a pass and returns the sums at a point.
    - `show`: a function that shows the number of steps and the loss.
    """
    damping = TrustRegion() if solver.damping is None else solver.damping
    if isinstance(damping, LongestStep):
        damping = dataclasses.replace(damping, detours=False)
    solver = dataclasses.replace(solver, damping=damping, acceleration=False)
    here = sums(y)
    state = solver.start(y, jax.eval_shape(Sums.outputs, here))
    # Zeros stand for a trial before the first one.
    none = _tree.zeros_like(eqx.filter_eval_shape(_first_trial, solver, y, here, state))
    yes, no = jnp.array(True), jnp.array(False)
    rows: list[dict[str, np.ndarray]] = []
    try:
        while not state.is_over and len(rows) < max_steps:
            trial, _, ended = _step(solver, y, here, state, yes, none, here)
            # The verdict that the run is over needs no pass.
            is_over, taken = state.settled and ended.terminate, (y, here)
            while trial.tried.goes_on and not is_over:
                at, there = trial.y, sums(trial.y)
                trial, takes, ended = _step(solver, y, here, state, no, trial, there)
                if takes:
                    taken = at, there
            if ended.counts.num_feature_updates > state.counts.num_feature_updates:
                rows.append(jax.device_get(ended.row() | {"loss": here.loss}))
                print_row(solver.verbose, rows[-1], jnp.array(len(rows)), jnp.array(True))
                show(len(rows), float(here.loss))
                if trial.tried.found:
                    y, here = taken
            state = ended
    except KeyboardInterrupt:
        if not rows:
            raise
    result = state.result
    if not state.is_over:
        result = optx.RESULTS.nonlinear_max_steps_reached
    names = rows[0] if rows else ()
    columns = {name: np.stack([row[name] for row in rows]) for name in names}
    return Minimum(y, here, result, columns)


class _Trial(NamedTuple):
    """The outcome of the trials at a linearisation, and the next step to try, which leads
    to `y`."""

    tried: TrialOutcome
    proposal: Proposal
    y: PyTree[Array]


def _proposed(trials: Trials, tried: TrialOutcome) -> _Trial:
    proposal = trials.proposed(tried)
    point = trials.lin.moved(proposal.step)
    return _Trial(tried, proposal, trials.as_tree(point))


def _trials(
    solver: LevenbergMarquardt, y: PyTree[Array], here: Sums, state: State
) -> tuple[Linearisation, Trials]:
    lin = solver.placed(HalfSquares(), here.at(y, solver.memory_budget))
    return lin, solver.trials(HalfSquares(), lin, lambda y: lin.outputs, state.memory)


@quickly
def _step(
    solver: LevenbergMarquardt,
    y: PyTree[Array],
    here: Sums,
    state: State,
    is_first: Bool[Array, ""],
    trial: _Trial,
    there: Sums,
) -> tuple[_Trial, Bool[Array, ""], State]:
    """Judge a trial, with the sums `there`, and propose the next step. Return also
    whether the judged step is the one to take so far, and the state of the run if nothing
    more is tried; before the first trial it says whether the run needs no step."""
    lin, trials = _trials(solver, y, here, state)
    judged, takes = trials.judged(trial.tried, trial.proposal, there.outputs())
    tried = _tree.where(is_first, trials.begun(), judged)
    trial = _proposed(trials, tried)
    left = _tree.where(is_first, trial.proposal.step, tried.step)
    tried = eqx.tree_at(lambda t: t.step, tried, left)
    _, ended = solver.ended(HalfSquares(), lin, solver.after(trials, tried), state)
    return trial, takes & ~is_first, ended


def _first_trial(
    solver: LevenbergMarquardt, y: PyTree[Array], here: Sums, state: State
) -> _Trial:
    _, trials = _trials(solver, y, here, state)
    return _proposed(trials, trials.begun())
