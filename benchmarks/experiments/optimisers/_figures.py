"""The table, a figure of the table, and a figure of the runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..._results import write_whole
from ...experiment import only, Runs, select
from ...figures import figure
from ._settings import Optimisers, Outcome, outcome
from .methods import METHODS, PERIOD
from .tasks import Task


HEADER = (
    "task",
    "batch",
    "method",
    "value",
    "reached",
    "steps",
    "range",
    "feature updates",
    "passes",
    "seconds",
    "range",
)
_HIGHEST = 3
"""The largest loss that is drawn, relative to the loss before training."""
SHORT = {f"iterative linearisation, K = {PERIOD}": "iterative linearisation"}


def markdown(settings: Optimisers, all_runs: Sequence[Runs]) -> str:
    """Return a table with a row for each method, task and batch size: medians over the
    seeds, and ranges of the runs that have reached the target."""
    rows = [HEADER, ("---",) * len(HEADER)]
    for task in settings.tasks:
        for batch_size in task.batch_sizes:
            for name in settings.methods:
                found = outcome(settings, all_runs, task, batch_size, name)
                rows.append(
                    (task.name, f"{batch_size:,}", name, *_row(found, METHODS[name]))
                )
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def _row(found: Outcome, method: Any) -> tuple[str, ...]:
    def median(name):
        value = found.median(name)
        return f"{value:,.4g}" if np.isfinite(value) else "not reached"

    def extent(values):
        values = values[found.reached]
        return f"{values.min():,.4g} to {values.max():,.4g}" if len(values) else ""

    edge = " (edge)" * found.at_edge
    return (
        f"{method.parameter} = {found.value:g}{edge}",
        f"{found.reached.sum()} of {len(found.reached)}",
        median("steps"),
        extent(found.steps),
        median("feature_updates"),
        median("passes"),
        median("seconds"),
        extent(found.seconds),
    )


def draw(settings: Optimisers, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    text = markdown(settings, all_runs)
    path = out / "optimisers.md"
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))
    height = 1.2 + 0.32 * len(settings.methods) * len(settings.tasks)
    with figure(out / "optimisers.png", width=11, height=height) as drawing:
        panels = drawing.subplots(
            len(settings.tasks), 2, sharey=True, sharex="col", squeeze=False
        )
        for row, task in zip(panels, settings.tasks, strict=True):
            for panel, name in zip(row, ("steps", "seconds"), strict=True):
                _dots(settings, panel, all_runs, task, name)
        for panel, label in zip(panels[-1], ("Steps", "Seconds"), strict=True):
            panel.set_xlabel(f"{label} to the target loss")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        drawing.legend(
            handles,
            labels,
            loc="outside upper center",
            ncols=len(labels),
            title="Batch size",
        )
    sizes = [task.batch_sizes for task in settings.tasks]
    columns = max(map(len, sizes))
    with figure(
        out / "optimisers_curves.png", width=14, height=1 + 3 * len(settings.tasks)
    ) as drawing:
        panels = drawing.subplots(len(settings.tasks), 2 * columns, squeeze=False)
        for row, task in zip(panels, settings.tasks, strict=True):
            for i, batch_size in enumerate(task.batch_sizes):
                for panel, name in zip(row[2 * i :], ("steps", "seconds"), strict=False):
                    _curves(settings, panel, all_runs, task, batch_size, name)
            row[0].set_ylabel("Loss")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=4)
    return {
        "optimisers": "Steps and seconds to the target loss: medians over "
        f"{settings.seeds} seeds, and ranges of the seeds that reach it. A cross at "
        "the right edge means that at least half of the runs do not reach it. The "
        f"target lies {settings.part_of_guessing:g} of the loss of guessing above "
        "the smallest attainable loss. Each method has one parameter: of "
        f"{settings.num_trials} values, the one is used that takes the fewest steps "
        "on a seed that is not judged. These values and the other settings are in "
        "benchmarks/experiments/optimisers/methods.py. The time is that of the "
        "process, without compilation and without evaluating the loss.",
        "optimisers_curves": "The loss of each seed over steps and over seconds. The "
        "dotted line is the target of the first seed.",
    }


def _dots(
    settings: Optimisers, panel: Any, all_runs: Sequence[Runs], task: Task, name: str
) -> None:
    last = len(task.batch_sizes) - 1
    for k, batch_size in enumerate(task.batch_sizes):
        shift = 0.16 * (2 * k - last)
        for i, method in enumerate(settings.methods):
            found = outcome(settings, all_runs, task, batch_size, method)
            colour, y = METHODS[method].colour, i + shift
            values = getattr(found, name)[found.reached]
            fill = colour if k == last else "white"
            if len(values):
                panel.plot([values.min(), values.max()], [y, y], color=colour, lw=1.4)
            median = found.median(name)
            if np.isfinite(median):
                panel.plot(median, y, "o", color=colour, markerfacecolor=fill, zorder=3)
            else:
                panel.plot(
                    0.985, y, "x", color=colour, transform=panel.get_yaxis_transform()
                )
        label = f"{('small', 'large')[k] if last == 1 else batch_size}"
        fill = "black" if k == last else "white"
        panel.plot([], [], "o", color="black", markerfacecolor=fill, label=label)
    found = panel.dataLim.intervalx
    if not np.all(np.isfinite(found)):  # no run reaches the target
        panel.set_xlim(1, 10)
    names = [SHORT.get(method, method) for method in settings.methods]
    panel.set_yticks(range(len(names)), names)
    panel.set(xscale="log", ylim=(len(names) - 0.5, -0.5))
    sizes = " and ".join(f"{size:,}" for size in task.batch_sizes)
    panel.set_title(f"{task.name}, batches of {sizes}", fontsize=10)


def _curves(
    settings: Optimisers,
    panel: Any,
    all_runs: Sequence[Runs],
    task: Task,
    batch_size: int,
    name: str,
) -> None:
    for method in settings.methods:
        runs = only(all_runs, task=task.name, batch_size=batch_size, method=method)
        of = METHODS[method]
        for seed in range(settings.seeds):
            x, loss = runs[name][seed, 1:], runs["losses"][seed, 1:]
            label = SHORT.get(method, method) if seed == 0 else None
            panel.plot(x, loss, color=of.colour, lw=1, alpha=0.7, label=label)
    first = select(all_runs, task=task.name, batch_size=batch_size)[0]
    target = first["target"][0]
    panel.axhline(target, color="black", ls=":", lw=1)
    panel.set(xscale="log", yscale="log", xlabel=name.capitalize())
    panel.set_ylim(0.7 * target, _HIGHEST * first["losses"][:, 0].max())
    panel.set_title(f"{task.name}, batches of {batch_size:,}", fontsize=10)
