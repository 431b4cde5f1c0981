"""The contents of a checkpoint are restored exactly; files that no run has written are
refused."""

import json
import math
import random

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_problems import BATCHES, fit, T, X

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
        self.turn, self.least = 1 + 0j, math.inf
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
        others = self.found, self.name, self.turn, None
        return [numbers, others, self.scalar, self.array, self.on_device, self.key]

    def restore(self, state):
        self.given.append(state)
        numbers, others, self.scalar, self.array, self.on_device, self.key = state
        self.count, self.total = numbers["count"], numbers["total"]
        self.least = numbers["least"]
        self.found, self.name, self.turn, _ = others


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
    [print, object(), np.array(["a"]), np.array([None]), b"a"],
    ids=["function", "object", "strings", "objects", "bytes"],
)
def test_unsupported_states_are_reported_before_training(what, tmp_path):
    words = f"`KeepsWhatCannotBe` holds a {type(what).__name__}, which a checkpoint"
    with pytest.raises(CheckpointError, match=words):
        fit(callbacks=KeepsWhatCannotBe(what), checkpoint=tmp_path)
    fit(steps=1, callbacks=KeepsWhatCannotBe(what))


#
# Checkpoints with a right checksum that no run has written
#


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """Return (arrays, meta) of a run at its fifth step."""
    folder = tmp_path_factory.mktemp("left")
    fit(steps=5, callbacks=Keeps(), checkpoint=folder)
    return _checkpoint.load(folder / "step-000000000005.gnlin")


def refused(folder, arrays, meta, **arguments):
    path = _checkpoint.save(folder, 5, arrays, meta, 1)
    with pytest.raises(CheckpointError) as caught:
        fit(
            **{"steps": 6, "callbacks": Keeps(), **arguments},
            checkpoint=folder,
            resume=True,
        )
    message = str(caught.value)
    assert message.startswith(f"{path} ")
    assert message.endswith(".")
    assert "\n" not in message
    assert "delete it" in message or "pass the arguments of that run" in message
    return message


NOT_NUMBERS = [-1, -(10**18), 10**18, 2**64, 5.0, math.nan, True, None, "5", [5], {}]
BAD = {
    **{f"step {x!r}": ("step", x) for x in NOT_NUMBERS},
    **{f"epoch {x!r}": ("epoch", x) for x in [*NOT_NUMBERS, 0, 2, 5]},
    **{f"index {x!r}": ("index", x) for x in [*NOT_NUMBERS, 0, 1, 3, 4]},
    **{f"result {x!r}": ("result", x) for x in [-1, 0, 99, None, "", "_value", [], {}]},
    **{f"reason {x!r}": ("reason", x) for x in [None, 1, ["why"], {}, math.nan]},
    **{f"settings {x!r}": ("settings", x) for x in [None, [], "ab", {"a": 1}, {}]},
    **{
        f"callbacks {x!r}": ("callbacks", x)
        for x in [None, 1, [], {}, [[]], ["abc"], [["Keeps", [], []]], [[1, 2, 3]]]
    },
}


def test_an_unchanged_checkpoint_resumes(left, tmp_path):
    arrays, meta = left
    _checkpoint.save(tmp_path, 5, arrays, json.loads(json.dumps(meta)), 1)
    result = fit(steps=6, callbacks=Keeps(), checkpoint=tmp_path, resume=True)
    assert result.stats["num_steps"] == 6


@pytest.mark.parametrize("name", BAD)
def test_crafted_meta_is_refused(name, left, tmp_path):
    arrays, meta = left
    key, value = BAD[name]
    assert repr(meta[key]) != repr(value)
    refused(tmp_path, arrays, {**meta, key: value})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("meta", [None, [], 3, "meta", {}, {"step": 5}], ids=repr)
def test_invalid_metadata_is_refused(meta, left, tmp_path):
    assert "was not written by a run of `gnlin.fit`" in refused(tmp_path, left[0], meta)


@pytest.mark.parametrize(
    "name", ["settings", "step", "epoch", "index", "result", "reason", "callbacks"]
)
def test_incomplete_metadata_is_refused(name, left, tmp_path):
    arrays, meta = left
    refused(tmp_path, arrays, {k: v for k, v in meta.items() if k != name})


def other_step(table):
    table[2, 0] = 7


def nan_step(table):
    table[2, 0] = math.nan


def infinite_updates(table):
    table[2, 7] = math.inf


def negative_updates(table):
    table[2, 7] = -1


def later_epoch(table):
    table[4, 1] = 2


def earlier_epoch(table):
    table[4, 1] = 0


@pytest.mark.parametrize(
    "change",
    [
        other_step,
        nan_step,
        infinite_updates,
        negative_updates,
        later_epoch,
        earlier_epoch,
    ],
)
def test_a_crafted_history_is_refused(change, left, tmp_path):
    arrays, meta = left
    table = arrays[-1].copy()
    change(table)
    assert "history" in refused(tmp_path, [*arrays[:-1], table], meta)


CHANGES = {
    "wider": lambda x: np.stack([x, x]),
    "flat": lambda x: np.concatenate([x.ravel(), x.ravel()]),
    "narrower": lambda x: x.astype(np.int8),
    "complex": lambda x: x.astype(complex),
    "truth values": lambda x: x.astype(bool),
    "empty": lambda x: x[..., None][..., :0],
}


@pytest.mark.parametrize("name", CHANGES)
def test_crafted_arrays_are_refused(name, left, tmp_path):
    """Change each array of the run, of the callbacks (with another shape or a key), and
    of the history."""
    arrays, meta = left
    kinds = [kind for _, _, kinds in meta["callbacks"] for kind, _ in kinds]
    kinds = [kind for kind in kinds if kind in ("array", "jax", "key", "scalar")]
    kinds = ["own"] * (len(arrays) - 1 - len(kinds)) + kinds + ["history"]
    draw = random.Random(name)
    owns = [i for i, kind in enumerate(kinds) if kind == "own"]
    tried = [*draw.sample(owns, 5), *(i for i, k in enumerate(kinds) if k != "own")]
    for i in tried:
        changed = CHANGES[name](arrays[i])
        kept = changed.shape == arrays[i].shape and kinds[i] in ("array", "jax", "scalar")
        if kept or (changed.dtype, changed.shape) == (arrays[i].dtype, arrays[i].shape):
            continue
        refused(tmp_path, [*arrays[:i], changed, *arrays[i + 1 :]], meta)


def test_too_few_and_too_many_arrays_are_refused(left, tmp_path):
    arrays, meta = left
    for others in ([], arrays[:1], arrays[1:], arrays[:-1], [*arrays, arrays[0]]):
        refused(tmp_path, others, meta)


def test_another_name_is_refused(left, tmp_path):
    arrays, meta = left
    _checkpoint.save(tmp_path, 6, arrays, meta, 1)
    with pytest.raises(CheckpointError, match="holds step 5, not the step in its name"):
        fit(steps=9, callbacks=Keeps(), checkpoint=tmp_path, resume=True)


def test_a_crafted_position_in_an_iterable_is_refused(tmp_path):
    def forever(epoch):
        while True:
            yield from BATCHES

    arguments = {"data": forever, "callbacks": Keeps()}
    fit(steps=5, checkpoint=tmp_path / "run", **arguments)
    arrays, meta = _checkpoint.load(tmp_path / "run" / "step-000000000005.gnlin")
    for changes in ({"index": 10**15}, {"epoch": 10**15}, {"epoch": 3, "index": 3}):
        refused(tmp_path, arrays, {**meta, **changes}, **arguments)


def _mutated(meta, draw):
    """Replace a random part by something else."""
    inner = isinstance(meta, dict) and "settings" in meta
    if inner or (isinstance(meta, dict | list) and meta and draw.random() < 0.8):
        keys = list(meta) if isinstance(meta, dict) else range(len(meta))
        chosen = draw.choice(list(keys))
        changed = dict(meta) if isinstance(meta, dict) else list(meta)
        changed[chosen] = _mutated(meta[chosen], draw)
        return changed
    others = [None, -1, 2**70, 0.5, math.inf, "", "key", "jax", [], [0], {}, [[["a"]]]]
    return draw.choice([x for x in others if x != meta])


def test_any_mutation_is_refused_or_harmless(left, tmp_path):
    """Numbers and strings that a callback stores may have any value, because only it
    reads them."""
    arrays, meta = left
    draw = random.Random(0)
    stopped = {**meta, "reason": "step 5: over"}
    for _ in range(60):
        changed = _mutated(stopped, draw)
        _checkpoint.save(tmp_path, 5, arrays, changed, 1)
        message, result = "refused.", None
        try:
            result = fit(steps=6, callbacks=Keeps(), checkpoint=tmp_path, resume=True)
        except CheckpointError as error:
            message = str(error)
        assert message.endswith(".")
        assert "\n" not in message
        if result is not None:
            assert result.stats["num_steps"] in (5, 6)
            assert all(changed[k] == stopped[k] for k in stopped if k not in MAY_DIFFER)


MAY_DIFFER = ("reason", "result", "callbacks")


def test_a_run_whose_solver_has_failed_does_not_go_on(tmp_path):
    data = [*BATCHES, (X[:4] * jnp.nan, T[:4])]
    with pytest.warns(UserWarning, match="stopped at step 4"):
        fit(data=data, checkpoint=tmp_path)
    arrays, meta = _checkpoint.load(tmp_path / "step-000000000004.gnlin")
    _checkpoint.save(tmp_path, 4, arrays, {**meta, "reason": ""}, 1)
    with pytest.raises(CheckpointError, match="continues after its solver has failed"):
        fit(data=data, checkpoint=tmp_path, resume=True)


def test_a_documented_schedule_is_carried(tmp_path):
    optax = pytest.importorskip("optax")
    solver = gnlin.DampedGaussNewton(optax.exponential_decay(1.0, 10, 0.5))
    for steps in (1, 2):
        result = fit(solver=solver, steps=steps, checkpoint=tmp_path, resume=True)
    assert result.stats["num_steps"] == 2
