"""The loop that all solvers share: linearise, solve the linearised problem, step."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, Bool, Int, PyTree, Scalar

from .._common import _tree
from .._common._checks import check_callable, check_count, check_nonnegative
from .._common._history import History, of_full_batch
from .._jacobian import DEFAULT_MEMORY_BUDGET
from .._linearisation._admitted import check_derivative, check_outputs, check_parameters
from .._linearisation._bounds import Box, check_pair
from .._linearisation._linearisation import Linearisation, linearised
from .._linearisation._objective import AbstractObjective, SumOfSquares
from .._linearisation._recognised import aux_of, check_number, recognised
from .._linearisation._retraction import check_fits, not_moved, Retraction
from ..losses._robust import faded, reweighted
from ._state import checked, Detour, Evaluate, num_rows_of, Report, State, Update
from ._stride import Stride
from ._termination import verdict
from ._verbose import check_verbose, print_row


def _as_bool(flag: Any) -> Any:
    """Convert a boolean of NumPy, which would be traced as an array."""
    return bool(flag) if isinstance(flag, np.bool_) else flag


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
        norm of the first residuals, or of the targets, is below 1, `atol` is multiplied
        by it.
    - `norm`: the norm in this test, `optimistix.max_norm` by default.
    - `memory_budget`: the most bytes that a matrix may take.
    - `bounds`: bounds `(lower, upper)` on the parameters, each a number, `None`, or a
        tree with the parameters' structure, in which a number may stand for a whole
        subtree. A list of numbers, of `None` or of such rows may stand for an array, and
        an array of numbers for a list of leaves, unless it is a bound of each of them by
        its shape. All points satisfy the bounds, and parameters with equal bounds stay
        constant. The functions of gnlin refuse a start out of bounds, and
        `optimistix.least_squares` moves it to the nearest point within. A parameter at a
        bound that descent would cross has no column in the Jacobian. A step that crosses
        other bounds is followed to the first one, and the problem is solved again for the
        remaining parameters. The default adjoint of `optimistix.least_squares` gives
        wrong derivatives of a minimum at a bound, or with a `retraction`: pass
        [`gnlin.methods.ImplicitAdjoint`][].
    - `retraction`: a function for parameters that are not moved by addition, such as
        rotations and poses. `retraction(row, step)` returns the new row of an array of
        parameters. The step has the shape of the row, and its unused entries stay zero. A
        tree of such functions has the parameters' structure, with `None` for parameters
        that are moved by addition. An array with one axis is a single row, such as one
        pose, unless the function acts on each entry by itself. The start is first moved
        by a step of zero, which may normalise it; a second one must not move it further.
        Retractions require a full batch and no bounds.
    - `verbose`: whether to print a line for each step, also within a compiled program. It
        may be a function, which is called while the program is traced, as in optimistix's
        solvers: `verbose(num_steps=("Num steps", number), loss=("Loss", value), ...)`,
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

    # Whether `update` returns points between the bounds. Others are clipped.
    _keeps_bounds: ClassVar[bool] = False

    rtol: float = eqx.field(default=1e-9, kw_only=True)
    atol: float = eqx.field(default=1e-12, kw_only=True)
    norm: Callable[[PyTree], Scalar] = eqx.field(default=optx.max_norm, kw_only=True)
    memory_budget: int = eqx.field(default=DEFAULT_MEMORY_BUDGET, kw_only=True)
    bounds: Any = eqx.field(default=None, kw_only=True)
    retraction: Any = eqx.field(default=None, kw_only=True)
    verbose: bool | Callable[..., None] = eqx.field(
        default=False, converter=_as_bool, kw_only=True
    )

    def __check_init__(self):
        check_nonnegative("rtol", self.rtol)
        check_nonnegative("atol", self.atol)
        check_callable("norm", self.norm, "a function of a pytree", "optimistix.max_norm")
        check_count("memory_budget", self.memory_budget)
        check_verbose(self.verbose)
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
            check_fits(self.retraction, y)
        numbers = eqx.tree_at(lambda s: s.bounds, self, None, is_leaf=lambda x: x is None)
        # A schedule or a filter, which is callable, may hold arrays of its own.
        fields = jax.tree_util.tree_leaves_with_path(numbers, is_leaf=callable)
        for path, value in fields:
            if eqx.is_array(value) and value.ndim > 0:
                name = jax.tree_util.keystr(path).removeprefix(".")
                raise ValueError(
                    f"`{name}` must be a scalar, but has the shape {value.shape}; to try "
                    "several values use `jax.vmap`."
                )
        dtype = _tree.dtype((y, outputs))
        return State.start(self.first_memory(y, dtype), dtype)

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
        check_derivative(lin.is_flat)
        num_steps = state.counts.num_feature_updates
        if same_examples and getattr(self, "form", "quadratic") == "quadratic":
            objective = reweighted(objective, state.reweighted)
        lin = self.placed(objective, lin)
        update = self.update(objective, lin, evaluate, state.memory, num_steps)
        update = checked(type(self).__name__, update, lin, state)
        if self.bounds is not None and not self._keeps_bounds:
            y = self.admissible(update.y)
            update = dataclasses.replace(update, y=y, outputs=evaluate(y), step_norm=None)
        return self.ended(objective, lin, update, state, same_examples)

    def ended(
        self, objective, lin, update: Update, state: State, same_examples: bool = True
    ) -> tuple[PyTree[Array], State]:
        """Return the point and the state after an update, unless the run is over at the
        linearisation."""
        dtype, detour = state.report.loss.dtype, self.detour(state)
        here, no = self.outputs_of_run(lin, state), jnp.array(False)
        loss = objective.value(here).astype(dtype)
        new_loss = objective.value(update.outputs).astype(dtype)
        is_first = state.counts.num_feature_updates == 0
        first_loss = jnp.where(is_first, loss, state.first_loss)
        state = dataclasses.replace(state, first_loss=first_loss)
        step = jax.tree.map(jnp.subtract, update.y, lin.point)
        gradient_norm, step_norm = update.gradient_norm, update.step_norm
        if gradient_norm is None:
            gradient_norm = _tree.norm(lin.vjp(objective.gradient(lin.outputs)))
        if step_norm is None:
            step_norm = _tree.norm(step)
        memory = update.memory
        if same_examples:
            where = lin, here, no if detour is None else detour.is_on
            arrived, state = verdict(
                self, objective, *where, update, gradient_norm, step, state, loss
            )
        else:
            arrived = no
            state = dataclasses.replace(state, settled=no, result=update.result)
            if detour is not None:  # Losses of other examples cannot judge a detour.
                memory = eqx.tree_at(lambda m: m.detour.is_on, memory, no)
        broken = no
        if not update.searched:  # A search accepts finite points only.
            finite = _tree.all_finite((new_loss, update.y, update.outputs))
            broken = ~finite & (update.result == optx.RESULTS.successful)
        needless = arrived & ~is_first  # A run that starts at a minimum takes one step.
        stays = needless | broken
        if self.retraction is not None:  # It may not be finite for a step of zero.
            stays |= ~_tree.all_finite(update.y)
        report = Report(
            loss=jnp.where(stays, loss, new_loss),
            gradient_norm=gradient_norm.astype(dtype),
            step_norm=jnp.where(broken, 0, step_norm.astype(dtype)),
            damping=jnp.asarray(update.damping, dtype),
            num_inner_steps=jnp.asarray(update.num_inner_steps, float),
        )
        accepted = jnp.where(broken, 0, update.num_accepted)
        rejected = jnp.where(broken, 1, update.num_rejected)
        counts = state.counts.plus(
            jnp.where(needless, 0, 1),
            update.num_inner_steps,
            update.passes.jvps,
            update.passes.vjps,
            jnp.where(needless, 0, accepted),
            jnp.where(needless, 0, rejected),
        )
        new = dataclasses.replace(
            state,
            memory=memory,
            report=report,
            counts=counts,
            reweighted=faded(state.reweighted, loss, new_loss),
            terminate=update.terminate | arrived,
            result=optx.RESULTS.where(broken, optx.RESULTS.nonfinite, state.result),
        )
        return _tree.where(stays, lin.point, update.y), new

    def detour(self, state: State) -> Detour | None:
        """Return where the next linearisation is, if it may be on a detour."""
        return None

    def next_point(self, y: PyTree[Array], state: State) -> PyTree[Array]:
        """Return the point of the next linearisation."""
        detour = self.detour(state)
        return y if detour is None else detour.next_point(y)

    def outputs_of_run(self, lin: Linearisation, state: State) -> PyTree[Array]:
        """Return the outputs at the run's own point, given the linearisation."""
        detour = self.detour(state)
        return lin.outputs if detour is None else detour.outputs_of_run(lin.outputs)

    #
    # Bounds and retractions
    #

    def admissible(self, y: PyTree[Array]) -> PyTree[Array]:
        """Return the nearest point between the bounds, or the point that the retraction
        of a step of zero leads to, such as a quaternion of norm 1. If it is not finite,
        return y itself."""
        moved = y
        if self.retraction is not None:
            moved = not_moved(self.retraction, y)
        elif self.bounds is not None:
            moved = Box.of(self.bounds, y).clip(y)
        return y if moved is y else _tree.where(_tree.all_finite(moved), moved, y)

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
    ) -> tuple[PyTree[Array], State, PyTree[Array], Any]:
        """Take one step on one batch with the outputs `fn(y, args)`. Return `(y, state,
        outputs, aux)`, with the batch's outputs before the step. By default the step is
        an outer step, shortened if there is a stride."""
        evaluate = lambda y_: fn(y_, args)[0] if has_aux else fn(y_, args)
        stride, back = state.stride, jnp.array(False)
        if stride is not None:
            # A loop over the two points compiles the function once.
            both = jax.tree.map(lambda *points: jnp.stack(points), stride.point, y)
            outputs = jax.lax.map(evaluate, both)
            before, now = (jax.tree.map(lambda x, i=i: x[i], outputs) for i in (0, 1))
            stride, back = stride.judged(objective, before, now)
            y = _tree.where(back, stride.point, y)
            memory = self.after_judgement(objective, state.memory, stride, back)
            state = dataclasses.replace(state, memory=memory)
        lin, aux = linearised(fn, y, args, has_aux, self.memory_budget)
        new_y, state = self.advance(objective, lin, evaluate, state, same_examples=False)
        state = eqx.tree_at(lambda s: s.terminate, state, jnp.array(False))
        if stride is not None:
            new_y = stride.along(y, new_y)
            outputs = evaluate(new_y)
            stride = stride.after(y, objective.decrease(lin.outputs, outputs))
            state = state.after_part(stride, objective.value(outputs), back)
        return new_y, state, lin.outputs, aux

    def after_judgement(self, objective, memory: PyTree, stride: Stride, back) -> PyTree:
        """Return the memory after a batch has judged the last step (`Stride.judged`)."""
        return memory

    def linearisation_point(self, state: State) -> PyTree[Array] | None:
        """Return the linearisation point if it is kept across batches, or `None`."""
        return None

    #
    # The interface to optimistix
    #

    def init(self, fn, y, args, options, f_struct, aux_struct, tags=None) -> State:
        if not isinstance(self, AbstractGaussNewton):  # called on a class
            raise ValueError(
                "The class of a solver was given: write brackets after it, as in "
                "`gnlin.LevenbergMarquardt()`."
            )
        num_rows = num_rows_of(options or {})
        check_number(fn, y, args, f_struct)
        state = self.start(y, f_struct)
        return state if num_rows is None else state.with_rows(num_rows)

    def step(
        self, fn, y, args, options, state: State, tags
    ) -> tuple[PyTree[Array], State, Any]:
        y, posed = self.admissible(y), recognised(fn, y, args)
        point = self.next_point(y, state)
        fixed = self.memory_budget, (options or {}).get("jac")
        if posed is None:
            lin, aux = linearised(fn, point, args, True, *fixed)
            evaluate = lambda y_: fn(y_, args)[0]
            objective = SumOfSquares()
        else:
            outputs, inputs, objective = posed
            lin, _ = linearised(outputs, point, inputs, False, *fixed)
            aux, evaluate = aux_of(fn, y, args), lambda y_: outputs(y_, inputs)
        y, after = self.advance(objective, lin, evaluate, state)
        at = state.counts.num_feature_updates
        moved = after.counts.num_feature_updates > at
        row = after.row() | {"loss": objective.value(self.outputs_of_run(lin, state))}
        print_row(self.verbose, row, after.counts.num_feature_updates, moved)
        return y, after.with_row(row, at, moved), aux

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
        stats: dict[str, Any] = own | state.counts.by_name()
        if state.rows is not None:
            stats["history"] = History(of_full_batch(state.rows))
        return y, aux, stats
