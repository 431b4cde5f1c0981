"""Scalings that race: at few linearisations two of them step, and the better goes on."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Scalar

from .. import _tree
from .._linearisation import Linearisation
from .._objective import AbstractObjective
from ._trials import Tried


# Of More's scales: they themselves, none, and half of them. The first is free of the
# parameters' units, and the fastest on classical problems and NIST's. Networks are
# trained much further by the others: columns that happen to vanish are not let loose.
_POWERS = 1.0, 0.0, 0.5
# What each one's gain counts. NIST is solved where More's counts 2 or 4 times, and one of
# its fits is not where it counts once.
_WEIGHTS = 2.0, 1.0, 1.0
# After so many steps that seem to have arrived, and as many again, another one has its
# turn: in a valley as narrow as rounding one stands still where another goes on.
_IDLE = 3


class Race(eqx.Module):
    """Which scaling is in use, and how each would damp.

    At the steps 0, 1, 3, 7 and so on another one, in turns, steps from the same
    linearisation, with its own damping, unless the run has arrived, or the step is next
    to the undamped one, which of a tall Jacobian no scaling changes. The one that lowers
    the loss more is in use until the next time. The others have their turn, too, where
    the one in use finds no step, or seems to have arrived and has not.
    """

    leader: Int[Array, ""]
    states: PyTree[Array]  # the damping's, of each, along a new leading axis

    @staticmethod
    def start(state: PyTree[Array]) -> "Race":
        """`state`: the damping's before the first trial."""
        each = jax.tree.map(lambda x: jnp.stack([x] * len(_POWERS)), state)
        return Race(jnp.zeros((), int), each)

    def run(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        contend: Callable[[Scalar, PyTree], Tried],
        num_steps: Int[Array, ""],
        num_idle: Int[Array, ""],
    ) -> tuple[Tried, "Race"]:
        """What came of one linearisation, by the scaling in use or the better of two, and
        how the race goes on.

        - `contend`: tries dampings, from a power of the scales and the damping's state.
        - `num_idle`: steps in a row before this one that seemed to have arrived.
        """
        powers = jnp.array(_POWERS, _tree.dtype(lin.point))
        weights = jnp.array(_WEIGHTS, powers.dtype)
        due = (num_steps & (num_steps + 1)) == 0
        idle = (num_idle == _IDLE) | (num_idle == 2 * _IDLE)
        number = jnp.where(idle, num_idle // _IDLE, jax.lax.population_count(num_steps))
        turn = 1 + number % 2
        m, p = lin.shape

        def gain(trial: Tried, number: Scalar) -> Scalar:
            decrease = objective.decrease(lin.outputs, trial.outputs).astype(powers.dtype)
            return jnp.where(trial.accepted, weights[number] * decrease, -jnp.inf)

        def goes_on(so_far: tuple[Scalar, Tried, Race]) -> Bool[Array, ""]:
            k, best, _ = so_far
            found_none = ~best.accepted & ~best.arrived
            decided = best.arrived | (best.undamped & (m >= p))
            second = (due & ~decided) | idle | found_none
            return (k == 0) | ((k == 1) & second) | ((k == 2) & found_none)

        def step(so_far: tuple[Scalar, Tried, Race]) -> tuple[Scalar, Tried, Race]:
            k, best, race = so_far
            first = k == 0
            steps = jnp.select([first, k == 1], [0, turn], -turn)
            number = (self.leader + steps) % len(_POWERS)
            state = jax.tree.map(lambda x: x[number], race.states)
            trial = contend(powers[number], state)
            wins = first | (gain(trial, number) > gain(best, race.leader))
            # A step that is not taken is a trial that has failed.
            lost = jnp.where(~first & best.accepted & trial.accepted, 1, 0)
            better = eqx.tree_at(
                lambda t: (t.num_rejected, t.num_inner_steps, t.passes),
                _tree.where(wins, trial, best),
                (
                    best.num_rejected + trial.num_rejected + lost,
                    best.num_inner_steps + trial.num_inner_steps,
                    best.passes + trial.passes,
                ),
            )
            states = jax.tree.map(
                lambda x, new: x.at[number].set(new), race.states, trial.state
            )
            return k + 1, better, Race(jnp.where(wins, number, race.leader), states)

        nothing = Tried.nothing(lin, jax.tree.map(lambda x: x[0], self.states))
        start = jnp.array(0), nothing, self
        _, best, race = jax.lax.while_loop(goes_on, step, start)
        return best, race
