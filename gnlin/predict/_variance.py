"""What a fit knows: the covariance of its parameters, from singular values, and the
variance of a linearised model's predictions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar, ScalarLike

from .._common._checks import check_finite_positive
from .._common._tree import matmul
from .._linear_algebra import _small_svd
from .._linearisation._linearisation import check_same_parameters, Linearisation


# A parameter is not determined that has this part, or more, in a direction that leaves
# the residuals as they are, and a part of less than rounding's root in no such.
_PART = 1e-6


class Covariance(NamedTuple):
    """Of k parameters, in units of the residuals' variance.

    - `factor`: $V S^{-1}$, of which $F F^\\top$ is the covariance.
    - `rank`: of the Jacobian, how many are.
    - `determined`: whether the residuals say anything of each.
    - `directions`: along which they stay as they are, a row each; else zero.
    """

    factor: Float[Array, "k k"]
    rank: Int[Array, ""]
    determined: Bool[Array, " k"]
    directions: Float[Array, "k k"]

    def matrix(self, variance: Scalar) -> Float[Array, "k k"]:
        """Infinite on the diagonal for what is not determined, and NaN beside it."""
        known = variance * matmul(self.factor, self.factor.T)
        both = self.determined[:, None] & self.determined[None, :]
        unknown = jnp.where(jnp.eye(self.determined.size, dtype=bool), jnp.inf, jnp.nan)
        return jnp.where(both, known, unknown.astype(known.dtype))


def covariance(
    jacobian: Float[Array, "m k"],
    free: Bool[Array, " k"],
    seen: Bool[Array, " k"] | None = None,
) -> Covariance:
    r"""$(J^\top J)^{-1}$ of the free parameters, by $J = U S V^\top$: no matrix is
    inverted, nor squared.

    The columns are scaled to length 1 first, so that neither the answer nor what counts
    as zero depends on the parameters' units. A column that is only rounding would be
    scaled to length 1, too: `seen` says which are more than that, and the parameters of
    the others are not determined. All is NaN where an entry of the Jacobian is not
    finite.
    """
    m, k = jacobian.shape
    finite = jnp.all(jnp.isfinite(jacobian))
    used = free if seen is None else free & seen
    jacobian = jnp.where(used[None] & finite, jacobian, 0)
    if m < k:  # All right singular vectors are wanted.
        jacobian = jnp.pad(jacobian, ((0, k - m), (0, 0)))
    norms = jax.lax.stop_gradient(jnp.linalg.norm(jacobian, axis=0))
    units = jnp.where(norms > 0, norms, 1)
    factor, s, vt = _inverse_factor(jacobian / units[None])
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
    matrix: Float[Array, "m k"],
) -> tuple[Float[Array, "k k"], Float[Array, " k"], Float[Array, "k k"]]:
    r"""$V S^{-1}$ on the numerical range, the singular values, 0 off it, and
    $V^\top$."""
    m, k = matrix.shape
    _, s, vt = _small_svd.svd(matrix)
    s = jnp.where(s > max(m, k) * jnp.finfo(matrix.dtype).eps * s[0], s, 0)
    factor = jnp.where((s > 0)[None], vt.T / jnp.where(s > 0, s, 1)[None], 0)
    return factor, s, vt


@_inverse_factor.defjvp
def _(primals, tangents):
    r"""Where singular values are equal, $F$ has no derivative, but
    $F F^\top = (A^\top A)^{-1}$ has: $-F M F^\top$, with
    $M = F^\top(\dot A^\top A + A^\top\dot A)F$. So $\dot F = -F M/2$ is right for what
    depends on $F F^\top$ alone."""
    (matrix,), (change,) = primals, tangents
    factor, s, vt = _inverse_factor(matrix)
    half = matmul(matmul(matrix, factor).T, matmul(change, factor))
    change = -0.5 * matmul(factor, half + half.T)
    return (factor, s, vt), (change, jnp.zeros_like(s), jnp.zeros_like(vt))


def robust_variance(
    pull: Float[Array, " m"],
    curvature: Float[Array, " m"],
    counted: Float[Array, " m"],
    num_parameters: Scalar,
) -> Scalar:
    r"""The factor of $(J^\top J)^{-1}$ for a robust loss $\rho$, of the residuals' pulls
    $\psi = \rho'$ and their slopes $\psi'$, where `counted` is 1; for squared error it is
    $\chi^2/(n-k)$.

    ??? cite "Reference"

        P. J. Huber, *Robust statistics* (1981), section 7.6, equation 6.5.
    """
    number = jnp.sum(counted)
    mean = jnp.sum(counted * curvature) / number
    spread = jnp.sum(counted * (curvature - mean) ** 2) / number
    correction = 1 + num_parameters / number * spread / mean**2
    pulls = jnp.sum(counted * pull**2) / (number - num_parameters)
    return correction**2 * pulls / mean**2


def predictive_variance(
    test: Linearisation,
    train: Linearisation,
    damping: ScalarLike,
    variance: ScalarLike = 1.0,
) -> PyTree[Array]:
    r"""The variance of a linearised model's outputs on test inputs, given training data
    (the linearised Laplace approximation, for squared error):

    $$\sigma^2\,\phi_*(\phi^\top\phi + \lambda I)^{-1}\phi_*^\top =
    \tfrac{\sigma^2}{\lambda}(K_{**} - K_{*}(K + \lambda I)^{-1}K_{*}^\top),$$

    its diagonal, on the side that is smaller: with more parameters than outputs it takes
    kernels only, by layers where there are any, and m x m numbers.

    **Arguments:**

    - `test`, `train`: linearisations of one model at one point, on the two sets of
        inputs, as from [`gnlin.features.linearise_model`][].
    - `damping`: $\lambda > 0$, as the model was trained with: the prior precision of the
        parameters, in units of the noise's.
    - `variance`: $\sigma^2$, of the noise.

    **Returns:** the variances, in the structure of the outputs; the noise of a new
    measurement is not in them.

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
