"""Functions that are compared by their programs, so that a new function object with the
same program, such as a lambda in a loop, is not compiled again."""

import contextlib
import functools
import math
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    jaxpr_as_fun,
    JaxprEqn,
    Literal,
    primitives,
)
from jax.interpreters import partial_eval
from jaxtyping import Array, PyTree

from ._cost import bytes_made, primitives_of
from ._precision import matmul_precision


_LOOPS = primitives.while_p, primitives.scan_p
# Constants of a program up to this many bytes are compared by their values.
_FEW_BYTES = 2**16
_MOST_PROGRAMS = 1024
# Most traced functions that are kept. They hold the arrays that they close over.
_MOST_KNOWN = 128
# Depth to which `jax.custom_jvp` rules that use other such rules are compared. A rule may
# use its own function, and then has no end.
_MOST_RULES = 2


class Program(eqx.Module):
    """A function of arrays of given shapes. Its leaves are the arrays that it closes
    over; two programs of equal pytree structure compute the same function of them."""

    consts: list[Array]
    traced: "_Traced" = eqx.field(static=True)

    def __call__(self, *args: PyTree[Array]) -> PyTree[Array]:
        closed = ClosedJaxpr(self.traced.jaxpr, self.consts)
        out = jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(self.traced.out_structure, out)

    @property
    def outputs(self) -> PyTree[jax.ShapeDtypeStruct]:
        shapes = [struct(v.aval) for v in self.traced.jaxpr.outvars]
        return jax.tree.unflatten(self.traced.out_structure, shapes)


class _Traced:
    """A program without the arrays that it closes over, compared by its key."""

    def __init__(self, jaxpr: Jaxpr, out_structure: Any, key: Hashable):
        self.jaxpr, self.out_structure = jaxpr, out_structure
        self._key, self._hash = key, hash(key)

    @functools.cached_property
    def has_loops(self) -> bool:
        return not primitives_of(self.jaxpr).isdisjoint(_LOOPS)

    @functools.cached_property
    def num_values(self) -> float:
        """The number of values that the program computes; infinite if it has loops."""
        return math.inf if self.has_loops else bytes_made(self.jaxpr)[0] / 8

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _Traced) and self._key == other._key


# What each function read when it was traced, and what is remembered of it.
_of_functions: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def memory_of(fn: Callable[..., Any]) -> dict[Hashable, Any]:
    """Return what is remembered of a plain function, by the kinds of its arguments. It is
    forgotten if the function reads other values than before."""
    if not isinstance(fn, types.FunctionType):
        return {}
    now = _read(fn)
    read, memory = _of_functions.get(fn, (now, {}))
    if read != now:
        memory = {}
    _of_functions[fn] = now, memory
    return memory


def read_by(leaves: Iterable[Any]) -> tuple[Hashable, ...]:
    """Return what the functions among some leaves read from outside."""
    functions = (x for x in leaves if isinstance(x, types.FunctionType))
    return tuple(map(_read, functions))


def _read(fn: types.FunctionType) -> tuple[Hashable, ...]:
    """Return the numbers and arrays that a plain function reads from its closure and its
    module, directly or through the module's functions that it calls, and the code of
    these. What it reads from other modules, or as attributes of objects, is left out."""
    found: dict[Any, Hashable] = {}
    waiting = [fn]
    while waiting:
        fn = waiting.pop()
        if fn in found:
            continue
        values, here = _variables(fn).values(), fn.__globals__
        found[fn] = fn.__code__, *map(_key_of_data, values)
        functions = (x for x in values if isinstance(x, types.FunctionType))
        waiting += [x for x in functions if x.__globals__ is here]
    return tuple(found.values())


def _key_of_data(value: Any) -> Hashable:
    """Return a key of a number, a string, an array or a tuple of them, else `None`."""
    if isinstance(value, tuple):
        return tuple(map(_key_of_data, value))
    if isinstance(value, Array):  # It never changes, and may be on another device.
        return None if isinstance(value, Tracer) else _Itself(value)
    is_data = isinstance(value, int | float | complex | str | np.ndarray | np.generic)
    return _key_of_value(value, 0) if is_data else None


def _variables(fn: types.FunctionType) -> dict[str, Any]:
    """Return the variables outside of a function that its code names."""
    names, codes = set(), [fn.__code__]
    for code in codes:
        names.update(code.co_names)
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    known = sorted(names & fn.__globals__.keys())
    values = {name: fn.__globals__[name] for name in known}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            values[name] = cell.cell_contents
    return values


def kind_of(args: PyTree[Any]) -> tuple[Any, Hashable, Hashable]:
    """Return the structure, the shapes and dtypes of arguments, and JAX's settings."""
    leaves, structure = jax.tree.flatten(args)
    kinds = [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves]
    return structure, tuple(kinds), _settings()


def program_of(fn: Callable[..., Any], *args: PyTree[Any]) -> Program:
    """Trace a function for arguments of these shapes. A function object is traced only
    once, unless the values that it reads have changed."""
    programs, kind = memory_of(fn), kind_of(args)
    if kind in programs:
        return programs[kind]
    # JAX, too, traces a function object only once.
    closed, out = jax.make_jaxpr(lambda *args: fn(*args), return_shape=True)(*args)
    out_structure = jax.tree.structure(out)
    key = _key(closed.jaxpr), kind[0], out_structure
    with jax.ensure_compile_time_eval():  # The program outlives an enclosing trace.
        consts = [
            c if isinstance(c, Tracer | Array) else jnp.asarray(c) for c in closed.consts
        ]
    program = Program(consts, _same(_Traced(closed.jaxpr, out_structure, key)))
    if not any(isinstance(c, Tracer) for c in consts):
        programs[kind] = program
    return program


AnyArray = jax.Array | np.ndarray | np.generic


class Static(NamedTuple):
    """A tree without its arrays, which is hashable if its leaves are."""

    structure: Any
    leaves: tuple
    types: tuple[type, ...]  # of the leaves, to distinguish 3 from 3.0
    read: tuple[Hashable, ...]  # values that the leaves read, if they are functions


_AN_ARRAY = object()


def split(tree: PyTree, kinds: Any = AnyArray) -> tuple[list[Any], Static]:
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if isinstance(leaf, kinds)]
    rest = tuple(_AN_ARRAY if isinstance(leaf, kinds) else leaf for leaf in leaves)
    return arrays, Static(structure, rest, tuple(map(type, rest)), read_by(rest))


def join(arrays: Iterable[Any], static: Static) -> PyTree:
    remaining = iter(arrays)
    leaves = [next(remaining) if x is _AN_ARRAY else x for x in static.leaves]
    return jax.tree.unflatten(static.structure, leaves)


def canonical(fn: Callable[..., Any], *args: PyTree[Any]) -> Callable[..., Any]:
    """Return a callable pytree, such as a model, in a form that is compared by its
    program for arguments of these shapes: a program of its arrays and of the arguments.
    It is traced only if its leaves other than arrays have changed, and is returned
    unchanged if one of these is unhashable."""
    arrays, static = split(fn, Array)
    given, of_args = jax.tree.flatten((arrays, *args))
    try:
        program = _traced(static, of_args, tuple(map(struct, given)), _settings())
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return fn
    return eqx.Partial(program, arrays)


@functools.lru_cache(maxsize=_MOST_KNOWN)
def _traced(static: Static, of_args: Any, shapes: tuple, settings: Hashable) -> Program:
    del settings  # part of the cache's key

    def called(arrays, *args):
        return join(arrays, static)(*args)

    return program_of(functools.partial(called), *of_args.unflatten(shapes))


def _settings() -> Hashable:
    """Return the settings of JAX that a traced program depends on."""
    return jax.config.jax_enable_x64, matmul_precision()  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=_MOST_PROGRAMS)
def _same(traced: _Traced) -> _Traced:
    """Return one object for all equal ones, so that they are compared by identity."""
    return traced


def _key(jaxpr: Jaxpr, depth: int = 0) -> Hashable:
    """Return a key that is equal for two programs only if they, and their derivatives,
    compute the same. `depth` is the number of enclosing `jax.custom_jvp` rules."""
    numbers: dict[Any, int] = {}
    of_value = functools.partial(_key_of_value, depth=depth)

    def atom(x):
        if isinstance(x, Literal):
            return of_value(x.val), x.aval
        return numbers[x]

    def named(variables):
        for v in variables:
            numbers[v] = len(numbers)
        return tuple(v.aval for v in variables)

    def params(equation):
        params = dict(equation.params)
        if equation.primitive.name == "custom_jvp_call" and depth < _MOST_RULES:
            try:
                rule = _derivative(jaxpr, equation)
            except Exception:  # raised by a rule that forbids derivatives, for example
                return of_value(params)
            del params["jvp_jaxpr_fun"]  # which differs in each trace
            return of_value(params), _key(rule, depth + 1)
        return of_value(params)

    used = _needed(jaxpr)
    inputs = named(jaxpr.constvars), named(jaxpr.invars)
    equations = tuple(
        (
            e.primitive,
            tuple(map(atom, e.invars)),
            named(e.outvars),
            params(e),
            repr(e.ctx),
        )
        for e in jaxpr.eqns
        if e.effects or not used.isdisjoint(e.outvars)
    )
    return inputs, equations, tuple(map(atom, jaxpr.outvars))


def _derivative(jaxpr: Jaxpr, equation: JaxprEqn) -> Jaxpr:
    """Return the program that computes the tangents of one equation."""
    fn, given = alone(jaxpr, equation)
    shapes = [struct(x.aval) for x in given]
    which = [k for k, x in enumerate(shapes) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def tangents(primals, moving):
        def of_floats(floats):
            all_of_them = list(primals)
            for k, x in zip(which, floats, strict=True):
                all_of_them[k] = x
            return fn(*all_of_them)

        return jax.jvp(of_floats, ([primals[k] for k in which],), (moving,))[1]

    return jax.make_jaxpr(tangents)(shapes, [shapes[k] for k in which]).jaxpr


def alone(jaxpr: Jaxpr, equation: JaxprEqn) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function that evaluates one equation, and the variables that it takes."""
    given = list(dict.fromkeys(filter(_is_variable, equation.invars)))
    of_one = {"constvars": [], "invars": given, "eqns": [equation]}
    program = jaxpr.replace(**of_one, outvars=list(equation.outvars))
    return jaxpr_as_fun(ClosedJaxpr(program, [])), given


def struct(aval: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)


def of_one_example(batch: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
    """Return the shapes of one example, without the leading axis."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)


def are_read(program: Jaxpr) -> list[bool]:
    """Whether any result of a program depends on each of its arguments."""
    return partial_eval.dce_jaxpr(program, [True] * len(program.outvars))[1]


def _needed(jaxpr: Jaxpr) -> set:
    """Return the variables that outputs or effects depend on."""
    found = set(filter(_is_variable, jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not found.isdisjoint(equation.outvars):
            found.update(filter(_is_variable, equation.invars))
    return found


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, Literal)


def _key_of_value(value: Any, depth: int) -> Hashable:
    again = functools.partial(_key_of_value, depth=depth)
    if isinstance(value, ClosedJaxpr):
        return _key(value.jaxpr, depth), tuple(map(again, value.consts))
    if isinstance(value, Jaxpr):
        return _key(value, depth)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(again, value))
    if isinstance(value, dict):
        return tuple((name, again(value[name])) for name in sorted(value))
    if isinstance(value, Tracer):
        return _Itself(value)
    if isinstance(value, Array | np.ndarray | np.generic):
        is_small = value.nbytes <= _FEW_BYTES
        if is_small and value.dtype.kind in "biufc":
            array = np.asarray(value)
            return type(value), array.shape, str(array.dtype), array.tobytes()
        return _Itself(value)
    try:
        hash(value)
    except TypeError:
        return _Itself(value)
    # In Python 3 == 3.0, and 0.0 == -0.0, but programs with them differ.
    return type(value), repr(value) if isinstance(value, float) else value


class _Itself:
    """A key that is equal only to the key of the same object."""

    def __init__(self, value: Any):
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value
