"""64 dampings or periods at one linearisation point, and sweeps of whole runs."""

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import gnlin

from . import floor, sweeps
from .inner_steps import LEARNING_RATE
from .report import Comparison, Figure, find, quotient, Row, timed_row
from .task import quintic, Task
from .timing import alternate, Case, Timing


NUMBER = 64
_REPEATS = 50

DAMPINGS = f"{NUMBER} dampings"
PERIODS = f"{NUMBER} periods"


def comparisons(quick: bool) -> Iterator[Comparison]:
    rounds = 5 if quick else 15
    task = quintic(width=50, num_examples=20)
    looped = in_a_loop(task, rounds)
    title = "A sweep at one linearisation point, in a compiled loop"
    yield Comparison(title, looped, "one", figures=_figures(looped))
    called = one_call(task, 3 * rounds)
    title = "The same in one call, which allocates its memory"
    yield Comparison(title, called, "one")
    yield Comparison("Shares of such a call", shares(task, 3 * rounds), "the first")
    yield from sweeps.comparisons(quick)


def _figures(rows: Sequence[Row]) -> list[Figure]:
    """Return the required figures. One factorisation serves all steps. What remains is
    the steps, which a sweep by hand has to write to memory, too."""

    def seconds(library: str, variant: str) -> float | None:
        return find(rows, library, lambda row: row.variant == variant).seconds

    return [
        Figure(
            f"{variant} over the same by hand",
            "<= 1.3",
            quotient(seconds("gnlin", variant), seconds("hand-written", variant)),
        )
        for variant in (DAMPINGS, PERIODS)
    ]


def in_a_loop(task: Task, num_rounds: int) -> list[Row]:
    """Linearise, factorise and step, again and again in one compiled program."""
    pairs = [
        (_repeated(library, task, variant, filter_of, values[NUMBER // 2]),
         _repeated(library, task, variant, filter_of, values))
        for library in _STEPS
        for variant, filter_of, values in _sweeps()
    ]  # fmt: skip
    return _rows(f"sweep in a loop: {task.name}", pairs, num_rounds)


def one_call(task: Task, num_rounds: int) -> list[Row]:
    """Measure the same in a call from Python, which has to allocate the steps' memory."""
    pairs = [
        (_called(task, variant, filter_of, values[NUMBER // 2]),
         _called(task, variant, filter_of, values))
        for variant, filter_of, values in _sweeps()
    ]  # fmt: skip
    return _rows(f"sweep in one call: {task.name}", pairs, num_rounds)


def shares(task: Task, num_rounds: int) -> list[Row]:
    """Measure the parts of a call. Ratios are to the first row."""
    y, args = task.parameters, task.args
    residuals = task.per_example()
    spectrum = jax.jit(lambda y, args: gnlin.linearise(residuals, y, args).spectrum())
    kernel = jax.jit(lambda y, args: gnlin.linearise(residuals, y, args).kernel())
    step = jax.jit(lambda spectrum, d: spectrum.step(gnlin.filters.Tikhonov(d)))
    steps = jax.jit(jax.vmap(step, in_axes=(None, 0)))
    ready = spectrum(y, args)
    dampings = jnp.logspace(-3, 3, NUMBER)
    cases = [
        Case("gnlin", "linearise, spectrum", lambda: spectrum(y, args)),
        Case("gnlin", "linearise, kernel", lambda: kernel(y, args)),
        Case("gnlin", "one step, spectrum at hand", lambda: step(ready, 1.0)),
        Case("gnlin", f"{DAMPINGS}, spectrum at hand", lambda: steps(ready, dampings)),
    ]
    timings = alternate(cases, num_rounds)
    name = f"sweep, shares of a call: {task.name}"
    return [timed_row(name, timing, timings[0]) for timing in timings]


def _sweeps():
    def descent(period):
        return gnlin.filters.GradientDescent(period, LEARNING_RATE)

    return [
        (DAMPINGS, gnlin.filters.Tikhonov, jnp.logspace(-3, 3, NUMBER)),
        (PERIODS, descent, jnp.round(jnp.logspace(0, 8, NUMBER))),
    ]


def _steps(task: Task, filter_of: Callable) -> Callable:
    """Return a function that takes one step for a scalar, and several for a vector."""
    residuals = task.per_example()

    def steps(y, args, values: Float[Array, "*n"]):
        spectrum = gnlin.linearise(residuals, y, args).spectrum()
        step = lambda value: spectrum.step(filter_of(value))
        return step(values) if values.ndim == 0 else jax.vmap(step)(values)

    return steps


def _steps_by_hand(_: Task, filter_of: Callable) -> Callable:
    def steps(y, args, values: Float[Array, "*n"]):
        factors = floor.spectrum(y, args)
        step = lambda value: floor.filtered_step(factors, filter_of(value))
        return step(values) if values.ndim == 0 else jax.vmap(step)(values)

    return steps


_STEPS = {"gnlin": _steps, "hand-written": _steps_by_hand}


def _called(task: Task, variant: str, filter_of: Callable, values: Array) -> Case:
    steps = jax.jit(_steps(task, filter_of))
    return Case(
        "gnlin", _name(variant, values), lambda: steps(task.parameters, task.args, values)
    )


def _repeated(
    library: str, task: Task, variant: str, filter_of: Callable, values: Array
) -> Case:
    steps = _STEPS[library](task, filter_of)

    @jax.jit
    def run(y, args, values):
        def body(_, y):
            # Without the barrier, the compiler would compute only the step that is taken.
            all_steps = jax.lax.optimization_barrier(steps(y, args, values))
            taken = jax.tree.map(lambda s: s[0] if values.ndim else s, all_steps)
            return jax.tree.map(lambda a, b: a + 1e-3 * b, y, taken)

        return jax.lax.fori_loop(0, _REPEATS, body, y)

    return Case(
        library,
        _name(variant, values),
        lambda: run(task.parameters, task.args, values),
        count=lambda _: _REPEATS,
    )


def _name(variant: str, values: Array) -> str:
    return variant if values.ndim else variant.replace(str(NUMBER), "1").rstrip("s")


def _rows(task: str, pairs: list[tuple[Case, Case]], num_rounds: int) -> list[Row]:
    timings = alternate([case for pair in pairs for case in pair], num_rounds)
    references: list[Timing] = [timings[2 * (k // 2)] for k in range(len(timings))]
    return [
        timed_row(task, timing, reference)
        for timing, reference in zip(timings, references, strict=True)
    ]
