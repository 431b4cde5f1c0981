"""By products with the Jacobian alone: conjugate gradients, or literal descent."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from jaxtyping import Array, PyTree, Scalar, ScalarLike

from .. import _tree
from .._conjugate_gradients import ConjugateGradients
from .._linearisation import Linearisation
from ..filters import GradientDescent, HeavyBall, PseudoInverse, Tikhonov
from ._base import AbstractSubproblem, Answer


_ROUNDINGS = 10


class MatrixFree(AbstractSubproblem):
    """Nothing of size m x p, m x m or p x p is built."""

    linearisation: Linearisation
    _gradient: PyTree[Array]
    gradient_norm: Scalar
    num_jvps: int = eqx.field(static=True)
    num_vjps: int = eqx.field(static=True)

    def __init__(self, linearisation: Linearisation):
        self.linearisation = linearisation
        self._gradient = linearisation.vjp(linearisation.outputs)
        self.gradient_norm = _tree.norm(self._gradient)
        self.num_jvps = 0
        self.num_vjps = 1

    def gradient(self) -> PyTree[Array]:
        return self._gradient

    def curvature_along_gradient(self) -> Scalar:
        pushed = self.linearisation.jvp(self._gradient)
        return _tree.dot(pushed, pushed) / self.gradient_norm**2

    def with_residual(self, residual: PyTree[Array]) -> "MatrixFree":
        lin = self.linearisation
        return MatrixFree(eqx.tree_at(lambda lin: lin.outputs, lin, residual))

    def solve(self, filter) -> Answer:
        match filter:
            case Tikhonov(damping=damping):
                return self.to_tolerance(self._exactly(), damping)
            case PseudoInverse(rcond=None):
                # From zero, conjugate gradients never leave the range of phi^T: the
                # limit is the minimum-norm solution.
                return self.to_tolerance(self._exactly(), 0.0)
            case GradientDescent(period=period, learning_rate=learning_rate):
                return self.descend(period, learning_rate, 0.0)
            case HeavyBall(period=period, learning_rate=rate, momentum=momentum):
                return self.descend(period, rate, momentum)
        raise ValueError(
            f"`{type(filter).__name__}` has no matrix-free form; use a method with a "
            'spectrum, "svd" or "eigh".'
        )

    def _exactly(self) -> float:
        """The relative linear residual that stands for an exact solution."""
        return 10 * float(jnp.finfo(_tree.dtype(self._gradient)).eps) ** (2 / 3)

    def to_tolerance(
        self, tolerance: ScalarLike, damping: ScalarLike, max_steps: int | None = None
    ) -> Answer:
        r"""Conjugate gradients on $(\phi^\top\phi + \lambda I)\delta = -\phi^\top r$
        until the linear residual is at most `tolerance` times the gradient (2-norms)."""
        lin = self.linearisation
        dtype = _tree.dtype(self._gradient)
        # A gradient within rounding of zero points anywhere, into the null space of phi
        # too, and is none: |phi^T r| says nothing below some roundings of |phi| |r|.
        size = jnp.sqrt(self.curvature_along_gradient()) * _tree.norm(lin.outputs)
        rounding = _ROUNDINGS * jnp.finfo(dtype).eps * size / self.gradient_norm
        tolerance = jnp.fmax(jnp.asarray(tolerance, dtype), rounding)
        curvature = lx.FunctionLinearOperator(
            lambda v: _tree.axpy(damping, v, lin.vjp(lin.jvp(v))),
            jax.eval_shape(lambda: lin.point),
            lx.positive_semidefinite_tag,
        )
        solution = lx.linear_solve(
            curvature,
            _tree.scale(-1, self._gradient),
            ConjugateGradients(tolerance, max_steps),
            throw=False,
        )
        # A tolerance below what the precision allows is met as far as it does.
        num_products = solution.stats["num_products"]
        return Answer(
            solution.value, solution.stats["num_steps"], num_products + 1, num_products
        )

    def descend(
        self, period: ScalarLike, learning_rate: ScalarLike, momentum: ScalarLike
    ) -> Answer:
        """Literal steps of gradient descent with heavy-ball momentum, one tangent and
        one transposed pass each (none but the first gradient's for the first step).

        Steps without an end, if they converge at all, converge to the minimum-norm
        solution, which conjugate gradients find.
        """
        lin = self.linearisation
        dtype = _tree.dtype(self._gradient)
        eta = jnp.asarray(learning_rate, dtype)
        mu = jnp.asarray(momentum, dtype)
        period = jnp.asarray(float(period) if isinstance(period, int) else period, float)

        def body(carry):
            k, step, velocity = carry
            linear_residual = _tree.axpy(1, lin.jvp(step), lin.outputs)
            gradient = lin.vjp(linear_residual)
            velocity = _tree.axpy(-eta, gradient, _tree.scale(mu, velocity))
            return k + 1, _tree.axpy(1, velocity, step), velocity

        first = _tree.scale(-eta, self._gradient)
        endless = jnp.isinf(period)
        period = jnp.where(endless, 1, period)
        _, step, _ = jax.lax.while_loop(
            lambda carry: carry[0] < period,
            body,
            (jnp.ones((), period.dtype), first, first),
        )
        # Without an end the steps are not seen to diverge, but the gradient may point to
        # an eigenvalue at which they do.
        too_large = eta * self.curvature_along_gradient() >= 2 * (1 + mu)
        diverged = ~_tree.all_finite(step) | (endless & too_large)
        diverged = diverged & jnp.isfinite(self.gradient_norm)
        result = optx.RESULTS.where(
            diverged, optx.RESULTS.nonlinear_divergence, optx.RESULTS.successful
        )
        literal = (step, period - 1, period - 1)

        def limit():
            exact = self.to_tolerance(self._exactly(), 0.0)
            counts = (exact.num_jvps, exact.num_vjps)
            return exact.step, *(jnp.asarray(n, float) for n in counts)

        step, num_jvps, num_vjps = jax.lax.cond(endless, limit, lambda: literal)
        return Answer(step, period, num_jvps, num_vjps, result)
