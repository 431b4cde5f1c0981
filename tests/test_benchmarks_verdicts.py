"""Verdicts follow from intervals, and intervals from SciPy's."""

import io

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from benchmarks.verdicts import judge, print_verdicts, rank_correlation, slope


VALUES = [0.5, 0.7, 0.6, 0.9, 0.4]


def test_the_interval_is_students():
    verdict = judge("a claim", "a number", VALUES, above=0)
    expected = stats.ttest_1samp(VALUES, 0).confidence_interval(0.95)
    assert verdict.estimate == pytest.approx(np.mean(VALUES))
    assert (verdict.low, verdict.high) == pytest.approx((expected.low, expected.high))
    assert verdict.condition == "> 0"
    assert verdict.num_seeds == 5


@pytest.mark.parametrize(
    ("bounds", "outcome"),
    [
        ({"above": 0}, "confirmed"),
        ({"above": 2}, "refuted"),
        ({"above": 0.6}, "undecided at this scale"),
        ({"below": 2}, "confirmed"),
        ({"below": 0.1}, "refuted"),
        ({"below": 0.6}, "undecided at this scale"),
        ({"above": 0, "below": 2}, "confirmed"),
        ({"above": 0, "below": 0.1}, "refuted"),
        ({"above": 0.6, "below": 2}, "undecided at this scale"),
    ],
)
def test_outcomes(bounds, outcome):
    assert judge("a claim", "a number", VALUES, **bounds).outcome == outcome


@pytest.mark.parametrize("values", [[], [1.0], [1.0, np.nan], [np.nan, np.inf]])
def test_too_few_seeds_decide_nothing(values):
    assert judge("a claim", "a number", values, above=0).outcome.startswith("undecided")


def test_slopes_leave_out_what_is_missing():
    x = np.arange(5.0)
    y = np.stack([2 * x + 1, np.where(x == 2, np.nan, -x), np.full(5, np.nan)])
    np.testing.assert_allclose(slope(x, y), [2, -1, np.nan])


def test_rank_correlations():
    x = np.arange(5.0)
    rng = np.random.default_rng(0)
    y = np.stack([x**3, rng.normal(size=5), np.ones(5)])
    found = rank_correlation(x, y)
    expected = stats.spearmanr(x, y[1]).statistic
    np.testing.assert_allclose(found, [1, expected, np.nan])


def test_they_are_printed():
    written = io.StringIO()
    verdicts = [judge("a claim", "a number", VALUES, above=0)]
    print_verdicts(Console(file=written, width=200), verdicts)
    assert "confirmed" in written.getvalue()
