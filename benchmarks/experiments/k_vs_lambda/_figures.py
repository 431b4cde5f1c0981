"""Four figures: both sweeps on one axis, their differences, the filters behind them, and
the theory of the networks' final kernels."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from numpy import ndarray

import gnlin
from gnlin import filters

from ... import thresholds
from ...experiment import only, Runs
from ...figures import BLACK, BLUE, figure, fill, GREEN, ORANGE, PURPLE, SKY, VERMILION
from ...thresholds import MOST_UNFINISHED
from ...training import flow_described
from ...verdicts import interval
from ._curves import (
    ALIKE,
    both_train,
    compared,
    DAMPED,
    DESCENT,
    difference,
    difference_at_equal_solution,
    eigenvalues,
    median_ratio,
    num_diverged,
    SOLVERS,
    squared_errors,
    where_stable,
)
from ._tasks import (
    AnySettings,
    CHECKED,
    DRAWN,
    make_task,
    names_of,
    num_tested,
    OWN,
    OwnKVsLambda,
    RELU,
    Task,
)


_ROUNDING = 1e-13
"""Eigenvalues below this, relative to the largest, cannot be distinguished from zero."""
_LEAST_LOSS, _LARGEST_RATIO = 1e-8, 12
"""Ends of the drawn ranges."""
_BIN = 1 / 2
"""Width of a bin, in decades."""
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


def draw(settings: AnySettings, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    tasks = {name: make_task(settings, name) for name in names_of(settings)}
    by_task = {
        name: {solver: only(all_runs, task=name, solver=solver) for solver in SOLVERS}
        for name in tasks
    }
    drawn = {name: task for name, task in tasks.items() if name in (*DRAWN, OWN)}
    _draw_sweeps(out / "k_vs_lambda.png", drawn, by_task)
    _draw_differences(out / "difference.png", tasks, by_task)
    captions = {
        "k_vs_lambda": _caption(settings, drawn, by_task),
        "difference": _difference_caption(settings, tasks, by_task),
    }
    squared = {name: task for name, task in drawn.items() if task.has_theory}
    if not squared:
        return captions
    spectra = {name: by_task[name][DESCENT]["spectrum"][0] for name in squared}
    shown = _shown(settings)
    _draw_filters(out / "filters.png", squared, settings.periods, shown, spectra)
    _draw_theory(out / "theory.png", squared, by_task)
    return captions | {
        "filters": (
            "The fraction of each eigencomponent of a linearised problem with squared "
            f"error that K steps and damping solve, at {len(shown)} matched strengths. "
            "Below: the kernel's eigenvalues for one seed, at initialisation and after "
            "training by K steps at the middle strength."
        ),
        "theory": _theory_caption(settings, squared, by_task),
    }


def _caption(settings: AnySettings, tasks, by_task) -> str:
    all_runs = [runs for name in tasks for runs in by_task[name].values()]
    diverged = sum(int(num_diverged(runs).sum()) for runs in all_runs)
    number = sum(runs["stable"].size for runs in all_runs)
    shown = [
        "Test error",
        "training loss",
        "centred kernel alignment with initialisation",
    ]
    if any(task.can_die for task in tasks.values()):
        shown.append("share of hidden units that are off on all training inputs")
    return (
        f"{', '.join(shown[:-1])} and {shown[-1]}, against the effective damping "
        "lambda = 1/(eta K); medians and ranges over "
        f"{_seeds(settings, tasks)}. At the grey strengths most runs of one of the two "
        f"methods are not trained to {thresholds.PART_OF_GUESSING:.0%} of the loss of "
        f"the best constant outputs. {diverged} of {number} runs diverged; no median is "
        f"drawn where one did. {_setting(settings, tasks, all_runs)}"
    )


def _seeds(settings: AnySettings, tasks: Mapping[str, Task]) -> str:
    if RELU not in tasks:
        return f"{settings.seeds} seeds"
    more = settings.seeds * tasks[RELU].more_seeds
    return f"{settings.seeds} seeds ({more} for the quintic with squared error)"


def _setting(
    settings: AnySettings, tasks: Mapping[str, Task], all_runs: Sequence[Runs]
) -> str:
    """Describe the tasks, and the error of gradient flow on one of them."""
    where = ""
    if isinstance(settings, OwnKVsLambda):
        task = tasks[OWN]
        said = (
            f"{settings.network}: {len(task.train[0]):,} training examples, "
            f"eta = {task.learning_rate:g}."
        )
        if task.loss.is_quadratic:
            return said
    else:
        where = " on the digits"
        said = (
            "The quintic is fitted at 20 points by a 5-layer network with ReLU or tanh, "
            f"and {10 * settings.images_per_class} images of digits by a 64-40-10 "
            "network."
        )
    flow = flow_described(all_runs, CHECKED, where)
    return f"{said} With cross-entropy, {flow}."


def _difference_caption(settings: AnySettings, tasks: Mapping[str, Task], by_task) -> str:
    def of(name, task):
        low, high = _intervals(difference(task, *_pair(by_task[name])))
        known = np.isfinite(low)
        inside = (low > task.margin.above) & (high < task.margin.below)
        above, below = low > 0, high < 0
        return (
            f"{task.title}: {inside[known].sum()}, {above[known].sum()} and "
            f"{below[known].sum()} of {known.sum()}"
        )

    listed = "; ".join(of(name, task) for name, task in tasks.items())
    return (
        "Test error after K steps less that of damping of equal strength, at the "
        "strengths at which both train and their filters differ, which is where the "
        f"largest eigenvalue of a final kernel is above {ALIKE:g} lambda; means and 95 % "
        f"bootstrap intervals over {_seeds(settings, tasks)}. Between the grey lines "
        "the two count as equal. Dotted: the difference from damping that solves as "
        "much of the kernel as K steps do, where most seeds have one. Number of "
        "strengths at which the interval lies between the lines, above zero and below "
        f"zero: {listed}."
    )


def _pair(both: dict[str, Runs]) -> tuple[Runs, Runs]:
    return both[DESCENT], both[DAMPED]


def _intervals(values: Float[ndarray, "seeds strengths"]) -> tuple[ndarray, ndarray]:
    """Return intervals of the means over the seeds; NaN at strengths without values."""
    ends = np.full((2, values.shape[1]), np.nan)
    for i, of_strength in enumerate(values.T):
        known = of_strength[np.isfinite(of_strength)]
        if len(known) > 1:
            ends[:, i] = interval(known, lambda x: float(np.mean(x)))
    return ends[0], ends[1]


#
# The sweeps
#


def _draw_sweeps(
    path: Path, tasks: Mapping[str, Task], by_task: dict[str, dict[str, Runs]]
) -> None:
    """Draw the sweeps, one column for each task."""
    rows = {
        "test_error": None,
        "train_loss": "Training loss",
        "kernel_alignment": "Centred kernel alignment\nwith initialisation",
    }
    if any(task.can_die for task in tasks.values()):
        rows["dead"] = "Dead hidden units\n(share)"
    with figure(path, width=max(3.4 * len(tasks), 6), height=10.5) as drawing:
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
            top, middle, aligned, bottom = *panels[:3], panels[-1]
            top.set(xscale="log", yscale="log" if task.in_decades else "linear")
            top.set_title(task.title)
            middle.set(yscale="log")
            middle.set_ylim(bottom=max(middle.get_ylim()[0], _LEAST_LOSS))
            aligned.set_ylim(top=1.03)
            if "dead" in rows and not task.can_die:
                _say(bottom, "no unit can die")
            strength = r"$\lambda = 1/(\eta K)$"
            bottom.set_xlabel(f"{strength}, {task.num_steps} outer steps")
            _add_period_axis(top, task.learning_rate)
            for panel in panels:
                _shade(panel, *_pair(by_task[name]))
            for solver, runs in by_task[name].items():
                other = by_task[name][DAMPED if solver == DESCENT else DESCENT]
                _mark_divergence(top, runs, other, solver)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        drawing.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=len(labels),
            title="Line: median of the seeds; band: their range",
        )


def _draw_curve(axes: Axes, runs: Runs, column: str, look: dict[str, Any]) -> None:
    damping, values = runs["damping"][0], runs[column]
    axes.plot(damping, where_stable(runs, np.median(values, axis=0)), **look)
    lowest, highest = (
        where_stable(runs, bound(values, axis=0)) for bound in (np.min, np.max)
    )
    fill(axes, damping, lowest, highest, look["color"])


def _shade(axes: Axes, a: Runs, b: Runs) -> None:
    """Shade the strengths at which the two do not both train."""
    logs = np.log10(a["damping"][0])
    half = np.abs(np.diff(logs)).max() / 2 if len(logs) > 1 else 0.25
    for log in logs[~both_train(a, b)]:
        ends = 10 ** (log - half), 10 ** (log + half)
        axes.axvspan(*ends, color="#EEEEEE", linewidth=0, zorder=0)


def _draw_differences(
    path: Path, tasks: Mapping[str, Task], by_task: dict[str, dict[str, Runs]]
) -> None:
    """Draw the differences: two panels for classes, one with each loss, and one for the
    quintic; or a single panel for a user's own task."""
    panels = {
        "Digits, squared error": lambda name, task: (
            not task.in_decades and task.loss.is_quadratic
        ),
        "Digits and sign, cross-entropy": lambda name, task: not task.loss.is_quadratic,
        "Quintic, squared error": lambda name, task: task.in_decades,
    }
    if OWN in tasks:
        panels = {tasks[OWN].title: lambda name, task: True}
    with figure(path, width=5 * len(panels), height=5.8) as drawing:
        (axes,) = drawing.subplots(1, len(panels), squeeze=False)
        for panel, (title, belongs) in zip(axes, panels.items(), strict=True):
            shown = {name: task for name, task in tasks.items() if belongs(name, task)}
            for (name, task), colour in zip(
                shown.items(), (BLUE, VERMILION, GREEN, ORANGE), strict=False
            ):
                _draw_difference(panel, task, *_pair(by_task[name]), colour)
            task = next(iter(shown.values()))
            scale, unit = (1, "decades of RMSE") if task.in_decades else (100, "points")
            for end in (task.margin.above, task.margin.below):
                panel.axhline(scale * end, color="#888888", linewidth=1)
            panel.axhline(0, color=BLACK, linewidth=0.8)
            panel.set(xscale="log", title=title, xlabel=r"$\lambda = 1/(\eta K)$")
            panel.set_xlim(_ends([by_task[name] for name in shown]))
            panel.set_ylabel(f"Test error, $K$ steps less damping ({unit})")
            if panel.get_legend_handles_labels()[0]:
                if any(map(_has_equal_solution, shown.values())):
                    label = "less damping that solves as much"
                    panel.plot([], [], ":", color=BLACK, label=label)
                below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15)}
                panel.legend(fontsize="small", ncols=2, **below)


def _ends(shown: Sequence[dict[str, Runs]]) -> tuple[float, float]:
    """Return the ends of the strengths that are compared, or of all if none is."""
    each = [(both[DAMPED]["damping"][0], compared(*_pair(both))) for both in shown]
    some = [damping[known] for damping, known in each if known.any()]
    dampings = np.concatenate(some or [damping for damping, _ in each])
    return dampings.min() / 2, 2 * dampings.max()


def _draw_difference(axes: Axes, task: Task, a: Runs, b: Runs, colour: str) -> None:
    dampings, scale = a["damping"][0], 1 if task.in_decades else 100
    parts = scale * difference(task, a, b)
    low, high = _intervals(parts)
    known = np.isfinite(low)
    if not known.any():
        return
    label = task.title.partition(", ")[0]
    if label == "Digits":
        width = task.make_model(jax.random.key(0)).width_size
        label = f"{len(task.train[0])} images, {width} units"
    mean = _where(known, np.nanmean(parts[:, known], axis=0))
    axes.plot(dampings, mean, "o-", color=colour, label=label)
    fill(axes, dampings, low, high, colour)
    if _has_equal_solution(task):
        left = scale * difference_at_equal_solution(task, a, b)
        some = np.isfinite(left).mean(axis=0) > MOST_UNFINISHED
        mean = _where(some, np.nanmean(left[:, some], axis=0))
        axes.plot(dampings, mean, ":", color=colour)


def _has_equal_solution(task: Task) -> bool:
    """Whether damping that solves as much of the kernel as K steps is drawn, too."""
    return task.loss.is_quadratic and not task.in_decades


def _where(
    known: Bool[ndarray, " strengths"], values: Float[ndarray, " known"]
) -> Float[ndarray, " strengths"]:
    """Return the values at the known strengths, and NaN at the others, where lines and
    bands break."""
    found = np.full(len(known), np.nan)
    found[known] = values
    return found


def _mark_divergence(axes: Axes, runs: Runs, other: Runs, solver: str) -> None:
    """Write the number of diverged runs at each strength, at the end of the panel that is
    away from the other solver's median. If both have diverged, each has an end."""
    axes.get_ylim()  # which updates the transformation of the data
    medians = where_stable(other, np.median(other["test_error"], axis=0))
    points = np.stack([runs["damping"][0], medians], axis=1)
    heights = (axes.transData + axes.transAxes.inverted()).transform(points)[:, 1]
    for (damping, _), height, number in zip(
        points, heights, num_diverged(runs), strict=True
    ):
        at_top = height < 0.5 if np.isfinite(height) else solver == DESCENT
        if number:
            axes.annotate(
                f"{number} diverged",
                (damping, 0.98 if at_top else 0.02),
                xycoords=("data", "axes fraction"),
                color=LOOKS[solver]["color"],
                ha="center",
                va="top" if at_top else "bottom",
                rotation=90,
                fontsize="small",
            )


def _add_period_axis(axes: Axes, learning_rate: float) -> None:
    def other(strength):  # from K to lambda, and from lambda to K
        return 1 / (learning_rate * np.maximum(strength, 1e-100))

    top = axes.secondary_xaxis("top", functions=(other, other))
    exponent = np.log10(learning_rate)
    shown = f"10^{{{exponent:.0f}}}" if exponent % 1 == 0 else f"{learning_rate:g}"
    top.set_xlabel(rf"Period $K$, at $\eta = {shown}$")


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
    axes.set_yticks([])


#
# The theory
#


def _draw_theory(
    path: Path, tasks: Mapping[str, Task], by_task: dict[str, dict[str, Runs]]
) -> None:
    """Draw the theory, one column for each task with squared error."""
    labels = (
        "Test error of the networks\n(mean square)",
        r"Effective dimension $d(\lambda)$",
        "Squared bias of one solution\nwith the final kernel",
        "Variance of this solution,\nrelative to the noise",
        "Risk ratio, $K$ steps (or flow)\nover damping",
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
                where_stable(damped, np.median(damped["squared_bias_repeated"], axis=0)),
                ":",
                color=BLACK,
                label="as many damped steps with the final kernel",
            )
            _draw_ratios(risk, both[DESCENT], damped)
            error.set(xscale="log", title=task.title)
            for panel in (variance, risk):
                panel.set_yscale("log")
            if task.in_decades:
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
    """Draw the ratios of the risks of the networks, and of linear problems with the
    kernels at the end of the damped runs."""
    damping, errors = damped["damping"][0], squared_errors(descent, damped)
    known = compared(descent, damped)
    ratios = _where(known, median_ratio(errors)[known])
    of_one = lambda i: interval(errors[:, :, i], lambda x: float(median_ratio(x)))
    ends = [of_one(i) for i in np.flatnonzero(known)]
    low, high = (_where(known, end) for end in np.array(ends).reshape(-1, 2).T)
    axes.plot(damping, ratios, "o-", color=BLACK, label="networks, median")
    if len(errors) > 1:
        fill(axes, damping, low, high, BLACK)
    for part, label, colour in (
        ("squared_bias", "linear problem, squared bias", PURPLE),
        ("variance", "linear problem, variance", GREEN),
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


def _theory_caption(settings: AnySettings, tasks: Mapping[str, Task], by_task) -> str:
    return (
        f"Tasks with squared error; medians and ranges over {_seeds(settings, tasks)}. "
        "Top: the networks' mean squared test error, and (dotted) the error of as many "
        "damped steps that all use the final linearisation. Then the effective "
        "dimension of the final kernel, the sum of w/(w + lambda) over its eigenvalues "
        "w, and the squared bias and the variance of fitting the targets once with this "
        "kernel, by flow after K steps and by ridge after damping, on "
        f"{max(map(num_tested, tasks.values())):,} test outputs. Bottom: the ratio of "
        "risks, for the networks and for linear problems with the kernels of the damped "
        "runs. A linear problem's ratio lies between its ratio of squared biases and its "
        "ratio of variances; in theory the ratio of variances stays below the bound, and "
        "so does the ratio of squared biases on average over targets. The largest "
        "medians are "
        f"{_largest(tasks, by_task)}."
    )


def _largest(tasks: Mapping[str, Task], by_task) -> str:
    def of(both):
        ratios = median_ratio(squared_errors(*_pair(both)))
        found = np.where(np.isfinite(ratios), ratios, -np.inf)
        if not np.isfinite(found).any():
            return "none"
        damping = both[DESCENT]["damping"][0, found.argmax()]
        return f"{found.max():.3g} at lambda = {damping:.3g}"

    return "; ".join(f"{task.title}: {of(by_task[name])}" for name, task in tasks.items())


#
# The filters
#


def _shown(settings: AnySettings) -> list[int]:
    """Return the indices of three strengths; the second is in the middle of the grid."""
    indices = range(len(settings.periods))
    return np.quantile(indices, [1 / 4, 1 / 2, 3 / 4]).astype(int).tolist()


def _draw_filters(
    path: Path,
    tasks: Mapping[str, Task],
    periods: Sequence[float],
    shown: Sequence[int],
    spectra: Mapping[str, Float[ndarray, "strengths m"]],
) -> None:
    """Draw the fraction of each eigencomponent that is solved, above the kernel's
    eigenvalues."""
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
            unique.values(), unique, loc="outside lower center", ncols=2 * len(tasks)
        )


def _draw_fractions(
    axes: Axes, task: Task, periods: Sequence[float], shown: Sequence[int]
) -> None:
    w = jnp.geomspace(
        task.damping(max(periods)) / 10, task.damping(min(periods)) * 10, 400
    )
    # Labels at one height would overlap if the eigenvalues span many decades.
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
