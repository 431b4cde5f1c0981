"""A matrix on disk that is filled a tile at a time, and gone on from after a kill."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = _beside(self.path, ".new")
        array = np.lib.format.open_memmap(
            new, mode="w+", dtype=self.dtype, shape=self.shape
        )
        array.flush()
        self._note(tile, 0)
        os.replace(new, self.path)
        return tile, 0

    def _found(self) -> tuple[Size, int]:
        if not self._record.exists():
            raise ValueError(
                f"`file` is {str(self.path)!r}, which is there already and is no kernel "
                "that was made here: give another name."
            )
        found = json.loads(self._record.read_text())
        for what, ours in self.identity.items():
            if found["identity"].get(what) != ours:
                raise ValueError(
                    f"`file` is {str(self.path)!r}, which has a kernel of other {what}: "
                    f"give another name, or delete it and {self._record.name!r}."
                )
        return tuple(found["tile"]), found["num_done"]

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


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
