"""Eigenpairs of the kernel or of the curvature, and their effect on other outputs."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree, Scalar

from .._common import _tree
from .._common._cost import rates
from .._common._tree import matmul, ravel_pytree
from .._jacobian import AbstractJacobian, Cost
from .._linear_algebra import _lapack, _small_svd
from .._linear_algebra._derivatives import with_derivative_of
from .._linearisation._eigenvectors import Eigenvectors
from .._linearisation._linearisation import Linearisation
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ..filters import Tikhonov
from ..spectra import leading


# Singular values take some three to ten times as long as eigenvalues, but resolve
# eigenvalues down to eps^2 of the largest instead of eps. They are used if they take at
# most `_WORTH` times as long, in double and in single precision, or at most `_SECONDS`.
_WORTH, _SECONDS = {64: 3.0, 32: 10.0}, 3.0
# Seconds for each operation of the orthogonal factorisation and the singular values,
# measured in double precision as 2.7 s for 66,561 x 400 numbers and 1.8 s for 1,200 x
# 4,673 (jax 0.10.1, one core of a CPU).
_ORTHOGONALISED = 6e-11
# Singular values below this multiple of eps times the largest count as zero. For 14 to
# 200 repeated examples, the multiple that LAPACK returned was at most 0.8.
_ZERO = 2.0
# Multiple of the rounding at which a filter is evaluated to see how it treats eigenvalues
# next to zero. At zero itself a pseudo-inverse would be 0.
_NEXT_TO_ZERO = 1e-2
# Least damping, as a multiple of the rounding, at which rounding does not dominate the
# prediction. At this damping its error was measured as up to 1 %.
_LEAST_DAMPING = 100.0
# Tolerance of a low-rank curvature's eigenvectors; eigenvalues have errors of its square.
_TOLERANCE = 1e-3


class Eigenbasis(eqx.Module):
    r"""Eigenpairs $w, u$ of the kernel $\phi\phi^\top$, or $w, v$ of the curvature
    $\phi^\top\phi$.

    The step of a filter $g$ changes outputs with the Jacobian $\phi_*$ by
    $-B\,(g(w)\,c)$, where $B = \phi_*\phi^\top U$ and $c = U^\top r$, or $B = \phi_* V$
    and $c = V^\top\phi^\top r$. Singular values of the Jacobian give $V$, and small
    eigenvalues more accurately. They are used if the Jacobian fits into the memory budget
    and they do not take too long.

    - `coefficients`: $c$.
    - `squares`: $(U^\top r)^2$.
    - `outside`: the squared norm of the part of the residual outside the span of $U$.
    - `rounding`: the error of the eigenvalues that are close to zero.
    - `vectors`: $U$ or $V$, and $U$ beside $V$ if it is the smaller one. Eigenvectors
        have no derivatives where eigenvalues are equal, for example zero. Results that
        follow from all eigenpairs do, and are differentiated by their formula, on the
        smaller side.
    - `residual`: $r$.
    """

    eigenvalues: Float[Array, " k"]
    coefficients: Float[Array, " k"]
    squares: Float[Array, " k"]
    outside: Scalar
    rounding: Scalar
    vectors: Eigenvectors
    residual: Float[Array, " m"]

    moves: ClassVar[bool] = True  # whether the mean differs from the model's output

    @property
    def of_kernel(self) -> bool:
        r"""Whether these are eigenpairs of the kernel, so that $V$ is unknown."""
        return self.vectors.right is None

    @property
    def columns(self) -> Float[Array, "n k"]:
        r"""$V$ if it is known, and $U$ if not."""
        known = self.vectors.left if self.of_kernel else self.vectors.right
        assert known is not None
        return known

    @staticmethod
    def fits(jacobian: AbstractJacobian) -> bool:
        """Whether the smaller of kernel and curvature fits into the memory budget."""
        smaller = min(jacobian.shape)
        return smaller**2 * jacobian.domain.dtype.itemsize <= jacobian.memory_budget

    @staticmethod
    def of(problem: Quadratic) -> "Eigenbasis":
        jacobian = problem.jacobian
        m, p = jacobian.shape
        if _singular_values_pay(jacobian.cost()):
            u, s, vt = _small_svd.svd(jacobian.as_matrix())
            least = _ZERO * jnp.finfo(s.dtype).eps * s[0]
            w = jnp.where(s <= least, 0, s) ** 2
            return _of_kernel(problem, w, u, least**2, vt.T)
        w, vectors = _lapack.eigh(jacobian.gram() if m <= p else jacobian.curvature())
        of_pairs = _of_kernel if m <= p else _of_curvature
        return of_pairs(problem, w, vectors, _tree.eps(w) * w[-1])

    @staticmethod
    def of_rank(problem: Quadratic, point: PyTree[Array], rank: int) -> "Eigenbasis":
        """Return the leading eigenpairs of the curvature. The others count as zero."""
        lin = Linearisation(point, problem.residual, problem.jacobian)
        pairs = leading(lin, rank, tolerance=_TOLERANCE)
        rows = jax.vmap(lambda x: ravel_pytree(x)[0])(pairs.on_parameters())
        rounding = jnp.finfo(rows.dtype).eps * pairs.eigenvalues[0]
        return _of_curvature(problem, pairs.eigenvalues, rows.T, rounding)

    def predicted(
        self, other: AbstractJacobian, damping: Scalar
    ) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
        """Return the change of the mean, and the variance in units of the prior's, of the
        outputs of another Jacobian."""
        seen = self.seen_from(other)
        change = self.change(other, seen, Tikhonov(damping))
        return change, self.variance(other, seen, damping)

    def change(
        self, other: AbstractJacobian, seen: Float[Array, "n k"], filter: Filter
    ) -> Float[Array, " n"]:
        """Return -B (g(w) c), the change of the outputs of another Jacobian; `seen` is
        B."""
        resolved = _Resolved(filter, self.rounding, self.cutoff)
        changes = matmul(seen, -resolved(self.eigenvalues) * self.coefficients)
        if not isinstance(filter, Tikhonov):  # which has derivatives of every order
            filter = resolved
        return self._by_formula(_change, changes, other, filter)

    def is_sure(self, filter: Filter) -> Bool[Array, ""]:
        """Whether a filter reaches no eigenvalues that rounding hides."""
        margin = self.eigenvalues.size**0.5  # the rounding of many eigenvalues grows so
        return _Resolved(filter, self.rounding, self.cutoff).is_harmless(margin)

    def hidden(self) -> Scalar:
        """Return the part of the squared residual along eigenvectors whose eigenvalues
        rounding hides; zero if products with the Jacobian show that these are zero."""
        w = self.eigenvalues
        hidden = w <= self.cutoff
        part, whole = jnp.where(hidden, self.squares, 0), jnp.sum(self.squares)
        part = _tree.quotient(jnp.sum(part), self.outside + whole, jnp.any(part > 0))
        are_zero = self.vectors.size_of(w, hidden) == 0
        if jnp.finfo(w.dtype).bits < 64:  # What singular values hide may be more there.
            are_zero &= self.rounding > _tree.eps(w) ** 1.5 * jnp.max(w)
        return jnp.where(are_zero, 0, part)

    @property
    def cutoff(self) -> Scalar:
        """The largest eigenvalue that may be only rounding."""
        return self.eigenvalues.size * self.rounding

    @property
    def least_damping(self) -> Scalar:
        """The least damping at which rounding does not dominate the prediction."""
        return _LEAST_DAMPING * self.rounding

    def seen_from(self, other: AbstractJacobian) -> Float[Array, "n k"]:
        """Return B for the outputs of another Jacobian."""
        if self.of_kernel:
            return matmul(other.gram_with(self.vectors.jacobian), self.columns)
        if other.cost().rows_fit:
            return matmul(other.as_matrix(), self.columns)
        unravel = other.domain.unravel
        push = lambda v: other.push_forward(unravel(v))
        return other.chunked(push, self.columns.T).T

    def variance(
        self, other: AbstractJacobian, seen: Float[Array, "n k"], damping: Scalar
    ) -> Float[Array, " n"]:
        r"""Return the diagonal of
        $\lambda\,\phi_*(\phi^\top\phi + \lambda I)^{-1}\phi_*^\top$; `seen` is B."""
        variance = self._variance_by_vectors(other, seen, damping)
        return self._by_formula(_variance, variance, other, Tikhonov(damping))

    def _variance_by_vectors(
        self, other: AbstractJacobian, seen: Float[Array, "n k"], damping: Scalar
    ) -> Float[Array, " n"]:
        w = self.eigenvalues
        if self.of_kernel:
            along = seen / (w + damping)[None]
            if not _rows_pay(self.vectors.jacobian, other):
                gained = jnp.sum(seen * along, axis=1)
                return other.squared_rows().astype(w.dtype) - gained
            combined = matmul(along, self.columns.T)
            return _left(self.vectors.jacobian, other, combined, damping)
        left = jnp.sum(seen**2 * (damping / (w + damping))[None], axis=1)
        p, k = self.columns.shape
        if k == p:
            return left
        if other.cost().rows_fit:
            unseen = other.as_matrix() - matmul(seen, self.columns.T)
            return left + jnp.sum(unseen**2, axis=1)
        unseen = other.squared_rows().astype(w.dtype) - jnp.sum(seen**2, axis=1)
        return left + jnp.maximum(unseen, 0)

    def narrowed(self, normal: PyTree[Array], damping: Scalar) -> PyTree[Array]:
        r"""Return $(I + \phi^\top\phi/\lambda)^{-1/2}\,\epsilon$. If `normal`, the
        $\epsilon$ like the parameters, is standard normal, this is a draw of the
        posterior about its mean, in units of the prior's standard deviation."""
        root = jnp.sqrt(self.eigenvalues + damping)
        # (1 - sqrt(lambda / (w + lambda))) / w without cancellation
        lost = 1 / ((root + jnp.sqrt(damping)) * root)
        if self.of_kernel:
            along = matmul(self.columns.T, self.vectors.jacobian.push_forward(normal))
            change = self.vectors.jacobian.pull_back(matmul(self.columns, lost * along))
        else:
            flat, unravel = ravel_pytree(normal)
            along = self.eigenvalues * lost * matmul(self.columns.T, flat)
            change = unravel(matmul(self.columns, along))
        return _tree.axpy(-1, change, normal)

    def inverse_norm(self, vector: PyTree[Array], damping: Scalar) -> Scalar:
        r"""Return $\lambda\,g^\top(\phi^\top\phi + \lambda I)^{-1} g$ for a `vector` $g$
        like the parameters."""
        flat, w = ravel_pytree(vector)[0], self.eigenvalues
        if self.of_kernel:
            pushed = matmul(self.columns.T, self.vectors.jacobian.push_forward(vector))
            along = _tree.quotient(pushed**2, w, w > self.cutoff)
        else:
            along = matmul(self.columns.T, flat) ** 2
        inside = jnp.sum(along * (w / (w + damping)))
        return jnp.maximum(_squared_norm(flat, w.dtype) - inside, 0)

    def misfit(self, damping: Scalar) -> Scalar:
        r"""Return $r^\top(\phi\phi^\top + \lambda I)^{-1} r$."""
        inside = jnp.sum(self.squares / (self.eigenvalues + damping))
        misfit = self.outside / damping + inside
        return self._by_formula(_misfit, misfit, Tikhonov(damping))

    def _by_formula(self, formula: Callable, value: Array, *args: Any) -> Array:
        """Return a value, with a formula's derivatives if all eigenpairs are known."""
        if not self.vectors.are_all:
            return value
        return with_derivative_of(formula, value, self, *args)


class _Resolved(eqx.Module):
    """A filter that leaves out eigenvalues that are only rounding, if it would not treat
    them like zero, as with gradient flow of infinite time."""

    filter: Filter
    rounding: Scalar
    cutoff: Scalar

    def __call__(self, w: Float[Array, " k"]) -> Float[Array, " k"]:
        is_known = (w > self.cutoff) | self.is_harmless()
        return jnp.where(is_known, self.filter(w), 0)

    def is_harmless(self, margin: float = 1.0) -> Bool[Array, ""]:
        """Whether the filter treats eigenvalues of the size of rounding like zero."""
        (g,) = self.filter(_NEXT_TO_ZERO * self.rounding[None])
        return g * self.rounding * margin <= 1


def _singular_values_pay(cost: Cost) -> bool:
    """Whether singular values fit into memory and are worth their time."""
    m, p = cost.shape
    few, many = sorted(cost.shape)
    first = 4.0 * many * float(few) ** 2 * _ORTHOGONALISED
    singular_values = cost.all_rows + first + rates().svd(few)
    matrix = cost.whole_gram if m <= p else cost.whole_curvature
    eigenvalues = matrix + rates().eigh(few)
    worth = max(_WORTH[8 * cost.itemsize] * eigenvalues, _SECONDS)
    return cost.rows_fit and singular_values <= worth


def _rows_pay(jacobian: AbstractJacobian, other: AbstractJacobian) -> bool:
    """Whether the rows of both Jacobians fit into memory, and their product is worth its
    time."""
    cost, of_other = jacobian.cost(), other.cost()
    (m, p), (n, _) = cost.shape, of_other.shape
    rows = cost.all_rows + of_other.all_rows
    seconds = rows + 2.0 * n * m * float(p) * rates().product
    worth = max(_WORTH[8 * cost.itemsize] * rates().eigh(m), _SECONDS)
    return cost.rows_fit and of_other.rows_fit and seconds <= worth


def _left(
    jacobian: AbstractJacobian,
    other: AbstractJacobian,
    combined: Float[Array, "n m"],
    damping: Scalar,
) -> Float[Array, " n"]:
    r"""Return the variance in units of the prior's, where
    $A = \phi_*\phi^\top(\phi\phi^\top + \lambda I)^{-1}$ is `combined`: the squared norms
    of the rows of $\phi_* - A\phi$ plus $\lambda$ times those of $A$. A difference of the
    variances before and after the data would cancel."""
    unseen = other.as_matrix() - matmul(combined, jacobian.as_matrix())
    squares = jnp.sum(unseen**2, axis=1).astype(combined.dtype)
    return squares + damping * jnp.sum(combined**2, axis=1)


def _of_kernel(
    problem: Quadratic,
    w: Float[Array, " k"],
    u: Float[Array, "m k"],
    rounding: Scalar,
    v: Float[Array, "p k"] | None = None,
) -> Eigenbasis:
    """Return the basis of eigenpairs of the kernel, also where $V$ is known, too."""
    residual = problem.flat_residual()
    along = matmul(u.T, residual).astype(w.dtype)
    spans_all = w.size == len(residual)
    outside = 0 if spans_all else _squared_norm(residual - matmul(u, along), w.dtype)
    return Eigenbasis(
        eigenvalues=jnp.maximum(w, 0),
        coefficients=along if v is None else jnp.sqrt(w) * along,
        squares=along**2,
        outside=jnp.asarray(outside, w.dtype),
        rounding=rounding,
        vectors=Eigenvectors(problem.jacobian, u if spans_all else None, v),
        residual=residual,
    )


def _of_curvature(
    problem: Quadratic, w: Float[Array, " k"], v: Float[Array, "p k"], rounding: Scalar
) -> Eigenbasis:
    jacobian, residual = problem.jacobian, problem.flat_residual()
    gradient, unravel = ravel_pytree(jacobian.pull_back(residual))
    coefficients = matmul(v.T, gradient).astype(w.dtype)
    # Components along eigenvalues that are only rounding count as outside.
    inside = _tree.quotient(coefficients, w, w > w.size * rounding)
    reached = jacobian.push_forward(unravel(matmul(v, inside)))
    return Eigenbasis(
        eigenvalues=jnp.maximum(w, 0),
        coefficients=coefficients,
        squares=inside * coefficients,
        outside=_squared_norm(residual - reached, w.dtype),
        rounding=rounding,
        vectors=Eigenvectors(jacobian, right=v),
        residual=residual,
    )


def _squared_norm(vector: Float[Array, " m"], dtype) -> Scalar:
    return jnp.sum(vector.astype(dtype) ** 2)


# The same quantities as formulas, used for their derivatives


def _change(
    basis: Eigenbasis, other: AbstractJacobian, filter: Filter
) -> Float[Array, " n"]:
    vectors, w, residual = basis.vectors, basis.eigenvalues, basis.residual
    if vectors.on_outputs:
        of_residual = vectors.filtered(filter, w, residual)
        return -matmul(other.gram_with(vectors.jacobian), of_residual)
    return other.push_forward(vectors.step(residual, filter, w))


def _variance(
    basis: Eigenbasis, other: AbstractJacobian, filter: Tikhonov
) -> Float[Array, " n"]:
    vectors, w = basis.vectors, basis.eigenvalues
    jacobian, on_outputs = vectors.jacobian, vectors.on_outputs
    seen = other.gram_with(jacobian) if on_outputs else other.as_matrix()
    combined = jax.vmap(lambda row: vectors.filtered(filter, w, row))(seen)
    if on_outputs and _rows_pay(jacobian, other):
        damping = jnp.asarray(filter.damping, combined.dtype)
        return _left(jacobian, other, combined, damping)
    each = jnp.sum(seen * combined, axis=1)
    return other.squared_rows() - each if on_outputs else each * filter.damping


def _misfit(basis: Eigenbasis, filter: Tikhonov) -> Scalar:
    vectors, w, residual = basis.vectors, basis.eigenvalues, basis.residual
    if vectors.on_outputs:
        return jnp.sum(residual * vectors.filtered(filter, w, residual))
    gradient, _ = ravel_pytree(vectors.jacobian.pull_back(residual))
    inside = jnp.sum(gradient * vectors.filtered(filter, w, gradient))
    return (jnp.sum(residual**2) - inside) / filter.damping
