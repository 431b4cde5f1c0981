"""Networks for differential equations, timed: steps match dense formulas, looks are at
the stated times, and verdicts and figures come from the runs."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import gnlin
from benchmarks import timed_training
from benchmarks.__main__ import main
from benchmarks.equations import EQUATIONS
from benchmarks.experiment import Runs
from benchmarks.experiments import pinn
from benchmarks.speed import pinn as speed
from benchmarks.timed_training import objective


HEAT = EQUATIONS["heat"]


@pytest.fixture(scope="module")
def small():
    return HEAT.model((3,), jax.random.key(0)), HEAT.groups(9)


@pytest.fixture(scope="module")
def dense(small):
    """The parameters, and the residual and Jacobian by forward derivatives."""
    model, groups = small
    trained, frozen = eqx.partition(model, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(trained)

    def residual(v):
        net = eqx.combine(unravel(v), frozen)
        parts = [
            np.sqrt(float(g.weight)) * jax.vmap(lambda x, g=g: g.fn(net, x))(g.data)
            for g in groups.values()
        ]
        return jnp.concatenate(parts)

    pair = jax.jit(lambda v: (residual(v), jax.jacfwd(residual)(v)))(flat)
    return np.asarray(flat), *map(np.asarray, pair)


def flat_of(model):
    return np.asarray(ravel_pytree(eqx.filter(model, eqx.is_inexact_array))[0])


@pytest.mark.slow
def test_the_objective_is_gnlins(small, dense):
    model, groups = small
    solution = gnlin.solve(model, groups, gnlin.DampedGaussNewton(1.0), max_steps=1)
    found = eqx.filter_jit(objective)(model, groups)
    np.testing.assert_allclose(found, solution.history.loss[0])
    np.testing.assert_allclose(found, 0.5 * np.sum(dense[1] ** 2))


@pytest.mark.slow
def test_a_natural_step_is_the_best_part_of_the_dense_one(small, dense):
    model, groups = small
    flat, residual, jacobian = dense
    new = timed_training.natural_step(model, groups)
    gramian, gradient = jacobian.T @ jacobian, jacobian.T @ residual
    step = flat_of(new) - flat
    whole = -np.linalg.lstsq(gramian, gradient, rcond=None)[0]
    halvings = np.log2(np.linalg.norm(whole) / np.linalg.norm(step))
    assert halvings == pytest.approx(round(halvings), abs=1e-4)
    np.testing.assert_allclose(step * 2.0 ** round(halvings), whole, rtol=1e-4, atol=1e-6)
    assert objective(new, groups) < objective(model, groups)


def test_rows_match_the_dense_jacobian(small, dense):
    model, groups = small
    flat, residual, jacobian = dense
    trained, frozen = eqx.partition(model, eqx.is_inexact_array)
    _, unravel = ravel_pytree(trained)
    model_at = lambda v: eqx.combine(unravel(v), frozen)
    rows_of = jax.jit(lambda v: timed_training.rows_of(model_at, v, groups))
    found, rows = rows_of(flat)
    np.testing.assert_allclose(found, residual, rtol=1e-10)
    np.testing.assert_allclose(rows, jacobian, rtol=1e-8, atol=1e-12)


def test_steps_by_hand_lower_the_objective(small):
    model, groups = small
    end, value = speed.by_hand(model, groups)
    trained, frozen = eqx.partition(model, eqx.is_inexact_array)
    new = eqx.combine(ravel_pytree(trained)[1](end), frozen)
    np.testing.assert_allclose(value, objective(new, groups))
    assert value < objective(model, groups)


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param(
            timed_training.by_gnlin(gnlin.DampedGaussNewton(1e-3)),
            marks=pytest.mark.slow,
            id="gnlin",
        ),
        pytest.param(timed_training.adam(1e-2), id="Adam"),
        pytest.param(timed_training.natural_gradients(), id="natural"),
    ],
)
def test_looks_are_on_the_way(trainer, small):
    model, groups = small
    looks = trainer(model, groups, 0.1, 5)
    seconds, steps = ([look[i] for look in looks] for i in (0, 1))
    assert 1 <= len(looks) <= 6
    assert seconds == sorted(seconds)
    assert steps == sorted(set(steps))
    assert seconds[-1] > 0
    assert objective(looks[-1].model, groups) < objective(model, groups)


@pytest.mark.exhaustive
def test_one_that_has_converged_has_a_last_look(small):
    model, groups = small
    looks = timed_training.by_gnlin(gnlin.LevenbergMarquardt())(model, groups, 60.0, 5)
    assert looks[-1].seconds < 60
    assert [look.steps for look in looks] == sorted({look.steps for look in looks})


@pytest.mark.exhaustive
def test_half_of_the_time_each(small):
    model, groups = small
    looks = timed_training.adam_then_lbfgs(1e-2)(model, groups, 0.2, 30)
    first = [look for look in looks if look.seconds < 0.1]
    assert all(look.steps % 20 == 0 for look in first)
    assert looks[-1].seconds >= 0.2
    assert objective(looks[-1].model, groups) < objective(first[-1].model, groups)


#
# The experiment
#


SETTINGS = dataclasses.replace(pinn.QUICK, sizes=pinn.TINY, seeds=2, rates=(1e-3, 1e-2))
ENDS = {
    pinn.LM: 1e-9,
    pinn.SPRING: 1e-5,
    pinn.NATURAL: 1e-7,
    pinn.ADAM: 1e-2,
    pinn.LBFGS: 1e-3,
    pinn.BOTH: 2e-3,
}


def runs_of(point):
    """Make up runs that end at `ENDS`; SPRING is fastest, and Adam's second rate best."""
    end = ENDS[point["solver"]] * (10 if point.get("rate") == 1e-3 else 1)
    errors = np.array([[1.0, end, end], [1.0, 2 * end, 2 * end]])
    seconds = np.array([[1.0, 2.0, 4.0]] * 2) * (
        2 if point["solver"] != pinn.SPRING else 1
    )
    columns = {
        "seconds": seconds,
        "steps": np.array([[1, 10, 20]] * 2),
        "error": errors,
        "coefficient_error": errors / 10,
        "u": np.zeros((2, pinn.SIDE**2, 1)),
    }
    return Runs(point, columns)


ALL_RUNS = [runs_of(point) for point in pinn.points(SETTINGS)]


def test_verdicts_use_the_last_errors():
    verdicts = pinn.judge_all(SETTINGS, ALL_RUNS)
    assert len(verdicts) == 3 * len(SETTINGS.sizes) + 2
    assert {verdict.outcome for verdict in verdicts} <= {
        "confirmed",
        "undecided",
    }
    sooner = next(verdict for verdict in verdicts if "sooner" in verdict.claim)
    np.testing.assert_allclose(sooner.estimate, np.log10(0.5))
    best = pinn.best(ALL_RUNS, "heat", pinn.ADAM)
    assert best.point["rate"] == 1e-2


def test_an_accuracy_is_reached_at_the_first_look_that_has_it():
    runs = runs_of({"equation": "heat", "solver": pinn.SPRING})
    np.testing.assert_array_equal(pinn.seconds_to(runs, 1.5e-5), [2.0, 4.0])
    np.testing.assert_array_equal(pinn.seconds_to(runs, 1e-9), [4.0, 4.0])


@pytest.mark.exhaustive
def test_figures_show_all_equations(tmp_path):
    captions = pinn.draw(SETTINGS, ALL_RUNS, tmp_path)
    assert set(captions) == {"pinn", "pinn_solutions"}
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in captions)
    assert "p = 33" in captions["pinn"]


@pytest.mark.exhaustive
def test_a_quick_run_writes_its_files(tmp_path, capsys):
    assert main(["pinn", "--quick", "--out", str(tmp_path)]) == 0
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["finished"]
    assert set(settings["figures"]) == {"pinn", "pinn_solutions"}
    assert "Levenberg-Marquardt finds it" in capsys.readouterr().out
    for name in ("pinn.csv", "verdicts.csv", "pinn.png", "pinn_solutions.pdf"):
        assert (tmp_path / name).exists()


#
# The tables
#


@pytest.mark.exhaustive
def test_steps_and_errors_are_measured():
    rows = speed.steps((3,), 9, 1)
    assert [row.library for row in rows] == ["hand-written", "gnlin", "gnlin", "gnlin"]
    assert rows[0].ratio == 1
    assert all(row.ratio > 0 for row in rows)
    rows = speed.to_an_accuracy((3,), 9, 0.2)
    assert all(0 < row.step_error < 10 for row in rows)
    assert rows[1].seconds >= rows[0].seconds
