"""The headline experiment at its quickest, and what it makes of its runs."""

import csv
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin
from benchmarks.__main__ import main
from benchmarks._results import PACKAGES
from benchmarks.experiment import Place, Runs
from benchmarks.experiments import k_vs_lambda
from benchmarks.experiments.k_vs_lambda._curves import (
    agreeing,
    DAMPED,
    DESCENT,
    intervals_of_ends,
    mean_error,
    share_agreeing,
    where_tested,
)
from benchmarks.experiments.k_vs_lambda._tasks import (
    KVsLambda,
    make_task,
    QUICK,
    RELU,
    SMOOTH,
    TASKS,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "new" / "folder"
    options = ["--quick", "--seeds", "1", "--out", str(out)]
    assert main(["k-vs-lambda", *options]) == 0
    return out


@pytest.mark.slow
def test_nothing_else_is_left_in_the_folder(results):
    assert {path.name for path in results.iterdir()} == {
        "filters.pdf",
        "filters.png",
        "k_vs_lambda.csv",
        "k_vs_lambda.pdf",
        "k_vs_lambda.png",
        "runs",
        "settings.json",
        "theory.pdf",
        "theory.png",
        "verdicts.csv",
    }
    assert len(list((results / "runs").iterdir())) == 2 * len(TASKS)


@pytest.mark.slow
def test_there_is_a_row_for_every_run(results):
    with (results / "k_vs_lambda.csv").open() as file:
        rows = list(csv.DictReader(file))
    settings = json.loads((results / "settings.json").read_text())["settings"]
    strengths = len(settings["periods"])
    runs = [(row["task"], row["solver"]) for row in rows]
    num_seeds = {task: make_task(QUICK, task).more_seeds for task in TASKS}
    for task in TASKS:
        assert runs.count((task, DESCENT)) == strengths * num_seeds[task]
        assert runs.count((task, DAMPED)) == strengths * num_seeds[task]
    assert len(rows) == 2 * strengths * sum(num_seeds.values())
    for row in rows:
        assert row["stable"] == "True"
        assert float(row["period"]) in settings["periods"]
        assert float(row["damping"]) > 0
        assert float(row["train_loss"]) >= 0
        assert float(row["distance"]) > 0
        assert 0 <= float(row["kernel_alignment"]) <= 1
        assert row["task"] == SMOOTH or 0 <= float(row["dead"]) < 1
        squared = "cross-entropy" not in row["task"]
        assert (row["effective_dimension"] != "") == squared
        if not squared:
            continue
        assert float(row["test_mse"]) > 0
        for part in ("squared_bias", "variance"):
            assert float(row[f"{part}_flow"]) > 0
        ratio = float(row["variance_flow"]) / float(row["variance_ridge"])
        assert 1 <= ratio < 1.6863


@pytest.mark.slow
@pytest.mark.parametrize("task", ["quintic", "quintic-tanh", "quintic-cross-entropy"])
def test_the_weakest_runs_of_both_solvers_agree(task, results):
    """One strength at which the two filters are one, to within a per cent."""
    with (results / "k_vs_lambda.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == task]
    strongest = max(float(row["damping"]) for row in rows)
    rows = [row for row in rows if row["seed"] == "0"]
    descent, damped = (row for row in rows if float(row["damping"]) == strongest)
    assert float(descent["distance"]) == pytest.approx(
        float(damped["distance"]), rel=1e-2
    )


@pytest.mark.slow
def test_settings_say_what_the_numbers_depend_on(results):
    settings = json.loads((results / "settings.json").read_text())
    assert {"python", *PACKAGES} == set(settings["versions"])
    assert settings["backend"] == jax.default_backend()
    assert settings["x64"] is True
    assert settings["scale"] == "quick"
    assert settings["settings"]["seeds"] == 1
    assert settings["run_seconds"] > 0
    assert {"platform", "date", "command"} <= set(settings)


@pytest.mark.slow
def test_the_captions_say_where_the_curves_agree(results):
    captions = json.loads((results / "settings.json").read_text())["figures"]
    assert set(captions) == {"k_vs_lambda", "filters", "theory"}
    for name in TASKS:
        title = make_task(QUICK, name).title
        assert f"{title}: lambda = " in captions["k_vs_lambda"]
    assert "0 of 104 runs diverged" in captions["k_vs_lambda"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width"), [("k_vs_lambda", 2550), ("filters", 2250), ("theory", 1950)]
)
def test_figures_are_pictures(name, width, results):
    from matplotlib.image import imread

    pixels = imread(results / f"{name}.png")
    assert pixels.shape[1] == width
    assert pixels[..., :3].std() > 0.05


def runs_of(solver, error, stable=True):
    error = np.array(error)
    columns = {
        "damping": np.broadcast_to([0.1, 1.0, 10.0, 100.0], error.shape),
        "test_error": error,
        "stable": np.broadcast_to(stable, error.shape),
        "largest_eigenvalue": np.full(error.shape, 5.0),
    }
    return Runs({"task": "quintic", "solver": solver}, columns)


@pytest.fixture
def curves():
    error = np.array([[9.0, 0.2, 0.3, 0.6], [0.1, 0.2, 0.3, 0.6]])
    stable = [[False, True, True, True], [True, True, True, True]]
    return runs_of(DESCENT, error, stable), runs_of(DAMPED, error + 0.1)


def test_what_diverged_is_in_no_mean(curves):
    mean = mean_error(curves[0])
    assert np.isnan(mean[0])
    np.testing.assert_allclose(mean[1:], [0.2, 0.3, 0.6])


def test_the_share_of_the_strengths_that_agree_is_of_mean_curves():
    error = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 1.0]])
    # Apart in each seed, and in the mean at the last strength alone.
    apart = np.array([[0.1, 0.1, 0.1, 0.1], [-0.1, -0.1, -0.1, 0.1]])
    errors = np.stack([error, error + apart], axis=1)
    assert share_agreeing(errors) == 3 / 4


def test_strengths_that_diverged_or_are_one_by_construction_are_not_tested(curves):
    descent, damped = curves
    errors = where_tested(descent, damped)
    assert np.isnan(errors[:, :, 0]).all()
    assert np.isfinite(errors[:, :, 1:3]).all()
    # The largest eigenvalue is 5 and lambda 100.
    assert np.isnan(errors[:, :, 3]).all()
    assert np.isnan(share_agreeing(np.full((2, 2, 4), np.nan)))


def test_where_all_diverged_or_all_is_flat_nothing_agrees():
    flat, gone = (
        runs_of(DESCENT, np.ones((2, 4))),
        runs_of(DAMPED, np.ones((2, 4)), False),
    )
    assert np.isnan(share_agreeing(where_tested(flat, gone)))
    assert agreeing(flat, gone) is None


@pytest.mark.parametrize(
    ("apart", "found"),
    [
        ([0, 0, 0, 0], (0.1, 100)),
        ([0, 1, 0, 0], (10, 100)),
        ([0, 0.04, 1, 0], (0.1, 1)),
        ([1, 0, 1, 1], (1, 1)),
        ([1, 1, 1, 1], None),
    ],
)
def test_the_longest_run_of_strengths_is_found(apart, found):
    error = np.array([[0.0, 1, 0, 1]])
    both = runs_of(DESCENT, error), runs_of(DAMPED, error + np.array(apart))
    assert agreeing(*both) == found


def test_a_strength_that_diverged_ends_the_range(curves):
    descent, _ = curves
    stable = [[True, False, True, True]] * 2
    assert agreeing(descent, descent) == (1, 100)
    other = runs_of(DAMPED, descent["test_error"], stable)
    assert agreeing(descent, other) == (10, 100)


def test_ends_of_the_range_are_as_uncertain_as_the_seeds_that_they_hang_on():
    error = np.array([[0.0, 1, 0, 1]] * 6)
    apart = np.zeros((6, 4))
    both = lambda: (runs_of(DESCENT, error), runs_of(DAMPED, error + apart))
    apart[:, 0] = 1
    assert intervals_of_ends(*both()) == [(1, 1), (100, 100)]
    # The mean difference is a twentieth of the range with three such seeds of six.
    apart[:, 1] = [0.12, 0.12, 0.12, 0, 0, 0]
    assert agreeing(*both()) == (10, 100)
    assert intervals_of_ends(*both()) == [(1, 10), (100, 100)]


def of_tasks(seeds, changed):
    """Runs at four strengths, of all tasks, that are the same by both solvers but for
    what is changed in those of K steps."""
    generator = np.random.default_rng(0)
    all_runs = []
    for name in TASKS:
        error = generator.uniform(0.1, 1, (seeds, 4))
        columns = runs_of(DAMPED, error).columns | {
            "damping": np.broadcast_to([1.0, 2.0, 3.0, 4.0], error.shape),
            "dead": np.full(error.shape, 0.2),
            "test_mse": error**2,
            "train_loss": error**2,
        }
        for solver in (DESCENT, DAMPED):
            more = changed(name, generator) if solver == DESCENT else {}
            moved = {
                key: columns[key] * more.get("factor", 1) ** power
                for key, power in (("test_error", 1), ("test_mse", 2), ("train_loss", 2))
            }
            dead = columns["dead"] + more.get("dead", 0)
            runs = columns | moved | {"dead": dead}
            all_runs.append(Runs({"task": name, "solver": solver}, runs))
    return all_runs


def outcomes(all_runs):
    verdicts = k_vs_lambda.judge_all(QUICK, all_runs)
    assert len(verdicts) == len(TASKS) + 5 + 3
    explained, bounded = verdicts[len(TASKS) : -3], verdicts[-3:]
    return [v.outcome for v in explained], [v.outcome for v in bounded]


def test_an_excess_of_dead_units_that_a_smooth_network_has_not_is_theirs():
    def changed(name, generator):
        if name != RELU:
            return {}
        dead = generator.uniform(0, 0.5, (8, 4))
        return {"dead": dead, "factor": 10**dead}

    explained, bounded = outcomes(of_tasks(8, changed))
    assert explained == ["confirmed"] * 5
    assert bounded == ["refuted", "confirmed", "confirmed"]


def test_an_excess_that_a_smooth_network_has_too_is_not_the_units():
    def changed(name, generator):
        if name not in (RELU, SMOOTH):
            return {}
        return {"factor": 10 ** generator.uniform(0.1, 0.5, (8, 4))}

    explained, bounded = outcomes(of_tasks(8, changed))
    # As many are dead by both solvers, in all runs.
    untested = "not tested at this scale"
    assert explained == ["confirmed", "undecided", untested, "confirmed", "refuted"]
    assert bounded == ["refuted", "refuted", "confirmed"]


def test_without_an_excess_there_is_nothing_of_it_to_be_left():
    changed = lambda name, generator: {"factor": 10 ** generator.normal(0, 0.1, (8, 4))}
    explained, _ = outcomes(of_tasks(8, changed))
    assert explained[0] == "undecided"
    assert explained[4] == "not tested at this scale"


def test_dampings_are_as_round_as_their_periods():
    task = make_task(QUICK, "quintic")
    assert [task.damping(period) for period in (100, 1e4)] == [1e5, 1e3]


MEASURED = (
    "test_error",
    "test_mse",
    "train_loss",
    "kernel_alignment",
    "dead",
    "effective_dimension",
    "squared_bias_repeated",
    *(
        f"{part}_{filter}"
        for part in ("squared_bias", "variance")
        for filter in ("ridge", "flow")
    ),
)
TINY = dataclasses.replace(
    QUICK, seeds=2, periods=(100.0, 1e5), quintic_steps=3, digits_steps=2
)


def dead_by_hand(model, inputs):
    """The share of the units that are on for none of the inputs."""
    activations, on = np.asarray(inputs), []
    for layer in model.layers[:-1]:
        activations = np.maximum(
            activations @ np.asarray(layer.weight).T + np.asarray(layer.bias), 0
        )
        on.append(activations.max(axis=0) > 0)
    return 1 - np.mean(on)


@pytest.mark.slow
@pytest.mark.parametrize("solver", [DESCENT, DAMPED])
@pytest.mark.parametrize("name", ["quintic", "quintic-cross-entropy"])
def test_a_row_is_one_run(name, solver):
    columns = k_vs_lambda.train(TINY, {"task": name, "solver": solver}, Place())
    task = make_task(TINY, name)
    (x, y), (test_x, test_y) = task.drawn(1)
    model = task.make_model(jax.random.key(1))
    for i, (period, method) in enumerate([(100, "auto"), (10**5, "flow")]):
        if solver == DAMPED:
            damping = 1 / (1e-7 * period)
            by_hand = gnlin.DampedGaussNewton(damping, form="prox-linear")
        else:
            method = "auto" if name == "quintic" else method
            by_hand = gnlin.IterativeLinearisation(period, 1e-7, method=method)
        solution = gnlin.solve(model, (x, y), by_hand, loss=task.loss, max_steps=3)
        np.testing.assert_allclose(columns["train_loss"][1, i], solution.loss, rtol=1e-6)
        outputs = jax.vmap(solution.model)(test_x)
        error = jnp.sqrt(jnp.mean((outputs - test_y) ** 2))
        if name != "quintic":
            error = jnp.mean((outputs > 0) != (test_y == 1))
        assert columns["test_error"][1, i] == pytest.approx(float(error), rel=1e-6)
        assert columns["dead"][1, i] == pytest.approx(dead_by_hand(solution.model, x))
        if name == "quintic":
            kernel = gnlin.TangentKernel(solution.model)(x).reshape(20, 20)
            damped = kernel + 1 / (1e-7 * period) * np.eye(20)
            dimension = np.trace(np.linalg.solve(damped, kernel))
            found = columns["effective_dimension"][1, i]
            assert found == pytest.approx(float(dimension), rel=1e-6)
            assert columns["test_mse"][1, i] == pytest.approx(float(error) ** 2)
        assert columns["period"][1, i] == period


@pytest.mark.slow
def test_descent_at_too_large_a_rate_is_counted_as_diverged():
    settings = dataclasses.replace(TINY, seeds=1, digits_rate=1.0)
    runs = {
        solver: k_vs_lambda.train(settings, {"task": "digits", "solver": solver}, Place())
        for solver in (DESCENT, DAMPED)
    }
    assert not runs[DESCENT]["stable"].any()
    assert runs[DAMPED]["stable"].all()


@pytest.mark.slow
def test_what_diverged_is_told_and_drawn(tmp_path):
    settings = KVsLambda(seeds=2, periods=(100.0, 1e3, 1e5, 1e7), images_per_class=1)
    shape = 2, 4
    some = np.random.default_rng(0).uniform(0.1, 1, shape)
    columns = {
        "damping": np.broadcast_to([1e5, 1e4, 1e2, 1.0], shape),
        "stable": np.broadcast_to([False, True, True, True], shape),
        "spectrum": np.broadcast_to(np.logspace(-3, 3, 5), (*shape, 5)),
        "largest_eigenvalue": np.full(shape, 1e3),
        **dict.fromkeys(MEASURED, some),
    }
    all_runs = [Runs(point, columns) for point in k_vs_lambda.points(settings)]
    captions = k_vs_lambda.EXPERIMENT.draw(settings, all_runs, tmp_path)
    assert "20 of 80 runs diverged" in captions["k_vs_lambda"]
    assert "lambda = 1 [1, 1] to 1e+04 [1e+04, 1e+04]" in captions["k_vs_lambda"]
    assert (tmp_path / "k_vs_lambda.png").stat().st_size > 0
