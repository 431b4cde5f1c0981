"""Tables of preconditioners and of rejected trials: the timed code is right."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from benchmarks.speed import preconditioners, rejected
from benchmarks.speed.task import quintic


#
# Rejected trials
#


def test_line_through_points():
    assert rejected.line((0, 5, 8), (1.0, 2.0, 2.6)) == pytest.approx((1.0, 0.2))


@pytest.mark.exhaustive
def test_smaller_first_dampings_reject_more_trials():
    run = rejected._outer_steps(task := quintic(50, 20), {}, 2)
    number = [
        int(run(task.parameters, task.args, damping)[0]) for damping in (1e3, 1e-3, 1e-12)
    ]
    assert number[0] == 0
    assert 0 < number[1] < number[2]


@pytest.mark.exhaustive
def test_rows_of_rejected_trials():
    options = {"acceleration": False, "scaling": "identity"}
    rows, cost = rejected.against_accepted(quintic(5, 20), "plain", options, 2, 3)
    assert rows[0].note == "0 rejected"
    step, trial = rows[-2:]
    assert trial.ratio == cost
    assert math.isfinite(cost)
    assert step.variant.endswith(rejected.ACCEPTED)
    assert len(rows) == len(rejected.DAMPINGS) + 2


#
# Preconditioners
#


def _small_layer():
    layer, (x, targets) = preconditioners._layer(60)
    return preconditioners.Setting("layer", layer, (x, targets), 1e-4, 1e-2)


@pytest.mark.exhaustive
def test_preconditioned_steps_are_solved_and_say_whether_they_pay():
    rows = preconditioners.of_one_linearisation(_small_layer(), 1)
    assert [row.variant for row in rows] == list(preconditioners._preconditioners())
    assert all(row.linear_residual <= 1.01e-4 for row in rows)
    assert all(re.search(r"\d+ iterations, \d+ \+ \d+ passes", row.note) for row in rows)
    first, *others = rows
    assert first.ratio == 1
    assert all(row.note.startswith("pays") == (row.ratio < 1) for row in others)


@pytest.mark.slow
def test_relative_residual():
    setting = _small_layer()
    fn, y = preconditioners._residuals(setting.model)
    flat, unravel = ravel_pytree(y)
    phi = jax.jacrev(lambda v: fn(unravel(v), setting.data).ravel())(flat)
    curvature = np.asarray(phi.T @ phi) + setting.damping * np.eye(flat.size)
    gradient = np.asarray(phi.T @ fn(y, setting.data).ravel())
    of_step = lambda step: preconditioners.relative_residual(
        setting.model, unravel(flat + step), setting.data, setting.damping
    )
    assert of_step(0 * flat) == pytest.approx(1)
    assert of_step(jnp.asarray(-np.linalg.solve(curvature, gradient))) < 1e-9
