"""Levenberg-Marquardt: the damping adapts to how well the linearisation predicts."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, Int, PyTree, Scalar, ScalarLike

from .. import _tree
from .._checks import as_scalar, check_finite_positive, check_flag, check_fraction
from .._jacobian import Cost
from .._linearisation import Linearisation
from .._objective import AbstractObjective
from .._passes import Passes
from .._problem import Quadratic
from .._subproblem import (
    AbstractSubproblem,
    AbstractWay,
    check_form,
    check_method,
    Early,
    Form,
    Method,
    problem_of,
    ProxLinear,
    way_of,
)
from ..damping import AbstractDamping, LongestStep, Nielsen, SKIPPED, slowly
from ..filters import Tikhonov
from ._base import AbstractGaussNewton, Evaluate, State, Update
from ._between_bounds import between_bounds
from ._scaling import check_scaling, first_scale, Measured, Scaling
from ._stepping import check_quadratic
from ._trials import try_dampings
from ._verdict import rounding_of_loss


# What an exact step is worth beside one by conjugate gradients that stop early: so many
# seconds, and so many times as many as that takes. Across batches it adds no accuracy,
# nor where the loss is not squared error.
_EXACT, _EXACT_OF_NETWORK = (10.0, 10.0), (2e-3, 2.0)
# The default rule where another trial is dear.
_ONE_TRIAL = LongestStep(1e-4, num_trials=1)
# The first damping on a full batch and across batches: on a full batch a rejected trial
# costs next to nothing.
_FIRST_DAMPING = 1e-3
_FIRST_DAMPING_ACROSS = 1.0
# The curvature of so few examples is that of no others, and what one step gains on the
# next is mostly noise: by steps as long as those of large batches a ReLU network is dead
# after three, and by a damping that changes as fast it stands still after a thousand.
_FEW_EXAMPLES = 8
# Of the size of gains on the next batches so much is remembered.
_MEMORY = 0.9


class _Memory(eqx.Module):
    state: PyTree  # of the damping
    scale: PyTree[Array] | None
    first_gradient: Float[Array, ""]  # its norm; negative before the first linearisation
    tolerance: Float[Array, ""]  # of conjugate gradients
    last: "_Last | None" = None  # across batches


class _Last(eqx.Module):
    """The last batch's step, for the next batch to judge."""

    step: PyTree[Array]  # zero where none was taken
    predicted: Float[Array, ""]
    ratio: Float[Array, ""]  # of the decrease to the predicted, on its own batch
    size: Float[Array, ""]  # of what steps have lately gained or lost on the next batches

    def judged(self, gained: Scalar, few: float) -> tuple[Scalar, Scalar]:
        """By what it has gained on the next batch: the damping's factor, and the size of
        such gains now.

        - `few`: how much less a batch says than one of many examples.
        """
        known = (self.predicted > 0) & jnp.isfinite(gained) & (gained != 0)
        before = jnp.where(self.size > 0, self.size, jnp.abs(gained))
        size = _MEMORY * before + (1 - _MEMORY) * jnp.abs(gained)
        factor = slowly(gained / jnp.where(known, size, 1), self.ratio) ** (1 / few)
        return jnp.where(known, factor, 1), jnp.where(known, size, self.size)


class LevenbergMarquardt(AbstractGaussNewton):
    r"""Damped Gauss-Newton whose damping adapts, and whose failing steps are rejected.

    Each outer step linearises once and factorises once. From that it looks for the
    longest step that keeps a quarter of its promise: another trial costs a filter, a
    product and an evaluation. Steps follow the curvature of the model's manifold to
    second order (geodesic acceleration), which shortens the way through narrow valleys
    many times; a step whose correction is nearly as long as itself is too long.

    **Arguments:**

    - `rtol`, `atol`: it has converged when a step changes each parameter `y` by less
        than `atol + rtol * |y|`, and the residuals, in `norm`, likewise.
    - `norm`: `optimistix.max_norm` by default.
    - `damping`: the rule by which $\lambda$ changes, one of `gnlin.damping`; a
        number is that of [`gnlin.damping.Nielsen`][], the first $\lambda$ relative to the
        curvature along the gradient. By default [`gnlin.damping.LongestStep`][], with one
        trial where a trial is dear; across batches of n examples 1 + 8 / n.
    - `scaling`: the $D$ of $\frac\lambda2\lVert D\delta\rVert^2$, from the norms of the
        Jacobian's columns: `"root"`, their square roots (below a millionth of the
        largest, a multiple of the norms); `"marquardt"`, the norms themselves; `"more"`,
        the largest norms lately (Moré, 1978), of which earlier ones fade by 0.8 an outer
        step; or `"identity"`, none. The first three need the dense Jacobian. By default
        `"root"`, or `"identity"` across batches and where the method is matrix-free.
    - `acceleration`: whether to add the second-order correction, for one more evaluation
        a trial; by default where the Jacobian is at hand, and
        not by the sparse factorisations, which are made again for it.
    - `tolerance`: to which conjugate gradients solve, where the method is matrix-free, as
        in [`gnlin.TruncatedGaussNewton`][]; on a full batch no more than the square root
        of what is left of the gradient.
    - `form`: of a loss that is not squared error, as in [`gnlin.GaussNewton`][]. The
        prox-linear form has the scaling `"identity"` and no acceleration.
    - `method`: how a step is computed: `"svd"`, `"eigh"`, `"kernel"`, `"curvature"`,
        `"schur"`, `"sparse"` or `"matrix-free"`; `"auto"` is matrix-free where the
        Jacobian at hand costs many times as much, or more than the memory budget; or a
        [`gnlin.MixedPrecision`][], a [`gnlin.NystromKernel`][], one of
        [`gnlin.preconditioners`][], with which conjugate gradients solve, or a solver of
        lineax.
        See "How to choose" in the documentation.
    - `memory_budget`: bytes that the largest matrix may take.
    - `bounds`, `retraction`, `verbose`: as in [`gnlin.AbstractGaussNewton`][].

    !!! example

        ```python
        solution = optx.least_squares(residuals, gnlin.LevenbergMarquardt(), y0, args)
        ```

    Across batches each step is one trial: one that does not lower its batch's loss is
    skipped, and the damping changes slowly, judged by the step's own batch and the next.

    ??? cite "References"

        J. J. Moré, *The Levenberg-Marquardt algorithm: implementation and theory* (1978).

        H. B. Nielsen, *Damping parameter in Marquardt's method*, IMM-REP-1999-05.

        J. Martens and R. Grosse, *Optimizing neural networks with Kronecker-factored
        approximate curvature*, ICML (2015), section 6.5.

        M. K. Transtrum and J. P. Sethna, *Improvements to the Levenberg-Marquardt
        algorithm for nonlinear least-squares minimization*, arXiv:1201.5885 (2012).
    """

    rtol: float = 1e-9
    atol: float = 1e-12
    norm: Callable[[PyTree], Scalar] = optx.max_norm
    damping: ScalarLike | AbstractDamping | None = eqx.field(
        default=None, converter=as_scalar, kw_only=True
    )
    scaling: Scaling | None = eqx.field(default=None, kw_only=True)
    acceleration: bool | None = eqx.field(default=None, kw_only=True)
    tolerance: ScalarLike = eqx.field(default=0.1, converter=as_scalar, kw_only=True)
    form: Form = eqx.field(default="quadratic", kw_only=True)
    method: Method = eqx.field(default="auto", kw_only=True)

    def __check_init__(self):
        if not isinstance(self.damping, AbstractDamping | None):
            check_finite_positive("damping", self.damping)
        check_method(self.method)
        check_form(self.form, self.method)
        check_fraction("tolerance", self.tolerance)
        if self.acceleration and self.form == "prox-linear":
            raise ValueError(
                'The "prox-linear" form has no geodesic acceleration: leave '
                "`acceleration` out."
            )
        if self.scaling is not None:
            check_scaling(self.scaling, self.method, self.form)
        if self.acceleration is not None:
            check_flag("acceleration", self.acceleration)

    def first_memory(self, y: PyTree[Array], dtype: jnp.dtype) -> _Memory:
        one, scale = jnp.ones((), dtype), first_scale(self.scaling or "root", y)
        return _Memory(self._rule().init(dtype), scale, -one, one)

    def check_curvature_batch(self) -> None:
        check_quadratic(self.form)

    def start_stream(
        self, y: PyTree[Array], outputs: PyTree[jax.ShapeDtypeStruct]
    ) -> State:
        state = self.start(y, outputs)
        zero = jnp.zeros((), state.report.loss.dtype)
        last = _Last(_tree.zeros_like(y), zero, zero, zero)
        damping = self._rule(outputs).init(zero.dtype)
        memory = _Memory(
            damping,
            state.memory.scale,
            state.memory.first_gradient,
            state.memory.tolerance,
            last,
        )
        return eqx.tree_at(lambda s: s.memory, state, memory)

    def update(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        memory: _Memory,
        num_steps: Int[Array, ""],
    ) -> Update:
        problem = problem_of(self.form, objective, lin)
        cost = problem.jacobian.cost()
        rule = self._rule(lin.outputs if objective.is_sample else None)
        by_default = self.damping is None and isinstance(rule, LongestStep)
        if by_default and cost.reads:  # Each trial may be a sparse factorisation.
            rule = _ONE_TRIAL
        # The damping of a tall problem may fall so far that squaring the condition number
        # does harm.
        m, p = cost.shape
        kind = Tikhonov(1.0 if p > m else 0.0)
        way = self._way(objective, problem, kind, rule.num_trials)
        if by_default and way.stops_early:  # It is one by conjugate gradients.
            rule = _ONE_TRIAL
        scaling, method = self._scaling(objective, cost, way), self.method
        if way.stops_early and method == "auto":
            method = way.method
        acceleration = self.acceleration
        if acceleration is None:
            acceleration = self.form == "quadratic" and not way.solves_anew
        rows, as_tree = Passes(), lambda parameters: parameters
        if scaling != "identity":
            rows, lin = cost.rows, lin.materialise()
            if scaling != "more" and not objective.is_sample:
                lin, as_tree = lin.in_one_array()
            problem = problem_of(self.form, objective, lin)
        measured = Measured.of(problem, scaling, memory.scale)
        subproblem = measured.chosen(kind, rule.num_trials, method)
        if scaling == "more":
            memory = eqx.tree_at(lambda m: m.scale, memory, measured.scale)
        if way.stops_early:
            memory, subproblem = self._truncated(objective, subproblem, memory)
        if objective.is_sample:
            return self._one_of_many(
                objective,
                lin,
                evaluate,
                subproblem,
                memory,
                rule,
                rows + measured.passes,
            )

        def again(lin: Linearisation, damping: Scalar) -> PyTree[Array]:
            held = measured.of_another(problem_of(self.form, objective, lin))
            return held.chosen(kind, 1, method).solve(Early(damping)).step

        problem = measured.problem
        in_memory = problem if scaling != "identity" else None
        assert not isinstance(in_memory, ProxLinear)  # which has no scales
        finite = jnp.isfinite(subproblem.gradient_norm)
        finite &= jnp.isfinite(objective.value(lin.outputs))
        tried = try_dampings(
            objective,
            lin,
            lambda y: evaluate(as_tree(y)),
            subproblem,
            rule,
            memory.state,
            acceleration,
            again,
            in_memory,
            finite,
        )
        finite &= ~jnp.isnan(tried.damping)
        step = _tree.where(tried.found, tried.step, _tree.zeros_like(tried.step))
        return Update(
            y=as_tree(lin.moved(step)),
            outputs=_tree.where(tried.found, tried.outputs, lin.outputs),
            memory=eqx.tree_at(lambda m: m.state, memory, tried.state),
            gradient_norm=subproblem.gradient_norm,
            step_norm=_tree.norm(step),
            damping=tried.damping,
            num_inner_steps=tried.num_inner_steps,
            passes=rows + measured.passes + subproblem.passes + tried.passes,
            num_accepted=jnp.where(tried.found, 1, 0),
            num_rejected=tried.num_tried - jnp.where(tried.found, 1, 0),
            left=as_tree(tried.step),
            problem=in_memory,
            searched=True,
            stuck=finite & ~tried.found,
            result=optx.RESULTS.where(
                finite, optx.RESULTS.successful, optx.RESULTS.nonfinite
            ),
        )

    def _truncated(
        self,
        objective: AbstractObjective,
        subproblem: AbstractSubproblem,
        memory: _Memory,
    ) -> tuple[_Memory, AbstractSubproblem]:
        """To be solved so well by conjugate gradients."""
        dtype = memory.tolerance.dtype
        gradient = subproblem.gradient_norm.astype(dtype)
        first = jnp.where(memory.first_gradient < 0, gradient, memory.first_gradient)
        tolerance = jnp.asarray(self.tolerance, dtype)
        if not objective.is_sample:
            # So that it converges faster than linearly (Nocedal and Wright, 2006,
            # section 7.1): the gradient relative to the first. In a curved valley it is
            # large again after each long step: what has been tight stays so.
            left = jnp.fmin(tolerance, jnp.sqrt(gradient / first))
            tolerance = jnp.fmin(left, memory.tolerance)
        memory = eqx.tree_at(
            lambda m: (m.first_gradient, m.tolerance), memory, (first, tolerance)
        )
        return memory, subproblem.truncated(tolerance)

    def _one_of_many(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        subproblem: AbstractSubproblem,
        memory: _Memory,
        rule: AbstractDamping,
        passes: Passes,
    ) -> Update:
        """One trial on one batch: a step that does not lower its loss is skipped.

        The damping changes slowly, by what the last step did to its own batch, and to
        this one, which it had not seen: a step that fits its own batch and makes the next
        one worse was too long, however well it was predicted.
        """
        last: _Last = memory.last  # type: ignore[assignment]
        before = evaluate(_tree.axpy(-1, last.step, lin.point))
        dtype = memory.tolerance.dtype
        damping = rule.damping(memory.state, subproblem, lin.point)
        gained = objective.decrease(before, lin.outputs).astype(dtype)
        factor, size = last.judged(gained, _few(lin.outputs))
        damping *= factor
        finite = jnp.isfinite(subproblem.gradient_norm) & jnp.isfinite(damping)
        finite &= jnp.isfinite(objective.value(lin.outputs))

        answer = subproblem.solve(Early(damping))
        step = _tree.cast_like(answer.step, lin.point)
        predicted = subproblem.predicted(answer, damping)
        if lin.box is not None:
            step, predicted = between_bounds(objective, lin, step)
            predicted = predicted.astype(dtype)
        y = lin.moved(step)
        outputs = evaluate(y)
        actual = objective.decrease(lin.outputs, outputs).astype(dtype)
        loss = objective.value(lin.outputs).astype(dtype)
        rounding = rounding_of_loss(loss, None, lin.point)
        noise = predicted <= rounding
        fell = (actual >= 0) | (noise & (actual >= -rounding))
        good = finite & _tree.all_finite((y, outputs)) & fell
        step = _tree.where(good, step, _tree.zeros_like(step))
        ratio = jnp.where(noise, 1, actual / jnp.where(predicted > 0, predicted, 1))
        taken = _Last(step, jnp.where(good, predicted, 0), ratio, size)
        return Update(
            y=_tree.where(good, y, lin.point),
            outputs=_tree.where(good, outputs, lin.outputs),
            memory=eqx.tree_at(
                lambda m: (m.state.damping, m.last),
                memory,
                (jnp.where(good, damping, SKIPPED * damping), taken),
            ),
            gradient_norm=subproblem.gradient_norm,
            step_norm=_tree.norm(step),
            damping=damping,
            num_inner_steps=answer.num_inner_steps,
            passes=passes + subproblem.passes + answer.passes,
            num_accepted=jnp.where(good, 1, 0),
            num_rejected=jnp.where(good, 0, 1),
            result=optx.RESULTS.where(
                finite, optx.RESULTS.successful, optx.RESULTS.nonfinite
            ),
        )

    def _rule(self, outputs: PyTree | None = None) -> AbstractDamping:
        """That of one batch; or, across batches, of which `outputs` are, what says where
        it starts."""
        damping, across = self.damping, outputs is not None
        if isinstance(damping, AbstractDamping):
            if across and not isinstance(damping, Nielsen):
                raise ValueError(
                    f"Across batches the damping changes slowly, and not by {damping}: "
                    "pass a number, the first damping, or one batch of all data."
                )
            return damping
        if damping is None and across:
            damping = _FIRST_DAMPING_ACROSS * _few(outputs)
        if damping is None and not across and self.form == "quadratic":
            return LongestStep()
        return Nielsen(_FIRST_DAMPING if damping is None else damping)

    def _way(
        self,
        objective: AbstractObjective,
        problem: Quadratic | ProxLinear,
        kind: Tikhonov,
        num_trials: int,
    ) -> type[AbstractWay]:
        """How the linearised problem is solved."""
        if self.scaling in (None, "identity"):  # else it takes the rows
            is_exact = objective.is_quadratic and not objective.is_sample
            kind = Early(kind.damping, *(_EXACT if is_exact else _EXACT_OF_NETWORK))
        return way_of(problem, kind, num_trials, self.method)

    def _scaling(
        self, objective: AbstractObjective, cost: Cost, way: type[AbstractWay]
    ) -> Scaling:
        if self.form == "prox-linear":
            return "identity"
        if self.scaling is not None:
            return self.scaling
        # It needs the rows themselves. Of a small batch it is mostly noise: networks on
        # scaled inputs do better without, recurrent ones by far.
        unscaled = way.stops_early or objective.is_sample or not cost.columns_fit
        return "identity" if unscaled else "root"


def _few(outputs: PyTree) -> float:
    """How much less a batch says than one of many examples."""
    return 1 + _FEW_EXAMPLES / max(x.shape[0] for x in jax.tree.leaves(outputs))
