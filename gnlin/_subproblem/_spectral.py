"""By eigen- or singular values: any filter, one factorisation for all of them."""

import equinox as eqx
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, PyTree, Scalar

from .. import _tree
from .._spectrum import Filter, Spectrum
from ._base import AbstractSubproblem, Answer


class Spectral(AbstractSubproblem):
    """`delta = -phi^T U g(w) U^T r`: each filter costs a function and a product."""

    spectrum: Spectrum
    gradient_norm: Scalar
    num_jvps: int = eqx.field(static=True)
    num_vjps: int = eqx.field(static=True)

    def __init__(self, spectrum: Spectrum, num_jvps: int, num_vjps: int):
        self.spectrum = spectrum
        self.gradient_norm = spectrum.gradient_norm()
        self.num_jvps = num_jvps
        self.num_vjps = num_vjps

    def gradient(self) -> PyTree[Array]:
        return self.spectrum.gradient()

    def curvature_along_gradient(self) -> Scalar:
        wc = self.spectrum.eigenvalues * self.spectrum.coefficients
        return _tree.dot(wc, wc) / self.gradient_norm**2

    def largest_curvature(self) -> Scalar:
        return jnp.max(self.spectrum.eigenvalues)

    def attainable_decrease(self) -> Scalar:
        w, c = self.spectrum.eigenvalues, self.spectrum.coefficients
        return 0.5 * jnp.sum(jnp.where(w > 0, c, 0) ** 2)

    def with_residual(self, residual: PyTree[Array]) -> "Spectral":
        return Spectral(self.spectrum.with_residual(residual), 0, 0)

    def solve(self, filter: Filter) -> Answer:
        w = self.spectrum.eigenvalues
        # The linearised residual is left with the factor 1 - w g(w). One that has grown
        # past 1/eps says nothing any more but that the steps diverge.
        growth = jnp.abs(1 - w * filter(w))
        diverged = jnp.any(~(growth < 1 / jnp.finfo(w.dtype).eps))
        result = optx.RESULTS.where(
            diverged & self.spectrum.finite(),
            optx.RESULTS.nonlinear_divergence,
            optx.RESULTS.successful,
        )
        return Answer(self.spectrum.step(filter), result=result)
