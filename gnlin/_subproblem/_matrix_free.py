"""By products with the Jacobian alone: conjugate gradients, or literal descent."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
from jaxtyping import Array, Bool, PyTree, Scalar, ScalarLike

from .. import _tree
from .._checks import nan_unless, nonnegative
from .._conjugate_gradients import ConjugateGradients, semidefinite
from .._jacobian import Cost
from .._objective import SumOfSquares
from .._passes import Passes
from .._problem import Quadratic
from .._spectrum import Filter
from ..filters import (
    Damped,
    GradientDescent,
    GradientFlow,
    HeavyBall,
    Nesterov,
    PseudoInverse,
    Tikhonov,
)
from ._base import (
    AbstractWay,
    Answer,
    Descent,
    does_not_serve,
    num_steps_of,
    unless_endless,
    vanishes,
)
from ._descent import descend
from ._flow import flow, TOLERANCE
from ._spaces import Parameters


_ROUNDINGS = 10
_POWER_STEPS = 50
# As many products as no other way costs.
_LAST_RESORT = 1e15


class MatrixFree(AbstractWay):
    """Nothing of size m x p, m x m or p x p is built."""

    method: ClassVar[str] = "matrix-free"
    problem: Quadratic
    passes: Passes
    tolerance: ScalarLike | None  # of a damped solution; `None` for an exact one
    _gradient: PyTree[Array]
    gradient_norm: Scalar

    def __init__(self, problem: Quadratic, tolerance: ScalarLike | None = None):
        self.problem = problem
        self.tolerance = tolerance
        self._gradient = problem.gradient()
        self.gradient_norm = _tree.norm(self._gradient)
        self.passes = Passes(vjps=problem.jacobian.a_product().vjps)

    @classmethod
    def fits(cls, problem, filter: Filter) -> bool:
        if isinstance(filter, Damped):
            return cls.fits(problem, filter.filter)
        known = isinstance(filter, Tikhonov | Descent | GradientFlow)
        known |= isinstance(filter, PseudoInverse) and filter.rcond is None
        return isinstance(problem, Quadratic) and known

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        if isinstance(filter, Damped):
            filter = filter.filter
        if isinstance(filter, Descent) and not vanishes(filter):
            num_steps = min(num_steps_of(filter), _LAST_RESORT)
            return num_trials * num_steps * cost.one_product
        # How many are needed the spectrum says, and the damping, which nobody knows yet:
        # where there is room for anything else, that is taken.
        return _LAST_RESORT * num_trials * cost.one_product

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "MatrixFree":
        return cls(problem)

    def truncated(self, tolerance: ScalarLike) -> "MatrixFree":
        return eqx.tree_at(
            lambda s: s.tolerance, self, tolerance, is_leaf=lambda x: x is None
        )

    def gradient(self) -> PyTree[Array]:
        return self._gradient

    def curvature_along_gradient(self) -> Scalar:
        dtype = self.gradient_norm.dtype
        pushed = self.problem.jacobian.mv(self._gradient)
        return _tree.dot(pushed, pushed).astype(dtype) / self.gradient_norm**2

    def largest_curvature(self) -> Scalar:
        return self.curvature_along_gradient()

    def with_residual(self, residual: PyTree[Array]) -> "MatrixFree":
        problem = self.problem.with_residual(residual)
        return MatrixFree(problem, tolerance=self.tolerance)

    def solve(self, filter) -> Answer:
        damping = 0.0
        if isinstance(filter, Damped):
            filter, damping = filter.filter, filter.damping
        match filter:
            case Tikhonov(damping=more):
                tolerance = self.tolerance
                tolerance = self.exactly() if tolerance is None else tolerance
                return self.to_tolerance(tolerance, damping + more)
            case PseudoInverse(rcond=None):
                # From zero, conjugate gradients never leave the range of phi^T: the
                # limit is the minimum-norm solution.
                return self.to_tolerance(self.exactly(), damping)
            case GradientDescent() | HeavyBall() | Nesterov():
                return self.descend(filter, damping)
            case GradientFlow(time=time):
                return unless_endless(
                    time,
                    lambda: self.to_tolerance(self.exactly(), damping),
                    lambda time: self._flow(time, damping),
                )
        raise does_not_serve(self.method, filter)

    def exactly(self) -> float:
        """The relative linear residual that stands for an exact solution."""
        return float(jnp.finfo(_tree.dtype(self._gradient)).eps) ** (3 / 4)

    def to_tolerance(
        self,
        tolerance: ScalarLike,
        damping: ScalarLike,
        max_steps: int | None = None,
        start: PyTree[Array] | None = None,
        preconditioner: lx.AbstractLinearOperator | None = None,
    ) -> Answer:
        r"""Conjugate gradients on $(\phi^\top\phi + \lambda I)\delta = -\phi^\top r$,
        from `start` (or zero), until the linear residual is at most `tolerance` times the
        gradient (2-norms). A tolerance below what the precision allows is met as far as
        it does."""
        answer, _ = self.attempt(tolerance, damping, max_steps, start, preconditioner)
        return answer

    def attempt(
        self,
        tolerance: ScalarLike,
        damping: ScalarLike,
        max_steps: int | None = None,
        start: PyTree[Array] | None = None,
        preconditioner: lx.AbstractLinearOperator | None = None,
    ) -> tuple[Answer, Bool[Array, ""]]:
        """The same, and whether the tolerance is met."""
        jacobian, residual = self.problem.jacobian, self.problem.residual
        dtype = _tree.dtype(self._gradient)
        gradient = self._reachable_gradient(damping)
        norm = _tree.norm(gradient)
        # A gradient within rounding of zero points anywhere, into the null space of phi
        # too, and is none. Its rounding is that of its terms, summed without regard to
        # their signs: phi^T r with the signs of r at random.
        terms = _tree.norm(jacobian.rmv(_with_random_signs(residual)))
        rounding = _ROUNDINGS * jnp.finfo(dtype).eps * terms / norm
        tolerance = nan_unless(
            nonnegative(tolerance), jnp.fmax(jnp.asarray(tolerance, dtype), rounding)
        )
        curvature = semidefinite(
            lambda v: _tree.axpy(damping, v, jacobian.rmv(jacobian.mv(v))),
            jacobian.domain.tree,
        )
        options = {"y0": start, "preconditioner": preconditioner}
        solution = lx.linear_solve(
            curvature,
            _tree.scale(-1, gradient),
            ConjugateGradients(tolerance, max_steps),
            options={k: v for k, v in options.items() if v is not None},
            throw=False,
        )
        num_products = solution.stats["num_products"]
        passes = self.problem.jacobian.a_product() * num_products + Passes(
            vjps=self.problem.jacobian.a_product().vjps
        )
        answer = Answer(solution.value, solution.stats["num_steps"], passes)
        return answer, solution.result == lx.RESULTS.successful

    def _reachable_gradient(self, damping: ScalarLike) -> PyTree[Array]:
        r"""Without damping there is a solution only for what is in the range of
        $\phi^\top$: of the rest, its projection $\phi^\top(\phi\phi^\top)^+\phi\,g_0$."""
        jacobian, rest = self.problem.jacobian, self.problem.rest
        if rest is None:
            return self._gradient

        def projected():
            kernel = semidefinite(
                lambda u: jacobian.mv(jacobian.rmv(u)), jacobian.codomain.tree
            )
            solver = ConjugateGradients(self.exactly())
            solution = lx.linear_solve(kernel, jacobian.mv(rest), solver, throw=False)
            return jacobian.rmv(_tree.axpy(1, solution.value, self.problem.residual))

        undamped = jnp.asarray(damping) == 0
        return jax.lax.cond(
            undamped & _tree.any_nonzero(rest), projected, lambda: self._gradient
        )

    def descend(self, filter: Descent, damping: ScalarLike = 0.0) -> Answer:
        """Literal steps, one tangent and one transposed pass each (none but the first
        gradient's for the first step).

        Steps without an end, if they converge at all, converge to the minimum-norm
        solution, which conjugate gradients find.
        """
        period, eta = filter.period, filter.learning_rate
        momentum = getattr(filter, "momentum", 0.0)
        endless = jnp.isinf(jnp.asarray(period, float))
        literal = descend(
            Parameters(self.problem.jacobian),
            SumOfSquares(),
            self.problem.residual,
            jnp.where(endless, 1, float(period) if isinstance(period, int) else period),
            eta,
            momentum,
            nesterov=isinstance(filter, Nesterov),
            damping=damping,
            gradient=self._gradient,
            rest=self.problem.rest,
        )
        steps = self.problem.jacobian.a_product() * (literal.num_steps - 1)

        def limit():
            exact = self.to_tolerance(self.exactly(), damping)
            taken = exact.passes + self.problem.jacobian.a_product() * _POWER_STEPS
            power = self._power_estimate()
            rate, added, stable = (
                jnp.asarray(x, power.dtype)
                for x in (eta, damping, filter.largest_stable())
            )
            return exact.step, taken.traced(), rate * (power + added) >= stable

        step, passes, diverged = jax.lax.cond(
            endless, limit, lambda: (literal.z, steps.traced(), literal.diverged)
        )
        result = optx.RESULTS.where(
            diverged & jnp.isfinite(self.gradient_norm),
            optx.RESULTS.nonlinear_divergence,
            optx.RESULTS.successful,
        )
        return Answer(step, period, passes, result=result)

    def _flow(self, time: ScalarLike, damping: ScalarLike) -> Answer:
        end = flow(
            Parameters(self.problem.jacobian),
            SumOfSquares(),
            self.problem.residual,
            time,
            damping,
            TOLERANCE[_tree.dtype(self._gradient).name],
            self.problem.rest,
        )
        result = optx.RESULTS.where(
            ~end.met & jnp.isfinite(self.gradient_norm),
            optx.RESULTS.nonlinear_divergence,
            optx.RESULTS.successful,
        )
        passes = self.problem.jacobian.a_product() * end.num_products
        return Answer(end.z, end.num_products, passes, result=result)

    def _power_estimate(self) -> Scalar:
        """The largest eigenvalue of phi^T phi, by the power method from the gradient."""
        jacobian = self.problem.jacobian

        def body(_, carry):
            v, _ = carry
            v = jacobian.rmv(jacobian.mv(v))
            size = _tree.norm(v)
            return _tree.scale(1 / jnp.where(size > 0, size, 1), v), size

        unit = jnp.where(self.gradient_norm > 0, self.gradient_norm, 1)
        start = _tree.scale(1 / unit, self._gradient), jnp.zeros_like(unit)
        return jax.lax.fori_loop(0, _POWER_STEPS, body, start)[1]


def _with_random_signs(outputs: PyTree[Array]) -> PyTree[Array]:
    # A generator of its own: the signs are to be the same for ever, and mean nothing.
    generator = np.random.default_rng(0)

    def with_signs(x):
        return x * jnp.asarray(generator.choice([-1.0, 1.0], x.shape), x.dtype)

    return jax.tree.map(with_signs, outputs)
