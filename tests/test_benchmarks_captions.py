"""Captions, quantities and the page lead a reader to the kept table."""

import csv
import gzip
import importlib
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure

import gnlin
from benchmarks import kept, rejudge, training
from benchmarks.__main__ import EXPERIMENTS
from benchmarks._options import Refusal
from benchmarks._results import KEPT, read_settings
from benchmarks.experiment import Runs
from benchmarks.experiments import data_scaling, k_sweep, k_vs_lambda, stability
from benchmarks.experiments.k_vs_lambda import _figures
from benchmarks.experiments.k_vs_lambda._tasks import CLASSES, make_task


MODULES = {name: importlib.import_module(module) for name, module in EXPERIMENTS.items()}
TABLES = {name: KEPT / name / f"{kept.table(name)}.gz" for name in EXPERIMENTS}
PAGE = (Path(__file__).parents[1] / "docs" / "experiments.md").read_text()


def runs_of(name):
    content = read_settings(KEPT / name)
    return rejudge._read(TABLES[name], MODULES[name].EXPERIMENT, content)


# Arrays of one run are not in the kept tables, so that figures of them cannot be drawn.
ARRAYS = {
    "k-vs-lambda": "spectrum",
    "lambda-sweep": "functions",
    "filters": "filters",
    "xor-features": "weights",
    "defaults": "adam_test_scores",
    "pinn": "u",
    "equations": "u",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TABLES if TABLES[name].exists()])
def test_figures_and_captions_of_kept_runs_train_nothing(name, tmp_path, monkeypatch):
    """Their numbers are of the kept runs, and not of today's code."""

    def refuse(*args, **options):
        raise AssertionError("trained for a figure")

    for function in ("solve", "fit"):
        monkeypatch.setattr(gnlin, function, refuse)
    monkeypatch.setattr(Figure, "savefig", lambda self, part, **look: part.touch())
    settings, all_runs = runs_of(name)
    draw = MODULES[name].EXPERIMENT.draw
    if name in ARRAYS:
        with pytest.raises(Refusal, match=f"the table lacks the column '{ARRAYS[name]}'"):
            draw(settings, all_runs, tmp_path)
        return
    captions = draw(settings, all_runs, tmp_path)
    assert set(captions) == set(read_settings(KEPT / name)["figures"])


def test_the_error_of_the_flow_is_that_of_the_runs():
    columns = {"flow_error": np.array([1e-3, 2e-3])}
    some = [Runs({}, {}), Runs({}, columns)]
    said = "K steps are computed as gradient flow from K = 10000 on"
    assert training.flow_described(some[:1], 1_000) == said
    assert training.flow_described(some, 1_000, " on the digits") == (
        f"{said}, which on the digits differs by at most 2.0e-03 of a step from 1,000 "
        "literal steps"
    )
    caption = _figures._setting(k_vs_lambda.EMBEDDED, {}, some)
    assert "With cross-entropy, K steps" in caption
    assert " on, which on the digits differs by" in caption
    for settings, first in ((k_sweep.EMBEDDED, 1e4), (k_sweep.QUICK, 1e5)):
        point = k_sweep._first_flow(settings)
        assert point["period"] == first
        assert point in k_sweep.points(settings)
    assert k_sweep._first_flow(k_sweep.FULL) is None


@pytest.mark.slow
def test_the_error_of_the_flow_is_measured_for_each_seed():
    task, settings = make_task(k_vs_lambda.QUICK, CLASSES), k_vs_lambda.QUICK
    (errors,) = k_vs_lambda._flow_errors(settings, task).values()
    assert errors.shape == (settings.seeds,)
    model, data = task.make_model(jax.random.key(1)), task.drawn(1)[0]
    expected = training.flow_error(model, data, task.loss, task.learning_rate, 1_000)
    assert errors[1] == pytest.approx(expected)
    assert 0 < errors[1] < 0.01
    squared = make_task(settings, "digits")
    assert k_vs_lambda._flow_errors(settings, squared) == {}


def columns_of(name):
    with gzip.open(TABLES[name], "rt", newline="", encoding="utf-8") as file:
        return next(csv.reader(file))


@pytest.mark.parametrize(
    ("name", "column"), [("stability", "diverged"), ("lambda-sweep-cnn", "left_out")]
)
def test_the_rule_that_selects_runs_is_a_column_of_the_kept_table(name, column):
    assert column in columns_of(name)
    _, all_runs = runs_of(name)
    for runs in all_runs:
        for key, values in MODULES[name].EXPERIMENT.derived(runs).items():
            np.testing.assert_array_equal(values, runs.columns[key])


def test_the_rule_for_divergence_is_in_the_caption(monkeypatch, tmp_path):
    monkeypatch.setattr(Figure, "savefig", lambda self, part, **look: part.touch())
    settings, all_runs = runs_of("stability")
    without_first = [
        Runs(
            runs.point, {k: x for k, x in runs.columns.items() if k != "first_train_loss"}
        )
        for runs in all_runs
    ]
    kinds = (all_runs, "before training"), (without_first, "constant outputs,")
    for made, start in kinds:
        caption = stability.draw(settings, made, tmp_path)["stability"]
        assert re.search(f"`diverged`.*1% above that .*{start}", caption)


def test_quantities_of_data_scaling_name_columns():
    verdicts = data_scaling.judge_all(*runs_of("data-scaling"))
    named = {word for v in verdicts[-2:] for word in re.findall(r"\w+_\w+", v.quantity)}
    assert len(named) == 3
    assert named <= set(columns_of("data-scaling"))


def test_the_page_names_the_columns_of_verdicts():
    section = PAGE.partition("## Which columns does")[2].partition("\n## ")[0]
    parts = section.split("\n- ")[1:]
    assert len(parts) == 4
    for part in parts:
        name, *columns = re.findall("`([a-z_-]+)`", part)
        lacking = {"first_train_loss"} if name == "stability" else set()
        assert set(columns) - {"stability"} - lacking <= set(columns_of(name))


def test_the_page_names_every_experiment_with_a_grid():
    section = PAGE.partition("## Which values does")[2].partition("\n## ")[0]
    listed, _, others = section.partition("\n\n`")
    assert set(re.findall("`([a-z-]+)`", listed)) - {"--grid"} == {
        name for name, module in MODULES.items() if module.EXPERIMENT.grid
    }
    without = {name for name, module in MODULES.items() if not module.EXPERIMENT.grid}
    assert set(re.findall("`([a-z-]+)`", "`" + others)) == without
