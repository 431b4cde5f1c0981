"""Alignment of the kernel with the initial and the final kernel during training.

The training is divided into equal parts. The rotation of the kernel in each is the angle
between the kernels at its ends. A sum over looks would depend on their number: ten times
as many looks reduce the sum of 1 - cos, which is quadratic in the angle, to a tenth.

A second part asks what one feature update is worth. The paper notes that one step of
K = 1 learns fewer features than 10^5 steps of K = 10^5, although both are one update. On
the full batch the features after one update of K steps are compared with the features
after one step, and after as many steps with K = 1. They are measured by the angle from
the first kernel, and by the test accuracy of regression with the kernel.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree
from numpy import ndarray

import gnlin

from .. import own_task, scores, thresholds, training
from ..dry_run import Tally
from ..experiment import Experiment, only, Place, Point, Runs, select
from ..figures import band, BLACK, BLUE, figure, shades
from ..shortfall import untrained
from ..training import Columns, Draw, Images
from ..verdicts import at_ceiling, judge, Verdict


PARTS = 5
"""Number of equal parts of the training; the claim is that the kernel changes fastest in
the first."""
ANGLES = tuple(f"angle_{part}" for part in range(1, PARTS + 1))
ONE_UPDATE, AS_MANY_STEPS = "one feature update", "as many steps of K = 1"
LABELS = {ONE_UPDATE: "one update of $K$ steps", AS_MANY_STEPS: "$K$ updates of one step"}
RIDGE = 1e-3
"""Damping of regression with a kernel, relative to its mean eigenvalue."""
MOST_TESTED = 500
"""Number of test examples for that regression."""


@dataclasses.dataclass(frozen=True)
class KernelDrift(Images):
    seeds: int = 10
    periods: tuple[int, ...] = (1, 100, 1_000)
    num_train: int | None = 50
    reduction: Literal["sum", "mean"] = "sum"
    num_steps: int = 4_000
    num_looks: int = 80
    num_kernel: int = 20
    """Number of training images for the kernel."""
    lengths: tuple[int, ...] = (1, 10, 100, 1_000, 10_000, 100_000)
    """Values of K for a single feature update, on the full batch."""


EMBEDDED = KernelDrift()
QUICK = dataclasses.replace(
    EMBEDDED, seeds=2, periods=(1, 10), num_steps=50, num_looks=5, lengths=(1, 100)
)
FULL = dataclasses.replace(
    EMBEDDED,
    periods=(1, 1_000, 100_000),
    data="cifar10",
    network="lenet",
    num_train=None,
    batch_size=256,
    learning_rate=1e-5,
    num_steps=1_000_000,
    num_kernel=30,
    num_looks=100,
)
MEDIUM = training.medium(FULL, periods=(1, 100, 1_000))


def points(settings: KernelDrift) -> list[Point]:
    found: list[Point] = [{"period": period} for period in settings.periods]
    if settings.batch_size is None:
        found += [{"after": ONE_UPDATE}, {"after": AS_MANY_STEPS}]
    return found


def train(settings: KernelDrift, point: Point, place: Place) -> Columns:
    """Train, and compute the kernel at evenly spaced looks; keep only alignments and
    angles."""
    if "after" in point:
        return _train_features(settings, point, place)

    def callbacks(draw, model, state):
        images = draw.train[0][: settings.num_kernel]
        kernel = lambda model, state: gnlin.TangentKernel(model, state=state)(images)
        return [training.Snapshots("kernels", kernel, (model, state), settings)]

    solver = training.descent(point["period"], settings.learning_rate)
    columns = training.mini_batches(settings, place, solver, callbacks)
    kernels = columns.pop("kernels")
    num_looks = kernels.shape[1] - 1
    ends = np.linspace(0, num_looks, PARTS + 1).round().astype(int)
    turned = np.array([_angles(of_seed[ends]) for of_seed in kernels])
    return columns | {
        "alignment_with_first": _alignment(kernels, 0),
        "alignment_with_last": _alignment(kernels, num_looks),
        **{name: turned[:, [part]] for part, name in enumerate(ANGLES)},
    }


@jax.jit
def _aligned(pair):
    return gnlin.features.kernel_alignment(*pair)


def _alignment(kernels: ndarray, other: int) -> Float[ndarray, "seeds looks"]:
    """Return the alignment of each kernel after the first with the kernel at `other`."""
    return np.array([[float(_aligned((k, of[other]))) for k in of[1:]] for of in kernels])


def _angles(kernels: ndarray) -> list[float]:
    """Return the angle between each kernel and the next."""
    pairs = itertools.pairwise(kernels.astype(float))
    return [float(np.arccos(np.clip(_aligned(pair), -1, 1))) for pair in pairs]


#
# Features after one update
#


def _train_features(settings: KernelDrift, point: Point, place: Place) -> Columns:
    """Measure the features of all seeds, with a look at each of the `lengths`."""
    one_update = point["after"] == ONE_UPDATE
    if place.rehearsal is not None:
        alone = dataclasses.replace(place, rehearsal=None)

        def attempt(number: int) -> Tally:
            # Make all single updates, whose cost hardly depends on K, or `number` steps.
            lengths = settings.lengths if one_update else (number,)
            one = dataclasses.replace(settings, seeds=1, lengths=lengths)
            passes = _train_features(one, point, alone)["passes"].max()
            return Tally(len(lengths) if one_update else number, passes)

        number = len(settings.lengths) if one_update else max(settings.lengths)
        place.rehearsal(point["after"], settings.seeds, number, attempt, whole=one_update)
    runs = []
    for seed in settings.each_seed:
        draw = training.load(settings, place, seed)
        start = own_task.with_state(training.model_of(settings)(jax.random.key(seed)))
        models = _updated_once if one_update else _stepped
        first = _kernel_of(*start, draw.train[0][: settings.num_kernel])
        looks = [
            _measured(model, state, passes, draw, first)
            for model, state, passes in models(settings, start, draw)
        ]
        runs.append({name: np.array([x[name] for x in looks]) for name in looks[0]})
    columns = {name: np.stack([run[name] for run in runs]) for name in runs[0]}
    number = len(settings.lengths)
    lengths = np.broadcast_to(sorted(settings.lengths), (settings.seeds, number))
    return columns | {"inner_steps": lengths}


def _updated_once(settings: KernelDrift, start: tuple[PyTree, PyTree], draw: Draw):
    """Yield the model after one update of each length, its state and passes."""
    for length in sorted(settings.lengths):
        method = training.method_of(length)
        yield _solved(settings, *start, draw, (length, method), 1)


def _stepped(settings: KernelDrift, start: tuple[PyTree, PyTree], draw: Draw):
    """Yield the model after each number of steps with K = 1, its state and passes."""
    (model, state), made, passes = start, 0, 0.0
    for length in sorted(settings.lengths):
        one_by_one = 1, training.method_of(1)
        model, state, more = _solved(
            settings, model, state, draw, one_by_one, length - made
        )
        made, passes = length, passes + more
        yield model, state, passes


def _solved(
    settings: KernelDrift, model, state, draw: Draw, how: tuple[int, Any], updates: int
) -> tuple[PyTree, PyTree, float]:
    period, method = how
    solution = gnlin.solve(
        model,
        draw.train,
        gnlin.IterativeLinearisation(
            jnp.asarray(float(period)), settings.learning_rate, method=method
        ),
        loss=scores.loss_of(draw.train[1], settings.reduction),
        max_steps=updates,
        state=state,
        divergence=None,
        history=False,
    )
    stats = solution.stats
    passes = float(stats["num_jvps"] + stats["num_vjps"])
    return solution.model, solution.state, passes


def _kernel_of(model: PyTree, state: PyTree, *inputs: Array) -> Array:
    return gnlin.TangentKernel(model, state=state)(*inputs)


def _measured(model, state, passes: float, draw: Draw, first: Array) -> dict[str, float]:
    (inputs, _), num_kernel = draw.train, len(first)
    kernel = _kernel_of(model, state, inputs[:num_kernel])
    outputs = training.outputs_of(model, state, inputs)
    return {
        "angle": _angles(np.stack([first, kernel]))[0],
        "regression_accuracy": regression_accuracy(model, state, draw),
        "train_loss": float(scores.mean_loss(outputs, draw.train[1])),
        "passes": passes,
    }


def regression_accuracy(model: PyTree, state: PyTree, draw: Draw) -> float:
    """Return the test accuracy of regression with the model's kernel alone."""
    (inputs, targets), _, (tested, test_targets) = draw
    tested, test_targets = tested[:MOST_TESTED], test_targets[:MOST_TESTED]
    kernel = np.asarray(_kernel_of(model, state, inputs))
    m = round(kernel.size**0.5)
    kernel = kernel.reshape(m, m)
    values = np.asarray(scores.as_values(targets, m // targets.size))
    mean = values.mean(axis=0)
    damped = kernel + RIDGE * np.trace(kernel) / m * np.eye(m)
    weights = np.linalg.solve(damped, np.ravel(values - mean))
    across = np.asarray(_kernel_of(model, state, tested, inputs)).reshape(-1, m)
    outputs = jnp.asarray((across @ weights).reshape(len(tested), *mean.shape) + mean)
    return float(scores.score(outputs, test_targets, scores.spread(targets)))


#
# Verdicts
#


def angles(runs: Runs) -> Float[ndarray, "seeds parts"]:
    return np.stack([runs.final(name) for name in ANGLES], axis=1)


def judge_all(settings: KernelDrift, all_runs: Sequence[Runs]) -> list[Verdict]:
    verdicts = []
    for period in settings.periods:
        runs = only(all_runs, period=period)
        turned = angles(runs)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log2(turned[:, 0] / turned[:, 1:].max(axis=1))
            share = turned[:, 0] / turned.sum(axis=1)
        verdicts += [
            judge(
                f"With K = {period:,} the kernel changes fastest at the start of "
                "training",
                "log2 of the ratio of angles by which the kernel turns, first "
                f"{1 / PARTS:.0%} of the steps over the fastest other {1 / PARTS:.0%}",
                training.where_trained(ratio, runs),
                thresholds.RISES,
                lacking=untrained(runs),
            ),
            judge(
                f"With K = {period:,} most of the kernel's change is at the start of "
                "training",
                f"share of the first {1 / PARTS:.0%} of the steps in the angle by which "
                f"the kernel turns, summed over {PARTS} parts of the training",
                training.where_trained(share, runs),
                thresholds.FASTEST_EARLY,
                lacking=untrained(runs),
            ),
        ]
    return verdicts + _judge_features(settings, all_runs)


def _judge_features(settings: KernelDrift, all_runs: Sequence[Runs]) -> list[Verdict]:
    if not select(all_runs, after=ONE_UPDATE):
        return []
    updated, stepped = (
        only(all_runs, after=which) for which in (ONE_UPDATE, AS_MANY_STEPS)
    )
    longest = max(settings.lengths)
    accuracy = "regression_accuracy"
    once, steps = updated[accuracy], stepped[accuracy]
    with np.errstate(divide="ignore", invalid="ignore"):
        further = np.log2(updated.final("angle") / stepped.final("angle"))
    of_regression = (
        "difference in test accuracy of regression with the kernel, one update of "
        f"K = {longest:,} less"
    )
    as_many = f"{longest:,} steps of K = 1"
    return [
        judge(
            f"One feature update of K = {longest:,} learns better features than one of "
            f"K = {min(settings.lengths)}",
            f"{of_regression} one update of K = {min(settings.lengths)}",
            once[:, -1] - once[:, 0],
            thresholds.RISES,
            untested=at_ceiling(once[:, 0], once[:, -1]),
        ),
        judge(
            f"One feature update of K = {longest:,} learns worse features than {as_many}",
            f"{of_regression} {as_many}",
            once[:, -1] - steps[:, -1],
            thresholds.FALLS,
            untested=at_ceiling(once[:, -1], steps[:, -1]),
        ),
        judge(
            f"One feature update of K = {longest:,} turns the kernel less than {as_many}",
            "log2 of the ratio of angles to the initial kernel, one update of K = "
            f"{longest:,} over {as_many}",
            further,
            thresholds.FALLS,
        ),
    ]


def draw(settings: KernelDrift, all_runs: Sequence[Runs], out: Path) -> Mapping[str, str]:
    colours = shades(len(settings.periods))
    # The title of each panel, and its value before training: the alignment of the first
    # kernel with itself, and with the last one (`end`).
    panels_of = {
        "alignment_with_first": (
            "With the initial kernel",
            lambda end: np.ones_like(end),
        ),
        "alignment_with_last": ("With the final kernel", lambda end: end),
    }
    features = select(all_runs, after=ONE_UPDATE) + select(all_runs, after=AS_MANY_STEPS)
    rows = 2 if features else 1
    with figure(out / "kernel_drift.png", width=11, height=4.4 * rows) as drawing:
        panels = drawing.subplots(rows, 2, squeeze=False)
        for panel, (name, (title, at_start)) in zip(
            panels[0], panels_of.items(), strict=True
        ):
            for period, colour in zip(settings.periods, colours, strict=True):
                runs, label = only(all_runs, period=period), f"K = {period:,}"
                end = runs["alignment_with_first"][:, -1:]
                steps = np.concatenate([[0], runs["inner_steps"].mean(axis=0)])
                values = np.concatenate([at_start(end), runs[name]], axis=1)
                band(panel, steps, values, colour, label)
            panel.set(title=title, xlabel="Inner steps")
        panels[0, 1].sharey(panels[0, 0])
        panels[0, 0].set_ylabel("Centred kernel alignment")
        panels[0, 0].legend()
        for runs, colour in zip(features, (BLUE, BLACK), strict=False):
            label, x = LABELS[str(runs.point["after"])], runs["inner_steps"][0]
            band(panels[1, 0], x, runs["angle"], colour, label, "o-")
            accuracy = 100 * runs["regression_accuracy"]
            band(panels[1, 1], x, accuracy, colour, label, "o-")
        if features:
            panels[1, 0].set(ylabel="Angle to the initial kernel")
            panels[1, 1].set(ylabel="Test accuracy of kernel regression (%)")
            panels[1, 0].legend()
            for panel in panels[1]:
                panel.set(xscale="log", xlabel="Inner steps $K$")
    caption = (
        f"Centred alignment of the kernel of {settings.num_kernel} training images with "
        "the kernel before and after training, over inner steps. Means and ranges over "
        f"{settings.seeds} seeds; {training.described(settings)}."
    )
    if features:
        caption += (
            " Below: the angle to the initial kernel, and the test accuracy of "
            f"regression with the kernel (ridge {RIDGE:g} of its mean eigenvalue), "
            "after one feature update of K steps and after K updates of one step."
        )
    return {"kernel_drift": caption}


EXPERIMENT = Experiment(
    QUICK,
    EMBEDDED,
    FULL,
    points,
    train,
    judge_all,
    draw,
    paper="The kernel changes fastest early in training (Fort et al. 2020). The paper "
    "adds that one step of K = 1 learns fewer features than 10^5 steps of K = 10^5.",
    grid="periods",
    own=training.own,
    trains_state=lambda settings: True,
    rehearsed=True,
    medium=MEDIUM,
)
