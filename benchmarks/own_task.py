"""A user's own task in one Python file: a model of one example, and data.

def model(key): ...      # an Equinox module, or a pair of a module and its state
def data(seed): ...      # (inputs, targets) for training, for validation, for testing
settings = {"learning_rate": 0.1}      # optional: settings of the experiment, by name
loss = gnlin.losses.Huber()            # optional, for `k-vs-lambda`

Targets that are whole numbers are classes; other numbers are values
(`benchmarks/scores.py`).
"""

import functools
import hashlib
import re
import runpy
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, Literal, NamedTuple

import equinox as eqx
import jax
import numpy as np

import gnlin

from ._options import Refusal
from .scores import are_classes


HAS_STATE = (
    "has state, which this experiment cannot train; `k-vs-lambda`, `batch` and "
    "`kernel-drift` can, and so can `mnist-k` and `data-scaling` with a --grid of finite "
    "K."
)


PARTS = "training", "validation", "test"


class OwnTask(NamedTuple):
    model: Callable[[Any], Any]
    data: Callable[[int], Any]
    settings: Mapping[str, Any]
    digest: str
    """The digest of the file, so that runs of different versions are not mixed."""
    loss: gnlin.authoring.AbstractLoss | None = None
    """The loss; `None` for the one that follows from the targets."""


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
    loss = _checked_loss(path, found.get("loss"))
    return OwnTask(found["model"], found["data"], settings, digest, loss)


def _checked_loss(path: str, loss: Any) -> gnlin.authoring.AbstractLoss | None:
    if loss is None:
        return None
    if not isinstance(loss, gnlin.authoring.AbstractLoss):
        of_kind = "the class" if isinstance(loss, type) else "a"
        name = loss.__name__ if isinstance(loss, type) else type(loss).__name__
        raise Refusal(
            f"`loss` of the task '{path}' must be a loss of gnlin, such as "
            "`gnlin.SoftmaxCrossEntropy(label_smoothing=0.1)`, but is "
            f"{of_kind} {name}."
        )
    if loss.reduction == "mean":
        raise Refusal(
            f"`loss` of the task '{path}' has the reduction 'mean', but the learning "
            "rate refers to the sum of the loss; leave its reduction out."
        )
    return loss.reduced("sum")


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
    alike = lambda part: [(x.shape, x.dtype.kind == "f") for x in part]
    for name, there, here in zip(PARTS, first, (train, validation, test), strict=True):
        if alike(there) != alike(here):
            raise Refusal(
                f"`data(seed)` of the task '{path}' must return arrays of the same "
                f"shapes and kinds for all seeds, but the {name} data are "
                f"{_shapes(there, 0)} at seed 0 and {_shapes(here, 0)} at seed {seed}."
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
        parts = _pairs(parts)
    except _Unfit as unfit:
        raise Refusal(
            f"`data(seed)` of the task '{path}' must return three pairs of inputs and "
            "targets, for training, validation and testing, each of two arrays of "
            f"numbers with the same length, but {unfit}."
        ) from None
    if not all(np.isfinite(array).all() for part in parts for array in part):
        raise Refusal(f"The data of the task '{path}' are not finite at seed {seed}.")
    return parts


class _Unfit(Exception):
    """Says in what the data are no three pairs."""


def _pairs(parts: Any) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    try:
        parts = list(parts)
    except TypeError:
        raise _Unfit(f"it returns a {type(parts).__name__}") from None
    if len(parts) != len(PARTS):
        raise _Unfit(f"it returns {len(parts)} of them")
    pairs = []
    for name, part in zip(PARTS, parts, strict=True):
        try:
            inputs, targets = map(np.asarray, part)
        except (TypeError, ValueError):
            raise _Unfit(f"the {name} data are not two arrays") from None
        for what, x in (("inputs", inputs), ("targets", targets)):
            if x.dtype.kind not in "iuf" or not x.ndim:
                raise _Unfit(f"the {name} {what} are {_instead(x)}")
        if len(inputs) != len(targets):
            counted = f"{len(inputs):,} {name} inputs and {len(targets):,} targets"
            raise _Unfit(f"there are {counted}")
        if not len(inputs):
            raise _Unfit(f"there are no {name} data")
        pairs.append((inputs, targets))
    return tuple(pairs)


def _instead(x: np.ndarray) -> str:
    """Describe what is no array of numbers, and say what to do."""
    if x.dtype.kind in "SU" or any(isinstance(each, str) for each in x.flat):
        return "strings: number the classes from 0"
    if x.dtype.kind == "b":
        return "booleans: write `.astype(int)`"
    return f"of type {x.dtype}" if x.ndim else "a single number"


def check(path: str, num_train: int | None = None, seeds: Sequence[int] = (0,)) -> None:
    """Raise `Refusal` if the model does not suit the data of all seeds, or if there are
    too few of them."""
    (inputs, targets), *others = draw(path, num_train, 0)
    ends = [
        (min(y.min() for _, y in parts), max(y.max() for _, y in parts))
        for parts in (draw(path, num_train, seed) for seed in (0, *seeds))
    ]
    kinds = lambda part: [(x.shape[1:], x.dtype.kind == "f") for x in part]
    for name, part in zip(PARTS[1:], others, strict=True):
        if kinds(part) != kinds((inputs, targets)):
            raise Refusal(
                f"The {name} data of the task '{path}' are {_shapes(part)} for each "
                f"example, but the training data are {_shapes((inputs, targets))}; make "
                "them alike."
            )

    def outputs_of(key, inputs):
        model, state = with_state(read(path).model(key))
        if not jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)):
            raise Refusal(
                f"The model of the task '{path}' has nothing to train; `model(key)` must "
                "return an Equinox module, or another pytree, with arrays of real "
                "numbers as parameters."
            )
        if state is None:
            return jax.vmap(model)(inputs)
        call = jax.vmap(model, (0, None), (0, None), axis_name="batch")
        return call(inputs, state)[0]

    try:
        outputs = eqx.filter_eval_shape(outputs_of, jax.random.key(0), inputs)
    except Refusal:
        raise
    except Exception as error:
        advice = ""
        if re.search(r"\bkey\b", str(error)):
            advice = (
                "; it is called without a key, so remove its dropout, or switch it off "
                "by `eqx.nn.inference_mode`"
            )
        raise Refusal(
            f"The model of the task '{path}' fails on examples of shape "
            f"{inputs.shape[1:]} ({_said(error)}){advice}."
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
        _check_loss(path, outputs, targets)
        return
    if shape[1:] == () or shape[-1] == 1:
        raise Refusal(
            f"The model of the task '{path}' returns one number, but its targets are "
            "classes, for which a single logit is not supported; give it an output for "
            "each class, such as two for two classes, or make the targets real numbers "
            "if they are values."
        )
    if shape[:-1] != targets.shape:
        raise Refusal(
            f"For each example, the outputs of the task '{path}' have shape "
            f"{shape[1:]}, so its classes must have shape {shape[1:-1]}, but they have "
            f"shape {targets.shape[1:]}; make the targets real numbers if they are "
            "values."
        )
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    if low < 0 or high >= shape[-1]:
        raise Refusal(
            f"The model of the task '{path}' has {shape[-1]} outputs, but the classes "
            f"are {low} to {high}; number the classes from 0, and give the model an "
            "output for each."
        )
    _check_loss(path, outputs, targets)


def _check_loss(path: str, outputs: jax.ShapeDtypeStruct, targets: np.ndarray) -> None:
    """Raise `Refusal` if the task's own loss does not suit the outputs and the targets.
    Warn of squared error on probabilities."""
    loss = read(path).loss
    if loss is None:
        if _are_probabilities(targets):
            warnings.warn(
                f"The targets of the task '{path}' are probabilities, but values are "
                "trained by squared error; return the classes as whole numbers, or set "
                "`loss = gnlin.SoftmaxCrossEntropy()` in the file and run `k-vs-lambda`.",
                stacklevel=2,
            )
        return
    elementwise = isinstance(loss, gnlin.authoring.AbstractElementwiseLoss)
    try:
        if elementwise and outputs.shape != targets.shape:
            raise ValueError("it needs a target for each output")
        found = jax.eval_shape(jax.vmap(loss.value), outputs, targets)
        if found.shape != targets.shape[:1]:
            raise ValueError(f"it returns the shape {found.shape[1:]} for one example")
    except Exception as error:
        raise Refusal(
            f"The loss of the task '{path}' fails on outputs of shape "
            f"{outputs.shape[1:]} and targets of shape {targets.shape[1:]} "
            f"({_said(error)}); choose one that suits them."
        ) from None


def _are_probabilities(targets: np.ndarray) -> bool:
    """Test whether each row of targets is a distribution of several classes."""
    if are_classes(targets) or targets.ndim < 2 or targets.shape[-1] < 2:
        return False
    return bool(targets.min() >= 0 and np.allclose(targets.sum(axis=-1), 1, atol=2e-3))


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


def _shapes(part: tuple[np.ndarray, np.ndarray], start: int = 1) -> str:
    """Describe the inputs and targets of one example, or of all from axis 0 on."""
    kinds = ["real" if x.dtype.kind == "f" else "whole" for x in part]
    each = [f"{kind} {x.shape[start:]}" for kind, x in zip(kinds, part, strict=True)]
    return " and ".join(each)


def _said(error: Exception) -> str:
    """Describe the error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
