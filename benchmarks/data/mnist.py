"""MNIST (LeCun, Cortes and Burges), from its four IDX files, gzipped or not."""

import functools
import gzip
import math
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from numpy import ndarray

from .files import check_labels, Damage, Dataset, Examples


HOST = "https://storage.googleapis.com/cvdf-datasets/mnist/"
MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
_IMAGE = (28, 28)
_UNSIGNED_BYTES = 8  # IDX's code for the type


def dataset(
    num_train: int = 60_000,
    num_test: int = 10_000,
    md5: Mapping[str, str] = MD5,
    host: str = HOST,
) -> Dataset:
    """Describe the files of this many images. They must hold no others."""
    shapes = {
        "train-images-idx3-ubyte": (num_train, *_IMAGE),
        "train-labels-idx1-ubyte": (num_train,),
        "t10k-images-idx3-ubyte": (num_test, *_IMAGE),
        "t10k-labels-idx1-ubyte": (num_test,),
    }
    readers = {name: functools.partial(_read, shape=s) for name, s in shapes.items()}
    parts = [{f"{name}.gz": reader, name: reader} for name, reader in readers.items()]
    return Dataset("mnist", host, md5, parts)


def _examples(images: UInt8[ndarray, "n 28 28"], labels: UInt8[ndarray, " n"]):
    return images[:, None], labels.astype(np.int32)


def _read(path: Path, shape: tuple[int, ...]) -> UInt8[ndarray, "..."]:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            # Try to read one byte too many, to see whether the file is too long.
            contents = file.read(_header_size(shape) + math.prod(shape) + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise Damage("it is not a whole gzip file") from None
    values = _parse(contents, shape)
    if len(shape) == 1:
        check_labels(values, "it")
    return values


def _header_size(shape: tuple[int, ...]) -> int:
    return 4 + 4 * len(shape)


def _parse(contents: bytes, shape: tuple[int, ...]) -> UInt8[ndarray, "..."]:
    """Parse an IDX file: two zeros, the type, the number of dimensions, each dimension as
    a big-endian uint32, and then the values in C order."""
    if len(contents) < _header_size(shape):
        raise Damage("it ends within its header")
    magic = bytes([0, 0, _UNSIGNED_BYTES, len(shape)])
    if contents[:4] != magic:
        raise Damage(
            f"it begins with the bytes '{contents[:4].hex(' ')}', not with the "
            f"'{magic.hex(' ')}' of its kind of IDX file"
        )
    dimensions = struct.unpack_from(f">{len(shape)}I", contents, offset=4)
    if dimensions != shape:
        raise Damage(f"its dimensions are {_by(dimensions)}, not {_by(shape)}")
    values = np.frombuffer(contents, np.uint8, offset=_header_size(shape))
    size = math.prod(shape)
    if len(values) != size:
        found = "more" if len(values) > size else f"{len(values):,}"
        raise Damage(f"it holds {found} values, where there should be {size:,}")
    return values.reshape(shape)


def _by(dimensions: tuple[int, ...]) -> str:
    return " x ".join(map(str, dimensions))


MNIST = dataset()


def load(data_dir: Path, source: Dataset = MNIST) -> tuple[Examples, Examples]:
    """Load the training and test data: images of shape (1, 28, 28), from 0 to 255, and
    classes. Raise `DataError` if a file is absent or damaged."""
    images, labels, test_images, test_labels = source.load(data_dir)
    return _examples(images, labels), _examples(test_images, test_labels)
