"""Cholesky factorisations of the damped kernel, m x m, or of the damped curvature, p x p,
one for each damping."""

import abc
import math
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from jaxtyping import Array, Bool, Float, Scalar, ScalarLike

from .._common import _tree
from .._common._cost import rates
from .._common._passes import Passes
from .._common._tree import matmul, ravel_pytree
from .._jacobian import Cost
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ._base import AbstractMethod, Answer, price_of_squaring


# A Jacobian of up to this many bytes is put in memory, for the gradient of `OnParameters`
# too; the curvature of a larger one is summed over parts.
_SMALL_JACOBIAN = 2**20


class Factorised(eqx.Module):
    """A factorisation of `matrix + lambda I`. If the matrix is not finite, solutions are
    NaN, and LAPACK is given the identity."""

    operator: lx.MatrixLinearOperator
    state: Any
    finite: Bool[Array, ""]

    @staticmethod
    def of(matrix: Float[Array, "n n"], damping: ScalarLike) -> "Factorised":
        identity = jnp.eye(len(matrix), dtype=matrix.dtype)
        damped = matrix + jnp.asarray(damping, matrix.dtype) * identity
        finite = _tree.all_finite(damped)
        operator = lx.MatrixLinearOperator(
            jnp.where(finite, damped, identity), lx.positive_semidefinite_tag
        )
        return Factorised(operator, lx.Cholesky().init(operator, {}), finite)

    def solve(
        self, vector: Float[Array, " n"]
    ) -> tuple[Float[Array, " n"], optx.RESULTS]:
        vector = vector.astype(self.operator.matrix.dtype)
        solution = lx.linear_solve(
            self.operator, vector, lx.Cholesky(), state=self.state, throw=False
        )
        result = optx.RESULTS.promote(solution.result)
        return jnp.where(self.finite, solution.value, jnp.nan), result


class AbstractFactorised(AbstractMethod):
    """A way that factorises a matrix for each filter.

    - `factor`: the factorisation if it was made in advance for one filter; `None` to
        make one for each solution.
    """

    factor: Factorised | None

    @abc.abstractmethod
    def _made(self, filter: Filter) -> Factorised:
        """Return the factorisation for a filter."""

    def factorised(self, filter: Filter) -> "AbstractFactorised":
        is_none = lambda x: x is None
        made = self._made(filter)
        return eqx.tree_at(lambda w: w.factor, self, made, is_leaf=is_none)

    def factor_for(self, filter: Filter) -> Factorised:
        """Return the factorisation made in advance, or else one for this filter."""
        return self._made(filter) if self.factor is None else self.factor


class AbstractByCholesky(AbstractFactorised):
    """A way that factorises a damped matrix.

    - `matrix`: the matrix without the damping, in the precision of the right-hand sides.
    """

    matrix: Float[Array, "n n"]

    def largest_curvature(self) -> Scalar:
        return jnp.max(jnp.diagonal(self.matrix))

    def _made(self, filter: Filter) -> Factorised:
        return Factorised.of(self.matrix, self.damping_of(filter))


class OnOutputs(AbstractByCholesky):
    r"""The step $-\phi^\top(\phi\phi^\top + \lambda I)^{-1} r$ by a Cholesky
    factorisation; see `through_outputs`."""

    method: ClassVar[str] = "kernel"
    pushed: Float[Array, " m"] | None  # phi g_0

    def __init__(
        self,
        problem: Quadratic,
        matrix: Float[Array, "m m"],
        passes: Passes,
        factor: Factorised | None = None,
    ):
        self.pushed = None
        if problem.rest is not None:
            self.pushed = problem.jacobian.push_forward(problem.rest)
            passes += Passes(jvps=problem.jacobian.a_product().jvps)
        AbstractMethod.__init__(self, problem, passes)
        self.matrix = matrix.astype(_tree.dtype((matrix, problem.residual)))
        self.factor = factor

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        m, p = cost.shape
        if not cost.holds(m**2):
            return math.inf
        once = rates().cholesky(m) + 2.0 * m * p * rates().product
        return cost.whole_gram + num_trials * once + price_of_squaring(cost, filter)

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "OnOutputs":
        problem = problem.at_hand_if_it_fits()
        return cls(problem, problem.jacobian.gram(), cost.gram)

    def with_problem(self, problem: Quadratic) -> "OnOutputs":
        return OnOutputs(problem, self.matrix, Passes(), self.factor)

    def solve(self, filter: Filter) -> Answer:
        damping = self.damping_of(filter)
        factor = self.factor_for(filter)
        return through_outputs(factor.solve, self.problem, self.pushed, damping)


def through_outputs(
    solve: Callable[[Float[Array, " m"]], tuple[Float[Array, " m"], optx.RESULTS]],
    problem: Quadratic,
    pushed: Float[Array, " m"] | None,
    damping: ScalarLike,
) -> Answer:
    r"""Return the step $-\phi^\top(\phi\phi^\top + \lambda I)^{-1} r$. With a rest $g_0$,
    add $-\frac1\lambda(g_0 - \phi^\top(\phi\phi^\top + \lambda I)^{-1}\phi g_0)$, by
    Woodbury's identity. `solve` multiplies by $(\phi\phi^\top + \lambda I)^{-1}$, and
    `pushed` is $\phi g_0$."""
    residual, pull_back = problem.flat_residual(), problem.jacobian.pull_back
    a_pass = Passes(vjps=problem.jacobian.a_product().vjps)
    if pushed is None:
        a, result = solve(residual)
        return Answer(pull_back(-a), passes=a_pass, result=result)
    inverse = 1 / jnp.asarray(damping, residual.dtype)
    inverse = jnp.where(_tree.any_nonzero(problem.rest), inverse, 0)
    right = _tree.axpy(-inverse, *_tree.promoted((pushed, residual)))
    a, result = solve(right)
    step = _tree.axpy(-inverse, problem.rest, pull_back(-a))
    return Answer(step, passes=a_pass, result=result)


class OnParameters(AbstractByCholesky):
    r"""The step $-(\phi^\top\phi + \lambda I)^{-1}(\phi^\top r + g_0)$ by a Cholesky
    factorisation."""

    method: ClassVar[str] = "curvature"

    def __init__(self, problem: Quadratic, matrix: Float[Array, "p p"], passes: Passes):
        AbstractMethod.__init__(self, problem, passes)
        self.matrix = matrix.astype(_tree.dtype((matrix, self._gradient)))
        self.factor = None

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        _, p = cost.shape
        if not (cost.in_parts or cost.rows_fit) or not cost.holds(p**2):
            return math.inf
        once = rates().cholesky(p)
        return cost.whole_curvature + num_trials * once + price_of_squaring(cost, filter)

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "OnParameters":
        m, p = cost.shape
        if m * p * cost.itemsize <= _SMALL_JACOBIAN:
            problem = problem.at_hand()
        return cls(problem, problem.jacobian.curvature(), cost.rows)

    def curvature_along_gradient(self) -> Scalar:
        g, _ = ravel_pytree(_tree.direction(self._gradient, self.gradient_norm))
        return matmul(g, matmul(self.matrix, g))

    def solve(self, filter: Filter) -> Answer:
        gradient, _ = ravel_pytree(self._gradient)
        step, result = self.factor_for(filter).solve(gradient)
        return Answer(self.problem.jacobian.domain.unravel(-step), result=result)
