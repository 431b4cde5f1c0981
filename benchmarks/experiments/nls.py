"""Moré, Garbow and Hillstrom's problems from near and far: gnlin and other libraries.

There are 41 least-squares problems, each from its start and from 10 and 100 times as far
from zero. A run is *solved* if its sum of squares is one of the known minima. A report of
success is *false* if the run is not solved and SciPy, started at its end, finds a smaller
sum.

The same problems are run with bounds that exclude the minimum in half of the parameters,
beside SciPy's methods that accept bounds. Such a run is *solved* if it reaches the least
sum of squares that any solver finds from any start.

Further tables show NIST's certified fits by the same solvers, and sparse problems with
thousands of parameters.
"""

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from rich.console import Console

import gnlin

from .._options import Options
from .._results import circumstances, write_csv, write_json
from ..data.classical import FACTORS, Problem, PROBLEMS
from ..data.nist import MODELS, require
from ..figures import figure
from ..speed.report import wide_console
from . import nist, nls_sparse
from .nist import (
    jaxopt_levenberg_marquardt,
    MAX_STEPS,
    Outcome,
    outcome_of,
    scipy_least_squares,
    Solve,
    solved_all,
    table_of_all,
    table_of_cases,
    through_optimistix,
)


QUICK = ("rosenbrock-2", "helical_valley-3", "bard-3")
QUICK_CERTIFIED = ("Misra1a", "BoxBOD")
FACTORS_IN_BOXES = 1.0, 10.0
# A report is false only if another solver reduces the sum by more than this part.
_GAIN = 1e-6


@dataclasses.dataclass(frozen=True)
class Row:
    problem: str
    factor: float
    solver: str
    sum_of_squares: float
    solved: bool
    reported: bool
    false: bool
    steps: int | None
    evaluations: int | None
    result: str

    @property
    def case(self) -> str:
        return f"{self.problem} x {self.factor:g}"

    @property
    def cell(self) -> str:
        steps = "-" if self.steps is None else f"{self.steps:,}"
        marks = "*" * (not self.solved) + "!" * self.false
        return f"{self.sum_of_squares:.6g}{marks} / {steps}"


def run(options: Options) -> None:
    """Solve all problems, print the tables, and write the rows and the profiles."""
    names = QUICK_CERTIFIED if options.quick else tuple(MODELS)
    require(names)
    problems = [p for p in PROBLEMS if not options.quick or p.name in QUICK]
    solvers = _solvers(options.quick)
    console = wide_console(200)
    began = time.perf_counter()
    rows = []
    for problem in problems:
        for factor in FACTORS:
            rows += [attempt(problem, factor, *solver) for solver in solvers.items()]
        jax.clear_caches()
        console.print(f"{problem.name}: {time.perf_counter() - began:.0f} s so far")
    title = "Sum of squares / steps (* not solved, ! falsely reported)"
    console.print(table_of_cases(title, rows, tuple(solvers)))
    console.print(table_of_all(rows, tuple(solvers), _COLUMNS))
    write_csv(options.out / "nls.csv", rows)
    bounded_rows = _in_boxes(problems, console)
    write_csv(options.out / "nls_bounded.csv", bounded_rows)
    certified_rows = solved_all(names, solvers, console)
    write_csv(options.out / "nls_nist.csv", certified_rows)
    sparse_rows = nls_sparse.run(options.quick, console)
    write_csv(options.out / "nls_sparse.csv", sparse_rows)
    settings = {
        **circumstances(),
        "quick": options.quick,
        "problems": [problem.name for problem in problems],
        "factors": FACTORS,
        "factors_in_boxes": FACTORS_IN_BOXES,
        "max_steps": MAX_STEPS,
    }
    write_json(options.out / "settings.json", settings)
    draw([*rows, *certified_rows], tuple(solvers), options.out)


def attempt(problem: Problem, factor: float, solver: str, solve: Solve) -> Row:
    """Run one solver from one start, and judge its outcome."""
    outcome = outcome_of(solve, problem, problem.from_far(factor))
    return judged(problem, factor, solver, outcome)


def judged(problem: Problem, factor: float, solver: str, outcome: Outcome) -> Row:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        end = sum_of_squares(problem, outcome.parameters)
        solved = problem.is_minimum(end)
        false = outcome.reported and not solved and _goes_on(problem, outcome.parameters)
    return Row(
        problem=problem.name,
        factor=factor,
        solver=solver,
        sum_of_squares=end,
        solved=solved,
        reported=outcome.reported,
        false=false,
        steps=outcome.steps,
        evaluations=outcome.evaluations,
        result=outcome.result,
    )


def sum_of_squares(problem: Problem, y: np.ndarray) -> float:
    """Return the sum of squares; NaN outside the bounds."""
    if problem.bounds is not None:
        lower, upper = problem.bounds
        if not np.all((lower <= y) & (y <= upper)):
            return np.nan
    return float(jnp.sum(problem.residuals(jnp.asarray(y)) ** 2))


def _goes_on(problem: Problem, y: np.ndarray) -> bool:
    """Return whether one of SciPy's methods finds a smaller sum, starting at `y`."""
    before = sum_of_squares(problem, y)
    if not np.isfinite(before):
        return True
    for method in ("lm", "trf") if problem.bounds is None else ("trf", "dogbox"):
        solve = scipy_least_squares(method, True, problem.bounds)
        try:
            after = solve(problem, y).parameters
        except ValueError:  # SciPy rejects this start
            continue
        if sum_of_squares(problem, after) < (1 - _GAIN) * before:
            return True
    return False


def _solvers(quick: bool) -> dict[str, Solve]:
    ours = {"gnlin LM": through_optimistix(gnlin.LevenbergMarquardt())}
    rule = gnlin.damping.TrustRegion()
    theirs = optx.LevenbergMarquardt(rtol=1e-10, atol=1e-10)
    if quick:
        return {**ours, "SciPy lm": scipy_least_squares("lm", tight=True)}
    return {
        **ours,
        "gnlin LM, trust region": through_optimistix(
            gnlin.LevenbergMarquardt(damping=rule)
        ),
        "optimistix LM": through_optimistix(theirs),
        "jaxopt LM": jaxopt_levenberg_marquardt,
        "SciPy lm": scipy_least_squares("lm", tight=True),
        "SciPy trf": scipy_least_squares("trf", tight=True),
        "SciPy dogbox": scipy_least_squares("dogbox", tight=True),
    }


#
# With bounds
#


def _in_boxes(problems: Sequence[Problem], console: Console) -> list[Row]:
    """Solve the problems in boxes around their minima, without those whose minimum SciPy
    does not find from the usual start."""
    rows, left_out = [], []
    for problem in problems:
        start = problem.from_far(1.0)
        found = outcome_of(scipy_least_squares("lm", tight=True), problem, start)
        if not problem.is_minimum(sum_of_squares(problem, found.parameters)):
            left_out.append(problem.name)
            continue
        rows += in_a_box(problem.in_a_box(found.parameters))
        jax.clear_caches()
    solvers = tuple(_bounded_solvers(problems[0].in_a_box(np.zeros(1))))
    title = "With bounds: sum of squares / steps (* not solved, ! falsely reported)"
    console.print(table_of_cases(title, rows, solvers))
    columns = {**_COLUMNS, "median evaluations": _median("evaluations")}
    console.print(table_of_all(rows, solvers, columns))
    if left_out:
        console.print(
            "Left out, because SciPy's lm does not find the minimum: "
            f"{', '.join(left_out)}."
        )
    return rows


def in_a_box(problem: Problem) -> list[Row]:
    outcomes = {
        (factor, name): outcome_of(solve, problem, problem.from_far(factor))
        for factor in FACTORS_IN_BOXES
        for name, solve in _bounded_solvers(problem).items()
    }
    ends = [sum_of_squares(problem, outcome.parameters) for outcome in outcomes.values()]
    known = dataclasses.replace(problem, minima=(float(np.nanmin(ends)),))
    return [judged(known, *case, outcome) for case, outcome in outcomes.items()]


def _bounded_solvers(problem: Problem) -> dict[str, Solve]:
    bounds = problem.bounds
    return {
        "gnlin LM": through_optimistix(gnlin.LevenbergMarquardt(bounds=bounds)),
        "SciPy trf": scipy_least_squares("trf", True, bounds),
        "SciPy dogbox": scipy_least_squares("dogbox", True, bounds),
    }


#
# The tables
#


def _median(name: str) -> Callable[[list[Row]], str]:
    """Return a column of the table: the median of a count over the solved runs."""

    def of(own: list[Row]) -> str:
        counts = [getattr(row, name) for row in own if row.solved]
        known = [count for count in counts if count is not None]
        return f"{np.median(known):g}" if known else ""

    return of


_COLUMNS: dict[str, Callable[[list[Row]], str]] = {
    "solved": lambda own: str(sum(row.solved for row in own)),
    "and reported": lambda own: str(sum(row.solved and row.reported for row in own)),
    "falsely reported": lambda own: str(sum(row.false for row in own)),
    "of": lambda own: str(len(own)),
    "median steps": _median("steps"),
}


def draw(rows: Sequence[Row | nist.Row], solvers: Sequence[str], folder: Path) -> None:
    """Draw performance profiles of the steps (Dolan and Moré, 2002): over each ratio, the
    share of the problems that a solver solves in at most this many times the fewest steps
    of any solver."""
    cases = list(dict.fromkeys(row.case for row in rows))
    steps = np.full((len(solvers), len(cases)), np.inf)
    for row in rows:
        if row.solved and row.steps is not None:
            steps[solvers.index(row.solver), cases.index(row.case)] = max(row.steps, 1)
    fewest = steps.min(axis=0)
    ratios = steps[:, np.isfinite(fewest)] / fewest[np.isfinite(fewest)]
    at = np.logspace(0, 3, 200)
    with figure(folder / "nls.png", 8, 5) as drawing:
        ax = drawing.subplots()
        for solver, own in zip(solvers, ratios, strict=True):
            share = [np.sum(own <= ratio) / len(cases) for ratio in at]
            ax.plot(at, share, label=solver)
        ax.set(
            xscale="log",
            xlabel="Steps, relative to the fewest of any solver",
            ylabel="Share of the problems",
            ylim=(0, 1),
        )
        ax.legend()
