"""Levenberg-Marquardt: the damping adapts to how well the linearisation predicts."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar, ScalarLike

from .. import _tree
from .._checks import (
    as_scalar,
    check_finite_positive,
    check_flag,
    check_settings,
    positive,
)
from .._linearisation import DEFAULT_MEMORY_BUDGET, Linearisation
from .._objective import AbstractObjective
from .._subproblem import AbstractSubproblem, check_form, check_method, Form, Method
from ..filters import Tikhonov
from ._base import AbstractGaussNewton, Evaluate, increased, Update
from ._scaling import (
    check_scaling,
    first_scale,
    prepare_scaled,
    Scaling,
    without_zeros,
)


# The loss must fall by this part of what the linearisation predicts (as in MINPACK).
_SUFFICIENT_DECREASE = 1e-4
# An acceleration longer than this part of the step says that the step is too long for
# the linearisation (Transtrum and Sethna, 2012, section 4).
_MAX_ACCELERATION = 0.75
# A change of the loss by less than eps to this power, relatively, says nothing: 3e-13 in
# double precision, 3e-6 in single.
_ROUNDING_POWER = 0.8
# A gradient of fewer roundings than this of |phi| |r| is none.
_GRADIENT_ROUNDINGS = 10
# A step that gains this part of what an undamped one would is not held by the damping.
_UNDAMPED = 0.1
# So many outer steps in a row without a gain are enough.
_MAX_IDLE = 10
# Up to this size of the smaller side eigenvalues, which serve all trials, cost less than
# a Cholesky factorisation for each; at 640 they cost thirty times as much.
_SMALL_SPECTRUM = 256
# Above so many multiplications singular values take seconds.
_DEAR_SVD = 10**9
# The damping then has grown by 2^1830, past all floating-point numbers.
_MAX_TRIALS = 60


class _Memory(eqx.Module):
    damping: Float[Array, ""]  # negative before the first linearisation
    num_idle: Int[Array, ""]  # outer steps in a row that gained no more than rounding
    scale: PyTree[Array] | None


class _Trial(eqx.Module):
    """The damping tried last, from the one factorisation, and what came of it."""

    damping: Float[Array, ""]
    next_damping: Float[Array, ""]
    growth: Float[Array, ""]  # of the damping, if the next trial fails
    y: PyTree[Array]
    outputs: PyTree[Array]
    step: PyTree[Array]
    accepted: Bool[Array, ""]
    converged: Bool[Array, ""]  # the least damped trial was within the tolerances
    idle: Bool[Array, ""]  # near the solution, and nothing to gain but rounding
    near: Bool[Array, ""]  # the gradient, or what there is to gain, is next to nothing
    stalled: Bool[Array, ""]  # and now what is left to gain is below one rounding
    num_rejected: Int[Array, ""]
    num_inner_steps: Float[Array, ""]
    num_jvps: Float[Array, ""]
    num_vjps: Float[Array, ""]


class LevenbergMarquardt(AbstractGaussNewton):
    r"""Damped Gauss-Newton whose damping adapts, and whose failing steps are rejected.

    Each outer step linearises once and factorises once, then tries dampings until one
    lowers the loss; a rejected trial costs a filter, a product and an evaluation. A good
    prediction lowers the damping for the next linearisation by up to a factor of 3
    (Nielsen, 1999). Steps follow the curvature of the model's manifold to second order
    (geodesic acceleration), which shortens the way through narrow valleys many times.

    **Arguments:**

    - `rtol`, `atol`: it has converged when a step changes each parameter `y` by less
        than `atol + rtol * |y|`, and the residuals, in `norm`, likewise.
    - `norm`: `optimistix.max_norm` by default.
    - `damping`: the first $\lambda$, relative to the curvature along the gradient.
    - `scaling`: the $D$ of $\frac\lambda2\lVert D\delta\rVert^2$. `"more"`: the largest
        norms that the Jacobian's columns have had lately (Moré, 1978; earlier ones fade
        by 0.8 an outer step), `"marquardt"`: their present norms, both of which make the
        steps independent of the parameters' units, but need the dense Jacobian;
        `"identity"`: none.
    - `acceleration`: whether to add the second-order correction, for one second
        directional derivative a trial.
    - `form`: of a loss that is not squared error, as in [`gnlin.GaussNewton`][]. The
        prox-linear form has the scaling `"identity"` and no acceleration.
    - `method`: how a step is computed: `"auto"`, `"svd"`, `"eigh"`, `"kernel"`,
        `"curvature"` or `"matrix-free"`; see "How to choose" in the documentation.
    - `memory_budget`: bytes that the largest matrix may take.

    !!! example

        ```python
        solution = optx.least_squares(residuals, gnlin.LevenbergMarquardt(), y0, args)
        ```

    ??? cite "References"

        J. J. Moré, *The Levenberg-Marquardt algorithm: implementation and theory* (1978).

        H. B. Nielsen, *Damping parameter in Marquardt's method*, IMM-REP-1999-05.

        M. K. Transtrum and J. P. Sethna, *Improvements to the Levenberg-Marquardt
        algorithm for nonlinear least-squares minimization*, arXiv:1201.5885 (2012).
    """

    rtol: float
    atol: float
    norm: Callable[[PyTree], Scalar]
    damping: ScalarLike
    scaling: Scaling
    acceleration: bool
    form: Form
    method: Method
    memory_budget: int

    def __init__(
        self,
        rtol: float = 1e-9,
        atol: float = 1e-12,
        norm: Callable[[PyTree], Scalar] = optx.max_norm,
        *,
        damping: ScalarLike = 1e-3,
        scaling: Scaling | None = None,
        acceleration: bool | None = None,
        form: Form = "quadratic",
        method: Method = "auto",
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ):
        check_finite_positive("damping", damping)
        check_method(method)
        check_form(form, method)
        quadratic = form == "quadratic"
        if scaling is None:
            scaling = "more" if quadratic else "identity"
        if acceleration and not quadratic:
            raise ValueError(
                'The "prox-linear" form has no geodesic acceleration: leave '
                "`acceleration` out."
            )
        check_scaling(scaling, method, form)
        if acceleration is not None:
            check_flag("acceleration", acceleration)
        check_settings(rtol, atol, norm, memory_budget)
        self.rtol = rtol
        self.atol = atol
        self.norm = norm
        self.damping = as_scalar(damping)
        self.scaling = scaling
        self.acceleration = quadratic if acceleration is None else acceleration
        self.form = form
        self.method = method
        self.memory_budget = memory_budget

    def first_memory(self, y: PyTree[Array], dtype: jnp.dtype) -> _Memory:
        return _Memory(jnp.array(-1, dtype), jnp.array(0), first_scale(self.scaling, y))

    def update(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        memory: _Memory,
        num_steps: Int[Array, ""],
    ) -> Update:
        norms, subproblem = prepare_scaled(
            self.scaling,
            memory.scale,
            self.form,
            objective,
            lin,
            self.method,
            self.memory_budget,
            damped=_is_wide(lin),
            reuse=min(lin.shape) <= _SMALL_SPECTRUM,
        )
        scale = without_zeros(norms)
        damping = jax.lax.cond(
            memory.damping < 0,
            lambda: self._first_damping(subproblem, memory.damping.dtype),
            lambda: memory.damping,
        )
        finite = _is_finite(objective, lin, subproblem) & positive(self.damping)
        trial = self._try_dampings(
            objective, lin, evaluate, subproblem, scale, damping, finite
        )

        good = trial.accepted & finite
        num_idle = jnp.where(trial.idle, memory.num_idle + 1, 0)
        done = trial.converged | trial.stalled | (num_idle >= _MAX_IDLE)
        success = finite & (trial.accepted | done)
        result = optx.RESULTS.where(
            success, optx.RESULTS.successful, optx.RESULTS.nonlinear_divergence
        )
        result = optx.RESULTS.where(finite, result, optx.RESULTS.nonfinite)
        step = _tree.where(good, trial.step, _tree.zeros_like(trial.step))
        return Update(
            y=_tree.where(good, trial.y, lin.point),
            outputs=_tree.where(good, trial.outputs, lin.outputs),
            step=step,
            step_norm=_tree.norm(step),
            memory=_Memory(trial.next_damping, num_idle, norms),
            gradient_norm=subproblem.gradient_norm,
            damping=trial.damping,
            num_inner_steps=trial.num_inner_steps,
            num_jvps=subproblem.num_jvps + trial.num_jvps,
            num_vjps=subproblem.num_vjps + trial.num_vjps,
            num_accepted=jnp.where(good, 1, 0),
            num_rejected=trial.num_rejected,
            terminate=success & done,
            result=result,
        )

    def _first_damping(
        self, subproblem: AbstractSubproblem, dtype: jnp.dtype
    ) -> Float[Array, ""]:
        curvature = subproblem.curvature_along_gradient()
        # Where the gradient vanishes there is no step to damp.
        safe = jnp.where(jnp.isfinite(curvature) & (curvature > 0), curvature, 1)
        return jnp.asarray(self.damping, dtype) * safe.astype(dtype)

    def _try_dampings(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        subproblem: AbstractSubproblem,
        scale: PyTree[Array] | None,
        damping: Float[Array, ""],
        finite: Bool[Array, ""],
    ) -> _Trial:
        dtype = damping.dtype
        eps = _tree.eps((lin.point, lin.outputs))
        gradient = subproblem.gradient()
        attainable = subproblem.attainable_decrease().astype(dtype)
        known = jnp.isfinite(attainable)
        largest = subproblem.largest_curvature().astype(dtype)
        loss = jnp.abs(objective.value(lin.outputs)).astype(dtype)
        residual = objective.residual(lin.outputs)
        root = objective.root(lin.outputs)
        flat = _slope(objective, lin, subproblem, gradient) <= eps ** (1 / 3)

        def scaled(step):
            return step if scale is None else jax.tree.map(jnp.multiply, scale, step)

        def damped_norm(answer):
            known = answer.damped_norm
            norm = _tree.norm(scaled(answer.step)) if known is None else known
            return norm.astype(dtype)

        def attempt(last: _Trial) -> _Trial:
            damping = last.next_damping
            answer = subproblem.solve(Tikhonov(damping))
            if answer.decrease is not None:
                predicted = answer.decrease.astype(dtype)
            else:
                along = _tree.dot(answer.step, gradient).astype(dtype)
                predicted = 0.5 * (damping * damped_norm(answer) ** 2 - along)
            step, gentle, bend = _tree.cast_like(answer.step, lin.point), True, None
            if self.acceleration:
                bend = self._acceleration(
                    root, evaluate, lin.point, subproblem, damping, step
                )
                longest = 0.5 * _MAX_ACCELERATION * damped_norm(answer)
                gentle = damped_norm(bend) <= longest
                step = _tree.axpy(0.5, bend.step, step)

            y = _tree.axpy(1, step, lin.point)
            outputs = evaluate(y)
            actual = objective.decrease(lin.outputs, outputs).astype(dtype)

            ratio = actual / jnp.where(predicted > 0, predicted, 1)
            rounding = eps**_ROUNDING_POWER * loss
            # A step can be small because the damping is large: to count as one near the
            # solution it has to gain a good part of what an undamped one would.
            free = (attainable <= rounding) | (predicted >= _UNDAMPED * attainable)
            free = jnp.where(known, free, damping <= largest)
            noise = free & (predicted <= rounding) & (actual >= -rounding)
            accepted = (
                _tree.all_finite((y, outputs))
                & gentle
                & (noise | (ratio > _SUFFICIENT_DECREASE))
            )
            ratio = jnp.where(noise, 1, jnp.clip(ratio, 0, 1))
            shrink = jnp.maximum(1 / 3, 1 - (2 * ratio - 1) ** 3)
            first = last.num_rejected == 0
            within = free & self.converged(y, step, objective.residual(outputs), residual)
            promise = jnp.maximum(predicted, jnp.where(known, attainable, 0))
            little = jnp.where(known | free, promise <= eps**0.5 * loss, False)
            near = jnp.where(first, little | flat, last.near)
            # The residual's part in the range of phi is rounding: so is the gradient.
            vanished = first & (known | free)
            vanished &= promise <= (_GRADIENT_ROUNDINGS * eps) ** 2 * loss
            taken = (answer,) if bend is None else (answer, bend)
            return _Trial(
                damping=damping,
                next_damping=damping * jnp.where(accepted, shrink, last.growth),
                growth=2 * last.growth,
                y=y,
                outputs=outputs,
                step=step,
                accepted=accepted,
                converged=jnp.where(first, within | vanished, last.converged),
                idle=near & accepted & (jnp.abs(actual) <= rounding),
                near=near,
                stalled=near & ~accepted & (predicted <= eps * loss),
                num_rejected=last.num_rejected + jnp.where(accepted, 0, 1),
                num_inner_steps=increased(
                    last.num_inner_steps, *(a.num_inner_steps for a in taken)
                ),
                num_jvps=increased(last.num_jvps, *(a.num_jvps for a in taken)),
                num_vjps=increased(last.num_vjps, *(a.num_vjps for a in taken)),
            )

        def again(trial: _Trial) -> Bool[Array, ""]:
            done = trial.accepted | trial.converged | trial.stalled
            return ~done & (trial.num_rejected < _MAX_TRIALS)

        no, zero = jnp.array(False), jnp.zeros((), jnp.result_type(float))
        start = _Trial(
            damping=damping,
            next_damping=damping,
            growth=jnp.array(2, dtype),
            y=lin.point,
            outputs=lin.outputs,
            step=_tree.zeros_like(lin.point),
            accepted=no,
            converged=no,
            idle=no,
            near=no,
            stalled=no,
            num_rejected=jnp.array(0),
            num_inner_steps=zero,
            num_jvps=zero,
            num_vjps=zero,
        )
        return jax.lax.while_loop(lambda trial: again(trial) & finite, attempt, start)

    def _acceleration(self, root, evaluate, y, subproblem, damping, velocity):
        """The second-order correction to a step v: the damped least-squares solution
        for the second directional derivative of the outputs along v, whitened."""

        def along(t):
            return jax.jvp(evaluate, (_tree.axpy(t, velocity, y),), (velocity,))[1]

        zero = jnp.zeros((), _tree.dtype(y))
        _, second = jax.jvp(along, (zero,), (jnp.ones_like(zero),))
        bent = subproblem.with_residual(root(second))
        answer = bent.solve(Tikhonov(damping))
        taken = (answer.num_jvps + 2 + bent.num_jvps, answer.num_vjps + bent.num_vjps)
        return eqx.tree_at(lambda a: (a.num_jvps, a.num_vjps), answer, taken)


def _slope(
    objective: AbstractObjective,
    lin: Linearisation,
    subproblem: AbstractSubproblem,
    gradient: PyTree[Array],
) -> Scalar:
    """How far the gradient is from zero, free of units. The smaller of two: the cosine
    between the residual and the range of phi (as MINPACK's gtol), and what a relative
    change of the parameters does to the loss (Dennis and Schnabel, 1983, section 7.2)."""
    dtype = _tree.dtype((lin.point, lin.outputs))
    loss = jnp.abs(objective.value(lin.outputs)).astype(dtype)
    # The residual's norm, of squared error; else the length that has as much loss.
    residual = jnp.sqrt(2 * loss)
    largest = jnp.sqrt(subproblem.largest_curvature()).astype(dtype)
    cosine = subproblem.scaled_gradient_norm().astype(dtype) / (largest * residual)
    gradient = _tree.cast_like(gradient, lin.point)
    terms = jax.tree.map(lambda g, x: jnp.abs(g * x), gradient, lin.point)
    sensitivity = _tree.total(terms, dtype)
    return jnp.minimum(cosine, sensitivity / loss)


def _is_finite(
    objective: AbstractObjective, lin: Linearisation, subproblem: AbstractSubproblem
) -> Bool[Array, ""]:
    loss = objective.value(lin.outputs)
    return jnp.isfinite(subproblem.gradient_norm) & jnp.isfinite(loss)


def _is_wide(lin: Linearisation) -> bool:
    """Whether to form the kernel: for a tall problem the damping may fall so far that
    squaring the condition number does harm, unless singular values cost too much."""
    m, p = lin.shape
    return p > m or m * p**2 > _DEAR_SVD
