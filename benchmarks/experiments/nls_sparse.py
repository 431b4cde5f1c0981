"""Classical sparse problems with thousands of parameters: gnlin and other libraries.

Each residual depends on a few parameters only. Each problem is run from its start and
from 10 and 100 times as far. A run is *solved* if its sum of squares is the minimum,
which is zero. A report of success is *false* if the run is not solved.
"""

import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
from rich.console import Console

import gnlin

from ..data.classical import FACTORS, Problem, sparse_ones
from .nist import Outcome, outcome_of, Solve, table_of_all, table_of_cases


NUM_PARAMETERS, NUM_PARAMETERS_QUICK = 5_000, 40
QUICK = "broyden_tridiagonal"
MAX_STEPS = 500
_TOLERANCE = 1e-10


@dataclasses.dataclass(frozen=True)
class Row:
    problem: str
    factor: float
    solver: str
    sum_of_squares: float
    solved: bool
    reported: bool
    steps: int | None
    seconds: float
    """Seconds of the second run, since the first one compiles."""
    result: str

    @property
    def case(self) -> str:
        return f"{self.problem} x {self.factor:g}"

    @property
    def false(self) -> bool:
        return self.reported and not self.solved

    @property
    def cell(self) -> str:
        steps = "-" if self.steps is None else f"{self.steps:,}"
        marks = "*" * (not self.solved) + "!" * self.false
        return f"{self.sum_of_squares:.2g}{marks} / {steps} / {self.seconds:.2g} s"


def run(quick: bool, console: Console) -> list[Row]:
    """Solve the problems, print the tables, and return the rows."""
    rows, began = [], time.perf_counter()
    problems = sparse_ones(NUM_PARAMETERS_QUICK if quick else NUM_PARAMETERS)
    for problem in problems:
        if quick and not problem.name.startswith(QUICK):
            continue
        solvers = solvers_of(problem)
        for factor in FACTORS:
            rows += [attempt(problem, factor, *solver) for solver in solvers.items()]
        jax.clear_caches()
        console.print(f"{problem.name}: {time.perf_counter() - began:.0f} s so far")
    title = "Sparse: sum of squares / steps / seconds (* not solved, ! falsely reported)"
    names = list(dict.fromkeys(row.solver for row in rows))
    console.print(table_of_cases(title, rows, names))
    console.print(table_of_all(rows, names, _COLUMNS))
    return rows


def attempt(problem: Problem, factor: float, solver: str, solve: Solve) -> Row:
    """Run one solver from one start, twice, and time the second run."""
    start = problem.from_far(factor)
    outcome_of(solve, problem, start)  # compiles
    began = time.perf_counter()
    outcome = outcome_of(solve, problem, start)
    seconds = time.perf_counter() - began
    end = float(jnp.sum(problem.residuals(jnp.asarray(outcome.parameters)) ** 2))
    return Row(
        problem=problem.name,
        factor=factor,
        solver=solver,
        sum_of_squares=end,
        solved=problem.is_minimum(end),
        reported=outcome.reported,
        steps=outcome.steps,
        seconds=seconds,
        result=outcome.result,
    )


def solvers_of(problem: Problem) -> dict[str, Solve]:
    """Return the solvers for a problem, whose sparsity pattern is found once."""
    by_products = lx.Normal(lx.CG(_TOLERANCE, _TOLERANCE, max_steps=10_000))
    known = gnlin.Sparsity(problem.residuals, jnp.asarray(problem.start))
    ours = gnlin.Residuals(problem.residuals, sparsity=known)
    tight: dict[str, Any] = {"rtol": _TOLERANCE, "atol": _TOLERANCE}
    theirs = optx.LevenbergMarquardt(**tight, linear_solver=by_products)
    return {
        "gnlin LM": _through_optimistix(ours, gnlin.LevenbergMarquardt()),
        "optimistix LM, CG": _through_optimistix(problem.residuals, theirs),
        "jaxopt LM, CG": _jaxopt(problem),
        "SciPy trf, sparse": _scipy(problem),
    }


def _through_optimistix(residuals: Any, solver: Any) -> Solve:
    def solve(problem: Problem, start: np.ndarray) -> Outcome:
        solution = optx.least_squares(
            residuals, solver, jnp.asarray(start), max_steps=MAX_STEPS, throw=False
        )
        reported = bool(solution.result == optx.RESULTS.successful)
        steps = int(solution.stats["num_steps"])
        said = "successful" if reported else optx.RESULTS[solution.result]
        return Outcome(np.asarray(solution.value), steps, None, said, reported)

    return solve


def _jaxopt(problem: Problem) -> Solve:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # on import
        import jaxopt

    solver = jaxopt.LevenbergMarquardt(
        problem.residuals,
        maxiter=MAX_STEPS,
        stop_criterion="madsen-nielsen",
        xtol=_TOLERANCE,
        gtol=_TOLERANCE,
        implicit_diff=False,
        unroll=False,
    )
    compiled: Callable[[Any], Any] = jax.jit(solver.run)

    def solve(problem: Problem, start: np.ndarray) -> Outcome:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            end = compiled(jnp.asarray(start))
        steps = int(end.state.iter_num)
        reported = steps < MAX_STEPS
        said = "stopped by itself" if reported else "all steps used"
        return Outcome(np.asarray(end.params), steps, None, said, reported)

    return solve


def _scipy(problem: Problem) -> Solve:
    """Return SciPy's solver with the exact sparse Jacobian, by one pass for each colour,
    and with tolerances close to rounding."""
    import asdex
    from scipy.optimize import least_squares
    from scipy.sparse import csr_array

    residuals: Any = jax.jit(problem.residuals)
    derivative: Any = jax.jit(
        asdex.jacobian(problem.residuals, jnp.asarray(problem.start))
    )

    def jacobian(b: np.ndarray) -> csr_array:
        found = derivative(jnp.asarray(b))
        index = np.asarray(found.indices)
        return csr_array((np.asarray(found.data), index.T), found.shape)

    def solve(problem: Problem, start: np.ndarray) -> Outcome:
        result = least_squares(
            lambda b: np.asarray(residuals(jnp.asarray(b))),
            start,
            jacobian,  # type: ignore[arg-type]
            method="trf",
            x_scale="jac",
            max_nfev=MAX_STEPS,
            ftol=1e-15,
            xtol=1e-15,
            gtol=1e-15,
        )
        counts = int(result.njev), int(result.nfev)
        return Outcome(result.x, *counts, result.message, result.status > 0)

    return solve


def _median(values: list[Any]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.3g}" if known else ""


_COLUMNS: dict[str, Callable[[list[Row]], str]] = {
    "solved": lambda own: str(sum(row.solved for row in own)),
    "and reported": lambda own: str(sum(row.solved and row.reported for row in own)),
    "falsely reported": lambda own: str(sum(row.false for row in own)),
    "of": lambda own: str(len(own)),
    "median steps": lambda own: _median([row.steps for row in own if row.solved]),
    "median seconds": lambda own: _median([row.seconds for row in own if row.solved]),
}
