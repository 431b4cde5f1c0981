"""Descriptions of the settings of a run, by text and checksums that do not depend on the
process, so that two runs can be compared.

Numbers are described by their values. A user's function is described by its code, its
defaults, its closure and the globals that it reads; a user's class by its members; an
object by its class and its attributes. Functions and classes of Python and of installed
packages are described by their names.
"""

import builtins
import copyreg
import dataclasses
import dis
import functools
import hashlib
import sys
import types
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from ._checks import is_key


# Most numbers of an array that are written out rather than checksummed.
_MOST_NUMBERS = 8
# Most characters of a description that is written out, as for error messages.
_LONGEST = 120


def described_by_field(name: str, thing: Any) -> dict[str, str]:
    """Describe the kind of a solver or a loss, and each hyperparameter but `verbose`."""
    found = {name: described(type(thing))}
    for field in dataclasses.fields(thing):
        if field.name != "verbose":
            value = described(getattr(thing, field.name))
            found[f"{name}'s {field.name}"] = value
    return found


def described_by_leaf(name: str, tree: PyTree) -> dict[str, str]:
    """Describe each leaf of a model, such as its activation, and then the whole model
    with its classes and static fields."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = {
        f"{name}{jax.tree_util.keystr(path)}": described(leaf) for path, leaf in leaves
    }
    return {**found, name: described(tree)}


def described(thing: Any) -> str:
    """Describe an object. Descriptions are equal in every process for objects that
    compute the same, and differ for others if the difference can be seen."""
    return _Description()(thing)


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


_NUMBER = jax.Array | np.ndarray | np.generic | bool | int | float | complex

# Special methods that do not change what an object computes.
_INCIDENTAL = ("__annotate__", "__annotate_func__", "__eq__", "__hash__", "__repr__")

# Packages whose wrappers only check a function's arguments.
_CHECKERS = "beartype", "jaxtyping"


class _Description:
    """Describes one object. Parts that occur several times are described once, and cycles
    are cut."""

    def __init__(self):
        # Keep a reference to each object, so that its `id` is not reused.
        self._known: dict[int, tuple[Any, str]] = {}
        self._open: set[int] = set()

    def __call__(self, thing: Any) -> str:
        if thing is None or isinstance(thing, str | bytes):
            return _short(repr(thing), type(thing).__name__)
        if isinstance(thing, _NUMBER):
            return self._numbers(thing)
        if id(thing) in self._known:
            return self._known[id(thing)][1]
        if id(thing) in self._open:
            return "..."
        self._open.add(id(thing))
        try:
            text = self._of(thing)
        finally:
            self._open.remove(id(thing))
        self._known[id(thing)] = thing, text
        return text

    def _numbers(self, thing: Any) -> str:
        numbers = as_numpy(thing)
        if numbers.dtype.hasobject:
            return self(numbers.tolist())
        if numbers.size > _MOST_NUMBERS:
            return checksum(numbers)
        plain = numbers.dtype in (bool, int, float, complex)
        return str(numbers.tolist()) + ("" if plain else f" {numbers.dtype}")

    def _of(self, thing: Any) -> str:
        if isinstance(thing, type):
            return self._class(thing)
        if isinstance(thing, types.ModuleType):
            return thing.__name__
        if isinstance(thing, types.CodeType):
            return self._code(thing)
        if isinstance(thing, types.FunctionType):
            return self._function(thing)
        if isinstance(thing, types.MethodType):
            return f"{self(thing.__func__)} of {self(thing.__self__)}"
        kind = self(type(thing))
        if dataclasses.is_dataclass(thing):
            fields = (f for f in dataclasses.fields(thing) if hasattr(thing, f.name))
            values = (f"{f.name}={self(getattr(thing, f.name))}" for f in fields)
            return _short(f"{kind}({', '.join(values)})", kind)
        if isinstance(thing, Mapping):
            values = (f"{self(k)}: {self(v)}" for k, v in thing.items())
            return _short(f"{kind}({', '.join(values)})", kind)
        if isinstance(thing, set | frozenset):  # whose order depends on the process
            return _short(f"{kind}({', '.join(sorted(map(self, thing)))})", kind)
        if isinstance(thing, list | tuple):
            return _short(f"{kind}({', '.join(map(self, thing))})", kind)
        if isinstance(thing, functools.partial):
            inner = self((thing.func, thing.args, thing.keywords))
            return _short(f"{kind}{inner}", kind)
        if isinstance(thing, property):
            return self((thing.fget, thing.fset))
        if isinstance(thing, functools.cached_property):
            return self(thing.func)
        if isinstance(thing, jax.tree_util.PyTreeDef):
            with suppress(Exception):
                return self(jax.tree.unflatten(thing, range(thing.num_leaves)))
        if getattr(thing, "__wrapped__", None) is not None:
            return self._wrapped(thing)
        return self._object(thing, kind)

    def _class(self, thing: type) -> str:
        if _is_installed(thing.__module__):
            return _name(thing)
        members = []
        for base in thing.__mro__:
            if _is_installed(base.__module__):
                members.append(_name(base))
                continue
            members += [
                f"{name}: {self(value)}"
                for name, value in sorted(vars(base).items())
                if _computes(base, name, value)
            ]
        return f"{thing.__qualname__}<{_digest(' '.join(members))}>"

    def _function(self, thing: types.FunctionType) -> str:
        wrapped = getattr(thing, "__wrapped__", None)
        made_by = (thing.__globals__.get("__name__", ""), thing.__code__.co_filename)
        if wrapped is not None and any(
            made_by[0].startswith(name) or made_by[1].startswith(f"<@{name}")
            for name in _CHECKERS
        ):
            return self(wrapped)
        installed = _is_installed(thing.__globals__.get("__name__"))
        if installed and "<" not in thing.__qualname__ and not thing.__closure__:
            return _name(thing)
        attributes = {k: v for k, v in vars(thing).items() if not k.startswith("__")}
        parts = [
            self._code(thing.__code__),
            self(thing.__defaults__),
            self(thing.__kwdefaults__),
            *map(self._cell, thing.__closure__ or ()),
            self(attributes),
        ]
        if not installed:
            parts += self._globals(thing)
        return f"{thing.__qualname__}<{_digest(' '.join(parts))}>"

    def _cell(self, cell: types.CellType) -> str:
        try:
            return self(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            return "empty"

    def _code(self, code: types.CodeType) -> str:
        num_arguments = code.co_argcount + code.co_kwonlyargcount
        parts = [
            code.co_code.hex(),
            code.co_exceptiontable.hex(),
            f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount}",
            f"{code.co_flags}",
            f"{code.co_varnames[:num_arguments]} {code.co_names}",
            *map(self, code.co_consts),
        ]
        return _digest(" ".join(parts))

    def _globals(self, thing: types.FunctionType) -> list[str]:
        """Describe the globals that a function reads, also as `module.name`."""
        found = {}
        for path in sorted(set(_global_names(thing.__code__))):
            first, *attributes = path
            if first not in thing.__globals__:
                builtin = hasattr(builtins, first)
                found[first] = "built in" if builtin else "missing"
                continue
            value, name = thing.__globals__[first], first
            while isinstance(value, types.ModuleType) and attributes:
                if _is_installed(value.__name__):
                    break
                name = f"{name}.{attributes[0]}"
                value = getattr(value, attributes.pop(0), None)
            found[name] = self(value)
            if isinstance(value, types.ModuleType):
                found[name] += f".{'.'.join(attributes)}"
        return [f"{name}: {value}" for name, value in sorted(found.items())]

    def _wrapped(self, thing: Any) -> str:
        """Describe a function wrapped by `jax.jit`, `jax.custom_jvp` and the like."""
        text = self(thing.__wrapped__)
        rules = [getattr(thing, name, None) for name in ("jvp", "fwd", "bwd")]
        if "<" not in text or not any(rules):
            return text
        return f"{text} with {self(rules)}"

    def _object(self, thing: Any, kind: str) -> str:
        """Describe an object by what would be pickled, or else by its class."""
        owner = getattr(thing, "__self__", None)
        if isinstance(thing, types.BuiltinFunctionType | types.MethodWrapperType):
            module = owner is None or isinstance(owner, types.ModuleType)
            return _name(thing) if module else f"{thing.__name__} of {self(owner)}"
        reduce = copyreg.dispatch_table.get(type(thing))
        try:
            parts = reduce(thing) if reduce else thing.__reduce_ex__(2)
            if isinstance(parts, str):
                return f"{kind} {parts}"
            constructor, arguments, *rest = parts
            rest = [list(x) if isinstance(x, Iterator) else x for x in rest]
            inner = self([constructor, arguments, *rest])
        except Exception:  # the object's own methods may raise anything
            return kind
        return f"{kind}<{_digest(inner)}>"


def _computes(owner: type, name: str, value: Any) -> bool:
    """Whether a member of a class may change what its objects compute. Python's own
    members do not, nor does an `__init__` that a dataclass generates."""
    if name == "__init__":
        return not getattr(vars(owner).get("__dataclass_params__"), "init", False)
    if name.startswith("__") and name.endswith("__"):
        return isinstance(value, types.FunctionType) and name not in _INCIDENTAL
    return name != "_abc_impl"


def _global_names(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the global names that a code object reads, each with the attributes that are
    read from it."""
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("EXTENDED_ARG", "CACHE"):
            continue
        if path and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*path, instruction.argval)
            continue
        if path:
            yield path
        is_global = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        path = (instruction.argval,) if is_global else ()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Whether a module belongs to Python, this library or an installed package."""
    if not module or module == "__main__":
        return False
    root = module.partition(".")[0]
    if root in (*sys.stdlib_module_names, __name__.partition(".")[0]):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    file = file or getattr(sys.modules.get(root), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _name(thing: Any) -> str:
    """Return a qualified name, with the module unless `builtins` or this library."""
    module = getattr(thing, "__module__", None) or ""
    name = getattr(thing, "__qualname__", None) or thing.__name__
    own = __name__.partition(".")[0], "builtins", ""
    return name if module.partition(".")[0] in own else f"{module}.{name}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _short(text: str, kind: str) -> str:
    return text if len(text) <= _LONGEST else f"{kind}<{_digest(text)}>"
