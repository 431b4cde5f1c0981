"""The tables of preconditioners and of rejected trials: that what is timed is right."""

import math

import pytest

from benchmarks.speed import rejected
from benchmarks.speed.task import quintic


#
# Rejected trials
#


def test_line_through_points():
    assert rejected.line((0, 5, 8), (1.0, 2.0, 2.6)) == pytest.approx((1.0, 0.2))


def test_smaller_first_dampings_reject_more_trials():
    run = rejected._outer_steps(task := quintic(50, 20), {}, 2)
    number = [
        int(run(task.parameters, task.args, damping)[0]) for damping in (1e3, 1e-3, 1e-12)
    ]
    assert number[0] == 0
    assert 0 < number[1] < number[2]


def test_rows_of_rejected_trials():
    options = {"acceleration": False, "scaling": "identity"}
    rows, cost = rejected.against_accepted(quintic(5, 20), "plain", options, 2, 3)
    assert rows[0].note == "0 rejected"
    step, trial = rows[-2:]
    assert trial.ratio == cost
    assert math.isfinite(cost)
    assert step.variant.endswith(rejected.ACCEPTED)
    assert len(rows) == len(rejected.DAMPINGS) + 2
