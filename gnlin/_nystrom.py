r"""Semidefinite operators from a few random products (Nyström).

Of $A$ with a matrix of probes $\Omega$, $\hat A = A\Omega(\Omega^\top A\Omega)^{-1}
(A\Omega)^\top$ is $BB^\top$ for $B = A\Omega\,C^{-\top}$, where $CC^\top =
\Omega^\top A\Omega$.

J. A. Tropp, A. Yurtsever, M. Udell and V. Cevher, *Fixed-rank approximation of a
positive-semidefinite matrix from streaming data*, NeurIPS (2017), Algorithm 3.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from . import _tree
from ._tree import matmul


Matrix = Float[Array, "n l"]


def shifted(probes: Matrix, sketch: Matrix, times: float = 1.0) -> tuple[Matrix, Scalar]:
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


def half(probes: Matrix, sketch: Matrix) -> tuple[Matrix, Scalar]:
    r"""$B$, of orthonormal probes, and $\nu$: $BB^\top$ is near $A + \nu I$."""
    sketch, shift = shifted(probes, sketch, len(sketch) ** 0.5)
    return halved(core_factor(probes, sketch), sketch), shift
