"""The options of the command line, for every benchmark."""

import dataclasses
from pathlib import Path
from typing import Literal


Scale = Literal["quick", "embedded", "medium", "full"]
LARGE: tuple[Scale, ...] = ("medium", "full")
"""The scales whose runs are long: they have checkpoints, and use all threads."""


@dataclasses.dataclass(frozen=True)
class Options:
    out: Path
    scale: Scale = "embedded"
    seeds: int | None = None
    first_seed: int | None = None
    steps: int | None = None
    grid: tuple[float, ...] | None = None
    """Replaces the swept values of the scale."""
    data_dir: Path | None = None
    """The folder of the files of MNIST and CIFAR-10."""
    reduction: Literal["sum", "mean"] | None = None
    """The reduction of the loss on mini-batches; replaces the scale's own."""
    task: Path | None = None
    """A file with the user's own task; replaces the scale's data and network."""
    resume: bool = False
    tables: tuple[str, ...] = ()
    """The tables of a benchmark to run; empty for all."""

    @property
    def quick(self) -> bool:
        return self.scale == "quick"


class Refusal(Exception):
    """Says in one sentence why a request cannot be met, and what can be done instead."""
