r"""Dense and convolutional layers: their part of the Jacobian as products.

Where an array of parameters does nothing but multiply, as the weights of a dense or a
convolutional layer do, its rows of the Jacobian are sums of outer products of what
comes back to the layer and what went into it,

$$\phi_{(n,c),(o,q)} = \sum_t s_{n,c,o,t}\,a_{n,t,q},$$

with $s$ the backward signals of output $c$ of example $n$ at the layer's output $o$ in
position $t$, and $a$ the activations that position $t$ sees (a dense layer has one
position, a convolution as many as its image, $q$ then running over a patch; weights that
are used several times have the positions of all their uses). They are much smaller than
the rows, and so is the work for the kernel.
"""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._common import _tree
from .._common._tree import gram, matmul, promoted
from ._block import AbstractBlock
from ._rows import Rows
from ._stacked_block import StackedBlock


# One multiplication by itself, in memory, takes as long as so many in a matrix product:
# measured 75 on two cores, 38 on one, in single precision twice as many.
_ELEMENTWISE = 60
# Positions' inner products of so many bytes at a time: fewer are products of matrices of
# few rows (4 times slower), more leave the nearer memories (2 times).
_POSITIONS_BYTES = 2**22
# Of the rows that are formed a part at a time for the kernel.
_PART_BYTES = 2**27


class Layer(AbstractBlock):
    """The Jacobian by the weights of one layer, of all outputs of n examples."""

    signals: Float[Array, "n c o t"]
    activations: Float[Array, "n t q"]
    shape: tuple[int, ...] = eqx.field(static=True)  # of the weights
    axes: tuple[int, ...] = eqx.field(static=True)  # theirs, those of o before those of q

    @property
    def num_rows(self) -> int:
        n, c, _, _ = self.signals.shape
        return n * c

    def is_smaller(self) -> bool:
        """Whether it takes less memory than its rows."""
        rows = self.num_rows * math.prod(self.shape)
        return self.signals.size + self.activations.size < rows

    def rows(self) -> Float[Array, "m ..."]:
        """The rows themselves, of all examples one after the other."""
        n, c, o, t = self.signals.shape
        signals = self.signals.reshape(n, c * o, t)
        # With one position they are outer products, which are fused with what follows.
        product = jnp.multiply if t == 1 else matmul
        rows = product(signals, self.activations)
        return jax.vmap(self._as_weights)(rows.reshape(n * c, -1))

    def merged(self, num_outputs: int) -> "Layer":
        """One row an example: outputs are further outputs of the layer."""
        n, c, o, t = self.signals.shape
        shape = c, *self.shape
        axes = 0, *(axis + 1 for axis in self.axes)
        return Layer(self.signals.reshape(n, 1, c * o, t), self.activations, shape, axes)

    def of_output(self, k: int | Int[Array, ""], num_outputs: int) -> "Layer":
        signals = self.signals[:, k][:, None]
        return Layer(signals, self.activations, self.shape, self.axes)

    def squared_rows(self) -> Float[Array, " m"]:
        c, o, t = self.signals.shape[1:]

        def of_example(example):
            signals, activations = example
            rows = matmul(signals.reshape(c * o, t), activations)
            return jnp.sum(rows.reshape(c, -1) ** 2, axis=1)

        if t == 1:
            sizes = jnp.sum(self.activations**2, axis=(1, 2))
            return (jnp.sum(self.signals**2, axis=(2, 3)) * sizes[:, None]).reshape(-1)
        return jax.lax.map(of_example, (self.signals, self.activations)).reshape(-1)

    def squared_columns(self) -> Float[Array, "..."]:
        """The squared norms of the Jacobian's columns, as weights."""
        n, _, o, t = self.signals.shape
        if t > 1:
            return jnp.sum(self.rows() ** 2, axis=0)
        # Their squares may be out of range where those of their products are not.
        unit_s, unit_a = _tree.unit(self.signals), _tree.unit(self.activations)
        signals = jnp.sum((self.signals / unit_s) ** 2, axis=1).reshape(n, o)
        activations = (self.activations.reshape(n, -1) / unit_a) ** 2
        return self._as_weights(matmul(signals.T, activations)) * (unit_s * unit_a) ** 2

    def gram_with(self, other: AbstractBlock) -> Float[Array, "m k"]:
        """Their inner products with those of another block."""
        if isinstance(other, StackedBlock):
            return other.gram_with(self).T
        if not (isinstance(other, Layer) and other.axes == self.axes):
            return Rows(self.rows()).gram_with(other)
        n, c, o, t = self.signals.shape
        k, e, _, u = other.signals.shape
        if t == u == 1:
            of_signals = matmul(
                self.signals.reshape(n * c, o), other.signals.reshape(k * e, o).T
            )
            of_activations = matmul(
                self.activations.reshape(n, -1), other.activations.reshape(k, -1).T
            )
            each = of_signals.reshape(n, c, k, e) * of_activations[:, None, :, None]
            return each.reshape(n * c, k * e)
        by_positions, by_rows = gram_multiplications(
            (n, c, t), (k, e, u), o, self.num_inputs
        )
        if by_positions < by_rows:
            return self._gram_of_positions(other)
        return self._gram_by_rows(other)

    @property
    def num_inputs(self) -> int:
        """Of one output, in one position: q."""
        return self.activations.shape[-1]

    def _gram_of_positions(self, other: "Layer") -> Float[Array, "m k"]:
        """The inner products of all positions of all rows, some examples at a time."""
        n, c, o, t = self.signals.shape
        k, e, _, u = other.signals.shape
        all_signals = other.signals.swapaxes(2, 3).reshape(k * e * u, o)
        all_activations = other.activations.reshape(k * u, -1)

        def of_example(example):
            signals, activations = example
            signals = signals.swapaxes(1, 2).reshape(c * t, o)
            of_signals = matmul(signals, all_signals.T).reshape(c, t, k, e, u)
            of_activations = matmul(activations, all_activations.T).reshape(t, k, u)
            products = of_signals * of_activations[None, :, :, None, :]
            return jnp.sum(products, axis=(1, 4)).reshape(c, k * e)

        of_one = c * t * all_activations.shape[0] * e * self.signals.dtype.itemsize
        at_once = max(1, min(n, _POSITIONS_BYTES // max(1, of_one)))
        examples = self.signals, self.activations
        rows = jax.lax.map(of_example, examples, batch_size=at_once)
        return rows.reshape(n * c, k * e)

    def _gram_by_rows(self, other: "Layer") -> Float[Array, "m k"]:
        """By the rows, for a few outputs of the layer at a time."""
        o, q = self.signals.shape[2], self.num_inputs
        num_bytes = max(self.num_rows, other.num_rows) * q * self.signals.dtype.itemsize
        part = _largest_divisor(o, max(1, _PART_BYTES // max(1, num_bytes)))

        def rows_of(layer: Layer, k):
            n, c, _, t = layer.signals.shape
            signals = jax.lax.dynamic_slice_in_dim(layer.signals, k * part, part, axis=2)
            rows = matmul(signals.reshape(n, c * part, t), layer.activations)
            return rows.reshape(n * c, part * q)

        def of_part(k):
            rows = rows_of(self, k)
            return gram(rows) if other is self else matmul(rows, rows_of(other, k).T)

        if part == o:
            return of_part(0)
        shape = self.num_rows, other.num_rows
        zero = jnp.zeros(shape, jax.eval_shape(of_part, 0).dtype)
        return jax.lax.fori_loop(0, o // part, lambda k, sum: sum + of_part(k), zero)

    def pull_back(self, a: Float[Array, " m"]) -> Float[Array, "..."]:
        r"""$\phi^\top a$, as weights."""
        n, c, _, _ = self.signals.shape
        precise = jax.lax.Precision.HIGHEST
        a, signals, activations = promoted((a, self.signals, self.activations))
        a = a.reshape(n, c)
        signals = jnp.einsum("nc,ncot->ont", a, signals, precision=precise)
        product = jnp.tensordot(signals, activations, 2, precision=precise)
        return self._as_weights(product)

    def push_forward(self, tangent: Float[Array, "..."]) -> Float[Array, " m"]:
        r"""$\phi v$, of weights."""
        precise = jax.lax.Precision.HIGHEST
        o = self.signals.shape[2]
        tangent, signals, activations = promoted(
            (tangent, self.signals, self.activations)
        )
        matrix = tangent.transpose(self.axes).reshape(o, -1)
        through = jnp.einsum("ntq,oq->not", activations, matrix, precision=precise)
        products = jnp.einsum("ncot,not->nc", signals, through, precision=precise)
        return products.reshape(-1)

    def transformed(self, transform: Callable[[Array], Array]) -> "Layer":
        # Of an example all rows have the same activations.
        n, c, o, t = self.signals.shape
        signals = jax.vmap(transform, 1, 1)(self.signals.reshape(n * c, o * t))
        signals = signals.astype(self.signals.dtype).reshape(n, -1, o, t)
        return Layer(signals, self.activations, self.shape, self.axes)

    def scaled(self, scale: Float[Array, "..."]) -> Rows:
        return Rows(self.rows()).scaled(scale)

    def astype(self, dtype: jnp.dtype) -> "Layer":
        signals, activations = (x.astype(dtype) for x in (self.signals, self.activations))
        return Layer(signals, activations, self.shape, self.axes)

    def _as_weights(self, matrix: Array) -> Array:
        sizes = [self.shape[axis] for axis in self.axes]
        return matrix.reshape(sizes).transpose(np.argsort(self.axes))


def gram_multiplications(
    these: tuple[int, int, int], those: tuple[int, int, int], o: int, q: int
) -> tuple[float, float]:
    """(by positions, by rows): of one layer. `these` and `those` are examples, their
    outputs and the layer's positions."""
    (n, c, t), (k, e, u) = these, those
    pairs, of_rows = float(n * c) * (k * e), float(n * c * t + k * e * u) / 2
    elementwise = _ELEMENTWISE * pairs if t * u > 1 else 0
    by_positions = t * u * (pairs * o + float(n) * k * q + elementwise)
    return by_positions, of_rows * o * q + pairs * o * q


def _largest_divisor(number: int, most: int) -> int:
    return next(k for k in range(min(number, most), 0, -1) if number % k == 0)
