"""Alternating runs, compile time apart.

Other work on a machine slows everything for a while. So the cases take turns, A B A B,
and a ratio is the median of the ratios within each round: what slows a whole round
cancels, which it does not in a ratio of two medians.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Case:
    """One program to be timed. `run` returns arrays; it may make many steps in one go,
    and then the time is per step."""

    library: str
    variant: str
    run: Callable[[], Any]
    num_steps: int = 1
    max_rounds: int | None = None
    """Fewer rounds than the others, for what takes seconds."""
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.library}: {self.variant}" if self.variant else self.library


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per step, one a round, and what the first run took beyond that."""

    case: Case
    seconds: tuple[float, ...]
    compile_seconds: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def ratio(a: Timing, b: Timing) -> float:
    """How many times longer `a` takes than `b`, round by round."""
    pairs = zip(a.seconds, b.seconds, strict=False)
    return statistics.median(x / y for x, y in pairs)


def alternate(cases: Sequence[Case], num_rounds: int) -> list[Timing]:
    """Run every case once to compile it, then all of them in turn."""
    first = [_seconds(case) for case in cases]
    measured: list[list[float]] = [[] for _ in cases]
    for i in range(num_rounds):
        for case, seconds in zip(cases, measured, strict=True):
            if case.max_rounds is None or i < case.max_rounds:
                seconds.append(_seconds(case))
    return [
        Timing(
            case,
            tuple(s / case.num_steps for s in seconds),
            max(0.0, start - statistics.median(seconds)),
        )
        for case, start, seconds in zip(cases, first, measured, strict=True)
    ]


def _seconds(case: Case) -> float:
    start = time.perf_counter()
    jax.block_until_ready(case.run())
    return time.perf_counter() - start
