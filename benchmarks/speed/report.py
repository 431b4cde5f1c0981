"""Rows of results, which are printed as a table and written to a file."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table

from .oracle import relative_error, SOLVED
from .timing import ratio, Timing


@dataclasses.dataclass(frozen=True)
class Row:
    task: str
    library: str
    variant: str
    seconds: float | None = None
    """The median time per step of several runs; `None` if there was no run."""
    ratio: float | None = None
    """The time relative to the hand-written limit, or to what the table says."""
    compile_seconds: float | None = None
    step_error: float | None = None
    """The relative error of the step, against the dense oracle."""
    linear_residual: float | None = None
    """The residual relative to the gradient."""
    peak_bytes: int | None = None
    """The memory beyond what was in use before."""
    note: str = ""
    tolerance: float = SOLVED
    """The row counts as solved up to this linear residual, or up to this error if there
    is none."""

    @property
    def solved(self) -> bool:
        missed = self.step_error if self.linear_residual is None else self.linear_residual
        return missed is not None and missed <= self.tolerance


def timed_row(
    task: str, timing: Timing, reference: Timing | None, **accuracy: float
) -> Row:
    case = timing.case
    return Row(
        task=task,
        library=case.library,
        variant=case.variant,
        seconds=timing.median,
        ratio=None if reference is None else ratio(timing, reference),
        compile_seconds=timing.compile_seconds,
        peak_bytes=timing.peak_bytes,
        note=case.note,
        **accuracy,
    )


def damped_row(task, timing, reference, oracle, damping) -> Row:
    """Return a row with the error of the first step, if the case has one."""
    if timing.case.step is None:
        return timed_row(task, timing, reference)
    step = timing.case.step()
    return timed_row(
        task,
        timing,
        reference,
        step_error=relative_error(step, oracle.damped(damping)),
        linear_residual=oracle.linear_residual(step, damping),
    )


def explained(rows: Sequence[Row], why: str) -> list[Row]:
    """Add a reason to the row of gnlin's default if another library is the fastest."""
    solved = [row for row in rows if row.solved and row.library != "hand-written"]
    fastest = min(solved, key=lambda row: row.ratio or math.inf)
    return [
        dataclasses.replace(row, note=f"{row.note}; {why}")
        if row.note.startswith("the default") and fastest.library != "gnlin"
        else row
        for row in rows
    ]


def find(rows: Sequence[Row], library: str, which: Callable[[Row], bool]) -> Row:
    """Return the library's one row for which `which` is true."""
    (row,) = (row for row in rows if row.library == library and which(row))
    return row


def quotient(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def wide_console(width: int = 130) -> Console:
    """Return a console as wide as the terminal, or wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure that the library promises. `measured` is `None` if the run was too quick
    to measure it."""

    what: str
    required: str
    """A comparison and a bound, such as "<= 1.3"."""
    measured: float | None

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        comparison, bound = self.required.split()
        met = {
            "<=": self.measured <= float(bound),
            ">=": self.measured >= float(bound),
            ">": self.measured > float(bound),
            "<": self.measured < float(bound),
        }[comparison]
        return "met" if met else "missed"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A table for one task, with a row for each program.

    If `bars` is given, the best rows appear under this title in the picture of all tasks.
    """

    title: str
    rows: Sequence[Row]
    ratio_to: str = "the limit"
    bars: str | None = None
    figures: Sequence[Figure] = ()


def print_figures(console: Console, figures: Sequence[Figure]) -> None:
    table = Table(title="Required figures", title_justify="left")
    table.add_column("what")
    table.add_column("required", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("")
    for figure in figures:
        shown = "" if figure.measured is None else f"{figure.measured:,.2f}"
        table.add_row(figure.what, figure.required, shown, figure.verdict)
    console.print(table)


def print_rows(
    console: Console, title: str, rows: Sequence[Row], ratio_to: str = "the limit"
) -> None:
    """Print the rows as a table, without the columns that are empty in all rows."""
    columns: list[tuple[str, Literal["left", "right"], list[str]]] = [
        ("library", "left", [row.library for row in rows]),
        ("variant", "left", [row.variant for row in rows]),
        ("time", "right", [duration(row.seconds) for row in rows]),
        (f"ratio to {ratio_to}", "right", [_number(row.ratio, ",.2f") for row in rows]),
        ("peak memory", "right", [size(row.peak_bytes) for row in rows]),
        ("compile", "right", [_compile_time(row.compile_seconds) for row in rows]),
        ("error", "right", [_number(row.step_error, ".0e") for row in rows]),
        ("lin. residual", "right", [_number(row.linear_residual, ".0e") for row in rows]),
        ("note", "left", [row.note for row in rows]),
    ]
    table = Table(title=title, title_justify="left")
    said = [column for column in columns if any(column[2])]
    for heading, justify, _ in said:
        table.add_column(heading, justify=justify, overflow="fold")
    for cells in zip(*(cells for _, _, cells in said), strict=True):
        table.add_row(*cells)
    console.print(table)


def _compile_time(seconds: float | None) -> str:
    """Show the time to compile, unless another row has compiled the program already."""
    return "" if seconds is None or seconds < 0.02 else duration(seconds)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return ""
    if num_bytes < 2**20:
        return "< 1 MiB"
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:,.0f} MiB"
    return f"{num_bytes / 2**30:,.1f} GiB"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
