"""CIFAR-10 (Krizhevsky, 2009), from its binary or Python version, archived or not."""

import functools
import io
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from numpy import ndarray

from . import pickled
from .files import check_labels, check_md5, Damage, Dataset, Examples


HOST = "https://www.cs.toronto.edu/~kriz/"
MD5 = {
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
_IMAGE = (3, 32, 32)
_NUM_PIXELS = 3 * 32 * 32
_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_TEST = "test_batch"

_Batch = tuple[UInt8[ndarray, "n 3072"], UInt8[ndarray, " n"]]
"""Pixels and labels."""


class _Version(NamedTuple):
    folder: str
    suffix: str
    """The suffix of the files in the folder."""
    largest: int
    """The largest number of bytes that a file may have for each image."""
    parse: Callable[[bytes, str, int], _Batch]
    """Returns the batch, from a file's contents, its name and the number of images."""


def dataset(
    num_per_file: int = 10_000, md5: Mapping[str, str] = MD5, host: str = HOST
) -> Dataset:
    """Describe five files to train on and one to test on, with `num_per_file` images
    each."""
    reader = lambda read, version: functools.partial(
        _examples, read=read, version=version, num_per_file=num_per_file, md5=md5
    )
    # The binary version comes first: it is smaller, and it is no pickle.
    forms = {
        "cifar-10-binary.tar.gz": reader(_from_archive, _BINARY),
        "cifar-10-python.tar.gz": reader(_from_archive, _PYTHON),
        _BINARY.folder: reader(_from_folder, _BINARY),
        _PYTHON.folder: reader(_from_folder, _PYTHON),
    }
    return Dataset("cifar10", host, md5, [forms])


def _examples(
    path: Path,
    read: Callable,
    version: _Version,
    num_per_file: int,
    md5: Mapping[str, str],
) -> tuple[Examples, Examples]:
    names = [f"{name}{version.suffix}" for name in (*_BATCHES, _TEST)]
    contents = read(path, version.folder, names, version.largest * num_per_file)
    for name in names:
        if name not in contents:
            raise Damage(f"there is no '{name}' in it")
        if name in md5:  # check this before anything else reads the contents
            check_md5(io.BytesIO(contents[name]), md5[name], f"the MD5 of '{name}' in it")
    # The contents of each file are dropped once they have been parsed.
    *train, test = (
        version.parse(contents.pop(name), f"'{name}' in it", num_per_file)
        for name in names
    )
    return _joined(train), _joined([test])


def _joined(batches: Sequence[_Batch]) -> Examples:
    pixels, labels = map(np.concatenate, zip(*batches, strict=True))
    return pixels.reshape(-1, *_IMAGE), labels.astype(np.int32)


def _from_folder(
    path: Path, folder: str, names: Sequence[str], largest: int
) -> dict[str, bytes]:
    contents = {}
    for name in names:
        if (path / name).exists():
            _check_size(name, (path / name).stat().st_size, largest)
            contents[name] = (path / name).read_bytes()
    return contents


def _from_archive(
    path: Path, folder: str, names: Sequence[str], largest: int
) -> dict[str, bytes]:
    """Read the files from the archive. Nothing is written to disk, and no link is
    followed."""
    wanted = {f"{folder}/{name}": name for name in names}
    contents = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = wanted.get(member.name)
                file = archive.extractfile(member) if name and member.isreg() else None
                if name and file:
                    _check_size(name, member.size, largest)
                    contents[name] = file.read()
    except (EOFError, tarfile.TarError, zlib.error):
        raise Damage("it is not a whole archive") from None
    return contents


def _check_size(name: str, size: int, largest: int) -> None:
    if size > largest:
        raise Damage(f"'{name}' in it has {size:,} bytes, more than the {largest:,} due")


def _parse_binary(contents: bytes, name: str, num_images: int) -> _Batch:
    """Parse a byte for the label and 3,072 bytes for the pixels, image after image."""
    size = num_images * (1 + _NUM_PIXELS)
    if len(contents) != size:
        raise Damage(f"{name} has {len(contents):,} bytes, not {size:,}")
    records = np.frombuffer(contents, np.uint8).reshape(num_images, -1)
    labels, pixels = records[:, 0], records[:, 1:]
    check_labels(labels, name)
    return pixels, labels


def _parse_python(contents: bytes, name: str, num_images: int) -> _Batch:
    """Parse a pickle of {b"data": pixels, b"labels": labels}, and other items that are
    not used."""
    try:
        batch = pickled.load(contents)
    except Damage as damage:
        raise Damage(f"{name} {damage}") from None
    if not isinstance(batch, dict):
        raise Damage(f"{name} is not the pickle of a dictionary")
    pixels, labels = batch.get("data"), batch.get("labels")
    pixels = pixels.values if isinstance(pixels, pickled.PickledArray) else None
    if pixels is None or not isinstance(labels, list):
        raise Damage(f"{name} does not hold an array 'data' and a list 'labels'")
    if pixels.shape != (num_images, _NUM_PIXELS):
        by = " x ".join(map(str, pixels.shape))
        raise Damage(f"{name} has 'data' of {by}, not {num_images} x {_NUM_PIXELS}")
    if len(labels) != num_images:
        raise Damage(f"{name} has {len(labels):,} labels, not {num_images:,}")
    if not all(type(label) is int and 0 <= label < 256 for label in labels):
        raise Damage(f"{name} has labels that are not whole numbers from 0 to 9")
    labels = np.array(labels, np.uint8)
    check_labels(labels, name)
    return pixels, labels


_BINARY = _Version("cifar-10-batches-bin", ".bin", 1 + _NUM_PIXELS, _parse_binary)
# A pickle written by Python 3 may take two bytes for a pixel, as text, and holds a name
# and a label for each image.
_PYTHON = _Version("cifar-10-batches-py", "", 2 * _NUM_PIXELS + 1_024, _parse_python)

CIFAR10 = dataset()


def load(data_dir: Path, source: Dataset = CIFAR10) -> tuple[Examples, Examples]:
    """Load the training and test data: images of shape (3, 32, 32), from 0 to 255, and
    classes. Raise `DataError` if the files are absent or damaged."""
    ((train, test),) = source.load(data_dir)
    return train, test
