r"""The checkpoint files of `gnlin.fit`, which hold arrays and a dictionary `meta` of JSON
values, but no model. A file consists of

    gnlin checkpoint 2\n
    <length of the payload, 20 digits> <SHA-256 of the payload, 64 digits>\n
    <length of the header, 8 bytes><header, JSON><the arrays, one after the other>

The third line is the payload. Its header holds `meta` and the dtype and shape of each
array. Numbers are little-endian, arrays in C order.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .._common._checks import check_count, check_finite_positive, check_scalar


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be written or cannot be used."""


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often a run is saved.

    A checkpoint is also written before the first step and after the last. If neither
    `every_steps` nor `every_seconds` is given, one is written every 600 seconds; if both
    are, whenever either is due. A run that is killed while it writes a checkpoint leaves
    the earlier ones intact.

    **Arguments:**

    - `folder`: the folder of the checkpoints. It holds those of one run only, and is
        created if it does not exist.
    - `every_steps`: the number of steps between checkpoints.
    - `every_seconds`: the number of seconds between checkpoints.
    - `keep`: the number of latest checkpoints to keep.

    **Raises:** `ValueError` if `folder` is not a path or is empty, if `every_steps` or
    `keep` is not a whole number of at least 1, or if `every_seconds` is not positive and
    finite.

    !!! example

        ```python
        gnlin.Checkpoint("runs/digits", every_steps=1000)
        ```
    """

    folder: str | os.PathLike
    every_steps: int | None = None
    every_seconds: float | None = None
    keep: int = 2

    def __post_init__(self):
        folder = self.folder
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise ValueError(
                f"`folder` must be the path of a folder, but {folder!r} was given."
            )
        every_steps, every_seconds = self.every_steps, self.every_seconds
        if every_steps is not None:
            check_count("every_steps", every_steps)
            every_steps = int(every_steps)
        if every_seconds is not None:
            check_scalar("every_seconds", every_seconds)
            check_finite_positive("every_seconds", every_seconds)
            every_seconds = float(every_seconds)
        if every_steps is None and every_seconds is None:
            every_seconds = 600.0
        object.__setattr__(self, "every_steps", every_steps)
        object.__setattr__(self, "every_seconds", every_seconds)
        check_count("keep", self.keep)
        object.__setattr__(self, "keep", int(self.keep))


_VERSION = 2
_MAGIC = f"gnlin checkpoint {_VERSION}\n".encode()
_ANY_MAGIC = re.compile(rb"gnlin checkpoint ([1-9][0-9]*)\n")
_SEAL = re.compile(rb"([0-9]{20}) ([0-9a-f]{64})\n")
_SEAL_SIZE = 20 + 1 + 64 + 1
_HEADER_LENGTH_SIZE = 8

_NAME = re.compile(r"step-([0-9]{12}|[1-9][0-9]{12,})\.gnlin")
_TEMPORARY_NAME = re.compile(_NAME.pattern + r"\.[0-9a-f]{32}\.tmp")

_CHUNK = 2**20


def save(
    folder: Path, step: int, arrays: Sequence[np.ndarray], meta: dict, keep: int
) -> Path:
    """Write a checkpoint atomically, then delete all but the latest `keep` up to this
    step. Checkpoints of later steps are not touched."""
    path = _path(folder, step)
    header = _header(arrays, meta)
    _remove(_leftovers(folder))
    temporary = _temporary(path)
    try:
        _write(temporary, header, arrays)
        os.replace(temporary, path)
        _synchronise(folder)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {_reason(error)}; earlier "
            "checkpoints are unchanged."
        ) from error
    finally:
        _remove([temporary])
    with suppress(OSError):
        older = [other for s, other in _checkpoints(folder).items() if s < step]
        _remove(older[: max(len(older) + 1 - keep, 0)])
    return path


def load(path: Path) -> tuple[list[np.ndarray], dict]:
    """Return the arrays and `meta` of a checkpoint; raise if it is damaged."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # such as a pipe
            raise _Fault("is not a gnlin checkpoint: it is not a file")
        with path.open("rb") as file:
            return _decode(file, _verify(file))
    except _Fault as error:
        cause, fault = None, str(error)
    except OSError as error:
        cause, fault = error, f"cannot be read: {_reason(error)}"
    raise refusal(path, fault) from cause


def refusal(path: Path, fault: str) -> CheckpointError:
    """Return the error for a file. `fault` is a predicate whose subject is the file."""
    return CheckpointError(f"{path} {fault}{_way_out(path)}.")


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    name = _NAME.fullmatch(path.name)
    assert name is not None
    return int(name[1])


def storable(dtype: np.dtype) -> bool:
    """Whether arrays of this dtype can be restored from its name and their bytes."""
    numbers = dtype.kind in "biufc" or hasattr(ml_dtypes, dtype.name)
    return numbers and not dtype.hasobject


def latest(folder: Path) -> Path | None:
    """Return the checkpoint of the largest step, even a damaged one, or `None`."""
    try:
        checkpoints = _checkpoints(folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            f"The folder of checkpoints {folder} cannot be read: {_reason(error)}."
        ) from error
    return checkpoints[max(checkpoints)] if checkpoints else None


def check_writable(folder: Path, num_bytes: int, keep: int) -> None:
    """Create the folder, and check that `keep` + 1 checkpoints of `num_bytes` fit."""
    probe = _temporary(_path(folder, 0))
    try:
        if folder.is_file():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a folder")
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(_MAGIC)
        probe.unlink()
        own = [*_checkpoints(folder).values(), *_leftovers(folder)]
        held = sum(path.stat().st_size for path in own)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise CheckpointError(
            f"No checkpoint can be written to {folder}: {_reason(error)}; pass another "
            "folder."
        ) from error
    finally:
        _remove([probe])
    # A resumed run replaces its own checkpoints, so the space that they hold counts as
    # free. The next checkpoint still needs space before the oldest is deleted.
    needed = max((keep + 1) * num_bytes - held, num_bytes)
    if free < needed:
        raise CheckpointError(
            f"The checkpoints in {folder} need {needed} more bytes, but only {free} are "
            "free; free some space, pass another folder, or keep fewer checkpoints."
        )


class _Fault(Exception):
    """A fault of a file, as a predicate whose subject is the file's path."""


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:012d}.gnlin"


def _temporary(path: Path) -> Path:
    # The name is unique, so that no other run in this folder can move a half-written file
    # into place.
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints by step, in ascending order."""
    named = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(name[1]), path) for name, path in named if name))


def _leftovers(folder: Path) -> list[Path]:
    """Return the temporary files of runs that were killed while they wrote."""
    try:
        return [p for p in folder.iterdir() if _TEMPORARY_NAME.fullmatch(p.name)]
    except OSError:
        return []


def _remove(paths: Iterable[Path]) -> None:
    """Delete the files, and ignore errors."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def _way_out(path: Path) -> str:
    try:
        checkpoints = _checkpoints(path.parent)
    except OSError:
        return ""
    step = next((step for step, other in checkpoints.items() if other == path), 0)
    earlier = [other for s, other in checkpoints.items() if s < step]
    if earlier:
        return f"; delete it to go on from {earlier[-1].name}"
    known = path in checkpoints.values()
    return "; delete it to start over, or pass another folder" if known else ""


def _header(arrays: Sequence[np.ndarray], meta: dict) -> bytes:
    kinds = [(_dtype(array.dtype.name).name, array.shape) for array in arrays]
    header = json.dumps({"meta": meta, "arrays": kinds}).encode()
    return len(header).to_bytes(_HEADER_LENGTH_SIZE, "little") + header


def _write(path: Path, header: bytes, arrays: Sequence[np.ndarray]) -> None:
    length, digest = 0, hashlib.sha256()
    with path.open("xb") as file:
        file.write(_MAGIC + bytes(_SEAL_SIZE))
        for part in _payload(header, arrays):
            digest.update(part)
            file.write(part)
            length += len(part)
        file.seek(len(_MAGIC))
        file.write(f"{length:020d} {digest.hexdigest()}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def _payload(header: bytes, arrays: Sequence[np.ndarray]) -> Iterator[bytes | memoryview]:
    yield header
    for array in arrays:
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        yield _bytes(np.ascontiguousarray(little))


def _synchronise(folder: Path) -> None:
    """Flush the folder's entries to disk, if the system can: on Windows a folder cannot
    be opened, and some file systems refuse."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES):
            raise
    finally:
        os.close(descriptor)


def _verify(file: BufferedReader) -> int:
    """Check a file's integrity. Return the length of the payload, and leave the file
    positioned at its beginning."""
    head = file.read(len(_MAGIC) + _SEAL_SIZE)
    if not head:
        raise _Fault("is not a gnlin checkpoint: it is empty")
    found = _ANY_MAGIC.match(head)
    version = int(found[1]) if found else _VERSION
    if version != _VERSION:
        newer = version > _VERSION
        raise _Fault(
            f"is a checkpoint of format {version}, written by "
            f"{'a newer' if newer else 'an older'} gnlin, and this one reads format "
            f"{_VERSION} only" + " (update gnlin)" * newer
        )
    if head[: len(_MAGIC)] != _MAGIC[: len(head)]:
        raise _Fault("is not a gnlin checkpoint: it does not begin like one")
    if len(head) < len(_MAGIC) + _SEAL_SIZE:
        raise _Fault(f"is truncated: all but its first {len(head)} bytes are missing")
    seal = _SEAL.fullmatch(head, len(_MAGIC))
    if seal is None:
        raise _Fault("is damaged: its second line does not hold a length and a checksum")
    length = int(seal[1])
    surplus = os.fstat(file.fileno()).st_size - len(head) - length
    if surplus < 0:
        raise _Fault(f"is truncated: {-surplus} of its bytes are missing")
    if surplus > 0:
        raise _Fault(f"is damaged: {surplus} bytes follow its end")
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    if digest.hexdigest().encode() != seal[2]:
        raise _Fault("is damaged: its checksum does not match its contents")
    file.seek(len(head))
    return length


def _decode(file: BufferedReader, length: int) -> tuple[list[np.ndarray], dict]:
    # The checksum is right, so a failure means that the file was not written by `save`,
    # or that it has a dtype of a newer ml_dtypes.
    try:
        header_length = int.from_bytes(file.read(_HEADER_LENGTH_SIZE), "little")
        rest = length - _HEADER_LENGTH_SIZE - header_length
        if rest < 0:
            raise ValueError("its header is longer than the file")
        header = json.loads(file.read(header_length))
        meta = header["meta"]
        kinds = [(_dtype(name), _shape(shape)) for name, shape in header["arrays"]]
        if rest != sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds):
            raise ValueError("its arrays do not fill it")
        return [_read(file, dtype, shape) for dtype, shape in kinds], meta
    except RecursionError as error:
        raise _Fault("cannot be decoded by this gnlin: it is nested too deep") from error
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise _Fault(f"cannot be decoded by this gnlin: {_one_line(error)}") from error


def _read(file: BufferedReader, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(shape, dtype.newbyteorder("<"))
    if file.readinto(_bytes(array)) < array.nbytes:
        raise ValueError("it became shorter while it was read")
    if dtype.kind == "b" and np.any(array.view(np.uint8) > 1):
        raise ValueError("an array of truth values holds other values")
    return array.astype(dtype, copy=False)


def _bytes(array: np.ndarray) -> memoryview:
    """Return a contiguous array's memory as bytes: NumPy exports no buffers of the types
    of ml_dtypes."""
    return array.reshape(-1).view(np.uint8).data


def _dtype(name: Any) -> np.dtype:
    """Return the dtype of a name; raise if it is not storable."""
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        dtype = None
    if dtype is None or not storable(dtype) or dtype.name != name:
        raise ValueError(f"an array of dtype {name} cannot be kept in a checkpoint")
    return dtype


def _shape(sizes: Any) -> tuple[int, ...]:
    natural = lambda size: type(size) is int and 0 <= size < 2**63
    if not isinstance(sizes, list) or not all(map(natural, sizes)):
        raise ValueError("the header of an array holds no shape")
    return tuple(sizes)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
