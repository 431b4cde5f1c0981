"""The experiment on what tuning gains over the default of `fit` across batches."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import updated

from benchmarks.experiment import Place, Runs
from benchmarks.experiments import tuning
from benchmarks.experiments.defaults.tasks import Data, TASKS
from benchmarks.verdicts import CONFIRMED, REFUTED


SETTINGS = dataclasses.replace(
    tuning.EMBEDDED, tasks=("GRU", "regression"), batch_sizes=(16, 128)
)


def small(seed):
    x = np.random.default_rng(seed).normal(size=(12, 3)).astype(np.float32)
    y = np.sin(x[:, :1])
    return Data((x[:8], y[:8]), (x[8:10], y[8:10]), (x[10:], y[10:]))


SMALL = dataclasses.replace(
    TASKS["regression"],
    make=lambda key: eqx.nn.MLP(3, 1, 4, 1, activation=jnp.tanh, key=key),
    data=small,
)


@pytest.mark.exhaustive
def test_runs_of_the_best_settings_are_literal_loops(monkeypatch):
    grid = {tuning.DEFAULT: optax.sgd(1e-9), "Adam": optax.adam(0.1)}
    monkeypatch.setattr(tuning, "GRID", grid)
    monkeypatch.setitem(tuning.TASKS, "regression", SMALL)
    settings = dataclasses.replace(
        tuning.QUICK, batch_sizes=(8,), steps=(1, 3), long_batch=8, long_steps=4
    )
    columns = tuning.train(settings, {"task": "regression", "batch_size": 8}, Place())
    assert columns["default_loss"].shape == (2, 3)
    np.testing.assert_array_equal(columns["lowest"][:, :2], 1)
    np.testing.assert_array_equal(columns["steps"], [[1, 3, 4]] * 2)
    assert np.isnan(columns["lowest_loss"][:, 2]).all()
    for seed in range(2):
        with jax.enable_x64(False):
            model, (x, y) = SMALL.start(seed).model, small(seed).train
            optimiser = optax.adam(0.1)
            moments = optimiser.init(eqx.filter(model, eqx.is_array))

            def loss(model, x=x, y=y):
                return 0.5 * jnp.mean(jnp.sum((jax.vmap(model)(x) - y) ** 2, 1))

            losses = []
            for _ in range(3):
                slope = eqx.filter_grad(loss)(model)
                change, moments = updated(optimiser, slope, moments)
                model = eqx.apply_updates(model, change)
                losses.append(float(loss(model)))
        np.testing.assert_allclose(
            columns["lowest_loss"][seed, :2], [losses[0], losses[2]], rtol=1e-4
        )


def made_up(task, size, ratio, shortfall):
    """Runs whose default has a loss that is `ratio` times the best setting's."""
    looks = (*SETTINGS.steps, 1000) if size == SETTINGS.long_batch else SETTINGS.steps
    shape = SETTINGS.seeds, len(looks)
    noise = np.random.default_rng(0).normal(size=shape)
    columns = {
        "lowest_loss": np.full(shape, 0.01),
        "default_loss": 0.01 * ratio * 10 ** (0.01 * noise - np.arange(len(looks))),
        "best_score": np.full(shape, 0.95),
        "default_test": 0.95 - shortfall + 1e-4 * noise,
        "default_diverged": np.zeros(SETTINGS.seeds),
    }
    columns["lowest_loss"] = columns["lowest_loss"] * 10.0 ** -np.arange(len(looks))
    return Runs({"task": task, "batch_size": size}, columns)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratios", "shortfall", "mean", "worst", "accurate"),
    [
        ((1.1, 1.2), 0.001, CONFIRMED, CONFIRMED, CONFIRMED),
        ((1.0, 1.9), 0.02, CONFIRMED, CONFIRMED, REFUTED),
        ((0.3, 6.0), 0.001, CONFIRMED, REFUTED, CONFIRMED),
        ((2.0, 2.5), 0.001, REFUTED, CONFIRMED, CONFIRMED),
    ],
)
def test_the_default_is_judged_against_the_best_setting(
    ratios, shortfall, mean, worst, accurate
):
    runs = [
        made_up(task, size, ratio, shortfall)
        for task, ratio in zip(SETTINGS.tasks, ratios, strict=True)
        for size in SETTINGS.batch_sizes
    ]
    verdicts = tuning.judge_all(SETTINGS, runs)
    assert [v.outcome for v in verdicts[:3]] == [mean, worst, accurate]
    assert math.isclose(
        verdicts[0].estimate, np.mean(np.log10(ratios)), rel_tol=0.05, abs_tol=5e-3
    )
    # The losses of the default fall tenfold from each look to the next.
    assert [v.outcome for v in verdicts[-2:]] == [CONFIRMED, CONFIRMED]


def test_large_batches_are_compared_at_fewer_steps():
    assert tuning.looks_at(tuning.EMBEDDED, 128) == (20, 100, 400)
    assert tuning.looks_at(tuning.EMBEDDED, 1024) == (20,)
    assert tuning.looks_at(tuning.FULL, 1024) == (20, 100, 400)
