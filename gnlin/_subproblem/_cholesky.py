"""Cholesky factorisations of damped systems."""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from jaxtyping import Array, Bool, Float, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._passes import Passes
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ..filters import Tikhonov
from ._base import AbstractWay, does_not_serve


def damping_of(filter: Filter) -> ScalarLike:
    """Return the damping of a `Tikhonov` filter; raise for any other filter."""
    if not isinstance(filter, Tikhonov):
        raise does_not_serve("cholesky", filter)
    return filter.damping


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


def solve_damped(
    matrix: Float[Array, "n n"], vector: Float[Array, " n"], damping: ScalarLike
) -> tuple[Float[Array, " n"], optx.RESULTS]:
    """Return `(matrix + lambda I)^-1 vector`."""
    matrix, vector = _tree.promoted((matrix, vector))
    return Factorised.of(matrix, damping).solve(vector)


class AbstractByCholesky(AbstractWay):
    """A way that factorises a damped matrix.

    - `matrix`: the matrix without the damping.
    - `factor`: the factorisation if it was made in advance for one filter; `None` to
        make one for each solution.
    """

    problem: Quadratic
    matrix: Float[Array, "n n"]
    passes: Passes
    gradient_norm: Scalar
    factor: Factorised | None

    def __init__(self, problem: Quadratic, matrix: Float[Array, "n n"], passes: Passes):
        self.problem = problem
        self.matrix = matrix
        self.passes = passes
        self.factor = None

    @abc.abstractmethod
    def vectors(self) -> PyTree[Array]:
        """Return right-hand sides, which determine the dtype of the factorisation."""

    def largest_curvature(self) -> Scalar:
        return jnp.max(jnp.diagonal(self.matrix))

    def with_residual(self, residual: PyTree[Array]) -> "AbstractByCholesky":
        problem = self.problem.with_residual(residual)
        return type(self)(problem, self.matrix, Passes())._with(self.factor)

    def factorised(self, filter: Filter) -> "AbstractByCholesky":
        return self._with(self._made(filter))

    def _with(self, factor: Factorised | None) -> "AbstractByCholesky":
        is_none = lambda x: x is None
        return eqx.tree_at(lambda w: w.factor, self, factor, is_leaf=is_none)

    def factor_for(self, filter: Filter) -> Factorised:
        """Return the factorisation made in advance, or else one for this filter."""
        return self._made(filter) if self.factor is None else self.factor

    def _made(self, filter: Filter) -> Factorised:
        wide = self.matrix.astype(_tree.dtype((self.matrix, self.vectors())))
        return Factorised.of(wide, damping_of(filter))
