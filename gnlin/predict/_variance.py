"""The variance of a linearised model's predictions."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, ScalarLike

from .._common._checks import check_finite_positive
from .._linearisation._linearisation import check_same_parameters, Linearisation


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

    The side with the smaller matrix is used. With more parameters than outputs this needs
    only kernels, which are computed layer by layer if possible, and m x m numbers.

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
    check_same_parameters(test, train)
    m, p = train.shape

    def whitened(square, sides):
        identity = jnp.eye(len(square), dtype=square.dtype)
        factor = jnp.linalg.cholesky(
            square + jnp.asarray(damping, square.dtype) * identity
        )
        half = jax.scipy.linalg.solve_triangular(factor, sides, lower=True)
        return jnp.sum(half**2, axis=0)

    if p <= m:
        flat = whitened(train.curvature(), test.matrix().T)
    else:
        prior = test.jacobian.squared_rows()
        rest = jnp.maximum(prior - whitened(train.kernel(), train.kernel(test)), 0)
        flat = rest / jnp.asarray(damping, rest.dtype)
    flat *= jnp.asarray(variance, flat.dtype)
    return test.jacobian.codomain.unravel(flat)
