"""What two runs must have in common to be the same: the program of their step, as it is
handed to the compiler, and their numbers. Descriptions in words tell users what differs.
All of these are texts that do not depend on the process.
"""

import dataclasses
import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from ._canonical import struct
from ._checks import is_key


# Most numbers of an array that are written out rather than checksummed.
_MOST_NUMBERS = 8
# Most characters of a description, beyond which only a class is named.
_LONGEST = 120

_NUMBER = jax.Array | np.ndarray | np.generic | bool | int | float | complex


def program(jitted: Any, *args: PyTree) -> str:
    """Return a digest of the program of a jitted function for arguments of these shapes,
    on one device. It covers all code and all constants. If the function is called later,
    it is not traced a second time."""
    shapes = jax.tree.map(lambda x: struct(x) if eqx.is_array(x) else x, args)
    text = jitted.lower(*shapes).as_text()
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def checksum(tree: PyTree) -> str:
    """Return a checksum of all arrays and numbers of a tree, with shapes and dtypes."""
    crc = 0
    for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array_like)):
        array = np.ascontiguousarray(as_numpy(leaf))
        crc = zlib.crc32(f"{array.shape} {array.dtype}".encode(), crc)
        crc = zlib.crc32(array.tobytes(), crc)
    return f"{crc:08x}"


def as_numpy(x: Any) -> np.ndarray:
    """Convert an array, or the data of a random key, to NumPy."""
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def described(thing: Any) -> str:
    """Describe an object in words: numbers by their values, functions and classes by
    their names, other objects by their class and their fields or items."""
    if thing is None or isinstance(thing, str):
        return repr(thing)
    if isinstance(thing, _NUMBER):
        numbers = as_numpy(thing)
        if numbers.size <= _MOST_NUMBERS:
            return str(numbers.tolist())
        return f"{numbers.dtype}{list(numbers.shape)} of checksum {checksum(thing)}"
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        parts = [f"{name}={described(value)}" for name, value in _fields(thing).items()]
    elif isinstance(thing, Mapping):
        parts = [f"{key}: {described(value)}" for key, value in thing.items()]
    elif isinstance(thing, list | tuple):
        parts = map(described, thing)
    else:
        return named(thing)
    text = f"{named(thing)}({', '.join(parts)})"
    return text if len(text) <= _LONGEST else named(thing)


def named(thing: Any) -> str:
    """Return the name of a function or class, or the name of an object's class."""
    return getattr(thing, "__qualname__", type(thing).__qualname__)


def described_by_field(name: str, thing: Any) -> dict[str, str]:
    """Describe a solver or a loss: its class, and each hyperparameter."""
    fields = {f"{name}'s {k}": described(value) for k, value in _fields(thing).items()}
    return {name: named(thing), **fields}


def described_by_leaf(name: str, tree: PyTree) -> dict[str, str]:
    """Describe each leaf of a model, such as its activation."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    at = jax.tree_util.keystr
    return {f"{name}{at(path)}": described(leaf) for path, leaf in leaves}


def _fields(thing: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that may change what it computes."""
    names = (field.name for field in dataclasses.fields(thing))
    return {x: getattr(thing, x) for x in names if x != "verbose" and hasattr(thing, x)}
