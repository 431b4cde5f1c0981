"""Adam on a task, in one compiled program for all rates and seeds."""

import functools
import time
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .runs import BATCH_SIZE, Figures
from .tasks import Task


def run_adam(
    task: Task,
    num_seeds: int,
    rates: Sequence[float],
    num_steps: int,
    *,
    batch_size: int = BATCH_SIZE,
    num_looks: int = 20,
) -> Figures:
    """**Returns:** `test_scores`, `validation_scores` and `train_losses` at looks evenly
    spaced in steps, with axes of seeds, rates and looks; `steps`, of two passes each; and
    the `seconds` of a run, without the compilation."""
    every = -(-num_steps // num_looks)
    seeds = range(num_seeds)
    arrays = [eqx.filter(task.start(seed), eqx.is_array) for seed in seeds]
    static = eqx.filter(task.start(0), eqx.is_array, inverse=True)
    of_seeds = zip(arrays, map(task.data, seeds), map(jax.random.key, seeds), strict=True)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *of_seeds)
    sizes = {"batch_size": batch_size, "num_looks": num_looks, "every": every}
    one = functools.partial(_train, task, static, **sizes)
    # One after another: a batch of convolutions with weights of their own is slow here.
    every_rate = lambda of: jax.lax.map(lambda rate: one(of, rate), jnp.asarray(rates))
    program = jax.jit(lambda of: jax.lax.map(every_rate, of)).lower(stacked).compile()
    begun = time.perf_counter()
    found = jax.block_until_ready(program(stacked))
    seconds = time.perf_counter() - begun
    figures: Figures = {name: np.asarray(x) for name, x in found.items()}
    num_runs = num_seeds * len(rates)
    return figures | {"steps": every * num_looks, "seconds": seconds / num_runs}


def _train(task, static, of_seed, rate, *, batch_size, num_looks, every):
    arrays, data, key = of_seed
    model, state = eqx.combine(arrays, static)
    parameters, frozen = eqx.partition(model, eqx.is_inexact_array)
    optimiser = optax.adam(rate)
    num_batches = len(data.train[1]) // batch_size

    def loss(parameters, state, inputs, targets, key):
        model = eqx.combine(parameters, frozen)
        outputs, state = task.apply(model, state, inputs, key)
        return task.mean_loss(outputs, targets), state

    def step(carry, number):
        parameters, state, moments = carry
        epoch, index = number // num_batches, number % num_batches
        order = jax.random.permutation(jax.random.fold_in(key, epoch), len(data.train[1]))
        batch = jax.lax.dynamic_slice_in_dim(order, index * batch_size, batch_size)
        inputs, targets = (x[batch] for x in data.train)
        gradient = jax.grad(loss, has_aux=True)
        dropout = jax.random.fold_in(jax.random.fold_in(key, 1), number)
        slope, state = gradient(parameters, state, inputs, targets, dropout)
        with jax.numpy_dtype_promotion("standard"):  # optax counts and multiplies
            change, moments = optimiser.update(slope, moments)
            parameters = optax.apply_updates(parameters, change)
        return (parameters, state, moments), None

    def until(carry, look):
        carry, _ = jax.lax.scan(step, carry, look * every + jnp.arange(every))
        model = eqx.nn.inference_mode(eqx.combine(carry[0], frozen))

        def figure(what, examples):
            inputs, targets = examples
            return what(task.apply(model, carry[1], inputs)[0], targets)

        return carry, {
            "test_scores": figure(task.metric, data.test),
            "validation_scores": figure(task.metric, data.validation),
            "train_losses": figure(task.mean_loss, data.train),
        }

    start = parameters, state, optimiser.init(parameters)
    return jax.lax.scan(until, start, jnp.arange(num_looks))[1]
