"""A user's own task, in one file: a model of one example, and data with classes.

def model(key): ...      # an Equinox module
def data(seed): ...      # (inputs, labels) to train, to validate, to test
settings = {"learning_rate": 0.1}      # optional: the experiment's, by their names
"""

import functools
import hashlib
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._options import Refusal


class OwnTask(NamedTuple):
    model: Callable[[Any], Any]
    data: Callable[[int], Any]
    settings: Mapping[str, Any]
    digest: str
    """Digest of the file, so that runs of another version are not mixed with these."""


@functools.lru_cache
def read(path: str) -> OwnTask:
    try:
        found = runpy.run_path(path)
        text = Path(path).read_bytes()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise Refusal(f"The task '{path}' cannot be run ({reason}).") from None
    for name in ("model", "data"):
        if not callable(found.get(name)):
            raise Refusal(
                f"The task '{path}' has no function '{name}'; a task is `model(key)` and "
                "`data(seed)`, as docs/benchmarks.md shows."
            )
    digest = hashlib.sha256(text).hexdigest()[:12]
    return OwnTask(found["model"], found["data"], found.get("settings", {}), digest)


def draw(path: str, num_train: int | None, seed: int) -> Any:
    """Training, validation and test data."""
    parts = read(path).data(seed)
    try:
        parts = [tuple(map(np.asarray, part)) for part in parts]
        good = [len(x) == len(y) and y.dtype.kind in "iu" for x, y in parts]
    except (TypeError, ValueError):
        good = []
    if good != [True] * 3:
        raise Refusal(
            f"`data(seed)` of the task '{path}' must return three pairs of inputs and "
            "whole labels, of the same length in each: to train, validate and test."
        )
    train, validation, test = parts
    return tuple(x[:num_train] for x in train), validation, test
