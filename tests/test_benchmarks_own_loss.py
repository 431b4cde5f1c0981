"""A task of the user's own may have a loss of its own."""

import dataclasses
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special
from test_benchmarks_own_task import settings_of, TASK, VALUES, written

import gnlin
from benchmarks import own_task, scores
from benchmarks._options import Refusal
from benchmarks.experiment import Place, Runs
from benchmarks.experiments import batch, k_sweep, k_vs_lambda
from benchmarks.experiments.k_vs_lambda._curves import both_train, DESCENT, trained
from benchmarks.experiments.k_vs_lambda._tasks import make_task


SMOOTHED = (
    TASK + "\nimport gnlin\nloss = gnlin.SoftmaxCrossEntropy(label_smoothing=0.2)\n"
)
ROWS = "y = np.eye(2)[(x[:, 0] > 0).astype(int)] * 0.8 + 0.1"
PROBABILITIES = TASK.replace("y = (x[:, 0] > 0).astype(int)", ROWS)


@pytest.fixture
def task(tmp_path):
    return tmp_path / "my_task.py"


def entropy(p):
    return special.entr(p).sum(axis=-1)


def test_the_least_loss_is_the_entropy_of_smoothed_targets():
    labels = np.array([0, 0, 1, 2, 2, 2])
    loss = gnlin.SoftmaxCrossEntropy(label_smoothing=0.3, reduction="sum")
    smoothed = 0.7 * np.eye(3)[labels] + 0.1
    least = scores.least_loss(loss, labels, (6, 3))
    assert least == pytest.approx(entropy(smoothed).sum(), rel=1e-9)
    guessed = scores.least_loss(loss, labels, (1, 3))
    assert guessed == pytest.approx(6 * entropy(smoothed.mean(axis=0)), rel=1e-9)


def test_the_least_loss_of_values_is_that_of_the_mean_or_the_median():
    targets = np.array([[0.0], [1.0], [2.0], [50.0], [3.0]])
    squared = gnlin.SquaredError(reduction="sum")
    assert scores.least_loss(squared, targets, (5, 1)) == pytest.approx(0, abs=1e-12)
    expected = scores.guessing_loss(squared, targets)
    assert scores.least_loss(squared, targets, (1, 1)) == pytest.approx(expected)


def runs_of(task, periods=(1e3,), num_steps=2):
    settings = dataclasses.replace(
        settings_of(k_vs_lambda, task), seeds=1, periods=periods, num_steps=num_steps
    )
    point = {"task": "own", "solver": DESCENT}
    return settings, Runs(point, k_vs_lambda.train(settings, point, Place()))


@pytest.mark.slow
def test_label_smoothing_trains_by_its_excess_over_the_least_loss(task):
    written(task, SMOOTHED)
    settings, runs = runs_of(task, periods=(100.0,), num_steps=60)
    made = make_task(settings, "own")
    (_, labels), _ = made.drawn(0)
    least = len(labels) * entropy(np.array([0.9, 0.1]))
    share = np.mean(labels)
    mean = 0.8 * np.array([1 - share, share]) + 0.1
    guessed = len(labels) * entropy(mean)
    np.testing.assert_allclose(runs["guessing_loss"], guessed - least, rtol=1e-7)
    # The plain loss can never be at most 5 % of guessing, whatever the outputs.
    assert least > 0.05 * guessed
    assert runs["train_loss"].min() > -1e-9
    assert trained(runs).all()
    assert both_train(runs, runs).all()
    wrong = runs["test_error"] * 20
    np.testing.assert_allclose(wrong, np.round(wrong), atol=1e-9)
    assert made.error_label == "Test error (fraction wrong)"
    assert made.title.endswith("SoftmaxCrossEntropy")


@pytest.mark.slow
def test_the_loss_of_the_runs_is_that_of_the_file(task):
    """One step of gradient descent, against the gradient of optax."""
    written(task, SMOOTHED)
    settings = dataclasses.replace(
        settings_of(k_vs_lambda, task), seeds=1, periods=(1.0,), num_steps=1
    )
    made = make_task(settings, "own")
    assert made.loss.reduction == "sum"
    found = k_vs_lambda.train(settings, {"task": "own", "solver": DESCENT}, Place())
    (x, labels), (test_x, test_labels) = made.drawn(0)
    model = made.make_model(jax.random.key(0))
    y, frozen = eqx.partition(model, eqx.is_inexact_array)
    smooth = 0.8 * jax.nn.one_hot(labels, 2) + 0.1

    def loss(y):
        outputs = jax.vmap(eqx.combine(y, frozen))(x)
        return optax.softmax_cross_entropy(outputs, smooth).sum()

    moved = jax.tree.map(lambda a, g: a - made.learning_rate * g, y, jax.grad(loss)(y))
    least = len(labels) * entropy(np.array([0.9, 0.1]))
    expected = float(loss(moved)) - least
    np.testing.assert_allclose(found["train_loss"][0, 0], expected, rtol=1e-7)
    outputs = jax.vmap(eqx.combine(moved, frozen))(test_x)
    wrong = jnp.mean(outputs.argmax(axis=1) != test_labels)
    np.testing.assert_allclose(found["test_error"][0, 0], wrong, atol=1e-12)


@pytest.mark.slow
def test_probabilities_and_weights_of_classes_are_trained_with_accuracy(task):
    loss = "gnlin.SoftmaxCrossEntropy(class_weights=[1.0, 3.0])"
    written(task, f"{PROBABILITIES}\nimport gnlin\nloss = {loss}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, runs = runs_of(task)
    assert 0 < runs["guessing_loss"][0, 0] < 30
    wrong = runs["test_error"] * 20
    np.testing.assert_allclose(wrong, np.round(wrong), atol=1e-9)


def test_a_loss_of_values_has_their_error(task):
    written(task, f"{VALUES}\nimport gnlin\nloss = gnlin.losses.Huber()\n")
    settings = settings_of(k_vs_lambda, task)
    made = make_task(settings, "own")
    assert made.error_label == "Test error (RMSE)"
    assert not made.has_theory


def test_squared_error_on_probabilities_is_warned_of(task):
    written(task, PROBABILITIES)
    with pytest.warns(UserWarning, match="loss = gnlin.SoftmaxCrossEntropy") as told:
        settings_of(k_sweep, task)
    assert len(told) == 1
    one_hot = ROWS.replace(" * 0.8 + 0.1", " * 1.0")
    written(task, PROBABILITIES.replace(ROWS, one_hot))
    with pytest.warns(UserWarning, match="are probabilities"):
        settings_of(k_sweep, task)
    others = ["y = x[:, :2]", "y = np.abs(x[:, :2])", f"{ROWS} - 0.1", f"{ROWS} * 2"]
    for other in others:
        written(task, PROBABILITIES.replace(ROWS, other))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            settings_of(k_sweep, task)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("3", "must be a loss of gnlin, .* but is a int"),
        ("gnlin.SquaredError", "must be a loss of gnlin, .* the class SquaredError"),
        ("(lambda o, y: 0)", "must be a loss of gnlin, .* but is a function"),
        ("gnlin.SoftmaxCrossEntropy(reduction='mean')", "leave its reduction out"),
        ("gnlin.SquaredError()", "fails on outputs of shape .2,. .* target for each out"),
        (
            "gnlin.SoftmaxCrossEntropy(class_weights=[1.0, 2.0, 3.0])",
            "fails on outputs of shape .2,. and targets of shape .. .*choose one",
        ),
        ("gnlin.SoftmaxCrossEntropy(label_smoothing=2)", "cannot be run .ValueError"),
    ],
)
def test_losses_that_do_not_suit_are_refused(loss, words, task):
    written(task, f"{TASK}\nimport gnlin\nloss = {loss}\n")
    with pytest.raises(Refusal, match=words):
        settings_of(k_vs_lambda, task)


@pytest.mark.parametrize("experiment", [k_sweep, batch])
def test_other_experiments_say_which_one_takes_a_loss(experiment, task):
    written(task, SMOOTHED)
    with pytest.raises(Refusal, match="leave it out, or run `k-vs-lambda`"):
        settings_of(experiment, task)
    assert own_task.read(str(task)).loss.label_smoothing == 0.2
