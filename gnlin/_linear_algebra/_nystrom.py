r"""Semidefinite operators from a few random products (Nyström).

Of $A$ with a matrix of probes $\Omega$, $\hat A = A\Omega(\Omega^\top A\Omega)^{-1}
(A\Omega)^\top$ is $BB^\top$ for $B = A\Omega\,C^{-\top}$, where $CC^\top =
\Omega^\top A\Omega$.

J. A. Tropp, A. Yurtsever, M. Udell and V. Cevher, *Fixed-rank approximation of a
positive-semidefinite matrix from streaming data*, NeurIPS (2017), Algorithm 3.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from .._common import _tree
from .._common._tree import matmul
from . import _lapack


Matrix = Float[Array, "n l"]


def shifted(probes: Matrix, sketch: Matrix, times: float) -> tuple[Matrix, Scalar]:
    r"""$(A + \nu I)\Omega$ from $A\Omega$, and a $\nu$ of so many times its rounding:
    positive definite in spite of that."""
    shift = times * float(jnp.finfo(sketch.dtype).eps) * _tree.norm(sketch)
    shift = jnp.where(shift > 0, shift, 1)
    return sketch + shift * probes, shift


def core_factor(probes: Matrix, sketch: Matrix) -> Float[Array, "l l"]:
    r"""$C$, lower triangular; of a sketch that is not finite NaN, and none of it to
    LAPACK."""
    core = matmul(probes.T, sketch)
    finite = _tree.all_finite(core)
    safe = jnp.where(finite, (core + core.T) / 2, jnp.eye(len(core), dtype=core.dtype))
    return jnp.where(finite, jnp.linalg.cholesky(safe), jnp.nan)


def halved(factor: Float[Array, "l l"], matrix: Matrix) -> Matrix:
    r"""The matrix times $C^{-\top}$."""
    return jax.scipy.linalg.solve_triangular(factor, matrix.T, lower=True).T


def eigenpairs(
    products: Callable[[Matrix], Matrix], size: int, rank: int, seed: int, dtype: Any
) -> tuple[Matrix, Float[Array, " l"]]:
    r"""Orthonormal $U$ and $w$, descending, of $\hat A = U\,\mathrm{diag}(w)\,U^\top$;
    those that rounding cannot tell from zero are exactly zero.

    Z. Frangella, J. A. Tropp and M. Udell, *Randomized Nyström preconditioning*, SIAM J.
    Matrix Anal. Appl. 44 (2023), Algorithm 2.1.

    - `products`: $A$ times the columns of a matrix.
    - `size`: of $A$; `seed`: of the probes.
    """
    probes = jax.random.normal(jax.random.key(seed), (size, rank), dtype)
    probes, _ = jnp.linalg.qr(probes)
    sketch, shift = shifted(probes, products(probes), size**0.5)
    vectors, s, _ = _lapack.svd(halved(core_factor(probes, sketch), sketch))
    excess = s**2 - shift
    least = rank * float(jnp.finfo(dtype).eps) * shift
    return vectors, jnp.where(excess > least, excess, 0)
