"""A reader of CIFAR-10's pickles that executes nothing.

A pickle is a program for a stack machine, and some of its instructions call functions
that the pickle names. This reader implements only the instructions that dictionaries,
lists, numbers, text and arrays of bytes need, in Python 2's format (protocol 2). It calls
only its own functions, and does not trust the lengths that a file claims. The worst that
a damaged or hostile file can cause is an error.
"""

import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import UInt8
from numpy import ndarray

from .files import Damage


class PickledArray:
    """Stands for NumPy's array. The pickle sets its values after making it."""

    values: UInt8[ndarray, "..."] | None = None

    def set(self, state: tuple) -> None:
        _, shape, _, is_fortran, text = state
        values = np.frombuffer(text.encode("latin1"), np.uint8)
        self.values = values.reshape(shape, order="F" if is_fortran else "C")


class _Bytes:
    """Stands for NumPy's data type of bytes."""

    def set(self, state: tuple) -> None:
        pass


class _Mark:
    """Marks on the stack where a run of items begins."""


def load(contents: bytes) -> Any:
    """Return the pickled object, with bytes as text in Latin 1. Raise `Damage` if the
    pickle is of another kind."""
    try:
        return _Machine().run(contents)
    except Damage:
        raise
    except Exception:  # an incomplete or invalid pickle may raise almost anything
        raise Damage("is not a whole pickle") from None


def _array(*arguments: object) -> PickledArray:
    return PickledArray()  # its state sets the shape


def _bytes(code: object, *arguments: object) -> _Bytes:
    if code != "u1":
        raise Damage("holds an array of other numbers than bytes")
    return _Bytes()


def _text(text: str, encoding: object) -> str:
    return text


_CALLABLES: dict[str, Callable] = {
    "numpy.core.multiarray _reconstruct": _array,
    "numpy._core.multiarray _reconstruct": _array,  # since NumPy 2.0
    "numpy dtype": _bytes,
    "_codecs encode": _text,  # Python 3 writes bytes like this in protocol 2
}
_NAMES = {*_CALLABLES, "numpy ndarray"}

_VALUES = ("BININT", "BININT1", "BININT2", "LONG1")
_VALUES += ("BINSTRING", "SHORT_BINSTRING", "BINUNICODE")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    def __init__(self):
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, contents: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(contents):
            if opcode.name == "STOP":
                return self.stack.pop()
            self._step(opcode.name, argument)

    def _step(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        match opcode:
            case "PROTO":
                pass
            case _ if opcode in _VALUES:
                stack.append(argument)
            case _ if opcode in _CONSTANTS:
                stack.append(_CONSTANTS[opcode])
            case "MARK":
                stack.append(_Mark)
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case _ if opcode in _TUPLES:
                stack.append(tuple(self._pop(_TUPLES[opcode])))
            case "TUPLE":
                stack.append(tuple(self._pop_to_mark()))
            case "APPEND":
                self._append(self._pop(1))
            case "APPENDS":
                self._append(self._pop_to_mark())
            case "SETITEM":
                self._set_items(self._pop(2))
            case "SETITEMS":
                self._set_items(self._pop_to_mark())
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "GLOBAL":
                stack.append(_admitted(argument))
            case "REDUCE":
                function, arguments = self._pop(2)
                stack.append(_CALLABLES[function](*arguments))
            case "BUILD":
                (state,) = self._pop(1)
                stack[-1].set(state)
            case _:
                raise Damage(f"has a {opcode}, which pixels and labels do not need")

    def _pop(self, number: int) -> list[Any]:
        if len(self.stack) < number:
            raise IndexError
        items = self.stack[-number:]
        del self.stack[-number:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        items = []
        while (item := self.stack.pop()) is not _Mark:
            items.append(item)
        return items[::-1]

    def _append(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise TypeError
        self.stack[-1].extend(items)

    def _set_items(self, items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise TypeError
            self.stack[-1][key] = value


def _admitted(name: str) -> str:
    if name not in _NAMES:
        raise Damage(
            f"asks to run '{name.replace(' ', '.')}', which pixels and labels do not "
            "need and which was not run"
        )
    return name
