"""Folders of results: what is replaced is announced, and a refusal leaves nothing."""

import dataclasses

import numpy as np
import pytest

from benchmarks import experiment
from benchmarks.__main__ import main
from benchmarks._options import Options, Refusal
from benchmarks.experiment import Experiment, Settings


@dataclasses.dataclass(frozen=True)
class Made(Settings):
    periods: tuple[float, ...] = (1.0, 10.0, 1e6)


MADE_UP = Experiment(
    Made(2),
    Made(2),
    Made(2),
    points=lambda settings: [{"period": p} for p in settings.periods],
    train=lambda settings, point, place: {"loss": np.zeros((settings.seeds, 1))},
    judge=lambda settings, all_runs: [],
    draw=lambda settings, all_runs, out: {},
    paper="Nothing.",
    grid="periods",
)


def run(out, train=MADE_UP.train, **options):
    made = dataclasses.replace(MADE_UP, train=train)
    experiment.run("made-up", made, Options(out, "quick", **options))


def test_runs_that_are_replaced_are_announced_before_they_are_deleted(tmp_path, capsys):
    def interrupt(settings, point, place):
        raise KeyboardInterrupt

    run(tmp_path)
    run(tmp_path, resume=True)
    assert "Replaces" not in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, interrupt)
    said = f"Replaces the finished runs of 3 points in '{tmp_path}'; pass `--resume` to "
    assert capsys.readouterr().out.startswith(said)
    run(tmp_path, interrupt, resume=True)  # all of them are still there


@pytest.mark.parametrize(
    "arguments",
    [
        ["stability", "--quick", "--grid", "1e6"],
        ["xor-features", "--scale", "medium"],
        ["k-sweep", "--task", "no_such_task.py"],
        ["mnist-k", "--scale", "full"],
    ],
)
def test_a_refused_command_leaves_no_empty_folder(arguments, tmp_path, capsys):
    out = tmp_path / "new" / "results"
    assert main([*arguments, "--out", str(out)]) == 2
    assert not (tmp_path / "new").exists()
    out.mkdir(parents=True)
    assert main([*arguments, "--out", str(out)]) == 2
    assert out.exists()  # it was there before


@pytest.mark.parametrize("command", ["report", "keep"])
def test_results_that_are_not_in_a_folder_are_refused_as_what_they_are(
    command, tmp_path, capsys
):
    (tmp_path / "file").write_text("")
    for name, why in (("file", "is a file"), ("missing", "does not exist")):
        assert main([command, "--out", str(tmp_path / name)]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"'{tmp_path / name}' {why}; ")
        assert message.count("\n") == 1


def test_a_refusal_leaves_what_was_written(tmp_path):
    def refuse_the_last(settings, point, place):
        if point["period"] == 1e6:
            raise Refusal("No.")
        return MADE_UP.train(settings, point, place)

    with pytest.raises(Refusal):
        run(tmp_path / "new", refuse_the_last)
    assert len([*(tmp_path / "new").glob("runs/*")]) == 2
    with pytest.raises(Refusal, match="must be positive"):  # as one of those of `all`
        run(tmp_path / "other", grid=(-1.0,))
    assert not (tmp_path / "other").exists()
