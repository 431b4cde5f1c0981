"""Eigen- and singular value decompositions, which serve for any number of filters."""

import math
from typing import ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, PyTree, Scalar

from .._common import _tree
from .._common._cost import rates
from .._common._passes import Passes
from .._jacobian import Cost
from .._linear_algebra._derivatives import with_derivative_of
from .._linearisation._decompositions import spectrum_of
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import evaluated, Filter, Spectrum
from ..filters import AbstractFilter, PseudoInverse, Tikhonov
from ._base import AbstractMethod, Answer, price_of_squaring


# The part of the rest outside the range of phi^T counts as zero below this many eps.
_ROUNDINGS = 100


class Spectral(AbstractMethod):
    r"""The step $-\phi^\top U g(w) U^\top r - g(\phi^\top\phi)\,g_0$ from a spectrum. A
    further filter costs one evaluation of it and one product.

    The filter acts on the rest $g_0$ as $g(w)$ within the range of $\phi^\top$, and as
    $g(0)$ outside it.
    """

    spectrum: Spectrum
    pushed: Float[Array, " k"]  # U^T phi g_0

    def __init__(self, problem: Quadratic, spectrum: Spectrum, passes: Passes):
        self.spectrum = spectrum
        self.pushed = jnp.zeros_like(spectrum.eigenvalues)
        if problem.rest is not None:
            self.pushed = spectrum.project(problem.jacobian.push_forward(problem.rest))
            passes += Passes(jvps=problem.jacobian.a_product().jvps)
        super().__init__(problem, passes)

    @classmethod
    def fits(cls, problem, filter: Filter) -> bool:
        return isinstance(problem, Quadratic)

    @classmethod
    def _made(cls, problem: Quadratic, method: Literal["svd", "eigh"], passes: Passes):
        spectrum = spectrum_of(problem.jacobian, problem.residual, method)
        return cls(problem, spectrum, passes)

    def curvature_along_gradient(self) -> Scalar:
        pushed = self.spectrum.eigenvalues * self.spectrum.coefficients + self.pushed
        pushed = _tree.divided(pushed, self.gradient_norm)
        along = _tree.dot(pushed, pushed)
        return with_derivative_of(Quadratic.curvature_along_gradient, along, self.problem)

    def largest_curvature(self) -> Scalar:
        return jnp.max(self.spectrum.eigenvalues)

    def attainable_decrease(self, least: Scalar) -> Scalar:
        spectrum = self.spectrum.damped(jnp.inf)
        w, c = spectrum.eigenvalues, spectrum.coefficients
        attainable = 0.5 * jnp.sum(jnp.where(w > 0, c, 0) ** 2)
        if self.problem.rest is None:
            exact = self.spectrum.step(PseudoInverse())
            return with_derivative_of(Quadratic.decrease, attainable, self.problem, exact)
        return jnp.where(_tree.any_nonzero(self.problem.rest), jnp.inf, attainable)

    def with_problem(self, problem: Quadratic) -> "Spectral":
        spectrum = self.spectrum.with_residual(problem.residual)
        return type(self)(problem, spectrum, Passes())

    def solve(self, filter: Filter) -> Answer:
        spectrum = self.spectrum
        if isinstance(filter, Tikhonov) and self.problem.rest is None:
            spectrum = spectrum.damped(filter.damping)
        w, c = spectrum.eigenvalues, spectrum.coefficients
        g = evaluated(filter, w)
        # The step multiplies the linearised residual by 1 - w g(w). Growth by 1/eps
        # counts as divergence, and so does the NaN of an overflow in gnlin's filters.
        growth, most = jnp.abs(1 - w * g), 1 / jnp.finfo(w.dtype).eps
        of_gnlin = isinstance(filter, AbstractFilter)
        diverged = jnp.any(~(growth < most) if of_gnlin else growth >= most)
        result = optx.RESULTS.where(
            diverged & spectrum.finite(),
            optx.RESULTS.nonlinear_divergence,
            optx.RESULTS.successful,
        )
        if self.problem.rest is None:
            step = spectrum.step(filter)
            decrease = 0.5 * jnp.sum(w * g * (2 - w * g) * c**2)
            decrease = with_derivative_of(
                Quadratic.decrease, decrease, self.problem, step
            )
            norm = _tree.norm(jnp.sqrt(w) * g * c)
            norm = with_derivative_of(_tree.norm, norm, step)
            return Answer(step, decrease=decrease, damped_norm=norm, result=result)
        within, outside = self._split_rest()
        step = self.spectrum.lift(-g * (c + within))
        step = _tree.axpy(-_at_zero(filter, w), outside, step)
        step = with_derivative_of(_with_rest, step, filter, self.spectrum, self.problem)
        return Answer(step, result=result)

    def _split_rest(self) -> tuple[Float[Array, " k"], PyTree[Array]]:
        r"""Split the rest as $\phi^\top U z + g_\perp$; return $z$ and $g_\perp$. If
        $g_\perp$ is rounding, it is set to zero, since a small damping would turn it into
        a long step."""
        w, rest = self.spectrum.eigenvalues, self.problem.rest
        within = _tree.quotient(self.pushed, w, w > 0)
        outside = _tree.axpy(-1, self.spectrum.lift(within), rest)
        size = _tree.norm(outside)
        least = _ROUNDINGS * _tree.eps(rest) * _tree.norm(rest)
        return within, _tree.scale(jnp.where(size <= least, 0, 1), outside)


def _at_zero(filter: Filter, w: Float[Array, " k"]) -> Scalar:
    return filter(jnp.concatenate([jnp.zeros_like(w[:1]), w]))[0]


# The same quantities by products with the Jacobian, used for their derivatives


def _with_rest(filter: Filter, spectrum: Spectrum, problem: Quadratic) -> PyTree[Array]:
    r"""Return the step, with $g(\phi^\top\phi)\,g_0 =
    g(0)\,g_0 + \phi^\top q(\phi\phi^\top)\,\phi g_0$ and $q(w) = (g(w) - g(0))/w$."""
    residual = problem.jacobian.push_forward(problem.rest)
    of_rest = spectrum.with_residual(residual).step(_Quotient(filter))
    step = _tree.axpy(1, of_rest, spectrum.step(filter))
    return _tree.axpy(-_at_zero(filter, spectrum.eigenvalues), problem.rest, step)


class _Quotient(eqx.Module):
    filter: Filter

    def __call__(self, w: Float[Array, " k"]) -> Float[Array, " k"]:
        change = self.filter(w) - _at_zero(self.filter, w)
        return _tree.quotient(change, w, w > 0)


class SingularValues(Spectral):
    """Singular values of the m x p Jacobian; small ones are accurate to rounding."""

    method: ClassVar[str] = "svd"

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        m, p = cost.shape
        if not cost.rows_fit:
            return math.inf
        few, many = sorted(cost.shape)
        # An oblong matrix is reduced to a square one by an orthogonal factorisation.
        oblong = 6.0 * many * float(few) ** 2 * rates().product
        tries = num_trials * 4.0 * m * p * rates().product
        return cost.all_rows + oblong + rates().svd(few) + tries

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "SingularValues":
        return cls._made(problem.at_hand(), "svd", cost.rows)


class Eigenvalues(Spectral):
    """Eigenvalues of the kernel or of the curvature, whichever is smaller."""

    method: ClassVar[str] = "eigh"

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        m, p = cost.shape
        on_outputs = _by_kernel(cost)
        n = m if on_outputs else p
        if not cost.holds(n**2):
            return math.inf
        gram = cost.whole_gram if on_outputs else cost.whole_curvature
        tries = num_trials * 2.0 * n * (m + p) * rates().product
        return gram + rates().eigh(n) + tries + price_of_squaring(cost, filter)

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "Eigenvalues":
        passes = cost.gram if _by_kernel(cost) else cost.rows
        return cls._made(problem.at_hand_if_it_fits(), "eigh", passes)


def _by_kernel(cost: Cost) -> bool:
    """Whether `spectrum_of` factorises the kernel for eigenvalues, not the curvature."""
    m, p = cost.shape
    return m <= p or not cost.rows_fit
