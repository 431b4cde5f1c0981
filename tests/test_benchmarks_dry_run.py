"""Dry runs say how long an experiment would take, and run nothing."""

import dataclasses
import importlib
import re
import types

import numpy as np
import pytest

from benchmarks import _results, dry_run, training
from benchmarks.__main__ import EXPERIMENTS, main
from benchmarks._options import Options
from benchmarks.data import textures
from benchmarks.dry_run import Planned, Rehearsal, Tally
from benchmarks.experiment import Place
from benchmarks.experiments import kernel_drift


MODULES = {name: importlib.import_module(module) for name, module in EXPERIMENTS.items()}
REHEARSED = [name for name in MODULES if MODULES[name].EXPERIMENT.rehearsed]


class Work:
    """Runs whose steps take a tenth of a second on a clock of their own."""

    def __init__(self, monkeypatch, overhead=3.0, compilation=20.0):
        self.now, self.overhead, self.left = 0.0, overhead, compilation
        self.asked = []
        clock = types.SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(dry_run, "time", clock)

    def __call__(self, number, most=10**9):
        self.asked.append(number)
        made = min(number, most)
        self.now += self.left + self.overhead + 0.1 * made
        self.left = 0.0
        return Tally(made, 3 * made)


def planned(rehearsal, program, attempt, num_steps=1_000, **options):
    with pytest.raises(Planned) as found:
        rehearsal(program, 5, num_steps, attempt, **options)
    return found.value


def test_a_rate_is_without_compilation_and_overhead(monkeypatch):
    work = Work(monkeypatch)
    plan = planned(Rehearsal(100), "a", work)
    assert plan.rate.seconds == pytest.approx(0.1)
    assert plan.rate.passes == pytest.approx(3)
    assert plan.steps == 5_000
    # 63 further steps take more than the overhead and 0.2 seconds.
    assert work.asked == [1, 1, 4, 16, 64, 64]


def test_the_compilation_of_another_number_of_steps_is_no_part_of_the_rate(monkeypatch):
    work, seen = Work(monkeypatch), set()

    def attempt(number):
        work.left = 0.0 if number in seen else 20.0
        seen.add(number)
        return work(number)

    plan = planned(Rehearsal(1_000), "a", attempt)
    assert plan.rate.seconds == pytest.approx(0.1)


def test_a_share_of_the_examples_stands_for_all(monkeypatch):
    plan = planned(Rehearsal(100), "a", Work(monkeypatch), share=0.01, held=7.0)
    assert plan.rate.seconds == pytest.approx(10)
    assert plan.rate.passes == pytest.approx(3)
    assert plan.held == 7


def test_a_program_is_measured_once_and_within_the_budget(monkeypatch):
    work, rehearsal = Work(monkeypatch), Rehearsal(25)
    first = planned(rehearsal, "a", work)
    number = len(work.asked)
    assert planned(rehearsal, "a", work).rate == first.rate
    assert len(work.asked) == number
    late = planned(rehearsal, "b", work)
    assert late.rate is None
    assert late.steps == 5_000


def test_runs_that_end_early_or_make_all_steps_are_measured(monkeypatch):
    work = Work(monkeypatch, overhead=0.0)
    ended = planned(Rehearsal(100), "a", lambda number: work(number, most=2))
    assert ended.rate.seconds == pytest.approx(0.1)
    whole = planned(Rehearsal(100), "b", lambda number: work(50), whole=True)
    assert whole.rate.seconds == pytest.approx(0.1)
    assert work.asked[-2:] == [50, 50]


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        (name, scale)
        for name in REHEARSED
        for scale in ("quick", "embedded", "medium", "full")
        if getattr(MODULES[name].EXPERIMENT, scale) is not None
    ],
)
def test_no_point_is_run_in_a_dry_run(name, scale, tmp_path, monkeypatch):
    """The files of the data may be missing, and nothing is measured."""
    black = lambda number, _: (np.zeros((number, 3, 32, 32)), np.arange(number) % 10)
    monkeypatch.setattr(textures, "images", black)
    monkeypatch.setattr(textures, "draw", textures.draw.__wrapped__)
    one = MODULES[name].EXPERIMENT
    settings = one.settings(Options(tmp_path, scale))
    place = Place(rehearsal=Rehearsal(0))
    # A few of each kind of point suffice.
    points = {tuple(point): point for point in one.points(settings)}
    for point in points.values():
        plan = dry_run._rehearsed(one, settings, point, place)
        assert plan.num_runs >= settings.seeds
        assert plan.num_steps >= 1


def test_a_dry_run_counts_steps_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dry_run, "BUDGET", 0)
    monkeypatch.chdir(tmp_path)
    options = ["--seeds", "3", "--seed-offset", "4", "--steps", "50", "--grid", "1,10"]
    assert main(["large-k-augmented", "--dry-run", *options]) == 0
    said = capsys.readouterr().out
    assert "2 points, seeds 4 to 6. Nothing is run or written." in said
    assert "6 runs, with at most 300 steps in total.\n" in said
    assert "No point could be measured" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_dry_run_measures(capsys, monkeypatch):
    monkeypatch.setattr(dry_run, "BUDGET", 1e6)
    settings = dataclasses.replace(kernel_drift.QUICK, num_steps=20, batch_size=50)
    one = dataclasses.replace(kernel_drift.EXPERIMENT, quick=settings)
    dry_run.dry_run("kernel-drift", one, Options(None, "quick"))
    said = capsys.readouterr().out
    assert "4 runs, with at most 80 steps in total" in said
    # Gradient steps on mini-batches: one tangent and one transposed pass.
    passes = re.search("About (.*) passes through the model, (.*) hours on this", said)
    assert 80 <= float(passes[1].replace(",", "")) <= 320
    assert float(passes[2]) > 0
    assert "2 of 2 points were measured" in said
    assert said.count(" hours: period ") == 2


def test_missing_files_are_named_and_replaced(capsys, monkeypatch):
    monkeypatch.setattr(dry_run, "BUDGET", 0)
    assert main(["k-sweep", "--scale", "full", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "The files of cifar10 are missing; this estimate uses other images" in said
    assert "--data-dir" in said
    drawn = training.load(MODULES["k-sweep"].FULL, Place(rehearsal=Rehearsal(0)), 0)
    assert drawn.train[0].shape == (1_000, 3, 32, 32)


def test_experiments_without_a_rate_say_how_long_they_took(capsys):
    assert main(["lambda-sweep", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "2 points, seeds 0 to 99." in said
    assert "2,600 runs. This experiment cannot be measured" in said
    assert re.search("runs in the repository took .* hours on 2 processors", said)


def test_the_page_names_the_experiments_with_a_medium_scale():
    text = (_results.KEPT.parents[1] / "docs" / "experiments.md").read_text()
    sentence = re.search(r"experiments have a medium scale: (.*?)\n\n", text, re.S)
    named = set(re.findall("`([a-z-]+)`", sentence[1]))
    assert named == {name for name in MODULES if MODULES[name].EXPERIMENT.medium}


def test_the_page_names_the_experiments_without_a_rate():
    text = (_results.KEPT.parents[1] / "docs" / "experiments.md").read_text()
    sentence = re.search(r"stand in for them\. (.*?) have no common step", text, re.S)
    named = set(re.findall("`([a-z-]+)`", sentence[1]))
    assert named == set(EXPERIMENTS) - set(REHEARSED)
