r"""Nyström approximations of semidefinite operators from a few random products.

The approximation of $A$ by its products with probes $\Omega$ is $\hat A = A\Omega
(\Omega^\top A\Omega)^{-1}(A\Omega)^\top = BB^\top$, where $B = A\Omega\,C^{-\top}$ and
$CC^\top = \Omega^\top A\Omega$.

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
    r"""Return $(A + \nu I)\Omega$ and $\nu$ for the sketch $A\Omega$, with $\nu$ equal to
    `times` the sketch's rounding, so that $A + \nu I$ is positive definite."""
    shift = times * float(jnp.finfo(sketch.dtype).eps) * _tree.norm(sketch)
    shift = jnp.where(shift > 0, shift, 1)
    return sketch + shift * probes, shift


def core_factor(probes: Matrix, sketch: Matrix) -> Float[Array, "l l"]:
    r"""Return the lower triangular $C$; NaN if the sketch is not finite."""
    core = matmul(probes.T, sketch)
    finite = _tree.all_finite(core)
    safe = jnp.where(finite, (core + core.T) / 2, jnp.eye(len(core), dtype=core.dtype))
    return jnp.where(finite, jnp.linalg.cholesky(safe), jnp.nan)


def halved(factor: Float[Array, "l l"], matrix: Matrix) -> Matrix:
    r"""Return the matrix times $C^{-\top}$."""
    return jax.scipy.linalg.solve_triangular(factor, matrix.T, lower=True).T


def eigenpairs(
    products: Callable[[Matrix], Matrix], size: int, rank: int, seed: int, dtype: Any
) -> tuple[Matrix, Float[Array, " l"]]:
    r"""Return orthonormal $U$ and descending $w$ with $\hat A = U\,\mathrm{diag}(w)\,
    U^\top$. Eigenvalues indistinguishable from zero by rounding are exactly zero.

    Z. Frangella, J. A. Tropp and M. Udell, *Randomized Nyström preconditioning*, SIAM J.
    Matrix Anal. Appl. 44 (2023), Algorithm 2.1.

    - `products`: multiplies a matrix by $A$, which is `size` x `size`.
    - `seed`: the seed of the probes.
    """
    probes = jax.random.normal(jax.random.key(seed), (size, rank), dtype)
    probes, _ = jnp.linalg.qr(probes)
    sketch, shift = shifted(probes, products(probes), size**0.5)
    vectors, s, _ = _lapack.svd(halved(core_factor(probes, sketch), sketch))
    excess = s**2 - shift
    least = rank * float(jnp.finfo(dtype).eps) * shift
    return vectors, jnp.where(excess > least, excess, 0)
