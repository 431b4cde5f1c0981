"""The two figures: both sweeps on one axis, and the filters behind them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes

from gnlin import filters

from ...figures import BLACK, BLUE, figure, GREEN, SKY, VERMILION
from ._summary import Curve, PerRun
from ._sweep import DAMPED, DESCENT, Spectra
from ._tasks import LARGEST_PERIOD, SMALLEST_PERIOD, Task


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


def draw_sweeps(
    path: Path, tasks: Sequence[Task], curves: dict[str, dict[str, Curve]]
) -> None:
    """Test error and kernel alignment against strength, a column a task."""
    num_seeds = len(curves[tasks[0].name][DESCENT].error)
    with figure(path, height=6.6) as drawing:
        axes = drawing.subplots(2, len(tasks), sharex="col", squeeze=False)
        for (top, bottom), task in zip(axes.T, tasks, strict=True):
            for solver, curve in curves[task.name].items():
                _draw_curve(top, curve, curve.error, solver)
                _draw_curve(bottom, curve, curve.alignment, solver)
                _mark_divergence(top, curve, solver)
            top.set(xscale="log", yscale="linear" if task.classifies else "log")
            top.set_ylabel(task.error_label.capitalize().replace("rmse", "RMSE"))
            top.set_title(task.title)
            strength = r"Effective damping $\lambda = 1/(\eta K)$"
            bottom.set_xlabel(f"{strength}, for {task.max_steps} outer steps")
            bottom.set_ylabel("Kernel alignment\nwith initialisation")
            _add_period_axis(top, task.learning_rate)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        drawing.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=len(labels),
            title=f"Line: mean over {num_seeds} seeds; band: their range",
        )


def _draw_curve(axes: Axes, curve: Curve, values: PerRun, solver: str) -> None:
    look = LOOKS[solver]
    axes.plot(curve.damping, curve.where_stable(values.mean(axis=0)), **look)
    lowest, highest = (
        curve.where_stable(bound(values, axis=0)) for bound in (np.min, np.max)
    )
    axes.fill_between(
        curve.damping, lowest, highest, color=look["color"], alpha=0.15, linewidth=0
    )


def _mark_divergence(axes: Axes, curve: Curve, solver: str) -> None:
    for damping, diverged in zip(curve.damping, curve.num_diverged, strict=True):
        if diverged:
            axes.annotate(
                f"{diverged} diverged",
                (damping, 0.98),
                xycoords=("data", "axes fraction"),
                color=LOOKS[solver]["color"],
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


def draw_filters(
    path: Path,
    tasks: Sequence[Task],
    periods: Sequence[float],
    spectra: dict[str, Spectra],
) -> None:
    """The fraction of each eigencomponent that is solved, at three matched strengths,
    above the eigenvalues that the kernel has."""
    shown = np.quantile(range(len(periods)), [1 / 4, 1 / 2, 3 / 4]).astype(int).tolist()
    with figure(path, height=5.8) as drawing:
        axes = drawing.subplots(
            2, len(tasks), sharex="col", squeeze=False, height_ratios=(5, 2)
        )
        for (top, bottom), task in zip(axes.T, tasks, strict=True):
            _draw_fractions(top, task, [periods[i] for i in shown])
            top.set(xscale="log", ylim=(-0.03, 1.15), title=task.title)
            top.set_ylabel("Fraction solved, $w\\,g(w)$")
            middle = shown[1]
            trained = f"trained at {_strength(task.damping(periods[middle]))}"
            first, later = spectra[task.name][0], spectra[task.name][1 + middle]
            _draw_spectrum(bottom, first, label="at initialisation", color=SKY)
            _draw_spectrum(bottom, later, label=trained, color=BLACK, histtype="step")
            bottom.set(xlabel="Eigenvalue $w$ of the kernel", ylabel="Eigenvalues")
            bottom.legend(fontsize="small")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        drawing.legend(
            unique.values(), unique, loc="outside lower center", ncols=len(unique)
        )


def _draw_fractions(axes: Axes, task: Task, periods: Sequence[float]) -> None:
    w = jnp.geomspace(
        task.damping(LARGEST_PERIOD) / 10, task.damping(SMALLEST_PERIOD) * 10, 400
    )
    for period in periods:
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


def _draw_spectrum(axes: Axes, eigenvalues: np.ndarray, **look: Any) -> None:
    exponents = np.log10(eigenvalues[eigenvalues > _ROUNDING * eigenvalues[-1]])
    first, last = np.floor(exponents.min()), np.ceil(exponents.max())
    edges = 10 ** np.arange(first, last + _BIN, _BIN)
    axes.hist(10**exponents, edges.tolist(), **look)
