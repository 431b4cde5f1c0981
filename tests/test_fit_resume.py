"""An interrupted run of `gnlin.fit` that is resumed equals the uninterrupted run."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest
from fit_problems import BATCHES, Dropped, fit, network, Normalised, numbers, T, X
from problems import each_once, each_pair

import gnlin
from gnlin import CheckpointError
from gnlin._fit import _checkpoint, _saver
from gnlin.callbacks import Callback, EarlyStop


ROOT = Path(__file__).resolve().parents[1]
DAMPED = gnlin.DampedGaussNewton(0.3)


def assert_same_run(left, right):
    """Check that two runs are equal to the bit."""
    assert left.history.columns == right.history.columns
    for name in left.history:
        assert left.history[name].tobytes() == right.history[name].tobytes(), name
    assert left.stats == right.stats
    assert left.result == right.result
    assert left.reason == right.reason
    parts = [
        eqx.filter((run.model, run.state, run.linearisation_point), eqx.is_array)
        for run in (left, right)
    ]
    for x, y in zip(*map(jax.tree.leaves, parts), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def checkpoint(step):
    return f"step-{step:012d}.npz"


#
# Killed
#


KINDS = [
    "momentum",
    "adam",
    "levenberg_marquardt",
    "full_batch",
    "normalised",
    "iterable",
]


def start(folder):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "OPENBLAS_NUM_THREADS": "1",  # else LAPACK waits for other runs
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.Popen(
        [sys.executable, ROOT / "tests" / "fit_killed.py", folder],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX")
def test_killed_at_any_moment(tmp_path):
    """Kill every kind of run after some step, some kinds twice."""
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    whole.mkdir()
    pieces.mkdir()
    draw = random.Random(0)
    kills = {name: [draw.randrange(15, 140)] for name in KINDS}
    for name in draw.sample(KINDS, 2):
        kills[name].append(draw.randrange(140, 149))
    uninterrupted = start(whole)
    starts = []
    while True:
        with start(pieces) as child:
            for line in child.stdout:
                name, event, step = line.split()
                if event == "starts":
                    starts.append((name, int(step)))
                elif kills[name] and int(step) >= kills[name][0]:
                    del kills[name][0]
                    time.sleep(draw.uniform(0, 0.01))
                    child.kill()
                    break
        if child.returncode != -signal.SIGKILL:
            break
    assert child.returncode == 0
    uninterrupted.communicate()
    assert uninterrupted.returncode == 0

    for name in KINDS:
        with (
            np.load(whole / f"{name}.npz") as left,
            np.load(pieces / f"{name}.npz") as right,
        ):
            assert left.files == right.files
            for part in left.files:
                assert left[part].tobytes() == right[part].tobytes(), (name, part)
        assert len(list((pieces / name).iterdir())) == 2
    assert not any(kills.values())
    # Each run did resume from a checkpoint.
    assert {name for name, step in starts if step > 0} == set(KINDS)


ON_DEVICES = """
import os, sys
number, folder, steps = sys.argv[1:]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={number}"
import equinox as eqx, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import gnlin

x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
on_all = NamedSharding(Mesh(np.array(jax.devices()), "batch"), PartitionSpec("batch"))
data = jax.device_put((x, x[:, :2] ** 2), on_all)
model = eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(0))
saving = {} if folder == "none" else {"checkpoint": folder, "resume": True}
result = gnlin.fit(
    model, data, gnlin.DampedGaussNewton(0.3), batch_size=8, steps=int(steps), **saving
)
print(*result.history.loss)
"""


@pytest.mark.slow
def test_resumed_on_another_number_of_devices(tmp_path):
    def losses(*arguments):
        child = subprocess.run(
            [sys.executable, "-c", ON_DEVICES, *map(str, arguments)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        return np.array(child.stdout.split(), float)

    losses(4, tmp_path, 3)
    resumed = losses(2, tmp_path, 6)
    assert len(resumed) == 6
    np.testing.assert_allclose(resumed, losses(2, "none", 6), rtol=1e-4)


#
# Stopped and resumed
#


def test_a_finished_run_is_not_trained_again(tmp_path):
    arguments = {"validation": (X, T), "checkpoint": tmp_path}
    first = fit(**arguments)
    before = names(tmp_path)
    steps = Steps()
    again = fit(**arguments, resume=True, callbacks=steps)
    assert_same_run(again, first)
    assert not steps.steps
    assert names(tmp_path) == before == [checkpoint(0), checkpoint(6)]
    with pytest.raises(CheckpointError, match="after 6 steps, more than this run makes"):
        fit(**{**arguments, "steps": 2}, resume=True)


class Steps(Callback):
    def __init__(self):
        self.steps, self.began = [], None

    def on_start(self, run):
        self.began = run.step, run.epoch, len(run.history["step"]), numbers(run.model)

    def on_step(self, run):
        self.steps.append(run.step)


_NORMALISED, _STATE = eqx.nn.make_with_state(Normalised)(jax.random.key(2))
ADAM = optax.adam(0.02)
RUNS = {
    "momentum, metrics": {
        "solver": gnlin.IterativeLinearisation(4, 0.02, 0.9),
        "validation": (X, T),
        "metrics": {"spread": lambda f, t: jnp.std(f)},
        "validate_every": 4,
    },
    "adam": {
        "solver": gnlin.IterativeLinearisation(4, optimiser=ADAM, restart=False),
        "validation": (X, T),
        "callbacks": lambda: EarlyStop(patience=100),
    },
    "list of batches": {"data": BATCHES, "validation": BATCHES},
    "levenberg-marquardt": {
        "data": BATCHES,
        "solver": gnlin.LevenbergMarquardt(scaling="identity", acceleration=False),
    },
    "full batch": {"batch_size": None, "solver": DAMPED, "validation": (X, T)},
    "batch normalisation": {"model": _NORMALISED, "state": _STATE},
    "dropout": {"model": Dropped(jax.random.key(0)), "validation": (X, T)},
}
SLOW = "levenberg-marquardt", "full batch"


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        pytest.param(name, cut, marks=pytest.mark.slow if name in SLOW else ())
        for name, cut in each_once(list(RUNS), [4, 6])
    ],
)
def test_more_steps_than_before(name, cut, tmp_path):
    def run(**changes):
        arguments = {**RUNS[name], **changes}
        if "callbacks" in arguments:
            arguments["callbacks"] = arguments["callbacks"]()
        return fit(**arguments, key=jax.random.key(8))

    saving = {"checkpoint": gnlin.Checkpoint(tmp_path, every_steps=3)}
    run(steps=cut, **saving)
    result = run(steps=9, **saving, resume=True)
    assert_same_run(result, run(steps=9))


def test_a_resumed_run_starts_where_the_other_was(tmp_path):
    model = fit(steps=4, checkpoint=tmp_path).model
    steps = Steps()
    fit(steps=6, checkpoint=tmp_path, resume=True, callbacks=steps)
    assert steps.began[:3] == (4, 1, 4)
    np.testing.assert_array_equal(steps.began[3], numbers(model))
    assert steps.steps == [5, 6]


def test_another_version_of_jax_is_told(tmp_path, monkeypatch):
    whole = fit(steps=9)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "__version__", "0.0.1")
        fit(checkpoint=tmp_path, steps=6)
        changed = tmp_path / "changed"
        fit(checkpoint=changed, steps=6)
    with pytest.warns(UserWarning, match=r"was written with jax 0\.0\.1, and here it is"):
        resumed = fit(checkpoint=tmp_path, resume=True, steps=9)
    assert eqx.tree_equal(whole.model, resumed.model)
    assert "its loss is" in refused(changed, 6, loss=gnlin.losses.Huber(1.0))


def test_verbose_is_not_part_of_the_run(tmp_path):
    told = []
    solver = gnlin.IterativeLinearisation(4, 0.02)
    talkative = gnlin.IterativeLinearisation(
        4, 0.02, verbose=lambda **said: told.append(said)
    )
    fit(solver=solver, steps=4, checkpoint=tmp_path)
    fit(solver=talkative, steps=6, checkpoint=tmp_path, resume=True)
    assert told


def test_nothing_to_resume(tmp_path):
    assert_same_run(fit(checkpoint=tmp_path / "new", resume=True), fit())


class Ended(Callback):
    times = 0

    def on_end(self, run):
        self.times += 1


def test_early_stopping_resumes(tmp_path):
    """The count of validations without an improvement continues."""
    losses = [5.0, 4.0, 6.0, 6.0, 6.0, 1.0, 1.0]

    def run(**arguments):
        def validation(epoch):
            return [(X[:1], T[:1] + losses[epoch])]

        return fit(
            data=BATCHES,
            solver=gnlin.IterativeLinearisation(3, 1e-9),
            validation=validation,
            callbacks=EarlyStop(patience=3),
            **arguments,
        )

    whole = run(epochs=6)
    assert whole.stats["num_steps"] == 12
    for epochs in (1, 3, 4):
        folder = tmp_path / str(epochs)
        run(epochs=epochs, checkpoint=folder)
        assert_same_run(run(epochs=6, checkpoint=folder, resume=True), whole)
        # A run that has stopped is not continued.
        assert_same_run(run(epochs=7, checkpoint=folder, resume=True), whole)
    patient = EarlyStop(patience=5)
    message = r"belongs to another run: .*patience=3.*, and here it has .*patience=5"
    ended = Ended()
    with pytest.raises(gnlin.CheckpointError, match=message):
        fit(
            data=BATCHES,
            solver=gnlin.IterativeLinearisation(3, 1e-9),
            epochs=6,
            validation=BATCHES,
            callbacks=[patient, ended],
            checkpoint=folder,
            resume=True,
        )
    assert ended.times == 1


def test_a_run_that_failed_stays_as_it_is(tmp_path):
    data = [*BATCHES, (X[:4] * jnp.nan, T[:4])]
    with pytest.warns(UserWarning, match="stopped at step 4"):
        first = fit(data=data, checkpoint=tmp_path)
    assert first.result == optx.RESULTS.nonfinite
    with pytest.warns(UserWarning, match="stopped at step 4: .* is not finite"):
        again = fit(data=data, checkpoint=tmp_path, resume=True)
    assert_same_run(again, first)


class Keyed(eqx.Module):
    weight: jax.Array
    key: eqx.nn.StateIndex

    def __init__(self):
        self.weight = jnp.ones(2)
        self.key = eqx.nn.StateIndex(jax.random.key(5))

    def __call__(self, x, state):
        key, now = jax.random.split(state.get(self.key))
        noise = jax.random.normal(now, (2,))
        return self.weight * x[:2] + noise, state.set(self.key, key)


def test_keys_as_state(tmp_path):
    model, state = eqx.nn.make_with_state(Keyed)()
    arguments = {"model": model, "state": state, "data": BATCHES}
    fit(**arguments, steps=2, checkpoint=tmp_path)
    resumed = fit(**arguments, steps=5, checkpoint=tmp_path, resume=True)
    assert_same_run(resumed, fit(**arguments, steps=5))


#
# Interrupted by the user or by an error
#


class OnPurpose(Exception):
    pass


class Raise(Callback):
    def __init__(self, event, step, error):
        def interrupt(run):
            if run.step == step:
                raise error

        setattr(self, event, interrupt)


def improving_twice(epoch):
    return [(X, T + [4.0, 3.0, 5.0, 2.0, 5.0, 5.0, 5.0, 1.0][epoch])]


@pytest.mark.parametrize(
    ("event", "broken_by", "every"),
    each_pair(
        ["on_step", "on_feature_update", "validation", "on_validation", "on_epoch"],
        [(0, KeyboardInterrupt), (1, OnPurpose)],
        [None, 2],
    ),
)
def test_an_interrupt_during_callbacks(event, broken_by, every, tmp_path):
    """The checkpoint excludes a step that only some of the callbacks have seen."""
    place, error = broken_by

    def run(broken, **arguments):
        callbacks, validation = [EarlyStop(patience=4)], improving_twice
        if broken and event == "validation":

            def validation(epoch):
                if epoch == 2:
                    raise error
                return improving_twice(epoch)

        elif broken:
            step = 4 if event == "on_feature_update" else 6
            callbacks.insert(place, Raise(event, step, error))
        return fit(
            data=BATCHES,
            epochs=6,
            solver=gnlin.IterativeLinearisation(3, 1e-9),
            validation=validation,
            validate_every=every,
            callbacks=callbacks,
            **arguments,
        )

    warned = pytest.warns(UserWarning, match="interrupted after step")
    with warned if error is KeyboardInterrupt else pytest.raises(error):
        run(True, checkpoint=tmp_path)
    assert len(names(tmp_path)) == 2
    result = run(False, checkpoint=tmp_path, resume=True)
    assert_same_run(result, run(False))


#
# Which checkpoints are written, and when
#


def test_checkpoints_by_steps_and_the_latest_ones_are_kept(tmp_path):
    fit(steps=8, checkpoint=gnlin.Checkpoint(tmp_path, every_steps=3, keep=2))
    assert names(tmp_path) == [checkpoint(6), checkpoint(8)]


def test_checkpoints_by_seconds(tmp_path, monkeypatch):
    now = [0.0]

    class Clock(Callback):
        def on_step(self, run):
            now[0] += 1.0

    monkeypatch.setattr(_saver, "time", SimpleNamespace(monotonic=lambda: now[0]))
    saving = gnlin.Checkpoint(tmp_path, every_seconds=2.5, keep=10)
    fit(steps=8, checkpoint=saving, callbacks=Clock())
    assert names(tmp_path) == [checkpoint(step) for step in (0, 3, 6, 8)]


def test_a_folder_by_its_name(tmp_path):
    fit(checkpoint=str(tmp_path / "runs" / "first"))
    assert names(tmp_path / "runs" / "first") == [checkpoint(0), checkpoint(6)]


def test_checkpoints_change_nothing(tmp_path):
    saving = gnlin.Checkpoint(tmp_path, every_steps=1)
    assert_same_run(fit(checkpoint=saving), fit())


#
# Errors
#


def refused(folder, step, **changes):
    """Return the message of the error."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    steps = Steps()
    arguments = {"callbacks": steps, "checkpoint": folder, "resume": True, **changes}
    with pytest.raises(CheckpointError) as caught:
        fit(**arguments)
    assert not steps.steps
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert str(folder) in message
    assert checkpoint(step) in message
    return message


OTHERS = {
    "batch size": ({"batch_size": 6}, "its batch_size is 4, and here it is 6"),
    "full batch": (
        {"batch_size": None, "solver": DAMPED},
        "its solver is IterativeLinearisation, and here it is DampedGaussNewton",
    ),
    "key": ({"key": jax.random.key(1)}, "its key is another one;"),
    "loss": (
        {"loss": gnlin.losses.Huber(1.0)},
        "its loss is SquaredError, and here it is Huber",
    ),
    "width": (
        {"model": network(width=5)},
        "its model.layers[0].weight is float64[3, 3], and here it is float64[5, 3];",
    ),
    "an optimiser itself": (
        {"solver": ADAM},
        "its solver is IterativeLinearisation, and here it is an optimiser of optax;",
    ),
    "optimiser": (
        {"solver": gnlin.IterativeLinearisation(3, optimiser=ADAM)},
        "its solver's learning_rate is 0.05, and here it is None",
    ),
    "examples": (
        {"data": (X[:8], T[:8])},
        "its data set is arrays with shapes ((12, 3), (12, 2), None), and here it is ",
    ),
    "other examples": (
        {"data": (X, T + 1)},
        "its data set has the same shape, but other numbers;",
    ),
    "hyperparameter": (
        {"solver": gnlin.IterativeLinearisation(3, 0.07)},
        "its solver's learning_rate is 0.05, and here it is 0.07",
    ),
    "momentum": (
        {"solver": gnlin.IterativeLinearisation(3, 0.05, 0.9)},
        "its solver's momentum is 0.0, and here it is 0.9",
    ),
    "augmentation": (
        {"augment": lambda x, key: x + 1e-3},
        "its augment is None, and here it is",
    ),
    "batches": ({"data": BATCHES, "batch_size": None}, "belongs to another run: its "),
    "metrics": (
        {"validation": (X, T), "metrics": {"spread": lambda f, t: jnp.std(f)}},
        "run: its history lacks validation_loss, validation_spread, "
        "validation_loss_linearised, validation_spread_linearised; pass the",
    ),
    "early stop": (
        {"validation": (X, T), "callbacks": EarlyStop()},
        "its history lacks validation_loss",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_is_refused(name, tmp_path):
    changes, words = OTHERS[name]
    fit(checkpoint=tmp_path)
    message = refused(tmp_path, 6, **changes)
    assert "belongs to another run" in message
    assert words in message


def test_a_run_with_more_columns_is_refused(tmp_path):
    measures = [gnlin.callbacks.Measure({n: lambda _: 0.0}) for n in ("first", "second")]
    fit(checkpoint=tmp_path, callbacks=measures)
    message = refused(tmp_path, 6, callbacks=measures[:1])
    assert "run: its history also has second; pass" in message
    message = refused(tmp_path, 6, callbacks=measures[::-1])
    assert "the columns of its history are in another order" in message


def test_other_callbacks_are_refused(tmp_path):
    validation = (X, T)
    fit(checkpoint=tmp_path / "without", validation=validation)
    message = refused(
        tmp_path / "without", 6, validation=validation, callbacks=EarlyStop()
    )
    assert "other callbacks" in message
    fit(checkpoint=tmp_path / "with", validation=validation, callbacks=EarlyStop())
    assert "other callbacks" in refused(tmp_path / "with", 6, validation=validation)


def test_a_folder_in_use_is_refused(tmp_path):
    fit(checkpoint=tmp_path)
    message = refused(tmp_path, 6, resume=False)
    assert "pass `resume=True` to resume it, or another folder" in message


def test_a_damaged_checkpoint_is_refused(tmp_path):
    saving = gnlin.Checkpoint(tmp_path, every_steps=3)
    fit(steps=7, checkpoint=saving)
    last = tmp_path / checkpoint(7)
    content = bytearray(last.read_bytes())
    content[content.index(b"history.npy") + 300] ^= 1
    for damaged, words in [
        (content, "is damaged, or not a gnlin checkpoint: the checksum of history.npy"),
        (content[:100], "is damaged, or not a gnlin checkpoint: File is not a zip file"),
        (b"", "is damaged, or not a gnlin checkpoint: File is not a zip file"),
    ]:
        last.write_bytes(damaged)
        message = refused(tmp_path, 7)
        assert words in message
        assert f"the latest that can be read is {checkpoint(6)}: delete all" in message
    last.unlink()
    assert_same_run(fit(steps=9, checkpoint=saving, resume=True), fit(steps=9))


def test_a_valid_file_that_is_not_a_run_is_refused(tmp_path):
    _checkpoint.save(tmp_path, 3, {"x": np.zeros(2)}, {"step": 3}, 1)
    assert "was not written by a run of `gnlin.fit`; delete it" in refused(tmp_path, 3)


def test_a_folder_that_cannot_be_written_is_refused_before_training(
    tmp_path, monkeypatch
):
    steps = Steps()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file cannot be read: Not a directory"):
        fit(checkpoint=tmp_path / "file", callbacks=steps)
    with pytest.raises(CheckpointError, match="below cannot be read: Not a directory"):
        fit(checkpoint=tmp_path / "file" / "below", callbacks=steps)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(CheckpointError, match=r"need \d+ more bytes, but only 100 are"):
        fit(checkpoint=tmp_path / "full", callbacks=steps)
    assert steps.began is None


def test_room_for_a_long_history_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    fit(steps=2, checkpoint=tmp_path / "short")
    with pytest.raises(CheckpointError, match="more bytes, but only 1000000 are free"):
        fit(steps=10**6, checkpoint=tmp_path / "long")


def test_a_full_disk_does_not_lose_the_run(tmp_path, monkeypatch):
    replace, calls = os.replace, []

    def full(*paths):
        calls.append(paths)
        if 2 <= len(calls) <= 3:
            raise OSError(28, "No space left on device")
        return replace(*paths)

    monkeypatch.setattr(os, "replace", full)
    told = []

    class Told(Callback):
        def on_checkpoint(self, run):
            told.append(run.step)

    saving = gnlin.Checkpoint(tmp_path, every_steps=2)
    words = re.escape(str(tmp_path)) + r"/step-\d+\.npz could not be written: No space "
    words += "left on device; .* The run continues without it"
    with pytest.warns(UserWarning, match=words):
        result = fit(steps=7, checkpoint=saving, callbacks=Told())
    assert_same_run(result, fit(steps=7))
    assert told == [6, 7]
    assert names(tmp_path) == [checkpoint(6), checkpoint(7)]
