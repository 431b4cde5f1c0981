"""The state that a run carries from step to step, and the result of a step."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import check_count
from .._common._passes import Passes
from .._linearisation._linearisation import Linearisation
from .._linearisation._quadratic import Quadratic
from ._stride import Stride


Evaluate = Callable[[PyTree[Array]], PyTree[Array]]
"""A function that returns the outputs at a point."""


class Report(eqx.Module):
    """The values of one outer step for the history.

    - `loss`: the loss at the new point.
    - `gradient_norm`: the norm of the loss's gradient at the linearisation point.
    - `step_norm`: |delta|; 0 if no step was taken.
    - `damping`: lambda; 0 for a solver without damping.
    - `num_inner_steps`: the number of steps on the subproblem.
    """

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    step_norm: Float[Array, ""]
    damping: Float[Array, ""]
    num_inner_steps: Float[Array, ""]


class Counts(eqx.Module):
    """The cost of the run so far. Inner steps are a float, as they may exceed 2^31."""

    num_feature_updates: Int[Array, ""]
    num_inner_steps: Float[Array, ""]
    num_jvps: Float[Array, ""]
    num_vjps: Float[Array, ""]
    num_accepted_steps: Int[Array, ""]
    num_rejected_steps: Int[Array, ""]

    def plus(self, *more: ScalarLike) -> "Counts":
        """Return the counts increased by one number each, in their order."""
        pairs = zip(jax.tree.leaves(self), more, strict=True)
        return Counts(*(count + jnp.asarray(each, count.dtype) for count, each in pairs))

    def by_name(self) -> dict[str, Array]:
        return {name: getattr(self, name) for name in Counts.__dataclass_fields__}


class Detour(eqx.Module):
    """Where the next linearisation is. The run itself stays at the end of its last step,
    until a step from a detour leads further down.

    - `is_on`: whether the next linearisation is on a detour.
    - `at`: its point if it is, with all parameters in one array.
    - `y`, `outputs`: the run's own point, in one array, and the outputs there.
    """

    is_on: Bool[Array, ""]
    at: Float[Array, " p"]
    y: Float[Array, " p"]
    outputs: PyTree[Array]

    @staticmethod
    def none(y: PyTree[Array], outputs: PyTree[jax.ShapeDtypeStruct]) -> "Detour":
        """Return the state before the first step."""
        flat, _ = _tree.ravel_pytree(y)
        return Detour(jnp.array(False), flat, flat, _tree.zeros_like(outputs))

    def next_point(self, y: PyTree[Array]) -> PyTree[Array]:
        """Return the point of the next linearisation if the run is at `y`."""
        flat, unravel = _tree.ravel_pytree(y)
        return unravel(jnp.where(self.is_on, self.at, flat))

    def outputs_of_run(self, outputs: PyTree[Array]) -> PyTree[Array]:
        """Return the outputs at the run's own point, with those at the linearisation."""
        return _tree.where(self.is_on, self.outputs, outputs)


class State(eqx.Module):
    # The solver's own memory between linearisations
    memory: PyTree
    # Shown to the user
    report: Report
    counts: Counts
    # Used for termination
    first_loss: Float[Array, ""]
    settled: Bool[Array, ""]  # the last step was within the tolerances
    num_still: Int[Array, ""]  # steps in a row that lowered the loss by rounding only
    still_loss: Float[Array, ""]  # the loss where these began
    # The `reweighted` of robust losses that leave it to the solver
    reweighted: Float[Array, ""]
    terminate: Bool[Array, ""]
    result: optx.RESULTS
    # Used across batches if each batch judges the step before it
    stride: Stride | None = None
    # The history, if it is requested through optimistix
    rows: dict[str, Array] | None = None

    @staticmethod
    def start(memory: PyTree, dtype: jnp.dtype) -> "State":
        """Return the state before the first step. All types are strong: a change of type
        in a step would cause a second compilation."""
        zero, count, counter = (jnp.zeros((), kind) for kind in (dtype, float, int))
        return State(
            memory=memory,
            report=Report(zero, zero, zero, zero, count),
            counts=Counts(counter, count, count, count, counter, counter),
            first_loss=zero,
            settled=jnp.array(False),
            num_still=counter,
            still_loss=zero,
            reweighted=jnp.ones((), dtype),
            terminate=jnp.array(False),
            result=optx.RESULTS.successful,
        )

    @property
    def is_over(self) -> Bool[Array, ""]:
        """Whether the run has ended."""
        return self.terminate | (self.result != optx.RESULTS.successful)

    def with_stride(self, y: PyTree[Array]) -> "State":
        """Return the state with a stride, with which each batch judges the last step."""
        stride = Stride.start(y, self.report.loss.dtype)
        return dataclasses.replace(self, stride=stride)

    def after_part(self, stride: Stride, loss: Scalar, back: Bool[Array, ""]) -> "State":
        """Return the state after a part of a step. `back` says whether the last step was
        undone."""
        undone = jnp.where(back, 1, 0)
        report, counts = self.report, self.counts
        report = dataclasses.replace(
            report,
            loss=loss.astype(report.loss.dtype),
            step_norm=stride.length * report.step_norm,
        )
        counts = dataclasses.replace(
            counts,
            num_accepted_steps=counts.num_accepted_steps - undone,
            num_rejected_steps=counts.num_rejected_steps + undone,
        )
        return dataclasses.replace(self, stride=stride, report=report, counts=counts)

    def row(self) -> dict[str, Array]:
        """Return a row of the history, but with the loss after the step."""
        names = Report.__dataclass_fields__
        row = {name: getattr(self.report, name) for name in names}
        updates = self.counts.num_feature_updates
        return row | {"num_feature_updates": updates.astype(float)}

    def with_rows(self, number: int) -> "State":
        """Return the state with room for this number of rows of the history."""
        empty = lambda x: jnp.full(number, jnp.nan, x.dtype)
        return dataclasses.replace(self, rows=jax.tree.map(empty, self.row()))

    def with_row(
        self, row: dict[str, Array], at: Int[Array, ""], moved: Bool[Array, ""]
    ) -> "State":
        """Return the state with a row of the history that optimistix asked for, if a step
        was made."""
        if self.rows is None:
            return self
        at = jnp.where(moved, at, jnp.iinfo(at.dtype).max)  # out of range: not written
        rows = {
            name: column.at[at].set(row[name].astype(column.dtype), mode="drop")
            for name, column in self.rows.items()
        }
        return dataclasses.replace(self, rows=rows)


def num_rows_of(options: Mapping[str, Any]) -> int | None:
    """Return the number of rows of the history that `options` of optimistix ask for, if
    any. Raise an error for options that solvers do not have."""
    others = sorted(set(options) - {"history", "jac"})
    if others:
        raise ValueError(
            'The only `options` of gnlin\'s solvers are "history" and "jac", but '
            f"{others} were given; set the solver's `method` for the way to compute "
            "a step, and its `bounds` for limits of the parameters."
        )
    num_rows = options.get("history")
    if num_rows is None:
        return None
    check_count("history", num_rows)
    return int(num_rows)


class Update(eqx.Module):
    """The result of one linearisation: the next point, and statistics of the step. A
    solver of your own only has to set `y` and `outputs`.

    **Arguments:**

    - `y`, `outputs`: the next point, and the outputs there.
    - `memory`: the memory for the next update.
    - `gradient_norm`, `step_norm`: the norms of the objective's gradient at the
        linearisation point, and of `y - lin.point`. If `None`, they are computed.
    - `damping`, `num_inner_steps`: values for the history.
    - `passes`: the [`gnlin.authoring.Passes`][] made in addition to the linearisation.
    - `num_accepted`, `num_rejected`: the numbers of accepted and rejected steps.
    - `stuck`: whether no step could be found. The run then ends, converged or not.
    - `left`: the whole step that solves the linearised problem, even if it was shortened
        or rejected; `None` for `y - lin.point`. If the last step was within the
        tolerances and this one has almost nothing to gain, the run has converged.
    - `problem`: the [`gnlin.authoring.Quadratic`][] of the linearisation, if its Jacobian
        is in memory.
    - `searched`: whether the solver has searched for the longest step that lowers the
        loss.
    - `terminate`: whether to end the run as a success, whatever the gradient. It has no
        effect across batches.
    - `result`: any value other than `successful` ends the run.
    - `attainable`: the largest decrease of the objective that the linearisation predicts
        of any step; `None` if it is not known.
    """

    y: PyTree[Array]
    outputs: PyTree[Array]
    memory: PyTree = None
    gradient_norm: Scalar | None = None
    step_norm: Scalar | None = None
    damping: ScalarLike = 0.0
    num_inner_steps: ScalarLike = 1
    passes: Passes = Passes()
    num_accepted: ScalarLike = 1
    num_rejected: ScalarLike = 0
    left: PyTree[Array] | None = None
    problem: Quadratic | None = None
    searched: bool = eqx.field(default=False, static=True)
    stuck: Bool[Array, ""] = eqx.field(default_factory=lambda: jnp.array(False))
    terminate: Bool[Array, ""] = eqx.field(default_factory=lambda: jnp.array(False))
    result: optx.RESULTS = eqx.field(default_factory=lambda: optx.RESULTS.successful)
    attainable: Scalar | None = None


def checked(solver: str, update: Any, lin: Linearisation, state: State) -> Update:
    """Return what a solver's `update` returned, with a memory of the precision that the
    run carries. Raise an error if it does not fit the run."""
    if not isinstance(update, Update):
        raise TypeError(
            f"`update` of {solver} must return a `gnlin.authoring.Update(y, outputs)`, "
            f"but returns a {type(update).__name__}."
        )

    def shapes(tree: PyTree) -> list[tuple[int, ...]]:
        # A structure may hold objects that cannot be compared.
        return [jnp.shape(x) for x in jax.tree.leaves(tree) if eqx.is_array_like(x)]

    for field, found, like in (
        ("y", update.y, "point"),
        ("outputs", update.outputs, "outputs"),
    ):
        expected = getattr(lin, like)
        if shapes(found) != shapes(expected):
            raise ValueError(
                f"The `{field}` of the `Update` of {solver} must have the shapes of "
                f"`lin.{like}`, {shapes(expected)}, but has {shapes(found)}."
            )
    what = f"The `memory` of the `Update` of {solver}"
    memory = carried(what, update.memory, "`first_memory`", state.memory)
    return dataclasses.replace(update, memory=memory)


def carried(what: str, found: PyTree, source: str, expected: PyTree) -> PyTree:
    """Return what one step hands to the next, with the precision of the first one, which
    the function `source` has returned. Raise an error if it is of another kind."""

    def kind(tree: PyTree) -> str:
        leaves, structure = jax.tree.flatten(tree)
        arrays = [x for x in leaves if eqx.is_array_like(x)]
        kinds = [f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in arrays]
        return f"{structure} of {', '.join(kinds)}"

    if jax.tree.structure(found) == jax.tree.structure(expected):
        found = jax.tree.map(_in_precision, found, expected)
    if kind(found) != kind(expected):
        raise ValueError(
            f"{what} must be of the kind that {source} returns, {kind(expected)}, but is "
            f"{kind(found)}."
        )
    return found


def _in_precision(x: Any, like: Any) -> Any:
    """Convert a floating-point number to the precision of another one."""
    for each in (x, like):
        is_number = eqx.is_array_like(each)
        if not is_number or not jnp.issubdtype(jnp.result_type(each), jnp.floating):
            return x
    return jnp.asarray(x, jnp.result_type(like))
