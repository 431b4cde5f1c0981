"""Second-order solvers for networks and for nonlinear least squares, in JAX."""

from importlib.metadata import version as _version

from . import (
    callbacks as callbacks,
    damping as damping,
    features as features,
    filters as filters,
    preconditioners as preconditioners,
    predict as predict,
    spectra as spectra,
)
from ._common._passes import Passes as Passes
from ._curve_fit import (
    curve_fit as curve_fit,
    CurveFit as CurveFit,
)
from ._fit import (
    Checkpoint as Checkpoint,
    CheckpointError as CheckpointError,
    fit as fit,
)
from ._jacobian import (
    AbstractJacobian as AbstractJacobian,
    PerExample as PerExample,
    Sparsity as Sparsity,
)
from ._linear_algebra._conjugate_gradients import ConjugateGradients as ConjugateGradients
from ._linearisation._linearisation import (
    Linearisation as Linearisation,
    linearise as linearise,
)
from ._linearisation._objective import (
    AbstractObjective as AbstractObjective,
    BatchLoss as BatchLoss,
    SumOfSquares as SumOfSquares,
)
from ._linearisation._quadratic import Quadratic as Quadratic
from ._linearisation._spectrum import Spectrum as Spectrum
from ._solve import solve as solve
from ._solver import (
    AbstractFilteredGaussNewton as AbstractFilteredGaussNewton,
    AbstractGaussNewton as AbstractGaussNewton,
    AdaptiveLinearisation as AdaptiveLinearisation,
    DampedGaussNewton as DampedGaussNewton,
    FilteredGaussNewton as FilteredGaussNewton,
    GaussNewton as GaussNewton,
    GridSearch as GridSearch,
    IterativeLinearisation as IterativeLinearisation,
    LevenbergMarquardt as LevenbergMarquardt,
    take_step as take_step,
    Trajectory as Trajectory,
    TruncatedGaussNewton as TruncatedGaussNewton,
    Update as Update,
)
from ._solver._adjoint import ImplicitAdjoint as ImplicitAdjoint
from ._solver._schedules import EisenstatWalker as EisenstatWalker
from ._subproblem import (
    AbstractSubproblem as AbstractSubproblem,
    Answer as Answer,
    choose as choose,
    MixedPrecision as MixedPrecision,
    NystromKernel as NystromKernel,
)
from ._tangent_kernel._tangent_kernel import TangentKernel as TangentKernel
from ._training._residuals import (
    Groups as Groups,
    Residuals as Residuals,
)
from ._training._solution import (
    History as History,
    Solution as Solution,
)
from .losses import (
    AbstractElementwiseLoss as AbstractElementwiseLoss,
    AbstractFactor as AbstractFactor,
    AbstractLoss as AbstractLoss,
    Arctan as Arctan,
    BinomialNLL as BinomialNLL,
    Cauchy as Cauchy,
    DenseFactor as DenseFactor,
    DiagonalFactor as DiagonalFactor,
    Huber as Huber,
    LogCosh as LogCosh,
    NegativeBinomialNLL as NegativeBinomialNLL,
    PoissonNLL as PoissonNLL,
    PseudoHuber as PseudoHuber,
    SigmoidCrossEntropy as SigmoidCrossEntropy,
    SoftmaxCrossEntropy as SoftmaxCrossEntropy,
    SquaredError as SquaredError,
    TobitNLL as TobitNLL,
    Tukey as Tukey,
)
from .losses._accuracy import accuracy as accuracy
from .predict._variance import predictive_variance as predictive_variance


__version__ = _version("gnlin")
