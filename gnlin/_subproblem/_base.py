"""What is asked of the linearised problem is a filter; how it is answered is here."""

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
from jaxtyping import Array, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._passes import Passes
from .._jacobian import Cost
from .._linearisation._spectrum import Filter, svd_is_cheap
from ..filters import (
    Damped,
    GradientDescent,
    GradientFlow,
    HeavyBall,
    Nesterov,
    PseudoInverse,
    Tikhonov,
)


class Answer(eqx.Module):
    """The step that solves a subproblem as far as asked, and what it took.

    - `passes`: of this answer alone, beyond what setting the subproblem up took.
    - `decrease`: what the linearised objective, without damping, falls by; `None` where
        the step solves a damped quadratic problem, and two products tell.
    - `damped_norm`: the step's in the variables in which the subproblem is damped; `None`
        where it is not known without a look at the step.

    The last two are of the numerical range of phi.
    """

    step: PyTree[Array]
    num_inner_steps: ScalarLike = 0
    passes: Passes = Passes()
    decrease: Scalar | None = None
    damped_norm: Scalar | None = None
    result: optx.RESULTS = eqx.field(default_factory=lambda: optx.RESULTS.successful)


class AbstractSubproblem(eqx.Module):
    """A linearised problem made ready for any number of filters.

    - `gradient_norm`: of the objective, NaN where the linearisation is not finite.
    - `passes`: that setting it up took.
    """

    gradient_norm: AbstractVar[Scalar]
    passes: AbstractVar[Passes]

    @abc.abstractmethod
    def solve(self, filter: Filter) -> Answer:
        """The step of a filter."""

    def truncated(
        self, tolerance: ScalarLike, max_steps: int | None = None
    ) -> "AbstractSubproblem":
        """The same, to be solved so well only where it is solved by iteration: until the
        linear residual is `tolerance` times the gradient, or for so many iterations."""
        return self

    def factorised(self, filter: Filter) -> "AbstractSubproblem":
        """The same, with what it takes to solve for a filter made, for several residuals
        and this filter only."""
        return self

    @abc.abstractmethod
    def gradient(self) -> PyTree[Array]:
        """Of the objective at the linearisation point; phi^T r for least squares."""

    def scaled_gradient_norm(self) -> Scalar:
        """The gradient's norm in the variables in which the subproblem is damped."""
        return self.gradient_norm

    def length(self, vector: PyTree[Array]) -> Scalar:
        """The norm of a step, or of a point, in these variables."""
        return _tree.norm(vector)

    def length_of(self, answer: Answer) -> Scalar:
        """The same of an answer's step."""
        known = answer.damped_norm
        return self.length(answer.step) if known is None else known

    def predicted(self, answer: Answer, damping: Scalar) -> Scalar:
        """What a step is predicted to lower the objective by, without damping."""
        if answer.decrease is not None:
            return answer.decrease.astype(damping.dtype)
        along = _tree.dot(answer.step, self.gradient()).astype(damping.dtype)
        length = self.length_of(answer).astype(damping.dtype)
        return 0.5 * (damping * length**2 - along)

    @abc.abstractmethod
    def curvature_along_gradient(self) -> Scalar:
        """|phi g|^2 / |g|^2: an eigenvalue that the gradient g points to, for scale."""

    @abc.abstractmethod
    def largest_curvature(self) -> Scalar:
        """The largest eigenvalue of phi^T phi, or what is known to be near it."""

    def attainable_decrease(self) -> Scalar:
        """What the undamped step is predicted to lower the loss by, |U^T r|^2 / 2 over
        the numerical range; infinity where that is not known without solving for it."""
        return jnp.full_like(self.gradient_norm, jnp.inf)

    @abc.abstractmethod
    def with_residual(self, residual: PyTree[Array]) -> "AbstractSubproblem":
        """The same Jacobian with another residual, set up already."""


class AbstractWay(AbstractSubproblem):
    """A way to solve a linearised problem: whether it serves, and what it costs, is known
    before it is made ready.

    - `method`: what a user calls it.
    - `problem`: a value, [`gnlin.authoring.Quadratic`][] or `ProxLinear`.
    - `stops_early`: whether `truncated` makes a solution cheaper.
    - `solves_anew`: whether another residual costs as much as the first.
    """

    method: ClassVar[str]
    stops_early: ClassVar[bool] = False
    solves_anew: ClassVar[bool] = False
    problem: AbstractVar[Any]

    @classmethod
    @abc.abstractmethod
    def fits(cls, problem: Any, filter: Filter) -> bool:
        """Whether this is a way to solve such a problem for such a filter."""

    @classmethod
    @abc.abstractmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        """Seconds, roughly, for so many filters of one kind on a Jacobian of such costs;
        infinity beyond the memory budget."""

    @classmethod
    @abc.abstractmethod
    def of(cls, problem: Any, cost: Cost) -> "AbstractWay":
        """A problem made ready."""

    def gradient(self) -> PyTree[Array]:
        return self.problem.gradient()


class AbstractWithGradient(AbstractWay):
    """A way that makes the gradient, by one product, and keeps it."""

    passes: Passes
    _gradient: PyTree[Array]
    gradient_norm: Scalar

    def __init__(self, problem: Any, passes: Passes):
        self.problem = problem
        self._gradient = problem.gradient()
        self.gradient_norm = _tree.norm(self._gradient)
        self.passes = passes + Passes(vjps=problem.jacobian.a_product().vjps)

    def gradient(self) -> PyTree[Array]:
        return self._gradient

    def curvature_along_gradient(self) -> Scalar:
        return self.problem.curvature_along(self._gradient)


Descent = GradientDescent | HeavyBall | Nesterov


# Conjugate gradients that stop early take about so many products.
_PRODUCTS = 20
# What an exact step is worth, in seconds, where each example reads few of the parameters.
_SPARSE_STEP = 2e-3


class Early(Tikhonov):
    """Asks for a solution whose damping is not zero, and that conjugate gradients may
    stop early.

    - `worth`, `times`: an exact one is worth so many seconds, and so many times what one
        by conjugate gradients takes.
    """

    worth: float = eqx.field(default=0.0, static=True)
    times: float = eqx.field(default=1.0, static=True)

    def price(self, cost: Cost) -> float:
        """Of a solution that stops early, in seconds of one that does not."""
        worth = min(self.worth, _SPARSE_STEP) if cost.reads else self.worth
        return max(worth, self.times * _PRODUCTS * cost.one_product)


class AbstractIteration(AbstractWithGradient):
    """A way by iteration: a solution to a tolerance, literal steps, or a flow.

    - `tolerance`: of a damped solution; `None` for an exact one.
    - `max_steps`: that it may take; `None` for as many as it needs.
    """

    stops_early: ClassVar[bool] = True
    solves_anew: ClassVar[bool] = True
    tolerance: ScalarLike | None
    max_steps: int | None

    def __init__(
        self,
        problem: Any,
        passes: Passes,
        tolerance: ScalarLike | None = None,
        max_steps: int | None = None,
    ):
        super().__init__(problem, passes)
        self.tolerance = tolerance
        self.max_steps = max_steps

    @classmethod
    def fits(cls, problem: Any, filter: Filter) -> bool:
        filter, _ = undamped(filter)
        if isinstance(filter, PseudoInverse):
            return filter.rcond is None
        return isinstance(filter, Tikhonov | Descent | GradientFlow)

    def truncated(
        self, tolerance: ScalarLike, max_steps: int | None = None
    ) -> "AbstractIteration":
        return eqx.tree_at(
            lambda s: (s.tolerance, s.max_steps),
            self,
            (tolerance, max_steps),
            is_leaf=lambda x: x is None,
        )

    def largest_curvature(self) -> Scalar:
        return self.curvature_along_gradient()

    @abc.abstractmethod
    def exactly(self) -> float:
        """The tolerance that stands for an exact solution."""

    @abc.abstractmethod
    def to_tolerance(
        self,
        tolerance: ScalarLike,
        damping: ScalarLike,
        max_steps: int | None = None,
        *,
        is_damped: bool = False,
    ) -> Answer:
        """The solution, to where the gradient is `tolerance` times what it was.

        - `is_damped`: whether it is known that the damping is not zero.
        """

    @abc.abstractmethod
    def descend(self, filter: Descent, damping: ScalarLike) -> Answer:
        """Literal steps."""

    @abc.abstractmethod
    def flow(self, filter: GradientFlow, damping: ScalarLike) -> Answer:
        """Gradient flow for a time."""

    def solve(self, filter: Filter) -> Answer:
        filter, damping = undamped(filter)
        match filter:
            case Tikhonov(damping=more):
                tolerance = self.tolerance
                tolerance = self.exactly() if tolerance is None else tolerance
                is_damped = isinstance(filter, Early)
                settings = tolerance, damping + more, self.max_steps
                return self.to_tolerance(*settings, is_damped=is_damped)
            case PseudoInverse(rcond=None):
                # From zero, conjugate gradients never leave the range of phi^T: the
                # limit is the minimum-norm solution.
                return self.to_tolerance(self.exactly(), damping)
            case GradientDescent() | HeavyBall() | Nesterov():
                return self.descend(filter, damping)
            case GradientFlow():
                return self.flow(filter, damping)
        raise does_not_serve(self.method, filter)

    def verdict(self, diverged: Array) -> optx.RESULTS:
        """Divergence, unless there was no number to start from."""
        return optx.RESULTS.where(
            diverged & jnp.isfinite(self.gradient_norm),
            optx.RESULTS.nonlinear_divergence,
            optx.RESULTS.successful,
        )


def undamped(filter: Filter) -> tuple[Filter, ScalarLike]:
    """A filter without the damping that is added to it, and that."""
    if isinstance(filter, Damped):
        return filter.filter, filter.damping
    return filter, 0.0


def num_steps_of(filter: Descent) -> float:
    """As far as it is known before the program runs: else very many."""
    period: Any = filter.period
    return float(period) if _is_known(period) else math.inf


def vanishes(filter: Filter) -> bool:
    """Whether a filter has no damping, or one that may vanish: then it asks for small
    singular values as they are."""
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


def _is_known(number: ScalarLike) -> bool:
    """Before the program runs."""
    return isinstance(number, int | float | np.ndarray)


# What small singular values are worth that are resolved to rounding, in seconds: as long
# as one is glad to wait where no damping hides them.
_ACCURACY = 3.0


def price_of_squaring(cost: Cost, filter: Filter) -> float:
    """Of forming phi phi^T, or phi^T phi, which squares the condition number."""
    return _ACCURACY if vanishes(filter) or svd_is_cheap(*cost.shape) else 0.0


def unless_endless(
    length: ScalarLike,
    limit: Callable[[], Answer],
    otherwise: Callable[[ScalarLike], Answer],
) -> Answer:
    """What steps, or a flow, of some length lead to; or, of an infinite one, what they
    converge to."""
    if _is_known(length):
        return limit() if np.isinf(length) else otherwise(length)
    endless = jnp.isinf(length)
    finite = jnp.where(endless, 1, jnp.asarray(length, float))

    def parts(answer: Answer):
        num_inner_steps = jnp.asarray(answer.num_inner_steps, float)
        return answer.step, num_inner_steps, answer.passes.traced(), answer.result

    step, num_inner_steps, passes, result = jax.lax.cond(
        endless, lambda: parts(limit()), lambda: parts(otherwise(finite))
    )
    return Answer(step, num_inner_steps, passes, result=result)


def does_not_serve(method: str, filter: Filter) -> ValueError:
    """Of a subproblem that was made ready for other filters."""
    return ValueError(
        f"A problem made ready by the method {method!r} does not serve for "
        f"`{type(filter).__name__}`: choose a way for this filter."
    )
