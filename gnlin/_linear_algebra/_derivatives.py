"""Derivatives that need no derivatives of a factorisation."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float

from .._common import _tree
from .._common._tree import matmul


Function = Callable[[Float[Array, " k"]], Float[Array, " k"]]


@eqx.filter_custom_jvp
def with_derivative_of(formula, value, *args):
    """Return `value`, with the derivative of `formula(*args)`, which must be equal to it.
    Use this if `value` was computed in a way that is not differentiable; `formula` is
    only ever differentiated."""
    return value


@with_derivative_of.def_jvp
def _(primals, tangents):
    formula, value, *args = primals
    _, _, *moved = tangents
    _, tangent = eqx.filter_jvp(formula, args, moved)
    # The value is differentiated again for second derivatives.
    value = with_derivative_of(formula, value, *args)
    return value, _tree.cast_like(tangent, value)


@eqx.filter_custom_jvp
def of_matrix(filter, matrix, vector, w, vectors):
    r"""Return $g(A) b$ for a symmetric matrix A with known eigenpairs."""
    return matmul(vectors, filter(w) * matmul(vectors.T, vector))


@of_matrix.def_jvp
def _of_matrix_jvp(primals, tangents):
    r"""Use $dg(A) = Q\,(G \circ Q^\top dA\,Q)\,Q^\top$, with the divided differences
    $G_{ij} = (g(w_i) - g(w_j))/(w_i - w_j)$, or $g'(w_i)$ if $w_i = w_j$.

    ??? cite "Reference"

        Y. Daleckii and S. Krein (1965); N. Higham, *Functions of matrices* (2008),
        theorem 3.11.
    """
    filter, matrix, vector, w, q = primals
    moved_filter, moved_matrix, moved_vector, *_ = tangents
    moved = jnp.zeros_like(vector)
    if moved_matrix is not None:
        rotated = matmul(q.T, matmul(moved_matrix, q))
        along = _divided_differences(filter, w) * rotated
        moved += matmul(q, matmul(along, matmul(q.T, vector)))
    # These are differentiated again for second derivatives.
    if moved_vector is not None:
        moved += of_matrix(filter, matrix, moved_vector, w, q)
    if jax.tree.leaves(moved_filter):
        change = Partial(_change, filter, moved_filter)
        moved += of_matrix(change, matrix, vector, w, q)
    return of_matrix(*primals), moved


def _change(filter: Function, moved: Function, w: Float[Array, " k"]):
    value, change = eqx.filter_jvp(lambda f: f(w), (filter,), (moved,))
    return jnp.zeros_like(value) if change is None else change  # what moves has no effect


def _divided_differences(filter: Function, w: Float[Array, " k"]) -> Float[Array, "k k"]:
    """Return the divided differences of the filter. At relative distances d below
    eps^(1/3), use the mean of both derivatives: its error d^2 is below eps / d."""
    g, slope = jax.jvp(filter, (w,), (jnp.ones_like(w),))
    gap, size = w[:, None] - w[None], jnp.maximum(w[:, None], w[None])
    near = jnp.abs(gap) <= _tree.eps(w) ** (1 / 3) * size
    mean = 0.5 * (slope[:, None] + slope[None])
    return jnp.where(near, mean, (g[:, None] - g[None]) / jnp.where(near, 1, gap))
