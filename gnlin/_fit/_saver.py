"""Saving and resuming a run."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from .._common._identity import checksum, described, described_by_field, described_by_leaf
from .._common._lock import locked
from .._common._sharding import Places
from .._common._warn import warn
from .._solver import IterativeLinearisation
from .._training._step import StepSettings
from . import _checkpoint
from ._checkpoint import Checkpoint, CheckpointError, Fault
from ._snapshot import pack, Snapshot, unpack
from ._step import Compiled, step
from ._stream import ArrayStream, IterableStream


if TYPE_CHECKING:
    from ._run import Run


# The settings that must be the same in a resumed run. The others only name what differs.
_DECISIVE = frozenset({"data", "columns", "step", "initial values"})
_CHECKSUM = re.compile(" of checksum [0-9a-f]{8}")


def described_run(
    setting: StepSettings,
    inputs: tuple,
    stream: ArrayStream | IterableStream,
    columns: list[str],
    model: PyTree,
    state: PyTree,
) -> dict[str, str]:
    """Describe a run. Some entries decide whether two runs are the same, and the others
    say in words what differs.

    - `inputs`: the arguments of the first step.
    """
    # A run may be resumed with other printing, or on another number of devices.
    solver = eqx.tree_at(lambda solver: solver.verbose, setting.solver, False)
    setting = setting._replace(solver=solver, places=Places())
    program = Compiled(step, (setting,), *inputs).program(*inputs)
    others = "prior", "key", "augment", "batch_size", "curvature_batch_size", "divergence"
    shapes = jax.tree.map(np.shape, stream.example)
    of_solver = described_by_field("solver", solver)
    is_iterative = isinstance(solver, IterativeLinearisation)
    if is_iterative and not solver.restart and solver.period == 1:
        of_solver["solver"] = "an optimiser of optax"
    return {
        "data": f"{stream.identity()} with shapes {shapes}",
        **of_solver,
        **described_by_field("loss", setting.loss),
        **{name: described(getattr(setting, name)) for name in others},
        "columns": ", ".join(columns),
        **described_by_leaf("model", model),
        **described_by_leaf("state", state),
        "step": f"{program} in jax {jax.__version__}",
        "jax": jax.__version__,
        "initial values": checksum(inputs[0]),
    }


class Saver:
    """Saves a run to checkpoints, and resumes it from the latest."""

    def __init__(self, checkpoint: Checkpoint, run: "Run"):
        self._checkpoint = checkpoint
        self._run = run
        self._folder = Path(checkpoint.folder).expanduser()
        self._saved: tuple[int, ...] = ()  # the run's position in the latest checkpoint
        self._saved_at = time.monotonic()
        self._failed = -1  # the step whose checkpoint could not be written
        self.path: Path | None = None  # the latest checkpoint
        # Kept because callbacks are restored later, after they have started.
        self._resumed: tuple[Path, Snapshot] | None = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude other runs from the folder."""
        with locked(self._folder / ".lock") as is_alone:
            if not is_alone:
                raise CheckpointError(
                    f"Another run is writing checkpoints to {self._folder.resolve()}: "
                    "wait for its end, or pass another folder."
                )
            yield

    def start(self, resume: bool) -> None:
        """Check that a checkpoint can be written, and resume from the latest if asked."""
        self._settings = self._run.settings()  # before the run changes
        latest = _checkpoint.latest(self._folder)
        if latest is not None and not resume:
            raise CheckpointError(
                f"{self._folder} holds the checkpoints of a run, the latest "
                f"{latest.name}: pass `resume=True` to resume it, or another folder."
            )
        num_bytes, keep = self._run.num_bytes(), self._checkpoint.keep
        _checkpoint.check_writable(self._folder, num_bytes, keep)
        if latest is not None:
            snapshot = self._load(latest)
            self._resumed, self._saved = (latest, snapshot), snapshot.now[:3]
            self.path = latest

    def _load(self, path: Path) -> Snapshot:
        try:
            snapshot, table, settings = unpack(*_checkpoint.load(path))
            self._check_same(path, settings)
            self._run.restore(snapshot, table)
        except Fault as error:
            raise _checkpoint.refusal(path, error) from error
        if self._run.left(snapshot.now) < 0:
            raise CheckpointError(
                f"{path} was written after {snapshot.now.step} steps, more than this "
                "run makes: raise `epochs` or `steps`, or pass another folder."
            )
        return snapshot

    def begin(self) -> None:
        """Restore the callbacks of a resumed run, or write the first checkpoint."""
        if self._resumed is None:
            self._write()
            return
        path, snapshot = self._resumed
        try:
            fits = self._run.restore_callbacks(snapshot.callbacks)
        except ValueError as error:
            raise CheckpointError(f"{path} belongs to another run: {error}") from error
        if not fits:
            raise CheckpointError(
                f"{path} belongs to a run with other callbacks: pass the arguments of "
                "that run, or another folder."
            )

    def _check_same(self, path: Path, there: dict[str, str]) -> None:
        here = self._settings
        differing = [x for x in {**here, **there} if here.get(x) != there.get(x)]
        if _DECISIVE.isdisjoint(differing):
            return
        # Another version of JAX has other programs, which cannot be compared.
        is_other_jax = there.get("jax") not in (None, here["jax"])
        if is_other_jax and here.keys() & differing <= {"jax", "step"}:
            warn(
                f"{path} was written with jax {there['jax']}, and here it is "
                f"{here['jax']}: the run is resumed, but its numbers may differ in "
                "rounding. Whether the numbers of an optimiser, and the code of the "
                "model, the loss and `augment`, are the same is not known."
            )
            return
        name = differing[0]
        called = "data set" if name == "data" else name
        old, new = (_CHECKSUM.sub("", str(x.get(name))) for x in (there, here))
        what = f"its {called} is {old}, and here it is {new}"
        if name == "key":
            what = "its key is another one"
        elif old == new:
            what = f"its {called} has the same shape, but other numbers"
            if name != "data":
                what += ", as with another seed"
        if name == "columns":
            old, new = (x.get(name, "").split(", ") for x in (there, here))
            more = ", ".join(column for column in old if column not in new)
            less = ", ".join(column for column in new if column not in old)
            what = " and ".join(
                f"its history {has} {columns}"
                for has, columns in (("also has", more), ("lacks", less))
                if columns
            )
            what = what or "the columns of its history are in another order"
        if name == "step":
            what = (
                "its steps compute something else, as with another optimiser of optax, "
                "another learning rate of one, other code of the model, or another "
                "version of gnlin or JAX"
            )
        raise CheckpointError(
            f"{path} belongs to another run: {what}; pass the arguments of that run, or "
            "another folder."
        )

    def is_due(self, number: int) -> bool:
        if number == self._failed or (self._saved and number == self._saved[0]):
            return False
        every_steps = self._checkpoint.every_steps
        every_seconds = self._checkpoint.every_seconds
        if every_steps is not None and number % every_steps == 0:
            return True
        elapsed = time.monotonic() - self._saved_at
        return every_seconds is not None and elapsed >= every_seconds

    def save(self) -> bool:
        """Write a checkpoint if the run has moved or ended since the last; return whether
        one was written. If writing fails, warn and let the run continue. No step is tried
        twice."""
        settled = self._run.settled
        step = settled.now.step
        if step == self._failed or (
            settled.now[:3] == self._saved and not settled.reason
        ):
            return False
        try:
            self._write()
        except CheckpointError as error:
            left = "there is no earlier one"
            if self.path is not None:
                left = f"the latest is {self.path.name}"
            warn(f"{error} The run continues without it; {left}.")
            self._failed, self._saved_at = step, time.monotonic()
            return False
        return True

    def _write(self) -> None:
        settled, keep = self._run.settled, self._checkpoint.keep
        packed = pack(settled, self._run.table(), self._settings)
        self.path = _checkpoint.save(self._folder, settled.now.step, *packed, keep)
        self._saved, self._saved_at = settled.now[:3], time.monotonic()
