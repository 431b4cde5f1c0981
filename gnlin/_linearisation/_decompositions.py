"""The spectrum of a Jacobian, by singular values or by eigenvalues."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, ScalarLike

from .._common import _tree
from .._common._tree import gram_of_columns, ravel_pytree
from .._jacobian import AbstractJacobian
from .._linear_algebra import _lapack, _small_svd
from ._eigenvectors import Eigenvectors
from ._spectrum import Spectrum


# An SVD is slower than `eigh` of the smaller Gram matrix, but far more accurate. It is
# preferred up to this number of multiplications (about a tenth of a millisecond).
_CHEAP_SVD = 50_000
# The same where a user asks for a spectrum in single precision, in which eigenvalues of a
# Gram matrix end at 1e-5 of the largest. SVD and `eigh` took 1 and 2 ms for 72 x 123
# numbers, 0.04 and 0.01 s for 300 x 1,000, and 1 and 0.25 s for 1,000 x 3,000 (jax 0.10,
# one core). At this number they take about 1.7 and 0.4 s.
_ORDINARY_SVD = 10**10


def svd_is_cheap(m: int, p: int) -> bool:
    return m * p * min(m, p) <= _CHEAP_SVD


def default_method(jacobian: AbstractJacobian) -> Literal["svd", "eigh"]:
    """Return how a spectrum is computed that has to serve any question."""
    m, p = jacobian.shape
    if svd_is_cheap(m, p):
        return "svd"
    is_double = jnp.finfo(jacobian.domain.dtype).bits == 64
    is_ordinary = m * p * min(m, p) <= _ORDINARY_SVD and jacobian.fits()
    return "svd" if is_ordinary and not is_double else "eigh"


def spectrum_of(
    jacobian: AbstractJacobian, residual: PyTree[Array], method: Literal["svd", "eigh"]
) -> Spectrum:
    """Return the spectrum of a Jacobian. `"eigh"` factorises the smaller Gram matrix, or
    the kernel if the Jacobian does not fit in the memory budget."""
    flat, _ = ravel_pytree(residual)
    if method == "svd":
        return from_svd(jacobian.at_hand(), flat)
    m, p = jacobian.shape
    if m > p and m * jacobian.domain.nbytes <= jacobian.memory_budget:
        return from_curvature(jacobian.at_hand(), flat)
    return from_kernel(jacobian.at_hand_if_it_fits(), flat)


def from_svd(jacobian: AbstractJacobian, residual: Float[Array, " m"]) -> Spectrum:
    """Return the spectrum from an SVD, which does not square the condition number.

    Columns are sorted by descending norm. If singular values are small because some
    columns are small, LAPACK then resolves them to rounding relative to these columns
    (as in J. Demmel et al., Linear Algebra Appl. 299 (1999), for Jacobi's method).
    """
    phi = jacobian.as_matrix()
    m, p = phi.shape
    few, many = sorted((m, p))
    rounding = _lapack.rounding_of_singular_values(few, many, _tree.eps(phi))
    # QR rounds each column relative to its norm, so that R may be sorted in its place.
    q, phi = _lapack.qr(phi) if m > p and _lapack.is_oblong(m, p) else (None, phi)
    norms = jnp.linalg.norm(phi, axis=0)
    order = jnp.argsort(-norms)
    u, s, sorted_vt = _small_svd.svd(phi[:, order])
    vt = jnp.zeros_like(sorted_vt).at[:, order].set(sorted_vt)
    # |phi| |v| bounds the rounding error of phi v for each singular vector v. Times the
    # square root of p it bounds phi v itself. A singular value above this bound is only
    # rounding, for example if v lies on columns of zeros.
    sizes = jnp.linalg.norm(vt * norms[None], axis=1)
    impossible = s > 2 * p**0.5 * sizes
    vanish = (s[0] > 0) & (s[0] ** 2 == 0)  # all squares underflow

    vectors = Eigenvectors(jacobian, left=u, right=vt.T, reduction=q)

    def above(least: ScalarLike, faint=None) -> Spectrum:
        kept = jnp.where((s <= least * sizes) & jnp.isfinite(sizes) | impossible, 0, s)
        w, c = jnp.where(vanish, jnp.nan, kept**2), vectors.project(residual, kept)
        return Spectrum(w, c, kept, vectors, residual, faint)

    if svd_is_cheap(m, p):
        return above(rounding)
    # On random matrices of low rank the rounding was at most 20 eps, but thousands of eps
    # where all columns are parallel. In single precision a network for the heat equation
    # (8,192 points) ends at an error of 2.3e-6 with the faint values, and 1.3e-4 without.
    eps = float(jnp.finfo(s.dtype).eps)
    usual = max(m, p) ** 0.5 * eps
    return above(rounding, (above(usual), (eps * jnp.max(s)) ** 2))


def from_kernel(jacobian: AbstractJacobian, residual: Float[Array, " m"]) -> Spectrum:
    """Return the spectrum from eigenpairs of the kernel."""
    kernel = jacobian.gram()
    w, u = _largest_first(*_lapack.eigh(kernel))
    w = jnp.where(w <= _rounding(kernel) * w[0], 0, w)
    vectors, s = Eigenvectors(jacobian, left=u), jnp.sqrt(w)
    return Spectrum(w, vectors.project(residual, s), s, vectors, residual)


def from_curvature(jacobian: AbstractJacobian, residual: Float[Array, " m"]) -> Spectrum:
    """Return the spectrum from eigenpairs of the curvature: u = phi v / sqrt(w)."""
    phi = jacobian.as_matrix()
    eigenvalues, v = _largest_first(*_lapack.eigh(gram_of_columns(phi)))
    vectors = Eigenvectors(jacobian, right=v, matrix=phi)

    def above(least: ScalarLike, faint=None) -> Spectrum:
        w = jnp.where(eigenvalues <= least * eigenvalues[0], 0, eigenvalues)
        s = jnp.sqrt(w)
        return Spectrum(w, vectors.project(residual, s), s, vectors, residual, faint)

    # Rounding was mostly about eps. The same network ends at an error of 2e-4 with the
    # faint values, and 2e-2 without.
    usual = float(jnp.finfo(v.dtype).eps)
    return above(_rounding(v), (above(usual), usual**2 * eigenvalues[0]))


def _largest_first(w, u):
    return w[::-1], u[:, ::-1]


def _rounding(matrix: Float[Array, "m n"]) -> float:
    return max(matrix.shape) * float(jnp.finfo(matrix.dtype).eps)
