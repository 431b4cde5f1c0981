"""Check a `solver` argument, which may be an optax optimiser."""

from typing import Any

from ._base import AbstractGaussNewton
from ._iterative_linearisation import IterativeLinearisation


def as_solver(solver: Any) -> AbstractGaussNewton:
    """Return a solver as it is, and an optax optimiser as iterative linearisation with a
    period of 1."""
    if isinstance(solver, AbstractGaussNewton):
        return solver
    if _is_optimiser(solver):
        return IterativeLinearisation(1, optimiser=solver, restart=False)
    named = getattr(solver, "__name__", None)
    given = f"a {type(solver).__name__}" if named is None else f"`{named}`"
    raise ValueError(
        "`solver` must be one of gnlin's, such as `gnlin.LevenbergMarquardt()`, or an "
        f"optax optimiser, but {given} was given; with other least-squares solvers use "
        "`optimistix.least_squares`."
    )


def _is_optimiser(solver: Any) -> bool:
    # Solvers of optimistix have `init`, too, but `step` in place of `update`.
    has_both = callable(getattr(solver, "init", None)) and callable(
        getattr(solver, "update", None)
    )
    return has_both and not isinstance(solver, type)
