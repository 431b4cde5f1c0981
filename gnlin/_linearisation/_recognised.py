"""Functions that gnlin's solvers recognise after optimistix has traced them.

Optimistix traces its function, so that a solver sees only a jaxpr. A call of an
`AbstractRecognised` is one equation of that jaxpr. gnlin's solvers read the function, its
groups and its losses from the equation; other solvers evaluate it as plain residuals.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, PyTree

from .._common import _tree
from .._common._canonical import are_read
from .._common._warn import warn
from ._admitted import check_outputs
from ._objective import AbstractObjective


Posed = tuple[Callable[[PyTree, Any], PyTree[Array]], Any, AbstractObjective]


class AbstractRecognised(eqx.Module):
    """A function of parameters and `args` for `optimistix.least_squares`."""

    @abc.abstractmethod
    def posed(self, y: PyTree[Array], args: Any) -> Posed:
        """Return `fn`, its `args`, and the objective of the outputs of `fn(y, args)`."""

    @abc.abstractmethod
    def hoisted(self, y: PyTree[Array], args: Any) -> "AbstractRecognised":
        """Return an equal function whose arrays are all leaves, including those that it
        closes over. An enclosing transformation, such as `jax.grad`, sees leaves only."""

    def __call__(self, y: PyTree[Array], args: Any = None) -> PyTree[Array]:
        """Return residuals such that half their sum of squares is the objective."""
        leaves, structure = jax.tree.flatten(y)
        rest, static = eqx.partition((self.hoisted(y, args), args), eqx.is_array)
        others, structure_of_rest = jax.tree.flatten(rest)
        call = _Call(structure, structure_of_rest, static)
        out = _residuals.bind(*leaves, *others, call=call)
        return jax.tree.unflatten(jax.tree.structure(call.shapes(*leaves, *others)), out)


class _Call:
    """The parts of a call that are not arrays."""

    def __init__(self, structure: Any, structure_of_rest: Any, static: Any):
        self._structure = structure
        self._structure_of_rest = structure_of_rest
        self._static = static

    @property
    def num_parameters(self) -> int:
        return self._structure.num_leaves

    def posed(self, leaves: Sequence[Any]) -> tuple[PyTree, Posed]:
        """Return the parameters, and the result of `AbstractRecognised.posed`."""
        k = self.num_parameters
        y = jax.tree.unflatten(self._structure, leaves[:k])
        rest = jax.tree.unflatten(self._structure_of_rest, leaves[k:])
        function, args = eqx.combine(rest, self._static)
        return y, function.posed(y, args)

    def shapes(self, *leaves: Any) -> PyTree:
        """Return the shapes of the residuals, which have the outputs' structure."""

        def outputs(*leaves):
            y, (fn, args, _) = self.posed(leaves)
            return fn(y, args)

        return jax.eval_shape(outputs, *leaves)

    def plain(self, *leaves: Any) -> list[Array]:
        y, (fn, args, objective) = self.posed(leaves)
        return jax.tree.leaves(objective.plain(fn(y, args)))


_residuals = Primitive("recognised_residuals")
_residuals.multiple_results = True


@_residuals.def_impl
def _impl(*leaves, call: _Call):
    return call.plain(*leaves)


@_residuals.def_abstract_eval
def _shapes(*leaves, call: _Call):
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    found = jax.tree.leaves(call.shapes(*structs))
    return [ShapedArray(x.shape, x.dtype) for x in found]


def _jvp(primals, tangents, *, call: _Call):
    moving = [k for k, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def of(*moved):
        leaves = list(primals)
        for k, x in zip(moving, moved, strict=True):
            leaves[k] = x
        return call.plain(*leaves)

    return jax.jvp(of, [primals[k] for k in moving], [tangents[k] for k in moving])


def _batched(leaves, axes, *, call: _Call):
    out = jax.vmap(call.plain, in_axes=tuple(axes))(*leaves)
    return out, [0] * len(out)


ad.primitive_jvps[_residuals] = _jvp
batching.primitive_batchers[_residuals] = _batched
mlir.register_lowering(_residuals, mlir.lower_fun(_impl, multiple_results=True))


def recognised(
    fn: Callable[[PyTree, Any], Any], y: PyTree[Array], args: Any
) -> Posed | None:
    """Return the function, `args` and objective behind optimistix's traced `fn`, which
    returns residuals and auxiliary data; `None` if `fn` is not recognised."""
    closed, (outputs, _), _ = eqx.filter_make_jaxpr(fn)(y, args)
    program = closed.jaxpr
    leaves = jax.tree.leaves(y)
    parameters, others = program.invars[: len(leaves)], program.invars[len(leaves) :]
    given = jax.tree.leaves(eqx.filter(args, eqx.is_array))
    values = dict(zip(others, given, strict=True))
    values |= dict(zip(program.constvars, closed.consts, strict=True))
    made = program.outvars[: len(jax.tree.leaves(outputs))]
    _check_derivatives(made, program, parameters)
    made = _copied(made, program)
    for equation in program.eqns:
        if equation.primitive is not _residuals or equation.outvars != made:
            continue
        call = equation.params["call"]
        k = call.num_parameters
        taken, rest = equation.invars[:k], equation.invars[k:]
        # An input that depends on the parameters is not one of the function's `args`.
        if taken == parameters and all(_is_known(x, values) for x in rest):
            known = [x.val if isinstance(x, Literal) else values[x] for x in rest]
            return call.posed([*leaves, *known])[1]
    return None


def _is_known(x: Any, values: dict[Any, Any]) -> bool:
    return isinstance(x, Literal) or x in values


def _copied(
    variables: Sequence[Any], program: Jaxpr, *, of_whole: bool = False
) -> list[Any]:
    """Return the variables that each variable is a copy of, also in nested programs.

    - `of_whole`: whether conversions of whole numbers and booleans count as copies.
    """
    names: dict[Any, Any] = {}
    for equation in program.eqns:
        inner = equation.params.get("call_jaxpr")
        if of_whole and _converts_whole(equation):
            names[equation.outvars[0]] = equation.invars[0]
        elif inner is not None:
            given = dict(zip(inner.jaxpr.invars, equation.invars, strict=True))
            copied = _copied(inner.jaxpr.outvars, inner.jaxpr, of_whole=of_whole)
            pairs = zip(equation.outvars, copied, strict=True)
            names |= {
                out: given[x]
                for out, x in pairs
                if not isinstance(x, Literal) and x in given
            }
    found = []
    for x in variables:
        while not isinstance(x, Literal) and x in names:
            x = names[x]
        found.append(x)
    return found


def _check_derivatives(
    made: Sequence[Any], program: Jaxpr, parameters: Sequence[Any]
) -> None:
    """Raise `ValueError` if an output is made of whole numbers that depend on the
    parameters. Optimistix converts them to floats, whose derivative is zero."""
    outputs = []
    for out, source in zip(made, _copied(made, program, of_whole=True), strict=True):
        is_constant = isinstance(source, Literal) or (
            _is_whole(source) and not _depends(source, program, len(parameters))
        )
        outputs.append((out if is_constant else source).aval)
    check_outputs(outputs)


def _depends(x: Any, program: Jaxpr, num_inputs: int) -> bool:
    """Whether a variable depends on the first inputs, also within nested programs. What
    a program prints does not count."""
    kept, read = [], {x}
    for equation in reversed(program.eqns):
        if not read.isdisjoint(equation.outvars):
            kept.append(equation)
            read.update(y for y in equation.invars if not isinstance(y, Literal))
    of_one = program.replace(eqns=kept[::-1], outvars=[x])
    return any(are_read(of_one)[:num_inputs])


def _converts_whole(equation: JaxprEqn) -> bool:
    """Whether an equation converts whole numbers or booleans to another type."""
    is_conversion = equation.primitive.name == "convert_element_type"
    return is_conversion and _is_whole(equation.invars[0])


def _is_whole(x: Any) -> bool:
    return not jnp.issubdtype(x.aval.dtype, jnp.inexact)


def aux_of(fn: Callable[[PyTree, Any], Any], y: PyTree[Array], args: Any) -> Any:
    """Return the auxiliary data of `fn`, which is called only if there are any."""
    _, aux = eqx.filter_eval_shape(fn, y, args)
    return fn(y, args)[1] if jax.tree.leaves(aux) else aux


def _is_equation(fn: Callable, y: PyTree[Array], args: Any) -> bool:
    """Whether the auxiliary data of a function that returns one number are a pair of this
    same number and others, as `optimistix.root_find` makes them."""
    closed, (_, aux), _ = eqx.filter_make_jaxpr(fn)(y, args)
    if not (isinstance(aux, tuple) and len(aux) == 2 and jax.tree.leaves(aux[0])):
        return False
    number, again, *_ = _copied(closed.jaxpr.outvars, closed.jaxpr)
    return number is again


def check_number(fn: Callable, y: PyTree[Array], args: Any, outputs: PyTree) -> None:
    """Warn if a function of several parameters returns one number, which is rarely a
    residual, and mostly a loss. `optimistix.root_find` says that it is a residual."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(outputs)]
    if shapes not in ([()], [(1,)]) or _is_equation(fn, y, args):
        return
    posed = recognised(fn, y, args)
    if shapes == [()] if posed is None else posed[2].is_quadratic:
        check_not_one(outputs, y)


def check_not_one(outputs: PyTree, y: PyTree[Array]) -> None:
    """Warn if the outputs are one number, or one example with one, and the parameters are
    several."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(outputs)]
    if shapes in ([()], [(1,)]) and _tree.size(y) > 1:
        warn(
            "The function returns one number, and the solver minimises its square, so "
            "the run looks for a zero. If it is a loss to be minimised, return the "
            "residuals, or use an optimiser such as `optimistix.BFGS`. If it is one "
            "equation in several unknowns, return an array of one number, which is "
            "solved without this warning."
        )
