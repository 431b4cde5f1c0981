"""The path of the inner steps at one linearisation."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree, ScalarLike

from .._common._checks import check_period
from .._linearisation._linearisation import Linearisation
from .._linearisation._spectrum import Filter, Spectrum


class Trajectory(eqx.Module):
    """The path of the inner steps at one linearisation point, also beyond the period.
    [`gnlin.IterativeLinearisation.trajectory`][] returns one."""

    linearisation: Linearisation
    spectrum: Spectrum
    filter: Callable[[ScalarLike], Filter]  # a function of the number of inner steps

    def __repr__(self) -> str:
        return f"Trajectory({self.spectrum})"

    def parameters(self, inner_steps: Int[Array, " n"]) -> PyTree[Array]:
        """Return the parameters after each number of inner steps, along a new leading
        axis. Each number is whole and at least 1."""
        check_period("inner_steps", inner_steps)
        return jax.vmap(self._after)(jnp.asarray(inner_steps))

    def outputs(
        self, inner_steps: Int[Array, " n"], *, on: Linearisation | None = None
    ) -> PyTree[Array]:
        """Return the linearised model's outputs after each number of inner steps.

        **Arguments:**

        - `inner_steps`: whole numbers of at least 1.
        - `on`: a linearisation of another function at the same point, such as the model
            on test inputs; by default the linearisation trained on.
        """
        check_period("inner_steps", inner_steps)
        on = self.linearisation if on is None else on
        # Work in chunks, because all parameters at once may not fit in memory.
        return jax.lax.map(
            lambda k: on(self._after(k)), jnp.asarray(inner_steps), batch_size=32
        )

    def _after(self, num_inner_steps: Int[Array, ""]) -> PyTree[Array]:
        step = self.spectrum.step(self.filter(num_inner_steps))
        return self.linearisation.moved(step)
