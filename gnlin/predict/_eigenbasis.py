"""Eigenpairs of the kernel or of the curvature, and how other outputs see them."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from .. import _lapack
from .._jacobian import AbstractJacobian
from .._problem import Quadratic
from .._spectrum import Filter
from .._tree import matmul, ravel_pytree


class Eigenbasis(eqx.Module):
    r"""Of the kernel $\phi\phi^\top = U w U^\top$, or with fewer parameters than outputs
    of the curvature $\phi^\top\phi = V w V^\top$.

    The step of a filter $g$ changes outputs with the Jacobian $\phi_*$ by
    $-B\,(g(w)\,c)$, where

    - `coefficients`: $c$, that is $U^\top r$, or $V^\top\phi^\top r$;
    - `seen_from`: $B$, that is $\phi_*\phi^\top U$, or $\phi_* V$.
    """

    eigenvalues: Float[Array, " k"]
    coefficients: Float[Array, " k"]
    vectors: Float[Array, "k k"]
    jacobian: AbstractJacobian
    on_outputs: bool = eqx.field(static=True)

    @staticmethod
    def fits(jacobian: AbstractJacobian) -> bool:
        """Whether the matrix stays within the memory budget."""
        smaller = min(jacobian.shape)
        return smaller**2 * jacobian.domain.dtype.itemsize <= jacobian.memory_budget

    @staticmethod
    def of(problem: Quadratic) -> "Eigenbasis":
        jacobian, right = problem.jacobian, problem.flat_residual()
        m, p = jacobian.shape
        on_outputs = m <= p
        if on_outputs:
            matrix = jacobian.gram()
        else:
            matrix = jacobian.curvature()
            right, _ = ravel_pytree(jacobian.pull_back(right))
        w, vectors = _lapack.eigh(matrix)
        w = jnp.where(w <= w.size * jnp.finfo(w.dtype).eps * w[-1], 0, w)
        coefficients = matmul(vectors.T, right).astype(w.dtype)
        if not on_outputs:
            # Nothing but rounding is pulled back along what the outputs do not see.
            coefficients = jnp.where(w > 0, coefficients, 0)
        return Eigenbasis(w, coefficients, vectors, jacobian, on_outputs)

    def filtered(self, filter: Filter) -> Float[Array, " k"]:
        """-g(w) c."""
        return -filter(self.eigenvalues) * self.coefficients

    def seen_from(self, other: AbstractJacobian) -> Float[Array, "n k"]:
        """B."""
        if not self.on_outputs:
            return matmul(other.as_matrix(), self.vectors)
        seen = matmul(other.gram_with(self.jacobian), self.vectors)
        return jnp.where(self.eigenvalues > 0, seen, 0)  # the rest is rounding

    def outside(self, residual: Float[Array, " m"]) -> Float[Array, ""]:
        """The squared norm of what of the residual no parameter reaches, where it is
        not among the coefficients."""
        if self.on_outputs:
            return jnp.zeros((), self.eigenvalues.dtype)
        w = self.eigenvalues
        inside = self.coefficients / jnp.where(w > 0, w, 1)
        domain = self.jacobian.domain
        reached = self.jacobian.push_forward(domain.unravel(matmul(self.vectors, inside)))
        return jnp.sum((residual - reached).astype(inside.dtype) ** 2)

    def misfit(self, damping: Scalar) -> Float[Array, " k"]:
        r"""By eigenvector, of $r^\top(\phi\phi^\top + \lambda I)^{-1} r$."""
        w = self.eigenvalues
        along = self.coefficients**2 / (w + damping)
        if self.on_outputs:
            return along
        return along / jnp.where(w > 0, w, 1)  # of those coefficients that are not zero
