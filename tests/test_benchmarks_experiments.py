"""The experiments run from the command line, write what they promise, and their numbers
are those of a run by hand."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin
from benchmarks.__main__ import main
from benchmarks.data import quintic, xor
from benchmarks.experiments import k_sweep, lambda_sweep, xor_features
from benchmarks.networks.mlp import digits_mlp, quintic_mlp, xor_mlp


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("name", "num_verdicts"),
    [
        pytest.param("adaptive", 2, marks=pytest.mark.slow),
        pytest.param("k-sweep", 3, marks=pytest.mark.slow),
        ("lambda-sweep", 4),
        ("xor-features", 4),
    ],
)
def test_quick_runs_write_what_they_promise(name, num_verdicts, tmp_path, capsys):
    assert main([name, "--quick", "--seeds", "2", "--out", str(tmp_path)]) == 0
    stem = name.replace("-", "_")
    kinds = {f"{stem}.{kind}" for kind in ("png", "pdf", "csv")}
    found = {path.name for path in tmp_path.iterdir()}
    assert found == kinds | {"verdicts.csv", "settings.json"}
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["quick"] is True
    assert settings["seeds"] == 2
    rows = read(tmp_path / f"{stem}.csv")
    assert {row["seed"] for row in rows} == {"0", "1"}
    verdicts = read(tmp_path / "verdicts.csv")
    assert len(verdicts) == num_verdicts
    written = capsys.readouterr().out
    for verdict in verdicts:
        assert f"{verdict['outcome']}: {verdict['claim']}." in written


def test_a_row_of_the_sweep_over_lambda_is_one_run():
    dampings = np.array([0.1, 10.0])
    sweep = lambda_sweep.train_all(num_seeds=2, dampings=dampings, max_steps=5)
    x, y = map(jnp.asarray, quintic.examples(20))
    model = quintic_mlp(jax.random.key(1))
    solver = gnlin.DampedGaussNewton(10.0)
    model = gnlin.solve(model, (x, y), solver, max_steps=5).model
    rmse = lambda data: np.sqrt(np.mean((jax.vmap(model)(data[0]) - data[1]) ** 2))
    assert sweep.train[1, 1] == pytest.approx(float(rmse((x, y))), rel=1e-6)
    assert sweep.test[1, 1] == pytest.approx(
        float(rmse(quintic.examples(1000))), rel=1e-6
    )
    learnt = jax.vmap(model)(quintic.examples(1000)[0])[:, 0]
    np.testing.assert_allclose(sweep.functions[1, 1], learnt, rtol=1e-5, atol=1e-7)


def test_runs_that_are_not_fitted_are_dropped_and_those_cut_short_not_judged():
    train = np.array([[1.0, 0.5, 3.0], [np.nan, 0.1, 0.3]])
    sweep = lambda_sweep.Sweep(np.array([1.0, 10, 100]), train, train, train, train)
    np.testing.assert_array_equal(
        sweep.dropped, [[False, False, True], [True, False, False]]
    )
    fitted = np.array([[1.0, 0.5, 2.0], [1.0, 0.1, 0.3]])
    sweep = lambda_sweep.Sweep(np.array([1.0, 10, 100]), fitted, fitted, fitted, fitted)
    np.testing.assert_array_equal(sweep.finished, [True, True, False])


@pytest.mark.parametrize("solver", ["iterative-linearisation", "damped-gauss-newton"])
def test_a_row_of_xor_features_is_one_run(solver, monkeypatch):
    monkeypatch.setattr(xor_features, "NUM_DAMPED_STEPS", 3)
    runs = xor_features.train_all(solver, np.array([1e5]), num_seeds=2, fewest=3)
    eta = xor_features.LEARNING_RATE
    if solver == "iterative-linearisation":
        by_hand = gnlin.IterativeLinearisation(10**5, eta)
    else:
        by_hand = gnlin.DampedGaussNewton(1 / (eta * 1e5))
    data = tuple(map(jnp.asarray, xor.examples(200, seed=0)))
    model = gnlin.solve(xor_mlp(jax.random.key(1)), data, by_hand, max_steps=3).model
    rows, output = (
        np.asarray(model.layers[0].weight),
        np.asarray(model.layers[1].weight[0]),
    )
    np.testing.assert_allclose(runs.weights[0, 1, :, :2], rows, rtol=1e-6, atol=1e-9)
    cosines = rows @ xor_features.CORNERS.T / np.sqrt(2)
    cosines = cosines.max(axis=1) / np.linalg.norm(rows, axis=1)
    share = np.abs(output) * np.linalg.norm(rows, axis=1)
    expected = np.sum(share * cosines) / np.sum(share)
    assert runs.alignment[0, 1] == pytest.approx(expected, rel=1e-6)
    assert runs.feature_updates[0, 1] == 3


def test_the_looks_of_the_sweep_over_k_are_those_of_one_run():
    curves = k_sweep.by_period(3.0, num_seeds=2, num_inner=12, fewest=1)
    np.testing.assert_array_equal(curves.updates, [1, 2, 3, 4])
    np.testing.assert_array_equal(curves.inner_steps[1], [3, 6, 9, 12])
    (inputs, labels), (test_inputs, test_labels) = k_sweep._data()
    solver = gnlin.IterativeLinearisation(3, k_sweep.LEARNING_RATE)
    solution = gnlin.solve(
        digits_mlp(jax.random.key(1)),
        (inputs, labels),
        solver,
        loss=gnlin.SoftmaxCrossEntropy(),
        max_steps=4,
    )
    np.testing.assert_allclose(curves.train_loss[1], solution.history.loss[1:], rtol=1e-8)
    outputs = jax.vmap(solution.model)(test_inputs)
    assert curves.final[1] == gnlin.accuracy(outputs, test_labels)
