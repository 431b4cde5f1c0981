"""The damped step as a picture: a bar a library, the hand-written limit at 1."""

import math
from collections.abc import Sequence
from pathlib import Path

from ..figures import BLUE, figure, GREY
from .report import Row


def draw(path: Path, groups: Sequence[tuple[str, Sequence[Row]]]) -> None:
    """One panel a task. Bars are ratios of time per step, on a logarithmic axis."""
    counts = [len(rows) for _, rows in groups]
    with figure(path, width=9, height=1.6 * len(groups) + 0.42 * sum(counts)) as drawing:
        panels = drawing.subplots(
            len(groups), 1, sharex=True, squeeze=False, height_ratios=counts
        )
        for panel, (title, rows) in zip(panels[:, 0], groups, strict=True):
            _bars(panel, title, rows)
        panels[-1, 0].set_xlabel(
            "time of a damped step over the hand-written limit's (log scale)"
        )


def _bars(panel, title: str, rows: Sequence[Row]) -> None:
    shown = [row for row in rows if not math.isnan(row.ratio)]
    names = [f"{row.library}: {row.variant}" for row in shown]
    colours = [BLUE if row.library == "gnlin" else GREY for row in shown]
    # Bars grow from below 1, so that one at the limit itself can be seen.
    left = 0.5
    bars = panel.barh(
        names, [max(row.ratio, left) - left for row in shown], left=left, color=colours
    )
    panel.bar_label(bars, [f"{row.ratio:,.3g}" for row in shown], padding=4)
    panel.axvline(1, color="black", linewidth=1)
    panel.set_xscale("log")
    panel.set_xlim(left, 4 * max(row.ratio for row in shown))
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)
    panel.set_title(title, loc="left")


def best_of_each(rows: Sequence[Row]) -> list[Row]:
    """gnlin's default, every fair setting of the others, fastest first; the limit is the
    axis. A step that is not solved has no bar; SciPy's is another step, and says so."""
    measured = [
        row
        for row in rows
        if row.library != "hand-written"
        and not math.isnan(row.ratio)
        and (row.solved or row.library == "SciPy")
    ]
    fastest: dict[str, Row] = {}
    for row in sorted(measured, key=lambda row: row.ratio):
        is_default = "default" in row.variant or row.note == "the default"
        if row.library == "gnlin" and not is_default:
            continue
        key = row.library + (", default" if "default" in row.variant else "")
        fastest.setdefault(key, row)
    return list(fastest.values())
