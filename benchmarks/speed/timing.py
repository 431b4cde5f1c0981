"""Alternating runs, compile time apart.

Other work on a machine slows everything for a while. So the cases take turns, A B A B,
and a ratio is the median of the ratios within each round: what slows a whole round
cancels, which it does not in a ratio of two medians. Every other round goes backwards:
what runs after a program with many threads finds them still awake. What takes
milliseconds only is run several times in its turn, and the first of them is not counted:
it finds the caches as the case before it left them.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .memory import PeakMemory


_BRIEF = 0.05
"""Seconds, of a turn of what takes less than that,"""
_MOST_REPEATS = 20
"""and the most repeats in it."""


def _one(output: Any) -> int:
    del output
    return 1


@dataclasses.dataclass(frozen=True)
class Case:
    """One program to be timed."""

    library: str
    variant: str
    run: Callable[[], Any]
    """Returns arrays, or a pytree that holds some."""
    count: Callable[[Any], int] = _one
    """How many steps an output of `run` is the result of: the time is per step."""
    step: Callable[[], np.ndarray] | None = None
    """The first step that it takes, as one vector, where there is an exact one."""
    max_rounds: int | None = None
    """Fewer rounds than the others, for what takes seconds."""
    compile: Callable[[], Any] | None = None
    """Compiles without running, for what takes so long that it runs only once."""
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.library} {self.variant}".strip()


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per step, one a round, what the first run took beyond that, and the most
    memory that one more run took."""

    case: Case
    seconds: tuple[float, ...]
    compile_seconds: float
    peak_bytes: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def ratio(a: Timing, b: Timing) -> float:
    """How many times longer `a` takes than `b`, round by round."""
    pairs = zip(a.seconds, b.seconds, strict=False)
    return statistics.median(x / y for x, y in pairs)


def alternate(cases: Sequence[Case], num_rounds: int) -> list[Timing]:
    """Compile every case, then run all of them in turn."""
    first = [_clock(case.compile or case.run)[0] for case in cases]
    whole: list[list[float]] = [[] for _ in cases]
    per_step: list[list[float]] = [[] for _ in cases]
    peaks: list[int | None] = [None for _ in cases]
    for i in range(num_rounds):
        order = list(enumerate(cases))
        for k, case in order if i % 2 == 0 else reversed(order):
            if case.max_rounds is None or i < case.max_rounds:
                with _peak_of(case) as peak:
                    seconds, output = _in_turn(case)
                whole[k].append(seconds)
                per_step[k].append(seconds / case.count(output))
                del output
                if peak is not None:
                    peaks[k] = peak.bytes
    # By itself: memory that is given back first takes time to be had again.
    for k, case in enumerate(cases):
        if case.compile is None:
            peaks[k] = _peak(case)
    return [
        Timing(
            case,
            tuple(per_step[k]),
            first[k]
            if case.compile
            else max(0.0, first[k] - statistics.median(whole[k])),
            peaks[k],
        )
        for k, case in enumerate(cases)
    ]


def _peak_of(case: Case) -> contextlib.AbstractContextManager[PeakMemory | None]:
    """Of what runs only once, in that run, which takes seconds."""
    return contextlib.nullcontext() if case.compile is None else PeakMemory()


def _peak(case: Case) -> int | None:
    with PeakMemory() as peak:
        jax.block_until_ready(case.run())
    return peak.bytes


def _in_turn(case: Case) -> tuple[float, Any]:
    seconds, output = _clock(case.run)
    if seconds >= _BRIEF or case.compile is not None:
        return seconds, output
    number = min(_MOST_REPEATS, int(_BRIEF / seconds) + 1)
    return statistics.median(_clock(case.run)[0] for _ in range(number)), output


def _clock(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    output = jax.block_until_ready(run())
    return time.perf_counter() - start, output
