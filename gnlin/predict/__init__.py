r"""Predictions of a linearised model after any number of training steps or any training
time, their uncertainty, the covariance of fitted parameters, and the error of the
solution of an equation.

The model $f(\theta_0) + \phi\,(\theta - \theta_0)$ is linear in its parameters. For
squared error, one factorisation of its Jacobian, kernel or curvature determines the
result of training. It is computed when the predictor is made; each time, damping and
input after that costs a product.
"""

from .._training._statistics import batch_statistics
from ._correction import Correction, correction
from ._covariance import covariance, ParameterCovariance
from ._gaussian import Gaussian
from ._laplace import posterior
from ._paths import Descent, Flow, gradient_descent, gradient_flow
from ._posterior import Posterior
from ._variance import predictive_variance


__all__ = [
    "Correction",
    "Descent",
    "Flow",
    "Gaussian",
    "ParameterCovariance",
    "Posterior",
    "batch_statistics",
    "correction",
    "covariance",
    "gradient_descent",
    "gradient_flow",
    "posterior",
    "predictive_variance",
]
