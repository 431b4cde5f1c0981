"""Cholesky factorisations that do not square the condition number."""

import math
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax.lax.linalg import triangular_solve
from jaxtyping import Array, Float, PyTree, Scalar

from .._common import _tree
from .._common._cost import rates
from .._common._passes import Passes
from .._common._tree import gram_of_columns, matmul, ravel_pytree
from .._jacobian import Cost
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ..filters import Tikhonov
from ._base import AbstractMethod, Answer, Early
from ._cholesky import Factorised


# The shift is this multiple of eps times the trace of the curvature, and the least
# damping the same multiple of eps times the shift. On the Jacobian of a network for the
# heat equation (1,120 x 697, condition 1e17), 3 and 30 serve as well. At a tenth of the
# least damping the factorisation fails.
_ROUNDINGS = 10


class CholeskyQR(AbstractMethod):
    r"""The step $-(\phi^\top\phi + \lambda I)^{-1}(\phi^\top r + g_0)$ by Cholesky
    factorisations of p x p matrices, accurate for small singular values, too.

    Rounding hides the eigenvalues $w$ of $\phi^\top\phi$ below a shift $s$. So let
    $\phi^\top\phi + sI = LL^\top$ and $Q = \phi L^{-\top}$. Then

    $$\phi^\top\phi + \lambda I = L\,(Q^\top Q + \lambda L^{-1}L^{-\top})\,L^\top,$$

    where $Q^\top Q$ has the eigenvalues $w / (w + s)$, so that rounding hides only those
    below $\varepsilon s$.

    ??? cite "Reference"

        T. Fukaya, R. Kannan, Y. Nakatsukasa, Y. Yamamoto and Y. Yanagisawa, *Shifted
        Cholesky QR for computing the QR factorization of ill-conditioned matrices*, SIAM
        J. Sci. Comput. 42 (2020).
    """

    method: ClassVar[str] = "cholesky-qr"
    largest: Scalar  # of the diagonal of phi^T phi
    shift: Scalar
    inverse: Float[Array, "p p"]  # L^-1
    q: Float[Array, "m p"]
    pulled: Float[Array, " p"]  # Q^T r + L^-1 g_0
    curvature: Float[Array, "p p"]  # Q^T Q
    identity: Float[Array, "p p"]  # L^-1 L^-T
    factor: Factorised | None

    def __init__(self, problem: Quadratic, passes: Passes):
        problem = problem.at_hand()
        super().__init__(problem, passes)
        phi = problem.jacobian.as_matrix()
        phi = phi.astype(_tree.dtype((phi, problem.residual)))
        curvature = gram_of_columns(phi)
        self.largest = jnp.max(jnp.diagonal(curvature))
        shift = _tree.fixed(_rounding(phi) * jnp.trace(curvature))
        self.shift = jnp.where(shift > 0, shift, 1)
        self.inverse = _inverse_root(curvature, self.shift)
        self.q = matmul(phi, self.inverse.T)
        self.pulled = self._pulled(problem)
        self.curvature = gram_of_columns(self.q)
        self.identity = matmul(self.inverse, self.inverse.T)
        self.factor = None

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        m, p = cost.shape
        both_fit = 2 * m * p * cost.itemsize <= cost.memory_budget  # phi and Q
        # Without any damping, rounding would decide about a rank-deficient phi.
        if p > m or not both_fit or not isinstance(filter, Early):
            return math.inf
        products = 6.0 * m * float(p) ** 2 + 4.0 * float(p) ** 3
        factorisations = (num_trials + 2) * rates().cholesky(p)
        return cost.all_rows + products * rates().product + factorisations

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "CholeskyQR":
        return cls(problem, cost.rows)

    def largest_curvature(self) -> Scalar:
        return self.largest

    def least_damping(self) -> Scalar:
        return _rounding(self.q) * self.shift

    def attainable_decrease(self) -> Scalar:
        decrease = self.solve(Tikhonov(self.least_damping())).decrease
        assert decrease is not None
        if self.problem.rest is None:
            return decrease
        return jnp.where(_tree.any_nonzero(self.problem.rest), jnp.inf, decrease)

    def with_residual(self, residual: PyTree[Array]) -> "CholeskyQR":
        new = super().with_residual(residual)
        return eqx.tree_at(lambda w: w.pulled, new, self._pulled(new.problem))

    def factorised(self, filter: Filter) -> "CholeskyQR":
        is_none = lambda x: x is None
        factor = self._factor_for(filter)
        return eqx.tree_at(lambda w: w.factor, self, factor, is_leaf=is_none)

    def solve(self, filter: Filter) -> Answer:
        factor = self._factor_for(filter) if self.factor is None else self.factor
        solution, result = factor.solve(self.pulled)
        step = -matmul(self.inverse.T, solution)
        length = _tree.norm(step)
        damping = jnp.asarray(self.damping_of(filter), step.dtype)
        decrease = 0.5 * (jnp.dot(self.pulled, solution) + damping * length**2)
        step = self.problem.jacobian.domain.unravel(step)
        return Answer(step, decrease=decrease, damped_norm=length, result=result)

    def _pulled(self, problem: Quadratic) -> Float[Array, " p"]:
        pulled = matmul(problem.flat_residual().astype(self.q.dtype), self.q)
        if problem.rest is None:
            return pulled
        rest, _ = ravel_pytree(problem.rest)
        return pulled + matmul(self.inverse, rest.astype(self.q.dtype))

    def _factor_for(self, filter: Filter) -> Factorised:
        damping = jnp.asarray(self.damping_of(filter), self.curvature.dtype)
        return Factorised.of(self.curvature + damping * self.identity, 0.0)


def _inverse_root(matrix: Float[Array, "n n"], shift: Scalar) -> Float[Array, "n n"]:
    r"""Return $L^{-1}$ for $LL^\top$ = `matrix + shift I`; NaN if it is not finite."""
    identity = jnp.eye(len(matrix), dtype=matrix.dtype)
    shifted = matrix + shift * identity
    finite = _tree.all_finite(shifted)
    lower = jnp.linalg.cholesky(jnp.where(finite, shifted, identity))
    inverse = triangular_solve(lower, identity, left_side=True, lower=True)
    return jnp.where(finite, inverse, jnp.nan)


def _rounding(matrix: Array) -> float:
    return _ROUNDINGS * float(jnp.finfo(matrix.dtype).eps)
