"""A dense Jacobian, kept by rows: the parameters' structure with a leading axis of m.

Leaf by leaf, so that no m x p matrix is put together where none is needed.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial
from jaxtyping import Array, Float, PyTree

from ._sharding import by_columns, is_spread
from ._spectrum import from_curvature, from_kernel, from_svd, Spectrum
from ._tree import matmul


def matrix(rows: PyTree[Array]) -> Float[Array, "m p"]:
    """As one matrix, parameters in `ravel_pytree` order."""
    return jax.vmap(lambda row: ravel_pytree(row)[0])(rows)


def gram(rows: PyTree[Array]) -> Float[Array, "m m"]:
    r"""$\phi\phi^\top$, the rows' inner products."""
    leaves = [leaf for leaf in jax.tree.leaves(rows) if leaf.size > 0]
    blocks = [leaf.reshape(leaf.shape[0], -1) for leaf in leaves]
    if not is_spread():
        return functools.reduce(jnp.add, [matmul(block, block.T) for block in blocks])
    # Summed over leaves on each device, then once over devices.
    parts = [by_columns(block) for block in blocks]
    each = [matmul(part, part.swapaxes(1, 2)) for part in parts]
    return jnp.sum(functools.reduce(jnp.add, each), axis=0)


def pull_back(rows: PyTree[Array], a: Float[Array, " m"]) -> PyTree[Array]:
    r"""$\phi^\top a$."""
    precise = jax.lax.Precision.HIGHEST
    return jax.tree.map(
        lambda row: jnp.tensordot(a, row, axes=1, precision=precise).astype(row.dtype),
        rows,
    )


def push_forward(rows: PyTree[Array], tangent: PyTree[Array]) -> Float[Array, " m"]:
    r"""$\phi v$."""
    precise = jax.lax.Precision.HIGHEST
    of_leaf = jax.tree.map(
        lambda row, v: jnp.tensordot(row, v, axes=v.ndim, precision=precise),
        rows,
        tangent,
    )
    return functools.reduce(jnp.add, jax.tree.leaves(of_leaf))


def spectrum(
    rows: PyTree[Array], residual: Float[Array, " m"], method: Literal["svd", "eigh"]
) -> Spectrum:
    """The spectrum of the Jacobian; `eigh` on the smaller side."""
    first_row, unravel = ravel_pytree(jax.tree.map(lambda x: x[0], rows))
    if method == "eigh" and residual.size <= first_row.size:
        return from_kernel(gram(rows), residual, Partial(pull_back, rows))
    factorise = from_svd if method == "svd" else from_curvature
    return factorise(matrix(rows), residual, Partial(unravel))
