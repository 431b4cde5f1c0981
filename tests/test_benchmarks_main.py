"""The benchmarks' command line, and its headline experiment at its quickest."""

import csv
import dataclasses
import json

import equinox as eqx
import jax
import numpy as np
import pytest
from rich.console import Console

from benchmarks.__main__ import main, MODULES
from benchmarks._results import PACKAGES
from benchmarks.data import digits, quintic
from benchmarks.experiments.k_vs_lambda._figures import draw_sweeps
from benchmarks.experiments.k_vs_lambda._summary import (
    agreement_of,
    Curve,
    curve_of,
    print_table,
)
from benchmarks.experiments.k_vs_lambda._sweep import DAMPED, DESCENT, sweep
from benchmarks.experiments.k_vs_lambda._tasks import make_tasks
from benchmarks.networks.mlp import digits_mlp, quintic_mlp


def test_list_names_everything_with_a_line(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(MODULES)
    assert all(len(line.split()) > 3 for line in lines)


def test_help_explains(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("--seeds", "--out", "--quick", *MODULES))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("k-vs-lamda", "k-vs-lambda"), ("NISTT", "nist"), ("sped", "speed")],
)
def test_an_unknown_name_is_answered_with_the_nearest(typed, meant, capsys):
    assert main([typed]) == 2
    assert f"did you mean '{meant}'?" in capsys.readouterr().err


def test_a_name_near_to_none_is_answered_with_no_guess(capsys):
    assert main(["zzz"]) == 2
    message = capsys.readouterr().err
    assert "did you mean" not in message
    assert "`python -m benchmarks list`" in message


@pytest.mark.parametrize("name", ["nist", "speed"])
def test_seeds_are_refused_where_there_are_none(name, tmp_path, capsys):
    assert main([name, "--seeds", "2", "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert name in message
    assert message.count("\n") == 1


def test_a_missing_package_is_answered_with_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(MODULES, "nist", "no_such_package")
    assert main(["nist", "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert 'python -m pip install -e ".[bench]"' in message
    assert message.count("\n") == 1


def test_a_missing_module_of_our_own_is_a_bug(tmp_path, monkeypatch):
    monkeypatch.setitem(MODULES, "nist", "benchmarks.no_such_module")
    with pytest.raises(ModuleNotFoundError):
        main(["nist", "--out", str(tmp_path)])


def test_an_interrupt_ends_in_one_line(tmp_path, monkeypatch, capsys):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.experiments.nist.run", interrupt)
    assert main(["nist", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_bad_seeds_are_refused_in_one_sentence(value, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--seeds", value])
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert value in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("within", ["", "folder"])
def test_a_file_is_no_folder_for_results(within, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    assert main(["--out", str(taken / within)]) == 2
    assert "is a file" in capsys.readouterr().err
    assert taken.read_text() == "mine"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "new" / "folder"
    assert main(["k-vs-lambda", "--quick", "--seeds", "1", "--out", str(out)]) == 0
    return out


def test_nothing_else_is_left_in_the_folder(results):
    assert {path.name for path in results.iterdir()} == {
        "filters.pdf",
        "filters.png",
        "k_vs_lambda.csv",
        "k_vs_lambda.pdf",
        "k_vs_lambda.png",
        "settings.json",
    }


def test_there_is_a_row_for_every_run(results):
    with (results / "k_vs_lambda.csv").open() as file:
        rows = list(csv.DictReader(file))
    settings = json.loads((results / "settings.json").read_text())
    strengths = len(settings["periods"])
    runs = [(row["task"], row["solver"]) for row in rows]
    for task in ("quintic", "digits"):
        assert runs.count((task, "iterative-linearisation")) == strengths
        assert runs.count((task, "damped-gauss-newton")) == strengths
    assert len(rows) == settings["num_runs"] == 4 * strengths
    for row in rows:
        by_descent = row["solver"] == "iterative-linearisation"
        assert bool(row["period"]) == by_descent
        assert bool(row["damping"]) != by_descent
        assert bool(row["test_accuracy"]) == (row["task"] == "digits")
        assert float(row["train_loss"]) >= 0
        assert float(row["distance"]) > 0
        assert 0 <= float(row["kernel_alignment"]) <= 1
        assert row["result"] in ("successful", "nonlinear_max_steps_reached")
        assert float(row["effective_damping"]) > 0


def test_the_weakest_runs_of_both_solvers_agree(results):
    """One strength at which the two filters are one, to within a per cent."""
    with (results / "k_vs_lambda.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == "quintic"]
    strongest = max(float(row["effective_damping"]) for row in rows)
    descent, damped = (
        row for row in rows if float(row["effective_damping"]) == strongest
    )
    assert float(descent["distance"]) == pytest.approx(
        float(damped["distance"]), rel=1e-2
    )


def test_settings_say_what_the_numbers_depend_on(results):
    settings = json.loads((results / "settings.json").read_text())
    assert {"python", *PACKAGES} == set(settings["versions"])
    assert settings["backend"] == jax.default_backend()
    assert settings["x64"] is True
    assert settings["quick"] is True
    assert settings["seeds"] == [0]
    assert settings["wall_seconds"] > 0
    assert {"platform", "date", "command", "agreement"} <= set(settings)


@pytest.mark.parametrize("name", ["k_vs_lambda.png", "filters.png"])
def test_figures_are_pictures_of_readme_width(name, results):
    from matplotlib.image import imread

    pixels = imread(results / name)
    assert pixels.shape[1] == 1500
    assert pixels[..., :3].std() > 0.05


@pytest.fixture
def curves():
    damping = np.array([0.1, 1.0, 10.0, 100.0])
    error = np.array([[9.0, 0.2, 0.3, 0.6], [0.1, 0.2, 0.3, 0.6]])
    stable = np.array([[False, True, True, True], [True, True, True, True]])
    descent = Curve(damping, error, alignment=error, stable=stable)
    damped = Curve(
        damping, error + 0.1, alignment=error, stable=np.full_like(stable, True)
    )
    return {DESCENT: descent, DAMPED: damped}


def test_what_diverged_is_in_no_mean(curves):
    mean = curves[DESCENT].mean_error
    assert np.isnan(mean[0])
    np.testing.assert_allclose(mean[1:], [0.2, 0.3, 0.6])
    agreement = agreement_of(curves)
    assert agreement.num_strengths == 3
    assert agreement.mean_difference == pytest.approx(0.1 / 0.5)
    assert agreement.correlation == pytest.approx(1)


def test_a_flat_curve_has_no_correlation(curves):
    flat = dataclasses.replace(curves[DAMPED], error=np.full((2, 4), 0.5))
    agreement = agreement_of({DESCENT: curves[DESCENT], DAMPED: flat})
    assert agreement.correlation is None
    assert agreement.correlation_of_damped_with_damping is None
    assert agreement.correlation_of_descent_with_damping == pytest.approx(1)
    json.dumps(dataclasses.asdict(agreement), allow_nan=False)
    print_table(Console(quiet=True), make_tasks(quick=True)[0], curves, agreement)


def test_dampings_are_as_round_as_their_periods():
    quintic_task = make_tasks(quick=True)[0]
    assert [quintic_task.damping(period) for period in (100, 1e4)] == [1e5, 1e3]


def test_what_diverged_is_told_and_drawn(curves, tmp_path):
    task = make_tasks(quick=True)[0]
    console = Console(record=True, width=100)
    print_table(console, task, curves, agreement_of(curves))
    assert "1 of 2 diverged" in console.export_text()
    draw_sweeps(tmp_path / "sweeps.png", [task], {task.name: curves})
    assert (tmp_path / "sweeps.png").stat().st_size > 0


def test_descent_at_too_large_a_rate_is_counted_as_diverged():
    digits_task = make_tasks(quick=True)[1]
    task = dataclasses.replace(digits_task, learning_rate=1.0, max_steps=2)
    rows, _ = sweep([task], [100.0, 1e4], 1, Console(quiet=True))
    diverged = {(row.solver, row.result) for row in rows if not row.stable}
    assert diverged == {(DESCENT, "nonlinear_divergence")}
    assert all(curve_of(rows, task.name, DESCENT).num_diverged == 1)


def test_the_quintic_touches_its_bounds_at_both_ends():
    x, y = quintic.examples(20)
    assert x.shape == y.shape == (20, 1)
    np.testing.assert_allclose(y[[0, -1], 0], [-4, 4], rtol=1e-12)
    np.testing.assert_allclose(y, x**5 / 32 - x**3 / 2 + 2 * x - 1, atol=1e-12)
    _, dense = quintic.examples(10_001)
    assert np.all(np.abs(dense) <= 4 + 1e-12)


def test_the_digits_are_split_once_and_for_all():
    labels = np.tile(np.arange(10), 6)
    train, test = digits.split(labels, per_class=2)
    assert list(train) == [*range(10), *range(30, 40)]
    assert not set(train) & set(test)
    assert len(train) + len(test) == len(labels)

    (x, y), (test_x, test_y) = digits.examples(per_class=4)
    assert (len(x), len(test_x)) == (40, 1757)
    assert y.sum(axis=0).tolist() == [4] * 10
    assert test_y.sum() == 1757
    assert x.min() == 0
    assert x.max() == 1


@pytest.mark.parametrize(("make", "number"), [(quintic_mlp, 7801), (digits_mlp, 3010)])
def test_networks_have_the_parameters_that_they_are_said_to(make, number):
    parameters = eqx.filter(make(jax.random.key(0)), eqx.is_inexact_array)
    assert sum(leaf.size for leaf in jax.tree.leaves(parameters)) == number


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data"], "Name a data set (mnist, cifar10) and its folder"),
        (["data", "mnits", "--data-dir", "x"], "did you mean 'mnist'?"),
        (["nist", "mnist"], "'nist' needs no files; leave them out."),
    ],
)
def test_data_sets_are_named_with_their_folder(arguments, words, capsys):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
