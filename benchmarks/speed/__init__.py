"""Times of gnlin beside the hand-written limit and other libraries, in one process."""

import dataclasses
import importlib

from .._modules import TABLES
from .._options import Options
from .._results import circumstances, write_csv, write_json
from ..data import nist
from . import picture
from .report import Figure, print_figures, print_rows, Row, wide_console


def run(options: Options) -> None:
    """Measure, print, and write speed.csv, speed.png and settings.json."""
    if "small" in (options.tables or TABLES):
        nist.require()
    console = wide_console()
    rows: list[Row] = []
    figures: list[Figure] = []
    groups = []
    for name in options.tables or TABLES:
        module = importlib.import_module(TABLES[name])
        for comparison in module.comparisons(options.quick):
            title, ratio_to = comparison.title, comparison.ratio_to
            print_rows(console, title, comparison.rows, ratio_to)
            rows.extend(comparison.rows)
            figures.extend(comparison.figures)
            if comparison.bars is not None:
                groups.append((comparison.bars, picture.best_of_each(comparison.rows)))
            write_csv(options.out / "speed.csv", rows)
    if figures:
        print_figures(console, figures)
    if groups:
        picture.draw(options.out / "speed.png", groups)
    write_json(
        options.out / "settings.json",
        {
            **circumstances(),
            "quick": options.quick,
            "required_figures": [
                dataclasses.asdict(figure) | {"verdict": figure.verdict}
                for figure in figures
            ],
        },
    )
