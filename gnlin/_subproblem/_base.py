"""The interface of a linearised problem that is ready to be solved for any filter."""

import abc
import math
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from equinox import AbstractVar
from jaxtyping import Array, Bool, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._cost import rates
from .._common._passes import Passes
from .._jacobian import Cost
from .._linearisation._decompositions import svd_is_cheap
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ..filters import (
    Damped,
    GradientDescent,
    GradientFlow,
    HeavyBall,
    Nesterov,
    PseudoInverse,
    Tikhonov,
)


# The largest curvature times eps to this power is a damping without effect.
_LEAST_POWER = 2.5


class Answer(eqx.Module):
    """A step of a subproblem, and what it cost.

    - `passes`: the passes that this step took, without those that set the subproblem up.
    - `decrease`: by how much the linearised objective falls, without damping. `None` if
        it is to be computed by the formula for the solution of a damped quadratic.
    - `damped_norm`: the norm of the step in the variables in which the subproblem is
        damped. `None` if it is to be computed from the step.

    `decrease` and `damped_norm` disregard directions outside the numerical range of phi.
    """

    step: PyTree[Array]
    num_inner_steps: ScalarLike = 0
    passes: Passes = Passes()
    decrease: Scalar | None = None
    damped_norm: Scalar | None = None
    result: optx.RESULTS = eqx.field(default_factory=lambda: optx.RESULTS.successful)


class AbstractSubproblem(eqx.Module):
    """A linearised problem that is set up once and can be solved for any number of
    filters.

    - `gradient_norm`: the norm of the objective's gradient; NaN if the linearisation is
        not finite.
    - `passes`: the passes that the setup took.
    """

    gradient_norm: AbstractVar[Scalar]
    passes: AbstractVar[Passes]

    @abc.abstractmethod
    def solve(self, filter: Filter) -> Answer:
        """Return the step of a filter."""

    def truncated(
        self, tolerance: ScalarLike, max_steps: ScalarLike | None = None
    ) -> "AbstractSubproblem":
        """Return a subproblem whose iterations, if it has any, stop early: once the
        linear residual is `tolerance` times the gradient, or after `max_steps`."""
        return self

    def factorised(self, filter: Filter) -> "AbstractSubproblem":
        """Return a subproblem that is factorised for this filter only, so that solving it
        for several residuals is cheap."""
        return self

    @abc.abstractmethod
    def gradient(self) -> PyTree[Array]:
        """Return the objective's gradient at the linearisation point: phi^T r for least
        squares."""

    def scaled_gradient_norm(self) -> Scalar:
        """Return the norm of the gradient in the damped variables."""
        return self.gradient_norm

    def length(self, vector: PyTree[Array]) -> Scalar:
        """Return the norm of a step, or of a point, in the damped variables."""
        return _tree.norm(vector)

    def length_of(self, answer: Answer) -> Scalar:
        """Return the norm of an answer's step in the damped variables."""
        known = answer.damped_norm
        return self.length(answer.step) if known is None else known

    def predicted(self, answer: Answer, damping: Scalar) -> Scalar:
        """Return the predicted decrease of the objective, without damping."""
        if answer.decrease is not None:
            return answer.decrease.astype(damping.dtype)
        along = _tree.dot(answer.step, self.gradient()).astype(damping.dtype)
        length = self.length_of(answer).astype(damping.dtype)
        return 0.5 * (damping * length**2 - along)

    @abc.abstractmethod
    def curvature_along_gradient(self) -> Scalar:
        """Return |phi g|^2 / |g|^2, the curvature along the gradient g; 0 if g is 0."""

    @abc.abstractmethod
    def largest_curvature(self) -> Scalar:
        """Return the largest eigenvalue of phi^T phi, or a cheap estimate of it."""

    def least_damping(self, size: ScalarLike = 1.0) -> Scalar:
        """Return a damping so small that it has no effect in this precision, at a point
        of this norm in the damped variables."""
        largest = self.largest_curvature()
        return largest * _tree.eps(largest) ** _LEAST_POWER

    def attainable_decrease(self, least: Scalar) -> Scalar:
        """Return the predicted decrease of the undamped step, |U^T r|^2 / 2 over the
        numerical range, or infinity if computing it would take long. `least` is a damping
        that may take the place of none."""
        return jnp.full_like(self.gradient_norm, jnp.inf)

    def with_residual(self, residual: PyTree[Array]) -> "AbstractSubproblem":
        """Return the subproblem of another residual; it shares the setup of this one.
        Only geodesic acceleration needs it."""
        raise NotImplementedError


class AbstractMethod(AbstractSubproblem):
    """A way to solve the linearised problem. Whether it applies to a problem, and its
    cost, are known before it is set up. It computes the gradient by one product.

    A way of your own defines `of` and `solve`, and is passed as a class, as in
    `gnlin.DampedGaussNewton(0.1, method=Dense)`. By default it is for damped quadratic
    problems. If a loss is not squared error, its gradient has a part `problem.rest`,
    which `gradient()` includes and the residual does not.

    - `method`: its name, as users of gnlin's own ways pass it.
    - `problem`: a [`gnlin.authoring.Quadratic`][] or a `ProxLinear`.
    - `stops_early`: whether `truncated` makes a solution cheaper.
    - `residuals_are_dear`: whether each further residual costs as much as the first, so
        that geodesic acceleration is left out by default.

    !!! example

        ```python
        class Dense(gnlin.authoring.AbstractMethod):
            @classmethod
            def of(cls, problem, cost):
                return cls(problem.at_hand(), cost.rows)

            def solve(self, filter):
                curvature = self.problem.jacobian.curvature()
                damped = curvature + filter.damping * jnp.eye(len(curvature))
                gradient, unravel = jax.flatten_util.ravel_pytree(self.gradient())
                step = unravel(-jnp.linalg.solve(damped, gradient))
                return gnlin.authoring.Answer(step)
        ```
    """

    method: ClassVar[str]
    stops_early: ClassVar[bool] = False
    residuals_are_dear: ClassVar[bool] = False
    problem: Any
    passes: Passes
    _gradient: PyTree[Array]
    gradient_norm: Scalar

    def __init__(self, problem: Any, passes: Passes):
        self.problem = problem
        self._gradient = problem.gradient()
        self.gradient_norm = _tree.norm(self._gradient)
        self.passes = passes + Passes(vjps=problem.jacobian.a_product().vjps)

    @classmethod
    def fits(cls, problem: Any, filter: Filter) -> bool:
        """Whether this way can solve such a problem for such a filter. By default it
        solves damped quadratic problems."""
        return isinstance(problem, Quadratic) and isinstance(filter, Tikhonov)

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        """Estimate the seconds that `num_trials` filters of one kind take, from the costs
        of the Jacobian; infinity if they exceed the memory budget. By default it is
        infinite, so that "auto" never chooses the way."""
        return math.inf

    @classmethod
    @abc.abstractmethod
    def of(cls, problem: Any, cost: Cost, *settings: Any) -> "AbstractMethod":
        """Set up a problem. A method with parameters is passed as the only setting."""

    def gradient(self) -> PyTree[Array]:
        return self._gradient

    def curvature_along_gradient(self) -> Scalar:
        return self.problem.curvature_along(self._gradient)

    def largest_curvature(self) -> Scalar:
        return self.curvature_along_gradient()

    def with_problem(self, problem: Any) -> "AbstractMethod":
        """Return the subproblem of another residual and rest, with the same Jacobian."""
        gradient = problem.gradient()
        passes = Passes(vjps=problem.jacobian.a_product().vjps)
        new = problem, gradient, _tree.norm(gradient), passes
        parts = lambda w: (w.problem, w._gradient, w.gradient_norm, w.passes)
        return eqx.tree_at(parts, self, new)

    def with_residual(self, residual: PyTree[Array]) -> AbstractSubproblem:
        return self.with_problem(self.problem.with_residual(residual))

    def unless_it_rises(
        self, answer: Answer, loss: Scalar, judged: Bool[Array, ""]
    ) -> Answer:
        """Return an answer, with the result divergence if it is `judged` and its step
        multiplies the loss of the linearised problem, which is `loss` before the step, by
        more than 1/eps. A run may recover from a smaller rise."""
        decrease, passes = answer.decrease, answer.passes
        if decrease is None:
            decrease = self.problem.decrease(answer.step)
            passes += Passes(jvps=self.problem.jacobian.a_product().jvps)
        rises = judged & (-decrease * _tree.eps(loss) > jnp.abs(loss))
        rises &= answer.result == optx.RESULTS.successful
        divergence = optx.RESULTS.nonlinear_divergence
        result = optx.RESULTS.where(rises, divergence, answer.result)
        return eqx.tree_at(lambda a: (a.passes, a.result), answer, (passes, result))

    def damping_of(self, filter: Filter) -> ScalarLike:
        """Return the damping of a `Tikhonov` filter; raise for any other filter."""
        if not isinstance(filter, Tikhonov):
            raise does_not_serve(type(self), filter)
        return filter.damping


Descent = GradientDescent | HeavyBall | Nesterov


# Typical number of products of conjugate gradients that stop early.
_PRODUCTS = 20
# Largest `InexactTikhonov.worth` for a Jacobian of which each example reads few
# parameters.
_SPARSE_STEP = 2e-3


class InexactTikhonov(Tikhonov):
    """Tikhonov's filter with a positive damping, whose step may be inexact, as by
    conjugate gradients that stop early. Where a way is chosen before the damping is
    known, 0 stands for one that may become tiny.

    - `worth`, `times`: an exact solution is preferred if it takes less than `worth`
        seconds, or less than `times` the seconds of conjugate gradients that stop early.
    """

    worth: float = eqx.field(default=0.0, static=True)
    times: float = eqx.field(default=1.0, static=True)

    def price(self, cost: Cost) -> float:
        """Return the seconds below which an exact solution is preferred."""
        worth = min(self.worth, _SPARSE_STEP) if cost.reads else self.worth
        return max(worth, self.times * _PRODUCTS * cost.one_product)


def undamped(filter: Filter) -> tuple[Filter, ScalarLike]:
    """Split a filter into the filter without `Damped`, and the damping it added."""
    if isinstance(filter, Damped):
        return filter.filter, filter.damping
    return filter, 0.0


def is_plain_inverse(filter: Filter) -> bool:
    """Whether a filter is the pseudo-inverse without a threshold of the user's."""
    return isinstance(filter, PseudoInverse) and filter.rcond is None


def num_steps_of(filter: Descent) -> float:
    """Return the number of steps, or infinity if it is traced."""
    period: Any = filter.period
    return float(period) if _is_known(period) else math.inf


def vanishes(filter: Filter) -> bool:
    """Whether a filter has no damping at all, so that its step depends on the accuracy
    of small singular values."""
    match filter:
        case PseudoInverse():
            return True
        case Tikhonov(damping=damping):
            return _is_known(damping) and bool(np.all(damping == 0))
        case GradientDescent() | HeavyBall() | Nesterov():
            return _is_known(filter.period) and math.isinf(filter.period)
        case GradientFlow(time=time):
            return _is_known(time) and math.isinf(time)
    return False


# Up to this number of steps of descent, times eps, squared singular values are accurate
# enough. In single precision the linearised loss was off by 0.4 % after 1e6 steps, and by
# 28 % after 1e7.
_MOST_STEPS = 0.1


def needs_accuracy(filter: Filter, cost: Cost) -> bool:
    """Whether a step depends on singular values that their squares do not resolve, as far
    as is known before the program runs."""
    if not isinstance(filter, Descent) or not _is_known(filter.period):
        return vanishes(filter)
    momentum: Any = getattr(filter, "momentum", 0.0)
    steps: Any = filter.period / (1 - momentum if _is_known(momentum) else 1)
    return bool(steps * float(np.finfo(f"f{cost.itemsize}").eps) > _MOST_STEPS)


def _is_known(number: ScalarLike) -> bool:
    """Whether a number is known before the program runs."""
    return isinstance(number, int | float | np.ndarray)


def price_of_squaring(cost: Cost, filter: Filter) -> float:
    """Return the seconds to add to the cost of a way that forms phi phi^T or phi^T phi,
    and so squares the condition number."""
    if serves_in_two_stages(cost, filter):
        return math.inf
    is_dear = needs_accuracy(filter, cost) or svd_is_cheap(*cost.shape)
    return rates().accuracy if is_dear else 0.0


def serves_in_two_stages(cost: Cost, filter: Filter) -> bool:
    """Whether `CholeskyQR` serves: for dampings that are positive but may become tiny,
    if the Jacobian and another matrix of its size fit in the memory budget. A square
    Jacobian is that of a system of equations, which needs undamped steps."""
    m, p = cost.shape
    fits = p < m and cost.holds(2 * m * p)
    return fits and isinstance(filter, InexactTikhonov) and vanishes(filter)


def unless_endless(
    length: ScalarLike,
    limit: Callable[[], Answer],
    otherwise: Callable[[ScalarLike], Answer],
) -> Answer:
    """Return the result after a finite number of steps (or time), or the limit if it is
    infinite."""
    if _is_known(length):
        return limit() if np.isinf(length) else otherwise(length)
    endless = jnp.isinf(length)
    finite = jnp.where(endless, 1, jnp.asarray(length, float))
    return either(endless, limit, lambda: otherwise(finite))


def either(
    condition: Bool[Array, ""], this: Callable[[], Answer], that: Callable[[], Answer]
) -> Answer:
    """Compute one of two answers, without its decrease and its damped norm."""

    def carried(answer: Answer) -> Answer:
        num_inner_steps = jnp.asarray(answer.num_inner_steps, float)
        passes = answer.passes.traced()
        return Answer(answer.step, num_inner_steps, passes, result=answer.result)

    return jax.lax.cond(condition, lambda: carried(this()), lambda: carried(that()))


def does_not_serve(way: type[AbstractMethod], filter: Filter) -> ValueError:
    name = getattr(way, "method", way.__name__)
    return ValueError(
        f"The method {name!r} cannot be used for `{type(filter).__name__}`: choose "
        "another method for this filter."
    )
