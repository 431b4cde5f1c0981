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
from jaxtyping import Array, Float, Key, Scalar

from .._common import _tree
from .._common._tree import matmul
from . import _lapack


Matrix = Float[Array, "n l"]
Rows = Float[Array, "l n"]


def shifted(probes: Matrix, sketch: Matrix, times: float) -> tuple[Matrix, Scalar]:
    r"""Return $(A + \nu I)\Omega$ and $\nu$ for the sketch $A\Omega$, with $\nu$ equal to
    `times` the sketch's rounding, so that $A + \nu I$ is positive definite."""
    shift = times * _tree.eps(sketch) * _tree.norm(sketch)
    shift = jnp.where(shift > 0, shift, 1)
    return sketch + shift * probes, shift


def core_factor(probes: Matrix, sketch: Matrix) -> Float[Array, "l l"]:
    r"""Return the lower triangular $C$; NaN if the sketch is not finite."""
    core = matmul(probes.T, sketch)
    return _lapack.cholesky((core + core.T) / 2)


def halved(factor: Float[Array, "l l"], matrix: Matrix) -> Matrix:
    r"""Return the matrix times $C^{-\top}$."""
    return jax.scipy.linalg.solve_triangular(factor, matrix.T, lower=True).T


def eigenpairs(
    products: Callable[[Rows], Rows], size: int, rank: int, seed: int, dtype: Any
) -> tuple[Matrix, Float[Array, " l"]]:
    r"""Return orthonormal $U$ and descending $w$ with $\hat A = U\,\mathrm{diag}(w)\,
    U^\top$. The eigenvalues have an error of about eps times the largest, and those that
    would be negative are zero.

    Z. Frangella, J. A. Tropp and M. Udell, *Randomized Nyström preconditioning*, SIAM J.
    Matrix Anal. Appl. 44 (2023), Algorithm 2.1.

    - `products`: multiplies each row of a matrix by $A$, which is `size` x `size`.
    - `seed`: the seed of the probes.
    """
    probes = jax.random.normal(jax.random.key(seed), (size, rank), dtype)
    probes, _ = jnp.linalg.qr(probes)
    sketch, shift = shifted(probes, products(probes.T).T, size**0.5)
    vectors, s, _ = _lapack.svd(halved(core_factor(probes, sketch), sketch))
    excess = s**2 - shift
    least = rank * _tree.eps(sketch) * shift
    return vectors, jnp.where(excess > least, excess, 0)


def trace(
    product: Callable[[Float[Array, " n"]], Float[Array, " n"]],
    n: int,
    num_probes: int,
    key: Key[Array, ""],
    dtype: Any,
) -> tuple[Scalar, Scalar]:
    r"""Estimate the trace of $A$, n x n, and the standard error of the estimate; see
    [`gnlin.spectra.trace`][]."""
    # Each column is uniform on the sphere of radius sqrt(n).
    probes = jax.random.normal(key, (n, num_probes), dtype)
    probes *= (n**0.5 / jnp.linalg.norm(probes, axis=0))[None]
    sketch = jax.lax.map(product, probes.T).T
    # The smallest singular value of the probes is about sqrt(n) times this (Marchenko and
    # Pastur), and the shift must exceed rounding there, too.
    least = 1 - (num_probes / n) ** 0.5 + 1 / n
    sketch, shift = shifted(probes, sketch, n**0.5 / least)

    # In the basis Q, the Nystrom approximation is B B^T.
    q, r = jnp.linalg.qr(sketch)
    factor = core_factor(probes, sketch)
    b = halved(factor, r)
    # The inverse of the core is C^-T times its transpose.
    inverse = halved(factor, jnp.eye(num_probes, dtype=dtype))
    scale = jnp.linalg.norm(inverse, axis=1)
    left_out = matmul(b, inverse.T) / scale[None]
    seen = jnp.sum(left_out * matmul(q.T, probes), axis=0)
    # The remainder is zero on the other probes. The part of a probe that is orthogonal to
    # them is scaled to represent the n - l + 1 dimensions beside them.
    _, upper = jnp.linalg.qr(probes)
    upward = jax.scipy.linalg.solve_triangular(upper, jnp.eye(num_probes, dtype=dtype))
    stretch = (n - num_probes + 1) * jnp.sum(upward**2, axis=1)
    compressed = jnp.sum(b**2) - jnp.sum(left_out**2, axis=0)
    value = jnp.mean(compressed + stretch * seen**2 - shift * n)

    # Without two probes, the approximation loses what their span held. The remainder of
    # one of them, and its part that is orthogonal to the other probes, are those without
    # it alone, divided by 1 - cos^2 of the two rows of the inverse of the core's factor,
    # or of R's.
    others = ~jnp.eye(num_probes, dtype=bool)
    cosine = _cosines(inverse)
    sine = jnp.where(others, 1 - cosine**2, 1)
    inner = matmul(left_out.T, left_out)
    alone = jnp.diagonal(inner)
    lost = (alone[:, None] + alone[None] - 2 * cosine * inner) / sine
    wider = (n - num_probes + 2) / (n - num_probes + 1) * (1 - _cosines(upward) ** 2)
    each = (stretch / scale**2)[:, None] * wider / sine - lost
    without = jnp.sum(jnp.where(others, each, 0), axis=0) / (num_probes - 1)
    unit = _tree.unit(without)  # whose square may be out of range
    return value, jnp.sqrt(num_probes - 1) * unit * jnp.std(without / unit)


def _cosines(rows: Float[Array, "l n"]) -> Float[Array, "l l"]:
    unit = rows / jnp.linalg.norm(rows, axis=1)[:, None]
    return matmul(unit, unit.T)
