"""Test accuracy over K, from gradient descent to fully solved linearised problems.

On the full batch every run is trained until it reaches the same mean training loss. All
claims are about such runs; runs that do not reach the loss are left out and counted. For
small K the steps are taken one by one, for larger K with the kernel, and from K = 10^4 on
as gradient flow for the time K eta; the flow's error against literal steps is measured.
On mini-batches, at the full scale, all K take the same number of steps. A K above that
number is not tested, since its run would not finish the first problem. The second figure
has the curves of K = 10, 100, ..., 20,000 that the paper's first version draws.

Whether a K is long depends on the length of the training. The claims therefore measure K
in units of the number of steps that K = 1 takes: the paper's K of 10^4 refers to runs of
millions of steps, whereas here a few thousand steps train the network.

Three other methods share the axes: damped Gauss-Newton at lambda = 1/(eta K), the same
with conjugate gradients that stop early, and the paper's truncated Gauss-Newton, which
solves each problem to a gradient tolerance. Other learning rates have a coarser grid of
K.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy import ndarray

import gnlin

from .. import thresholds, training
from ..experiment import Experiment, only, Place, Point, Runs, select
from ..figures import (
    band,
    BLACK,
    BLUE,
    figure,
    GREEN,
    ORANGE,
    PURPLE,
    shades,
    SKY,
    VERMILION,
)
from ..scores import loss_of
from ..shortfall import uncounted
from ..solved import described, MOST_STEPS, train_solving
from ..thresholds import MOST_UNFINISHED, SHORT
from ..training import Columns, Images
from ..verdicts import at_ceiling, judge, Verdict


DESCENT = "iterative linearisation"
DAMPED, TRUNCATED = "damped Gauss-Newton", "truncated Gauss-Newton"
SOLVED = "each problem solved"
STATISTICS = {
    "at the end of training": lambda runs: training.counted(
        runs, runs.final("test_accuracy")
    ),
    "at optimal early stopping": lambda runs: training.counted(
        runs, training.optimally_stopped(runs)
    ),
}
UPDATES = "feature_updates"
FIRST_VERSION = 10.0, 100.0, 1e3, 1e4, 2e4
"""The periods whose curves the paper's first version draws."""
PAPERS_LIMIT = 1e4
"""The paper claims that K up to here is like K = 1, on its task."""


@dataclasses.dataclass(frozen=True)
class KSweep(Images):
    seeds: int = 10
    periods: tuple[float, ...] = (
        *(float(f"{digit}e{power}") for power in range(8) for digit in (1, 2, 5)),
        1e8,
    )
    other_learning_rates: tuple[float, ...] = (3e-4, 1e-2)
    every: int = 3
    """At the other learning rates, only one in this many periods is run."""
    damped_from: float = 100
    """The smallest period whose damping 1/(eta K) is tried: at smaller ones damping would
    have to solve nearly as many linearised problems as descent takes steps."""
    tolerance: float = 0.1
    """Tolerance of conjugate gradients, relative to the gradient."""
    solved_to: tuple[float, ...] = (1e-4, 1e-7)
    """Tolerances for the largest entry of the mean loss's gradient. The claims are judged
    by the smaller one, which is about the level after 10^8 steps. On separable classes
    the loss has no minimum, so that any tolerance is arbitrary."""
    num_steps: int = 100_000
    """The largest number of steps on the full batch, or `most_updates` feature updates if
    these are more."""
    most_updates: int = 50
    damped_steps: int = 2_000
    """Steps of the Gauss-Newton methods on mini-batches."""
    num_looks: int = 40
    num_train: int | None = 50


EMBEDDED = KSweep()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=2,
    periods=(1.0, 8.0, 1e5, 1e6),
    other_learning_rates=(1e-2,),
    every=3,
    most_updates=10,
    num_looks=10,
    num_train=20,
)
FULL = dataclasses.replace(
    EMBEDDED,
    seeds=5,
    data="cifar10",
    network="lenet",
    num_train=None,
    batch_size=256,
    reduction="sum",
    learning_rate=1e-5,
    other_learning_rates=(1e-6, 1e-4),
    num_steps=500_000,
    most_updates=20,
    num_looks=100,
)
MEDIUM = training.medium(
    FULL,
    periods=(1.0, 10.0, 100.0, 1e3, 1e4),
    other_learning_rates=(1e-5,),
    seeds=8,
    damped_steps=200,
    most_updates=3,
)


def points(settings: KSweep) -> Sequence[Point]:
    def at(learning_rate, periods, solver=DESCENT):
        return [
            {"solver": solver, "learning_rate": learning_rate, "period": period}
            for period in periods
        ]

    rate = settings.learning_rate
    long = [period for period in settings.periods if period >= settings.damped_from]
    found = at(rate, settings.periods)
    found += [{"solver": SOLVED, "tolerance": each} for each in settings.solved_to]
    found += at(rate, long, DAMPED) + at(rate, long, TRUNCATED)
    for other in settings.other_learning_rates:
        found += at(other, settings.periods[:: settings.every])
    return found


def train(settings: KSweep, point: Point, place: Place) -> Columns:
    columns = _train(settings, point, place)
    if point == _first_flow(settings):
        columns |= {"flow_error": _flow_errors(settings, place)}
    return columns | {"first_test_accuracy": training.untouched(settings, place)}


def _train(settings: KSweep, point: Point, place: Place) -> Columns:
    most = settings.most_updates
    if point["solver"] == SOLVED:
        tolerance = point["tolerance"]
        return train_solving(
            settings,
            place,
            most,
            tolerance=tolerance,
            until_trained=True,
            most_steps=min(MOST_STEPS, settings.num_steps),
        )
    period, learning_rate = point["period"], point["learning_rate"]
    on_mini_batches = settings.batch_size is not None
    if point["solver"] != DESCENT:
        solver = _damped(settings, point["solver"], 1 / (learning_rate * period))
        if not on_mini_batches:
            updates = max(most, round(settings.num_steps / period))
            return training.full_batch(
                settings, place, solver, updates, until_trained=True
            )
        steps = min(settings.damped_steps, settings.num_steps)
        settings = dataclasses.replace(settings, num_steps=steps)
        return training.mini_batches(settings, place, solver)
    if on_mini_batches:
        solver = training.descent(period, learning_rate)
        return training.mini_batches(settings, place, solver)
    return training.descend(
        settings,
        place,
        period,
        learning_rate,
        fewest_updates=most,
        until_trained=True,
    )


def _damped(
    settings: KSweep, name: str, damping: float
) -> gnlin.authoring.AbstractGaussNewton:
    form = {"form": "prox-linear", "search": None}
    if name == DAMPED:
        return gnlin.DampedGaussNewton(jnp.asarray(damping), **form)
    return gnlin.TruncatedGaussNewton(settings.tolerance, jnp.asarray(damping), **form)


def _first_flow(settings: KSweep) -> Point | None:
    """Return the point with the smallest period that is computed as gradient flow, whose
    runs measure the error of the flow."""
    if settings.batch_size is not None:
        return None
    rate, flows = settings.learning_rate, lambda k: k >= training.FLOW_FROM
    period = min(filter(flows, settings.periods), default=None)
    return {"solver": DESCENT, "learning_rate": rate, "period": period}


def _flow_errors(settings: KSweep, place: Place) -> Float[ndarray, " seeds"]:
    """Return the error of gradient flow at `FLOW_FROM`."""
    make_model, found = training.stateless(settings), []
    for seed in settings.each_seed:
        data, rate = training.load(settings, place, seed).train, settings.learning_rate
        how = loss_of(data[1]), rate, int(training.FLOW_FROM)
        found.append(training.flow_error(make_model(jax.random.key(seed)), data, *how))
    return np.array(found)


def _line(settings: KSweep, all_runs: Sequence[Runs], solver: str) -> list[Runs]:
    """Return a solver's runs over K, at the learning rate that is judged."""
    return select(all_runs, solver=solver, learning_rate=settings.learning_rate)


def training_length(settings: KSweep, line: Sequence[Runs]) -> float:
    """Return the number of steps that the shortest period takes, median of the seeds."""
    if settings.batch_size is not None:
        return settings.num_steps
    first = min(line, key=lambda runs: runs.point["period"])
    return float(np.median(first.final("inner_steps")))


def is_tested(settings: KSweep, period: float) -> bool:
    """Return whether a run is long enough to finish a problem of this period."""
    return settings.batch_size is None or period <= settings.num_steps


def rise(apart: Float[ndarray, "seeds periods"]) -> Float[ndarray, " seeds"]:
    """Return each seed's value at the period that is best in the mean of the *other*
    seeds: the largest value of all periods would be above zero by chance alone. Periods
    that too few of the others have finished do not count."""
    found = np.full(len(apart), np.nan)
    for seed in range(len(apart)):
        others = np.delete(apart, seed, axis=0)
        known = np.isfinite(others).mean(axis=0) >= 1 - MOST_UNFINISHED
        if known.any():
            best = np.nanmean(others[:, known], axis=0).argmax()
            found[seed] = apart[seed, np.flatnonzero(known)[best]]
    return found


def judge_all(settings: KSweep, all_runs: Sequence[Runs]) -> list[Verdict]:
    """Judge all claims at the end of training and, as in the paper, at optimal early
    stopping."""
    solved = only(all_runs, solver=SOLVED, tolerance=min(settings.solved_to))
    line = _line(settings, all_runs, DESCENT)
    length = training_length(settings, line)
    verdicts = []
    at_k = {runs.point["period"]: runs for runs in line}
    pairs = _of_equal_strength(settings, all_runs)

    def lacking(above, up_to):
        some = [k for k in at_k if k == min(at_k) or above < k <= up_to]
        return uncounted(settings, *(at_k[k] for k in some if is_tested(settings, k)))

    for which, of in STATISTICS.items():
        by_k = {period: of(runs) for period, runs in at_k.items()}
        first, longest = by_k[min(by_k)], max(by_k)
        shortest = f"K = {min(by_k):g}"
        untested = ""
        if not is_tested(settings, longest):
            untested = f"K is longer than the {settings.num_steps:,} steps of a run"
        apart = {
            k: by_k[k] - first for k in by_k if k > min(by_k) and is_tested(settings, k)
        }
        between = {k: values for k, values in apart.items() if k < longest}
        in_units = f"K = {longest:g}, {longest / length:.2g} times the training length,"
        most = f"K = {longest:g}"
        largest = max([k for k in apart if k <= PAPERS_LIMIT], default=PAPERS_LIMIT)
        if 2 * largest > PAPERS_LIMIT:  # near enough to speak of the paper's range
            largest = PAPERS_LIMIT
        verdicts += [
            _like_first(
                f"K up to {SHORT:.0%} of the training length gives the test accuracy of "
                f"{shortest}, {which}",
                shortest,
                first,
                _in_range(apart, 0, SHORT * length),
                lacking(0, SHORT * length),
            ),
            _like_first(
                f"K up to {largest:g}, {largest / length:.2g} times the training "
                f"length, gives the test accuracy of {shortest}, {which}",
                shortest,
                first,
                _in_range(apart, 0, PAPERS_LIMIT),
                lacking(0, PAPERS_LIMIT),
            ),
            judge(
                f"Beyond {SHORT:.0%} of the training length, test accuracy first rises "
                f"above that of {shortest}, {which}",
                f"difference in test accuracy, best K below {longest:g} (chosen on the "
                f"other seeds) less {shortest}",
                rise(_in_range(between, SHORT * length, longest)),
                thresholds.RISES,
                lacking=lacking(SHORT * length, longest),
            ),
            judge(
                f"{in_units} is less accurate than {shortest}, {which}",
                f"difference in test accuracy, {most} less {shortest}",
                by_k[longest] - first,
                thresholds.FALLS,
                untested=untested,
                lacking=uncounted(settings, at_k[min(at_k)], at_k[longest]),
            ),
            judge(
                f"{in_units} approaches truncated Gauss-Newton, {which}",
                f"difference in test accuracy, {most} less each problem solved to a "
                f"gradient of {min(settings.solved_to):g}",
                by_k[longest] - of(solved),
                thresholds.REACHED_BY_TRUNCATED,
                untested=untested,
                lacking=uncounted(settings, at_k[longest], solved),
            ),
            judge(
                f"Damping is more accurate than K steps of equal strength, {which}",
                "difference in test accuracy, damping 1/(eta K) less K steps, mean over "
                "K",
                np.mean([of(damped) - of(runs) for damped, runs in pairs], axis=0)
                if pairs
                else [],
                thresholds.RISES,
                lacking=uncounted(settings, *itertools.chain(*pairs)),
            ),
        ]
    return verdicts


def _in_range(
    apart: Mapping[float, Float[ndarray, " seeds"]], above: float, up_to: float
) -> Float[ndarray, "seeds periods"]:
    """Stack the values at the periods in a range."""
    some = [values for period, values in apart.items() if above < period <= up_to]
    return np.stack(some, axis=1) if some else np.zeros((0, 0))


def _like_first(
    claim: str,
    shortest: str,
    first: Float[ndarray, " seeds"],
    apart: Float[ndarray, "seeds periods"],
    lacking: str,
) -> Verdict:
    # A seed counts only if all of its runs do.
    whole = np.isfinite(apart).all(axis=1, keepdims=True)
    return judge(
        claim,
        f"absolute difference in mean test accuracy between K and {shortest}, largest "
        "over K",
        np.where(whole, apart, np.nan),
        thresholds.LIKE_FIRST,
        statistic=lambda apart: float(np.abs(apart.mean(axis=0)).max()),
        untested=at_ceiling(first, *(first + each for each in apart.T)),
        lacking=lacking,
    )


def _of_equal_strength(
    settings: KSweep, all_runs: Sequence[Runs]
) -> list[tuple[Runs, Runs]]:
    """Return the runs with damping, each with those of K steps of equal strength."""
    by_descent, damped = (
        {runs.point["period"]: runs for runs in _line(settings, all_runs, solver)}
        for solver in (DESCENT, DAMPED)
    )
    return [(damped[k], by_descent[k]) for k in damped if is_tested(settings, k)]


def draw(settings: KSweep, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    """Draw test accuracy over inner steps and over feature updates, its final value over
    K, and the number of steps to train."""
    rate, line = settings.learning_rate, _line(settings, all_runs, DESCENT)
    rates = (rate, *settings.other_learning_rates)
    lines = [
        (rf"descent, $\eta$ = {each:g}", DESCENT, each, colour, "o-")
        for each, colour in zip(rates, (BLUE, ORANGE, GREEN, SKY), strict=False)
    ]
    lines += [
        (rf"{DAMPED}, $\lambda = 1/\eta K$", DAMPED, rate, BLACK, "s--"),
        (rf"{TRUNCATED}, $\lambda = 1/\eta K$", TRUNCATED, rate, VERMILION, "^-."),
    ]
    shown = [(runs, _colour_of(runs), "-") for runs in line[:: max(1, len(line) // 8)]]
    with figure(out / "k_sweep.png", width=13, height=9.2) as drawing:
        (over_steps, over_updates), (over_k, length) = drawing.subplots(2, 2)
        for runs, colour, look in shown:
            label = f"K = {runs.point['period']:.3g}"
            _draw_from_zero(over_steps, runs, "inner_steps", colour, label, look)
            _draw_from_zero(over_updates, runs, UPDATES, colour, None, look)
        for tolerance, look in zip(settings.solved_to, (":", "--"), strict=False):
            runs = only(all_runs, solver=SOLVED, tolerance=tolerance)
            label = f"{SOLVED}, to {tolerance:g}"
            _draw_from_zero(over_updates, runs, UPDATES, PURPLE, label, look)
            final = training.counted(runs, runs.final("test_accuracy"))
            if np.isfinite(final).any():
                level = 100 * np.nanmean(final)
                over_k.axhline(level, linestyle=look, color=PURPLE, label=label)
        for label, solver, at, colour, look in lines:
            of_line = select(all_runs, solver=solver, learning_rate=at)
            periods = np.array([runs.point["period"] for runs in of_line])
            if not len(periods):
                continue
            accuracy, steps = (
                np.transpose(
                    [training.counted(runs, runs.final(name)) for runs in of_line]
                )
                for name in ("test_accuracy", "feature_updates")
            )
            band(over_k, periods, 100 * accuracy, colour, label, look)
            band(length, periods, steps, colour, label, look)
        over_steps.set(xlabel="Inner steps", ylabel="Test accuracy (%)")
        over_updates.set(xlabel="Feature updates", ylabel="Test accuracy (%)")
        for axes in (over_steps, over_updates):
            axes.set_xscale("symlog", linthresh=1)
            decades = np.arange(np.ceil(np.log10(axes.get_xlim()[1])))
            axes.set_xticks([0, *10.0 ** decades[:: 1 + len(decades) // 6]])
            axes.set_xlim(left=0)
        over_k.set(xscale="log", xlabel="Period $K$", ylabel="Test accuracy (%)")
        unit = training_length(settings, line)
        in_units = lambda k: np.asarray(k) / unit, lambda share: np.asarray(share) * unit
        top = over_k.secondary_xaxis("top", functions=in_units)
        shortest = min(settings.periods)
        top.set_xlabel(
            rf"At the end; $K$ relative to the training length of $K = {shortest:g}$"
        )
        length.set(xscale="log", yscale="log", xlabel="Period $K$")
        length.set(title="Until trained", ylabel="Feature updates")
        for axes in (over_steps, over_updates, over_k):
            axes.legend(fontsize="x-small")
    captions = {"k_sweep": _caption(settings, all_runs)}
    some = [runs for runs in line if runs.point["period"] in (1, *FIRST_VERSION)]
    if len(some) > 1:
        captions["curves"] = _draw_curves(settings, some, out)
    return captions


def _draw_curves(settings: KSweep, line: Sequence[Runs], out: Path) -> str:
    """Draw the curves of the paper's first version, and return their caption."""
    with figure(out / "curves.png", width=11, height=4.6) as drawing:
        accuracy, loss = drawing.subplots(1, 2)
        for runs, colour in zip(line, shades(len(line)), strict=True):
            label = f"K = {runs.point['period']:,.0f}"
            _draw_from_zero(accuracy, runs, "inner_steps", colour, label, "-")
            each = runs["train_loss"] / runs["guessing_loss"]
            band(loss, runs["inner_steps"].mean(axis=0), each, colour, label)
        accuracy.set(ylabel="Test accuracy (%)", xlabel="Inner steps")
        accuracy.set_xscale("symlog", linthresh=100)
        loss.set(xscale="log", yscale="log", xlabel="Inner steps")
        loss.set_ylabel("Training loss, relative to guessing")
        accuracy.legend(fontsize="small")
    return (
        "Test accuracy and training loss over inner steps, for the few K in the figure "
        f"of the paper's first version. Means and ranges over {settings.seeds} seeds; "
        f"{training.described(settings)}."
    )


def _colour_of(runs: Runs) -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis"](np.log10(runs.point["period"]) / 8.5)


def _draw_from_zero(axes, runs: Runs, name: str, colour: Any, label: Any, look: str):
    """Draw the test accuracy over a column of steps. Up to the first look, the line is at
    the accuracy before training."""
    x, accuracy = runs[name].mean(axis=0), 100 * runs["test_accuracy"]
    band(axes, x, accuracy, colour, label, look)
    first = 100 * runs["first_test_accuracy"].mean()
    axes.plot([0, x[0], x[0]], [first, first, accuracy[:, 0].mean()], look, color=colour)


def _caption(settings: KSweep, all_runs: Sequence[Runs]) -> str:
    caption = (
        "Test accuracy over inner steps and over feature updates, final test accuracy "
        "over K, and the number of feature updates until a run is trained. Means and "
        f"ranges over {settings.seeds} seeds; {training.described(settings)}. "
    )
    solved = select(all_runs, solver=SOLVED)
    caption += (
        f"For '{SOLVED}', each problem is {described(solved, settings.solved_to)}. "
    )
    if settings.batch_size is not None:
        return caption + (
            f"All K take {settings.num_steps:,} inner steps; a longer K does not finish "
            "its first problem, and is not judged."
        )
    line = _line(settings, all_runs, DESCENT)
    trained = [runs for runs in all_runs if "trained" in runs.columns]
    left_out = sum(int(np.sum(runs.final("trained") == 0)) for runs in trained)
    number = sum(len(runs.final("trained")) for runs in trained)
    return caption + (
        f"Runs end at a mean training loss of {training.enough(settings)}; {left_out} of "
        f"{number} do not reach it, and are left out. Training with K = "
        f"{min(settings.periods):g} takes {training_length(settings, line):,.0f} steps "
        f"(median). {training.flow_described(all_runs, training.FLOW_FROM)}."
    )


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="The paper trains a CNN on CIFAR-10. K up to 10^4 is like K = 1. Larger K are "
    "erratic, and at first a little better. K = 10^8 is worse, and approaches "
    "truncated Gauss-Newton.",
    grid="periods",
    own=training.own,
    rehearsed=True,
    medium=MEDIUM,
)
