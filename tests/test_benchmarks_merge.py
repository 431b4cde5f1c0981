"""Results of several jobs with different seeds, merged into one."""

import csv
import dataclasses
import json
import sys
import types

import numpy as np
import pytest

from benchmarks import experiment, merge
from benchmarks.__main__ import main
from benchmarks._options import Options, Refusal
from benchmarks.experiment import Experiment, Settings
from benchmarks.thresholds import RISES
from benchmarks.verdicts import judge


@dataclasses.dataclass(frozen=True)
class Made(Settings):
    periods: tuple[float, ...] = (1.0, 10.0, float("inf"))
    limit: int | None = None


def train(settings, point, place):
    draws = [np.random.default_rng(seed) for seed in settings.each_seed]
    return {
        "loss": np.array([rng.normal(size=3) + 1 for rng in draws]),
        "accuracy": np.array([rng.random() for rng in draws]),
        "weights": np.array([rng.normal(size=(3, 2)) for rng in draws]),
    }


def draw(settings, all_runs, out):
    total = sum(runs["weights"].sum() for runs in all_runs)
    (out / "made_up.png").write_text(f"{total!r}")
    return {"made_up": f"{settings.seeds} seeds."}


MADE_UP = Experiment(
    Made(2),
    Made(6),
    Made(4),
    points=lambda settings: [{"period": p} for p in settings.periods],
    train=train,
    judge=lambda settings, all_runs: [
        judge("it is positive", "loss", runs.final("loss"), RISES) for runs in all_runs
    ],
    draw=draw,
    paper="Nothing.",
    grid="periods",
    seedless=lambda point: point["period"] == 10.0,
)


@pytest.fixture
def made_up(monkeypatch):
    module = types.SimpleNamespace(EXPERIMENT=MADE_UP)
    monkeypatch.setitem(sys.modules, "made_up", module)
    monkeypatch.setattr(merge, "EXPERIMENTS", {"made-up": "made_up", "other": "made_up"})


def run(out, name="made-up", **options):
    experiment.run(name, MADE_UP, Options(out, **options))
    return out


def settings_of(folder):
    return json.loads((folder / "settings.json").read_text())


def change(folder, **changes):
    (folder / "settings.json").write_text(json.dumps(settings_of(folder) | changes))


def same_files(merged, whole, *names):
    for name in names:
        assert (merged / name).read_bytes() == (whole / name).read_bytes()


def same_arrays(merged, whole):
    paths = sorted((whole / "runs").iterdir())
    assert [path.name for path in paths] == sorted(
        path.name for path in (merged / "runs").iterdir()
    )
    for path in paths:
        with np.load(path) as theirs, np.load(merged / "runs" / path.name) as ours:
            assert set(ours.files) == set(theirs.files)
            for name in set(ours.files) - {"_seconds", "_commit"}:
                np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.usefixtures("made_up")
def test_merged_runs_that_are_replaced_are_announced(tmp_path, capsys):
    parts = [run(tmp_path / "a", seeds=1), run(tmp_path / "b", seeds=1, first_seed=1)]
    out = tmp_path / "out"
    merge.merge(parts, out)
    assert "Replaces" not in capsys.readouterr().out
    merge.merge(parts, out)
    said = f"Replaces the finished runs of 3 points in '{out}'.\n"
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("name", ["settings.json", "missing"])
def test_an_input_that_is_no_folder_is_named_as_one(name, tmp_path, capsys):
    part, other = run(tmp_path / "a"), tmp_path / "a" / name
    assert main(["merge", str(part), str(other), "--out", str(tmp_path / "out")]) == 2
    why = "is a file" if other.exists() else "does not exist"
    said = f"'{other}' {why}; name folders of results to merge.\n"
    assert capsys.readouterr().err == said
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("made_up")
def test_a_damaged_input_is_not_about_the_output(tmp_path, capsys):
    part, other = run(tmp_path / "a"), run(tmp_path / "b", seeds=1, first_seed=6)
    (other / "settings.json").write_text("{")
    assert main(["merge", str(part), str(other), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "settings.json' cannot be read" in message
    assert "--out" not in message


@pytest.mark.usefixtures("made_up")
def test_merged_parts_are_the_whole_run(tmp_path, monkeypatch):
    # The point without seeds has the runs of the first part, so compare equal parts.
    monkeypatch.setattr(sys.modules["made_up"], "EXPERIMENT", WITH_SEEDS)
    whole = run(tmp_path / "whole")
    parts = [
        run(tmp_path / "c", seeds=3, first_seed=3),
        run(tmp_path / "a", seeds=1),
        run(tmp_path / "b", seeds=2, first_seed=1),
    ]
    merged = tmp_path / "merged"
    merge.merge(parts, merged)
    same_arrays(merged, whole)
    same_files(merged, whole, "made_up.csv", "verdicts.csv", "made_up.png")
    ours, theirs = settings_of(merged), settings_of(whole)
    for name in ("settings", "scale", "figures", "num_runs", "commits", "finished"):
        assert ours[name] == theirs[name]
    assert ours["settings"]["seeds"] == 6


WITH_SEEDS = dataclasses.replace(MADE_UP, seedless=lambda point: False)


@pytest.mark.usefixtures("made_up")
def test_a_part_lists_its_own_seeds(tmp_path):
    with (run(tmp_path, seeds=2, first_seed=4) / "made_up.csv").open() as file:
        assert {row["seed"] for row in csv.DictReader(file)} == {"4", "5"}


@pytest.mark.usefixtures("made_up")
def test_merged_results_are_those_of_a_run(tmp_path):
    """They can be resumed, and merged again."""
    first, second = run(tmp_path / "a", seeds=2), run(tmp_path / "b", first_seed=2)
    merge.merge([first, second], tmp_path / "ab")
    change_nothing = dataclasses.replace(MADE_UP, train=None)
    options = Options(tmp_path / "ab", seeds=8, resume=True)
    assert len(experiment.run("made-up", change_nothing, options)) == 3
    third = run(tmp_path / "c", seeds=1, first_seed=8)
    merge.merge([tmp_path / "ab", third], tmp_path / "abc")
    assert settings_of(tmp_path / "abc")["settings"]["seeds"] == 9


@pytest.mark.usefixtures("made_up")
def test_runs_without_seeds_are_those_of_the_first_part(tmp_path):
    parts = run(tmp_path / "a", seeds=2), run(tmp_path / "b", seeds=2, first_seed=2)
    merge.merge(parts, tmp_path / "ab")
    for period, number in (("1", 4), ("10", 2)):
        with np.load(tmp_path / "ab" / "runs" / f"period={period}.npz") as archive:
            assert archive["loss"].shape == (number, 3)


@pytest.mark.usefixtures("made_up")
def test_commits_and_times_are_of_all_parts(tmp_path, monkeypatch):
    commits = iter(["a" * 40, "b" * 40])
    monkeypatch.setattr(experiment._results, "commit", lambda: next(commits))
    parts = run(tmp_path / "a", seeds=1), run(tmp_path / "b", seeds=1, first_seed=1)
    merge.merge(parts, tmp_path / "ab")
    assert settings_of(tmp_path / "ab")["commits"] == ["a" * 40, "b" * 40]
    merge.merge([tmp_path / "ab", run_with(tmp_path / "c", monkeypatch)], tmp_path / "x")
    assert len(settings_of(tmp_path / "x")["commits"]) == 3


def run_with(out, monkeypatch):
    monkeypatch.setattr(experiment._results, "commit", lambda: "c" * 40)
    return run(out, seeds=1, first_seed=2)


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        ({"first_seed": 1}, {}, "have seed 1; merge only one of them"),
        ({"first_seed": 4}, {}, "Seeds 2 to 3 are missing between"),
        ({"grid": (1.0,)}, {}, "differ in more than their seeds .periods: "),
        ({"scale": "quick", "seeds": 2}, {}, "more than their seeds .scale: "),
        ({"name": "other"}, {}, "more than their seeds .experiment: "),
        ({}, {"versions": {"jax": "0"}}, r"their seeds .equinox: .* in the first"),
        ({}, {"device": "abacus"}, "more than their seeds .device: cpu in the first"),
        ({}, {"finished": False}, "has no finished results"),
        ({}, {"borrowed": True}, "are reused from another experiment"),
        ({}, {"settings": {"seeds": 2}}, "was written by another version"),
    ],
)
def test_parts_that_do_not_fit_are_refused(options, changes, words, tmp_path):
    first = run(tmp_path / "a", seeds=2)
    second = run(tmp_path / "b", **{"seeds": 2, "first_seed": 2} | options)
    change(second, **changes)
    with pytest.raises(Refusal, match=words) as refused:
        merge.merge([first, second], tmp_path / "ab")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ab").exists()


@pytest.mark.usefixtures("made_up")
def test_missing_runs_are_refused(tmp_path):
    parts = run(tmp_path / "a", seeds=2), run(tmp_path / "b", first_seed=2)
    (tmp_path / "b" / "runs" / "period=inf.npz").unlink()
    with pytest.raises(Refusal, match=r"lacks the runs at .*inf.* with --resume"):
        merge.merge(parts, tmp_path / "ab")


@pytest.mark.usefixtures("made_up")
def test_settings_of_another_version_are_refused(tmp_path):
    parts = run(tmp_path / "a", seeds=2), run(tmp_path / "b", first_seed=2)
    for part in parts:
        settings = settings_of(part)["settings"] | {"width": 3}
        change(part, settings=settings)
    with pytest.raises(Refusal, match="another version of the experiment"):
        merge.merge(parts, tmp_path / "ab")


VALUES = """
import equinox as eqx
import numpy as np

def model(key):
    return eqx.nn.MLP(2, 1, width_size=8, depth=1, key=key)

def data(seed):
    x = np.random.default_rng(seed).normal(size=(40, 2))
    y = np.sin(x[:, :1]) + x[:, 1:] ** 2
    return (x[:10], y[:10]), (x[10:20], y[10:20]), (x[20:], y[20:])
"""


@pytest.mark.exhaustive
def test_merged_halves_of_k_vs_lambda_are_the_whole_run(tmp_path):
    """The targets are values, so that all figures and verdicts are made."""
    task = tmp_path / "values.py"
    task.write_text(VALUES)

    def made(folder, *options):
        out = tmp_path / folder / "k-vs-lambda"
        command = ["k-vs-lambda", "--quick", "--task", str(task), "--out", str(out)]
        assert main([*command, *options]) == 0
        return out

    whole = made("whole", "--seeds", "2")
    parts = made("a", "--seeds", "1"), made("b", "--seeds", "1", "--seed-offset", "1")
    merged = tmp_path / "merged" / "k-vs-lambda"
    assert main(["merge", *map(str, parts), "--out", str(merged)]) == 0
    same_arrays(merged, whole)
    figures = [f"{name}.png" for name in settings_of(whole)["figures"]]
    assert len(figures) == 4
    same_files(merged, whole, "k_vs_lambda.csv", "verdicts.csv", *figures)
    for folder in (merged, whole):
        assert main(["report", "--out", str(folder.parent)]) == 0
    same_files(merged.parent, whole.parent, "report.json")
