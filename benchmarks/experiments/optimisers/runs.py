"""One run to a target loss, by `gnlin.fit` or by a compiled loop of an optax optimiser.

The loss is evaluated at the same numbers of steps for all methods. The time of the
evaluation does not count, and neither does compilation.
"""

import functools
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree
from numpy import ndarray

import gnlin

from ...speed.opponents import promoting
from ..defaults.runs import num_passes
from .methods import Method
from .tasks import Drawn, Examples, mean_loss


LOOK_RATIO = 1.1
"""Ratio of the steps at successive looks; there is a look at each of the first ten."""
_REHEARSALS = 5


class Course(NamedTuple):
    """The record of a run at its looks; the first look is before the first step."""

    steps: list[int]
    seconds: list[float]
    losses: list[float]
    passes: float
    """Passes through the model on a batch; a gradient takes two."""
    feature_updates: float
    reached: bool


def looks_at(most_steps: int) -> Int[ndarray, " looks"]:
    """Return the numbers of steps at which to look, from 1 to `most_steps`."""
    number = 2 + int(np.log(most_steps) / np.log(LOOK_RATIO))
    grown = np.round(LOOK_RATIO ** np.arange(number)).astype(int)
    return np.unique(np.append(grown[grown < most_steps], most_steps))


def clock() -> float:
    """Return the time of the process, so that other work on the machine does not count,
    or the wall-clock time on an accelerator."""
    on_cpu = jax.default_backend() == "cpu"
    return time.process_time() if on_cpu else time.perf_counter()


@eqx.filter_jit
def _loss(model: PyTree, watched: Examples) -> Array:
    return promoting(mean_loss)(model, watched)


def look(model: PyTree, drawn: Drawn) -> float:
    return float(_loss(model, drawn.watched))


class Race(NamedTuple):
    """The settings that runs with different values of the parameter share."""

    method: Method
    drawn: Drawn
    seed: int
    batch_size: int
    most_passes: int

    def run(self, value: float, limit: int | None = None) -> Course:
        """Run until a look finds that the target is reached or the limit exceeded."""
        by = _by_fit if self.method.by_fit else _by_optax
        return by(self, value, limit or self.most_passes // 2)


#
# gnlin
#


class _Watch(gnlin.callbacks.Callback):
    """Looks at the loss. A look overlaps with the next step, which has already started,
    and cannot be timed alone: its cost is measured beforehand, and subtracted."""

    def __init__(self, race: Race, limit: int):
        self.race, self.drawn, self.passes = race, race.drawn, 0.0
        self.looks = set(looks_at(limit).tolist())
        model, drawn = race.drawn.model, race.drawn
        look(model, drawn)  # compiles
        begun, first = clock(), np.nan
        for _ in range(_REHEARSALS):
            first = look(model, drawn)
        self.cost = (clock() - begun) / _REHEARSALS
        self.steps, self.seconds, self.losses = [0], [0.0], [first]

    def on_start(self, run: Any) -> None:
        self.begun = clock()

    def on_step(self, run: Any) -> None:
        # An inner step takes a tangent and a transposed pass; the others are forward.
        forward = 4 if self.race.method.updates else 1
        self.passes += 2 * run.row["num_inner_steps"] + forward
        spent = self.passes >= self.race.most_passes
        if run.step not in self.looks and not spent:
            return
        seconds = clock() - self.begun - self.cost * (len(self.steps) - 1)
        self.steps.append(run.step)
        self.seconds.append(seconds)
        self.losses.append(look(run.model, self.drawn))
        if self.losses[-1] <= self.drawn.target:
            run.stop("the target is reached")
        elif spent:
            run.stop("no more passes")


def _by_fit(race: Race, value: float, limit: int) -> Course:
    drawn = race.drawn
    train = functools.partial(
        gnlin.fit,
        drawn.model,
        drawn.train,
        race.method.make(jnp.asarray(value, jnp.float32)),
        loss=gnlin.SoftmaxCrossEntropy(),
        batch_size=race.batch_size,
        key=jax.random.key(race.seed),
        progress=False,
        divergence=None,
    )
    with warnings.catch_warnings():
        # `reached` says whether the run has reached the target.
        warnings.filterwarnings("ignore", message="`gnlin.fit`")
        train(steps=2)  # compiles
        watch = _Watch(race, limit)
        result = train(steps=limit, callbacks=watch)
    if result.reason.endswith("interrupted"):
        raise KeyboardInterrupt
    return Course(
        watch.steps,
        watch.seconds,
        watch.losses,
        num_passes(result.stats, across=True),
        float(result.stats["num_feature_updates"]),
        watch.losses[-1] <= drawn.target,
    )


#
# optax
#


@eqx.filter_jit
def _advance(make, carry, frozen, train: Examples, order, start, stop, rate):
    """Make the steps from `start` to `stop`. The rate is traced: all share a program."""
    optimiser = make(rate)

    def step(i, carry):
        trained, state = carry
        inputs, labels = train
        batch = inputs[order[i]], labels[order[i]]
        loss = lambda trained: mean_loss(eqx.combine(trained, frozen), batch)
        updates, state = optimiser.update(jax.grad(loss)(trained), state, trained)
        trained = jax.tree.map(lambda x, u: (x + u).astype(x.dtype), trained, updates)
        return trained, state

    return promoting(jax.lax.fori_loop)(start, stop, step, carry)


def batches(
    num_examples: int, batch_size: int, num_steps: int, seed: int
) -> Int[ndarray, "steps batch"]:
    """Draw batches as `gnlin.fit` does: without replacement in each epoch, and without an
    incomplete last batch."""
    rng, a_pass = np.random.default_rng(seed), num_examples // batch_size
    epochs = [
        rng.permutation(num_examples)[: a_pass * batch_size].reshape(a_pass, batch_size)
        for _ in range(-(-num_steps // a_pass))
    ]
    return np.concatenate(epochs)[:num_steps].astype(np.int32)


def _by_optax(race: Race, value: float, limit: int) -> Course:
    method, drawn = race.method, race.drawn
    trained, frozen = eqx.partition(drawn.model, eqx.is_inexact_array)
    rate = jnp.asarray(value, jnp.float32)
    drawing = len(drawn.train[1]), race.batch_size, race.most_passes // 2, race.seed
    order = jnp.asarray(batches(*drawing))
    carry = trained, promoting(method.make(rate).init)(trained)

    def advance(carry, start, stop):
        start, stop = jnp.asarray(start), jnp.asarray(stop)
        given = method.make, carry, frozen, drawn.train, order, start, stop, rate
        return jax.block_until_ready(_advance(*given))

    advance(advance(carry, 0, 1), 0, 1)  # compiles twice: types may change
    steps, seconds, losses = [0], [0.0], [look(drawn.model, drawn)]
    for stop in looks_at(limit).tolist():
        begun = clock()
        carry = advance(carry, steps[-1], stop)
        seconds.append(seconds[-1] + clock() - begun)
        steps.append(stop)
        losses.append(look(eqx.combine(carry[0], frozen), drawn))
        if not losses[-1] > drawn.target:  # reached, or NaN
            break
    reached = losses[-1] <= drawn.target
    return Course(steps, seconds, losses, 2.0 * steps[-1], float(steps[-1]), reached)


#
# The choice of a value
#


class Choice(NamedTuple):
    value: float
    trials: list[float]
    """Steps that each value takes to the target; infinite if it does not reach it within
    the fewest steps so far."""


def choose(race: Race, values: Sequence[float]) -> Choice:
    """Try each value, and choose the one that takes the fewest steps to the target or, if
    none reaches it, ends at the least loss. A trial is stopped once it takes longer than
    the best so far."""
    best, fewest, least = values[0], race.most_passes // 2, np.inf
    trials = []
    for value in values:
        course = race.run(value, fewest)
        steps, loss = course.steps[-1], course.losses[-1]
        trials.append(float(steps) if course.reached else np.inf)
        if course.reached and (steps < fewest or least > -np.inf):
            best, fewest, least = value, steps, -np.inf
        elif loss < least:
            best, least = value, loss
    return Choice(best, trials)
