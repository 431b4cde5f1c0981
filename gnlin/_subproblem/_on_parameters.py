"""Cholesky factorisations of the damped curvature, p x p, one for each damping."""

import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Scalar

from .._common import _tree
from .._common._cost import rates
from .._common._passes import Passes
from .._common._tree import matmul, ravel_pytree
from .._jacobian import Cost
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ..filters import Tikhonov
from ._base import Answer, price_of_squaring
from ._cholesky import AbstractByCholesky, Factorised


# A Jacobian of up to this many bytes is put in memory, for the gradient too; the
# curvature of a larger one is summed over parts.
_SMALL_JACOBIAN = 2**20


class OnParameters(AbstractByCholesky):
    r"""The step $-(\phi^\top\phi + \lambda I)^{-1}(\phi^\top r + g_0)$ by a Cholesky
    factorisation."""

    method: ClassVar[str] = "curvature"
    problem: Quadratic
    curvature: Float[Array, "p p"]
    passes: Passes
    flat_gradient: Float[Array, " p"]
    gradient_norm: Scalar
    factor: Factorised | None

    def __init__(
        self,
        problem: Quadratic,
        curvature: Float[Array, "p p"],
        passes: Passes,
        factor: Factorised | None = None,
    ):
        self.problem = problem
        self.curvature = curvature
        self.factor = factor
        self.flat_gradient, _ = ravel_pytree(problem.gradient())
        self.gradient_norm = _tree.norm(self.flat_gradient)
        self.passes = passes + Passes(vjps=problem.jacobian.a_product().vjps)

    @classmethod
    def fits(cls, problem, filter: Filter) -> bool:
        return isinstance(problem, Quadratic) and isinstance(filter, Tikhonov)

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
        return matmul(g, matmul(self.curvature, g)) / self.gradient_norm**2

    def largest_curvature(self) -> Scalar:
        return jnp.max(jnp.diagonal(self.curvature))

    def with_residual(self, residual: PyTree[Array]) -> "OnParameters":
        problem = self.problem.with_residual(residual)
        return OnParameters(problem, self.curvature, Passes(), self.factor)

    def system(self) -> tuple[Float[Array, "n n"], PyTree[Array]]:
        return self.curvature, self.flat_gradient

    def solve(self, filter: Filter) -> Answer:
        factor = self.factor_for(filter)
        step, result = factor.solve(self.flat_gradient)
        return Answer(self.problem.jacobian.domain.unravel(-step), result=result)
