"""What every benchmark is told: how many seeds, where to write, whether to be quick."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Options:
    seeds: int | None
    out: Path
    quick: bool
