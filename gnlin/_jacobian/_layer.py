r"""The blocks of dense and convolutional layers, stored as factors.

If an array of parameters only multiplies, as the weights of a dense or a convolutional
layer do, its block of the Jacobian is a sum of outer products,

$$\phi_{(n,c),(o,q)} = \sum_t s_{n,c,o,t}\,a_{n,t,q}.$$

Here $s$ are the backward signals: the derivative of output $c$ of example $n$ with
respect to the layer's output $o$ at position $t$. The activations $a$ are the layer's
inputs at position $t$. A dense layer has one position; a convolution has one for each
pixel of its output, and $q$ runs over a patch; weights that are used several times have
the positions of all uses. The factors are much smaller than the rows, and the kernel
costs less.
"""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._common import _tree
from .._common._tree import einsum, gram, matmul, promoted, tensordot
from ._block import AbstractBlock, StackedBlock


# Cost of an elementwise multiplication relative to one in a matrix product. Measured: 75
# on two cores, 38 on one core; twice as much in single precision.
_ELEMENTWISE = 60
# Size of the batches in which inner products of positions are computed. Smaller batches
# multiply matrices with few rows (4 times slower), larger ones leave the caches (twice).
_POSITIONS_BYTES = 2**22
# Size of the batches of rows that are formed to make the kernel.
_PART_BYTES = 2**27


class Layer(AbstractBlock):
    """The block of the weights of one layer, for all outputs of n examples."""

    signals: Float[Array, "n c o t"]
    activations: Float[Array, "n t q"]
    shape: tuple[int, ...] = eqx.field(static=True)  # of the weights
    axes: tuple[int, ...] = eqx.field(static=True)  # axes that form o, then those of q

    @property
    def num_rows(self) -> int:
        n, c, _, _ = self.signals.shape
        return n * c

    def is_smaller(self) -> bool:
        """Whether the factors take less memory than the rows."""
        rows = self.num_rows * math.prod(self.shape)
        return self.signals.size + self.activations.size < rows

    def rows(self) -> Float[Array, "m ..."]:
        n, c, o, t = self.signals.shape
        signals = self.signals.reshape(n, c * o, t)
        # An outer product (one position) written as `multiply` is fused by XLA.
        product = jnp.multiply if t == 1 else matmul
        rows = product(signals, self.activations)
        return jax.vmap(self._as_weights)(rows.reshape(n * c, -1))

    def merged(self, num_outputs: int) -> "Layer":
        # The outputs of an example become outputs of the layer.
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

    def partial_traces(self) -> tuple[Float[Array, "o o"], Float[Array, "q q"]]:
        # See `Rows.partial_traces`.
        signals, activations = self.signals, self.activations
        of_positions = einsum("ntq,nuq->ntu", activations, activations)
        weighted = einsum("ncot,ntu->ncou", signals, of_positions)
        left = einsum("ncou,ncpu->op", weighted, signals)
        of_positions = einsum("ncot,ncou->ntu", signals, signals)
        weighted = einsum("ntu,nuq->ntq", of_positions, activations)
        return left, einsum("ntq,ntr->qr", weighted, activations)

    def weighted_squares(
        self,
        left: Float[Array, "o o"],
        right: Float[Array, "q q"],
        weights: Float[Array, "o q"],
    ) -> Float[Array, " m"]:
        # See `Rows.weighted_squares`.
        signals = einsum("ncot,op->ncpt", self.signals, left)
        activations = einsum("ntq,qr->ntr", self.activations, right)
        if signals.shape[3] == 1:
            by_example = einsum("ntr,pr->np", activations**2, weights)
            return einsum("ncpt,np->nc", signals**2, by_example).reshape(-1)

        def of_example(example):
            signals, activations = example
            return jnp.sum(matmul(signals, activations) ** 2 * weights[None], axis=(1, 2))

        return jax.lax.map(of_example, (signals, activations)).reshape(-1)

    def squared_columns(self) -> Float[Array, "..."]:
        n, _, o, t = self.signals.shape
        if t > 1:
            return jnp.sum(self.rows() ** 2, axis=0)
        # Squares of the factors may overflow where squares of their products do not.
        unit_s, unit_a = _tree.unit(self.signals), _tree.unit(self.activations)
        signals = jnp.sum((self.signals / unit_s) ** 2, axis=1).reshape(n, o)
        activations = (self.activations.reshape(n, -1) / unit_a) ** 2
        return self._as_weights(matmul(signals.T, activations)) * (unit_s * unit_a) ** 2

    def gram_with(self, other: AbstractBlock) -> Float[Array, "m k"]:
        if isinstance(other, StackedBlock):
            return other.gram_with(self).T
        if not (isinstance(other, Layer) and other.axes == self.axes):
            return super().gram_with(other)
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
        """q, the number of inputs of one output at one position."""
        return self.activations.shape[-1]

    def _gram_of_positions(self, other: "Layer") -> Float[Array, "m k"]:
        """Sum the inner products between all positions, in batches of examples."""
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

        example_bytes = c * t * all_activations.shape[0] * e * self.signals.dtype.itemsize
        at_once = max(1, min(n, _POSITIONS_BYTES // max(1, example_bytes)))
        examples = self.signals, self.activations
        rows = jax.lax.map(of_example, examples, batch_size=at_once)
        return rows.reshape(n * c, k * e)

    def _gram_by_rows(self, other: "Layer") -> Float[Array, "m k"]:
        """Multiply the rows, formed for a few of the layer's outputs at a time."""
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
        n, c, _, _ = self.signals.shape
        a, signals, activations = promoted((a, self.signals, self.activations))
        signals = einsum("nc,ncot->ont", a.reshape(n, c), signals)
        return self._as_weights(tensordot(signals, activations, 2))

    def push_forward(self, tangent: Float[Array, "..."]) -> Float[Array, " m"]:
        o = self.signals.shape[2]
        tangent, signals, activations = promoted(
            (tangent, self.signals, self.activations)
        )
        matrix = tangent.transpose(self.axes).reshape(o, -1)
        through = einsum("ntq,oq->not", activations, matrix)
        return einsum("ncot,not->nc", signals, through).reshape(-1)

    def transformed(self, transform: Callable[[Array], Array]) -> "Layer":
        # All rows of an example share their activations, so only signals change.
        n, c, o, t = self.signals.shape
        signals = jax.vmap(transform, 1, 1)(self.signals.reshape(n * c, o * t))
        signals = signals.astype(self.signals.dtype).reshape(n, -1, o, t)
        return Layer(signals, self.activations, self.shape, self.axes)

    def _as_weights(self, matrix: Array) -> Array:
        sizes = [self.shape[axis] for axis in self.axes]
        return matrix.reshape(sizes).transpose(np.argsort(self.axes))


def gram_multiplications(
    left: tuple[int, int, int], right: tuple[int, int, int], o: int, q: int
) -> tuple[float, float]:
    """Return the multiplications that a layer's kernel takes by positions, and by rows.
    `left` and `right` are (examples, outputs of an example, positions)."""
    (n, c, t), (k, e, u) = left, right
    pairs, of_rows = float(n * c) * (k * e), float(n * c * t + k * e * u) / 2
    elementwise = _ELEMENTWISE * pairs if t * u > 1 else 0
    by_positions = t * u * (pairs * o + float(n) * k * q + elementwise)
    return by_positions, of_rows * o * q + pairs * o * q


def _largest_divisor(number: int, most: int) -> int:
    return next(k for k in range(min(number, most), 0, -1) if number % k == 0)
