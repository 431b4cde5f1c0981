"""Scalings that race: at few linearisations two of them step, and the better goes on."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree, Scalar

from .. import _tree
from .._linearisation import Linearisation
from .._objective import AbstractObjective
from ._trials import Tried


# Of More's scales: they themselves, none, and half of them. The first is free of the
# parameters' units, and among classical problems and NIST's the fastest; networks are
# trained faster, and recurrent ones only, where columns may stay next to nothing.
_POWERS = 1.0, 0.0, 0.5
# More's go on unless another gains so many times as much. NIST is solved for 2 and 4, and
# all but one of its fits for 1.
_AHEAD = 2.0


class Race(eqx.Module):
    """Which scaling is in use, and how each would damp.

    At the steps 0, 1, 3, 7 and so on a second one is tried, in turns, from the same
    linearisation, with its own damping; the one whose step lowers the loss more is in use
    until the next time.
    """

    leader: Int[Array, ""]
    rules: PyTree[Array]  # the damping's state of each, along a new leading axis

    @staticmethod
    def start(state: PyTree[Array]) -> "Race":
        """`state`: the damping's before the first trial."""
        each = jax.tree.map(lambda x: jnp.stack([x] * len(_POWERS)), state)
        return Race(jnp.array(0), each)

    def run(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        contend: Callable[[Scalar, PyTree], Tried],
        state: PyTree,
        num_steps: Int[Array, ""],
    ) -> tuple[Tried, "Race"]:
        """One linearisation, with the scaling in use or also with the next: the better
        trial, and how the race goes on.

        - `contend`: tries dampings, from a power of the scales and the damping's state.
        - `state`: of the damping, with the scaling in use.
        """
        powers = jnp.array(_POWERS, _tree.dtype(lin.point))
        num_races = jax.lax.population_count(num_steps)
        due = (num_steps & (num_steps + 1)) == 0
        turn = 1 + num_races % (len(_POWERS) - 1)
        challenger = (self.leader + turn) % len(_POWERS)
        ahead = jnp.where(self.leader == 0, _AHEAD, 1.0)
        ahead = jnp.where(challenger == 0, 1 / _AHEAD, ahead)

        def step(k: Array, so_far: tuple[Tried, Race]) -> tuple[Tried, Race]:
            best, race = so_far
            number = jnp.where(k == 0, self.leader, challenger)
            trial = contend(powers[number], race._state_of(number))
            better = (k == 0) | _is_better(objective, lin, best, trial, ahead)
            # A step that is not taken is a trial that has failed.
            lost = (k > 0) & best.accepted & trial.accepted
            taken = (
                best.num_rejected + trial.num_rejected + jnp.where(lost, 1, 0),
                best.num_inner_steps + trial.num_inner_steps,
                (best.passes + trial.passes).traced(),
            )
            won = eqx.tree_at(
                lambda t: (t.num_rejected, t.num_inner_steps, t.passes),
                _tree.where(better, trial, best),
                taken,
            )
            leader = jnp.where(better, number, race.leader)
            return won, Race(leader, race._with_state(number, trial.rule).rules)

        start = Tried.nothing(lin, state), self._with_state(self.leader, state)
        return jax.lax.fori_loop(0, jnp.where(due, 2, 1), step, start)

    def _state_of(self, number: Int[Array, ""]) -> PyTree:
        return jax.tree.map(lambda x: x[number], self.rules)

    def _with_state(self, number: Int[Array, ""], state: PyTree) -> "Race":
        rules = jax.tree.map(lambda x, new: x.at[number].set(new), self.rules, state)
        return Race(self.leader, rules)


def _is_better(
    objective: AbstractObjective,
    lin: Linearisation,
    leading: Tried,
    trial: Tried,
    ahead: Array,
) -> Array:
    """Whether a trial gains so many times as much as the leading one."""
    gain, other = (
        objective.decrease(lin.outputs, each.outputs) for each in (trial, leading)
    )
    more = ~leading.accepted | (gain > ahead.astype(other.dtype) * other)
    return trial.accepted & more & ~leading.arrived
