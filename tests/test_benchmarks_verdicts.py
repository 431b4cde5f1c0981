"""Verdicts follow from intervals and levels, which match independent code."""

import dataclasses
import io
import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console
from scipy import stats

from benchmarks import thresholds, verdicts
from benchmarks.thresholds import Threshold, within
from benchmarks.verdicts import (
    after_holm,
    holm,
    interval,
    judge,
    NOT_TESTED,
    print_verdicts,
    rank_correlation,
    slope,
)


VALUES = [0.5, 0.7, 0.6, 0.9, 0.4]


def bounded(**bounds):
    return Threshold("a reason", **bounds)


def judged(values=VALUES, **bounds):
    return judge("a claim", "a number", values, bounded(**(bounds or {"above": 0})))


def test_resamples_that_come_to_one_number_are_not_said_to_be_the_values():
    two_thirds = lambda values: 2 / 3
    verdict = judge("a", "b", VALUES, bounded(above=0.5), statistic=two_thirds)
    assert (verdict.low, verdict.high) == (2 / 3, 2 / 3)
    assert verdict.note == "nearly all resamples give the same value"


@pytest.mark.parametrize("number", [1, 7, 9])
def test_a_few_resamples_beyond_a_bound_count_as_they_do_in_the_interval(number):
    """Student's alone would take a skewed statistic to be further away."""
    resamples = np.ones(1_999)
    resamples[:number] = 1.6
    error = np.sqrt(6 / 5) * resamples.std()
    found = verdicts._Resampled(6, 1.0, 1.0, 1.0, resamples, error)
    share = stats.norm.ppf(number / 1_999) / np.sqrt(6 / 5)
    p = verdicts._beyond(found, 1.5, -1)
    assert p == pytest.approx(stats.t.cdf(share, 5))


@pytest.mark.parametrize("values", [[0.4, 0.7], [0.4, 0.7, 1.3], [0.1, 0.2, 0.4, 0.3]])
def test_the_interval_and_the_level_of_the_mean_of_few_seeds_are_students(values):
    # The mean of so few values has no resamples beyond Student's interval or the bound.
    found, exact = judged(values, above=-0.5), stats.ttest_1samp(values, -0.5)
    ends = tuple(exact.confidence_interval())
    assert (found.low, found.high) == pytest.approx(ends, rel=1e-10)
    assert found.p == pytest.approx(exact.pvalue, rel=1e-10)


@pytest.mark.parametrize("number", range(2, 11))
def test_no_mean_of_up_to_ten_seeds_is_surer_than_students_test(number):
    for seed in range(5):
        values = np.random.default_rng(seed).normal(1.0, 1.0, number)
        for bound in (0.0, 0.5):
            found, exact = judged(values, above=bound), stats.ttest_1samp(values, bound)
            low, high = exact.confidence_interval()
            assert found.low <= low + 1e-10
            assert found.high >= high - 1e-10
            assert found.p >= exact.pvalue * (1 - 1e-10) or values.mean() < bound


def test_the_interval_is_the_same_without_a_verdict():
    middle = lambda values: float(np.median(values))
    verdict = judge("a", "b", VALUES, bounded(above=0), statistic=middle)
    assert interval(np.array(VALUES), middle) == (verdict.low, verdict.high)


def every_mean(values):
    """Return the means of all samples with replacement, instead of random ones."""
    n = len(values)
    return np.mean(np.array(list(itertools.product(values, repeat=n))), axis=1)


def widened(n):
    """Hesterberg's level of one end, and back from it."""
    quantile = stats.t.ppf(0.025, n - 1) * np.sqrt(n / (n - 1))
    return stats.norm.cdf(quantile)


def wider(resamples, estimate, n):
    """Return the wider one of the widened percentiles and Student's interval."""
    low, high = np.quantile(resamples, [widened(n), 1 - widened(n)])
    half = stats.t.ppf(0.975, n - 1) * np.sqrt(n / (n - 1)) * np.std(resamples)
    return min(low, estimate - half), max(high, estimate + half)


def test_the_interval_is_the_wider_of_percentiles_and_students():
    found = judged()
    ends = wider(every_mean(VALUES), np.mean(VALUES), 5)
    assert found.estimate == pytest.approx(np.mean(VALUES))
    assert (found.low, found.high) == pytest.approx(ends, abs=0.02)
    student = stats.ttest_1samp(VALUES, 0).confidence_interval(0.95)
    assert found.low == pytest.approx(student.low, abs=0.005)
    assert found.high > student.high
    assert (found.condition, found.reason) == ("> 0", "a reason")
    assert (found.num_seeds, found.num_left_out) == (5, 0)


def test_with_many_seeds_the_interval_is_of_percentiles():
    values = np.random.default_rng(3).exponential(size=12)
    found = judged(values)
    means = np.random.default_rng(4).choice(values, (20_000, 12)).mean(axis=1)
    ends = np.quantile(means, [widened(12), 1 - widened(12)])
    assert (found.low, found.high) == pytest.approx(ends, abs=0.03)


def test_intervals_of_many_normal_values_are_near_students():
    values = np.random.default_rng(0).normal(size=40)
    student = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = judged(values)
    assert (found.low, found.high) == pytest.approx((student.low, student.high), abs=0.03)


def test_the_level_inverts_the_interval():
    """A bound at an end of the interval is reached at exactly the interval's level."""
    found = judged()
    for bounds in ({"above": found.low}, {"below": found.high}):
        assert judged(**bounds).p == pytest.approx(0.05, rel=0.25)


def test_the_level_matches_all_resamples():
    bound = 0.5
    share = np.mean(every_mean(VALUES) <= bound + 1e-12)
    z = stats.norm.ppf(share) * np.sqrt(4 / 5)
    assert judged(above=bound).p == pytest.approx(2 * stats.t.cdf(z, 4), rel=0.05)


def test_far_out_the_level_is_students():
    values = np.random.default_rng(1).normal(size=12)
    expected = stats.ttest_1samp(values, -3).pvalue
    assert judged(values, above=-3).p == pytest.approx(expected, rel=0.1)


def test_an_interval_covers_as_often_as_it_says():
    """Use five values, the fewest in the suite."""
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(2_000, 5))
    factor = stats.t.ppf(0.975, 4)
    # The limit of many resamples: normal, with the plain variance.
    half = factor * np.sqrt(5 / 4) * samples.std(axis=1) / np.sqrt(5)
    student = np.mean(np.abs(samples.mean(axis=1)) < half)
    found = [judged(sample) for sample in samples[:100]]
    covered = np.mean([v.low < 0 < v.high for v in found])
    assert student == pytest.approx(0.95, abs=0.02)
    assert covered == pytest.approx(0.95, abs=0.06)


@pytest.mark.parametrize("number", [2, 3, 4, 8])
def test_with_very_few_seeds_the_interval_is_no_narrower_than_students(number):
    """The percentiles stay within the data, which rarely enclose the mean."""
    rng = np.random.default_rng(number)
    covered = 0
    for _ in range(60):
        values = rng.normal(size=number)
        student = stats.ttest_1samp(values, 0)
        low, high = student.confidence_interval(0.95)
        found = judged(values)
        assert found.low <= low + 0.02 * (high - low)
        assert found.high >= high - 0.02 * (high - low)
        assert found.p >= 0.9 * student.pvalue
        # The outcome and the interval agree.
        assert (found.outcome == "undecided") == (found.low <= 0 <= found.high)
        covered += found.low <= 0 <= found.high
    assert covered >= 0.85 * 60


@pytest.mark.parametrize("values", [[0.1, 0.3], [0.0, 0.278], [0.01, 0.02, 0.09]])
def test_the_number_of_seeds_is_that_of_students_test(values):
    (number,) = map(int, re.findall(r"about (\d+) seeds would", judged(values).note))
    mean, spread = np.mean(values), np.std(values, ddof=1)
    p = lambda n: 2 * stats.t.sf(mean / spread * np.sqrt(n), n - 1)
    assert p(number) < 0.05 <= p(number - 1)


@pytest.mark.parametrize(
    ("bounds", "outcome"),
    [
        ({"above": 0}, "confirmed"),
        ({"above": 2}, "refuted"),
        ({"above": 0.6}, "undecided"),
        ({"below": 2}, "confirmed"),
        ({"below": 0.1}, "refuted"),
        ({"below": 0.6}, "undecided"),
        ({"above": 0, "below": 2}, "confirmed"),
        ({"above": 0, "below": 0.1}, "refuted"),
        ({"above": 0.6, "below": 2}, "undecided"),
    ],
)
def test_outcomes(bounds, outcome):
    found = judged(**bounds)
    assert found.outcome == outcome
    assert (found.p < 0.05) == (outcome != "undecided")


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
def test_too_few_values_or_equal_ones_are_undecided(values):
    found = judged(values)
    assert found.outcome == "undecided"
    assert found.p == pytest.approx(2 * 0.5**5 if len(values) == 5 else 1)


def test_without_values_there_is_no_test():
    found = judged([])
    assert (found.outcome, found.p, found.num_seeds) == (NOT_TESTED, 1, 0)


@pytest.mark.parametrize("value", [1.0, 6 / 7])  # the percentiles are rounded
def test_one_value_of_many_seeds_decides_by_their_number(value):
    found = judged([value] * 8)
    assert (found.outcome, found.p) == ("confirmed", pytest.approx(2 / 2**8))
    assert found.note == "all 8 values are the same"


@pytest.mark.parametrize(("number", "outcome"), [(5, "undecided"), (6, "confirmed")])
def test_a_few_equal_values_are_said_to_decide_nothing(number, outcome):
    found = judged([1.0] * number)
    assert found.outcome == outcome
    said = "so few equal values decide nothing"
    assert (said in found.note) == (outcome == "undecided")
    assert found.note.startswith(f"all {number} values are the same")
    on_the_bound = judged([0.0] * number)
    assert (said in on_the_bound.note) == (number == 5)


def test_seeds_without_a_value_are_counted_and_too_many_of_them_prevent_the_test():
    one, two = [*VALUES, np.nan], [*VALUES, np.nan, np.inf]
    assert (judged(one).outcome, judged(one).num_left_out) == ("confirmed", 1)
    assert (judged(two).outcome, judged(two).p) == (NOT_TESTED, 1)
    assert judged(two).note == "2 of 7 seeds have no value"
    why = "K = 1 did not end"
    told = judge("a", "b", two, bounded(above=0), lacking=why)
    assert told.note == f"2 of 7 seeds have no value: {why}"
    assert why not in judge("a", "b", one, bounded(above=0), lacking=why).note
    assert thresholds.MOST_LEFT_OUT == 0.25


def test_undecidable_claims_are_not_tested():
    found = judge("a claim", "a number", VALUES, bounded(above=0), untested="a ceiling")
    assert (found.outcome, found.p, found.note) == (NOT_TESTED, 1, "a ceiling")


def test_a_margin_far_above_the_noise_is_reported():
    values = 0.001 * np.array(VALUES)
    assert "from the threshold is" in judged(values, below=0.1).note
    assert judged(values, below=0.002).note == ""
    assert judged(values, above=0).note == ""
    assert "times the noise" in judge("", "", values, within(0.1, "")).note


def test_a_statistic_of_rows_is_resampled_by_rows():
    rows = np.random.default_rng(0).normal([0, 1, 5], size=(6, 3))
    statistic = lambda some: float(np.ptp(some.mean(axis=0)))
    found = judge("", "", rows, bounded(above=0), statistic=statistic)
    chosen = np.array(list(itertools.product(range(6), repeat=6)))[::7]
    all_of_them = np.ptp(rows[chosen].mean(axis=1), axis=1)
    ends = wider(all_of_them, statistic(rows), 6)
    assert found.estimate == pytest.approx(statistic(rows))
    assert (found.low, found.high) == pytest.approx(ends, abs=0.1)


#
# All verdicts together
#


def by_definition(levels, alpha):
    """Holm's procedure as he states it: reject in order until one is not rejected."""
    rejected = set()
    for step, i in enumerate(sorted(range(len(levels)), key=levels.__getitem__)):
        if levels[i] >= alpha / (len(levels) - step):
            break
        rejected.add(i)
    return rejected


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0.01, 0.3))
def test_holms_levels_reject_what_his_procedure_does(levels, alpha):
    adjusted = holm(levels)
    near = np.abs(adjusted - alpha) < 1e-9
    rejected = {i for i, level in enumerate(adjusted) if level < alpha}
    if not near.any():
        assert rejected == by_definition(levels, alpha)


def test_one_verdict_may_be_undecided_among_many():
    clear, weak = judged(np.linspace(0.9, 1.1, 20)), judged(above=0.35)
    assert weak.outcome == "confirmed"
    untested = dataclasses.replace(clear, outcome=NOT_TESTED, p=1.0)
    found = after_holm([weak, clear, untested, *[untested] * 5])
    assert found[:3] == ["undecided", "confirmed", NOT_TESTED]
    assert after_holm([weak]) == ["confirmed"]


#
# Statistics
#


def test_slopes_leave_out_missing_values():
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
    print_verdicts(
        Console(file=written, width=200), [judged(), judged([*VALUES, np.nan])]
    )
    assert "confirmed: a claim." in written.getvalue()
    assert "over 5 seeds (1 left out), p = " in written.getvalue()


def test_every_threshold_has_a_reason_and_a_bound():
    all_of_them = [x for x in vars(thresholds).values() if isinstance(x, Threshold)]
    assert len(all_of_them) > 15
    for threshold in all_of_them:
        assert threshold.reason
        assert threshold.above < threshold.below
        assert threshold.condition
    assert verdicts.CONFIDENCE == 0.95


def test_an_undecided_verdict_estimates_the_seeds_needed():
    seeds = np.random.default_rng(0).normal(0.3, 1, 12)
    verdict = judged(seeds, above=0.0)
    assert verdict.outcome == "undecided"
    (number,) = map(int, re.findall(r"about (\d+) seeds would decide it", verdict.note))
    assert number > 12
    again = np.tile(seeds, -(-number // 12))
    assert judged(again, above=0.0).outcome == "confirmed"


def test_verdicts_that_need_very_many_seeds():
    seeds = [1.0, -1.0, 1.0, -1.0, 1e-3]
    assert judged(seeds, above=0.0).note == "more than 1,000 seeds would decide it"
    assert judged([1.0], above=0.0).note == "more seeds would decide it"


def test_accuracies_are_at_the_ceiling_if_all_are():
    at, below = np.full(5, 0.99), np.full(5, 0.97)
    assert "99.0%" in verdicts.at_ceiling(at, at)
    assert verdicts.at_ceiling(at, below) == ""
    assert verdicts.at_ceiling(np.append(at, np.nan), at)
    assert verdicts.at_ceiling() == ""


def test_no_test_of_signs_gives_less_than_if_all_are_one():
    for n in (1, 5, 8):
        assert verdicts.least_exact(n) == stats.binomtest(n, n).pvalue
