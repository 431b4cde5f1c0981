"""A verdict without values says which runs fall short of what."""

import dataclasses

import numpy as np
import pytest

from benchmarks import shortfall, training
from benchmarks.experiment import Runs
from benchmarks.experiments import k_sweep, kernel_drift
from benchmarks.verdicts import NOT_TESTED


SETTINGS = dataclasses.replace(
    k_sweep.QUICK, periods=(1.0, 1e6), other_learning_rates=(), solved_to=(1e-7,)
)


def of(point, trained, steps=(300.0, 300.0), **more):
    """Make runs of two seeds with three looks."""
    looks = lambda values: np.tile(np.asarray(values)[:, None], (1, 3))
    return Runs(
        point,
        {
            "trained": looks(np.array(trained, bool)),
            "test_accuracy": looks([0.8, 0.7]),
            "inner_steps": looks(steps),
            "feature_updates": looks([50.0, 40.0]),
            **{name: looks(values) for name, values in more.items()},
        },
    )


def descended(period, *trained, **more):
    point = {"solver": k_sweep.DESCENT, "learning_rate": 1e-3, "period": period}
    return of(point, trained, **more)


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (descended(1.0, True, True), ""),
        (
            descended(1.0, False, False),
            "K = 1 did not reach a mean training loss of 0.01 in 300 steps for 2 of 2 "
            "seeds",
        ),
        (  # the steps of the runs that fall short
            descended(10.0, True, False, steps=(420.0, 300.0)),
            "K = 10 did not reach a mean training loss of 0.01 in 300 steps for 1 of 2 "
            "seeds",
        ),
        (
            of({"solver": k_sweep.DAMPED, "period": 100.0}, (False, True)),
            "damped Gauss-Newton with K = 100 did not reach a mean training loss of 0.01 "
            "in 50 feature updates for 1 of 2 seeds",
        ),
        (
            of(
                {"solver": k_sweep.SOLVED, "tolerance": 1e-7},
                (True, True),
                unsolved=(0.0, 3.0),
            ),
            "each problem solved with tolerance = 1e-07 left problems unsolved for 1 of "
            "2 seeds",
        ),
    ],
)
def test_runs_that_are_not_counted_are_described(runs, said):
    assert shortfall.uncounted(SETTINGS, runs) == said
    kept = np.isfinite(training.counted(runs, runs.final("test_accuracy")))
    assert kept.all() == (said == "")


def test_after_two_points_the_others_are_counted():
    runs = [descended(float(k), False, True) for k in (1, 2, 5, 10)]
    said = shortfall.uncounted(SETTINGS, *runs)
    assert said.count("did not reach") == 2
    assert said.endswith(", and 2 further runs fall short")
    three = shortfall.uncounted(SETTINGS, *runs[:3])
    assert three.endswith(", and one more falls short")


def test_a_column_of_the_steps_may_be_missing():
    runs = descended(1.0, False, True)
    del runs.columns["feature_updates"]
    said = shortfall.uncounted(SETTINGS, runs)
    assert said == "K = 1 did not reach a mean training loss of 0.01 for 1 of 2 seeds"


def test_claims_about_an_untrained_period_say_so():
    solved = {"solver": k_sweep.SOLVED, "tolerance": 1e-7}
    damped = {"solver": k_sweep.DAMPED, "learning_rate": 1e-3, "period": 1e6}
    runs = [
        descended(1.0, False, False),
        descended(1e6, True, True),
        of(solved, (True, True)),
        of(damped, (True, True)),
    ]
    verdicts = k_sweep.judge_all(SETTINGS, runs)
    why = "K = 1 did not reach a mean training loss of 0.01 in 300 steps"
    lower = [v for v in verdicts if "is less accurate than K = 1" in v.claim]
    assert len(lower) == 2
    for verdict in lower:
        assert verdict.outcome == NOT_TESTED
        assert verdict.note == f"2 of 2 seeds have no value: {why} for 2 of 2 seeds"
    others = [v for v in verdicts if "approaches truncated" in v.claim]
    assert [v.outcome == NOT_TESTED for v in others] == [False, False]


def test_untrained_runs_on_mini_batches_are_told_by_the_common_rule():
    columns = {
        "train_loss": np.array([[1.0, 0.2], [1.0, 0.05]]),
        "guessing_loss": np.full((2, 2), 2.0),
        "inner_steps": np.array([[25.0, 50.0]] * 2),
        "feature_updates": np.array([[25.0, 50.0]] * 2),
        **{name: np.full((2, 1), 0.1) for name in kernel_drift.ANGLES},
    }
    runs = Runs({"period": 1}, columns)
    assert list(training.is_trained(runs)) == [False, True]  # at most 0.1
    settings = dataclasses.replace(kernel_drift.QUICK, periods=(1,))
    why = "K = 1 did not reach 5% of the training loss of constant outputs in 50 steps"
    for verdict in kernel_drift.judge_all(settings, [runs]):
        assert verdict.note == f"1 of 2 seeds have no value: {why} for 1 of 2 seeds"
