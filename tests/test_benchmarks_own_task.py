"""An experiment on a task that the user defines in one file."""

import dataclasses
import importlib
import json
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin
from benchmarks import own_task, scores, solved, training
from benchmarks.__main__ import EXPERIMENTS, main
from benchmarks._options import Options, Refusal
from benchmarks.experiment import Place, Runs
from benchmarks.experiments import (
    batch,
    data_scaling,
    k_sweep,
    k_vs_lambda,
    linear_probe,
    mnist_k,
    xor_features,
)
from benchmarks.experiments.k_vs_lambda._tasks import make_task, num_tested


ROOT = Path(__file__).resolve().parents[1]
PAGE_TEXT = (ROOT / "docs" / "own-task.md").read_text()
PAGE = PAGE_TEXT.partition("```python\n")[2].partition("```")[0]


TASK = """
import equinox as eqx
import numpy as np

def model(key):
    return eqx.nn.MLP(3, 2, width_size=5, depth=1, key=key)

def data(seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((60, 3))
    y = (x[:, 0] > 0).astype(int)
    return (x[:30], y[:30]), (x[30:40], y[30:40]), (x[40:], y[40:])

settings = {"learning_rate": 0.02}
"""


VALUES = TASK.replace("y = (x[:, 0] > 0).astype(int)", "y = x[:, :2] ** 2")
TOKENS = """
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

class Transformer(eqx.Module):
    embedding: jax.Array
    attention: eqx.nn.MultiheadAttention
    dense: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embedding = jax.random.normal(keys[0], (4, 6))
        self.attention = eqx.nn.MultiheadAttention(2, 6, key=keys[1])
        self.dense = eqx.nn.MLP(6, 3, 8, 1, jnp.tanh, key=keys[2])

    def __call__(self, tokens):
        x = self.embedding[tokens]
        return self.dense(jnp.mean(x + self.attention(x, x, x), axis=0))

def model(key):
    return Transformer(key)

def data(seed):
    x = np.random.default_rng(seed).integers(4, size=(50, 5))
    y = np.minimum((x == 0).sum(axis=1), 2)
    return (x[:15], y[:15]), (x[15:20], y[15:20]), (x[20:], y[20:])
"""
"""A stranger's transformer: how often a token occurs, 0, 1 or more times."""
STATE = """
import equinox as eqx
import jax.numpy as jnp
import numpy as np

class Network(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        self.first = eqx.nn.Linear(3, 6, key=key)
        self.norm = eqx.nn.BatchNorm(6, "batch", momentum=0.9, mode="batch")
        self.last = eqx.nn.Linear(6, 2, key=key)

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(jnp.tanh(x)), state

def model(key):
    return eqx.nn.make_with_state(Network)(key)

def data(seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((60, 3))
    y = (x[:, 0] > 0).astype(int)
    return (x[:30], y[:30]), (x[30:40], y[30:40]), (x[40:], y[40:])
"""
FEW = 'settings = {"sizes": [10, 20, 30]}'
KINDS = {"classes": TASK, "values": VALUES, "tokens": TOKENS, "state": STATE}


def written(path, text):
    path.write_text(text)
    own_task.read.cache_clear()
    own_task._drawn.cache_clear()
    return path


@pytest.fixture
def task(tmp_path):
    return written(tmp_path / "my_task.py", TASK)


def settings_of(experiment, task):
    return experiment.EXPERIMENT.settings(Options(task.parent, "quick", task=task))


def test_model_data_and_settings_come_from_the_task(task):
    settings = settings_of(k_sweep, task)
    assert (settings.learning_rate, settings.num_train) == (0.02, None)
    assert settings.network.startswith("my_task ")
    train, validation, test = training.load(settings, Place(), 1)
    assert [len(y) for _, y in (train, validation, test)] == [30, 10, 20]
    expected = np.random.default_rng(1).standard_normal((60, 3))
    np.testing.assert_array_equal(test[0], expected[40:])
    few = dataclasses.replace(settings, num_train=7)
    np.testing.assert_array_equal(training.load(few, Place(), 1).train[0], expected[:7])
    model = training.model_of(settings)(jax.random.key(0))
    assert isinstance(model, eqx.nn.MLP)
    assert model.width_size == 5


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(Refusal, match="There is no file"):
        own_task.read(str(tmp_path / "nothing.py"))


def test_another_version_of_the_file_is_another_task(task):
    before = settings_of(k_sweep, task).network
    written(task, TASK + "\n# changed\n")
    assert settings_of(k_sweep, task).network != before


def test_the_grid_of_a_task_is_sorted_as_that_of_the_command_line_is(task):
    for given, expected in (("(100, 3, 100)", (3.0, 100.0)), ("[7]", (7.0,))):
        written(task, TASK.replace('"learning_rate": 0.02', f'"periods": {given}'))
        assert settings_of(k_vs_lambda, task).periods == expected
    # Other lists are sorted as well: verdicts take their ends.
    written(task, TASK.replace('"learning_rate": 0.02', '"sizes": (20, 5, 20)'))
    assert settings_of(data_scaling, task).sizes == (5, 20)


def test_whole_numbers_and_lists_are_taken_for_the_settings_of_their_kind(task):
    written(task, TASK.replace("0.02", '1, "periods": [2, 30]'))
    settings = settings_of(k_sweep, task)
    assert (settings.learning_rate, settings.periods) == (1.0, (2.0, 30.0))
    assert isinstance(settings.learning_rate, float)


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_of_every_kind_are_taken(kind, task):
    written(task, KINDS[kind])
    assert settings_of(batch, task).network.startswith("my_task ")


def test_state_is_refused_where_it_cannot_be_trained(task):
    written(task, STATE)
    with pytest.raises(Refusal, match="has state, which this experiment cannot train"):
        settings_of(k_sweep, task)
    for experiment, command, grid in (
        (mnist_k, "mnist-k", (1.0, 10.0)),
        (data_scaling, "data-scaling", (1.0,)),
    ):
        written(task, STATE + FEW * (command == "data-scaling"))
        options = Options(task.parent, "quick", task=task)
        with pytest.raises(Refusal, match=f"`{command}`"):
            experiment.EXPERIMENT.settings(options)
        experiment.EXPERIMENT.settings(dataclasses.replace(options, grid=grid))


def test_a_state_is_refused_before_the_runs_are_begun(task, tmp_path, capsys):
    written(task, STATE)
    assert main(["k-sweep", "--quick", "--task", str(task), "--out", str(tmp_path)]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.count("\n") == 1


def test_the_page_names_the_experiments_that_train_state(task):
    sentence = PAGE_TEXT.partition("Models with state")[2].partition(".")[0]
    named = set(re.findall("`([a-z-]+)`", sentence))
    assert named == set(re.findall("`([a-z-]+)`", own_task.HAS_STATE))
    for name in named:
        written(task, STATE + FEW * (name == "data-scaling"))
        options = Options(task.parent, "quick", task=task, grid=(1.0, 10.0))
        importlib.import_module(EXPERIMENTS[name]).EXPERIMENT.settings(options)


def test_an_experiment_with_fixed_tasks_refuses_another(task):
    with pytest.raises(Refusal, match="has tasks of its own; leave --task out"):
        settings_of(xor_features, task)
    with pytest.raises(Refusal, match="reads the runs of 'large-k-augmented', which has"):
        settings_of(linear_probe, task)


def test_the_learning_rate_is_by_default_a_small_part_of_the_stable_one(task):
    written(task, TASK.replace("settings =", "others ="))
    settings = settings_of(k_vs_lambda, task)
    found = make_task(settings, "own")
    assert settings.learning_rate == found.learning_rate
    (inputs, _), _ = found.drawn(0)
    kernel = gnlin.TangentKernel(found.make_model(jax.random.key(0)))(inputs)
    stable = 2 / np.linalg.eigvalsh(kernel.reshape(60, 60))[-1]
    assert 0.001 < found.learning_rate / stable <= 0.01
    assert np.log10(found.learning_rate) % 1 == pytest.approx(0)


def test_the_caption_counts_the_test_outputs(task):
    written(task, VALUES)
    assert num_tested(make_task(settings_of(k_vs_lambda, task), "own")) == 20 * 2
    written(task, VALUES.replace("(60, 3)", "(2_000, 3)"))
    assert num_tested(make_task(settings_of(k_vs_lambda, task), "own")) == 1_000


def test_too_many_outputs_are_refused(task):
    written(task, TASK.replace("(60, 3)", "(6_000, 3)").replace("[:30]", "[:3_000]"))
    with pytest.raises(Refusal, match="has 6,000 training outputs"):
        make_task(settings_of(k_vs_lambda, task), "own")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_k_vs_lambda_on_every_kind(kind, task):
    written(task, KINDS[kind].replace("settings =", "others ="))
    settings = dataclasses.replace(
        settings_of(k_vs_lambda, task), seeds=1, periods=(1e4, 1e6), num_steps=3
    )
    (inputs, _), _, (_, test_targets) = own_task.draw(settings.data, None, 0)
    num_eigenvalues = len(inputs) * {"tokens": 3}.get(kind, 2)
    if kind == "values":  # the smaller of kernel and curvature, for squared error
        model = make_task(settings, "own").make_model(jax.random.key(0))
        parameters = jax.tree.leaves(eqx.filter(model, eqx.is_array))
        num_eigenvalues = sum(x.size for x in parameters)
    for point in k_vs_lambda.points(settings):
        columns = k_vs_lambda.train(settings, point, Place())
        assert point["task"] == "own"
        assert columns["test_error"].shape == (1, 2)
        assert columns["train_loss"][0, 0] < 2 * columns["guessing_loss"][0, 0]
        assert np.all(columns["feature_updates"] == 3)
        assert columns["spectrum"].shape[2] == num_eigenvalues
        assert ("test_mse" in columns) == (kind == "values")
        if kind == "values":
            mse = columns["test_error"] ** 2
            np.testing.assert_allclose(columns["test_mse"], mse, rtol=1e-10)
        else:
            wrong = columns["test_error"] * len(test_targets)
            np.testing.assert_allclose(wrong, np.round(wrong), atol=1e-9)


def test_values_are_scored_by_the_share_of_their_variance():
    rng = np.random.default_rng(0)
    targets = jnp.asarray(rng.normal(size=(200, 2)) * [1, 3])
    spread = scores.spread(targets)
    assert float(spread) == pytest.approx(np.var(targets, axis=0).sum())
    mean = jnp.broadcast_to(targets.mean(axis=0), targets.shape)
    for outputs, expected in ((targets, 1), (mean, 0), (-targets, 0)):
        found = scores.score(outputs, targets, spread)
        assert float(found) == pytest.approx(expected, abs=1e-12)
    halfway = (mean + targets) / 2
    parts = [
        float(scores.score(halfway[part], targets[part], spread))
        for part in (slice(0, 50), slice(50, 200))
    ]
    assert 0.25 * parts[0] + 0.75 * parts[1] == pytest.approx(0.75)
    loss = scores.loss_of(targets)
    assert loss.is_quadratic
    guessed = scores.guessing_loss(loss, targets) / len(targets)
    assert float(scores.trained_loss(targets)) == pytest.approx(0.01 * guessed)
    assert float(scores.mean_loss(mean, targets)) == pytest.approx(guessed)


def test_captions_say_what_accuracy_and_a_trained_run_are_for_values(task):
    settings = settings_of(k_sweep, written(task, VALUES))
    assert "explained share of the variance" in training.described(settings)
    (_, targets), _, _ = training.load(settings, Place(), 0)
    guessed = scores.guessing_loss(gnlin.SquaredError(), targets) / len(targets)
    assert float(scores.trained_loss(targets)) == pytest.approx(0.01 * guessed)
    assert training.enough(settings).startswith("1% of that of outputs that equal the")
    settings = settings_of(k_sweep, written(task, TASK))
    assert "explained" not in training.described(settings)
    assert training.enough(settings) == "0.01"


def test_the_guessing_loss_of_sequences_is_over_their_tokens():
    labels = jnp.asarray([[0, 1, 1], [2, 1, 0]])
    outputs = np.tile(np.log(np.array([2, 3, 1]) / 6), (2, 3, 1))
    loss = scores.loss_of(labels)

    @jax.jit
    def values(outputs):
        objective = gnlin.authoring.BatchLoss(loss, outputs, labels)
        return objective.value(outputs), scores.mean_loss(outputs, labels)

    guessed = scores.guessing_loss(loss, labels)
    value, mean = map(float, values(outputs))
    assert value == pytest.approx(guessed)
    assert scores.number_of(labels) == 6
    assert mean == pytest.approx(guessed / 6)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("values", marks=pytest.mark.slow),
        pytest.param("state", marks=pytest.mark.exhaustive),
    ],
)
def test_mini_batches_train_values_and_state(kind, task):
    """The sum, at a rate as many times smaller as there are examples, is the mean."""
    written(task, KINDS[kind])
    settings = dataclasses.replace(
        settings_of(batch, task), seeds=1, batch_size=10, num_steps=60, num_looks=2
    )
    callbacks = lambda draw, *start: [
        training.TrainAccuracy(draw.train),
        training.TrainLoss(draw.train),
    ]
    mean, total = (
        training.mini_batches(
            dataclasses.replace(settings, reduction=reduction),
            Place(),
            training.descent(1, rate),
            callbacks,
        )
        for reduction, rate in (("mean", 0.1), ("sum", 0.1 / 30))
    )
    assert mean["train_loss"][0, -1] < 0.9 * mean["guessing_loss"][0, -1]
    assert mean["train_accuracy"][0, -1] > 0.1
    assert mean["passes"][0] >= 2 * 60
    for name in ("train_loss", "validation_accuracy", "test_accuracy"):
        np.testing.assert_allclose(total[name], mean[name], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mini-batches", "full batch", "solved"])
def test_early_stopping_tells_bad_validation_scores_apart(way, task):
    """The validation targets are so far off that all scores are below zero."""
    text = VALUES.replace("(x[30:40], y[30:40])", "(x[30:40], 9 + y[30:40])")
    assert text != VALUES
    written(task, text)
    settings = dataclasses.replace(
        settings_of(batch, task),
        **{"seeds": 1, "batch_size": 10, "num_steps": 60, "num_looks": 4},
    )
    if way == "mini-batches":
        columns = training.mini_batches(settings, Place(), training.descent(1, 0.1))
    elif way == "full batch":
        solver = gnlin.IterativeLinearisation(1, 1e-3)
        columns = training.full_batch(settings, Place(), solver, 60)
    else:
        columns = solved.train_solving(settings, Place(), 2, most_steps=20)
    (validation,), (test,) = columns["validation_accuracy"], columns["test_accuracy"]
    assert np.all(validation < 0)
    assert len(set(validation)) > 1
    assert np.all(test >= 0)
    stopped = training.early_stopped(Runs({}, columns))
    assert stopped[0] == test[np.argmax(validation)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("batch", "1,10"),
        ("stability", "1,10"),
        ("kernel-drift", "1,10"),
        ("k-sweep", "1,10"),
        ("schedules", "3,10"),
        ("beta-sweep", "0.1,0.5"),
    ],
)
@pytest.mark.parametrize("kind", ["classes", "values"])
def test_an_experiment_runs_on_the_task(name, grid, kind, task, tmp_path):
    written(task, KINDS[kind])
    out = tmp_path / "results"
    command = [name, "--quick", "--task", str(task), "--seeds", "1", "--grid", grid]
    assert main([*command, "--out", str(out)]) == 0
    settings = json.loads((out / "settings.json").read_text())
    assert settings["settings"]["data"] == str(task)
    assert settings["settings"]["learning_rate"] == 0.02
    assert (out / f"{name.replace('-', '_')}.png").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["tokens", "state", "page"])
def test_k_vs_lambda_runs_on_the_task(kind, task, tmp_path):
    """`page`: the example of the documentation."""
    texts = KINDS | {"page": PAGE}
    written(task, texts[kind])
    out = tmp_path / "results"
    assert main(["k-vs-lambda", "--quick", "--task", str(task), "--out", str(out)]) == 0
    settings = json.loads((out / "settings.json").read_text())
    assert set(settings["figures"]) == {"k_vs_lambda", "difference"}
    assert settings["num_runs"] == 2 * 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["k-vs-lambda", "k-sweep", "batch"])
def test_the_tasks_of_the_documentation_suit_the_experiments(name, task):
    module = importlib.import_module(EXPERIMENTS[name])
    written(task, PAGE)
    settings_of(module, task)
    settings_of(module, ROOT / "docs" / "examples" / "token_task.py")


def test_the_page_names_the_experiments_that_take_a_task():
    sentence = PAGE_TEXT.partition("These experiments take a task:")[2].partition(".")[0]
    named = set(re.findall("`([a-z-]+)`", sentence))
    taking = {
        name
        for name, module in EXPERIMENTS.items()
        if importlib.import_module(module).EXPERIMENT.own is not None
    }
    assert named == taking
