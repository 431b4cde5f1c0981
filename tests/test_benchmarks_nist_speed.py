"""The comparison with other libraries: its data, its oracle, and that it runs."""

import csv
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import speed_training
from benchmarks.__main__ import main
from benchmarks._options import Options
from benchmarks.data import classical, nist
from benchmarks.experiments import nist as nist_experiment, nls
from benchmarks.speed import (
    damped_step,
    inner_steps,
    picture,
    report,
    sweep,
    task as tasks,
    timing,
)
from benchmarks.speed.oracle import Oracle, relative_error
from benchmarks.speed.timing import alternate, Case, ratio, Timing


@pytest.fixture(scope="module")
def task():
    return tasks.quintic(width=5, num_examples=6)


#
# NIST
#


@pytest.mark.slow
@pytest.mark.parametrize("name", nist.MODELS)
def test_certified_parameters_have_the_certified_sum_of_squares(name):
    problem = nist.load(name)
    data = jnp.asarray(problem.x), jnp.asarray(problem.y)
    residuals = jax.jit(problem.residuals)(jnp.asarray(problem.certified), data)
    residuals = np.asarray(residuals)
    assert problem.starts.shape == (2, problem.certified.size)
    assert problem.lre(problem.certified) == nist.MAX_LRE
    if name == "Lanczos1":  # 1e-25, which 11 digits of the parameters cannot reach
        assert np.sum(residuals**2) < 1e-20
    else:
        sum_of_squares = float(np.sum(residuals**2))
        # 11 digits of the parameters: those of Lanczos's sums, 1e-11 small, fade sooner.
        assert sum_of_squares == pytest.approx(problem.sum_of_squares, rel=1e-8)


def test_lre():
    problem = nist.load("Misra1a")
    assert problem.lre(problem.certified * (1 + 1e-6)) == pytest.approx(6, abs=1e-3)
    assert problem.lre(problem.certified * 3) == 0
    assert problem.lre(problem.certified * np.nan) == 0


def test_a_solver_that_raises_gets_a_reason_and_no_credit():
    def broken(problem, start):
        raise RuntimeError("out of luck\nand more")

    row = nist_experiment.attempt(nist.load("Misra1a"), 1, "broken", broken)
    assert (row.lre, row.solved, row.steps) == (0, False, None)
    assert row.result == "RuntimeError: out of luck"


@pytest.mark.slow
def test_nist_quick_writes_its_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(nist_experiment, "QUICK", ("Misra1a", "BoxBOD"))
    nist_experiment.run(Options(tmp_path, "quick"))
    with (tmp_path / "nist.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * len(nist_experiment.QUICK)
    own = [row for row in rows if row["solver"] == "gnlin LM"]
    assert all(row["solved"] == "True" for row in own)
    assert {"problem", "start", "solver", "lre", "steps", "result"} <= rows[0].keys()
    assert json.loads((tmp_path / "settings.json").read_text())["quick"] is True
    assert "median steps" in capsys.readouterr().out


#
# Timing
#


def test_ratio_is_within_rounds():
    # A slow second round: the ratio of medians would be 1.5.
    case = Case("", "", lambda: None)
    a, b = Timing(case, (3.0, 30.0), 0.0), Timing(case, (1.0, 20.0), 0.0)
    assert ratio(a, b) == pytest.approx((3 + 1.5) / 2)


@pytest.mark.parametrize("brief", [False, True])
def test_alternate_takes_turns_and_divides_by_the_steps(brief, monkeypatch):
    monkeypatch.setattr(timing, "_BRIEF", 1e9 if brief else 0.0)
    ran = []

    def case(name, **kwargs):
        def run():
            ran.append(name)
            return jnp.zeros(())

        return Case(name, "", run, **kwargs)

    a, b = alternate([case("a", count=lambda _: 10), case("b", max_rounds=1)], 2)
    # Short cases are repeated in their turn. There are three turns, and the first is not
    # counted. The first two runs compile, and the last two measure memory.
    turns = [name for name in "aba" for _ in range(21 if brief else 1)]
    assert ran == ["a", "b", *turns, "a", "b"]
    assert len(a.seconds) == 2
    assert len(b.seconds) == 1
    assert all(s > 0 for s in a.seconds + b.seconds)


def test_a_case_that_compiles_by_itself_runs_once_only():
    compiled, ran = [], []

    def run():
        ran.append(1)
        return jnp.zeros(())

    case = Case("", "", run, compile=lambda: compiled.append(1), max_rounds=1)
    alternate([case], 3)
    assert (len(compiled), len(ran)) == (1, 1)


#
# The oracle
#


def test_oracle_against_the_normal_equations():
    phi = np.asarray(jax.random.normal(jax.random.key(0), (4, 9)))
    r = np.asarray(jax.random.normal(jax.random.key(1), (4,)))
    oracle = Oracle(phi, r)
    step = oracle.damped(0.3)
    direct = -np.linalg.solve(phi.T @ phi + 0.3 * np.eye(9), phi.T @ r)
    assert relative_error(step, direct) < 1e-12
    assert oracle.linear_residual(step, 0.3) < 1e-13
    assert oracle.linear_residual(np.zeros(9), 0.3) == pytest.approx(1)


def test_oracle_against_literal_descent():
    phi = np.asarray(jax.random.normal(jax.random.key(0), (4, 9)))
    r = np.asarray(jax.random.normal(jax.random.key(1), (4,)))
    step = np.zeros(9)
    for _ in range(20):
        step = step - 0.01 * phi.T @ (phi @ step + r)
    assert relative_error(Oracle(phi, r).descent(20, 0.01), step) < 1e-12


#
# The timed code
#


def test_task_has_the_published_sizes():
    task = tasks.quintic(width=50, num_examples=20)
    assert (task.num_parameters, task.num_outputs) == (7801, 20)
    # Descent converges without alternating, so literal steps match the formula.
    largest = np.linalg.norm(task.oracle.jacobian, ord=2) ** 2
    assert inner_steps.LEARNING_RATE * largest < 1


@pytest.mark.exhaustive
def test_damped_steps_are_solved_and_timed(task):
    rows = damped_step.in_a_loop(task, 1, num_steps=3, methods=["auto"])
    assert {row.library for row in rows} == {"hand-written", "gnlin", "optimistix"}
    assert all(0 < row.ratio < math.inf for row in rows)
    assert all(row.solved and row.step_error < 1e-8 for row in rows)
    skipped = damped_step.skipped(task, "other", "slow", "hours")
    best = picture.best_of_each([*rows, skipped])
    assert sorted((row.library, row.variant) for row in best) == [
        ("gnlin", 'DampedGaussNewton "auto"'),
        ("optimistix", "LM, Normal(CG)"),
        ("optimistix", "damped GN, Normal(CG)"),
    ]


@pytest.mark.slow
def test_inner_steps_agree_with_the_oracle(task):
    alone, outer = inner_steps.by_formula(task, num_rounds=1)
    literal = inner_steps.literally(task, largest=100)
    assert len(alone) == len(outer) == 2 * len(inner_steps.PERIODS)
    assert all(row.step_error < 1e-9 for row in alone + outer + literal)
    assert all(0 < row.ratio < math.inf for row in alone + outer + literal)


@pytest.mark.slow
def test_sweeps_have_finite_ratios(task):
    rows = sweep.in_a_loop(task, 1) + sweep.one_call(task, 1) + sweep.shares(task, 1)
    assert all(0 < row.ratio < math.inf for row in rows)
    variants = [row.variant for row in rows[:4]]
    assert variants == ["1 damping", "64 dampings", "1 period", "64 periods"]


def test_picture_and_tables(task, tmp_path, capsys):
    rows = [
        report.Row(
            "t", "gnlin", "auto", 1e-3, 1.2, 1.0, 1e-12, 1e-13, note="the default"
        ),
        report.Row("t", "other", "LM", 1.0, 1200.0, 1.0, 1e-12, 1e-13),
        report.Row("t", "wrong", "LM", 1e-6, 0.1, 1.0, 1.0, 1.0),
        damped_step.skipped(task, "slow", "LM", "hours"),
    ]
    best = picture.best_of_each(rows)
    assert [row.library for row in best] == ["gnlin", "other"]
    picture.draw(tmp_path / "speed.png", [("one", best), ("two", best)])
    assert (tmp_path / "speed.png").stat().st_size > 0
    report.print_rows(report.wide_console(), "A table", rows)
    printed = capsys.readouterr().out
    assert "1,200.00" in printed
    assert "hours" in printed


@pytest.mark.parametrize(
    ("required", "measured", "verdict"),
    [
        ("<= 1.5", 1.4, "met"),
        ("<= 1.5", 1.6, "missed"),
        (">= 1000", 2e3, "met"),
        ("> 1", 1.0, "missed"),
        ("> 1", None, "not measured"),
    ],
)
def test_verdicts(required, measured, verdict):
    assert report.Figure("it", required, measured).verdict == verdict


@pytest.mark.exhaustive
def test_training_speed_quick_writes_its_results(tmp_path, capsys):
    speed_training.run(Options(tmp_path, "quick"))
    assert "at sizes too small to judge them by" in capsys.readouterr().out
    with (tmp_path / "speed_training.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7
    for row in rows:
        assert math.isfinite(float(row["measured"])), row["what"]
    assert json.loads((tmp_path / "settings.json").read_text())["quick"] is True


@pytest.mark.slow
def test_the_classical_problems(tmp_path):
    """The problems of `--quick` are solved and reported as solved; the tables and
    profiles are written."""
    assert main(["nls", "--quick", "--out", str(tmp_path)]) == 0
    rows = list(csv.DictReader((tmp_path / "nls.csv").read_text().splitlines()))
    assert len(rows) == 3 * 3 * 2
    ours = [row for row in rows if row["solver"] == "gnlin LM"]
    assert all(row["solved"] == "True" and row["reported"] == "True" for row in ours)
    assert (tmp_path / "nls.png").stat().st_size > 10_000
    boxes = list(csv.DictReader((tmp_path / "nls_bounded.csv").read_text().splitlines()))
    assert len(boxes) == 3 * 2 * 3
    ours = [row for row in boxes if row["solver"] == "gnlin LM"]
    assert all(row["solved"] == "True" and row["reported"] == "True" for row in ours)
    # Rosenbrock's function with x up to 0.9 has the minimum (1 - 0.9)^2.
    ends = [float(r["sum_of_squares"]) for r in boxes if r["problem"] == "rosenbrock-2"]
    np.testing.assert_allclose(ends, 0.01, rtol=1e-9)
    certified = list(csv.DictReader((tmp_path / "nls_nist.csv").read_text().splitlines()))
    assert len(certified) == 2 * 2 * 2
    assert all(
        row["solved"] == "True" for row in certified if row["solver"] == "gnlin LM"
    )
    sparse = list(csv.DictReader((tmp_path / "nls_sparse.csv").read_text().splitlines()))
    assert len(sparse) == 3 * 4
    assert all(row["solved"] == "True" == row["reported"] for row in sparse)


def test_the_sparse_problems_are_the_classical_ones():
    """They have their published size and start. No residual reads many parameters."""
    published = {problem.name: problem for problem in classical.PROBLEMS}
    for n in (10, 12):
        found = [p for p in classical.sparse_ones(n) if p.name in published]
        assert found
        for problem in found:
            known = published[problem.name]
            assert problem.fn == known.fn
            np.testing.assert_allclose(problem.start, known.start)
    for problem in classical.sparse_ones(12):
        jacobian = jax.jit(jax.jacfwd(problem.residuals))
        rows = np.asarray(jacobian(jnp.asarray(problem.from_far(1.7))))
        assert np.max(np.sum(rows != 0, axis=1)) <= 7


def test_the_banded_function_matches_the_paper():
    """x_i (2 + 5 x_i^2) + 1 - sum over j != i, i - 5 <= j <= i + 1, of x_j (1 + x_j)."""
    x = np.random.default_rng(0).normal(size=9)
    expected = [
        x[i] * (2 + 5 * x[i] ** 2)
        + 1
        - sum(x[j] * (1 + x[j]) for j in range(9) if j != i and i - 5 <= j <= i + 1)
        for i in range(9)
    ]
    np.testing.assert_allclose(classical.broyden_banded(jnp.asarray(x)), expected)


def test_a_point_out_of_its_box_has_no_sum_of_squares():
    (problem,) = (p for p in classical.PROBLEMS if p.name == "rosenbrock-2")
    boxed = problem.in_a_box(np.ones(2))
    assert np.isnan(nls.sum_of_squares(boxed, np.array([0.91, 0.8])))
    assert nls.sum_of_squares(boxed, np.array([0.9, 0.81])) > 0
    for factor in nls.FACTORS:
        assert np.isfinite(nls.sum_of_squares(boxed, boxed.from_far(factor)))
