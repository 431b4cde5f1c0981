r"""Factors $R$ of a loss's Hessian in the outputs, $H = R^\top R$, of one example.

With one the quadratic problem is a least-squares problem: whitened Jacobian $R\phi$,
whitened residual $R^{-\top}\nabla L$.
"""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._common._tree import matmul, ravel_pytree
from .._linear_algebra._lapack import eigh


class AbstractFactor(eqx.Module):
    r"""A matrix $R$ with $R^\top R$ the Hessian of one example's loss in its outputs.

    It is known by its products. All of them take and give the outputs' structure.
    """

    @abc.abstractmethod
    def mv(self, v: PyTree[Array]) -> PyTree[Array]:
        """$R v$."""

    @abc.abstractmethod
    def transpose_mv(self, u: PyTree[Array]) -> PyTree[Array]:
        r"""$R^\top u$."""

    @abc.abstractmethod
    def pseudo_inverse_mv(self, u: PyTree[Array]) -> PyTree[Array]:
        """$R^+ u$."""

    @abc.abstractmethod
    def whiten(
        self, gradient: PyTree[Array]
    ) -> tuple[PyTree[Array], PyTree[Array] | None]:
        r"""The gradient as $R^\top \tilde r + e$, in the outputs: `(r~, e)`.

        The remainder $e$ is what $R^\top$ does not reach, because the loss is flat
        there, or reaches only with an $\tilde r$ so large that all else is lost beside it
        to rounding. `None` where that cannot be.
        """


class IdentityFactor(AbstractFactor):
    """Of squared error: the gradient is the residual."""

    def mv(self, v: PyTree[Array]) -> PyTree[Array]:
        return v

    def transpose_mv(self, u: PyTree[Array]) -> PyTree[Array]:
        return u

    def pseudo_inverse_mv(self, u: PyTree[Array]) -> PyTree[Array]:
        return u

    def whiten(self, gradient: PyTree[Array]) -> tuple[PyTree[Array], None]:
        return gradient, None


def _is_steep(gradient: Array, root: Array, unit: float | Array) -> Array:
    """Whether `gradient / root` has the square of a loss greater than 1/eps units, and a
    Newton step would be longer than 1/sqrt(eps): a slope with next to no curvature. (Or
    is not a number.)"""
    eps = jnp.finfo(gradient.dtype).eps
    slope = jnp.abs(gradient) * eps**0.5
    return ~((slope <= root * unit**0.5) | (slope <= root**2))


def _quotient(x: Array, y: Array, where: Array) -> Array:
    return jnp.where(where, x / jnp.where(where, y, 1), 0)


class DiagonalFactor(AbstractFactor):
    """Of a loss that is a sum over the outputs.

    **Arguments:**

    - `root`: the square roots of the second derivatives, in the outputs' structure.
    - `unit`: what counts as one unit of the loss.
    """

    root: PyTree[Array]
    unit: float = eqx.field(static=True, default=1.0)

    def mv(self, v: PyTree[Array]) -> PyTree[Array]:
        return jax.tree.map(jnp.multiply, self.root, v)

    def transpose_mv(self, u: PyTree[Array]) -> PyTree[Array]:
        return self.mv(u)

    def pseudo_inverse_mv(self, u: PyTree[Array]) -> PyTree[Array]:
        return jax.tree.map(lambda d, x: _quotient(x, d, d > 0), self.root, u)

    def whiten(self, gradient: PyTree[Array]) -> tuple[PyTree[Array], PyTree[Array]]:
        steep = jax.tree.map(lambda g, d: _is_steep(g, d, self.unit), gradient, self.root)
        residual = jax.tree.map(
            lambda g, d, s: _quotient(g, d, ~s & (d > 0)), gradient, self.root, steep
        )
        remainder = jax.tree.map(lambda g, s: jnp.where(s, g, 0), gradient, steep)
        return residual, remainder


class SoftmaxFactor(AbstractFactor):
    r"""$R = \sqrt t\,(I - s s^\top)\,\mathrm{diag}(s)$ with $s = \sqrt p$, of
    $H = t\,(\mathrm{diag}(p) - p p^\top)$.

    No difference of nearly equal numbers is taken where one probability is close to 1,
    and $s$ is kept where its square underflows.

    **Arguments:**

    - `s`: square roots of the probabilities, along the last axis.
    - `total`: $t$, the sum of the target, with a last axis of length 1.
    """

    s: Float[Array, "*k c"]
    total: Float[Array, "*k 1"]

    def _relative(self, v: Float[Array, "*k c"]) -> Float[Array, "*k c"]:
        """v less the component of the most probable class."""
        likeliest = jnp.argmax(self.s, axis=-1, keepdims=True)
        return v - jnp.take_along_axis(v, likeliest, axis=-1)

    def _centred(self, v: Float[Array, "*k c"]) -> Float[Array, "*k c"]:
        """$v - p^\top v$: the differences to the likeliest class are exact."""
        v = self._relative(v)
        return v - jnp.sum(self.s**2 * v, axis=-1, keepdims=True)

    def mv(self, v: Float[Array, "*k c"]) -> Float[Array, "*k c"]:
        return jnp.sqrt(self.total) * self.s * self._centred(v)

    def transpose_mv(self, u: Float[Array, "*k c"]) -> Float[Array, "*k c"]:
        return jnp.sqrt(self.total) * self.s * self._across(u)

    def _across(self, u: Float[Array, "*k c"]) -> Float[Array, "*k c"]:
        r"""$(I - s s^\top) u$: of the likeliest class k, $u_k \sum_{j \ne k} s_j^2
        - s_k \sum_{j \ne k} s_j u_j$."""
        likeliest = jnp.argmax(self.s, axis=-1, keepdims=True)
        top = jax.nn.one_hot(likeliest[..., 0], self.s.shape[-1], dtype=bool)
        s_top = jnp.take_along_axis(self.s, likeliest, axis=-1)
        u_top = jnp.take_along_axis(u, likeliest, axis=-1)
        others = jnp.where(top, 0, self.s)
        along = jnp.sum(others * u, axis=-1, keepdims=True)
        rest = jnp.sum(others**2, axis=-1, keepdims=True)
        of_top = u_top * rest - s_top * along
        return jnp.where(top, of_top, u - self.s * (along + s_top * u_top))

    def pseudo_inverse_mv(self, u: Float[Array, "*k c"]) -> Float[Array, "*k c"]:
        possible = self.s > 0
        v = _quotient(self._across(u), self.s, possible)
        count = jnp.sum(possible, axis=-1, keepdims=True, dtype=v.dtype)
        mean = jnp.sum(v, axis=-1, keepdims=True) / count
        positive = self.total > 0
        return _quotient(jnp.where(possible, v - mean, 0), jnp.sqrt(self.total), positive)

    def whiten(
        self, gradient: Float[Array, "*k c"]
    ) -> tuple[Float[Array, "*k c"], Float[Array, "*k c"]]:
        # The gradient sums to zero, and so g / s is at right angles to s: it is the
        # shortest solution of R^T r~ = g. A steep component is left out of it, and what
        # R^T then misses is the component itself and its share of the others.
        root = jnp.sqrt(self.total) * self.s
        steep = _is_steep(gradient, root, 1.0)
        residual = _quotient(gradient, root, ~steep & (root > 0))
        left = jnp.where(steep, gradient, 0)
        missed = left - self.s**2 * jnp.sum(left, axis=-1, keepdims=True)
        return residual, missed


class DenseFactor(AbstractFactor):
    r"""$R = \mathrm{diag}(\sqrt w)\,V^\top$ from the eigenpairs of any Hessian: c x c
    numbers an example. Negative curvature counts as none.

    **Arguments:**

    - `hessian`: c x c, of the outputs in `ravel_pytree` order.
    - `unit`: what counts as one unit of the loss.
    """

    root: Float[Array, " c"]
    vectors: Float[Array, "c c"]
    unit: Float[Array, ""]

    def __init__(self, hessian: Float[Array, "c c"], unit: Float[Array, ""]):
        self.unit = unit
        w, self.vectors = eigh(hessian)
        rounding = w.size * float(jnp.finfo(w.dtype).eps)
        self.root = jnp.sqrt(jnp.where(w > rounding * jnp.max(jnp.abs(w)), w, 0))

    def mv(self, v: PyTree[Array]) -> PyTree[Array]:
        v, unravel = ravel_pytree(v)
        return unravel(self.root * matmul(self.vectors.T, v))

    def transpose_mv(self, u: PyTree[Array]) -> PyTree[Array]:
        u, unravel = ravel_pytree(u)
        return unravel(matmul(self.vectors, self.root * u))

    def pseudo_inverse_mv(self, u: PyTree[Array]) -> PyTree[Array]:
        u, unravel = ravel_pytree(u)
        return unravel(matmul(self.vectors, _quotient(u, self.root, self.root > 0)))

    def whiten(self, gradient: PyTree[Array]) -> tuple[PyTree[Array], PyTree[Array]]:
        g, unravel = ravel_pytree(gradient)
        along = matmul(self.vectors.T, g)
        curved = (self.root > 0) & ~_is_steep(along, self.root, self.unit)
        residual = _quotient(along, self.root, curved)
        remainder = matmul(self.vectors, jnp.where(curved, 0, along))
        # The rounding of the rest is no gradient.
        rounding = g.size * jnp.finfo(g.dtype).eps * jnp.max(jnp.abs(g))
        remainder = jnp.where(jnp.max(jnp.abs(remainder)) > rounding, remainder, 0)
        return unravel(residual), unravel(remainder)
