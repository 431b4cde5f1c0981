"""The 1,797 handwritten digits, 8 x 8, that scikit-learn ships, in a fixed split."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from sklearn.datasets import load_digits


NUM_CLASSES = 10
NUM_TEST = 450  # a quarter, scikit-learn's own default: 1,347 images train
NUM_VALIDATION = 150
"""Of a split that is drawn, where 1,197 train."""
_DARKEST = 16.0


class Split(NamedTuple):
    train: Int[ndarray, " n"]
    test: Int[ndarray, " m"]


def split(labels: Int[ndarray, " all"], per_class: int) -> Split:
    """As many training images of each class, evenly spaced through the file, and so
    through its writers; all others test. No random number, and so the same everywhere."""
    train = []
    for label in range(NUM_CLASSES):
        (images,) = np.nonzero(labels == label)
        train.append(images[np.arange(per_class) * len(images) // per_class])
    train = np.sort(np.concatenate(train))
    return Split(train, np.setdiff1d(np.arange(len(labels)), train))


def stratified_split(labels: Int[ndarray, " all"], num_test: int) -> Split:
    """As large a share of each class tests, to within an image, evenly spaced through the
    file like the training images of `split`; all others train."""
    by_class = np.argsort(labels, kind="stable")
    test = np.sort(by_class[np.arange(num_test) * len(labels) // num_test])
    return Split(np.setdiff1d(np.arange(len(labels)), test), test)


class Drawn(NamedTuple):
    train: Int[ndarray, " n"]
    validation: Int[ndarray, " v"]
    test: Int[ndarray, " m"]


def drawn(labels: Int[ndarray, " all"], num_train: int | None, seed: int) -> Drawn:
    """At random, the classes evenly in each part: so many test, so many validate, and of
    the rest the first `num_train` train, which are among those of any larger number."""
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(labels))
    place = np.empty(len(labels))
    for label in np.unique(labels):
        of_class = shuffled[labels[shuffled] == label]
        # Evenly through the whole, so that each part has its share.
        place[of_class] = (np.arange(len(of_class)) + rng.random()) / len(of_class)
    test, validation, train = np.split(
        np.argsort(place), [NUM_TEST, NUM_TEST + NUM_VALIDATION]
    )
    return Drawn(train[:num_train], validation, test)


def examples(
    per_class: int,
) -> tuple[
    tuple[Float[ndarray, "n 64"], Float[ndarray, "n 10"]],
    tuple[Float[ndarray, "m 64"], Float[ndarray, "m 10"]],
]:
    """Training and test data: pixels in [0, 1], labels one-hot."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = np.asarray(pixels) / _DARKEST
    one_hot = np.eye(NUM_CLASSES)[labels]
    train, test = split(np.asarray(labels), per_class)
    return (pixels[train], one_hot[train]), (pixels[test], one_hot[test])


def labelled(
    per_class: int, flat: bool = True
) -> tuple[
    tuple[Float[ndarray, "n ..."], Int[ndarray, " n"]],
    tuple[Float[ndarray, "m ..."], Int[ndarray, " m"]],
]:
    """As `examples`, but with classes for labels, and images of shape (1, 8, 8) if not
    `flat`."""
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
    """Training and test data: pixels in [0, 1], of shape (64,) if `flat` and (1, 8, 8) if
    not; labels are classes."""
    pixels, labels = load_digits(return_X_y=True)
    image = (64,) if flat else (1, 8, 8)
    pixels = np.reshape(np.asarray(pixels) / _DARKEST, (-1, *image))
    labels = np.asarray(labels)
    train, test = stratified_split(labels, NUM_TEST)
    return (pixels[train], labels[train]), (pixels[test], labels[test])


def draw(
    num_train: int | None, seed: int, flat: bool = True
) -> tuple[
    tuple[Float[ndarray, "n ..."], Int[ndarray, " n"]],
    tuple[Float[ndarray, "150 ..."], Int[ndarray, " 150"]],
    tuple[Float[ndarray, "450 ..."], Int[ndarray, " 450"]],
]:
    """Training, validation and test data of a split that is drawn: pixels in [0, 1], of
    shape (64,) if `flat` and (1, 8, 8) if not; labels are classes."""
    pixels, labels = load_digits(return_X_y=True)
    image = (64,) if flat else (1, 8, 8)
    pixels = np.reshape(np.asarray(pixels) / _DARKEST, (-1, *image))
    labels = np.asarray(labels)
    train, validation, test = (
        (pixels[part], labels[part]) for part in drawn(labels, num_train, seed)
    )
    return train, validation, test
