"""A detour: the next linearisation is not where the last step ended."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from .._common import _tree


class Detour(eqx.Module):
    """Where the next linearisation is. The run itself stays at the end of its last step,
    until a step from a detour leads further down.

    - `is_on`: whether the next linearisation is on a detour.
    - `at`: its point if it is, with all parameters in one array.
    - `y`, `outputs`: the run's own point, in one array, and the outputs there.
    """

    is_on: Bool[Array, ""]
    at: Float[Array, " p"]
    y: Float[Array, " p"]
    outputs: PyTree[Array]

    @staticmethod
    def none(y: PyTree[Array], outputs: PyTree[jax.ShapeDtypeStruct]) -> "Detour":
        """Return the state before the first step."""
        flat, _ = _tree.ravel_pytree(y)
        return Detour(jnp.array(False), flat, flat, _tree.zeros_like(outputs))

    def next_point(self, y: PyTree[Array]) -> PyTree[Array]:
        """Return the point of the next linearisation if the run is at `y`."""
        flat, unravel = _tree.ravel_pytree(y)
        return unravel(jnp.where(self.is_on, self.at, flat))

    def outputs_of_run(self, outputs: PyTree[Array]) -> PyTree[Array]:
        """Return the outputs at the run's own point, with those at the linearisation."""
        return _tree.where(self.is_on, self.outputs, outputs)
