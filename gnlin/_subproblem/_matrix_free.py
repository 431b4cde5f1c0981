"""By products with the Jacobian alone: conjugate gradients, or literal descent."""

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
from .._linearisation import Linearisation
from .._objective import SumOfSquares
from ..filters import (
    Damped,
    GradientDescent,
    HeavyBall,
    Nesterov,
    PseudoInverse,
    Tikhonov,
)
from ._base import AbstractSubproblem, Answer
from ._descent import descend
from ._spaces import Parameters


_ROUNDINGS = 10
_POWER_STEPS = 50


class MatrixFree(AbstractSubproblem):
    """Nothing of size m x p, m x m or p x p is built."""

    linearisation: Linearisation
    rest: PyTree[Array] | None
    tolerance: ScalarLike | None  # of a damped solution; `None` for an exact one
    _gradient: PyTree[Array]
    gradient_norm: Scalar
    num_jvps: int = eqx.field(static=True)
    num_vjps: int = eqx.field(static=True)

    def __init__(self, linearisation: Linearisation, rest: PyTree[Array] | None = None):
        self.linearisation = linearisation
        self.rest = rest
        self.tolerance = None
        gradient = linearisation.vjp(linearisation.outputs)
        self._gradient = gradient if rest is None else _tree.axpy(1, rest, gradient)
        self.gradient_norm = _tree.norm(self._gradient)
        self.num_jvps = 0
        self.num_vjps = 1

    def truncated(self, tolerance: ScalarLike) -> "MatrixFree":
        return eqx.tree_at(
            lambda s: s.tolerance, self, tolerance, is_leaf=lambda x: x is None
        )

    def gradient(self) -> PyTree[Array]:
        return self._gradient

    def curvature_along_gradient(self) -> Scalar:
        dtype = self.gradient_norm.dtype
        pushed = self.linearisation.jvp(self._gradient)
        return _tree.dot(pushed, pushed).astype(dtype) / self.gradient_norm**2

    def largest_curvature(self) -> Scalar:
        return self.curvature_along_gradient()

    def with_residual(self, residual: PyTree[Array]) -> "MatrixFree":
        other = MatrixFree(self.linearisation.with_outputs(residual))
        return other if self.tolerance is None else other.truncated(self.tolerance)

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
        raise ValueError(
            f"`{type(filter).__name__}` has no matrix-free form; use a method with a "
            'spectrum, "svd" or "eigh".'
        )

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
        lin = self.linearisation
        dtype = _tree.dtype(self._gradient)
        gradient = self._reachable_gradient(damping)
        norm = _tree.norm(gradient)
        # A gradient within rounding of zero points anywhere, into the null space of phi
        # too, and is none. Its rounding is that of its terms, summed without regard to
        # their signs: phi^T r with the signs of r at random.
        terms = _tree.norm(lin.vjp(_with_random_signs(lin.outputs)))
        rounding = _ROUNDINGS * jnp.finfo(dtype).eps * terms / norm
        tolerance = nan_unless(
            nonnegative(tolerance), jnp.fmax(jnp.asarray(tolerance, dtype), rounding)
        )
        curvature = semidefinite(
            lambda v: _tree.axpy(damping, v, lin.vjp(lin.jvp(v))), lin.point
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
        answer = Answer(
            solution.value, solution.stats["num_steps"], num_products, num_products + 1
        )
        return answer, solution.result == lx.RESULTS.successful

    def _reachable_gradient(self, damping: ScalarLike) -> PyTree[Array]:
        r"""Without damping there is a solution only for what is in the range of
        $\phi^\top$: of the rest, its projection $\phi^\top(\phi\phi^\top)^+\phi\,g_0$."""
        rest, lin = self.rest, self.linearisation
        if rest is None:
            return self._gradient

        def projected():
            kernel = semidefinite(lambda u: lin.jvp(lin.vjp(u)), lin.outputs)
            solver = ConjugateGradients(self.exactly())
            solution = lx.linear_solve(kernel, lin.jvp(rest), solver, throw=False)
            return lin.vjp(_tree.axpy(1, solution.value, lin.outputs))

        undamped = jnp.asarray(damping) == 0
        return jax.lax.cond(
            undamped & _tree.any_nonzero(rest), projected, lambda: self._gradient
        )

    def descend(
        self, filter: GradientDescent | HeavyBall | Nesterov, damping: ScalarLike = 0.0
    ) -> Answer:
        """Literal steps, one tangent and one transposed pass each (none but the first
        gradient's for the first step).

        Steps without an end, if they converge at all, converge to the minimum-norm
        solution, which conjugate gradients find.
        """
        period, eta = filter.period, filter.learning_rate
        momentum = getattr(filter, "momentum", 0.0)
        endless = jnp.isinf(jnp.asarray(period, float))
        literal = descend(
            Parameters(self.linearisation),
            SumOfSquares(),
            self.linearisation.outputs,
            jnp.where(endless, 1, float(period) if isinstance(period, int) else period),
            eta,
            momentum,
            nesterov=isinstance(filter, Nesterov),
            damping=damping,
            gradient=self._gradient,
            rest=self.rest,
        )
        num_passes = literal.num_steps - 1

        def limit():
            exact = self.to_tolerance(self.exactly(), damping)
            counts = [
                jnp.asarray(n + _POWER_STEPS, float)
                for n in (exact.num_jvps, exact.num_vjps)
            ]
            power = self._power_estimate()
            rate, added, stable = (
                jnp.asarray(x, power.dtype)
                for x in (eta, damping, filter.largest_stable())
            )
            return exact.step, *counts, rate * (power + added) >= stable

        step, num_jvps, num_vjps, diverged = jax.lax.cond(
            endless,
            limit,
            lambda: (literal.z, num_passes, num_passes, literal.diverged),
        )
        result = optx.RESULTS.where(
            diverged & jnp.isfinite(self.gradient_norm),
            optx.RESULTS.nonlinear_divergence,
            optx.RESULTS.successful,
        )
        return Answer(step, period, num_jvps, num_vjps, result=result)

    def _power_estimate(self) -> Scalar:
        """The largest eigenvalue of phi^T phi, by the power method from the gradient."""
        lin = self.linearisation

        def body(_, carry):
            v, _ = carry
            v = lin.vjp(lin.jvp(v))
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
