"""Fully connected networks, with ReLU unless stated otherwise."""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Scalar


def quintic_mlp(
    key: Key[Array, ""], activation: Callable[[Array], Array] = jax.nn.relu
) -> eqx.nn.MLP:
    """Five layers, four of them hidden and 50 wide: 7,801 parameters."""
    return eqx.nn.MLP(1, 1, width_size=50, depth=4, activation=activation, key=key)


def digits_mlp(key: Key[Array, ""], width: int = 40) -> eqx.nn.MLP:
    """64-40-10: 3,010 parameters, the fewest that are many for a few hundred outputs."""
    return eqx.nn.MLP(64, 10, width_size=width, depth=1, key=key)


def mnist_mlp(key: Key[Array, ""]) -> eqx.nn.Sequential:
    """784-512-512-10, for an image: 669,706 parameters."""
    dense = eqx.nn.MLP(784, 10, width_size=512, depth=2, key=key)
    return eqx.nn.Sequential([eqx.nn.Lambda(jnp.ravel), dense])


def teacher_mlp(key: Key[Array, ""]) -> eqx.nn.MLP:
    """30-128-2: 4,226 parameters."""
    return eqx.nn.MLP(30, 2, width_size=128, depth=1, key=key)


def xor_mlp(key: Key[Array, ""], scale: float | Float[Array, ""] = 1.0) -> eqx.nn.MLP:
    """2-100-1, with weights this many times as large as Equinox's: 401 parameters."""
    return scaled(eqx.nn.MLP(2, 1, width_size=100, depth=1, key=key), scale)


def scaled(model: eqx.nn.MLP, by: float | Float[Array, ""]) -> eqx.nn.MLP:
    """The same model with parameters this many times as large."""
    times = lambda leaf: by * leaf if eqx.is_inexact_array(leaf) else leaf
    return jax.tree.map(times, model)


def dead_units(model: eqx.nn.MLP, inputs: Float[Array, "n d"]) -> Scalar:
    """The share of the hidden units (all of them ReLUs) that are off for all inputs."""
    x, off = inputs, []
    for layer in model.layers[:-1]:
        x = jax.nn.relu(jax.vmap(layer)(x))
        off.append(jnp.all(x == 0, axis=0))
    return jnp.mean(jnp.concatenate(off))


class DropoutMLP(eqx.Module):
    """Two hidden layers, each followed by dropout."""

    layers: tuple[eqx.nn.Linear, eqx.nn.Linear, eqx.nn.Linear]
    dropout: eqx.nn.Dropout

    def __init__(
        self, key: Key[Array, ""], sizes: tuple[int, int, int, int], rate: float
    ):
        first, second, last = jax.random.split(key, 3)
        size, width, other_width, num_outputs = sizes
        self.layers = (
            eqx.nn.Linear(size, width, key=first),
            eqx.nn.Linear(width, other_width, key=second),
            eqx.nn.Linear(other_width, num_outputs, key=last),
        )
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(
        self, x: Float[Array, " size"], key: Key[Array, ""] | None = None
    ) -> Float[Array, " outputs"]:
        keys = (None, None) if key is None else jax.random.split(key)
        *hidden, last = self.layers
        for layer, key in zip(hidden, keys, strict=True):
            x = self.dropout(jax.nn.relu(layer(x)), key=key)
        return last(x)


class TanhMLP(eqx.Module):
    """A map from a point to a number, by hidden layers of any widths."""

    layers: tuple[eqx.nn.Linear, ...]

    def __init__(self, sizes: Sequence[int], key: Key[Array, ""]):
        ends = zip(sizes, (*sizes[1:], "scalar"), strict=True)
        keys = jax.random.split(key, len(sizes))
        self.layers = tuple(
            eqx.nn.Linear(*pair, key=k) for pair, k in zip(ends, keys, strict=True)
        )

    def __call__(self, x: Float[Array, " d"]) -> Float[Array, ""]:
        *hidden, last = self.layers
        for layer in hidden:
            x = jnp.tanh(layer(x))
        return last(x)
