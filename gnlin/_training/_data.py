"""Conversion of a user's data to batches of arrays, with checks."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from .._common._checks import as_jax_reads, nan_unless, nonnegative, shown, to_jax
from .._common._sharding import automatic, is_here


def as_batch(
    data: object, name: str = "data", *, is_whole: bool = True
) -> tuple[PyTree[Array], PyTree[Array], Float[Array, " n"] | None]:
    """Return (inputs, targets, weights or None) of one batch, checked.

    - `is_whole`: whether these are all data, whose weights may not all be zero.
    """
    if not (isinstance(data, tuple | list) and len(data) in (2, 3)):
        of_groups = "; each group must be a `gnlin.Residuals`" * isinstance(data, Mapping)
        raise ValueError(
            f"`{name}` must be a pair `(inputs, targets)`, or, with weights of the "
            f"examples, `(inputs, targets, weights)`, but {a_kind_of(data)} was given"
            f"{of_groups}."
        )
    inputs, targets = map(as_arrays, ("inputs", "targets"), data)
    n_inputs, n_targets = _lengths("inputs", inputs), _lengths("targets", targets)
    if len(n_inputs | n_targets) > 1:
        raise ValueError(
            "Inputs and targets must have the same number of examples, but there are "
            f"{_listed(n_inputs)} inputs and {_listed(n_targets)} targets."
        )
    (num_examples,) = n_inputs
    if num_examples == 0:
        raise ValueError(f"There is no data: `{name}` holds 0 examples.")
    if len(data) == 2 or data[2] is None:
        return inputs, targets, None
    weights = _as_weights(automatic(data[2]), num_examples, is_whole)
    return (*_unmasked((inputs, targets), weights), weights)


def as_tuple(data: Any) -> Any:
    """Convert a list `[inputs, targets]` to a tuple; lists of batches hold no arrays."""
    is_list = isinstance(data, list) and len(data) in (2, 3)
    return tuple(data) if is_list and any(hasattr(x, "shape") for x in data) else data


def a_kind_of(data: object) -> str:
    """Return a short description of `data`, for error messages."""
    if isinstance(data, Mapping):
        names = ", ".join(map(repr, data))
        return f"a dictionary of {names}" if names else "an empty dictionary"
    if isinstance(data, tuple | list):
        return f"a {type(data).__name__} of {len(data)}"
    if isinstance(data, jax.Array | np.ndarray):
        return f"an array of the shape {data.shape}"
    return f"a {type(data).__name__}"


def not_finite(
    inputs: PyTree[Array],
    targets: PyTree[Array],
    weights: Array | None = None,
) -> str:
    """Return a sentence that names examples with non-finite inputs or targets, or "".
    This looks at all data, so it is used only after a run has failed."""
    both = {"input": inputs, "target": targets}
    bad = {name: next(rows_not_finite(tree), None) for name, tree in both.items()}
    named = {name: rows for name, rows in bad.items() if rows is not None}
    if not named:
        return ""
    words = []
    for name, rows in named.items():
        more = f"s of example {rows[0]} and of {rows.size - 1} more"
        words.append(name + (more if rows.size > 1 else f" of example {rows[0]}"))
    several = len(named) > 1 or max(rows.size for rows in named.values()) > 1
    verb = "are" if several else "is"
    return f"The {', and the '.join(words)} {verb} not finite."


def rows_not_finite(tree: PyTree[Array]) -> Iterator[np.ndarray]:
    """Yield, for each leaf with non-finite entries, the indices of their examples. Leaves
    that are traced, or not addressable by this process, are skipped."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, Tracer) or not is_here(leaf):
            continue
        rows = np.asarray(jnp.isfinite(leaf)).reshape(leaf.shape[0], -1)
        bad = np.flatnonzero(~rows.all(axis=1))
        if bad.size > 0:
            yield bad


def as_arrays(name: str, tree: PyTree) -> PyTree[Array]:
    return jax.tree.map(lambda x: _as_array(name, x), automatic(tree))


def as_inputs(inputs: PyTree) -> PyTree:
    """Return checked inputs. NumPy arrays that JAX can read are not copied: they may
    exceed the memory."""

    def each(x):
        is_numpy = isinstance(x, np.ndarray) and not _is_masked(x)
        return as_jax_reads(x) if is_numpy else _as_array("inputs", x)

    inputs = jax.tree.map(each, inputs)
    for x in jax.tree.leaves(inputs):
        if isinstance(x, np.ndarray) and x.dtype.kind not in "biufV":
            raise ValueError(f"The inputs must be arrays of numbers, but hold {x.dtype}.")
    lengths = _lengths("inputs", inputs)
    if len(lengths) > 1:
        raise ValueError(
            "All inputs must have the same number of examples, but there are "
            f"{_listed(lengths)}."
        )
    if lengths == {0}:
        raise ValueError("There is no data: the inputs hold 0 examples.")
    return inputs


def _as_array(name: str, x: Any) -> Array:
    try:
        return to_jax(x)
    except (TypeError, ValueError) as error:
        what = f"dtype {x.dtype}" if hasattr(x, "dtype") else shown(x)
        if _is_masked(x):
            what = "a masked array, whose mask would be lost: leave masked examples out"
        raise ValueError(
            f"The {name} must be arrays of numbers, but hold {what}."
        ) from error


def _is_masked(x: Any) -> bool:
    return isinstance(x, np.ma.MaskedArray)


def _lengths(name: str, tree: PyTree) -> set[int]:
    if any(map(jnp.iscomplexobj, jax.tree.leaves(tree))):
        raise ValueError(f"The {name} must be real, but are complex.")
    return leading_lengths(name, tree)


def leading_lengths(name: str, tree: PyTree) -> set[int]:
    """Return the lengths of leading axes; raise `ValueError` if an array has none."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise ValueError(f"There is no data: the {name} hold no array.")
    if any(leaf.ndim == 0 for leaf in leaves):
        raise ValueError(
            f"The {name} must have a leading axis over examples, but hold a scalar; "
            "convert a list of numbers to an array by `jnp.array`."
        )
    return {leaf.shape[0] for leaf in leaves}


def _listed(lengths: set[int]) -> str:
    return " and ".join(map(str, sorted(lengths)))


def _as_weights(weights: object, num_examples: int, is_whole: bool) -> Array:
    weights = _as_array("weights", weights)
    if jnp.iscomplexobj(weights):
        raise ValueError("The weights must be real, but are complex.")
    weights = weights.astype(float)
    if weights.shape != (num_examples,):
        raise ValueError(
            f"The weights must be one for each of the {num_examples} examples, but have "
            f"the shape {weights.shape}: for weights of the parts of an example, such as "
            "tokens, write a loss whose targets hold them."
        )
    if not isinstance(weights, Tracer) and is_here(weights):
        known = np.asarray(weights)
        if not (np.all(np.isfinite(known)) and np.all(known >= 0)):
            raise ValueError(
                "The weights must be finite and not negative: put signed weights, such "
                "as advantages, into the targets of a loss of your own, whose `factor` "
                "is that of `gnlin.SoftmaxCrossEntropy`."
            )
        if is_whole and not known.any():
            raise ValueError("All weights are zero, so that no example has a loss.")
        return weights
    return nan_unless(nonnegative(weights), weights)


def _unmasked(tree: PyTree[Array], weights: Float[Array, " n"]) -> PyTree[Array]:
    """Replace non-finite examples of weight zero by an example of positive weight,
    because 0 * NaN is NaN."""
    if not isinstance(weights, Tracer) and is_here(weights) and np.all(weights > 0):
        return tree
    first = jnp.argmax(weights > 0)
    masked = weights <= 0
    finite = jnp.ones_like(masked)
    for x in jax.tree.leaves(tree):
        finite &= jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim)))

    def replaced(x):
        out = jnp.expand_dims(masked & ~finite, tuple(range(1, x.ndim)))
        return jnp.where(out, x[first], x)

    return jax.tree.map(replaced, tree)
