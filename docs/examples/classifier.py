"""A classifier of handwritten digits, trained by the default of `gnlin.fit` and by Adam.

    python docs/examples/classifier.py [--quick] [--out FOLDER]

An MLP of 2,410 parameters learns images of 8 x 8 pixels, with cross-entropy on
mini-batches. This draws `classifier.png` and prints a table.
"""

import argparse
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import gnlin


RATES = [1e-3, 3e-3, 1e-2, 3e-2]


def load():
    images, labels = load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        np.float32(images / 16), labels, test_size=450, stratify=labels, random_state=0
    )
    return (train_images, train_labels), (test_images, test_labels)


# --8<-- [start:train]
def train(data, test, epochs, **how):
    model = eqx.nn.MLP(64, 10, 32, 1, activation=jax.nn.tanh, key=jax.random.key(0))
    return gnlin.fit(
        model,
        data,
        loss=gnlin.SoftmaxCrossEntropy(),
        batch_size=128,
        epochs=epochs,
        validation=test,
        metrics={"accuracy": gnlin.losses.accuracy},
        progress=False,
        **how,
    )


# --8<-- [end:train]


def adam(rate):
    """Adam as a solver: iterative linearisation with K = 1 that keeps Adam's state."""
    return gnlin.IterativeLinearisation(1, optimiser=optax.adam(rate), restart=False)


def looks(result):
    """Accuracy and loss on the test data, at each validation."""
    rows = np.isfinite(result.history["validation_loss"])
    row = lambda name: np.asarray(result.history[name])[rows]
    return row("validation_accuracy"), row("validation_loss")


def draw(results, test, path):
    figure = Figure(figsize=(10, 3.4), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    for (name, result), colour in zip(
        results.items(), ["#0072B2", "#D55E00"], strict=True
    ):
        accuracy, _ = looks(result)
        epochs = 1 + np.arange(len(accuracy))
        left.plot(epochs, 100 * (1 - accuracy), ".-", color=colour, label=name)
    left.set(xlabel="epoch", ylabel="test error (%)", yscale="log")
    left.set_yticks(ticks := [2, 5, 10, 20, 50], [str(x) for x in ticks])
    left.minorticks_off()
    left.legend(frameon=False)
    left.spines[["top", "right"]].set_visible(False)

    images, labels = test
    model = next(iter(results.values())).model
    said = np.asarray(jax.vmap(model)(images).argmax(1))
    wrong = np.flatnonzero(said != labels)[:8]
    picture = np.ones((2 * 10, 4 * 10))
    for i, image in enumerate(images[wrong]):
        row, column = 10 * (i // 4), 10 * (i % 4)
        picture[row : row + 8, column : column + 8] = 1 - image.reshape(8, 8)
    right.imshow(picture, cmap="gray")
    right.axis("off")
    right.set_title("misread", fontsize=10)
    for i, index in enumerate(wrong):
        place = (10 * (i % 4), 10 * (i // 4) + 9.4)
        right.text(*place, f"{labels[index]} as {said[index]}", fontsize=8)
    figure.savefig(path)


def main(out: Path, quick: bool):
    data, test = load()
    epochs = 10 if quick else 40
    results = {"gnlin.fit, no solver given": train(data, test, epochs)}
    by_adam = {rate: train(data, test, epochs, solver=adam(rate)) for rate in RATES}
    best = max(RATES, key=lambda rate: looks(by_adam[rate])[0][-1])
    results[f"Adam, {best:g}"] = by_adam[best]

    print("| | test accuracy | test loss | passes |")
    print("|---|---|---|---|")
    for name, result in results.items():
        accuracy, loss = looks(result)
        passes = sum(result.stats[x] for x in ("num_steps", "num_jvps", "num_vjps"))
        print(f"| {name} | {accuracy[-1]:.1%} | {loss[-1]:.3f} | {passes:.0f} |")
    out.mkdir(parents=True, exist_ok=True)
    draw(results, test, out / "classifier.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="ten epochs")
    parser.add_argument("--out", type=Path, default=Path("results/tutorials"))
    arguments = parser.parse_args()
    main(arguments.out, arguments.quick)
