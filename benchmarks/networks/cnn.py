"""Small convolutional networks, as models of one example."""

import itertools
from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


def max_pool(
    x: Float[Array, "channels height width"], window: int = 2
) -> Float[Array, "channels pooled_height pooled_width"]:
    """The maximum of each square window; the windows do not overlap.

    It is computed by reshaping, and not by `equinox.nn.MaxPool2d`: on a CPU the gradient
    of a `reduce_window` is slower, and nearly triples the memory of a training step.
    """
    channels, height, width = x.shape
    if height % window or width % window:
        raise ValueError(
            f"windows of {window} x {window} do not tile an image of {height} x {width}; "
            "choose the image, or pad the convolutions, so that each side is a multiple "
            "of the window wherever it is pooled"
        )
    windows = x.reshape(channels, height // window, window, width // window, window)
    return jnp.max(windows, axis=(2, 4))


class ConvNet(eqx.Module):
    """Convolutions, each followed by 2 x 2 pooling, then dense layers, with an activation
    after each layer except the last."""

    convolutions: list[eqx.nn.Conv2d]
    dense: list[eqx.nn.Linear]
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        key: Key[Array, ""],
        image: tuple[int, int, int],
        channels: tuple[int, ...],
        kernel_sizes: tuple[int, ...],
        padding: Literal["SAME", "VALID"],
        widths: tuple[int, ...],
        activation: Callable[[Array], Array] = jax.nn.relu,
    ):
        keys = iter(jax.random.split(key, len(channels) + len(widths)))
        self.convolutions = [
            eqx.nn.Conv2d(*pair, size, padding=padding, key=next(keys))
            for pair, size in zip(
                itertools.pairwise((image[0], *channels)), kernel_sizes, strict=True
            )
        ]
        self.activation = activation
        num_features = eqx.filter_eval_shape(self.features, jnp.zeros(image)).size
        self.dense = [
            eqx.nn.Linear(*pair, key=next(keys))
            for pair in itertools.pairwise((num_features, *widths))
        ]

    def features(
        self, x: Float[Array, "channels height width"], num_layers: int | None = None
    ) -> Float[Array, " features"]:
        """The pooled activations of the first convolutions, by default all."""
        for convolution in self.convolutions[:num_layers]:
            x = max_pool(self.activation(convolution(x)))
        return jnp.ravel(x)

    def __call__(
        self, x: Float[Array, "channels height width"]
    ) -> Float[Array, " classes"]:
        x = self.features(x)
        for linear in self.dense[:-1]:
            x = self.activation(linear(x))
        return self.dense[-1](x)


def lenet(
    key: Key[Array, ""],
    channels: int = 50,
    image: tuple[int, int, int] = (3, 32, 32),
    num_classes: int = 10,
) -> ConvNet:
    """LeNet-5 with ReLUs, maximal pooling and equally many channels in both convolutions:
    227,484 parameters by default."""
    return ConvNet(
        key,
        image,
        channels=(channels, channels),
        kernel_sizes=(5, 5),
        padding="VALID",
        widths=(120, 84, num_classes),
    )


def digits_cnn(key: Key[Array, ""]) -> ConvNet:
    """A network for an 8 x 8 image of one channel: 6,090 parameters."""
    return _digits_cnn(key, kernel_sizes=(3, 3))


def wide_filtered_digits_cnn(key: Key[Array, ""]) -> ConvNet:
    """The same with 5 x 5 filters in its first layer, so that they can be looked at:
    6,346 parameters."""
    return _digits_cnn(key, kernel_sizes=(5, 3))


def _digits_cnn(key: Key[Array, ""], kernel_sizes: tuple[int, int]) -> ConvNet:
    return ConvNet(
        key,
        (1, 8, 8),
        channels=(16, 16),
        kernel_sizes=kernel_sizes,
        padding="SAME",
        widths=(48, 10),
    )


def smooth_digits_cnn(key: Key[Array, ""], num_classes: int = 10) -> ConvNet:
    """A network with tanh for an 8 x 8 image of one channel: 6,090 parameters for 10
    classes.

    A Gauss-Newton step that goes too far can switch a ReLU off for every image, and then
    permanently; a tanh recovers.
    """
    return ConvNet(
        key,
        (1, 8, 8),
        channels=(16, 32),
        kernel_sizes=(3, 3),
        padding="SAME",
        widths=(num_classes,),
        activation=jnp.tanh,
    )
