"""LAPACK factorisations that return NaN for a matrix that is not finite.

LAPACK's `eigh` of such a matrix can run for minutes, and can crash the process. LAPACK is
therefore given zeros in its place.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar, ScalarLike

from .._common._tree import matmul


def guarded(factorise, matrix: Float[Array, "m n"]) -> Any:
    finite = jnp.all(jnp.isfinite(matrix))
    factors = factorise(jnp.where(finite, matrix, jnp.zeros_like(matrix)))
    return tuple(jnp.where(finite, factor, jnp.nan) for factor in factors)


def eigh(matrix: Float[Array, "n n"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
    """Return the eigenvalues (ascending) and eigenvectors (columns) of a symmetric
    matrix."""
    return guarded(jnp.linalg.eigh, matrix)


def svd(
    matrix: Float[Array, "m n"],
) -> tuple[Float[Array, "m k"], Float[Array, " k"], Float[Array, "k n"]]:
    """Return the thin singular value decomposition, singular values descending."""
    return guarded(_thin_svd, matrix)


# Factor of the root of the longer side below. The rounding was at most 44 eps, in both
# precisions: parallel and dependent columns, 2 to 50 of them with up to 4 million rows.
_ROUNDINGS = 4.0


def rounding_of_singular_values(few: int, many: ScalarLike, eps: float) -> Scalar:
    """Return the part of the largest singular value below which others may be rounding,
    with `few` and `many` the lengths of the sides.

    The usual `many` times eps holds in the worst case. It exceeds 1 for ten million rows
    in single precision, where no singular value would be left."""
    return jnp.maximum(few, jnp.minimum(many, _ROUNDINGS * many**0.5)) * eps


def cholesky(matrix: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Return the lower triangular factor of a positive definite matrix."""
    finite = jnp.all(jnp.isfinite(matrix))
    safe = jnp.where(finite, matrix, jnp.eye(len(matrix), dtype=matrix.dtype))
    return jnp.where(finite, jnp.linalg.cholesky(safe), jnp.nan)


# Aspect ratio and number of entries from which a QR factorisation is made first. It takes
# 0.4 to 0.5 of the time of the plain decomposition (jax 0.10, on a CPU).
_OBLONG, _LARGE = 8, 2**14


def is_oblong(m: int, n: int) -> bool:
    """Whether an orthogonal factorisation should come before singular values."""
    return max(m, n) >= _OBLONG * min(m, n) and m * n >= _LARGE


def qr(matrix: Float[Array, "m n"]) -> tuple[Float[Array, "m k"], Float[Array, "k n"]]:
    """The thin QR factorisation. Only the small factor is NaN if the matrix is not
    finite: to overwrite the large one would be another pass over its memory."""
    finite = jnp.all(jnp.isfinite(matrix))
    q, r = jnp.linalg.qr(jnp.where(finite, matrix, jnp.zeros_like(matrix)))
    return q, jnp.where(finite, r, jnp.nan)


def _thin_svd(matrix: Float[Array, "m n"]):
    m, n = matrix.shape
    if not is_oblong(m, n):
        return jnp.linalg.svd(matrix, full_matrices=False)
    q, r = jnp.linalg.qr(matrix if m > n else matrix.T)
    u, s, vt = jnp.linalg.svd(r if m > n else r.T, full_matrices=False)
    if m > n:
        return matmul(q, u), s, vt
    return u, s, matmul(vt, q.T)
