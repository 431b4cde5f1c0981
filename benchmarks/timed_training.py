"""Train models on groups of residuals for a number of seconds, by several methods.

Neither compilation nor the evaluation of models during training is counted: the models
are stored, and evaluated later. On a CPU, the time is the processor time of the process,
so that other work on the machine does not count.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree, Scalar

import gnlin

from .equations import Groups
from .speed.opponents import promoting


LENGTHS = 0.5 ** np.arange(31)
"""The fractions of a step that a grid search tries."""


class Look(NamedTuple):
    """A model during training."""

    seconds: float
    steps: int
    model: PyTree


class Trainer(Protocol):
    """Trains a model on groups for a number of seconds, and returns about the requested
    number of looks: closely spaced at first, with one at the end."""

    def __call__(
        self, model: PyTree, groups: Groups, seconds: float, num_looks: int
    ) -> list[Look]: ...


class _Clock:
    """Chooses the times of the looks, which grow by a constant factor. The last one is at
    the end."""

    def __init__(self, seconds: float, num_looks: int):
        on_cpu = jax.default_backend() == "cpu"
        self.time = time.process_time if on_cpu else time.perf_counter
        self.seconds = seconds
        self.times = list(np.geomspace(seconds / 1000, seconds, num_looks))
        self.looks: list[Look] = []
        self.begun = self.time()

    @property
    def now(self) -> float:
        return self.time() - self.begun

    def told(self, steps: int, model: PyTree) -> bool:
        """Keep the model if a look is due, and return whether time is up."""
        now = self.now
        over = now >= self.seconds
        if over or now >= self.times[0]:
            self.looks.append(Look(now, steps, model))
            self.times = [t for t in self.times if t > now]
        return over


def objective(model: PyTree, groups: Groups) -> Scalar:
    """Return the objective of gnlin: half the squared residuals, with the groups'
    weights."""
    squares = [
        jnp.asarray(group.weight) * jnp.sum(_residuals(group, model) ** 2)
        for group in groups.values()
    ]
    return 0.5 * jnp.sum(jnp.stack(squares))


def _residuals(group: gnlin.Residuals, model: PyTree) -> Float[Array, " m"]:
    return jax.vmap(lambda x: group.fn(model, x))(group.data)


#
# gnlin
#


class _Watch(gnlin.callbacks.Callback):
    def __init__(self, seconds: float, num_looks: int):
        self.how = seconds, num_looks

    def on_start(self, run: Any) -> None:
        self.clock = _Clock(*self.how)

    def on_step(self, run: Any) -> None:
        if self.clock.told(run.step, run.model):
            run.stop("time is up")

    def on_end(self, run: Any) -> None:
        """Add a last look in case the run has converged early."""
        self.clock.seconds = 0.0
        if not self.clock.looks or self.clock.looks[-1].steps < run.step:
            self.clock.told(run.step, run.model)


def by_gnlin(solver: Any) -> Trainer:
    def train(model, groups, seconds, num_looks):
        watch = _Watch(seconds, num_looks)
        options = {"progress": False, "divergence": None}
        with warnings.catch_warnings():  # a stagnated run would warn
            warnings.simplefilter("ignore", UserWarning)
            gnlin.fit(model, groups, solver, steps=2, **options)  # compiles
            gnlin.fit(model, groups, solver, steps=10**9, callbacks=watch, **options)
        return watch.clock.looks

    return train


#
# Optimisers of optax
#


class _Descent:
    """Several steps of an optimiser as one compiled program. The learning rate is an
    argument of each call."""

    def __init__(self, make: Callable[[Any], Any], steps_a_call: int):
        self.steps_a_call = steps_a_call
        self._init = lambda trained: promoting(make(0.0).init)(trained)

        @eqx.filter_jit
        @promoting
        def advance(carry, frozen, groups, rate):
            optimiser = optax.with_extra_args_support(make(rate))
            value_of = lambda trained: objective(eqx.combine(trained, frozen), groups)

            def step(_, carry):
                trained, state = carry
                value, gradient = jax.value_and_grad(value_of)(trained)
                updates, state = optimiser.update(
                    gradient,
                    state,
                    trained,
                    value=value,
                    grad=gradient,
                    value_fn=value_of,
                )
                return optax.apply_updates(trained, updates), state

            return jax.lax.fori_loop(0, steps_a_call, step, carry)

        self._advance = advance

    def begin(self, model: PyTree) -> tuple[tuple, PyTree]:
        trained, frozen = eqx.partition(model, eqx.is_inexact_array)
        return (trained, self._init(trained)), frozen

    def until(
        self,
        clock: _Clock,
        end: float,
        model: PyTree,
        groups: Groups,
        steps: int,
        rate: Callable[[float], float],
    ) -> tuple[PyTree, int]:
        """Run until time is up. `rate` maps the share of the time that has passed to a
        learning rate."""
        carry, frozen = self.begin(model)
        begun, over = clock.now, False
        while not over:
            share = (clock.now - begun) / (end - begun)
            carry = self._advance(carry, frozen, groups, jnp.asarray(rate(share), float))
            carry = jax.block_until_ready(carry)
            steps += self.steps_a_call
            model = eqx.combine(carry[0], frozen)
            over = clock.told(steps, model) or clock.now >= end
        return model, steps

    def compiled(self, model: PyTree, groups: Groups) -> None:
        """Compile the program. The second call compiles it for the types of its own
        results, which may differ from the types of the start."""
        carry, frozen = self.begin(model)
        for _ in range(2):
            carry = self._advance(carry, frozen, groups, jnp.zeros((), float))
        jax.block_until_ready(carry)


_ADAM = _Descent(optax.adam, 20)
_LBFGS = _Descent(lambda rate: optax.lbfgs(), 5)


def adam(rate: float) -> Trainer:
    """Return Adam with a cosine schedule that falls to zero at the end."""
    return _descents((_ADAM, _falling(rate)))


def lbfgs() -> Trainer:
    """Return L-BFGS with ten pairs and a zoom search."""
    return _descents((_LBFGS, lambda share: 0.0))


def adam_then_lbfgs(rate: float) -> Trainer:
    """Return a trainer that uses Adam for half of the time, and then L-BFGS."""
    return _descents((_ADAM, _falling(rate)), (_LBFGS, lambda share: 0.0))


def _falling(rate: float) -> Callable[[float], float]:
    return lambda share: rate * 0.5 * (1 + np.cos(np.pi * min(share, 1)))


def _descents(*parts: tuple[_Descent, Callable[[float], float]]) -> Trainer:
    def train(model, groups, seconds, num_looks):
        for descent, _ in parts:
            descent.compiled(model, groups)
        clock, steps = _Clock(seconds, num_looks), 0
        for k, (descent, rate) in enumerate(parts, start=1):
            end = seconds * k / len(parts)
            model, steps = descent.until(clock, end, model, groups, steps, rate)
        return clock.looks

    return train


#
# Energy natural gradients
#


def rows_of(
    model_at: Callable[[Array], PyTree], v: Float[Array, " p"], groups: Groups
) -> tuple[Float[Array, " m"], Float[Array, "m p"]]:
    """Return the weighted residuals and their derivatives, by one reverse pass each."""
    found = []
    for group in groups.values():
        of_one = lambda v, x, fn=group.fn: fn(model_at(v), x)
        pair = jax.vmap(jax.value_and_grad(of_one), (None, 0))(v, group.data)
        found.append([jnp.sqrt(group.weight) * each for each in pair])
    residual, rows = (jnp.concatenate(parts) for parts in zip(*found, strict=True))
    return residual, rows


@eqx.filter_jit
def natural_step(model: PyTree, groups: Groups) -> PyTree:
    """Take a step of energy natural gradient descent: form the Gramian of the residuals'
    gradients, solve by least squares, and take the best of the whole step, its half, its
    quarter and so on (J. Müller and M. Zeinhofer, ICML 2023, algorithm 1)."""
    trained, frozen = eqx.partition(model, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(trained)
    model_at = lambda v: eqx.combine(unravel(v), frozen)
    residual, jacobian = rows_of(model_at, flat, groups)
    gramian, gradient = jacobian.T @ jacobian, jacobian.T @ residual
    direction = jnp.linalg.lstsq(gramian, gradient)[0]
    lengths = jnp.asarray(LENGTHS)
    value_at = lambda length: objective(model_at(flat - length * direction), groups)
    values = jax.lax.map(value_at, lengths)
    values = jnp.where(jnp.isnan(values), jnp.inf, values)
    return model_at(flat - lengths[jnp.argmin(values)] * direction)


def natural_gradients() -> Trainer:
    def train(model, groups, seconds, num_looks):
        jax.block_until_ready(eqx.filter(natural_step(model, groups), eqx.is_array))
        clock, steps, over = _Clock(seconds, num_looks), 0, False
        while not over:
            model = natural_step(model, groups)
            jax.block_until_ready(eqx.filter(model, eqx.is_array))
            steps += 1
            over = clock.told(steps, model)
        return clock.looks

    return train
