"""Further solvers, and objects that solvers take as arguments.

- A solver: `FilteredGaussNewton`.
- For the argument `method`: `ConjugateGradients`, `NystromKernel`.
- For `search`: `GridSearch`.
- For `tolerance`: `EisenstatWalker`.
- For the `adjoint` of optimistix: `ImplicitAdjoint`.
"""

from ._common._checks import says_where
from ._linear_algebra._conjugate_gradients import ConjugateGradients
from ._solver import FilteredGaussNewton, GridSearch
from ._solver._adjoint import ImplicitAdjoint
from ._solver._schedules import EisenstatWalker
from ._subproblem import NystromKernel


__all__ = [
    "ConjugateGradients",
    "EisenstatWalker",
    "FilteredGaussNewton",
    "GridSearch",
    "ImplicitAdjoint",
    "NystromKernel",
]

__getattr__ = says_where(
    __name__,
    Trajectory="use `spectrum.step(solver.filter(k))`, with `spectrum = lin.spectrum()`",
)
