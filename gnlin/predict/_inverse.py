"""The inverse of the curvature at a minimum: by singular values, or by a solve for each
function of the parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar

from .._common import _tree
from .._jacobian import in_few_rows, matrix_of
from .._linear_algebra._covariance import Covariance, covariance, where_determined
from .._linearisation._quadratic import Quadratic
from .._subproblem import choose
from ..filters import Tikhonov


# The damping is this multiple of the rounding of the curvature. A function is not
# determined if the damping determines more than this part of its variance.
_ROUNDINGS, _PART = 100.0, 0.03
# Functions solved for at a time: the factorisation is made once for all of them. Its time
# is that of about ten solves, and a larger number does not make a solve cheaper.
_MOST_AT_ONCE = 256
# Vectors of the size of the system in memory, for each of these functions.
_VECTORS = 8


def by_singular_values(
    problem: Quadratic,
    moving: Bool[Array, " p"],
    concave: Float[Array, "p p"] | None,
    nearby: Quadratic | None,
) -> Covariance:
    """Return the covariance from the singular values of the whole Jacobian.

    - `nearby`: the problem at parameters that differ by rounding.
    """
    matrix_at = lambda problem: matrix_of(in_few_rows(problem.jacobian.blocks()))
    matrix = matrix_at(problem)
    number = jnp.array(problem.jacobian.codomain.size, matrix.dtype)
    other = None if nearby is None else matrix_at(nearby)
    known = covariance(matrix, moving, moving, number, other)
    return known if concave is None else known.less(concave.astype(matrix.dtype))


class BySolves(eqx.Module):
    r"""The inverse of the curvature by damped solves for each function, for sparse
    problems of many parameters. The damping is that of rounding, after the columns are
    scaled to length 1, so that it does not depend on the parameters' units.

    With $x = (A + \lambda)^{-1} a$, a variance $a^\top x$ falls by
    $\lambda\lVert x\rVert^2$ if the damping grows in proportion. This is all of it in
    directions without curvature, and otherwise what the damping took from the variance,
    to first order."""

    problem: Quadratic
    units: Float[Array, " p"]
    damping: Scalar
    rank: Scalar
    is_whole: ClassVar[bool] = True

    @staticmethod
    def of(problem: Quadratic, moving: Bool[Array, " p"]) -> "BySolves":
        if _tree.dtype(problem.residual) != jnp.float64:
            raise ValueError(
                "Single precision does not resolve the covariance of so many parameters: "
                'use `jax.config.update("jax_enable_x64", True)`.'
            )
        zeros = jax.tree.map(jnp.zeros_like, problem.residual)
        jacobian = problem.jacobian.at_hand_if_it_fits()
        norms = jax.tree.map(jnp.sqrt, jacobian.squared_columns())
        units = jax.tree.map(lambda x: jnp.where(x > 0, x, 1), norms)
        damping = jnp.array(_ROUNDINGS * _tree.eps(problem.residual))
        scaled = Quadratic(jacobian, zeros).scaled(units)
        flat, _ = _tree.ravel_pytree(units)
        return BySolves(scaled, flat, damping, jnp.sum(moving))

    def covariance_of(self, rows: Float[Array, "k p"], scale: Scalar) -> Array:
        """Return the covariance of linear functions of the parameters."""
        step = self._steps()
        rows = rows / self.units[None]
        solved = -self._in_blocks(step, rows)
        damped = _tree.matmul(rows, solved.T)
        lost = self.damping * _tree.matmul(solved, solved.T)
        determined = jnp.diagonal(lost) <= _PART * jnp.diagonal(damped)
        found = 0.5 * (damped + damped.T) + lost
        return where_determined(determined, scale * found)

    def variances(self, rows: Float[Array, "k p"], scale: Scalar) -> Array:
        """Return the variances of linear functions of the parameters."""
        return self._variances(lambda row: row / self.units, rows, scale)

    def variances_of_parameters(self, scale: Scalar) -> Float[Array, " p"]:
        """Return the variance of each parameter, without a p x p matrix."""
        units = self.units

        def row(k: Int[Array, ""]) -> Float[Array, " p"]:
            return jnp.zeros_like(units).at[k].set(1 / units[k])

        return self._variances(row, jnp.arange(len(units)), scale)

    def newton_decrement(self, slope: PyTree[Array]) -> Scalar:
        """Return the length of a Newton step in standard deviations. A product with the
        Jacobian removes what rounding adds in directions without curvature."""
        step = self._steps()(_tree.ravel_pytree(slope)[0] / self.units)
        return _tree.norm(self.problem.jacobian.push_forward(self._unravel(step)))

    def _variances(
        self, row_of: Callable[[Array], Array], each: Array, scale: Scalar
    ) -> Array:
        """Return the variances of the functions whose rows, in the scaled parameters,
        `row_of` makes from the entries of `each`."""
        step = self._steps()

        def variance(of: Array) -> Scalar:
            row = row_of(of)
            solved = -step(row)
            damped = _tree.dot(row, solved)
            lost = self.damping * _tree.dot(solved, solved)
            return jnp.where(lost <= _PART * damped, damped + lost, jnp.inf)

        return scale * self._in_blocks(variance, each)

    def _in_blocks(self, fn: Callable[[Array], Array], each: Array) -> Array:
        """Map a function of one row in blocks of equal size that fit in the memory
        budget."""
        jacobian = self.problem.jacobian
        one = _VECTORS * sum(jacobian.shape) * self.damping.dtype.itemsize
        most = max(1, min(_MOST_AT_ONCE, jacobian.memory_budget // one))
        number = max(1, -(-len(each) // most))
        size = max(1, -(-len(each) // number))
        more = [(0, number * size - len(each))] + [(0, 0)] * (each.ndim - 1)
        found = jax.lax.map(fn, jnp.pad(each, more), batch_size=size)
        return found[: len(each)]

    def _steps(self) -> Callable[[Float[Array, " p"]], Float[Array, " p"]]:
        """Set the problem up, and return its step for a gradient."""
        filter = Tikhonov(self.damping)
        zeros = self._unravel(jnp.zeros_like(self.units))
        problem = dataclasses.replace(self.problem, rest=zeros)
        # More than one trial: trying products first would not pay for many functions.
        ready: Any = choose(problem, filter, num_trials=2).factorised(filter)

        def step(slope: Float[Array, " p"]) -> Float[Array, " p"]:
            problem = dataclasses.replace(ready.problem, rest=self._unravel(slope))
            found = ready.with_problem(problem).solve(filter).step
            return _tree.ravel_pytree(found)[0]

        return step

    def _unravel(self, flat: Float[Array, " p"]) -> PyTree[Array]:
        return self.problem.jacobian.domain.unravel(flat)
