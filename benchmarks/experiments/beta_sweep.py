"""Truncated Gauss-Newton as beta varies: convergence, cost and generalisation.

Conjugate gradients solve each linearised problem until its gradient has fallen to beta
times its initial value. Theory promises that near a solution with zero residuals each
step then multiplies the network's gradient by at most beta. If beta itself falls with the
gradient, as in the rule of Eisenstat and Walker, convergence is superlinear, and its
order is the exponent of the rule. The rate and the order are measured in the last steps
whose gradients are above rounding. The networks interpolate their training data by
squared error, where classes become values of 0 and 1 minus their mean.

The paper's truncated Gauss-Newton solves each problem nearly completely, as very large K
does. So the second question is whether networks generalise worse as beta falls.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

import gnlin

from .. import scores, thresholds, training
from ..dry_run import Tally
from ..experiment import Experiment, only, Place, Point, Runs, select
from ..figures import band, BLACK, BLUE, figure, ORANGE, shades, VERMILION
from ..shortfall import short_of, TRAINED
from ..training import Columns, Images
from ..verdicts import at_ceiling, judge, slope, Verdict


FIXED, WALKER = "fixed beta", "Eisenstat-Walker"
ROUNDING = 1e-13
"""A gradient below this part of the first one may be rounding."""
SOLVED = 1e-8
"""A run has converged once its gradient is this part of the first one."""


@dataclasses.dataclass(frozen=True)
class BetaSweep(Images):
    seeds: int = 10
    tolerances: tuple[float, ...] = (0.5, 0.2, 0.1, 0.03, 0.01, 1e-3, 1e-4)
    """Fixed values of beta."""
    exponents: tuple[float, ...] = (1.5, 2.0)
    """Exponents of Eisenstat and Walker's rule for beta."""
    num_train: int | None = 30
    num_steps: int = 120
    """The largest number of outer steps."""


EMBEDDED = BetaSweep()
QUICK = dataclasses.replace(
    EMBEDDED, seeds=2, tolerances=(0.2, 0.1, 0.01), num_train=10, num_steps=60
)
FULL = dataclasses.replace(EMBEDDED, seeds=20, num_train=100, num_steps=300)


def points(settings: BetaSweep) -> list[Point]:
    return [
        *({"rule": FIXED, "tolerance": beta} for beta in settings.tolerances),
        *({"rule": WALKER, "exponent": each} for each in settings.exponents),
    ]


def train(settings: BetaSweep, point: Point, place: Place) -> Columns:
    """Train all seeds, with a look at each step. After an early end the last values are
    repeated, except the gradient, which is NaN."""
    if place.rehearsal is not None:
        one = dataclasses.replace(settings, seeds=1)
        alone = dataclasses.replace(place, rehearsal=None)

        def attempt(_):
            found = train(one, point, alone)
            return Tally(found["feature_updates"].max(), found["passes"].max())

        place.rehearsal(
            tuple(point.values()), settings.seeds, settings.num_steps, attempt, whole=True
        )
    runs = [_of_seed(settings, point, place, seed) for seed in settings.each_seed]
    return {name: np.stack([run[name] for run in runs]) for name in runs[0]}


def _of_seed(settings: BetaSweep, point: Point, place: Place, seed: int) -> Columns:
    draw = training.load(settings, place, seed)
    model: Any = training.stateless(settings)(jax.random.key(seed))
    inputs, targets = draw.train
    number = jax.eval_shape(jax.vmap(model), inputs).shape[-1]
    data = inputs, scores.as_values(targets, number)
    tolerance = (
        jnp.asarray(point["tolerance"])
        if point["rule"] == FIXED
        else gnlin.methods.EisenstatWalker(exponent=jnp.asarray(point["exponent"]))
    )
    solver = gnlin.TruncatedGaussNewton(tolerance, rtol=1e-13, atol=0.0)
    solution = gnlin.solve(
        model, data, solver, max_steps=settings.num_steps, throw=False, divergence=None
    )
    history, left = solution.history, settings.num_steps - len(solution.history.step)
    made = np.arange(1, len(history.step) + 1)
    # Each inner step and each linearisation take a tangent and a transposed pass.
    passes = 2 * (history.num_inner_steps.cumsum() + made)
    by_step = {
        "feature_updates": made,
        "passes": passes,
        "train_loss": history.loss,
    }
    gradients = np.pad(history.gradient_norm, (0, left), constant_values=np.nan)
    trained: Any = solution.model
    outputs = jax.vmap(trained)(draw.test[0])
    accuracy = scores.score(outputs, draw.test[1], scores.spread(targets))
    return {
        **{name: np.pad(x, (0, left), mode="edge") for name, x in by_step.items()},
        "gradient_norm": gradients,
        "test_accuracy": np.full(1, accuracy),
        "guessing_loss": np.full(1, scores.guessing_loss(gnlin.SquaredError(), data[1])),
    }


#
# Statistics of the runs
#


def above_rounding(gradients: Float[ndarray, " steps"]) -> Float[ndarray, " some"]:
    """Return log10 of the gradients relative to the first, until one is rounding."""
    parts = np.log10(gradients[np.isfinite(gradients) & (gradients > 0)] / gradients[0])
    rounding = np.flatnonzero(parts < math.log10(ROUNDING))
    return parts[: rounding[0]] if len(rounding) else parts


def last_falls(runs: Runs) -> Float[ndarray, "seeds 2"]:
    """Return the decreases of log10 of the gradient in the last two steps that end above
    rounding; NaN for seeds that do not converge, or make fewer than two such steps."""
    found = np.full((runs.num_seeds, 2), np.nan)
    for seed, gradients in enumerate(runs["gradient_norm"]):
        parts = above_rounding(gradients)[-3:]
        if len(parts) == 3 and np.nanmin(gradients) < SOLVED * gradients[0]:
            found[seed] = -np.diff(parts)
    return found


def rate(runs: Runs) -> Float[ndarray, " seeds"]:
    """Return log10 of the factor by which the last step above rounding multiplies the
    gradient."""
    return -last_falls(runs)[:, 1]


def order(runs: Runs) -> Float[ndarray, " seeds"]:
    """Return the ratio of the last two decreases of log10 of the gradient, which is p for
    convergence of order p."""
    before, last = last_falls(runs).T
    return np.where(np.minimum(before, last) > 0, last / before, np.nan)


def passes(runs: Runs) -> Float[ndarray, " seeds"]:
    """Return the number of passes until the run has converged; NaN if it does not."""
    gradients = runs["gradient_norm"]
    reached = gradients <= SOLVED * gradients[:, :1]
    # A step's row has the gradient before the step.
    first = np.maximum(reached.argmax(axis=1) - 1, 0)
    found = runs["passes"][np.arange(len(first)), first]
    return np.where(reached.any(axis=1), found, np.nan)


def accuracy(runs: Runs) -> Float[ndarray, " seeds"]:
    """Return the test accuracy; NaN for seeds that are not trained."""
    return np.where(is_trained(runs), runs.final("test_accuracy"), np.nan)


def is_trained(runs: Runs) -> Bool[ndarray, " seeds"]:
    guessing = runs.final("guessing_loss")
    return runs.final("train_loss") <= thresholds.PART_OF_GUESSING * guessing


def against_best(
    own: Float[ndarray, " seeds"], others: Float[ndarray, "seeds tolerances"]
) -> Float[ndarray, " seeds"]:
    """Return log10 of each seed's passes, relative to its passes at the tolerance that
    takes the fewest in the mean of the *other* seeds."""
    logs, found = np.log10(others), np.full(len(own), np.nan)
    for seed in range(len(own)):
        rest = np.delete(logs, seed, axis=0)
        whole = np.isfinite(rest).all(axis=0)
        if len(rest) and whole.any():
            best = np.flatnonzero(whole)[rest[:, whole].mean(axis=0).argmin()]
            found[seed] = np.log10(own[seed]) - logs[seed, best]
    return found


def judge_all(settings: BetaSweep, all_runs: Sequence[Runs]) -> list[Verdict]:
    x = np.log10(settings.tolerances)
    fixed = [only(all_runs, rule=FIXED, tolerance=beta) for beta in settings.tolerances]
    walker = {
        each: only(all_runs, rule=WALKER, exponent=each) for each in settings.exponents
    }
    loose, tight = min(walker), max(walker)
    rates = np.stack([rate(runs) for runs in fixed], axis=1)
    whole = np.isfinite(rates).all(axis=1, keepdims=True)
    accuracies = np.stack([accuracy(runs) for runs in fixed], axis=1)
    return [
        judge(
            "Near a solution each step reduces the gradient at least by the factor beta",
            "log10 of (factor by which the last step above rounding multiplies the "
            "gradient / beta), median over the seeds, largest over beta",
            np.where(whole, rates - x, np.nan),
            thresholds.AT_MOST_BETA,
            statistic=lambda values: float(np.median(values, axis=0).max()),
        ),
        judge(
            "Near a solution the factor by which a step reduces the gradient is "
            "proportional to beta",
            "slope of log10 of the factor by which the last step above rounding "
            "multiplies the gradient, in log10 beta",
            slope(x, rates),
            thresholds.LIKE_BETA,
        ),
        judge(
            "If beta falls with the gradient, convergence is superlinear",
            f"order of convergence of {WALKER} with exponent {tight:g}",
            order(walker[tight]),
            thresholds.SUPERLINEAR,
        ),
        judge(
            "The order of convergence is the exponent of the rule for beta",
            f"difference in order of convergence, exponent {tight:g} less exponent "
            f"{loose:g}",
            order(walker[tight]) - order(walker[loose]),
            thresholds.ORDER_BY_EXPONENT,
        ),
        judge(
            f"{WALKER} takes no more passes than the best fixed beta",
            f"log10 of the ratio of passes until the gradient is {SOLVED:g} of the "
            f"first, {WALKER} with exponent {tight:g} over the fixed beta that takes "
            "the fewest passes on the other seeds",
            against_best(
                passes(walker[tight]), np.stack([passes(runs) for runs in fixed], axis=1)
            ),
            thresholds.NO_MORE_PASSES,
        ),
        judge(
            "Networks generalise worse as beta falls",
            "slope of test accuracy in log10 beta",
            slope(x, accuracies),
            thresholds.RISES,
            untested=at_ceiling(*accuracies.T),
            lacking=short_of(TRAINED, fixed, is_trained),
        ),
    ]


def draw(settings: BetaSweep, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    """Draw the gradient over steps, the rate, the passes and the accuracy over beta."""
    fixed = select(all_runs, rule=FIXED)
    x = list(settings.tolerances)
    over_beta = lambda of: np.stack([of(runs) for runs in fixed], axis=1)
    with figure(out / "beta_sweep.png", width=12, height=8.4) as drawing:
        (gradient, rates), (cost, accuracies) = drawing.subplots(2, 2)
        shown = zip(fixed, shades(len(fixed)), strict=True)
        lines = [(f"$\\beta$ = {r.point['tolerance']:g}", r, c, "-") for r, c in shown]
        walkers = zip(select(all_runs, rule=WALKER), (ORANGE, VERMILION), strict=False)
        named = [(f"{WALKER}, {r.point['exponent']:g}", r, c) for r, c in walkers]
        for label, runs, colour, look in [*lines, *((*each, "--") for each in named)]:
            gradients = runs["gradient_norm"][0]
            steps = np.arange(len(gradients))
            ended = np.flatnonzero(gradients < ROUNDING * gradients[0])
            end = ended[0] + 1 if len(ended) else len(gradients)
            gradient.plot(steps[:end], gradients[:end], look, color=colour, label=label)
        gradient.set(yscale="log", xlabel="Steps", ylabel="Norm of the gradient")
        band(rates, x, 10.0 ** over_beta(rate), BLUE, "measured", "o-")
        rates.plot(x, x, "--", color=BLACK, label=r"$\beta$")
        rates.set(
            yscale="log", ylabel="Factor by which the last step\nmultiplies the gradient"
        )
        band(cost, x, over_beta(passes), BLUE, r"fixed $\beta$", "o-")
        band(accuracies, x, 100 * over_beta(accuracy), BLUE, r"fixed $\beta$", "o-")
        for label, runs, colour in named:
            for axes, values in (
                (cost, passes(runs)),
                (accuracies, 100 * accuracy(runs)),
            ):
                if np.isfinite(values).any():
                    axes.axhline(
                        np.nanmean(values), color=colour, linestyle="--", label=label
                    )
        cost.set(
            yscale="log", ylabel=f"Passes until the gradient\nis {SOLVED:g} of the first"
        )
        accuracies.set(ylabel="Test accuracy (%)")
        for axes in (rates, cost, accuracies):
            axes.set(xlim=(min(x) / 1.5, 1.5 * max(x)), xscale="log")
            axes.set_xlabel(r"Tolerance $\beta$")
            axes.legend(fontsize="small")
        gradient.legend(fontsize="x-small")
    left_out = int(sum(np.sum(~np.isfinite(accuracy(runs))) for runs in all_runs))
    caption = (
        "Top left: the norm of the gradient over steps, for the first seed. Top right: "
        f"the factor by which the last step before rounding ({ROUNDING:g} of the first "
        "gradient) multiplies the gradient. Bottom: the number of tangent and "
        f"transposed passes until the gradient is {SOLVED:g} of the first, and the "
        f"final test accuracy. Means and ranges over {settings.seeds} seeds; "
        f"{training.described(settings)}, squared error. {left_out} of "
        f"{len(all_runs) * settings.seeds} runs are not trained and left out."
    )
    return {"beta_sweep": caption}


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="This experiment is not in the paper, whose truncated Gauss-Newton solves "
    "each problem by Adam. The theory is in R. S. Dembo, S. C. Eisenstat and T. "
    "Steihaug, *Inexact Newton Methods* (1982), and S. C. Eisenstat and H. F. "
    "Walker, *Choosing the Forcing Terms in an Inexact Newton Method* (1996).",
    grid="tolerances",
    bounds=(1e-9, 0.99),
    own=training.own,
    rehearsed=True,
)
