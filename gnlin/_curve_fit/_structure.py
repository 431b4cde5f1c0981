"""The results of a fit in the structure of the parameters."""

from typing import Any, TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._common import _tree
from ._likelihood import Likelihood
from ._problem import FitSettings


if TYPE_CHECKING:
    from ._program import Fitted


def in_structure(setting: FitSettings, end: "Fitted") -> dict[str, Any]:
    matrix = end.covariance.matrix(end.factor(setting))
    errors = jnp.sqrt(jnp.diagonal(matrix))
    held = end.at_bound != 0
    errors = jnp.where(held, jnp.nan, errors)
    outer = errors[:, None] * errors[None, :]
    correlation = jnp.where(jnp.eye(held.size, dtype=bool), 1.0, matrix / outer)
    correlation = jnp.where(held[:, None] | held[None], jnp.nan, correlation)
    dof = end.num_points - end.num_free
    misfit = end.num_points * jnp.log(end.chi_squared / end.num_points)
    if isinstance(setting.loss, Likelihood):
        misfit = 2 * end.loss
    every = _Every(setting, end.parameters)
    return {
        "parameters": every.parameters,
        "standard_errors": every.vector(errors),
        "covariance": every.blocks(matrix),
        "covariance_matrix": matrix,
        "correlation": every.blocks(correlation),
        "deviance": 2 * end.loss,
        "reduced_chi_squared": end.chi_squared / dof,
        "degrees_of_freedom": dof,
        "scale": jnp.ones_like(end.noise) if setting.absolute_sigma else end.noise,
        "at_bound": jax.tree.map(lambda x: x.astype(int), every.vector(end.at_bound)),
        "multipliers": every.vector(jnp.where(held, end.pull, 0)),
        "aic": misfit + 2 * end.num_free,
        "bic": misfit + jnp.log(end.num_points) * end.num_free,
    }


class _Every:
    """All parameters. Its methods put vectors and matrices over the free parameters into
    the structure of all, with zeros for the fixed ones."""

    def __init__(self, setting: FitSettings, free: PyTree[Array]):
        merged, fixed = setting.curve.merged, setting.fixed
        self.parameters = merged(free, fixed)
        self.like = _tree.Structure.of(self.parameters)
        is_free = merged(
            jax.tree.map(lambda x: np.ones(x.shape, bool), free),
            jax.tree.map(lambda x: np.zeros(x.shape, bool), fixed),
        )
        flags = [flag.ravel() for flag in jax.tree.leaves(is_free)]
        self.places = np.flatnonzero(np.concatenate(flags))

    def vector(self, values: Array) -> PyTree[Array]:
        zeros = jnp.zeros(self.like.size, values.dtype)
        return self.like.unravel(zeros.at[self.places].set(values))

    def blocks(self, matrix: Array) -> PyTree[Array]:
        """Return a block of the matrix for each pair of leaves."""
        zeros = jnp.zeros((self.like.size, matrix.shape[0]), matrix.dtype)
        rows = jax.vmap(self.vector)(zeros.at[self.places].set(matrix))
        ends = np.cumsum([leaf.size for leaf in self.like.leaves])

        def of(leaf, end):
            some = slice(end - leaf.size, end)
            return jax.tree.map(
                lambda row: row[some].reshape(leaf.shape + row.shape[1:]), rows
            )

        pairs = zip(self.like.leaves, ends, strict=True)
        return self.like.treedef.unflatten([of(*pair) for pair in pairs])
