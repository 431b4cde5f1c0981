"""Second-order training of a classifier of handwritten digits, beside SGD and Adam.

    python docs/examples/digits.py [--quick] [--out FOLDER]

Each solver trains one MLP from the same start. This draws `digits_training.png`, the
test error against wall time (without compilation) and against feature updates, and
writes the table `digits_training.md`.
"""

import argparse
import math
import time
import warnings
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import gnlin


LOSS = gnlin.SoftmaxCrossEntropy(reduction="mean")
BATCH_SIZE = 64


def linearised(period):
    """K steps of Adam, across batches, on each linearisation. With K = 1 this is Adam
    itself, since the optimiser's state is kept."""
    return gnlin.IterativeLinearisation(period, optimiser=optax.adam(1e-2), restart=False)


# (solver, epochs). Dampings and learning rates are the best of a small grid.
SOLVERS = {
    "Gauss-Newton": (gnlin.GaussNewton(), 2),
    "damped Gauss-Newton": (gnlin.DampedGaussNewton(0.1), 10),
    "Levenberg-Marquardt": (gnlin.LevenbergMarquardt(), 10),
    "truncated Gauss-Newton": (gnlin.TruncatedGaussNewton(0.1, damping=0.1), 10),
    "K = 10": (linearised(10), 200),
    "K = 100": (linearised(100), 200),
    "K = 1000": (linearised(1000), 200),
    "K = infinity": (linearised(math.inf), 200),
    "SGD": (
        gnlin.IterativeLinearisation(
            1, optimiser=optax.sgd(0.1, momentum=0.9), restart=False
        ),
        200,
    ),
    "Adam": (linearised(1), 200),
}


class Stopwatch(gnlin.callbacks.Callback):
    """Record seconds, feature updates and test error at each validation. With K =
    infinity the linearised network is trained, so its error is recorded."""

    def __init__(self, solver):
        endless = getattr(solver, "period", None) == math.inf
        self.column = "validation_accuracy" + ("_linearised" if endless else "")
        self.looks = []

    def on_start(self, run):
        self.begin = time.perf_counter()

    def on_validation(self, run):
        seconds = time.perf_counter() - self.begin
        updates, error = run.row["num_feature_updates"], 1 - run.row[self.column]
        self.looks.append((seconds, updates, error))


def train(solver, epochs, train_data, test_data):
    """`(seconds, feature updates, test error)` after each epoch, and the result."""
    stopwatch = Stopwatch(solver)

    def run(callbacks, **how_long):
        model = eqx.nn.MLP(64, 10, 32, 1, activation=jax.nn.tanh, key=jax.random.key(0))
        return gnlin.fit(
            model,
            train_data,
            solver,
            loss=LOSS,
            batch_size=BATCH_SIZE,
            validation=test_data,
            metrics={"accuracy": gnlin.losses.accuracy},
            callbacks=callbacks,
            progress=False,
            **how_long,
        )

    with warnings.catch_warnings():
        # Undamped Gauss-Newton may diverge, and the table shows it.
        warnings.filterwarnings("ignore", message="`gnlin.fit` stopped")
        run([], steps=1)  # to compile
        result = run([stopwatch], epochs=epochs)
    return np.array(stopwatch.looks), result


def draw(curves, path):
    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    by_time, by_updates = figure.subplots(1, 2, sharey=True)
    colours = ["#000000", "#0072B2", "#56B4E9", "#009E73", "#E69F00"]
    colours += ["#CC79A7", "#D55E00", "#999999", "#0072B2", "#D55E00"]
    for (name, looks), colour in zip(curves.items(), colours, strict=True):
        style = "--" if name in ("SGD", "Adam") else "-"
        how = {"color": colour, "linestyle": style, "label": name, "alpha": 0.8}
        lowest = 100 * np.minimum.accumulate(looks[:, 2])
        by_time.plot(looks[:, 0], lowest, **how)
        by_updates.plot(looks[:, 1], lowest, **how, marker=".")
    by_time.set(xscale="log", yscale="log", xlabel="wall time (s)")
    by_time.set_ylabel("lowest test error so far (%)")
    by_time.set_yticks(ticks := [2, 5, 10, 20, 50, 90], [str(x) for x in ticks])
    by_time.minorticks_off()
    by_updates.set(xscale="log", xlabel="feature updates")
    for axes in (by_time, by_updates):
        axes.grid(color="#E4E4E4")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*by_time.get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path)


def table(curves, results):
    lines = [
        "| | best test accuracy | seconds to it | feature updates to it | in the end |",
        "|---|---|---|---|---|",
    ]
    for name, looks in curves.items():
        seconds, updates, error = looks[np.argmin(looks[:, 2])]
        lines.append(
            f"| {name} | {1 - error:.1%} | {seconds:.2f} | {updates:.0f} | "
            f"{1 - looks[-1, 2]:.1%} after {results[name].stats['num_steps']} steps |"
        )
    return "\n".join(lines) + "\n"


def main(out: Path, quick: bool):
    images, labels = load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        np.float32(images / 16), labels, test_size=450, stratify=labels, random_state=0
    )
    curves, results = {}, {}
    for name, (solver, epochs) in SOLVERS.items():
        curves[name], results[name] = train(
            solver,
            1 if quick else epochs,
            (train_images, train_labels),
            (test_images, test_labels),
        )
        print(f"{name}: {1 - curves[name][-1, 2]:.1%}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    draw(curves, out / "digits_training.png")
    (out / "digits_training.md").write_text(table(curves, results))
    print(table(curves, results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one epoch each")
    parser.add_argument("--out", type=Path, default=Path("results/digits-training"))
    arguments = parser.parse_args()
    main(arguments.out, arguments.quick)
