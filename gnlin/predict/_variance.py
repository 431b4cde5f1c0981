"""The covariance of a fit's parameters, from singular values, and the variance of a
linearised model's predictions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar, ScalarLike

from .._common._checks import check_finite_positive
from .._common._tree import matmul
from .._linear_algebra import _small_svd
from .._linearisation._linearisation import check_same_parameters, Linearisation


# A parameter is undetermined if more than this part of it lies in directions that do not
# change the residuals. Rounding is less, about the root of eps.
_PART = 1e-6


class Covariance(NamedTuple):
    """The covariance of k parameters, in units of the residuals' variance.

    - `factor`: $F = V S^{-1}$, where $F F^\\top$ is the covariance.
    - `rank`: the rank of the Jacobian.
    - `determined`: whether the residuals determine each parameter.
    - `directions`: the directions that do not change the residuals, one in a row; the
        other rows are zero.
    """

    factor: Float[Array, "k k"]
    rank: Int[Array, ""]
    determined: Bool[Array, " k"]
    directions: Float[Array, "k k"]

    def matrix(self, variance: Scalar) -> Float[Array, "k k"]:
        """Return the covariance. For undetermined parameters it is infinite on the
        diagonal and NaN elsewhere."""
        known = variance * matmul(self.factor, self.factor.T)
        both = self.determined[:, None] & self.determined[None, :]
        unknown = jnp.where(jnp.eye(self.determined.size, dtype=bool), jnp.inf, jnp.nan)
        return jnp.where(both, known, unknown.astype(known.dtype))


def covariance(
    jacobian: Float[Array, "m k"],
    free: Bool[Array, " k"],
    seen: Bool[Array, " k"] | None = None,
    num_rows: ScalarLike = 0,
) -> Covariance:
    r"""Compute $(J^\top J)^{-1}$ of the free parameters from the singular values
    $J = U S V^\top$, without forming $J^\top J$.

    The columns are first scaled to length 1, so that neither the result nor the threshold
    for zero depends on the parameters' units. This would scale up a column that is only
    rounding: `seen` is false for such columns, and their parameters are undetermined. The
    result is NaN if an entry of the Jacobian is not finite. If the Jacobian is a factor
    of a taller one, `num_rows` of those have added to its rounding.
    """
    m, k = jacobian.shape
    length = jnp.maximum(jnp.asarray(num_rows, jacobian.dtype), max(m, k))
    finite = jnp.all(jnp.isfinite(jacobian))
    used = free if seen is None else free & seen
    jacobian = jnp.where(used[None] & finite, jacobian, 0)
    if m < k:  # Pad, to get all k right singular vectors.
        jacobian = jnp.pad(jacobian, ((0, k - m), (0, 0)))
    norms = jax.lax.stop_gradient(jnp.linalg.norm(jacobian, axis=0))
    units = jnp.where(norms > 0, norms, 1)
    factor, s, vt = _inverse_factor(jacobian / units[None], length)
    known = s > 0
    factor /= units[:, None]
    parts = jnp.where(known[:, None], 0, vt)
    undetermined = free & finite & (jnp.linalg.norm(parts, axis=0) > _PART)
    directions = jnp.where(free[None] & finite, parts / units[None], 0)
    rank = jnp.where(finite, jnp.sum(known), jnp.sum(free))
    factor = jnp.where(finite, factor, jnp.nan)
    return Covariance(factor, rank, ~undetermined, directions)


@jax.custom_jvp
def _inverse_factor(
    matrix: Float[Array, "m k"], length: Scalar
) -> tuple[Float[Array, "k k"], Float[Array, " k"], Float[Array, "k k"]]:
    r"""Return $V S^{-1}$ on the numerical range, the singular values (0 off the range),
    and $V^\top$. Singular values below `length` roundings of the largest are off it."""
    _, s, vt = _small_svd.svd(matrix)
    s = jnp.where(s > length * jnp.finfo(matrix.dtype).eps * s[0], s, 0)
    factor = jnp.where((s > 0)[None], vt.T / jnp.where(s > 0, s, 1)[None], 0)
    return factor, s, vt


@_inverse_factor.defjvp
def _(primals, tangents):
    r"""Differentiate so that functions of $F F^\top$ alone get the right derivative.

    If singular values are equal, $F$ has no derivative, but $F F^\top = (A^\top A)^{-1}$
    has: $-F M F^\top$, with $M = F^\top(\dot A^\top A + A^\top\dot A)F$. Hence
    $\dot F = -F M/2$."""
    (matrix, length), (change, _) = primals, tangents
    factor, s, vt = _inverse_factor(matrix, length)
    half = matmul(matmul(matrix, factor).T, matmul(change, factor))
    change = -0.5 * matmul(factor, half + half.T)
    return (factor, s, vt), (change, jnp.zeros_like(s), jnp.zeros_like(vt))


def robust_variance(
    pull: Scalar,
    slopes: tuple[Scalar, Scalar],
    number: Scalar,
    num_parameters: Scalar,
) -> Scalar:
    r"""Return the factor of $(J^\top J)^{-1}$ in the covariance for a robust loss $\rho$.
    For squared error it would be $\chi^2/(n-k)$.

    - `pull`: the sum of $\psi^2$ over the residuals, where $\psi = \rho'$.
    - `slopes`: the sums of $\psi'$ and of its square.
    - `number`: of points, without missing ones.

    ??? cite "Reference"

        P. J. Huber, *Robust statistics* (1981), section 7.6, equation 6.5.
    """
    mean = slopes[0] / number
    spread = slopes[1] / number - mean**2
    correction = 1 + num_parameters / number * spread / mean**2
    return correction**2 * pull / (number - num_parameters) / mean**2


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
        damped = square + jnp.asarray(damping, square.dtype) * jnp.eye(len(square))
        factor = jnp.linalg.cholesky(damped.astype(square.dtype))
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
