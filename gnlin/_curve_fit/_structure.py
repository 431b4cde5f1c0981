"""The results of a fit in the structure of the parameters."""

from typing import Any, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._common import _tree
from ..losses import SquaredError
from ._problem import FitSettings


if TYPE_CHECKING:
    from ._statistics import Fitted


def in_structure(setting: FitSettings, end: "Fitted") -> dict[str, Any]:
    matrix = end.covariance.matrix(end.factor(setting))
    errors = jnp.sqrt(jnp.diagonal(matrix))
    held = end.at_bound != 0
    errors = jnp.where(held, jnp.nan, errors)
    outer = errors[:, None] * errors[None, :]
    correlation = jnp.where(jnp.eye(held.size, dtype=bool), 1.0, matrix / outer)
    correlation = jnp.where(held[:, None] | held[None], jnp.nan, correlation)
    dof = end.num_points - end.num_free
    # Twice the negative logarithm of the likelihood, up to a constant of the data
    misfit = 2 * end.loss
    if isinstance(setting.loss, SquaredError):
        misfit = end.chi_squared
        if not setting.absolute_sigma:
            misfit = end.num_points * jnp.log(misfit / end.num_points)
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
        self.parameters = eqx.combine(free, setting.fixed)
        self._free = _tree.Structure.of(free)
        self._zeros = _tree.zeros_like(setting.fixed)

    def vector(self, values: Array) -> PyTree[Array]:
        return eqx.combine(self._free.unravel(values), self._zeros)

    def blocks(self, matrix: Array) -> PyTree[Array]:
        """Return a block of the matrix for each pair of leaves."""

        def of_leaf(rows):
            each = jax.vmap(self.vector)(rows.reshape(-1, rows.shape[-1]))
            return jax.tree.map(lambda x: x.reshape(rows.shape[:-1] + x.shape[1:]), each)

        return jax.tree.map(of_leaf, jax.vmap(self.vector, -1, -1)(matrix))
