"""Ten classes of textures, as colour images of 32 x 32 that any machine can make.

A class is an orientation and a frequency. An image is noise around that frequency, with
random phases and colours, on a background of smooth noise. So neither a pixel nor a
colour tells the class, and the orientations have to be found. An orientation and its
mirror image are the same class, so that flips do not change the class.
"""

import functools
import itertools

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray


Labelled = tuple[Float[ndarray, "n 3 32 32"], Int[ndarray, " n"]]
SIDE, NUM_CLASSES = 32, 10
NUM_TRAIN, NUM_VALIDATION, NUM_TEST = 5_000, 500, 1_000
CLASSES = tuple(itertools.product(np.radians([0, 22.5, 45, 67.5, 90]), (0.12, 0.25)))
"""Orientation in radians, and frequency in cycles per pixel."""
JITTER, WIDTH = np.radians(8), 0.03
"""The spread of an image's orientation, and of its frequencies."""
BACKGROUND = 0.5
"""The standard deviation of the background, relative to the texture's."""


@functools.lru_cache(maxsize=2)
def draw(num_train: int | None, seed: int) -> tuple[Labelled, Labelled, Labelled]:
    """Draw training, validation and test data."""
    number = NUM_TRAIN if num_train is None else num_train
    # Draw the training images last, so that their number does not change the others.
    rng = np.random.default_rng(seed)
    test, validation = images(NUM_TEST, rng), images(NUM_VALIDATION, rng)
    return images(number, rng), validation, test


def images(number: int, rng: np.random.Generator) -> Labelled:
    """Return images of each class in turn, with a mean of zero and a standard deviation
    of 1."""
    labels = np.arange(number) % NUM_CLASSES
    angles, frequencies = np.array(CLASSES)[labels].T
    angles = angles + JITTER * rng.standard_normal(number)
    angles = rng.choice([-1, 1], number) * angles
    x, y = np.meshgrid(*2 * [np.fft.fftfreq(SIDE)], indexing="ij")
    squares = [
        (x - _each(sign * frequencies * np.sin(angles))) ** 2
        + (y - _each(sign * frequencies * np.cos(angles))) ** 2
        for sign in (-1, 1)
    ]
    texture = _noise(np.exp(-np.minimum(*squares) / (2 * WIDTH**2)), rng)
    smooth = 1 / np.maximum(np.hypot(x, y), 1 / SIDE)
    background = _noise(np.broadcast_to(smooth, texture.shape), rng)
    colours = rng.standard_normal((2, number, 3, 1, 1))
    colours /= np.linalg.norm(colours, axis=2, keepdims=True)
    made = colours[0] * texture[:, None] + BACKGROUND * colours[1] * background[:, None]
    made -= made.mean(axis=(1, 2, 3), keepdims=True)
    return made / made.std(axis=(1, 2, 3), keepdims=True), labels


def _each(values: Float[ndarray, " n"]) -> Float[ndarray, "n 1 1"]:
    return values[:, None, None]


def _noise(
    spectra: Float[ndarray, "n 32 32"], rng: np.random.Generator
) -> Float[ndarray, "n 32 32"]:
    """Return noise with these amplitudes and a standard deviation of 1."""
    white = np.fft.fft2(rng.standard_normal(spectra.shape))
    noise = np.fft.ifft2(spectra * white).real
    return noise / noise.std(axis=(1, 2), keepdims=True)
