"""The settings: what is trained on what, and at which strengths."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, Scalar

import gnlin

from ...data import digits, quintic
from ...experiment import Settings
from ...networks.mlp import digits_mlp, quintic_mlp


Data = tuple[Array, Array]


def _periods(per_decade: float) -> tuple[float, ...]:
    """Six decades of them, whole numbers."""
    return tuple(np.round(np.logspace(2, 8, round(6 * per_decade) + 1)).tolist())


@dataclasses.dataclass(frozen=True)
class KVsLambda(Settings):
    """The learning rates are for the kernels met in training, whose largest eigenvalue
    reaches some 1e6 on the quintic (50 at initialisation) and 1e5 on the digits; with
    cross-entropy the loss's curvature takes most of it away."""

    seeds: int = 5
    periods: tuple[float, ...] = _periods(per_decade=2)
    """K; lambda is 1/(eta K)."""
    quintic_rate: float = 1e-7
    quintic_steps: int = 150
    """Outer steps, the same for all strengths."""
    digits_rate: float = 1e-5
    digits_steps: int = 20
    images_per_class: int = 4


EMBEDDED = KVsLambda()
QUICK = dataclasses.replace(
    EMBEDDED,
    seeds=2,
    periods=_periods(per_decade=0.5),
    quintic_steps=20,
    digits_steps=5,
    images_per_class=2,
)
FULL = dataclasses.replace(
    EMBEDDED, seeds=10, periods=_periods(per_decade=4), images_per_class=10
)


@dataclasses.dataclass(frozen=True)
class Task:
    title: str
    train: Data
    test: Data
    make_model: Callable[[Key[Array, ""]], eqx.nn.MLP]
    loss: gnlin.AbstractLoss
    test_error: Callable[[Array, Array], Scalar]
    """Of predictions and targets."""
    error_label: str
    learning_rate: float
    """eta, which times the largest eigenvalue must stay below 2."""
    num_steps: int

    def damping(self, period: float) -> float:
        """The damping of the same strength as a period, to 12 digits: 1e5, and not
        100000.00000000001."""
        exact = jnp.asarray(gnlin.filters.equivalent_damping(period, self.learning_rate))
        return float(f"{float(exact):.12g}")


def make_task(settings: KVsLambda, name: str) -> Task:
    return TASKS[name](settings)


def _quintic(settings: KVsLambda) -> Task:
    return Task(
        "Quintic, squared error",
        *(_on_device(quintic.examples(number)) for number in (20, 1000)),
        make_model=quintic_mlp,
        loss=gnlin.SquaredError(reduction="sum"),
        test_error=_root_mean_square,
        error_label="Test error (RMSE)",
        learning_rate=settings.quintic_rate,
        num_steps=settings.quintic_steps,
    )


def _quintic_sign(settings: KVsLambda) -> Task:
    task = _quintic(settings)
    (x, y), (test_x, test_y) = task.train, task.test
    return dataclasses.replace(
        task,
        title="Quintic's sign, cross-entropy",
        train=(x, jnp.where(y > 0, 1.0, 0.0)),
        test=(test_x, jnp.where(test_y > 0, 1.0, 0.0)),
        loss=gnlin.SigmoidCrossEntropy(reduction="sum"),
        test_error=_wrong_signs,
        error_label="Test error (fraction wrong)",
    )


def _digits(settings: KVsLambda) -> Task:
    return Task(
        "Digits, squared error",
        *map(_on_device, digits.examples(settings.images_per_class)),
        make_model=digits_mlp,
        loss=gnlin.SquaredError(reduction="sum"),
        test_error=_error_rate,
        error_label="Test error (fraction wrong)",
        learning_rate=settings.digits_rate,
        num_steps=settings.digits_steps,
    )


def _digits_classes(settings: KVsLambda) -> Task:
    train, test = map(_on_device, digits.labelled(settings.images_per_class))
    return dataclasses.replace(
        _digits(settings),
        title="Digits, cross-entropy",
        train=train,
        test=test,
        loss=gnlin.SoftmaxCrossEntropy(reduction="sum"),
        test_error=lambda outputs, labels: 1 - gnlin.accuracy(outputs, labels),
    )


TASKS: dict[str, Callable[[KVsLambda], Task]] = {
    "quintic": _quintic,
    "quintic-cross-entropy": _quintic_sign,
    "digits": _digits,
    "digits-cross-entropy": _digits_classes,
}


def _on_device(data: tuple[np.ndarray, np.ndarray]) -> Data:
    inputs, targets = jax.tree.map(jnp.asarray, data)
    return inputs, targets


def _root_mean_square(predictions: Array, targets: Array) -> Scalar:
    return jnp.sqrt(jnp.mean((predictions - targets) ** 2))


def _error_rate(predictions: Array, targets: Array) -> Scalar:
    return jnp.mean(jnp.argmax(predictions, axis=1) != jnp.argmax(targets, axis=1))


def _wrong_signs(predictions: Array, targets: Array) -> Scalar:
    return jnp.mean((predictions > 0) != (targets > 0))
