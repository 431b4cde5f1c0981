"""The linearised problem with its loss expanded to second order."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Scalar

from .._common import _tree
from .._common._tree import ravel_pytree
from .._jacobian import AbstractJacobian, ScaledColumns


class Quadratic(eqx.Module):
    r"""The least-squares problem
    $\frac12\lVert R\phi\,\delta + \tilde r\rVert^2 + g_0^\top\delta$, where the loss has
    Hessian $R^\top R$ in the outputs.

    - `jacobian`: the whitened Jacobian, $R\phi$.
    - `residual`: the whitened residual, $\tilde r = R^{-\top}\nabla L$.
    - `rest`: $g_0$, the part of the gradient outside the range of the curvature; `None`
        if it is always zero.
    - `slope`: the gradient, if one pass has computed it.
    """

    jacobian: AbstractJacobian
    residual: PyTree[Array]
    rest: PyTree[Array] | None = None
    slope: PyTree[Array] | None = None

    def gradient(self) -> PyTree[Array]:
        r"""Return $\phi^\top r + g_0$."""
        if self.slope is not None and not self.jacobian.is_at_hand:
            return self.slope
        gradient = self.jacobian.rmv(self.residual)
        return gradient if self.rest is None else _tree.axpy(1, self.rest, gradient)

    def decrease(self, step: PyTree[Array]) -> Scalar:
        """Return by how much a step lowers the objective of the problem."""
        pushed = self.jacobian.mv(step)
        decrease = -_tree.dot(pushed, _tree.axpy(0.5, pushed, self.residual))
        if self.rest is None:
            return decrease
        return decrease - _tree.dot(step, self.rest).astype(decrease.dtype)

    def curvature_along(self, vector: PyTree[Array]) -> Scalar:
        r"""Return $\lVert\phi v\rVert^2 / \lVert v\rVert^2$, or zero if v is zero."""
        norm = _tree.norm(vector)
        pushed = self.jacobian.mv(_tree.direction(vector, norm))
        return _tree.dot(pushed, pushed).astype(norm.dtype)

    def curvature_along_gradient(self) -> Scalar:
        """Return the curvature along the gradient, or zero if the gradient is zero."""
        return self.curvature_along(self.gradient())

    def flat_residual(self) -> Float[Array, " m"]:
        """Return the residual as one vector, in `ravel_pytree` order."""
        return ravel_pytree(self.residual)[0]

    def with_residual(self, residual: PyTree[Array]) -> "Quadratic":
        """Return the problem with another residual, and without `rest`."""
        return Quadratic(self.jacobian, residual)

    def with_jacobian(self, jacobian: AbstractJacobian) -> "Quadratic":
        """Return the problem with its Jacobian replaced."""
        return Quadratic(jacobian, self.residual, self.rest, self.slope)

    def at_hand(self) -> "Quadratic":
        """Return the problem with its Jacobian in memory."""
        return self.with_jacobian(self.jacobian.at_hand())

    def at_hand_if_it_fits(self) -> "Quadratic":
        """Return the problem with its Jacobian in memory if the memory budget allows."""
        return self.with_jacobian(self.jacobian.at_hand_if_it_fits())

    def scaled(self, scale: PyTree[Array]) -> "Quadratic":
        r"""Return the problem in the variables $D\delta$; `scale` is D's diagonal."""
        rest, slope = (
            None if x is None else jax.tree.map(jnp.divide, x, scale)
            for x in (self.rest, self.slope)
        )
        jacobian = ScaledColumns.of(self.jacobian, scale)
        return Quadratic(jacobian, self.residual, rest, slope)
