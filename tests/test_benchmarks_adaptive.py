"""The trigger of the experiment `adaptive`, compared with the rules in dense formulas."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_problems import BATCHES, fit, network, numbers, T, X
from jax.flatten_util import ravel_pytree

import gnlin
from benchmarks.adaptive_linearisation import AdaptiveLinearisation


ETA = 0.02
PARAMETERS, STATIC = eqx.partition(network(), eqx.is_inexact_array)
START, UNRAVEL = ravel_pytree(PARAMETERS)


def outputs(flat, x=X):
    return jax.vmap(eqx.combine(UNRAVEL(flat), STATIC))(x).ravel()


_jacobian = jax.jit(jax.jacobian(outputs))


def jacobian(flat, x=X):
    return np.asarray(_jacobian(jnp.asarray(flat), x))


def loss(f, t=T):
    return 0.5 * float(np.sum((np.asarray(f) - np.ravel(t)) ** 2))


def probe(seed, size):
    key = jax.random.fold_in(jax.random.key(0), seed)
    return np.asarray(jax.random.normal(key, (size,)))


def is_trusted(point, there, linearised, seed, drift, ratio, x=X, t=T):
    """Apply the two rules to dense kernels."""
    f, f_there = np.asarray(outputs(point, x)), np.asarray(outputs(there, x))
    good = True
    if drift is not None:
        u = probe(seed, f.size)
        then, now = (j @ j.T @ u for j in (jacobian(point, x), jacobian(there, x)))
        good &= bool(np.linalg.norm(now - then) <= drift * np.linalg.norm(then))
    if ratio is not None:
        fallen = loss(f, t) - loss(f_there, t)
        good &= fallen >= ratio * (loss(f, t) - loss(linearised, t))
    return good


def longest_trusted(point, seed, first, drift, ratio, longest):
    """Find the period and the step by literal steps and doubling."""
    j, f = jacobian(point), np.asarray(outputs(point))

    def step(period):
        delta = np.zeros_like(point)
        for _ in range(int(period)):
            delta = delta - ETA * j.T @ (f + j @ delta - np.ravel(T))
        return delta

    def good(period):
        delta = step(period)
        return is_trusted(point, point + delta, f + j @ delta, seed, drift, ratio)

    period = min(first, longest)
    if good(period):
        while 2 * period <= longest and good(2 * period):
            period *= 2
    else:
        while period > 1:
            period = math.ceil(period / 2)
            if good(period):
                break
    return period, step(period)


RULES = {
    "drift": (0.2, None),
    "ratio": (None, 0.7),
    "both": (0.3, 0.7),
    "never": (1e-6, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["both", "never"])
def test_longest_trusted_period(name):
    drift, ratio = RULES[name]
    longest = 300
    solver = AdaptiveLinearisation(
        gnlin.IterativeLinearisation(longest, ETA), drift, ratio
    )
    solution = gnlin.solve(network(), (X, T), solver, max_steps=4)
    point, period, periods = np.asarray(START), 1, []
    for seed in range(4):
        period, step = longest_trusted(point, seed, period, drift, ratio, longest)
        periods.append(period)
        point = point + step
    np.testing.assert_array_equal(solution.history.num_inner_steps, periods)
    np.testing.assert_allclose(numbers(solution.model), point, rtol=1e-8, atol=1e-10)
    if name == "never":
        assert periods == [1, 1, 1, 1]
    else:
        assert max(periods) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["drift", "ratio", "both"],
)
def test_across_batches(name):
    drift, ratio = RULES[name]
    every, steps = 2, 24
    solver = AdaptiveLinearisation(
        gnlin.IterativeLinearisation(math.inf, 0.1), drift, ratio, check_every=every
    )
    result = fit(data=BATCHES, solver=solver, steps=steps)

    y = point = np.asarray(START)
    since, updates, counts = 0, 0, []
    for step in range(steps):
        x, t = BATCHES[step % len(BATCHES)]
        j, f = jacobian(point, x), np.asarray(outputs(point, x))
        linearised = f + j @ (y - point)
        since += 1
        updates += since == 1
        counts.append(updates)
        new = y - 0.1 * j.T @ (linearised - np.ravel(t))
        if since % every == 0 and not is_trusted(
            point, y, linearised, since, drift, ratio, x, t
        ):
            point, since = new, 0
        y = new
    np.testing.assert_array_equal(result.history["num_feature_updates"], counts)
    np.testing.assert_allclose(numbers(result.model), y, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(
        numbers(result.linearisation_point), point, rtol=1e-8, atol=1e-10
    )
    assert 1 < updates < steps
