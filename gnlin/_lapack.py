"""LAPACK factorisations that are never handed a NaN or an infinity.

`eigh` of a matrix that holds one can run for minutes, and a crash in LAPACK takes the
process with it. Here a non-finite matrix is replaced before the call, and every number
that comes back is a NaN: the caller sees the failure, LAPACK does not.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def guarded(factorise, matrix: Float[Array, "m n"]):
    finite = jnp.all(jnp.isfinite(matrix))
    factors = factorise(jnp.where(finite, matrix, jnp.zeros_like(matrix)))
    return tuple(jnp.where(finite, factor, jnp.nan) for factor in factors)


def eigh(
    matrix: Float[Array, "n n"],
) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
    """Eigenvalues (ascending) and eigenvectors (columns) of a symmetric matrix."""
    eigenvalues, eigenvectors = guarded(jnp.linalg.eigh, matrix)
    return eigenvalues, eigenvectors


def svd(
    matrix: Float[Array, "m n"],
) -> tuple[Float[Array, "m k"], Float[Array, " k"], Float[Array, "k n"]]:
    """The thin singular value decomposition, singular values descending."""
    u, s, vt = guarded(lambda a: jnp.linalg.svd(a, full_matrices=False), matrix)
    return u, s, vt
