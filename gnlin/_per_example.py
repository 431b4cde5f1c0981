"""A function of one example, lifted to many: what is gained by their independence."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from . import _program, _rows, _tree
from ._sharding import is_spread
from ._tree import ravel_pytree


class PerExample(eqx.Module):
    """A function of one example, lifted to a batch of independent ones.

    `PerExample(fn)(y, args)` is `fn(y, example)` for each example along the leading
    axis of every array in `args`. What it adds over `jax.vmap` is the knowledge that
    outputs of one example do not depend on another: the dense Jacobian then takes as
    many reverse passes as *one example* has outputs, not as all of them have together.

    **Arguments:**

    - `fn`: `fn(y, example)` returning a pytree of arrays.

    !!! example

        ```python
        residuals = gnlin.PerExample(lambda w, xy: jnp.tanh(w @ xy[0]) - xy[1])
        lin = gnlin.linearise(residuals, w, (inputs, targets))
        ```
    """

    fn: Callable[[Any, Any], PyTree[Array]]

    def __call__(self, y, args):
        return jax.vmap(self.fn, in_axes=(None, 0))(y, args)

    def blocks(
        self,
        y: PyTree[Array],
        args: PyTree[Array],
        memory_budget: int,
        wanted: Sequence[int] | None = None,
    ) -> list[Any]:
        """The Jacobian by each leaf of the parameters (or the `wanted` ones): its rows,
        with a leading axis over all outputs, or its layer's factors."""
        wanted = range(len(jax.tree.leaves(y))) if wanted is None else wanted
        outputs = jax.eval_shape(self.fn, y, _example_of(args))
        if forward_is_cheaper(_tree.size(outputs), _tree.size(y)):
            of_example = functools.partial(_rows_forward, self.fn)
            rows = jax.tree.leaves(jax.vmap(of_example, in_axes=(None, 0))(y, args))
            found = [rows[leaf] for leaf in wanted]
        else:
            program = self._program_of(y, args)
            passed = program.num_bytes_passed(_tree.size(outputs))
            batch_size = max(1, memory_budget // passed)
            found = _program.blocks(program, y, args, wanted, batch_size)
        # (n, c, ...) -> (m, ...), one output leaf after the other
        ends = np.cumsum([leaf.size for leaf in jax.tree.leaves(outputs)])[:-1]

        def stack(block):
            if _rows.is_layer(block):
                return block
            parts = [
                part.reshape(part.shape[0] * part.shape[1], *block.shape[2:])
                for part in jnp.split(block, ends, axis=1)
            ]
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

        return list(map(stack, found))

    def summed(
        self,
        of_blocks: Callable[[list[Any]], PyTree[Array]],
        y: PyTree[Array],
        args: PyTree[Array],
        memory_budget: int,
    ) -> PyTree[Array]:
        """What a function makes of the blocks of some examples, summed over all: so many
        at a time that their blocks stay within the budget (bytes)."""
        n = jax.tree.leaves(args)[0].shape[0]
        of_one = max(1, sum(self.num_bytes(y, args)) // n)
        size = min(n, max(1, memory_budget // of_one))

        def part(args):
            return of_blocks(self.blocks(y, args, memory_budget))

        if size == n or is_spread():
            return part(args)
        whole = n - n % size
        parts = jax.tree.map(lambda x: x[:whole].reshape(-1, size, *x.shape[1:]), args)
        zero = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part, args)
        )
        add = lambda total, args: (jax.tree.map(jnp.add, total, part(args)), None)
        total, _ = jax.lax.scan(add, zero, parts)
        if whole == n:
            return total
        total, _ = add(total, jax.tree.map(lambda x: x[whole:], args))
        return total

    def num_bytes(self, y: PyTree[Array], args: PyTree[Array]) -> list[int]:
        """What the block of each leaf takes in memory."""
        outputs = jax.eval_shape(self.fn, y, _example_of(args))
        sizes = _program.num_numbers(self._program_of(y, args), y, _tree.size(outputs))
        num_examples = jax.tree.leaves(args)[0].shape[0]
        return [num_examples * size * _tree.dtype(y).itemsize for size in sizes]

    def num_kernel_multiplications(self, y, args) -> float:
        """In the kernel, by blocks."""
        outputs = jax.eval_shape(self.fn, y, _example_of(args))
        shape = jax.tree.leaves(args)[0].shape[0], _tree.size(outputs)
        return _program.num_gram_multiplications(self._program_of(y, args), y, shape)

    def _program_of(self, y, args) -> _program.Program:
        # Over devices the rows are divided by columns, which factors do not have.
        return _program.find(self.fn, y, _example_of(args), layers=not is_spread())


def _example_of(args: PyTree[Array]) -> PyTree[jax.ShapeDtypeStruct]:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), args)


def _rows_forward(fn, y: PyTree[Array], example) -> PyTree[Array]:
    """The Jacobian of one example, as parameters with a leading axis of outputs."""
    flat, unravel = ravel_pytree(y)

    def push(v):
        return ravel_pytree(jax.jvp(lambda y_: fn(y_, example), (y,), (unravel(v),))[1])[
            0
        ]

    columns = jax.vmap(push, out_axes=1)(jnp.eye(flat.size, dtype=flat.dtype))
    return jax.vmap(unravel)(columns.astype(flat.dtype))


def forward_is_cheaper(num_outputs: int, num_parameters: int) -> bool:
    """Whether a dense Jacobian takes fewer passes by forward mode."""
    return num_parameters < num_outputs
