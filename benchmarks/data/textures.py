"""Ten classes of textures, as colour images of 32 x 32 that any machine can make.

A class is an orientation and a frequency. An image is noise about that frequency, with
other phases and colours each time, on a background of smooth noise. So no pixel tells the
class, and neither does a colour: the orientations have to be found. An orientation is
that of its mirror image, too, so that flips leave the class what it is.
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
"""Orientation, and cycles for each pixel."""
JITTER, WIDTH = np.radians(8), 0.03
"""The spread of an image's orientation, and of its frequencies."""
BACKGROUND = 1.5
"""Standard deviation of the background, in units of the texture's."""


@functools.lru_cache(maxsize=2)
def draw(num_train: int | None, seed: int) -> tuple[Labelled, Labelled, Labelled]:
    """Training, validation and test data."""
    number = NUM_TRAIN if num_train is None else num_train
    # Fewer training images are the first of more.
    rng = np.random.default_rng(seed)
    test, validation = images(NUM_TEST, rng), images(NUM_VALIDATION, rng)
    return images(number, rng), validation, test


def images(number: int, rng: np.random.Generator) -> Labelled:
    """Images of equally many of each class, in turn, with a mean of zero and a standard
    deviation of 1."""
    labels = np.arange(number) % NUM_CLASSES
    made = np.stack([_image(label, rng) for label in labels]) if number else _none()
    return made, labels


def _image(label: int, rng: np.random.Generator) -> Float[ndarray, "3 32 32"]:
    angle, frequency = CLASSES[label]
    angle = rng.choice([-1, 1]) * (angle + JITTER * rng.standard_normal())
    x, y = _frequencies()
    away = [
        (x - sign * frequency * np.cos(angle)) ** 2
        + (y - sign * frequency * np.sin(angle)) ** 2
        for sign in (-1, 1)
    ]
    texture = _noise(np.exp(-np.minimum(*away) / (2 * WIDTH**2)), rng)
    smooth = _noise(1 / np.maximum(np.hypot(x, y), 1 / SIDE), rng)
    colours = rng.standard_normal((2, 3, 1, 1))
    colours /= np.linalg.norm(colours, axis=1, keepdims=True)
    image = colours[0] * texture + BACKGROUND * colours[1] * smooth
    return (image - image.mean()) / image.std()


def _noise(
    spectrum: Float[ndarray, "32 32"], rng: np.random.Generator
) -> Float[ndarray, "32 32"]:
    """Noise with such amplitudes, and a standard deviation of 1."""
    white = np.fft.fft2(rng.standard_normal((SIDE, SIDE)))
    noise = np.fft.ifft2(spectrum * white).real
    return noise / noise.std()


@functools.cache
def _frequencies() -> tuple[Float[ndarray, "32 32"], Float[ndarray, "32 32"]]:
    x, y = np.meshgrid(*2 * [np.fft.fftfreq(SIDE)], indexing="ij")
    return x, y


def _none() -> Float[ndarray, "0 3 32 32"]:
    return np.zeros((0, 3, SIDE, SIDE))
