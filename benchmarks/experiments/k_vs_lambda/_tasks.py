"""The settings: the networks, their data, and the strengths."""

import dataclasses
import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, Scalar

import gnlin

from ... import thresholds
from ...data import digits, quintic
from ...experiment import Settings
from ...networks.mlp import digits_mlp, quintic_mlp
from ...thresholds import Threshold


Data = tuple[Array, Array]


def _periods(per_decade: float) -> tuple[float, ...]:
    """Whole-number periods over six decades."""
    return tuple(np.round(np.logspace(2, 8, round(6 * per_decade) + 1)).tolist())


@dataclasses.dataclass(frozen=True)
class KVsLambda(Settings):
    """Learning rates suit the kernels met in training, whose largest eigenvalue reaches
    some 1e6 on the quintic (50 at initialisation) and 1e5 on the digits; with
    cross-entropy the loss's curvature cancels most of it."""

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


NUM_TEST = 1_000
"""Number of test outputs for the theory."""


@dataclasses.dataclass(frozen=True)
class Task:
    title: str
    drawn: Callable[[int], tuple[Data, Data]]
    """The training and test data of a seed."""
    make_model: Callable[[Key[Array, ""]], eqx.nn.MLP]
    loss: gnlin.authoring.AbstractLoss
    test_error: Callable[[Array, Array], Scalar]
    """The error of predictions against targets."""
    error_label: str
    learning_rate: float
    """eta; its product with the largest eigenvalue must stay below 2."""
    num_steps: int
    can_die: bool = True
    """Whether hidden units can die, as ReLUs can."""
    more_seeds: int = 1
    """Factor of the settings' number of seeds, for cheap runs that vary much."""

    @property
    def in_decades(self) -> bool:
        """Whether test errors are compared by their ratio."""
        return "RMSE" in self.error_label

    @property
    def difference(self) -> str:
        if self.in_decades:
            return "log10 of test RMSE after K steps over that by damping"
        return "test error after K steps less that by damping"

    @property
    def margin(self) -> Threshold:
        """The margin within which two results are alike."""
        return thresholds.SAME_RMSE if self.in_decades else thresholds.SAME_ERROR

    @property
    def train(self) -> Data:
        """The training data of the first seed."""
        return self.drawn(0)[0]

    def damping(self, period: float) -> float:
        """The damping of the same strength as a period, rounded to 12 digits: 1e5, and
        not 100000.00000000001."""
        exact = jnp.asarray(gnlin.filters.equivalent_damping(period, self.learning_rate))
        return float(f"{float(exact):.12g}")


def make_task(settings: KVsLambda, name: str) -> Task:
    return TASKS[name](settings)


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
        more_seeds=5,
    )


def _smooth_quintic(settings: KVsLambda) -> Task:
    return dataclasses.replace(
        _quintic(settings),
        title="Quintic by tanh, squared error",
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
        more_seeds=1,
        test_error=_wrong_signs,
        error_label="Test error (fraction wrong)",
    )


def _digits(settings: KVsLambda) -> Task:
    return Task(
        "Digits, squared error",
        drawn=lambda seed: _digits_of(settings.images_per_class, seed),
        make_model=digits_mlp,
        loss=gnlin.SquaredError(reduction="sum"),
        test_error=_error_rate,
        error_label="Test error (fraction wrong)",
        learning_rate=settings.digits_rate,
        num_steps=settings.digits_steps,
    )


def _digits_classes(settings: KVsLambda) -> Task:
    return dataclasses.replace(
        _digits(settings),
        title="Digits, cross-entropy",
        drawn=lambda seed: _digits_of(settings.images_per_class, seed, False),
        loss=gnlin.SoftmaxCrossEntropy(reduction="sum"),
        test_error=lambda outputs, labels: 1 - gnlin.losses.accuracy(outputs, labels),
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


def _error_rate(predictions: Array, targets: Array) -> Scalar:
    return jnp.mean(jnp.argmax(predictions, axis=1) != jnp.argmax(targets, axis=1))


def _wrong_signs(predictions: Array, targets: Array) -> Scalar:
    return jnp.mean((predictions > 0) != (targets > 0))
