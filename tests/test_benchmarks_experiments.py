"""The experiments run from the command line and write their files; rows match a run by
hand."""

import csv
import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin
from benchmarks import training
from benchmarks.__main__ import main
from benchmarks.adaptive_linearisation import AdaptiveLinearisation
from benchmarks.data import quintic, xor
from benchmarks.experiment import Place, Runs
from benchmarks.experiments import adaptive, k_sweep, lambda_sweep, xor_features
from benchmarks.networks.mlp import dead_units, digits_mlp, quintic_mlp, xor_mlp


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("name", "num_verdicts"),
    [
        pytest.param("adaptive", 2, marks=pytest.mark.exhaustive),
        pytest.param("batch", 2, marks=pytest.mark.exhaustive),
        pytest.param("data-scaling", 3, marks=pytest.mark.exhaustive),
        pytest.param("k-sweep", 12, marks=pytest.mark.exhaustive),
        pytest.param("beta-sweep", 6, marks=pytest.mark.exhaustive),
        pytest.param("kernel-drift", 7, marks=pytest.mark.exhaustive),
        pytest.param("lazy-to-rich", 8, marks=pytest.mark.exhaustive),
        pytest.param("lambda-sweep-cnn", 2, marks=pytest.mark.exhaustive),
        pytest.param("mnist-k", 3, marks=pytest.mark.exhaustive),
        pytest.param("provable-features", 2, marks=pytest.mark.exhaustive),
        pytest.param("regimes", 4, marks=pytest.mark.exhaustive),
        pytest.param("resnet", 3, marks=pytest.mark.exhaustive),
        pytest.param("schedules", 12, marks=pytest.mark.exhaustive),
        pytest.param("solved-subproblem", 4, marks=pytest.mark.exhaustive),
        pytest.param("stability", 3, marks=pytest.mark.exhaustive),
        pytest.param("lambda-sweep", 14, marks=pytest.mark.exhaustive),
        pytest.param("xor-features", 12, marks=pytest.mark.exhaustive),
    ],
)
def test_quick_runs_write_their_files(name, num_verdicts, tmp_path, capsys):
    assert main([name, "--quick", "--seeds", "2", "--out", str(tmp_path)]) == 0
    stem = name.replace("-", "_")
    kinds = {f"{stem}.{kind}" for kind in ("png", "pdf", "csv")}
    found = {path.name for path in tmp_path.iterdir()}
    assert found == kinds | {"verdicts.csv", "settings.json", "runs"}
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["scale"] == "quick"
    assert settings["settings"]["seeds"] == 2
    assert "2 seeds" in settings["figures"][stem] or "2 init" in settings["figures"][stem]
    rows = read(tmp_path / f"{stem}.csv")
    assert {row["seed"] for row in rows} == {"0", "1"}
    verdicts = read(tmp_path / "verdicts.csv")
    assert len(verdicts) == num_verdicts
    written = capsys.readouterr().out
    for verdict in verdicts:
        assert f"{verdict['outcome']}: {verdict['claim']}" in written


@pytest.mark.exhaustive
def test_probes_and_filters_come_from_runs_with_large_k(tmp_path):
    def run(name):
        assert main([name, "--quick", "--out", str(tmp_path / name)]) == 0
        return json.loads((tmp_path / name / "settings.json").read_text())

    assert run("large-k-augmented")["borrowed"] is False
    for name, num_verdicts in (("linear-probe", 6), ("filters", 3)):
        assert run(name)["borrowed"] is True
        assert not (tmp_path / name / "runs").exists()
        assert len(read(tmp_path / name / "verdicts.csv")) == num_verdicts
        assert (tmp_path / name / f"{name.replace('-', '_')}.png").exists()


@pytest.mark.exhaustive
def test_a_row_of_the_sweep_over_lambda_is_one_run():
    settings = lambda_sweep.LambdaSweep(seeds=2, dampings=(0.1, 10.0), num_steps=5)
    point = {"interval": "outputs in [-4, 4]"}
    columns = lambda_sweep.train(settings, point, Place())
    x, y = map(jnp.asarray, quintic.examples(20))
    model = quintic_mlp(jax.random.key(1))
    solver = gnlin.DampedGaussNewton(10.0)
    model = gnlin.solve(model, (x, y), solver, max_steps=5).model
    rmse = lambda data: np.sqrt(np.mean((jax.vmap(model)(data[0]) - data[1]) ** 2))
    assert columns["damping"][1, 1] == 10
    assert columns["train_rmse"][1, 1] == pytest.approx(float(rmse((x, y))), rel=1e-6)
    assert columns["test_rmse"][1, 1] == pytest.approx(
        float(rmse(quintic.examples(1000))), rel=1e-6
    )
    learnt = jax.vmap(model)(quintic.examples(1000)[0])[:, 0]
    np.testing.assert_allclose(columns["functions"][1, 1], learnt, rtol=1e-5, atol=1e-7)
    kernel = gnlin.TangentKernel(model)(x).reshape(20, 20)
    dimension = np.trace(np.linalg.solve(kernel + 10 * np.eye(20), kernel))
    found = columns["effective_dimension"][1, 1]
    assert found == pytest.approx(float(dimension), rel=1e-5)


def test_unfinished_runs_are_left_out_and_too_many_of_them_prevent_a_verdict():
    train = np.array([[0.05, 0.05, 3.0], [0.05, 0.2, 0.3], [np.nan, 0.1, 0.05]])
    columns = {"train_rmse": train, "test_rmse": np.full((3, 3), 0.01)}
    runs = Runs({}, columns)
    np.testing.assert_array_equal(
        lambda_sweep.finished(runs), [[1, 1, 0], [1, 0, 0], [0, 1, 1]]
    )
    np.testing.assert_array_equal(lambda_sweep.judged(runs), [True, True, False])
    found = lambda_sweep.logs(runs, "test_rmse", lambda_sweep.finished(runs))
    np.testing.assert_allclose(found, [[-2, -2], [-2, np.nan], [np.nan, -2]])


def test_units_that_are_off_for_all_inputs_are_dead():
    model = quintic_mlp(jax.random.key(0))
    model = jax.tree.map(lambda x: jnp.ones_like(x) if eqx.is_array(x) else x, model)
    first = model.layers[0]
    # The unit -x - 5 is always off, and x - 3 is on only at the end.
    weight = jnp.where(jnp.arange(50) < 20, -1.0, 1.0)[:, None]
    bias = jnp.where(jnp.arange(50) < 20, -5.0, -3.0)
    first = eqx.tree_at(lambda x: (x.weight, x.bias), first, (weight, bias))
    model = eqx.tree_at(lambda m: m.layers[0], model, first)
    x = jnp.linspace(-4, 4, 50)[:, None]
    assert float(dead_units(model, x)) == pytest.approx(20 / 200)


@pytest.mark.exhaustive
def test_alignments_with_the_corners():
    rows = jnp.array([[2.0, 2.0], [-3.0, 3.0], [1.0, 0.0], [0.0, 0.0]])
    found = xor_features.with_corners(rows)
    np.testing.assert_allclose(found, [1, 1, np.sqrt(0.5), 0], rtol=1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("solver", [xor_features.BY_PERIOD, xor_features.BY_DAMPING])
def test_a_row_of_xor_features_is_one_run(solver):
    settings = xor_features.XorFeatures(
        seeds=2, periods=(1e5,), fewest_updates=3, damped_steps=3
    )
    eta = settings.learning_rate
    point = {"scale": 0.3, "solver": solver, "period": 1e5}
    columns = xor_features.train(settings, point, Place())
    if solver == xor_features.BY_PERIOD:
        by_hand = gnlin.IterativeLinearisation(10**5, eta)
    else:
        by_hand = gnlin.DampedGaussNewton(1 / (eta * 1e5))
    data = tuple(map(jnp.asarray, xor.examples(200, seed=1)))
    model = gnlin.solve(xor_mlp(jax.random.key(1), 0.3), data, by_hand, max_steps=3).model
    rows, output = (
        np.asarray(model.layers[0].weight),
        np.asarray(model.layers[1].weight[0]),
    )
    np.testing.assert_allclose(columns["weights"][1, :, :2], rows, rtol=1e-6, atol=1e-9)
    cosines = rows @ xor_features.CORNERS.T / np.sqrt(2)
    cosines = cosines.max(axis=1) / np.linalg.norm(rows, axis=1)
    share = np.abs(output) * np.linalg.norm(rows, axis=1)
    expected = np.sum(share * cosines) / np.sum(share)
    assert columns["weighted_alignment"][1] == pytest.approx(expected, rel=1e-6)
    assert columns["alignment"][1] == pytest.approx(np.mean(cosines), rel=1e-6)
    assert columns["feature_updates"][1] == 3
    assert columns["damping"][1] == pytest.approx(1 / (eta * 1e5))


@pytest.mark.exhaustive
def test_looks_of_the_k_sweep_match_one_run():
    settings = dataclasses.replace(
        k_sweep.EMBEDDED, seeds=2, num_steps=12, most_updates=1
    )
    point = {"solver": k_sweep.DESCENT, "learning_rate": 1e-3, "period": 3.0}
    columns = k_sweep.train(settings, point, Place())
    np.testing.assert_array_equal(columns["feature_updates"], [[1, 2, 3, 4]] * 2)
    np.testing.assert_array_equal(columns["inner_steps"][1], [3, 6, 9, 12])
    train, _, (test_inputs, test_labels) = training.load(settings, Place(), 1)
    solution = gnlin.solve(
        digits_mlp(jax.random.key(1)),
        train,
        gnlin.IterativeLinearisation(3, 1e-3),
        loss=gnlin.SoftmaxCrossEntropy(),
        max_steps=4,
    )
    losses = np.array([*solution.history.loss[1:], solution.loss]) / len(train[1])
    np.testing.assert_allclose(columns["train_loss"][1], losses, rtol=1e-8)
    outputs = jax.vmap(solution.model)(test_inputs)
    assert columns["test_accuracy"][1, -1] == gnlin.losses.accuracy(outputs, test_labels)


@pytest.mark.exhaustive
def test_a_triggered_run_is_one_run():
    settings = dataclasses.replace(adaptive.EMBEDDED, seeds=2, num_updates=3)
    columns = adaptive.train(settings, {"solver": adaptive.DEFAULT}, Place())
    train = training.load(settings, Place(), 1).train
    descent = gnlin.IterativeLinearisation(10**6, 1e-3, method="flow")
    solution = gnlin.solve(
        digits_mlp(jax.random.key(1)),
        train,
        AdaptiveLinearisation(descent, min_ratio=0.25),
        loss=gnlin.SoftmaxCrossEntropy(),
        max_steps=3,
    )
    np.testing.assert_array_equal(columns["feature_updates"][1], [1, 2, 3])
    np.testing.assert_allclose(
        columns["inner_steps"][1], np.cumsum(solution.history.num_inner_steps)
    )
    losses = np.array([*solution.history.loss[1:], solution.loss]) / len(train[1])
    np.testing.assert_allclose(columns["train_loss"][1], losses, rtol=1e-6)


def runs_of(updates, accuracy):
    return Runs(
        {"solver": adaptive.FIXED, "period": 10.0},
        {"feature_updates": np.array(updates), "test_accuracy": np.array(accuracy)},
    )


def test_updates_to_an_accuracy_are_counted_at_the_first_look_that_reaches_it():
    runs = runs_of([[1, 2, 5], [1, 3, 6]], [[0.5, 0.9, 0.8], [0.1, 0.2, 0.3]])
    np.testing.assert_array_equal(training.updates_to(runs, 0.8), [2, 7])


def test_accuracy_after_some_updates_comes_from_a_look_without_more_updates():
    runs = runs_of([[1, 2, 5], [4, 5, 6]], [[0.5, 0.9, 0.8], [0.1, 0.2, 0.3]])
    np.testing.assert_array_equal(adaptive.accuracy_after(runs, 3), [0.9, np.nan])
    np.testing.assert_array_equal(adaptive.accuracy_after(runs, 9), [0.8, 0.3])
