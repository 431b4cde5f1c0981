"""Whole fits of small dense problems: one certified regression, or 1,000 at once."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..data import nist
from . import fits
from .report import Comparison, explained, Row, timed_row
from .timing import alternate, Case


PROBLEMS = "Misra1a", "Thurber", "Gauss1", "MGH17"
IN_THE_PICTURE = "Thurber"
SOLVED = 10**-nist.SOLVED_LRE
"""A fit counts as solved up to this relative error of the worst parameter."""

TOLERANCES = 1e-6, 1e-8, 1e-10, 1e-12, 1e-15
QUICK_TOLERANCES = (1e-8,)
DIGITS = 6
"""Every library gets the loosest of these tolerances that gives it this many correct
digits or, if none does, the tolerance that gives it the most."""

NUM_CALLS = 20
"""The number of calls of a fit that are timed together."""
NUM_FITS = 1000
NUM_POINTS = 32
NUM_BY_SCIPY = 20

WHY_NOT_FIRST = (
    "singular values, a trial loop and a second derivative, whose time a step is more "
    "than the steps that they save are worth here"
)

Make = Callable[[float], Callable[[], fits.End]]
"""`make(tolerance)()` makes one fit, or all of them."""


@dataclasses.dataclass(frozen=True)
class Contender:
    library: str
    variant: str
    make: Make
    note: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of its `Case`."""


def comparisons(quick: bool) -> Iterator[Comparison]:
    rounds = 3 if quick else 15
    tolerances = QUICK_TOLERANCES if quick else TOLERANCES
    for name in PROBLEMS[:1] if quick else PROBLEMS:
        bars = f"a whole fit: {name}" if name == IN_THE_PICTURE else None
        title = f"A whole fit in one compiled call: {name}, NIST's second start"
        yield Comparison(title, certified(name, rounds, tolerances), bars=bars)
    num_fits = 100 if quick else NUM_FITS
    title = f"{num_fits:,} fits at once: four parameters, {NUM_POINTS} points each"
    yield Comparison(title, batched(num_fits, rounds, tolerances), bars=title)


def certified(
    name: str, num_rounds: int, tolerances: Sequence[float] = TOLERANCES
) -> list[Row]:
    """Fit from the second start. The error is the worst parameter's, against NIST's
    values."""
    problem = nist.load(name)
    start = jnp.asarray(problem.starts[1])
    data = jnp.asarray(problem.x), jnp.asarray(problem.y)

    def called(make: Callable, transform: Callable) -> Make:
        def with_tolerance(tolerance: float):
            fit = transform(make(problem.residuals, tolerance))

            def run():
                for _ in range(NUM_CALLS - 1):
                    jax.block_until_ready(fit(start, data))
                return fit(start, data)

            return run

        return with_tolerance

    settings = {"count": lambda _: NUM_CALLS}
    contenders = [
        *(
            Contender(
                m.library, m.variant, called(m.make, jax.jit), m.note, settings=settings
            )
            for m in fits.methods()
        ),
        *(
            Contender(
                "SciPy",
                name,
                called(fits.scipy(name), lambda fit: fit),
                "a loop in Python",
                settings=settings,
            )
            for name in fits.SCIPY
        ),
    ]
    return _rows(f"fit: {name}", contenders, num_rounds, problem.certified, tolerances)


def batched(
    num_fits: int, num_rounds: int, tolerances: Sequence[float] = TOLERANCES
) -> list[Row]:
    """Fit many data sets at once. The error is the worst of all parameters'."""
    starts, data, solutions = logistic_curves(num_fits)
    count = min(NUM_BY_SCIPY, num_fits)

    def mapped(method: fits.Method) -> Make:
        def make(tolerance: float):
            fit = jax.jit(jax.vmap(method.make(residuals, tolerance)))
            return lambda: fit(starts, data)

        return make

    def one_by_one(name: str) -> Make:
        each = [(b, (x, y)) for b, x, y in zip(starts[:count], *data, strict=False)]

        def make(tolerance: float):
            fit = fits.scipy(name)(residuals, tolerance)

            def run():
                ends = [fit(*one) for one in each]
                return fits.End(*map(np.stack, zip(*ends, strict=True)))

            return run

        return make

    contenders = [
        *(Contender(m.library, m.variant, mapped(m), m.note) for m in fits.methods()),
        *(
            Contender(
                "SciPy",
                name,
                one_by_one(name),
                f"{count} in a loop in Python, times {num_fits / count:.0f}",
                {"count": lambda _: count / num_fits, "max_rounds": 3},
            )
            for name in fits.SCIPY
        ),
    ]
    return _rows(f"{num_fits} fits", contenders, num_rounds, solutions, tolerances)


def residuals(b, data):
    """Return the residuals of a logistic curve between two levels."""
    x, y = data
    low, high, slope, middle = b
    return low + (high - low) * jax.nn.sigmoid(slope * (x - middle)) - y


def logistic_curves(num_fits: int):
    """Return the starts, the noisy data and the solutions of this many curves."""
    random = np.random.default_rng(0)
    truth = np.array([1, 5, 2, 1]) + random.uniform(-0.5, 0.5, (num_fits, 4))
    x = np.linspace(-3, 3, NUM_POINTS)
    y = np.stack([_curve(b, x) for b in truth])
    y += 0.05 * random.standard_normal(y.shape)
    solutions = np.stack([_refined(b, x, y_) for b, y_ in zip(truth, y, strict=True)])
    starts = np.tile([0.0, 4.0, 1.0, 0.5], (num_fits, 1))
    data = jnp.asarray(np.tile(x, (num_fits, 1))), jnp.asarray(y)
    return jnp.asarray(starts), data, solutions


def _curve(b, x):
    low, high, slope, middle = b
    return low + (high - low) / (1 + np.exp(-slope * (x - middle)))


def _refined(b, x, y):
    """Return the exact solution, by Gauss-Newton in NumPy. It starts at the parameters
    that made the data, which are near the solution."""
    for _ in range(15):
        low, high, slope, middle = b
        s = 1 / (1 + np.exp(-slope * (x - middle)))
        bend = (high - low) * s * (1 - s)
        jacobian = np.stack([1 - s, s, bend * (x - middle), -bend * slope], axis=1)
        b = b - np.linalg.lstsq(jacobian, _curve(b, x) - y, rcond=None)[0]
    return b


def _rows(
    task: str,
    contenders: Sequence[Contender],
    num_rounds: int,
    exact: np.ndarray,
    tolerances: Sequence[float],
) -> list[Row]:
    chosen = [_choose(contender, exact, tolerances) for contender in contenders]
    timings = alternate([choice.case for choice in chosen], num_rounds)
    rows = []
    for choice, timing in zip(chosen, timings, strict=True):
        row = timed_row(
            task, timing, timings[0], step_error=choice.error, tolerance=SOLVED
        )
        whole = timing.median * timing.case.count(None)
        seconds = max(0.0, choice.first_seconds - whole)
        rows.append(dataclasses.replace(row, compile_seconds=seconds))
    return explained(rows, WHY_NOT_FIRST)


@dataclasses.dataclass(frozen=True)
class _Choice:
    case: Case
    error: float
    first_seconds: float
    """The time of the first call, which also compiles."""


def _choose(
    contender: Contender, exact: np.ndarray, tolerances: Sequence[float]
) -> _Choice:
    """Choose the loosest tolerance that gives enough digits."""
    choices = []
    for tolerance in tolerances:
        run = contender.make(tolerance)
        began = time.perf_counter()
        end = jax.block_until_ready(run())
        seconds = time.perf_counter() - began
        error = _worst(np.asarray(end.parameters), exact)
        note = _note(contender, tolerance, end, error)
        case = Case(
            contender.library, contender.variant, run, note=note, **contender.settings
        )
        choices.append(_Choice(case, error, seconds))
        if error <= 10**-DIGITS or contender.note == "the default":
            return choices[-1]
    return min(choices, key=lambda choice: choice.error)


def _note(contender: Contender, tolerance: float, end: fits.End, error: float) -> str:
    lre = np.clip(-np.log10(max(error, 1e-300)), 0, nist.MAX_LRE)
    said = [contender.note] if contender.note else []
    if contender.note != "the default":
        said.append(f"tolerance {tolerance:.0e}")
    said += [f"{np.max(end.num_steps):,} steps", f"LRE {lre:.1f}"]
    return ", ".join(said if error <= SOLVED else [*said, "not solved"])


def _worst(b: np.ndarray, exact: np.ndarray) -> float:
    error = np.max(np.abs(b - exact[: len(b)]) / np.abs(exact[: len(b)]))
    return float(error) if np.isfinite(error) else np.inf
