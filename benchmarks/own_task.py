"""A user's own task in one Python file: a model of one example, and data.

def model(key): ...      # an Equinox module, or a pair of a module and its state
def data(seed): ...      # (inputs, targets) for training, for validation, for testing
settings = {"learning_rate": 0.1}      # optional: settings of the experiment, by name

Targets that are whole numbers are classes; other numbers are values
(`benchmarks/scores.py`).
"""

import functools
import hashlib
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, Literal, NamedTuple

import equinox as eqx
import jax
import numpy as np

from ._options import Refusal
from .scores import are_classes


HAS_STATE = (
    "has state, which this experiment cannot train; `k-vs-lambda`, `batch` and "
    "`kernel-drift` can, and so can `mnist-k` and `data-scaling` with a --grid of finite "
    "K."
)


class OwnTask(NamedTuple):
    model: Callable[[Any], Any]
    data: Callable[[int], Any]
    settings: Mapping[str, Any]
    digest: str
    """The digest of the file, so that runs of different versions are not mixed."""


def is_own(data: str) -> bool:
    """Test whether a setting's `data` is the file of a user's own task."""
    return data.endswith(".py")


def named(path: Path) -> str:
    """Return the name of the task, with the digest of its file."""
    return f"{path.stem} {read(str(path)).digest}"


@functools.lru_cache
def read(path: str) -> OwnTask:
    if not Path(path).is_file():
        raise Refusal(f"There is no file '{path}'.")
    try:
        found = runpy.run_path(path)
        text = Path(path).read_bytes()
    except Exception as error:
        raise Refusal(f"The task '{path}' cannot be run ({_said(error)}).") from None
    for name in ("model", "data"):
        if not callable(found.get(name)):
            raise Refusal(
                f"The task '{path}' has no function '{name}'; a task must define "
                "`model(key)` and `data(seed)`, as in docs/own-task.md."
            )
    settings = found.get("settings", {})
    if not isinstance(settings, Mapping):
        raise Refusal(f"`settings` of the task '{path}' must be a dictionary.")
    digest = hashlib.sha256(text).hexdigest()[:12]
    return OwnTask(found["model"], found["data"], settings, digest)


def draw(path: str, num_train: int | None, seed: int) -> Any:
    """Return training, validation and test data."""
    train, validation, test = _drawn(path, seed)
    number = len(train[0])
    if num_train is not None and num_train > number:
        raise Refusal(
            f"The task '{path}' has {number:,} training examples, but {num_train:,} are "
            "requested; set a smaller `num_train`, or smaller `sizes`, in its `settings`."
        )
    first = _drawn(path, 0) if seed != 0 else (train, validation, test)
    if any(
        x.shape != y.shape
        for part, other in zip(first, (train, validation, test), strict=True)
        for x, y in zip(part, other, strict=True)
    ):
        raise Refusal(
            f"`data(seed)` of the task '{path}' must return arrays of the same shapes "
            "for all seeds."
        )
    return tuple(x[:num_train] for x in train), validation, test


@functools.lru_cache(maxsize=64)
def _drawn(path: str, seed: int) -> Any:
    try:
        parts = read(path).data(seed)
    except Exception as error:
        raise Refusal(
            f"`data({seed})` of the task '{path}' fails ({_said(error)})."
        ) from None
    try:
        parts = tuple(tuple(map(np.asarray, part)) for part in parts)
        good = [
            len(x) == len(y) > 0 and x.dtype.kind in "iuf" and y.dtype.kind in "iuf"
            for x, y in parts
        ]
    except (TypeError, ValueError):
        good = []
    if good != [True] * 3:
        kinds = {getattr(x, "dtype", None) for x in jax.tree.leaves(parts)}
        how = ", not booleans: write `.astype(int)`" * (np.dtype(bool) in kinds)
        raise Refusal(
            f"`data(seed)` of the task '{path}' must return three pairs of inputs and "
            "targets, for training, validation and testing, each of two arrays of "
            f"numbers with the same length{how}."
        )
    if not all(np.isfinite(array).all() for part in parts for array in part):
        raise Refusal(f"The data of the task '{path}' are not finite at seed {seed}.")
    return parts


def check(path: str, num_train: int | None = None) -> None:
    """Raise `Refusal` if the model does not suit the data, or if there are too few."""
    (inputs, targets), *others = parts = draw(path, num_train, 0)
    kinds = lambda part: [(x.shape[1:], x.dtype.kind == "f") for x in part]
    for name, part in zip(("validation", "test"), others, strict=True):
        if kinds(part) != kinds((inputs, targets)):
            raise Refusal(
                f"The {name} data of the task '{path}' are {_shapes(part)} for each "
                f"example, but the training data are {_shapes((inputs, targets))}; make "
                "them alike."
            )

    def outputs_of(key, inputs):
        model, state = with_state(read(path).model(key))
        if state is None:
            return jax.vmap(model)(inputs)
        call = jax.vmap(model, (0, None), (0, None), axis_name="batch")
        return call(inputs, state)[0]

    try:
        outputs = eqx.filter_eval_shape(outputs_of, jax.random.key(0), inputs)
    except Exception as error:
        raise Refusal(
            f"The model of the task '{path}' fails on examples of shape "
            f"{inputs.shape[1:]} ({_said(error)})."
        ) from None
    shape = getattr(outputs, "shape", None)
    if shape is None or not jax.numpy.issubdtype(outputs.dtype, jax.numpy.floating):
        raise Refusal(f"The model of the task '{path}' must return one array of numbers.")
    if not are_classes(targets):
        if shape != targets.shape:
            raise Refusal(
                f"For each example, the outputs of the task '{path}' have shape "
                f"{shape[1:]}, but the targets have shape {targets.shape[1:]}; make the "
                "shapes equal, or the targets whole numbers if they are classes."
            )
        return
    if not shape[1:]:
        raise Refusal(
            f"The model of the task '{path}' returns one number, but its targets are "
            "classes; give it an output for each class, such as two for two classes."
        )
    if shape[:-1] != targets.shape:
        raise Refusal(
            f"For each example, the outputs of the task '{path}' have shape "
            f"{shape[1:]}, so its classes must have shape {shape[1:-1]}, but they have "
            f"shape {targets.shape[1:]}; make the targets real numbers if they are "
            "values."
        )
    low = min(int(y.min()) for _, y in parts)
    high = max(int(y.max()) for _, y in parts)
    if low < 0 or high >= shape[-1]:
        raise Refusal(
            f"The model of the task '{path}' has {shape[-1]} outputs, but the classes "
            f"are {low} to {high}; number the classes from 0, and give the model an "
            "output for each."
        )


def check_stateless(path: str) -> None:
    """Raise `Refusal` if the model has state."""
    _, state = with_state(read(path).model(jax.random.key(0)))
    if state is not None:
        raise Refusal(f"The model of the task '{path}' {HAS_STATE}")


def with_state(made: Any) -> tuple[Any, Any]:
    """Return the model and its state, which is `None` if it has none."""
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], eqx.nn.State):
        return made
    return made, None


def of_kind(kind: Any, value: Any) -> Any:
    """Convert the value to the annotated type of a setting; raise `TypeError` if it has
    another type."""
    parts = get_args(kind)
    if get_origin(kind) is tuple and isinstance(value, tuple | list) and value:
        return tuple(of_kind(parts[0], each) for each in value)
    if get_origin(kind) is UnionType:
        some = [part for part in parts if part is not NoneType]
        return None if value is None else of_kind(some[0], value)
    if get_origin(kind) is Literal and value in parts:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is kind:
        return value
    raise TypeError


def described(kind: Any) -> str:
    """Describe the annotated type of a setting, for a message."""
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        return f"a list, and each element {described(parts[0])}"
    if get_origin(kind) is UnionType:
        return f"{described(parts[0])}, or None"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    return {int: "a whole number", float: "a number"}.get(kind, f"a {kind.__name__}")


def _shapes(part: tuple[np.ndarray, np.ndarray]) -> str:
    """Describe the inputs and targets of one example."""
    each = [f"{'real' if x.dtype.kind == 'f' else 'whole'} {x.shape[1:]}" for x in part]
    return " and ".join(each)


def _said(error: Exception) -> str:
    """Describe the error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
