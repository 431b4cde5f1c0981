"""The strengths at which K steps and damping can be compared, and their difference."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpy import ndarray

from gnlin import filters

from ...experiment import Runs
from ...thresholds import MOST_UNFINISHED, PART_OF_GUESSING
from ._tasks import Task


DESCENT, DAMPED = "iterative-linearisation", "damped-gauss-newton"
SOLVERS = (DESCENT, DAMPED)
ALIKE = 0.1
"""Up to this ratio x of the largest eigenvalue to lambda, the filters are equal by
construction: 1 - exp(-x) and x / (1 + x) differ by less than 5 %."""

PerStrength = Float[ndarray, " strengths"]
PerRun = Float[ndarray, "seeds strengths"]


def eigenvalues(kernel: Float[Array, "..."]) -> Float[Array, " m"]:
    m = math.isqrt(kernel.size)
    return jnp.linalg.eigvalsh(kernel.reshape(m, m))


def num_diverged(runs: Runs) -> ndarray:
    """Return the number of diverged runs at each strength."""
    return np.sum(runs["stable"] == 0, axis=0)


def where_stable(runs: Runs, values: PerStrength) -> PerStrength:
    """Return the values, with NaN at the strengths at which a run has diverged."""
    return np.where(num_diverged(runs) == 0, values, np.nan)


def trained(runs: Runs) -> Bool[ndarray, "seeds strengths"]:
    small = runs["train_loss"] <= PART_OF_GUESSING * runs["guessing_loss"]
    return small & (runs["stable"] != 0)


def both_train(a: Runs, b: Runs) -> Bool[ndarray, " strengths"]:
    """Return at which strengths most runs of both methods are trained."""
    enough = 1 - MOST_UNFINISHED
    return (trained(a).mean(axis=0) >= enough) & (trained(b).mean(axis=0) >= enough)


def filters_differ(a: Runs, b: Runs) -> Bool[ndarray, " strengths"]:
    largest = np.fmax(a["largest_eigenvalue"], b["largest_eigenvalue"])
    return np.fmax.reduce(largest, axis=0) > ALIKE * a["damping"][0]


def compared(a: Runs, b: Runs) -> Bool[ndarray, " strengths"]:
    return both_train(a, b) & filters_differ(a, b)


def difference(task: Task, a: Runs, b: Runs) -> PerRun:
    """Return the difference of test errors, in the task's unit, at the strengths that are
    compared; NaN if one of the two runs is not trained."""
    first, second = a["test_error"], b["test_error"]
    if task.in_decades:
        with np.errstate(divide="ignore", invalid="ignore"):
            first, second = np.log10(first), np.log10(second)
    return np.where(trained(a) & trained(b) & compared(a, b), first - second, np.nan)


def more_thrown_off(a: Runs, b: Runs) -> PerRun:
    """Return 1 if only the first run is not trained, -1 if only the second is not, and 0
    otherwise; NaN at strengths at which neither method trains most of its runs, or the
    filters do not differ."""
    most = [trained(runs).mean(axis=0) >= 1 - MOST_UNFINISHED for runs in (a, b)]
    apart = trained(b).astype(float) - trained(a)
    return np.where((most[0] | most[1]) & filters_differ(a, b), apart, np.nan)


def apart(a: Runs, b: Runs, name: str) -> PerRun:
    """Return the difference of another column, where `difference` is known."""
    both = trained(a) & trained(b) & compared(a, b)
    return np.where(both, a[name] - b[name], np.nan)


def squared_errors(a: Runs, b: Runs) -> Float[ndarray, "seeds 2 strengths"]:
    """Return both mean squared test errors; NaN at strengths that are not compared."""
    both = np.stack([a["test_mse"], b["test_mse"]], axis=1)
    return np.where(compared(a, b), both, np.nan)


def median_ratio(errors: Float[ndarray, "seeds 2 strengths"]) -> PerStrength:
    """Return the median over the seeds of the first error over the second, without seeds
    for which the ratio is not finite."""
    ratios = errors[:, 0] / errors[:, 1]
    ratios = np.where(np.isfinite(ratios), ratios, np.nan)
    some = np.isfinite(ratios).any(axis=0)
    return np.where(some, np.nanmedian(np.where(some, ratios, 0), axis=0), np.nan)


def largest_ratio(errors: Float[ndarray, "seeds 2 strengths"]) -> float:
    known = median_ratio(errors)[np.isfinite(median_ratio(errors))]
    return float(known.max()) if len(known) else np.nan


#
# The effect of the filters
#


PerComponent = Float[ndarray, "seeds strengths m"]


def _spectrum(runs: Runs) -> PerComponent:
    return np.maximum(runs["spectrum"], 0)


def _solved_by_steps(task: Task, runs: Runs) -> PerComponent:
    """Return the fraction of each component of the final kernel that K steps solve."""

    def fraction(period, w):
        filter = filters.GradientDescent(period, task.learning_rate)
        return w * np.asarray(filter(jnp.asarray(w)))

    by_strength = zip(runs["period"][0], _spectrum(runs).swapaxes(0, 1), strict=True)
    return np.stack([fraction(period, w) for period, w in by_strength], axis=1)


def solves_more(task: Task, runs: Runs) -> PerRun:
    """Return how much more of the components of the final kernel K steps solve than
    damping of equal strength, mean over the components."""
    w = _spectrum(runs)
    damped = w / (w + runs["damping"][..., None])
    return np.mean(_solved_by_steps(task, runs) - damped, axis=-1)


def equal_damping(task: Task, runs: Runs) -> PerRun:
    """Find by bisection the damping that solves as much of the final kernel as K steps,
    in the sum over its components; NaN if it is below a thousandth of the damping of
    equal strength."""
    w, as_much = _spectrum(runs), np.sum(_solved_by_steps(task, runs), axis=-1)
    solves = lambda log: np.sum(w / (w + 10.0 ** log[..., None]), axis=-1)
    high = np.log10(runs["damping"]) + 1
    low = lowest = high - 4
    for _ in range(50):
        middle = (low + high) / 2
        more = solves(middle) > as_much
        low, high = np.where(more, middle, low), np.where(more, high, middle)
    found = solves(lowest) > as_much
    return np.where(found, 10.0**low, np.nan)


def difference_at_equal_solution(task: Task, a: Runs, b: Runs) -> PerRun:
    """Return the difference from damping that solves as much. Its errors are interpolated
    between the damped runs, linearly in the logarithm of the damping."""
    found, dampings = difference(task, a, b), equal_damping(task, a)
    errors = np.log10(b["test_error"]) if task.in_decades else b["test_error"]
    for seed, usable in enumerate(trained(b)):
        order = np.flatnonzero(usable)[np.argsort(b["damping"][seed][usable])]
        if len(order):
            found[seed] += errors[seed] - np.interp(
                np.log10(dampings[seed]),
                np.log10(b["damping"][seed][order]),
                errors[seed][order],
                left=np.nan,
                right=np.nan,
            )
    return found
