"""The headline: K steps on each linearised model against damping 1/(eta K), on one axis.

Two ways to solve each linearised problem only so far, swept over six orders of magnitude:
stop its descent after K steps of size eta, or damp it by lambda. At lambda = 1/(eta K)
their spectral filters are nearly the same. Are the networks they train?

Tasks: a quintic by a 5-layer network, and 40 handwritten digits by a small one, both with
squared error, full batch, a fixed number of outer steps, and several initialisations,
each of which both solvers start from. The learning rate keeps eta times the kernel's
largest eigenvalue below 2; runs that diverge all the same are counted, and no mean is
taken over what they left.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import scipy.stats
from jaxtyping import Array, Bool, Float, PyTree, Scalar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from threadpoolctl import threadpool_limits

import gnlin

from .. import _results, figures
from .._options import Options
from ..data import digits, quintic
from ..networks.mlp import digits_mlp, quintic_mlp


NUM_SEEDS, NUM_SEEDS_QUICK = 5, 2
SMALLEST_PERIOD, LARGEST_PERIOD = 1e2, 1e8
PER_DECADE, PER_DECADE_QUICK = 2, 0.5

DESCENT, DAMPED = "iterative-linearisation", "damped-gauss-newton"
SOLVERS = (DESCENT, DAMPED)

Data = tuple[Float[np.ndarray, "n *inputs"], Float[np.ndarray, "n *outputs"]]


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    title: str
    train: Data
    test: Data
    make_model: Callable[[Array], eqx.Module]
    test_error: Callable[[Array, Array], Scalar]
    """Of predictions and targets."""
    error_label: str
    classifies: bool
    learning_rate: float
    max_steps: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One run."""

    task: str
    solver: str
    seed: int
    effective_damping: float
    period: float | None
    damping: float | None
    train_loss: float
    test_error: float
    test_accuracy: float | None
    distance: float
    """2-norm of all parameters' change since initialisation."""
    kernel_alignment: float
    """Cosine of the final kernel with the initial one, centred over the examples."""
    largest_eigenvalue: float
    """Of the final kernel: descent is stable while eta times it stays below 2."""
    result: str
    feature_updates: int
    inner_steps: float

    @property
    def stable(self) -> bool:
        return self.result in ("successful", "nonlinear_max_steps_reached")


@dataclasses.dataclass(frozen=True)
class Curve:
    """One solver's runs on one task: a row a seed, a column a strength."""

    error: Float[np.ndarray, "seeds strengths"]
    alignment: Float[np.ndarray, "seeds strengths"]
    stable: Bool[np.ndarray, "seeds strengths"]

    @property
    def usable(self) -> np.ndarray:
        """The strengths at which no run diverged."""
        return self.stable.all(axis=0)

    def mean(self, values: np.ndarray) -> np.ndarray:
        return np.where(self.usable, values.mean(axis=0), np.nan)

    @property
    def mean_error(self) -> np.ndarray:
        return self.mean(self.error)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How well a task's two curves of mean test error agree."""

    num_strengths: int
    """Those at which all runs of both solvers are stable; the others are left out."""
    mean_difference: float
    """Mean absolute difference, relative to the range of both curves."""
    largest_difference: float
    correlation_of_curves: float
    """Spearman's, of one curve with the other."""
    correlation_with_damping: dict[str, float]
    """Spearman's, of each solver's test error with the damping."""


def run(options: Options) -> None:
    """Sweep, then write the CSV, the settings and the figures, and print a summary."""
    start = time.perf_counter()
    console = Console()
    num_seeds = options.seeds or (NUM_SEEDS_QUICK if options.quick else NUM_SEEDS)
    periods = _periods(PER_DECADE_QUICK if options.quick else PER_DECADE)
    tasks = _tasks(options.quick)

    rows, spectra = _sweep(tasks, periods, num_seeds, console)

    agreements = {}
    for task in tasks:
        curves = {s: _curve(rows, task.name, s, num_seeds) for s in SOLVERS}
        agreements[task.name] = _agreement(curves, _dampings(task, periods))
        _print_table(console, task, periods, curves, agreements[task.name])

    out = options.out
    _results.write_csv(out / "k_vs_lambda.csv", rows)
    _draw_sweeps(out / "k_vs_lambda.png", tasks, periods, rows, num_seeds)
    _draw_filters(out / "filters.png", tasks, periods, spectra)
    seconds = time.perf_counter() - start
    settings = {
        "seeds": num_seeds,
        "quick": options.quick,
        "periods": periods.tolist(),
        "tasks": [_settings(task) for task in tasks],
        "agreement": {name: dataclasses.asdict(a) for name, a in agreements.items()},
        "diverged": sum(not row.stable for row in rows),
        "wall_seconds": round(seconds, 1),
        **_results.circumstances(),
    }
    _results.write_json(out / "settings.json", settings)
    console.print(
        f"{len(rows)} runs, {settings['diverged']} diverged, {seconds:.0f} s. "
        f"In {out}: k_vs_lambda.csv, k_vs_lambda.png, filters.png, settings.json.",
        soft_wrap=True,
        highlight=False,
    )


#
# What is run
#


def _tasks(quick: bool) -> tuple[Task, ...]:
    # Both rates leave a factor of two or more to 2/w for the largest eigenvalue w met in
    # training: w reaches 1e6 on the quintic (from 50 at initialisation), 1.5e3 on digits.
    digits_train, digits_test = digits.examples(per_class=2 if quick else 4)
    return (
        Task(
            name="quintic",
            title="Quintic, 20 points, 7,801 parameters",
            train=quintic.examples(20),
            test=quintic.examples(1000),
            make_model=quintic_mlp,
            test_error=_root_mean_square,
            error_label="Test error (RMSE)",
            classifies=False,
            learning_rate=1e-7,
            max_steps=20 if quick else 150,
        ),
        Task(
            name="digits",
            title=f"Digits, {len(digits_train[0])} images, 3,010 parameters",
            train=digits_train,
            test=digits_test,
            make_model=digits_mlp,
            test_error=_error_rate,
            error_label="Test error (fraction wrong)",
            classifies=True,
            learning_rate=1e-5,
            max_steps=5 if quick else 20,
        ),
    )


def _periods(per_decade: float) -> Float[np.ndarray, " strengths"]:
    low, high = np.log10([SMALLEST_PERIOD, LARGEST_PERIOD])
    return np.round(np.logspace(low, high, round((high - low) * per_decade) + 1))


def _dampings(task: Task, periods: np.ndarray) -> Float[np.ndarray, " strengths"]:
    return np.asarray(gnlin.equivalent_damping(periods, task.learning_rate))


def _solver(name: str, period: Scalar, learning_rate: float) -> gnlin.AbstractGaussNewton:
    if name == DESCENT:
        return gnlin.IterativeLinearisation(period, learning_rate)
    return gnlin.DampedGaussNewton(gnlin.equivalent_damping(period, learning_rate))


def _root_mean_square(predictions: Array, targets: Array) -> Scalar:
    return jnp.sqrt(jnp.mean((predictions - targets) ** 2))


def _error_rate(predictions: Array, targets: Array) -> Scalar:
    return jnp.mean(jnp.argmax(predictions, axis=1) != jnp.argmax(targets, axis=1))


#
# The runs: all strengths at once, by vmap, and one compiled program a task and solver
#


def _sweep(
    tasks: Sequence[Task], periods: np.ndarray, num_seeds: int, console: Console
) -> tuple[list[Row], dict[str, Float[np.ndarray, "strengths+1 m"]]]:
    """Every run's row; and for each task the eigenvalues of the first seed's kernel, at
    initialisation and after descent at each strength."""
    rows, spectra = [], {}
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn())
    # LAPACK's threads and XLA's wait for each other on these small matrices: on a busy
    # machine that takes a hundred times as long as one thread does.
    with (
        threadpool_limits(1, user_api="blas"),
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
    ):
        bar = progress.add_task("", total=len(tasks) * len(SOLVERS) * num_seeds)
        for task in tasks:
            for solver in SOLVERS:
                for seed in range(num_seeds):
                    progress.update(bar, description=f"{task.name}, {solver}")
                    new_rows, spectrum = _runs(task, solver, seed, periods)
                    rows += new_rows
                    if solver == DESCENT and seed == 0:
                        spectra[task.name] = spectrum
                    progress.advance(bar)
    return rows, spectra


def _runs(
    task: Task, solver: str, seed: int, periods: np.ndarray
) -> tuple[list[Row], Float[np.ndarray, "strengths+1 m"]]:
    """One initialisation trained at all strengths."""
    model = task.make_model(jax.random.key(seed))
    solution = _train(
        model, task.train, periods, solver, task.learning_rate, task.max_steps
    )
    measured = jax.device_get(
        _measure(model, solution.model, task.train, task.test, task.test_error)
    )
    stats = jax.device_get(solution.stats)
    damping, error = _dampings(task, periods), measured["test_error"]
    unset = [None] * len(periods)
    columns = {
        "effective_damping": damping.tolist(),
        "period": periods.tolist() if solver == DESCENT else unset,
        "damping": damping.tolist() if solver == DAMPED else unset,
        "train_loss": measured["train_loss"].tolist(),
        "test_error": error.tolist(),
        "test_accuracy": (1 - error).tolist() if task.classifies else unset,
        "distance": measured["distance"].tolist(),
        "kernel_alignment": measured["kernel_alignment"].tolist(),
        "largest_eigenvalue": measured["spectrum"][:, -1].tolist(),
        "result": _result_names(solution.result).tolist(),
        "feature_updates": stats["num_feature_updates"].tolist(),
        "inner_steps": stats["num_inner_steps"].tolist(),
    }
    rows = [
        Row(task.name, solver, seed, *values)
        for values in zip(*columns.values(), strict=True)
    ]
    return rows, np.vstack([measured["initial_spectrum"], measured["spectrum"]])


def _result_names(results: Any) -> np.ndarray:
    """The names of optimistix's results, of an array of them."""
    names = (
        "successful",
        "nonlinear_max_steps_reached",
        "nonlinear_divergence",
        "nonfinite",
    )
    matches = [np.asarray(results == getattr(optx.RESULTS, name)) for name in names]
    return np.select(matches, names, "other")


@eqx.filter_jit
def _train(
    model: eqx.Module,
    data: Data,
    periods: Float[Array, " strengths"],
    solver: str,
    learning_rate: float,
    max_steps: int,
) -> gnlin.Solution:
    def at_strength(period):
        return gnlin.solve(
            model, data, _solver(solver, period, learning_rate), max_steps=max_steps
        )

    return eqx.filter_vmap(at_strength)(periods)


@eqx.filter_jit
def _measure(
    initial: eqx.Module,
    trained: eqx.Module,
    train: Data,
    test: Data,
    test_error: Callable[[Array, Array], Scalar],
) -> dict[str, Array]:
    """Of models along a leading axis, all trained from one."""
    num_examples = train[0].shape[0]
    first, frozen = eqx.partition(initial, eqx.is_inexact_array)
    first_kernel = _kernel(first, frozen, train)
    first_centred = _centred(first_kernel, num_examples)

    def one(model):
        parameters, frozen = eqx.partition(model, eqx.is_inexact_array)
        kernel = _kernel(parameters, frozen, train)
        residual = jax.vmap(model)(train[0]) - train[1]
        changes = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), parameters, first)
        return {
            "train_loss": 0.5 * jnp.sum(residual**2),
            "test_error": test_error(jax.vmap(model)(test[0]), test[1]),
            "distance": jnp.sqrt(sum(jax.tree.leaves(changes))),
            "kernel_alignment": _cosine(_centred(kernel, num_examples), first_centred),
            "spectrum": jnp.linalg.eigvalsh(kernel),
        }

    return eqx.filter_vmap(one)(trained) | {
        "initial_spectrum": jnp.linalg.eigvalsh(first_kernel)
    }


def _kernel(parameters: PyTree, frozen: PyTree, data: Data) -> Float[Array, "m m"]:
    def outputs(parameters, x):
        return eqx.combine(parameters, frozen)(x)

    return gnlin.linearise(gnlin.PerExample(outputs), parameters, data[0]).kernel()


def _centred(kernel: Float[Array, "m m"], num_examples: int) -> Array:
    """The kernel of features from which their mean over the examples is taken, for each
    output by itself."""
    blocks = kernel.reshape(num_examples, -1, num_examples, kernel.shape[0] // num_examples)
    for examples in (0, 2):
        blocks = blocks - blocks.mean(axis=examples, keepdims=True)
    return blocks


def _cosine(a: Array, b: Array) -> Scalar:
    return jnp.sum(a * b) / (jnp.linalg.norm(a.ravel()) * jnp.linalg.norm(b.ravel()))


#
# What came out
#


def _curve(rows: Sequence[Row], task: str, solver: str, num_seeds: int) -> Curve:
    chosen = [row for row in rows if (row.task, row.solver) == (task, solver)]

    def table(column):
        return np.array([getattr(row, column) for row in chosen]).reshape(num_seeds, -1)

    return Curve(*map(table, ("test_error", "kernel_alignment", "stable")))


def _agreement(curves: dict[str, Curve], dampings: np.ndarray) -> Agreement:
    usable = curves[DESCENT].usable & curves[DAMPED].usable
    a, b = (curves[solver].mean_error[usable] for solver in SOLVERS)
    difference, both = np.abs(a - b), np.concatenate([a, b])
    scale = np.ptp(both)

    def rank_correlation(x, y):
        return float(scipy.stats.spearmanr(x, y).statistic)

    return Agreement(
        num_strengths=int(usable.sum()),
        mean_difference=float(difference.mean() / scale),
        largest_difference=float(difference.max() / scale),
        correlation_of_curves=rank_correlation(a, b),
        correlation_with_damping={
            solver: rank_correlation(mean, dampings[usable])
            for solver, mean in zip(SOLVERS, (a, b), strict=True)
        },
    )


def _print_table(
    console: Console,
    task: Task,
    periods: np.ndarray,
    curves: dict[str, Curve],
    agreement: Agreement,
) -> None:
    table = Table(title=f"{task.title}: {task.error_label[0].lower()}{task.error_label[1:]}")
    for heading in ("K", "lambda", "K runs", "lambda runs", "difference"):
        table.add_column(heading, justify="right")
    columns = [_cells(curves[solver]) for solver in SOLVERS]
    difference = curves[DESCENT].mean_error - curves[DAMPED].mean_error
    for period, damping, a, b, d in zip(
        periods, _dampings(task, periods), *columns, difference, strict=True
    ):
        gap = "" if np.isnan(d) else f"{d:+.3f}"
        table.add_row(f"{period:.3g}", f"{damping:.3g}", a, b, gap)
    console.print(table)
    correlations = agreement.correlation_with_damping
    console.print(
        f"Over the {agreement.num_strengths} strengths at which every run is stable the "
        f"two curves differ by {agreement.mean_difference:.1%} of their range on average, "
        f"{agreement.largest_difference:.1%} at most; their rank correlation is "
        f"{agreement.correlation_of_curves:.2f}, with the damping "
        f"{correlations[DESCENT]:.2f} (K) and {correlations[DAMPED]:.2f} (lambda).\n",
        highlight=False,
    )


def _cells(curve: Curve) -> list[str]:
    lost = (~curve.stable).sum(axis=0)
    return [
        f"{mean:.3f}" if n == 0 else f"{n} of {len(curve.stable)} diverged"
        for mean, n in zip(curve.mean_error, lost, strict=True)
    ]


#
# Figures
#

LOOKS = {
    DESCENT: {
        "label": "K gradient steps on each linearised model",
        "color": figures.BLUE,
        "marker": "o",
    },
    DAMPED: {
        "label": "damped Gauss-Newton",
        "color": figures.VERMILION,
        "marker": "s",
        "linestyle": "--",
        "markerfacecolor": "white",
    },
}
DAMPING_LABEL = r"Effective damping  $\lambda = 1/(\eta K)$"


def _draw_sweeps(
    path: Path,
    tasks: Sequence[Task],
    periods: np.ndarray,
    curves: dict[str, dict[str, Curve]],
) -> None:
    """Test error and kernel alignment against strength: a column a task."""
    with figures.figure(path, height=7.0) as figure:
        axes = figure.subplots(2, len(tasks), sharex="col")
        for (top, bottom), task in zip(axes.T, tasks, strict=True):
            dampings = _dampings(task, periods)
            for solver, curve in curves[task.name].items():
                _draw_curve(top, dampings, curve, curve.error, solver)
                _draw_curve(bottom, dampings, curve, curve.alignment, solver)
            top.set(title=task.title, ylabel=task.error_label, xscale="log")
            bottom.set(xlabel=DAMPING_LABEL, ylabel="Alignment with the initial kernel")
            if not task.classifies:
                top.set_yscale("log")
            _add_period_axis(top, task.learning_rate)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def _draw_curve(
    axes: Axes, dampings: np.ndarray, curve: Curve, values: np.ndarray, solver: str
) -> None:
    axes.plot(dampings, curve.mean(values), **LOOKS[solver])
    low, high = (np.where(curve.usable, f(values, axis=0), np.nan) for f in (np.min, np.max))
    axes.fill_between(dampings, low, high, color=LOOKS[solver]["color"], alpha=0.15, lw=0)
    for damping, lost in zip(dampings, (~curve.stable).sum(axis=0), strict=True):
        if lost:
            axes.annotate(
                f"x {lost}",
                (damping, 0.97),
                xycoords=("data", "axes fraction"),
                color=LOOKS[solver]["color"],
                ha="center",
                fontsize=8,
            )


def _add_period_axis(axes: Axes, learning_rate: float) -> None:
    def other(strength):  # K of lambda and lambda of K: the same formula
        return 1 / (learning_rate * np.maximum(strength, np.finfo(float).tiny))

    top = axes.secondary_xaxis("top", functions=(other, other))
    top.set_xlabel(rf"Period $K$  ($\eta = ${learning_rate:.0e})")


def _draw_filters(
    path: Path,
    tasks: Sequence[Task],
    periods: np.ndarray,
    spectra: dict[str, np.ndarray],
) -> None:
    """How much of each eigencomponent is solved, above the kernel's own eigenvalues."""
    with figures.figure(path, height=6.0) as figure:
        axes = figure.subplots(
            2, len(tasks), sharex="col", sharey="row", height_ratios=(3, 1)
        )
        for (top, bottom), task in zip(axes.T, tasks, strict=True):
            _draw_fractions(top, task, periods)
            _draw_spectra(bottom, spectra[task.name], len(periods) // 2)
            top.set(title=task.title, xscale="log")
            bottom.set_xlabel("Eigenvalue $w$ of the kernel")
        axes[0, 0].set_ylabel("Fraction solved, $w\\,g(w)$")
        axes[1, 0].set_ylabel("Eigenvalues")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
