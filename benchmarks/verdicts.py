"""Whether a claim held: a number a seed, its confidence interval, and what follows."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from rich.console import Console
from scipy import stats


CONFIDENCE = 0.95
CONFIRMED, REFUTED, UNDECIDED = "confirmed", "refuted", "undecided at this scale"


@dataclasses.dataclass(frozen=True)
class Verdict:
    claim: str
    quantity: str
    """What was computed, once a seed."""
    condition: str
    """What the claim says of it."""
    estimate: float
    low: float
    high: float
    """Student's interval for the mean over the seeds."""
    num_seeds: int
    outcome: Literal["confirmed", "refuted", "undecided at this scale"]


def judge(
    claim: str,
    quantity: str,
    values: Sequence[float] | Float[ndarray, " seeds"],
    *,
    above: float = -np.inf,
    below: float = np.inf,
) -> Verdict:
    """Confirmed if the interval lies between the bounds, refuted if it lies beyond one of
    them, undecided otherwise, and with fewer than two finite values."""
    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    estimate, low, high = _interval(finite)
    outcome = UNDECIDED
    if low > above and high < below:
        outcome = CONFIRMED
    elif high < above or low > below:
        outcome = REFUTED
    return Verdict(
        claim,
        quantity,
        _condition(above, below),
        estimate,
        low,
        high,
        len(finite),
        outcome,
    )


def _interval(values: Float[ndarray, " seeds"]) -> tuple[float, float, float]:
    if len(values) < 2:
        return (float(values[0]) if len(values) else np.nan), -np.inf, np.inf
    mean, error = float(values.mean()), float(stats.sem(values))
    width = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    return mean, mean - width, mean + width


def _condition(above: float, below: float) -> str:
    if np.isfinite(above) and np.isfinite(below):
        return f"between {above:g} and {below:g}"
    return f"> {above:g}" if np.isfinite(above) else f"< {below:g}"


def slope(
    x: Float[ndarray, " points"], y: Float[ndarray, "... points"]
) -> Float[ndarray, "..."]:
    """Of least-squares lines through the points whose `y` is finite; NaN where fewer than
    three are."""

    def of_one(values):
        known = np.isfinite(values)
        if known.sum() < 3:
            return np.nan
        return np.polyfit(x[known], values[known], 1)[0]

    return np.apply_along_axis(of_one, -1, np.asarray(y, float))


def rank_correlation(
    x: Float[ndarray, " points"], y: Float[ndarray, "... points"]
) -> Float[ndarray, "..."]:
    """Spearman's, of the points whose `y` is finite; NaN where fewer than three are, or
    where they are all the same."""

    def of_one(values):
        known = np.isfinite(values)
        if known.sum() < 3 or 0 in (np.ptp(x[known]), np.ptp(values[known])):
            return np.nan
        ranks = stats.rankdata(x[known]), stats.rankdata(values[known])
        return np.corrcoef(*ranks)[0, 1]

    return np.apply_along_axis(of_one, -1, np.asarray(y, float))


def print_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    for v in verdicts:
        console.print(
            f"{v.outcome}: {v.claim}.\n    {v.quantity}: {v.estimate:.3g}, "
            f"{CONFIDENCE:.0%} interval [{v.low:.3g}, {v.high:.3g}] over {v.num_seeds}; "
            f"claimed {v.condition}.",
            highlight=False,
            soft_wrap=True,
        )
