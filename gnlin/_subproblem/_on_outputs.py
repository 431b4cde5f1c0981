"""Cholesky factorisations of the damped kernel, m x m, one for each damping."""

import math
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._cost import rates
from .._common._passes import Passes
from .._common._tree import matmul
from .._jacobian import Cost
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ._base import Answer, price_of_squaring
from ._cholesky import AbstractByCholesky, damping_of


Solved = tuple[Float[Array, " m"], ScalarLike, optx.RESULTS]
"""Coefficients of outputs, the inner steps they took, and the result."""


class OnOutputs(AbstractByCholesky):
    r"""The step $-\phi^\top(\phi\phi^\top + \lambda I)^{-1} r$ by a Cholesky
    factorisation; see `through_outputs`."""

    method: ClassVar[str] = "kernel"
    pushed: Float[Array, " m"] | None  # phi g_0

    def __init__(self, problem: Quadratic, matrix: Float[Array, "m m"], passes: Passes):
        super().__init__(problem, matrix, passes)
        if problem.rest is None:
            self.pushed = None
            self.gradient_norm = _norm_by(matrix, problem.flat_residual())
        else:
            self.pushed = problem.jacobian.push_forward(problem.rest)
            self.passes = passes + problem.jacobian.a_product()
            self.gradient_norm = _tree.norm(self.gradient())

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        m, p = cost.shape
        if m**2 * cost.itemsize > cost.memory_budget:
            return math.inf
        once = rates().cholesky(m) + 2.0 * m * p * rates().product
        return cost.whole_gram + num_trials * once + price_of_squaring(cost, filter)

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "OnOutputs":
        problem = problem.at_hand_if_it_fits()
        return cls(problem, problem.jacobian.gram(), cost.gram)

    def curvature_along_gradient(self) -> Scalar:
        pushed = matmul(self.matrix, self.problem.flat_residual())
        if self.pushed is not None:
            pushed = _tree.axpy(1, self.pushed, pushed)
        return _tree.dot(pushed, pushed) / self.gradient_norm**2

    def vectors(self) -> PyTree[Array]:
        return self.problem.residual

    def solve(self, filter: Filter) -> Answer:
        damping = damping_of(filter)
        factor = self.factor_for(filter)

        def solve(vector):
            a, result = factor.solve(vector)
            return a, 0, result

        return through_outputs(solve, self.problem, self.pushed, damping)


def through_outputs(
    solve: Callable[[Float[Array, " m"]], Solved],
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
        a, num_steps, result = solve(residual)
        return Answer(pull_back(-a), num_steps, a_pass, result=result)
    inverse = 1 / jnp.asarray(damping, residual.dtype)
    inverse = jnp.where(_tree.any_nonzero(problem.rest), inverse, 0)
    right = _tree.axpy(-inverse, *_tree.promoted((pushed, residual)))
    a, num_steps, result = solve(right)
    step = _tree.axpy(-inverse, problem.rest, pull_back(-a))
    return Answer(step, num_steps, a_pass, result=result)


def _norm_by(kernel: Float[Array, "m m"], residual: Float[Array, " m"]) -> Scalar:
    r"""Return $\lVert\phi^\top r\rVert$ without overflow of its square."""
    residual = residual.astype(_tree.dtype((kernel, residual)))
    unit = _tree.unit(residual)
    r = residual / unit
    product = matmul(kernel, r)
    size = _tree.unit(product)
    squared = matmul(r, product / size)
    return unit * jnp.sqrt(size) * jnp.sqrt(jnp.where(squared < 0, 0, squared))
