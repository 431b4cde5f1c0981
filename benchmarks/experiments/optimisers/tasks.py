"""The tasks: a network, its data, and the target of its loss."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from ... import training
from ...data import sentences
from ...experiment import Place
from ...networks.transformer import TokenTransformer


Examples = tuple[Array, Array]
WATCHED_TEXTS = 256
_FRESH = 10_000
"""Distance between the seeds of the texts for training and of the watched ones."""


class Drawn(NamedTuple):
    """The network, the data and the target of one seed."""

    model: PyTree
    train: Examples
    watched: Examples
    """The examples whose loss is to reach the target."""
    target: float


@dataclasses.dataclass(frozen=True)
class Task:
    """A task with settings, which are written to the results."""

    name: str
    batch_sizes: tuple[int, ...]
    """Batch sizes in examples, ascending."""
    most_passes: int
    """Passes through the network on a batch, after which a run is stopped."""

    @property
    def most_steps(self) -> int:
        """Return the largest number of steps, at two passes each."""
        return self.most_passes // 2

    def draw(self, seed: int, place: Place, part: float) -> Drawn:
        """Draw the model, the data and the target. The target lies `part` of the loss of
        guessing above the least attainable loss."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Images(Task):
    """Digits. The loss is watched on all training images, and its minimum is zero."""

    data: str = "digits"
    network: str = "digits-mlp"

    def draw(self, seed: int, place: Place, part: float) -> Drawn:
        settings = training.Images(data=self.data, network=self.network)
        train = training.load(settings, place, seed).train
        model = training.NETWORKS[self.network](jax.random.key(seed))
        target = part * np.log(training.NUM_CLASSES)
        single, train = training.single((model, train))
        return Drawn(single, train, train, float(target))


@dataclasses.dataclass(frozen=True)
class Text(Task):
    """Generated text. The loss is watched on fresh texts, and a model that knows the
    grammar attains its minimum."""

    num_texts: int = 8_192
    length: int = 16
    width: int = 16
    depth: int = 1
    heads: int = 2

    def draw(self, seed: int, place: Place, part: float) -> Drawn:
        del place
        tokens = sentences.texts(self.num_texts, self.length + 1, seed)
        watched = sentences.texts(WATCHED_TEXTS, self.length + 1, _FRESH + seed)
        number = len(sentences.CHARACTERS)
        make = functools.partial(
            TokenTransformer,
            num_tokens=number,
            length=self.length,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            causal=True,
        )
        target = sentences.least_losses(watched).mean() + part * np.log(number)
        pairs = [
            (jnp.asarray(x[:, :-1]), jnp.asarray(x[:, 1:])) for x in (tokens, watched)
        ]
        return Drawn(
            training.single(make(jax.random.key(seed))), pairs[0], pairs[1], float(target)
        )


def mean_loss(model: PyTree, examples: Examples) -> Float[Array, ""]:
    """Return the mean loss over the images, or over the characters."""
    inputs, labels = examples
    outputs = jax.vmap(model)(inputs)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, labels))
