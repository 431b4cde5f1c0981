"""The regression tasks that are timed: ReLU networks that fit a quintic."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

import gnlin

from ..data.quintic import examples
from .oracle import Oracle


DAMPING = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A network with one output, its data, and the same as a function of the
    parameters."""

    name: str
    model: eqx.nn.MLP
    inputs: Float[Array, "m 1"]
    targets: Float[Array, "m 1"]
    parameters: PyTree[Array]
    forward: Callable[[PyTree[Array], Float[Array, " 1"]], Float[Array, ""]]
    """`forward(parameters, x)` returns the one output of one example."""

    @property
    def args(self):
        return self.inputs, self.targets

    @property
    def num_outputs(self) -> int:
        return self.inputs.shape[0]

    @property
    def num_parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.parameters))

    def residuals(self, parameters, args) -> Float[Array, " m"]:
        """Return the residuals. The data are arguments, so that they are never
        constants."""
        inputs, targets = args
        outputs = jax.vmap(self.forward, in_axes=(None, 0))(parameters, inputs)
        return outputs - targets[:, 0]

    def per_example(self) -> gnlin.PerExample:
        """Return the same residuals in the form that gnlin uses best."""
        return gnlin.PerExample(self._residual)

    def _residual(self, parameters, example):
        x, target = example
        return self.forward(parameters, x) - target[0]

    @property
    def flat_parameters(self) -> np.ndarray:
        return np.asarray(ravel_pytree(self.parameters)[0])

    def flat_step(self, parameters: PyTree[Array]) -> np.ndarray:
        """Return the step from the starting point to these parameters, as one vector."""
        return np.asarray(ravel_pytree(parameters)[0]) - self.flat_parameters

    @functools.cached_property
    def oracle(self) -> Oracle:
        """Return the oracle, by reverse mode through the whole batch and without
        gnlin."""
        flat, unravel = ravel_pytree(self.parameters)

        def residuals(v, args):
            return self.residuals(unravel(v), args)

        jacobian = jax.jit(jax.jacrev(residuals))(flat, self.args)
        residual = jax.jit(residuals)(flat, self.args)
        return Oracle(np.asarray(jacobian), np.asarray(residual))


def cast(tree: PyTree, dtype: Any) -> PyTree:
    """Convert the floating-point arrays of a tree to a dtype."""
    convert = lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf
    return jax.tree.map(convert, tree)


def in_double(tree: PyTree) -> PyTree:
    return cast(tree, float)


def quintic(width: int, num_examples: int) -> Task:
    """Return a task with four hidden layers. The published one has 50 neurons and 20
    examples."""
    model = in_double(eqx.nn.MLP(1, 1, width, 4, key=jax.random.key(0)))
    x, y = (jnp.asarray(values, float) for values in examples(num_examples))
    parameters, static = eqx.partition(model, eqx.is_inexact_array)

    def forward(parameters, x):
        return eqx.combine(parameters, static)(x)[0]

    count = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    name = f"quintic, p = {count:,}, m = {num_examples}"
    return Task(name, model, x, y, parameters, forward)
