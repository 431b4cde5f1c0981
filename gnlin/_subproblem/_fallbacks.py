"""Ways that try a cheap method first, and fall back on an expensive one."""

import abc
import math
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import AbstractVar
from jax.tree_util import Partial
from jaxtyping import Array, Bool, PyTree

from .._common import _tree
from .._common._sharding import is_sharded
from .._jacobian import Cost
from .._linearisation._decompositions import svd_is_cheap
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ..filters import PseudoInverse, Tikhonov
from ._base import (
    AbstractMethod,
    Answer,
    either,
    InexactTikhonov,
    is_plain_inverse,
    needs_accuracy,
    price_of_squaring,
    serves_in_two_stages,
)
from ._cholesky import OnOutputs, OnParameters
from ._matrix_free import MatrixFree, random_signs
from ._schur import SchurComplement
from ._sparse import dense_seconds, has_factorisation, SparseLU
from ._spectral import Eigenvalues, SingularValues
from ._wrappers import AbstractWrapper


# Share of the factorisation's cost that conjugate gradients may spend before it, and the
# least number of products for which trying them pays.
_SHARE_TRIED = 0.4
_FEWEST_TRIED = 10
# Seconds of one iteration of conjugate gradients besides its product. With a network of
# 3,010 parameters an iteration took 96 microseconds, and its product is estimated at 45.
_ITERATION = 5e-5
# Approximate share of problems in which eigenvalues do not suffice.
_SHARE_UNRESOLVED = 1 / 3
# The sparse factorisation of an undamped problem has this multiple of the curvature's
# rounding as its damping, of which each refinement removes the effect.
_ROUNDINGS, _REFINED = 100, 3
# Most that a refinement may leave of the error in any direction.
_MOST_LEFT = 1e-3
# Seconds added to the cost of each step for compiling two ways, and for trying products.
_BOTH_COMPILED, _TRYING = 1e-3, 5e-3


class AbstractFirst(AbstractWrapper, AbstractMethod):
    """A cheap way that is tried first, and a direct one that is used if it fails. The
    compiled program decides between them, and counts the passes of both.

    - `inner`: the cheap way.
    - `directly`: sets the same problem up for the direct way.
    """

    inner: AbstractVar[Any]
    directly: Callable[[], AbstractMethod]

    def __init__(self, first: AbstractMethod, directly: Callable[[], AbstractMethod]):
        self.problem = first.problem
        self.inner = first
        self.directly = directly
        self._gradient = first.gradient()
        self.gradient_norm = first.gradient_norm
        self.passes = first.passes

    @abc.abstractmethod
    def attempt(self, filter: Filter) -> tuple[Answer, Bool[Array, ""]]:
        """Return the answer of the first way, and whether it is a solution."""

    def with_problem(self, problem: Quadratic) -> AbstractMethod:
        new = super().with_problem(problem)
        parts = self.inner.with_problem(problem), Partial(_other, self.directly, problem)
        return eqx.tree_at(lambda s: (s.inner, s.directly), new, parts)

    def solve(self, filter: Filter) -> Answer:
        tried, arrived = self.attempt(filter)

        def otherwise():
            direct = self.directly()
            answer = direct.solve(filter)
            passes = tried.passes + direct.passes + answer.passes
            num_inner_steps = tried.num_inner_steps
            return Answer(answer.step, num_inner_steps, passes, result=answer.result)

        return either(arrived, lambda: tried, otherwise)


class ProductsFirst(AbstractFirst):
    """Conjugate gradients first, and a factorisation if they do not converge.

    They take about as many steps as there are distinct eigenvalues above the damping, a
    number that is not known in advance. They are therefore tried up to a number of steps
    that costs a fraction of the factorisation.
    """

    method: ClassVar[str] = "products-first"
    stops_early: ClassVar[bool] = True
    residuals_are_dear: ClassVar[bool] = True
    inner: MatrixFree
    most: int = eqx.field(static=True)

    def __init__(
        self, first: MatrixFree, directly: Callable[[], AbstractMethod], most: int
    ):
        super().__init__(first, directly)
        self.most = most

    @classmethod
    def fits(cls, problem, filter: Filter) -> bool:
        return super().fits(problem, filter) and not is_sharded()

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        if isinstance(filter, InexactTikhonov):
            is_sparse = _direct(cost) is SparseLU
            return filter.price(cost) if is_sparse else math.inf
        if num_trials > 1 or _most_tried(cost) < _FEWEST_TRIED:
            return math.inf
        return _TRYING + _SHARE_TRIED * _direct(cost).cost(cost, filter, 1)

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "ProductsFirst":
        directly = Partial(_direct(cost).of, problem, cost)
        return cls(MatrixFree(problem), directly, _most_tried(cost))

    def attempt(self, filter: Filter) -> tuple[Answer, Bool[Array, ""]]:
        damping, is_damped = self.damping_of(filter), isinstance(filter, InexactTikhonov)
        tolerance = self.inner.tolerance
        return self.inner.attempt(tolerance, damping, self.most, is_damped=is_damped)


class EigenvaluesFirst(AbstractFirst):
    """Eigenvalues first, and singular values if some are too small to be accurate.

    Eigenvalues of the kernel or of the curvature are 8 to 38 times cheaper than singular
    values of the Jacobian, but small ones are inaccurate. Only the eigenvalues tell
    whether there are small ones that are not zero.

    - `inner`: the eigenvalues without those that are only rounding.
    - `resolved`: whether singular values would add nothing to them.
    """

    method: ClassVar[str] = "eigh-first"
    inner: Eigenvalues
    resolved: Bool[Array, ""]

    def __init__(self, first: Eigenvalues, directly: Callable[[], AbstractMethod]):
        super().__init__(first, directly)
        spectrum, self.resolved = first.spectrum.resolved()
        self.inner = eqx.tree_at(lambda s: s.spectrum, first, spectrum)

    @classmethod
    def fits(cls, problem, filter: Filter) -> bool:
        return isinstance(problem, Quadratic) and not is_sharded()

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        if num_trials > 1 or not needs_accuracy(filter, cost):
            return math.inf
        if svd_is_cheap(*cost.shape) or serves_in_two_stages(cost, filter):
            return math.inf
        eigenvalues = Eigenvalues.cost(cost, filter, 1) - price_of_squaring(cost, filter)
        singular_values = SingularValues.cost(cost, filter, 1)
        return _BOTH_COMPILED + eigenvalues + _SHARE_UNRESOLVED * singular_values

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "EigenvaluesFirst":
        first = Eigenvalues.of(problem, cost)
        problem = first.problem  # whose Jacobian may be in memory now
        return cls(first, Partial(SingularValues.of, problem, problem.jacobian.cost()))

    def attempt(self, filter: Filter) -> tuple[Answer, Bool[Array, ""]]:
        return self.inner.solve(filter), self.resolved


class FactorisedFirst(AbstractFirst):
    r"""A sparse factorisation or a Schur complement for an undamped problem, and a dense
    way if the problem is rank-deficient.

    A tiny damping $\lambda$ makes the factorisation possible. Each refinement
    $\delta \leftarrow \delta - (A + \lambda)^{-1}\nabla(\delta)$ multiplies the error in
    an eigenvector of the curvature $A$ by $\lambda/(w + \lambda)$. The largest of these
    factors follows from a power method with the same matrix, and is one if the problem is
    rank-deficient. Parameters that no residual depends on have a step of zero.

    ??? cite "Reference"

        Å. Björck, *Numerical methods for least squares problems* (1996), section 2.9, on
        refinement; J. D. Riley, *Solving systems of linear equations with a positive
        definite, symmetric, but possibly ill-conditioned matrix* (1955), for the damping.
    """

    method: ClassVar[str] = "sparse"
    inner: SparseLU | SchurComplement

    def __init__(
        self,
        first: SparseLU | SchurComplement,
        directly: Callable[[], AbstractMethod],
    ):
        super().__init__(first, directly)

    @classmethod
    def fits(cls, problem, filter: Filter) -> bool:
        if not isinstance(problem, Quadratic) or is_sharded():
            return False
        if not is_plain_inverse(filter) or _tree.dtype(problem.residual) != jnp.float64:
            return False
        return _factorising(problem.jacobian.cost()) is not None

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        first = _factorising(cost)
        if first is None or num_trials > 1:
            return math.inf
        dense = dense_seconds(cost.reads) if first is SparseLU else 0.0
        once = first.cost(cost, Tikhonov(1.0), _REFINED)
        return _BOTH_COMPILED + once + _REFINED * dense

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "FactorisedFirst":
        problem = problem.at_hand_if_it_fits()
        first, cost = _factorising(cost), problem.jacobian.cost()
        assert first is not None  # as `fits` has checked
        dense = EigenvaluesFirst, SingularValues, Eigenvalues, MatrixFree
        cheapest = min(dense, key=lambda way: way.cost(cost, PseudoInverse(), 1))
        return cls(first.of(problem, cost), Partial(cheapest.of, problem, cost))

    def attempt(self, filter: Filter) -> tuple[Answer, Bool[Array, ""]]:
        problem, jacobian = self.problem, self.problem.jacobian
        squares = jacobian.squared_columns()
        largest = jnp.max(jnp.stack([jnp.max(x) for x in jax.tree.leaves(squares)]))
        damping = _tree.fixed(_ROUNDINGS * _tree.eps(largest) * largest)
        is_read = jax.tree.map(lambda x: x > 0, squares)
        only_read = lambda tree: jax.tree.map(
            lambda there, x: jnp.where(there, x, 0), is_read, tree
        )
        zeros = _tree.zeros_like(problem.residual)

        def solved(slope: PyTree[Array]) -> PyTree[Array]:
            of_slope = self.inner.with_problem(Quadratic(jacobian, zeros, slope))
            return of_slope.solve(Tikhonov(damping)).step

        def refined(_, carry):
            step, slope, probe, _ = carry
            # One factorisation serves for both right-hand sides.
            both = jax.tree.map(lambda *x: jnp.stack(x), only_read(slope), probe)
            both = jax.vmap(solved)(both)
            change, probed = (jax.tree.map(lambda x, k=k: x[k], both) for k in (0, 1))
            step = _tree.axpy(1, change, step)
            residual = _tree.axpy(1, jacobian.mv(step), problem.residual)
            slope = Quadratic(jacobian, residual, problem.rest).gradient()
            probed = _tree.scale(-damping, probed)
            return step, slope, probed, _tree.norm(probe)

        slope = self.inner.gradient()
        probe = only_read(random_signs(slope))
        start = _tree.zeros_like(slope), slope, probe, _tree.norm(probe)
        step, _, probe, before = jax.lax.fori_loop(0, _REFINED, refined, start)
        resolved = _tree.norm(probe) <= _MOST_LEFT * before
        passes = jacobian.a_product() * _REFINED
        # A step that is not finite ends the run, by whichever way it was found.
        known = resolved | ~jnp.isfinite(self.gradient_norm)
        return Answer(step, passes=passes), known


def _factorising(cost: Cost) -> type[SparseLU | SchurComplement] | None:
    """Return the cheaper factorisation of a sparse Jacobian; `None` if there is none."""
    if not cost.reads:
        return None
    ways = [SchurComplement, *[SparseLU] * has_factorisation()]
    costs = [way.cost(cost, Tikhonov(1.0), 1) for way in ways]
    return None if math.isinf(min(costs)) else ways[costs.index(min(costs))]


def _other(directly: Callable[[], AbstractMethod], problem: Quadratic) -> AbstractMethod:
    """Set up the direct way for another problem; its passes include the setup's."""
    direct = directly()
    other = direct.with_problem(problem)
    return eqx.tree_at(lambda s: s.passes, other, direct.passes + other.passes)


def _direct(cost: Cost) -> type[OnOutputs | OnParameters | SparseLU]:
    m, p = cost.shape
    dense = OnOutputs if m <= p else OnParameters
    return SparseLU if cost.reads and has_factorisation() else dense


def _most_tried(cost: Cost) -> int:
    direct = _direct(cost).cost(cost, Tikhonov(1.0), 1)
    if math.isinf(direct):
        return 1
    return max(1, int(_SHARE_TRIED * direct / (cost.one_product + _ITERATION)))
