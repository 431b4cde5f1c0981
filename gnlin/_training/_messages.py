"""Names and messages of the endings of a run."""

import math
from typing import Any

import optimistix as optx

from .._solver import AbstractGaussNewton, IterativeLinearisation, LevenbergMarquardt


LAST_FINITE = "the model is the last finite one"
AT_START = "the model is still that of the start"
LEFT_OUT = (
    "If the derivative leaves something out (`jax.lax.stop_gradient`, a derivative of "
    "your own), the loss does not follow it"
)
NO_GRADIENT = (
    "the gradient is exactly zero, as where both factors of a product are zero: start "
    "elsewhere, unless the outputs do not depend on the parameters"
)
RESULT_NAMES = (
    "successful",
    "nonlinear_max_steps_reached",
    "nonfinite",
    "nonlinear_divergence",
    "stagnation",
)
# The names of the endings that are no failure.
WELL = "successful", "nonlinear_max_steps_reached"


def result_name(result: optx.RESULTS) -> str:
    """Return the name in `optimistix.RESULTS`, whose message for success is empty."""
    for name in RESULT_NAMES:
        # Unlike the results themselves, messages are compared without a compilation.
        if optx.RESULTS[result] == optx.RESULTS[getattr(optx.RESULTS, name)]:
            return name
    return "failed"


def in_words(result: str, num_steps: int, why: str = "", *, higher: bool = False) -> str:
    """Return `Solution.reason`.

    - `why`: explains a failure.
    - `higher`: whether the linearised model alone has converged, and the loss of the
        model is higher than at the start.
    """
    if result == "successful" and higher:
        return (
            f"step {num_steps}: the linearised model has converged, but the loss of the "
            "model is higher than at the start"
        )
    if result == "nonlinear_max_steps_reached":
        all_of = "the only step was" if num_steps == 1 else f"all {num_steps} steps were"
        return f"{all_of} made"
    ended = "converged" if result == "successful" else why.split(";")[0]
    return f"step {num_steps}: {ended}"


def is_endless(period: Any) -> bool:
    """Whether each linearised model is trained to convergence."""
    return not callable(period) and math.isinf(period)


def shorter_steps(solver: AbstractGaussNewton, *, on_batches: bool) -> str:
    """Return what makes the steps of a solver shorter or more reliable, as the object of
    "use"; only what this solver has."""
    if isinstance(solver, IterativeLinearisation):
        ways = ["a smaller learning rate"]
        if is_endless(solver.period):
            ways = ["a finite `period`"]
        elif solver.period != 1:
            ways += ["fewer inner steps"]
    else:
        ways = ["more damping"] if hasattr(solver, "damping") else []
        if getattr(solver, "search", "") is None:
            ways += ['`search="auto"`']
        elif getattr(solver, "search", "") == "auto" and not on_batches:
            ways += ["`search=optimistix.BacktrackingArmijo()`"]
    if on_batches:
        ways += ["larger batches"]
    if not isinstance(solver, LevenbergMarquardt):
        ways += ["`gnlin.LevenbergMarquardt()` in place of this solver"]
    *others, last = ways or ["another start"]
    return f"{', '.join(others)} or {last}" if others else last


def why_it_ended(
    result: optx.RESULTS,
    shorter: str = "more damping, or another start",
    factor: float | None = None,
) -> str:
    """Return what went wrong in a run that failed, which model is returned, and what to
    do.

    - `shorter`: what makes the steps shorter, as `shorter_steps` returns it.
    - `factor`: the multiple of the first loss that the loss is above, if the loss of the
        run has diverged, and not a step on the linearised problem.
    """
    last = LAST_FINITE
    name = result_name(result)
    if name == "nonfinite":
        return f"a number is not finite (inf or NaN); {last}."
    if name == "stagnation":
        return (
            "it stands still without having converged: steps are within `rtol` and "
            "`atol`, or no finite step lowers the loss, although the linearised problem "
            f"promises a decrease; {last}. The point may be a minimum at which the "
            f"Jacobian is almost zero. {LEFT_OUT}: use `gnlin.GaussNewton()`, which does "
            "not compare losses. "
            "Otherwise use a smooth function, double precision, another start, or "
            "another value of a fixed damping or learning rate."
        )
    if name == "nonlinear_divergence":
        what = "the inner steps diverge on the linearised model, so they were not taken"
        if factor is not None:
            what = f"the loss is more than {factor:g} times its start"
        return f"it diverged: {what}; the model is the best so far. Use {shorter}."
    said = " ".join(optx.RESULTS[result].split()).split(". ")[0]
    return (
        f"{said}; {last}. Use more damping, double precision, or another method, such as "
        '`method="svd"`.'
    )
