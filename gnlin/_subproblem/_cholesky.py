"""Damped systems by a Cholesky factorisation."""

import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from jaxtyping import Array, Float, ScalarLike

from .. import _tree
from .._spectrum import Filter
from ..filters import Tikhonov
from ._base import does_not_serve


def damping_of(filter: Filter) -> ScalarLike:
    """Of the only kind of filter that these systems are."""
    if not isinstance(filter, Tikhonov):
        raise does_not_serve("cholesky", filter)
    return filter.damping


def solve_damped(
    matrix: Float[Array, "n n"], vector: Float[Array, " n"], damping: ScalarLike
) -> tuple[Float[Array, " n"], optx.RESULTS]:
    """`(matrix + lambda I)^-1 vector`; NaN in, NaN out, and none of it to LAPACK."""
    dtype = _tree.dtype((matrix, vector))
    matrix, vector = matrix.astype(dtype), vector.astype(dtype)
    identity = jnp.eye(vector.size, dtype=dtype)
    damped = matrix + jnp.asarray(damping, matrix.dtype) * identity
    finite = _tree.all_finite((damped, vector))
    operator = lx.MatrixLinearOperator(
        jnp.where(finite, damped, identity), lx.positive_semidefinite_tag
    )
    solution = lx.linear_solve(operator, vector, lx.Cholesky(), throw=False)
    return jnp.where(finite, solution.value, jnp.nan), optx.RESULTS.promote(
        solution.result
    )
