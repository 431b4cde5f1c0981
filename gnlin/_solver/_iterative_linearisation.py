"""Iterative linearisation: K steps of descent on each linearised model."""

import math
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, Int, PyTree, Scalar, ScalarLike

from .. import _tree
from .._checks import (
    as_scalar,
    check_finite_nonnegative,
    check_finite_positive,
    check_flag,
    check_less_than_one,
    check_period,
    check_settings,
    nan_unless,
    nonnegative,
    positive,
)
from .._linearisation import DEFAULT_MEMORY_BUDGET, Linearisation
from .._objective import AbstractObjective, SumOfSquares
from .._spectrum import Filter
from .._subproblem import (
    AbstractSubproblem,
    Answer,
    check_form,
    check_method,
    Form,
    Parameters,
    prepare,
    prepare_prox_linear,
    ProxLinear,
    updated,
)
from ..filters import Damped, GradientDescent, GradientFlow, HeavyBall, Nesterov
from ._base import (
    AbstractGaussNewton,
    Counts,
    Evaluate,
    linearised,
    Report,
    State,
    step_if_finite,
    Update,
)
from ._trajectory import Trajectory
from ._verdict import STANDS_STILL


DescentMethod = Literal["auto", "svd", "eigh", "kernel", "matrix-free", "flow"]

# Whether, after so many inner steps, the linearised outputs are trusted no more.
Trigger = Callable[[Linearisation, PyTree[Array], Array], Array]

# Up to this many multiplications the kernel and its eigenvalues take a millisecond.
_CHEAP_SPECTRUM = 10**8


class IterativeLinearisation(AbstractGaussNewton):
    r"""Train the linearised model for K steps of gradient descent, then linearise again.

    One outer step is one feature update and K inner steps. K = 1 is gradient descent on
    the model itself; K = infinity trains its linearisation at the starting point to
    convergence (the NTK regime), and is done after one outer step.

    For squared error the K steps are one formula on the spectrum of the kernel, and
    $K = 10^8$ costs what K = 1 costs. For another loss they are taken one by one, with
    the m x m kernel where that is cheaper than with passes through the model; very many
    very small ones by gradient flow (`method="flow"`). Steps that diverge (for squared
    error, if $\eta$ times the largest eigenvalue is above 2, or $2(1+\mu)$ with
    momentum) end the run with `optx.RESULTS.nonlinear_divergence` before they are taken.

    **Arguments:**

    - `period`: K, a whole number of at least 1, or `math.inf`; a number or a traced
        scalar. (A Python number is static: another one compiles again.) An optimiser's
        steps may be endless on mini-batches only.
    - `learning_rate`: $\eta > 0$, a number or a traced scalar; or instead of it
        `optimiser`.
    - `momentum`: $\mu$ of heavy-ball momentum, at least 0 and less than 1. The velocity
        starts at zero after each linearisation.
    - `rtol`, `atol`: it has converged when an *outer* step changes each parameter `y` by
        less than `atol + rtol * |y|`, and the residuals, in `norm`, likewise.
    - `norm`: `optimistix.max_norm` by default.
    - `nesterov`: whether the momentum is Nesterov's.
    - `damping`: $\lambda \ge 0$: the steps descend on the loss with
        $\frac\lambda2\lVert\theta - \theta_s\rVert^2$ added.
    - `optimiser`: any of optax, whose steps are then the inner steps, in place of
        `learning_rate` and `momentum`.
    - `restart`: whether the optimiser's state starts anew at each linearisation. If not,
        K = 1 is the optimiser itself on the model.
    - `form`: of a loss that is not squared error: `"prox-linear"`, the loss itself on the
        linearised model, or `"quadratic"`, expanded to second order, for which K is a
        formula again.
    - `method`: how the K steps are computed: on a spectrum (`"svd"`, `"eigh"`, quadratic
        problems only), one by one with the kernel (`"kernel"`) or by passes through the
        model (`"matrix-free"`), by whichever is cheaper (`"auto"`); or by gradient flow
        for the time $K\eta$, with error control (`"flow"`).
    - `memory_budget`: bytes that the largest matrix may take.

    !!! example

        ```python
        solver = gnlin.IterativeLinearisation(period=10**5, learning_rate=1e-5)
        solution = gnlin.solve(model, (x, y), solver, max_steps=40)
        gnlin.IterativeLinearisation(period=100, optimiser=optax.adam(1e-3))
        ```

    ??? cite "Reference"

        A. Goldwaser and H. Ge, *Understanding Sparse Feature Updates in Deep Networks
        using Iterative Linearisation*, arXiv:2211.12345.
    """

    period: ScalarLike
    learning_rate: ScalarLike | None
    momentum: ScalarLike
    rtol: float
    atol: float
    norm: Callable[[PyTree], Scalar]
    nesterov: bool
    damping: ScalarLike
    optimiser: Any
    restart: bool
    form: Form
    method: DescentMethod
    memory_budget: int

    def __init__(
        self,
        period: ScalarLike,
        learning_rate: ScalarLike | None = None,
        momentum: ScalarLike = 0.0,
        rtol: float = 1e-9,
        atol: float = 1e-12,
        norm: Callable[[PyTree], Scalar] = optx.max_norm,
        *,
        nesterov: bool = False,
        damping: ScalarLike = 0.0,
        optimiser: Any = None,
        restart: bool = True,
        form: Form = "prox-linear",
        method: DescentMethod = "auto",
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ):
        check_period("period", period)
        if (learning_rate is None) == (optimiser is None):
            raise ValueError(
                "`IterativeLinearisation` takes its inner steps with a `learning_rate` "
                "or with an `optimiser`: pass one of the two."
            )
        if learning_rate is not None:
            check_finite_positive("learning_rate", learning_rate)
        if optimiser is not None:
            _check_optimiser(optimiser, momentum, nesterov, method)
        elif not restart:
            raise ValueError(
                "`restart=False` keeps an optimiser's state: pass "
                "`optimiser=optax.sgd(learning_rate, momentum)`."
            )
        check_less_than_one("momentum", momentum)
        check_flag("nesterov", nesterov)
        check_flag("restart", restart)
        check_finite_nonnegative("damping", damping)
        check_method(method, damped=False, also=("kernel", "flow"))
        if form == "quadratic" and method == "kernel":
            raise ValueError(
                'The method "kernel" takes steps on the loss itself: with '
                '`form="quadratic"` use "auto", "svd", "eigh" or "matrix-free".'
            )
        check_form(form, "auto")
        if isinstance(period, float) and math.isfinite(period):
            period = int(period)
        self.period = period
        self.learning_rate = as_scalar(learning_rate)
        self.momentum = momentum
        check_settings(rtol, atol, norm, memory_budget)
        self.rtol = rtol
        self.atol = atol
        self.norm = norm
        self.nesterov = nesterov
        undamped = isinstance(damping, float | int) and damping == 0
        self.damping = 0.0 if undamped else as_scalar(damping)
        self.optimiser = optimiser
        self.restart = restart
        self.form = form
        self.method = method
        self.memory_budget = memory_budget

    def filter(self, num_inner_steps: ScalarLike | None = None) -> Filter:
        """The spectral filter of a number of inner steps, `period` of them by default."""
        eta = self.learning_rate
        if eta is None:
            raise ValueError(
                "The steps of an optimiser have no spectral filter; use `learning_rate`."
            )
        period = self.period if num_inner_steps is None else num_inner_steps
        plain = isinstance(self.momentum, float | int) and self.momentum == 0
        if self.method == "flow":
            filter = GradientFlow(eta * period / (1 - self.momentum))
        elif plain:
            filter = GradientDescent(period, eta)
        else:
            kind = Nesterov if self.nesterov else HeavyBall
            filter = kind(period, eta, self.momentum)
        if isinstance(self.damping, float) and self.damping == 0:
            return filter
        return Damped(filter, self.damping)

    def damping_now(self) -> Scalar:
        """The damping; NaN where any of the numbers is out of its range."""
        eta = 1.0 if self.learning_rate is None else self.learning_rate
        period, momentum = jnp.asarray(_as_float(self.period)), jnp.asarray(self.momentum)
        sound = (period >= 1) & ((period == jnp.floor(period)) | jnp.isinf(period))
        sound &= positive(eta) & (momentum >= 0) & (momentum < 1)
        return nan_unless(sound & nonnegative(self.damping), self.damping)

    def first_memory(self, y: PyTree[Array], dtype: jnp.dtype) -> PyTree:
        if self.optimiser is None or self.restart:
            return None
        return self.optimiser.init(y)

    def update(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        memory: PyTree[Array],
        num_steps: Int[Array, ""],
    ) -> Update:
        if self.optimiser is not None:
            return self._optimised(objective, lin, evaluate, memory)
        endless = isinstance(self.period, float) and math.isinf(self.period)
        known = float(self.period) if isinstance(self.period, int) else math.inf
        subproblem = self.subproblem(objective, lin, known, endless=endless)
        answer = subproblem.solve(self.filter())
        period = jnp.asarray(_as_float(self.period), float)
        answer = eqx.tree_at(lambda a: a.num_inner_steps, answer, period)
        update = step_if_finite(
            self, objective, lin, evaluate, subproblem, answer, damping=self.damping_now()
        )
        # Descent without an end is never linearised again: its point is the answer.
        over = jnp.isinf(period) & (update.result == optx.RESULTS.successful)
        solved = jax.lax.cond(
            over,
            lambda: self._is_solved(objective, lin, subproblem, answer),
            lambda: jnp.array(True),
        )
        result = optx.RESULTS.where(solved, update.result, STANDS_STILL)
        return eqx.tree_at(lambda u: (u.terminate, u.result), update, (over, result))

    def _is_solved(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        subproblem: AbstractSubproblem,
        answer: Answer,
    ) -> Bool[Array, ""]:
        """Whether the linearised problem's gradient is next to nothing of what it was."""
        change = lin.jvp(answer.step)
        if isinstance(subproblem, ProxLinear):
            cotangent = objective.gradient(_tree.axpy(1, change, lin.outputs))
        else:
            curved = objective.curvature(lin.outputs)(change)
            cotangent = _tree.axpy(1, curved, objective.gradient(lin.outputs))
        gradient = _tree.axpy(self.damping, answer.step, lin.vjp(cotangent))
        eps = _tree.eps((lin.point, lin.outputs))
        return _tree.norm(gradient) <= eps ** (1 / 3) * subproblem.gradient_norm

    def subproblem(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        num_steps: float,
        *,
        endless: bool = False,
    ) -> AbstractSubproblem:
        """The linearised problem, ready for `filter`.

        - `num_steps`: so many, as far as is known, will be taken on it.
        - `endless`: whether its solution is asked for instead.
        """
        steps = self.form == "prox-linear" and not objective.is_quadratic
        if steps or self.method == "kernel":
            method = "auto" if self.method == "flow" else self.method
            if method in ("svd", "eigh"):
                raise ValueError(
                    f"The method {method!r} is for quadratic problems: for this loss use "
                    '`form="quadratic"`, or "auto", "kernel", "matrix-free" or "flow".'
                )
            if endless and self.method == "auto":
                method = "matrix-free"
            return prepare_prox_linear(
                objective,
                lin,
                method,
                self.memory_budget,
                damped=not endless,
                num_steps=num_steps,
            )
        method = "auto" if self.method == "flow" else self.method
        if self.method == "auto" and self._literal_is_cheaper(lin, num_steps):
            method = "matrix-free"
        return prepare(
            objective.expand(lin),
            method,
            self.memory_budget,
            damped=not endless,
            reuse=True,
        )

    def _optimised(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        memory: PyTree,
    ) -> Update:
        if isinstance(self.period, float) and math.isinf(self.period):
            raise ValueError(
                "On one batch an `optimiser` takes `period` steps, which must be finite; "
                'to solve the linearised problem use `GaussNewton(form="prox-linear")`.'
            )
        if self.form == "quadratic":
            quadratic = objective.expand(lin)
            on, rest = quadratic.lin, quadratic.rest
            subproblem = ProxLinear(SumOfSquares(), on, Parameters(on))
        else:
            subproblem, rest = ProxLinear(objective, lin, Parameters(lin)), None
        state = self.optimiser.init(lin.point) if memory is None else memory
        damping = self.damping_now()
        answer, state = subproblem.optimise(
            self.optimiser, state, self.period, damping, rest
        )
        update = step_if_finite(
            self, objective, lin, evaluate, subproblem, answer, damping=damping
        )
        if memory is None:
            return update
        return eqx.tree_at(lambda u: u.memory, update, state, is_leaf=lambda x: x is None)

    def _literal_is_cheaper(self, lin: Linearisation, num_steps: float) -> bool:
        """K known to be so small that its steps take fewer passes than the Jacobian,
        where its factorisation is more than the work of a moment."""
        m, p = lin.shape
        if m * p * min(m, p) <= _CHEAP_SPECTRUM:
            return False
        return 2 * num_steps - 1 <= sum(lin.num_row_passes())

    #
    # Mini-batches: one step is one inner step, and theta_s stays for K of them
    #

    def start_stream(
        self, y: PyTree[Array], outputs: PyTree[jax.ShapeDtypeStruct]
    ) -> State:
        if self.method not in ("auto", "matrix-free"):
            raise ValueError(
                "On mini-batches the inner steps are taken one by one: `method` must be "
                f'"auto" or "matrix-free", but {self.method!r} was given.'
            )
        state = self.start(y, outputs)
        inner = self._optimiser().init(y)
        stream = Stream(y, inner, jnp.array(0))
        return eqx.tree_at(lambda s: s.memory, state, stream, is_leaf=lambda x: x is None)

    def _optimiser(self) -> Any:
        if self.learning_rate is None:
            return self.optimiser
        return _Momentum(self.learning_rate, self.momentum, self.nesterov)

    def advance_stream(
        self,
        objective: AbstractObjective,
        fn: Callable[[Any, Any], Any],
        y: PyTree[Array],
        args: PyTree,
        state: State,
        *,
        has_aux: bool,
        trigger: Trigger | None = None,
    ) -> tuple[PyTree[Array], State, Scalar, Any]:
        """One inner step. With a `trigger`, it says when to linearise anew before the
        period is over."""
        stream: Stream = state.memory
        delta = jax.tree.map(jnp.subtract, y, stream.point)
        # One forward, one tangent and one transposed pass.
        lin, aux = linearised(fn, stream.point, args, has_aux)
        change = lin.jvp(delta)
        outputs = _tree.axpy(1, change, lin.outputs)
        if self.form == "quadratic" and not objective.is_quadratic:
            curved = objective.curvature(lin.outputs)(change)
            cotangent = _tree.axpy(1, curved, objective.gradient(lin.outputs))
        else:
            cotangent = objective.gradient(outputs)
        loss = objective.value(outputs)
        gradient = _tree.axpy(self.damping_now(), delta, lin.vjp(cotangent))

        optimiser = self._optimiser()
        updates, inner = updated(optimiser, gradient, stream.inner, y)
        new_y = _tree.axpy(1, updates, y)
        finite = _tree.all_finite((new_y, loss))
        new_y = _tree.where(finite, new_y, y)
        num_steps = stream.num_steps + 1
        renew = num_steps.astype(float) >= jnp.asarray(_as_float(self.period), float)
        if trigger is not None:
            renew |= trigger(lin, outputs, num_steps)
        point = _tree.where(renew, new_y, stream.point)
        if self.restart:
            inner = _tree.where(renew, optimiser.init(new_y), inner)
        begins = jnp.where(stream.num_steps == 0, 1, 0)
        stream = Stream(point, inner, jnp.where(renew, 0, num_steps))

        dtype = state.report.loss.dtype
        one = jnp.ones((), float)
        report = Report(
            loss.astype(dtype),
            _tree.norm(gradient).astype(dtype),
            jnp.where(finite, _tree.norm(updates), 0).astype(dtype),
            self.damping_now().astype(dtype),
            one,
        )
        counts = state.counts
        counts = Counts(
            counts.num_feature_updates + begins,
            counts.num_inner_steps + 1,
            counts.num_jvps + 1,
            counts.num_vjps + 1,
            counts.num_accepted_steps + jnp.where(finite, 1, 0),
            counts.num_rejected_steps + jnp.where(finite, 0, 1),
        )
        result = optx.RESULTS.where(
            finite, optx.RESULTS.successful, optx.RESULTS.nonfinite
        )
        state = eqx.tree_at(
            lambda s: (s.memory, s.report, s.counts, s.result),
            state,
            (stream, report, counts, result),
        )
        return new_y, state, loss, aux

    def trajectory(self, lin: Linearisation) -> Trajectory:
        """The inner steps at one linearisation, to be looked at wherever one likes.

        !!! example

            ```python
            lin = gnlin.linearise(residuals, y, (inputs, targets))
            trajectory = solver.trajectory(lin)
            trajectory.parameters(jnp.array([1, 10, 100]))
            trajectory.outputs(jnp.array([1, 10, 100]))
            trajectory.outputs(jnp.array([1, 10, 100]), on=gnlin.linearise(f, y, test))
            ```
        """
        method = self.method if self.method in ("svd", "eigh") else None
        spectrum = lin.spectrum(method, memory_budget=self.memory_budget)
        return Trajectory(lin, spectrum, self.filter)


class Stream(eqx.Module):
    """Between the inner steps on one batch and on the next."""

    point: PyTree[Array]  # theta_s
    inner: PyTree  # the optimiser's state, or the velocity
    num_steps: Int[Array, ""]  # since theta_s was linearised at


class _Momentum(eqx.Module):
    """Gradient descent with momentum as an optimiser, its numbers traced."""

    learning_rate: ScalarLike
    momentum: ScalarLike
    nesterov: bool

    def init(self, y: PyTree[Array]) -> PyTree[Array] | None:
        plain = isinstance(self.momentum, float | int) and self.momentum == 0
        return None if plain else _tree.zeros_like(y)

    def update(self, gradient, velocity, y):
        step = _tree.scale(-jnp.asarray(self.learning_rate), gradient)
        if velocity is None:
            return step, None
        velocity = _tree.axpy(self.momentum, velocity, step)
        if self.nesterov:
            return _tree.axpy(self.momentum, velocity, step), velocity
        return velocity, velocity


def _as_float(period: ScalarLike) -> ScalarLike:
    # A Python integer may be too large for JAX's integers, but never for a float.
    return float(period) if isinstance(period, int) else period


def _check_optimiser(optimiser, momentum, nesterov, method) -> None:
    if not (hasattr(optimiser, "init") and hasattr(optimiser, "update")):
        raise ValueError(
            "`optimiser` must be one of optax's, such as `optax.adam(1e-3)`, but "
            f"{optimiser!r} was given."
        )
    if (isinstance(momentum, float | int) and momentum != 0) or nesterov:
        raise ValueError(
            "With an `optimiser` there is no `momentum` to set here: pass "
            "`optax.sgd(learning_rate, momentum, nesterov)`."
        )
    if method not in ("auto", "matrix-free"):
        raise ValueError(
            "An `optimiser` takes its steps on the parameters: the method must be "
            f'"auto" or "matrix-free", but {method!r} was given.'
        )
