"""Singular value decompositions of many small matrices at once.

Under `jax.vmap`, LAPACK is called for one matrix after the other. Jacobi rotations can
instead be vectorised over the batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float

from .._common import _tree
from . import _lapack


# Most columns, and fewest matrices, for which rotations are used. Their time over LAPACK
# on a CPU: 0.7 to 3 for one matrix of 1 to 8 columns, and 0.4 to 3 for four; for 32 or
# 1,000 matrices 0.2 to 0.8 with 1 to 6 columns (least with few rows), 0.5 to 1 with 7 and
# 8 columns, and 1.1 to 1.7 with 10 and 16.
_MOST_COLUMNS = 6
_FEWEST_MATRICES = 8
# Most matrices rotated at once, so that they fit into the cache: with 8 columns this
# takes 0.6 of the time.
_MOST_LANES = 256
# With more rows than this many times the columns, a QR factorisation is made first.
_TALL = 2
# Most sweeps of rotations; the measured batches took five to nine.
_MAX_SWEEPS = 30


@jax.custom_jvp
def svd(
    matrix: Float[Array, "m n"],
) -> tuple[Float[Array, "m k"], Float[Array, " k"], Float[Array, "k n"]]:
    """Return the thin singular value decomposition, singular values descending, by LAPACK
    or, under `jax.vmap` over many small matrices, by Jacobi rotations.

    With rotations, the singular vector on the longer side is zero if the singular value
    is exactly zero. For a matrix that is not finite, all results are NaN.
    """
    return _svd(matrix)


@svd.defjvp
def _svd_jvp(primals, tangents):
    # Rotations are a loop, and so LAPACK's decomposition is differentiated in its place.
    return jax.jvp(_lapack.svd, primals, tangents)


@custom_vmap
def _svd(matrix):
    return _lapack.svd(matrix)


@_svd.def_vmap
def _svd_of_many(axis_size, in_batched, matrices):
    small = min(matrices.shape[1:]) <= _MOST_COLUMNS
    many = axis_size >= _FEWEST_MATRICES
    on_cpu = jax.default_backend() == "cpu"  # the only platform that was measured
    way = by_rotations if small and many and on_cpu else _lapack.svd
    return jax.vmap(way)(matrices), (True, True, True)


def by_rotations(
    matrix: Float[Array, "m n"],
) -> tuple[Float[Array, "m k"], Float[Array, " k"], Float[Array, "k n"]]:
    """Return the decomposition by one-sided Jacobi, which is accurate for small columns
    beside large ones, too."""
    m, n = matrix.shape
    if m < n:
        v, s, ut = by_rotations(matrix.T)
        return ut.T, s, v.T
    return _lapack.guarded(_tall, matrix)


def _tall(matrix):
    m, n = matrix.shape
    unit = _tree.unit(matrix)
    matrix = matrix / unit
    if m <= _TALL * n:
        u, s, vt = _jacobi(matrix)
    else:
        q, r = jnp.linalg.qr(matrix)
        u, s, vt = _jacobi(r)
        u = _tree.matmul(q, u)
    return u, unit * s, vt


@custom_vmap
def _jacobi(matrix: Float[Array, "m n *lanes"]):
    r"""Rotate the columns in pairs until they are orthogonal and sorted by length. Then
    $A V = U \Sigma$, where $V$ is the product of the rotations (one-sided Jacobi).

    ??? cite "Reference"

        J. Demmel and K. Veselić, *Jacobi's method is more accurate than QR*, SIAM J.
        Matrix Anal. Appl. 13 (1992). For the rotation of all columns at once, paired as
        in a round-robin tournament: R. P. Brent and F. T. Luk, SIAM J. Sci. Stat. Comput.
        6 (1985).
    """
    m, n, *lanes = matrix.shape
    identity = jnp.eye(n, dtype=matrix.dtype).reshape(n, n, *(1 for _ in lanes))
    identity = jnp.broadcast_to(identity, (n, n, *lanes))
    # Each column of V is stored below its column of A, and rotated with it.
    columns = jnp.concatenate([jnp.moveaxis(matrix, 1, 0), identity], axis=1)
    if n % 2 == 1:
        columns = jnp.concatenate([columns, jnp.zeros_like(columns[:1])])
    half = columns.shape[0] // 2
    in_order = jnp.asarray(_tournament(half))

    def unfinished(carry):
        *_, rotated, num_sweeps = carry
        return rotated & (num_sweeps < _MAX_SWEEPS)

    def sweep(carry):
        left, right, _, num_sweeps = carry
        start = left, right, jnp.array(False)
        *sides, rotated = jax.lax.fori_loop(0, len(in_order), play, start)
        return *sides, rotated, num_sweeps + 1

    def play(k, carry):
        left, right, rotated = carry
        left, right, these = _rotated(left, right, m, in_order[k])
        return *_next_round(left, right), rotated | these

    start = columns[:half], columns[half:], jnp.array(True), jnp.array(0)
    left, right, *_ = jax.lax.while_loop(unfinished, sweep, start)
    columns = jnp.concatenate([left, right])[:n]
    s = jnp.sqrt(_dot(columns, columns, m))
    u = columns[:, :m] / jnp.where(s > 0, s, 1)[:, None]
    return jnp.moveaxis(u, 0, 1), s, columns[:, m:]


@_jacobi.def_vmap
def _jacobi_in_lanes(axis_size, in_batched, matrix):
    of_each = (True, True, True)
    if axis_size > _MOST_LANES:
        return jax.lax.map(_jacobi, matrix, batch_size=_MOST_LANES), of_each
    factors = _jacobi(jnp.moveaxis(matrix, 0, -1))
    return tuple(jnp.moveaxis(x, -1, 0) for x in factors), of_each


def _tournament(half: int) -> np.ndarray:
    """Return, for each round and pair, whether the left column precedes the right one."""
    left, right = np.arange(half), np.arange(half, 2 * half)
    in_order = []
    for _ in range(2 * half - 1):
        in_order.append(left < right)
        left, right = _next_round(left, right, np)
    return np.stack(in_order)


def _next_round(left, right, numpy=jnp):
    """Pair the columns for the next round: the first stays, the others move one place
    round the table."""
    if len(left) == 1:
        return left, right
    return (
        numpy.concatenate([left[:1], right[:1], left[1:-1]]),
        numpy.concatenate([right[1:], left[-1:]]),
    )


def _rotated(
    left: Float[Array, "h k *lanes"],
    right: Float[Array, "h k *lanes"],
    m: int,
    in_order: Bool[Array, " h"],
) -> tuple[Float[Array, "h k *lanes"], Float[Array, "h k *lanes"], Bool[Array, ""]]:
    """Make each pair of columns orthogonal in the first m rows, and sort it; return also
    whether any pair has changed."""
    a, b = jnp.sqrt(_dot(left, left, m)), jnp.sqrt(_dot(right, right, m))
    c = _dot(left, right, m)
    oblique = jnp.abs(c) > m * _tree.eps(c) * a * b
    # The cotangent of twice the angle; the tangent of the angle, at most 45 degrees.
    cotangent = (b - a) * (b + a) / jnp.where(oblique, 2 * c, 1)
    sign = jnp.where(cotangent < 0, -1, 1).astype(c.dtype)
    tangent = sign / (jnp.abs(cotangent) + jnp.sqrt(1 + cotangent**2))
    tangent = jnp.where(oblique, tangent, 0)
    # A rotation by 90 degrees more swaps two columns; the longer one stays the longer.
    in_order = in_order.reshape(-1, *(1 for _ in c.shape[1:]))
    swaps = jnp.where(in_order, a < b, a > b)
    # XLA recomputes the operands of a product for each row, but not those of a division.
    secant = jnp.sqrt(1 + tangent**2)
    cosine = (jnp.where(swaps, tangent, 1) / secant)[:, None]
    sine = (jnp.where(swaps, -1, tangent) / secant)[:, None]
    left, right = cosine * left - sine * right, sine * left + cosine * right
    return left, right, jnp.any(oblique | swaps)


def _dot(x: Float[Array, "h k *lanes"], y: Float[Array, "h k *lanes"], m: int):
    """Return the inner products over the first m rows. (`jnp.sum` is not vectorised over
    the batch.)"""
    total = x[:, 0] * y[:, 0]
    for i in range(1, m):
        total += x[:, i] * y[:, i]
    return total
