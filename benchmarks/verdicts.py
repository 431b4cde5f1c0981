"""Verdicts on claims: a statistic of the seeds, its bootstrap interval, and the outcome.

A seed is one draw of everything that varies: the initialisation, the order of batches,
and the training set and its split. Seeds are therefore independent, and are resampled.
Repeated measurements at one seed form a row, which is resampled as a whole.

The interval is the percentile interval, widened as if the resampled means were normal and
Student's quantile were used for them (Hesterberg). It stays within the statistic's own
bounds, and with few seeds it is too narrow. With at most ten it is therefore the wider
one of this and Student's, which may leave these bounds. The p-value
is found by inverting the interval. Beyond the range of the resamples it is Student's
p-value, which is close to it there. Student's interval and p-value are exact for a mean.
For other statistics, which have no exact standard error, they are approximate: the
standard error is the spread of the resamples, widened. The p-value may be smaller than an
exact test of a few seeds could give, so the page has the least p-value of such a test
beside it.

??? cite "References"

    - T. C. Hesterberg, *What Teachers Should Know About the Bootstrap*, The American
      Statistician 69, 2015, section 4.4.
    - S. Holm, *A Simple Sequentially Rejective Multiple Test Procedure*, Scandinavian
      Journal of Statistics 6, 1979.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from rich.console import Console
from scipy import special, stats

from .thresholds import CEILING, MOST_LEFT_OUT, Threshold


CONFIDENCE = 0.95
CONFIRMED, REFUTED, UNDECIDED = "confirmed", "refuted", "undecided"
NOT_TESTED = "not tested at this scale"
Outcome = Literal["confirmed", "refuted", "undecided", "not tested at this scale"]

MANY = 10
"""A margin is reported if it is at least this many times the noise, which is half the
width of the interval."""
_MANY_SEEDS = 1_000
"""If deciding a claim would take more seeds than this, only that is said."""
_FEW = 11
"""With fewer seeds than this, the interval is no narrower than Student's."""
_NUM_RESAMPLES = 19_999
_NUM_OF_STATISTIC = 1_999
"""The number of resamples of a statistic other than the mean, which are computed one by
one."""
_RESOLVED = 10
"""With fewer resamples beyond a bound, their share is too uncertain."""

Statistic = Callable[[Float[ndarray, "seeds ..."]], float]


@dataclasses.dataclass(frozen=True)
class Verdict:
    claim: str
    quantity: str
    """The computed quantity. It has one value for each seed, and the estimate is their
    mean, unless it says otherwise."""
    condition: str
    """The condition that the claim puts on it."""
    reason: str
    estimate: float
    low: float
    high: float
    num_seeds: int
    num_left_out: int
    """The number of seeds without a value, for example because their runs have not
    finished training."""
    p: float
    """The smallest level at which the claim is decided."""
    outcome: Outcome
    note: str = ""


def judge(
    claim: str,
    quantity: str,
    values: Sequence[float] | Float[ndarray, "seeds ..."],
    threshold: Threshold,
    *,
    statistic: Statistic | None = None,
    untested: str = "",
    lacking: str = "",
) -> Verdict:
    """Judge a claim. It is confirmed if the interval lies between the bounds, refuted if
    it lies beyond one of them, and otherwise undecided. It is not tested if too many
    seeds have no value.

    - `values`: one for each seed. Seeds without a finite value are left out and counted.
    - `statistic`: a function of the values; their mean by default.
    - `untested`: why the runs cannot decide, such as a ceiling; empty if they can.
    - `lacking`: why seeds have no value, if any have none (`benchmarks/shortfall.py`).
    """
    values = np.asarray(values, float)
    known = np.isfinite(values).any(axis=tuple(range(1, values.ndim)))
    num_left_out = int(np.sum(~known))
    found = _resample(values[known], statistic)
    p_confirmed, p_refuted = _levels(found, threshold)
    if not len(values):
        untested = untested or "the grid has too few values"
    elif not untested and num_left_out > MOST_LEFT_OUT * len(values):
        untested = f"{num_left_out} of {len(values)} seeds have no value"
        untested += f": {lacking}" if lacking else ""
    outcome = UNDECIDED
    if untested:
        outcome = NOT_TESTED
    elif p_confirmed < 1 - CONFIDENCE:
        outcome = CONFIRMED
    elif p_refuted < 1 - CONFIDENCE:
        outcome = REFUTED
    return Verdict(
        claim,
        quantity,
        threshold.condition,
        threshold.reason,
        found.estimate,
        found.low,
        found.high,
        int(np.sum(known)),
        num_left_out,
        1.0 if untested else min(p_confirmed, p_refuted, 1.0),
        outcome,
        untested or _note(found, threshold, outcome, statistic is None),
    )


def at_ceiling(*accuracies: Float[ndarray, "seeds ..."]) -> str:
    """Explain why these accuracies cannot be distinguished, or return nothing if they
    can."""
    known = [each[np.isfinite(each)] for each in accuracies]
    lowest = min((each.mean() for each in known if len(each)), default=0.0)
    if lowest < CEILING:
        return ""
    return f"all accuracies are at the ceiling: at least {lowest:.1%}"


def interval(
    values: Float[ndarray, "seeds ..."], statistic: Statistic
) -> tuple[float, float]:
    """Return the bootstrap interval of a statistic of the seeds, which is infinite for
    one seed."""
    found = _resample(np.asarray(values, float), statistic)
    return found.low, found.high


@dataclasses.dataclass(frozen=True)
class _Resampled:
    num_seeds: int
    estimate: float
    low: float
    high: float
    resamples: Float[ndarray, " resamples"]
    error: float
    """The standard error of the estimate. It is exact for a mean."""


def _resample(
    values: Float[ndarray, "seeds ..."], statistic: Statistic | None
) -> _Resampled:
    n = len(values)
    mean = statistic is None
    assert not mean or values.ndim == 1
    of = (lambda x: float(np.mean(x))) if statistic is None else statistic
    if n < 2:
        estimate = of(values) if n else np.nan
        return _Resampled(n, estimate, -np.inf, np.inf, np.full(1, estimate), np.inf)
    expanded = 2 * special.ndtr(_widening(n) * _quantile(n)) - 1
    with warnings.catch_warnings():
        # If resamples give NaN, the interval has no ends, and the claim is undecided.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        interval = stats.bootstrap(
            (values,) if mean else (np.arange(n),),
            np.mean if mean else lambda chosen: of(values[chosen]),
            n_resamples=_NUM_RESAMPLES if mean else _NUM_OF_STATISTIC,
            batch=2_000,
            vectorized=mean,
            confidence_level=expanded,
            method="percentile",
            rng=np.random.default_rng(0),
        )
    low, high = interval.confidence_interval
    resamples = np.asarray(interval.bootstrap_distribution)
    spread = float(resamples.std())
    error = float(values.std(ddof=1) / np.sqrt(n)) if mean else _widening(n) * spread
    if np.ptp(resamples) == 0:  # percentiles of equal values may differ by rounding
        low = high = resamples[0]
    elif n < _FEW:
        half = _quantile(n) * error
        low, high = min(low, of(values) - half), max(high, of(values) + half)
    return _Resampled(n, of(values), float(low), float(high), resamples, error)


def _widening(n: int) -> float:
    """Return a factor for the spread of resampled means, whose variance divides by n."""
    return np.sqrt(n / (n - 1))


def _quantile(n: int | Int[ndarray, " k"]) -> Any:
    """Return Student's two-sided quantile for the mean of n values."""
    return stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)


def _levels(found: _Resampled, threshold: Threshold) -> tuple[float, float]:
    """Return the smallest two-sided levels at which a claim is confirmed, and refuted."""
    is_high = lambda bound: _beyond(found, bound, 1)
    is_low = lambda bound: _beyond(found, bound, -1)
    above, below = threshold.above, threshold.below
    return (
        2 * max(is_high(above), is_low(below)),
        2 * min(is_low(above), is_high(below)),
    )


def _beyond(found: _Resampled, bound: float, side: int) -> float:
    """Return the one-sided p-value for the statistic being on one side of a bound."""
    n, resamples = found.num_seeds, side * found.resamples
    distance = side * (found.estimate - bound)
    if np.isinf(bound):
        return 0.0 if distance > 0 else 1.0
    if n < 2 or not np.isfinite(found.estimate):
        return 1.0
    if np.ptp(resamples) == 0:  # the spread is unknown, so only the signs count
        return 0.5**n if distance > 0 else 1.0
    reached = np.sum(resamples <= side * bound)
    t_of = lambda number: special.ndtri(number / len(resamples)) / _widening(n)
    t = t_of(max(reached, _RESOLVED))
    if n < _FEW:
        t = -distance / found.error
    elif reached < _RESOLVED:
        t = min(t, -distance / found.error)
    if reached:  # the p-value is at least what their share gives, as in the interval
        t = max(t, t_of(reached))
    return float(stats.t.cdf(t, n - 1))


def _note(found: _Resampled, threshold: Threshold, outcome: str, is_mean: bool) -> str:
    if found.num_seeds > 1 and found.low == found.high:
        if not is_mean:
            return "nearly all resamples give the same value"
        same = f"all {found.num_seeds} values are the same"
        few = least_exact(found.num_seeds) >= 1 - CONFIDENCE
        return same + few * ", and so few equal values decide nothing"
    bounds = [b for b in (threshold.above, threshold.below) if np.isfinite(b)]
    spare = min(abs(found.estimate - bound) for bound in bounds)
    noise = (found.high - found.low) / 2
    if outcome == CONFIRMED and 0 not in bounds and spare > MANY * noise:
        return f"its distance from the threshold is {spare / noise:.0f} times the noise"
    return _what_would_decide(found, bounds) if outcome == UNDECIDED else ""


def _what_would_decide(found: _Resampled, bounds: Sequence[float]) -> str:
    """Estimate how many seeds would decide the claim, if the estimate and the spread of
    the seeds stay: the interval shrinks with their number as Student's does."""
    nearest = min(bounds, key=lambda bound: abs(found.estimate - bound))
    spare = abs(nearest - found.estimate)
    end = found.high if nearest > found.estimate else found.low
    n = found.num_seeds
    if n < 2 or not np.isfinite(end):
        return "more seeds would decide it"
    width = lambda n: _quantile(n) / np.sqrt(n)
    numbers = np.arange(n + 1, _MANY_SEEDS + 1)
    enough = abs(end - found.estimate) * width(numbers) / width(n) < spare
    if not enough.any():
        return f"more than {_MANY_SEEDS:,} seeds would decide it"
    return f"about {numbers[np.argmax(enough)]} seeds would decide it"


def least_exact(num_seeds: int) -> float:
    """Return the smallest two-sided p-value of a test of the seeds' signs."""
    return min(2.0 ** (1 - num_seeds), 1.0)


def holm(levels: Sequence[float]) -> Float[ndarray, " verdicts"]:
    """Return Holm's corrected p-values of all verdicts. Among the claims below a level,
    the probability that any is false is at most that level."""
    given = np.asarray(levels, float)
    order = np.argsort(given)
    factors = np.arange(len(given), 0, -1)
    adjusted = np.empty_like(given)
    adjusted[order] = np.maximum.accumulate(factors * given[order])
    return np.minimum(adjusted, 1)


def after_holm(verdicts: Sequence[Verdict]) -> list[Outcome]:
    """Return each outcome after Holm's correction over all verdicts. Untested claims
    count in their number."""
    levels = holm([verdict.p for verdict in verdicts])
    decided = CONFIRMED, REFUTED
    return [
        UNDECIDED if v.outcome in decided and level >= 1 - CONFIDENCE else v.outcome
        for v, level in zip(verdicts, levels, strict=True)
    ]


def slope(
    x: Float[ndarray, " points"], y: Float[ndarray, "... points"]
) -> Float[ndarray, "..."]:
    """Return the slopes of least-squares lines through the points whose `y` is finite, or
    NaN if there are fewer than three."""

    def of_one(values):
        known = np.isfinite(values)
        if known.sum() < 3:
            return np.nan
        return np.polyfit(x[known], values[known], 1)[0]

    return np.apply_along_axis(of_one, -1, np.asarray(y, float))


def mean_of_seed(values: Float[ndarray, "seeds runs"]) -> Float[ndarray, " seeds"]:
    """Return each seed's mean over its finite values; NaN if it has none."""
    known = np.isfinite(values)
    number = known.sum(axis=1)
    total = np.where(known, values, 0).sum(axis=1)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def rank_correlation(
    x: Float[ndarray, " points"], y: Float[ndarray, "... points"]
) -> Float[ndarray, "..."]:
    """Return Spearman's correlations over the points whose `y` is finite, or NaN if there
    are fewer than three, or all are equal."""

    def of_one(values):
        known = np.isfinite(values)
        if known.sum() < 3 or 0 in (np.ptp(x[known]), np.ptp(values[known])):
            return np.nan
        ranks = stats.rankdata(x[known]), stats.rankdata(values[known])
        return np.corrcoef(*ranks)[0, 1]

    return np.apply_along_axis(of_one, -1, np.asarray(y, float))


def print_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    for v in verdicts:
        left_out = f" ({v.num_left_out} left out)" if v.num_left_out else ""
        note = f" ({v.note})" if v.note else ""
        console.print(
            f"{v.outcome}: {v.claim}{note}.\n    {v.quantity}: {v.estimate:.3g}, "
            f"{CONFIDENCE:.0%} interval [{v.low:.3g}, {v.high:.3g}] over {v.num_seeds} "
            f"seeds{left_out}, p = {v.p:.1g}; claimed: {v.condition}.",
            highlight=False,
            soft_wrap=True,
        )
