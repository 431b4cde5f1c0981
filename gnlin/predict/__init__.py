r"""What a linearised model predicts after training: at any number of steps, after any
time, and with what uncertainty.

The model $f(\theta_0) + \phi\,(\theta - \theta_0)$ is linear in its parameters. For
squared error all that training makes of it is in the singular values of its Jacobian, or
the eigenpairs of the kernel or the curvature: one factorisation, when the predictor is
made, and every time, damping and input after that is a product.
"""

from ._gaussian import Gaussian as Gaussian
from ._paths import (
    Descent as Descent,
    Flow as Flow,
    gradient_descent as gradient_descent,
    gradient_flow as gradient_flow,
)
from ._posterior import Posterior as Posterior, posterior as posterior
from ._variance import predictive_variance as predictive_variance


__all__ = [
    "Descent",
    "Flow",
    "Gaussian",
    "Posterior",
    "gradient_descent",
    "gradient_flow",
    "posterior",
    "predictive_variance",
]
