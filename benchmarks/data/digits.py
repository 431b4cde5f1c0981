"""The 1,797 handwritten digits, 8 x 8, that come with scikit-learn, in a fixed split."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from sklearn.datasets import load_digits


NUM_CLASSES = 10
NUM_TEST = 450  # a quarter, scikit-learn's own default: 1,347 images train
NUM_VALIDATION = 150
"""The number of validation images in a random split, where 1,197 images train."""
_DARKEST = 16.0


class Split(NamedTuple):
    train: Int[ndarray, " n"]
    test: Int[ndarray, " m"]


def split(labels: Int[ndarray, " all"], per_class: int) -> Split:
    """Select equally many training images of each class, evenly spaced through the file
    and so through its writers. All others test. No random numbers are used, so that the
    split is the same everywhere."""
    train = []
    for label in range(NUM_CLASSES):
        (images,) = np.nonzero(labels == label)
        train.append(images[np.arange(per_class) * len(images) // per_class])
    train = np.sort(np.concatenate(train))
    return Split(train, np.setdiff1d(np.arange(len(labels)), train))


def stratified_split(labels: Int[ndarray, " all"], num_test: int) -> Split:
    """Select an equal share of each class for testing, to within an image, evenly spaced
    through the file. All others train."""
    by_class = np.argsort(labels, kind="stable")
    test = np.sort(by_class[np.arange(num_test) * len(labels) // num_test])
    return Split(np.setdiff1d(np.arange(len(labels)), test), test)


class Drawn(NamedTuple):
    train: Int[ndarray, " n"]
    validation: Int[ndarray, " v"]
    test: Int[ndarray, " m"]


def drawn(labels: Int[ndarray, " all"], num_train: int | None, seed: int) -> Drawn:
    """Draw a random split with the classes evenly in each part: `NUM_TEST` images test,
    `NUM_VALIDATION` validate, and the first `num_train` of the rest train, so that a
    smaller training set is part of any larger one."""
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(labels))
    place = np.empty(len(labels))
    for label in np.unique(labels):
        of_class = shuffled[labels[shuffled] == label]
        # Spread the class evenly over all places, so that each part gets its share.
        place[of_class] = (np.arange(len(of_class)) + rng.random()) / len(of_class)
    test, validation, train = np.split(
        np.argsort(place), [NUM_TEST, NUM_TEST + NUM_VALIDATION]
    )
    return Drawn(train[:num_train], validation, test)


def _all_digits(
    flat: bool = True,
) -> tuple[Float[ndarray, "1797 ..."], Int[ndarray, " 1797"]]:
    pixels, labels = load_digits(return_X_y=True)
    image = (64,) if flat else (1, 8, 8)
    return np.reshape(np.asarray(pixels) / _DARKEST, (-1, *image)), np.asarray(labels)


def examples(
    per_class: int,
) -> tuple[
    tuple[Float[ndarray, "n 64"], Float[ndarray, "n 10"]],
    tuple[Float[ndarray, "m 64"], Float[ndarray, "m 10"]],
]:
    """Return training and test data, with pixels in [0, 1] and one-hot labels."""
    pixels, labels = _all_digits()
    one_hot = np.eye(NUM_CLASSES)[labels]
    train, test = split(labels, per_class)
    return (pixels[train], one_hot[train]), (pixels[test], one_hot[test])


def labelled(
    per_class: int, flat: bool = True
) -> tuple[
    tuple[Float[ndarray, "n ..."], Int[ndarray, " n"]],
    tuple[Float[ndarray, "m ..."], Int[ndarray, " m"]],
]:
    """Return the data of `examples` with classes for labels, and with images of shape (1,
    8, 8) if not `flat`."""
    image = (64,) if flat else (1, 8, 8)
    (x, y), (test_x, test_y) = examples(per_class)
    return (
        (x.reshape(-1, *image), y.argmax(axis=1)),
        (test_x.reshape(-1, *image), test_y.argmax(axis=1)),
    )


def classification(
    flat: bool = True,
) -> tuple[
    tuple[Float[ndarray, "1347 ..."], Int[ndarray, " 1347"]],
    tuple[Float[ndarray, "450 ..."], Int[ndarray, " 450"]],
]:
    """Return training and test data. Pixels are in [0, 1], of shape (64,) if `flat` and
    otherwise (1, 8, 8). Labels are classes."""
    pixels, labels = _all_digits(flat)
    train, test = stratified_split(labels, NUM_TEST)
    return (pixels[train], labels[train]), (pixels[test], labels[test])


def draw(
    num_train: int | None, seed: int, flat: bool = True
) -> tuple[
    tuple[Float[ndarray, "n ..."], Int[ndarray, " n"]],
    tuple[Float[ndarray, "150 ..."], Int[ndarray, " 150"]],
    tuple[Float[ndarray, "450 ..."], Int[ndarray, " 450"]],
]:
    """Return training, validation and test data of a random split. Pixels are in [0, 1],
    of shape (64,) if `flat` and otherwise (1, 8, 8). Labels are classes."""
    pixels, labels = _all_digits(flat)
    train, validation, test = (
        (pixels[part], labels[part]) for part in drawn(labels, num_train, seed)
    )
    return train, validation, test
