"""MNIST and CIFAR-10: verify and download their files, and scale their images."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Float32, UInt8
from numpy import ndarray

from .cifar10 import CIFAR10
from .files import DataError, Dataset, Finding
from .mnist import MNIST


DATASETS: dict[str, Dataset] = {"mnist": MNIST, "cifar10": CIFAR10}


def verify(name: str, data_dir: Path) -> list[Finding]:
    """Report whether each file in the folder is sound, and which parts are absent."""
    return _dataset(name).verify(data_dir)


def download(name: str, data_dir: Path, out: Callable[[str], object] = print) -> None:
    """Download absent files from their original host. Raise `DataError` if that fails, or
    if a file is not the right one."""
    _dataset(name).download(data_dir, out)


def run(name: str, data_dir: Path, out: Callable[[str], object] = print) -> int:
    """Verify the files that are there, and download the absent ones. Return the exit
    code: 0 if the data can then be loaded, and 2 if not."""
    try:
        findings = verify(name, data_dir)
        for finding in findings:
            if finding.condition != "absent":
                out(finding.sentence)
        download(name, data_dir, out)
    except DataError as error:
        out(str(error))
        return 2
    return 2 if any(finding.condition == "damaged" for finding in findings) else 0


def scaled(
    images: UInt8[ndarray, "n channels height width"],
) -> Float32[ndarray, "n channels height width"]:
    """Return images with pixels in [0, 1]."""
    return images.astype(np.float32) / np.float32(255)


def standardised(
    images: UInt8[ndarray, "n channels height width"],
    test_images: UInt8[ndarray, "m channels height width"],
) -> tuple[
    Float32[ndarray, "n channels height width"],
    Float32[ndarray, "m channels height width"],
]:
    """Scale the images so that each channel of the training images has mean 0 and
    standard deviation 1. The test images undergo the same transformation."""
    over = {"axis": (0, 2, 3), "keepdims": True, "dtype": np.float64}
    x = scaled(images)
    mean = np.mean(x, **over).astype(np.float32)
    x -= mean
    deviation = np.sqrt(np.mean(np.square(x), **over)).astype(np.float32)
    x /= deviation
    return x, (scaled(test_images) - mean) / deviation


def _dataset(name: str) -> Dataset:
    if name not in DATASETS:
        raise DataError(
            f"There is no data set '{name}' to look for; there are "
            f"{' and '.join(DATASETS)}."
        )
    return DATASETS[name]
