"""A Jacobian at hand, by rows: the parameters' structure with a leading axis of m.

Leaf by leaf, so that no m x p matrix is put together where none is needed. In place of
the rows of a leaf there may be a layer's factors of them, a `Layer`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float, PyTree

from ._layer import Layer
from ._sharding import by_columns, is_spread
from ._spectrum import from_curvature, from_kernel, from_svd, Spectrum
from ._tree import matmul, promoted, ravel_pytree


# XLA's product of rows so long leaves the caches on a CPU. It is summed over slices of so
# many columns, in a quarter to four fifths of the time.
_LONG = 2**16
_SLICE = 2**11


def is_layer(x: Any) -> bool:
    return isinstance(x, Layer)


def dense(rows: PyTree) -> PyTree[Array]:
    """With all rows themselves."""
    return jax.tree.map(lambda x: x.rows() if is_layer(x) else x, rows, is_leaf=is_layer)


def matrix(rows: PyTree[Array]) -> Float[Array, "m p"]:
    """As one matrix, parameters in `ravel_pytree` order; of rows themselves."""
    return jax.vmap(lambda row: ravel_pytree(row)[0])(rows)


def gram(rows: PyTree) -> Float[Array, "m m"]:
    r"""$\phi\phi^\top$, the rows' inner products."""
    leaves = jax.tree.leaves(rows, is_leaf=is_layer)
    if not is_spread():
        return functools.reduce(jnp.add, promoted([*map(_gram_of_leaf, leaves)]))
    # Summed over leaves on each device, then once over devices.
    blocks = [leaf.reshape(leaf.shape[0], -1) for leaf in leaves if leaf.size > 0]
    parts = [by_columns(block) for block in blocks]
    each = [matmul(part, part.swapaxes(1, 2)) for part in parts]
    return jnp.sum(functools.reduce(jnp.add, promoted(each)), axis=0)


def _gram_of_leaf(rows: Array | Layer) -> Float[Array, "m m"]:
    if isinstance(rows, Layer):
        return rows.gram()
    block = rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))  # of no column, too
    # Of several devices each may have some of the columns.
    one_cpu = jax.default_backend() == "cpu" and jax.device_count() == 1
    if block.shape[1] < _LONG or not one_cpu:
        return matmul(block, block.T)

    def add(k, total):
        part = jax.lax.dynamic_slice_in_dim(block, k * _SLICE, _SLICE, axis=1)
        return total + matmul(part, part.T)

    num_slices, num_left = divmod(block.shape[1], _SLICE)
    left = block[:, block.shape[1] - num_left :]
    return jax.lax.fori_loop(0, num_slices, add, matmul(left, left.T))


def squared_columns(rows: PyTree) -> PyTree[Array]:
    """The squared norms of the Jacobian's columns."""
    return jax.tree.map(
        lambda x: x.squared_columns() if is_layer(x) else jnp.sum(x**2, axis=0),
        rows,
        is_leaf=is_layer,
    )


def pull_back(rows: PyTree, a: Float[Array, " m"]) -> PyTree[Array]:
    r"""$\phi^\top a$."""
    precise = jax.lax.Precision.HIGHEST

    def of_leaf(rows):
        if is_layer(rows):
            return rows.pull_back(a)
        product = jnp.tensordot(*promoted((a, rows)), axes=1, precision=precise)
        return product.astype(rows.dtype)

    return jax.tree.map(of_leaf, rows, is_leaf=is_layer)


def push_forward(rows: PyTree, tangent: PyTree[Array]) -> Float[Array, " m"]:
    r"""$\phi v$."""
    precise = jax.lax.Precision.HIGHEST

    def of_leaf(rows, v):
        if is_layer(rows):
            return rows.push_forward(v)
        return jnp.tensordot(*promoted((rows, v)), axes=v.ndim, precision=precise)

    parts = jax.tree.map(of_leaf, rows, tangent, is_leaf=is_layer)
    return functools.reduce(jnp.add, promoted(jax.tree.leaves(parts)))


def spectrum(
    rows: PyTree,
    residual: Float[Array, " m"],
    method: Literal["svd", "eigh"],
    pull_back: Callable[[Float[Array, " m"]], PyTree[Array]],
) -> Spectrum:
    """The spectrum of the Jacobian; `eigh` on the smaller side. Layers serve on the
    side of the outputs alone."""
    m, p = residual.size, num_parameters(rows)
    if method == "eigh" and m <= p:
        return from_kernel(gram(rows), residual, pull_back)
    _, unravel = ravel_pytree(jax.tree.map(lambda x: x[0], rows))
    factorise = from_svd if method == "svd" else from_curvature
    return factorise(matrix(rows), residual, Partial(unravel))


def num_parameters(rows: PyTree) -> int:
    leaves = jax.tree.leaves(rows, is_leaf=is_layer)
    shapes = [leaf.shape if is_layer(leaf) else leaf.shape[1:] for leaf in leaves]
    return sum(map(math.prod, shapes))
