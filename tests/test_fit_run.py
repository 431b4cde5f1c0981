"""The parts of `gnlin.fit` around its steps: data, history, callbacks, failures."""

import csv
import sys
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest
from fit_problems import (
    BATCHES,
    DESCENT,
    fit,
    inner_steps,
    LABELS,
    network,
    Normalised,
    numbers,
    T,
    X,
)
from problems import num_compiled

import gnlin
from gnlin.callbacks import Callback, EarlyStop, Log, Measure


def assert_same(left, right):
    left, right = jax.tree.leaves(left), jax.tree.leaves(right)
    for x, y in zip(left, right, strict=True):
        np.testing.assert_array_equal(x, y)


#
# Batches from other libraries
#


class Tensor:
    """A tensor of torch or TensorFlow, which only NumPy can convert."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype)


class Loader:
    """A data loader as in torch: it can be iterated repeatedly, and its batches are
    lists."""

    def __iter__(self):
        for inputs, targets in BATCHES:
            yield [Tensor(inputs), Tensor(targets)]


def generated(epoch):
    assert isinstance(epoch, int)
    yield from BATCHES


BY_HAND = {
    "NumPy": [tuple(map(np.asarray, batch)) for batch in BATCHES],
    "loader": Loader(),
    "function of the epoch": generated,
    "function of the epoch that returns a list": lambda epoch: BATCHES,
}


@pytest.mark.parametrize("data", BY_HAND.values(), ids=BY_HAND)
def test_any_iterable_of_batches(data):
    expected, result = fit(data=BATCHES, steps=7), fit(data=data, steps=7)
    np.testing.assert_array_equal(numbers(result.model), numbers(expected.model))
    for name in expected.history:
        np.testing.assert_array_equal(result.history[name], expected.history[name])


def test_a_function_of_the_epoch_is_given_the_epoch():
    def generate(epoch):
        return [(X[:4] + epoch, T[:4])] * 2

    by_hand = [(X[:4] + epoch, T[:4]) for epoch in (0, 0, 1, 1, 2, 2)]
    result = fit(data=generate, epochs=3)
    expected = fit(data=by_hand, epochs=1)
    np.testing.assert_array_equal(numbers(result.model), numbers(expected.model))
    np.testing.assert_array_equal(result.history["epoch"], [0, 0, 1, 1, 2, 2])


def test_an_iterator_is_good_for_one_epoch():
    expected = fit(data=BATCHES, epochs=1)
    result = fit(data=iter(BATCHES), epochs=1)
    np.testing.assert_array_equal(numbers(result.model), numbers(expected.model))
    with pytest.warns(UserWarning, match=r"ended in epoch 1 after 0 batches: pass some"):
        ended = fit(data=iter(BATCHES), epochs=2)
    np.testing.assert_array_equal(numbers(ended.model), numbers(expected.model))
    assert ended.reason == f"step {len(BATCHES)}: the data ended"


def test_a_stream_without_an_end():
    def forever():
        while True:
            yield BATCHES[0]

    result = fit(data=forever(), steps=5)
    expected = fit(data=[BATCHES[0]], epochs=5)
    np.testing.assert_array_equal(numbers(result.model), numbers(expected.model))


def test_batches_of_differing_sizes():
    batches = [(X[:5], T[:5]), (X[5:8], T[5:8]), (X[8:], T[8:])]
    result = fit(data=batches, steps=7)
    expected, _, losses = inner_steps(optax.sgd(0.05), 3, batches, 7)
    np.testing.assert_allclose(numbers(result.model), expected, rtol=1e-9)
    np.testing.assert_allclose(result.history["loss"], losses, rtol=1e-9)


def test_the_means_over_uneven_chunks_are_exact():
    weights = jnp.arange(11.0)
    arrays = X[:11], T[:11], weights
    ends = ((0, 5), (5, 10), (10, 11))
    batches = [tuple(part[i:j] for part in arrays) for i, j in ends]
    for validation in (arrays, Reiterated(batches), lambda epoch: iter(batches)):
        result = fit(
            data=BATCHES,
            steps=3,
            validation=validation,
            metrics={"largest": largest},
        )
        f = jax.vmap(result.model)(X[:11])
        each = 0.5 * jnp.sum((f - T[:11]) ** 2, axis=1)
        expected = {
            "validation_loss": np.average(each, weights=weights),
            "validation_largest": largest(f, T[:11]),
        }
        for name, value in expected.items():
            column = result.history[name]
            np.testing.assert_allclose(column[-1], value, rtol=1e-12)


def largest(outputs, targets):
    return jnp.mean(jnp.max(outputs, axis=1))


class Reiterated:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_arrays_are_validated_in_chunks():
    result = fit(data=(X, T), batch_size=5, epochs=1, validation=(X, T))
    f = jax.vmap(result.model)(X)
    loss = 0.5 * jnp.mean(jnp.sum((f - T) ** 2, axis=1))
    np.testing.assert_allclose(result.history["validation_loss"][-1], loss, rtol=1e-12)


def test_when_the_validation_data_are_looked_at():
    def looks(**arguments):
        column = fit(validation=(X, T), **arguments).history["validation_loss"]
        return (1 + np.flatnonzero(np.isfinite(column))).tolist()

    assert looks(epochs=3) == [3, 6, 9]
    assert looks(epochs=3, validate_every=2) == [2, 4, 6, 8, 9]
    assert looks(steps=5) == [3, 5]
    assert looks(steps=5, validate_every=100) == [5]


def test_accuracy():
    outputs = jnp.asarray([[0.1, 2.0], [3.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    labels = jnp.asarray([1, 1, 1, 0])
    assert gnlin.losses.accuracy(outputs, labels) == 0.75
    assert gnlin.losses.accuracy(outputs, jax.nn.one_hot(labels, 2)) == 0.75
    result = fit(
        data=(X, LABELS),
        loss=gnlin.SoftmaxCrossEntropy(),
        validation=(X, LABELS),
        metrics={"accuracy": gnlin.losses.accuracy},
        epochs=1,
    )
    likeliest = jnp.argmax(jax.vmap(result.model)(X), axis=1)
    expected = np.mean(np.asarray(likeliest == LABELS))
    assert result.history["validation_accuracy"][-1] == expected


#
# The history
#


def test_the_table(tmp_path):
    result = fit(
        validation=(X, T), metrics={"spread": lambda f, t: jnp.std(f)}, validate_every=4
    )
    history = result.history
    documented = gnlin.History.__doc__
    for name in history:
        known = f"`{name}`" in documented
        assert known or name.startswith("validation_")
    assert history.columns == [
        "step",
        "epoch",
        "loss",
        "gradient_norm",
        "step_norm",
        "damping",
        "num_inner_steps",
        "num_feature_updates",
        "validation_loss",
        "validation_spread",
        "validation_loss_linearised",
        "validation_spread_linearised",
    ]
    assert repr(history).startswith("History(6 steps: step, epoch, loss")
    assert "loss" in history
    assert dict(history)["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert history["step"].dtype == history["epoch"].dtype == int
    assert all(column.shape == (6,) for column in history.values())

    table = history.to_pandas()
    assert list(table.columns) == history.columns
    for name in history:
        np.testing.assert_array_equal(table[name], history[name])
    history.to_csv(tmp_path / "history.csv")
    read = np.genfromtxt(tmp_path / "history.csv", delimiter=",", names=True)
    assert list(read.dtype.names) == history.columns
    for name in history:
        np.testing.assert_array_equal(read[name], history[name])


def test_a_column_that_is_not_there():
    with pytest.raises(
        KeyError, match=r"no column 'accuracy'; it has step, epoch, loss, "
    ):
        fit(steps=1).history["accuracy"]


def test_pandas_is_not_needed(monkeypatch):
    history = fit(steps=1).history
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        history.to_pandas()


#
# Callbacks
#


class Recorder(Callback):
    def __init__(self):
        self.events = []

    def on_start(self, run):
        assert np.isnan(run.row["loss"])
        self.events.append(("start", run.step, run.epoch))

    def on_step(self, run):
        assert run.row["step"] == run.step == run.history["step"][-1]
        with pytest.raises(TypeError):  # only `record` fills a column
            run.row["loss"] = 0.0
        self.events.append(("step", run.step, run.epoch))

    def on_feature_update(self, run):
        self.events.append(("feature update", run.step, run.epoch))

    def on_validation(self, run):
        assert np.isfinite(run.row["validation_loss"])
        self.events.append(("validation", run.step, run.epoch))

    def on_epoch(self, run):
        self.events.append(("epoch", run.step, run.epoch))

    def on_checkpoint(self, run):
        self.events.append(("checkpoint", run.step, run.epoch))

    def on_end(self, run):
        self.events.append(("end", run.step, run.epoch))


def test_the_order_of_events(tmp_path):
    recorder = Recorder()
    fit(
        solver=gnlin.IterativeLinearisation(jnp.asarray(2), 0.05),
        validation=(X, T),
        callbacks=recorder,
        checkpoint=gnlin.Checkpoint(tmp_path, every_steps=2),
    )
    assert recorder.events == [
        ("start", 0, 0),
        ("step", 1, 0),
        ("feature update", 1, 0),
        ("step", 2, 0),
        ("checkpoint", 2, 0),
        ("step", 3, 0),
        ("feature update", 3, 0),
        ("validation", 3, 1),
        ("epoch", 3, 1),
        ("step", 4, 1),
        ("checkpoint", 4, 1),
        ("step", 5, 1),
        ("feature update", 5, 1),
        ("step", 6, 1),
        ("checkpoint", 6, 1),
        ("validation", 6, 2),
        ("epoch", 6, 2),
        ("checkpoint", 6, 2),
        ("end", 6, 2),
    ]


class Models(Callback):
    def __init__(self):
        self.models, self.states = [], []

    def on_step(self, run):
        self.models.append(run.model)
        self.states.append(run.model_state)


def test_the_model_is_that_of_the_step():
    models = Models()
    fit(data=BATCHES, callbacks=models)
    for step, model in enumerate(models.models, 1):
        expected = fit(data=BATCHES, steps=step).model
        np.testing.assert_array_equal(numbers(model), numbers(expected))


class StopAt(Callback):
    def __init__(self, event, step):
        def stop(run):
            if run.step == step:
                run.stop("enough")

        setattr(self, event, stop)


@pytest.mark.parametrize("event", ["on_step", "on_feature_update", "on_validation"])
def test_a_stop_is_at_once(event):
    """The run stops at once, although the next step had already been started."""
    result = fit(
        validation=(X, T), validate_every=4, callbacks=[StopAt(event, 4)], epochs=9
    )
    assert result.result == optx.RESULTS.successful
    assert result.reason == "step 4: enough"
    assert result.stats["num_steps"] == len(result.history["step"]) == 4
    shorter = fit(steps=4)
    np.testing.assert_array_equal(numbers(result.model), numbers(shorter.model))
    assert result.stats["num_feature_updates"] == 2


def test_a_stop_before_the_first_step_and_after_an_epoch():
    result = fit(callbacks=StopAt("on_start", 0))
    assert len(result.history["step"]) == 0
    np.testing.assert_array_equal(numbers(result.model), numbers(network()))
    result = fit(callbacks=StopAt("on_epoch", 3))
    assert (result.stats["num_steps"], result.stats["num_epochs"]) == (3, 1)


class Drift(eqx.Module):
    """A model whose bias grows by 0.1 a step and does not affect the validation loss."""

    bias: jax.Array

    def __call__(self, x):
        return jnp.where(x > 0, self.bias, 0.0)


def drifting(figures, **arguments):
    """A run whose bias counts the steps. The k-th validation loss is `figures[k - 1]`."""

    def validation(epoch):
        return [(jnp.zeros(1), jnp.sqrt(2 * jnp.asarray([0.0, *figures])[epoch])[None])]

    return fit(
        Drift(jnp.asarray(0.0)),
        [(jnp.ones(1), 1e9 * jnp.ones(1))],
        gnlin.IterativeLinearisation(1, 1e-10),
        epochs=len(figures),
        validation=validation,
        **arguments,
    )


@pytest.mark.filterwarnings("ignore:The validation data are not finite")
@pytest.mark.parametrize(
    ("arguments", "figures", "stopped", "best"),
    [
        ({"patience": 2}, [3, 2, 2.5, 2, 1, 1], 4, 2),
        ({"patience": 3}, [3, 2, 2.5, 2, 1, 1], 6, 5),
        ({"patience": 2, "mode": "max"}, [3, 2, 4, 4, 5, 1], 6, 5),
        ({"patience": 2, "mode": "max"}, [3, 2, 2.9, 4, 5, 1], 3, 1),
        ({"patience": 2, "min_change": 0.6}, [3, 2.5, 2.2, 2.1, 1, 1], 6, 5),
        ({"patience": 2, "min_change": 0.9}, [3, 2.5, 2.2, 2.1, 1, 1], 3, 1),
        ({"patience": 2}, [3, np.nan, 2.9, np.nan, np.nan, 1], 5, 3),
    ],
)
def test_an_early_stop(arguments, figures, stopped, best):
    result = drifting(figures, callbacks=EarlyStop(**arguments))
    assert result.stats["num_steps"] == stopped
    last = result.history["validation_loss"][-1]
    np.testing.assert_allclose(last, figures[stopped - 1], rtol=1e-12)
    np.testing.assert_allclose(result.model.bias, 0.1 * (best or stopped), rtol=1e-6)
    if stopped < len(figures):
        assert result.result == optx.RESULTS.successful
        assert "validation_loss has not improved on" in result.reason
        assert result.reason.endswith(f"in {arguments['patience']} validations")
    result = drifting(figures, callbacks=EarlyStop(**arguments, restore_best=False))
    np.testing.assert_allclose(result.model.bias, 0.1 * stopped, rtol=1e-6)


def test_early_stopping_without_finite_losses_is_not_a_success():
    stop = EarlyStop(patience=1)
    with pytest.warns(UserWarning, match="validation_loss has not been finite in 1 val"):
        result = drifting([np.nan, 1, 1], callbacks=stop)
    assert result.result == optx.RESULTS.nonfinite
    assert result.stats["num_steps"] == 1
    assert result.reason.endswith("validation_loss has not been finite in 1 validations")


def test_an_early_stop_hands_back_the_state_of_the_best():
    model, state = eqx.nn.make_with_state(Normalised)(jax.random.key(2))
    models = Models()
    result = fit(
        model,
        BATCHES[:1],
        state=state,
        epochs=3,
        validation=lambda epoch: [(X, T + [0.0, 9.0, 0.0, 9.0][epoch])],
        callbacks=[models, EarlyStop()],
    )
    assert_same(result.state, models.states[1])
    np.testing.assert_array_equal(numbers(result.model), numbers(models.models[1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "every"), [((7,), "step"), ((4, 7), "feature_update"), ((4, 7), "epoch")]
)
def test_an_early_stop_by_a_measure_of_groups(parts, every, tmp_path):
    """Groups of residuals have no validation data. A run in two parts ends as a whole."""
    figures, models = iter([3.0, 1.0, 2.0, 0.9, 2.0, 2.0, 0.5]), Models()
    for steps in parts:
        stop = EarlyStop("error", mode="min", patience=2)
        measure = gnlin.callbacks.Measure({"error": lambda _: next(figures)}, every)
        result = gnlin.fit(
            jnp.ones(3),
            gnlin.Residuals(lambda w, x: w * x - 3.0, X),
            gnlin.DampedGaussNewton(1.0),
            steps=steps,
            callbacks=[stop, models, measure],
            checkpoint=gnlin.Checkpoint(tmp_path, every_steps=1),
            resume=True,
            progress=False,
        )
    assert result.reason == "step 6: error has not improved on 0.9 in 2 measurements"
    np.testing.assert_array_equal(result.model, models.models[3])


@pytest.mark.parametrize("every", ["step", 100])
def test_an_early_stop_without_a_number_to_judge_is_told(every):
    measure = gnlin.callbacks.Measure({"error": lambda _: np.nan}, every)
    words = "'error' is NaN in each row of the history"
    with pytest.warns(UserWarning, match=words) as told:
        result = fit(steps=2, callbacks=[EarlyStop("error"), measure])
    assert told[0].filename.endswith("fit_problems.py")  # which calls `gnlin.fit`
    assert int(result.stats["num_steps"]) == 2


@pytest.mark.usefixtures("unchecked")
def test_an_early_stop_that_is_mistaken():
    with pytest.raises(ValueError, match=r"'validation_f1': the history's .* are st"):
        fit(validation=(X, T), callbacks=EarlyStop("validation_f1", mode="max"))
    with pytest.raises(ValueError, match="`EarlyStop` needs validation data"):
        fit(callbacks=EarlyStop())
    with pytest.raises(ValueError, match="`EarlyStop` needs validation data"):
        fit(callbacks=EarlyStop("loss"))
    with pytest.raises(ValueError, match='`mode` must be "min" or "max"'):
        EarlyStop(mode="best")
    with pytest.raises(ValueError, match="`patience` must be a whole number"):
        EarlyStop(patience=0)
    with pytest.raises(ValueError, match="`min_change` must not be negative"):
        EarlyStop(min_change=-1.0)
    # A guess of the mode could return the worst model, without a word.
    for name in ("validation_mse", "validation_perplexity_linearised", "validation_f1"):
        with pytest.raises(ValueError, match=rf"{name}' does not say .* pass `mode=\"mi"):
            EarlyStop(name)
    assert EarlyStop("validation_mse", mode="min").sign == 1.0
    assert EarlyStop("validation_accuracy").sign == -1.0
    assert EarlyStop("validation_error").sign == 1.0
    assert EarlyStop("validation_loss_linearised").sign == 1.0


def test_a_log():
    written = []
    log = Log(lambda *entry: written.append(entry), every=2)
    # Callbacks after the log write columns, too, in each step or after an epoch.
    first = lambda model: numbers(model)[0]
    each, late = (Measure({f"of_{n}": first}, n) for n in ("step", "epoch"))
    history = fit(validation=(X, T), callbacks=[log, each, late]).history
    of = {(name, step): value for name, value, step in written}
    assert len(of) == len(written)
    for name in set(history) - {"step"}:
        column = history[name]
        is_late = name.startswith("validation_") or name == "of_epoch"
        every = (3, 6) if is_late else (2, 4, 6)
        assert sorted(step for n, step in of if n == name) == list(every)
        assert all(of[name, step] == column[step - 1] for step in every)


@pytest.mark.usefixtures("unchecked")
def test_a_log_that_is_mistaken():
    with pytest.raises(ValueError, match=r"`write` must be .* `add_scalar`\."):
        Log(None)
    with pytest.raises(ValueError, match="`every` must be a whole number"):
        Log(print, every=0)


def test_a_log_to_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("tensorboardX")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        fit(steps=3, callbacks=Log(writer.add_scalar))
    (events,) = tmp_path.iterdir()
    content = events.read_bytes()
    assert b"gradient_norm" in content
    assert b"num_feature_updates" in content


def test_a_bar_with_the_loss_and_the_rate(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    history = fit(steps=6, progress=True, validation=(X, T)).history
    text = capsys.readouterr().err
    assert "6/6" in text
    assert "step/s" in text
    last = text.split("\r")[-1]
    assert f"loss={history['loss'][-1]:.4g}" in last
    assert f"loss_linearised={history['validation_loss_linearised'][-1]:.4g}" in last
    fit(data=BATCHES, epochs=1, progress=True)
    assert "3step [" in capsys.readouterr().err


def test_a_bar_that_goes_on(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fit(steps=4, checkpoint=tmp_path)
    fit(steps=9, checkpoint=tmp_path, resume=True, progress=True)
    text = capsys.readouterr().err
    assert "| 4/9 [" in text.split("\r")[1]
    assert "9/9" in text


def test_a_bar_that_ends_with_why(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    descent = gnlin.IterativeLinearisation(1, 1e3)
    with pytest.warns(UserWarning, match="diverged"):
        result = fit(steps=50, solver=descent, progress=True)
    last = capsys.readouterr().err.split("\r")[-1]
    assert result.reason in last
    assert "loss=" in last


def test_nothing_is_printed_or_called_without(capfd):
    fit(steps=4, progress=False)
    assert capfd.readouterr() == ("", "")
    fit(steps=4, progress=True)  # when there is no terminal
    assert capfd.readouterr() == ("", "")


#
# Runs that fail
#


def assert_stopped(result, step, why, model):
    assert result.reason == f"step {step}: {why}"
    assert result.stats["num_steps"] == len(result.history["loss"]) == step
    np.testing.assert_array_equal(numbers(result.model), numbers(model))
    assert np.all(np.isfinite(numbers(result.model)))


def with_bad_batch(bad, at=4):
    return [bad if k == at else BATCHES[k % 3] for k in range(7)]


@pytest.mark.parametrize(
    "solver",
    [
        gnlin.DampedGaussNewton(0.3),
        gnlin.LevenbergMarquardt(scaling="identity", acceleration=False),
        DESCENT,
    ],
    ids=["damped", "levenberg-marquardt", "descent"],
)
def test_a_batch_that_is_not_finite(solver):
    data = with_bad_batch((X[:4].at[1, 1].set(jnp.nan), T[:4]))
    recorder = Recorder()
    with pytest.warns(UserWarning, match="stopped at step 5: the loss is not finite"):
        result = fit(data=data, solver=solver, epochs=1, callbacks=recorder)
    assert result.result == optx.RESULTS.nonfinite
    before = fit(data=data, solver=solver, steps=4)
    assert_stopped(result, 5, "the loss is not finite", before.model)
    assert np.isnan(result.history["loss"][4])
    assert result.history["step_norm"][4] == 0 or solver is DESCENT
    assert ("step", 5, 0) in recorder.events
    assert recorder.events[-1] == ("end", 5, 0)


def test_a_state_is_finite_too():
    model, state = eqx.nn.make_with_state(Normalised)(jax.random.key(2))
    data = with_bad_batch((X[:4] * jnp.nan, T[:4]), at=1)
    with pytest.warns(UserWarning, match="stopped at step 2"):
        result = fit(model, data, state=state, epochs=1)
    expected = fit(model, data, state=state, steps=1)
    assert_same(result.state, expected.state)


def test_steps_that_grow_beyond_all_bounds():
    solver = gnlin.IterativeLinearisation(3, 1e40)
    with pytest.warns(UserWarning, match=r"stopped at step \d: the loss is not finite"):
        result = fit(data=BATCHES, solver=solver, epochs=100, validation=(X, T))
    assert result.result == optx.RESULTS.nonfinite
    before = fit(data=BATCHES, solver=solver, steps=result.stats["num_steps"] - 1)
    np.testing.assert_array_equal(numbers(result.model), numbers(before.model))
    assert np.all(np.isfinite(numbers(result.model)))
    assert np.isinf(result.history["loss"][-1])


def test_a_step_that_is_not_finite():
    solver = gnlin.IterativeLinearisation(3, 1e308)
    with pytest.warns(UserWarning, match="stopped at step 1: the step is not finite"):
        result = fit(data=BATCHES, solver=solver)
    assert_stopped(result, 1, "the step is not finite", network())


def test_levenberg_marquardt_backs_off():
    """Levenberg-Marquardt recovers where Gauss-Newton does not."""
    solver = gnlin.LevenbergMarquardt(
        scaling="identity", acceleration=False, damping=1e-12
    )
    result = fit(data=(X, T), batch_size=None, solver=solver, steps=8)
    assert result.stats["num_rejected_steps"] > 0
    assert np.all(np.diff(result.history["loss"]) < 0)


def test_labels_outside_the_classes():
    loss = gnlin.SoftmaxCrossEntropy()
    with pytest.raises(ValueError, match="but one is 2; if they count from 1, subtract"):
        fit(data=(X, LABELS + 1), loss=loss)
    labels = LABELS.at[-1].set(2)
    with pytest.raises(ValueError, match="labels must lie between 0 and 1, but one is 2"):
        fit(data=(X, labels), loss=loss)
    with pytest.raises(ValueError, match="labels must lie between 0 and 1, but one is 2"):
        fit(data=(X, LABELS), loss=loss, validation=(X, labels))
    batches = [(X[i : i + 4], labels[i : i + 4]) for i in (0, 4, 8)]
    with pytest.raises(ValueError, match="labels must lie between 0 and 1, but one is 2"):
        fit(data=batches, loss=loss)
    with pytest.raises(ValueError, match="labels must lie between 0 and 1, but one is 2"):
        fit(data=(X, LABELS), loss=loss, validation=batches)
    # Errors in batches from elsewhere are found when they arrive.
    with pytest.warns(UserWarning, match="step 3: the loss is not finite.* but one is 2"):
        result = fit(data=lambda epoch: batches, loss=loss, steps=3)
    before = fit(data=batches[:2], loss=loss, steps=2)
    assert_stopped(result, 3, "the loss is not finite", before.model)


def test_the_example_of_a_batch_from_elsewhere_that_is_not_finite():
    bad = X[4:8].at[1, 1].set(jnp.nan), T[4:8]
    with pytest.warns(UserWarning, match="In its batch: The input of example 1 is not"):
        fit(data=lambda epoch: [BATCHES[0], bad, *BATCHES], steps=3)


def test_integer_labels_that_are_one_hot():
    with pytest.raises(ValueError, match=r"one-hot labels pass `jnp.argmax\(targets, ax"):
        fit(
            data=(X, jnp.stack([LABELS, 1 - LABELS], 1)), loss=gnlin.SoftmaxCrossEntropy()
        )


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (lambda outputs, targets: outputs - targets, "returns an array of the shape"),
        (lambda outputs, targets: (0.0, 1.0), "but returns a tuple"),
        (lambda outputs, targets: float(outputs[0, 0]), "use `jax.numpy`"),
        (lambda outputs, targets: np.mean(np.asarray(outputs)), "use `jax.numpy`"),
        (lambda outputs, targets: jnp.mean(outputs[targets > 0]), "use `jax.numpy`"),
    ],
)
def test_metrics_that_are_not_means_over_examples(metric, said):
    with pytest.raises(ValueError, match=f"The metric 'own' .*{said}"):
        fit(validation=(X, T), metrics={"own": metric})


@pytest.mark.slow
def test_a_schedule_that_leaves_its_range():
    solver = gnlin.DampedGaussNewton(lambda step: 1.0 - 1.5 * step)
    said = "`gnlin.fit` stopped at step 2: `damping` is -0.5, and must be"
    with pytest.warns(UserWarning, match=said):
        result = fit(solver=solver, steps=3)
    assert result.result == optx.RESULTS.nonfinite
    solver = gnlin.TruncatedGaussNewton(lambda step: 0.5 - 0.6 * step)
    said = "`gnlin.solve` stopped at step 2.*`tolerance` is -0.1, and must be"
    with pytest.warns(UserWarning, match=said):
        gnlin.solve(network(), (X, T), solver)


def test_a_failure_is_not_explained_away():
    """A callback that asks for a stop does not turn a failure into a success."""
    data = with_bad_batch((X[:4] * jnp.nan, T[:4]))
    stop = StopAt("on_step", 5)
    with pytest.warns(UserWarning, match="stopped at step 5"):
        result = fit(data=data, callbacks=stop)
    assert result.result == optx.RESULTS.nonfinite
    assert result.reason == "step 5: the loss is not finite"


class InterruptAt(Callback):
    def __init__(self, event, step, error=KeyboardInterrupt):
        def interrupt(run):
            if run.step == step:
                raise error

        setattr(self, event, interrupt)


@pytest.mark.parametrize("event", ["on_step", "on_validation", "on_epoch"])
def test_an_interrupt(event):
    step = 4 if event == "on_step" else 3
    recorder = Recorder()
    callbacks = [InterruptAt(event, step), recorder]
    with pytest.warns(UserWarning, match=f"interrupted after step {step}"):
        result = fit(validation=(X, T), callbacks=callbacks)
    assert result.reason == f"step {step}: interrupted"
    assert result.stats["num_steps"] == len(result.history["step"]) == step
    expected = fit(steps=step)
    np.testing.assert_array_equal(numbers(result.model), numbers(expected.model))
    assert recorder.events[-1] == ("end", step, 1)


class OnPurpose(Exception):
    pass


def test_an_error_is_raised_after_the_end():
    recorder = Recorder()
    with pytest.raises(OnPurpose):
        fit(callbacks=[InterruptAt("on_step", 4, OnPurpose), recorder])
    assert recorder.events[-1] == ("end", 4, 1)


#
# Compilations
#


COMPILED = []


def _count(name, *_, **__):
    if name == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(name)


jax.monitoring.register_event_duration_secs_listener(_count)


def test_other_numbers_do_not_compile_again():
    def run(seed):
        solver = gnlin.IterativeLinearisation(5, jnp.asarray(0.01 * (1 + seed)), 0.7)
        return fit(
            network(seed, width=5),
            (X + seed, T * seed),
            solver,
            key=jax.random.key(seed),
            validation=(X * seed, T),
        )

    run(0)
    for seed in (1, 2):  # making the data compiles programs too
        network(seed, width=5), X + seed, T * seed, X * seed
    before = len(COMPILED)
    assert before > 0
    run(1)
    run(2)
    assert len(COMPILED) == before


@pytest.mark.usefixtures("unchecked")
def test_the_old_kind_of_key():
    result = fit(key=jax.random.PRNGKey(3))
    assert np.all(np.isfinite(result.history["loss"]))


#
# Errors
#


class Other(eqx.Module):
    weight: jax.Array


WITH_VALIDATION = {"validation": (X, T)}
MISTAKES = {
    "solver": ({"solver": optax.sgd}, "`solver` must be one of gnlin's"),
    "optimistix": ({"solver": optx.BFGS(1e-6, 1e-6)}, "`solver` must be one of gnlin's"),
    "loss": ({"loss": "mse"}, "`loss` must be one of gnlin's"),
    "batch size 0": ({"batch_size": 0}, "`batch_size` must be a whole number"),
    "batch size 2.5": ({"batch_size": 2.5}, "`batch_size` must be a whole number"),
    "batch size 13": ({"batch_size": 13}, "13, more than the number of examples, 12"),
    "epochs 0": ({"epochs": 0}, "`epochs` must be a whole number"),
    "steps True": ({"steps": True}, "`steps` must be a whole number"),
    "steps -1": ({"steps": -1}, "`steps` must be a whole number"),
    "neither": ({"epochs": None}, "one of `epochs` and `steps`"),
    "both": ({"epochs": 1, "steps": 1}, "one of `epochs` and `steps`"),
    "validate every 0": (
        {**WITH_VALIDATION, "validate_every": 0},
        "`validate_every` must be a whole number",
    ),
    "validate every": ({"validate_every": 5}, "pass `validation`"),
    "metrics": ({"metrics": {"accuracy": gnlin.losses.accuracy}}, "pass `validation`"),
    "metric": ({**WITH_VALIDATION, "metrics": {"f1": "f1"}}, "must be functions"),
    "metric loss": (
        {**WITH_VALIDATION, "metrics": {"loss": gnlin.losses.accuracy}},
        'other than "loss"',
    ),
    "augment": ({"augment": 3}, "`augment` must be a function"),
    "augment without a key": (
        {"augment": lambda x: x},
        r"is called as `augment\(inputs, key\)`, but its arguments are \(x\)",
    ),
    "batches without an epoch": (
        {"data": lambda: [(X, X)], "batch_size": None},
        r"is called as `data\(epoch\)`, but its arguments are \(\)",
    ),
    "callbacks": ({"callbacks": [print]}, "`callbacks` must be"),
    "callback class": ({"callbacks": gnlin.callbacks.Progress}, "must be instances"),
    "key": ({"key": 0}, "`key` must be one key"),
    "keys": ({"key": jax.random.split(jax.random.key(0))}, "`key` must be one key"),
    "state of none": ({"state": 3}, "has no state: leave `state` out"),
    "resume": ({"resume": True}, "needs `checkpoint`"),
    "data": ({"data": 3, "batch_size": None}, "`data` must be a tuple of arrays"),
    "array": ({"data": X, "batch_size": None}, "must be a tuple of arrays"),
    "array of NumPy": ({"data": np.asarray(X)}, "must be a tuple of arrays"),
    "batches by name": (
        {"data": [{"image": X, "label": T}], "batch_size": None},
        "or an iterable of such batches, but it holds a dictionary of 'image', 'label': "
        r"pass `\[\(b\['image'\], b\['label'\]\) for b in data\]`",
    ),
    "a tuple of batches": (
        {"data": ((X, T), (X, T), (X, T)), "batch_size": None},
        r"but a tuple of tuples was given: put batches into a list, `list\(data\)`",
    ),
    "batch of four": ({"data": [(X, T, T, T)], "batch_size": None}, "must be a pair"),
    "four arrays": ({"data": (X, T, T, T)}, "must be a pair"),
    "iterable with a batch size": ({"data": BATCHES, "batch_size": 4}, "leave `batch_s"),
    "empty iterable": ({"data": [], "batch_size": None}, "holds no batch"),
    "empty arrays": ({"data": (X[:0], T[:0]), "batch_size": None}, "no data"),
    "empty batch": ({"data": [(X[:0], T[:0])], "batch_size": None}, "no data"),
    "lengths": ({"data": (X, T[1:])}, "same number of examples"),
    "shape": ({"data": (X, T[:, 0])}, "shape of the model's outputs"),
    "shape of a first batch": (
        {"data": [(X, T[:, :1])], "batch_size": None},
        "shape of the model's outputs",
    ),
    "shape of a later batch": (
        {"data": [BATCHES[0], (X[:5], T[:5, :1])], "batch_size": None},
        "shape of the model's outputs",
    ),
    "weights": ({"data": (X, T, -jnp.ones(12))}, "weights must be finite"),
    "complex": ({"data": (X, T.astype(complex))}, "must be real"),
    "validation": (
        {"validation": 3},
        "`validation` must be a tuple .* but a int",
    ),
    "validation, shape": ({"validation": (X, T[:, 0])}, "shape of the model's outputs"),
    "validation, empty": ({"validation": []}, "holds no batch"),
    "validation, no examples": (
        {"validation": (X[:0], T[:0])},
        "`validation` holds 0 examples",
    ),
    "validation, iterator": ({"validation": iter(BATCHES)}, "can be iterated only once"),
    "nothing to train": ({"filter_spec": lambda leaf: False}, "no trainable array"),
    "not callable": ({"model": Other(jnp.ones(3))}, "must be callable"),
    "curvature batch of fewer": ({"curvature_batch_size": 4}, "more than `batch_size`"),
    "curvature batch of too many": ({"curvature_batch_size": 13}, "at most the number"),
    "curvature batch of all": (
        {"batch_size": None, "curvature_batch_size": 12},
        "needs a `batch_size`",
    ),
    "curvature batch of an iterable": (
        {"data": BATCHES, "batch_size": None, "curvature_batch_size": 12},
        "the data as arrays",
    ),
    "curvature batch of descent": (
        {"curvature_batch_size": 8},
        "leave `curvature_batch_size` out",
    ),
    "curvature batch of an optimiser": (
        {"curvature_batch_size": 8, "solver": optax.sgd(0.1)},
        "An optimiser of optax uses no curvature",
    ),
    "curvature batch of the loss itself": (
        {
            "curvature_batch_size": 8,
            "solver": gnlin.DampedGaussNewton(1.0, form="prox-linear"),
        },
        'form="quadratic"',
    ),
    "method": (
        {"solver": gnlin.IterativeLinearisation(3, 0.1, method="eigh")},
        '`method` must be "auto" or "matrix-free"',
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("changes", "words"), MISTAKES.values(), ids=MISTAKES)
def test_error_messages(changes, words):
    with pytest.raises(ValueError, match=words) as caught:
        fit(**changes)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message


def test_no_warning_without_a_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(validation=(X, T))


def test_the_last_batch_is_all_that_is_asked_for():
    def endless(epoch):
        yield from BATCHES[:2]
        raise AssertionError("One batch too many was asked for.")

    assert fit(data=endless, steps=2).stats["num_steps"] == 2


def test_a_run_may_be_stopped_when_it_is_saved(tmp_path):
    class Stop(Callback):
        def on_checkpoint(self, run):
            run.stop("enough")

    saving = gnlin.Checkpoint(tmp_path, every_steps=2)
    result = fit(checkpoint=saving, callbacks=Stop())
    assert result.stats["num_steps"] == 2
    assert result.reason == "step 2: enough"


def test_an_iterator_that_is_handed_out_once_is_used_from_its_first_batch():
    batches = iter(BATCHES)
    result = fit(data=lambda epoch: batches, epochs=1)
    assert result.stats["num_steps"] == len(BATCHES)


def test_batches_of_weight_zero_take_no_step():
    weights = np.zeros(12)
    weights[5] = 1
    result = fit(
        data=(X, T, weights),
        solver=gnlin.DampedGaussNewton(1.0),
        loss=gnlin.SquaredError(reduction="mean"),
        epochs=1,
    )
    assert result.stats["num_steps"] == 3
    np.testing.assert_array_equal(np.sort(result.history["step_norm"] > 0), [0, 0, 1])


class Scaled(eqx.Module):
    weight: jax.Array
    by: int | float

    def __call__(self, x):
        # A float times integers is promoted, and so makes a second program.
        with jax.numpy_dtype_promotion("standard"):
            return (x * self.by).astype(float) @ self.weight


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*it diverged")
def test_a_whole_number_and_a_float_are_two_programs():
    x, t = np.full((4, 3), 100, np.uint8), np.ones((4, 2))
    losses = [
        fit(Scaled(jnp.ones((3, 2)), by), (x, t), steps=1, batch_size=None).history
        for by in (3, 3.0)
    ]
    assert losses[0]["loss"] != losses[1]["loss"]  # the first of which overflows


@pytest.mark.slow
@pytest.mark.parametrize("by_optax", [False, True])
def test_redefined_functions_of_a_model_are_not_compiled_again(by_optax):
    mlp = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    solver = optax.sgd(0.1) if by_optax else DESCENT

    def trained(by=1.0):
        anew = eqx.tree_at(lambda m: m.activation, mlp, lambda x: jnp.tanh(by * x))
        pair = (lambda m, x: m(x)), anew
        data = X, T
        every = {"batch_size": 4, "epochs": 2, "validation": data}
        return gnlin.fit(pair, data, solver, **every).history

    first = trained()
    assert num_compiled(lambda: trained()) == 0
    np.testing.assert_array_equal(trained().loss, first.loss)
    assert not np.array_equal(trained(2.0).loss, first.loss)
    np.testing.assert_array_equal(trained().validation_loss, first.validation_loss)


SCALE = 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch_size",
    [None, 4, "drawn"],
)
def test_redefined_groups_are_not_compiled_again(batch_size, monkeypatch):
    is_drawn = batch_size == "drawn"

    def trained(to=3.0):
        points = X[:, 0]
        if is_drawn:
            points = lambda key: to + SCALE * jax.random.uniform(key, 12)
        groups = {
            "inside": gnlin.Residuals(lambda m, x: m["a"] * x - SCALE * to, points),
            "apart": gnlin.Residuals(
                lambda m, x: m["b"], X, select=lambda x: {"a": jnp.zeros(0, int), "b": 1}
            ),
            "penalty": gnlin.Residuals(lambda m, _: SCALE * (m["a"] - to)),
        }
        model, size = (
            {"a": jnp.ones(2), "b": jnp.ones(2)},
            None if is_drawn else batch_size,
        )
        return gnlin.fit(model, groups, DESCENT, batch_size=size, steps=3).history.loss

    first, other = trained(), []
    assert num_compiled(lambda: trained()) == 0
    np.testing.assert_array_equal(trained(), first)
    assert not np.array_equal(trained(2.0), first)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2.0)
    assert num_compiled(lambda: other.append(trained())) > 0
    assert not np.array_equal(other[0], first)


@pytest.mark.slow
def test_a_key_of_another_kind():
    """The step is compiled for keys of the kind that was passed."""
    key, keys = jax.random.key(0, impl="rbg"), []

    class Noisy(eqx.Module):
        weight: jax.Array

        def __call__(self, x, key):
            return self.weight * jax.random.normal(key, (2,))

    def points(key):
        keys.append(str(key.dtype))
        return jax.random.uniform(key, 12)

    fit(Noisy(jnp.ones(2)), (X, T), steps=2, key=key)
    groups = gnlin.Residuals(lambda w, x: w * x - 3.0, points)
    gnlin.fit(jnp.ones(2), groups, DESCENT, steps=2, key=key)
    assert "key<rbg>" in keys


def test_no_step_after_the_first_is_compiled():
    """This holds for every dtype of the initial state."""
    solvers = [
        gnlin.DampedGaussNewton(0.1),
        gnlin.TruncatedGaussNewton(gnlin.methods.EisenstatWalker()),
        gnlin.LevenbergMarquardt(),
        gnlin.IterativeLinearisation(2, optimiser=optax.adam(1e-2)),
    ]
    traced = []

    class Count(gnlin.callbacks.Callback):
        def on_step(self, step):
            after_each.append(len(traced))

    for solver in solvers:
        after_each = []

        def f(parameters, x):
            traced.append(1)
            return parameters @ x

        fit((f, jnp.ones((2, 3))), (X, T), solver, steps=3, callbacks=Count())
        assert len(set(after_each)) == 1, solver


@pytest.mark.parametrize("batch_size", [4, None])
def test_a_step_is_compiled_once(batch_size, caplog):
    # No other test has this program, which would be shared.
    model = (lambda parameters, x: 1.0625 * (parameters @ x)), jnp.ones((2, 3))
    with jax.log_compiles():
        fit(model, (X, T), gnlin.LevenbergMarquardt(), batch_size=batch_size, steps=3)
    compiled = [r.message for r in caplog.records if "Compiling jit(call)" in r.message]
    assert len(compiled) == 1


def test_validation_data_that_are_not_finite_are_named():
    wrong = X.at[3, 1].set(jnp.nan)
    with pytest.warns(
        UserWarning, match="The validation data are not finite. The input of example 3"
    ):
        solution = fit(validation=(wrong, T))
    assert np.isnan(solution.history["validation_loss"][-1])


def test_early_stop_by_a_measure_beside_validation_data():
    """The measure is taken after the validation."""
    measure = Measure({"size": lambda now: jnp.linalg.norm(now.layers[0].weight)})
    stop = EarlyStop("size", patience=2, mode="max")
    solution = fit(epochs=4, validation=(X, T), callbacks=[measure, stop], batch_size=4)
    assert solution.result in (
        optx.RESULTS.successful,
        optx.RESULTS.nonlinear_max_steps_reached,
    )
    assert "finite" not in solution.reason


def test_early_stop_by_a_measure_whose_name_is_like_that_of_validation():
    measure = Measure({"validity": lambda now: jnp.linalg.norm(now.layers[0].weight)})
    solution = fit(callbacks=[measure, EarlyStop("validity", mode="max")])
    assert "validity" in solution.history


@pytest.mark.slow
def test_a_table_with_a_comma_in_a_groups_name(tmp_path):
    group = gnlin.Residuals(lambda p, _: p - 1.0)
    solution = gnlin.solve(jnp.zeros(2), {"a, b": group, 'c"': group}, max_steps=2)
    solution.history.to_csv(tmp_path / "table.csv")
    with open(tmp_path / "table.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert {"loss/a, b", 'loss/c"'} < set(header)
    assert {len(row) for row in rows} == {len(header)}
