"""Measure programs in turn, with the time to compile apart.

Other work on a machine slows everything for a while. So the cases take turns, A B A B,
and a ratio is the median of the ratios within each round. What slows a whole round then
cancels, which it would not in a ratio of two medians. Every other round goes backwards,
because a program that follows one with many threads finds them still awake. A case that
takes only milliseconds is run several times in its turn. The first of these runs is not
counted, because it finds the caches as the case before it left them.
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
"""A case that takes fewer seconds than this is repeated for about as long,"""
_MOST_REPEATS = 20
"""but at most this many times."""


def _one(output: Any) -> int:
    del output
    return 1


@dataclasses.dataclass(frozen=True)
class Case:
    """One program to be timed."""

    library: str
    variant: str
    run: Callable[[], Any]
    """Returns arrays, or a pytree with arrays."""
    count: Callable[[Any], int] = _one
    """Returns the number of steps that led to an output of `run`. Times are per step."""
    step: Callable[[], np.ndarray] | None = None
    """Returns the first step as one vector, if there is an exact step to compare it
    with."""
    max_rounds: int | None = None
    """The largest number of rounds, for programs that take seconds."""
    compile: Callable[[], Any] | None = None
    """Compiles without running, for programs so slow that they run only once."""
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.library} {self.variant}".strip()


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per step in each round, the time that the first run took beyond that, and
    the peak memory of one more run."""

    case: Case
    seconds: tuple[float, ...]
    compile_seconds: float
    peak_bytes: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def ratio(a: Timing, b: Timing) -> float:
    """Return how many times as long `a` takes as `b`: the median over the rounds."""
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
    # Measure memory separately: it is given back first, and allocating again takes time.
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
    """Measure the memory in the run itself, for programs that run only once."""
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
