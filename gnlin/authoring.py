"""Base classes and functions for your own solvers, losses and subproblems.

- **A solver** is a subclass of `AbstractGaussNewton`, or of `AbstractFilteredGaussNewton`
    if its step is a spectral filter. Its `update` asks `choose` for a subproblem, solves
    it, and returns an `Update`, which `take_step` makes for most solvers.
- **A loss** is a subclass of `AbstractElementwiseLoss`, or of `AbstractLoss` with a
    factor of its Hessian.
- **An objective** is a loss on a batch of targets, with its quadratic expansion.
- **A way to solve** the linearised problem is a subclass of `AbstractMethod`, for the
    argument `method` of solvers. All ways are subproblems, an `AbstractSubproblem`.
"""

from ._common._passes import Passes
from ._jacobian import AbstractJacobian
from ._linearisation._objective import AbstractObjective, BatchLoss, SumOfSquares
from ._linearisation._quadratic import Quadratic
from ._solver import AbstractFilteredGaussNewton, AbstractGaussNewton, take_step, Update
from ._subproblem import AbstractMethod, AbstractSubproblem, Answer, choose
from .losses import AbstractElementwiseLoss, AbstractLoss
from .losses._factors import AbstractFactor, DenseFactor, DiagonalFactor


__all__ = [
    "AbstractElementwiseLoss",
    "AbstractFactor",
    "AbstractFilteredGaussNewton",
    "AbstractGaussNewton",
    "AbstractJacobian",
    "AbstractLoss",
    "AbstractMethod",
    "AbstractObjective",
    "AbstractSubproblem",
    "Answer",
    "BatchLoss",
    "DenseFactor",
    "DiagonalFactor",
    "Passes",
    "Quadratic",
    "SumOfSquares",
    "Update",
    "choose",
    "take_step",
]
