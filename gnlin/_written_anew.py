"""Functions are known by what they compute, so that one that is written anew, such as a
lambda in a loop, is not compiled again."""

import functools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun, JaxprEqn, Literal
from jaxtyping import Array, PyTree


# Constants within a program, of up to so many bytes, are compared by their values.
_FEW_BYTES = 2**16
_MOST_PROGRAMS = 1024
# Rules of `jax.custom_jvp` that use others again are looked into so many times.
_MOST_RULES = 2


class Program(eqx.Module):
    """A function of arrays of given shapes. The arrays that it closes over are its leaves;
    two programs of equal structure compute the same."""

    consts: list[Array]
    traced: "_Traced" = eqx.field(static=True)

    def __call__(self, *args: PyTree[Array]) -> PyTree[Array]:
        closed = ClosedJaxpr(self.traced.jaxpr, self.consts)
        out = jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(self.traced.out_structure, out)

    @property
    def outputs(self) -> PyTree[jax.ShapeDtypeStruct]:
        shapes = [_struct(v.aval) for v in self.traced.jaxpr.outvars]
        return jax.tree.unflatten(self.traced.out_structure, shapes)


class _Traced:
    """A program without the arrays that it closes over."""

    def __init__(self, jaxpr: Jaxpr, out_structure: Any, key: Hashable):
        self.jaxpr, self.out_structure = jaxpr, out_structure
        self._key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _Traced) and self._key == other._key


_of_functions: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def program_of(fn: Callable[..., Any], *args: PyTree[Any]) -> Program:
    """What a function computes of arrays of these shapes. A function object is traced only
    once, and keeps the values that it closed over then, as under `jax.jit`."""
    is_kept = isinstance(fn, types.FunctionType)
    programs = _of_functions.setdefault(fn, {}) if is_kept else {}
    leaves, structure = jax.tree.flatten(args)
    kinds = [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves]
    asked = structure, tuple(kinds), jax.config.jax_enable_x64  # type: ignore[attr-defined]
    if asked in programs:
        return programs[asked]
    closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    out_structure = jax.tree.structure(out)
    key = _key_of_all(closed), structure, out_structure
    consts = [
        c if isinstance(c, Tracer | Array) else jnp.asarray(c) for c in closed.consts
    ]
    program = Program(consts, _same(_Traced(closed.jaxpr, out_structure, key)))
    if not any(isinstance(c, Tracer) for c in consts):
        programs[asked] = program
    return program


@functools.lru_cache(maxsize=_MOST_PROGRAMS)
def _same(traced: _Traced) -> _Traced:
    """One object for all equal ones, so that comparing them takes no time."""
    return traced


def _key_of_all(closed: ClosedJaxpr) -> Hashable:
    """Equal for two programs only if they and their derivatives compute the same. The
    rule of a `jax.custom_jvp` is a new object in each trace, and is known by the program
    that it leads to."""
    rules: list[Any] = []
    keys = [_key(closed.jaxpr, rules)]
    fn = lambda *leaves: jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, leaves[:k]))(*leaves[k:])
    k = len(closed.consts)
    shapes = [_struct(v.aval) for v in (*closed.jaxpr.constvars, *closed.jaxpr.invars)]
    for _ in range(_MOST_RULES):
        if not rules:
            break
        rules, floats = [], [jnp.issubdtype(x.dtype, jnp.inexact) for x in shapes]
        fn = functools.partial(_derivative, fn, tuple(floats))
        shapes += [x for x, is_float in zip(shapes, floats, strict=True) if is_float]
        keys.append(_key(jax.make_jaxpr(fn)(*shapes).jaxpr, rules))
    return tuple(keys), tuple(map(_Itself, rules))


def _derivative(fn: Callable, floats: tuple[bool, ...], *leaves: Array) -> list[Array]:
    primals, moving = leaves[: len(floats)], iter(leaves[len(floats) :])

    def of_floats(*values):
        values = iter(values)
        pairs = zip(primals, floats, strict=True)
        return fn(*(next(values) if is_float else x for x, is_float in pairs))

    given = [x for x, is_float in zip(primals, floats, strict=True) if is_float]
    _, tangents = jax.jvp(of_floats, given, list(moving))
    return jax.tree.leaves(tangents)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _key(jaxpr: Jaxpr, rules: list[Any]) -> Hashable:
    """Equal for two programs only if they compute the same of equal arguments; without
    the rules of `jax.custom_jvp`, which are added to a list."""
    numbers: dict[Any, int] = {}
    of_value = functools.partial(_key_of_value, rules=rules)

    def atom(x):
        if isinstance(x, Literal):
            return of_value(x.val), x.aval
        return numbers[x]

    def named(variables):
        for v in variables:
            numbers[v] = len(numbers)
        return tuple(v.aval for v in variables)

    def params(e):
        if e.primitive.name != "custom_jvp_call" or e.params.get("symbolic_zeros", True):
            return of_value(e.params)
        rules.append(e.params["jvp_jaxpr_fun"])
        return of_value({n: v for n, v in e.params.items() if n != "jvp_jaxpr_fun"})

    inputs = named(jaxpr.constvars), named(jaxpr.invars)
    equations = tuple(
        (
            e.primitive,
            tuple(map(atom, e.invars)),
            named(e.outvars),
            params(e),
            repr(e.ctx),
        )
        for e in _needed(jaxpr)
    )
    return inputs, equations, tuple(map(atom, jaxpr.outvars))


def _needed(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations that outputs or effects depend on."""
    needed, found = set(filter(_is_variable, jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            needed.update(filter(_is_variable, equation.invars))
            found.append(equation)
    return found[::-1]


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, Literal)


def _key_of_value(value: Any, rules: list[Any]) -> Hashable:
    again = functools.partial(_key_of_value, rules=rules)
    if isinstance(value, ClosedJaxpr):
        return _key(value.jaxpr, rules), tuple(map(again, value.consts))
    if isinstance(value, Jaxpr):
        return _key(value, rules)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(again, value))
    if isinstance(value, dict):
        return tuple((name, again(value[name])) for name in sorted(value))
    if hasattr(value, "dtype") and hasattr(value, "nbytes"):
        is_small = not isinstance(value, Tracer) and value.nbytes <= _FEW_BYTES
        if is_small and value.dtype.kind in "biufc":
            array = np.asarray(value)
            return type(value), array.shape, str(array.dtype), array.tobytes()
        return _Itself(value)
    try:
        hash(value)
    except TypeError:
        return _Itself(value)
    # 3 and 3.0 are equal, and not the same; 0.0 and -0.0 likewise.
    return type(value), repr(value) if isinstance(value, float) else value


class _Itself:
    """Equal to no other object."""

    def __init__(self, value: Any):
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value
