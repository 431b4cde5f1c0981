"""A detour: the next linearisation is not where the last step ended."""

import equinox as eqx
from jaxtyping import Array, Bool, PyTree

from .._common import _tree


class Detour(eqx.Module):
    """Where the next linearisation is. The run itself stays at the end of its last step,
    until a step from a detour leads further down.

    - `is_on`: whether the next linearisation is on a detour.
    - `at`: its point, which is the run's own point if not.
    - `y`, `outputs`: the run's own point, and the outputs there.
    """

    is_on: Bool[Array, ""]
    at: PyTree[Array]
    y: PyTree[Array]
    outputs: PyTree[Array]

    def outputs_of_run(self, outputs: PyTree[Array]) -> PyTree[Array]:
        """Return the outputs at the run's own point, with those at the linearisation."""
        return _tree.where(self.is_on, self.outputs, outputs)
