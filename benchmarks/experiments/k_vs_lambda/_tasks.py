"""What is trained on what, and at which strengths."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, Scalar

import gnlin

from ...data import digits, quintic
from ...networks.mlp import digits_mlp, quintic_mlp


SMALLEST_PERIOD, LARGEST_PERIOD = 1e2, 1e8

Data = tuple[Float[Array, "n inputs"], Float[Array, "n outputs"]]


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    title: str
    train: Data
    test: Data
    make_model: Callable[[Key[Array, ""]], eqx.nn.MLP]
    test_error: Callable[[Array, Array], Scalar]
    """Of predictions and targets."""
    error_label: str
    classifies: bool
    learning_rate: float
    """eta, which times the kernel's largest eigenvalue must stay below 2."""
    max_steps: int
    """Outer steps, the same for all strengths."""

    def damping(self, period: float) -> float:
        """The damping of the same strength as a period, to 12 digits: 1e5, and not
        100000.00000000001."""
        exact = jnp.asarray(gnlin.equivalent_damping(period, self.learning_rate))
        return float(f"{float(exact):.12g}")

    def settings(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "training_examples": len(self.train[0]),
            "test_examples": len(self.test[0]),
            "network": self.make_model.__name__,
            "test_error": self.error_label,
            "learning_rate": self.learning_rate,
            "max_steps": self.max_steps,
        }


def make_tasks(quick: bool) -> tuple[Task, ...]:
    """The learning rates are for the kernels met in training, whose largest eigenvalue
    reaches 1.1e6 on the quintic (50 at initialisation) and 1,800 on the digits."""
    quintic_train, quintic_test = map(_on_device, map(quintic.examples, (20, 1000)))
    digits_train, digits_test = map(_on_device, digits.examples(2 if quick else 4))
    return (
        Task(
            name="quintic",
            title="Quintic: 20 points, 7,801 parameters",
            train=quintic_train,
            test=quintic_test,
            make_model=quintic_mlp,
            test_error=_root_mean_square,
            error_label="test error (RMSE)",
            classifies=False,
            learning_rate=1e-7,
            max_steps=20 if quick else 150,
        ),
        Task(
            name="digits",
            title=f"Digits: {len(digits_train[0])} images, 3,010 parameters",
            train=digits_train,
            test=digits_test,
            make_model=digits_mlp,
            test_error=_error_rate,
            error_label="test error (fraction wrong)",
            classifies=True,
            learning_rate=1e-5,
            max_steps=5 if quick else 20,
        ),
    )


def strengths(per_decade: float) -> list[float]:
    """The periods K of the sweep, whole numbers."""
    low, high = np.log10([SMALLEST_PERIOD, LARGEST_PERIOD])
    periods = np.logspace(low, high, round((high - low) * per_decade) + 1)
    return np.round(periods).tolist()


def _on_device(data: tuple[np.ndarray, np.ndarray]) -> Data:
    inputs, targets = data
    return jnp.asarray(inputs), jnp.asarray(targets)


def _root_mean_square(predictions: Array, targets: Array) -> Scalar:
    return jnp.sqrt(jnp.mean((predictions - targets) ** 2))


def _error_rate(predictions: Array, targets: Array) -> Scalar:
    return jnp.mean(jnp.argmax(predictions, axis=1) != jnp.argmax(targets, axis=1))
