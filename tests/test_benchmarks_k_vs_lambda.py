"""The main experiment at its smallest scale, and its evaluation of runs."""

import csv
import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

import gnlin
from benchmarks import verdicts
from benchmarks.__main__ import main
from benchmarks._results import PACKAGES
from benchmarks.experiment import Place, Runs
from benchmarks.experiments import k_vs_lambda
from benchmarks.experiments.k_vs_lambda._curves import (
    compared,
    DAMPED,
    DESCENT,
    difference,
    difference_at_equal_solution,
    equal_damping,
    largest_ratio,
    more_thrown_off,
    squared_errors,
    trained,
)
from benchmarks.experiments.k_vs_lambda._figures import (
    _draw_difference,
    _draw_differences,
    _mark_divergence,
    LOOKS,
)
from benchmarks.experiments.k_vs_lambda._tasks import (
    DRAWN,
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


@pytest.mark.exhaustive
def test_the_folder_has_no_other_files(results):
    assert {path.name for path in results.iterdir()} == {
        "difference.pdf",
        "difference.png",
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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", ["quintic", "quintic-tanh", "quintic-cross-entropy"])
def test_the_weakest_runs_of_both_solvers_agree(task, results):
    """The two filters agree within one per cent at this strength."""
    with (results / "k_vs_lambda.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == task]
    strongest = max(float(row["damping"]) for row in rows)
    rows = [row for row in rows if row["seed"] == "0"]
    descent, damped = (row for row in rows if float(row["damping"]) == strongest)
    assert float(descent["distance"]) == pytest.approx(
        float(damped["distance"]), rel=1e-2
    )


@pytest.mark.exhaustive
def test_settings_say_what_the_numbers_depend_on(results):
    settings = json.loads((results / "settings.json").read_text())
    assert {"python", *PACKAGES} == set(settings["versions"])
    assert settings["backend"] == jax.default_backend()
    assert settings["x64"] is True
    assert settings["scale"] == "quick"
    assert settings["settings"]["seeds"] == 1
    assert settings["run_seconds"] > 0
    assert {"platform", "date", "command"} <= set(settings)


@pytest.mark.exhaustive
def test_the_captions_name_all_tasks_and_count_diverged_runs(results):
    captions = json.loads((results / "settings.json").read_text())["figures"]
    assert set(captions) == {"k_vs_lambda", "difference", "filters", "theory"}
    for name in TASKS:
        assert f"{make_task(QUICK, name).title}: " in captions["difference"]
    assert "0 of 104 runs diverged" in captions["k_vs_lambda"]
    assert "training loss, centred kernel alignment with" in captions["k_vs_lambda"]
    assert "initialisation and share of hidden units" in captions["k_vs_lambda"]
    assert "on 1,000 test outputs" in captions["theory"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "width"),
    [("k_vs_lambda", 2550), ("difference", 2250), ("filters", 2250), ("theory", 1950)],
)
def test_figures_are_pictures(name, width, results):
    from matplotlib.image import imread

    pixels = imread(results / f"{name}.png")
    assert pixels.shape[1] == width
    assert pixels[..., :3].std() > 0.05


def runs_of(solver, error, **changes):
    """Make up runs at four strengths, trained at the last three."""
    error = np.array(error, float)
    columns = {
        "period": np.broadcast_to([1e6, 1e5, 1e4, 1e3], error.shape),
        "damping": np.broadcast_to([0.1, 1.0, 10.0, 100.0], error.shape),
        "test_error": error,
        "test_mse": error**2,
        "train_loss": np.broadcast_to([1.0, 0.01, 0.01, 0.01], error.shape),
        "guessing_loss": np.ones(error.shape),
        "dead": np.full(error.shape, 0.2),
        "stable": np.ones(error.shape, bool),
        "largest_eigenvalue": np.full(error.shape, 1e3),
        "spectrum": np.broadcast_to(np.logspace(-2, 3, 6), (*error.shape, 6)),
    }
    given = {key: np.broadcast_to(x, error.shape) for key, x in changes.items()}
    return Runs({"task": "digits", "solver": solver}, columns | given)


@pytest.fixture
def task():
    return make_task(QUICK, "digits")


def test_strengths_are_tested_where_both_train_and_the_filters_differ():
    error = np.full((4, 4), 0.2)
    most = [[1, 0.01, 0.01, 0.01], [1, 0.01, 1, 0.01], [1, 1, 1, 0.01], [1, 1, 1, 0.01]]
    a, b = runs_of(DESCENT, error, train_loss=most), runs_of(DAMPED, error)
    np.testing.assert_array_equal(compared(a, b), [False, True, False, True])
    np.testing.assert_array_equal(compared(b, a), compared(a, b))
    # The largest eigenvalue is 5, less than a tenth of the last damping.
    one = runs_of(DAMPED, error, largest_eigenvalue=5.0)
    np.testing.assert_array_equal(compared(one, one), [False, True, True, False])


def test_diverged_runs_count_as_untrained():
    stable = [[True, True, False, True]] * 2
    runs = runs_of(DESCENT, np.full((2, 4), 0.2), stable=stable)
    np.testing.assert_array_equal(trained(runs), [[False, True, False, True]] * 2)


def test_untrained_runs_do_not_set_the_scale_of_a_difference(task):
    error = np.array([[0.9, 0.2, 0.3, 0.1]] * 2)
    a, b = runs_of(DESCENT, error + 0.02), runs_of(DAMPED, error)
    expected = [[np.nan, 0.02, 0.02, 0.02]] * 2
    np.testing.assert_allclose(difference(task, a, b), expected)
    # Their size does not matter.
    b.columns["test_error"][:, 0] = 100.0
    np.testing.assert_allclose(difference(task, a, b), expected)


def test_the_difference_of_a_regression_is_in_decades():
    error = np.array([[1.0, 0.1, 0.01, 0.01]])
    a, b = runs_of(DESCENT, 10 * error), runs_of(DAMPED, error)
    in_decades = difference(make_task(QUICK, RELU), a, b)
    np.testing.assert_allclose(in_decades, [[np.nan, 1, 1, 1]])


def test_outlying_runs_are_counted_and_do_not_change_the_mean(task):
    error, loss = np.full((5, 4), 0.2), np.tile([1.0, 0.01, 0.01, 0.01], (5, 1))
    thrown = error.copy()
    thrown[0, 2], loss[0, 2] = 1e4, 1e8
    a, b = runs_of(DESCENT, thrown, train_loss=loss), runs_of(DAMPED, error)
    assert np.nanmax(difference(task, a, b)) == 0
    assert np.nansum(more_thrown_off(a, b)) == 1
    assert np.nansum(more_thrown_off(b, a)) == -1
    assert largest_ratio(squared_errors(a, b)) == 1  # of medians


def test_a_seed_without_a_ratio_does_not_lower_the_median():
    errors = np.array([[2.0, 1.0], [3.0, 1.0], [np.nan, 1.0]])[..., None]
    assert largest_ratio(errors) == 2.5


def test_a_strength_at_which_only_one_trains_counts_as_thrown_off():
    error = np.full((3, 4), 0.2)
    a = runs_of(DESCENT, error, train_loss=1.0)
    counted = more_thrown_off(a, runs_of(DAMPED, error))
    np.testing.assert_array_equal(counted, [[np.nan, 1, 1, 1]] * 3)


def test_matched_damping_is_smaller_and_solves_equally_much(task):
    runs = runs_of(DESCENT, np.full((1, 4), 0.2))
    rate = task.learning_rate
    runs.columns["period"] = np.round(1 / (rate * runs["damping"]))
    found = equal_damping(task, runs)
    assert (found < runs["damping"]).all()
    w = runs["spectrum"][0, 0]
    for period, damping in zip(runs["period"][0], found[0], strict=True):
        by_steps = np.sum(1 - (1 - rate * w) ** period)
        assert np.sum(w / (w + damping)) == pytest.approx(by_steps, rel=1e-6)


def test_no_difference_remains_at_the_matched_damping(task):
    """The error of the damped network is a function of log10 lambda. The error after K
    steps is the same function at the matched damping."""
    dampings = np.logspace(-1, 2, 4)[None].repeat(3, 0)
    b = runs_of(DAMPED, 0.1 * np.log10(dampings) + 0.3, train_loss=0.01)
    a = runs_of(DESCENT, np.zeros((3, 4)), train_loss=0.01)
    a.columns["period"] = np.round(1 / (task.learning_rate * dampings))
    there = np.log10(equal_damping(task, a))
    a.columns["test_error"] = 0.1 * there + 0.3
    left = difference_at_equal_solution(task, a, b)
    assert np.isfinite(left).sum() >= 3
    np.testing.assert_allclose(left[np.isfinite(left)], 0, atol=1e-9)
    assert (np.abs(difference(task, a, b)) > 0.005).all()


@pytest.mark.exhaustive
def test_differences_are_drawn_where_no_strength_is_tested_too(tmp_path):
    tasks = {name: make_task(QUICK, name) for name in TASKS}
    untrained = runs_of(DESCENT, np.full((2, 4), 0.2), train_loss=1.0)
    by_task = {name: {DESCENT: untrained, DAMPED: untrained} for name in TASKS}
    _draw_differences(tmp_path / "difference.png", tasks, by_task)
    assert (tmp_path / "difference.png").stat().st_size > 0


def test_a_task_without_a_curve_has_no_entry_in_the_legend():
    axes = Figure().subplots()
    untrained = runs_of(DESCENT, np.full((2, 4), 0.2), train_loss=1.0)
    _draw_difference(axes, make_task(QUICK, SMOOTH), untrained, untrained, "#000000")
    assert axes.get_legend_handles_labels() == ([], [])


def of_tasks(seeds, changed):
    """Make up runs at four strengths for all tasks. They are the same for both solvers,
    except for the changes to those of K steps."""
    generator = np.random.default_rng(0)
    all_runs = []
    for name in TASKS:
        error = generator.uniform(0.1, 1, (seeds, 4))
        loss = 1e-3 * error**2
        same = {"train_loss": loss, "period": np.full((seeds, 4), 1e5)}
        columns = runs_of(DAMPED, error, **same).columns
        for solver in (DESCENT, DAMPED):
            more = changed(name, generator) if solver == DESCENT else {}
            moved = {
                key: columns[key] * more.get("factor", 1) ** power
                for key, power in (("test_error", 1), ("test_mse", 2), ("train_loss", 2))
            }
            moved["test_error"] = moved["test_error"] + more.get("points", 0)
            dead = columns["dead"] + more.get("dead", 0)
            runs = columns | moved | {"dead": dead}
            all_runs.append(Runs({"task": name, "solver": solver}, runs))
    return all_runs


def outcomes(all_runs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts, "_NUM_OF_STATISTIC", 199)  # decides as 1,999 do
        judged = k_vs_lambda.judge_all(QUICK, all_runs)
    found = {verdict.claim: verdict.outcome for verdict in judged}
    assert len(found) == len(DRAWN) + len(TASKS) + 2 * 3 + 2 + 4 + 3
    return found


def explained(found):
    return [
        outcome
        for claim, outcome in found.items()
        if claim.startswith(("On the quintic", "With tanh"))
    ]


def bounded(found):
    return [outcome for claim, outcome in found.items() if "linear problem" in claim]


@pytest.mark.slow
def test_points_of_error_are_judged_by_a_margin_and_by_their_direction():
    by = {"digits": 0.005, "digits-cross-entropy": 0.03}
    found = outcomes(of_tasks(8, lambda name, generator: {"points": by.get(name, 0)}))
    alike = {k: v for k, v in found.items() if "same test error" in k}
    better = {k: v for k, v in found.items() if "damping has a smaller" in k}
    assert list(alike.values()) == [*4 * ["confirmed"], "refuted"]
    decided = [k for k, v in better.items() if v == "confirmed"]
    assert [k.partition(":")[0] for k in decided] == [
        "Digits, squared error",
        "Digits, cross-entropy",
    ]


def test_an_excess_without_dead_units_in_a_smooth_network_is_attributed_to_them():
    def changed(name, generator):
        if name != RELU:
            return {}
        dead = generator.uniform(0, 0.5, (8, 4))
        return {"dead": dead, "factor": 10**dead}

    found = outcomes(of_tasks(8, changed))
    assert explained(found) == 4 * ["confirmed"]
    assert bounded(found) == ["refuted", "confirmed", "confirmed"]


def test_an_excess_in_a_smooth_network_too_is_not_attributed_to_dead_units():
    def changed(name, generator):
        if name not in (RELU, SMOOTH):
            return {}
        return {"factor": 10 ** generator.uniform(0.1, 0.5, (8, 4))}

    found = outcomes(of_tasks(8, changed))
    # Both solvers have equally many dead units in all runs.
    untested = "not tested at this scale"
    assert explained(found) == ["undecided", untested, "confirmed", "refuted"]
    assert bounded(found) == ["refuted", "refuted", "confirmed"]


def test_without_an_excess_no_share_of_it_is_computed():
    changed = lambda name, generator: {"factor": 10 ** generator.normal(0, 0.1, (8, 4))}
    found = outcomes(of_tasks(8, changed))
    assert explained(found)[3] == "not tested at this scale"


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
    """Return the share of units that are off for all inputs."""
    activations, on = np.asarray(inputs), []
    for layer in model.layers[:-1]:
        activations = np.maximum(
            activations @ np.asarray(layer.weight).T + np.asarray(layer.bias), 0
        )
        on.append(activations.max(axis=0) > 0)
    return 1 - np.mean(on)


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_descent_at_too_large_a_rate_is_counted_as_diverged():
    settings = dataclasses.replace(TINY, seeds=1, digits_rate=1.0)
    runs = {
        solver: k_vs_lambda.train(settings, {"task": "digits", "solver": solver}, Place())
        for solver in (DESCENT, DAMPED)
    }
    assert not runs[DESCENT]["stable"].any()
    assert runs[DAMPED]["stable"].all()


@pytest.mark.exhaustive
def test_diverged_runs_are_reported_and_drawn(tmp_path):
    settings = KVsLambda(seeds=2, periods=(100.0, 1e3, 1e5, 1e7), images_per_class=1)
    shape = 2, 4
    some = np.random.default_rng(0).uniform(0.1, 1, shape)
    columns = {
        "period": np.broadcast_to(settings.periods, shape),
        "guessing_loss": np.broadcast_to([1.0, 1.0, 100.0, 100.0], shape),
        "damping": np.broadcast_to([1e5, 1e4, 1e2, 1.0], shape),
        "stable": np.broadcast_to([False, True, True, True], shape),
        "spectrum": np.broadcast_to(np.logspace(-3, 3, 5), (*shape, 5)),
        "largest_eigenvalue": np.full(shape, 1e3),
        **dict.fromkeys(MEASURED, some),
    }
    all_runs = [Runs(point, columns) for point in k_vs_lambda.points(settings)]
    captions = k_vs_lambda.EXPERIMENT.draw(settings, all_runs, tmp_path)
    assert "20 of 80 runs diverged" in captions["k_vs_lambda"]

    assert (tmp_path / "k_vs_lambda.png").stat().st_size > 0


@pytest.mark.slow
def test_a_verdict_says_at_how_many_strengths_it_was_tested():
    all_runs = of_tasks(8, lambda name, generator: {})
    for runs in all_runs:
        if runs.point == {"task": "digits", "solver": DESCENT}:
            runs.columns["train_loss"] = np.tile([1.0, 1.0, 1e-3, 1.0], (8, 1))
    quantities = {
        verdict.claim: verdict.quantity
        for verdict in k_vs_lambda.judge_all(QUICK, all_runs)
    }
    on_digits = [v for k, v in quantities.items() if k.startswith("Digits, squared err")]
    only = [each for each in on_digits if "(1 of 4)" in each]
    assert len(only) == 5, "as good, better, by filters twice, and bounded"
    counted = [
        re.search(r"\(\d of 4( and \d of 4)?\)", each) for each in quantities.values()
    ]
    assert all(counted)
    with_tanh = next(v for k, v in quantities.items() if k.startswith("With tanh"))
    assert "(4 of 4 and 4 of 4)" in with_tanh


@pytest.mark.parametrize(
    ("error", "stable", "ends"),
    [
        ([0.9, 0.2, 0.2, 0.1], [True] * 4, {DESCENT: 0.02}),
        ([0.1, 0.2, 0.2, 0.9], [True] * 4, {DESCENT: 0.98}),
        ([0.1, 0.2, 0.2, 0.9], [False, True, True, True], {DESCENT: 0.98, DAMPED: 0.02}),
    ],
)
def test_a_label_of_divergence_is_away_from_the_other_markers(error, stable, ends):
    axes = Figure().add_subplot()
    first = [[False, True, True, True]] * 2
    runs = {
        DESCENT: runs_of(DESCENT, [error] * 2, stable=first),
        DAMPED: runs_of(DAMPED, [error] * 2, stable=[stable] * 2),
    }
    axes.set(xscale="log", yscale="log")
    axes.plot([0.1, 1, 10, 100], error)
    _mark_divergence(axes, runs[DESCENT], runs[DAMPED], DESCENT)
    _mark_divergence(axes, runs[DAMPED], runs[DESCENT], DAMPED)
    found = {text.get_color(): text.xy[1] for text in axes.texts}
    assert found == {LOOKS[solver]["color"]: end for solver, end in ends.items()}
    assert all(text.get_text() == "2 diverged" for text in axes.texts)
