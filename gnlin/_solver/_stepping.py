"""Turn a subproblem's answer into a step; solvers whose steps are spectral filters."""

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Int, PyTree, ScalarLike

from .._common import _tree
from .._common._checks import check_callable, is_zero, nan_unless, nonnegative
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from .._subproblem import (
    AbstractSubproblem,
    Answer,
    check_form,
    choose,
    Form,
    Method,
    problem_of,
    ProxLinear,
    undamped,
)
from ..filters import PseudoInverse, Tikhonov
from ._base import AbstractGaussNewton
from ._between_bounds import Again, between_bounds
from ._search import check_search, safeguard, Search, searched
from ._state import Evaluate, State, Update


class AbstractSearchedGaussNewton(AbstractGaussNewton):
    """A solver with a `form` of the linearised problem and a line `search`. With
    `search="auto"` the next batch also judges each step."""

    _keeps_bounds: ClassVar[bool] = True

    form: Form = eqx.field(default="quadratic", kw_only=True)
    search: Search = eqx.field(default="auto", kw_only=True)

    def __check_init__(self):
        check_search(self.search)
        check_form(self.form, "auto")

    def start_stream(self, y, outputs) -> State:
        state = self.start(y, outputs)
        return state.with_stride(y) if self.search == "auto" else state


class AbstractFilteredGaussNewton(AbstractSearchedGaussNewton):
    r"""A solver whose steps are given by a spectral filter $g$, as
    $\delta = -\phi^\top U g(w) U^\top r$. A subclass only has to define `filter_at`.

    **Arguments:**

    - `rtol`, `atol`, `norm`, `memory_budget`, `bounds`, `retraction`, `verbose`: as in
        [`gnlin.authoring.AbstractGaussNewton`][].
    - `form`, `search`, `method`: as in [`gnlin.GaussNewton`][].

    !!! example

        ```python
        class Cooled(gnlin.authoring.AbstractFilteredGaussNewton):
            damping: float

            def filter_at(self, num_steps):
                return gnlin.filters.Tikhonov(self.damping * 0.5**num_steps)
        ```
    """

    method: Method = eqx.field(default="auto", kw_only=True)

    def __check_init__(self):
        check_form(self.form, self.method)

    @abc.abstractmethod
    def filter_at(self, num_steps: Int[Array, ""]) -> Filter:
        """Return the filter of the next step, after `num_steps` outer steps."""

    def prepared(
        self, problem: Quadratic | ProxLinear, filter: Filter, memory: PyTree
    ) -> tuple[AbstractSubproblem, PyTree]:
        """Return a problem's subproblem for a filter, and the next update's memory."""
        return choose(problem, filter, method=self.method), memory

    def update(self, objective, lin, evaluate, memory, num_steps) -> Update:
        filter = self.filter_at(num_steps)
        what = "a function of the eigenvalues"
        check_callable(
            "filter_at(num_steps)", filter, what, "gnlin.filters.Tikhonov(0.1)"
        )
        is_plain = isinstance(filter, Tikhonov) and is_zero(filter.damping)
        if is_plain and self.method == "auto":
            filter = PseudoInverse()  # the curvature may be singular

        def prepared(lin):
            problem = problem_of(self.form, objective, lin)
            return self.prepared(problem, filter, memory)

        subproblem, new_memory = prepared(lin)
        answer = subproblem.solve(filter)
        given = objective, lin, evaluate, subproblem, answer
        return take_step(
            *given,
            search=self.search,
            memory=new_memory,
            damping=_reported(filter),
            again=lambda lin: prepared(lin)[0].solve(filter).step,
        )


def _reported(filter: Filter) -> ScalarLike:
    """Return the damping of a filter; NaN if a parameter of it is out of range."""
    filter, damping = undamped(filter)
    match filter:
        case Tikhonov(damping=further):
            return damping + further
        case PseudoInverse(rcond=rcond) if rcond is not None:
            return nan_unless(nonnegative(rcond), damping)
    return damping


def take_step(
    objective: AbstractObjective,
    lin: Linearisation,
    evaluate: Evaluate,
    subproblem: AbstractSubproblem,
    answer: Answer,
    *,
    search: Search = None,
    memory: PyTree = None,
    damping: ScalarLike = 0.0,
    again: Again | None = None,
) -> Update:
    """Take a subproblem's step, or the fraction of it that a search accepts.

    **Arguments:**

    - `objective`, `lin`, `evaluate`: the arguments of a solver's `update`.
    - `subproblem`, `answer`: the subproblem and its solution.
    - `search`: a line search, `"auto"`, or `None` for the whole step.
    - `memory`: the memory for the next update.
    - `damping`: the damping for the history. If it is not finite, the run ends.
    - `again`: a function that solves another linearisation in the same way and returns
        its step. It is needed with bounds, to solve for the parameters not at a bound.

    **Returns:** a [`gnlin.authoring.Update`][].
    """
    y, outputs = lin.point, lin.outputs
    step = answer.step
    solved = answer.result == optx.RESULTS.successful
    if lin.box is not None:
        step = _tree.cast_like(step, y)
        decrease = ProxLinear(lin.jacobian, lin.outputs, objective).decrease
        step, _ = between_bounds(decrease, lin, step, again)
    found, stuck = None, jnp.array(False)
    search = safeguard(search, objective)
    if search is not None:
        gradient = subproblem.gradient()
        found = searched(search, objective, lin, evaluate, gradient, step)
        step = _tree.scale(found.length, step)
        stuck = ~found.any & solved
    step_norm = _tree.norm(step)
    # A damping that is not finite means that a hyperparameter is out of range.
    at_point = jnp.isfinite(subproblem.gradient_norm) & jnp.isfinite(damping)
    at_point &= jnp.isfinite(objective.value(outputs))
    # If a search has found no step, nonfinite trials are no error.
    broken = ~at_point | (solved & ~stuck & ~jnp.isfinite(step_norm))
    takes = solved & ~stuck & ~broken
    candidate = _tree.where(takes, lin.moved(step), y)
    new_outputs = evaluate(candidate) if found is None else found.outputs
    return Update(
        y=candidate,
        outputs=_tree.where(takes, new_outputs, outputs),
        memory=memory,
        gradient_norm=subproblem.gradient_norm,
        step_norm=jnp.where(takes, step_norm, 0),
        damping=damping,
        num_inner_steps=answer.num_inner_steps,
        passes=subproblem.passes + answer.passes,
        num_accepted=jnp.where(takes, 1, 0),
        num_rejected=jnp.where(takes, 0, 1),
        left=answer.step,
        problem=_in_memory(subproblem),
        stuck=stuck & at_point,
        result=optx.RESULTS.where(broken, optx.RESULTS.nonfinite, answer.result),
    )


def step_taken(update: Update, lin: Linearisation) -> PyTree[Array]:
    """Return the step of an update in the variables of the linearisation."""
    if lin.retraction is None:
        return jax.tree.map(jnp.subtract, update.y, lin.point)
    assert update.step_norm is not None
    whole = _tree.norm(update.left)
    part = update.step_norm / jnp.where(whole == 0, 1, whole)
    return _tree.cast_like(_tree.scale(part, update.left), lin.point)


def _in_memory(subproblem: AbstractSubproblem) -> Quadratic | None:
    """Return the linearised problem if its Jacobian is in memory."""
    problem = getattr(subproblem, "problem", None)
    is_there = isinstance(problem, Quadratic) and problem.jacobian.is_at_hand
    return problem if is_there else None
