"""The covariance of fitted parameters, from singular values."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int, Scalar

from .._common import _tree
from .._common._tree import matmul
from . import _lapack, _small_svd


# A parameter, or a function of them, is undetermined if more than this part of it lies in
# directions that do not change the residuals. Rounding is less, about the root of eps.
_PART = 1e-6
# With more rounding in the Jacobian the part may be larger, but not as large as that of
# one parameter in a common shift of ten thousand.
_MOST_PART = 1e-3
# Roundings by which a parameter is changed to see the rounding of the Jacobian.
_FEWEST, _MOST = 2, 8
# A singular value is rounding below this multiple of its change by that. The change over
# the value was 0.14 or more where only the product of two parameters enters (a linear
# system, eigenvalues, a loop), and 0.01 or less for singular values above the rounding of
# a decomposition (sums of two exponentials or Gaussians with near parameters,
# polynomials of degree 4 to 14).
_CHANGES = 10
# Larger changes than this power of eps, relative to the column, are no rounding but those
# at a kink of the function.
_JUMP = 3 / 8
# The Jacobian has to be evaluated a second time if a singular value is less than this
# power of eps. Linear systems of condition number 1e7 have a rounding of 1e-9.
_DOUBTFUL = 0.5


class Covariance(NamedTuple):
    """The covariance of k parameters, in units of the residuals' variance.

    - `factor`: $F$, where $F F^\\top$ is the covariance: $V S^{-1}$.
    - `rank`: the rank of the Jacobian.
    - `determined`: whether the residuals determine each parameter.
    - `directions`: the directions that do not change the residuals, one in a row; the
        other rows are zero.
    - `is_whole`: whether no negative curvature of the loss had to be left out.
    - `units`: the lengths of the Jacobian's columns; infinite for parameters not free.
    - `rounding`: the part of a function that may lie in `directions` by rounding.
    """

    factor: Float[Array, "k k"]
    rank: Int[Array, ""]
    determined: Bool[Array, " k"]
    directions: Float[Array, "k k"]
    is_whole: Bool[Array, ""]
    units: Float[Array, " k"]
    rounding: Float[Array, ""]

    def matrix(self, variance: Scalar) -> Float[Array, "k k"]:
        """Return the covariance. For undetermined parameters it is infinite on the
        diagonal and NaN elsewhere."""
        known = variance * matmul(self.factor, self.factor.T)
        return where_determined(self.determined, known)

    @property
    def is_doubtful(self) -> Bool[Array, ""]:
        """Whether a singular value is so small that it may be the Jacobian's rounding."""
        units = jnp.where(jnp.isinf(self.units), 0, self.units)
        errors = jnp.linalg.norm(self.factor * units[:, None], axis=0)
        return jnp.any(errors > _tree.eps(self.units) ** -_DOUBTFUL)

    @property
    def extreme(self) -> Bool[Array, " k"]:
        """Whether the squares of the Jacobian's columns underflow or overflow."""
        info = jnp.finfo(self.units.dtype)
        least, most = float(info.tiny) ** 0.5, float(info.max) ** 0.5
        is_large = (self.units > most) & (self.units < math.inf)
        return self.determined & ((self.units < least) | is_large)

    def covariance_of(
        self, matrix: Float[Array, "n k"], variance: Scalar
    ) -> Float[Array, "n n"]:
        """Return the covariance of n linear functions of the parameters. For functions
        that the residuals do not determine it is infinite and NaN, as in `matrix`."""
        half = matmul(matrix, self.factor)
        known = variance.astype(half.dtype) * matmul(half, half.T)
        return where_determined(self.determines(matrix), known)

    def variances(self, matrix: Float[Array, "n k"], variance: Scalar) -> Array:
        """Return the variances of n linear functions of the parameters. They are infinite
        for functions that the residuals do not determine."""
        squares = jnp.sum(matmul(matrix, self.factor) ** 2, axis=1)
        known = variance.astype(squares.dtype) * squares
        return jnp.where(self.determines(matrix), known, jnp.inf)

    def determines(self, matrix: Float[Array, "n k"]) -> Bool[Array, " n"]:
        """Whether the residuals determine n linear functions of the parameters."""
        change = jnp.linalg.norm(matmul(matrix, self.directions.T), axis=1)
        whole = jnp.linalg.norm(matrix / self.units[None], axis=1)
        return change <= self.rounding * whole

    def moved_by(self, tangents: Float[Array, "k k"]) -> "Covariance":
        r"""Return the covariance of the parameters, if this is that of steps, which move
        the parameters by $T$ times the step."""
        directions = matmul(self.directions, tangents.T)
        sizes = jnp.linalg.norm(directions * self.units[None], axis=1, keepdims=True)
        lengths = jnp.linalg.norm(tangents / self.units[None], axis=1)
        return self._replace(
            factor=matmul(tangents, self.factor),
            determined=self.determines(tangents),
            directions=jnp.where(sizes > _PART, directions, 0),
            units=jnp.where(lengths > 0, 1 / lengths, jnp.inf),
        )

    def less(self, curvature: Float[Array, "k k"]) -> "Covariance":
        r"""Return the covariance $(J^\top J - C)^{-1}$ for a symmetric matrix C;
        without C if that is not positive."""
        part = matmul(self.factor.T, matmul(curvature, self.factor))
        identity = jnp.eye(len(part), dtype=part.dtype)
        left = identity - jnp.where(_tree.all_finite(part), part, 0)
        is_positive = _tree.all_finite(jnp.linalg.cholesky(_tree.fixed(left)))
        lower = jnp.linalg.cholesky(jnp.where(is_positive, left, identity))
        factor = solve_triangular(lower, self.factor.T, lower=True).T
        return self._replace(factor=factor, is_whole=is_positive)


def where_determined(
    determined: Bool[Array, " n"], matrix: Float[Array, "n n"]
) -> Float[Array, "n n"]:
    """Return a covariance with infinity on the diagonal, and NaN elsewhere, for what is
    not determined."""
    both = determined[:, None] & determined[None, :]
    unknown = jnp.where(jnp.eye(len(matrix), dtype=bool), jnp.inf, jnp.nan)
    return jnp.where(both & ~jnp.isinf(matrix), matrix, unknown.astype(matrix.dtype))


def rounded(
    y: Float[Array, " k"], start: Float[Array, " k"] | None = None
) -> Float[Array, " k"]:
    """Return a step by a few roundings of each parameter, up or down. For a parameter of
    zero it is of the size of its start."""
    eps, size = _tree.eps(y), jnp.abs(y)
    if start is not None:
        size = jnp.where(y == 0, jnp.abs(start), size)
    generator = np.random.default_rng(0)
    roundings = generator.integers(_FEWEST, _MOST + 1, y.size)
    signs = generator.choice([-1, 1], y.size)
    return jnp.asarray(eps * (roundings * signs), y.dtype) * size


def covariance(
    jacobian: Float[Array, "m k"],
    free: Bool[Array, " k"],
    seen: Bool[Array, " k"],
    num_points: Scalar,
    nearby: Float[Array, "m k"] | None = None,
) -> Covariance:
    r"""Compute $(J^\top J)^{-1}$ of the free parameters from the singular values
    $J = U S V^\top$, without forming $J^\top J$.

    The columns are first scaled to length 1, so that neither the result nor the threshold
    for zero depends on the parameters' units. This would scale up a column that is only
    rounding: `seen` is false for such columns, and their parameters are undetermined. The
    result is NaN if an entry of the Jacobian is not finite. All of `num_points` have
    added to the rounding of the Jacobian, also if it is a triangular factor.

    - `nearby`: the Jacobian at parameters that differ by `rounded`. A singular value is
        known only if it does not change by its own size when the parameters change by
        their rounding. A function that solves a linear system, for example, amplifies
        rounding by the condition number of that system.
    """
    m, k = jacobian.shape
    length = jnp.maximum(num_points, max(m, k))
    length = length.astype(jacobian.dtype)
    least = _lapack.rounding_of_singular_values(k, length, _tree.eps(jacobian))
    finite = jnp.all(jnp.isfinite(jacobian))
    jacobian = jnp.where((free & seen)[None] & finite, jacobian, 0)
    norms = jax.lax.stop_gradient(_tree.column_norms(jacobian))
    units = jnp.where(norms > 0, norms, 1)
    # One more row for each parameter holds the others at their values. Without it they
    # would count as undetermined, and be mixed with those that are.
    rows = jnp.diag(jnp.where(free, 0, 1).astype(jacobian.dtype))
    held = jnp.concatenate([jacobian / units[None], rows])
    change, noise = None, 0.0
    if nearby is not None:
        nearby = jax.lax.stop_gradient(jnp.where((free & seen)[None], nearby, 0))
        change = (nearby - jax.lax.stop_gradient(jacobian)) / units[None]
        # This also leaves out changes that are not finite.
        change = jnp.where(jnp.abs(change) <= _tree.eps(change) ** _JUMP, change, 0)
        change = jnp.concatenate([change, jnp.zeros_like(rows)])
        noise = _CHANGES * jnp.max(_tree.column_norms(change), initial=0)
    factor, s, vt = _inverse_factor(held, change, least)
    known = s > 0
    factor = jnp.where((norms > 0)[:, None], factor / units[:, None], 0)
    parts = jnp.where(known[:, None], 0, vt)
    part = jnp.clip(jnp.where(jnp.all(known), 0, noise), _PART, _MOST_PART)
    undetermined = free & finite & (jnp.linalg.norm(parts, axis=0) > part)
    directions = jnp.where(free[None] & finite, parts / units[None], 0)
    rank = jnp.sum(free) - jnp.where(finite, jnp.sum(~known), 0)
    factor = jnp.where(finite, factor, jnp.nan)
    rounding = jnp.maximum(part, jnp.sqrt(m) * least).astype(jacobian.dtype)
    return Covariance(
        factor,
        rank,
        ~undetermined,
        directions,
        is_whole=jnp.array(True),
        units=jnp.where(free, units, jnp.inf),
        rounding=rounding,
    )


@jax.custom_jvp
def _inverse_factor(
    matrix: Float[Array, "m k"], change: Float[Array, "m k"] | None, least: Scalar
) -> tuple[Float[Array, "k k"], Float[Array, " k"], Float[Array, "k k"]]:
    r"""Return $V S^{-1}$ on the numerical range, the singular values (0 off the range),
    and $V^\top$. Singular values below `least` times the largest are off it, and those
    that the change of the matrix changes by much."""
    _, s, vt = _small_svd.svd(matrix)
    s = jnp.where(s > least * s[0], s, 0)
    factor = _tree.quotient(vt.T, s[None])
    if change is not None:
        s = jnp.where(s > _CHANGES * _changes(matrix, factor, vt, change), s, 0)
        factor = jnp.where(s > 0, factor, 0)
    return factor, s, vt


@_inverse_factor.defjvp
def _(primals, tangents):
    r"""Differentiate so that functions of $F F^\top$ alone get the right derivative.

    If singular values are equal, $F$ has no derivative, but $F F^\top = (A^\top A)^{-1}$
    has: $-F M F^\top$, with $M = F^\top(\dot A^\top A + A^\top\dot A)F$. Hence
    $\dot F = -F M/2$."""
    (matrix, *_), (change, *_) = primals, tangents
    factor, s, vt = _inverse_factor(*primals)
    half = matmul(matmul(matrix, factor).T, matmul(change, factor))
    change = -0.5 * matmul(factor, half + half.T)
    return (factor, s, vt), (change, jnp.zeros_like(s), jnp.zeros_like(vt))


def _changes(
    matrix: Float[Array, "m k"],
    factor: Float[Array, "k k"],
    vt: Float[Array, "k k"],
    change: Float[Array, "m k"],
) -> Float[Array, " k"]:
    r"""Return by how much the singular values of $U S V^\top$ may change with it: the
    lengths of $N v_i$ for the change $N$. The part of $N v_i$ along $u_j$ with a larger
    singular value turns $v_i$, and does not change $s_i$."""
    moved, u = matmul(change, vt.T), matmul(matrix, factor)
    larger = jnp.triu(matmul(u.T, moved), 1)
    return _tree.column_norms(moved - matmul(u, larger))
