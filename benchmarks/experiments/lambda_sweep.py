"""Test error against damping: a quintic, many initialisations, damped Gauss-Newton.

Every initialisation is trained at every damping to the same training error, in one
compiled program. A run that does not reach it has not finished: it is left out and
counted. Dead hidden units, which are off for every input and stay off, are counted too.
The paper leaves out only runs with a training RMSE over 2.5. Its text can be read as
either of two intervals of x, and both are run.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, Bool, Float
from numpy import ndarray
from scipy import stats

import gnlin

from .. import thresholds
from ..data import quintic
from ..experiment import Columns, Experiment, only, Place, Point, Runs, Settings
from ..figures import BLACK, BLUE, figure, GREEN, ORANGE, VERMILION
from ..networks.mlp import dead_units, quintic_mlp
from ..thresholds import MOST_UNFINISHED, TRAINED_RMSE
from ..verdicts import judge, rank_correlation, slope, Verdict


LARGEST_TRAIN_RMSE = 2.5
"""The paper leaves out runs with a larger training RMSE."""
INTERVALS = {
    "outputs in [-4, 4]": quintic.INTERVAL,
    "inputs in [-4, 4]": quintic.OTHER_INTERVAL,
}
# A larger batch of runs waits for its slowest one; a smaller one has more overhead.
_BATCH = 4
_SHOWN = 10
"""Number of learned functions drawn for each damping."""

PerRun = Float[ndarray, "seeds dampings"]


@dataclasses.dataclass(frozen=True)
class LambdaSweep(Settings):
    seeds: int = 100
    dampings: tuple[float, ...] = tuple(np.logspace(-3, 3, 13).tolist())
    num_steps: int = 1000
    """The largest number of outer steps."""
    num_train: int = 20
    num_test: int = 1000


EMBEDDED = LambdaSweep()
QUICK = dataclasses.replace(
    EMBEDDED, seeds=4, dampings=tuple(np.logspace(-3, 3, 5).tolist()), num_steps=60
)
FULL = dataclasses.replace(EMBEDDED, num_steps=10_000)


def points(settings: LambdaSweep) -> list[Point]:
    """Return a point for each interval: all dampings share a compiled program."""
    return [{"interval": interval} for interval in INTERVALS]


def train(settings: LambdaSweep, point: Point, place: Place) -> Columns:
    ends = INTERVALS[point["interval"]]
    data, test = (
        jax.tree.map(jnp.asarray, quintic.examples(number, ends))
        for number in (settings.num_train, settings.num_test)
    )
    shape = settings.seeds, len(settings.dampings)
    dampings = np.broadcast_to(settings.dampings, shape)
    # Batch runs of the same damping, which take about equally many steps.
    seeds = jnp.tile(jnp.asarray(settings.each_seed), len(settings.dampings))

    runs = seeds, jnp.asarray(dampings.T.ravel())
    found = _sweep(runs, data, test, settings.num_steps)
    return {"damping": dampings} | {
        name: np.swapaxes(np.reshape(x, (*shape[::-1], *x.shape[1:])), 0, 1)
        for name, x in jax.device_get(found).items()
    }


@partial(jax.jit, static_argnums=3)
def _sweep(runs, data, test, num_steps: int):
    one = lambda run: _run(run, data, test, num_steps)
    return jax.lax.map(one, runs, batch_size=_BATCH)


def _run(run, data, test, num_steps: int) -> dict[str, Array]:
    seed, damping = run
    (x, targets), (test_x, test_targets) = data, test
    parameters, frozen = eqx.partition(quintic_mlp(jax.random.key(seed)), eqx.is_array)
    fn = gnlin.PerExample(lambda y, x: eqx.combine(y, frozen)(x))
    outputs = jax.eval_shape(fn, parameters, x)
    objective = gnlin.authoring.BatchLoss(gnlin.SquaredError(), outputs, targets)
    solver = gnlin.DampedGaussNewton(damping, search=None)

    def unfinished(carry):
        y, state, moving = carry
        fitted = _rms(fn(y, x) - targets) <= TRAINED_RMSE
        stable = state.result == optx.RESULTS.successful
        more = state.counts.num_feature_updates < num_steps
        return stable & ~fitted & moving & more

    def step(carry):
        y, state, _ = carry
        lin = gnlin.linearise(fn, y, x)
        y, new = solver.advance(objective, lin, lambda y: fn(y, x), state)
        # At a stationary point no update is made, now or later.
        made = new.counts.num_feature_updates - state.counts.num_feature_updates
        return y, new, made > 0

    start = parameters, solver.start(parameters, outputs), jnp.array(True)
    y, state, _ = jax.lax.while_loop(unfinished, step, start)
    learnt = fn(y, test_x)
    spectrum = gnlin.linearise(fn, y, x).spectrum()
    second = jnp.diff(learnt[:, 0], 2) / (test_x[1, 0] - test_x[0, 0]) ** 2
    return {
        "train_rmse": _rms(fn(y, x) - targets),
        "test_rmse": _rms(learnt - test_targets),
        "roughness": _rms(second),
        "dead": dead_units(eqx.combine(y, frozen), test_x),
        "effective_dimension": spectrum.effective_dimension(damping),
        "steps": state.counts.num_feature_updates,
        "functions": learnt[:, 0],
    }


def _rms(x: Array) -> Array:
    return jnp.sqrt(jnp.mean(x**2))


def finished(runs: Runs) -> Bool[ndarray, "seeds dampings"]:
    return runs["train_rmse"] <= TRAINED_RMSE


def judged(runs: Runs) -> Bool[ndarray, " dampings"]:
    """Return at which dampings enough runs have finished for a verdict."""
    return finished(runs).mean(axis=0) >= 1 - MOST_UNFINISHED


def logs(runs: Runs, name: str, kept: Bool[ndarray, "seeds dampings"]) -> PerRun:
    """Return log10 of a column at the judged dampings; NaN for runs that are not kept."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.log10(runs[name])
    return np.where(kept, found, np.nan)[:, judged(runs)]


def judge_all(settings: LambdaSweep, all_runs: Sequence[Runs]) -> list[Verdict]:
    """Judge the paper's claims by the slopes of its curves over log10 of the damping."""
    return [
        verdict
        for name in INTERVALS
        for verdict in _judge(name, only(all_runs, interval=name))
    ]


def _judge(name: str, runs: Runs) -> list[Verdict]:
    usable = judged(runs)
    x = np.log10(runs["damping"][0, usable])
    untested = ""
    if len(x) < 3:
        untested = "runs finish at too few dampings"

    def slope_of(curve: Callable) -> Callable[[PerRun], float]:
        return lambda errors: float(slope(x, curve(errors, axis=0)))

    judged_range = f" from {10 ** x[0]:,.4g} to {10 ** x[-1]:,.4g}" if len(x) else ""
    unit = f"slope of log10 test RMSE in log10 lambda{judged_range}"
    error, roughness = (
        logs(runs, column, finished(runs)) for column in ("test_rmse", "roughness")
    )
    filtered = logs(runs, "test_rmse", runs["train_rmse"] <= LARGEST_TRAIN_RMSE)
    trained = "of the seeds that finish"
    claims = (
        ("The mean error falls", f"mean {trained}", np.nanmean, error, thresholds.FALLS),
        (
            "The mean error of the runs that pass the paper's filter falls",
            f"mean of the seeds with a training RMSE of at most {LARGEST_TRAIN_RMSE}",
            np.nanmean,
            filtered,
            thresholds.FALLS,
        ),
        ("The worst error falls", f"worst {trained}", np.nanmax, error, thresholds.FALLS),
        (
            "The best error does not change",
            f"best {trained}",
            np.nanmin,
            error,
            thresholds.SAME_BEST,
        ),
    )
    return [
        *(
            judge(
                f"{claim} as lambda grows, {name}",
                f"{unit}, {which}",
                values if not untested else [],
                threshold,
                statistic=slope_of(_where_any(curve)),
                untested=untested,
            )
            for claim, which, curve, values, threshold in claims
        ),
        judge(
            f"The learned functions get smoother as lambda grows, {name}",
            f"slope of log10 of the RMS second derivative in log10 lambda{judged_range}",
            slope(x, roughness) if not untested else [],
            thresholds.FALLS,
            untested=untested,
        ),
        *_follows(name, error, runs, untested),
    ]


def _follows(name: str, error: PerRun, runs: Runs, untested: str) -> list[Verdict]:
    """Judge whether the error follows the effective dimension: over the dampings for each
    seed, and over the seeds at each damping."""
    dimension = np.where(
        np.isfinite(error), runs["effective_dimension"][:, judged(runs)], np.nan
    )
    both = np.stack([error, dimension], axis=1)
    what = "Spearman's correlation of test RMSE with the effective dimension"
    return [
        judge(
            f"The error falls with the effective dimension as lambda grows, {name}",
            f"{what} over the dampings, runs that finish",
            over_dampings(both) if not untested else [],
            thresholds.FOLLOWS,
            untested=untested,
        ),
        judge(
            "At the same lambda, seeds with a smaller effective dimension have a "
            f"smaller error, {name}",
            f"{what} over the seeds, runs that finish, mean over the dampings",
            both if not untested else [],
            thresholds.RISES,
            statistic=over_seeds,
            untested=untested,
        ),
    ]


def over_dampings(both: Float[ndarray, "seeds 2 dampings"]) -> Float[ndarray, " seeds"]:
    """Return each seed's rank correlation of error and dimension over the dampings."""
    return np.array([float(rank_correlation(d, error)) for error, d in both])


def over_seeds(both: Float[ndarray, "seeds 2 dampings"]) -> float:
    """Return the rank correlation of error and dimension over the seeds, mean of the
    dampings."""
    known = np.isfinite(both)
    ranks = stats.rankdata(np.where(known, both, np.inf), axis=0)
    ranks = np.ma.array(ranks, mask=~known)
    centred = ranks - ranks.mean(axis=0)
    covariance = (centred[:, 0] * centred[:, 1]).sum(axis=0)
    sizes = (centred**2).sum(axis=0)
    found = covariance / np.ma.sqrt(sizes[0] * sizes[1])
    return float(np.ma.filled(found.mean(), np.nan))


def _where_any(curve: Callable) -> Callable:
    """Make a statistic such as `nanmean` return NaN without a warning if all are NaN."""

    def of(values: PerRun, axis: int) -> Float[ndarray, " dampings"]:
        missing = np.isnan(values).all(axis=axis)
        return np.where(missing, np.nan, curve(np.where(missing, 0, values), axis=axis))

    return of


def draw(settings: LambdaSweep, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    """Draw the errors, the effective dimension, and the shares of finished runs and dead
    units; below them, learned functions at four dampings."""
    shown = np.linspace(0, len(settings.dampings) - 1, 4).round().astype(int)
    above = [name for name in ("errors", "dimension", "shares") for _ in range(4)]
    below = [str(index) for index in shown for _ in range(3)]
    with figure(out / "lambda_sweep.png", width=13, height=14) as drawing:
        parts = drawing.subfigures(len(INTERVALS), 1, squeeze=False)[:, 0]
        for part, (name, interval) in zip(parts, INTERVALS.items(), strict=True):
            runs = only(all_runs, interval=name)
            panels = part.subplot_mosaic([above, below])
            part.suptitle(f"{name[0].upper()}{name[1:]}", fontweight="bold")
            _draw_errors(panels["errors"], runs)
            _draw_dimension(panels["dimension"], runs)
            _draw_shares(panels["shares"], runs)
            for index in shown:
                _draw_functions(panels[str(index)], runs, index, settings, interval)
            panels[str(shown[0])].set_ylabel("$f(x)$")
            panels["errors"].legend(fontsize="small")
            panels["shares"].legend(fontsize="small")
    number = sum(runs["test_rmse"].size for runs in all_runs)
    unfinished = sum(int(np.sum(~finished(runs))) for runs in all_runs)
    done, not_done = _dead_units(all_runs, True), _dead_units(all_runs, False)
    dropped = sum(
        int(np.sum(~(runs["train_rmse"] <= LARGEST_TRAIN_RMSE))) for runs in all_runs
    )
    caption = (
        "Test RMSE, effective dimension, and shares of finished runs and of dead hidden "
        f"units against damping, for {settings.seeds} initialisations. Below: up to "
        f"{_SHOWN} learned functions at each of four dampings, with the quintic "
        "(dashed) and the training points. Dots are runs, and lines are drawn at the "
        f"dampings that are judged, where at least {1 - MOST_UNFINISHED:.0%} of the "
        f"runs have finished by reaching a training RMSE of {TRAINED_RMSE:g}. The "
        "effective dimension is the sum of w/(w + lambda) over the eigenvalues w of the "
        f"final kernel. {unfinished} of {number} runs have not finished, and {not_done} "
        f"of their hidden units are dead, against {done} in finished runs. The paper's "
        f"filter, a training RMSE over {LARGEST_TRAIN_RMSE}, would leave out {dropped} "
        "runs."
    )
    return {"lambda_sweep": caption}


def _dead_units(all_runs: Sequence[Runs], is_finished: bool) -> str:
    """Return the mean share of dead units in finished, or in unfinished, runs."""
    shares = [runs["dead"][finished(runs) == is_finished] for runs in all_runs]
    shares = np.concatenate(shares)
    return f"{shares.mean():.0%}" if len(shares) else "none"


def _draw_runs(axes, runs: Runs, values: PerRun) -> None:
    """Draw one point for each run."""
    dampings = np.broadcast_to(runs["damping"][0], values.shape)
    axes.plot(dampings.ravel(), values.ravel(), ".", color="#BBBBBB", markersize=3)
    axes.set(xscale="log", xlabel=r"Damping $\lambda$")


def _draw_curve(axes, runs: Runs, values: PerRun, curve: Callable, **look) -> None:
    """Draw a statistic of the seeds, with gaps at dampings that are not judged."""
    drawn = np.where(judged(runs), _where_any(curve)(values, axis=0), np.nan)
    axes.plot(runs["damping"][0], drawn, **look)


def _draw_errors(axes, runs: Runs) -> None:
    errors = np.where(finished(runs), runs["test_rmse"], np.nan)
    _draw_runs(axes, runs, errors)
    for label, curve, colour in (
        ("worst", np.nanmax, VERMILION),
        ("mean", np.nanmean, BLUE),
        ("best", np.nanmin, GREEN),
    ):
        _draw_curve(axes, runs, errors, curve, color=colour, label=label)
    axes.set(ylabel="Test RMSE", title="Test error")
    if np.isfinite(errors).any():
        axes.set_yscale("log")


def _draw_dimension(axes, runs: Runs) -> None:
    values = np.where(finished(runs), runs["effective_dimension"], np.nan)
    _draw_runs(axes, runs, values)
    _draw_curve(axes, runs, values, np.nanmean, color=BLUE)
    axes.set(ylabel=r"$d(\lambda)$", title="Final effective dimension")


def _draw_shares(axes, runs: Runs) -> None:
    x = runs["damping"][0]
    axes.plot(
        x, 100 * finished(runs).mean(axis=0), "o-", color=BLUE, label="finished runs"
    )
    dead = runs["dead"].mean(axis=0)
    axes.plot(x, 100 * dead, "s-", color=ORANGE, label="dead hidden units")
    axes.set(xscale="log", ylim=(-3, 103), xlabel=r"Damping $\lambda$")
    axes.set(ylabel="Share (%)", title="Finished runs, dead units")


def _draw_functions(axes, runs: Runs, index, settings: LambdaSweep, interval) -> None:
    x, y = quintic.examples(settings.num_test, interval)
    for seed in np.nonzero(finished(runs)[:, index])[0][:_SHOWN]:
        axes.plot(x, runs["functions"][seed, index], color=BLUE, linewidth=0.8)
    axes.plot(x, y, "--", color=BLACK, linewidth=1)
    axes.plot(*quintic.examples(settings.num_train, interval), "o", color=BLACK, ms=3)
    axes.set(ylim=(1.5 * y.min(), 1.5 * y.max()), xlabel="$x$")
    damping = float(f"{runs['damping'][0, index]:.3g}")
    axes.set_title(rf"Learned functions, $\lambda = {damping:g}$", fontsize="medium")
    if not finished(runs)[:, index].any():
        middle = 0.5, 0.9
        axes.text(*middle, "no run finished", transform=axes.transAxes, ha="center")


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="The paper fits 20 points of a quintic with a 5-layer network by exact damped "
    "Gauss-Newton from many initialisations. As lambda grows, the mean and the "
    "worst test error fall, the best stays the same, and the functions get smoother.",
    grid="dampings",
    runs_at_a_point=lambda settings: len(settings.dampings),
)
