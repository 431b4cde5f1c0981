"""The content of a checkpoint: its conversion to arrays and JSON and back, and checks
that a run could have left it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._common._checks import is_key
from .._common._identity import as_numpy
from .._training._solution import COUNTS
from ..callbacks import Callback
from ._checkpoint import CheckpointError, storable


class Unsound(Exception):
    """A fault of a snapshot, as a predicate whose subject is the file."""


class CallbackState(NamedTuple):
    """The state of a callback: the class's name, and each leaf with its path."""

    callback: str
    paths: list[str]
    leaves: list[Any]


class Snapshot(NamedTuple):
    """Everything of a run that is not among its arguments."""

    settings: dict[str, str]
    step: int
    epoch: int
    index: int  # of the next batch in the epoch
    result: str
    reason: str
    carry: list[np.ndarray]
    callbacks: list[CallbackState]
    table: np.ndarray  # the history

    @property
    def position(self) -> tuple[int, int, int]:
        return self.step, self.epoch, self.index


_NUMBERS = ("settings", "step", "epoch", "index", "result", "reason")


def pack(snapshot: Snapshot) -> tuple[list[np.ndarray], dict]:
    """Return the snapshot as arrays and a dictionary `meta` of JSON values."""
    arrays, callbacks = [*snapshot.carry], []
    for name, paths, leaves in snapshot.callbacks:
        packed = [_pack_leaf(leaf, name) for leaf in leaves]
        arrays += [x for kind, x in packed if kind in _ARRAYS]
        kinds = [[kind, None if kind in _ARRAYS else x] for kind, x in packed]
        callbacks.append([name, paths, kinds])
    meta = {name: getattr(snapshot, name) for name in _NUMBERS}
    return [*arrays, snapshot.table], {**meta, "callbacks": callbacks}


def unpack(arrays: Sequence[np.ndarray], meta: Any) -> Snapshot:
    """Invert `pack`; raise `Unsound` if `pack` cannot have returned this."""
    try:
        of_callbacks = meta["callbacks"]
        num_arrays = sum(k in _ARRAYS for _, _, kinds in of_callbacks for k, _ in kinds)
        num_own = len(arrays) - num_arrays - 1
        _require(num_own >= 0)
        *rest, table = arrays
        remaining = iter(rest[num_own:])
        callbacks = []
        for name, paths, kinds in of_callbacks:
            _require(isinstance(name, str) and len(paths) == len(kinds))
            _require(all(isinstance(path, str) for path in paths))
            leaves = [
                _unpack_leaf(kind, next(remaining) if kind in _ARRAYS else value)
                for kind, value in kinds
            ]
            callbacks.append(CallbackState(name, paths, leaves))
        snapshot = Snapshot(
            **{name: meta[name] for name in _NUMBERS},
            carry=rest[:num_own],
            callbacks=callbacks,
            table=table,
        )
        _require(all(type(x) is int and x >= 0 for x in snapshot.position))
        _require(isinstance(snapshot.result, str) and isinstance(snapshot.reason, str))
        texts = [*snapshot.settings.keys(), *snapshot.settings.values()]
        _require(all(isinstance(text, str) for text in texts))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise Unsound("was not written by a run of `gnlin.fit`") from error
    return snapshot


def check_fits(
    snapshot: Snapshot,
    carry: Sequence[Any],
    columns: Sequence[str],
    num_batches: int | None,
    results: Sequence[str],
) -> None:
    """Raise `Unsound` if this run cannot have left the snapshot."""
    step, epoch, index = snapshot.position
    if num_batches is None:  # each epoch has at least one batch
        possible = epoch + index <= step
    else:
        possible = index <= num_batches and step == epoch * num_batches + index
    if not possible:
        raise Unsound(f"cannot be at step {step}, epoch {epoch}, batch {index}")
    if snapshot.result not in results:
        raise Unsound(f"has the unknown result {snapshot.result!r}")
    own = [as_numpy(x) for x in carry]
    if list(map(_kind, own)) != list(map(_kind, snapshot.carry)):
        raise Unsound("holds arrays that do not match its own settings")
    table = snapshot.table
    if _kind(table) != ((step, len(columns)), np.dtype(float)):
        raise Unsound(f"has no history of {step} steps")
    counts = table[:, [name in COUNTS for name in columns]]
    if not np.all((counts >= 0) & (counts == np.floor(counts)) & np.isfinite(counts)):
        raise Unsound("has a history whose counts are not whole numbers")
    steps, epochs = (table[:, columns.index(name)] for name in ("step", "epoch"))
    in_order = np.all(np.diff(epochs) >= 0) and np.all(epochs <= epoch)
    if not (in_order and np.array_equal(steps, np.arange(1, step + 1))):
        raise Unsound("has a history whose steps are not in order")


#
# The states of callbacks
#


def state_of(callback: Callback) -> CallbackState:
    found, _ = jax.tree_util.tree_flatten_with_path(callback.state())
    paths = [jax.tree_util.keystr(path) for path, _ in found]
    return CallbackState(type(callback).__qualname__, paths, [leaf for _, leaf in found])


def give_back(
    states: Sequence[CallbackState],
    callbacks: Sequence[Callback],
    like_array: Callable[[np.ndarray, Array], Array],
) -> bool:
    """Restore the callbacks' states; return whether they fit the callbacks."""
    # Callbacks without a state may be added or removed.
    callbacks = [callback for callback in callbacks if state_of(callback).leaves]
    states = [state for state in states if state.leaves]
    own = [state_of(callback) for callback in callbacks]
    if list(map(_form, own)) != list(map(_form, states)):
        return False
    for callback, state, like in zip(callbacks, states, own, strict=True):
        leaves = [
            _like(leaf, of, like_array)
            for leaf, of in zip(state.leaves, like.leaves, strict=True)
        ]
        structure = jax.tree.structure(callback.state())
        callback.restore(jax.tree.unflatten(structure, leaves))
    return True


class _Key(NamedTuple):
    """A random key whose implementation is known only by the run that is resumed."""

    numbers: np.ndarray


def _form(state: CallbackState) -> tuple:
    """Return the part of a state that stays the same during a run."""
    forms = []
    for leaf in state.leaves:
        key = isinstance(leaf, _Key) or is_key(leaf)
        numbers = leaf.numbers if isinstance(leaf, _Key) else leaf
        forms.append(_kind(as_numpy(numbers)) if key else np.shape(leaf))
    return state.callback, state.paths, forms


def _like(leaf: Any, own: Any, like_array: Callable[[np.ndarray, Array], Array]) -> Any:
    """Return a saved leaf; JAX arrays get the sharding of the run's `own` leaf."""
    if isinstance(leaf, _Key):
        return like_array(leaf.numbers, own)
    if isinstance(leaf, jax.Array) and isinstance(own, jax.Array):
        return like_array(as_numpy(leaf), own)
    return leaf


_ARRAYS = ("array", "jax", "key", "scalar")
_PLAIN = {"bool": bool, "int": int, "float": float, "str": str}


def _pack_leaf(leaf: Any, callback: str) -> tuple[str, Any]:
    """Return the kind of a leaf, and its value as an array or a JSON value."""
    if isinstance(leaf, jax.Array):
        return "key" if is_key(leaf) else "jax", as_numpy(leaf)
    if isinstance(leaf, np.ndarray | np.generic) and storable(leaf.dtype):
        kind = "array" if isinstance(leaf, np.ndarray) else "scalar"
        return kind, np.asarray(leaf)
    for kind, of in _PLAIN.items():
        if type(leaf) is of:
            return kind, leaf
    if type(leaf) is complex:
        return "complex", [leaf.real, leaf.imag]
    raise CheckpointError(
        f"The state of the callback `{callback}` holds a {type(leaf).__name__}, which a "
        "checkpoint cannot hold: let `state` return arrays, numbers and strings."
    )


def _unpack_leaf(kind: Any, x: Any) -> Any:
    if kind == "key":
        return _Key(x)
    if kind == "jax":
        return jnp.asarray(x)
    if kind == "scalar":
        _require(x.shape == ())
        return x[()]
    if kind == "array":
        return x
    if kind == "complex":
        _require(len(x) == 2 and all(type(part) is float for part in x))
        return complex(*x)
    _require(type(x) is _PLAIN[kind])
    return x


def _kind(array: np.ndarray) -> tuple[tuple[int, ...], np.dtype]:
    return array.shape, array.dtype


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError
