"""Why seeds have no value: which runs fall short of which goal, and after how many steps.

A verdict with too few values says it (`lacking` of `judge`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from .experiment import Point, Runs
from .thresholds import PART_OF_GUESSING
from .training import enough, Given, is_trained


_DESCENT = "iterative linearisation"
"""The solver that is meant where a point has a period and names no other."""
TRAINED = f"{PART_OF_GUESSING:.0%} of the training loss of constant outputs"
"""The goal of every run that need not end at a stated loss."""
_MOST_NAMED = 2
"""The largest number of points that are described one by one."""


def untrained(*all_runs: Runs) -> str:
    """Say which runs on mini-batches `training.where_trained` leaves out, and why."""
    return short_of(TRAINED, all_runs, is_trained)


def uncounted(settings: Given, *all_runs: Runs) -> str:
    """Say which runs `training.counted` leaves out, and why."""
    said = []
    for runs in all_runs:
        if "trained" in runs.columns:
            goal = f"a mean training loss of {enough(settings)}"
            said += _falls_short(runs, runs.final("trained") > 0, goal)
        if "unsolved" in runs.columns:
            unsolved = runs.final("unsolved") > 0
            if unsolved.any():
                left = f"{named(runs.point)} left problems unsolved"
                said.append(f"{left} for {_of(unsolved)}")
    return _joined(said)


def short_of(
    goal: str,
    all_runs: Sequence[Runs],
    reached: Callable[[Runs], Bool[ndarray, " seeds"]],
) -> str:
    """Say which of these runs do not reach the goal."""
    return _joined(
        [each for runs in all_runs for each in _falls_short(runs, reached(runs), goal)]
    )


def named(point: Point) -> str:
    """Name a point in the words of a claim."""
    kinds = [x for x in point.values() if isinstance(x, str) and x != _DESCENT]
    sizes = [
        f"{'K' if key == 'period' else key.replace('_', ' ')} = {value:g}"
        for key, value in point.items()
        if not isinstance(value, str | None) and key != "learning_rate"
    ]
    return " with ".join(", ".join(each) for each in (kinds, sizes) if each)


def _falls_short(runs: Runs, reached: Any, goal: str) -> list[str]:
    missing = ~np.asarray(reached)
    if not missing.any():
        return []
    did_not = f"{named(runs.point)} did not reach {goal}"
    return [f"{did_not}{_length(runs, missing)} for {_of(missing)}"]


def _length(runs: Runs, missing: Bool[ndarray, " seeds"]) -> str:
    """Say how long the longest of these runs was, if its columns tell."""
    if "feature_updates" not in runs.columns:
        return ""
    updates = _last(runs, "feature_updates")
    in_steps = "period" in runs.point and runs.point.get("solver", _DESCENT) == _DESCENT
    if "inner_steps" in runs.columns:
        steps = _last(runs, "inner_steps")
        if in_steps or np.array_equal(steps, updates):
            return f" in {steps[missing].max():,.0f} steps"
    return f" in {updates[missing].max():,.0f} feature updates"


def _last(runs: Runs, name: str) -> Float[ndarray, " seeds"]:
    column = runs[name]
    return column[:, -1] if column.ndim > 1 else column


def _of(which: Bool[ndarray, " seeds"]) -> str:
    return f"{which.sum()} of {len(which)} seeds"


def _joined(said: Sequence[str]) -> str:
    more = len(said) - _MOST_NAMED
    others = f"{more} further runs fall short" if more > 1 else "one more falls short"
    told = [*said[:_MOST_NAMED]] + [others] * (more > 0)
    return ", and ".join(told)
