"""The settings: the networks, their data, and the strengths."""

import dataclasses
import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree, Scalar

import gnlin

from ... import own_task, scores, thresholds, training
from ..._options import Refusal
from ...data import digits, quintic
from ...experiment import Place, Settings
from ...networks.mlp import digits_mlp, quintic_mlp
from ...thresholds import Threshold


Data = tuple[Array, Array]


def _periods(per_decade: float) -> tuple[float, ...]:
    """Return whole-number periods over six decades."""
    return tuple(np.round(np.logspace(2, 8, round(6 * per_decade) + 1)).tolist())


@dataclasses.dataclass(frozen=True)
class KVsLambda(Settings):
    """The settings for all tasks.

    The learning rates suit the kernels in training, whose largest eigenvalue grows to
    about 1e6 on the quintic (from 50 at initialisation) and to 1e5 on the digits. With
    cross-entropy the curvature of the loss cancels most of it.
    """

    seeds: int = 8
    periods: tuple[float, ...] = _periods(per_decade=2)
    """K; lambda is 1/(eta K)."""
    quintic_rate: float = 1e-7
    quintic_steps: int = 150
    """Outer steps, the same for all strengths."""
    digits_rate: float = 1e-5
    digits_steps: int = 20
    images_per_class: int = 4
    few_per_class: int = 2
    wide: int = 160
    """Hidden units of the wider network for the digits; the usual one has 40."""


EMBEDDED = KVsLambda()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=2,
    periods=_periods(per_decade=0.5),
    quintic_steps=20,
    digits_steps=5,
    images_per_class=2,
    few_per_class=1,
    wide=80,
)
FULL = dataclasses.replace(
    EMBEDDED, seeds=10, periods=_periods(per_decade=4), images_per_class=10
)


@dataclasses.dataclass(frozen=True)
class OwnKVsLambda(Settings):
    """The settings for one task, such as a user's own."""

    seeds: int = EMBEDDED.seeds
    periods: tuple[float, ...] = EMBEDDED.periods
    learning_rate: float | None = None
    """eta; by default a power of ten, at most a hundredth of the largest stable learning
    rate at the first initialisation, since eigenvalues grow in training."""
    num_steps: int = EMBEDDED.digits_steps
    """Outer steps, the same for all strengths."""
    data: str = ""
    """The file of the task, or the name of its data."""
    network: str = ""
    num_train: int | None = None
    """Number of training examples; `None` for all of them."""


AnySettings = KVsLambda | OwnKVsLambda
MEDIUM = OwnKVsLambda(
    periods=_periods(per_decade=1),
    learning_rate=1e-5,  # the default, since the largest eigenvalue is 405 at first
    num_steps=15,
    data="textures",
    network="lenet",
    num_train=40,
)


def own(settings: AnySettings) -> OwnKVsLambda:
    if isinstance(settings, OwnKVsLambda):
        return dataclasses.replace(settings, learning_rate=None, num_train=None)
    return OwnKVsLambda(
        seeds=settings.seeds, periods=settings.periods, num_steps=settings.digits_steps
    )


def with_rate(settings: AnySettings) -> AnySettings:
    """Return the settings with the learning rate that is used by default."""
    if not isinstance(settings, OwnKVsLambda) or settings.learning_rate is not None:
        return settings
    return dataclasses.replace(settings, learning_rate=_own(settings).learning_rate)


MOST_OUTPUTS = 5_000
"""The largest number of training outputs of a user's own task: their kernel is in memory
for several strengths at once."""
_STABLE_PART = 0.01
NUM_TEST = 1_000
"""The largest number of test outputs for the theory."""


def tested_examples(test: Data) -> int:
    """Return the number of test examples for the theory."""
    targets = test[1]
    return min(max(NUM_TEST // targets[0].size, 1), len(targets))


@dataclasses.dataclass(frozen=True)
class Task:
    title: str
    drawn: Callable[[int], tuple[Data, Data]]
    """Draws the training and test data of a seed."""
    make_model: Callable[[Key[Array, ""]], PyTree]
    """Creates the model, or the pair of a model and its state."""
    # Not compared, since arrays in a loss have no hash; tasks differ in other fields.
    loss: gnlin.authoring.AbstractLoss = dataclasses.field(compare=False)
    test_error: Callable[[Array, Array], Scalar]
    """Returns the error of predictions against targets."""
    error_label: str
    learning_rate: float
    """eta; its product with the largest eigenvalue must stay below 2."""
    num_steps: int
    has_theory: bool = False
    """Whether theory predicts the networks: for squared error, without a state."""
    can_die: bool = True
    """Whether hidden units can die, as ReLUs can."""
    own_loss: bool = False
    """Whether the loss is a user's own, whose least value may be above zero."""
    more_seeds: int = 1
    """Factor of the number of seeds: larger if runs are cheap and vary much."""

    @property
    def in_decades(self) -> bool:
        """Return whether test errors are compared by their ratio."""
        return "RMSE" in self.error_label

    @property
    def difference(self) -> str:
        if self.in_decades:
            return "log10 of the ratio of test RMSE, K steps over damping"
        return "difference in test error, K steps less damping"

    @property
    def margin(self) -> Threshold:
        """Return the margin within which two results are alike."""
        return thresholds.SAME_RMSE if self.in_decades else thresholds.SAME_ERROR

    @property
    def train(self) -> Data:
        """Return the training data of the first seed."""
        return self.drawn(0)[0]

    def damping(self, period: float) -> float:
        """Return the damping of the same strength as a period, rounded to 12 digits: 1e5,
        and not 100000.00000000001."""
        exact = jnp.asarray(gnlin.filters.equivalent_damping(period, self.learning_rate))
        return float(f"{float(exact):.12g}")


CHECKED = 1000
"""Number of literal steps with which gradient flow is compared."""


def num_tested(task: Task) -> int:
    """Return the number of test outputs for the theory."""
    _, test = task.drawn(0)
    return tested_examples(test) * test[1][0].size


def names_of(settings: AnySettings) -> tuple[str, ...]:
    return (OWN,) if isinstance(settings, OwnKVsLambda) else tuple(TASKS)


def make_task(settings: AnySettings, name: str) -> Task:
    return _own(settings) if isinstance(settings, OwnKVsLambda) else TASKS[name](settings)


def start(task: Task, key: Key[Array, ""]) -> tuple[PyTree, PyTree]:
    """Return the model before training and its state, which is `None` if it has none."""
    return own_task.with_state(task.make_model(key))


def own_loss(settings: OwnKVsLambda) -> gnlin.authoring.AbstractLoss | None:
    """Return the loss in the file of a user's own task, if there is one."""
    own = own_task.is_own(settings.data)
    return own_task.read(settings.data).loss if own else None


def losses_of(task: Task, seed: int) -> tuple[float, float]:
    """Return the least training loss of outputs that are the same for all examples, and
    the least one of any outputs, which is zero for the losses of the built-in tasks."""
    (inputs, targets), _ = task.drawn(seed)
    if not task.own_loss:
        return scores.guessing_loss(task.loss, targets), 0.0
    model, state = start(task, jax.random.key(seed))
    outputs = eqx.filter_eval_shape(training.outputs_of, model, state, inputs)
    least = lambda number: scores.least_loss(
        task.loss, targets, (number, *outputs.shape[1:])
    )
    return least(1), least(len(targets))


@functools.cache
def _own(settings: OwnKVsLambda) -> Task:
    def drawn(seed):
        train, _, test = training.load(settings, Place(), seed)
        return train, test

    make_model = training.model_of(settings)
    (inputs, targets), _ = drawn(0)
    model, state = own_task.with_state(make_model(jax.random.key(0)))
    kernel = gnlin.TangentKernel(model, state=state)
    shape = jax.eval_shape(kernel, inputs).shape
    number = int(np.prod(shape[: len(shape) // 2]))
    if number > MOST_OUTPUTS:
        raise Refusal(
            f"The task '{settings.data}' has {number:,} training outputs, for which the "
            f"kernel is too large; return fewer examples, with at most {MOST_OUTPUTS:,} "
            "outputs."
        )
    rate = settings.learning_rate
    if rate is None:
        largest = float(jnp.linalg.norm(kernel(inputs).reshape(number, number), 2))
        rate = 10.0 ** np.floor(np.log10(_STABLE_PART * 2 / largest))
    classes = scores.are_classes(targets)
    name = "cross-entropy" if classes else "squared error"
    loss, given = scores.loss_of(targets), own_loss(settings)
    if given is not None:
        loss, name = given, type(given).__name__
        classes |= isinstance(
            given, gnlin.SoftmaxCrossEntropy | gnlin.SigmoidCrossEntropy
        )
    return Task(
        f"{settings.network.split()[0]}, {name}",
        drawn=drawn,
        make_model=make_model,
        loss=loss,
        own_loss=given is not None,
        test_error=_share_wrong if classes else _root_mean_square,
        error_label=f"Test error ({'fraction wrong' if classes else 'RMSE'})",
        learning_rate=float(rate),
        num_steps=settings.num_steps,
        can_die=False,
        has_theory=isinstance(loss, gnlin.SquaredError) and state is None,
    )


def _quintic(settings: KVsLambda) -> Task:
    data = _on_device(quintic.examples(20)), _on_device(quintic.examples(1000))
    return Task(
        "Quintic, squared error",
        drawn=lambda seed: data,
        make_model=quintic_mlp,
        loss=gnlin.SquaredError(reduction="sum"),
        test_error=_root_mean_square,
        error_label="Test error (RMSE)",
        learning_rate=settings.quintic_rate,
        num_steps=settings.quintic_steps,
        has_theory=True,
        more_seeds=5,
    )


def _smooth_quintic(settings: KVsLambda) -> Task:
    return dataclasses.replace(
        _quintic(settings),
        title="Quintic with tanh, squared error",
        make_model=functools.partial(quintic_mlp, activation=jnp.tanh),
        can_die=False,
    )


def _quintic_sign(settings: KVsLambda) -> Task:
    task = _quintic(settings)
    sign = lambda data: (data[0], jnp.where(data[1] > 0, 1.0, 0.0))
    train, test = map(sign, task.drawn(0))
    return dataclasses.replace(
        task,
        title="Quintic's sign, cross-entropy",
        drawn=lambda seed: (train, test),
        loss=gnlin.SigmoidCrossEntropy(reduction="sum"),
        has_theory=False,
        more_seeds=1,
        test_error=_share_wrong,
        error_label="Test error (fraction wrong)",
    )


def _digits(settings: KVsLambda) -> Task:
    return Task(
        "Digits, squared error",
        drawn=lambda seed: _digits_of(settings.images_per_class, seed),
        make_model=digits_mlp,
        loss=gnlin.SquaredError(reduction="sum"),
        test_error=_share_wrong,
        error_label="Test error (fraction wrong)",
        learning_rate=settings.digits_rate,
        num_steps=settings.digits_steps,
        has_theory=True,
    )


def _digits_classes(settings: KVsLambda) -> Task:
    return dataclasses.replace(
        _digits(settings),
        title="Digits, cross-entropy",
        drawn=lambda seed: _digits_of(settings.images_per_class, seed, False),
        loss=gnlin.SoftmaxCrossEntropy(reduction="sum"),
        has_theory=False,
    )


def _fewer(task: Task, settings: KVsLambda) -> Task:
    one_hot, number = task.loss.is_quadratic, settings.few_per_class
    return dataclasses.replace(
        task,
        title=f"{task.title}, {digits.NUM_CLASSES * number} images",
        drawn=lambda seed: _digits_of(number, seed, one_hot),
    )


def _wider(task: Task, settings: KVsLambda) -> Task:
    return dataclasses.replace(
        task,
        title=f"{task.title}, {settings.wide} units",
        make_model=functools.partial(digits_mlp, width=settings.wide),
    )


def _digits_of(
    images_per_class: int, seed: int, one_hot: bool = True
) -> tuple[Data, Data]:
    number = digits.NUM_CLASSES * images_per_class
    train, _, test = map(_on_device, digits.draw(number, seed))
    if not one_hot:
        return train, test
    encoded = lambda data: (data[0], jnp.eye(digits.NUM_CLASSES)[data[1]])
    return encoded(train), encoded(test)


OWN = "own"
RELU, SMOOTH = "quintic", "quintic-tanh"
SQUARED, CLASSES = "digits", "digits-cross-entropy"
DRAWN: dict[str, Callable[[KVsLambda], Task]] = {
    RELU: _quintic,
    SMOOTH: _smooth_quintic,
    "quintic-cross-entropy": _quintic_sign,
    SQUARED: _digits,
    CLASSES: _digits_classes,
}
"""The tasks whose sweeps are drawn."""
OTHERS: dict[str, Callable[[KVsLambda], Task]] = {
    f"{name}-{how}": lambda settings, of=of, change=change: change(of(settings), settings)
    for name, of in ((SQUARED, _digits), (CLASSES, _digits_classes))
    for how, change in (("few", _fewer), ("wide", _wider))
}
"""The digits with another number of images and another width."""
TASKS = DRAWN | OTHERS
DIGITS = tuple(name for name in TASKS if name.startswith(SQUARED))


def _on_device(data: tuple[np.ndarray, np.ndarray]) -> Data:
    inputs, targets = jax.tree.map(jnp.asarray, data)
    return inputs, targets


def _root_mean_square(predictions: Array, targets: Array) -> Scalar:
    return jnp.sqrt(jnp.mean((predictions - targets) ** 2))


def _share_wrong(predictions: Array, targets: Array) -> Scalar:
    return 1 - gnlin.losses.accuracy(predictions, targets)
