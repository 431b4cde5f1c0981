"""The inverse of the curvature at a minimum: by singular values, or by a solve for each
function of the parameters."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar

from .._common import _tree
from .._linear_algebra._covariance import (
    Covariance,
    covariance as from_matrix,
    where_determined,
)
from .._linearisation._quadratic import Quadratic
from .._subproblem import choose
from ..filters import Tikhonov


# A function is undetermined if its variance falls by more than the first factor when the
# damping, a multiple of the rounding of the curvature, rises by the second.
_FALLS, _RISES, _ROUNDINGS = 1.1, 4.0, 100.0


class BySingularValues(eqx.Module):
    """The inverse of the curvature from the singular values of the whole Jacobian."""

    known: Covariance

    @property
    def rank(self) -> Int[Array, ""]:
        return self.known.rank

    @property
    def is_whole(self) -> Bool[Array, ""]:
        """Whether no negative curvature of the loss had to be left out."""
        return self.known.is_whole

    @staticmethod
    def of(
        problem: Quadratic,
        moving: Bool[Array, " p"],
        concave: Float[Array, "p p"] | None,
    ) -> "BySingularValues":
        matrix = problem.jacobian.as_matrix()
        number = jnp.array(len(matrix), matrix.dtype)
        known = from_matrix(matrix, moving, moving, number)
        if concave is not None:
            known = known.less(concave.astype(matrix.dtype))
        return BySingularValues(known)

    def covariance_of(self, rows: Float[Array, "k p"], scale: Scalar) -> Array:
        """Return the covariance of linear functions of the parameters."""
        return self.known.covariance_of(rows, scale.astype(rows.dtype))

    def newton_decrement(self, slope: PyTree[Array]) -> Scalar:
        """Return the length of a Newton step in standard deviations."""
        flat = _tree.ravel_pytree(slope)[0]
        return jnp.linalg.norm(_tree.matmul(flat, self.known.factor))


class BySolves(eqx.Module):
    """The inverse of the curvature by damped solves for each function, for sparse
    problems of many parameters. The damping is that of rounding, after the columns are
    scaled to length 1, so that it does not depend on the parameters' units."""

    problem: Quadratic
    units: PyTree[Array]
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
        return BySolves(scaled, units, damping, jnp.sum(moving))

    def covariance_of(self, rows: Float[Array, "k p"], scale: Scalar) -> Array:
        """Return the covariance of linear functions of the parameters. Two dampings show
        whether the function is determined, and remove most of the damping's effect."""
        units = _tree.ravel_pytree(self.units)[0]
        unravel = self.problem.jacobian.domain.unravel
        rows = rows / units[None]

        def damped(damping: Scalar) -> Float[Array, "k k"]:
            solved = jax.lax.map(lambda row: self._step(unravel(row), damping), rows)
            flat = jax.vmap(lambda step: _tree.ravel_pytree(step)[0])(solved)
            return -_tree.matmul(rows, flat.T)

        less, more = damped(self.damping), damped(_RISES * self.damping)
        determined = jnp.diagonal(less) <= _FALLS * jnp.diagonal(more)
        found = less + (less - more) / (_RISES - 1)
        return where_determined(determined, scale * 0.5 * (found + found.T))

    def newton_decrement(self, slope: PyTree[Array]) -> Scalar:
        """Return the length of a Newton step in standard deviations. A product with the
        Jacobian removes what rounding adds in directions without curvature."""
        slope = jax.tree.map(jnp.divide, slope, self.units)
        return _tree.norm(self.problem.jacobian.mv(self._step(slope, self.damping)))

    def _step(self, slope: PyTree[Array], damping: Scalar) -> PyTree[Array]:
        problem, filter = dataclasses.replace(self.problem, rest=slope), Tikhonov(damping)
        return choose(problem, filter).solve(filter).step
