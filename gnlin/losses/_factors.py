r"""Factors $R$ of the Hessian of one example's loss in its outputs, $H = R^\top R$.

They turn the quadratic problem into a least-squares problem with the whitened Jacobian
$R\phi$ and the whitened residual $R^{-\top}\nabla L$.
"""

import abc
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, ScalarLike

from .._common import _tree
from .._common._checks import first_line
from .._common._tree import matmul, ravel_pytree
from .._linear_algebra._lapack import eigh


class AbstractFactor(eqx.Module):
    r"""A matrix $R$ such that $R^\top R$ is the Hessian of one example's loss in its
    outputs. Arguments and results of its products have the outputs' structure."""

    @abc.abstractmethod
    def mv(self, v: PyTree[Array]) -> PyTree[Array]:
        """Return $R v$."""

    @abc.abstractmethod
    def transpose_mv(self, u: PyTree[Array]) -> PyTree[Array]:
        r"""Return $R^\top u$."""

    @abc.abstractmethod
    def whiten(
        self, gradient: PyTree[Array]
    ) -> tuple[PyTree[Array], PyTree[Array] | None]:
        r"""Return $(\tilde r, e)$ such that the gradient is $R^\top \tilde r + e$.

        The remainder $e$ is the part of the gradient outside the range of $R^\top$, or so
        steep that its $\tilde r$ would drown all others in rounding errors. It is `None`
        if there can be no such part.
        """


def whitened_by(
    factor: AbstractFactor, gradient: PyTree[Array], outputs: PyTree[Array], loss: str
) -> tuple[PyTree[Array], PyTree[Array] | None]:
    """Whiten the gradient of one example; raise if it, or the factor, does not suit the
    outputs of the example.

    - `loss`: the loss's name.
    """
    if not isinstance(factor, AbstractFactor):
        raise TypeError(
            f"`factor` of {loss} must return a factor of the Hessian, such as a "
            f"`gnlin.authoring.DenseFactor`, but returns a {type(factor).__name__}."
        )
    what = (
        f"of {loss} must suit the outputs of one example, which have the shapes "
        f"{_tree.listed_shapes(outputs)}"
    )
    if not _tree.alike(gradient, outputs):
        raise ValueError(
            f"`gradient` {what}, but it has {_tree.listed_shapes(gradient)}."
        )
    try:
        residual, rest = factor.whiten(gradient)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`factor` {what}, but failed: {first_line(error)}.") from error
    return residual, rest


class IdentityFactor(AbstractFactor):
    """The factor of squared error, whose gradient is the residual."""

    def mv(self, v: PyTree[Array]) -> PyTree[Array]:
        return v

    def transpose_mv(self, u: PyTree[Array]) -> PyTree[Array]:
        return u

    def whiten(self, gradient: PyTree[Array]) -> tuple[PyTree[Array], None]:
        return gradient, None


def _is_steep(gradient: Array, root: Array, unit: ScalarLike) -> Array:
    """Whether the curvature is negligible for this gradient, or NaN: `(gradient/root)**2`
    exceeds `unit / eps`, and the Newton step exceeds 1/sqrt(eps)."""
    eps = jnp.finfo(gradient.dtype).eps
    slope = jnp.abs(gradient) * eps**0.5
    return ~((slope <= root * unit**0.5) | (slope <= root**2))


class DiagonalFactor(AbstractFactor):
    """The factor of a loss that is a sum over outputs.

    **Arguments:**

    - `root`: square roots of the second derivatives, with the outputs' structure.
    - `unit`: the scale of the loss.
    """

    root: PyTree[Array]
    unit: ScalarLike = 1.0

    def mv(self, v: PyTree[Array]) -> PyTree[Array]:
        return jax.tree.map(jnp.multiply, self.root, v)

    def transpose_mv(self, u: PyTree[Array]) -> PyTree[Array]:
        return self.mv(u)

    def whiten(self, gradient: PyTree[Array]) -> tuple[PyTree[Array], PyTree[Array]]:
        steep = jax.tree.map(lambda g, d: _is_steep(g, d, self.unit), gradient, self.root)
        residual = jax.tree.map(
            lambda g, d, s: _tree.quotient(g, d, ~s & (d > 0)), gradient, self.root, steep
        )
        remainder = jax.tree.map(lambda g, s: jnp.where(s, g, 0), gradient, steep)
        return residual, remainder


class IsotropicFactor(AbstractFactor):
    r"""The factor $a\,nn^\top + b\,(I - nn^\top)$ of a loss of a vector's length.

    **Arguments:**

    - `direction`: the unit vectors n, or 0 for a vector of length 0.
    - `along`, `across`: a and b; the vectors' axis has length 1.
    - `axis`: the vectors' axis.
    - `unit`: the scale of the loss.
    """

    direction: PyTree[Array]
    along: PyTree[Array]
    across: PyTree[Array]
    axis: int = eqx.field(static=True)
    unit: ScalarLike

    def _split(self, v: PyTree[Array]) -> tuple[PyTree[Array], PyTree[Array]]:
        """Return the component along n, and the vector across it."""

        component = functools.partial(_tree.sum_of_products, axis=self.axis)
        c = jax.tree.map(component, self.direction, v)
        return c, jax.tree.map(lambda v, n, c: v - c * n, v, self.direction, c)

    def _joined(self, c: PyTree[Array], rest: PyTree[Array]) -> PyTree[Array]:
        return jax.tree.map(lambda n, c, v: c * n + v, self.direction, c, rest)

    def mv(self, v: PyTree[Array]) -> PyTree[Array]:
        c, rest = self._split(v)
        times = lambda x, y: jax.tree.map(jnp.multiply, x, y)
        return self._joined(times(self.along, c), times(self.across, rest))

    def transpose_mv(self, u: PyTree[Array]) -> PyTree[Array]:
        return self.mv(u)

    def whiten(self, gradient: PyTree[Array]) -> tuple[PyTree[Array], PyTree[Array]]:
        # The gradient of a loss of the length has no part across n.
        c, rest = self._split(gradient)
        residual, remainder = DiagonalFactor(self.along, self.unit).whiten(c)
        nothing = jax.tree.map(jnp.zeros_like, rest)
        return self._joined(residual, nothing), self._joined(remainder, nothing)


class SoftmaxFactor(AbstractFactor):
    r"""$R = \sqrt t\,(I - s s^\top)\,\mathrm{diag}(s)$ with $s = \sqrt p$, the factor
    of $H = t\,(\mathrm{diag}(p) - p p^\top)$.

    Products avoid cancellation when one probability is close to 1, and $s$ is stored
    because $p$ may underflow.

    **Arguments:**

    - `s`: square roots of the probabilities, along the last axis.
    - `total`: $t$, the sum of the target's probabilities; its last axis has length 1.
    """

    s: Float[Array, "*k c"]
    total: Float[Array, "*k 1"]

    def _centred(self, v: Float[Array, "*k c"]) -> Float[Array, "*k c"]:
        r"""Return $v - p^\top v$, exact in differences from the likeliest class."""
        likeliest = jnp.argmax(self.s, axis=-1, keepdims=True)
        v = v - jnp.take_along_axis(v, likeliest, axis=-1)
        return v - _tree.sum_of_products(self.s**2, v)

    def mv(self, v: Float[Array, "*k c"]) -> Float[Array, "*k c"]:
        return jnp.sqrt(self.total) * self.s * self._centred(v)

    def transpose_mv(self, u: Float[Array, "*k c"]) -> Float[Array, "*k c"]:
        across = u - self.s * _tree.sum_of_products(self.s, u)
        return jnp.sqrt(self.total) * self.s * across

    def whiten(
        self, gradient: Float[Array, "*k c"]
    ) -> tuple[Float[Array, "*k c"], Float[Array, "*k c"]]:
        # The gradient g sums to zero, so g / s is orthogonal to s, and g / (sqrt(t) s) is
        # the minimum-norm solution of R^T r~ = g. Steep components are left out of it;
        # the remainder is then diag(s) (I - s s^T) diag(1/s) times these components.
        root = jnp.sqrt(self.total) * self.s
        steep = _is_steep(gradient, root, 1.0)
        residual = _tree.quotient(gradient, root, ~steep & (root > 0))
        left = jnp.where(steep, gradient, 0)
        missed = left - self.s**2 * jnp.sum(left, axis=-1, keepdims=True)
        return residual, missed


class DenseFactor(AbstractFactor):
    r"""$R = \mathrm{diag}(\sqrt w)\,V^\top$ from the eigenpairs of a dense Hessian.
    Negative eigenvalues are replaced by zero.

    **Arguments:**

    - `hessian`: the c x c Hessian, with outputs in `ravel_pytree` order.
    - `unit`: the scale of the loss.
    """

    root: Float[Array, " c"]
    vectors: Float[Array, "c c"]
    unit: Float[Array, ""]

    def __init__(self, hessian: Float[Array, "c c"], unit: Float[Array, ""]):
        self.unit = unit
        if jnp.ndim(hessian) != 2 or hessian.shape[0] != hessian.shape[1]:
            raise ValueError(
                "The Hessian of a `gnlin.authoring.DenseFactor` must be a square matrix "
                "over the outputs of one example, but has the shape "
                f"{jnp.shape(hessian)}."
            )
        w, self.vectors = eigh(hessian)
        rounding = w.size * float(jnp.finfo(w.dtype).eps)
        self.root = jnp.sqrt(jnp.where(w > rounding * jnp.max(jnp.abs(w)), w, 0))

    def mv(self, v: PyTree[Array]) -> PyTree[Array]:
        v, unravel = ravel_pytree(v)
        return unravel(self.root * matmul(self.vectors.T, v))

    def transpose_mv(self, u: PyTree[Array]) -> PyTree[Array]:
        u, unravel = ravel_pytree(u)
        return unravel(matmul(self.vectors, self.root * u))

    def whiten(self, gradient: PyTree[Array]) -> tuple[PyTree[Array], PyTree[Array]]:
        g, unravel = ravel_pytree(gradient)
        along = matmul(self.vectors.T, g)
        curved = (self.root > 0) & ~_is_steep(along, self.root, self.unit)
        residual = _tree.quotient(along, self.root, curved)
        remainder = matmul(self.vectors, jnp.where(curved, 0, along))
        # A remainder below the rounding error counts as zero.
        rounding = g.size * jnp.finfo(g.dtype).eps * jnp.max(jnp.abs(g))
        remainder = jnp.where(jnp.max(jnp.abs(remainder)) > rounding, remainder, 0)
        return unravel(residual), unravel(remainder)
