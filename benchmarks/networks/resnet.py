"""ResNet-18 for small images, with and without batch normalisation, of one example.

The layout is that for CIFAR-10: 3 x 3 convolutions throughout, no pooling before the last
layer, and a 1 x 1 convolution on the shortcut wherever the shape changes (He et al. 2016,
Deep Residual Learning for Image Recognition, which has its four stages of two blocks for
ImageNet).
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


# Shape of the images and of all hidden layers
Maps = Float[Array, "channels height width"]
# State of batch normalisation; None without
State = eqx.nn.State | None

_STAGES = ((1, 1), (2, 2), (4, 2), (8, 2))  # width, in the network's; stride
_BLOCKS_PER_STAGE = 2
_NUM_BLOCKS = _BLOCKS_PER_STAGE * len(_STAGES)
# Decay of the running statistics per step, as in other libraries. With Equinox's default
# of 0.99 the variances, which begin at 1, keep a share of 0.99^t / (1 - 0.99^t) of it.
_MOMENTUM = 0.9


class Convolution(eqx.Module):
    """A convolution of odd size that keeps the image's size, except for its stride; and,
    if `normalise`, batch normalisation instead of its bias.

    Weights are normal with variance 2 / fan-in (He et al. 2015, Delving Deep into
    Rectifiers), times `scale` squared; biases are zero."""

    weight: Float[Array, "out_channels in_channels size size"]
    bias: Float[Array, "out_channels 1 1"] | None
    norm: eqx.nn.BatchNorm | None
    stride: int = eqx.field(static=True)

    def __init__(
        self,
        key: Key[Array, ""],
        in_channels: int,
        out_channels: int,
        *,
        size: int = 3,
        stride: int = 1,
        scale: float = 1.0,
        normalise: bool,
    ):
        shape = (out_channels, in_channels, size, size)
        deviation = scale * math.sqrt(2 / (in_channels * size**2))
        self.weight = deviation * jax.random.normal(key, shape)
        self.bias = None if normalise else jnp.zeros((out_channels, 1, 1))
        self.norm = _norm(out_channels) if normalise else None
        self.stride = stride

    def __call__(self, x: Maps, state: State) -> tuple[Maps, State]:
        margin = self.weight.shape[-1] // 2
        (x,) = jax.lax.conv_general_dilated(
            x[None], self.weight, (self.stride, self.stride), 2 * [(margin, margin)]
        )
        if self.bias is not None:
            x = x + self.bias
        if self.norm is None:
            return x, state
        if state is None:
            raise ValueError(
                "A network that normalises needs its state: call `model(x, state)`, with "
                "`model, state = equinox.nn.make_with_state(resnet18)(key)`."
            )
        return self.norm(x, state)


def _norm(channels: int) -> eqx.nn.BatchNorm:
    return eqx.nn.BatchNorm(channels, "batch", momentum=_MOMENTUM, mode="batch")


class Block(eqx.Module):
    """Two convolutions, and a shortcut past them.

    Without normalisation the second is scaled down by the square root of the number of
    blocks, as batch normalisation does in effect: otherwise the activations' variance
    doubles with each block (De and Smith 2020, Batch Normalization Biases Residual Blocks
    Towards the Identity Function in Deep Networks). De and Smith, and Zhang et al. (2019,
    Fixup), also begin at zero. But then the block's first convolution has no derivative,
    and the first linearised problem cannot use it.
    """

    first: Convolution
    second: Convolution
    shortcut: Convolution | None

    def __init__(
        self,
        key: Key[Array, ""],
        in_channels: int,
        out_channels: int,
        stride: int,
        *,
        normalise: bool,
    ):
        first, second, shortcut = jax.random.split(key, 3)
        self.first = Convolution(
            first, in_channels, out_channels, stride=stride, normalise=normalise
        )
        self.second = Convolution(
            second,
            out_channels,
            out_channels,
            scale=1.0 if normalise else _NUM_BLOCKS**-0.5,
            normalise=normalise,
        )
        self.shortcut = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = Convolution(
                shortcut,
                in_channels,
                out_channels,
                size=1,
                stride=stride,
                normalise=normalise,
            )

    def __call__(self, x: Maps, state: State) -> tuple[Maps, State]:
        residual, state = self.first(x, state)
        residual, state = self.second(jax.nn.relu(residual), state)
        if self.shortcut is not None:
            x, state = self.shortcut(x, state)
        return jax.nn.relu(x + residual), state


class ResNet(eqx.Module):
    """A convolution, residual blocks, the mean over the image, and a dense layer."""

    first: Convolution
    blocks: list[Block]
    dense: eqx.nn.Linear

    def __init__(
        self,
        key: Key[Array, ""],
        normalise: bool,
        width: int,
        num_classes: int,
        image_channels: int,
    ):
        keys = iter(jax.random.split(key, 2 + _NUM_BLOCKS))
        self.first = Convolution(next(keys), image_channels, width, normalise=normalise)
        self.blocks = []
        channels = width
        for multiple, stride in _STAGES:
            for i in range(_BLOCKS_PER_STAGE):
                shape = channels, multiple * width, stride if i == 0 else 1
                self.blocks.append(Block(next(keys), *shape, normalise=normalise))
                channels = multiple * width
        self.dense = eqx.nn.Linear(channels, num_classes, key=next(keys))

    def __call__(
        self, x: Maps, state: State = None
    ) -> Float[Array, " classes"] | tuple[Float[Array, " classes"], State]:
        """The outputs, and the new state if one is given."""
        x, new_state = self.first(x, state)
        x = jax.nn.relu(x)
        for block in self.blocks:
            x, new_state = block(x, new_state)
        outputs = self.dense(jnp.mean(x, axis=(1, 2)))
        return outputs if state is None else (outputs, new_state)


def resnet18(
    key: Key[Array, ""],
    normalise: bool = True,
    width: int = 64,
    num_classes: int = 10,
    image_channels: int = 3,
) -> ResNet:
    """11,173,962 parameters by default, and 11,169,162 without normalisation.

    With it: `model, state = equinox.nn.make_with_state(resnet18)(key)`, and
    `model(x, state)` within a `vmap` with the axis "batch"; without: `model(x)`."""
    return ResNet(key, normalise, width, num_classes, image_channels)
