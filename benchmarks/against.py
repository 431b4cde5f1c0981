"""Compare two reports: list verdicts that differ and estimates that moved."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._options import Refusal


Verdicts = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Verdicts by experiment and claim, as in `report.json`."""


def compare(folder: Path, other: Path) -> None:
    """Print the verdicts that differ between the report in a folder and another
    report."""
    now, then = _read(folder / "report.json"), _read(other)
    lines, missing, num_alike = [], [], 0
    for name in dict.fromkeys([*then, *now]):
        claims = dict.fromkeys([*then.get(name, {}), *now.get(name, {})])
        for claim in claims:
            old, new = (of.get(name, {}).get(claim) for of in (then, now))
            if old and new and old["outcome"] == new["outcome"] and _overlap(old, new):
                num_alike += 1
            elif not new:
                missing.append(f"{name}: {claim}")
            else:
                lines.append(f"{name}: {claim}\n    {_shown(old)} -> {_shown(new)}")
    print("\n".join(lines))
    print(
        f"{num_alike} verdicts agree and have overlapping intervals; {len(lines)} "
        f"differ; {len(missing)} are in the other report only."
    )
    print("\n".join(f"    {claim}" for claim in missing), end="\n" * bool(missing))


def _read(path: Path) -> Verdicts:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for claims in content.values():
            for verdict in claims.values():
                {verdict[key] for key in ("outcome", "estimate", "low", "high")}
        return content
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise Refusal(
            f"'{path}' is not a report in JSON ({error}); `python -m benchmarks report` "
            "writes one as report.json."
        ) from None


def _overlap(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Test whether the intervals overlap. An unknown interval overlaps with any."""
    ends = old["low"], old["high"], new["low"], new["high"]
    if any(end is None for end in ends):
        return True
    return old["low"] <= new["high"] and new["low"] <= old["high"]


def _shown(verdict: Mapping[str, Any] | None) -> str:
    if verdict is None:
        return "missing"
    low, high, estimate = (
        "none" if verdict[key] is None else f"{verdict[key]:.3g}"
        for key in ("low", "high", "estimate")
    )
    return f"{verdict['outcome']}, {estimate} [{low}, {high}]"
