"""The content of a checkpoint, and its conversion to arrays and JSON and back."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array

from .._common._checks import is_key
from .._common._identity import as_numpy
from .._training._messages import result_name, RESULT_NAMES
from ..callbacks import Callback
from ._checkpoint import CheckpointError, Fault
from ._stream import Seen


class CallbackState(NamedTuple):
    """The state of a callback: the class's name, and each leaf with its path."""

    callback: str
    paths: list[str]
    leaves: list[Any]


class Now(NamedTuple):
    """The position of a run, and its arrays."""

    step: int
    epoch: int
    index: int  # of the next batch in the epoch
    arrays: list[Any]  # of the carry
    seen: Seen | None = None  # of the user's batches


class Snapshot(NamedTuple):
    """The state that a checkpoint saves, taken when all callbacks have been told of all
    events. It is replaced as a whole, so that an interruption cannot leave a mixture."""

    now: Now
    result: optx.RESULTS
    reason: str
    callbacks: list[CallbackState]


def pack(
    snapshot: Snapshot, table: np.ndarray, settings: dict[str, str]
) -> tuple[dict[str, np.ndarray], dict]:
    """Return arrays, and a dictionary `meta` of JSON values.

    - `table`: the history.
    - `settings`: a description of the run.
    """
    (step, epoch, index, carry, seen), result, reason, states = snapshot
    arrays = {f"carry_{i}": as_numpy(x) for i, x in enumerate(carry)}
    callbacks = []
    for i, (name, paths, leaves) in enumerate(states):
        arrays |= {_leaf(i, j): _numbers(leaf, name) for j, leaf in enumerate(leaves)}
        callbacks.append([name, paths])
    meta = {
        "settings": settings,
        "step": step,
        "epoch": epoch,
        "index": index,
        "seen": seen,
        "result": result_name(result),
        "reason": reason,
        "callbacks": callbacks,
    }
    return {**arrays, "history": table}, meta


def unpack(
    arrays: Mapping[str, np.ndarray], meta: dict
) -> tuple[Snapshot, np.ndarray, dict[str, str]]:
    """Invert `pack`; raise `Fault` if `pack` cannot have returned this."""
    try:
        callbacks = []
        for i, (name, paths, *_) in enumerate(meta["callbacks"]):
            leaves = [arrays[_leaf(i, j)] for j in range(len(paths))]
            callbacks.append(CallbackState(name, paths, leaves))
        carry = [x for name, x in arrays.items() if name.startswith("carry_")]
        seen = meta.get("seen")  # Earlier files have none, and are not compared.
        seen = None if seen is None else Seen(*map(str, seen))
        now = Now(meta["step"], meta["epoch"], meta["index"], carry, seen)
        if meta["result"] not in RESULT_NAMES:
            raise ValueError(meta["result"])
        result = getattr(optx.RESULTS, meta["result"])
        snapshot = Snapshot(now, result, meta["reason"], callbacks)
        return snapshot, arrays["history"], meta["settings"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Fault("was not written by a run of `gnlin.fit`") from error


def _leaf(callback: int, leaf: int) -> str:
    return f"callback_{callback}_{leaf}"


#
# The states of callbacks
#


_SAVED = jax.Array | np.ndarray | np.generic | bool | int | float | complex | str


def _numbers(leaf: Any, callback: str) -> np.ndarray:
    if isinstance(leaf, _SAVED) and not (array := as_numpy(leaf)).dtype.hasobject:
        return array
    raise CheckpointError(
        f"The state of the callback `{callback}` holds a {type(leaf).__name__}, which a "
        "checkpoint cannot hold: let `state` return arrays, numbers and strings."
    )


def state_of(callback: Callback) -> CallbackState:
    found, _ = jax.tree_util.tree_flatten_with_path(callback.state())
    paths = [jax.tree_util.keystr(path) for path, _ in found]
    return CallbackState(type(callback).__qualname__, paths, [leaf for _, leaf in found])


def give_back(states: Sequence[CallbackState], callbacks: Sequence[Callback]) -> bool:
    """Restore the callbacks' states; return whether they fit the callbacks."""
    # Callbacks without a state may be added or removed.
    callbacks = [callback for callback in callbacks if state_of(callback).leaves]
    states = [state for state in states if state.leaves]
    own = [state_of(callback) for callback in callbacks]
    if list(map(_form, own)) != list(map(_form, states)):
        return False

    for callback, state, now in zip(callbacks, states, own, strict=True):
        leaves = map(_like, state.leaves, now.leaves)
        structure = jax.tree.structure(callback.state())
        callback.restore(jax.tree.unflatten(structure, list(leaves)))
    return True


def _like(x: np.ndarray, like: Any) -> Any:
    """Return a leaf of the kind that the callback has now."""
    if isinstance(like, jax.Array):
        return like_array(x, like)
    if isinstance(like, np.ndarray):
        return x
    return x[()] if isinstance(like, np.generic) else x.item()


def like_array(x: np.ndarray, like: Any) -> Array:
    if is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(like))
    weak = getattr(like, "weak_type", False) and like.ndim == 0
    array = jnp.asarray(x.item() if weak else x)
    on_one = len(like.devices()) == 1
    return array if on_one else jax.device_put(array, like.sharding)


def _form(state: CallbackState) -> tuple:
    """Return the part of a state that stays the same during a run."""
    return state.callback, state.paths, [as_numpy(x).shape for x in state.leaves]
