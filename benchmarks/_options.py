"""The options of the command line, for every benchmark."""

import dataclasses
from pathlib import Path
from typing import Literal


Scale = Literal["quick", "embedded", "medium", "full"]
MOST_SEEDS, MOST_STEPS = 10_000, 10**9
"""Upper limits. A run with more would not end in practice."""
LARGE: tuple[Scale, ...] = ("medium", "full")
"""The scales with long runs. They write checkpoints, and use all threads."""


@dataclasses.dataclass(frozen=True)
class Options:
    out: Path
    scale: Scale = "embedded"
    seeds: int | None = None
    first_seed: int | None = None
    steps: int | None = None
    grid: tuple[float, ...] | None = None
    """Values that replace those that the scale sweeps."""
    data_dir: Path | None = None
    """The folder with the files of MNIST and CIFAR-10."""
    reduction: Literal["sum", "mean"] | None = None
    """The reduction of the loss on mini-batches; `None` for the scale's own."""
    task: Path | None = None
    """A file with the user's own task, which replaces the scale's data and network."""
    resume: bool = False
    tables: tuple[str, ...] = ()
    """The tables of a benchmark to run; empty to run all."""

    @property
    def quick(self) -> bool:
        return self.scale == "quick"


def no_folder(path: Path) -> str:
    """Say why the path is not a folder."""
    return "is a file" if path.exists() else "does not exist"


class Refusal(Exception):
    """Explains in one sentence why a request cannot be met, and what to do instead."""
