"""The headline: K steps on each linearised model against damping 1/(eta K), on one axis.

Two ways to solve each linearised problem only so far, swept over six orders of magnitude:
stop its descent after K steps of size eta, or damp it by lambda. At lambda = 1/(eta K)
their spectral filters are nearly the same. Are the networks that they train?

Tasks: a quintic by a 5-layer network, and 40 handwritten digits by a small one, both with
squared error, full batch, a fixed number of outer steps, and several initialisations,
from each of which both solvers start. Runs that diverge are counted, and no mean is taken
over what they left.
"""

import dataclasses
import time

from rich.console import Console

from ... import _results
from ..._options import Options
from ._figures import draw_filters, draw_sweeps
from ._summary import agreement_of, curve_of, print_table
from ._sweep import SOLVERS, sweep
from ._tasks import make_tasks, strengths


NUM_SEEDS, NUM_SEEDS_QUICK = 5, 2
PER_DECADE, PER_DECADE_QUICK = 2, 0.5


def run(options: Options) -> None:
    """Sweep; print how well the curves agree; write rows, settings and figures."""
    start = time.perf_counter()
    console = Console()
    num_seeds = options.seeds or (NUM_SEEDS_QUICK if options.quick else NUM_SEEDS)
    periods = strengths(PER_DECADE_QUICK if options.quick else PER_DECADE)
    tasks = make_tasks(options.quick)

    rows, spectra = sweep(tasks, periods, num_seeds, console)
    curves = {
        task.name: {solver: curve_of(rows, task.name, solver) for solver in SOLVERS}
        for task in tasks
    }
    agreement = {task.name: agreement_of(curves[task.name]) for task in tasks}
    for task in tasks:
        print_table(console, task, curves[task.name], agreement[task.name])

    draw_sweeps(options.out / "k_vs_lambda.png", tasks, curves)
    draw_filters(options.out / "filters.png", tasks, periods, spectra)
    _results.write_csv(options.out / "k_vs_lambda.csv", rows)
    num_diverged = sum(not row.stable for row in rows)
    seconds = time.perf_counter() - start
    settings = {
        "seeds": list(range(num_seeds)),
        "quick": options.quick,
        "periods": periods,
        "tasks": [task.settings() for task in tasks],
        "num_runs": len(rows),
        "num_diverged": num_diverged,
        "agreement": {name: dataclasses.asdict(a) for name, a in agreement.items()},
        "wall_seconds": round(seconds, 1),
        **_results.circumstances(),
    }
    _results.write_json(options.out / "settings.json", settings)
    console.print(
        f"{len(rows)} runs, of which {num_diverged} diverged, in {seconds:.0f} s.\n"
        f"In {options.out}: k_vs_lambda.png, filters.png, k_vs_lambda.csv, settings.json",
        highlight=False,
        soft_wrap=True,
    )
