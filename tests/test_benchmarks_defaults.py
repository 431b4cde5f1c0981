"""The experiment on `fit` without tuning: its tasks, Adam's compiled loop, and its
tables."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import updated

import gnlin
from benchmarks.__main__ import main
from benchmarks.experiment import Runs
from benchmarks.experiments import defaults
from benchmarks.experiments.defaults.adam import run_adam
from benchmarks.experiments.defaults.runs import num_passes, run_task
from benchmarks.experiments.defaults.tasks import Data, Task, TASKS
from benchmarks.verdicts import CONFIRMED, REFUTED


def small(seed):
    x = np.random.default_rng(seed).normal(size=(12, 3)).astype(np.float32)
    y = np.sin(x[:, :1])
    return Data((x[:8], y[:8]), (x[8:10], y[8:10]), (x[10:], y[10:]))


SMALL = dataclasses.replace(
    TASKS["regression"],
    make=lambda key: eqx.nn.MLP(3, 1, 4, 1, activation=jnp.tanh, key=key),
    data=small,
    epochs=2,
)


@pytest.mark.parametrize("name", TASKS)
def test_examples_are_drawn_for_each_seed_and_none_twice(name):
    task: Task = TASKS[name]
    data, again, other = task.data(3), task.data(3), task.data(4)
    for part, same in zip(data, again, strict=True):
        np.testing.assert_array_equal(part[0], same[0])
    assert not np.array_equal(data.train[0], other.train[0])
    if name not in ("transformer", "regression"):  # whose examples are generated
        images = [part[0].reshape(len(part[0]), 64) for part in data]
        assert len(np.unique(np.concatenate(images), axis=0)) == 1797
    assert {x.dtype for part in data for x in part} <= {
        np.dtype(np.float32),
        np.dtype(np.int32),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_networks_have_the_outputs_that_the_targets_need(name):
    task = TASKS[name]
    with jax.enable_x64(False):
        model, state = task.start(0)
        inputs, targets = (x[:2] for x in task.data(0).train)
        key = jax.random.key(0)
        outputs, _ = eqx.filter_eval_shape(task.apply, model, state, inputs, key)
        task.loss.check(outputs, jnp.asarray(targets))


@pytest.mark.exhaustive
def test_adam_is_a_literal_loop_for_each_rate_and_seed():
    rates = (0.01, 0.1)
    found = run_adam(SMALL, range(2), rates, 6, batch_size=4, num_looks=3)
    assert found["steps"] == 6
    assert found["test_scores"].shape == (2, 2, 3)
    for seed in range(2):
        (model, _), data, key = SMALL.start(seed), small(seed), jax.random.key(seed)
        optimiser = optax.adam(rates[1])
        moments = optimiser.init(eqx.filter(model, eqx.is_array))

        def loss(model, inputs, targets):
            return 0.5 * jnp.mean(jnp.sum((jax.vmap(model)(inputs) - targets) ** 2, 1))

        for step in range(6):
            order = jax.random.permutation(jax.random.fold_in(key, step // 2), 8)
            batch = np.asarray(order)[4 * (step % 2) :][:4]
            inputs, targets = (x[batch] for x in data.train)
            slope = eqx.filter_grad(loss)(model, inputs, targets)
            change, moments = updated(optimiser, slope, moments)
            model = eqx.apply_updates(model, change)
        error = np.mean((jax.vmap(model)(data.test[0]) - data.test[1]) ** 2)
        np.testing.assert_allclose(found["test_scores"][seed, 1, -1], error, rtol=1e-4)
        train_loss = loss(model, *data.train)
        np.testing.assert_allclose(
            found["train_losses"][seed, 1, -1], train_loss, rtol=1e-4
        )


@pytest.mark.exhaustive
def test_a_run_reports_its_results():
    solver = gnlin.DampedGaussNewton(1.0, search=None)
    found = run_task(SMALL, 0, solver, batch_size=4, num_looks=2)
    assert found["steps"] == 4
    # The Jacobian has a row for each of four residuals; then comes one product with it.
    assert found["passes"] > 4 * 2
    assert found["test_scores"].shape == found["validation_scores"].shape == (2,)
    assert found["score"] == pytest.approx(found["test_scores"][-1])
    assert found["diverged"] is False


def test_passes_are_counted_both_ways_and_forwards():
    counts = {
        "num_jvps": 3,
        "num_vjps": 4,
        "num_feature_updates": 2,
        "num_accepted_steps": 2,
        "num_rejected_steps": 5,
    }
    assert num_passes(counts, across=False) == 16
    assert num_passes(counts, across=True) == 16 + counts["num_feature_updates"]


SETTINGS = dataclasses.replace(
    defaults.EMBEDDED, seeds=6, tasks=("MLP, tanh", "regression"), rates=(0.1, 0.2)
)


def made_up(name, fit, adam, diverged=False):
    """Adam's first rate is best in the middle of the run, and the second at its end."""
    n, looks = SETTINGS.seeds, SETTINGS.num_looks
    scores = np.full((n, 2, 2 * looks), adam)
    worse = -1 if TASKS[name].higher_is_better else 1
    scores[:, 1, :looks] += 0.1 * worse
    scores[:, 0, looks:] += 0.1 * worse
    columns = {"adam_test_scores": scores, "adam_steps": np.full(n, 40.0)}
    columns["adam_seconds"] = np.ones(n)
    for kind in ("fit", "full"):
        columns |= {
            f"{kind}_score": np.full(n, fit),
            f"{kind}_test_scores": np.full((n, looks), fit),
            f"{kind}_passes": np.full(n, 40.0),
            f"{kind}_steps": np.full(n, 10.0),
            f"{kind}_seconds": np.ones(n),
            f"{kind}_diverged": np.full(n, diverged),
        }
    return Runs({"task": name}, columns)


@pytest.mark.parametrize(
    ("accuracy", "error", "outcomes"),
    [(0.95, 1.0, [CONFIRMED, REFUTED]), (0.9, 0.5, [REFUTED, CONFIRMED])],
)
def test_as_good_means_within_a_margin_of_tuned_adam(accuracy, error, outcomes):
    runs = [made_up("MLP, tanh", accuracy, 0.96), made_up("regression", error, 0.9)]
    verdicts = defaults.judge_all(SETTINGS, runs)
    assert [v.outcome for v in verdicts[:2]] == outcomes
    assert verdicts[2].estimate == 0.5
    assert verdicts[3].outcome == CONFIRMED  # no run diverged
    best = defaults.outcome(SETTINGS, runs[0])
    assert (best.rate, best.longer_rate) == (0.1, 0.2)


@pytest.mark.slow
def test_table_and_figure_have_a_part_for_each_task(tmp_path):
    runs = [made_up("MLP, tanh", 0.95, 0.96), made_up("regression", 1.0, 0.9, True)]
    assert set(defaults.draw(SETTINGS, runs, tmp_path)) == {"defaults"}
    assert (tmp_path / "defaults.png").exists()
    lines = (tmp_path / "defaults.md").read_text().splitlines()
    assert len(lines) == 6
    assert lines[2].startswith("| MLP, tanh | 95.0 ± 0.0 | 95.0 ± 0.0 | 96.0 ± 0.0 | 0.1")
    assert lines[3].endswith("| 12 |")  # of six seeds, twice
    assert lines[-1] == "gnlin.fit is as good as Adam or better on 1 of 2 tasks."


@pytest.mark.exhaustive
def test_a_quick_run_is_judged_and_resumed(tmp_path, capsys):
    arguments = ["defaults", "--quick", "--seeds", "2", "--out", str(tmp_path)]
    assert main(arguments) == 0
    kinds = {f"defaults.{kind}" for kind in ("png", "pdf", "csv", "md")}
    found = {path.name for path in tmp_path.iterdir()}
    assert found == kinds | {"verdicts.csv", "settings.json", "runs"}
    assert "No run diverges" in capsys.readouterr().out
    table = (tmp_path / "defaults.md").read_text()
    (runs,) = (tmp_path / "runs").iterdir()
    made = runs.stat().st_mtime_ns
    assert main([*arguments, "--resume"]) == 0
    assert runs.stat().st_mtime_ns == made
    assert (tmp_path / "defaults.md").read_text() == table
