"""Estimates of an experiment's cost, before anything is run or written.

Instead of making their runs, the functions that train call a `Rehearsal` with their
number of steps and a function that makes a few steps. It measures the time of a step, and
raises `Planned`. After a minute no further points are measured, and the remaining ones
are assumed to cost the mean of the measured ones.
"""

import math
import random
import resource
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from threadpoolctl import threadpool_limits

from . import _results
from ._options import LARGE, Options
from .experiment import Experiment, Place, Point


BUDGET = 60.0
"""Seconds, including compilation, after which no further point is measured."""
_LONG_ENOUGH = 0.2
"""A measurement takes at least this many seconds more than two of the shortest runs."""
_SHOWN = 5
"""The number of points that are listed."""


class Tally(NamedTuple):
    """The steps and passes that an attempt made."""

    steps: float
    passes: float
    """Tangent and transposed passes through the model."""


class Rate(NamedTuple):
    """The cost of one step."""

    seconds: float
    passes: float
    memory: float
    """Bytes in addition to those that the process already uses."""


class Planned(Exception):
    """The expected cost of the runs at a point, raised instead of making them."""

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

        - `program`: a key; runs with the same key have steps of the same cost.
        - `num_steps`: the largest number of steps of a run.
        - `attempt`: makes about as many steps as its argument says; for 1, as few as
            possible.
        - `whole`: whether an attempt makes a whole run, whatever its argument.
        - `share`: the share of the examples that an attempt uses.
        - `held`: bytes that the history of a run takes.
        """
        if program not in self.rates and time.perf_counter() < self.end:
            self.rates[program] = _measured(attempt, 1 if whole else num_steps, share)
        raise Planned(num_runs, num_steps, self.rates.get(program), held)


def _measured(attempt: Callable[[int], Tally], num_steps: float, share: float) -> Rate:
    """Measure the cost of a step, without the overhead that a run of any length has."""

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
        if tally.steps < number:  # the run ended early
            break
    memory = (_peak() - before) / share
    more = tally.steps - first.steps
    if more <= 0 or seconds <= overhead:
        steps = max(tally.steps, 1)
        return Rate(seconds / steps / share, tally.passes / steps, memory)
    passes = (tally.passes - first.passes) / more
    return Rate((seconds - overhead) / more / share, passes, memory)


def _peak() -> float:
    """Return the peak memory in bytes: of the device, or of this process on a CPU."""
    (device,) = jax.numpy.zeros(()).devices()
    found = device.memory_stats() if device.platform != "cpu" else None
    if found is not None:
        return found["peak_bytes_in_use"]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most * (1 if sys.platform == "darwin" else 1024)


def dry_run(name: str, experiment: Experiment, options: Options) -> None:
    """Print the estimated cost of the experiment with these options."""
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
            f"The files of {data} are missing; this estimate uses other images of the "
            "same shape. For the run itself, name the folder of the files with "
            "--data-dir."
        )
    begun = time.perf_counter()
    place = Place(options.data_dir, rehearsal=Rehearsal(BUDGET))
    base, planned = _peak(), {}
    with threadpool_limits(None if options.scale in LARGE else 1, user_api="blas"):
        # In random order, so that the measured points are representative.
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
    print(f"{num_runs:,} runs, with at most {_rounded(steps)} steps in total.")
    if not known:
        print("No point could be measured within the time limit.")
        return
    number = len(plans) / len(known)
    passes = number * sum(plan.steps * rate.passes for plan, rate in known)
    hours = number * sum(plan.steps * rate.seconds for plan, rate in known) / 3600
    memory = base + max(plan.memory for _, plan in plans)
    (device,) = jax.numpy.zeros(()).devices()
    print(
        f"About {_rounded(passes)} passes through the model, {_rounded(hours)} hours on "
        f"this machine ({device.device_kind}), excluding compilation, and "
        f"{_rounded(memory / 2**30)} GiB of memory."
    )
    print(
        f"{len(known)} of {len(plans)} points were measured, in {seconds:.0f} s. The "
        "slowest:"
    )
    by_time = sorted(
        ((plan.steps * plan.rate.seconds, point) for point, plan in plans if plan.rate),
        key=lambda each: -each[0],
    )
    for each, point in by_time[:_SHOWN]:
        shown = ", ".join(f"{key} {value}" for key, value in point.items())
        print(f"  {_rounded(each / 3600)} hours: {shown}")


def _kept(name: str) -> str:
    """Say how long the runs in the repository took."""
    settings = _results.read_settings(_results.KEPT / name)
    said = "This experiment cannot be measured, because its steps differ in cost."
    if settings is not None and settings.get("run_seconds"):
        said += (
            f" The {settings['num_runs']:,} runs in the repository took "
            f"{settings['run_seconds'] / 3600:.2g} hours on {settings['processors']} "
            "processors."
        )
    return said


def _rounded(number: float) -> str:
    """Round to two digits."""
    if number >= 100:
        exponent = math.floor(math.log10(number)) - 1
        return f"{round(number / 10**exponent) * 10**exponent:,.0f}"
    return f"{number:.2g}"
