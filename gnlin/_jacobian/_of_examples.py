"""The Jacobian of a function of independent examples."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._common._canonical import of_one_example
from .._common._checks import check_count
from .._common._convolutions import channels_last
from .._common._sharding import is_sharded
from .._common._tree import ravel_pytree, Structure
from . import _program
from ._base import Of, summed_over
from ._block import AbstractBlock, Rows
from ._by_passes import AbstractByPasses
from ._cost import Cost
from ._layer import Layer


class PerExample(eqx.Module):
    """A function of one example, lifted to a batch of independent ones.

    `PerExample(fn)(y, args)` is `fn(y, example)` for each example along the leading axis
    of every array in `args`. Unlike `jax.vmap`, it records that the outputs of one
    example do not depend on another example. The dense Jacobian then takes as many
    reverse passes as *one example* has outputs, not as all examples have together.

    **Arguments:**

    - `fn`: `fn(y, example)` returning a pytree of arrays.
    - `part_size`: how many examples have their activations in memory at once; each
        product recomputes the others' activations. `None` means all examples.

    !!! example

        ```python
        residuals = gnlin.PerExample(lambda w, xy: jnp.tanh(w @ xy[0]) - xy[1])
        lin = gnlin.linearise(residuals, w, (inputs, targets))
        ```
    """

    fn: Callable[[Any, Any], PyTree[Array]]
    part_size: int | None = eqx.field(default=None, static=True)

    def __check_init__(self):
        if self.part_size is not None:
            check_count("part_size", self.part_size)

    def __call__(self, y, args):
        return by_parts(eqx.Partial(self.fn, y), args, self.part_size)


def by_parts(
    fn: Callable[[Any], PyTree[Array]], examples: PyTree[Array], size: int | None
) -> PyTree[Array]:
    """Map `fn` over examples, in parts of `size`. Intermediate values are stored for one
    part at a time, and recomputed in each derivative pass."""
    # JAX would take the name of a module from its `repr`, which is slow.
    of_each = channels_last(jax.vmap(lambda example: fn(example)))
    if size is None or size >= _number(examples):
        return of_each(examples)
    of_part = jax.checkpoint(of_each)
    parts, whole, last = _divided(examples, size)
    found, axis = jax.lax.map(lambda part: of_part(whole(part)), parts), _axis_of_parts()
    merge = lambda x: jnp.moveaxis(x, 0, axis).reshape(-1, *x.shape[2:])
    found = jax.tree.map(merge, found)
    if last is None:
        return found
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), found, of_part(last))


def _divided(
    examples: PyTree[Array], size: int
) -> tuple[PyTree[Array], Callable[[PyTree[Array]], PyTree[Array]], PyTree | None]:
    """Return the examples in flat parts of `size` along a new axis, a function that
    restores a part's shape, and the remaining examples, if any. Parts are flat so that
    XLA does not copy all examples into the layout that convolutions prefer."""
    n, axis = _number(examples), _axis_of_parts()
    end = n - n % size

    def split(x: Array) -> Array:
        width = math.prod(x.shape[1:])
        if axis == 0:
            return x[:end].reshape(n // size, size * width)
        return jnp.moveaxis(x[:end].reshape(size, n // size, width), 1, 0)

    def whole(part: PyTree[Array]) -> PyTree[Array]:
        return jax.tree.map(lambda p, x: p.reshape(size, *x.shape[1:]), part, examples)

    last = None if end == n else jax.tree.map(lambda x: x[end:], examples)
    return jax.tree.map(split, examples), whole, last


def _axis_of_parts() -> int:
    """Return 1 if devices share the examples, so that each part uses all devices."""
    return 1 if is_sharded() else 0


def _number(examples: PyTree[Array]) -> int:
    return jax.tree.leaves(examples)[0].shape[0]


class OfExamples(AbstractByPasses):
    """The Jacobian of `function(y, args)`. It takes as many reverse passes as one example
    has outputs, for some arrays of parameters or some examples at a time. The blocks of
    dense and convolutional layers are stored as factors."""

    function: PerExample
    _point: PyTree[Array]
    _args: PyTree[Array]

    @property
    def shape_of_passes(self) -> tuple[int, int]:
        return self._outputs_of_one().size, self.domain.size

    def curvature_mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        if self.function.part_size is None:
            return self.rmv(self.mv(vector))

        def of_part(args):
            outputs_of = lambda y: jax.vmap(functools.partial(self._fn, y))(args)
            _, jvp = jax.linearize(outputs_of, self._point)
            (found,) = jax.linear_transpose(jvp, self.domain.tree)(jvp(vector))
            return found

        return self._sum_of_parts(channels_last(of_part), self.function.part_size)

    def blocks(self, wanted: Sequence[int] | None = None) -> Sequence[AbstractBlock]:
        whole = self.function.part_size is None
        if whole and self.is_by_forward:
            return super().blocks(wanted)
        wanted = range(len(self.domain.leaves)) if wanted is None else wanted
        return self._blocks_of(self._args, wanted)

    def _blocks_of(self, args, wanted: Sequence[int]) -> Sequence[AbstractBlock]:
        outputs = self._outputs_of_one()
        if self.is_by_forward:
            of_example = functools.partial(_rows_forward, self._fn, self._point)
            rows = jax.tree.leaves(by_parts(of_example, args, self.function.part_size))
            found = [rows[leaf] for leaf in wanted]
        else:
            program = self._program()
            example_bytes = program.num_bytes_passed(outputs.size)
            most = self.function.part_size or self._num_examples()
            batch_size = min(most, max(1, self.memory_budget // example_bytes))
            found = _program.blocks(program, self._point, args, wanted, batch_size)
        # (n, c, ...) -> (m, ...): outputs are ordered by array first, then by example.
        ends = np.cumsum([leaf.size for leaf in outputs.leaves])[:-1]

        def stacked(rows: Array) -> Rows:
            parts = [
                part.reshape(part.shape[0] * part.shape[1], *rows.shape[2:])
                for part in jnp.split(rows, ends, axis=1)
            ]
            return Rows(jnp.concatenate(parts))

        return [x if isinstance(x, Layer) else stacked(x) for x in found]

    def in_turn(self, array: Array) -> tuple["OfExamples", Array]:
        point, array = jax.lax.optimization_barrier((self._point, array))
        return dataclasses.replace(self, _point=point), array

    def summed(self, of_blocks, part_bytes):
        n = self._num_examples()
        most = min(self.memory_budget, part_bytes)
        example_bytes = self._outputs_of_one().size * self.domain.nbytes
        size = min(n, max(1, most // max(1, example_bytes)))
        all_leaves = range(len(self.domain.leaves))

        def of_part(args):
            return of_blocks(self._blocks_of(args, all_leaves))

        return of_part(self._args) if is_sharded() else self._sum_of_parts(of_part, size)

    def _sum_of_parts(self, of_part: Callable[[PyTree[Array]], Of], size: int) -> Of:
        if size >= self._num_examples():
            return of_part(self._args)
        parts, whole, last = _divided(self._args, size)
        total = summed_over(lambda part: of_part(whole(part)), parts)
        return total if last is None else jax.tree.map(jnp.add, total, of_part(last))

    def transformed(
        self, matrices: PyTree[Array], codomain: Structure
    ) -> AbstractByPasses:
        fn = eqx.Partial(_transformed_fn, self._fn)
        return dataclasses.replace(
            super().transformed(matrices, codomain),
            function=PerExample(fn, self.function.part_size),
            _args=(self._args, matrices),
        )

    def cost(self) -> Cost:
        shape = self._num_examples(), self._outputs_of_one().size
        multiplications = _program.num_gram_multiplications(
            self._program(), self._point, shape
        )
        return super().cost()._replace(gram_operations=2 * multiplications, in_parts=True)

    @property
    def _fn(self) -> Callable[[Any, Any], PyTree[Array]]:
        return self.function.fn

    def _num_examples(self) -> int:
        return _number(self._args)

    def _outputs_of_one(self) -> Structure:
        return Structure.of(of_one_example(self.codomain.tree))

    def _program(self) -> _program.Program:
        # Devices share the rows' columns, and factored blocks have no such columns.
        layers = not is_sharded()
        return _program.find(
            self._fn, self._point, of_one_example(self._args), layers=layers
        )

    def block_bytes(self) -> list[int]:
        c, itemsize = self._outputs_of_one().size, self.domain.dtype.itemsize
        sizes = _program.num_numbers(self._program(), self._point, c)
        return [self._num_examples() * size * itemsize for size in sizes]


def _rows_forward(fn, y: PyTree[Array], example) -> PyTree[Array]:
    """Return the rows of one example by forward mode."""
    flat, unravel = ravel_pytree(y)

    def push(v):
        _, pushed = jax.jvp(lambda y_: fn(y_, example), (y,), (unravel(v),))
        return ravel_pytree(pushed)[0]

    columns = jax.vmap(push, out_axes=1)(jnp.eye(flat.size, dtype=flat.dtype))
    return jax.vmap(unravel)(columns.astype(flat.dtype))


def _transformed_fn(fn, y, args):
    example, matrix = args
    return matrix.mv(fn(y, example))
