"""Merge results of one experiment that differ only in their seeds.

The merged folder is the same as if one run had made all seeds. It concatenates the arrays
of the parts, and makes the table, verdicts and figures from them.
"""

import dataclasses
import importlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import _results
from ._modules import EXPERIMENTS
from ._options import no_folder, Options, Refusal
from .experiment import (
    CIRCUMSTANCES,
    difference,
    Experiment,
    Folder,
    load,
    Made,
    plain,
    Point,
    Runs,
    Settings,
    stamp,
    write_results,
)
from .own_task import is_own, named


SEEDS = "seeds", "first_seed"
"""The settings in which the parts may differ."""
_WHERE = "in the first", "in the second"


class _Part(NamedTuple):
    folder: Path
    described: Mapping[str, Any]
    """The content of the folder's `settings.json`."""

    @property
    def seeds(self) -> range:
        settings = self.described["settings"]
        return range(settings["first_seed"], settings["first_seed"] + settings["seeds"])


def merge(folders: Sequence[Path], out: Path | None) -> None:
    """Merge the results in these folders. Raise `Refusal` if they do not belong
    together."""
    if len(folders) < 2:
        raise Refusal(
            "Name at least two folders of results: `python -m benchmarks merge OUT1 OUT2 "
            "--out DIR`."
        )
    parts = sorted(map(_read, folders), key=lambda part: part.seeds.start)
    first = parts[0]
    for part in parts[1:]:
        _check_alike(first, part)
    for before, after in itertools.pairwise(parts):
        _check_seeds(before, after)
    name = first.described["experiment"]
    experiment = importlib.import_module(EXPERIMENTS[name]).EXPERIMENT
    settings = _settings(experiment, parts)
    target: Path = Path("results") / name if out is None else out
    circumstances = _results.circumstances() | {
        key: first.described[key]
        for key in (*CIRCUMSTANCES, "platform", "processors", "backend")
    }
    options = Options(target, first.described["scale"])
    with _results.claimed(target), _results.alone_in(target):
        folder = Folder(target, name, settings, options, circumstances)
        folder.announce()
        made = [_together(experiment, parts, p) for p in experiment.points(settings)]
        for each in made:
            folder.save(each)
        write_results(experiment, settings, folder, made)


def _read(folder: Path) -> _Part:
    if not folder.is_dir():
        raise Refusal(
            f"'{folder}' {no_folder(folder)}; name folders of results to merge."
        )
    described = _results.read_settings(folder)
    if described is None or not described.get("finished"):
        raise Refusal(
            f"'{folder}' has no finished results; run the experiment there first, with "
            "--resume if it was interrupted."
        )
    name = described["experiment"]
    if name not in EXPERIMENTS or "first_seed" not in described["settings"]:
        raise Refusal(
            f"'{folder}' was written by another version, which did not store the seeds; "
            "run the experiment again."
        )
    if described["borrowed"]:
        raise Refusal(
            f"The runs of {name} in '{folder}' are reused from another experiment; merge "
            f"that experiment, and then run {name} in a folder next to it."
        )
    return _Part(folder, described)


def _check_alike(first: _Part, other: _Part) -> None:
    for key in ("experiment", "scale", "settings", *CIRCUMSTANCES):
        old, new = first.described[key], other.described[key]
        if key == "settings":
            old, new = (
                {k: x for k, x in of.items() if k not in SEEDS} for of in (old, new)
            )
        if old != new:
            raise Refusal(
                f"'{first.folder}' and '{other.folder}' cannot be merged, because they "
                f"differ in more than their seeds ({difference(old, new, key, _WHERE)})."
            )


def _check_seeds(before: _Part, after: _Part) -> None:
    end, start = before.seeds.stop, after.seeds.start
    if start < end:
        raise Refusal(
            f"Both '{before.folder}' and '{after.folder}' have seed {start}; merge only "
            "one of them, or run one again with another --seed-offset."
        )
    if start > end:
        raise Refusal(
            f"Seeds {end} to {start - 1} are missing between '{before.folder}' and "
            f"'{after.folder}'; run them with --seeds {start - end} --seed-offset {end}."
        )


def _settings(experiment: Experiment, parts: Sequence[_Part]) -> Settings:
    """Return the settings of all parts together."""
    described = dict(parts[0].described["settings"])
    described["seeds"] = sum(len(part.seeds) for part in parts)
    data = described.get("data", "")
    try:
        settings = experiment.settings_from(parts[0].described["scale"], described)
    except TypeError:
        settings = None
    if settings is None or plain(dataclasses.asdict(settings)) != described:
        raise Refusal(
            f"'{parts[0].folder}' was written by another version of the experiment, with "
            "other settings; run the experiment again."
        )
    if is_own(data) and described["network"] != named(Path(data)):
        raise Refusal(f"The task '{data}' has changed since '{parts[0].folder}' was run.")
    return settings


def _together(experiment: Experiment, parts: Sequence[_Part], point: Point) -> Made:
    made = [_load(part, point) for part in parts]
    columns = made[0].runs.columns
    if not experiment.seedless(point):
        all_columns = [each.runs.columns for each in made]
        columns = {
            name: np.concatenate([each[name] for each in all_columns]) for name in columns
        }
    commits = sorted({commit for each in made for commit in each.commits})
    return Made(Runs(point, columns), sum(each.seconds for each in made), commits)


def _load(part: _Part, point: Point) -> Made:
    name = part.described["experiment"]
    found = load(part.folder / "runs", point, stamp(name, part.described))
    if found is None:
        raise Refusal(
            f"'{part.folder}' lacks the runs at {dict(point)}; run the experiment there "
            "again with --resume."
        )
    return found
