"""The two figures: both sweeps on one axis, and the filters behind them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from numpy import ndarray

import gnlin
from gnlin import filters

from ...experiment import only, Runs
from ...figures import BLACK, BLUE, figure, GREEN, SKY, VERMILION
from ...training import flow_error, FLOW_FROM
from ._curves import (
    agreeing,
    CLOSE,
    DAMPED,
    DESCENT,
    eigenvalues,
    num_diverged,
    SOLVERS,
    where_stable,
)
from ._tasks import KVsLambda, make_task, Task, TASKS


_ROUNDING = 1e-13
"""Eigenvalues below this, relative to the largest, are not told from zero."""
_BIN = 1 / 2
"""Of a decade."""

LOOKS: dict[str, dict[str, Any]] = {
    DESCENT: {
        "label": "$K$ gradient steps",
        "color": BLUE,
        "marker": "o",
    },
    DAMPED: {
        "label": r"damping $\lambda$",
        "color": VERMILION,
        "marker": "s",
        "linestyle": "--",
        "markerfacecolor": "white",
    },
}


def draw(settings: KVsLambda, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    tasks = {name: make_task(settings, name) for name in TASKS}
    by_task = {
        name: {solver: only(all_runs, task=name, solver=solver) for solver in SOLVERS}
        for name in TASKS
    }
    _draw_sweeps(out / "k_vs_lambda.png", tasks, by_task)
    squared = {name: task for name, task in tasks.items() if task.loss.is_quadratic}
    spectra = {name: by_task[name][DESCENT]["spectrum"][0] for name in squared}
    shown = _shown(settings)
    _draw_filters(out / "filters.png", squared, settings.periods, shown, spectra)
    return {
        "k_vs_lambda": _caption(settings, tasks, by_task),
        "filters": (
            "The fraction of each eigencomponent of a linearised problem with squared "
            f"error that is solved, by K steps and by damping at {len(shown)} matched "
            "strengths; below, the kernel's eigenvalues, at initialisation and trained "
            "by K steps at the middle one, of one seed."
        ),
    }


def _caption(settings: KVsLambda, tasks, by_task) -> str:
    digits = tasks["digits-cross-entropy"]
    model = digits.make_model(jax.random.key(0))
    error = flow_error(model, digits.train, digits.loss, digits.learning_rate, _CHECKED)
    all_runs = [runs for both in by_task.values() for runs in both.values()]
    diverged = sum(int(num_diverged(runs).sum()) for runs in all_runs)
    number = sum(runs["stable"].size for runs in all_runs)
    agreement = "; ".join(
        f"{task.title}: {_agreement(by_task[name])}" for name, task in tasks.items()
    )
    return (
        "Test error, training loss and kernel alignment with initialisation against "
        f"effective damping, lambda = 1/(eta K), means and ranges of {settings.seeds} "
        f"seeds. Quintic: 20 points, a 5-layer network, {settings.quintic_steps} outer "
        f"steps, eta = {settings.quintic_rate:g}. Digits: "
        f"{10 * settings.images_per_class} images, a 64-40-10 network, "
        f"{settings.digits_steps} outer steps, eta = {settings.digits_rate:g}. With "
        f"cross-entropy, from K = {FLOW_FROM:g} on the steps are gradient flow, which on "
        f"the digits ends {error:.1e} of a step from {_CHECKED:,} literal ones. "
        f"{diverged} of {number} runs diverged; where one did, no mean is drawn. The "
        f"mean errors agree to {CLOSE:.0%} of their range: {agreement}."
    )


def _agreement(both: dict[str, Runs]) -> str:
    found = agreeing(both[DESCENT], both[DAMPED])
    if found is None:
        return "nowhere"
    low, high = found
    dampings = both[DESCENT]["damping"][0]
    everywhere = found == (dampings.min(), dampings.max())
    return f"lambda = {low:.3g} to {high:.3g}" + (", everywhere" if everywhere else "")


_CHECKED = 1000


#
# The sweeps
#


def _draw_sweeps(
    path: Path, tasks: Mapping[str, Task], by_task: dict[str, dict[str, Runs]]
) -> None:
    """A column a task."""
    rows = {
        "test_error": None,
        "train_loss": "Training loss",
        "kernel_alignment": "Kernel alignment\nwith initialisation",
    }
    with figure(path, width=15, height=8.6) as drawing:
        axes = drawing.subplots(len(rows), len(tasks), sharex="col", squeeze=False)
        for i, (panels, (name, task)) in enumerate(
            zip(axes.T, tasks.items(), strict=True)
        ):
            for panel, (column, label) in zip(panels, rows.items(), strict=True):
                for solver, runs in by_task[name].items():
                    _draw_curve(panel, runs, column, LOOKS[solver])
                if i == 0 or label is None:
                    panel.set_ylabel(label or task.error_label)
            top, middle, bottom = panels
            is_rmse = "RMSE" in task.error_label
            top.set(xscale="log", yscale="log" if is_rmse else "linear")
            top.set_title(task.title)
            middle.set(yscale="log")
            bottom.set_ylim(top=1.03)
            strength = r"$\lambda = 1/(\eta K)$"
            bottom.set_xlabel(f"{strength}, {task.num_steps} outer steps")
            _add_period_axis(top, task.learning_rate)
            for solver, runs in by_task[name].items():
                _mark_divergence(top, runs, LOOKS[solver]["color"])
        handles, labels = axes[0, 0].get_legend_handles_labels()
        num_seeds = len(next(iter(by_task.values()))[DESCENT]["test_error"])
        drawing.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=len(labels),
            title=f"Line: mean over {num_seeds} seeds; band: their range",
        )


def _draw_curve(axes: Axes, runs: Runs, column: str, look: dict[str, Any]) -> None:
    damping, values = runs["damping"][0], runs[column]
    axes.plot(damping, where_stable(runs, values.mean(axis=0)), **look)
    lowest, highest = (
        where_stable(runs, bound(values, axis=0)) for bound in (np.min, np.max)
    )
    axes.fill_between(
        damping, lowest, highest, color=look["color"], alpha=0.15, linewidth=0
    )


def _mark_divergence(axes: Axes, runs: Runs, colour: str) -> None:
    for damping, number in zip(runs["damping"][0], num_diverged(runs), strict=True):
        if number:
            axes.annotate(
                f"{number} diverged",
                (damping, 0.98),
                xycoords=("data", "axes fraction"),
                color=colour,
                ha="center",
                va="top",
                rotation=90,
                fontsize="small",
            )


def _add_period_axis(axes: Axes, learning_rate: float) -> None:
    def other(strength):  # K of lambda and lambda of K are one formula
        return 1 / (learning_rate * np.maximum(strength, 1e-100))

    top = axes.secondary_xaxis("top", functions=(other, other))
    exponent = round(np.log10(learning_rate))
    top.set_xlabel(rf"Period $K$, at $\eta = 10^{{{exponent}}}$")


#
# The filters
#


def _shown(settings: KVsLambda) -> list[int]:
    """Three of the strengths, the middle one second."""
    indices = range(len(settings.periods))
    return np.quantile(indices, [1 / 4, 1 / 2, 3 / 4]).astype(int).tolist()


def _draw_filters(
    path: Path,
    tasks: Mapping[str, Task],
    periods: Sequence[float],
    shown: Sequence[int],
    spectra: Mapping[str, Float[ndarray, "strengths m"]],
) -> None:
    """The fraction of each eigencomponent that is solved, above the eigenvalues that the
    kernel has."""
    with figure(path, height=5.8) as drawing:
        axes = drawing.subplots(
            2, len(tasks), sharex="col", squeeze=False, height_ratios=(5, 2)
        )
        for (top, bottom), (name, task) in zip(axes.T, tasks.items(), strict=True):
            _draw_fractions(top, task, periods, shown)
            top.set(xscale="log", ylim=(-0.03, 1.15), title=task.title)
            top.set_ylabel("Fraction solved, $w\\,g(w)$")
            middle = shown[1]
            trained = f"trained at {_strength(task.damping(periods[middle]))}"
            model = task.make_model(jax.random.key(0))
            first = eigenvalues(gnlin.features.kernel(model, task.train[0]))
            later = spectra[name][middle]
            _draw_spectrum(
                bottom, np.asarray(first), label="at initialisation", color=SKY
            )
            _draw_spectrum(bottom, later, label=trained, color=BLACK, histtype="step")
            bottom.set(xlabel="Eigenvalue $w$ of the kernel", ylabel="Eigenvalues")
            bottom.legend(fontsize="small")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        drawing.legend(
            unique.values(), unique, loc="outside lower center", ncols=len(unique)
        )


def _draw_fractions(
    axes: Axes, task: Task, periods: Sequence[float], shown: Sequence[int]
) -> None:
    w = jnp.geomspace(
        task.damping(max(periods)) / 10, task.damping(min(periods)) * 10, 400
    )
    for period in (periods[i] for i in shown):
        damping = task.damping(period)
        descent = filters.GradientDescent(period, task.learning_rate)
        flow = filters.GradientFlow(1 / damping)
        damped = filters.Tikhonov(damping)
        axes.plot(w, w * descent(w), color=BLUE, label="$K$ gradient steps")
        axes.plot(w, w * flow(w), ":", color=BLACK, label=r"gradient flow, time $\eta K$")
        axes.plot(w, w * damped(w), "--", color=VERMILION, label=r"damping $\lambda$")
        axes.text(damping, 1.05, _strength(damping), ha="center", fontsize="small")
    exact = filters.PseudoInverse()
    axes.plot(w, w * exact(w), "-.", color=GREEN, linewidth=1, label="Gauss-Newton")


def _strength(damping: float) -> str:
    return rf"$\lambda = ${float(f'{damping:.3g}'):g}"


def _draw_spectrum(axes: Axes, spectrum: ndarray, **look: Any) -> None:
    exponents = np.log10(spectrum[spectrum > _ROUNDING * spectrum[-1]])
    first, last = np.floor(exponents.min()), np.ceil(exponents.max())
    edges = 10 ** np.arange(first, last + _BIN, _BIN)
    axes.hist(10**exponents, edges.tolist(), **look)
