"""Damped systems by a Cholesky factorisation."""

from typing import Any, TypeVar

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from jaxtyping import Array, Bool, Float, ScalarLike

from .. import _tree
from .._spectrum import Filter
from ..filters import Tikhonov
from ._base import does_not_serve


def damping_of(filter: Filter) -> ScalarLike:
    """Of the only kind of filter that these systems are."""
    if not isinstance(filter, Tikhonov):
        raise does_not_serve("cholesky", filter)
    return filter.damping


class Factorised(eqx.Module):
    """`matrix + lambda I`, for any number of vectors; NaN in, NaN out, and none of it to
    LAPACK."""

    operator: lx.MatrixLinearOperator
    state: Any  # lineax's
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
    """`(matrix + lambda I)^-1 vector`."""
    matrix, vector = _tree.promoted((matrix, vector))
    return Factorised.of(matrix, damping).solve(vector)


_Way = TypeVar("_Way", bound=eqx.Module)


def with_factor(way: _Way, factor: Factorised) -> _Way:
    """The same, with a `factor`."""
    return eqx.tree_at(lambda w: w.factor, way, factor, is_leaf=lambda x: x is None)
