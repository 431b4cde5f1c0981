"""Complex numbers: where they are refused, and how they become real ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree


def check_real(what: str, tree: PyTree) -> None:
    """Raise `ValueError` if arrays are complex: a cast to real numbers would lose their
    imaginary parts."""
    if any(map(np.iscomplexobj, jax.tree.leaves(tree))):
        raise ValueError(
            f"{what} must be real: split complex numbers into their real and imaginary "
            "parts."
        )


def in_real_parts(value: Any) -> Array:
    """Return a complex array as its real and imaginary parts, along a new last axis; and
    a real array unchanged."""
    value = jnp.asarray(value)
    if not jnp.iscomplexobj(value):
        return value
    return jnp.stack([value.real, value.imag], axis=-1)
