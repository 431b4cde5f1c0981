"""Verdicts that are made again from the tables in the repository."""

import csv
import dataclasses
import gzip
import json
import math
import shutil
import sys
import types

import numpy as np
import pytest

from benchmarks import experiment, kept, rejudge
from benchmarks.__main__ import main
from benchmarks._options import Options, Refusal
from benchmarks._results import write_table
from benchmarks.experiment import Experiment, Runs, Settings
from benchmarks.thresholds import RISES
from benchmarks.verdicts import judge


@dataclasses.dataclass(frozen=True)
class Task:
    name: str


@dataclasses.dataclass(frozen=True)
class Made(Settings):
    periods: tuple[float, ...] = (1.0, math.inf)
    tasks: tuple[Task, ...] = (Task("one"),)


def train(settings, point, place):
    of_point = list(str(point).encode())
    draws = [np.random.default_rng([seed, *of_point]) for seed in settings.each_seed]
    return {
        "loss": np.array([rng.normal(size=3) + 4 for rng in draws]),
        "accuracy": np.array([rng.random() for rng in draws]),
        "weights": np.array([rng.normal(size=(3, 2)) for rng in draws]),
    }


def made_up(claim="it is positive", offset=0.0, drawn="accuracy"):
    def judge_all(settings, all_runs):
        (task,) = settings.tasks
        values = lambda runs: runs.final("loss") + runs["accuracy"] + offset
        return [
            judge(f"{task.name}: {claim}", f"sum at {r.point}", values(r), RISES)
            for r in all_runs
        ]

    def draw(settings, all_runs, out):
        total = sum(runs[drawn].sum() for runs in all_runs)
        (out / "made_up.png").write_text(f"{total!r}: {claim}")
        return {"made_up": f"The {drawn}: {claim}."}

    return Experiment(
        Made(2),
        Made(6, 3),
        Made(4),
        points=lambda settings: [
            *({"by": "K", "period": period} for period in settings.periods),
            {"by": "nothing", "limit": None},
        ],
        train=train,
        judge=judge_all,
        draw=draw,
        paper=f"Nothing: {claim}.",
        grid="periods",
    )


@pytest.fixture
def use(monkeypatch):
    """Put an experiment in the place of all others."""

    def use(made):
        module = types.SimpleNamespace(EXPERIMENT=made)
        monkeypatch.setitem(sys.modules, "made_up", module)
        monkeypatch.setattr(rejudge, "EXPERIMENTS", {"made-up": "made_up"})

    return use


@pytest.fixture
def root(tmp_path):
    """Keep the results of a run."""
    results = tmp_path / "results"
    experiment.run("made-up", made_up(), Options(results / "made-up"))
    kept.keep(results, ["made-up"], tmp_path)
    return tmp_path


def files(root):
    folder = root / kept.KEPT / "made-up"
    picture = root / kept.PAGE / "report" / "made_up.png"
    return folder / "verdicts.csv", folder / "settings.json", picture


def contents(root):
    return [path.read_bytes() for path in files(root)]


def change(path, old, new):
    """Replace a text in a file, or in a packed one."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        text = file.read()
    assert old in text
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        file.write(text.replace(old, new))


def test_runs_come_back_from_their_table(tmp_path):
    rng = np.random.default_rng(0)
    point = {"solver": "a, b", "period": math.inf, "limit": None}
    columns = {
        "loss": np.array([[1e-300, np.nan, np.inf], rng.normal(size=3)]),
        "error": rng.normal(size=2),
        "steps": np.array([[1, 2, 3], [4, 5, 5]]),
        "stable": np.array([[True, False, True], [True, True, True]]),
        "ending": np.array(["done", "not done"]),
        "weights": rng.normal(size=(2, 3, 4)),
    }
    write_table(tmp_path / "table.csv", Runs(point, columns).rows(7))
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    axes = {name: column.ndim for name, column in columns.items()} | {"other": 2}
    found = Runs.of_rows(point, rows, axes)
    assert set(found.columns) == set(columns) - {"weights"}
    for name, column in found.columns.items():
        np.testing.assert_array_equal(column, columns[name])
        assert column.dtype.kind == columns[name].dtype.kind
    for name in ("weights", "other"):
        with pytest.raises(Refusal, match=f"lacks the column '{name}'"):
            found[name]


def test_without_a_change_all_is_as_kept(root, use, capsys):
    use(made_up())
    before = contents(root)
    assert rejudge.rejudge(["made-up"], root)
    assert contents(root) == before
    assert "3 claims of 1 experiments: 3 as kept.\n" in capsys.readouterr().out


def test_columns_that_follow_from_others_are_added_to_the_table(root, use):
    large = lambda runs: {"large": runs.final("loss") > 4}
    use(dataclasses.replace(made_up(), derived=large))
    path = root / kept.KEPT / "made-up" / "made_up.csv.gz"

    def rows():
        with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    before = rows()
    assert rejudge.rejudge(["made-up"], root)
    last = {(r["by"], r["period"], r["seed"]): r["loss"] for r in before}
    for old, new in zip(before, rows(), strict=True):
        loss = last[new["by"], new["period"], new["seed"]]
        assert new.pop("large") == str(float(loss) > 4)
        assert new == old
    settings = json.loads((path.parent / "settings.json").read_text())
    assert settings["axes"]["large"] == 1
    packed = path.read_bytes()
    assert rejudge.rejudge(["made-up"], root)
    assert path.read_bytes() == packed


def test_other_words_are_carried_over(root, use, capsys):
    use(made_up("it is above 0"))
    old = json.loads(files(root)[1].read_text())
    assert rejudge.rejudge(["made-up"], root)
    assert "3 as kept in other words" in capsys.readouterr().out
    verdicts, settings, picture = files(root)
    assert picture.read_text().endswith(": it is above 0")
    assert verdicts.read_text().count("one: it is above 0,") == 3
    assert "one: it is above 0" in (root / kept.PAGE / "report.md").read_text()
    assert "one: it is above 0" in (root / kept.KEPT / "report.json").read_text()
    found = json.loads(settings.read_text())
    assert found.pop("figures") == {"made_up": "The accuracy: it is above 0."}
    assert found.pop("paper") == "Nothing: it is above 0."
    assert found == {k: v for k, v in old.items() if k not in ("figures", "paper")}


def test_another_statistic_is_found_and_written(root, use, capsys):
    use(made_up(offset=-9.0))
    assert not rejudge.rejudge(["made-up"], root)
    said = capsys.readouterr().out
    assert "outcome confirmed kept, refuted now" in said
    assert "claims of 1 experiments: 3 different" in said
    assert files(root)[0].read_text().count("refuted") == 3
    assert rejudge.rejudge(["made-up"], root)


def test_another_number_in_the_table_is_found(root, use, capsys):
    use(made_up())
    table = root / kept.KEPT / "made-up" / "made_up.csv.gz"
    with gzip.open(table, "rt") as file:
        last = list(csv.DictReader(file))[-1]
    change(table, last["loss"], "99.0")
    assert not rejudge.rejudge(["made-up"], root)
    assert "1 different" in capsys.readouterr().out


def test_another_number_of_claims_is_found(root, use, capsys):
    use(made_up())
    verdicts = files(root)[0]
    verdicts.write_text("".join(verdicts.read_text().splitlines(keepends=True)[:-1]))
    assert not rejudge.rejudge(["made-up"], root)
    assert "2 claims are kept, and 3 are judged" in capsys.readouterr().out


def test_figures_of_more_axes_stay(root, use, capsys):
    use(made_up("it is above 0", drawn="weights"))
    before = files(root)[2].read_bytes()
    assert rejudge.rejudge(["made-up"], root)
    assert "stay as they are, because the table lacks the column 'weights'" in (
        capsys.readouterr().out
    )
    assert files(root)[2].read_bytes() == before
    found = json.loads(files(root)[1].read_text())
    assert found["figures"] == {"made_up": "The accuracy: it is positive."}


def test_what_cannot_be_judged_stays(root, use, capsys):
    def said(path, old, new, why):
        change(path, old, new)
        before = contents(root)
        assert rejudge.rejudge(["made-up"], root)
        assert f"made-up is not judged, because {why}." in capsys.readouterr().out
        assert contents(root) == before
        change(path, new, old)

    use(made_up())
    _, settings, _ = files(root)
    table = settings.parent / "made_up.csv.gz"
    said(settings, '"axes"', '"other"', "its settings.json lacks the axes of the columns")
    gone = "the experiment no longer has all of its settings"
    said(settings, '"seeds"', '"former"', gone)
    said(table, "K,inf", "K,3.0", "its table has other points than the experiment")
    table.unlink()
    said(settings, "Nothing", "No thing", "no table of its runs is kept")


@pytest.mark.parametrize("damage", ["cut off", "no archive", "a row is lost"])
def test_a_damaged_table_is_refused(root, use, capsys, damage):
    use(made_up())
    table = files(root)[1].parent / "made_up.csv.gz"
    whole, before = table.read_bytes(), contents(root)
    lines = gzip.decompress(whole).splitlines(keepends=True)
    damaged = {"cut off": whole[: len(whole) // 2], "no archive": b"garbage"}
    damaged["a row is lost"] = gzip.compress(b"".join(lines[:-1]))
    table.write_bytes(damaged[damage])
    rejudge.rejudge(["made-up"], root)
    assert "not judged, because its table is damaged" in capsys.readouterr().out
    assert contents(root) == before


def test_a_changed_verdict_of_stability_is_found(tmp_path, capsys):
    folder = tmp_path / kept.KEPT / "stability"
    shutil.copytree(kept.ROOT / kept.KEPT / "stability", folder)
    verdicts = folder / "verdicts.csv"
    before = verdicts.read_text()
    change(verdicts, "-0.33", "-0.34")
    change(verdicts, ",undecided,", ",refuted,")
    assert not rejudge.rejudge(["stability"], tmp_path)
    said = capsys.readouterr().out
    assert "1 as kept, 2 different" in said
    assert "estimate -0.342 kept, -0.332 now" in said
    assert "outcome refuted kept, undecided now" in said
    assert verdicts.read_text() == before


def test_the_command_line(monkeypatch, capsys):
    assert main(["rejudge", "regime"]) == 2
    assert "There is no experiment 'regime'; did you mean" in capsys.readouterr().err
    for alike in (True, False):
        monkeypatch.setattr(rejudge, "rejudge", lambda names, alike=alike: alike)
        assert main(["rejudge", "regimes", "pinn"]) == (0 if alike else 1)


@pytest.mark.slow
def test_the_verdicts_of_kernel_drift_come_from_its_table(tmp_path, capsys):
    folder = tmp_path / kept.KEPT / "kernel-drift"
    shutil.copytree(kept.ROOT / kept.KEPT / "kernel-drift", folder)
    before = (folder / "verdicts.csv").read_bytes()
    assert rejudge.rejudge(["kernel-drift"], tmp_path)
    assert (folder / "verdicts.csv").read_bytes() == before
