"""Levenberg-Marquardt on data that are never in memory as a whole: the loss is known by
sums over the data, to second order, at one point after another."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, Bool, Float, PyTree, Scalar

from .._common import _tree
from .._common._tree import Structure
from .._jacobian import AtHand, Rows
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from .._linearisation._quadratic import Quadratic
from ._base import AbstractGaussNewton, row_of, State, Update
from ._levenberg_marquardt import LevenbergMarquardt, ONE_TRIAL
from ._trials import Proposal, TrialOutcome, Trials


class Expansion(NamedTuple):
    r"""A loss of p parameters to second order at one point.

    - `loss`: its value.
    - `triangle`: the triangular factor $T$ of all whitened rows, with the residual as one
        more column: $T^\top T = [\phi\ r]^\top[\phi\ r]$. Its first p columns stand for
        the Jacobian, and its last one for the residual.
    """

    loss: Scalar
    triangle: Float[Array, "p+1 p+1"]

    @property
    def jacobian(self) -> Float[Array, "p p"]:
        return self.triangle[:-1, :-1]

    @property
    def residual(self) -> Float[Array, " p"]:
        return self.triangle[:-1, -1]

    @property
    def gradient(self) -> Float[Array, " p"]:
        return _tree.matmul(self.jacobian.T, self.residual)

    def outputs(self) -> PyTree[Array]:
        """Return outputs of which `HalfSquares` is the loss."""
        return _outputs(self.residual, self.loss)

    def at(self, point: PyTree[Array], memory_budget: int) -> Linearisation:
        """Return the linearisation of these outputs."""
        outputs, domain = self.outputs(), Structure.of(point)
        matrix = jnp.pad(self.jacobian, ((0, 1), (0, 0)))  # the rest is constant
        rows = jax.tree.leaves(jax.vmap(domain.unravel)(matrix))
        blocks = [Rows(x) for x in rows]
        jacobian = AtHand(domain, Structure.of(outputs), memory_budget, blocks)
        return Linearisation(point, outputs, jacobian)


def _outputs(residual: Float[Array, " p"], loss: Scalar) -> PyTree[Array]:
    return {"residual": residual, "rest": loss - 0.5 * _tree.dot(residual, residual)}


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

    def root(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree]:
        return lambda v: v | {"rest": jnp.zeros_like(v["rest"])}

    def curvature(self, outputs: PyTree[Array]) -> Callable[[PyTree], PyTree]:
        return self.root(outputs)

    def residual(self, outputs: PyTree[Array]) -> PyTree[Array]:
        return jnp.sqrt(2 * jnp.abs(self.value(outputs)))

    def expand(self, lin: Linearisation) -> Quadratic:
        return Quadratic(lin.jacobian, self.root(lin.outputs)(lin.outputs))


class _After(AbstractGaussNewton):
    """A solver whose trials have been made: its update is the step that they lead to."""

    solver: LevenbergMarquardt
    tried: TrialOutcome

    def update(self, objective, lin, evaluate, memory, num_steps) -> Update:
        trials = self.solver.trials(objective, lin, evaluate, memory)
        return self.solver.after(trials, self.tried)


class Minimum(NamedTuple):
    """The end of a run.

    - `last`: what the last call of `expand` at this point returned.
    - `rows`: the history.
    """

    y: PyTree[Array]
    last: Any
    result: optx.RESULTS
    rows: dict[str, np.ndarray]


def minimise(
    solver: LevenbergMarquardt,
    expand: Callable[[PyTree[Array]], tuple[Expansion, Any]],
    y: PyTree[Array],
    max_steps: int,
    show: Callable[[int, float], None],
) -> Minimum:
    """Minimise a loss that one pass over the data expands to second order.

    Each trial is one pass, and an accepted one is the next linearisation. A longer step
    is therefore not searched for, and steps have no second-order correction.

    - `expand`: makes a pass; returns the expansion at a point, and anything else.
    - `show`: shows the number of steps and the loss.
    """
    damping = ONE_TRIAL if solver.damping is None else solver.damping
    solver = dataclasses.replace(solver, damping=damping, acceleration=False)
    here, last = expand(y)
    state = solver.start(y, jax.eval_shape(Expansion.outputs, here))
    rows: list[dict[str, np.ndarray]] = []
    while not _is_over(state) and len(rows) < max_steps:
        tried, proposal, there_y = _first(solver, y, here, state)
        if state.settled:  # the verdict needs no pass if it is that the run is over
            ending = eqx.tree_at(lambda t: t.step, tried, proposal.step)
            ended = _after(solver, y, here, state, ending)
            if ended.terminate:
                state = ended
                break
        taken = y, here, last
        while tried.goes_on:
            there, there_last = expand(there_y)
            tried, takes, proposal, next_y = _next(
                solver, y, here, state, tried, proposal, there
            )
            if takes:
                taken = there_y, there, there_last
            there_y = next_y
        num_steps = state.counts.num_feature_updates
        ended = _after(solver, y, here, state, tried)
        if ended.counts.num_feature_updates > num_steps:
            row = row_of(ended) | {"loss": here.loss}
            rows.append(jax.device_get(row))
            if tried.found:
                y, here, last = taken
            show(len(rows), float(here.loss))
        state = ended
    result = state.result
    if not _is_over(state):
        result = optx.RESULTS.nonlinear_max_steps_reached
    names = rows[0] if rows else ()
    columns = {name: np.stack([row[name] for row in rows]) for name in names}
    return Minimum(y, last, result, columns)


def _is_over(state: State) -> Bool[Array, ""]:
    return state.terminate | (state.result != optx.RESULTS.successful)


@eqx.filter_jit
def _first(
    solver: LevenbergMarquardt, y: PyTree[Array], here: Expansion, state: State
) -> tuple[TrialOutcome, Proposal, PyTree[Array]]:
    """Return the outcome before the first trial, the step to try, and where it leads."""
    trials = _trials(solver, y, here, state)
    tried = trials.begun()
    proposal = trials.proposed(tried, trials.known())
    return tried, proposal, _led_to(trials, proposal)


@eqx.filter_jit
def _next(
    solver: LevenbergMarquardt,
    y: PyTree[Array],
    here: Expansion,
    state: State,
    last: TrialOutcome,
    proposal: Proposal,
    there: Expansion,
) -> tuple[TrialOutcome, Bool[Array, ""], Proposal, PyTree[Array]]:
    """Return the outcome after a trial, whether its step is the one to take so far, the
    next step to try, and where it leads."""
    trials = _trials(solver, y, here, state)
    known = trials.known()
    tried, takes = trials.judged(last, proposal, there.outputs(), known)
    proposal = trials.proposed(tried, known)
    return tried, takes, proposal, _led_to(trials, proposal)


def _trials(
    solver: LevenbergMarquardt, y: PyTree[Array], here: Expansion, state: State
) -> Trials:
    lin = here.at(y, solver.memory_budget)
    lin = solver.placed(HalfSquares(), lin)
    return solver.trials(HalfSquares(), lin, lambda y: lin.outputs, state.memory)


def _led_to(trials: Trials, proposal: Proposal) -> PyTree[Array]:
    return trials.as_tree(trials.lin.moved(proposal.step))


@eqx.filter_jit
def _after(
    solver: LevenbergMarquardt,
    y: PyTree[Array],
    here: Expansion,
    state: State,
    tried: TrialOutcome,
) -> State:
    """Return the state after the trials at a linearisation, with the verdict on the run."""
    lin = here.at(y, solver.memory_budget)
    shared = {name: getattr(solver, name) for name in _SHARED}
    after = _After(solver=solver, tried=tried, **shared)
    _, state = after.advance(HalfSquares(), lin, lambda y: lin.outputs, state)
    return state


_SHARED = "rtol", "atol", "norm", "memory_budget", "bounds", "retraction"
