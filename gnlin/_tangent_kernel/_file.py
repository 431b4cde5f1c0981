"""A matrix on disk that is filled a tile at a time, and gone on from after a kill."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np


Place = tuple[slice, ...]
Size = tuple[int, int]


class Tiles(Sequence):
    """Of a matrix of so many examples by so many, as slices of rows and of columns; of a
    symmetric one those on and above the diagonal. All are of one size: the last overlap
    with those before them."""

    def __init__(self, shape: Size, size: Size, symmetric: bool):
        rows, columns = map(_slices, shape, size)
        self._all = [
            (r, c)
            for i, r in enumerate(rows)
            for j, c in enumerate(columns)
            if i <= j or not symmetric
        ]

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number):
        return self._all[number]


def _slices(n: int, size: int) -> list[slice]:
    size = min(n, size)
    starts = [min(k, n - size) for k in range(0, n, size)]
    return [slice(start, start + size) for start in starts]


class KernelFile(NamedTuple):
    """A NumPy file, and beside it one that says of what it is, and how much is done.

    - `path`: of the array, `.npy`.
    - `shape`, `dtype`: of it.
    - `identity`: of what it is made of, by checksums.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    identity: Mapping[str, str]

    def begin(self, tile: Size) -> tuple[Size, int]:
        """(the size of a tile, how many are done): as they are in the file, or of a new
        one."""
        if self.path.exists():
            return self._found()
        new = _beside(self.path, ".new")
        try:
            array = np.lib.format.open_memmap(
                new, mode="w+", dtype=self.dtype, shape=self.shape
            )
            array.flush()
            _reserve(new)
            self._note(tile, 0)
            os.replace(new, self.path)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise self._unwritable(error) from error
        return tile, 0

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No other process writes the file in the meantime."""
        lock = _beside(self.path, ".lock")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("w")
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error
        with file:
            if not _locked(file):
                raise ValueError(
                    f"`file` is {str(self.path)!r}, which another process is writing: "
                    "wait for it, or give another name."
                )
            yield
            lock.unlink(missing_ok=True)

    def _unwritable(self, error: Exception) -> ValueError:
        return ValueError(f"The kernel cannot be written to {str(self.path)!r}: {error}.")

    def _found(self) -> tuple[Size, int]:
        if not self._record.exists():
            raise ValueError(
                f"`file` is {str(self.path)!r}, which is there already and is no kernel "
                "that was made here: give another name."
            )
        try:
            found = json.loads(self._record.read_text())
            record = found["identity"], tuple(found["tile"]), found["num_done"]
            array = np.load(self.path, mmap_mode="r")
        except (EOFError, KeyError, OSError, TypeError, ValueError) as error:
            raise self._damaged() from error
        identity, tile, num_done = record
        for what, ours in self.identity.items():
            if identity.get(what) != ours:
                raise ValueError(
                    f"`file` is {str(self.path)!r}, which has a kernel of other {what}: "
                    f"give another name, or delete it and {self._record.name!r}."
                )
        if (array.shape, array.dtype) != (self.shape, self.dtype):
            raise self._damaged()
        return tile, num_done

    def _damaged(self) -> ValueError:
        return ValueError(
            f"`file` is {str(self.path)!r}, which is damaged, or {self._record.name!r} "
            "is: delete both."
        )

    def put(self, parts: Iterable[tuple[Place, np.ndarray]], tile: Size, num_done: int):
        """Parts of the array, after which so many tiles are done."""
        array = np.load(self.path, mmap_mode="r+")
        for place, part in parts:
            array[place] = part
        array.flush()
        self._note(tile, num_done)

    def read(self) -> np.ndarray:
        """The array, on disk still."""
        return np.load(self.path, mmap_mode="r")

    @property
    def _record(self) -> Path:
        return _beside(self.path, ".json")

    def _note(self, tile: Size, num_done: int) -> None:
        record = {"tile": tile, "num_done": num_done, "identity": dict(self.identity)}
        new = _beside(self._record, ".new")
        new.write_text(json.dumps(record, indent=1))
        os.replace(new, self._record)


def _reserve(path: Path) -> None:
    """All of its room on the disk: without it, a memory map that meets a full disk ends
    the process."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _locked(file: IO) -> bool:
    """Released when it is closed, or its process killed."""
    try:
        import fcntl
    except ImportError:  # as on Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
