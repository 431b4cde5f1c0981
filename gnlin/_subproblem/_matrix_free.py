"""By products with the Jacobian alone: conjugate gradients, or literal descent."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree, Scalar, ScalarLike

from .. import _tree
from .._conjugate_gradients import ConjugateGradients
from .._linearisation import Linearisation
from ..filters import GradientDescent, HeavyBall, PseudoInverse, Tikhonov
from ._base import AbstractSubproblem, Answer


_ROUNDINGS = 10
_POWER_STEPS = 50


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

    def largest_curvature(self) -> Scalar:
        return self.curvature_along_gradient()

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
        # too, and is none. Its rounding is that of its terms, summed without regard to
        # their signs: phi^T r with the signs of r at random.
        terms = _tree.norm(lin.vjp(_with_random_signs(lin.outputs)))
        rounding = _ROUNDINGS * jnp.finfo(dtype).eps * terms / self.gradient_norm
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
            solution.value, solution.stats["num_steps"], num_products, num_products + 1
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
        # As on a spectrum: a residual that has grown past 1/eps says nothing any more.
        largest = _tree.norm(lin.outputs) / jnp.finfo(dtype).eps

        def body(carry):
            k, step, velocity, _ = carry
            linear_residual = _tree.axpy(1, lin.jvp(step), lin.outputs)
            gradient = lin.vjp(linear_residual)
            velocity = _tree.axpy(-eta, gradient, _tree.scale(mu, velocity))
            grown = ~(_tree.norm(linear_residual) <= largest)
            return k + 1, _tree.axpy(1, velocity, step), velocity, grown

        first = _tree.scale(-eta, self._gradient)
        endless = jnp.isinf(period)
        period = jnp.where(endless, 1, period)
        _, step, _, grown = jax.lax.while_loop(
            lambda carry: (carry[0] < period) & ~carry[3],
            body,
            (jnp.ones((), period.dtype), first, first, jnp.array(False)),
        )
        literal = (step, period - 1, period - 1, grown | ~_tree.all_finite(step))

        def limit():
            exact = self.to_tolerance(self._exactly(), 0.0)
            counts = [
                jnp.asarray(n + _POWER_STEPS, float)
                for n in (exact.num_jvps, exact.num_vjps)
            ]
            return exact.step, *counts, eta * self._power_estimate() >= 2 * (1 + mu)

        step, num_jvps, num_vjps, diverged = jax.lax.cond(endless, limit, lambda: literal)
        result = optx.RESULTS.where(
            diverged & jnp.isfinite(self.gradient_norm),
            optx.RESULTS.nonlinear_divergence,
            optx.RESULTS.successful,
        )
        return Answer(step, period, num_jvps, num_vjps, result)

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
    flat, unravel = ravel_pytree(outputs)
    # A generator of its own: the signs are to be the same for ever, and mean nothing.
    signs = np.random.default_rng(0).choice([-1.0, 1.0], flat.size)
    return unravel(flat * jnp.asarray(signs, flat.dtype))
