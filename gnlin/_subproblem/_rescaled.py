"""Subproblems that are damped in scaled variables."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Scalar

from .._common import _tree
from .._common._passes import Passes
from .._linearisation._spectrum import Filter
from ._base import AbstractSubproblem, AbstractWrapper, Answer


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
