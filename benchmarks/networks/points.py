"""Networks that are functions of a point, for differential equations."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key


Point = Float[Array, " d"]


class Features(Protocol):
    """The inputs of the first layer, as `size` functions of a point."""

    @property
    def size(self) -> int: ...

    def __call__(self, x: Point) -> Array: ...


class Coordinates(eqx.Module):
    """The point itself."""

    size: int = eqx.field(static=True)

    def __call__(self, x: Point) -> Array:
        return x


class Periodic(eqx.Module):
    """Maps (t, x) to t and to the cosines and sines in x of some waves, which are counted
    by how often each fits into the period."""

    period: float = eqx.field(static=True)
    waves: tuple[int, ...] = eqx.field(static=True, default=(1,))

    @property
    def size(self) -> int:
        return 1 + 2 * len(self.waves)

    def __call__(self, x: Point) -> Float[Array, " size"]:
        angles = 2 * jnp.pi / self.period * jnp.asarray(self.waves, x.dtype) * x[1]
        return jnp.concatenate([x[:1], jnp.cos(angles), jnp.sin(angles)])


class Fourier(eqx.Module):
    """The sine and cosine of each coordinate, times pi and each frequency."""

    dimensions: int = eqx.field(static=True)
    frequencies: tuple[float, ...] = eqx.field(static=True)

    @property
    def size(self) -> int:
        return 2 * self.dimensions * len(self.frequencies)

    def __call__(self, x: Point) -> Float[Array, " size"]:
        angles = jnp.pi * jnp.outer(jnp.asarray(self.frequencies), x).ravel()
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])


class PointMLP(eqx.Module):
    """A map from features of a point, by hidden layers, to a number or several.

    Weights and biases are larger than Equinox's at the start: by the square root of 3, so
    that activations keep their size (X. Glorot and Y. Bengio, 2010), and in the first
    layer also by `spread`. Otherwise the network is nearly linear at its start, and few
    of the Jacobian's singular values are above rounding.
    """

    layers: tuple[eqx.nn.Linear, ...]
    features: Features
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        hidden: Sequence[int],
        key: Key[Array, ""],
        features: Features,
        *,
        outputs: int | Literal["scalar"] = "scalar",
        activation: Callable[[Array], Array] = jnp.tanh,
        spread: float = 1.0,
    ):
        ends = zip((features.size, *hidden), (*hidden, outputs), strict=True)
        keys = jax.random.split(key, len(hidden) + 1)
        layers = [eqx.nn.Linear(*pair, key=k) for pair, k in zip(ends, keys, strict=True)]
        scales = [spread * np.sqrt(3.0)] + [np.sqrt(3.0)] * len(hidden)
        self.layers = tuple(
            jax.tree.map(lambda x, c=c: c * x, layer)
            for layer, c in zip(layers, scales, strict=True)
        )
        self.features, self.activation = features, activation

    def __call__(self, x: Point) -> Array:
        *hidden, last = self.layers
        values = self.features(x)
        for layer in hidden:
            values = self.activation(layer(values))
        return last(values)


class Separable(eqx.Module):
    """The sum of `rank` products, each of one function for every coordinate, which is a
    network with one hidden layer."""

    first: Float[Array, "d width"]
    bias: Float[Array, "d width"]
    second: Float[Array, "d width rank"]
    constant: Float[Array, "d rank"]

    def __init__(self, dimensions: int, width: int, rank: int, key: Key[Array, ""]):
        keys = jax.random.split(key, 4)
        normal = lambda k, *shape: jax.random.normal(keys[k], (dimensions, *shape), float)
        self.first, self.bias = normal(0, width), normal(1, width)
        self.second = normal(2, width, rank) / np.sqrt(width)
        self.constant = 0.5 * normal(3, rank)

    def __call__(self, x: Point) -> Float[Array, ""]:
        hidden = jnp.tanh(self.first * x[:, None] + self.bias)
        factors = jnp.einsum("dw,dwr->dr", hidden, self.second) + self.constant
        product = factors[0]
        for factor in factors[1:]:
            product = product * factor
        return jnp.sum(product)
