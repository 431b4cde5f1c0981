"""A matrix on disk that is filled tile by tile, and can be resumed after a kill."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .._common._lock import locked


Place = tuple[slice, ...]
Size = tuple[int, int]


def tiles(shape: Size, size: Size, symmetric: bool) -> list[tuple[slice, slice]]:
    """Return the tiles of a matrix, as slices of rows and of columns; for a symmetric
    matrix those on and above the diagonal. All have the same size, so the last tile of a
    row or column overlaps with the one before it.

    - `shape`, `size`: of the matrix and of a tile, in examples.
    """
    rows, columns = map(_slices, shape, size)
    return [
        (r, c)
        for i, r in enumerate(rows)
        for j, c in enumerate(columns)
        if i <= j or not symmetric
    ]


def _slices(n: int, size: int) -> list[slice]:
    size = min(n, size)
    starts = [min(k, n - size) for k in range(0, n, size)]
    return [slice(start, start + size) for start in starts]


class KernelFile(NamedTuple):
    """A NumPy file, and a JSON file beside it with its origin and its progress.

    - `path`: the path of the array, with the suffix `.npy`. Until it is finished, the
        suffix `.part` is added.
    - `shape`, `dtype`: the shape and type of the array.
    - `identity`: checksums of everything that determines the array.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    identity: Mapping[str, str]

    def begin(self, tile: Size) -> tuple[Size, int]:
        """Return the size of a tile and the number that are done. For an existing file
        both are read from it; else a new file is created."""
        for path in (self.path, self._part):
            if path.exists():
                return self._found(path)
        new = _beside(self.path, ".new")
        try:
            array = np.lib.format.open_memmap(
                new, mode="w+", dtype=self.dtype, shape=self.shape
            )
            array.flush()
            _reserve(new)
            self._note(tile, 0)
            os.replace(new, self._part)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise self._unwritable(error) from error
        return tile, 0

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from writing the file in the meantime."""
        with contextlib.ExitStack() as stack:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                is_alone = stack.enter_context(locked(_beside(self.path, ".lock")))
            except (OSError, ValueError) as error:
                raise self._unwritable(error) from error
            if not is_alone:
                raise ValueError(
                    f"`file` is {str(self.path)!r}, which another process is writing: "
                    "wait for it, or pass another name."
                )
            yield

    def _unwritable(self, error: Exception) -> ValueError:
        return ValueError(f"The kernel cannot be written to {str(self.path)!r}: {error}.")

    def _found(self, path: Path) -> tuple[Size, int]:
        if not self._record.exists():
            raise ValueError(
                f"`file` is {str(self.path)!r}, which exists and is not a kernel written "
                "by gnlin: pass another name."
            )
        try:
            found = json.loads(self._record.read_text())
            record = found["identity"], tuple(found["tile"]), found["num_done"]
            array = np.load(path, mmap_mode="r")
        except (EOFError, KeyError, OSError, TypeError, ValueError) as error:
            raise self._damaged(path) from error
        identity, tile, num_done = record
        for what, ours in self.identity.items():
            if identity.get(what) != ours:
                raise ValueError(
                    f"`file` is {str(self.path)!r}, which has a kernel of other {what}: "
                    f"pass another name, or delete it and {self._record.name!r}."
                )
        if (array.shape, array.dtype) != (self.shape, self.dtype):
            raise self._damaged(path)
        return tile, num_done

    def _damaged(self, path: Path) -> ValueError:
        return ValueError(
            f"`file` is {str(self.path)!r}, but {path.name!r} or "
            f"{self._record.name!r} is damaged: delete both."
        )

    def put(self, parts: Iterable[tuple[Place, np.ndarray]], tile: Size, num_done: int):
        """Write parts of the array, and record that `num_done` tiles are done."""
        array = np.load(self._part, mmap_mode="r+")
        for place, part in parts:
            array[place] = part
        array.flush()
        self._note(tile, num_done)

    def finished(self) -> np.ndarray:
        """Give the array its name, and return it memory-mapped."""
        if self._part.exists():
            os.replace(self._part, self.path)
        return np.load(self.path, mmap_mode="r")

    @property
    def _part(self) -> Path:
        return _beside(self.path, ".part")

    @property
    def _record(self) -> Path:
        return _beside(self.path, ".json")

    def _note(self, tile: Size, num_done: int) -> None:
        record = {"tile": tile, "num_done": num_done, "identity": dict(self.identity)}
        new = _beside(self._record, ".new")
        new.write_text(json.dumps(record, indent=1))
        os.replace(new, self._record)


def _reserve(path: Path) -> None:
    """Reserve the file's space: writing to a memory map on a full disk would kill the
    process."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
