"""The checkpoint files of `gnlin.fit`: ordinary archives of NumPy, for `numpy.load`.

Each array is a member. The member `meta` is a text in JSON, with the names of the arrays
and of their types. The types of ml_dtypes, which NumPy does not know, are stored as
integers of the same bits.
"""

import errno
import json
import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
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


_FORMAT = 3

# Earlier versions wrote files of their own format, with the suffix `.gnlin`.
_NAME = re.compile(r"step-([0-9]{12}|[1-9][0-9]{12,})\.(npz|gnlin)")
_TEMPORARY_NAME = re.compile(_NAME.pattern + r"\.[0-9a-f]{32}\.tmp")


class Fault(Exception):
    """A fault of a checkpoint. Its message is a predicate whose subject is the file."""


def save(
    folder: Path, step: int, arrays: Mapping[str, np.ndarray], meta: dict, keep: int
) -> Path:
    """Write a checkpoint atomically, then delete all but the latest `keep` up to this
    step. Checkpoints of later steps are not touched."""
    path = _path(folder, step)
    _remove(_leftovers(folder))
    temporary = _temporary(path)
    try:
        _write(temporary, arrays, meta)
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


def load(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Return the arrays and `meta` of a checkpoint; raise `Fault` if it is damaged."""
    if path.suffix == ".gnlin":
        raise Fault("was written by an older gnlin, and this one cannot read it")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # reads all members, and compares their CRC-32
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        with np.load(path, allow_pickle=False) as members:
            arrays = dict(members)
        meta = json.loads(str(arrays.pop("meta")))
        found = meta.pop("format")
        if found != _FORMAT:
            raise Fault(
                f"is a checkpoint of format {found}, and this gnlin reads format "
                f"{_FORMAT} only (update gnlin)"
            )
        dtypes = meta.pop("dtypes")
        if list(dtypes) != list(arrays):
            raise zipfile.BadZipFile("an array is missing")
        for name, dtype in dtypes.items():
            if hasattr(ml_dtypes, dtype):
                arrays[name] = arrays[name].view(getattr(ml_dtypes, dtype))
    except OSError as error:
        raise Fault(f"cannot be read: {_reason(error)}") from error
    except (Fault, MemoryError):
        raise
    except Exception as error:  # zipfile and NumPy raise many kinds
        said = " ".join(str(error).split())
        raise Fault(f"is damaged, or not a gnlin checkpoint: {said}") from error
    return arrays, meta


def _can_be_read(path: Path) -> bool:
    with suppress(Fault):
        load(path)
        return True
    return False


def refusal(path: Path, fault: Fault) -> CheckpointError:
    """Return the error for a file, which says what to do."""
    files, way_out = [], ""
    with suppress(OSError):
        files = list(_checkpoints(path.parent).values())
    if path in files:
        earlier = files[: files.index(path)]
        way_out = "; delete it to start over, or pass another folder"
        if earlier:
            way_out = (
                "; no earlier one can be read either: delete all of them to start over, "
                "or pass another folder"
            )
        if (sound := next(filter(_can_be_read, reversed(earlier)), None)) is not None:
            way_out = (
                f"; the latest that can be read is {sound.name}: delete all after it to "
                "go on from there"
            )
    return CheckpointError(f"{path} {fault}{way_out}.")


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
        probe.write_bytes(b"probe")
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


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:012d}.npz"


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


def _write(path: Path, arrays: Mapping[str, np.ndarray], meta: dict) -> None:
    members: dict[str, Any] = dict(arrays)
    dtypes = {name: x.dtype.name for name, x in arrays.items()}
    for name, x in arrays.items():
        if hasattr(ml_dtypes, x.dtype.name):
            members[name] = x.view(f"u{x.dtype.itemsize}")
    text = json.dumps({**meta, "format": _FORMAT, "dtypes": dtypes})
    with path.open("xb") as file:
        np.savez(file, **members, meta=np.array(text))
        file.flush()
        os.fsync(file.fileno())


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
