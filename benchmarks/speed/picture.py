"""A picture of the tables: a bar for each program, with the hand-written limit at 1."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from ..figures import BLACK, BLUE, figure
from .report import Row


_OTHERS = "#9A9A9A"
# Bars begin below the limit, so that a bar that ends at the limit can be seen.
_LEFT = 0.5


def draw(path: Path, groups: Sequence[tuple[str, Sequence[Row]]]) -> None:
    """Draw one panel for each task. Bars are ratios of time per step, on a logarithmic
    axis."""
    counts = [len(rows) for _, rows in groups]
    with figure(path, width=9, height=1.6 * len(groups) + 0.42 * sum(counts)) as drawing:
        panels = drawing.subplots(
            len(groups), 1, sharex=True, squeeze=False, height_ratios=counts
        )
        for panel, (title, rows) in zip(panels[:, 0], groups, strict=True):
            _bars(panel, title, rows)
        longest = max(_ratio(row) for _, rows in groups for row in rows)
        panels[0, 0].set_xlim(_LEFT, 5 * longest)
        panels[-1, 0].set_xlabel("time over the hand-written limit's (log scale)")


def _bars(panel: Axes, title: str, rows: Sequence[Row]) -> None:
    names = [_name(row) for row in rows]
    lengths = [max(_ratio(row), _LEFT) - _LEFT for row in rows]
    colours = [BLUE if row.library == "gnlin" else _OTHERS for row in rows]
    bars = panel.barh(names, lengths, left=_LEFT, color=colours)
    panel.bar_label(bars, [_times(_ratio(row)) for row in rows], padding=4)
    panel.axvline(1, color=BLACK, linewidth=1)
    panel.set_xscale("log")
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)
    panel.set_title(title, loc="left")


def _name(row: Row) -> str:
    if row.library == "gnlin":
        return "gnlin"
    other = "\n(another step)" if _is_another_step(row) else ""
    return f"{row.library}: {row.variant}{other}"


def _ratio(row: Row) -> float:
    assert row.ratio is not None
    return row.ratio


def _is_another_step(row: Row) -> bool:
    return row.linear_residual is None and row.step_error is None


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"


def best_of_each(rows: Sequence[Row]) -> list[Row]:
    """Return the bars, the fastest first: gnlin's default, all variants of optimistix,
    and the fastest of each other library. The limit is left out, since it is the axis,
    and so are unsolved rows. SciPy takes another step, and its bars say so."""
    measured = [
        row
        for row in rows
        if row.library != "hand-written"
        and row.ratio is not None
        and (row.solved or (row.library == "SciPy" and _is_another_step(row)))
    ]
    fastest: dict[tuple[str, str], Row] = {}
    for row in sorted(measured, key=_ratio):
        if row.library == "gnlin" and not row.note.startswith("the default"):
            continue
        variant = row.variant if row.library == "optimistix" else ""
        fastest.setdefault((row.library, variant), row)
    return list(fastest.values())
