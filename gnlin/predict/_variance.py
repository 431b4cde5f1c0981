"""The variance of a linearised model's predictions."""

import jax.numpy as jnp
from jaxtyping import Array, PyTree, ScalarLike

from .._common import _tree
from .._common._checks import check_finite_nonnegative, check_finite_positive
from .._linearisation._linearisation import check_same_parameters, Linearisation
from .._linearisation._quadratic import Quadratic
from ._eigenbasis import Eigenbasis


def predictive_variance(
    test: Linearisation,
    train: Linearisation,
    damping: ScalarLike,
    variance: ScalarLike = 1.0,
) -> PyTree[Array]:
    r"""Return the variance of a linearised model's outputs on test inputs, given training
    data (the linearised Laplace approximation for squared error): the diagonal of

    $$\sigma^2\,\phi_*(\phi^\top\phi + \lambda I)^{-1}\phi_*^\top =
    \tfrac{\sigma^2}{\lambda}(K_{**} - K_{*}(K + \lambda I)^{-1}K_{*}^\top).$$

    The factorisation is that of [`gnlin.predict.posterior`][]: singular values of the
    Jacobian, which are accurate also for little damping, or, if they would take too long,
    eigenvalues of the smaller of kernel and curvature. With many more parameters than
    outputs only kernels are needed, which are computed layer by layer if possible. Their
    accuracy ends at a damping of about a hundred roundings of the largest eigenvalue.

    **Arguments:**

    - `test`, `train`: linearisations of one model at one point, on the two sets of
        inputs, as from [`gnlin.features.linearise_model`][].
    - `damping`: the $\lambda > 0$ that the model was trained with: the prior precision of
        the parameters, in units of the noise's.
    - `variance`: the variance $\sigma^2$ of the noise.

    **Returns:** the variances, in the structure of the outputs, without the noise of a
    new measurement.

    **Raises:** `ValueError` if `damping` is not positive, or if the parameters are not
    the same.

    !!! example

        ```python
        model = eqx.nn.MLP(3, 1, 16, 2, key=jax.random.key(0))
        train = gnlin.features.linearise_model(model, inputs[:4])
        test = gnlin.features.linearise_model(model, inputs[4:])
        variances = gnlin.predict.predictive_variance(test, train, damping=0.1)
        ```

    ??? cite "Reference"

        A. Immer, M. Korzepa and M. Bauer, *Improving predictions of Bayesian neural nets
        via local linearization*, AISTATS (2021), equation 8.
    """
    check_finite_positive("damping", damping)
    check_finite_nonnegative("variance", variance)
    check_same_parameters(test, train)
    problem = Quadratic(train.jacobian, _tree.zeros_like(train.outputs))
    basis, jacobian = Eigenbasis.of(problem), test.jacobian
    dtype = basis.eigenvalues.dtype
    damping = jnp.asarray(damping, dtype)
    left = basis.variance(jacobian, basis.seen_from(jacobian), damping)
    flat = jnp.maximum(left, 0) * (jnp.asarray(variance, dtype) / damping)
    return jacobian.codomain.unravel(flat)
