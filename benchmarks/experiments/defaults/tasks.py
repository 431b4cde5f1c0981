"""Seven ordinary networks, and their data in single precision.

Each seed draws its own training, validation and test examples.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree
from numpy import ndarray
from sklearn.datasets import load_digits, make_friedman1

import gnlin

from ... import training
from ...networks.mlp import DropoutMLP
from ...networks.normalised import NormalisedConvNet
from ...networks.recurrent import Recurrent
from ...networks.transformer import TokenTransformer


Examples = tuple[ndarray, ndarray]


class Data(NamedTuple):
    """Inputs and targets of each part."""

    train: Examples
    validation: Examples
    test: Examples


class Trainable(NamedTuple):
    model: PyTree
    state: PyTree
    """`None` for a model without state."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A network, its data, and the length of its training."""

    name: str
    make: Callable[[Key[Array, ""]], Any]
    """Creates the model; called by `equinox.nn.make_with_state` if it `has_state`."""
    data: Callable[[int], Data]
    """Draws the data of a seed."""
    loss: gnlin.authoring.AbstractLoss
    metric: Callable[[Array, Array], Float[Array, ""]]
    """The metric of the outputs and targets of many examples."""
    epochs: int
    """The number of epochs of `gnlin.fit` on mini-batches."""
    higher_is_better: bool = True
    has_state: bool = False
    takes_key: bool = False
    """Whether the model takes a key, for dropout."""
    full_batch: bool = True
    """Whether the full batch is run, since its steps take only seconds."""

    def start(self, seed: int) -> Trainable:
        """Return the initialised network."""
        key = jax.random.key(seed)
        if self.has_state:
            return Trainable(*training.single(eqx.nn.make_with_state(self.make)(key)))
        return Trainable(training.single(self.make(key)), None)

    @property
    def sign(self) -> int:
        """Return 1 if high values of the metric are good, and -1 if low ones are."""
        return 1 if self.higher_is_better else -1

    def apply(
        self, model: PyTree, state: PyTree, inputs: Array, key: Array | None = None
    ) -> tuple[Array, PyTree]:
        """Return the outputs on a batch, and the new state; the key is for dropout."""
        if state is not None:
            axes: dict[str, Any] = {"in_axes": (0, None), "out_axes": (0, None)}
            return jax.vmap(model, axis_name="batch", **axes)(inputs, state)
        if not self.takes_key or key is None:
            return jax.vmap(model)(inputs), None
        keys = jax.random.split(key, len(inputs))
        return jax.vmap(lambda x, key: model(x, key=key))(inputs, keys), None

    def mean_loss(self, outputs: Array, targets: Array) -> Float[Array, ""]:
        return jnp.mean(jax.vmap(self.loss.value)(outputs, targets))


def accuracy(outputs: Array, labels: Array) -> Float[Array, ""]:
    """Return the share of right labels among all labels of all examples."""
    return jnp.mean(jnp.argmax(outputs, axis=-1) == labels)


def squared_error(outputs: Array, targets: Array) -> Float[Array, ""]:
    return jnp.mean((outputs - targets) ** 2)


#
# Data
#

NUM_TRAIN = 1_152  # nine mini-batches of 128
NUM_VALIDATION = 195  # leaves 450 of the 1,797 images for the test


def digits(seed: int, shape: tuple[int, ...] = (64,)) -> Data:
    """Split scikit-learn's 1,797 images at random, as arrays of a given shape."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = np.reshape(np.asarray(pixels) / 16, (-1, *shape))
    return _split(pixels, np.asarray(labels), seed, NUM_TRAIN, NUM_VALIDATION)


LENGTH = 8
NUM_TOKENS = 10
SORTED_TRAIN = 2_048


def to_sort(seed: int) -> Data:
    """Draw rows of digits, whose targets are the sorted rows: the target of each place
    depends on all places."""
    tokens = np.random.default_rng(seed).integers(0, NUM_TOKENS, (4_096, LENGTH))
    return _split(tokens, np.sort(tokens, axis=1), seed, SORTED_TRAIN, 512)


FRIEDMAN_TRAIN = 2_048


def friedman(seed: int) -> Data:
    """Draw data of Friedman's first function, which depends on five of ten features, with
    noise of variance 1.

    scikit-learn's tables of real data have only some hundred examples: their test errors
    differ by more than 2 % from split to split. The features are centred about zero; the
    target is in units of the noise, minus its mean of 14.4.
    """
    x, y = make_friedman1(8_192, n_features=10, noise=1.0, random_state=seed)
    inputs = np.asarray(x) * 2 - 1
    return _split(inputs, np.asarray(y)[:, None] - 14.4, seed, FRIEDMAN_TRAIN, 1_024)


def _split(inputs, targets, seed, num_train, num_validation) -> Data:
    order = np.random.default_rng(seed).permutation(len(inputs))
    parts = np.split(order, [num_train, num_train + num_validation])
    return Data(*((_narrow(inputs[part]), _narrow(targets[part])) for part in parts))


def _narrow(x: ndarray) -> ndarray:
    """Convert reals to single precision, and labels to 32 bits."""
    floats = np.issubdtype(x.dtype, np.floating)
    return x.astype(np.float32 if floats else np.int32)


#
# The tasks
#


def _mlp(activation: Callable[[Array], Array]):
    return lambda key: eqx.nn.MLP(64, 10, 64, 2, activation=activation, key=key)


_LABELS: dict[str, Any] = {"loss": gnlin.SoftmaxCrossEntropy(), "metric": accuracy}

_TASKS = (
    Task("MLP, tanh", _mlp(jnp.tanh), digits, epochs=20, **_LABELS),
    Task("MLP, ReLU", _mlp(jax.nn.relu), digits, epochs=20, **_LABELS),
    Task(
        "CNN, batch normalisation",
        NormalisedConvNet,
        lambda seed: digits(seed, (1, 8, 8)),
        epochs=10,
        has_state=True,
        full_batch=False,
        **_LABELS,
    ),
    Task(
        "MLP, dropout",
        lambda key: DropoutMLP(key, (64, 128, 128, 10), rate=0.3),
        digits,
        epochs=20,
        takes_key=True,
        **_LABELS,
    ),
    Task(
        "GRU",
        lambda key: Recurrent(key, size=4, width=32, num_classes=10),
        lambda seed: digits(seed, (16, 4)),  # half rows of pixels, one after another
        epochs=20,
        full_batch=False,
        **_LABELS,
    ),
    Task(
        "transformer",
        lambda key: TokenTransformer(key, NUM_TOKENS, LENGTH, width=32, depth=1, heads=4),
        to_sort,
        epochs=4,
        full_batch=False,
        **_LABELS,
    ),
    Task(
        "regression",
        lambda key: eqx.nn.MLP(10, 1, 32, 2, activation=jnp.tanh, key=key),
        friedman,
        gnlin.SquaredError(),
        squared_error,
        epochs=20,
        higher_is_better=False,
    ),
)

TASKS: dict[str, Task] = {task.name: task for task in _TASKS}
