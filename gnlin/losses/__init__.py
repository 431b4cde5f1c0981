"""Losses of a model's outputs."""

from ._accuracy import accuracy
from ._base import AbstractElementwiseLoss, AbstractLoss
from ._binomial import BinomialNLL, NegativeBinomialNLL
from ._calibration import expected_calibration_error, reliability_diagram
from ._cross_entropy import SigmoidCrossEntropy, SoftmaxCrossEntropy
from ._isotropic import Isotropic
from ._poisson import PoissonNLL
from ._robust import Arctan, Cauchy, Huber, LogCosh, PseudoHuber, Tukey
from ._squared_error import SquaredError
from ._tobit import TobitNLL


__all__ = [
    "AbstractElementwiseLoss",
    "AbstractLoss",
    "Arctan",
    "BinomialNLL",
    "Cauchy",
    "Huber",
    "Isotropic",
    "LogCosh",
    "NegativeBinomialNLL",
    "PoissonNLL",
    "PseudoHuber",
    "SigmoidCrossEntropy",
    "SoftmaxCrossEntropy",
    "SquaredError",
    "TobitNLL",
    "Tukey",
    "accuracy",
    "expected_calibration_error",
    "reliability_diagram",
]
