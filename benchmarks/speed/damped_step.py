"""One damped Gauss-Newton step, gnlin beside the hand-written limit and the others."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np
import optimistix as optx

import gnlin

from . import floor, opponents
from .report import damped_row, Row
from .task import DAMPING, Task
from .timing import alternate, Case


LIMIT = "hand-written"
NUM_STEPS = 200


def in_a_loop(task: Task, num_rounds: int, others: bool) -> list[Row]:
    """Time per step inside one compiled program of many. The first row is the limit."""
    cases = _limits(task) + _gnlin_loops(task) + _optimistix_loops(task)
    if others:
        cases += _jaxopt_loops(task) + _scipy_loops(task)
    return _rows(task, "in a loop", cases, num_rounds)


def one_call(task: Task, num_rounds: int) -> list[Row]:
    """Time of a call from Python that makes one step, dispatch and all."""
    run = floor.damped_loop(task)
    solver = gnlin.DampedGaussNewton(DAMPING)
    data = task.inputs, task.targets
    residuals = task.per_example()
    cases = [
        Case(LIMIT, "", lambda: run(task.parameters, task.args, DAMPING, 1)),
        Case("gnlin", "optx.least_squares", _optimistix(task, solver, 1, residuals)),
        Case("gnlin", "gnlin.solve", lambda: _solve(task.model, data, solver, 1)),
        Case(
            "optimistix",
            "LM, Normal(CG)",
            _optimistix(task, _lm(opponents.CG), 2),
            note="2 iterations, of which one is an update",
        ),
    ]
    return _rows(task, "one call", cases, num_rounds)


def default_levenberg_marquardt(task: Task) -> list[Row]:
    """optimistix's own choice of linear solver: so slow that it runs only once."""
    solver = _lm(None)
    run = eqx.filter_jit(opponents.optimistix_solution).lower
    compiled: list[Any] = []
    outputs: list[Any] = []

    def build():
        compiled.append(run(task.residuals, solver, 2, task.parameters, task.args).compile())

    def once():
        outputs.append(compiled[0](task.residuals, solver, 2, task.parameters, task.args))
        return outputs[-1]

    case = Case(
        "optimistix",
        "LM, default (QR)",
        once,
        count=_num_iterations,
        step=lambda: task.flat_step(outputs[0].value),
        max_rounds=1,
        compile=build,
        note="one run of 2 iterations",
    )
    limit = Case(
        LIMIT,
        "",
        lambda: floor_run(task.parameters, task.args, DAMPING, NUM_STEPS),
        count=lambda _: NUM_STEPS,
    )
    floor_run = floor.damped_loop(task)
    return _rows(task, "in a loop", [limit, case], 1)[1:]


def _rows(task: Task, what: str, cases: list[Case], num_rounds: int) -> list[Row]:
    oracle = task.oracle()
    timings = alternate(cases, num_rounds)
    return [
        damped_row(f"{what}: {task.name}", timing, timings[0], oracle, DAMPING)
        for timing in timings
    ]


def _limits(task: Task) -> list[Case]:
    bare = floor.damped_loop(task)
    checked = floor.checked_damped_loop(task, NUM_STEPS)
    y, args = task.parameters, task.args
    return [
        Case(
            LIMIT,
            "",
            lambda: bare(y, args, DAMPING, NUM_STEPS),
            count=lambda _: NUM_STEPS,
            step=lambda: task.flat_step(bare(y, args, DAMPING, 1)),
        ),
        Case(
            LIMIT,
            "with loss and finiteness",
            lambda: checked(y, args, DAMPING, NUM_STEPS),
            count=lambda _: NUM_STEPS,
            step=lambda: task.flat_step(checked(y, args, DAMPING, 1)[0]),
        ),
    ]


# An SVD of the m x p Jacobian takes tens of the others' steps.
_GNLIN_STEPS = {"auto": NUM_STEPS, "kernel": NUM_STEPS, "eigh": NUM_STEPS, "svd": 5}


def _gnlin_loops(task: Task) -> list[Case]:
    return [
        _gnlin_loop(task, method, num_steps)
        for method, num_steps in {**_GNLIN_STEPS, "matrix-free": 20}.items()
    ]


def _gnlin_loop(task: Task, method: Any, num_steps: int) -> Case:
    solver = gnlin.DampedGaussNewton(DAMPING, rtol=0.0, atol=0.0, method=method)
    data = task.inputs, task.targets
    note = "the default" if method == "auto" else ""
    return Case(
        "gnlin",
        f'DampedGaussNewton "{method}"',
        lambda: _solve(task.model, data, solver, num_steps),
        count=lambda solution: int(solution.stats["num_steps"]),
        step=_first_step(task, solver, 1, task.per_example()),
        max_rounds=3 if num_steps < NUM_STEPS else None,
        note=note,
    )


def _optimistix_loops(task: Task) -> list[Case]:
    damped = opponents.OptimistixDamped(opponents.CG)
    lm = _lm(opponents.CG)
    return [
        Case(
            "optimistix",
            variant,
            _optimistix(task, solver, NUM_STEPS),
            count=_num_iterations,
            step=_first_step(task, solver, 2),
            note=note,
        )
        for variant, solver, note in (
            ("LM, Normal(CG)", lm, "its damping adapts, from 1"),
            ("damped GN, Normal(CG)", damped, "put together from its parts"),
        )
    ]


def _jaxopt_loops(task: Task) -> list[Case]:
    by_cg = opponents.jaxopt(task, DAMPING)
    by_cholesky = opponents.jaxopt(
        task, DAMPING, materialize_jac=True, solver="cholesky"
    )
    return [
        Case(
            "jaxopt",
            "LM, CG",
            lambda: by_cg(NUM_STEPS),
            count=lambda _: NUM_STEPS,
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
            max_rounds=5,
            note=note,
        )
        for name in ("lsmr", "exact")
    ]


def _lm(linear_solver) -> optx.LevenbergMarquardt:
    """Tolerances of zero: it does not stop before its last step."""
    if linear_solver is None:
        return optx.LevenbergMarquardt(rtol=0.0, atol=0.0)
    return optx.LevenbergMarquardt(rtol=0.0, atol=0.0, linear_solver=linear_solver)


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
