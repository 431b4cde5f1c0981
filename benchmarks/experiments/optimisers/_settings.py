"""The settings, and statistics of the runs."""

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
    """Number of values that are tried, from the middle of each method's list."""
    part_of_guessing: float = thresholds.PART_OF_GUESSING

    def tried(self, method: str) -> list[float]:
        """Return the values from the middle outwards, so that a good one comes early and
        limits the length of the other trials."""
        values = METHODS[method].values
        middle = (len(values) - 1) / 2
        order = sorted(range(len(values)), key=lambda i: abs(i - middle))
        return [values[i] for i in order[: self.num_trials]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of one method on one task and batch size, a number for each seed. They
    are lower bounds for a run that has not reached the target."""

    steps: Float[ndarray, " seeds"]
    seconds: Float[ndarray, " seeds"]
    passes: Float[ndarray, " seeds"]
    feature_updates: Float[ndarray, " seeds"]
    reached: Bool[ndarray, " seeds"]
    value: float
    at_edge: bool
    """Whether the best value is the smallest or the largest that is tried, so that there
    may be a better one beyond."""

    def median(self, name: str) -> float:
        """Return the median of all seeds; infinite if at least half of the runs do not
        reach the target."""
        return float(np.median(np.where(self.reached, getattr(self, name), np.inf)))


def outcome(
    settings: Optimisers, all_runs: Sequence[Runs], task: Task, batch_size: int, name: str
) -> Outcome:
    runs = only(all_runs, task=task.name, batch_size=batch_size, method=name)
    reached = runs["reached"] > 0
    # Extrapolate a run that has ended early at its own pace.
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
    """Return log10 of ours over theirs. If one of the two has not reached the target, the
    ratio is only a bound: it is kept if it decides on which side of the threshold the
    ratio lies, and NaN otherwise."""
    ratio = np.log10(getattr(ours, name) / getattr(theirs, name))
    known = ours.reached & theirs.reached
    if threshold is not None:
        known |= ours.reached & (ratio < threshold.below)
        known |= theirs.reached & (ratio > threshold.below)
    return np.where(known, ratio, np.nan)
