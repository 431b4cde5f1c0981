"""What an experiment would take, before anything is run or written.

The functions that train call a `Rehearsal` in place of their runs, with their number of
steps and a function that makes a few. It measures the rate, and raises `Planned`. After a
minute no further points are measured, and the others count like the mean of those.
"""

import math
import random
import resource
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
from threadpoolctl import threadpool_limits

from . import _results
from ._options import LARGE, Options
from .experiment import Experiment, Place, Point


BUDGET = 60.0
"""Seconds, with compilation, after which no further point is measured."""
_LONG_ENOUGH = 0.2
"""Seconds of a measurement, beyond twice what the shortest run takes."""
_SHOWN = 5
"""The number of points that are listed."""
_KEPT = Path(__file__).parent / "results"


class Tally(NamedTuple):
    """What an attempt has come to."""

    steps: float
    passes: float
    """Tangent and transposed passes through the model."""


class Rate(NamedTuple):
    """What a step takes."""

    seconds: float
    passes: float
    memory: float
    """Bytes beyond those of the process so far."""


class Planned(Exception):
    """What the runs at a point would take."""

    def __init__(self, num_runs: int, num_steps: float, rate: Rate | None, held: float):
        super().__init__("a dry run")
        self.num_runs = num_runs
        self.num_steps = num_steps
        self.rate = rate
        self.held = held

    @property
    def steps(self) -> float:
        return self.num_runs * self.num_steps

    @property
    def memory(self) -> float:
        return self.held + (0 if self.rate is None else self.rate.memory)


class Rehearsal:
    """Measures rates until the budget is used up."""

    def __init__(self, budget: float):
        self.end = time.perf_counter() + budget
        self.rates: dict[Hashable, Rate] = {}

    def __call__(
        self,
        program: Hashable,
        num_runs: int,
        num_steps: float,
        attempt: Callable[[int], Tally],
        *,
        whole: bool = False,
        share: float = 1.0,
        held: float = 0.0,
    ) -> NoReturn:
        """Raise `Planned`.

        - `program`: a step takes equally long in all runs with the same one.
        - `num_steps`: steps of a run, at most.
        - `attempt`: makes more steps the larger its argument; at 1 as few as possible.
        - `whole`: an attempt makes a whole run, whatever its argument.
        - `share`: the share of the examples that an attempt has.
        - `held`: bytes that a run holds for its history.
        """
        if program not in self.rates and time.perf_counter() < self.end:
            self.rates[program] = _measured(attempt, 1 if whole else num_steps, share)
        raise Planned(num_runs, num_steps, self.rates.get(program), held)


def _measured(attempt: Callable[[int], Tally], num_steps: float, share: float) -> Rate:
    """The rate of the steps after the first, without what a run of any length takes."""

    def timed(number: int) -> tuple[Tally, float]:
        begun = time.perf_counter()
        return attempt(number), time.perf_counter() - begun

    before = _peak()
    attempt(1)  # compiles
    number = 1
    first, overhead = tally, seconds = timed(1)
    long_enough = 2 * overhead + _LONG_ENOUGH
    while number < num_steps and seconds < long_enough:
        number = min(4 * number, math.ceil(num_steps))
        tally, seconds = timed(number)
        if seconds >= long_enough:  # another number of steps may be another program
            tally, seconds = timed(number)
        if tally.steps < number:  # the run has ended
            break
    memory = (_peak() - before) / share
    more = tally.steps - first.steps
    if more <= 0 or seconds <= overhead:
        steps = max(tally.steps, 1)
        return Rate(seconds / steps / share, tally.passes / steps, memory)
    passes = (tally.passes - first.passes) / more
    return Rate((seconds - overhead) / more / share, passes, memory)


def _peak() -> float:
    """The most bytes in use so far: of the device, or of this process on a CPU."""
    (device,) = jax.numpy.zeros(()).devices()
    found = device.memory_stats() if device.platform != "cpu" else None
    if found is not None:
        return found["peak_bytes_in_use"]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most * (1 if sys.platform == "darwin" else 1024)


def dry_run(name: str, experiment: Experiment, options: Options) -> None:
    """Print what the experiment would take with these options."""
    settings = experiment.settings(options)
    points = list(experiment.points(settings))
    last = settings.first_seed + settings.seeds - 1
    print(
        f"{name}, {options.scale}: {len(points)} points, seeds {settings.first_seed} to "
        f"{last}. Nothing is run or written."
    )
    if not experiment.rehearsed:
        num_runs = len(points) * settings.seeds * experiment.runs_at_a_point(settings)
        print(f"{num_runs:,} runs. {_kept(name)}")
        return
    data = getattr(settings, "data", "")
    if options.scale == "full" and data in ("mnist", "cifar10") and not options.data_dir:
        print(
            f"The files of {data} are missing, and images of their shape stand in for "
            "them here: name their folder with --data-dir for the run."
        )
    begun = time.perf_counter()
    place = Place(options.data_dir, rehearsal=Rehearsal(BUDGET))
    base, planned = _peak(), {}
    with threadpool_limits(None if options.scale in LARGE else 1, user_api="blas"):
        # In random order, so that those within the budget are like the others.
        for i in random.Random(0).sample(range(len(points)), len(points)):
            planned[i] = _rehearsed(experiment, settings, points[i], place)
    seconds = time.perf_counter() - begun
    _print_plans([(points[i], planned[i]) for i in range(len(points))], base, seconds)


def _rehearsed(
    experiment: Experiment, settings: Any, point: Point, place: Place
) -> Planned:
    try:
        experiment.train(settings, point, place)
    except Planned as plan:
        return plan
    raise AssertionError(f"{point} was run")


def _print_plans(
    plans: Sequence[tuple[Point, Planned]], base: float, seconds: float
) -> None:
    known = [(plan, plan.rate) for _, plan in plans if plan.rate is not None]
    steps = sum(plan.steps for _, plan in plans)
    num_runs = sum(plan.num_runs for _, plan in plans)
    print(
        f"{num_runs:,} runs, and at most {_rounded(steps)} steps in all; a run that is "
        "trained ends earlier."
    )
    if not known:
        print("No rate could be measured in the time for it.")
        return
    number = len(plans) / len(known)
    passes = number * sum(plan.steps * rate.passes for plan, rate in known)
    hours = number * sum(plan.steps * rate.seconds for plan, rate in known) / 3600
    memory = base + max(plan.memory for _, plan in plans)
    (device,) = jax.numpy.zeros(()).devices()
    print(
        f"About {_rounded(passes)} passes through the model, {_rounded(hours)} hours on "
        f"this machine ({device.device_kind}), without compilation, and "
        f"{_rounded(memory / 2**30)} GiB of memory."
    )
    print(
        f"The rates of {len(known)} of {len(plans)} points were measured, in "
        f"{seconds:.0f} s. The longest:"
    )
    by_time = sorted(
        ((plan.steps * plan.rate.seconds, point) for point, plan in plans if plan.rate),
        key=lambda each: -each[0],
    )
    for each, point in by_time[:_SHOWN]:
        shown = ", ".join(f"{key} {value}" for key, value in point.items())
        print(f"  {_rounded(each / 3600)} hours: {shown}")


def _kept(name: str) -> str:
    """How long the runs in the repository took."""
    settings = _results.read_settings(_KEPT / name)
    said = "No rate is measured for this experiment, whose steps are not alike."
    if settings is not None and settings.get("run_seconds"):
        said += (
            f" The {settings['num_runs']:,} runs in the repository took "
            f"{settings['run_seconds'] / 3600:.2g} hours on {settings['processors']} "
            "processors."
        )
    return said


def _rounded(number: float) -> str:
    """Two digits."""
    if number >= 100:
        exponent = math.floor(math.log10(number)) - 1
        return f"{round(number / 10**exponent) * 10**exponent:,.0f}"
    return f"{number:.2g}"
