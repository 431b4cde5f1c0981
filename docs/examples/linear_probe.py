"""A linear probe: how well each layer of a network separates the digits.

    python docs/examples/linear_probe.py [--quick]

A probe is a softmax regression on the frozen activations of a layer, before and after
training. It is a convex problem, on which `DampedGaussNewton` is Newton's method, so ten
steps suffice.
"""

import argparse

import equinox as eqx
import jax
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import gnlin


LOSS = gnlin.SoftmaxCrossEntropy(reduction="mean")


class Probe(eqx.Module):
    """A linear layer on the activations of a network's first layers."""

    body: eqx.nn.MLP
    depth: int
    linear: eqx.nn.Linear

    def __init__(self, body, depth, key):
        self.body = body
        self.depth = depth
        width = 64 if depth == 0 else body.width_size
        self.linear = eqx.nn.Linear(width, 10, key=key)

    def __call__(self, x):
        for layer in self.body.layers[: self.depth]:
            x = self.body.activation(layer(x))
        return self.linear(x)


def only_the_probe(model):
    """A `filter_spec` that is true for the leaves of the linear layer."""
    nothing = jax.tree.map(lambda _: False, model)
    where = lambda m: (m.linear.weight, m.linear.bias)
    return eqx.tree_at(where, nothing, (True, True))


def main(quick: bool):
    images, labels = load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        np.float32(images / 16), labels, test_size=450, stratify=labels, random_state=0
    )
    train, test = (train_images, train_labels), (test_images, test_labels)
    untrained = eqx.nn.MLP(64, 10, 16, 3, activation=jax.nn.tanh, key=jax.random.key(0))
    trained = gnlin.fit(
        untrained,
        train,
        gnlin.DampedGaussNewton(0.3),
        loss=LOSS,
        batch_size=64,
        epochs=1 if quick else 10,
        progress=False,
    ).model

    print("| activations of | test accuracy, untrained | trained |")
    print("|---|---|---|")
    for depth in range(4):
        found = []
        for body in (untrained, trained):
            probe = Probe(body, depth, jax.random.key(1))
            result = gnlin.fit(
                probe,
                train,
                gnlin.DampedGaussNewton(1e-3),
                loss=LOSS,
                steps=2 if quick else 10,
                filter_spec=only_the_probe(probe),
                validation=test,
                validate_every=2 if quick else 10,
                metrics={"accuracy": gnlin.losses.accuracy},
                progress=False,
            )
            found.append(f"{result.history['validation_accuracy'][-1]:.1%}")
        name = "the input" if depth == 0 else f"layer {depth}"
        print(f"| {name} | {' | '.join(found)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps of each")
    main(parser.parse_args().quick)
