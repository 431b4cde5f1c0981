"""Singular values of many small matrices at once.

Under `jax.vmap` LAPACK is called for one matrix after the other. Here all are rotated
together, each operation along the batch, in lanes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float

from .._common import _tree
from . import _lapack


# Over LAPACK's, on a CPU: for one matrix of 1 to 8 columns it takes 0.7 to 3 times the
# time, for 4 of them 0.4 to 3 times, for 32 or 1,000 of 1 to 6 columns 0.2 to 0.8 times
# (the fewer rows the less), of 7 and 8 columns 0.5 to 1 times, of 10 and 16 1.1 to 1.7.
_MOST_COLUMNS = 6
_FEWEST_MATRICES = 8
# So many at once stay in the nearer memories, which 8 columns take in 0.6 of the time.
_MOST_LANES = 256
# Of more rows than so many times the columns a triangle is made first, and rotated.
_TALL = 2
# Five to nine are enough for the batches that were measured.
_MAX_SWEEPS = 30


@jax.custom_jvp
def svd(
    matrix: Float[Array, "m n"],
) -> tuple[Float[Array, "m k"], Float[Array, " k"], Float[Array, "k n"]]:
    """The thin singular value decomposition, singular values descending: by LAPACK, or,
    where it is mapped over many small matrices, by rotations.

    By rotations what is exactly zero has no singular vector on the longer side but zero.
    If a matrix is not finite, all numbers that come back are NaN, of this matrix alone.
    """
    return _svd(matrix)


@svd.defjvp
def _svd_jvp(primals, tangents):
    # Until they are orthogonal: a loop, which is not to be differentiated.
    return jax.jvp(_lapack.svd, primals, tangents)


@custom_vmap
def _svd(matrix):
    return _lapack.svd(matrix)


@_svd.def_vmap
def _svd_of_many(axis_size, in_batched, matrices):
    small = min(matrices.shape[1:]) <= _MOST_COLUMNS
    many = axis_size >= _FEWEST_MATRICES
    on_cpu = jax.default_backend() == "cpu"  # where it has been measured
    way = by_rotations if small and many and on_cpu else _lapack.svd
    return jax.vmap(way)(matrices), (True, True, True)


def by_rotations(
    matrix: Float[Array, "m n"],
) -> tuple[Float[Array, "m k"], Float[Array, " k"], Float[Array, "k n"]]:
    """As accurate as one-sided Jacobi is: what small columns say is not lost beside large
    ones."""
    m, n = matrix.shape
    if m < n:
        v, s, ut = by_rotations(matrix.T)
        return ut.T, s, v.T
    u, s, vt = _lapack.guarded(_tall, matrix)
    return u, s, vt


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
    r"""By one-sided Jacobi: columns are rotated, two by two, until they are orthogonal,
    and the longer stands before the shorter. $A V = U \Sigma$, with V the rotations.

    ??? cite "Reference"

        J. Demmel and K. Veselić, *Jacobi's method is more accurate than QR*, SIAM J.
        Matrix Anal. Appl. 13 (1992). All columns at once, in the rounds of a tournament:
        R. P. Brent and F. T. Luk, SIAM J. Sci. Stat. Comput. 6 (1985).
    """
    m, n, *lanes = matrix.shape
    identity = jnp.eye(n, dtype=matrix.dtype).reshape(n, n, *(1 for _ in lanes))
    identity = jnp.broadcast_to(identity, (n, n, *lanes))
    # Below each column of A stands that of V, which the same rotations make.
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
    """For each round and pair, whether the left one's place is before the right one's."""
    left, right = np.arange(half), np.arange(half, 2 * half)
    in_order = []
    for _ in range(2 * half - 1):
        in_order.append(left < right)
        left, right = _next_round(left, right, np)
    return np.stack(in_order)


def _next_round(left, right, numpy=jnp):
    """The first stays, the others go on by one place round the table."""
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
    """Each pair of columns made orthogonal in its first m rows, and in order; and whether
    any was not."""
    a, b = jnp.sqrt(_dot(left, left, m)), jnp.sqrt(_dot(right, right, m))
    c = _dot(left, right, m)
    oblique = jnp.abs(c) > m * float(jnp.finfo(c.dtype).eps) * a * b
    # Of twice the angle, and of the angle, which is at most 45 degrees:
    cotangent = (b - a) * (b + a) / jnp.where(oblique, 2 * c, 1)
    sign = jnp.where(cotangent < 0, -1, 1).astype(c.dtype)
    tangent = sign / (jnp.abs(cotangent) + jnp.sqrt(1 + cotangent**2))
    tangent = jnp.where(oblique, tangent, 0)
    # By 90 degrees more where the longer, which stays the longer, is to change places.
    in_order = in_order.reshape(-1, *(1 for _ in c.shape[1:]))
    swaps = jnp.where(in_order, a < b, a > b)
    # XLA repeats for each row what comes before a product, but not before a division.
    secant = jnp.sqrt(1 + tangent**2)
    cosine = (jnp.where(swaps, tangent, 1) / secant)[:, None]
    sine = (jnp.where(swaps, -1, tangent) / secant)[:, None]
    left, right = cosine * left - sine * right, sine * left + cosine * right
    return left, right, jnp.any(oblique | swaps)


def _dot(x: Float[Array, "h k *lanes"], y: Float[Array, "h k *lanes"], m: int):
    """Of the first m rows. `jnp.sum` would not run along the lanes."""
    total = x[:, 0] * y[:, 0]
    for i in range(1, m):
        total += x[:, i] * y[:, i]
    return total
