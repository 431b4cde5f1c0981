"""What every benchmark is told on the command line."""

import dataclasses
from pathlib import Path
from typing import Literal


Scale = Literal["quick", "embedded", "full"]


@dataclasses.dataclass(frozen=True)
class Options:
    out: Path
    scale: Scale = "embedded"
    seeds: int | None = None
    steps: int | None = None
    grid: tuple[float, ...] | None = None
    """In place of the swept values of the scale."""
    data_dir: Path | None = None
    """Of MNIST's and CIFAR-10's files."""
    reduction: Literal["sum", "mean"] | None = None
    """Of the loss on mini-batches, in place of the scale's own."""
    task: Path | None = None
    """A file with a task of the user's own, in place of the scale's data and network."""
    resume: bool = False
    tables: tuple[str, ...] = ()
    """Those of a benchmark that are wanted; none for all."""

    @property
    def quick(self) -> bool:
        return self.scale == "quick"


class Refusal(Exception):
    """Says in one sentence why what was asked for cannot be done, and what can."""
