"""Adam on a task, at all rates and from all seeds."""

import time
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .runs import BATCH_SIZE, Figures
from .tasks import Task, Trainable


def run_adam(
    task: Task,
    seeds: Sequence[int],
    rates: Sequence[float],
    num_steps: int,
    *,
    batch_size: int = BATCH_SIZE,
    num_looks: int = 20,
) -> Figures:
    """Train a task by Adam at each rate from each seed.

    **Returns:** `test_scores`, `validation_scores` and `train_losses` at evenly spaced
    looks, with axes over seeds, rates and looks; the number of `steps`, of two passes
    each; and the mean `seconds` of a run, compilation excluded.
    """
    every = -(-num_steps // num_looks)
    static = eqx.filter(task.start(0), eqx.is_array, inverse=True)

    # Make the steps one by one: convolutions are many times slower inside a loop of XLA.
    @jax.jit
    def step(carry, train, key, rate, number):
        arrays, moments = carry
        model, state = eqx.combine(arrays, static)
        parameters, frozen = eqx.partition(model, eqx.is_inexact_array)
        num_batches = len(train[1]) // batch_size
        epoch, index = number // num_batches, number % num_batches
        order = jax.random.permutation(jax.random.fold_in(key, epoch), len(train[1]))
        batch = jax.lax.dynamic_slice_in_dim(order, index * batch_size, batch_size)
        inputs, targets = (x[batch] for x in train)
        dropout = jax.random.fold_in(jax.random.fold_in(key, 1), number)

        def loss(parameters):
            model = eqx.combine(parameters, frozen)
            outputs, new = task.apply(model, state, inputs, dropout)
            return task.mean_loss(outputs, targets), new

        slope, state = jax.grad(loss, has_aux=True)(parameters)
        with jax.numpy_dtype_promotion("standard"):  # optax counts and multiplies
            change, moments = optax.adam(rate).update(slope, moments)
            parameters = optax.apply_updates(parameters, change)
        now = Trainable(eqx.combine(parameters, frozen), state)
        return eqx.filter(now, eqx.is_array), moments

    @jax.jit
    def looked(arrays, data):
        model, state = eqx.combine(arrays, static)
        model = eqx.nn.inference_mode(model)

        def figure(what, examples):
            inputs, targets = examples
            return what(task.apply(model, state, inputs)[0], targets)

        return {
            "test_scores": figure(task.metric, data.test),
            "validation_scores": figure(task.metric, data.validation),
            "train_losses": figure(task.mean_loss, data.train),
        }

    def trained(seed: int, rate: float) -> list[dict]:
        start, data, key = task.start(seed), task.data(seed), jax.random.key(seed)
        data = jax.tree.map(jnp.asarray, data)
        moments = optax.adam(rate).init(eqx.filter(start.model, eqx.is_inexact_array))
        carry, looks = (eqx.filter(start, eqx.is_array), moments), []
        for number in range(every * num_looks):
            carry = step(carry, data.train, key, rate, number)
            if (number + 1) % every == 0:
                looks.append(looked(carry[0], data))
        return jax.device_get(looks)

    trained(seeds[0], rates[0])  # compiles
    begun = time.perf_counter()
    runs = [[trained(seed, rate) for rate in rates] for seed in seeds]
    seconds = (time.perf_counter() - begun) / (len(seeds) * len(rates))
    names = runs[0][0][0]
    figures: Figures = {
        name: np.array([[[look[name] for look in run] for run in of] for of in runs])
        for name in names
    }
    return figures | {"steps": every * num_looks, "seconds": seconds}
