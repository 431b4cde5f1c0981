"""What a run is of, in words and checksums that are the same in every process."""

import dataclasses
import functools
import inspect
import types
import zlib
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


_MOST_NUMBERS = 8
"""Of an array that is written out."""


def described_by_field(name: str, thing: Any) -> dict[str, str]:
    """The kind of a solver or a loss, and each of its hyperparameters."""
    found = {name: type(thing).__qualname__}
    for field in dataclasses.fields(thing):
        value = described(getattr(thing, field.name))
        found[f"{name}'s {field.name}"] = value
    return found


def described(thing: Any, seen: tuple[int, ...] = ()) -> str:
    """All the numbers of a thing; a function, by its code and what it has closed over."""
    if id(thing) in seen:
        return "..."
    inner = functools.partial(described, seen=(*seen, id(thing)))
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = dataclasses.fields(thing)
        values = (f"{f.name}={inner(getattr(thing, f.name))}" for f in fields)
        return f"{type(thing).__qualname__}({', '.join(values)})"
    if eqx.is_array_like(thing):
        numbers = as_numpy(thing)
        few = numbers.size <= _MOST_NUMBERS
        return str(numbers.tolist()) if few else checksum(numbers)
    if isinstance(thing, str | bytes | None):
        return repr(thing)
    if isinstance(thing, Mapping):
        return f"{{{', '.join(f'{inner(k)}: {inner(v)}' for k, v in thing.items())}}}"
    if isinstance(thing, set | frozenset):  # whose order is another in each process
        return f"{type(thing).__qualname__}({', '.join(sorted(map(inner, thing)))})"
    if isinstance(thing, list | tuple):
        return f"{type(thing).__qualname__}({', '.join(map(inner, thing))})"
    if isinstance(thing, functools.partial):
        return f"partial{inner((thing.func, thing.args, thing.keywords))}"
    if isinstance(thing, types.MethodType):
        return f"{inner(thing.__func__)} of {inner(thing.__self__)}"
    if isinstance(thing, types.FunctionType):
        closed_over = inspect.getclosurevars(thing).nonlocals
        parts = [thing.__code__, thing.__defaults__, thing.__kwdefaults__, closed_over]
        return f"{thing.__qualname__}<{_short(inner(parts))}>"
    if isinstance(thing, types.CodeType):
        return f"{thing.co_code.hex()} {inner(thing.co_names)} {inner(thing.co_consts)}"
    wrapped = getattr(thing, "__wrapped__", None)
    if wrapped is not None:  # by `jax.jit`, for one
        return inner(wrapped)
    return getattr(thing, "__qualname__", type(thing).__qualname__)


def checksum(tree: PyTree) -> str:
    """Of all arrays and numbers of a tree, with their shapes and dtypes."""
    of_all = 0
    for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array_like)):
        array = np.ascontiguousarray(as_numpy(leaf))
        of_all = zlib.crc32(f"{array.shape} {array.dtype}".encode(), of_all)
        of_all = zlib.crc32(array.tobytes(), of_all)
    return f"{of_all:08x}"


def _short(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def is_key(x: Any) -> bool:
    return eqx.is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def as_numpy(x: Any) -> np.ndarray:
    """An array, or the numbers that a random key is."""
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)
