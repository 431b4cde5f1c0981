"""Verdicts and figures that are made again from the tables in the repository.

Nothing is run: the table of an experiment is read back into its runs, and its own judge
and figures are called on these. So a reader can recompute what is published, and a claim
can change its wording or its statistic without new runs.
"""

import csv
import gzip
import importlib
import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from . import report
from ._modules import EXPERIMENTS
from ._options import Refusal
from ._results import read_settings, write_json, write_table, write_verdicts
from .experiment import (
    axes_of,
    DAMAGED,
    Experiment,
    Point,
    rows_of,
    Runs,
    Settings,
    with_derived,
)
from .kept import copy_figures, KEPT, pack, PAGE, ROOT, table
from .verdicts import Verdict


NUMBERS = {
    "condition": "",
    "estimate": ".3g",
    "low": ".3g",
    "high": ".3g",
    "num_seeds": "",
    "num_left_out": "",
    "p": ".1g",
    "outcome": "",
}
"""The fields of a verdict that must be as kept, and the format that prints them."""
WORDS = "claim", "quantity", "reason", "note"
CLOSE = 1e-4
"""The relative difference up to which two numbers are the same: other versions of NumPy
and SciPy may round otherwise, and three digits are published."""
Found = Literal["as kept", "as kept in other words", "different"]


def rejudge(names: Sequence[str], root: Path = ROOT) -> bool:
    """Judge the kept experiments again, put the verdicts and figures in the place of the
    kept ones, and write the page. Return whether all outcomes and numbers are as kept."""
    counts: Counter[Found] = Counter()
    left_out = []
    for name in names:
        try:
            counts += _again(name, root)
        except Refusal as refusal:
            print(f"{name} is not judged, because {refusal}.")
            left_out.append(name)
    number = len(names) - len(left_out)
    found = ", ".join(f"{count} {key}" for key, count in sorted(counts.items()))
    print(f"{counts.total()} claims of {number} experiments: {found or 'none'}.")
    report.write(root / KEPT, list(EXPERIMENTS), root / PAGE)
    return not counts["different"]


def _again(name: str, root: Path) -> Counter[Found]:
    folder = root / KEPT / name
    content = read_settings(folder)
    if content is None:
        raise Refusal("no results of it are kept")
    experiment = importlib.import_module(EXPERIMENTS[name]).EXPERIMENT
    settings, all_runs = _read(folder / f"{table(name)}.gz", experiment, content)
    all_runs = with_derived(experiment, all_runs)
    verdicts = experiment.judge(settings, all_runs)
    print(f"{name}:")
    counts = _compared(report.read_verdicts(folder / "verdicts.csv"), verdicts)
    more: dict[str, Any] = {"paper": experiment.paper}
    with tempfile.TemporaryDirectory() as drawn:
        if any(experiment.derived(runs) for runs in all_runs):
            more["axes"] = content["axes"] | axes_of(all_runs)
            write_table(Path(drawn) / table(name), rows_of(settings, all_runs))
            pack(Path(drawn) / table(name), folder)
        try:
            more["figures"] = dict(experiment.draw(settings, all_runs, Path(drawn)))
            copy_figures(Path(drawn), name, more["figures"], root)
        except Refusal as refusal:
            print(f"  Its figures and captions stay as they are, because {refusal}.")
    write_verdicts(folder / "verdicts.csv", verdicts, content["scale"])
    write_json(folder / "settings.json", content | more)
    return counts


def _read(
    path: Path, experiment: Experiment, content: Mapping[str, Any]
) -> tuple[Settings, list[Runs]]:
    """Return the settings, and the runs that a table holds."""
    if not path.exists():
        raise Refusal("no table of its runs is kept")
    if "axes" not in content:
        raise Refusal("its settings.json lacks the axes of the columns")
    try:
        settings = experiment.settings_from(content["scale"], content["settings"])
    except TypeError:
        raise Refusal("the experiment no longer has all of its settings") from None
    points = experiment.points(settings)
    try:
        with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        parts = [[row for row in rows if _is_at(row, point)] for point in points]
        if not all(parts) or sum(map(len, parts)) != len(rows):
            raise Refusal("its table has other points than the experiment")
        return settings, [
            Runs.of_rows(point, part, content["axes"])
            for point, part in zip(points, parts, strict=True)
        ]
    except DAMAGED as error:
        raise Refusal(f"its table is damaged ({error})") from error


def _is_at(row: Mapping[str, str], point: Point) -> bool:
    return all(
        row.get(key) == ("" if value is None else str(value))
        for key, value in point.items()
    )


def _compared(kept: Sequence[Verdict], judged: Sequence[Verdict]) -> Counter[Found]:
    """Print what differs in each verdict from the kept one at the same position."""
    if len(kept) != len(judged):
        print(f"  different: {len(kept)} claims are kept, and {len(judged)} are judged.")
        return Counter({"different": len(judged)})
    counts: Counter[Found] = Counter()
    for old, new in zip(kept, judged, strict=True):
        numbers = [
            f"{field} {getattr(old, field):{form}} kept, {getattr(new, field):{form}} now"
            for field, form in NUMBERS.items()
            if not _same(getattr(old, field), getattr(new, field))
        ]
        words = [field for field in WORDS if getattr(old, field) != getattr(new, field)]
        found: Found = "as kept"
        if numbers or words:
            found = "different" if numbers else "as kept in other words"
        said = f" ({', '.join(numbers or words)})" if numbers or words else ""
        print(f"  {found}{said}: {new.claim}: {new.outcome}, {new.estimate:.3g}")
        counts[found] += 1
    return counts


def _same(old: Any, new: Any) -> bool:
    if not isinstance(old, float):
        return old == new
    return math.isclose(old, new, rel_tol=CLOSE) or (math.isnan(old) and math.isnan(new))
