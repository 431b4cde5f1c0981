"""The loop that all solvers share: linearise, solve the linearised problem, step."""

import abc
import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import check_callable, check_count, check_flag, check_nonnegative
from .._common._passes import Passes
from .._jacobian import DEFAULT_MEMORY_BUDGET
from .._linearisation._bounds import Box, check_pair
from .._linearisation._linearisation import (
    check_outputs,
    check_parameters,
    Linearisation,
    linearise,
)
from .._linearisation._objective import AbstractObjective, SumOfSquares
from .._linearisation._quadratic import Quadratic
from .._linearisation._recognised import aux_of, recognised
from .._linearisation._retraction import Retraction
from ._stride import Stride
from ._termination import has_arrived, rounding_of_loss, STANDS_STILL


# A run ends after this many steps in a row that change the loss by rounding only.
_MOST_STILL = 10
# History columns printed by `verbose`.
_PRINTED = "loss", "gradient_norm", "step_norm", "damping"
# Up to this many parameters, a `jax.lax.cond` around the test of a step does not pay.
_FEW = 1_000


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
        return Counts(*map(increased, jax.tree.leaves(self), more))


def increased(count: Array, *more: ScalarLike) -> Array:
    """Return the sum of a count and further numbers, in the dtype of the count."""
    return sum((jnp.asarray(each, count.dtype) for each in more), count)


class State(eqx.Module):
    # What the solver itself carries from one linearisation to the next
    memory: PyTree
    # Shown to the user
    report: Report
    counts: Counts
    # Used for termination
    first_loss: Float[Array, ""]
    settled: Bool[Array, ""]  # the last step was within the tolerances
    num_still: Int[Array, ""]  # steps in a row that changed the loss by rounding only
    terminate: Bool[Array, ""]
    result: optx.RESULTS
    # Used across batches if each batch judges the step before it
    stride: Stride | None = None
    # The history, if it is requested through optimistix
    rows: dict[str, Array] | None = None

    def with_stride(self, y: PyTree[Array]) -> "State":
        """Return the state with a stride, with which each batch judges the last step."""
        stride = Stride.start(y, self.report.loss.dtype)
        return dataclasses.replace(self, stride=stride)


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
    - `terminate`: whether to end the run as a success, whatever the gradient.
    - `result`: any value other than `successful` ends the run.
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


class Ended(NamedTuple):
    """The verdict on a run at a linearisation: whether it has converged (`arrived`), and
    what the next verdict needs."""

    arrived: Bool[Array, ""]
    settled: Bool[Array, ""]
    num_still: Int[Array, ""]
    result: optx.RESULTS


Evaluate = Callable[[PyTree[Array]], PyTree[Array]]


class AbstractGaussNewton(optx.AbstractLeastSquaresSolver):
    """Base class of all solvers. A solver linearises the outputs, solves the linearised
    problem exactly or in part, and steps.

    A solver of your own defines `update`, and `first_memory` if it has a memory. The
    arguments below are its keyword arguments, in addition to its own. It works in
    [`gnlin.solve`][], [`gnlin.fit`][] and `optimistix.least_squares`, and its run
    converges only where the gradient is close to zero.

    **Arguments:**

    - `rtol`, `atol`: the run has converged when an outer step changes each parameter `y`
        by less than `atol + rtol * |y|`, and the residuals, in `norm`, likewise. If the
        norm of the first residuals is below 1, `atol` is multiplied by it.
    - `norm`: the norm in this test, `optimistix.max_norm` by default.
    - `memory_budget`: the most bytes that a matrix may take.
    - `bounds`: bounds `(lower, upper)` on the parameters, each a number, `None`, or a
        tree with the parameters' structure, in which a number may stand for a whole
        subtree. All points satisfy the bounds, and parameters with equal bounds stay
        constant. The functions of gnlin refuse a start out of bounds, and
        `optimistix.least_squares` moves it to the nearest point within. A parameter at a
        bound that descent would cross has no column in the Jacobian. A step that crosses
        other bounds is followed to the first one, and the problem is solved again for the
        remaining parameters. (If Levenberg-Marquardt uses scales, and there are at most
        ten times as many parameters as residuals, this takes no further factorisation.)
        For derivatives of a minimum at a bound use [`gnlin.methods.ImplicitAdjoint`][],
        as with a `retraction`.
    - `retraction`: a function for parameters that are not moved by addition, such as
        rotations and poses. `retraction(row, step)` returns the new row of an array of
        parameters. The step has the shape of the row, and its unused entries stay zero. A
        tree of such functions has the parameters' structure, with `None` for parameters
        that are moved by addition. An array with one axis is a single row, such as one
        pose, unless the function acts on each entry by itself. Retractions require a full
        batch and no bounds.
    - `verbose`: whether to print a line for each step, also within a compiled program. It
        may be a function, which is called while the program is traced, as by solvers of
        optimistix: `verbose(num_steps=("Num steps", number), loss=("Loss", value), ...)`,
        with `gradient_norm`, `step_norm` and `damping`.

    !!! example

        ```python
        from gnlin.authoring import AbstractGaussNewton, Passes, Update

        class GradientDescent(AbstractGaussNewton):
            learning_rate: float

            def update(self, objective, lin, evaluate, memory, num_steps):
                gradient = lin.vjp(objective.gradient(lin.outputs))
                step = jax.tree.map(lambda g: -self.learning_rate * g, gradient)
                y = jax.tree.map(jnp.add, lin.point, step)
                return Update(y, evaluate(y), passes=Passes(vjps=1))
        ```
    """

    rtol: float = eqx.field(default=1e-9, kw_only=True)
    atol: float = eqx.field(default=1e-12, kw_only=True)
    norm: Callable[[PyTree], Scalar] = eqx.field(default=optx.max_norm, kw_only=True)
    memory_budget: int = eqx.field(default=DEFAULT_MEMORY_BUDGET, kw_only=True)
    bounds: Any = eqx.field(default=None, kw_only=True)
    retraction: Any = eqx.field(default=None, kw_only=True)
    verbose: bool | Callable[..., None] = eqx.field(default=False, kw_only=True)

    def __check_init__(self):
        check_nonnegative("rtol", self.rtol)
        check_nonnegative("atol", self.atol)
        check_callable("norm", self.norm, "a function of a pytree", "optimistix.max_norm")
        check_count("memory_budget", self.memory_budget)
        if not callable(self.verbose):
            check_flag("verbose", self.verbose)
        if self.bounds is not None:
            check_pair(self.bounds)
            if self.retraction is not None:
                raise ValueError(
                    "A step by a `retraction` does not stay between `bounds`: pass only "
                    "one of the two."
                )

    def __repr__(self) -> str:
        return _tree.in_words(self)

    def first_memory(self, y: PyTree[Array], dtype: jnp.dtype) -> PyTree:
        """Return the memory for the first update."""
        return None

    @abc.abstractmethod
    def update(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        memory: PyTree,
        num_steps: Int[Array, ""],
    ) -> Update:
        """Solve the linearised problem exactly or in part, and step.

        - `objective`: the objective, a function of the outputs.
        - `lin`: the outputs' linearisation at the current point.
        - `evaluate`: a function that returns the outputs at any other point.
        - `memory`: the memory that the previous update returned.
        - `num_steps`: the number of outer steps so far.
        """

    def start(self, y: PyTree[Array], outputs: PyTree[jax.ShapeDtypeStruct]) -> State:
        """Return the state before the first step, without evaluating the function."""
        check_parameters(y)
        check_outputs(outputs)
        if self.bounds is not None:
            Box.of(self.bounds, y)  # raises an error if they do not fit
        if self.retraction is not None:
            Retraction.of(self.retraction, y)  # raises an error if it does not fit
        numbers = eqx.tree_at(lambda s: s.bounds, self, None, is_leaf=lambda x: x is None)
        for path, value in jax.tree_util.tree_leaves_with_path(numbers):
            if eqx.is_array(value) and value.ndim > 0:
                name = jax.tree_util.keystr(path).removeprefix(".")
                raise ValueError(
                    f"`{name}` must be a scalar, but has the shape {value.shape}; to try "
                    "several values use `jax.vmap`."
                )
        dtype = _tree.dtype((y, outputs))
        zero = jnp.zeros((), dtype)
        # Use strong types: a change of type in a step would cause a second compilation.
        count, counter = jnp.zeros((), float), jnp.zeros((), int)
        return State(
            memory=self.first_memory(y, dtype),
            report=Report(zero, zero, zero, zero, count),
            counts=Counts(counter, count, count, count, counter, counter),
            first_loss=zero,
            settled=jnp.array(False),
            num_still=counter,
            terminate=jnp.array(False),
            result=optx.RESULTS.successful,
        )

    def advance(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        state: State,
        *,
        same_examples: bool = True,
    ) -> tuple[PyTree[Array], State]:
        """Take one outer step from a linearisation, unless the run is over there.

        - `same_examples`: whether the next step uses the same examples. If not, the run
            is not tested for convergence.
        """
        num_steps = state.counts.num_feature_updates
        lin = lin.with_jacobian(lin.jacobian.within(self.memory_budget))
        lin = self.placed(objective, lin)
        dtype = state.report.loss.dtype
        loss = objective.value(lin.outputs).astype(dtype)
        first_loss = jnp.where(num_steps == 0, loss, state.first_loss)
        solver = self._in_units_of(objective, lin.outputs, first_loss)
        update = solver.update(objective, lin, evaluate, state.memory, num_steps)
        if not isinstance(update, Update):
            raise TypeError(
                f"`update` of {type(self).__name__} must return a "
                "`gnlin.authoring.Update(y, outputs)`, but returns a "
                f"{type(update).__name__}."
            )
        gradient_norm, step, step_norm = _completed(update, objective, lin)
        no = jnp.array(False)
        ended = Ended(no, no, state.num_still, update.result)
        if same_examples:
            ended = solver._ended(objective, lin, update, step, state, loss, first_loss)
        # A run that has converged here takes no further step.
        stays = ended.arrived & (num_steps > 0)
        one = jnp.where(stays, 0, 1)
        report = Report(
            loss=jnp.where(stays, loss, objective.value(update.outputs).astype(dtype)),
            gradient_norm=gradient_norm.astype(dtype),
            step_norm=step_norm.astype(dtype),
            damping=jnp.asarray(update.damping, dtype),
            num_inner_steps=jnp.asarray(update.num_inner_steps, float),
        )
        counts = state.counts.plus(
            one,
            update.num_inner_steps,
            update.passes.jvps,
            update.passes.vjps,
            one * update.num_accepted,
            one * update.num_rejected,
        )
        new = dataclasses.replace(
            state,
            memory=update.memory,
            report=report,
            counts=counts,
            first_loss=first_loss,
            settled=ended.settled,
            num_still=ended.num_still,
            terminate=update.terminate | ended.arrived,
            result=ended.result,
        )
        return _tree.where(stays, lin.point, update.y), new

    def _ended(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        update: Update,
        step: PyTree[Array],
        state: State,
        loss: Scalar,
        first_loss: Scalar,
    ) -> "Ended":
        """Return the verdict at a linearisation. Convergence is tested after a small
        step, after many steps without progress, and if no step could be found."""
        going = ~update.terminate & (update.result == optx.RESULTS.successful)
        stands = update.stuck | (state.num_still >= _MOST_STILL)
        asks = going & (state.settled | stands)
        problem, gradient = update.problem, None
        if problem is None:
            # The solver has computed the same gradient, so XLA merges the two.
            problem = objective.expand(lin)
            gradient = problem.gradient()

        def look():
            left = step if update.left is None else update.left
            return has_arrived(
                problem,
                problem.gradient() if gradient is None else gradient,
                _as_in(problem, lin.point),
                _as_in(problem, left),
                self.rtol,
                self.atol,
                loss,
                first_loss,
                update.searched,
            )

        arrived = jax.lax.cond(asks, look, lambda: jnp.array(False))
        now, then = map(objective.residual, (update.outputs, lin.outputs))
        gained = objective.decrease(lin.outputs, update.outputs).astype(loss.dtype)
        point = _as_in(update.problem, lin.point)
        quiet = jnp.abs(gained) <= rounding_of_loss(loss, update.problem, point)
        return Ended(
            arrived,
            settled=self.converged(update.y, step, now, then),
            num_still=jnp.where(quiet, state.num_still + 1, 0),
            result=optx.RESULTS.where(
                asks & stands & ~arrived, STANDS_STILL, update.result
            ),
        )

    def _in_units_of(
        self, objective: AbstractObjective, outputs: PyTree[Array], first_loss: Scalar
    ) -> "AbstractGaussNewton":
        """Return the solver with `atol` multiplied by the norm of the first residual or
        of the targets, whichever is smaller, if that is below 1."""
        zero_loss = jnp.abs(objective.value(_tree.zeros_like(outputs)))
        zero_loss = zero_loss.astype(first_loss.dtype)
        least = jnp.minimum(jnp.abs(first_loss), 0.5)
        least = jnp.where(zero_loss > 0, jnp.minimum(least, zero_loss), least)
        return eqx.tree_at(lambda s: s.atol, self, self.atol * jnp.sqrt(2 * least))

    def tell(
        self,
        row: dict[str, Array],
        num_steps: Int[Array, ""],
        moved: Bool[Array, ""],
    ) -> None:
        """Print a row of the history if `verbose` is set and a step was made."""
        if self.verbose is False:
            return
        jax.lax.cond(moved, lambda: self._tell(row, num_steps), lambda: None)

    def _tell(self, row: dict[str, Array], num_steps: Int[Array, ""]) -> None:
        values = {"num_steps": num_steps} | {name: row[name] for name in _PRINTED}
        titles = {name: name.replace("_", " ").capitalize() for name in values}
        if callable(self.verbose):
            self.verbose(**{name: (titles[name], values[name]) for name in values})
        else:
            line = ", ".join(f"{title}: {{:.6g}}" for title in titles.values())
            jax.debug.print(line, *values.values())

    #
    # Bounds and retractions
    #

    def between_bounds(self, y: PyTree[Array]) -> PyTree[Array]:
        """Return the nearest point between the bounds."""
        return y if self.bounds is None else Box.of(self.bounds, y).clip(y)

    def placed(self, objective: AbstractObjective, lin: Linearisation) -> Linearisation:
        """Return the linearisation with the solver's retraction or bounds."""
        if self.retraction is not None:
            return lin.along(Retraction.of(self.retraction, lin.point))
        if self.bounds is None:
            return lin
        box = Box.of(self.bounds, lin.point)
        slope = lin.vjp(objective.gradient(lin.outputs))
        return lin.within(box, box.blocked(lin.point, slope))

    #
    # Mini-batches
    #

    def start_stream(
        self, y: PyTree[Array], outputs: PyTree[jax.ShapeDtypeStruct]
    ) -> State:
        """Return the state before the first of many batches."""
        return self.start(y, outputs)

    def advance_stream(
        self,
        objective: AbstractObjective,
        fn: Callable[[Any, Any], Any],
        y: PyTree[Array],
        args: PyTree,
        state: State,
        *,
        has_aux: bool,
    ) -> tuple[PyTree[Array], State, Scalar, Any]:
        """Take one step on one batch with the outputs `fn(y, args)`. Return `(y, state,
        loss, aux)`, with the batch's loss before the step. By default the step is an
        outer step, shortened if there is a stride."""
        evaluate = lambda y_: fn(y_, args)[0] if has_aux else fn(y_, args)
        stride, back = state.stride, jnp.array(False)
        if stride is not None:
            # A loop over the two points compiles the function once.
            both = jax.tree.map(lambda *points: jnp.stack(points), stride.point, y)
            outputs = jax.lax.map(evaluate, both)
            before, now = (jax.tree.map(lambda x, i=i: x[i], outputs) for i in (0, 1))
            stride, back = stride.judged(objective, before, now)
            y = _tree.where(back, stride.point, y)
        lin, aux = linearised(fn, y, args, has_aux, self.memory_budget)
        new_y, state = self.advance(objective, lin, evaluate, state, same_examples=False)
        state = eqx.tree_at(lambda s: s.terminate, state, jnp.array(False))
        if stride is not None:
            new_y = stride.along(y, new_y)
            outputs = evaluate(new_y)
            stride = stride.after(y, objective.decrease(lin.outputs, outputs))
            state = _with_stride(state, stride, objective.value(outputs), back)
        return new_y, state, objective.value(lin.outputs), aux

    def linearisation_point(self, state: State) -> PyTree[Array] | None:
        """Return the linearisation point if it is kept across batches, or `None`."""
        return None

    def check_curvature_batch(self) -> None:
        """Raise `ValueError` if the curvature cannot use more examples than the loss."""

    def converged(
        self,
        y: PyTree[Array],
        step: PyTree[Array],
        residual: PyTree[Array],
        old_residual: PyTree[Array],
    ) -> Bool[Array, ""]:
        """Whether a step was within the tolerances for each parameter and for the norm of
        the residuals. The relative tolerance is at least 4 eps."""
        eps = _tree.eps((y, residual))
        change = jax.tree.map(jnp.subtract, residual, old_residual)

        def norm(tree):
            return self.norm(_tree.promoted(tree))

        def relative(x, size):
            rtol = jnp.maximum(self.rtol, 4 * eps).astype(x.dtype)
            scale = jnp.asarray(self.atol, x.dtype) + rtol * size
            return jnp.where(x == 0, 0, jnp.abs(x) / jnp.where(scale == 0, 1e-30, scale))

        def small_step():
            of_y = _tree.cast_like(step, y)
            each = jax.tree.map(lambda d, x: relative(d, jnp.abs(x)), of_y, y)
            # A finite step may lead to a point that is not finite.
            return (norm(each) < 1) & _tree.all_finite(y)

        small_change = relative(norm(change), norm(residual)) < 1
        if _tree.size(y) <= _FEW:
            return small_change & small_step()
        return jax.lax.cond(small_change, small_step, lambda: jnp.array(False))

    #
    # The interface to optimistix
    #

    def init(self, fn, y, args, options, f_struct, aux_struct, tags) -> State:
        others = sorted(set(options or {}) - {"history", "jac"})
        if others:
            raise ValueError(
                'The only `options` of gnlin\'s solvers are "history" and "jac", but '
                f"{others} were given; set the solver's `method` for the way to compute "
                "a step."
            )
        state = self.start(y, f_struct)
        num_rows = (options or {}).get("history")
        if num_rows is None:
            return state
        check_count("history", num_rows)
        rows = jax.tree.map(
            lambda x: jnp.full(int(num_rows), jnp.nan, x.dtype), row_of(state)
        )
        return eqx.tree_at(_rows, state, rows, is_leaf=lambda x: x is None)

    def step(
        self, fn, y, args, options, state: State, tags
    ) -> tuple[PyTree[Array], State, Any]:
        y, posed = self.between_bounds(y), recognised(fn, y, args)
        given = {"jac": (options or {}).get("jac"), "memory_budget": self.memory_budget}
        if posed is None:
            lin, aux = linearise(fn, y, args, has_aux=True, **given)
            objective, evaluate = SumOfSquares(), lambda y_: fn(y_, args)[0]
        else:
            outputs, inputs, objective = posed
            lin, aux = linearise(outputs, y, inputs, **given), aux_of(fn, y, args)
            evaluate = lambda y_: outputs(y_, inputs)
        y, after = self.advance(objective, lin, evaluate, state)
        at = state.counts.num_feature_updates
        moved = after.counts.num_feature_updates > at
        row = row_of(after) | {"loss": objective.value(lin.outputs)}
        self.tell(row, after.counts.num_feature_updates, moved)
        if state.rows is not None:
            at = jnp.where(moved, at, jnp.iinfo(at.dtype).max)
            rows = {
                name: column.at[at].set(row[name].astype(column.dtype), mode="drop")
                for name, column in state.rows.items()
            }
            after = eqx.tree_at(_rows, after, rows, is_leaf=lambda x: x is None)
        return y, after, aux

    def terminate(
        self, fn, y, args, options, state: State, tags
    ) -> tuple[Bool[Array, ""], optx.RESULTS]:
        return state.terminate, state.result

    def postprocess(self, fn, y, aux, args, options, state: State, tags, result):
        # `step` returns the auxiliary data of the point that it started from.
        if jax.tree.leaves(aux):
            _, aux = fn(y, args)
        # Do not count a last linearisation that only found that the run was over.
        own = {"num_steps": state.counts.num_feature_updates}
        stats: dict[str, Any] = own | statistics(state.counts)
        if state.rows is not None:
            stats["history"] = state.rows
        return y, aux, stats


_rows = operator.attrgetter("rows")


def _as_in(problem: Quadratic | None, parameters: PyTree[Array]) -> PyTree[Array]:
    """Return parameters in the structure of a problem, a tree or one array."""
    if problem is None:
        return parameters
    domain = problem.jacobian.domain
    is_tree = domain.treedef == jax.tree.structure(parameters)
    return parameters if is_tree else _tree.ravel_pytree(parameters)[0]


def _completed(
    update: Update, objective: AbstractObjective, lin: Linearisation
) -> tuple[Scalar, PyTree[Array], Scalar]:
    """Return the gradient's norm, the step and its norm, computed if they are missing."""
    gradient_norm, step_norm = update.gradient_norm, update.step_norm
    if gradient_norm is None:
        gradient_norm = _tree.norm(lin.vjp(objective.gradient(lin.outputs)))
    step = jax.tree.map(jnp.subtract, update.y, lin.point)
    if step_norm is None:
        step_norm = _tree.norm(step)
    return gradient_norm, step, step_norm


def _with_stride(
    state: State, stride: Stride, loss: Scalar, back: Bool[Array, ""]
) -> State:
    """Return the state after a part of a step, with `back` if the last one was undone."""
    undone = jnp.where(back, 1, 0)
    report, counts = state.report, state.counts
    return eqx.tree_at(
        lambda s: (
            s.stride,
            s.report.loss,
            s.report.step_norm,
            s.counts.num_accepted_steps,
            s.counts.num_rejected_steps,
        ),
        state,
        (
            stride,
            loss.astype(report.loss.dtype),
            stride.length * report.step_norm,
            counts.num_accepted_steps - undone,
            counts.num_rejected_steps + undone,
        ),
    )


def linearised(
    fn, y, args, has_aux: bool, memory_budget: int
) -> tuple[Linearisation, Any]:
    if has_aux:
        return linearise(fn, y, args, has_aux=True, memory_budget=memory_budget)
    return linearise(fn, y, args, memory_budget=memory_budget), None


def row_of(state: State) -> dict[str, Array]:
    """Return a row of the history, but with the loss after the step."""
    row = {name: getattr(state.report, name) for name in Report.__dataclass_fields__}
    return row | {"num_feature_updates": state.counts.num_feature_updates.astype(float)}


def statistics(counts: Counts) -> dict[str, Array]:
    return {name: getattr(counts, name) for name in Counts.__dataclass_fields__}
