"""By eigen- or singular values: any filter, one factorisation for all of them."""

import equinox as eqx
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, PyTree, Scalar

from .. import _tree
from .._spectrum import Filter, Spectrum
from ._base import AbstractSubproblem, Answer


class Spectral(AbstractSubproblem):
    r"""$\delta = -\phi^\top U g(w) U^\top r - g(\phi^\top\phi)\,g_0$: each filter costs
    a function and a product.

    $g_0$ is the part of the gradient that is no $\phi^\top r$, `rest`; to it the filter
    is applied as $g(0) I + \phi^\top U\,\frac{g(w) - g(0)}{w}\,U^\top\phi$.
    """

    spectrum: Spectrum
    rest: PyTree[Array] | None
    pushed: Float[Array, " k"]  # U^T phi g_0
    gradient_norm: Scalar
    num_jvps: int = eqx.field(static=True)
    num_vjps: int = eqx.field(static=True)

    def __init__(
        self, spectrum, num_jvps, num_vjps, *, rest=None, push_forward=lambda _: None
    ):
        self.spectrum = spectrum
        self.rest = rest
        if rest is None:
            self.pushed = jnp.zeros_like(spectrum.eigenvalues)
            self.gradient_norm = spectrum.gradient_norm()
        else:
            self.pushed = spectrum.project(push_forward(rest))
            self.gradient_norm = _tree.norm(self.gradient())
        self.num_jvps = num_jvps
        self.num_vjps = num_vjps

    def gradient(self) -> PyTree[Array]:
        gradient = self.spectrum.gradient()
        return gradient if self.rest is None else _tree.axpy(1, self.rest, gradient)

    def curvature_along_gradient(self) -> Scalar:
        pushed = self.spectrum.eigenvalues * self.spectrum.coefficients + self.pushed
        return _tree.dot(pushed, pushed) / self.gradient_norm**2

    def largest_curvature(self) -> Scalar:
        return jnp.max(self.spectrum.eigenvalues)

    def attainable_decrease(self) -> Scalar:
        w, c = self.spectrum.eigenvalues, self.spectrum.coefficients
        attainable = 0.5 * jnp.sum(jnp.where(w > 0, c, 0) ** 2)
        if self.rest is None:
            return attainable
        return jnp.where(_tree.any_nonzero(self.rest), jnp.inf, attainable)

    def with_residual(self, residual: PyTree[Array]) -> "Spectral":
        return Spectral(self.spectrum.with_residual(residual), 0, 0)

    def solve(self, filter: Filter) -> Answer:
        w, c = self.spectrum.eigenvalues, self.spectrum.coefficients
        g = filter(w)
        # The linearised residual is left with the factor 1 - w g(w). One that has grown
        # past 1/eps says nothing any more but that the steps diverge.
        growth = jnp.abs(1 - w * g)
        diverged = jnp.any(~(growth < 1 / jnp.finfo(w.dtype).eps))
        result = optx.RESULTS.where(
            diverged & self.spectrum.finite(),
            optx.RESULTS.nonlinear_divergence,
            optx.RESULTS.successful,
        )
        if self.rest is None:
            return Answer(
                self.spectrum.lift(-g * c),
                decrease=0.5 * jnp.sum(w * g * (2 - w * g) * c**2),
                damped_norm=_tree.norm(jnp.sqrt(w) * g * c),
                result=result,
            )
        at_zero = filter(jnp.concatenate([jnp.zeros_like(w[:1]), w]))[0]
        slope = jnp.where(w > 0, (g - at_zero) / jnp.where(w > 0, w, 1), 0)
        within = self.spectrum.lift(-g * c - slope * self.pushed)
        return Answer(_tree.axpy(-at_zero, self.rest, within), result=result)
