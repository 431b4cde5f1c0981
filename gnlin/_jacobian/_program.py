"""Finds the dense and convolutional layers in a function's jaxpr, and makes their blocks.

Because layers are found in the jaxpr, it does not matter with which library they were
written.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun, JaxprEqn, Literal, Var
from jaxtyping import Array, Float, PyTree

from .._common import _tree
from .._common._canonical import alone
from .._common._convolutions import channels_last
from .._common._cost import bytes_made
from .._common._tree import ravel_pytree
from ._layer import gram_multiplications, Layer


class _Use(NamedTuple):
    """An equation that has an array of parameters as one of its operands."""

    equation: JaxprEqn
    operand: int

    @property
    def is_convolution(self) -> bool:
        return self.equation.primitive.name == "conv_general_dilated"

    @property
    def weights(self) -> jax.ShapeDtypeStruct:
        return _struct(self.equation.invars[self.operand])

    @property
    def output(self) -> jax.ShapeDtypeStruct:
        (out,) = self.equation.outvars
        return _struct(out)

    @property
    def out_axes(self) -> tuple[int, ...]:
        """The axes of the weights that are also axes of the output."""
        dimensions = self.equation.params["dimension_numbers"]
        if self.is_convolution:
            return (dimensions.rhs_spec[0],)
        contracted = dimensions[0][self.operand]
        axes = range(len(self.weights.shape))
        return tuple(axis for axis in axes if axis not in contracted)

    @property
    def axes(self) -> tuple[int, ...]:
        """All axes of the weights: first `out_axes`, then those of the input."""
        dimensions = self.equation.params["dimension_numbers"]
        if self.is_convolution:
            return tuple(dimensions.rhs_spec)
        return (*self.out_axes, *dimensions[0][self.operand])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(o, t, q): see [`Layer`][]."""
        o = math.prod(self.weights.shape[axis] for axis in self.out_axes)
        return o, self.output.size // o, self.weights.size // o


def _struct(atom: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


class Program(NamedTuple):
    """The jaxpr of a function of parameters and one example, and the layers in it."""

    jaxpr: ClosedJaxpr
    layers: dict[int, list[Any]]  # index of a leaf of parameters -> its uses

    def num_bytes_passed(self, num_outputs: int) -> int:
        """Return the bytes that one example takes in reverse mode: all values that the
        forward pass makes, and the largest one once more for each output."""
        made, largest = bytes_made(self.jaxpr.jaxpr)
        return made + num_outputs * max(largest, 1)


def find(
    fn: Callable, y: PyTree[Array], example: PyTree, *, layers: bool = True
) -> Program:
    """Return the program of `fn(y, example)`; `example` may hold shapes only. No layers
    are reported if there is more than one array of outputs, or if there are effects."""
    leaves, structure = jax.tree.flatten(y)
    parts, of_example = jax.tree.flatten(example)

    def flat(leaves, parts):
        out = fn(structure.unflatten(leaves), of_example.unflatten(parts))
        return jax.tree.leaves(out)

    closed = jax.make_jaxpr(flat)(leaves, parts)
    if not layers or closed.effects or len(closed.out_avals) > 1:
        return Program(closed, {})
    names = dict(zip(closed.jaxpr.invars, range(len(leaves)), strict=False))
    uses: dict[int, list[_Use | None]] = {leaf: [] for leaf in range(len(leaves))}
    _note_uses(closed.jaxpr, names, uses)
    found = {leaf: each for leaf, each in uses.items() if _is_one_layer(each)}
    return Program(closed, found)


def _is_one_layer(uses: Sequence[_Use | None]) -> bool:
    """Whether all uses multiply by the same matrix, as positions of one layer do."""
    axes = {None if use is None else use.axes for use in uses}
    return len(axes) == 1 and None not in axes


def _note_uses(jaxpr: Jaxpr, names: dict[Var, int], uses: dict[int, list]) -> None:
    """Append to `uses` the equations that take each leaf of parameters, or `None` for an
    equation that is not a layer."""
    for atom in jaxpr.outvars:
        if not isinstance(atom, Literal) and atom in names:
            uses[names[atom]].append(None)
    for equation in jaxpr.eqns:
        taken = _taken(equation, names)
        inner = _inlined(equation)
        if taken and inner is not None:
            inner_names = {inner.jaxpr.invars[k]: leaf for k, leaf in taken.items()}
            _note_uses(inner.jaxpr, inner_names, uses)
            continue
        for operand, leaf in taken.items():
            use = _Use(equation, operand)
            uses[leaf].append(use if len(taken) == 1 and _is_layer(use) else None)


def _taken(equation: JaxprEqn, names: dict[Var, int]) -> dict[int, int]:
    """Map positions of operands that are parameters to their leaves."""
    return {
        k: names[atom]
        for k, atom in enumerate(equation.invars)
        if not isinstance(atom, Literal) and atom in names
    }


def _inlined(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Return the program inside a nested `jax.jit`, else `None`."""
    is_jit = equation.primitive.name in ("jit", "pjit")
    return equation.params["jaxpr"] if is_jit else None


def _is_layer(use: _Use) -> bool:
    params = use.equation.params
    match use.equation.primitive.name:
        case "dot_general":
            _, (batch, _) = params["dimension_numbers"]
            return not batch and 0 not in (use.weights.size, use.output.size)
        case "conv_general_dilated":
            ungrouped = params["feature_group_count"] == params["batch_group_count"] == 1
            dilated = any(d != 1 for d in params["lhs_dilation"])
            cropped = any(low < 0 or high < 0 for low, high in params["padding"])
            axis = params["dimension_numbers"].lhs_spec[0]
            (image, _) = map(_struct, use.equation.invars)
            plain = ungrouped and not dilated and not cropped
            plain = plain and 0 not in (use.weights.size, use.output.size)
            return plain and use.operand == 1 and image.shape[axis] == 1
    return False


def evaluate(
    program: Program,
    leaves: Sequence[Array],
    example: Sequence[Array],
    added: dict[int, list[Array]],
) -> tuple[list[Array], dict[int, list[Array]]]:
    """Return the outputs, with `added` added to the output of each use of each layer, and
    the layers' inputs. Derivatives with respect to `added` are the backward signals."""
    activations = {leaf: [] for leaf in added}
    if not added:
        return jaxpr_as_fun(program.jaxpr)(*leaves, *example), activations

    def run(jaxpr: Jaxpr, consts, args, names):
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= dict(zip(jaxpr.invars, args, strict=True))
        for equation in jaxpr.eqns:
            taken = _taken(equation, names)
            inner = _inlined(equation)
            if taken and inner is not None:
                operands = [_read(values, atom) for atom in equation.invars]
                inner_names = {inner.jaxpr.invars[k]: leaf for k, leaf in taken.items()}
                outs = run(inner.jaxpr, inner.consts, operands, inner_names)
            else:
                fn, operands = alone(jaxpr, equation)
                outs = fn(*[values[v] for v in operands])
                for operand, leaf in taken.items():
                    x = _read(values, equation.invars[1 - operand])
                    dtype = _tree.dtype((x, _struct(equation.invars[operand])))
                    outs = [outs[0] + added[leaf][len(activations[leaf])]]
                    activations[leaf].append(x.astype(dtype))
            values.update(zip(equation.outvars, outs, strict=True))
        return [_read(values, atom) for atom in jaxpr.outvars]

    jaxpr = program.jaxpr.jaxpr
    names = {v: k for k, v in enumerate(jaxpr.invars[: len(leaves)]) if k in added}
    outputs = run(jaxpr, program.jaxpr.consts, [*leaves, *example], names)
    return outputs, activations


def _read(values: dict[Var, Array], atom) -> Array:
    return atom.val if isinstance(atom, Literal) else values[atom]


def _sizes(uses: Sequence[_Use]) -> tuple[int, int, int]:
    """Return (o, t, q) of a layer, where t counts the positions of all uses."""
    o, _, q = uses[0].sizes
    return o, sum(use.sizes[1] for use in uses), q


def num_numbers(program: Program, y: PyTree[Array], num_outputs: int) -> list[int]:
    """Return the numbers stored for one example's block, for each leaf of parameters."""
    sizes = []
    for k, leaf in enumerate(jax.tree.leaves(y)):
        sizes.append(num_outputs * leaf.size)
        if k in program.layers:
            o, t, q = _sizes(program.layers[k])
            sizes[k] = min(sizes[k], t * (num_outputs * o + q))
    return sizes


def num_gram_multiplications(
    program: Program, y: PyTree[Array], shape: tuple[int, int]
) -> float:
    """Return the multiplications that the kernel takes, for n examples of c outputs."""
    n, c = shape
    total = 0.0
    for k, leaf in enumerate(jax.tree.leaves(y)):
        of_leaf = float(n * c) ** 2 * leaf.size
        if k in program.layers:
            o, t, q = _sizes(program.layers[k])
            of_leaf = min(gram_multiplications((n, c, t), (n, c, t), o, q))
        total += of_leaf
    return total


def blocks(
    program: Program,
    y: PyTree[Array],
    args: PyTree[Array],
    wanted: Sequence[int],
    batch_size: int,
) -> list[Any]:
    """Return the blocks of n examples for the `wanted` leaves of the parameters, each a
    [`Layer`][] or rows of shape (n, c, ...), by passes for `batch_size` examples at once.
    """
    leaves = jax.tree.leaves(y)
    layers = {leaf: program.layers[leaf] for leaf in wanted if leaf in program.layers}
    empty = [leaf for leaf in wanted if leaves[leaf].size == 0]  # kept out of the loop
    plain = [leaf for leaf in wanted if leaf not in (*layers, *empty)]

    def of_example(example):
        def run(added, chosen):
            all_leaves = list(leaves)
            for leaf, value in zip(plain, chosen, strict=True):
                all_leaves[leaf] = value
            return evaluate(program, all_leaves, example, added)

        zeros = {
            leaf: [jnp.zeros(use.output.shape, use.output.dtype) for use in uses]
            for leaf, uses in layers.items()
        }
        chosen = [leaves[leaf] for leaf in plain]
        outputs, pull, activations = jax.vjp(run, zeros, chosen, has_aux=True)
        flat, unravel = ravel_pytree(outputs)
        basis = jnp.eye(flat.size, dtype=flat.dtype)
        return activations, *jax.vmap(lambda u: pull(unravel(u)))(basis)

    examples = jax.tree.leaves(args)
    if batch_size >= examples[0].shape[0]:
        of_each = jax.vmap(of_example)
    else:
        of_each = functools.partial(jax.lax.map, of_example, batch_size=batch_size)
    activations, signals, rows = channels_last(of_each)(examples)
    found: dict[int, Any] = dict(zip(plain, rows, strict=True))
    n, c = examples[0].shape[0], sum(out.size for out in program.jaxpr.out_avals)
    for leaf in empty:
        found[leaf] = jnp.zeros((n, c, *leaves[leaf].shape), leaves[leaf].dtype)
    for leaf, uses in layers.items():
        layer = _layer(uses, activations[leaf], signals[leaf])
        dense = not layer.is_smaller()
        found[leaf] = layer.rows().reshape(n, c, *layer.shape) if dense else layer
    return [found[leaf] for leaf in wanted]


def _layer(uses: Sequence[_Use], xs: Sequence[Array], backs: Sequence[Array]) -> Layer:
    """Return the block, given the input `xs` (n, ...) and the backward signals `backs`
    (n, c, ...) of each use."""
    parts = [_factors(*each) for each in zip(uses, xs, backs, strict=True)]
    signals, activations = zip(*parts, strict=True)
    return Layer(
        jnp.concatenate(_tree.promoted(signals), axis=3),
        jnp.concatenate(_tree.promoted(activations), axis=1),
        uses[0].weights.shape,
        uses[0].axes,
    )


def _factors(
    use: _Use, x: Array, signals: Array
) -> tuple[Float[Array, "n c o t"], Float[Array, "n t q"]]:
    o, t, _ = use.sizes
    params = use.equation.params
    n, c = signals.shape[:2]
    if not use.is_convolution:
        of_x = params["dimension_numbers"][0][1 - use.operand]
        free = [axis for axis in range(x.ndim - 1) if axis not in of_x]
        activations = x.transpose(0, *(axis + 1 for axis in (*free, *of_x)))
        if use.operand == 0:
            signals = signals.reshape(n, c, o, t)
        else:
            signals = signals.reshape(n, c, t, o).swapaxes(2, 3)
    else:
        dimensions = params["dimension_numbers"]
        x = x.transpose(0, *(axis + 1 for axis in dimensions.lhs_spec))[:, 0]
        signals = signals.transpose(0, 1, *(axis + 2 for axis in dimensions.out_spec))
        size = [use.weights.shape[axis] for axis in dimensions.rhs_spec[2:]]
        activations = _patches(x, size, signals.shape[4:], params)
    return signals.reshape(n, c, o, t), activations.reshape(n, t, -1)


def _patches(
    x: Float[Array, "n i ..."], size: Sequence[int], positions: Sequence[int], params
) -> Float[Array, "n t q"]:
    """Return the input patch of each position of a convolution's output."""
    padding = [(0, 0, 0), (0, 0, 0), *((a, b, 0) for a, b in params["padding"])]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), padding)
    strides, dilations = params["window_strides"], params["rhs_dilation"]
    parts = []
    for offset in np.ndindex(*size):
        starts = [k * d for k, d in zip(offset, dilations, strict=True)]
        within = [
            slice(a, a + (t - 1) * s + 1, s)
            for a, t, s in zip(starts, positions, strides, strict=True)
        ]
        parts.append(x[:, :, *within])
    patches = jnp.stack(parts, axis=2)  # n, i, window, *positions
    n, i, window = patches.shape[:3]
    return patches.reshape(n, i * window, -1).swapaxes(1, 2)
