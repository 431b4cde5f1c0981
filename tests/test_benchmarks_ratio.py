"""The experiment on the ratio of the longest step: a row is a run by hand, and verdicts,
table and figure are of the runs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin
from benchmarks.__main__ import main
from benchmarks.experiment import Place, Runs
from benchmarks.experiments import ratio
from benchmarks.verdicts import CONFIRMED, REFUTED


SETTINGS = dataclasses.replace(ratio.QUICK, seeds=6)
RATIOS = 0.075, 0.25, 0.75


def test_the_default_is_gnlins():
    assert gnlin.damping.LongestStep().ratio == ratio.DEFAULT
    assert ratio.DEFAULT in ratio.swept(dataclasses.replace(SETTINGS, ratios=(0.9,)))


@pytest.mark.slow
def test_a_row_is_one_run():
    settings = dataclasses.replace(ratio.QUICK, looks=(1, 3))
    columns = ratio.train(settings, {"problem": "burgers", "ratio": 0.5}, Place())
    problem = ratio.PROBLEMS["burgers"]
    solver = gnlin.LevenbergMarquardt(damping=gnlin.damping.LongestStep(0.5))
    run = gnlin.solve(
        problem.model(jax.random.key(1)), problem.data(), solver, max_steps=3
    )
    expected = [run.history.loss[1], float(run.loss)]
    np.testing.assert_allclose(columns["loss"][1], expected, rtol=1e-6)


def test_a_run_that_has_ended_keeps_its_loss_and_one_below_rounding_counts_as_it():
    x = jnp.linspace(0, 1, 5)
    model = (lambda y, x: y * x, jnp.ones(()))
    data, looks = (x, 3 * x), np.array([1, 50])
    losses = ratio.losses_after(looks, model, data, gnlin.LevenbergMarquardt())
    first = 0.5 * np.sum((2 * np.asarray(x)) ** 2)
    assert losses[0] < first
    assert losses[1] == pytest.approx(1e-28 * first)


def test_burgers_residuals_vanish_where_nothing_moves():
    """A constant solves the equation, and misses the start by the sine."""
    constant = lambda x: jnp.asarray(2.0) + 0 * x[0]
    groups = ratio.PROBLEMS["burgers"].data()
    inside, start = groups["interior"], groups["start"]
    residuals = jax.vmap(lambda x: inside.fn(constant, x))(inside.data)
    np.testing.assert_allclose(residuals, np.zeros(512), atol=1e-12)
    residuals = jax.vmap(lambda x: start.fn(constant, x))(start.data)
    x = -1 + np.arange(64) / 32
    np.testing.assert_allclose(residuals, 2 + np.sin(np.pi * x), atol=1e-12)
    t, x = np.asarray(inside.data).T
    assert 0 <= t.min() < 0.1 < 0.9 < t.max() <= 1
    assert -1 <= x.min() < -0.9 < 0.9 < x.max() <= 1


#
# Verdicts, table and figure, of runs that are made up
#


def made_up(network, burgers):
    """Runs with these losses at the last look on both problems, one a ratio."""
    spread = 1 + 0.01 * np.arange(6)
    losses = {"network-16": network, "burgers": burgers}
    runs = []
    for point in ratio.points(SETTINGS):
        last = losses[point["problem"]][RATIOS.index(point["ratio"])] * spread
        steps = np.tile(SETTINGS.looks, (6, 1))
        runs.append(Runs(point, {"steps": steps, "loss": np.stack([spread, last], 1)}))
    return runs


AS_CLAIMED = made_up([1e-3, 2e-4, 1e-4], [1e-6, 5e-6, 2e-5])


def test_verdicts_are_of_the_loss_at_the_judged_look():
    verdicts = ratio.judge_all(SETTINGS, AS_CLAIMED)
    assert [v.outcome for v in verdicts] == [CONFIRMED] * 4
    # No ratio is best on both: the default is nearest, at 5 times the least loss.
    estimates = np.log10([2, 5, 5, 1 / 20])
    np.testing.assert_allclose([v.estimate for v in verdicts], estimates)


def test_what_is_otherwise_is_refuted():
    found = made_up([1e-4, 1e-2, 1e-2], [1e-6, 1e-4, 2e-6])
    verdicts = ratio.judge_all(SETTINGS, found)
    assert [v.outcome for v in verdicts] == [REFUTED] * 4
    estimates = np.log10([100, 100, 1, 1 / 2])
    np.testing.assert_allclose([v.estimate for v in verdicts], estimates, atol=1e-12)


def test_without_both_of_its_ratios_the_claim_on_burgers_is_not_judged():
    settings = dataclasses.replace(SETTINGS, ratios=(0.075,))
    assert len(ratio.judge_all(settings, AS_CLAIMED)) == 3


def test_the_table_has_the_best_in_bold_where_others_are_worse():
    lines = ratio.table(SETTINGS, made_up([1e-3, 2e-4, 1e-4], [1e-6] * 3)).splitlines()
    assert lines[0] == "| | steps | 0.075 | 0.25 | 0.75 |"
    assert lines[2].endswith("400 points | 2 | 1.0e+00 | 1.0e+00 | 1.0e+00 |")
    assert lines[3] == "|  | 5 | 1.0e-03 | 2.0e-04 | **1.0e-04** |"
    assert lines[5] == "|  | 5 | 1.0e-06 | 1.0e-06 | 1.0e-06 |"


def test_the_figure_has_a_caption(tmp_path):
    captions = ratio.draw(SETTINGS, AS_CLAIMED, tmp_path)
    assert set(captions) == {"ratio"}
    assert (tmp_path / "ratio.png").stat().st_size > 10_000
    assert (tmp_path / "ratio.md").read_text() == ratio.table(SETTINGS, AS_CLAIMED)


@pytest.mark.slow
def test_a_quick_run_writes_what_it_promises(tmp_path, capsys):
    assert main(["ratio", "--quick", "--out", str(tmp_path)]) == 0
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["finished"]
    assert "no one ratio is best on all problems" in capsys.readouterr().out
    for name in ("ratio.csv", "ratio.md", "verdicts.csv", "ratio.png", "ratio.pdf"):
        assert (tmp_path / name).exists()
