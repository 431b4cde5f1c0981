"""One style for all figures: legible fonts, and colours for colour-blind readers."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray

from ._results import write_whole


# Okabe and Ito's palette: distinct in all common forms of colour blindness.
BLACK, BLUE, GREEN = "#000000", "#0072B2", "#009E73"
ORANGE, PURPLE, SKY, VERMILION = "#E69F00", "#CC79A7", "#56B4E9", "#D55E00"

_STYLE: dict[Any, Any] = {
    "figure.dpi": 150,
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # TrueType, so that text in a PDF can be searched
}


# A cache of fonts without those that only formulas use would print a line for each.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)


@contextmanager
def figure(path: Path, width: float = 10.0, height: float = 6.0) -> Iterator[Figure]:
    """Open a figure in the common style (inches, at 150 dots each). On exit, save it as
    PNG and as vector PDF.

    It belongs to no window system, and needs none.
    """
    with matplotlib.rc_context(_STYLE):
        drawing = Figure(figsize=(width, height))
        yield drawing
        _limit_empty_axes(drawing)
        for kind in ("png", "pdf"):
            write_whole(
                path.with_suffix(f".{kind}"),
                lambda part, kind=kind: drawing.savefig(part, format=kind),
            )


def _limit_empty_axes(drawing: Figure) -> None:
    """Give logarithmic axes without a finite value limits: they would keep those of a
    linear axis, and could not be drawn."""
    for axes in drawing.axes:
        if axes.get_xscale() == "log" and min(axes.get_xlim()) <= 0:
            axes.set_xlim(1, 10)
        if axes.get_yscale() == "log" and min(axes.get_ylim()) <= 0:
            axes.set_ylim(1, 10)


def band(
    axes: Any,
    x: Sequence[float] | Float[ndarray, " points"],
    values: Float[ndarray, "seeds points"],
    colour: Any,
    label: str | None = None,
    look: str = "-",
) -> None:
    """Draw the mean over the seeds as a line and their range as a band, ignoring NaN."""
    known = np.isfinite(values).any(axis=0)
    x, values = np.asarray(x)[known], values[:, known]
    axes.plot(x, np.nanmean(values, axis=0), look, color=colour, label=label)
    fill(axes, x, np.nanmin(values, axis=0), np.nanmax(values, axis=0), colour)


def fill(
    axes: Any,
    x: Float[ndarray, " points"],
    low: Float[ndarray, " points"],
    high: Float[ndarray, " points"],
    colour: Any,
) -> None:
    """Draw ranges as a band, and as bars at points without known neighbours, where a band
    has no width."""
    known = np.concatenate([[False], np.isfinite(low), [False]])
    alone = known[1:-1] & ~known[:-2] & ~known[2:]
    if alone.any():
        axes.vlines(x[alone], low[alone], high[alone], color=colour, alpha=0.5)
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def field(
    panel: Any,
    values: Float[ndarray, " points"],
    axes: Sequence[tuple[float, float]],
    **look: Any,
) -> Any:
    """Draw values on a square grid in two coordinates, with these ends, as colours.
    Return the image, for a colour bar."""
    side = round(len(values) ** 0.5)
    (left, right), (bottom, top) = axes
    panel.grid(visible=False)
    return panel.imshow(
        values.reshape(side, side).T,
        origin="lower",
        extent=(left, right, bottom, top),
        aspect="auto",
        **look,
    )


def shades(number: int) -> Any:
    """Return this many colours from dark to light, for an ordered quantity such as K."""
    return matplotlib.colormaps["viridis"](np.linspace(0, 0.85, number))
