"""The results in the repository, and the page that is generated from them."""

import csv
import gzip
import json
import re
import shutil

import pytest
from test_benchmarks_report import leave

from benchmarks import kept, report
from benchmarks._modules import EXPERIMENTS
from benchmarks._options import Refusal


RESULTS, PAGE = kept.ROOT / kept.KEPT, kept.ROOT / kept.PAGE
NAMES = sorted(folder.parent.name for folder in RESULTS.glob("*/settings.json"))


def without_age(text):
    """Drop the note on results older than the solvers, which changes with every commit to
    them."""
    lines = [line for line in text.splitlines() if line]
    return [line for line in lines if not line.startswith(report.OLDER)]


def test_the_page_matches_the_results(tmp_path):
    results, page = tmp_path / kept.KEPT, tmp_path / kept.PAGE
    shutil.copytree(RESULTS, results)
    shutil.copytree(PAGE / "report", page / "report")
    report.write(results, list(EXPERIMENTS), page)
    made = (page / "report.md").read_text(encoding="utf-8")
    there = (PAGE / "report.md").read_text(encoding="utf-8")
    assert without_age(made) == without_age(there)
    found = (results / "report.json").read_text()
    assert json.loads(found) == json.loads((RESULTS / "report.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_results_with_a_commit_have_a_table(name):
    settings = json.loads((RESULTS / name / "settings.json").read_text())
    table = RESULTS / name / f"{name.replace('-', '_')}.csv.gz"
    assert table.exists() == bool(settings["commits"])
    if not table.exists():
        return
    for commit in settings["commits"]:
        assert len(commit) == 40, "made of code that is not committed"
    with gzip.open(table, "rt", newline="") as file:
        num_rows = len(list(csv.DictReader(file)))
    # A row of `tuning` has the results of up to three of its seven runs.
    assert num_rows >= settings["num_runs"] / (3 if name == "tuning" else 1)


def test_the_results_are_small():
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 8e6


def quoted():
    """The intervals of the page, each with the verdicts that may be its source."""
    text = (PAGE / "findings.md").read_text(encoding="utf-8")
    verdicts = []
    for paragraph in text.split("\n\n"):
        names = [n for n in re.findall("`([a-z-]+)`", paragraph) if n in NAMES]
        if names:  # Further paragraphs are on the same experiment.
            files = [RESULTS / name / "verdicts.csv" for name in names]
            tables = [f.read_text().splitlines() for f in files]
            verdicts = [row for table in tables for row in csv.DictReader(table)]
        # The brackets of "inputs in [-4, 4]" hold no interval.
        for low, high in re.findall(
            r"(?<!in )\[(-?[\d.,e]+),\s+(-?[\d.,e]+)\]", paragraph
        ):
            yield low.replace(",", ""), high.replace(",", ""), verdicts


def test_quoted_intervals_are_those_of_the_verdicts():
    """They may have other units or signs: percent, a factor for a logarithm."""

    def is_rounded(value, text):
        mantissa, _, exponent = text.partition("e")
        decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
        return abs(value - float(text)) <= 0.51 * 10.0**-decimals

    units = [lambda x: x, lambda x: 100 * x, lambda x: 10**x]
    found = list(quoted())
    assert len(found) > 50
    for low, high, verdicts in found:
        ends = [(float(v["low"]), float(v["high"])) for v in verdicts]
        ends = [pair for pair in ends if max(map(abs, pair)) < 100]
        either = [pair for a, b in ends for pair in ((a, b), (-b, -a))]
        assert any(
            is_rounded(unit(a), low) and is_rounded(unit(b), high)
            for a, b in either
            for unit in units
        ), f"[{low}, {high}]"


def test_finished_results_replace_kept_ones(tmp_path, capsys):
    results = tmp_path / "results"
    commit = "c" * 40
    for name, figures in (("batch", {"batch": "One."}), ("filters", {"filters": "Two."})):
        folder = leave(results, name, figures=figures, commits=[commit])
        (folder / f"{name}.csv").write_text("seed,loss\n0,1.5\n")
    leave(results, "resnet", finished=False)
    kept.keep(results, ["batch", "filters", "resnet"], tmp_path)
    there = tmp_path / kept.KEPT
    assert {path.name for path in there.iterdir()} == {"batch", "filters", "report.json"}
    packed = (there / "batch" / "batch.csv.gz").read_bytes()
    assert gzip.decompress(packed) == b"seed,loss\n0,1.5\n"
    assert f"experiments in '{results}': batch, filters.\n" in capsys.readouterr().out
    text = (tmp_path / kept.PAGE / "report.md").read_text()
    assert f"commit {commit[:7]}" in text
    assert "](report/filters.png)" in text
    assert (tmp_path / kept.PAGE / "report" / "filters.png").exists()
    assert "Not run yet. To run it: `python -m benchmarks resnet`." in text
    # Adding a result keeps the existing ones and their figures.
    shutil.rmtree(results)
    leave(results, "resnet", figures={"resnet": "Three."}, commits=[commit])
    (results / "resnet" / "resnet.csv").write_text("seed\n0\n")
    kept.keep(results, ["batch", "filters", "resnet"], tmp_path)
    text = (tmp_path / kept.PAGE / "report.md").read_text()
    assert all(f"](report/{name}.png)" in text for name in ("batch", "filters", "resnet"))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"scale": "quick"}, "a quick run"),
        ({"settings": {"data": "my_task.py"}}, "on a task of your own"),
    ],
)
def test_quick_runs_and_those_of_an_own_task_are_not_kept(other, why, tmp_path, capsys):
    results = tmp_path / "results"
    folder = leave(results, "batch", **other)
    (folder / "batch.csv").write_text("seed\n0\n")
    with pytest.raises(Refusal, match="no finished experiment"):
        kept.keep(results, ["batch"], tmp_path)
    assert f"batch is not copied, because it is {why}" in capsys.readouterr().out


def test_without_results_nothing_is_kept(tmp_path):
    (tmp_path / "results").mkdir()
    with pytest.raises(Refusal, match="no finished experiment"):
        kept.keep(tmp_path / "results", ["batch"], tmp_path)


@pytest.mark.parametrize(
    ("commits", "counts", "older"),
    [
        (["a" * 40], {"a" * 40 + "..HEAD": "0"}, False),
        (
            ["a" * 40, "b" * 40],
            {"a" * 40 + "..HEAD": "0", "b" * 40 + "..HEAD": "3"},
            True,
        ),
        (["a" * 40 + " with changes"], {"a" * 40 + "..HEAD": "1"}, True),
        (["of another repository"], {}, False),
        ([], {"--since=2026-01-02T23:59:59": "2"}, True),
    ],
)
def test_results_older_than_the_solvers_are_named(
    commits, counts, older, tmp_path, monkeypatch
):
    answer = lambda folder, command, count, since, *rest: counts.get(since, "")
    monkeypatch.setattr(report, "git", answer)
    leave(tmp_path, "batch", commits=commits)
    report.write(tmp_path, ["batch"])
    text = (tmp_path / "report.md").read_text()
    assert (f"{report.OLDER}batch." in text) == older
