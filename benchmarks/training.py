"""Training and evaluation of networks on images, or on a user's own task.

Most experiments use this module. On the full batch one compiled program trains all seeds,
with looks after given numbers of feature updates. On mini-batches `gnlin.fit` trains one
seed after the other, with looks after given numbers of steps. A seed draws the training,
validation and test images as well as the initialisation.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, ScalarLike
from numpy import ndarray

import gnlin

from . import own_task, scores
from ._options import Refusal
from .data import augmentation, cifar10, digits, mnist, textures
from .data.standard import DATASETS, scaled, standardised
from .data.teachers import TEACHERS
from .dry_run import Tally
from .experiment import Place, Runs, Settings
from .figures import band
from .networks.cnn import digits_cnn, lenet, smooth_digits_cnn, wide_filtered_digits_cnn
from .networks.mlp import digits_mlp, mnist_mlp, teacher_mlp
from .networks.resnet import resnet18
from .scores import guessing_loss, loss_of, Score, score, spread, trained_loss
from .thresholds import PART_OF_GUESSING, TRAINED_LOSS


Labelled = tuple[Float[Array, "n ..."], Int[Array, " n"]]
Columns = dict[str, ndarray]


class Given(Protocol):
    """Settings that say which network is trained on which data."""

    @property
    def data(self) -> str: ...
    @property
    def network(self) -> str: ...
    @property
    def num_train(self) -> int | None: ...


class Draw(NamedTuple):
    """The images that one seed draws."""

    train: Labelled
    validation: Labelled
    """The images for early stopping."""
    test: Labelled


Callbacks = Callable[[Draw, PyTree, PyTree], Sequence[gnlin.callbacks.Callback]]
"""Returns callbacks for a seed's images, and its model and state before training."""

NETWORKS: dict[str, Callable[[Key[Array, ""]], Any]] = {
    "digits-mlp": digits_mlp,
    "mlp-mnist": mnist_mlp,
    "teacher-mlp": teacher_mlp,
    "digits-cnn": digits_cnn,
    "smooth-digits-cnn": smooth_digits_cnn,
    "wide-filtered-digits-cnn": wide_filtered_digits_cnn,
    "lenet": lenet,
    "lenet-mnist": functools.partial(lenet, image=(1, 28, 28)),
    "resnet18": functools.partial(resnet18, normalise=False),
    "resnet18-bn": eqx.nn.make_with_state(resnet18),
    "narrow-resnet18": functools.partial(
        resnet18, normalise=False, width=4, image_channels=1
    ),
    "narrow-resnet18-bn": functools.partial(
        eqx.nn.make_with_state(resnet18), width=4, image_channels=1
    ),
}
AUGMENTATIONS: dict[str, Any] = {
    "shift": augmentation.shift,
    "flip-and-crop": augmentation.flip_and_crop,
    "none": None,
}
Augmentation = Literal["shift", "flip-and-crop", "none"]
NUM_CLASSES = 10
EXPLAINED = "the explained share of the variance of the targets"
"""What the accuracy is on a task of values (`benchmarks/scores.py`)."""
MOST_MARKED = 30
"""The largest number of feature updates that a figure marks."""
VALIDATION_SHARE = 0.1
"""The share of the training images of the standard files that is used for validation."""
IMAGES = {"mnist": ((1, 28, 28), 54_000), "cifar10": ((3, 32, 32), 45_000)}
"""The shape of an image, and the number of training images, of the standard files."""
FEW = 1_000
"""The number of training images in a dry run."""

_LITERAL = 30
"""Below this number of steps, passes through the model are cheaper than a kernel."""
HISTORY_BYTES = 500
"""The memory of one step in the history of `gnlin.fit`, which holds Python numbers."""
FLOW_FROM = 1e4
"""From this period K on, gradient flow for the time K eta replaces K steps."""


@dataclasses.dataclass(frozen=True)
class Images(Settings):
    """Settings of an experiment on images."""

    seeds: int = 5
    data: str = "digits"
    network: str = "digits-mlp"
    num_train: int | None = None
    """The number of training examples; `None` for all of them."""
    batch_size: int | None = None
    """`None` for the full batch."""
    learning_rate: float = 1e-3
    reduction: Literal["sum", "mean"] = "mean"
    """The reduction of the loss to which the learning rate refers. On mini-batches it is
    the mean, or the sum over all training images, which a batch estimates. On the full
    batch it is always the sum (`Experiment.settings`)."""
    num_steps: int = 1000
    """The number of inner steps of a run."""
    num_looks: int = 24
    augmentation: Augmentation = "none"


S = TypeVar("S", bound=Images)


def medium(full: S, **changes: Any) -> S:
    """Return the settings of the full scale with fewer steps, on images that need no
    files. These are a ninth of the images, so that the learning rate for the summed loss
    is nine times the paper's."""
    defaults: dict[str, Any] = {"num_steps": 10_000, "learning_rate": 1e-4}
    changes = {"data": "textures", "network": "lenet"} | defaults | changes
    return dataclasses.replace(full, **changes)


def own(settings: Images) -> Images:
    """Return the settings for a user's own task."""
    return dataclasses.replace(settings, num_train=None, augmentation="none")


def model_of(settings: Given) -> Callable[[Key[Array, ""]], Any]:
    """Return a function that makes the model, or the pair of the model and its state."""
    if own_task.is_own(settings.data):
        return own_task.read(settings.data).model
    return NETWORKS[settings.network]


def stateless(settings: Given) -> Callable[[Key[Array, ""]], eqx.Module]:
    """Return a function that makes the model, and refuses a model with state."""
    return _stateless(model_of(settings))


@functools.cache  # one object for each network, so that compiled programs are shared
def _stateless(make_model):
    def checked(key):
        model, state = own_task.with_state(make_model(key))
        if state is not None:
            raise Refusal(f"The model of this task {own_task.HAS_STATE}")
        return model

    return checked


def load(settings: Given, place: Place, seed: int) -> Draw:
    """Load the data. A seed draws all parts of the digits. The test images of the
    standard files are fixed."""
    if place.rehearsal is not None and settings.data in IMAGES:
        drawn = _few(settings, place.data_dir, seed)
    else:
        drawn = _load(
            settings.data, settings.network, place.data_dir, settings.num_train, seed
        )
    return Draw(*(_on_device(*labelled) for labelled in drawn))


def _load(
    data: str, network: str, data_dir: Path | None, num_train: int | None, seed: int
):
    if own_task.is_own(data):
        return own_task.draw(data, num_train, seed)
    if data in TEACHERS:
        assert num_train is not None
        return TEACHERS[data].draw(num_train, seed)
    if data == "digits":
        return digits.draw(num_train, seed, network.endswith("mlp"))
    if data == "textures":
        return textures.draw(num_train, seed)
    (images, labels), test = _standard(data, data_dir)
    order = np.random.default_rng(seed).permutation(len(labels))
    num_validation = math.ceil(VALIDATION_SHARE * len(labels))
    validation, train = order[:num_validation], order[num_validation:][:num_train]
    return (images[train], labels[train]), (images[validation], labels[validation]), test


def _few(settings: Given, data_dir: Path | None, seed: int):
    """Return a thousand training images for a dry run, or noise if no folder is given."""
    number = round(share(settings) * num_images(settings))
    if data_dir is not None:
        return _load(settings.data, settings.network, data_dir, number, seed)
    rng, (shape, _) = np.random.default_rng(seed), IMAGES[settings.data]
    noise = lambda n: (rng.random((n, *shape)), rng.integers(NUM_CLASSES, size=n))
    return noise(number), noise(number), noise(number)


def num_images(settings: Given) -> int:
    """Return the number of training images."""
    if settings.data in IMAGES:
        whole = IMAGES[settings.data][1]
        return min(settings.num_train or whole, whole)
    return len(load(settings, Place(), 0).train[1])


def share(settings: Given) -> float:
    """Return the share of the training images that a dry run uses."""
    if settings.data not in IMAGES:
        return 1.0
    return min(1.0, FEW / num_images(settings))


def _on_device(images: ndarray, labels: ndarray) -> Labelled:
    return jnp.asarray(images), jnp.asarray(labels)


@functools.lru_cache(maxsize=2)
def _standard(data: str, data_dir: Path | None):
    if data_dir is None:
        raise Refusal(
            f"This scale needs the files of {data}: name their folder with --data-dir."
        )
    reader = {"mnist": mnist, "cifar10": cifar10}[data]
    (images, labels), (test_images, test_labels) = reader.load(data_dir, DATASETS[data])
    if data == "mnist":
        return (scaled(images), labels), (scaled(test_images), test_labels)
    images, test_images = standardised(images, test_images)
    return (images, labels), (test_images, test_labels)


def untouched(settings: Images, place: Place) -> Float[ndarray, " seeds"]:
    """Return the test accuracies before training."""
    make_model, found = model_of(settings), []
    for seed in settings.each_seed:
        draw = load(settings, place, seed)
        model, state = own_task.with_state(make_model(jax.random.key(seed)))
        found.append(accuracy_of(model, state, draw.test, spread(draw.train[1])))
    return np.array(found, float)


def first_losses(settings: Images, place: Place) -> Float[ndarray, " seeds"]:
    """Return the mean training losses before training."""
    make_model, found = model_of(settings), []
    for seed in settings.each_seed:
        model, state = own_task.with_state(make_model(jax.random.key(seed)))
        found.append(mean_loss(model, state, load(settings, place, seed).train))
    return np.array(found, float)


def on_mini_batches(settings: Images) -> bool:
    return settings.batch_size is not None


def described(settings: Images) -> str:
    """Describe the network, the data and the batch, for a caption."""
    number = "all" if settings.num_train is None else f"{settings.num_train:,}"
    batch = "full batch" if settings.batch_size is None else "mini-batches of "
    if settings.batch_size is not None:
        batch += f"{settings.batch_size}"
        if own_task.is_own(settings.data):
            batch += ", or all examples if they are fewer"
    if own_task.is_own(settings.data):
        said = f"{settings.network}, {number} training examples, {batch}"
        return said + (f" (accuracy is {EXPLAINED})" if has_values(settings) else "")
    return f"{settings.network} on {number} training images of {settings.data}, {batch}"


def has_values(settings: Given) -> bool:
    """Return whether this is a user's own task whose targets are values."""
    if not own_task.is_own(settings.data):
        return False
    (_, targets), _, _ = own_task.draw(settings.data, None, 0)
    return not scores.are_classes(targets)


def enough(settings: Given) -> str:
    """Say, for a caption, at which mean training loss a run ends (`trained_loss`)."""
    if not has_values(settings):
        return f"{TRAINED_LOSS:g}"
    return f"{TRAINED_LOSS:.0%} of that of outputs that equal the mean target"


#
# The full batch
#


def looks_at(num_updates: int, num_looks: int) -> Float[ndarray, " looks"]:
    """Return the numbers of feature updates after which to look, evenly spaced in their
    logarithm."""
    return np.unique(np.round(np.geomspace(1, num_updates, num_looks)))


def full_batch(
    settings: Images,
    place: Place,
    solver: gnlin.authoring.AbstractGaussNewton,
    num_updates: int,
    *,
    until_trained: bool = False,
    damping: ScalarLike | None = None,
) -> Columns:
    """Train all seeds on the full batch, and return columns over seeds and looks. Losses
    are means over the examples.

    - `until_trained`: a run ends once its mean training loss is at most `TRAINED_LOSS`,
        and its last look is repeated. `trained` says whether it has reached that loss.
    - `damping`: the damping of the solver, if its linearised problems are to be solved.
        `gradient` is then the largest entry of the gradient of the mean loss that
        remained in any of them.
    """
    looks = looks_at(num_updates, settings.num_looks)
    # All points have the same number of looks, so that they can share a program.
    padded = np.pad(looks, (0, settings.num_looks - len(looks)), mode="edge").astype(int)
    make_model, seeds = stateless(settings), settings.each_seed
    if place.rehearsal is not None:
        options = until_trained, damping
        _rehearse_full_batch(settings, place, solver, num_updates, options)
    draws = [load(settings, place, seed) for seed in seeds]
    guessed = [
        guessing_loss(loss_of(y), y) / scores.number_of(y)
        for _, y in (draw.train for draw in draws)
    ]
    draws = jax.tree.map(lambda *parts: jnp.stack(parts), *draws)
    options = padded, until_trained, damping
    found = _train_all(make_model, solver, (jnp.asarray(seeds), draws), options)
    columns = {name: np.asarray(x)[:, : len(looks)] for name, x in found.items()}
    return columns | {"guessing_loss": np.array(guessed)[:, None]}


def _rehearse_full_batch(settings, place, solver, num_updates, options) -> None:
    seed = settings.first_seed

    @functools.cache
    def draws():
        return jax.tree.map(lambda x: x[None], load(settings, place, seed))

    method = getattr(solver, "method", None)
    # With the kernel, inner steps are taken one by one.
    counted, in_update = "feature_updates", 1.0
    if method == "kernel":
        counted, in_update = "inner_steps", float(solver.period)

    def attempt(number):
        looks = np.full(settings.num_looks, min(number, num_updates))
        found = _train_all(
            stateless(settings), solver, (jnp.asarray([seed]), draws()), (looks, *options)
        )
        steps, passes = (float(found[name][0, -1]) for name in (counted, "passes"))
        return Tally(steps, passes)

    program = type(solver), method, settings.num_train
    num_steps = in_update * num_updates
    assert place.rehearsal is not None
    place.rehearsal(program, settings.seeds, num_steps, attempt, share=share(settings))


@eqx.filter_jit
def _train_all(make_model, solver, seeds, options):
    one = lambda seed: _train(make_model, solver, seed[0], seed[1], *options)
    return jax.lax.map(one, seeds)


class _Run(NamedTuple):
    y: PyTree
    point: PyTree
    """The point of the last linearisation."""
    state: PyTree
    stable: Array
    moving: Array
    """Whether the last call made a feature update. At a stationary point it makes
    none."""
    trained: Array
    gradient: Array
    """The largest entry of the gradients that remained in the problems solved so far."""


def _train(make_model, solver, seed, draw: Draw, looks, until_trained, damping):
    (inputs, labels), (held_out, held_out_labels), (test_inputs, test_labels) = draw
    model = make_model(jax.random.key(seed))
    parameters, frozen = eqx.partition(model, eqx.is_inexact_array)
    fn = gnlin.PerExample(lambda y, x: eqx.combine(y, frozen)(x))
    outputs = jax.eval_shape(fn, parameters, inputs)
    objective = gnlin.authoring.BatchLoss(loss_of(labels), outputs, labels)
    number, of_training = scores.number_of(labels), spread(labels)
    score_of = functools.partial(score, spread=of_training)
    evaluate = lambda y: fn(y, inputs)

    def is_trained(y):
        if not until_trained:
            return jnp.array(False)
        return objective.value(evaluate(y)) <= trained_loss(labels) * number

    def left_by(y, lin):
        if damping is None:
            return jnp.zeros(())
        moved = jax.tree.map(jnp.subtract, y, lin.point)
        cotangent = objective.gradient(lin.outputs + lin.jvp(moved))
        of_loss = lin.vjp(cotangent)
        gradient = jax.tree.map(lambda g, d: g + damping * d, of_loss, moved)
        return optx.max_norm(gradient) / number

    def step(run):
        lin = gnlin.linearise(fn, run.y, inputs)
        y, state = solver.advance(objective, lin, evaluate, run.state)
        stable = state.result == optx.RESULTS.successful
        made = state.counts.num_feature_updates - run.state.counts.num_feature_updates
        gradient = jnp.maximum(run.gradient, left_by(y, lin))
        return _Run(y, run.y, state, stable, made > 0, is_trained(y), gradient)

    def until(run, updates):
        def unfinished(run):
            more = run.state.counts.num_feature_updates < updates
            return run.stable & run.moving & ~run.trained & more

        run = jax.lax.while_loop(unfinished, step, run)
        y, point, state = run.y, run.point, run.state
        fitted, tested = evaluate(y), fn(y, test_inputs)
        moved = jax.tree.map(jnp.subtract, y, point)

        of_linearised = lambda x: linearised(lambda y: fn(y, x), point, moved)
        measured = {
            "feature_updates": state.counts.num_feature_updates,
            "inner_steps": state.counts.num_inner_steps,
            "passes": state.counts.num_jvps + state.counts.num_vjps,
            "stable": run.stable,
            "train_loss": objective.value(fitted) / number,
            "train_loss_linearised": objective.value(of_linearised(inputs)) / number,
            "train_accuracy": score_of(fitted, labels),
            "validation_accuracy": score_of(
                fn(y, held_out), held_out_labels, least=-math.inf
            ),
            "test_accuracy": score_of(tested, test_labels),
            "train_accuracy_linearised": score_of(of_linearised(inputs), labels),
            "test_accuracy_linearised": score_of(of_linearised(test_inputs), test_labels),
        }
        if until_trained:
            measured["trained"] = run.trained
        if damping is not None:
            measured["gradient"] = run.gradient
        return run, measured

    state = solver.start(parameters, outputs)
    dtype = jax.tree.leaves(parameters)[0].dtype
    start = _Run(
        parameters,
        parameters,
        state,
        jnp.array(True),
        jnp.array(True),
        jnp.array(False),
        jnp.zeros((), dtype),
    )
    return jax.lax.scan(until, start, looks)[1]


def literal(period: float) -> Any:
    """Return the method by which `IterativeLinearisation` takes this many steps one by
    one."""
    return "matrix-free" if period < _LITERAL else "kernel"


def method_of(period: float) -> Any:
    """Return the method for this period: literal steps, or gradient flow for a long
    period."""
    return literal(period) if period < FLOW_FROM else "flow"


def descend(
    settings: Images,
    place: Place,
    period: float,
    learning_rate: float,
    *,
    fewest_updates: int,
    until_trained: bool = False,
) -> Columns:
    """Run iterative linearisation on the full batch, for at least `num_steps` inner
    steps, or until trained. Short periods use passes through the model, longer ones the
    kernel, and very long ones gradient flow."""
    solver = gnlin.IterativeLinearisation(
        jnp.asarray(float(period)), jnp.asarray(learning_rate), method=method_of(period)
    )
    num_updates = max(round(settings.num_steps / period), fewest_updates)
    return full_batch(settings, place, solver, num_updates, until_trained=until_trained)


def flow_error(
    model: PyTree,
    data: Labelled,
    loss: gnlin.authoring.AbstractLoss,
    learning_rate: float,
    num_steps: int,
) -> float:
    """Return how far gradient flow and literal steps on the first linearised problem
    differ, relative to the step."""

    def end(method):
        solver = gnlin.IterativeLinearisation(num_steps, learning_rate, method=method)
        return gnlin.solve(model, data, solver, loss=loss, max_steps=1).model

    literal, flow = end("kernel"), end("flow")
    moved = gnlin.features.parameter_distance(literal, model)
    return float(gnlin.features.parameter_distance(flow, literal) / moved)


def flow_described(all_runs: Sequence[Runs], num_steps: float, where: str = "") -> str:
    """Say, for a caption, which periods are computed as gradient flow and, if the runs
    have measured it, its error against literal steps."""
    said = f"K steps are computed as gradient flow from K = {FLOW_FROM:g} on"
    measured = [runs["flow_error"] for runs in all_runs if "flow_error" in runs.columns]
    if not measured:
        return said
    return (
        f"{said}, which{where} differs by at most {np.max(measured):.1e} of a step from "
        f"{num_steps:,.0f} literal steps"
    )


#
# Mini-batches
#


def descent(period: float, learning_rate: float) -> gnlin.IterativeLinearisation:
    """Return a solver that takes gradient steps on mini-batches. The period is an array,
    so that all periods share a compiled program."""
    return gnlin.IterativeLinearisation(jnp.asarray(float(period)), learning_rate)


def looks(settings: Images) -> tuple[int, int]:
    """Return the number of steps between looks, and the number of looks."""
    every = math.ceil(settings.num_steps / settings.num_looks)
    return every, math.ceil(settings.num_steps / every)


def mini_batches(
    settings: Images,
    place: Place,
    solver: gnlin.authoring.AbstractGaussNewton,
    callbacks: Callbacks = lambda draw, model, state: (),
) -> Columns:
    """Train all seeds on mini-batches in single precision, with evenly spaced looks. The
    columns include those that the callbacks record. The training loss is the mean over a
    batch."""
    if place.rehearsal is not None:
        _rehearse_mini_batches(settings, place, solver, callbacks)
    runs = [_fit(settings, place, solver, callbacks, seed) for seed in settings.each_seed]
    return {name: np.stack([run[name] for run in runs]) for name in runs[0]}


def _rehearse_mini_batches(settings, place, solver, callbacks) -> None:
    whole = num_images(settings)
    batch_size = min(settings.batch_size or whole, whole)
    in_batch = min(1.0, share(settings) * whole / batch_size)

    def attempt(number):
        short = dataclasses.replace(settings, num_steps=number, num_looks=1)
        run = _fit(short, place, solver, callbacks, settings.first_seed)
        return Tally(number, float(run["passes"]))

    each = type(solver), settings.network, settings.augmentation, batch_size
    held = HISTORY_BYTES * settings.num_steps
    assert place.rehearsal is not None
    place.rehearsal(
        each, settings.seeds, settings.num_steps, attempt, share=in_batch, held=held
    )


def to_a_loss(
    settings: Images, place: Place, solver: gnlin.authoring.AbstractGaussNewton
) -> Columns:
    """Train as `mini_batches` does, with the loss and accuracy on the training images:
    `trained` says whether their mean loss is at most `TRAINED_LOSS`."""
    columns = mini_batches(
        settings,
        place,
        solver,
        lambda draw, model, state: [TrainAccuracy(draw.train), TrainLoss(draw.train)],
    )
    enough = [
        [float(trained_loss(load(settings, place, seed).train[1]))]
        for seed in settings.each_seed
    ]
    return columns | {"trained": columns["train_loss"] <= np.array(enough)}


def _fit(settings, place, solver, callbacks, seed) -> Columns:
    draw = Draw(*(single(labelled) for labelled in load(settings, place, seed)))
    train = draw.train
    model, state = own_task.with_state(model_of(settings)(jax.random.key(seed)))
    model, state = single(model), single(state)
    of_training = Score(float(spread(train[1])))
    told = [HeldOut(draw.validation, of_training), *callbacks(draw, model, state)]
    num_train = len(train[1])
    batch_size = min(settings.batch_size or num_train, num_train)
    if settings.reduction == "sum":  # over all examples, estimated from the batch
        train = (*train, jnp.full(num_train, num_train / batch_size, jnp.float32))
    every, num_looks = looks(settings)
    checkpoint = None
    if place.checkpoints is not None:
        checkpoint = place.checkpoints / f"seed={seed}"
    with warnings.catch_warnings():
        # If a run ended early, `stable` says so.
        warnings.filterwarnings("ignore", message="`gnlin.fit` (stopped|was interrupted)")
        result = _checkpointed(
            model,
            train,
            solver,
            loss=loss_of(train[1], settings.reduction),
            batch_size=batch_size,
            steps=settings.num_steps,
            key=jax.random.key(seed),
            state=state,
            validation=draw.test,
            validate_every=every,
            metrics={"accuracy": of_training},
            augment=AUGMENTATIONS[settings.augmentation],
            callbacks=told,
            progress=place.checkpoints is not None,
            checkpoint=checkpoint,
            resume=checkpoint is not None and place.resume,
        )
    if result.reason.endswith("interrupted"):
        raise KeyboardInterrupt
    history = result.history
    looked = np.flatnonzero(~np.isnan(history["validation_accuracy"]))
    if looked.size == 0:  # the model's outputs are NaN, so no look has an accuracy
        looked = np.array([-1])
    ours = {
        "inner_steps": history["num_inner_steps"].cumsum(),
        "feature_updates": history["num_feature_updates"],
        "train_loss": history["loss"]
        / (1 if settings.reduction == "mean" else scores.number_of(train[1])),
        "test_accuracy": np.nan_to_num(history["validation_accuracy"], nan=0.0),
    }
    if "validation_accuracy_linearised" in history.columns:
        linearised = history["validation_accuracy_linearised"]
        ours["test_accuracy_linearised"] = np.nan_to_num(linearised, nan=0.0)
    for callback in told:
        ours |= {name: history[name] for name in callback.columns}
    columns = {name: padded(x[looked], num_looks) for name, x in ours.items()}
    columns["validation_accuracy"] = columns.pop("held_out_accuracy")
    guessed = guessing_loss(loss_of(train[1]), train[1]) / scores.number_of(train[1])
    columns["guessing_loss"] = np.full(num_looks, guessed)
    columns["passes"] = np.array(result.stats["num_jvps"] + result.stats["num_vjps"])
    columns["stable"] = np.ones(num_looks, bool)
    well = optx.RESULTS.successful, optx.RESULTS.nonlinear_max_steps_reached
    if not any(bool(result.result == each) for each in well):
        columns["stable"][-1] = False
    for callback in told:
        if isinstance(callback, Snapshots):
            columns[callback.name] = callback.taken
    return columns


class HeldOut(gnlin.callbacks.Callback):
    """Records the accuracy on the validation images. `fit` itself looks at the test
    images."""

    columns = ("held_out_accuracy",)

    def __init__(self, data: Labelled, of_training: Score):
        self.data, self.spread = data, of_training.spread

    def on_validation(self, run: Any) -> None:
        of = run.model, run.model_state, self.data, self.spread
        found = accuracy_of(*of, least=-math.inf)
        run.record({"held_out_accuracy": float(found)})


def in_precision_of(model: PyTree, data: Labelled) -> Labelled:
    """Return the data in the precision of the model. Tokens and classes are unchanged."""
    dtype = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))[0].dtype
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, data)


def outputs_of(model: PyTree, state: PyTree, inputs: Array) -> Array:
    """Return the outputs for many examples, in inference mode."""
    model = eqx.nn.inference_mode(model)
    if state is None:
        return jax.vmap(model)(inputs)
    return jax.vmap(model, (0, None), (0, None), axis_name="batch")(inputs, state)[0]


@eqx.filter_jit
def accuracy_of(
    model, state, data: Labelled, spread: ScalarLike, least: float = 0.0
) -> Array:
    images, labels = in_precision_of(model, data)
    return score(outputs_of(model, state, images), labels, spread, least)


@eqx.filter_jit
def mean_loss(model: PyTree, state: PyTree, data: Labelled) -> Array:
    images, labels = in_precision_of(model, data)
    return scores.mean_loss(outputs_of(model, state, images), labels)


class TrainLoss(gnlin.callbacks.Callback):
    """Records the loss on training images at each look, in place of the batch's loss."""

    columns = ("train_loss",)

    def __init__(self, data: Labelled, most: int = 10_000):
        images, labels = data
        self.data = images[:most], labels[:most]

    def on_validation(self, run: Any) -> None:
        loss = mean_loss(run.model, run.model_state, self.data)
        run.record({"train_loss": float(loss)})


class TrainAccuracy(gnlin.callbacks.Callback):
    """Records the accuracy of the network and of the linearised network on training
    images."""

    columns = ("train_accuracy", "train_accuracy_linearised")

    def __init__(self, data: Labelled, most: int = 10_000):
        images, labels = data
        self.data = images[:most], labels[:most]

    def on_validation(self, run: Any) -> None:
        both = _accuracies(run.model, run.model_state, run.linearisation_point, self.data)
        run.record(dict(zip(self.columns, map(float, both), strict=True)))


@eqx.filter_jit
def _accuracies(model, state, point, data: Labelled) -> tuple[Array, Array]:
    """Return the accuracies of the model, and of its linearisation at a point."""
    images, labels = in_precision_of(model, data)
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    start = eqx.filter(point, eqx.is_inexact_array)
    fn = lambda y: outputs_of(eqx.combine(y, static), state, images)
    moved = jax.tree.map(jnp.subtract, parameters, start)
    accuracy = lambda outputs: score(outputs, labels, spread(labels))
    return accuracy(fn(parameters)), accuracy(linearised(fn, start, moved))


def linearised(fn: Callable, point: PyTree, moved: PyTree) -> Array:
    """Return the outputs of a function's linearisation at a point, after a
    displacement."""
    outputs, change = jax.jvp(fn, (point,), (moved,))
    return outputs + change


class Snapshots(gnlin.callbacks.Callback):
    """Records an array computed from the model and its state, before training and at each
    look, as a column named `name`."""

    def __init__(
        self,
        name: str,
        take: Callable[[PyTree, PyTree], Array],
        start: tuple[PyTree, PyTree],
        settings: Images,
    ):
        first = np.asarray(take(*start))
        self.name = name
        self.take = take
        _, num_looks = looks(settings)
        self.taken = np.full((num_looks + 1, *first.shape), np.nan, first.dtype)
        self.taken[0] = first
        self.num_taken = np.array(1)

    def on_validation(self, run: Any) -> None:
        if self.num_taken < len(self.taken):
            self.taken[self.num_taken] = self.take(run.model, run.model_state)
            self.num_taken = self.num_taken + 1

    def state(self) -> PyTree:
        return self.taken, self.num_taken

    def restore(self, state: PyTree) -> None:
        self.taken, self.num_taken = (np.array(x) for x in state)


def _checkpointed(*arguments: Any, **options: Any) -> gnlin.Solution:
    try:
        return gnlin.fit(*arguments, divergence=None, **options)
    except gnlin.CheckpointError as error:
        raise Refusal(str(error)) from None


def single(tree: Any) -> Any:
    """Return the same arrays in single precision."""
    cast = lambda x: jnp.asarray(x, jnp.float32) if eqx.is_inexact_array(x) else x
    return jax.tree.map(cast, tree)


def padded(x: ndarray, length: int) -> ndarray:
    """Repeat the last value for the looks after an early end."""
    return np.pad(x, (0, length - len(x)), mode="edge")


#
# Statistics of the runs
#


def early_stopped(runs: Runs) -> Float[ndarray, " seeds"]:
    """Return the test accuracies at the look with the best validation accuracy, or at the
    first such look."""
    validation = np.nan_to_num(runs["validation_accuracy"], nan=-np.inf)
    best = np.argmax(validation, axis=1)
    return runs["test_accuracy"][np.arange(len(best)), best]


def optimally_stopped(runs: Runs) -> Float[ndarray, " seeds"]:
    """Return the paper's "optimal early stopping": the best test accuracy over all looks.
    It is chosen on the test images, and rises with the number of looks."""
    return runs["test_accuracy"].max(axis=1)


def where_trained(
    values: Float[ndarray, "seeds ..."], *all_runs: Runs
) -> Float[ndarray, "seeds ..."]:
    """Return the values, with NaN for seeds whose run on mini-batches is not trained."""
    finished = np.ones(len(values), bool)
    for runs in all_runs:
        finished &= is_trained(runs)
    return np.where(finished.reshape(-1, *(1,) * (values.ndim - 1)), values, np.nan)


def is_trained(runs: Runs) -> Bool[ndarray, " seeds"]:
    """Return whether each run on mini-batches is trained. The loss is averaged over the
    last tenth of the looks, since the loss of one batch is noisy."""
    loss = runs["train_loss"]
    last = loss[:, -max(loss.shape[1] // 10, 1) :].mean(axis=1)
    return last <= PART_OF_GUESSING * runs.final("guessing_loss")


def counted(runs: Runs, accuracy: Float[ndarray, " seeds"]) -> Float[ndarray, " seeds"]:
    """Return the accuracies, with NaN for runs that were meant to be trained and are not,
    or that have unsolved problems."""
    usable = np.ones(len(accuracy), bool)
    if "trained" in runs.columns:
        usable &= runs.final("trained") > 0
    if "unsolved" in runs.columns:
        usable &= runs.final("unsolved") == 0
    return np.where(usable, accuracy, np.nan)


def updates_to(
    runs: Runs, accuracy: float | Float[ndarray, " seeds"]
) -> Float[ndarray, " seeds"]:
    """Return how many feature updates each seed needs to reach a test accuracy, or one
    more than all of them if it does not."""
    reached = runs["test_accuracy"] >= np.asarray(accuracy)[..., None]
    updates = runs["feature_updates"]
    first = updates[np.arange(len(updates)), np.argmax(reached, axis=1)]
    return np.where(reached.any(axis=1), first, updates[:, -1] + 1)


def draw_band(
    axes: Any, runs: Runs, name: str, colour: Any, label: str, scale: float = 100
) -> None:
    """Draw the mean over the seeds and their range over inner steps, by default in per
    cent."""
    steps, values = runs["inner_steps"].mean(axis=0), scale * runs[name]
    band(axes, steps, values, colour, label)
    ended = runs.final("stable") == 0 if "stable" in runs.columns else np.zeros(1, bool)
    if ended.any():
        end = steps[-1], values[:, -1].mean()
        axes.plot(*end, "X", color=colour, markersize=9)
        said = f"{ended.sum()} of {len(ended)} diverged"
        offset = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(said, end, color=colour, fontsize="small", **offset)


def mark_updates(axes: Any, runs: Runs) -> None:
    """Mark the feature updates, if they are few."""
    period, end = runs.point["period"], runs["inner_steps"].max()
    if end / period <= MOST_MARKED:
        for step in np.arange(period, end, period):
            axes.axvline(step, color="#CCCCCC", linewidth=0.7, zorder=0)
