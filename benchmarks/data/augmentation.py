"""Random changes of an image, `augment(image, key)`, that do not change its class."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


Image = Float[Array, "channels height width"]


def shift(image: Image, key: Key[Array, ""], by: int = 1) -> Image:
    """Shift an image by up to `by` pixels up or down, left or right, with zeros from
    outside. This is a random crop of the padded image."""
    margins = ((0, 0), (by, by), (by, by))
    corner = jax.random.randint(key, (2,), 0, 2 * by + 1)
    return jax.lax.dynamic_slice(
        jnp.pad(image, margins), (0, corner[0], corner[1]), image.shape
    )


def flip_and_crop(image: Image, key: Key[Array, ""]) -> Image:
    """Change an image as is usual for CIFAR-10: flip it horizontally half of the time,
    and shift it by up to 4 pixels."""
    flip_key, crop_key = jax.random.split(key)
    flipped = jnp.where(jax.random.bernoulli(flip_key), image[..., ::-1], image)
    return shift(flipped, crop_key, by=4)
