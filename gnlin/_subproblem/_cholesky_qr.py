"""Cholesky factorisations in two stages, which resolve small singular values."""

import math
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax.lax.linalg import triangular_solve
from jaxtyping import Array, Bool, Float, Scalar, ScalarLike

from .._common import _tree
from .._common._cost import rates
from .._common._passes import Passes
from .._common._tree import (
    gram,
    gram_of_columns,
    gram_of_triangle,
    matmul,
    on_one_cpu,
    ravel_pytree,
)
from .._jacobian import Cost
from .._linear_algebra import _lapack
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ..filters import Tikhonov
from ._base import AbstractMethod, Answer, serves_in_two_stages
from ._cholesky import AbstractFactorised, Factorised


# The shift over eps times the trace of the curvature, and the least damping over eps
# times the shift. On the Jacobian of a network for the heat equation (1,120 x 697,
# condition 1e17), factorisations fail from a tenth of the least damping downwards.
_SHIFT, _LEAST = 10.0, 10.0
# Where the Jacobian has no rank, a damping of eps |phi| |r| makes a step of length 1 out
# of rounding. Such a step may have this part of the length of the point.
_PART_OF_POINT = 0.1
# Dampings that a search tries at a linearisation, in the median.
_USUAL_TRIALS = 3


class CholeskyQR(AbstractFactorised):
    r"""The step $-(\phi^\top\phi + \lambda I)^{-1}(\phi^\top r + g_0)$ by Cholesky
    factorisations of p x p matrices in two stages, which resolve small singular values.

    Rounding hides the eigenvalues $w$ of $\phi^\top\phi$ below a shift $s$. So let
    $\phi^\top\phi + sI = LL^\top$ and $Q = \phi L^{-\top}$. Then

    $$\phi^\top\phi + \lambda I = L\,(Q^\top Q + \lambda L^{-1}L^{-\top})\,L^\top,$$

    where $Q^\top Q$ has the eigenvalues $w / (w + s)$, so that rounding hides only those
    below $\varepsilon s$. From $\lambda = s / \sqrt\varepsilon$ on, the plain
    factorisation is used, which is as accurate there.

    ??? cite "Reference"

        T. Fukaya, R. Kannan, Y. Nakatsukasa, Y. Yamamoto and Y. Yanagisawa, *Shifted
        Cholesky QR for computing the QR factorization of ill-conditioned matrices*, SIAM
        J. Sci. Comput. 42 (2020).
    """

    method: ClassVar[str] = "cholesky-qr"
    unit: Scalar  # phi is divided by it, so that no square underflows
    curvature: Float[Array, "p p"]  # phi^T phi
    flat_gradient: Float[Array, " p"]  # phi^T r + g_0
    shift: Scalar
    q: Float[Array, "p m"]  # Q^T
    inverse: Float[Array, "p p"]  # L^-1
    gram: Float[Array, "p p"]  # Q^T Q
    damped: Float[Array, "p p"]  # L^-1 L^-T
    gradient_in_q: Float[Array, " p"]  # Q^T r + L^-1 g_0

    def __init__(self, problem: Quadratic, passes: Passes):
        problem = problem.at_hand()
        AbstractMethod.__init__(self, problem, passes)
        phi = problem.jacobian.as_matrix()
        phi = phi.astype(_tree.dtype((phi, problem.residual)))
        self.unit = _tree.fixed(_tree.unit(phi))
        phi = phi / self.unit
        self.curvature = gram_of_columns(phi)
        shift = _SHIFT * _tree.eps(phi) * jnp.trace(self.curvature)
        self.shift = _tree.fixed(jnp.where(shift > 0, shift, 1))
        # No step depends on L, which is therefore a constant to derivatives.
        identity = jnp.eye(len(self.curvature), dtype=phi.dtype)
        lower = _tree.fixed(_lapack.cholesky(self.curvature + self.shift * identity))
        self.q, self.inverse = _divided(lower, phi.T, identity)
        self.gram = gram(self.q)
        self.damped = gram_of_triangle(self.inverse)
        self.flat_gradient, self.gradient_in_q = self._gradients(problem)
        self.factor = None

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        m, p = cost.shape
        if not serves_in_two_stages(cost, filter):
            return math.inf
        products = 6.0 * m * float(p) ** 2 + 4.0 * float(p) ** 3
        factorisations = 2 + min(num_trials, _USUAL_TRIALS)
        return (
            cost.all_rows
            + products * rates().product
            + factorisations * rates().cholesky(p)
        )

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "CholeskyQR":
        return cls(problem, cost.rows)

    def largest_curvature(self) -> Scalar:
        return jnp.max(jnp.diagonal(self.curvature)) * self.unit**2

    def least_damping(self, size: ScalarLike = 1.0) -> Scalar:
        eps, trace = _tree.eps(self.q), jnp.trace(self.curvature)
        least = _LEAST * eps * self.shift
        # Below this damping, rounding of phi^T r would be a long step in directions that
        # phi does not determine. It vanishes with the residual.
        size = jnp.asarray(size, self.q.dtype) * self.unit * _PART_OF_POINT
        noise = eps * jnp.sqrt(trace) * _tree.norm(self.problem.residual)
        noise = _tree.quotient(noise, size, size > 0)
        noise = jnp.minimum(noise, eps * trace)
        return jnp.maximum(least, noise) * self.unit**2

    def attainable_decrease(self, least: Scalar) -> Scalar:
        filter = Tikhonov(least)
        decrease = self._answer(self._made(filter), filter).decrease
        assert decrease is not None
        if self.problem.rest is None:
            return decrease
        return jnp.where(_tree.any_nonzero(self.problem.rest), jnp.inf, decrease)

    def with_problem(self, problem: Quadratic) -> AbstractMethod:
        new, gradients = super().with_problem(problem), self._gradients(problem)
        return eqx.tree_at(lambda w: (w.flat_gradient, w.gradient_in_q), new, gradients)

    def solve(self, filter: Filter) -> Answer:
        return self._answer(self.factor_for(filter), filter)

    def _answer(self, factor: Factorised, filter: Filter) -> Answer:
        damping = self._scaled_damping(filter)
        is_plain = self._is_plain(damping)
        gradient = jnp.where(is_plain, self.flat_gradient, self.gradient_in_q)
        solution, result = factor.solve(gradient)
        step = -jnp.where(is_plain, solution, matmul(self.inverse.T, solution))
        length = _tree.norm(step)
        decrease = 0.5 * (jnp.dot(gradient, solution) + damping * length**2)
        step = self.problem.jacobian.domain.unravel(step / self.unit)
        norm = length / self.unit
        return Answer(step, decrease=decrease, damped_norm=norm, result=result)

    def _gradients(
        self, problem: Quadratic
    ) -> tuple[Float[Array, " p"], Float[Array, " p"]]:
        """Return phi^T r + g_0 and Q^T r + L^-1 g_0. The second is not L^-1 times the
        first, because L^-1 would magnify its rounding."""
        gradient, _ = ravel_pytree(problem.gradient())
        gradient = gradient.astype(self.q.dtype) / self.unit
        in_q = matmul(self.q, problem.flat_residual().astype(self.q.dtype))
        if problem.rest is not None:
            rest, _ = ravel_pytree(problem.rest)
            in_q += matmul(self.inverse, rest.astype(self.q.dtype) / self.unit)
        return gradient, in_q

    def _made(self, filter: Filter) -> Factorised:
        damping = self._scaled_damping(filter)
        plain = self.curvature + damping * jnp.eye(
            len(self.curvature), dtype=self.q.dtype
        )
        matrix = self.gram + damping * self.damped
        return Factorised.of(jnp.where(self._is_plain(damping), plain, matrix), 0.0)

    def _is_plain(self, damping: Scalar) -> Bool[Array, ""]:
        # The rounding of the steps is eps damping / shift in two stages, and about
        # shift / damping in one.
        return damping * _tree.eps(self.q) ** 0.5 >= self.shift

    def _scaled_damping(self, filter: Filter) -> Scalar:
        return jnp.asarray(self.damping_of(filter), self.q.dtype) / self.unit**2


def _divided(
    lower: Float[Array, "p p"], matrix: Float[Array, "p m"], identity: Float[Array, "p p"]
) -> tuple[Float[Array, "p m"], Float[Array, "p p"]]:
    r"""Return $L^{-1}$ times a matrix, and $L^{-1}$."""
    divide = lambda right: triangular_solve(lower, right, left_side=True, lower=True)
    if not on_one_cpu():  # A solution would gather a matrix that several devices share.
        inverse = divide(identity)
        return matmul(inverse, matrix), inverse
    both = divide(jnp.concatenate([matrix, identity], axis=1))
    return both[:, : matrix.shape[1]], both[:, matrix.shape[1] :]
