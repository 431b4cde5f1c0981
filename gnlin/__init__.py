"""Second-order solvers for networks and for nonlinear least squares, in JAX."""

from importlib.metadata import version as _version

from . import (
    callbacks as callbacks,
    features as features,
    filters as filters,
    preconditioners as preconditioners,
)
from ._accuracy import accuracy as accuracy
from ._conjugate_gradients import ConjugateGradients as ConjugateGradients
from ._fit import (
    Checkpoint as Checkpoint,
    CheckpointError as CheckpointError,
    fit as fit,
)
from ._linearisation import (
    Linearisation as Linearisation,
    linearise as linearise,
)
from ._losses import (
    AbstractElementwiseLoss as AbstractElementwiseLoss,
    AbstractFactor as AbstractFactor,
    AbstractLoss as AbstractLoss,
    DenseFactor as DenseFactor,
    DiagonalFactor as DiagonalFactor,
    Huber as Huber,
    LogCosh as LogCosh,
    PoissonNLL as PoissonNLL,
    PseudoHuber as PseudoHuber,
    SigmoidCrossEntropy as SigmoidCrossEntropy,
    SoftmaxCrossEntropy as SoftmaxCrossEntropy,
    SquaredError as SquaredError,
)
from ._objective import (
    AbstractObjective as AbstractObjective,
    BatchLoss as BatchLoss,
    Quadratic as Quadratic,
    SumOfSquares as SumOfSquares,
)
from ._per_example import PerExample as PerExample
from ._schedules import EisenstatWalker as EisenstatWalker
from ._solution import History as History, Solution as Solution
from ._solve import solve as solve
from ._solver import (
    AbstractGaussNewton as AbstractGaussNewton,
    AdaptiveLinearisation as AdaptiveLinearisation,
    DampedGaussNewton as DampedGaussNewton,
    FilteredGaussNewton as FilteredGaussNewton,
    GaussNewton as GaussNewton,
    IterativeLinearisation as IterativeLinearisation,
    LevenbergMarquardt as LevenbergMarquardt,
    Trajectory as Trajectory,
    TruncatedGaussNewton as TruncatedGaussNewton,
    Update as Update,
)
from ._spectrum import Spectrum as Spectrum
from ._subproblem import MixedPrecision as MixedPrecision
from .filters import (
    equivalent_damping as equivalent_damping,
    equivalent_period as equivalent_period,
)


__version__ = _version("gnlin")
