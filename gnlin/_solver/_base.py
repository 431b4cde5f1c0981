"""The loop that all solvers share: linearise, solve this far, step."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from equinox import AbstractVar
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar, ScalarLike

from .. import _tree
from .._linearisation import check_outputs, check_parameters, Linearisation, linearise
from .._objective import AbstractObjective, SumOfSquares
from .._subproblem import AbstractSubproblem, Answer


class Report(eqx.Module):
    """One outer step, for the history.

    - `loss`: at the new point.
    - `gradient_norm`: of the loss, at the linearisation point.
    - `step_norm`: |delta|; 0 where no step was taken.
    - `damping`: lambda of that step; 0 for a solver without one.
    - `num_inner_steps`: steps on the subproblem.
    """

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    step_norm: Float[Array, ""]
    damping: Float[Array, ""]
    num_inner_steps: Float[Array, ""]


class Counts(eqx.Module):
    """What the run has taken so far. Inner steps are a float: they pass 2^31 soon."""

    num_feature_updates: Int[Array, ""]
    num_inner_steps: Float[Array, ""]
    num_jvps: Float[Array, ""]
    num_vjps: Float[Array, ""]
    num_accepted_steps: Int[Array, ""]
    num_rejected_steps: Int[Array, ""]


def increased(count: Array, *more: ScalarLike) -> Array:
    """A count, and more of any dtypes."""
    return sum((jnp.asarray(each, count.dtype) for each in more), count)


class State(eqx.Module):
    # What the solver itself carries from one linearisation to the next
    memory: PyTree
    # Told to the user
    report: Report
    counts: Counts
    # Used for termination
    terminate: Bool[Array, ""]
    result: optx.RESULTS


class Update(eqx.Module):
    """What a solver made of one linearisation: the next point, and how it came there."""

    y: PyTree[Array]
    outputs: PyTree[Array]
    step: PyTree[Array]  # zero where none was taken
    step_norm: Scalar
    memory: PyTree
    gradient_norm: Scalar
    damping: ScalarLike
    num_inner_steps: ScalarLike
    num_jvps: ScalarLike
    num_vjps: ScalarLike
    num_accepted: ScalarLike
    num_rejected: ScalarLike
    terminate: Bool[Array, ""]
    result: optx.RESULTS


Evaluate = Callable[[PyTree[Array]], PyTree[Array]]


class AbstractGaussNewton(optx.AbstractLeastSquaresSolver):
    """Base class of all solvers here: linearise, solve the linearised problem so far,
    step.

    A solver of your own provides `rtol`, `atol`, `norm`, the memory it starts with, and
    `update`.
    """

    rtol: AbstractVar[float]
    atol: AbstractVar[float]
    norm: AbstractVar[Callable[[PyTree], Scalar]]

    def first_memory(self, y: PyTree[Array], dtype: jnp.dtype) -> PyTree:
        """What `update` is given as `memory` at the first linearisation."""
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
        """Solve the linearised problem, as far as this solver does, and step.

        - `objective`: what is minimised, as a function of the outputs.
        - `lin`: the outputs' linearisation at the current point.
        - `evaluate`: the outputs at any other point.
        - `memory`: as the previous update left it.
        - `num_steps`: the outer steps made so far.
        """

    def start(self, y: PyTree[Array], outputs: PyTree[jax.ShapeDtypeStruct]) -> State:
        """The state before the first step; nothing is evaluated."""
        check_parameters(y)
        check_outputs(outputs)
        for name, value in vars(self).items():
            if eqx.is_array(value) and value.ndim > 0:
                raise ValueError(
                    f"`{name}` must be a scalar, but has the shape {value.shape}; for a "
                    "sweep use `jax.vmap` over it."
                )
        dtype = _tree.dtype((y, outputs))
        zero = jnp.zeros((), dtype)
        count, counter = jnp.zeros((), jnp.result_type(float)), jnp.array(0)
        return State(
            memory=self.first_memory(y, dtype),
            report=Report(zero, zero, zero, zero, count),
            counts=Counts(counter, count, count, count, counter, counter),
            terminate=jnp.array(False),
            result=optx.RESULTS.successful,
        )

    def advance(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        state: State,
    ) -> tuple[PyTree[Array], State]:
        """One outer step from a linearisation."""
        num_steps = state.counts.num_feature_updates
        update = self.update(objective, lin, evaluate, state.memory, num_steps)
        dtype = state.report.loss.dtype
        report = Report(
            loss=objective.value(update.outputs).astype(dtype),
            gradient_norm=update.gradient_norm.astype(dtype),
            step_norm=update.step_norm.astype(dtype),
            damping=jnp.asarray(update.damping, dtype),
            num_inner_steps=jnp.asarray(update.num_inner_steps, float),
        )
        so_far = state.counts
        counts = Counts(
            so_far.num_feature_updates + 1,
            increased(so_far.num_inner_steps, update.num_inner_steps),
            increased(so_far.num_jvps, update.num_jvps),
            increased(so_far.num_vjps, update.num_vjps),
            increased(so_far.num_accepted_steps, update.num_accepted),
            increased(so_far.num_rejected_steps, update.num_rejected),
        )
        state = State(update.memory, report, counts, update.terminate, update.result)
        return update.y, state

    #
    # Mini-batches
    #

    def start_stream(
        self, y: PyTree[Array], outputs: PyTree[jax.ShapeDtypeStruct]
    ) -> State:
        """The state before the first of many batches."""
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
        """One step on one batch, `fn(y, args)` its outputs: `(y, state, loss, aux)`, with
        the loss on the batch before the step. Here it is an outer step."""
        lin, aux = linearised(fn, y, args, has_aux)
        evaluate = lambda y_: fn(y_, args)[0] if has_aux else fn(y_, args)
        y, state = self.advance(objective, lin, evaluate, state)
        # What has settled on one batch has not on another.
        state = eqx.tree_at(lambda s: s.terminate, state, jnp.array(False))
        return y, state, objective.value(lin.outputs), aux

    def converged(
        self,
        y: PyTree[Array],
        step: PyTree[Array],
        residual: PyTree[Array],
        old_residual: PyTree[Array],
    ) -> Bool[Array, ""]:
        """Whether a step was within the tolerances, of the parameters (each by itself)
        and of the residuals (together). None is asked for below rounding."""

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
            # A step may be finite, and the point it leads to not.
            return (norm(each) < 1) & _tree.all_finite(y)

        small_change = relative(norm(change), norm(residual)) < 1
        # There may be many parameters, and mostly the residuals settle it.
        return jax.lax.cond(small_change, small_step, lambda: jnp.array(False))

    #
    # The interface to optimistix
    #

    def init(self, fn, y, args, options, f_struct, aux_struct, tags) -> State:
        if options:
            raise ValueError(
                f"The solvers of gnlin take no `options`, but {sorted(options)} were "
                "given; how a step is computed is the solver's `method`."
            )
        return self.start(y, f_struct)

    def step(
        self, fn, y, args, options, state: State, tags
    ) -> tuple[PyTree[Array], State, Any]:
        lin, aux = linearise(fn, y, args, has_aux=True)
        y, state = self.advance(SumOfSquares(), lin, lambda y_: fn(y_, args)[0], state)
        return y, state, aux

    def terminate(
        self, fn, y, args, options, state: State, tags
    ) -> tuple[Bool[Array, ""], optx.RESULTS]:
        return state.terminate, state.result

    def postprocess(self, fn, y, aux, args, options, state: State, tags, result):
        # `step` hands out the auxiliary data of the point that it started from.
        if jax.tree.leaves(aux):
            _, aux = fn(y, args)
        return y, aux, statistics(state.counts)


def linearised(fn, y, args, has_aux: bool) -> tuple[Linearisation, Any]:
    if has_aux:
        return linearise(fn, y, args, has_aux=True)
    return linearise(fn, y, args), None


def statistics(counts: Counts) -> dict[str, Array]:
    return {name: getattr(counts, name) for name in Counts.__dataclass_fields__}


def step_if_finite(
    solver: AbstractGaussNewton,
    objective: AbstractObjective,
    lin: Linearisation,
    evaluate: Evaluate,
    subproblem: AbstractSubproblem,
    answer: Answer,
    *,
    search: optx.AbstractSearch | None = None,
    memory: PyTree = None,
    damping: ScalarLike = 0.0,
) -> Update:
    """Take a subproblem's answer, or as much of it as a search says, unless it leads away
    from the finite numbers."""
    y, outputs = lin.point, lin.outputs
    step, result = answer.step, answer.result
    if search is not None:
        step, found = _searched(
            search, objective, lin, evaluate, subproblem.gradient(), step
        )
        missed = found | (result != optx.RESULTS.successful)
        result = optx.RESULTS.where(missed, result, optx.RESULTS.nonlinear_divergence)
    solved = result == optx.RESULTS.successful
    step_norm = _tree.norm(step)
    # A damping that is not finite stands for hyperparameters out of their range.
    at_point = jnp.isfinite(subproblem.gradient_norm) & jnp.isfinite(damping)
    sound = at_point & jnp.isfinite(step_norm)
    candidate = _tree.where(sound & solved, _tree.axpy(1, step, y), y)
    new_outputs = evaluate(candidate)
    finite = sound & _tree.all_finite((new_outputs, outputs))
    good = finite & solved
    settled = solver.converged(
        candidate, step, objective.residual(new_outputs), objective.residual(outputs)
    )
    step = _tree.where(good, _tree.cast_like(step, y), _tree.zeros_like(y))
    step_norm = jnp.where(good, step_norm, 0)
    new_y = _tree.where(good, candidate, y)
    new_outputs = _tree.where(good, new_outputs, outputs)
    result = optx.RESULTS.where(
        at_point & (finite | ~solved), result, optx.RESULTS.nonfinite
    )
    return Update(
        y=new_y,
        outputs=new_outputs,
        step=step,
        step_norm=step_norm,
        memory=memory,
        gradient_norm=subproblem.gradient_norm,
        damping=damping,
        num_inner_steps=answer.num_inner_steps,
        num_jvps=subproblem.num_jvps + answer.num_jvps,
        num_vjps=subproblem.num_vjps + answer.num_vjps,
        num_accepted=jnp.where(good, 1, 0),
        num_rejected=jnp.where(good, 0, 1),
        terminate=good & settled,
        result=result,
    )


_MAX_SEARCH_STEPS = 40
_ROUNDINGS = 10


def _searched(
    search: optx.AbstractSearch,
    objective: AbstractObjective,
    lin: Linearisation,
    evaluate: Evaluate,
    gradient: PyTree[Array],
    direction: PyTree[Array],
) -> tuple[PyTree[Array], Bool[Array, ""]]:
    """As much of a direction as an optimistix search accepts, and whether it does."""
    zero = jnp.zeros((), _tree.dtype(lin.outputs))
    y, gradient, zero = _tree.promoted((lin.point, gradient, zero))
    # All a search compares is differences, which are known better than their terms.
    here = optx.FunctionInfo.EvalGrad(zero, gradient)

    def attempt(carry):
        step_size, _, state, num_steps = carry
        candidate = _tree.axpy(step_size, direction, lin.point)
        outputs = evaluate(candidate)
        change = -objective.decrease(lin.outputs, outputs).astype(zero.dtype)
        there = optx.FunctionInfo.Eval(jnp.where(jnp.isnan(change), jnp.inf, change))
        next_size, accept, _, state = search.step(
            jnp.array(False), y, _tree.cast_like(candidate, y), here, there, state
        )
        lost = _tree.all_finite(outputs) & (jnp.abs(change) <= rounding) & flat
        accept = accept | lost
        step_size = jnp.where(accept, step_size, next_size.astype(step_size.dtype))
        return step_size, accept, state, num_steps + 1

    rounding = _ROUNDINGS * _tree.eps((lin.point, lin.outputs))
    rounding *= jnp.abs(objective.value(lin.outputs)).astype(zero.dtype)
    # A slope that is lost in the rounding of the loss is for no search to judge.
    flat = jnp.abs(_tree.dot(gradient, direction)).astype(zero.dtype) <= rounding
    state = search.init(y, jax.eval_shape(lambda: here))
    first = optx.FunctionInfo.Eval(zero)
    step_size, _, _, state = search.step(jnp.array(True), y, y, here, first, state)
    start = step_size.astype(zero.dtype), jnp.array(False), state, jnp.array(0)
    step_size, found, _, _ = jax.lax.while_loop(
        lambda carry: ~carry[1] & (carry[3] < _MAX_SEARCH_STEPS), attempt, start
    )
    return _tree.scale(step_size, direction), found
