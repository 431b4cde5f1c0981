"""The precision in which the user's functions compute: that of products of matrices, and
floats in the place of whole numbers."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


def matmul_precision() -> str | None:
    """Return JAX's setting, or `None` if it was left at its default."""
    return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute matrix products of single precision to all their digits, unless the user
    has set `jax_default_matmul_precision`. By default a GPU rounds their factors to three
    digits, and no loss falls below that error."""
    given = matmul_precision()
    with jax.default_matmul_precision("highest" if given is None else given):
        yield


def with_floats(trace: Callable[[PyTree], Any], x: PyTree) -> tuple[np.dtype, ...]:
    """Return the dtypes of the leaves of x with which a user's function is called: floats
    for whole numbers, whose sums and powers wrap (in `uint8`, 3 - 5 is 254). Indices,
    which the function cannot read as floats, become the widest whole numbers.

    - `trace`: calls the function with the shapes and dtypes of x.
    """
    leaves, structure = jax.tree.flatten(x)
    shaped = [jax.eval_shape(jnp.asarray, leaf) for leaf in leaves]
    for k, leaf in enumerate(shaped):
        if not jnp.issubdtype(leaf.dtype, jnp.integer):
            continue
        kinds = [jax.dtypes.canonicalize_dtype(kind) for kind in (float, int)]
        as_float, shaped[k] = (jax.ShapeDtypeStruct(leaf.shape, d) for d in kinds)
        tried = structure.unflatten([*shaped[:k], as_float, *shaped[k + 1 :]])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", DeprecationWarning)  # as of `one_hot`
                trace(tried)
        except Exception:  # whatever the function raises
            continue
        shaped[k] = as_float
    return tuple(leaf.dtype for leaf in shaped)


def cast(x: PyTree, dtypes: tuple[np.dtype, ...]) -> PyTree:
    """Convert the leaves of x."""
    leaves, structure = jax.tree.flatten(x)
    pairs = zip(leaves, dtypes, strict=True)
    return structure.unflatten([jnp.asarray(v, d) for v, d in pairs])
