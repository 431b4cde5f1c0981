"""The experiment on the ratio of the longest step: rows match a run by hand; verdicts,
table and figure come from the runs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import gnlin
from benchmarks.__main__ import main
from benchmarks.data import nist
from benchmarks.experiment import Place, Runs
from benchmarks.experiments import ratio
from benchmarks.verdicts import CONFIRMED, NOT_TESTED, REFUTED


SETTINGS = dataclasses.replace(
    ratio.QUICK, seeds=6, problems=("network-16", "burgers"), ratios=(0.1, 0.5)
)


def test_the_default_is_gnlins():
    assert gnlin.damping.LongestStep().ratio == ratio.DEFAULT
    assert ratio.DEFAULT in ratio.swept(dataclasses.replace(SETTINGS, ratios=(0.9,)))


@pytest.mark.exhaustive
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


@pytest.mark.slow
def test_ended_runs_keep_their_loss_and_losses_below_rounding_count_as_rounding():
    x = jnp.linspace(0, 1, 5)
    model = (lambda y, x: y * x, jnp.ones(()))
    data, looks = (x, 3 * x), np.array([1, 50])
    losses = ratio.losses_after(looks, model, data, gnlin.LevenbergMarquardt())
    first = 0.5 * np.sum((2 * np.asarray(x)) ** 2)
    assert losses[0] < first
    assert losses[1] == pytest.approx(1e-28 * first)


def test_burgers_residuals_vanish_where_nothing_moves():
    """A constant solves Burgers' equation, and misses the initial condition by the
    sine."""
    constant = lambda x: jnp.asarray(2.0) + 0 * x[0]
    groups = ratio.PROBLEMS["burgers"].data()
    inside, start = groups["interior"], groups["start"]
    of_all = lambda group: jax.jit(jax.vmap(lambda x: group.fn(constant, x)))
    residuals = of_all(inside)(inside.data)
    np.testing.assert_allclose(residuals, np.zeros(512), atol=1e-12)
    residuals = of_all(start)(start.data)
    x = -1 + np.arange(64) / 32
    np.testing.assert_allclose(residuals, 2 + np.sin(np.pi * x), atol=1e-12)
    t, x = np.asarray(inside.data).T
    assert 0 <= t.min() < 0.1 < 0.9 < t.max() <= 1
    assert -1 <= x.min() < -0.9 < 0.9 < x.max() <= 1


@pytest.mark.slow
def test_fits_match_optimistix():
    settings = dataclasses.replace(ratio.QUICK, fits=("Misra1a",))
    columns = ratio.train(settings, {"problem": ratio.FITS, "ratio": 0.5}, Place())
    problem = nist.load("Misra1a")
    solution = optx.least_squares(
        problem.residuals,
        gnlin.LevenbergMarquardt(damping=gnlin.damping.LongestStep(0.5)),
        jnp.asarray(problem.starts[1]),
        (jnp.asarray(problem.x), jnp.asarray(problem.y)),
    )
    assert columns["fit"].tolist() == [["Misra1a 1"], ["Misra1a 2"]]
    assert columns["steps"][1, 0] == int(solution.stats["num_steps"])
    assert columns["solved"].all()


#
# Verdicts, table and figure of made-up runs
#


def runs_of(point, losses, steps):
    """Make up the loss at the second look, and the steps of three fits."""
    if point["problem"] == ratio.FITS:
        steps = np.array([[steps], [2 * steps], [7]])
        solved = np.array([[True], [True], [point["ratio"] > 0.2]])
        return Runs(point, {"fit": steps.astype(str), "steps": steps, "solved": solved})
    spread = 1 + 0.01 * np.arange(6)
    loss = np.stack([np.ones(6), losses[point["problem"]][point["ratio"]] * spread], 1)
    return Runs(point, {"steps": np.tile(SETTINGS.looks, (6, 1)), "loss": loss})


def made_up(network, valley, steps):
    """Make up, for each ratio, the losses on both problems and the steps of the fits."""
    named = lambda values: dict(zip((0.1, 0.25, 0.5), values, strict=True))
    losses = {"network-16": named(network), "burgers": named(valley)}
    return [
        runs_of(point, losses, named(steps)[point["ratio"]])
        for point in ratio.points(SETTINGS)
    ]


AS_CLAIMED = made_up([1e-3, 2e-4, 1e-4], [1e-6, 5e-6, 1e-5], [100, 102, 104])


def test_verdicts_use_the_loss_at_the_judged_look():
    verdicts = ratio.judge_all(SETTINGS, AS_CLAIMED)
    assert [v.outcome for v in verdicts[:-1]] == [CONFIRMED] * 5
    estimates = np.log10([2, 5, 5, 10, 0.1])
    # No ratio is best on both problems; the default, at 5 times the least loss, is
    # nearest.
    np.testing.assert_allclose([v.estimate for v in verdicts[:-1]], estimates)
    # The third fit is not solved at every ratio.
    assert (verdicts[-1].num_seeds, verdicts[-1].num_left_out) == (2, 1)
    np.testing.assert_allclose(verdicts[-1].estimate, np.log10(1.04))


def test_false_claims_are_refuted():
    found = made_up([1e-4, 1e-2, 1e-2], [1e-6, 1e-4, 1e-4], [100, 150, 100])
    outcomes = [verdict.outcome for verdict in ratio.judge_all(SETTINGS, found)]
    assert outcomes[:4] == [REFUTED] * 4
    assert outcomes[4] == CONFIRMED


def test_ratios_with_equal_losses_are_equally_good():
    found = made_up([1e-28] * 3, [1e-6, 5e-6, 1e-5], [100, 102, 104])
    verdicts = ratio.judge_all(SETTINGS, found)
    assert [verdicts[0].outcome, verdicts[3].outcome] == [CONFIRMED, NOT_TESTED]


def test_the_quotient_on_burgers_is_of_its_two_ratios_at_the_last_look():
    settings = dataclasses.replace(SETTINGS, ratios=(0.075, 0.75))
    losses = {0.075: 1e-6, 0.25: 1e-9, 0.75: 2e-5}
    both = dict.fromkeys(SETTINGS.problems, losses)
    runs = [runs_of(point, both, 100) for point in ratio.points(settings)]
    verdict = ratio.judge_all(settings, runs)[-2]
    assert (verdict.outcome, verdict.num_seeds) == (CONFIRMED, 6)
    assert verdict.estimate == pytest.approx(-np.log10(20))


def test_ratios_on_one_side_of_the_default_do_not_tell_which_side_is_better():
    settings = dataclasses.replace(SETTINGS, ratios=(0.5,))
    verdicts = ratio.judge_all(settings, AS_CLAIMED)
    assert [v.outcome for v in verdicts[3:5]] == [NOT_TESTED] * 2


def test_the_table_has_the_best_in_bold_where_some_are_worse():
    lines = ratio.table(SETTINGS, AS_CLAIMED).splitlines()
    assert lines[0] == "| | steps | 0.1 | 0.25 | 0.5 |"
    assert lines[2].endswith("| 2 | 1.0e+00 | 1.0e+00 | 1.0e+00 |")
    assert lines[3] == "|  | 5 | 1.0e-03 | 2.0e-04 | **1.0e-04** |"
    assert lines[-2].endswith("| **141.4** | 144.2 | 147.1 |")
    assert lines[-1].endswith("| 2 | **3** | **3** |")


@pytest.mark.slow
def test_the_figure_has_a_panel_a_problem(tmp_path):
    captions = ratio.draw(SETTINGS, AS_CLAIMED, tmp_path)
    assert set(captions) == {"ratio"}
    assert (tmp_path / "ratio.png").stat().st_size > 10_000
    assert (tmp_path / "ratio.md").read_text() == ratio.table(SETTINGS, AS_CLAIMED)


@pytest.mark.exhaustive
def test_a_quick_run_writes_its_files(tmp_path, capsys):
    assert main(["ratio", "--quick", "--out", str(tmp_path)]) == 0
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["finished"]
    assert "NIST's fits: the ratio changes" in capsys.readouterr().out
    for name in ("ratio.csv", "ratio.md", "verdicts.csv", "ratio.png", "ratio.pdf"):
        assert (tmp_path / name).exists()
