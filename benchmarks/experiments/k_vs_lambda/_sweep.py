"""The runs: all strengths at once, by `vmap`, one compiled program a task and solver."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, Float, Scalar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from threadpoolctl import threadpool_limits

import gnlin

from ._tasks import Data, Task


DESCENT, DAMPED = "iterative-linearisation", "damped-gauss-newton"
SOLVERS = (DESCENT, DAMPED)

Spectra = Float[np.ndarray, "strengths+1 m"]
"""A kernel's eigenvalues, ascending: at initialisation, then as trained, by strength."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One run. What a solver does not have, the other one's parameter, is `None`."""

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
    """2-norm of the parameters' change since initialisation."""
    kernel_alignment: float
    """Cosine of the trained kernel with the initial one, both centred over examples."""
    largest_eigenvalue: float
    """Of the trained kernel."""
    result: str
    feature_updates: int
    inner_steps: float

    @property
    def stable(self) -> bool:
        return self.result in ("successful", "nonlinear_max_steps_reached")


def sweep(
    tasks: Sequence[Task], periods: Sequence[float], num_seeds: int, console: Console
) -> tuple[list[Row], dict[str, Spectra]]:
    """All rows; and of each task the spectra of the first seed's runs by descent."""
    rows, spectra = [], {}
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn())
    # LAPACK's threads and XLA's wait for each other on matrices as small as these: on a
    # busy machine that takes a hundred times as long as one thread does.
    with (
        threadpool_limits(1, user_api="blas"),
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
    ):
        bar = progress.add_task("", total=len(tasks) * len(SOLVERS) * num_seeds)
        for task in tasks:
            for solver in SOLVERS:
                for seed in range(num_seeds):
                    progress.update(bar, description=f"{task.name}, {solver}")
                    new_rows, new_spectra = _run(task, solver, seed, periods)
                    rows += new_rows
                    if solver == DESCENT and seed == 0:
                        spectra[task.name] = new_spectra
                    progress.advance(bar)
        progress.update(bar, description="all runs")
    return rows, spectra


def _make_solver(
    name: str, period: Scalar, learning_rate: float
) -> gnlin.AbstractGaussNewton:
    """Either solver at the strength that a period stands for."""
    if name == DESCENT:
        return gnlin.IterativeLinearisation(period=period, learning_rate=learning_rate)
    damping = gnlin.equivalent_damping(period, learning_rate)
    return gnlin.DampedGaussNewton(damping=damping)


def _run(
    task: Task, solver: str, seed: int, periods: Sequence[float]
) -> tuple[list[Row], Spectra]:
    """One initialisation, trained at all strengths."""
    model = task.make_model(jax.random.key(seed))
    rate, steps = task.learning_rate, task.max_steps
    solution = _train(model, task.train, jnp.asarray(periods), solver, rate, steps)
    measured = _measure(model, solution.model, task.train, task.test, task.test_error)
    stats, measured = jax.device_get((solution.stats, measured))

    damping = list(map(task.damping, periods))
    error = measured["test_error"]
    missing = [None] * len(periods)
    columns = {
        "effective_damping": damping,
        "period": list(periods) if solver == DESCENT else missing,
        "damping": damping if solver == DAMPED else missing,
        "train_loss": measured["train_loss"].tolist(),
        "test_error": error.tolist(),
        "test_accuracy": (1 - error).tolist() if task.classifies else missing,
        "distance": measured["distance"].tolist(),
        "kernel_alignment": measured["kernel_alignment"].tolist(),
        "largest_eigenvalue": measured["spectrum"][:, -1].tolist(),
        "result": _names(solution.result),
        "feature_updates": stats["num_feature_updates"].tolist(),
        "inner_steps": stats["num_inner_steps"].tolist(),
    }
    rows = [
        Row(task.name, solver, seed, **dict(zip(columns, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    ]
    return rows, np.vstack([measured["initial_spectrum"], measured["spectrum"]])


@eqx.filter_jit
def _train(
    model: eqx.Module,
    data: Data,
    periods: Float[Array, " strengths"],
    solver: str,
    learning_rate: float,
    max_steps: int,
) -> gnlin.Solution:
    """One model at each strength, along a new leading axis of all arrays."""

    def at(period):
        chosen = _make_solver(solver, period, learning_rate)
        return gnlin.solve(model, data, chosen, max_steps=max_steps)

    return eqx.filter_vmap(at)(periods)


@eqx.filter_jit
def _measure(
    initial: eqx.Module,
    trained: eqx.Module,
    train: Data,
    test: Data,
    test_error: Callable[[Array, Array], Scalar],
) -> dict[str, Array]:
    """What is to be known of the models along a leading axis that began as one."""
    first_kernel = gnlin.features.kernel(initial, train[0])

    def one(model):
        kernel = gnlin.features.kernel(model, train[0])
        residual = jax.vmap(model)(train[0]) - train[1]
        return {
            "train_loss": 0.5 * jnp.sum(residual**2),
            "test_error": test_error(jax.vmap(model)(test[0]), test[1]),
            "distance": gnlin.features.distance(model, initial),
            "kernel_alignment": gnlin.features.kernel_alignment(kernel, first_kernel),
            "spectrum": _eigenvalues(kernel),
        }

    spectrum = _eigenvalues(first_kernel)
    return eqx.filter_vmap(one)(trained) | {"initial_spectrum": spectrum}


def _eigenvalues(kernel: Float[Array, "n c n c"]) -> Float[Array, " m"]:
    m = kernel.shape[0] * kernel.shape[1]
    return jnp.linalg.eigvalsh(kernel.reshape(m, m))


def _names(results: Any) -> list[str]:
    """optimistix's name of each result in an array of them."""
    names = (
        "successful",
        "nonlinear_max_steps_reached",
        "nonlinear_divergence",
        "nonfinite",
    )
    matches = [np.asarray(results == getattr(optx.RESULTS, name)) for name in names]
    return np.select(matches, names, "other").tolist()
