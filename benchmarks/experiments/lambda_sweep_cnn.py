"""Test accuracy against damping: a CNN, with each linearised problem solved.

`lambda |theta - theta_s|^2` is added to the mean loss of each linearised problem. On the
full batch Newton's method minimises the sum, and the network is trained to a given loss.
Runs that do not reach it, or that have an unsolved problem, are left out and counted. On
mini-batches Adam minimises the sum. It takes many steps, since few steps would act as
damping themselves.

Whether these methods reach the same minimum, and at what cost, is measured on the first
linearised problem, at a few dampings.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float
from numpy import ndarray

import gnlin

from .. import solved, thresholds, training
from ..dry_run import Tally
from ..experiment import Experiment, only, Place, Point, Runs, select
from ..figures import band, BLUE, figure, GREEN, ORANGE, VERMILION
from ..scores import loss_of, number_of
from ..shortfall import uncounted
from ..solved import TOLERANCE
from ..thresholds import MOST_UNFINISHED
from ..training import Columns, Images
from ..verdicts import judge, slope, Verdict


NEWTON, TRUNCATED, ADAM = "Newton", "truncated Newton", "Adam"


@dataclasses.dataclass(frozen=True)
class LambdaSweepCNN(Images):
    seeds: int = 8
    dampings: tuple[float, ...] = (1e-5, 1e-4, 3e-4, 1e-3, 1e-2, 1e-1, 1.0)
    num_updates: int = 200
    """The largest number of updates on the full batch."""
    period: int = 50_000
    """Steps of Adam on each linearised problem, on mini-batches."""
    compared: tuple[float, ...] = (1e-1, 1e-3, 1e-5)
    """Dampings at which all methods solve the first problem."""
    adam_steps: tuple[int, ...] = (300, 3_000)
    tolerance: float = 1e-6
    """Tolerance of truncated Newton on the first problem, relative to the gradient."""
    network: str = "digits-cnn"
    num_train: int | None = 50
    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    num_looks: int = 30


EMBEDDED = LambdaSweepCNN()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=2,
    dampings=(1e-4, 1e-2, 1.0),
    compared=(1e-1,),
    adam_steps=(10, 100),
    network="digits-mlp",
    num_train=20,
    num_updates=3,
    num_looks=3,
)
FULL = dataclasses.replace(
    EMBEDDED,
    dampings=(1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0),
    data="cifar10",
    network="lenet",
    num_train=None,
    batch_size=256,
    num_steps=1_000_000,
    num_looks=100,
    compared=(),
)


def points(settings: LambdaSweepCNN) -> list[Point]:
    methods = [(NEWTON, 0), (TRUNCATED, 0), *((ADAM, n) for n in settings.adam_steps)]
    return [
        *({"solved_by": None, "damping": each} for each in settings.dampings),
        *(
            {"solved_by": method, "steps": steps, "damping": each}
            for each in settings.compared
            for method, steps in methods
        ),
    ]


def train(settings: LambdaSweepCNN, point: Point, place: Place) -> Columns:
    if point["solved_by"] is not None:
        return solve_first(settings, point, place)
    damping = 2 * point["damping"]  # gnlin adds damping / 2 |theta - theta_s|^2
    if settings.batch_size is None:
        # The loss is the sum over the images here, not their mean.
        number = number_of(training.load(settings, place, 0).train[1])
        damping = jnp.asarray(damping * number)
        columns = training.full_batch(
            settings,
            place,
            gnlin.DampedGaussNewton(damping, form="prox-linear", search=None),
            settings.num_updates,
            until_trained=True,
            damping=damping,
        )
        return columns | {"unsolved": columns["gradient"] > TOLERANCE}
    adam = _adam(settings.learning_rate)
    solver = gnlin.IterativeLinearisation(
        settings.period, optimiser=adam, damping=damping
    )
    return training.to_a_loss(settings, place, solver)


@cache
def _adam(learning_rate: float) -> optax.GradientTransformation:
    """Return the same object each time, so that code that uses it is compiled once."""
    return optax.adam(learning_rate)


def solve_first(settings: LambdaSweepCNN, point: Point, place: Place) -> Columns:
    """Solve the first linearised problem by one method. Return the damped mean loss that
    it reaches, the largest entry of its gradient, and the number of passes."""
    if place.rehearsal is not None:
        one = dataclasses.replace(settings, seeds=1)
        alone = dataclasses.replace(place, rehearsal=None)
        attempt = lambda _: Tally(1, solve_first(one, point, alone)["passes"].sum())
        place.rehearsal(tuple(point.values()), settings.seeds, 1, attempt)
    make_model, mean = training.stateless(settings), jnp.asarray(2 * point["damping"])
    form = {"form": "prox-linear", "search": None}
    found = []
    for seed in settings.each_seed:
        model = make_model(jax.random.key(seed))
        data = training.load(settings, place, seed).train
        damping = mean * number_of(data[1])
        loss, solver = loss_of(data[1]), gnlin.DampedGaussNewton(damping, **form)
        if point["solved_by"] == TRUNCATED:
            solver = gnlin.TruncatedGaussNewton(
                settings.tolerance, damping, method="matrix-free", **form
            )
        if point["solved_by"] == ADAM:
            loss = loss_of(data[1], "mean")
            steps, adam = (
                jnp.asarray(float(point["steps"])),
                _adam(settings.learning_rate),
            )
            solver = gnlin.IterativeLinearisation(steps, optimiser=adam, damping=mean)
        done = gnlin.solve(model, data, solver, loss=loss, max_steps=1)
        value, gradient = solved.damped(done.model, model, data, point["damping"])
        passes = done.stats["num_jvps"] + done.stats["num_vjps"]
        found.append([float(x) for x in (value, gradient, passes)])
    names = "damped_loss", "gradient", "passes"
    return dict(zip(names, np.transpose(found)[..., None], strict=True))


#
# Statistics of the runs
#


def finals(settings: LambdaSweepCNN, all_runs: Sequence[Runs], name: str) -> ndarray:
    """Return final values by damping and seed; NaN for runs that are left out."""
    found = [only(all_runs, solved_by=None, damping=x) for x in settings.dampings]
    return np.array([training.counted(runs, runs.final(name)) for runs in found])


def usable(settings: LambdaSweepCNN, all_runs) -> Bool[ndarray, " dampings"]:
    """Return at which dampings enough runs are kept for a verdict."""
    left = np.isfinite(finals(settings, all_runs, "test_accuracy"))
    return left.mean(axis=1) >= 1 - MOST_UNFINISHED


def first_solved(
    all_runs: Sequence[Runs], damping: float, by: str, name: str, steps: int = 0
) -> Float[ndarray, " seeds"]:
    """Return a result of one method on the first problem."""
    found = only(all_runs, solved_by=by, damping=damping, steps=steps)
    return found.final(name)


def apart(
    settings: LambdaSweepCNN, all_runs, damping: float, by: str, steps: int = 0
) -> Float[ndarray, " seeds"]:
    """Return by how much the loss exceeds Newton's, relative to it."""
    newton = first_solved(all_runs, damping, NEWTON, "damped_loss")
    return first_solved(all_runs, damping, by, "damped_loss", steps) / newton - 1


def left_out(runs: Runs) -> Columns:
    """Return which runs are left out; nothing for a single problem."""
    if runs.point["solved_by"] is not None:
        return {}
    return {"left_out": np.isnan(training.counted(runs, runs.final("test_accuracy")))}


def judge_all(settings: LambdaSweepCNN, all_runs: Sequence[Runs]) -> list[Verdict]:
    judged = usable(settings, all_runs)
    accuracy = finals(settings, all_runs, "test_accuracy").T[:, judged]
    dampings = np.asarray(settings.dampings)[judged]
    x = np.log10(dampings)
    kept = [only(all_runs, solved_by=None, damping=each) for each in dampings]
    verdicts = [
        judge(
            "More damping generalises better",
            "slope of the final test accuracy in log10 lambda, at dampings at which "
            f"most runs reach a mean loss of {training.enough(settings)}",
            slope(x, accuracy) if len(x) > 2 else [],
            thresholds.RISES,
            untested="" if len(x) > 2 else "runs are trained at too few dampings",
            lacking=uncounted(settings, *kept),
        )
    ]
    if settings.compared:
        damping, steps = max(settings.compared), max(settings.adam_steps)
        verdicts.append(
            judge(
                "Newton's method and Adam reach the same loss of a linearised problem, "
                f"at lambda = {damping:g}",
                "relative difference in the damped loss of the first problem, "
                f"{steps:,} steps of Adam less Newton's method",
                apart(settings, all_runs, damping, ADAM, steps),
                thresholds.SAME_LOSS,
            )
        )
    return verdicts


def draw(
    settings: LambdaSweepCNN, all_runs: Sequence[Runs], out: Path
) -> Mapping[str, str]:
    with figure(out / "lambda_sweep_cnn.png", width=12, height=5) as drawing:
        axes, cost = drawing.subplots(1, 2)
        for name, colour in (("test_accuracy", BLUE), ("train_accuracy", VERMILION)):
            values = 100 * finals(settings, all_runs, name)
            label = name.replace("_", " ").replace("train", "training")
            band(axes, settings.dampings, values.T, colour, label, "o-")
        axes.set(xscale="log", xlabel=r"Damping $\lambda$", ylabel="Final accuracy (%)")
        axes.legend()
        for damping, look, full in zip(
            settings.compared, ("-", "--", ":"), (True, False, False), strict=False
        ):
            _draw_cost(cost, settings, all_runs, damping, look, full)
        cost.set(xscale="log", yscale="log", xlabel="Tangent and transposed passes")
        cost.set(ylabel="Largest entry of the gradient", title="The first problem")
        cost.legend(fontsize="small")
    return {"lambda_sweep_cnn": _caption(settings, all_runs)}


def _draw_cost(axes, settings, all_runs, damping, look, full) -> None:
    """Draw the final gradient on the first problem over each method's passes."""

    def of(by: str, name: str) -> ndarray:
        steps = settings.adam_steps if by == ADAM else (0,)
        found = [first_solved(all_runs, damping, by, name, each) for each in steps]
        return np.transpose(found)

    for by, colour, marker in (
        (ADAM, GREEN, "o"),
        (TRUNCATED, ORANGE, "^"),
        (NEWTON, VERMILION, "s"),
    ):
        passes = of(by, "passes").mean(axis=0)
        label = rf"{by}, $\lambda$ = {damping:g}"
        band(axes, passes, of(by, "gradient"), colour, None, look)
        face = colour if full else "white"
        mean = of(by, "gradient").mean(axis=0)
        axes.plot(passes, mean, marker + look, color=colour, mfc=face, label=label)


def _caption(settings: LambdaSweepCNN, all_runs: Sequence[Runs]) -> str:
    trained = select(all_runs, solved_by=None)
    number = sum(len(runs.final("trained")) for runs in trained)
    left_out = int(np.isnan(finals(settings, all_runs, "test_accuracy")).sum())
    said = (
        "Final accuracy against damping, after linearised problems are solved until the "
        f"mean training loss is {training.enough(settings)}; means and ranges over "
        f"{settings.seeds} seeds, {training.described(settings)}. {left_out} of "
        f"{number} runs do not reach this loss or have an unsolved problem, and are "
        "left out (`left_out` in the table). "
    )
    if settings.batch_size is not None:
        return f"{said}Each problem is solved by {settings.period:,} steps of Adam."
    residuals = np.array([runs.final("gradient") for runs in trained])
    kept = np.isfinite(finals(settings, all_runs, "test_accuracy"))
    said += (
        "Problems are solved by Newton's method until no entry of the mean loss's "
        f"gradient exceeds {TOLERANCE:g} (largest in the runs that are kept: "
        f"{residuals.max(initial=0, where=kept):.1e})."
    )
    if not settings.compared:
        return said
    steps = max(settings.adam_steps)
    said += (
        " Right: the first problem, solved by Newton's method "
        "with the kernel, by truncated Newton with conjugate gradients, and by Adam."
    )
    for damping in settings.compared:
        passes = {
            by: first_solved(all_runs, damping, by, "passes", each).mean()
            for by, each in ((NEWTON, 0), (TRUNCATED, 0), (ADAM, steps))
        }
        truncated = np.abs(apart(settings, all_runs, damping, TRUNCATED)).max()
        adam = np.abs(apart(settings, all_runs, damping, ADAM, steps)).max()
        said += (
            f" At lambda = {damping:g} the damped losses of truncated Newton and Adam "
            f"differ from Newton's by {truncated:.1e} and {adam:.1e}, relative to it; "
            f"Newton, truncated Newton and Adam take {passes[NEWTON]:,.0f}, "
            f"{passes[TRUNCATED]:,.0f} and {passes[ADAM]:,.0f} passes."
        )
    return said


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="The paper trains a CNN on CIFAR-10 with cross-entropy, and solves each "
    "linearised problem by Adam. More damping generalises better.",
    grid="dampings",
    derived=left_out,
    own=training.own,
    rehearsed=True,
)
