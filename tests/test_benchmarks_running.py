"""Running, storing and resuming experiments, and errors of the command line."""

import csv
import dataclasses
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st

from benchmarks import __main__ as command_line, _results, experiment
from benchmarks.__main__ import BENCHMARKS, EXPERIMENTS, main
from benchmarks._options import Options, Refusal
from benchmarks.experiment import Experiment, only, Runs, select, Settings
from benchmarks.experiments import xor_features
from benchmarks.thresholds import RISES
from benchmarks.verdicts import judge


@dataclasses.dataclass(frozen=True)
class Made(Settings):
    periods: tuple[float, ...] = (1.0, 10.0, 1e6)
    widths: tuple[int, ...] = (4, 8)
    num_steps: int = 5


class Calls:
    """An experiment that counts its runs, and can be interrupted before one of them."""

    def __init__(self, **changes):
        self.trained = Counter()
        self.places = []
        self.interrupt_at = None
        self.experiment = Experiment(
            Made(2),
            Made(3),
            Made(4),
            points=lambda settings: [{"period": p} for p in settings.periods],
            train=self.train,
            judge=lambda settings, all_runs: [
                judge("it is positive", "loss", all_runs[-1].final("loss"), RISES)
            ],
            draw=self.draw,
            paper="Nothing.",
            grid="periods",
        )
        self.experiment = dataclasses.replace(self.experiment, **changes)

    def train(self, settings, point, place):
        if point["period"] == self.interrupt_at:
            raise KeyboardInterrupt
        self.trained[point["period"]] += 1
        self.places.append(place)
        seeds = np.arange(settings.seeds)
        looks = np.arange(3)
        return {
            "loss": point["period"] + seeds[:, None] + 0.1 * looks,
            "accuracy": 0.5 * seeds,
            "look": np.broadcast_to(looks, (settings.seeds, 3)),
            "weights": np.zeros((settings.seeds, 3, 2)),
        }

    def draw(self, settings, all_runs, out):
        (out / "made_up.png").write_text("a figure")
        return {"made_up": "A caption."}

    def run(self, out, name="made-up", **options):
        options = {"scale": "quick"} | options
        return experiment.run(name, self.experiment, Options(out, **options))


@pytest.fixture
def calls():
    return Calls()


def settings_of(folder):
    return json.loads((folder / "settings.json").read_text())


def change_settings(folder, **changes):
    (folder / "settings.json").write_text(json.dumps(settings_of(folder) | changes))


def test_files_of_a_run(calls, tmp_path):
    verdicts = calls.run(tmp_path)
    assert [verdict.claim for verdict in verdicts] == ["it is positive"]
    with (tmp_path / "made_up.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 2 * 3
    assert list(rows[0]) == ["period", "seed", "loss", "accuracy", "look"]
    last = {"period": "1000000.0", "seed": "1", "accuracy": "0.5", "look": "2"}
    assert last.items() <= rows[-1].items()
    assert float(rows[-1]["loss"]) == pytest.approx(1e6 + 1.2)
    left = settings_of(tmp_path)
    assert left["finished"]
    assert left["scale"] == "quick"
    assert left["settings"]["periods"] == [1.0, 10.0, 1e6]
    assert left["figures"] == {"made_up": "A caption."}
    assert left["num_runs"] == 6
    assert left["paper"] == "Nothing."
    assert not left["borrowed"]
    with (tmp_path / "verdicts.csv").open() as file:
        verdicts = list(csv.DictReader(file))
    assert list(verdicts[0])[:2] == ["claim", "quantity"]
    assert {row["scale"] for row in verdicts} == {"quick"}


@given(st.integers(1, 4), st.integers(1, 5))
def test_columns_are_broadcast_to_a_row_a_seed_and_look(num_seeds, num_looks):
    both = np.random.default_rng(0).normal(size=(num_seeds, num_looks))
    columns = {
        "both": both,
        "seed_alone": both[:, 0],
        "look_alone": both[:1],
        "neither": np.ones((1, 1)),
        "drawn": np.zeros((num_seeds, num_looks, 7)),
    }
    rows = Runs({"solver": "a"}, columns).rows()
    assert len(rows) == num_seeds * num_looks
    for number, row in enumerate(rows):
        seed, look = divmod(number, num_looks)
        assert row == {
            "solver": "a",
            "seed": seed,
            "both": both[seed, look],
            "seed_alone": both[seed, 0],
            "look_alone": both[0, look],
            "neither": 1.0,
        }


def test_columns_of_seeds_alone_are_one_row_a_seed():
    runs = Runs({}, {"name": np.array(["a", "b"]), "number": np.array([1, 2])})
    assert runs.rows() == [
        {"seed": 0, "name": "a", "number": 1},
        {"seed": 1, "name": "b", "number": 2},
    ]
    assert all(type(row["number"]) is int for row in runs.rows())


def test_runs_are_found_by_their_point():
    all_runs = [Runs({"a": a, "b": b}, {}) for a in (1, 2) for b in ("x", "y")]
    assert select(all_runs, a=1) == all_runs[:2]
    assert select(all_runs) == all_runs
    assert only(all_runs, a=2, b="x") is all_runs[2]
    with pytest.raises(ValueError, match="unpack"):
        only(all_runs, a=1)


def test_an_interrupted_experiment_goes_on_without_repeating_runs(calls, tmp_path):
    calls.interrupt_at = 1e6
    with pytest.raises(KeyboardInterrupt):
        calls.run(tmp_path)
    assert not settings_of(tmp_path)["finished"]
    assert not (tmp_path / "verdicts.csv").exists()
    calls.interrupt_at = None
    calls.run(tmp_path, resume=True)
    assert calls.trained == {1.0: 1, 10.0: 1, 1e6: 1}
    whole = Calls()
    whole.run(tmp_path / "whole")
    table = (tmp_path / "made_up.csv").read_text()
    assert table == (tmp_path / "whole" / "made_up.csv").read_text()


def test_without_resume_all_runs_are_repeated(calls, tmp_path):
    calls.run(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    calls.run(tmp_path)
    assert calls.trained == {1.0: 2, 10.0: 2, 1e6: 2}
    assert not (tmp_path / "checkpoints").exists()


def test_a_figure_that_fails_leaves_the_table_and_the_verdicts(calls, tmp_path, capsys):
    def fail(settings, all_runs, out):
        raise ValueError("all values are <= 0")

    broken = Calls(draw=fail)
    with pytest.raises(ValueError, match="all values"):
        broken.run(tmp_path)
    assert "it is positive" in (tmp_path / "verdicts.csv").read_text()
    assert "it is positive" in capsys.readouterr().out
    table = (tmp_path / "made_up.csv").read_text()
    assert not settings_of(tmp_path)["finished"]
    calls.run(tmp_path, resume=True)
    assert not calls.trained
    assert (tmp_path / "made_up.csv").read_text() == table
    assert settings_of(tmp_path)["finished"]


def test_results_that_cannot_be_recomputed_are_not_deleted(calls, tmp_path):
    calls.run(tmp_path)
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def refuse(settings, point, place):
        raise Refusal("There are no files.")

    made = dataclasses.replace(calls.experiment, train=refuse)
    with pytest.raises(Refusal, match="no files"):
        experiment.run("made-up", made, Options(tmp_path, "quick"))
    assert kept == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("resume", [False, True])
def test_two_commands_do_not_share_a_folder(resume, calls, tmp_path):
    def meanwhile(settings, point, place):
        with pytest.raises(Refusal, match="Another command is writing to"):
            Calls().run(tmp_path, seeds=3, resume=resume)
        return calls.train(settings, point, place)

    both = Calls(train=meanwhile)
    both.run(tmp_path)
    assert settings_of(tmp_path)["settings"]["seeds"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {
        "made_up.csv",
        "made_up.png",
        "runs",
        "settings.json",
        "verdicts.csv",
    }
    calls.run(tmp_path)  # which is allowed, because the other one has ended


def test_a_killed_command_does_not_lock_its_folder(calls, tmp_path):
    program = (
        "import os; from pathlib import Path; from benchmarks._results import alone_in\n"
        f"with alone_in(Path({str(tmp_path)!r})): os._exit(1)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 1
    assert (tmp_path / ".lock").exists()
    calls.run(tmp_path)
    assert not (tmp_path / ".lock").exists()


def test_files_of_other_settings_are_refused_wherever_they_came_from(calls, tmp_path):
    calls.run(tmp_path / "a")
    calls.run(tmp_path / "b", seeds=3)
    name = "period=10.npz"
    (tmp_path / "b" / "runs" / name).replace(tmp_path / "a" / "runs" / name)
    with pytest.raises(Refusal, match=r"period=10\.npz' holds runs with other settings"):
        calls.run(tmp_path / "a", resume=True)
    (tmp_path / "a" / "runs" / name).unlink()
    calls.run(tmp_path / "a", resume=True)


def test_resume_without_results_starts_and_says_so(calls, tmp_path, capsys):
    calls.run(tmp_path / "new", resume=True)
    assert "holds no runs to resume: they start anew" in capsys.readouterr().out
    assert calls.trained.total() == 3


def test_a_medium_scale_is_for_images():
    with pytest.raises(Refusal, match="has no medium scale, which is only for images"):
        xor_features.EXPERIMENT.settings(Options(Path("x"), "medium"))


def test_checkpoints_are_for_the_full_scale_alone(calls, tmp_path):
    calls.run(tmp_path / "quick")
    calls.run(tmp_path / "full", scale="full", data_dir=Path("x"), resume=True)
    quick, full = calls.places[0], calls.places[-1]
    assert quick.checkpoints is None
    assert full.checkpoints == tmp_path / "full" / "checkpoints" / "period=1e+06"
    assert full.data_dir == Path("x")
    assert full.resume


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seeds": 5}, "(seeds: 2 there, 5 now)"),
        ({"steps": 6}, "(num_steps: 5 there, 6 now)"),
        ({"grid": (1.0, 2.0)}, "(periods: [1.0, 10.0, 1000000.0] there, [1.0, 2.0] now)"),
        ({"scale": "embedded"}, "(scale: quick there, embedded now)"),
        ({"name": "another"}, "(experiment: made-up there, another now)"),
    ],
)
def test_other_settings_are_refused(options, words, resume, calls, tmp_path):
    calls.run(tmp_path)
    before = (tmp_path / "settings.json").read_text()
    with pytest.raises(Refusal) as refusal:
        calls.run(tmp_path, resume=resume, **options)
    assert words in str(refusal.value)
    assert "--out" in str(refusal.value)
    assert calls.trained.total() == 3
    assert (tmp_path / "settings.json").read_text() == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": {"jax": "0.1"}}, "(equinox: None there, "),
        ({"device": "an abacus"}, "(device: an abacus there, "),
        ({"x64": "maybe"}, "(x64: maybe there, "),
    ],
)
def test_other_circumstances_are_refused_with_resume_alone(
    changes, words, calls, tmp_path
):
    calls.run(tmp_path)
    change_settings(tmp_path, **changes)
    with pytest.raises(Refusal) as refusal:
        calls.run(tmp_path, resume=True)
    assert words in str(refusal.value)
    assert "without --resume" in str(refusal.value)
    calls.run(tmp_path)
    assert calls.trained == {1.0: 2, 10.0: 2, 1e6: 2}


@pytest.mark.parametrize("text", ["", "{", "[]", "1"])
def test_unreadable_settings_are_refused(text, calls, tmp_path):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(Refusal, match="cannot be read"):
        calls.run(tmp_path)
    assert not calls.trained


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Make a complete archive of the runs at one point."""
    folder = tmp_path_factory.mktemp("runs")
    Calls().run(folder)
    return folder / "runs" / "period=10.npz"


@given(st.data())
def test_a_damaged_archive_is_refused_by_its_name(archive, data):
    whole = archive.read_bytes()
    damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        archive.write_bytes(damaged)
        with pytest.raises(Refusal, match=r"period=10\.npz' cannot be read .*delete it"):
            experiment.load(archive.parent, {"period": 10.0})
    finally:
        archive.write_bytes(whole)


@given(st.data())
def test_a_changed_archive_is_refused_or_equivalent(archive, data):
    whole = archive.read_bytes()
    known, *_ = experiment.load(archive.parent, {"period": 10.0})
    changed = bytearray(whole)
    place = data.draw(st.integers(0, len(whole) - 1))
    changed[place] ^= data.draw(st.integers(1, 255))
    try:
        archive.write_bytes(changed)
        found, *_ = experiment.load(archive.parent, {"period": 10.0})
    except Refusal:
        return
    finally:
        archive.write_bytes(whole)
    for name, column in known.columns.items():
        np.testing.assert_array_equal(found[name], column)


def test_damaged_runs_are_refused_and_made_again_once_deleted(calls, tmp_path):
    calls.run(tmp_path)
    path = tmp_path / "runs" / "period=10.npz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(Refusal, match=r"period=10\.npz"):
        calls.run(tmp_path, resume=True)
    path.unlink()
    calls.run(tmp_path, resume=True)
    assert calls.trained == {1.0: 1, 10.0: 2, 1e6: 1}


def test_runs_keep_the_commit_that_made_them(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment._results, "commit", lambda: "a" * 40)
    calls.interrupt_at = 1e6
    with pytest.raises(KeyboardInterrupt):
        calls.run(tmp_path)
    monkeypatch.setattr(experiment._results, "commit", lambda: "b" * 40)
    calls.interrupt_at = None
    calls.run(tmp_path, resume=True)
    assert settings_of(tmp_path)["commits"] == ["a" * 40, "b" * 40]


def test_the_commit_marks_uncommitted_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(_results, "__file__", str(tmp_path / "benchmarks" / "x.py"))
    assert _results.commit() == ""
    (tmp_path / "benchmarks").mkdir()
    write = lambda text: (tmp_path / "benchmarks" / "x.py").write_text(text)
    write("1")
    who = ["-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    commit = _results.commit()
    assert len(commit) == 40
    write("2")
    assert _results.commit() == f"{commit} with changes"


def test_runs_of_a_sibling_are_borrowed(calls, tmp_path):
    calls.run(tmp_path / "made-up")
    sibling = Calls(runs_of="made-up")
    sibling.run(tmp_path / "sibling", name="sibling")
    assert not sibling.trained
    left = settings_of(tmp_path / "sibling")
    assert left["borrowed"]
    assert left["run_seconds"] == settings_of(tmp_path / "made-up")["run_seconds"]
    tables = tmp_path / "sibling" / "sibling.csv", tmp_path / "made-up" / "made_up.csv"
    assert tables[0].read_text() == tables[1].read_text()


def test_runs_that_a_sibling_lacks_are_made(calls, tmp_path):
    calls.interrupt_at = 1e6
    with pytest.raises(KeyboardInterrupt):
        calls.run(tmp_path / "made-up")
    sibling = Calls(runs_of="made-up")
    sibling.run(tmp_path / "sibling", name="sibling")
    assert sibling.trained == {1e6: 1}
    assert not settings_of(tmp_path / "sibling")["borrowed"]


@pytest.mark.parametrize("other", ["settings", "versions", "device", "folder"])
def test_runs_of_a_sibling_with_other_settings_are_not_borrowed(other, calls, tmp_path):
    if other == "settings":
        calls.run(tmp_path / "made-up", seeds=7)
    elif other != "folder":
        calls.run(tmp_path / "made-up")
        change_settings(tmp_path / "made-up", **{other: "another"})
    sibling = Calls(runs_of="made-up")
    sibling.run(tmp_path / "sibling", name="sibling")
    assert sibling.trained.total() == 3


def test_options_change_the_settings(calls, tmp_path):
    made = calls.experiment
    assert made.settings(Options(tmp_path)) == made.embedded
    assert made.settings(Options(tmp_path, "full")) == made.full
    options = Options(tmp_path, "quick", seeds=9, steps=8, grid=(2.0, 3.0))
    assert made.settings(options) == Made(9, periods=(2.0, 3.0), num_steps=8)


def test_a_grid_of_whole_numbers_stays_one(tmp_path):
    made = Calls(grid="widths").experiment
    settings = made.settings(Options(tmp_path, "quick", grid=(2.0, 30.0)))
    assert settings.widths == (2, 30)
    assert all(type(width) is int for width in settings.widths)
    for grid, kind in ((2.5,), "whole"), ((math.inf,), "finite"):
        with pytest.raises(Refusal, match=f"widths here, which must be {kind}"):
            made.settings(Options(tmp_path, grid=grid))


@pytest.mark.parametrize("grid", [(0.0, 1.0), (-1.0,)])
def test_a_grid_is_positive(grid, calls, tmp_path):
    with pytest.raises(Refusal, match="periods here, which must be positive"):
        calls.experiment.settings(Options(tmp_path, grid=grid))


@pytest.mark.parametrize("grid", [(1e-300,), (1.0, 1e300)])
def test_a_grid_is_bounded(grid, calls, tmp_path):
    with pytest.raises(Refusal, match="must be from 1e-12 to 1e\\+12"):
        calls.run(tmp_path, grid=grid)
    assert not calls.trained


def test_steps_that_are_taken_one_by_one_have_an_end(tmp_path, capsys):
    arguments = ["stability", "--quick", "--grid", "1e6", "--out", str(tmp_path)]
    assert main(arguments) == 2
    assert "periods here, which must be from 1 to 100000" in capsys.readouterr().err


def test_steps_are_refused_by_experiments_without_them(tmp_path):
    made = Calls(embedded=Settings(2)).experiment
    with pytest.raises(Refusal, match="leave --steps out"):
        made.settings(Options(tmp_path, steps=3))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda x: st.lists(x) | st.tuples(x, x) | st.dictionaries(st.text(), x),
    max_leaves=10,
)


@given(VALUES)
def test_plain_is_what_json_gives_back(value):
    plain = experiment.plain(value)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert experiment.plain(plain) == plain


@given(*[st.dictionaries(st.text(min_size=1), st.integers() | VALUES)] * 2)
def test_a_difference_is_named_by_its_key(old, new):
    old, new = experiment.plain(old), experiment.plain(new)
    if old == new:
        return
    said = experiment.difference(old, new, "settings")
    differing = [key for key in {*old, *new} if old.get(key) != new.get(key)]
    nested = isinstance(old.get(min(differing)), dict)
    assert nested or not differing or said.startswith(f"{min(differing)}: ")
    assert " there, " in said
    assert said.endswith(" now")


def test_a_difference_is_short():
    assert experiment.difference({"a": {"b": 1}}, {"a": {"b": 2}}, "x") == (
        "b: 1 there, 2 now"
    )
    said = experiment.difference(list(range(1000)), None, "x")
    assert len(said) < 100
    assert "... there, None now" in said


@given(st.lists(st.floats(0, allow_nan=False), min_size=2, unique=True))
def test_points_have_files_of_their_own(periods):
    names = {experiment._name({"period": period}) for period in periods}
    assert len(names) == len(periods)


def test_files_are_named_by_their_points():
    point = {"solver": "damped / a b", "period": 1e6, "width": 4, "none": None}
    name = "solver=damped---a-b,period=1e+06,width=4,none=None"
    assert experiment._name(point) == name
    assert experiment._name({}) == "all"


# The command line.


@pytest.fixture
def ran(monkeypatch):
    """Record the experiments that would run, instead of running them."""
    found = []
    monkeypatch.setattr(
        command_line, "_run", lambda name, options: found.append((name, options))
    )
    monkeypatch.setattr(command_line, "_report", lambda folder: 0)
    return found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["k-swep"], "There is no experiment 'k-swep'; did you mean 'k-sweep'?"),
        (["k-swep", "mnist"], "There is no experiment 'k-swep'"),
        (["reprot"], "did you mean 'report'?"),
        (["k-sweep", "mnist"], "'k-sweep' takes no second name; leave 'mnist' out."),
        (["list", "mnist"], "'list' takes no second name"),
        (["k-sweep", "mnist", "x"], "leave 'mnist' out"),
        (["speed", "auto", "x"], "'x' is one name too many"),
        (["k-sweep", "--dry-run", "--against", "x"], "takes no --against"),
        (["all", "--dry-run"], "--dry-run needs a single experiment"),
        (["merge", "a"], "Name at least two folders"),
        (["merge", "a", "b", "--seeds", "2"], "'merge' takes no --seeds"),
        (["k-sweep", "--quick", "--scale", "full"], "leave --scale out"),
        (["nist", "--seeds", "2"], "'nist' takes no --seeds"),
        (["nist", "--scale", "full"], "'nist' takes no --scale"),
        (["speed", "--resume"], "'speed' takes no --resume"),
        (["speed", "--data-dir", "x"], "'speed' takes no --data-dir"),
        (["report", "--quick"], "'report' takes no --quick"),
        (["report", "--grid", "1"], "'report' takes no --grid"),
        (["report", "--device", "cpu"], "'report' takes no --device"),
        (["list", "--out", "x"], "'list' takes no --out"),
        (["data", "mnist", "--data-dir", "x", "--seeds", "1"], "'data' takes no --seeds"),
        (["data", "mnits", "--data-dir", "x"], "did you mean 'mnist'?"),
        (["data", "--data-dir", "x"], "Name a data set (mnist, cifar10) and its folder"),
        (["all", "--steps", "3"], "--steps needs a single experiment"),
        (["all", "--grid", "3"], "--grid needs a single experiment"),
        (["k-sweep", "--data-dir", "x"], "--data-dir is for --scale full"),
        (["k-sweep", "--quick", "--data-dir", "x"], "--data-dir is for --scale full"),
        (["k-sweep", "--sede", "3"], "no option '--sede'; did you mean '--seeds'?"),
        (["k-sweep", "--sede=3"], "no option '--sede'; did you mean '--seeds'?"),
        (["k-sweep", "--zzzzzz"], "no option '--zzzzzz'. See --help."),
        (["k-sweep", "--res"], "no option '--res'; did you mean '--resume'?"),
    ],
)
def test_impossible_options_are_refused_in_one_line(arguments, words, ran, capsys):
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
    assert not ran


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scale", "ful"], "must be embedded, medium or full, but is 'ful'; did"),
        (["--device", "tpu"], "must be cpu or gpu, but is 'tpu'"),
        (["--grid", "a"], "must be numbers with commas between"),
        (["--grid", "1,,2"], "must be numbers with commas between"),
        (["--grid", "nan"], "must be numbers with commas between"),
        (["--seeds", "0"], "at least 1 and at most 10,000, but is '0'"),
        (["--steps", "1.5"], "must be a whole number of at least 1 and at most"),
        (["--steps", "9" * 20], f"at most 1,000,000,000, but is '{'9' * 20}'"),
        (["--seeds", "999999999999"], "at most 10,000, but is '999999999999'"),
        (["--out", "a\0b"], "a folder, but is 'a\\x00b', with a null character"),
        (["--data-dir", "\0"], "with a null character"),
        (["--out"], "expected one argument"),
    ],
)
def test_bad_values_are_refused_in_a_line(arguments, words, ran, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["k-sweep", *arguments])
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert words in message
    assert arguments[0] in message
    assert message.count("\n") == 1
    assert not ran


@pytest.fixture
def device():
    """Restore the device afterwards."""
    before = jax.config.jax_default_device
    yield
    jax.config.update("jax_default_device", before)


def test_a_missing_device_is_refused(ran, device, tmp_path, capsys, monkeypatch):
    def none(name):
        raise RuntimeError(f"Unknown backend {name}")

    monkeypatch.setattr(jax, "devices", none)
    assert main(["k-sweep", "--device", "gpu", "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "jax finds no gpu here" in message
    assert message.count("\n") == 1
    assert not ran


def test_a_device_is_taken(ran, device, tmp_path):
    assert main(["k-sweep", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert jax.config.jax_default_device == jax.devices("cpu")[0]


def test_options_arrive(ran, tmp_path):
    arguments = (
        "--scale full --seeds 3 --seed-offset 5 --steps 7 --grid 1e6,1,1 --resume "
        "--data-dir x"
    )
    assert main(["k-sweep", *arguments.split(), "--out", str(tmp_path)]) == 0
    expected = Options(
        tmp_path,
        "full",
        seeds=3,
        first_seed=5,
        steps=7,
        grid=(1.0, 1e6),
        data_dir=Path("x"),
        resume=True,
    )
    assert ran == [("k-sweep", expected)]


@pytest.mark.parametrize(
    ("arguments", "scale"),
    [([], "embedded"), (["--quick"], "quick"), (["--scale", "embedded"], "embedded")],
)
def test_scales(arguments, scale, ran, tmp_path):
    assert main(["k-sweep", *arguments, "--out", str(tmp_path)]) == 0
    assert ran == [("k-sweep", Options(tmp_path, scale))]


@pytest.mark.parametrize("name", [*EXPERIMENTS, *BENCHMARKS])
def test_results_go_to_a_folder_of_their_own(name, ran, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([name]) == 0
    assert ran == [(name, Options(Path("results") / name))]


def test_without_a_name_the_headline_is_run(ran, tmp_path):
    assert main(["--quick", "--out", str(tmp_path)]) == 0
    assert ran == [("k-vs-lambda", Options(tmp_path, "quick"))]


@pytest.mark.parametrize("order", ["data mnist --data-dir x", "data --data-dir x mnist"])
def test_a_data_set_stands_before_or_behind_its_folder(order, monkeypatch):
    asked = []

    def run(name, data_dir):
        asked.append((name, data_dir))
        return 7

    monkeypatch.setattr("benchmarks.data.standard.run", run)
    assert main(order.split()) == 7
    assert asked == [("mnist", Path("x"))]


def test_all_runs_each_in_its_folder_and_goes_on_after_a_refusal(
    tmp_path, monkeypatch, capsys
):
    ran, reported = [], []

    def run(name, options):
        ran.append((name, options.out))
        if name == "batch":
            raise Refusal("No.")

    monkeypatch.setattr(command_line, "_run", run)
    monkeypatch.setattr(command_line, "_report", lambda out: reported.append(out) or 0)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    assert main(["all", "--quick", "--out", str(tmp_path)]) == 2
    assert ran == [(name, tmp_path / name) for name in EXPERIMENTS]
    assert reported == [tmp_path]
    assert capsys.readouterr().err.splitlines() == ["batch: No.", "Failed: batch."]


def test_all_succeeds(ran, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    assert main(["all", "--quick", "--out", str(tmp_path)]) == 0
    assert [name for name, _ in ran] == list(EXPERIMENTS)


@pytest.mark.parametrize(
    ("name", "resumable"), [("k-sweep", True), ("all", True), ("nist", False)]
)
def test_an_interruption_says_how_to_go_on(
    name, resumable, tmp_path, monkeypatch, capsys
):
    def interrupt(name, options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "_run", interrupt)
    assert main([name, "--out", str(tmp_path)]) == 130
    message = capsys.readouterr().err
    assert ("Continue with --resume" in message) == resumable
    assert message.count("\n") == 1


def test_a_report_without_results_is_refused(tmp_path, capsys):
    assert main(["report", "--out", str(tmp_path)]) == 2
    assert "has no results" in capsys.readouterr().err


def test_a_report_is_written(calls, tmp_path, capsys):
    calls.run(tmp_path / "k-sweep", name="k-sweep")
    assert main(["report", "--out", str(tmp_path)]) == 0
    assert "1 of " in capsys.readouterr().out
    assert "it is positive" in (tmp_path / "report.md").read_text()
    assert "A caption." in (tmp_path / "report.html").read_text()
