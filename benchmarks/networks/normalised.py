"""A small convolutional network with batch normalisation, as a model of one example."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from .cnn import max_pool
from .resnet import Convolution, State


class NormalisedConvNet(eqx.Module):
    """Convolutions, each normalised over the batch and followed by a ReLU and 2 x 2
    pooling, and a dense layer."""

    convolutions: list[Convolution]
    dense: eqx.nn.Linear

    def __init__(
        self,
        key: Key[Array, ""],
        image: tuple[int, int, int] = (1, 8, 8),
        channels: tuple[int, ...] = (8, 16),
        num_classes: int = 10,
    ):
        *keys, dense = jax.random.split(key, len(channels) + 1)
        pairs = itertools.pairwise((image[0], *channels))
        self.convolutions = [
            Convolution(key, *pair, normalise=True)
            for key, pair in zip(keys, pairs, strict=True)
        ]
        side, other_side = (length >> len(channels) for length in image[1:])
        num_features = channels[-1] * side * other_side
        self.dense = eqx.nn.Linear(num_features, num_classes, key=dense)

    def __call__(
        self, x: Float[Array, "channels height width"], state: State
    ) -> tuple[Float[Array, " classes"], State]:
        for convolution in self.convolutions:
            x, state = convolution(x, state)
            x = max_pool(jax.nn.relu(x))
        return self.dense(jnp.ravel(x)), state
