"""Levenberg-Marquardt: the damping adapts to how well the linearisation predicts."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import as_scalar, check_finite_positive, check_flag, check_fraction
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from .._linearisation._quadratic import Quadratic
from .._subproblem import (
    AbstractMethod,
    AbstractSubproblem,
    check_form,
    check_method,
    Form,
    InexactTikhonov,
    Method,
    problem_of,
    ProxLinear,
    way_of,
)
from ..damping import AbstractDamping, LongestStep, Nielsen
from ..filters import Tikhonov
from ._base import AbstractGaussNewton
from ._on_a_batch import damps_as_drawn, MemoryAcross, step_on_a_batch
from ._scaling import check_scaling, first_scale, Measured, Scaling
from ._state import Detour, Evaluate, State, Update
from ._trials import TrialOutcome, Trials, try_dampings


# The most that an exact step may cost, in seconds or as a multiple of the time of
# conjugate gradients that stop early. A more expensive one is replaced by the latter. The
# pairs are for squared error on all data, for squared error on a sample, and for other
# losses. For these, exact steps add no accuracy. On samples they do: for Poisson's
# equation in five dimensions, at points drawn for each step (320 residuals, 200 steps),
# the error is 1.6e-5 with exact steps and 3.6e-3 without.
_EXACT, _EXACT_OF_SAMPLE, _EXACT_OF_NETWORK = (10.0, 10.0), (2e-2, 5.0), (2e-3, 2.0)
# Between bounds the curvature is inverted if the parameters are at most this many times
# as many as the residuals. Else a factorisation on each face takes fewer operations.
_MOST_WIDE = 10
# The default rule if trials are expensive.
_ONE_TRIAL = LongestStep(1e-4, num_trials=1, detours=False)
# Fits of fewer parameters make no detours. With them the median of NIST's would be 10
# steps instead of 11, and each first call would take a tenth longer.
_FEWEST_WITH_DETOURS = 20
# The first damping on a full batch, where a rejected trial is cheap.
_FIRST_DAMPING = 1e-3
# The first tolerance of conjugate gradients on a full batch.
_TOLERANCE = 0.1
# The most iterations of conjugate gradients on a full batch, if the tolerance is not
# given. A classifier takes up to a hundred, until its loss is so small that single
# precision resolves no step; then tens of thousands change nothing. An equation on a grid
# of 64 x 64 points takes thousands. So for squared error the limit is the second number
# times the iterations of the last step that lowered the loss, if that is more, and at
# most the third number times the number of parameters.
_MOST_ON_ALL_DATA, _MORE_ITERATIONS, _MORE_OF_ALL = 300, 2, 10


class _Memory(eqx.Module):
    state: PyTree  # the damping rule's
    scale: Float[Array, " p"] | None
    first_gradient: Float[Array, ""]  # its norm; negative before the first linearisation
    tolerance: Float[Array, ""]  # of conjugate gradients
    num_iterations: Float[Array, ""]  # of a trial at the last step; 0 if it failed
    detour: Detour | None = None


class LevenbergMarquardt(AbstractGaussNewton):
    r"""Gauss-Newton with a damping that adapts and failing steps that are rejected.

    Each outer step linearises and factorises once. It then looks for the longest step
    that lowers the loss by at least a quarter of the prediction. A further trial costs a
    filter, a product and an evaluation. Steps follow the curvature of the model's
    manifold to second order (geodesic acceleration), which greatly shortens the way
    through narrow valleys. A step is rejected if its correction is nearly as long. Where
    progress is slow, some linearisations are made at points with a larger loss, on a
    detour ([`gnlin.damping.LongestStep`][]).

    Across batches of n examples a step is pulled towards 0.8 n / (n + 2) times the last
    step, so that in directions that one batch does not determine it follows earlier
    batches. The step is halved until it lowers the loss of its own batch, and its effect
    on the next batch adapts the length of the following steps. If examples or classes
    have weights w, n is the effective number $(\sum w)^2/\sum w^2$ of each batch.

    **Arguments:**

    - `damping`: the rule that adapts $\lambda$, one of `gnlin.damping`. The default is
        [`gnlin.damping.LongestStep`][], with one trial if trials are expensive, and
        [`gnlin.damping.Nielsen`][] in the prox-linear form. A number is the `initial` of
        the latter. Across batches `damping` must be a number, by default
        0.001 (1 + (48 / n)^2). For squared residuals at points that [`gnlin.fit`][]
        draws it is 1e-8 or, once a step has not carried over to the next points, as with
        noise, 0.001 times the loss relative to the first one if that is more. $\lambda$
        is this number times the curvature along the first gradient. It grows tenfold
        after a batch whose problem cannot be solved in this precision, or after two in a
        row on which no part of the step lowers the loss.
    - `scaling`: the diagonal $D$ of the damping, as in [`gnlin.DampedGaussNewton`][]. The
        default is `"root"`, or `"identity"` across batches and if the method is
        matrix-free.
    - `acceleration`: whether to add the second-order correction, for one more evaluation
        per trial. By default it is added if the Jacobian is in memory, except with sparse
        factorisations, which would be repeated for it.
    - `tolerance`: the tolerance of conjugate gradients if the method is matrix-free, as
        in [`gnlin.TruncatedGaussNewton`][]. On a full batch the default is 0.1, or the
        square root of the gradient's norm relative to the first one if that is smaller.
        There are at most 300 iterations or, for squared error, twice those of the last
        step if that is more; a tolerance that is given has no such limit. Across batches
        the default is 0.01, and there are at most 20 iterations at any tolerance.
    - `form`: the linearised problem for a loss other than squared error, as in
        [`gnlin.GaussNewton`][]. The prox-linear form has the scaling `"identity"` and no
        acceleration.
    - `method`: the way to compute a step, as in [`gnlin.DampedGaussNewton`][]. `"auto"`
        is matrix-free if the Jacobian would cost many times as much, or exceed the memory
        budget.
    - `rtol`, `atol`, `norm`, `memory_budget`, `bounds`, `retraction`, `verbose`: as in
        [`gnlin.authoring.AbstractGaussNewton`][].

    !!! example

        ```python
        solution = optx.least_squares(residuals, gnlin.LevenbergMarquardt(), y0, args)
        ```

    ??? cite "References"

        J. J. Moré, *The Levenberg-Marquardt algorithm: implementation and theory* (1978).

        H. B. Nielsen, *Damping parameter in Marquardt's method*, IMM-REP-1999-05.

        For the pull to the last step: G. Goldshlager, N. Abrahamsen and L. Lin, *A
        Kaczmarz-inspired approach to accelerate the optimization of neural network
        wavefunctions*, J. Comput. Phys. 516 (2024), equation 27.

        M. K. Transtrum and J. P. Sethna, *Improvements to the Levenberg-Marquardt
        algorithm for nonlinear least-squares minimization*, arXiv:1201.5885 (2012).
    """

    _keeps_bounds: ClassVar[bool] = True

    rtol: float = 1e-9
    atol: float = 1e-12
    norm: Callable[[PyTree], Scalar] = optx.max_norm
    damping: ScalarLike | AbstractDamping | None = eqx.field(
        default=None, converter=as_scalar, kw_only=True
    )
    scaling: Scaling | None = eqx.field(default=None, kw_only=True)
    acceleration: bool | None = eqx.field(default=None, kw_only=True)
    tolerance: ScalarLike | None = eqx.field(
        default=None, converter=as_scalar, kw_only=True
    )
    form: Form = eqx.field(default="quadratic", kw_only=True)
    method: Method = eqx.field(default="auto", kw_only=True)

    def __check_init__(self):
        if not isinstance(self.damping, AbstractDamping | None):
            check_finite_positive("damping", self.damping)
        check_method(self.method)
        check_form(self.form, self.method)
        if self.tolerance is not None:
            check_fraction("tolerance", self.tolerance)
        if self.acceleration and self.form == "prox-linear":
            raise ValueError(
                '`acceleration` cannot be used with `form="prox-linear"`: leave it out.'
            )
        if self.scaling is not None:
            check_scaling(self.scaling, self.method, self.form)
        if self.acceleration is not None:
            check_flag("acceleration", self.acceleration)

    def first_memory(self, y: PyTree[Array], dtype: jnp.dtype) -> _Memory:
        one, scale = jnp.ones((), dtype), first_scale(self.scaling or "root", y)
        as_array = lambda x: jnp.array(x, dtype if isinstance(x, float) else None)
        state = jax.tree.map(as_array, self._rule(y).init(dtype))
        return _Memory(state, scale, -one, one, jnp.zeros((), dtype))

    def start(self, y: PyTree[Array], outputs: PyTree[jax.ShapeDtypeStruct]) -> State:
        state = super().start(y, outputs)
        if not self._rule(y).detours:
            return state
        memory = dataclasses.replace(state.memory, detour=Detour.none(y, outputs))
        return dataclasses.replace(state, memory=memory)

    def detour(self, state: State) -> Detour | None:
        memory = state.memory
        return memory.detour if isinstance(memory, _Memory) else None

    def start_stream(self, y, outputs) -> State:
        state = self.start(y, outputs)
        scale = first_scale(self.scaling or "identity", y)
        memory = MemoryAcross.start(scale, y, state.report.loss.dtype)
        return eqx.tree_at(lambda s: s.memory, state.with_stride(y), memory)

    def after_judgement(self, objective, memory, stride, back) -> PyTree:
        if not damps_as_drawn(self, objective):
            return memory
        is_noisy = memory.is_noisy | back | (stride.balance < 0)
        return dataclasses.replace(memory, is_noisy=is_noisy)

    def update(self, objective, lin, evaluate, memory, num_steps) -> Update:
        if isinstance(memory, MemoryAcross):
            return step_on_a_batch(self, objective, lin, evaluate, memory)
        trials = self.trials(objective, lin, evaluate, memory)
        return self.after(trials, try_dampings(trials))

    def trials(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        memory: _Memory,
    ) -> Trials:
        """Return the dampings to try in one outer step on the full batch."""
        problem = problem_of(self.form, objective, lin)
        cost = problem.jacobian.cost()
        m, p = cost.shape
        # If p <= m the damping may become so small that squaring the condition number
        # does harm, so ask for a way that also serves without damping.
        filter = InexactTikhonov(1.0 if p > m else 0.0, worth=math.inf)
        # Trials are dear if each may need a sparse factorisation or conjugate gradients.
        are_dear = bool(cost.reads)
        num_trials = self._rule(lin.point, are_dear).num_trials
        way, scaling, method = self.planned(objective, problem, filter, num_trials)
        rule = self._rule(
            lin.point,
            are_dear or way.stops_early,
            is_square=m == p and objective.is_quadratic,
        )
        as_tree = lambda parameters: parameters
        if scaling != "identity":
            lin, as_tree = lin.in_one_array()
            problem = problem_of(self.form, objective, lin)
        measured = Measured.of(problem, scaling, memory.scale, cost.rows)
        subproblem = measured.chosen(measured.problem, filter, rule.num_trials, method)
        memory = dataclasses.replace(memory, scale=measured.memory)
        if way.stops_early:
            memory, subproblem = self._truncated(objective, subproblem, memory, p)

        def on_face(damping: Scalar, lin: Linearisation) -> PyTree[Array]:
            problem = problem_of(self.form, objective, lin)
            # One damping does not pay for a factorisation in two stages.
            once = measured.chosen(problem, Tikhonov(filter.damping), 1, method)
            return once.solve(InexactTikhonov(damping)).step

        inverse = None  # It is dense, so sparse problems are solved again instead.
        pays = p <= _MOST_WIDE * m and not cost.reads
        if lin.box is not None and measured.in_memory is not None and pays:
            inverse = measured.inverse()
        acceleration = self.acceleration
        if acceleration is None:
            acceleration = self.form == "quadratic" and not way.residuals_are_dear
        ready = lin, as_tree, measured, subproblem, on_face, inverse
        evaluate_array = lambda y: evaluate(as_tree(y))
        return Trials(objective, *ready, evaluate_array, rule, memory, acceleration)

    def after(self, trials: Trials, tried: TrialOutcome) -> Update:
        """Return the outer step that the trials lead to."""
        lin, as_tree = trials.lin, trials.as_tree
        subproblem, problem = trials.subproblem, trials.measured.in_memory
        found, detour = tried.found, trials.detour
        finite = trials.is_finite & ~jnp.isnan(tried.damping)
        step = _tree.where(found, tried.step, _tree.zeros_like(tried.step))
        point = lin.moved(step)
        outputs = _tree.where(found, tried.outputs, lin.outputs)
        dtype = trials.memory.num_iterations.dtype
        num_trials = jnp.maximum(tried.num_tried.astype(dtype), 1)
        iterations = tried.num_inner_steps.astype(dtype) / num_trials
        memory = dataclasses.replace(
            trials.memory,
            state=tried.state,
            num_iterations=jnp.where(found, iterations, 0),
        )
        if detour is not None:
            lost = detour.is_on & ~found
            flat, unravel = _tree.ravel_pytree(point)
            flat = jnp.where(lost, detour.y, flat)
            point = unravel(flat)
            outputs = _tree.where(lost, detour.outputs, outputs)
            finite |= lost
            at, _ = _tree.ravel_pytree(lin.moved(tried.detour))
            detour = Detour(tried.leaves, at, flat, outputs)
            memory = dataclasses.replace(memory, detour=detour)
        return Update(
            y=as_tree(point),
            outputs=outputs,
            memory=memory,
            gradient_norm=subproblem.gradient_norm,
            step_norm=_tree.norm(step),
            damping=tried.damping,
            num_inner_steps=tried.num_inner_steps,
            passes=subproblem.passes + tried.passes,
            num_accepted=jnp.where(found, 1, 0),
            num_rejected=tried.num_tried - jnp.where(found, 1, 0),
            left=as_tree(tried.step),
            problem=problem,
            searched=True,
            attainable=trials.attainable,
            stuck=finite & ~found,
            result=optx.RESULTS.where(
                finite, optx.RESULTS.successful, optx.RESULTS.nonfinite
            ),
        )

    def _truncated(
        self,
        objective: AbstractObjective,
        subproblem: AbstractSubproblem,
        memory: _Memory,
        size: int,
    ) -> tuple[_Memory, AbstractSubproblem]:
        """Return the memory, and the subproblem with a tolerance for conjugate gradients.
        The tolerance falls with the gradient, for superlinear convergence (Nocedal and
        Wright, 2006, section 7.1), but it never rises, although in a curved valley the
        gradient does after each long step."""
        dtype = memory.tolerance.dtype
        gradient = subproblem.gradient_norm.astype(dtype)
        first = jnp.where(memory.first_gradient < 0, gradient, memory.first_gradient)
        tolerance = _TOLERANCE if self.tolerance is None else self.tolerance
        left = jnp.fmin(jnp.asarray(tolerance, dtype), jnp.sqrt(gradient / first))
        tolerance = jnp.fmin(left, memory.tolerance)
        memory = dataclasses.replace(memory, first_gradient=first, tolerance=tolerance)
        most: ScalarLike | None = None
        if self.tolerance is None:
            most = _MOST_ON_ALL_DATA
            if objective.is_quadratic:
                more = _MORE_ITERATIONS * memory.num_iterations
                more = jnp.minimum(more, _MORE_OF_ALL * size)
                most = jnp.maximum(most, more.astype(int))
        return memory, subproblem.truncated(tolerance, most)

    def _rule(
        self, y: PyTree[Array], trials_are_dear: bool = False, is_square: bool = False
    ) -> AbstractDamping:
        """Return the rule on a full batch.

        - `is_square`: whether there are as many squared residuals as parameters.
        """
        damping = self.damping
        if isinstance(damping, AbstractDamping):
            return damping
        if damping is None and self.form == "quadratic":
            if trials_are_dear:
                return _ONE_TRIAL
            initial = 0.0 if is_square else _FIRST_DAMPING
            detours = _tree.size(y) >= _FEWEST_WITH_DETOURS
            return LongestStep(initial=initial, detours=detours)
        return Nielsen(_FIRST_DAMPING if damping is None else damping)

    def planned(
        self,
        objective: AbstractObjective,
        problem: Quadratic | ProxLinear,
        filter: Tikhonov,
        num_trials: int,
    ) -> tuple[type[AbstractMethod], Scaling, Any]:
        """Return the way to solve the linearised problem, the scaling, and the method by
        which to set up the scaled problem."""
        if self.scaling in (None, "identity"):
            price = _EXACT_OF_SAMPLE if objective.is_sample else _EXACT
            price = price if objective.is_quadratic else _EXACT_OF_NETWORK
            filter = InexactTikhonov(filter.damping, *price)
        way = way_of(problem, filter, num_trials, self.method)
        scaling = self.scaling
        if scaling is None:
            # Scales need the dense Jacobian. On a small batch they are mostly noise:
            # networks on scaled inputs do better without them, recurrent ones by far.
            fits = self.form == "quadratic" and problem.jacobian.cost().columns_fit
            is_scaled = fits and not (way.stops_early or objective.is_sample)
            scaling = "root" if is_scaled else "identity"
        is_chosen = self.method == "auto" and scaling == "identity"
        return way, scaling, way.method if is_chosen else self.method
