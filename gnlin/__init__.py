"""Second-order solvers for networks and for nonlinear least squares, in JAX."""

import importlib as _importlib
import warnings as _warnings
from importlib.metadata import version as _version
from typing import Any as _Any

from . import (
    authoring as authoring,
    callbacks as callbacks,
    damping as damping,
    features as features,
    filters as filters,
    losses as losses,
    methods as methods,
    preconditioners as preconditioners,
    predict as predict,
    spectra as spectra,
)
from ._common._history import History as History
from ._curve_fit import curve_fit as curve_fit, CurveFit as CurveFit
from ._fit import Checkpoint as Checkpoint, CheckpointError as CheckpointError, fit as fit
from ._jacobian import PerExample as PerExample, Sparsity as Sparsity
from ._linearisation._linearisation import (
    Linearisation as Linearisation,
    linearise as linearise,
)
from ._linearisation._spectrum import Spectrum as Spectrum
from ._solve import solve as solve
from ._solver import (
    DampedGaussNewton as DampedGaussNewton,
    GaussNewton as GaussNewton,
    IterativeLinearisation as IterativeLinearisation,
    LevenbergMarquardt as LevenbergMarquardt,
    TruncatedGaussNewton as TruncatedGaussNewton,
)
from ._tangent_kernel._tangent_kernel import TangentKernel as TangentKernel
from ._training._residuals import Groups as Groups, Residuals as Residuals
from ._training._solution import Solution as Solution
from .losses import (
    SigmoidCrossEntropy as SigmoidCrossEntropy,
    SoftmaxCrossEntropy as SoftmaxCrossEntropy,
    SquaredError as SquaredError,
)


__version__ = _version("gnlin")

# The names that stood here in version 0.1; they go in 0.3.
_MOVED = {"accuracy": "losses", "predictive_variance": "predict"}
_MOVED |= dict.fromkeys(losses.__all__, "losses")
_MOVED |= dict.fromkeys(methods.__all__, "methods")
_MOVED |= dict.fromkeys(authoring.__all__, "authoring")


def __getattr__(name: str) -> _Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = f"{__name__}.{_MOVED[name]}"
    _warnings.warn(
        f"`{__name__}.{name}` has moved: use `{room}.{name}`. The old name works until "
        "version 0.3.",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(_importlib.import_module(room), name)
