"""Subproblems that are solved by means of another one: in scaled variables, or with a
damping that pulls towards another step than zero."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import AbstractVar
from jaxtyping import Array, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._passes import Passes
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ._base import AbstractMethod, AbstractSubproblem, Answer
from ._matrix_free import MatrixFree
from ._prox_linear import ProxLinear


class AbstractWrapper(AbstractSubproblem):
    """A subproblem that is solved by means of another one, `inner`."""

    inner: AbstractVar[AbstractSubproblem]

    def curvature_along_gradient(self) -> Scalar:
        return self.inner.curvature_along_gradient()

    def largest_curvature(self) -> Scalar:
        return self.inner.largest_curvature()

    def least_damping(self, size: ScalarLike = 1.0) -> Scalar:
        return self.inner.least_damping(size)

    def truncated(self, tolerance, max_steps=None) -> "AbstractWrapper":
        inner = self.inner.truncated(tolerance, max_steps)
        return eqx.tree_at(lambda s: s.inner, self, inner)

    def factorised(self, filter: Filter) -> "AbstractWrapper":
        return eqx.tree_at(lambda s: s.inner, self, self.inner.factorised(filter))


class Rescaled(AbstractWrapper):
    r"""A subproblem that is solved in the variables $D\delta$, and returns $\delta$."""

    inner: AbstractSubproblem
    scale: PyTree[Array]
    passes: Passes
    gradient_norm: Scalar

    def __init__(self, inner: AbstractSubproblem, scale: PyTree[Array], own: Passes):
        """`own`: the passes that the scales took."""
        self.inner = inner
        self.scale = scale
        self.passes = own + inner.passes
        self.gradient_norm = _tree.norm(self.gradient())

    def gradient(self) -> PyTree[Array]:
        return jax.tree.map(jnp.multiply, self.scale, self.inner.gradient())

    def scaled_gradient_norm(self) -> Scalar:
        return self.inner.gradient_norm

    def length(self, vector: PyTree[Array]) -> Scalar:
        scale, vector = _tree.joined(self.scale), _tree.joined(vector)
        return _tree.norm(jax.tree.map(jnp.multiply, scale, vector))

    def attainable_decrease(self, least: Scalar) -> Scalar:
        return self.inner.attainable_decrease(least)

    def with_residual(self, residual: PyTree[Array]) -> "Rescaled":
        return Rescaled(self.inner.with_residual(residual), self.scale, Passes())

    def solve(self, filter: Filter) -> Answer:
        answer = self.inner.solve(filter)
        step = jax.tree.map(jnp.divide, answer.step, self.scale)
        return eqx.tree_at(lambda a: a.step, answer, step)


class WithMomentum(AbstractWrapper):
    r"""A subproblem with $\frac\lambda2\lVert\delta - \delta_0\rVert^2$ in place of
    $\frac\lambda2\lVert\delta\rVert^2$. It is solved for $\delta - \delta_0$, with the
    residual $r + \phi\delta_0$; its gradient is the gradient at $\delta = 0$.
    """

    inner: AbstractSubproblem
    problem: Quadratic
    towards: PyTree[Array]
    _gradient: PyTree[Array]
    gradient_norm: Scalar
    passes: Passes

    def __init__(
        self,
        problem: Quadratic,
        towards: PyTree[Array],
        ready: Callable[[Quadratic], AbstractSubproblem],
    ):
        """`ready`: sets a problem up."""
        jacobian = problem.jacobian
        pushed = jacobian.mv(towards)
        residual = jax.tree.map(jnp.add, problem.residual, pushed)
        self.inner = ready(Quadratic(jacobian, residual, problem.rest))
        self.problem = problem
        self.towards = towards
        self._gradient = problem.gradient()
        self.gradient_norm = _tree.norm(self._gradient)
        self.passes = self.inner.passes + jacobian.a_product()

    def gradient(self) -> PyTree[Array]:
        return self._gradient

    def curvature_along_gradient(self) -> Scalar:
        return self.problem.curvature_along(self._gradient)

    def solve(self, filter: Filter) -> Answer:
        answer = self.inner.solve(filter)
        step = _tree.axpy(1, answer.step, self.towards)
        taken = answer.num_inner_steps, answer.passes
        return Answer(step, *taken, result=answer.result)


def pulled(
    problem: Quadratic | ProxLinear,
    towards: PyTree[Array],
    way: type[AbstractMethod],
    ready: Callable[[Quadratic | ProxLinear], AbstractSubproblem],
) -> AbstractSubproblem:
    """Return a subproblem whose damping pulls towards a step; the damping of a
    prox-linear problem does not.

    - `ready`: sets a problem up, as `way` does.
    """
    if isinstance(problem, ProxLinear):
        return ready(problem)
    subproblem = ready(problem) if issubclass(way, MatrixFree) else None
    if not isinstance(subproblem, MatrixFree):  # It may be in other variables.
        return WithMomentum(problem, towards, ready)
    is_none = lambda x: x is None
    return eqx.tree_at(lambda s: s.towards, subproblem, towards, is_leaf=is_none)
