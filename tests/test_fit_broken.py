"""What a run keeps if the user's code, the disk or another process breaks it."""

import os
import subprocess
import sys
import traceback
import warnings

import numpy as np
import pytest
from fit_problems import BATCHES, fit, numbers, T, X

import gnlin
from gnlin import CheckpointError
from gnlin._common._lock import locked
from gnlin._fit import _checkpoint


#
# Loaders that draw other batches when a run is resumed
#


class Shuffled:
    """A loader that draws a new order from its own generator, as torch's does."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __iter__(self):
        order = self.rng.permutation(12)
        for i in range(0, 12, 4):
            chosen = order[i : i + 4]
            yield np.asarray(X)[chosen], np.asarray(T)[chosen]


class InOrder:
    def __iter__(self):
        return iter(BATCHES)


def by_epoch(epoch):
    return iter(Shuffled(epoch))


def resumed(make, tmp_path, cut):
    """Interrupt a run; return the resumed run and its warnings."""
    fit(data=make(), **cut, checkpoint=tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        more = {name: 10 if name == "steps" else 4 for name in cut}
        result = fit(data=make(), **more, checkpoint=tmp_path, resume=True)
    return result, fit(data=make(), **more), caught


CUTS = [{"steps": steps} for steps in (1, 3, 4, 6, 7, 9)]
CUTS += [{"epochs": epochs} for epochs in (1, 2, 3)]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("others", [0, 1])
def test_another_order_is_told(cut, others, tmp_path):
    """A warning comes exactly where the numbers are not those of a run without a break.
    With the same seed they are the same up to the second epoch."""
    seeds = [0, others, 0]
    result, whole, caught = resumed(lambda: Shuffled(seeds.pop(0)), tmp_path, cut)
    same = np.array_equal(result.history.loss, whole.history.loss)
    assert same == (others == 0 and (cut.get("epochs") == 1 or cut.get("steps", 9) < 7))
    assert len(caught) == (not same)
    for each in caught:
        assert "do not yield the batches that the interrupted run took" in str(
            each.message
        )
        assert "lambda epoch: " in str(each.message)
        assert each.filename.endswith("fit_problems.py")  # the line that calls `fit`
    assert len(result.history.loss) == len(whole.history.loss)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("make", [InOrder, lambda: by_epoch, lambda: list(BATCHES)])
def test_the_same_order_is_not_warned_of(make, cut, tmp_path):
    result, whole, caught = resumed(make, tmp_path, cut)
    assert not caught
    np.testing.assert_array_equal(result.history.loss, whole.history.loss)
    np.testing.assert_array_equal(numbers(result.model), numbers(whole.model))


def test_checkpoints_without_checksums_are_not_compared(tmp_path):
    fit(data=Shuffled(0), steps=4, checkpoint=tmp_path)
    path = _checkpoint.latest(tmp_path)
    assert path is not None
    arrays, meta = _checkpoint.load(path)
    assert len(meta.pop("seen")) == 2
    _checkpoint.save(tmp_path, 4, arrays, meta, 2)
    result = fit(data=Shuffled(0), steps=8, checkpoint=tmp_path, resume=True)
    assert result.stats["num_steps"] == 8


def test_large_batches_are_compared_by_their_first_examples(tmp_path):
    seen = []
    for shift in (0, 1):
        x = np.zeros((50, 4000)) + np.arange(50)[:, None] + shift
        stream = gnlin._fit._stream.IterableStream(iter([(x, x[:, :1])]), "data")
        (batch,) = stream.epoch(0, 0, stream.seen)
        seen.append(batch.seen)
    assert seen[0] != seen[1]


#
# Errors of the user's code
#


class OnPurpose(Exception):
    pass


class Solved(Exception):
    """An exception with another attribute of this name."""

    @property
    def solution(self):
        return 42


class Broken:
    """Batches whose third one raises an error, or is one that cannot be used."""

    def __init__(self, error=None, batch=None):
        self.error, self.batch = error, batch

    def __iter__(self):
        yield from BATCHES[:2]
        if self.error is not None:
            raise self.error
        yield BATCHES[2] if self.batch is None else self.batch


class RaiseIn(gnlin.callbacks.Callback):
    def __init__(self, event, step, error):
        def broken(run):
            if run.step == step:
                raise error

        setattr(self, event, broken)


class Bad(gnlin.callbacks.Callback):
    def on_step(self, run):
        if run.step == 2:
            run.stop("enough")


def assert_is_run_of(solution, steps):
    expected = fit(data=BATCHES, steps=steps)
    np.testing.assert_array_equal(numbers(solution.model), numbers(expected.model))
    np.testing.assert_array_equal(solution.history.loss, expected.history.loss)
    assert solution.stats["num_steps"] == steps


def notes(error):
    return " ".join(error.__notes__)


@pytest.mark.parametrize(
    ("broken", "error", "where"),
    [
        (Broken(OnPurpose("no file")), OnPurpose, "at batch 2 of epoch 0"),
        (Broken(batch=(X, T[:3])), ValueError, "at batch 2 of epoch 0"),
        (Broken(batch=(X[:, :2], T)), ValueError, "at batch 2 of epoch 0"),
        (Broken(batch=3), ValueError, "at batch 2 of epoch 0"),
    ],
)
def test_a_broken_batch(broken, error, where):
    with pytest.raises(error) as caught:
        fit(data=broken)
    assert f"raised {where} of `gnlin.fit`" in notes(caught.value)
    assert "had made 2 steps. Its attribute `solution`" in notes(caught.value)
    assert "With `checkpoint=`" in notes(caught.value)
    assert_is_run_of(caught.value.solution, 2)
    assert caught.value.solution.reason == f"step 2: {error.__name__}"
    assert "had made 2 steps" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("event", "step"), [("on_step", 2), ("on_epoch", 3), ("on_end", 6)]
)
def test_a_broken_callback(event, step):
    with pytest.raises(OnPurpose) as caught:
        fit(data=BATCHES, callbacks=RaiseIn(event, step, OnPurpose()))
    assert f"in `RaiseIn.{event}` of `gnlin.fit`" in notes(caught.value)
    assert_is_run_of(caught.value.solution, step)


def test_broken_validation_data():
    def validation(epoch):
        if epoch == 1:
            raise OnPurpose
        return BATCHES

    with pytest.raises(OnPurpose) as caught:
        fit(data=BATCHES, validation=validation)
    assert "raised in the validation of `gnlin.fit`" in notes(caught.value)
    assert_is_run_of(caught.value.solution, 3)


def test_an_error_before_the_first_step_hands_over_nothing():
    with pytest.raises(OnPurpose) as caught:
        fit(data=BATCHES, callbacks=RaiseIn("on_start", 0, OnPurpose()))
    assert not hasattr(caught.value, "solution")
    assert "had made" not in notes(caught.value)


def test_an_error_with_an_attribute_of_this_name():
    with pytest.raises(Solved) as caught:
        fit(data=Broken(Solved()))
    assert "had made 2 steps. With" in notes(caught.value)


def test_a_run_that_ends_does_not_need_the_next_batch():
    result = fit(data=Broken(OnPurpose()), callbacks=Bad())
    assert result.reason == "step 2: enough"


def test_a_broken_run_is_resumed(tmp_path):
    with pytest.raises(OnPurpose) as caught:
        fit(data=Broken(OnPurpose()), checkpoint=tmp_path)
    path = _checkpoint.latest(tmp_path)
    assert path is not None
    assert path.name == "step-000000000002.npz"
    assert f"with `resume=True` goes on from {path}." in notes(caught.value)
    result = fit(data=Broken(), checkpoint=tmp_path, resume=True)
    assert_is_run_of(result, 6)


#
# Another process
#


HOLDER = """
import sys, time
from pathlib import Path
from gnlin._common._lock import locked
import os
with locked(Path(sys.argv[1]) / ".lock"):
    if sys.argv[2] == "fork" and os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
@pytest.mark.parametrize("kind", ["alone", "fork"])
def test_another_process_is_refused_until_it_ends(kind, tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for resume in (True, False):
            with pytest.raises(CheckpointError, match="Another run is writing") as caught:
                fit(steps=2, checkpoint=tmp_path, resume=resume)
        assert "wait for its end, or pass another folder" in str(caught.value)
        holder.kill()
        holder.stdout.close()
    assert (tmp_path / ".lock").exists()
    fit(steps=2, checkpoint=tmp_path)
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("name", ["folder", "folder/../folder", "link"])
def test_a_run_within_a_run(name, tmp_path):
    folder = tmp_path / "folder"
    (tmp_path / "link").symlink_to(folder)

    class Nested(gnlin.callbacks.Callback):
        def on_step(self, run):
            fit(steps=2, checkpoint=tmp_path / name, resume=True)

    with pytest.raises(CheckpointError, match="Another run is writing"):
        fit(steps=2, checkpoint=folder, callbacks=Nested())
    fit(steps=2, checkpoint=folder, resume=True)  # the lock was released


def test_a_refused_run_releases_the_folder(tmp_path):
    fit(steps=2, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="pass `resume=True`"):
        fit(steps=3, checkpoint=tmp_path)
    fit(steps=3, checkpoint=tmp_path, resume=True)


@pytest.mark.parametrize("number", [13, 37, 38, 95])
def test_file_systems_without_locks(number, tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def fails(*_):
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "lockf", fails)
    if number == 13:  # POSIX allows this for a lock that another process holds
        with pytest.raises(CheckpointError, match="Another run"):
            fit(steps=2, checkpoint=tmp_path)
    else:
        fit(steps=2, checkpoint=tmp_path)
    assert len(_checkpoint._leftovers(tmp_path)) == 0


def test_a_lock_whose_file_was_deleted_meanwhile(tmp_path, monkeypatch):
    """Its last holder may delete the file between opening and locking it."""
    fcntl = pytest.importorskip("fcntl")
    lockf, path, calls = fcntl.lockf, tmp_path / ".lock", []

    def deleted_first(*args):
        if not calls:
            path.unlink()
        calls.append(args)
        return lockf(*args)

    monkeypatch.setattr(fcntl, "lockf", deleted_first)
    with locked(path) as is_alone:
        assert is_alone
        assert len(calls) == 2
        assert os.path.samestat(os.fstat(calls[-1][0]), path.stat())
        with locked(path) as another:
            assert not another
    assert not path.exists()


#
# A full disk
#


def test_a_disk_that_fills(tmp_path, monkeypatch):
    """Each checkpoint is tried once, also where a step ends an epoch and the run."""
    replace, tried = os.replace, []

    def full(source, target):
        tried.append(os.path.basename(target))
        if len(tried) > 2:
            raise OSError(28, "No space left on device")
        return replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    saving = gnlin.Checkpoint(tmp_path, every_steps=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(steps=9, checkpoint=saving)
    assert len(tried) == 4  # before the run, and at steps 3, 6 and 9
    assert len(caught) == 2
    for each, step in zip(caught, (6, 9), strict=True):
        assert each.filename.endswith("fit_problems.py")
        said = str(each.message)
        assert f"step-{step:012d}.npz could not be written: No space left" in said
        assert said.endswith("without it; the latest is step-000000000003.npz.")
