"""The linearised problem as a least-squares problem for any solver of lineax."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from jaxtyping import Array, Float, PyTree, Scalar

from .._common import _tree
from .._common._passes import Passes
from .._jacobian import AbstractJacobian, Cost, plain_operator
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ..filters import PseudoInverse, Tikhonov
from ._base import AbstractMethod, Answer, is_plain_inverse


# Solvers of square systems, which are given the normal equations.
_SQUARE = (lx.CG, lx.GMRES, lx.BiCGStab, lx.Cholesky, lx.LU)
# Solvers that factorise a matrix, and do not multiply by an operator.
_DIRECT = (lx.AutoLinearSolver, lx.QR, lx.SVD, lx.Cholesky, lx.LU)


def needs_full_rank(method: Any) -> bool:
    """Whether a method is a direct solver of lineax that fails for a singular matrix."""
    inner = method.inner_solver if isinstance(method, lx.Normal) else method
    return isinstance(inner, _DIRECT) and inner.assume_full_rank()


class ByLineax(AbstractMethod):
    r"""One least-squares problem, with $\sqrt\lambda I$ below $\phi$: the step minimises
    $\lVert\phi\delta + r\rVert^2 + \lVert\sqrt\lambda\,\delta +
    g_0/\sqrt\lambda\rVert^2$."""

    method: ClassVar[str] = "lineax"
    problem: Quadratic
    solver: lx.AbstractLinearSolver

    def __init__(self, problem: Quadratic, solver: Any, passes: Passes):
        super().__init__(problem, passes)
        square: Any = solver
        self.solver = lx.Normal(square) if isinstance(solver, _SQUARE) else solver

    @classmethod
    def fits(cls, problem: Any, filter: Filter) -> bool:
        if not isinstance(problem, Quadratic):
            return False
        undamped = is_plain_inverse(filter) and problem.rest is None
        return isinstance(filter, Tikhonov) or undamped

    @classmethod
    def of(cls, problem, cost: Cost, solver: lx.AbstractLinearSolver) -> "ByLineax":
        inner = solver.inner_solver if isinstance(solver, lx.Normal) else solver
        if isinstance(inner, _DIRECT):
            return cls(problem.at_hand(), solver, cost.rows)
        return cls(problem, solver, Passes())

    def solve(self, filter: Filter) -> Answer:
        jacobian, minus_r = self.problem.jacobian, _tree.scale(-1, self.problem.residual)
        if isinstance(filter, PseudoInverse):
            return self._solved(jacobian, minus_r)
        root = jnp.sqrt(jnp.asarray(self.damping_of(filter), self.gradient_norm.dtype))
        below = self.problem.rest
        if below is None:
            below = _tree.zeros_like(jacobian.domain.tree)
        else:
            below = _tree.scale(jnp.where(_tree.any_nonzero(below), -1 / root, 0), below)
        return self._solved(_Damped(jacobian, root), (minus_r, below))

    def _solved(self, operator: lx.AbstractLinearOperator, vector: PyTree) -> Answer:
        solution = lx.linear_solve(operator, vector, self.solver, throw=False)
        num_steps = solution.stats.get("num_steps", 1)
        return Answer(
            solution.value,
            num_steps,
            self.problem.jacobian.a_product() * num_steps,
            result=optx.RESULTS.promote(solution.result),
        )


class _Damped(lx.AbstractLinearOperator):
    r"""The operator $\phi$ above $\sqrt\lambda I$."""

    jacobian: AbstractJacobian
    root: Scalar

    def mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self.jacobian.mv(vector), _tree.scale(self.root, vector)

    def as_matrix(self) -> Float[Array, "m_plus_p p"]:
        matrix = self.jacobian.as_matrix()
        identity = jnp.eye(matrix.shape[1], dtype=matrix.dtype)
        return jnp.concatenate([matrix, self.root.astype(matrix.dtype) * identity])

    def transpose(self) -> lx.AbstractLinearOperator:
        def rmv(vectors):
            above, below = vectors
            return _tree.axpy(self.root, below, self.jacobian.rmv(above))

        return lx.FunctionLinearOperator(rmv, self.out_structure())

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.jacobian.in_structure()

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.jacobian.out_structure(), self.jacobian.in_structure()


plain_operator(_Damped)
