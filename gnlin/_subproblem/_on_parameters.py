"""Cholesky factorisations of the damped curvature, p x p, one for each damping."""

import math
from typing import ClassVar

from jaxtyping import Array, Float, PyTree, Scalar

from .._common import _tree
from .._common._cost import rates
from .._common._passes import Passes
from .._common._tree import matmul, ravel_pytree
from .._jacobian import Cost
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ._base import Answer, price_of_squaring
from ._cholesky import AbstractByCholesky


# A Jacobian of up to this many bytes is put in memory, for the gradient too; the
# curvature of a larger one is summed over parts.
_SMALL_JACOBIAN = 2**20


class OnParameters(AbstractByCholesky):
    r"""The step $-(\phi^\top\phi + \lambda I)^{-1}(\phi^\top r + g_0)$ by a Cholesky
    factorisation."""

    method: ClassVar[str] = "curvature"
    flat_gradient: Float[Array, " p"]

    def __init__(self, problem: Quadratic, matrix: Float[Array, "p p"], passes: Passes):
        super().__init__(problem, matrix, passes)
        self.flat_gradient, _ = ravel_pytree(problem.gradient())
        self.gradient_norm = _tree.norm(self.flat_gradient)
        self.passes = passes + Passes(vjps=problem.jacobian.a_product().vjps)

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        _, p = cost.shape
        held = cost.in_parts or cost.rows_fit
        if not held or p**2 * cost.itemsize > cost.memory_budget:
            return math.inf
        once = rates().cholesky(p)
        return cost.whole_curvature + num_trials * once + price_of_squaring(cost, filter)

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "OnParameters":
        m, p = cost.shape
        if m * p * cost.itemsize <= _SMALL_JACOBIAN:
            problem = problem.at_hand()
        return cls(problem, problem.jacobian.curvature(), cost.rows)

    def gradient(self) -> PyTree[Array]:
        return self.problem.jacobian.domain.unravel(self.flat_gradient)

    def curvature_along_gradient(self) -> Scalar:
        g = self.flat_gradient
        return matmul(g, matmul(self.matrix, g)) / self.gradient_norm**2

    def vectors(self) -> PyTree[Array]:
        return self.flat_gradient

    def solve(self, filter: Filter) -> Answer:
        factor = self.factor_for(filter)
        step, result = factor.solve(self.flat_gradient)
        return Answer(self.problem.jacobian.domain.unravel(-step), result=result)
