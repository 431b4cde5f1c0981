"""The settings, and what is read off runs."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from ... import thresholds
from ...experiment import only, Runs, Settings
from ...thresholds import Threshold
from .methods import METHODS
from .tasks import Task


@dataclasses.dataclass(frozen=True)
class Optimisers(Settings):
    seeds: int = 5
    tasks: tuple[Task, ...] = ()
    methods: tuple[str, ...] = tuple(METHODS)
    num_trials: int = 7
    """Of the values of each method's parameter, those in the middle."""
    part_of_guessing: float = thresholds.PART_OF_GUESSING

    def tried(self, method: str) -> list[float]:
        """From the middle outwards, so that what takes long is given up early."""
        values = METHODS[method].values
        middle = (len(values) - 1) / 2
        order = sorted(range(len(values)), key=lambda i: abs(i - middle))
        return [values[i] for i in order[: self.num_trials]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one method on one task and batch, a number a seed; of a run that has not reached
    the target, what it would at least have taken."""

    steps: Float[ndarray, " seeds"]
    seconds: Float[ndarray, " seeds"]
    passes: Float[ndarray, " seeds"]
    feature_updates: Float[ndarray, " seeds"]
    reached: Bool[ndarray, " seeds"]
    value: float
    at_edge: bool
    """Of the values that were tried: there may be better ones beyond."""

    def median(self, name: str) -> float:
        """Of all seeds; infinite where half of the runs or more have not got there."""
        return float(np.median(np.where(self.reached, getattr(self, name), np.inf)))


def outcome(
    settings: Optimisers, all_runs: Sequence[Runs], task: Task, batch_size: int, name: str
) -> Outcome:
    runs = only(all_runs, task=task.name, batch_size=batch_size, method=name)
    reached = runs["reached"] > 0
    # One that has ended early goes on, as it were, at its own pace.
    longer = np.maximum(np.where(reached, 1.0, task.most_passes / runs["passes"]), 1.0)
    value = float(runs["value"][0])
    tried = settings.tried(name)
    return Outcome(
        runs.final("steps") * longer,
        runs.final("seconds") * longer,
        runs["passes"] * longer,
        runs["feature_updates"] * longer,
        reached,
        value,
        value in (min(tried), max(tried)),
    )


def log_ratio(
    ours: Outcome, theirs: Outcome, name: str, threshold: Threshold | None = None
) -> Float[ndarray, " seeds"]:
    """log10 of ours over theirs. Where one has not got there it is a bound, which is
    taken if it lies on its side of the threshold, and says nothing, NaN, if not."""
    ratio = np.log10(getattr(ours, name) / getattr(theirs, name))
    known = ours.reached & theirs.reached
    if threshold is not None:
        known |= ours.reached & (ratio < threshold.below)
        known |= theirs.reached & (ratio > threshold.below)
    return np.where(known, ratio, np.nan)
