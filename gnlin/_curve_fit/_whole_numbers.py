"""Conversion of whole numbers in x to floats, where the user's function allows it."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr
from jaxtyping import PyTree

from .._common._cost import inner_jaxprs


# Operations that need whole numbers, although they accept floats when traced.
_OF_WHOLE = {"random_seed", "random_wrap", "random_fold_in", "bitcast_convert_type"}

Dtypes = tuple[Any, ...]  # of the leaves of x


def whole_numbers(x: PyTree) -> tuple[int, ...]:
    """Return the indices of the leaves of x that hold whole numbers which fit into
    floats."""
    real = jax.dtypes.canonicalize_dtype(float)
    leaves = enumerate(jax.tree.leaves(x))
    return tuple(k for k, leaf in leaves if _fits(leaf, real))


def with_floats(
    trace: Callable[[PyTree], Jaxpr], x: PyTree, whole: tuple[int, ...]
) -> Dtypes:
    """Return the dtypes with which a function is called: floats for the leaves `whole`,
    because sums and powers of whole numbers wrap around (in `uint8`, 3 - 5 is 254).
    Leaves that the function needs as whole numbers, such as indices, keep their dtypes.

    - `trace`: returns the function's program for these shapes and dtypes.
    """
    leaves, real = jax.tree.leaves(x), jax.dtypes.canonicalize_dtype(float)

    def dtypes(chosen: tuple[int, ...]) -> Dtypes:
        return tuple(real if k in chosen else v.dtype for k, v in enumerate(leaves))

    def are_read(chosen: tuple[int, ...]) -> bool:
        """Whether the function can read these leaves as floats."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="jax.nn.one_hot input")
                return not _needs_whole_numbers(trace(shaped(x, dtypes(chosen))))
        except Exception:  # whatever the function raises
            return False

    if are_read(whole):
        return dtypes(whole)
    chosen: tuple[int, ...] = ()
    for k in whole if len(whole) > 1 else ():
        if are_read((*chosen, k)):
            chosen = *chosen, k
    return dtypes(chosen)


def cast(x: PyTree, dtypes: Dtypes) -> PyTree:
    """Convert the leaves of x."""
    leaves, structure = jax.tree.flatten(x)
    pairs = zip(leaves, dtypes, strict=True)
    return structure.unflatten([v if v.dtype == d else v.astype(d) for v, d in pairs])


def shaped(x: PyTree, dtypes: Dtypes) -> PyTree[jax.ShapeDtypeStruct]:
    """Return the shapes of x, and these dtypes."""
    return jax.eval_shape(lambda x: cast(x, dtypes), x)


def _fits(leaf: Any, real: np.dtype) -> bool:
    """Whether these are whole numbers that floats hold exactly, as far as is known."""
    if not jnp.issubdtype(leaf.dtype, jnp.integer):
        return False
    if isinstance(leaf, Tracer | jax.ShapeDtypeStruct):
        return True
    largest = np.max(np.abs(np.asarray(leaf, np.float64)), initial=0)
    return bool(largest <= 2.0 ** (jnp.finfo(real).nmant + 1))


def _needs_whole_numbers(jaxpr: Jaxpr) -> bool:
    """Whether a program whose arguments are floats needs whole numbers."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in _OF_WHOLE:
            return True
        new = equation.params.get("new_dtype")
        is_whole = new is not None and jnp.issubdtype(new, jnp.integer)
        given: Any = equation.invars[0].aval if equation.invars else None
        if is_whole and jnp.issubdtype(given.dtype, jnp.floating):
            return True
        if any(map(_needs_whole_numbers, inner_jaxprs(equation.params))):
            return True
    return False
