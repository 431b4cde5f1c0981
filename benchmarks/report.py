"""One page with all results of the experiments, as Markdown and as one HTML file.

Both are written from the same blocks. Identical results give identical pages.
"""

import csv
import dataclasses
import json
import math
import shlex
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from . import thresholds
from ._modules import EXPERIMENTS, summary
from ._options import no_folder, Refusal
from ._page import (
    Block,
    Code,
    Details,
    Heading,
    Image,
    Link,
    markdown,
    Outcome,
    page as as_html,
    Paragraph,
    Table,
    Text,
)
from ._results import claim_folder, git, read_settings, write_json, write_whole
from .verdicts import (
    after_holm,
    CONFIDENCE,
    CONFIRMED,
    least_exact,
    NOT_TESTED,
    Outcome as Judged,
    REFUTED,
    UNDECIDED,
    Verdict,
)


TITLE = "What the experiments found"
OUTCOMES: dict[str, str] = {
    CONFIRMED: "confirmed",
    REFUTED: "refuted",
    UNDECIDED: "undecided",
    NOT_TESTED: "untested",
}
SCALES = {
    "quick": ["--quick"],
    "medium": ["--scale", "medium"],
    "full": ["--scale", "full"],
}
"""The options of the command line that select each scale."""


@dataclasses.dataclass(frozen=True)
class Found:
    """The content of a finished experiment's folder."""

    name: str
    folder: Path
    scale: str
    settings: Mapping[str, Any]
    paper: str
    figures: Mapping[str, str]
    num_runs: int
    seconds: float
    borrowed: bool
    command: str
    date: str
    commits: Sequence[str]
    """Commits of the code that made the runs; empty if they are unknown."""
    older: bool
    """Whether the solvers have changed since the runs were made."""
    circumstances: Mapping[str, str]
    verdicts: Sequence[Verdict]
    after_holm: Sequence[Judged] = ()
    """The outcome of each verdict after Holm's correction over all experiments."""


@dataclasses.dataclass(frozen=True)
class Lacking:
    """An experiment without results, and the command that makes them."""

    name: str
    state: Literal["not run", "unfinished", "unreadable"]
    command: str


def write(folder: Path, names: Sequence[str], page: Path | None = None) -> None:
    """Write `report.md` with its figures in `report/`, and `report.html`. If `page` is
    given, write only `report.md` and its figures, into that folder."""
    kept = page is not None
    results = [_result(folder, name, kept) for name in names]
    if not any((folder / name / "settings.json").exists() for name in names):
        raise Refusal(_no_results(folder))
    results = _corrected(results)
    there = page or folder
    blocks = _page(folder, results, there / "report", kept)
    images = [block for block in blocks if isinstance(block, Image)]
    claim_folder(there / "report")
    for image in images:
        target = there / "report" / image.name
        if image.source != target:
            copy = lambda part, image=image: shutil.copyfile(image.source, part)
            write_whole(target, copy)
    texts = {"report.md": markdown(blocks)}
    if page is None:
        texts["report.html"] = as_html(blocks, TITLE)
    for name, text in texts.items():
        write_whole(
            there / name, lambda part, text=text: part.write_text(text, encoding="utf-8")
        )
    write_json(folder / "report.json", _as_json(results))
    num_found = sum(isinstance(result, Found) for result in results)
    print(
        f"The report has {num_found} of {len(results)} experiments and {len(images)} "
        f"figures. Written: {', '.join(texts)} and report/ in {there}, report.json in "
        f"{folder}."
    )


def _no_results(folder: Path) -> str:
    """Say why a folder has no results, and name those that bear other names."""
    if not folder.is_dir():
        return (
            f"'{folder}' {no_folder(folder)}; run `python -m benchmarks all` first, or "
            "name the folder of the results with --out."
        )
    others = sorted(path.parent.name for path in folder.glob("*/settings.json"))
    if others:
        return (
            f"Each folder in '{folder}' must bear the name of its experiment, such as "
            f"'k-sweep', but it holds {', '.join(map(repr, others))}; rename them, or "
            "name another folder with --out."
        )
    return (
        f"'{folder}' has no results of an experiment in a folder of its own; make some "
        "by `python -m benchmarks all`, or name another folder with --out."
    )


def _corrected(results: Sequence[Found | Lacking]) -> list[Found | Lacking]:
    """Add the outcomes after Holm's correction over the verdicts of all experiments."""
    found = [result for result in results if isinstance(result, Found)]
    outcomes = iter(after_holm([v for result in found for v in result.verdicts]))
    return [
        dataclasses.replace(result, after_holm=[next(outcomes) for _ in result.verdicts])
        if isinstance(result, Found)
        else result
        for result in results
    ]


def _as_json(results: Sequence[Found | Lacking]) -> dict[str, Any]:
    """Return the verdicts by experiment and claim, for `--against`."""
    return {
        result.name: {
            v.claim: {
                "outcome": v.outcome,
                "after_holm": corrected,
                "estimate": _number(v.estimate),
                "low": _number(v.low),
                "high": _number(v.high),
            }
            for v, corrected in zip(result.verdicts, result.after_holm, strict=True)
        }
        for result in results
        if isinstance(result, Found)
    }


def _number(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _result(folder: Path, name: str, kept: bool) -> Found | Lacking:
    usual = kept or folder == Path("results")
    out = [] if usual else ["--out", str(folder / name)]
    rerun = shlex.join(["python", "-m", "benchmarks", name, *out])
    try:
        content = read_settings(folder / name)
        if content is None:
            return Lacking(name, "not run", rerun)
        if content.get("experiment") != name:
            raise ValueError
        if content["finished"]:
            return _found(folder / name, content)
        command = _command(name, content["command"])
        return Lacking(name, "unfinished", shlex.join([*command, *out, "--resume"]))
    except (Refusal, OSError, ValueError, TypeError, KeyError, AttributeError):
        return Lacking(name, "unreadable", rerun)


def _found(folder: Path, content: Mapping[str, Any]) -> Found:
    return Found(
        content["experiment"],
        folder,
        str(content["scale"]),
        dict(content["settings"]),
        _line(content.get("paper", "")),
        {name: _line(caption) for name, caption in content["figures"].items()},
        int(content["num_runs"]),
        float(content["run_seconds"]),
        bool(content["borrowed"]),
        shlex.join(_command(content["experiment"], content["command"])),
        str(content["date"])[:10],
        content.get("commits", []),
        _is_older(content),
        _circumstances(content),
        read_verdicts(folder / "verdicts.csv"),
    )


def _is_older(content: Mapping[str, Any]) -> bool:
    """Test by git whether `gnlin` has changed since the commits of the results, or since
    their date if these are unknown."""
    here = Path(__file__).parents[1]
    since = [[f"{word.split()[0]}..HEAD"] for word in content.get("commits", []) if word]
    since = since or [[f"--since={str(content['date'])[:10]}T23:59:59", "HEAD"]]
    counts = (git(here, "rev-list", "--count", *words, "--", "gnlin") for words in since)
    return any(count not in ("", "0") for count in counts)


def read_verdicts(path: Path) -> list[Verdict]:
    with path.open(newline="", encoding="utf-8") as file:
        return [_verdict(row) for row in csv.DictReader(file)]


def _verdict(row: Mapping[str, Any]) -> Verdict:
    if row["outcome"] not in OUTCOMES:
        raise ValueError
    return Verdict(
        _line(row["claim"]),
        _line(row["quantity"]),
        row["condition"],
        _line(row["reason"]),
        float(row["estimate"]),
        float(row["low"]),
        float(row["high"]),
        int(row["num_seeds"]),
        int(row["num_left_out"]),
        float(row["p"]),
        row["outcome"],
        _line(row["note"]),
    )


def _line(text: str) -> str:
    return " ".join(text.split())


def _command(name: str, command: str) -> list[str]:
    """Return the command that makes the results again, without the folders of the machine
    on which it ran."""
    words, given = [], iter(shlex.split(command))
    for word in given:
        option, equals, _ = word.partition("=")
        if option in ("--out", "--data-dir") and not equals:
            next(given, None)
        if option == "--data-dir":
            words += ["--data-dir", "DIR"]
        elif option not in ("--out", "--resume"):
            words.append(name if word == "all" else word)
    return words


def _circumstances(content: Mapping[str, Any]) -> dict[str, str]:
    precision = "double" if content["x64"] else "single"
    return {
        "device": str(content["device"]),
        "precision": f"{precision}, unless an experiment says otherwise",
        "platform": f"{content['platform']}, {content['processors']} processors",
        **{name: str(number) for name, number in content["versions"].items()},
    }


def _page(
    folder: Path, results: Sequence[Found | Lacking], images: Path, kept: bool
) -> list[Block]:
    """Return the blocks of the page. `images` is the folder of the images that are not in
    the folders of their experiments."""
    found = [result for result in results if isinstance(result, Found)]
    groups = _groups(found)
    blocks: list[Block] = [
        Heading(1, TITLE),
        *_opening(folder, found, kept),
        Heading(2, "Summary"),
        _overview(results),
        Paragraph([_totals(results, found)]),
        *_older(found),
        *_where(groups),
    ]
    for result in results:
        if isinstance(result, Lacking):
            blocks += _lacking(result)
        else:
            blocks += _of(result, groups[0][0], images)
    return blocks


def _opening(folder: Path, found: Sequence[Found], kept: bool) -> list[Block]:
    made_by = "keep" if kept else "report"
    out = [] if folder == Path("results") or kept else ["--out", str(folder)]
    scales = {result.scale for result in found}
    (scale,) = scales if len(scales) == 1 else {"embedded"}
    everything = ["python", "-m", "benchmarks", "all", *SCALES.get(scale, [])]
    blocks: list[Block] = [
        Paragraph(
            [
                "This page is made by ",
                Code(shlex.join(["python", "-m", "benchmarks", made_by, *out])),
                " from the results of each experiment",
                *(
                    [", which are in ", Code("benchmarks/results"), " in the repository"]
                    if kept
                    else []
                ),
                ". To run all experiments: ",
                Code(shlex.join([*everything, *out])),
                ".",
            ]
        ),
        Paragraph(
            [
                "Each claim is a statement about one statistic over the seeds. A seed "
                "is one draw of everything random: the initialisation, the order of the "
                "batches and, where there are images, the images. Unless a quantity "
                "says otherwise, it has one value for each seed, and the estimate is "
                "the mean over the seeds. A claim is ",
                Outcome("confirmed"),
                f" if the {CONFIDENCE:.0%} interval lies within the claimed range, ",
                Outcome("refuted"),
                " if it lies outside, and ",
                Outcome("undecided"),
                " otherwise. It is ",
                Outcome("untested"),
                " if the runs cannot decide it, because accuracies are at their "
                "ceiling, networks are not trained, or the claim holds by construction.",
            ]
        ),
        Paragraph(
            [
                "The column 'after Holm' gives the outcome after Holm's correction over "
                "the verdicts of all experiments. A p-value inverts the interval, which "
                "with at most ten seeds is at least as wide as Student's, for normally "
                "distributed means. The column 'exact p' gives the smallest p-value that "
                "a sign test of as many seeds could give, which does not assume this. "
                "The thresholds are in ",
                Code("benchmarks/thresholds.py"),
                f". They were set on {thresholds.DATE}, unless a later date is given "
                "there.",
            ]
        ),
    ]
    if kept and not all(result.commits for result in found):
        unknown = (
            "Experiments with an unknown commit were run before results were kept in "
            "the repository. Only their settings, verdicts and figures are left."
        )
        blocks.append(Paragraph([unknown]))
    if "quick" in scales:
        blocks.append(
            Paragraph(["Quick runs only test the code: their verdicts say nothing."])
        )
    if len(scales) > 1:
        counts = Counter(result.scale for result in found)
        of_each = ", ".join(f"{number} at '{name}'" for name, number in counts.items())
        blocks.append(
            Paragraph([f"The experiments are not all at the same scale: {of_each}."])
        )
    return blocks


def _overview(results: Sequence[Found | Lacking]) -> Table:
    rows: list[list[Text]] = []
    for result in results:
        name = [Link(result.name)]
        if isinstance(result, Lacking):
            rows.append([name, [result.state], [""], [""], [""]])
            continue
        claims: list[str | Outcome] = []
        for verdict, corrected in zip(result.verdicts, result.after_holm, strict=True):
            claims += ["\n"] if claims else []
            after = " (undecided after Holm)" if corrected != verdict.outcome else ""
            claims += [Outcome(OUTCOMES[verdict.outcome]), f"{after}: {verdict.claim}"]
        seconds = "reused runs" if result.borrowed else _duration(result.seconds)
        rows.append(
            [name, claims or [""], [result.scale], [f"{result.num_runs:,}"], [seconds]]
        )
    return Table(["experiment", "claims", "scale", "runs", "time"], rows)


def _totals(results: Sequence[Found | Lacking], found: Sequence[Found]) -> str:
    outcomes = Counter(v.outcome for result in found for v in result.verdicts)
    corrected = Counter(outcome for result in found for outcome in result.after_holm)
    counts, after = (
        ", ".join(f"{of[key]} {word}" for key, word in OUTCOMES.items())
        for of in (outcomes, corrected)
    )
    own = [result for result in found if not result.borrowed]
    return (
        f"{len(found)} of {len(results)} experiments have results. They judge "
        f"{outcomes.total()} claims: {counts}. After Holm's correction over all claims: "
        f"{after}. The {sum(result.num_runs for result in own):,} runs took "
        f"{_duration(sum(result.seconds for result in own))} in total."
    )


def _groups(found: Sequence[Found]) -> list[list[Found]]:
    """Group the experiments by circumstances, the largest group first."""
    groups: dict[str, list[Found]] = {}
    for result in found:
        key = json.dumps(result.circumstances, sort_keys=True)
        groups.setdefault(key, []).append(result)
    return sorted(groups.values(), key=len, reverse=True)


OLDER = "Run before the latest change to gnlin: "


def _older(found: Sequence[Found]) -> list[Block]:
    names = [result.name for result in found if result.older]
    listed = "all of them" if len(names) == len(found) > 1 else ", ".join(names)
    return [Paragraph([f"{OLDER}{listed}."])] if names else []


def _where(groups: Sequence[Sequence[Found]]) -> list[Block]:
    if not groups:
        return []
    blocks: list[Block] = [Heading(2, "Where and when")]
    if len(groups) > 1:
        blocks.append(
            Paragraph(
                [
                    "The experiments were not all run with the same "
                    "versions on the same machine."
                ]
            )
        )
    for group in groups:
        names = ", ".join(result.name for result in group)
        dates = sorted({result.date for result in group})
        versions = dict(group[0].circumstances)
        listed = {
            "date": " to ".join(dict.fromkeys([dates[0], dates[-1]])),
            **{key: versions.pop(key) for key in ("device", "precision", "platform")},
            "versions": ", ".join(f"{name} {n}" for name, n in versions.items()),
        }
        rows = [[[name], [value]] for name, value in listed.items()]
        blocks.append(Table(["experiments", names], rows))
    return blocks


def _lacking(result: Lacking) -> list[Block]:
    state = {
        "not run": "Not run yet. To run it: ",
        "unfinished": "Unfinished. To finish it: ",
        "unreadable": "Unreadable: its folder has damaged or unknown files. Delete the "
        "folder, and run: ",
    }[result.state]
    return [*_head(result.name), Paragraph([state, Code(result.command), "."])]


def _head(name: str) -> list[Block]:
    line = summary(EXPERIMENTS[name]) if name in EXPERIMENTS else ""
    return [Heading(2, name), *([Paragraph([line])] if line else [])]


def _of(result: Found, usual: Found, images: Path) -> list[Block]:
    """Return the blocks of one experiment, with a note if its circumstances differ from
    the usual ones."""
    blocks = _head(result.name)
    if result.paper:
        blocks.append(Paragraph([f"Background: {result.paper}"]))
    runs = f"{result.num_runs:,} runs in {_duration(result.seconds)}"
    if result.borrowed:
        runs = f"{result.num_runs:,} runs, reused from another experiment"
    blocks.append(
        Paragraph(
            [
                f"Scale '{result.scale}', {runs}, {result.date}: ",
                Code(result.command),
                *_made_by(result),
            ]
        )
    )
    known = usual.circumstances
    other = {k: v for k, v in result.circumstances.items() if v != known.get(k)}
    if other:
        listed = ", ".join(f"{name} {value}" for name, value in other.items())
        blocks.append(Paragraph([f"Different from {usual.name}: {listed}."]))
    blocks += [_figure(result, *figure, images) for figure in result.figures.items()]
    blocks += _judged(result)
    settings = {key: _shown(value) for key, value in result.settings.items()}
    blocks.append(Details("Settings", settings))
    return blocks


def _made_by(result: Found) -> list[str]:
    if not result.commits:
        return [", commit unknown."]
    each = ", ".join(commit[:7] + commit[40:] for commit in result.commits)
    return [f", commit {each}."]


def picture(name: str, stem: str) -> str:
    """Return the file name of an experiment's figure on the page."""
    own = name.replace("-", "_")
    return f"{stem}.png" if stem.startswith(own) else f"{own}_{stem}.png"


def _figure(result: Found, stem: str, caption: str, images: Path) -> Block:
    name = picture(result.name, stem)
    source = result.folder / f"{stem}.png"
    source = source if source.is_file() else images / name
    if not source.is_file():
        return Paragraph([f"The figure {stem}.png is missing. {caption}"])
    return Image(source, name, f"Figure {stem} of {result.name}", caption)


def _judged(result: Found) -> list[Block]:
    if not result.verdicts:
        return [Paragraph(["This experiment judges no claim."])]
    header = "claim", "quantity", "claimed", "estimate", f"{CONFIDENCE:.0%} interval"
    table = Table(
        [*header, "seeds", "p", "exact p", "outcome", "after Holm"],
        [
            [
                [f"{v.claim} ({v.note})" if v.note else v.claim],
                [v.quantity],
                [v.condition],
                [f"{v.estimate:.3g}"],
                [_interval(v)],
                [f"{v.num_seeds}" + (f" of {_all_seeds(v)}" if v.num_left_out else "")],
                [f"{v.p:.1g}"],
                [f"≥ {least_exact(v.num_seeds):.1g}"],
                [Outcome(OUTCOMES[v.outcome])],
                [Outcome(OUTCOMES[corrected])],
            ]
            for v, corrected in zip(result.verdicts, result.after_holm, strict=True)
        ],
    )
    reasons = {
        condition: "; ".join(
            dict.fromkeys(v.reason for v in result.verdicts if v.condition == condition)
        )
        for condition in dict.fromkeys(v.condition for v in result.verdicts)
    }
    return [table, Details("Reasons for the thresholds", reasons)]


def _all_seeds(verdict: Verdict) -> int:
    return verdict.num_seeds + verdict.num_left_out


def _interval(verdict: Verdict) -> str:
    if not (math.isfinite(verdict.low) and math.isfinite(verdict.high)):
        return "none"
    return f"{verdict.low:.3g} to {verdict.high:.3g}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else str(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return "none" if value is None else _line(str(value))
