"""A loaded checkpoint equals the saved one, or nothing is loaded, even after disk errors
or a kill."""

import errno
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from gnlin._fit import _checkpoint
from gnlin._fit._checkpoint import (
    check_writable,
    Checkpoint,
    CheckpointError,
    Fault,
    latest,
    load,
    save,
)


ARRAYS = {
    "array_0": np.arange(6, dtype=np.float32).reshape(2, 3),
    "array_1": np.array([True, False, True]),
    "array_2": np.array([1.5, -2], ml_dtypes.bfloat16),
}
ANEW = "; delete it to start over, or pass another folder."
NAN = np.frombuffer(bytes.fromhex("0100c07f"), "<f4")  # with a payload of its own


def assert_same(left, right):
    """Check that two dictionaries of arrays are equal to the bit."""
    assert list(left) == list(right)
    for x, y in zip(left.values(), right.values(), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert x.tobytes() == y.tobytes()


def assert_holds(folder, *steps):
    """Check that the folder holds valid checkpoints of these steps, and nothing else."""
    paths = sorted(folder.iterdir())
    assert [path.name for path in paths] == [f"step-{s:012d}.npz" for s in steps]
    for step, path in zip(steps, paths, strict=True):
        arrays, meta = load(path)
        assert meta == {"step": step}
        assert_same(arrays, ARRAYS)


def saved(folder, *steps, keep=10):
    return [save(folder, step, ARRAYS, {"step": step}, keep) for step in steps]


@contextmanager
def file_size_limit(num_bytes):
    """Make longer writes fail, as on a full disk; this applies to root too."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3)),
        np.zeros((2, 0), ml_dtypes.bfloat16),
        np.array(3.5),
        np.array(1.5, ml_dtypes.bfloat16),
        np.array([True, False]),
        np.arange(-3, 3, dtype=np.int8),
        np.array([2**64 - 1], np.uint64),
        np.array([0.1, np.inf, np.nan], np.float16),
        np.array([0.1, np.inf, np.nan], ml_dtypes.bfloat16),
        np.array([0.5, -1.0], ml_dtypes.float8_e4m3fn),
        np.array([-8, 7], ml_dtypes.int4),
        np.array([1 + 2j, np.nan], np.complex64),
        np.array([-0.0, 5e-324, np.pi]),
        NAN,
        np.arange(24.0).reshape(2, 3, 4)[:, ::-2].T,
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(12, dtype=ml_dtypes.bfloat16).reshape(3, 4)[:, ::2],
        np.broadcast_to(np.float32(2), (3, 2)),
        np.arange(5, dtype=">f8"),
        np.arange(5, dtype=">i2")[::2],
        np.array([1 + 2j], ">c16"),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_arrays_come_back(tmp_path, array):
    given = {**ARRAYS, "one": array, "again": array}
    path = save(tmp_path, 0, given, {}, 1)
    arrays, meta = load(path)
    assert_same(arrays, given)
    assert meta == {}
    assert all(a.flags.writeable and a.flags.aligned for a in arrays.values())


@hypothesis.given(
    st.lists(
        hnp.arrays(
            hnp.boolean_dtypes()
            | hnp.integer_dtypes(endianness="?")
            | hnp.floating_dtypes(endianness="?")
            | hnp.complex_number_dtypes(endianness="?"),
            hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
        ),
        max_size=4,
    ).map(lambda arrays: {f"array_{i}": x for i, x in enumerate(arrays)}),
    st.dictionaries(st.text(), st.none() | st.integers() | st.floats() | st.text()),
)
@hypothesis.settings(max_examples=30)
def test_anything_comes_back(arrays, meta):
    with tempfile.TemporaryDirectory() as folder:
        loaded, loaded_meta = load(save(Path(folder), 7, arrays, meta, 1))
    assert_same(loaded, arrays)
    assert repr(loaded_meta) == repr(meta)


def test_meta_comes_back(tmp_path):
    meta = {"inf": [-math.inf, math.inf], "nested": {"é\n": None}, "pi": math.pi}
    _, loaded = load(save(tmp_path, 1, {}, {**meta, "nan": math.nan}, 1))
    assert math.isnan(loaded.pop("nan"))
    assert loaded == meta


def test_numpy_opens_a_checkpoint(tmp_path):
    path = save(tmp_path, 5, ARRAYS, {"step": 5}, 1)
    with np.load(path, allow_pickle=False) as archive:
        assert archive.files == [*ARRAYS, "meta"]
        np.testing.assert_array_equal(archive["array_0"], ARRAYS["array_0"])
        assert json.loads(str(archive["meta"]))["step"] == 5


def test_large_arrays_are_not_copied(tmp_path):
    array = np.ones(2**22)
    tracemalloc.start()  # NumPy tells it of its memory
    path = save(tmp_path, 1, {"one": array, "other": array}, {}, 1)
    saving = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    load(path)
    loading = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert saving < 0.6 * array.nbytes
    assert loading < 2.4 * array.nbytes


def test_the_latest_are_kept(tmp_path):
    saved(tmp_path, 1, 2, keep=2)
    assert_holds(tmp_path, 1, 2)
    saved(tmp_path, 10, keep=2)
    assert_holds(tmp_path, 2, 10)
    saved(tmp_path, 11, keep=1)
    assert_holds(tmp_path, 11)


def test_the_checkpoint_just_written_is_kept(tmp_path):
    saved(tmp_path, 1, 5, 6)
    saved(tmp_path, 3, keep=1)
    assert_holds(tmp_path, 3, 5, 6)


def test_a_step_is_replaced(tmp_path):
    save(tmp_path, 3, {}, {"step": "old"}, 2)
    saved(tmp_path, 3)
    assert_holds(tmp_path, 3)


def test_files_that_cannot_be_deleted_stay(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def refuse(self, missing_ok=False):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    saved(tmp_path, 2, keep=1)
    assert_holds(tmp_path, 1, 2)


def test_latest_is_of_the_largest_step(tmp_path):
    assert latest(tmp_path / "missing") is None
    assert latest(tmp_path) is None
    for name in [
        "step-000000000009.npz.0123456789abcdef0123456789abcdef.tmp",
        "step-9.npz",
        "step-000000000009.npz.bak",
        "copy of step-000000000009.npz",
        "step-0000000000009.npz",
        "notes.txt",
    ]:
        (tmp_path / name).touch()
    assert latest(tmp_path) is None
    saved(tmp_path, 7, 10**12, 8)
    assert latest(tmp_path) == tmp_path / "step-1000000000000.npz"


def test_a_folder_that_is_a_file_is_not_an_empty_one(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file cannot be read: Not a directory\.$"):
        latest(tmp_path / "file")


def no_room(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def failing(stage, monkeypatch):
    with monkeypatch.context() as patch:
        if stage == "fsync":
            patch.setattr(os, "fsync", no_room)
        elif stage == "replace":
            patch.setattr(os, "replace", no_room)
        elif stage == "open":
            patch.setattr(_checkpoint, "_temporary", lambda path: path / "below")
        elif stage == "first write":
            patch.setattr(np, "savez", no_room)
        if stage in ("buffered write", "large write"):
            with file_size_limit(50 if stage == "buffered write" else 2**16):
                yield
        else:
            yield


@pytest.mark.parametrize(
    "stage",
    ["open", "first write", "buffered write", "large write", "fsync", "replace"],
)
def test_a_failure_leaves_the_earlier_ones(tmp_path, monkeypatch, stage):
    saved(tmp_path, 1, 2)
    arrays = ARRAYS | ({"large": np.zeros(10**5)} if stage == "large write" else {})
    path = tmp_path / "step-000000000002.npz"
    with (
        failing(stage, monkeypatch),
        pytest.raises(CheckpointError, match=re.escape(str(path))) as raised,
    ):
        save(tmp_path, 2, arrays, {"step": "new"}, 1)
    assert os.strerror(raised.value.__cause__.errno) in str(raised.value)
    assert_holds(tmp_path, 1, 2)
    saved(tmp_path, 3, keep=2)
    assert_holds(tmp_path, 2, 3)


def test_an_interrupt_leaves_no_temporary_file(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, 2)
    assert_holds(tmp_path, 1)


def _fail_for_folders(monkeypatch, number):
    fsync, folders = os.fsync, []

    def fail(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            folders.append(descriptor)
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    return folders


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="names of descriptors")
def test_a_folder_that_cannot_be_synchronised(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    with monkeypatch.context() as patch:
        folders = _fail_for_folders(patch, errno.EINVAL)
        saved(tmp_path, 2)
        assert len(folders) == 1
    with monkeypatch.context() as patch:
        _fail_for_folders(patch, errno.EIO)
        with pytest.raises(CheckpointError, match=os.strerror(errno.EIO)):
            saved(tmp_path, 3, keep=1)
    assert_holds(tmp_path, 1, 2, 3)  # files that may still be needed are not deleted


def test_a_folder_that_cannot_be_opened(tmp_path, monkeypatch):
    def refuse(path, flags):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        saved(tmp_path, 1)
    assert_holds(tmp_path, 1)


def test_leftovers_are_removed(tmp_path):
    leftover = tmp_path / f"step-000000000001.npz.{'0a' * 16}.tmp"
    leftover.write_bytes(b"gnlin check")
    other = tmp_path / "step-000000000001.npz.tmp"
    other.touch()
    saved(tmp_path, 2)
    assert not leftover.exists()
    assert other.exists()


def refusal(path):
    with pytest.raises(Fault) as raised:
        load(path)
    return sentence_of(path, raised.value)


def sentence_of(path, fault):
    sentence = str(_checkpoint.refusal(path, fault))
    assert sentence.startswith(f"{path} ")
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def test_every_flip_is_refused_or_harmless(tmp_path):
    """Some bytes of a zip archive have no meaning, such as the time of a member."""
    (path,) = saved(tmp_path, 1)
    content, num_harmless = path.read_bytes(), 0
    for position in range(len(content)):
        for mask in (0x20, random.Random(position).randrange(1, 256)):
            flipped = bytearray(content)
            flipped[position] ^= mask
            path.write_bytes(flipped)
            try:
                arrays, meta = load(path)
            except Fault as fault:
                sentence_of(path, fault)
            else:
                num_harmless += 1
                assert meta == {"step": 1}
                assert_same(arrays, ARRAYS)
    assert num_harmless < len(content) * 2 / 3
    path.write_bytes(content)
    assert_holds(tmp_path, 1)


def test_every_truncation_is_refused(tmp_path):
    (path,) = saved(tmp_path, 1)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        refusal(path)


def test_damage_in_a_large_file_is_refused(tmp_path):
    path = save(tmp_path, 1, {"large": np.arange(10**6)}, {}, 1)
    size = path.stat().st_size
    draw = random.Random(0)
    for position in (draw.randrange(200, size - 2000) for _ in range(10)):
        with path.open("r+b") as file:
            file.seek(position)
            byte = file.read(1)
            file.seek(position)
            file.write(bytes([byte[0] ^ 4]))
            file.flush()
            refusal(path)
            file.seek(position)
            file.write(byte)
    load(path)


def test_refusals_say_what_is_wrong(tmp_path, monkeypatch):
    (path,) = saved(tmp_path, 1)
    content = path.read_bytes()

    def refused(content):
        path.write_bytes(content)
        return refusal(path).removeprefix(f"{path} ")

    damaged = "is damaged, or not a gnlin checkpoint: "
    for no_archive in (b"", b"\x80\x04\x95", content[:-7], content[7:-30]):
        assert refused(no_archive) == f"{damaged}File is not a zip file{ANEW}"
    at = content.index(ARRAYS["array_0"].tobytes())
    flipped = content[:at] + b"\x01" + content[at + 1 :]
    assert refused(flipped) == f"{damaged}the checksum of array_0.npy is wrong{ANEW}"
    np.savez(path, array_0=ARRAYS["array_0"])
    assert damaged in refusal(path)
    np.savez(path, array_0=np.array([None]), meta=np.array("{}"))
    assert "allow_pickle=False" in refusal(path)
    with monkeypatch.context() as patch:
        patch.setattr(_checkpoint, "_FORMAT", 12)
        saved(tmp_path, 1)
    assert refusal(path).removeprefix(f"{path} ") == (
        "is a checkpoint of format 12, and this gnlin reads format 3 only (update "
        f"gnlin){ANEW}"
    )


def test_a_checkpoint_of_an_older_gnlin_is_not_overlooked(tmp_path):
    saved(tmp_path, 1)
    old = tmp_path / "step-000000000002.gnlin"
    old.write_bytes(b"gnlin checkpoint 2\n")
    assert latest(tmp_path) == old
    assert refusal(old) == (
        f"{old} was written by an older gnlin, and this one cannot read it; the latest "
        "that can be read is step-000000000001.npz: delete all after it to go on from "
        "there."
    )


def test_a_damaged_shape_takes_no_memory(tmp_path):
    """The checksums are compared before any array is made."""
    path = save(tmp_path, 1, {"x": np.zeros(1000)}, {}, 1)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"(1000,)", b"(9999,)"))
    tracemalloc.start()
    assert "the checksum of x.npy is wrong" in refusal(path)
    assert tracemalloc.get_traced_memory()[1] < 60_000
    tracemalloc.stop()


def test_unreadable_files(tmp_path):
    saved(tmp_path, 1)
    folder = tmp_path / "step-000000000002.npz"
    folder.mkdir()
    assert refusal(folder) == (
        f"{folder} cannot be read: Is a directory; the latest that can be read is "
        "step-000000000001.npz: delete all after it to go on from there."
    )
    missing = tmp_path / "step-000000000003.npz"
    assert refusal(missing) == f"{missing} cannot be read: No such file or directory."
    below = tmp_path / "step-000000000001.npz" / "step-000000000003.npz"
    assert refusal(below) == f"{below} cannot be read: Not a directory."


def test_the_latest_that_can_be_read_is_named(tmp_path):
    paths = saved(tmp_path, 1, 20, 100, 300)
    for path in paths[2:]:
        path.write_bytes(b"damaged")
    for path in paths[2:]:
        assert refusal(path).endswith(
            "; the latest that can be read is step-000000000020.npz: delete all after it "
            "to go on from there."
        )
    for path in paths[:2]:
        path.write_bytes(b"damaged")
    assert refusal(paths[0]).endswith(ANEW)
    assert refusal(paths[3]).endswith(
        "; no earlier one can be read either: delete all of them to start over, or pass "
        "another folder."
    )
    assert len(list(tmp_path.iterdir())) == 4
    elsewhere = tmp_path / "mine.npz"
    elsewhere.write_bytes(b"damaged")
    assert "delete" not in refusal(elsewhere)


def test_a_writable_folder_is_created_and_left_empty(tmp_path):
    folder = tmp_path / "runs" / "digits"
    check_writable(folder, 1000, 2)
    assert not list(folder.iterdir())
    saved(folder, 1)
    check_writable(folder, 1000, 2)
    assert_holds(folder, 1)


def test_an_unwritable_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: it is a file, not a folder"):
        check_writable(tmp_path / "file", 1, 1)
    with pytest.raises(CheckpointError, match="below: Not a directory"):
        check_writable(tmp_path / "file" / "below", 1, 1)
    with (
        file_size_limit(0),
        pytest.raises(CheckpointError, match=os.strerror(errno.EFBIG)),
    ):
        check_writable(tmp_path / "full", 1, 1)
    assert not list((tmp_path / "full").iterdir())

    def refuse(self, **_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match="new: Read-only file system"):
        check_writable(tmp_path / "new", 1, 1)


def test_too_little_room_is_refused(tmp_path, monkeypatch):
    def usage(path):
        return SimpleNamespace(free=2999)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    check_writable(tmp_path, 999, 2)
    with pytest.raises(CheckpointError, match=r"need 3000 more bytes, but only 2999 are"):
        check_writable(tmp_path, 1000, 2)
    # A resumed run has already written some of its checkpoints.
    (tmp_path / "step-000000000001.npz").write_bytes(bytes(1000))
    (tmp_path / f"step-000000000002.npz.{'0' * 32}.tmp").write_bytes(bytes(500))
    check_writable(tmp_path, 1499, 2)
    with pytest.raises(CheckpointError, match=r"need 3000 more bytes, but only 2999 are"):
        check_writable(tmp_path, 1500, 2)
    (tmp_path / "step-000000000003.npz").write_bytes(bytes(10**5))
    check_writable(tmp_path, 2999, 2)
    with pytest.raises(CheckpointError, match=r"need 3000 more bytes, but only 2999 are"):
        check_writable(tmp_path, 3000, 2)


# Empty modules stand in for gnlin's, so that JAX is not imported each time.
CHILD = f"""
import os, signal, sys, types
from pathlib import Path
import numpy as np

for name in ("gnlin", "gnlin._common", "gnlin._common._checks", "gnlin._fit"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["gnlin._fit"].__path__ = [{str(Path(_checkpoint.__file__).parent)!r}]
sys.modules["gnlin._common._checks"].__getattr__ = lambda _: lambda *_: None
from gnlin._fit import _checkpoint
from gnlin._fit._checkpoint import latest, load, save

folder = Path(sys.argv[1])

def arrays(step):
    shapes = dict(a=10**6, b=(), c=99_999)
    return dict((name, np.full(shape, step)) for name, shape in shapes.items())

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
"""

FOREVER = """
path = latest(folder)
step = 0 if path is None else load(path)[1]["step"]
while True:
    step += 1
    save(folder, step, arrays(step), {"step": step}, 2)
    print(step, flush=True)
"""

ONCE = {
    "fsync": "os.fsync = die",
    "archive": "np.savez = lambda file, **_: (file.write(b'PK' * 10**6), die())",
    "replace": "os.replace = die",
    "folder": "_checkpoint._synchronise = die",
    "delete": "_checkpoint._checkpoints = die",
}


def _consistent(folder):
    path = latest(folder)
    arrays, meta = load(path)
    assert [a.size for a in arrays.values()] == [10**6, 1, 99_999]
    assert all((a == meta["step"]).all() for a in arrays.values())
    assert path.name == f"step-{meta['step']:012d}.npz"
    return meta["step"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX")
def test_killed_at_any_moment(tmp_path):
    draw = random.Random(0)
    step = 0
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD + FOREVER, tmp_path],
            stdout=subprocess.PIPE,
            text=True,
        )
        with child:
            announced = int(child.stdout.readline())
            time.sleep(draw.uniform(0, 0.06))
            child.kill()
            announced = int([announced, *child.stdout.read().split()][-1])
        assert step < announced <= _consistent(tmp_path)
        step = _consistent(tmp_path)
    save(tmp_path, step + 1, ARRAYS, {"step": step + 1}, 1)
    assert_holds(tmp_path, step + 1)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX")
@pytest.mark.parametrize("stage", ONCE)
def test_killed_at_each_stage(tmp_path, stage):
    code = f"""
save(folder, 1, arrays(1), {{"step": 1}}, 1)
{ONCE[stage]}
save(folder, 2, arrays(2), {{"step": 2}}, 1)
"""
    child = subprocess.run([sys.executable, "-c", CHILD + code, tmp_path], check=False)
    assert child.returncode == -signal.SIGKILL
    replaced = stage in ("folder", "delete")
    assert _consistent(tmp_path) == (2 if replaced else 1)
    assert len(list(tmp_path.iterdir())) == 2
    save(tmp_path, 3, ARRAYS, {"step": 3}, 1)
    assert_holds(tmp_path, 3)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, True, "2", math.inf, math.nan])
@pytest.mark.parametrize("name", ["every_steps", "keep"])
def test_whole_numbers(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a whole number"):
        Checkpoint("runs", **{name: value})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("value", [0, -1.0, True, "2", math.inf, math.nan, 1j])
def test_seconds(value):
    with pytest.raises(ValueError, match="`every_seconds` must "):
        Checkpoint("runs", every_seconds=value)


@pytest.mark.usefixtures("unchecked")
def test_how_often(tmp_path):
    default = Checkpoint(tmp_path)
    assert (default.every_steps, default.every_seconds, default.keep) == (None, 600, 2)
    by_steps = Checkpoint("runs", every_steps=1000)
    assert (by_steps.every_steps, by_steps.every_seconds) == (1000, None)
    both = Checkpoint("runs", every_steps=np.int64(5), every_seconds=60, keep=1)
    assert both == Checkpoint("runs", 5, 60.0, 1)
    assert type(both.every_steps) is int
    with pytest.raises(AttributeError):
        both.keep = 3
