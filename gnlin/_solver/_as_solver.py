"""What a user may pass as a solver."""

from typing import Any

from ._base import AbstractGaussNewton
from ._iterative_linearisation import IterativeLinearisation


def as_solver(solver: Any) -> AbstractGaussNewton:
    """A solver of gnlin's; an optimiser of optax's is iterative linearisation at every
    step."""
    if isinstance(solver, AbstractGaussNewton):
        return solver
    if _is_optimiser(solver):
        return IterativeLinearisation(1, optimiser=solver, restart=False)
    named = getattr(solver, "__name__", None)  # of a function or a class
    given = f"a {type(solver).__name__}" if named is None else f"`{named}`"
    raise ValueError(
        "`solver` must be one of gnlin's, such as `gnlin.LevenbergMarquardt()`, or an "
        f"optimiser of optax's, but {given} was given; for other least-squares "
        "solvers use `optimistix.least_squares`."
    )


def _is_optimiser(solver: Any) -> bool:
    # Of optax's, a pair of functions; optimistix's solvers have an `init`, and a `step`.
    has_both = callable(getattr(solver, "init", None)) and callable(
        getattr(solver, "update", None)
    )
    return has_both and not isinstance(solver, type)
