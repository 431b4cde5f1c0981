"""NIST's 27 certified regressions from both starts: gnlin and other libraries."""

import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from rich.console import Console
from rich.table import Table

import gnlin

from .._options import Options
from .._results import circumstances, write_csv, write_json
from ..data import nist
from ..speed.report import wide_console


MAX_STEPS = 5000
QUICK = ("Misra1a", "DanWood", "MGH09", "BoxBOD", "Rat43")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a solver's run, and its costs, which are `None` if the solver does not
    report them."""

    parameters: np.ndarray
    steps: int | None
    evaluations: int | None
    result: str
    reported: bool
    """Whether the solver itself reports success."""


class Problem(Protocol):
    """A least-squares problem, by NIST or another source."""

    @property
    def residuals(self) -> Callable: ...

    @property
    def x(self) -> Any: ...

    @property
    def y(self) -> Any: ...


Solve = Callable[[Any, np.ndarray], Outcome]


@dataclasses.dataclass(frozen=True)
class Row:
    problem: str
    start: int
    solver: str
    lre: float
    solved: bool
    steps: int | None
    evaluations: int | None
    result: str

    @property
    def case(self) -> str:
        return f"{self.problem} {self.start}"

    @property
    def cell(self) -> str:
        steps = "-" if self.steps is None else f"{self.steps:,}"
        return f"{self.lre:.1f}{'' if self.solved else '*'} / {steps}"


def run(options: Options) -> None:
    """Solve all problems, print the tables, and write nist.csv and settings.json."""
    names = QUICK if options.quick else tuple(nist.MODELS)
    nist.require(names)
    solvers = _quick_solvers() if options.quick else _solvers()
    console = wide_console(200)
    rows = solved_all(names, solvers, console)
    for row in rows:
        if row.lre == 0:
            console.print(f"{row.problem}, start {row.start}, {row.solver}: {row.result}")
    write_csv(options.out / "nist.csv", rows)
    settings = {
        **circumstances(),
        "quick": options.quick,
        "problems": names,
        "max_steps": MAX_STEPS,
        "solved_above": nist.SOLVED_LRE,
    }
    write_json(options.out / "settings.json", settings)


def solved_all(
    names: Sequence[str], solvers: Mapping[str, Solve], console: Console
) -> list[Row]:
    """Solve all problems from both starts; print the tables, and return the rows."""
    began = time.perf_counter()
    rows = []
    for name in names:
        problem = nist.load(name)
        for start in (1, 2):
            rows += [attempt(problem, start, *solver) for solver in solvers.items()]
        console.print(f"{name}: {time.perf_counter() - began:.0f} s so far")
    title = "LRE / steps (* not solved)"
    console.print(table_of_cases(title, rows, tuple(solvers)))
    console.print(table_of_all(rows, tuple(solvers), _COLUMNS))
    return rows


def outcome_of(solve: Solve, problem: Any, start: np.ndarray) -> Outcome:
    """Run a solver. If it raises, the outcome has parameters of NaN and the reason, and
    does not report success."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overflow during a run is part of the task
        try:
            return solve(problem, start)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            return Outcome(np.full(start.shape, np.nan), None, None, reason, False)


def attempt(problem: nist.Problem, start: int, solver: str, solve: Solve) -> Row:
    """Run one solver from one start (1 or 2). If it raises, the LRE is 0, and the result
    says why."""
    outcome = outcome_of(solve, problem, problem.starts[start - 1])
    lre = problem.lre(outcome.parameters)
    return Row(
        problem=problem.name,
        start=start,
        solver=solver,
        lre=lre,
        solved=lre > nist.SOLVED_LRE,
        steps=outcome.steps,
        evaluations=outcome.evaluations,
        result=outcome.result,
    )


#
# The solvers
#


def _quick_solvers() -> dict[str, Solve]:
    solvers = _solvers()
    return {name: solvers[name] for name in ("gnlin LM", "optimistix LM")}


def _solvers() -> dict[str, Solve]:
    tight: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
    return {
        "gnlin LM": through_optimistix(gnlin.LevenbergMarquardt()),
        "gnlin LM marquardt": _by_scaling("marquardt"),
        "gnlin LM identity": _by_scaling("identity"),
        "gnlin GN": through_optimistix(gnlin.GaussNewton(search=None)),
        "optimistix LM": through_optimistix(optx.LevenbergMarquardt(**tight)),
        "optimistix Dogleg": through_optimistix(optx.Dogleg(**tight)),
        "optimistix GN": through_optimistix(optx.GaussNewton(**tight)),
        "jaxopt LM": jaxopt_levenberg_marquardt,
        "jaxopt GN": _jaxopt_gauss_newton,
        "SciPy lm": scipy_least_squares("lm", tight=True),
        "SciPy trf": scipy_least_squares("trf", tight=True),
        "SciPy lm default": scipy_least_squares("lm", tight=False),
        "SciPy trf default": scipy_least_squares("trf", tight=False),
    }


def _by_scaling(scaling: Any) -> Solve:
    return through_optimistix(gnlin.LevenbergMarquardt(scaling=scaling))


def _data(problem: Problem) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(problem.x), jnp.asarray(problem.y)


def through_optimistix(solver: Any) -> Solve:
    def solve(problem: Problem, start: np.ndarray) -> Outcome:
        solution = optx.least_squares(
            problem.residuals,
            solver,
            jnp.asarray(start),
            _data(problem),
            max_steps=MAX_STEPS,
            throw=False,
        )
        return Outcome(
            np.asarray(solution.value),
            int(solution.stats["num_steps"]),
            _evaluations(solution.stats),
            _first_sentence(optx.RESULTS[solution.result]),
            bool(solution.result == optx.RESULTS.successful),
        )

    return solve


def _first_sentence(message: str) -> str:
    return message.replace("\n", " ").partition(". ")[0].strip() or "successful"


def _evaluations(stats: dict[str, Any]) -> int | None:
    """Return the number of trial points: one for each accepted or rejected step."""
    if "num_rejected_steps" not in stats or "num_jvps" not in stats:
        return None
    return int(stats["num_accepted_steps"] + stats["num_rejected_steps"])


def jaxopt_levenberg_marquardt(problem: Problem, start: np.ndarray) -> Outcome:
    # Use QR of the stacked Jacobian: other linear solvers square the condition number.
    # The other stopping rule has an absolute gradient tolerance, usually out of reach.
    import jaxopt

    solver = jaxopt.LevenbergMarquardt(
        problem.residuals,
        maxiter=MAX_STEPS,
        stop_criterion="madsen-nielsen",
        xtol=1e-15,
        gtol=1e-15,
        solver="qr",
        materialize_jac=True,
        implicit_diff=False,
        unroll=False,
    )
    return _jaxopt(solver, problem, start)


def _jaxopt_gauss_newton(problem: Problem, start: np.ndarray) -> Outcome:
    import jaxopt

    solver = jaxopt.GaussNewton(
        problem.residuals,
        maxiter=MAX_STEPS,
        tol=1e-12,
        implicit_diff=False,
        unroll=False,
    )
    return _jaxopt(solver, problem, start)


def _jaxopt(solver: Any, problem: Problem, start: np.ndarray) -> Outcome:
    end = jax.jit(solver.run)(jnp.asarray(start), _data(problem))
    steps = int(end.state.iter_num)
    stopped = "stopped by itself" if steps < MAX_STEPS else "all steps used"
    return Outcome(np.asarray(end.params), steps, None, stopped, steps < MAX_STEPS)


def scipy_least_squares(method: Any, tight: bool, bounds: Any = None) -> Solve:
    from scipy.optimize import least_squares

    tolerance = 1e-15 if tight else 1e-8  # the latter is its default
    # Scaling by the Jacobian's columns is better than none if precision matters.
    x_scale: Any = "jac" if tight else 1.0

    def solve(problem: Problem, start: np.ndarray) -> Outcome:
        data = _data(problem)
        residuals = jax.jit(problem.residuals)
        jacobian: Any = jax.jit(jax.jacfwd(problem.residuals))
        exact: Any = lambda b: np.asarray(jacobian(jnp.asarray(b), data))
        result = least_squares(
            lambda b: np.asarray(residuals(jnp.asarray(b), data)),
            start,
            exact,
            method=method,
            bounds=(-np.inf, np.inf) if bounds is None else bounds,
            max_nfev=MAX_STEPS,
            x_scale=x_scale,
            ftol=tolerance,
            xtol=tolerance,
            gtol=tolerance,
        )
        counts = int(result.njev), int(result.nfev)
        return Outcome(result.x, *counts, result.message, result.status > 0)

    return solve


#
# The tables
#


def table_of_cases(title: str, rows: Sequence[Any], solvers: Sequence[str]) -> Table:
    """Make a table of each row's `cell`, with a row for each case and a column for each
    solver."""
    table = Table(title=title, title_justify="left")
    table.add_column("problem", no_wrap=True)
    for solver in solvers:
        table.add_column(solver, justify="right")
    cells = {(row.case, row.solver): row.cell for row in rows}
    for case in dict.fromkeys(row.case for row in rows):
        table.add_row(case, *(cells[case, solver] for solver in solvers))
    return table


def table_of_all(
    rows: Sequence[Any],
    solvers: Sequence[str],
    columns: Mapping[str, Callable[[list[Any]], str]],
) -> Table:
    """Make a table with a row for each solver. `columns` maps each heading to a function
    of the solver's rows."""
    table = Table(title="All problems", title_justify="left")
    table.add_column("solver")
    for heading in columns:
        table.add_column(heading, justify="right")
    for solver in solvers:
        own = [row for row in rows if row.solver == solver]
        table.add_row(solver, *(of(own) for of in columns.values()))
    return table


_COLUMNS: dict[str, Callable[[list[Row]], str]] = {
    "solved": lambda own: str(sum(row.solved for row in own)),
    "of": lambda own: str(len(own)),
    "mean LRE": lambda own: f"{statistics.fmean(row.lre for row in own):.2f}",
    "median steps": lambda own: _median([row.steps for row in own]),
    "median evaluations": lambda own: _median([row.evaluations for row in own]),
}


def _median(counts: Sequence[int | None]) -> str:
    known = [count for count in counts if count is not None]
    return f"{statistics.median(known):,.0f}" if known else ""
