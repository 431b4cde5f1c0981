"""When a run is saved, and what it goes on from."""

import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from . import _checkpoint
from ._checkpoint import Checkpoint, CheckpointError


if TYPE_CHECKING:
    from ._run import Run


class Saver:
    """When a run is saved, and where."""

    def __init__(self, checkpoint: Checkpoint, run: "Run"):
        self._checkpoint = checkpoint
        self._run = run
        self._folder = Path(checkpoint.folder)
        self._saved: tuple[int, ...] = ()  # where the run stood
        self._saved_at = time.monotonic()
        # What is to be given back to the callbacks, once they have started
        self._resumed: tuple[Path, list[np.ndarray]] | None = None

    def start(self, resume: bool) -> None:
        """Go on from the latest, if asked to; else make sure that one can be written."""
        latest = _checkpoint.latest(self._folder)
        if latest is not None and not resume:
            raise CheckpointError(
                f"{self._folder} holds the checkpoints of a run, the latest "
                f"{latest.name}: pass `resume=True` to go on with it, or another folder."
            )
        num_bytes, keep = self._run.num_bytes(), self._checkpoint.keep
        _checkpoint.check_writable(self._folder, num_bytes, keep)
        if latest is not None:
            arrays, meta = _checkpoint.load(latest)
            self._check_same(latest, meta)
            self._resumed = latest, self._run.restore(arrays, meta)
            self._saved = _position(meta)

    def begin(self) -> None:
        """The callbacks' part of the same."""
        if self._resumed is None:
            self._write()
        elif not self._run.restore_callbacks(self._resumed[1]):
            raise CheckpointError(
                f"{self._resumed[0]} is of a run with other callbacks: pass what that "
                "run was given, or another folder."
            )

    def _check_same(self, path: Path, meta: dict) -> None:
        there, here = meta.get("settings", {}), self._run.settings
        for name, value in here.items():
            if there.get(name) != value:
                raise CheckpointError(
                    f"{path} is of another run: its {name} is {there.get(name)}, and "
                    f"here it is {value}; pass what that run was given, or another "
                    "folder."
                )

    def is_due(self, step: int) -> bool:
        if self._saved and step == self._saved[0]:
            return False
        every_steps = self._checkpoint.every_steps
        every_seconds = self._checkpoint.every_seconds
        if every_steps is not None and step % every_steps == 0:
            return True
        elapsed = time.monotonic() - self._saved_at
        return every_seconds is not None and elapsed >= every_seconds

    def save(self) -> bool:
        """Whether it was written. One that fails is no reason to lose the run."""
        settled = self._run.settled
        if settled.now[:3] == self._saved and not settled.reason:
            return False
        try:
            self._write()
        except CheckpointError as error:
            warnings.warn(f"{error} The run goes on without it.", stacklevel=5)
            self._saved_at = time.monotonic()
            return False
        return True

    def _write(self) -> None:
        arrays, meta = self._run.snapshot()
        step, keep = meta["step"], self._checkpoint.keep
        _checkpoint.save(self._folder, step, arrays, meta, keep)
        self._saved, self._saved_at = _position(meta), time.monotonic()


def _position(meta: dict) -> tuple[int, ...]:
    return meta["step"], meta["epoch"], meta["index"]
