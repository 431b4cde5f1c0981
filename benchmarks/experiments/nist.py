"""NIST's 27 certified regressions from both starts: gnlin beside the other libraries."""

import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
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
    """Where a solver ended, and what it took; `None` where it does not tell."""

    parameters: np.ndarray
    steps: int | None
    evaluations: int | None
    result: str
    reported: bool
    """As solved, by the solver itself."""


class Problem(Protocol):
    """NIST's, or another."""

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


def run(options: Options) -> None:
    """Solve, print, and write nist.csv and settings.json."""
    names = QUICK if options.quick else tuple(nist.MODELS)
    solvers = _quick_solvers() if options.quick else _solvers()
    console = wide_console(200)
    began = time.perf_counter()
    rows = []
    for name in names:
        problem = nist.load(name)
        for start in (1, 2):
            rows += [attempt(problem, start, *solver) for solver in solvers.items()]
        console.print(f"{name}: {time.perf_counter() - began:.0f} s so far")
    console.print(_table(rows, tuple(solvers)))
    console.print(_summary(rows, tuple(solvers)))
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


def attempt(problem: nist.Problem, start: int, solver: str, solve: Solve) -> Row:
    """One solver from one start (1 or 2). What raises has an LRE of 0, and its reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overflow on the way is part of the task
        try:
            outcome = solve(problem, problem.starts[start - 1])
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            outcome = Outcome(
                np.full(problem.certified.shape, np.nan), None, None, reason, False
            )
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
    """Of the residuals at a trial point, one a step that was taken or rejected."""
    if "num_rejected_steps" not in stats or "num_jvps" not in stats:
        return None
    return int(stats["num_accepted_steps"] + stats["num_rejected_steps"])


def jaxopt_levenberg_marquardt(problem: Problem, start: np.ndarray) -> Outcome:
    # QR on the stacked Jacobian: its other linear solvers square the condition number.
    # Its other stopping rule, on the gradient, is absolute, and mostly is never met.
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


def scipy_least_squares(method: Any, tight: bool) -> Solve:
    from scipy.optimize import least_squares

    tolerance = 1e-15 if tight else 1e-8  # the latter is its default
    # Scaling by the Jacobian's columns does better than none where precision counts.
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


def _table(rows: Sequence[Row], solvers: Sequence[str]) -> Table:
    """LRE and steps of every solver on every problem; a star where it is not solved."""
    table = Table(title="LRE / steps (* not solved)", title_justify="left")
    table.add_column("problem", no_wrap=True)
    for solver in solvers:
        table.add_column(solver, justify="right")
    cells = {(row.problem, row.start, row.solver): row for row in rows}
    for name, start in dict.fromkeys((row.problem, row.start) for row in rows):
        of_solvers = (_cell(cells[name, start, solver]) for solver in solvers)
        table.add_row(f"{name} {start}", *of_solvers)
    return table


def _cell(row: Row) -> str:
    steps = "-" if row.steps is None else f"{row.steps:,}"
    return f"{row.lre:.1f}{'' if row.solved else '*'} / {steps}"


def _summary(rows: Sequence[Row], solvers: Sequence[str]) -> Table:
    table = Table(title="All of them", title_justify="left")
    table.add_column("solver")
    for heading in ("solved", "of", "mean LRE", "median steps", "median evaluations"):
        table.add_column(heading, justify="right")
    for solver in solvers:
        own = [row for row in rows if row.solver == solver]
        table.add_row(
            solver,
            str(sum(row.solved for row in own)),
            str(len(own)),
            f"{statistics.fmean(row.lre for row in own):.2f}",
            _median([row.steps for row in own]),
            _median([row.evaluations for row in own]),
        )
    return table


def _median(counts: Sequence[int | None]) -> str:
    known = [count for count in counts if count is not None]
    return f"{statistics.median(known):,.0f}" if known else ""
