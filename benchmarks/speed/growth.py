"""The growth of time with m, p, K, the dampings of a sweep, and devices."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import gnlin

from . import devices, floor
from .inner_steps import LEARNING_RATE
from .report import Comparison, Row, timed_row
from .task import DAMPING, quintic, Task
from .timing import alternate, Case, Timing


NUM_STEPS = 50
"""Steps in a loop, enough to make the cost of the call negligible."""
FITTED = 3
"""The number of sizes, the largest ones, to which the exponent is fitted."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """What grows, its sizes, and the exponent that is expected of the time."""

    symbol: str
    sizes: Sequence[int]
    expected: str
    programs: Sequence[Callable[[int], Case]]
    """Functions from a size to a case, one for each library."""
    fitted: int = FITTED


def comparisons(quick: bool) -> Iterator[Comparison]:
    rounds = 3 if quick else 5
    for axis in axes(quick):
        title = f"Growth with {axis.symbol}: {axis.expected}"
        yield Comparison(title, grown(axis, rounds), "the smallest")
    yield Comparison(devices.TITLE, devices.rows(quick), "one device")


def axes(quick: bool) -> list[Axis]:
    examples = (16, 32) if quick else (32, 64, 128, 256, 512)
    widths = (25, 50) if quick else (50, 100, 200, 400)
    wide = 25 if quick else 100
    return [
        Axis(
            "m",
            examples,
            "expected 1 to 2: the passes 1, the kernel 2 (and Cholesky 3, small here)",
            [lambda m: damped(quintic(wide, m)), lambda m: limit(quintic(wide, m))],
        ),
        Axis(
            "p",
            [quintic(width, 1).num_parameters for width in widths],
            "expected 1/2 (kernels of layers) to 1 (the passes), more beyond the caches",
            [
                lambda p: damped(quintic(_width(p), 32)),
                lambda p: limit(quintic(_width(p), 32)),
            ],
        ),
        Axis(
            "K",
            [10**k for k in range(0, 9, 2)],
            "expected 0, by formula",
            [inner_steps(quintic(50, 20))],
            fitted=5,
        ),
        Axis(
            "dampings",
            (1, 4, 16) if quick else (1, 4, 16, 64, 256),
            "expected between 0, all of them from one spectrum, and 1",
            [sweep(quintic(50, 20))],
        ),
    ]


def _width(num_parameters: int) -> int:
    """Return the width of the network with this many parameters, 3 w^2 + 6 w + 1."""
    return round(np.sqrt((num_parameters + 2) / 3) - 1)


def grown(axis: Axis, num_rounds: int) -> list[Row]:
    """Return, for each library, a row for each size and then the exponent."""
    cases = [program(size) for program in axis.programs for size in axis.sizes]
    timings = alternate(cases, num_rounds)
    rows = []
    for k in range(0, len(timings), len(axis.sizes)):
        of_library = timings[k : k + len(axis.sizes)]
        task = f"growth with {axis.symbol}"
        for size, timing in zip(axis.sizes, of_library, strict=True):
            row = timed_row(task, timing, of_library[0])
            rows.append(dataclasses.replace(row, variant=f"{axis.symbol} = {size:,}"))
        found = exponent(axis.sizes[-axis.fitted :], of_library[-axis.fitted :])
        variant = f"exponent in {axis.symbol}: {found:.2f}"
        note = f"{axis.expected}; of the last {len(axis.sizes[-axis.fitted :])}"
        rows.append(Row(task, of_library[0].case.library, variant, note=note))
    return rows


def exponent(sizes: Sequence[int], timings: Sequence[Timing]) -> float:
    """Fit a line to the logarithms in each round, and return the median slope."""
    rounds = zip(*(timing.seconds for timing in timings), strict=True)
    slopes = [np.polyfit(np.log(sizes), np.log(seconds), 1)[0] for seconds in rounds]
    return statistics.median(map(float, slopes))


def damped(task: Task) -> Case:
    """Return damped Gauss-Newton steps by Cholesky, in a compiled loop."""
    solver = gnlin.DampedGaussNewton(
        DAMPING, rtol=0.0, atol=0.0, search=None, method="kernel"
    )

    @jax.jit
    def run(parameters, args):
        model = eqx.combine(parameters, task.model)
        solution = gnlin.solve(model, args, solver, max_steps=NUM_STEPS)
        return solution.loss, solution.stats["num_steps"]

    return Case(
        "gnlin",
        "DampedGaussNewton",
        lambda: run(task.parameters, task.args),
        count=lambda found: int(found[1]),
    )


def limit(task: Task) -> Case:
    run = floor.damped_loop()
    return Case(
        "hand-written",
        "",
        lambda: run(task.parameters, task.args, DAMPING, NUM_STEPS),
        count=lambda _: NUM_STEPS,
    )


def inner_steps(task: Task) -> Callable[[int], Case]:
    """Return a function from K to the whole outer step with K inner steps."""
    solver = lambda period: gnlin.IterativeLinearisation(period, LEARNING_RATE)

    @jax.jit
    def run(parameters, args, period):
        model = eqx.combine(parameters, task.model)
        return gnlin.solve(model, args, solver(period), max_steps=1).loss

    def case(period: int) -> Case:
        arrays = task.parameters, task.args, jnp.asarray(float(period))
        return Case("gnlin", "IterativeLinearisation", lambda: run(*arrays))

    return case


def sweep(task: Task) -> Callable[[int], Case]:
    """Return a function from a number of dampings to one linearisation and all their
    steps."""
    residuals = task.per_example()

    @jax.jit
    def run(parameters, args, dampings):
        spectrum = gnlin.linearise(residuals, parameters, args).spectrum()
        step = lambda damping: spectrum.step(gnlin.filters.Tikhonov(damping))
        return jax.vmap(step)(dampings)

    def case(number: int) -> Case:
        arrays = task.parameters, task.args, jnp.logspace(-3, 3, number)
        return Case("gnlin", "Spectrum.step", lambda: run(*arrays))

    return case
