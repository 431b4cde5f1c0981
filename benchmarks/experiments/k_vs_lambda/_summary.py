"""How well the two curves agree."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float
from rich.console import Console
from rich.table import Table

from ...verdicts import rank_correlation
from ._sweep import DAMPED, DESCENT, Row, SOLVERS
from ._tasks import Task


PerRun = Float[np.ndarray, "seeds strengths"]
PerStrength = Float[np.ndarray, " strengths"]

FEWEST_STRENGTHS = 3
"""Of fewer, a correlation says nothing."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """One solver's runs on one task."""

    damping: PerStrength
    error: PerRun
    alignment: PerRun
    stable: Bool[np.ndarray, "seeds strengths"]

    @property
    def num_diverged(self) -> np.ndarray:
        return (~self.stable).sum(axis=0)

    def where_stable(self, values: PerStrength) -> PerStrength:
        """NaN at the strengths at which a run diverged."""
        return np.where(self.num_diverged == 0, values, np.nan)

    @property
    def mean_error(self) -> PerStrength:
        return self.where_stable(self.error.mean(axis=0))


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How well two curves of mean test error agree where every run is stable.

    Differences are relative to the range that the two curves span; correlations are
    Spearman's. What too few strengths, or a flat curve, leave undefined is `None`.
    """

    num_strengths: int
    mean_difference: float | None
    largest_difference: float | None
    correlation: float | None
    correlation_of_descent_with_damping: float | None
    correlation_of_damped_with_damping: float | None


def curve_of(rows: Sequence[Row], task: str, solver: str) -> Curve:
    chosen = [row for row in rows if (row.task, row.solver) == (task, solver)]
    num_seeds = len({row.seed for row in chosen})

    def table(column):
        return np.array([getattr(row, column) for row in chosen]).reshape(num_seeds, -1)

    return Curve(
        damping=table("effective_damping")[0],
        error=table("test_error"),
        alignment=table("kernel_alignment"),
        stable=table("stable"),
    )


def agreement_of(curves: dict[str, Curve]) -> Agreement:
    """Of the curves of both solvers on one task."""
    a, b = (curves[solver].mean_error for solver in SOLVERS)
    usable = np.isfinite(a) & np.isfinite(b)
    if usable.sum() < FEWEST_STRENGTHS:
        return Agreement(int(usable.sum()), None, None, None, None, None)
    a, b, damping = a[usable], b[usable], curves[DESCENT].damping[usable]
    relative = np.abs(a - b) / (np.ptp([a, b]) or 1.0)
    return Agreement(
        num_strengths=int(usable.sum()),
        mean_difference=float(relative.mean()),
        largest_difference=float(relative.max()),
        correlation=_or_none(rank_correlation(a, b)),
        correlation_of_descent_with_damping=_or_none(rank_correlation(a, damping)),
        correlation_of_damped_with_damping=_or_none(rank_correlation(b, damping)),
    )


def _or_none(correlation: PerStrength) -> float | None:
    return None if np.isnan(correlation) else float(correlation)


def print_table(
    console: Console, task: Task, curves: dict[str, Curve], agreement: Agreement
) -> None:
    """Mean test errors, strength by strength, and a sentence on them."""
    descent, damped = curves[DESCENT], curves[DAMPED]
    table = Table(
        title=f"{task.title}. Mean {task.error_label}, {len(descent.error)} seeds"
    )
    for heading in ("K", "lambda", "by K steps", "by damping", "difference"):
        table.add_column(heading, justify="right")
    differences = descent.mean_error - damped.mean_error
    for damping, first, second, difference in zip(
        descent.damping, _cells(descent), _cells(damped), differences, strict=True
    ):
        table.add_row(
            f"{1 / (task.learning_rate * damping):.3g}",
            f"{damping:.3g}",
            first,
            second,
            f"{difference:+.3f}" if np.isfinite(difference) else "",
        )
    console.print(table)
    console.print(_sentence(agreement), highlight=False)


def _cells(curve: Curve) -> list[str]:
    return [
        f"{diverged} of {len(curve.stable)} diverged" if diverged else f"{mean:.3f}"
        for mean, diverged in zip(curve.mean_error, curve.num_diverged, strict=True)
    ]


def _sentence(agreement: Agreement) -> str:
    if agreement.mean_difference is None:
        return "Too few strengths are stable to compare the curves.\n"
    return (
        f"At the {agreement.num_strengths} strengths where every run is stable the "
        f"curves differ by {agreement.mean_difference:.1%} of their range on average and "
        f"{agreement.largest_difference:.1%} at most. Spearman's correlation: of the "
        f"curves {_shown(agreement.correlation)}, of test error with damping "
        f"{_shown(agreement.correlation_of_descent_with_damping)} (by K steps) and "
        f"{_shown(agreement.correlation_of_damped_with_damping)} (by damping).\n"
    )


def _shown(correlation: float | None) -> str:
    return "undefined" if correlation is None else f"{correlation:.2f}"
