"""The eigenvectors of a Jacobian's kernel and curvature."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, PyTree, Scalar

from .._common import _tree
from .._common._checks import is_zero
from .._common._tree import matmul, ravel_pytree
from .._jacobian import AbstractJacobian
from .._linear_algebra._derivatives import Function, of_matrix
from ..filters import Tikhonov


# Number of random sums of eigenvectors. With eight, the probability that all of them
# contain less than a tenth of a given eigenvector is one in a million.
_NUM_PROBES = 8
# Products of the Jacobian with vectors count as zero below this multiple of rounding.
_ZERO = 3.0


def resolved(
    g: Float[Array, " k"], w: Float[Array, " k"], rounding: Scalar
) -> Float[Array, " k"]:
    """Return the values of a filter, or zero where it is large at an eigenvalue of zero.
    Such an eigenvalue is only rounding, and its eigenvector has no gradient: the filter
    would make a step, and a derivative of the step, out of rounding."""
    return jnp.where((w == 0) & (g * rounding > 1), 0, g)


def _resolved(
    filter: Function, rounding: Scalar, w: Float[Array, " k"]
) -> Float[Array, " k"]:
    return resolved(filter(w), w, rounding)


class Eigenvectors(eqx.Module):
    r"""Eigenvectors $U$ of the kernel and $V$ of the curvature, with
    $\phi V = U\,\mathrm{diag}(s)$. One of them may be unknown: products with the Jacobian
    replace it.

    - `left`: $U$; or $U'$ with $U = QU'$, if there is a `reduction` $Q$, with orthonormal
        columns.
    - `right`: $V$.
    - `matrix`: the Jacobian, if it is in memory. With many rows its products are faster
        than transposed passes and, in single precision, more accurate.
    """

    jacobian: AbstractJacobian
    left: Float[Array, "n k"] | None = None
    right: Float[Array, "p k"] | None = None
    reduction: Float[Array, "m n"] | None = None
    matrix: Float[Array, "m p"] | None = None

    @property
    def on_outputs(self) -> bool:
        """Whether the smaller of the known sides is that of the outputs."""
        m, p = self.jacobian.shape
        return self.right is None or (self.left is not None and m <= p)

    @property
    def smaller(self) -> Float[Array, "n k"]:
        vectors = self.left if self.on_outputs else self.right
        assert vectors is not None
        return vectors

    @property
    def are_all(self) -> bool:
        """Whether no eigenvectors are missing on the smaller of the known sides."""
        n, k = self.smaller.shape[-2:]  # of one of many Jacobians
        return n == k

    def project(
        self, outputs: Float[Array, " m"], s: Float[Array, " k"]
    ) -> Float[Array, " k"]:
        r"""Return $U^\top r$ in the precision of the Jacobian, if outputs have more."""
        if self.left is None:
            if self.matrix is not None:
                gradient = matmul(self.matrix.T, outputs)
            else:
                gradient, _ = ravel_pytree(self.jacobian.pull_back(outputs))
            along = matmul(self.smaller.T, gradient.astype(self.smaller.dtype))
            return _tree.quotient(along, s).astype(s.dtype)
        if self.reduction is not None:
            outputs = matmul(outputs, self.reduction)
        return matmul(outputs, self.left).astype(s.dtype)

    def lift(self, z: Float[Array, " k"], s: Float[Array, " k"]) -> PyTree[Array]:
        r"""Return $\phi^\top U z$."""
        if self.right is None:
            return self.push(z)
        return self.jacobian.domain.unravel(matmul(self.right, s * z))

    def push(self, z: Float[Array, " k"]) -> PyTree[Array]:
        r"""Return $\phi^\top U z$ or $\phi V z$, from the smaller of the known sides."""
        vector = matmul(z, self.smaller.T)  # batches of z stay in front under `vmap`
        if self.on_outputs:
            return self.jacobian.pull_back(vector)
        return self.jacobian.push_forward(self.jacobian.domain.unravel(vector))

    def size_of(self, w: Float[Array, " k"], chosen: Bool[Array, " k"]) -> Scalar:
        """Estimate the root of the sum of the true eigenvalues of the `chosen`
        eigenvectors, relative to the largest one; zero if it may be only rounding."""
        probes = jax.random.normal(jax.random.key(0), (_NUM_PROBES, w.size), w.dtype)
        pushed = jax.vmap(self.push)(jnp.where(chosen[None], probes, 0))
        size = jnp.sqrt(_tree.dot(pushed, pushed) / (_NUM_PROBES * jnp.max(w)))
        rounding = _ZERO * w.size**0.5 * float(jnp.finfo(w.dtype).eps) ** (3 / 4)
        return jnp.where(size <= rounding, 0, size)

    # Formulas that need no derivatives of eigenvectors, if these are all

    def step(
        self,
        residual: Float[Array, " m"],
        filter: Function,
        w: Float[Array, " k"],
        rounding: Scalar | None = None,
    ) -> PyTree[Array]:
        r"""Return the step $-\phi^\top g(\phi\phi^\top)\,r$ of a filter $g$."""
        if self.on_outputs:
            return self.jacobian.pull_back(-self.filtered(filter, w, residual, rounding))
        gradient, unravel = ravel_pytree(self.jacobian.pull_back(residual))
        return unravel(-self.filtered(filter, w, gradient, rounding))

    def filtered(
        self,
        filter: Function,
        w: Float[Array, " k"],
        vector: Float[Array, " k"],
        rounding: Scalar | None = None,
    ) -> Float[Array, " k"]:
        """Return $g(A) b$, where A is the kernel or the curvature, with g as `resolved`
        if a `rounding` is given."""
        vectors, jacobian = self.smaller, self.jacobian
        matrix = jacobian.gram() if self.on_outputs else jacobian.curvature()
        known = filter if rounding is None else Partial(_resolved, filter, rounding)
        by_differences = lambda: of_matrix(known, matrix, vector, w, vectors)
        if not isinstance(filter, Tikhonov) or is_zero(filter.damping):
            return by_differences()
        # As the solution of a linear system it has derivatives of every order.
        damping = jnp.asarray(filter.damping, w.dtype)
        matrix, vector = matrix.astype(w.dtype), vector.astype(w.dtype)
        product = lambda x: matmul(matrix, x) + damping * x
        g = filter(w)
        solve = lambda _, b: matmul(vectors, g * matmul(vectors.T, b))
        by_system = lambda: jax.lax.custom_linear_solve(
            product, vector, solve, symmetric=True
        )
        if rounding is None:
            return by_system()
        # Where the damping is only rounding, the system is singular.
        is_singular = jnp.any(resolved(g, w, rounding) != g)
        return jax.lax.cond(is_singular, by_differences, by_system)
