"""Transfer learning: from the digits 0 to 4 to the digits 5 to 9, in four ways.

    python docs/examples/transfer.py [--quick]

A CNN that was trained on the first five digits learns the others from a few images of
each. It trains its last layer alone (a linear probe), its linearisation (K = infinity,
so that the features stay the same), all its parameters, or, for comparison, starts from
scratch. Test accuracies are means over five draws of the images.
"""

import argparse
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import gnlin


LOSS = gnlin.SoftmaxCrossEntropy(reduction="mean")
DAMPED = gnlin.DampedGaussNewton(0.3, search=optx.BacktrackingArmijo())


class CNN(eqx.Module):
    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(1, 8, 3, stride=2, padding=1, key=keys[0])
        self.second = eqx.nn.Conv2d(8, 16, 3, stride=2, padding=1, key=keys[1])
        self.head = eqx.nn.Linear(64, 5, key=keys[2])

    def __call__(self, image):
        features = jnp.tanh(self.second(jnp.tanh(self.first(image))))
        return self.head(jnp.ravel(features))


def with_new_head(model, key):
    return eqx.tree_at(lambda m: m.head, model, eqx.nn.Linear(64, 5, key=key))


def only_the_head(model):
    """A `filter_spec` that is true for the leaves of the last layer."""
    nothing = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(lambda m: (m.head.weight, m.head.bias), nothing, (True, True))


def accuracy(model, data):
    images, labels = data
    return float(gnlin.losses.accuracy(jax.vmap(model)(images), labels))


def main(quick: bool):
    pixels, labels = load_digits(return_X_y=True)
    images = np.float32(pixels / 16).reshape(-1, 1, 8, 8)
    old, new = labels < 5, labels >= 5
    key, head_key = jax.random.split(jax.random.key(0))

    pretrained = gnlin.fit(
        CNN(key),
        (images[old], labels[old]),
        DAMPED,
        loss=LOSS,
        batch_size=64,
        epochs=1 if quick else 5,
        progress=False,
    ).model
    print(f"0 to 4: {accuracy(pretrained, (images[old], labels[old])):.1%} fitted")

    ways = "linear probe | linearised | all parameters | from scratch"
    print(f"| images of each | {ways} |")
    print("|---|---|---|---|---|")
    steps, draws = (3, 1) if quick else (30, 5)
    for per_class in (4,) if quick else (2, 4, 8, 16):
        found = []
        for draw in range(draws):
            few, rest, few_labels, rest_labels = train_test_split(
                images[new],
                labels[new] - 5,
                train_size=5 * per_class,
                stratify=labels[new],
                random_state=draw,
            )
            start = with_new_head(pretrained, jax.random.fold_in(head_key, draw))
            scratch = CNN(jax.random.fold_in(key, draw))
            data = (few, few_labels), (rest, rest_labels)
            found.append(four_ways(start, scratch, *data, steps))
        means = " | ".join(f"{mean:.1%}" for mean in np.mean(found, axis=0))
        print(f"| {per_class} | {means} |", flush=True)


def four_ways(start, scratch, few, rest, steps):
    """Test accuracies by probe, linearisation, all parameters, and from scratch."""

    def learnt(model, solver, steps, **how):
        return gnlin.fit(
            model, few, solver, loss=LOSS, steps=steps, progress=False, **how
        )

    probe = learnt(start, DAMPED, steps, filter_spec=only_the_head(start))
    linearised = learnt(
        start,
        gnlin.IterativeLinearisation(math.inf, optimiser=optax.adam(3e-3)),
        10 * steps,
        batch_size=len(few[0]),
        validation=rest,
        validate_every=10 * steps,
        metrics={"accuracy": gnlin.losses.accuracy},
    )
    return (
        accuracy(probe.model, rest),
        linearised.history["validation_accuracy_linearised"][-1],
        accuracy(learnt(start, DAMPED, steps).model, rest),
        accuracy(learnt(scratch, DAMPED, steps).model, rest),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps of each")
    main(parser.parse_args().quick)
