"""The report that a fit prints."""

from typing import TYPE_CHECKING

import jax
import numpy as np

from .._common._canonical import Program
from .._common._words import abridged, aligned, how_many, names_of, rounded
from ..losses._base import has_observed_root
from ._advice import different_ends, starts_at_best
from ._ending import some_directions
from ._likelihood import is_known
from ._points import listed, num_of, total
from ._residuals import num_points, outlying, points


if TYPE_CHECKING:
    from ._result import CurveFit

# Correlations below this are not reported.
_LEAST_CORRELATION = 0.1
_MOST_CORRELATIONS, _MOST_OUTLIERS = 10, 10
# Where the parameters are that the table leaves out.
_ELSEWHERE = "`fit.parameters` and `fit.standard_errors`"


def report(fit: "CurveFit") -> str:
    """Return a summary, with a table of the parameters."""
    number = how_many(len(fit.names), "free parameter")
    if num_held := np.count_nonzero(fit._end.at_bound):
        number += f", {num_held} of them at a bound"
    sizes = [np.size(leaf) for leaf in jax.tree.leaves(fit.parameters)]
    lines = [
        f"{fit.reason}: {_how_many(fit)}, {number}",
        *_how_well(fit),
        "",
        *abridged(aligned(_rows(fit)), sizes, f", in {_ELSEWHERE}"),
    ]
    pairs = _correlations(fit)
    if pairs:
        lines += ["", f"correlations of at least {_LEAST_CORRELATION:g}:"]
        largest = pairs[:_MOST_CORRELATIONS]
        lines += [f"  {a}, {b}: {value:+.3f}" for value, a, b in largest]
        if len(pairs) > len(largest):
            more = how_many(len(pairs) - len(largest), "smaller one")
            lines.append(f"  and {more}")
    if fit.residuals is not None and fit._setting.is_robust:
        outliers = points(fit, outlying(fit))
        if number := total(outliers):
            at = f"at {'point' if number == 1 else 'points'}"
            where = listed(outliers, _MOST_OUTLIERS)
            lines += ["", f"{how_many(number, 'outlier')}, {at} {where}"]
    if fit.losses is not None and np.isfinite(fit.losses[0]):
        losses, number = np.asarray(fit.losses), different_ends(fit)
        where = f", at {number} different values of the parameters" * (number > 1)
        lines += [
            "",
            f"{starts_at_best(fit)} of {losses.size} starts reached the best loss, "
            f"{losses[0]:.6g}{where}; the worst loss is {losses[-1]:.6g}",
        ]
    if undetermined := some_directions(fit, "; "):
        lines += ["", f"not determined: {undetermined}"]
    return "\n".join(lines)


def _how_many(fit: "CurveFit") -> str:
    """Return the number of points, and of their real numbers if these are more."""
    numbers = int(fit._end.num_points)
    if fit._data is None:  # A program for parts says how many numbers a point has.
        f = fit._setting.curve.f
        are_points = not isinstance(f, Program) or len(set(num_of(f.outputs))) == 1
        return how_many(numbers, "point" if are_points else "number")
    number = num_points(fit)
    of = " of " + how_many(numbers, "number")
    return how_many(number, "point") + of * (numbers != number)


def _how_well(fit: "CurveFit") -> list[str]:
    number = round(float(fit.degrees_of_freedom))
    dof = f"({how_many(number, 'degree')} of freedom)"
    criteria = f", AIC {float(fit.aic):.4g}, BIC {float(fit.bic):.4g}"
    criteria = "" if np.isnan(fit.aic) else criteria
    chi_squared = float(fit.chi_squared)
    loss = fit._setting.likelihood
    if loss is not None:
        pearson = f", Pearson's chi-squared {chi_squared:.6g}"
        pearson = "" if has_observed_root(loss) else pearson
        lines = [f"deviance {float(fit.deviance):.6g}{pearson} {dof}{criteria}"]
        if fit.residuals is not None and is_known(loss):
            p = fit.runs_test()
            lines.append(f"runs test of the residuals' signs: p = {p:.2g}")
        return lines
    reduced = float(fit.reduced_chi_squared)
    lines = [f"chi-squared {chi_squared:.6g}, reduced {reduced:.4g} {dof}{criteria}"]
    if fit._setting.knows_noise and number > 0:
        lines.append(f"chi-squared test: p = {fit.chi_squared_test():.2g}")
    if fit._setting.is_robust:
        lines.append("standard errors by Huber's sandwich estimator from the residuals")
    return lines


def _rows(fit: "CurveFit") -> list[tuple[str, str, str, str]]:
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    columns = (
        names_of(fit.parameters),
        flat(fit.parameters),
        flat(fit.standard_errors),
        flat(fit.at_bound),
        flat(fit.multipliers),
    )
    notes = dict.fromkeys(names_of(fit._curve.fixed), "fixed")
    for flags, note in (
        (~np.asarray(fit._end.covariance.determined), "not determined"),
        (fit._hidden.vanishing, "error unknown: its derivative is zero here"),
        (fit._hidden.missing, "not fitted: its derivative is zero"),
    ):
        notes |= dict.fromkeys(np.array(fit.names)[np.asarray(flags)].tolist(), note)
    rows = []
    for name, value, error, side, multiplier in zip(*columns, strict=True):
        known = ""
        if side != 0:
            which = "upper" if side > 0 else "lower"
            note = f"at its {which} bound, multiplier {multiplier:.3g}"
        elif name in notes:
            note = notes[name]
        elif not np.isfinite(error):
            note = "error unknown"
        else:
            known = f"± {error:.3g}"
            note = f"({100 * error / abs(value):.2g} %)" if value != 0 else ""
        rows.append((name, rounded(value, error if known else np.nan), known, note))
    return rows


def _correlations(fit: "CurveFit") -> list[tuple[float, str, str]]:
    matrix = np.asarray(fit.covariance_matrix)
    errors = np.sqrt(np.diagonal(matrix))
    with np.errstate(all="ignore"):
        values = np.triu(matrix / np.outer(errors, errors), 1)
    pairs = np.argwhere(np.isfinite(values) & (np.abs(values) >= _LEAST_CORRELATION))
    names = fit.names
    found = [(float(values[i, j]), names[i], names[j]) for i, j in pairs]
    return sorted(found, key=lambda pair: -abs(pair[0]))
