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
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from ._options import Refusal
from .scores import are_classes


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
            "requested; set a smaller number in its `settings`."
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
        raise Refusal(
            f"`data(seed)` of the task '{path}' must return three pairs of inputs and "
            "targets, for training, validation and testing, each of two arrays of "
            "numbers with the same length."
        )
    if not all(np.isfinite(array).all() for part in parts for array in part):
        raise Refusal(f"The data of the task '{path}' are not finite at seed {seed}.")
    return parts


def check(path: str) -> None:
    """Raise `Refusal` if the model does not suit the data."""
    (inputs, targets), _, _ = parts = draw(path, None, 0)

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


def with_state(made: Any) -> tuple[Any, Any]:
    """Return the model and its state, which is `None` if it has none."""
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], eqx.nn.State):
        return made
    return made, None


def like(default: Any, value: Any) -> Any:
    """Convert the value to the type of a setting's default; raise `TypeError` if it has
    another type."""
    if isinstance(default, tuple) and isinstance(value, tuple | list) and value:
        return tuple(like(default[0], each) if default else each for each in value)
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if default is None or type(value) is type(default):
        return value
    raise TypeError


def _said(error: Exception) -> str:
    """Describe the error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
