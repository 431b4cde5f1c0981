"""The linearised problem, expanded to second order: a value."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Scalar

from .._common import _tree
from .._common._tree import ravel_pytree
from .._jacobian import AbstractJacobian, ScaledColumns


class Quadratic(eqx.Module):
    r"""A linearised problem with the loss expanded to second order: least squares,
    $\frac12\lVert R\phi\,\delta + \tilde r\rVert^2 + g_0^\top\delta$.

    - `jacobian`: whitened, $R\phi$.
    - `residual`: whitened, $\tilde r = R^{-\top}\nabla L$.
    - `rest`: $g_0$, the part of the gradient that the curvature does not reach; `None`
        where there cannot be any.
    """

    jacobian: AbstractJacobian
    residual: PyTree[Array]
    rest: PyTree[Array] | None = None

    def gradient(self) -> PyTree[Array]:
        r"""$\phi^\top r + g_0$."""
        gradient = self.jacobian.rmv(self.residual)
        return gradient if self.rest is None else _tree.axpy(1, self.rest, gradient)

    def curvature_along(self, vector: PyTree[Array]) -> Scalar:
        r"""$\lVert\phi v\rVert^2 / \lVert v\rVert^2$."""
        pushed, norm = self.jacobian.mv(vector), _tree.norm(vector)
        return _tree.dot(pushed, pushed).astype(norm.dtype) / norm**2

    def flat_residual(self) -> Float[Array, " m"]:
        """In `ravel_pytree` order."""
        return ravel_pytree(self.residual)[0]

    def with_residual(self, residual: PyTree[Array]) -> "Quadratic":
        """The same Jacobian with another residual, and nothing besides."""
        return Quadratic(self.jacobian, residual)

    def with_jacobian(self, jacobian: AbstractJacobian) -> "Quadratic":
        """The same, with the Jacobian in another form."""
        return Quadratic(jacobian, self.residual, self.rest)

    def at_hand(self) -> "Quadratic":
        """The same, with the Jacobian in memory."""
        return self.with_jacobian(self.jacobian.at_hand())

    def at_hand_if_it_fits(self) -> "Quadratic":
        """The same, where its blocks stay within the memory budget."""
        return self.with_jacobian(self.jacobian.at_hand_if_it_fits())

    def scaled(self, scale: PyTree[Array]) -> "Quadratic":
        r"""In the variables $D\delta$."""
        rest = self.rest
        if rest is not None:
            rest = jax.tree.map(jnp.divide, rest, scale)
        return Quadratic(ScaledColumns(self.jacobian, scale), self.residual, rest)
