"""One damped Gauss-Newton step, gnlin beside the hand-written limit and the others."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import numpy as np
import optimistix as optx

import gnlin

from . import floor, opponents
from .report import Comparison, damped_row, Figure, find, quotient, Row
from .task import DAMPING, quintic, Task
from .timing import alternate, Case


LIMIT = "hand-written"
LOOP = "in a loop"
NUM_STEPS = 2000
"""Steps in a loop. There are enough to make the cost of the call negligible, which checks
its arguments. Programs that take ten times as long run a tenth of them, and the slowest
still fewer."""


def comparisons(quick: bool) -> Iterator[Comparison]:
    rounds = 5 if quick else 15
    task = quintic(width=50, num_examples=20)
    rows = _all_libraries(task, quick, rounds)
    title = f"One damped step in a compiled loop; {task.name}"
    yield Comparison(title, rows, bars=task.name, figures=_figures(rows))
    yield Comparison("The same in one call", one_call(task, 3 * rounds))
    if quick:
        return
    task = quintic(width=200, num_examples=100)
    title = f"One damped step in a compiled loop; {task.name}"
    yield Comparison(title, _wider(task), bars=task.name)


def _figures(rows: Sequence[Row]) -> list[Figure]:
    gnlin = find(rows, "gnlin", lambda row: row.note == "the default")
    default = find(rows, "optimistix", lambda row: "default" in row.variant)
    by_cg = find(rows, "optimistix", lambda row: row.variant == "LM, Normal(CG)")
    errors = quotient(gnlin.step_error, by_cg.step_error)
    as_exact = gnlin.solved and errors is not None and errors <= 1
    return [
        Figure("damped step over the hand-written limit", "<= 1.3", gnlin.ratio),
        Figure(
            "optimistix LM, default, over gnlin's damped step",
            ">= 1000",
            quotient(default.ratio, gnlin.ratio),
        ),
        Figure(
            "optimistix LM, Normal(CG), over gnlin's damped step, no less accurate",
            "> 1",
            quotient(by_cg.ratio, gnlin.ratio) if as_exact else 0.0,
        ),
    ]


def _all_libraries(task: Task, quick: bool, rounds: int) -> list[Row]:
    rows = in_a_loop(task, rounds)
    lm = "SciPy", "lm", "it needs at least as many residuals as parameters"
    if quick:
        reason = "seconds a step"
        return [
            *rows,
            skipped(task, "optimistix", "LM, default (QR)", reason),
            skipped(task, *lm),
        ]
    return [
        *rows,
        *jaxopt_in_a_loop(task, 5),
        *slower_in_a_loop(task, 5),
        *default_levenberg_marquardt(task),
        skipped(task, *lm),
    ]


def _wider(task: Task) -> list[Row]:
    p, m = task.num_parameters, task.num_outputs
    stacked, square = (8 * n * p / 2**30 for n in (m + p, p))
    hopeless = (
        ("optimistix", "LM, default (QR)", f"{m + p:,} x {p:,}, {stacked:,.0f} GiB"),
        ("jaxopt", "LM, Cholesky", f"p x p, {square:,.0f} GiB"),
        ("jaxopt", "LM, CG", f"its start forms p x p numbers, {square:,.0f} GiB"),
        ("SciPy", "lm", "it needs at least as many residuals as parameters"),
    )
    return [
        *in_a_loop(task, 3, num_steps=100),
        *slower_in_a_loop(task, 1, num_steps=2),
        *(skipped(task, *what) for what in hopeless),
    ]


def in_a_loop(
    task: Task,
    num_rounds: int,
    num_steps: int = NUM_STEPS,
    methods: Sequence[str] = ("auto", "kernel", "eigh"),
) -> list[Row]:
    """Measure the time per step inside one compiled loop. The first row is the limit."""
    cases = [
        *_limits(task, num_steps),
        *(gnlin_loop(task, method, num_steps) for method in methods),
        *optimistix_loops(task, max(1, num_steps // 10)),
    ]
    return _rows(task, cases, num_rounds, LOOP)


def slower_in_a_loop(task: Task, num_rounds: int, num_steps: int = 5) -> list[Row]:
    """Measure the slow methods separately, since they would disturb the others."""
    slow = [gnlin_loop(task, method, num_steps) for method in ("matrix-free", "svd")]
    cases = [limit(task, 100 * num_steps), *slow, *_scipy_loops(task)]
    return _rows(task, cases, num_rounds, LOOP)[1:]


def jaxopt_in_a_loop(task: Task, num_rounds: int) -> list[Row]:
    cases = [limit(task, NUM_STEPS), *_jaxopt_loops(task)]
    return _rows(task, cases, num_rounds, LOOP)[1:]


def one_call(task: Task, num_rounds: int) -> list[Row]:
    """Measure a call from Python that makes one step, including its dispatch."""
    run = floor.damped_loop()
    solver = gnlin.DampedGaussNewton(DAMPING, search=None)
    data = task.inputs, task.targets
    residuals = task.per_example()
    cases = [
        Case(LIMIT, "one step", lambda: run(task.parameters, task.args, DAMPING, 1)),
        Case("gnlin", "optx.least_squares", _optimistix(task, solver, 1, residuals)),
        Case("gnlin", "gnlin.solve", lambda: _solve(task.model, data, solver, 1)),
        Case(
            "optimistix",
            "LM, Normal(CG)",
            _optimistix(task, _lm(), 2),
            note="2 iterations, of which one is an update",
        ),
    ]
    return _rows(task, cases, num_rounds, "one call")


def default_levenberg_marquardt(task: Task) -> list[Row]:
    """Measure optimistix's default linear solver, which is so slow that it runs only
    once."""
    call = task.residuals, optx.LevenbergMarquardt(rtol=0.0, atol=0.0)
    data = task.parameters, task.args
    program: Any = eqx.filter_jit(opponents.optimistix_once)
    compiled, outputs = [], []

    def once():
        outputs.append(compiled[0](*call, *data))
        return outputs[0]

    case = Case(
        "optimistix",
        "LM, default (QR)",
        once,
        step=lambda: task.flat_step(outputs[0]),
        max_rounds=1,
        compile=lambda: compiled.append(program.lower(*call, *data).compile()),
        note="run once, for one iteration",
    )
    return _rows(task, [limit(task, NUM_STEPS), case], 1, LOOP)[1:]


def skipped(task: Task, library: str, variant: str, reason: str) -> Row:
    return Row(f"{LOOP}: {task.name}", library, variant, note=f"skipped: {reason}")


def _rows(task: Task, cases: list[Case], num_rounds: int, what: str) -> list[Row]:
    timings = alternate(cases, num_rounds)
    return [
        damped_row(f"{what}: {task.name}", timing, timings[0], task.oracle, DAMPING)
        for timing in timings
    ]


def limit(task: Task, num_steps: int) -> Case:
    """Return the hand-written step. As a solver must, it computes each step's loss and
    tests that everything is finite."""
    run = floor.checked_damped_loop(task, num_steps)
    y, args = task.parameters, task.args
    return Case(
        LIMIT,
        "",
        lambda: run(y, args, DAMPING, num_steps),
        count=lambda _: num_steps,
        step=lambda: task.flat_step(run(y, args, DAMPING, 1)[0]),
    )


def _limits(task: Task, num_steps: int) -> list[Case]:
    bare = floor.damped_loop()
    y, args = task.parameters, task.args
    return [
        limit(task, num_steps),
        Case(
            LIMIT,
            "without loss and finiteness",
            lambda: bare(y, args, DAMPING, num_steps),
            count=lambda _: num_steps,
            step=lambda: task.flat_step(bare(y, args, DAMPING, 1)),
        ),
    ]


def gnlin_loop(task: Task, method: Any, num_steps: int) -> Case:
    solver = gnlin.DampedGaussNewton(
        DAMPING, rtol=0.0, atol=0.0, search=None, method=method
    )
    data = task.inputs, task.targets
    note = "the default" if method == "auto" else ""
    return Case(
        "gnlin",
        f'DampedGaussNewton "{method}"',
        lambda: _solve(task.model, data, solver, num_steps),
        count=lambda solution: int(solution.stats["num_steps"]),
        step=_first_step(task, solver, 1, task.per_example()),
        note=note,
    )


def optimistix_loops(task: Task, num_steps: int) -> list[Case]:
    damped = opponents.optimistix_damped(opponents.CG)
    lm = _lm()
    return [
        Case(
            "optimistix",
            variant,
            _optimistix(task, solver, num_steps),
            count=_num_iterations,
            step=_first_step(task, solver, 2),
            note=note,
        )
        for variant, solver, note in (
            ("LM, Normal(CG)", lm, "its damping adapts, from 1; error 1: step rejected"),
            ("damped GN, Normal(CG)", damped, "put together from its parts"),
        )
    ]


def _jaxopt_loops(task: Task) -> list[Case]:
    by_cg = opponents.jaxopt(task, DAMPING)
    by_cholesky = opponents.jaxopt(task, DAMPING, materialize_jac=True, solver="cholesky")
    return [
        Case(
            "jaxopt",
            "LM, CG",
            lambda: by_cg(NUM_STEPS // 10),
            count=lambda _: NUM_STEPS // 10,
            step=lambda: np.asarray(by_cg(1)) - task.flat_parameters,
            note="its damping adapts, from 1; its start, of p^2 numbers, not counted",
        ),
        Case(
            "jaxopt",
            "LM, Cholesky",
            lambda: by_cholesky(1),
            step=lambda: np.asarray(by_cholesky(1)) - task.flat_parameters,
            max_rounds=1,
            note="p x p",
        ),
    ]


def _scipy_loops(task: Task) -> list[Case]:
    note = "a loop in Python; its trust region takes other steps"
    return [
        Case(
            "SciPy",
            f"trf, {name}",
            opponents.scipy_trf(task, 10, name),
            count=lambda result: result.nfev,
            note=note,
        )
        for name in ("lsmr", "exact")
    ]


def _lm() -> optx.LevenbergMarquardt:
    """Return optimistix's LM with tolerances of zero, so that it takes all its steps."""
    return optx.LevenbergMarquardt(rtol=0.0, atol=0.0, linear_solver=opponents.CG)


def arrays(model):
    """Return a model's parameters, in the structure of a task's parameters."""
    return eqx.filter(model, eqx.is_inexact_array)


def _solve(model, data, solver, num_steps) -> gnlin.Solution:
    return gnlin.solve(model, data, solver, max_steps=num_steps)


def _optimistix(task: Task, solver, max_steps: int, fn=None) -> Callable[[], Any]:
    fn = task.residuals if fn is None else fn
    return lambda: opponents.optimistix_solution(
        fn, solver, max_steps, task.parameters, task.args
    )


def _first_step(task: Task, solver, max_steps: int, fn=None) -> Callable:
    run = _optimistix(task, solver, max_steps, fn)
    return lambda: task.flat_step(run().value)


def _num_iterations(solution: optx.Solution) -> int:
    return int(solution.stats["num_steps"])
