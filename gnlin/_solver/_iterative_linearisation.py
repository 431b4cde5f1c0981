"""Iterative linearisation: K steps of descent on each linearised model."""

import dataclasses
import math
import warnings
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import (
    as_float,
    as_scalar,
    check_finite_nonnegative,
    check_finite_positive,
    check_flag,
    check_less_than_one,
    check_period,
    is_traced,
    is_zero,
    nan_unless,
    nonnegative,
    positive,
    unless_zero,
)
from .._common._words import how_many
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from .._linearisation._spectrum import Filter
from .._subproblem import (
    AbstractMethod,
    by_products,
    check_form,
    check_method,
    choose,
    Form,
    problem_of,
    ProxLinear,
)
from ..filters import Damped, GradientDescent, GradientFlow, HeavyBall, Nesterov
from ._base import AbstractGaussNewton
from ._inner_step import check_optimiser, inner_step, is_optimiser, optimiser_of, Stream
from ._schedules import is_period, out_of_range, returned_at, rounded, value_at
from ._state import Evaluate, State, Update
from ._stepping import take_step
from ._termination import STANDS_STILL


DescentMethod = Literal[
    "auto", "svd", "eigh", "eigh-first", "kernel", "matrix-free", "flow"
]


# From here on not all whole numbers are doubles. More steps than the second number
# change nothing.
_INEXACT, _LARGEST = 2**53, 10**300


def _whole(period: Any) -> Any:
    """Return a whole number as an integer if it is a double exactly, else as a float."""
    if isinstance(period, int) and period >= _INEXACT:
        return float(min(period, _LARGEST))
    if isinstance(period, float) and period % 1 == 0 and period < _INEXACT:
        return int(period)
    return period


def _is_one(period: ScalarLike) -> bool:
    return isinstance(period, int | float) and period == 1


def _is_endless(period: ScalarLike) -> bool:
    return isinstance(period, float) and math.isinf(period)


# From this period on, literal steps take many seconds.
_MANY = 100_000


def _warn_of_many_steps(period: Any) -> None:
    if isinstance(period, int | float) and _MANY <= period < math.inf:
        warnings.warn(
            f"`IterativeLinearisation` takes {period:,.0f} steps one by one at each "
            "linearisation, because the loss is not squared error: pass "
            '`method="flow"` for gradient flow of the same time, or `form="quadratic"`.',
            stacklevel=2,
        )


class IterativeLinearisation(AbstractGaussNewton):
    r"""Train the linearised model for K steps of gradient descent, then linearise again.

    One outer step is one feature update and K inner steps. With K = 1 this is gradient
    descent on the model itself. With K = infinity it trains the linearisation at the
    start to convergence (the NTK regime), and ends after one outer step.

    For squared error the K steps are one formula on the spectrum of the kernel, and
    $K = 10^8$ costs as much as K = 1. For another loss they are taken one by one, with
    the m x m kernel or by passes through the model, whichever is cheaper. For very many
    very small steps use gradient flow (`method="flow"`).

    For squared error the inner steps diverge if $\eta$ times the largest eigenvalue is
    above 2, or $2(1+\mu)$ with momentum. The run ends with
    `optx.RESULTS.nonlinear_divergence`, before the K steps are taken, if they would
    multiply the loss of the linearised model, or some part of the residual, by more than
    $1/\varepsilon$. From smaller rises a run may recover, so these steps are taken. A
    single step (K = 1), and the steps of an `optimiser`, are not judged on the linearised
    model; the loss after them is, by the `divergence` of [`gnlin.solve`][].

    **Arguments:**

    - `period`: K, a whole number of at least 1 or `math.inf`, also a traced scalar. (A
        Python number is static: another one triggers a new compilation.) With an
        `optimiser` it may be infinite on mini-batches only. With a traced K, `"auto"`
        does not know that small singular values matter: pass `method="svd"` above
        $0.1/\varepsilon$ steps, which are $10^6$ in single precision. A function of the
        number of linearisations so far gives each its own K, which is traced: its value,
        at least 0.5, is rounded to the nearest whole number, and may be infinite.
    - `learning_rate`: $\eta > 0$, a number or a traced scalar, or a function of the
        number of linearisations so far, such as an optax schedule. Pass either this or an
        `optimiser`.
    - `momentum`: $\mu$ of heavy-ball momentum, at least 0 and less than 1. The velocity
        is zero after each linearisation.
    - `nesterov`: whether the momentum is Nesterov's.
    - `damping`: $\lambda \ge 0$. The steps descend on the loss plus
        $\frac\lambda2\lVert\theta - \theta_s\rVert^2$.
    - `optimiser`: an optax optimiser that takes the inner steps.
    - `restart`: whether to reset the optimiser's state at each linearisation. If not,
        K = 1 is the optimiser itself on the model.
    - `form`: the linearised problem for a loss other than squared error. `"prox-linear"`
        keeps the loss, and linearises the model only; `"quadratic"` expands the loss to
        second order, so that the K steps are one formula again.
    - `method`: the way to compute the K steps: on a spectrum (`"svd"`, `"eigh"`; for
        quadratic problems), one by one with the kernel (`"kernel"`) or by passes through
        the model (`"matrix-free"`), in the cheapest of these ways (`"auto"`), or by
        gradient flow for the time $K\eta$ (`"flow"`), with local errors below $10^{-6}$
        of the step ($10^{-4}$ in single precision).
    - `rtol`, `atol`, `norm`, `memory_budget`, `bounds`, `retraction`, `verbose`: as in
        [`gnlin.authoring.AbstractGaussNewton`][].

    !!! example

        ```python
        solver = gnlin.IterativeLinearisation(period=10**5, learning_rate=1e-5)
        solution = gnlin.solve(model, (x, y), solver, max_steps=40)
        gnlin.IterativeLinearisation(period=100, optimiser=optax.adam(1e-3))
        # Features first: K = 1 for a hundred linearisations, then K = 10,000
        features_first = lambda k: jnp.where(k < 100, 1, 10**4)
        gnlin.IterativeLinearisation(features_first, learning_rate=1e-3)
        ```

    ??? cite "Reference"

        A. Goldwaser and H. Ge, *Understanding Sparse Feature Updates in Deep Networks
        using Iterative Linearisation*, arXiv:2211.12345.
    """

    _keeps_bounds: ClassVar[bool] = True

    period: Any = eqx.field(converter=_whole)  # ScalarLike | Schedule
    learning_rate: Any = eqx.field(default=None, converter=as_scalar)  # or None
    momentum: ScalarLike = 0.0
    nesterov: bool = eqx.field(default=False, kw_only=True)
    damping: ScalarLike = eqx.field(default=0.0, converter=unless_zero, kw_only=True)
    optimiser: Any = eqx.field(default=None, kw_only=True)
    restart: bool = eqx.field(default=True, kw_only=True)
    form: Form = eqx.field(default="prox-linear", kw_only=True)
    method: DescentMethod = eqx.field(default="auto", kw_only=True)

    def __check_init__(self):
        if not callable(self.period):
            check_period("period", self.period)
        if (self.learning_rate is None) == (self.optimiser is None):
            raise ValueError(
                "`IterativeLinearisation` needs either a `learning_rate` or an "
                "`optimiser`: pass exactly one of them."
            )
        if self.learning_rate is not None and not callable(self.learning_rate):
            check_finite_positive("learning_rate", self.learning_rate)
        if self.optimiser is not None:
            check_optimiser(self.optimiser, self.momentum, self.nesterov, self.method)
        elif not self.restart:
            raise ValueError(
                "`restart=False` needs an optimiser: pass "
                "`optimiser=optax.sgd(learning_rate, momentum)`."
            )
        check_less_than_one("momentum", self.momentum)
        check_flag("nesterov", self.nesterov)
        check_flag("restart", self.restart)
        check_finite_nonnegative("damping", self.damping)
        check_method(self.method, damped=False, also=("kernel", "flow"))
        if self.form == "quadratic" and self.method == "kernel":
            raise ValueError(
                '`method="kernel"` cannot be used with `form="quadratic"`: use "auto", '
                '"svd", "eigh" or "matrix-free".'
            )
        check_form(self.form, "auto")

    def at(self, num_linearisations: ScalarLike) -> "IterativeLinearisation":
        """Return the solver with the values of its schedules after some linearisations,
        or itself if it has no schedule."""
        number, values = jnp.asarray(num_linearisations), {}
        if not is_traced(number) and (wrong := out_of_range(self, int(number))):
            raise ValueError(f"After {how_many(int(number), 'linearisation')} {wrong}.")
        if callable(self.period):
            values["period"] = rounded(returned_at(self.period, number))
        if callable(self.learning_rate):
            values["learning_rate"] = value_at(self.learning_rate, number, positive)
        return dataclasses.replace(self, **values) if values else self

    def filter(self, num_inner_steps: ScalarLike | None = None) -> Filter:
        """Return the spectral filter of `num_inner_steps`, by default `period`. A solver
        with schedules has one at each linearisation, `solver.at(number).filter()`.

        !!! example

            ```python
            spectrum = gnlin.linearise(residuals, y, (inputs, targets)).spectrum()
            step_of = lambda k: spectrum.step(solver.filter(k))
            path = jax.vmap(step_of)(jnp.array([1, 10, 100]))
            ```
        """
        eta = self.learning_rate
        if eta is None:
            raise ValueError(
                "An `optimiser` has no spectral filter: pass a `learning_rate` instead."
            )
        period = self.period if num_inner_steps is None else num_inner_steps
        if callable(period) or callable(eta):
            raise ValueError(
                "A solver with schedules has a filter at each linearisation: use "
                "`solver.at(number).filter()`."
            )
        if self.method == "flow" and not _is_endless(period):
            filter = GradientFlow(eta * period / (1 - self.momentum))
        elif is_zero(self.momentum):
            filter = GradientDescent(period, eta)
        else:
            kind = Nesterov if self.nesterov else HeavyBall
            filter = kind(period, eta, self.momentum)
        return filter if is_zero(self.damping) else Damped(filter, self.damping)

    def damping_now(self) -> Scalar:
        """Return the damping; NaN if any hyperparameter is out of its range."""
        eta = 1.0 if self.learning_rate is None else self.learning_rate
        momentum = jnp.asarray(self.momentum)
        sound = is_period(self.period) & positive(eta) & (momentum >= 0) & (momentum < 1)
        return nan_unless(sound & nonnegative(self.damping), self.damping)

    def first_memory(self, y: PyTree[Array], dtype: jnp.dtype) -> PyTree:
        if self.optimiser is None or self.restart:
            return None
        return self.optimiser.init(y)

    def update(self, objective, lin, evaluate, memory, num_steps) -> Update:
        return self.at(num_steps)._update(objective, lin, evaluate, memory)

    def _update(self, objective, lin, evaluate, memory) -> Update:
        if self.optimiser is not None:
            return self._optimised(objective, lin, evaluate, memory)
        subproblem = self.subproblem(objective, lin)
        answer = subproblem.solve(self.filter())
        period = jnp.asarray(as_float(self.period), float)
        answer = eqx.tree_at(lambda a: a.num_inner_steps, answer, period)
        # Flow never raises the loss, and a single step is descent on the model itself.
        if self.method != "flow" and not _is_one(self.period):
            loss = objective.value(lin.outputs)
            answer = subproblem.unless_it_rises(answer, loss, period > 1)
        given = objective, lin, evaluate, subproblem, answer
        update = take_step(
            *given,
            damping=self.damping_now(),
            again=lambda lin: self.subproblem(objective, lin).solve(self.filter()).step,
        )
        # With an infinite period the run ends after one outer step.
        over = jnp.isinf(period) & (update.result == optx.RESULTS.successful)
        solved = jax.lax.cond(
            over,
            lambda: self._is_solved(subproblem, answer.step),
            lambda: jnp.array(True),
        )
        result = optx.RESULTS.where(solved, update.result, STANDS_STILL)
        return eqx.tree_at(lambda u: (u.terminate, u.result), update, (over, result))

    def _is_solved(
        self, subproblem: AbstractMethod, step: PyTree[Array]
    ) -> Bool[Array, ""]:
        """Whether the linearised problem's gradient has become almost zero."""
        problem = by_products(subproblem.problem).in_space()
        gradient = problem.gradient(step, self.damping)
        eps = _tree.eps((problem.space.zero(), problem.outputs))
        return _tree.norm(gradient) <= eps ** (1 / 3) * subproblem.gradient_norm

    def subproblem(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        num_trials: int = 1,
    ) -> AbstractMethod:
        """Return the linearised problem, ready for `filter` of any number of steps up to
        the period.

        - `num_trials`: the number of filters that it will be solved for.
        """
        problem = problem_of(self.form, objective, lin)
        if self.method == "kernel":
            problem = ProxLinear(lin.jacobian, lin.outputs, objective)
        elif self.method == "auto" and isinstance(problem, ProxLinear):
            _warn_of_many_steps(self.period)
        method = "auto" if self.method == "flow" else self.method
        return choose(problem, self.filter(), num_trials, method)

    def _optimised(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        memory: PyTree,
    ) -> Update:
        if _is_endless(self.period):
            raise ValueError(
                "On a full batch `period` must be finite with an `optimiser`; to solve "
                'the linearised problem use `GaussNewton(form="prox-linear")`.'
            )
        state = self.optimiser.init(lin.point) if memory is None else memory
        damping = self.damping_now()
        subproblem = by_products(problem_of(self.form, objective, lin))
        answer, state = subproblem.optimise(
            self.optimiser, lin.point, state, self.period, damping
        )
        given = objective, lin, evaluate, subproblem, answer
        kept = None if memory is None else state
        return take_step(*given, memory=kept, damping=damping)

    #
    # Mini-batches: each batch is for one inner step, and theta_s is kept for K of them
    #

    def start_stream(self, y, outputs) -> State:
        if self.method not in ("auto", "matrix-free"):
            raise ValueError(
                "On mini-batches the inner steps are taken one by one: `method` must be "
                f'"auto" or "matrix-free", but {self.method!r} was given.'
            )
        state = self.start(y, outputs)
        inner = optimiser_of(self.at(0)).init(y)
        stream = Stream(y, inner, jnp.array(0))
        return dataclasses.replace(state, memory=stream)

    def linearisation_point(self, state: State) -> PyTree[Array] | None:
        return state.memory.point if isinstance(state.memory, Stream) else None

    def advance_stream(self, objective, fn, y, args, state, *, has_aux):
        return inner_step(self, objective, fn, y, args, state, has_aux)


def as_solver(solver: Any) -> AbstractGaussNewton:
    """Return a solver as it is, and an optax optimiser as iterative linearisation with a
    period of 1."""
    if isinstance(solver, AbstractGaussNewton):
        return solver
    if is_optimiser(solver):
        return IterativeLinearisation(1, optimiser=solver, restart=False)
    if hasattr(solver, "shape") or isinstance(solver, list):
        raise ValueError(
            "Inputs and targets must be passed as one tuple, `(inputs, targets)`, but "
            "`solver`, the argument after the data, is an array or a list."
        )
    named = getattr(solver, "__name__", None)
    given = (
        f"a {type(solver).__name__} was given; with other least-squares solvers use "
        "`optimistix.least_squares`"
        if named in (None, "<lambda>")
        else f"`{named}` was given without its arguments: call it"
    )
    raise ValueError(
        "`solver` must be one of gnlin's, such as `gnlin.LevenbergMarquardt()`, or an "
        f"optax optimiser, such as `optax.adam(1e-3)`, but {given}."
    )
