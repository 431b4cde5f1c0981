"""The parts of a tangent kernel: rows of the Jacobian, and their products."""

from collections.abc import Callable
from typing import Any, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._common import _tree
from .._jacobian import AbstractBlock, PerExample
from .._linearisation._linearisation import Linearisation, linearise
from ._file import Place


if TYPE_CHECKING:
    from ._tangent_kernel import TangentKernel


class Blocks(eqx.Module):
    """The Jacobian's rows for n examples of c outputs, by array of parameters."""

    blocks: tuple[AbstractBlock, ...]
    n: int = eqx.field(static=True)
    c: int = eqx.field(static=True)


def shape_of(kernel: "TangentKernel", n1: int, n2: int, c: int) -> tuple[int, ...]:
    shapes: dict[Any, tuple[int, ...]] = {"all": (n1, c, n2, c), "diagonal": (n1, n2, c)}
    return shapes.get(kernel.outputs, (n1, n2))


def place_of(kernel: "TangentKernel", rows: slice, columns: slice) -> Place:
    every = slice(None)
    return (rows, every, columns, every) if kernel.outputs == "all" else (rows, columns)


def mirrored(kernel: "TangentKernel") -> tuple[int, ...]:
    axes: dict[Any, tuple[int, ...]] = {"all": (2, 3, 0, 1), "diagonal": (1, 0, 2)}
    return axes.get(kernel.outputs, (1, 0))


def _linearise(kernel: "TangentKernel", x: PyTree) -> Linearisation:
    args = (x, None) if kernel._has_keys else x
    fn = kernel._fn
    if not isinstance(kernel.outputs, str):
        fn = PerExample(eqx.Partial(_one_output, fn.fn, kernel.outputs), fn.part_size)
    return linearise(fn, kernel._point, args, memory_budget=kernel.memory_budget)


def _rows(kernel: "TangentKernel", x: PyTree) -> Blocks:
    lin = _linearise(kernel, x)
    n = number_of(lin.outputs)
    return Blocks(tuple(lin.jacobian.blocks()), n, lin.shape[0] // n)


blocks_of = eqx.filter_jit(_rows)


def _parts(kernel: "TangentKernel", these: Blocks, those: Blocks | None) -> list[Array]:
    """Return the part of the kernel for each array of parameters."""
    others = these if those is None else those
    shape = shape_of(kernel, these.n, others.n, these.c)
    pairs = zip(these.blocks, others.blocks, strict=True)
    return [_gram(kernel, a, b, these.c).reshape(shape) for a, b in pairs]


def _gram(
    kernel: "TangentKernel", a: AbstractBlock, b: AbstractBlock, c: int
) -> Float[Array, "..."]:
    def of(view: Callable[[AbstractBlock], AbstractBlock]) -> Array:
        viewed = view(a)
        return viewed.gram_with(viewed if a is b else view(b))

    match kernel.outputs:
        case "trace":
            return of(lambda block: block.merged(c))
        case "diagonal":
            each = jax.lax.map(
                lambda k: of(lambda block: block.of_output(k, c)), jnp.arange(c)
            )
            return jnp.moveaxis(each, 0, -1)
    return of(lambda block: block)


@eqx.filter_jit
def look(
    kernel: "TangentKernel", one: PyTree, other: PyTree | None
) -> tuple[list[tuple[int, ...]], np.dtype, int]:
    """Return, from the first example of each set, the shapes of its outputs, the kernel's
    dtype, and the bytes of its blocks. This is compiled only to cache the result."""
    shapes = []
    for x in (one, other):
        if x is None:
            continue
        args = (x, None) if kernel._has_keys else x
        leaves = jax.tree.leaves(eqx.filter_eval_shape(kernel._fn, kernel._point, args))
        if len(leaves) != 1:
            raise ValueError(
                f"A tangent kernel needs a model of one array of outputs, but this model "
                f"has {len(leaves)}: pass a function that returns one of them, such as "
                "`(lambda model, x: model(x)[0], model)`."
            )
        shapes.append(leaves[0].shape[1:])
    if shapes[0] != shapes[-1]:  # The caller raises an error.
        other = None
    dtype = eqx.filter_eval_shape(tile_of, kernel, one, other).dtype
    num_bytes = sum(_linearise(kernel, one).jacobian.block_bytes())
    return shapes, np.dtype(dtype), num_bytes


@eqx.filter_jit
def product(
    kernel: "TangentKernel", these: Blocks, those: Blocks | None
) -> Float[Array, "..."]:
    return _tree.summed(_parts(kernel, these, those))


@eqx.filter_jit
def tile_of(
    kernel: "TangentKernel", x1: PyTree, x2: PyTree | None
) -> Float[Array, "..."]:
    these, those = _rows(kernel, x1), None if x2 is None else _rows(kernel, x2)
    return product(kernel, these, those)


@eqx.filter_jit
def by_parameter(kernel: "TangentKernel", x1: PyTree, x2: PyTree | None) -> PyTree[Array]:
    structure = jax.tree.structure(kernel._point)
    these, those = _rows(kernel, x1), None if x2 is None else _rows(kernel, x2)
    return structure.unflatten(_parts(kernel, these, those))


@eqx.filter_jit
def diagonal_of(kernel: "TangentKernel", x: PyTree) -> Float[Array, "n c"]:
    squares = _linearise(kernel, x).jacobian.squared_rows()
    return squares.reshape(number_of(x), -1)


def _one_output(
    fn: Callable[[Any, Any], PyTree[Array]], k: int, y: PyTree[Array], example: Any
) -> Float[Array, ""]:
    (outputs,) = jax.tree.leaves(fn(y, example))
    return outputs.reshape(-1)[k]


def number_of(x: PyTree) -> int:
    return jax.tree.leaves(x)[0].shape[0]
