"""Times of gnlin beside the hand-written limit and other libraries, in one process."""

from collections.abc import Callable, Sequence

from rich.table import Table

from .._options import Options
from .._results import circumstances, write_csv, write_json
from . import damped_step, import_time, inner_steps, picture, sweep
from .report import print_rows, Row, wide_console
from .task import DAMPING, quintic, Task


def run(options: Options) -> None:
    """Measure, print, and write speed.csv, speed.png and settings.json."""
    console = wide_console()
    rounds = 5 if options.quick else 15
    task = quintic(width=50, num_examples=20)
    rows: list[Row] = []

    def show(title: str, new: Sequence[Row], ratio_to: str = "the limit") -> None:
        rows.extend(new)
        print_rows(console, title, new, ratio_to)

    damped = _damped(task, options.quick, rounds)
    show(f"One damped step in a compiled loop; {task.name}", damped)
    show("The same in one call", damped_step.one_call(task, 3 * rounds))
    alone, outer = inner_steps.by_formula(task, 3 * rounds)
    show("K inner steps on a spectrum at hand", alone, "K = 1")
    show("K inner steps, the whole outer step", outer, "K = 1")
    largest = 10**3 if options.quick else inner_steps.MAX_LITERAL
    show("K inner steps, one by one", inner_steps.literally(task, largest), "K = 1")
    swept = sweep.in_a_loop(task, rounds)
    show("A sweep at one linearisation point, in a compiled loop", swept, "one")
    called = sweep.one_call(task, 3 * rounds)
    show("The same in one call, its memory allocated anew", called, "one")
    shares = sweep.shares(task, 3 * rounds)
    show("Shares of such a call", shares, "the first")
    imports = import_time.against_dependencies(3 if options.quick else 9)
    show("Import", imports, "the dependencies")
    groups = [(task.name, picture.best_of_each(damped))]
    if not options.quick:
        wide = quintic(width=200, num_examples=100)
        wider = _damped_wide(wide)
        show(f"One damped step in a compiled loop; {wide.name}", wider)
        groups.append((wide.name, picture.best_of_each(wider)))

    figures = required_figures(damped, outer, swept, called, imports)
    console.print(_figures_table(figures))
    write_csv(options.out / "speed.csv", rows)
    picture.draw(options.out / "speed.png", groups)
    write_json(options.out / "settings.json", _settings(options, rounds, figures))


def _damped(task: Task, quick: bool, rounds: int) -> list[Row]:
    rows = damped_step.in_a_loop(task, rounds)
    lm = "SciPy", "lm", "it needs at least as many residuals as parameters"
    if quick:
        reason = "seconds a step"
        return [
            *rows,
            damped_step.skipped(task, "optimistix", "LM, default (QR)", reason),
            damped_step.skipped(task, *lm),
        ]
    return [
        *rows,
        *damped_step.jaxopt_in_a_loop(task, 5),
        *damped_step.slower_in_a_loop(task, 5),
        *damped_step.default_levenberg_marquardt(task),
        damped_step.skipped(task, *lm),
    ]


def _damped_wide(task: Task) -> list[Row]:
    p, m = task.num_parameters, task.num_outputs
    stacked, square = (8 * n * p / 2**30 for n in (m + p, p))
    hopeless = (
        ("optimistix", "LM, default (QR)", f"{m + p:,} x {p:,}, {stacked:,.0f} GiB"),
        ("jaxopt", "LM, Cholesky", f"p x p, {square:,.0f} GiB"),
        ("jaxopt", "LM, CG", f"its start forms p x p numbers, {square:,.0f} GiB"),
        ("SciPy", "lm", "it needs at least as many residuals as parameters"),
    )
    return [
        *damped_step.in_a_loop(task, 3, num_steps=5),
        *damped_step.slower_in_a_loop(task, 1, num_steps=2),
        *(damped_step.skipped(task, *what) for what in hopeless),
    ]


def required_figures(
    damped: Sequence[Row],
    outer: Sequence[Row],
    swept: Sequence[Row],
    called: Sequence[Row],
    imports: Sequence[Row],
) -> list[dict]:
    """What the library promises, and what came out; `None` where this run is too quick
    to tell."""
    gnlin = _find(damped, "gnlin", lambda row: row.note == "the default")
    default = _find(damped, "optimistix", lambda row: "default" in row.variant)
    by_cg = _find(damped, "optimistix", lambda row: row.variant == "LM, Normal(CG)")
    last = _find(outer, "gnlin", lambda row: row.variant == "K = 100,000,000")
    errors = _quotient(gnlin.step_error, by_cg.step_error)
    as_exact = gnlin.solved and errors is not None and errors <= 1
    figures = [
        _figure("damped step over the hand-written limit", "<= 1.5", gnlin.ratio),
        _figure(
            "optimistix LM, default, over gnlin's damped step",
            ">= 1000",
            _quotient(default.ratio, gnlin.ratio),
        ),
        _figure(
            "optimistix LM, Normal(CG), over gnlin's damped step, no less accurate",
            "> 1",
            _quotient(by_cg.ratio, gnlin.ratio) if as_exact else 0.0,
        ),
        _figure("outer step, K = 10^8 over K = 1", "<= 1.2", last.ratio),
    ]
    for where, rows in (("in a loop", swept), ("in one call", called)):
        for variant in (sweep.DAMPINGS, sweep.PERIODS):
            row = _find(rows, "gnlin", lambda row, v=variant: row.variant == v)
            figures.append(_figure(f"{variant} over one, {where}", "<= 2", row.ratio))
    return [
        *figures,
        _figure("import gnlin over its dependencies", "<= 1.2", imports[1].ratio),
    ]


def _find(rows: Sequence[Row], library: str, which: Callable[[Row], bool]) -> Row:
    (row,) = (row for row in rows if row.library == library and which(row))
    return row


def _quotient(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def _figure(what: str, required: str, measured: float | None) -> dict:
    figure = {"what": what, "required": required, "measured": measured}
    if measured is None:
        return figure | {"verdict": "not measured"}
    comparison, bound = required.split()
    met = {
        "<=": measured <= float(bound),
        ">=": measured >= float(bound),
        ">": measured > float(bound),
    }[comparison]
    return figure | {"verdict": "met" if met else "missed"}


def _figures_table(figures: Sequence[dict]) -> Table:
    table = Table(title="Required figures", title_justify="left")
    table.add_column("what")
    table.add_column("required", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("")
    for figure in figures:
        measured = figure["measured"]
        shown = "" if measured is None else f"{measured:,.2f}"
        table.add_row(figure["what"], figure["required"], shown, figure["verdict"])
    return table


def _settings(options: Options, rounds: int, figures: list[dict]) -> dict:
    return {
        **circumstances(),
        "quick": options.quick,
        "rounds": rounds,
        "damping": DAMPING,
        "learning_rate": inner_steps.LEARNING_RATE,
        "required_figures": figures,
    }
