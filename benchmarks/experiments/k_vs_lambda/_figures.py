"""Three figures: both sweeps on one axis, the filters behind them, and what theory says
of the kernels that the networks have in the end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from numpy import ndarray

import gnlin
from gnlin import filters

from ... import thresholds
from ...experiment import only, Runs
from ...figures import BLACK, BLUE, figure, GREEN, PURPLE, SKY, VERMILION
from ...training import flow_error, FLOW_FROM
from ...verdicts import interval
from ._curves import (
    agreeing,
    CLOSE,
    DAMPED,
    DESCENT,
    eigenvalues,
    intervals_of_ends,
    num_diverged,
    ratio,
    SOLVERS,
    where_stable,
    where_tested,
)
from ._tasks import KVsLambda, make_task, NUM_TEST, RELU, Task, TASKS


_ROUNDING = 1e-13
"""Eigenvalues below this, relative to the largest, are not told from zero."""
_LEAST_LOSS, _LARGEST_RATIO = 1e-8, 12
"""That are drawn."""
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
    _draw_theory(out / "theory.png", squared, by_task)
    return {
        "k_vs_lambda": _caption(settings, tasks, by_task),
        "filters": (
            "The fraction of each eigencomponent of a linearised problem with squared "
            f"error that is solved, by K steps and by damping at {len(shown)} matched "
            "strengths; below, the kernel's eigenvalues, at initialisation and trained "
            "by K steps at the middle one, of one seed."
        ),
        "theory": _theory_caption(settings, squared, by_task),
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
        "Test error, training loss, kernel alignment with initialisation, and the share "
        "of hidden units that are off on all training inputs, against effective damping, "
        f"lambda = 1/(eta K), means and ranges of {settings.seeds} seeds, of the quintic "
        f"with squared error {settings.seeds * tasks[RELU].more_seeds}. Quintic: 20 "
        "points, a 5-layer network with ReLU, or with tanh, whose units cannot die, "
        f"{settings.quintic_steps} outer steps, eta = {settings.quintic_rate:g}. Digits: "
        f"{10 * settings.images_per_class} images, a 64-40-10 network, "
        f"{settings.digits_steps} outer steps, eta = {settings.digits_rate:g}. With "
        f"cross-entropy, from K = {FLOW_FROM:g} on the steps are gradient flow, which on "
        f"the digits ends {error:.1e} of a step from {_CHECKED:,} literal ones. "
        f"{diverged} of {number} runs diverged; where one did, no mean is drawn. The "
        f"mean errors agree to {CLOSE:.0%} of their range (in brackets, 95 % bootstrap "
        f"intervals of the ends): {agreement}."
    )


def _agreement(both: dict[str, Runs]) -> str:
    found = agreeing(both[DESCENT], both[DAMPED])
    if found is None:
        return "nowhere"
    dampings = both[DESCENT]["damping"][0]
    everywhere = found == (dampings.min(), dampings.max())
    ends = zip(found, intervals_of_ends(both[DESCENT], both[DAMPED]), strict=True)
    low, high = (f"{end:.3g} [{a:.3g}, {b:.3g}]" for end, (a, b) in ends)
    return f"lambda = {low} to {high}" + (", everywhere" if everywhere else "")


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
        "dead": "Dead hidden units\n(share)",
    }
    with figure(path, width=17, height=10.5) as drawing:
        axes = drawing.subplots(len(rows), len(tasks), sharex="col", squeeze=False)
        for i, (panels, (name, task)) in enumerate(
            zip(axes.T, tasks.items(), strict=True)
        ):
            for panel, (column, label) in zip(panels, rows.items(), strict=True):
                for solver, runs in by_task[name].items():
                    if task.can_die or column != "dead":
                        _draw_curve(panel, runs, column, LOOKS[solver])
                if i == 0 or label is None:
                    panel.set_ylabel(label or task.error_label)
            top, middle, aligned, bottom = panels
            is_rmse = "RMSE" in task.error_label
            top.set(xscale="log", yscale="log" if is_rmse else "linear")
            top.set_title(task.title)
            middle.set(yscale="log")
            middle.set_ylim(bottom=max(middle.get_ylim()[0], _LEAST_LOSS))
            aligned.set_ylim(top=1.03)
            if not task.can_die:
                _say(bottom, "no unit can die")
            strength = r"$\lambda = 1/(\eta K)$"
            bottom.set_xlabel(f"{strength}, {task.num_steps} outer steps")
            _add_period_axis(top, task.learning_rate)
            for solver, runs in by_task[name].items():
                _mark_divergence(top, runs, LOOKS[solver]["color"])
        handles, labels = axes[0, 0].get_legend_handles_labels()
        drawing.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=len(labels),
            title="Line: mean over the seeds; band: their range",
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


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
    axes.set_yticks([])


#
# What theory says
#


def _draw_theory(
    path: Path, tasks: Mapping[str, Task], by_task: dict[str, dict[str, Runs]]
) -> None:
    """A column a task with squared error."""
    labels = (
        "Test error of the networks\n(mean square)",
        r"Effective dimension $d(\lambda)$",
        "Squared bias of one solution\nby the last kernel",
        "Its variance,\nper unit of the noise's",
        r"Risk, $K$ steps (or flow)" + "\nover damping",
    )
    ridge = {**LOOKS[DAMPED], "label": r"damping $\lambda$ (ridge)"}
    flow = {**LOOKS[DESCENT], "label": r"$K$ steps (gradient flow, $t = 1/\lambda$)"}
    with figure(path, width=13, height=13.5) as drawing:
        axes = drawing.subplots(len(labels), len(tasks), sharex="col", squeeze=False)
        for panels, (name, task) in zip(axes.T, tasks.items(), strict=True):
            both = by_task[name]
            error, dimension, bias, variance, risk = panels
            for solver, look, filter in (
                (DESCENT, flow, "flow"),
                (DAMPED, ridge, "ridge"),
            ):
                runs = both[solver]
                _draw_curve(error, runs, "test_mse", look)
                _draw_curve(dimension, runs, "effective_dimension", look)
                _draw_curve(bias, runs, f"squared_bias_{filter}", look)
                _draw_curve(variance, runs, f"variance_{filter}", look)
            damped = both[DAMPED]
            error.plot(
                damped["damping"][0],
                where_stable(damped, damped["squared_bias_repeated"].mean(axis=0)),
                ":",
                color=BLACK,
                label="the last kernel, as often",
            )
            _draw_ratios(risk, both[DESCENT], damped)
            error.set(xscale="log", title=task.title)
            for panel in (variance, risk):
                panel.set_yscale("log")
            if "RMSE" in task.error_label:
                error.set_yscale("log")
                bias.set_yscale("log")
            ticks = [0.5, 1, 2, 5, 10]
            risk.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            risk.yaxis.set_minor_locator(NullLocator())
            risk.set_ylim(0.4, _LARGEST_RATIO)
            risk.set_xlabel(rf"$\lambda = 1/(\eta K)$, {task.num_steps} outer steps")
        for panel, label in zip(axes[:, 0], labels, strict=True):
            panel.set_ylabel(label)
        axes[-1, 0].legend(fontsize="small")
        handles, entries = axes[0, 0].get_legend_handles_labels()
        drawing.legend(handles, entries, loc="outside lower center", ncols=len(entries))


def _draw_ratios(axes: Axes, descent: Runs, damped: Runs) -> None:
    """Of the networks, and of the linear problems at the end of the damped runs."""
    damping, errors = damped["damping"][0], where_tested(descent, damped, "test_mse")
    tested = np.flatnonzero(np.isfinite(ratio(errors)))
    ends = [interval(errors[:, :, i], lambda x: float(ratio(x))) for i in tested]
    low, high = np.array(ends).reshape(-1, 2).T
    axes.plot(
        damping[tested], ratio(errors)[tested], "o-", color=BLACK, label="of the networks"
    )
    if len(errors) > 1:
        axes.fill_between(
            damping[tested], low, high, color=BLACK, alpha=0.12, linewidth=0
        )
    for part, label, colour in (
        ("squared_bias", "of a linear problem: bias", PURPLE),
        ("variance", "of a linear problem: variance", GREEN),
    ):
        means = (damped[f"{part}_{filter}"].mean(axis=0) for filter in ("flow", "ridge"))
        axes.plot(
            damping,
            where_stable(damped, np.divide(*means)),
            "--",
            color=colour,
            label=label,
        )
    bound = thresholds.FLOW_AGAINST_RIDGE.below
    axes.axhline(bound, color=VERMILION, linewidth=1, label=f"bound, {bound:.2f}")


def _theory_caption(settings: KVsLambda, tasks: Mapping[str, Task], by_task) -> str:
    of_quintic = settings.seeds * tasks[RELU].more_seeds
    return (
        f"Tasks with squared error, means and ranges of {settings.seeds} seeds, of the "
        f"quintic {of_quintic}: the networks' mean squared test error, and (dotted) what "
        "as many damped steps come to if the linearisation is the last one from the "
        "start. Of the kernel at the end of each run, with eigenvalues w, the effective "
        "dimension, the sum of w/(w + lambda); and the squared bias and the variance of "
        "learning the targets by it in one solution from the initial outputs, by flow at "
        "the end of runs of K steps and by ridge at the end of damped ones, on "
        f"{NUM_TEST:,} test outputs. The truth of the bias is the test targets; the "
        "variance is of independent noise on the training targets. Below, the risk of K "
        "steps over that of damping: of the networks, where the filters differ, with its "
        "95 % bootstrap interval; and of flow over ridge by the kernels of the damped "
        "runs, where with noise of any size it is between the ratio of the biases and "
        "that of the variances. The latter stays below the bound by theory, the former "
        "on average over truths. Ratios are drawn up to "
        f"{_LARGEST_RATIO}; the networks' largest: {_largest(tasks, by_task)}."
    )


def _largest(tasks: Mapping[str, Task], by_task) -> str:
    def of(both):
        errors = where_tested(both[DESCENT], both[DAMPED], "test_mse")
        found = np.where(np.isfinite(ratio(errors)), ratio(errors), -np.inf)
        if not np.isfinite(found).any():
            return "none"
        damping = both[DESCENT]["damping"][0, found.argmax()]
        return f"{found.max():.3g} at lambda = {damping:.3g}"

    return "; ".join(f"{task.title}: {of(by_task[name])}" for name, task in tasks.items())


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
    with figure(path, width=5 * len(tasks), height=5.8) as drawing:
        axes = drawing.subplots(
            2, len(tasks), sharex="col", squeeze=False, height_ratios=(5, 2)
        )
        for (top, bottom), (name, task) in zip(axes.T, tasks.items(), strict=True):
            _draw_fractions(top, task, periods, shown)
            top.set(xscale="log", ylim=(-0.03, 1.26), title=task.title)
            top.set_yticks(np.linspace(0, 1, 6))
            top.set_ylabel("Fraction solved, $w\\,g(w)$")
            middle = shown[1]
            trained = f"trained at {_strength(task.damping(periods[middle]))}"
            model = task.make_model(jax.random.key(0))
            first = eigenvalues(gnlin.TangentKernel(model)(task.train[0]))
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
    # One above the other: over many decades of eigenvalues they stand close together.
    for height, period in zip(
        (1.04, 1.11, 1.18), (periods[i] for i in shown), strict=True
    ):
        damping = task.damping(period)
        descent = filters.GradientDescent(period, task.learning_rate)
        flow = filters.GradientFlow(1 / damping)
        damped = filters.Tikhonov(damping)
        axes.plot(w, w * descent(w), color=BLUE, label="$K$ gradient steps")
        axes.plot(w, w * flow(w), ":", color=BLACK, label=r"gradient flow, time $\eta K$")
        axes.plot(w, w * damped(w), "--", color=VERMILION, label=r"damping $\lambda$")
        axes.text(damping, height, _strength(damping), ha="center", fontsize="small")
    exact = filters.PseudoInverse()
    axes.plot(w, w * exact(w), "-.", color=GREEN, linewidth=1, label="Gauss-Newton")


def _strength(damping: float) -> str:
    return rf"$\lambda = ${float(f'{damping:.3g}'):g}"


def _draw_spectrum(axes: Axes, spectrum: ndarray, **look: Any) -> None:
    exponents = np.log10(spectrum[spectrum > _ROUNDING * spectrum[-1]])
    first, last = np.floor(exponents.min()), np.ceil(exponents.max())
    edges = 10 ** np.arange(first, last + _BIN, _BIN)
    axes.hist(10**exponents, edges.tolist(), **look)
