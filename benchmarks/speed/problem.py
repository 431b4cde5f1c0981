"""A network to be trained to a given loss, and the programs that train it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree


def squared_error(outputs, targets) -> Float[Array, ""]:
    return 0.5 * jnp.sum((outputs - targets) ** 2)


def cross_entropy(outputs, labels) -> Float[Array, ""]:
    each = optax.softmax_cross_entropy_with_integer_labels
    return jnp.mean(each(outputs, labels))


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A network, several starts, data, and the training loss at which a run ends."""

    name: str
    model: PyTree
    starts: list[PyTree[Array]]
    data: tuple[Array, Array]
    loss: Callable[[Array, Array], Float[Array, ""]]
    target: float
    most_steps: int
    """The largest number of steps of a first-order method."""
    most_newton_steps: int = 300
    """The largest number of outer steps of gnlin's solvers."""
    says: str = ""

    @property
    def num_starts(self) -> str:
        number = len(self.starts)
        return "one start" if number == 1 else f"mean over {number} starts"

    def outputs(self, parameters: PyTree[Array], inputs: Array) -> Array:
        return jax.vmap(eqx.combine(parameters, self.model))(inputs)

    def value(self, parameters: PyTree[Array], data) -> Float[Array, ""]:
        inputs, targets = data
        return self.loss(self.outputs(parameters, inputs), targets)

    def residuals(self, parameters: PyTree[Array], data) -> Float[Array, " m"]:
        inputs, targets = data
        return jnp.ravel(self.outputs(parameters, inputs) - targets)


@dataclasses.dataclass(frozen=True, eq=False)
class Contender:
    library: str
    variant: str
    settings: tuple[str, ...]
    most_steps: int
    run: Callable[[str, PyTree[Array], int], Any]
    """`run(setting, start, n)` makes at most n steps, and returns arrays."""
    find: Callable[[str, PyTree[Array], int], int | None]
    """Returns the number of steps to the target, or `None` if it is larger than n."""
    note: str = ""


def num_parameters(problem: Problem) -> int:
    return ravel_pytree(problem.starts[0])[0].size


def small(problem: Problem) -> bool:
    """Test whether a p x p matrix would be small."""
    return num_parameters(problem) < 100
