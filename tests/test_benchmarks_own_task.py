"""An experiment on a task that the user defines in one file."""

import dataclasses
import json

import equinox as eqx
import jax
import numpy as np
import pytest

from benchmarks import own_task, training
from benchmarks.__main__ import main
from benchmarks._options import Options, Refusal
from benchmarks.experiment import Place
from benchmarks.experiments import batch, k_sweep, xor_features


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


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "my_task.py"
    path.write_text(TASK)
    own_task.read.cache_clear()
    return path


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


def test_another_version_of_the_file_is_another_task(task):
    before = settings_of(k_sweep, task).network
    task.write_text(TASK + "\n# changed\n")
    own_task.read.cache_clear()
    assert settings_of(k_sweep, task).network != before


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("def model", "def network", "has no function 'model'"),
        ("import equinox", "import no_such_module", "cannot be run"),
        ('"learning_rate"', '"rate"', "sets 'rate', which is no setting"),
    ],
)
def test_invalid_task_files_are_refused(old, new, words, task):
    task.write_text(TASK.replace(old, new))
    with pytest.raises(Refusal, match=words):
        settings_of(k_sweep, task)


@pytest.mark.parametrize("new", ["(y[:30] + 0.5)", "y[:29]", "y[:30], y"])
def test_data_of_another_form_are_refused(new, task):
    task.write_text(TASK.replace("(x[:30], y[:30])", f"(x[:30], {new})"))
    with pytest.raises(Refusal, match="three pairs of inputs and whole labels"):
        training.load(settings_of(k_sweep, task), Place(), 0)


def test_an_experiment_with_fixed_tasks_refuses_another(task):
    with pytest.raises(Refusal, match="leave --task out"):
        settings_of(xor_features, task)


@pytest.mark.slow
def test_an_experiment_runs_on_the_task(task, tmp_path):
    out = tmp_path / "results"
    command = ["batch", "--quick", "--task", str(task), "--seeds", "1", "--grid", "1"]
    assert main([*command, "--out", str(out)]) == 0
    settings = json.loads((out / "settings.json").read_text())
    assert settings["settings"]["data"] == str(task)
    assert settings["settings"]["learning_rate"] == 0.02
    assert (out / "batch.png").exists()
    assert batch.EXPERIMENT.own
