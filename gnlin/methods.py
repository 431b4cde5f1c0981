"""Further solvers, and what the solvers take as arguments: searches, linear solvers, and
schedules.

- Solvers: `AdaptiveLinearisation`, `FilteredGaussNewton`.
- For `method`: `ConjugateGradients`, `MixedPrecision`, `NystromKernel`.
- For `search`: `GridSearch`.
- For `tolerance`: `EisenstatWalker`.
- For optimistix's `adjoint`: `ImplicitAdjoint`.
- `Trajectory`: the inner steps of iterative linearisation, one by one.
"""

from ._linear_algebra._conjugate_gradients import ConjugateGradients
from ._solver import AdaptiveLinearisation, FilteredGaussNewton, GridSearch, Trajectory
from ._solver._adjoint import ImplicitAdjoint
from ._solver._schedules import EisenstatWalker
from ._subproblem import MixedPrecision, NystromKernel


__all__ = [
    "AdaptiveLinearisation",
    "ConjugateGradients",
    "EisenstatWalker",
    "FilteredGaussNewton",
    "GridSearch",
    "ImplicitAdjoint",
    "MixedPrecision",
    "NystromKernel",
    "Trajectory",
]
