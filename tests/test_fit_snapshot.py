"""The contents of a checkpoint are restored exactly; files that no run has written are
refused."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_problems import fit, T, X

import gnlin
from gnlin import CheckpointError
from gnlin._fit import _checkpoint
from gnlin.callbacks import Callback, EarlyStop


#
# States of callbacks
#


class Keeps(Callback):
    """A callback with states of all kinds, which change in each step."""

    def __init__(self):
        self.count, self.total, self.found, self.name = 0, 0.0, False, "none"
        self.turn, self.least, self.names = 1 + 0j, math.inf, np.array(["one"])
        self.scalar, self.array = np.float32(0), np.zeros(3)
        self.on_device = jnp.zeros(2, jnp.bfloat16)
        self.key = jax.random.key(0)
        self.given = []

    def on_step(self, run):
        self.count += 1
        self.total += run.row["loss"]
        self.found = run.step % 2 == 1
        self.name = f"step {run.step}"
        self.turn *= 1j
        self.least = min(self.least, run.row["loss"])
        self.scalar = np.float32(self.scalar + 0.1)
        self.array = self.array + run.step
        self.on_device = self.on_device + 1
        self.key, _ = jax.random.split(self.key)

    def state(self):
        numbers = {"count": self.count, "total": self.total, "least": self.least}
        others = self.found, self.name, self.turn, None, self.names
        return [numbers, others, self.scalar, self.array, self.on_device, self.key]

    def restore(self, state):
        self.given.append(state)
        numbers, others, self.scalar, self.array, self.on_device, self.key = state
        self.count, self.total = numbers["count"], numbers["total"]
        self.least = numbers["least"]
        self.found, self.name, self.turn, _, self.names = others


def assert_same_state(left, right):
    for x, y in zip(
        *(jax.tree.leaves(side, is_leaf=lambda x: x is None) for side in (left, right)),
        strict=True,
    ):
        assert type(x) is type(y)
        if isinstance(x, jax.Array):
            assert x.dtype == y.dtype
        if eqx.is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.array_equal(x, y)
    assert jax.tree.structure(left) == jax.tree.structure(right)


def test_numbers_of_callbacks_come_back_as_they_were(tmp_path):
    whole, first, second = Keeps(), Keeps(), Keeps()
    fit(steps=5, callbacks=whole)
    fit(steps=3, callbacks=first, checkpoint=tmp_path)
    fit(steps=5, callbacks=[Callback(), second], checkpoint=tmp_path, resume=True)
    (given,) = second.given
    assert_same_state(given, first.state())
    assert_same_state(second.state(), whole.state())
    assert second.count == 5


class Swapped(Keeps):
    pass


class More(Keeps):
    def state(self):
        return [*super().state(), 0]


class Wider(Keeps):
    def state(self):
        return [np.zeros((*np.shape(x), 1)) for x in super().state()[2:4]]


def other_key():
    callback = Keeps()
    callback.key = jax.random.key(0, impl="rbg")
    return callback


@pytest.mark.parametrize("kind", [Swapped, More, Wider, other_key, Callback, EarlyStop])
def test_states_of_other_callbacks_are_refused(kind, tmp_path):
    arguments = {"validation": (X, T), "checkpoint": tmp_path}
    fit(steps=1, callbacks=Keeps(), **arguments)
    with pytest.raises(CheckpointError, match="belongs to a run with other callbacks"):
        fit(steps=2, callbacks=kind(), resume=True, **arguments)


class KeepsWhatCannotBe(Callback):
    def __init__(self, what):
        self.what = what

    def state(self):
        return {"what": self.what}


@pytest.mark.parametrize(
    "what",
    [print, object(), np.array([None]), b"a", 2**70],
    ids=["function", "object", "objects", "bytes", "large integer"],
)
def test_unsupported_states_are_reported_before_training(what, tmp_path):
    words = f"`KeepsWhatCannotBe` holds a {type(what).__name__}, which a checkpoint"
    with pytest.raises(CheckpointError, match=words):
        fit(callbacks=KeepsWhatCannotBe(what), checkpoint=tmp_path)
    fit(steps=1, callbacks=KeepsWhatCannotBe(what))


#
# Archives that no run has written
#


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """Return (arrays, meta) of a run at its fifth step."""
    folder = tmp_path_factory.mktemp("left")
    fit(steps=5, callbacks=Keeps(), checkpoint=folder)
    return _checkpoint.load(folder / "step-000000000005.npz")


def resumed(folder, arrays, meta):
    _checkpoint.save(folder, 5, arrays, meta, 1)
    return fit(steps=6, callbacks=Keeps(), checkpoint=folder, resume=True)


def refused(folder, arrays, meta):
    with pytest.raises(CheckpointError) as caught:
        resumed(folder, arrays, meta)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'step-000000000005.npz'} ")
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_an_unchanged_checkpoint_resumes(left, tmp_path):
    assert resumed(tmp_path, *left).stats["num_steps"] == 6


@pytest.mark.parametrize(
    "name", ["settings", "step", "epoch", "index", "result", "reason", "callbacks"]
)
def test_incomplete_metadata_is_refused(name, left, tmp_path):
    arrays, meta = left
    meta = {k: v for k, v in meta.items() if k != name}
    assert "was not written by a run of `gnlin.fit`" in refused(tmp_path, arrays, meta)


@pytest.mark.parametrize("name", ["carry_0", "carry_3", "callback_0_2", "history"])
@pytest.mark.parametrize(
    "change",
    [lambda x: None, lambda x: np.stack([x, x]), lambda x: x[..., None][..., :0]],
    ids=["missing", "wider", "empty"],
)
def test_other_arrays_are_refused(name, change, left, tmp_path):
    arrays, meta = left
    changed = {**arrays, name: change(arrays[name])}
    refused(tmp_path, {k: x for k, x in changed.items() if x is not None}, meta)


def test_other_dtypes_and_results_are_refused(left, tmp_path):
    arrays, meta = left
    narrow = {**arrays, "carry_0": arrays["carry_0"].astype(np.float16)}
    refused(tmp_path, narrow, meta)
    refused(tmp_path, arrays, {**meta, "result": "of a newer gnlin"})


def test_a_documented_schedule_is_carried(tmp_path):
    optax = pytest.importorskip("optax")
    solver = gnlin.DampedGaussNewton(optax.exponential_decay(1.0, 10, 0.5))
    for steps in (1, 2):
        result = fit(solver=solver, steps=steps, checkpoint=tmp_path, resume=True)
    assert result.stats["num_steps"] == 2
