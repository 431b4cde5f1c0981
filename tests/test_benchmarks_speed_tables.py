"""Tables of small, tall and large problems: the timed code is right."""

import math

import jax
import numpy as np
import pytest

from benchmarks.data import nist
from benchmarks.speed import (
    auto,
    costs,
    curve_fits,
    eigenpairs,
    fits,
    graph,
    kinematics,
    large,
    large_fits,
    parts,
    picture,
    report,
    small_fits,
    tall,
)


def _libraries(rows):
    return {row.library for row in rows}


def _sound(rows):
    measured = [row for row in rows if row.ratio is not None]
    assert all(row.note.startswith("skipped") for row in rows if row.ratio is None)
    assert all(0 < row.ratio < math.inf for row in measured)
    return measured


#
# Rows
#


def test_without_a_linear_residual_the_error_decides():
    row = report.Row("t", "gnlin", "LM", 1.0, 1.0, step_error=1e-5, tolerance=1e-4)
    assert row.solved
    assert not report.Row("t", "gnlin", "LM", 1.0, 1.0, step_error=1e-5).solved
    assert not report.Row("t", "gnlin", "LM", 1.0, 1.0).solved


def test_an_unsolved_fit_has_no_bar_but_another_step_has():
    fit = report.Row("t", "SciPy", "lm", 1.0, 2.0, step_error=1.0, tolerance=1e-4)
    assert picture.best_of_each([fit]) == []
    other = report.Row("t", "SciPy", "trf", 1.0, 2.0)
    assert picture.best_of_each([fit, other]) == [other]


#
# Small
#


@pytest.mark.slow
def test_fits_of_a_certified_problem():
    rows = _sound(small_fits.certified("Misra1a", 1, (1e-10,)))
    assert _libraries(rows) == {"hand-written", "gnlin", "optimistix", "jaxopt", "SciPy"}
    own, by_hand = (
        next(row for row in rows if row.library == name)
        for name in ("gnlin", "hand-written")
    )
    assert own.solved
    assert own.step_error < 1e-9
    assert by_hand.step_error < 1e-6
    assert "LRE" in own.note


def test_a_fit_that_is_not_solved_says_so():
    problem = nist.load("Misra1a")

    def lost(residuals, tolerance):
        return lambda b, data: fits.End(0 * b, np.array(1))

    choice = small_fits._choose(
        small_fits.Contender(
            "lost",
            "",
            lambda tolerance: lambda: lost(None, tolerance)(problem.starts[1], None),
        ),
        problem.certified,
        (1e-8, 1e-10),
    )
    assert choice.error == pytest.approx(1)
    assert choice.case.note.endswith("not solved")


@pytest.mark.slow
def test_curves_have_their_solutions():
    starts, data, solutions = small_fits.logistic_curves(3)
    assert starts.shape == solutions.shape
    gradient = jax.vmap(
        jax.grad(lambda b, data: 0.5 * (small_fits.residuals(b, data) ** 2).sum())
    )
    assert np.abs(gradient(solutions, data)).max() < 1e-12


@pytest.mark.exhaustive
def test_fits_at_once():
    rows = _sound(small_fits.batched(5, 1, (1e-8,)))
    assert _libraries(rows) == {"hand-written", "gnlin", "optimistix", "jaxopt", "SciPy"}
    solved = {(row.library, row.variant) for row in rows if row.solved}
    assert {("gnlin", "LM"), ("hand-written", "LM, Cholesky")} <= solved
    assert {("jaxopt", "LM, Cholesky"), ("SciPy", "lm")} <= solved


#
# Tall
#


def test_oracle_of_a_tall_problem():
    problem = tall.Problem(60, 4)
    jacobian = np.asarray(jax.jacfwd(problem.residuals)(problem.parameters, problem.args))
    residual = np.asarray(problem.residuals(problem.parameters, problem.args))
    stacked = np.concatenate([jacobian, np.sqrt(tall.DAMPING) * np.eye(4)])
    padded = np.concatenate([residual, np.zeros(4)])
    step = -np.linalg.lstsq(stacked, padded, rcond=None)[0]
    np.testing.assert_allclose(problem.exact_step, step, rtol=1e-12)
    assert problem.linear_residual(step) < 1e-13
    assert problem.linear_residual(np.zeros(4)) == pytest.approx(1)


@pytest.mark.slow
def test_tall_steps_are_solved():
    rows = tall.one_step(tall.Problem(3000, 6), 1)
    names = {"hand-written", "gnlin", "optimistix", "jaxopt", "SciPy", "somax"}
    assert _libraries(rows) == names
    steps = [row for row in _sound(rows) if row.step_error is not None]
    assert all(row.solved and row.step_error < 1e-5 for row in steps)
    own = next(row for row in steps if row.library == "gnlin")
    assert own.step_error < 1e-12


@pytest.mark.slow
def test_slow_cases_are_left_out_with_a_reason(monkeypatch):
    monkeypatch.setattr(tall, "MOST_WORK", 0)
    rows = tall.one_step(tall.Problem(50, 3), 1)
    left_out = {row.variant for row in rows if row.note.startswith("skipped")}
    assert {"LM, QR", "LM, default (QR)", "trf, exact", "lm"} <= left_out


#
# Large
#


@pytest.mark.exhaustive
def test_large_steps_are_solved():
    (comparison,) = large.comparisons(quick=True)
    rows = comparison.rows
    names = {"hand-written", "gnlin", "optimistix", "jaxopt", "SciPy", "somax"}
    assert _libraries(rows) == names
    measured = _sound(rows)
    assert all(row.solved for row in measured if row.linear_residual is not None)
    best = picture.best_of_each(rows)
    assert {"gnlin", "optimistix", "jaxopt"} <= _libraries(best)


@pytest.mark.exhaustive
def test_linear_residual_of_a_large_problem():
    problem = large.Problem(3, channels=(2,))
    assert problem.linear_residual(problem.parameters) == pytest.approx(1)
    flat, args = problem.flat.astype(float), problem.args
    residuals = lambda v: problem.residuals(problem.unravel(v), args).ravel()
    phi, r = (
        np.asarray(jax.jacrev(residuals)(problem.flat), float),
        residuals(problem.flat),
    )
    damped = phi.T @ phi + large.DAMPING * np.eye(flat.size)
    step = -np.linalg.solve(damped, phi.T @ np.asarray(r, float))
    assert problem.linear_residual(problem.unravel((flat + step).astype("f4"))) < 1e-4


#
# The method that "auto" chooses
#


@pytest.mark.exhaustive
def test_every_method_that_serves_is_beside_auto():
    problem = next(auto._problems())
    rows, factor = auto._compared(problem, "damped, 1", 2)
    methods = {"auto", "svd", "eigh", "kernel", "curvature", "matrix-free"}
    assert {row.variant for row in rows} == methods
    errors = [float(row.note.rpartition(" ")[2]) for row in rows]
    assert max(errors) < 1e-8
    # "auto" is one of those that come as far.
    assert 1 <= factor < math.inf


@pytest.mark.exhaustive
def test_the_problems_have_the_sizes_that_they_are_said_to():
    sizes = [problem.shape for problem in auto._problems()]
    assert len(sizes) * len(auto.SOLVERS) >= 40
    assert min(m for m, _ in sizes) == 10
    assert max(m for m, _ in sizes) == 10**5
    assert min(p for _, p in sizes) < 10
    assert max(p for _, p in sizes) > 5e4


@pytest.mark.exhaustive
def test_costs_of_operations():
    (comparison,) = costs.comparisons(quick=True)
    seconds = {row.variant: row.seconds for row in comparison.rows}
    assert min(seconds.values()) >= 0
    assert 0 < seconds["an operation of a matrix product"] < 1e-6
    for name in ("cholesky", "eigh", "svd"):
        assert seconds[f"{name}, n = 256"] > 0
        parts = [seconds[f"{name}, {x}"] for x in ("a call", "n^2 times", "n^3 times")]
        assert max(parts) > 0


def test_costs_are_fitted_without_negative_terms():
    n = np.array([10.0, 20.0, 40.0, 80.0])
    powers = np.stack([n**0, n**2, n**3], axis=1)
    np.testing.assert_allclose(
        costs._nonnegative(powers, powers @ [3.0, 0.0, 0.5]), [3, 0, 0.5], atol=1e-9
    )
    kept = costs._nonnegative(powers, powers @ [3.0, -1.0, 0.5])
    assert np.all(kept >= 0)


@pytest.mark.exhaustive
def test_parts_of_a_batch():
    one, unsplit, in_parts, many = _sound(parts.steps(8, 32, 64, 1))
    assert unsplit.ratio == 1
    assert in_parts.peak_bytes < unsplit.peak_bytes
    assert many.peak_bytes < 8 * one.peak_bytes


@pytest.mark.exhaustive
def test_many_bounded_fits():
    by_hand, ours, scipys = _sound(curve_fits.fitted(25, 1))
    assert by_hand.solved
    assert ours.solved
    assert _libraries([by_hand, ours, scipys]) == {fits.LIMIT, "gnlin", "SciPy"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (graph.pose_graph, (20, 50)),
        (graph.laps, (30, 4, 10)),
        (graph.sphere, (3, 8)),
        (graph.bundle, (4, 20, 80)),
    ],
    ids=["poses", "laps", "sphere", "bundle"],
)
def test_sparse_problems_are_solved_by_all(make, sizes):
    rows = _sound(graph.solved(make(*sizes), 1))
    assert len(rows) == 3
    assert all(row.solved for row in rows)


@pytest.mark.exhaustive
def test_large_fits_of_all_libraries_end_at_the_same_parameters():
    rows = _sound(large_fits.fitted(2_000))
    assert {"gnlin", "SciPy", "optimistix"} <= _libraries(rows)
    assert all(row.solved for row in rows)


@pytest.mark.exhaustive
def test_kinematics_reach_most_targets():
    ours, scipys = _sound(kinematics.solved(10, 5, 1))
    for row in (ours, scipys):
        assert int(row.note.partition(" %")[0]) >= 80


@pytest.mark.slow
def test_eigenpairs_of_all_libraries_are_as_precise():
    (comparison,) = eigenpairs.comparisons(quick=True)
    rows = _sound(comparison.rows)
    assert _libraries(rows) == {"gnlin", "SciPy", "jax"}
    assert all(row.solved for row in rows)
