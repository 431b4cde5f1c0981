"""Predictions of a linearised network by formula, compared with literal training.

    python docs/examples/linearised.py [--quick] [--out FOLDER]

Networks of two widths fit twelve points by gradient descent. For their linearisations at
the start, one factorisation gives the result of any number of steps, up to 10^8. A wide
network stays closer to its linearisation than a narrow one. This draws `linearised.png`
and prints a table.
"""

import argparse
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

import gnlin


jax.config.update("jax_enable_x64", True)

X = jnp.linspace(-1.0, 1.0, 12)[:, None]
Y = jnp.sin(4 * X)
GRID = jnp.linspace(-1.4, 1.4, 101)[:, None]
PERIODS = [10, 100, 1_000, 10**8]


def outputs(network, x):
    return jax.vmap(network)(x)


def residuals(network, data):
    x, y = data
    return outputs(network, x) - y


# --8<-- [start:linearised]
def linearised_predictions(network, periods):
    """Predictions on the grid after each number of steps on the linearised network, and
    the learning rate, which is half of the largest stable one."""
    kernel = gnlin.TangentKernel(network, outputs=0)(X)
    eta = 1 / jnp.linalg.norm(kernel, 2)
    predict = gnlin.predict.gradient_descent(network, (X, Y), learning_rate=eta)
    return predict(GRID, steps=periods), eta


# --8<-- [end:linearised]


def trained_predictions(network, eta, periods):
    """Predictions of the network itself, by gradient descent, step by step."""
    trained, rest = eqx.partition(network, eqx.is_inexact_array)

    def loss(trained):
        return 0.5 * jnp.sum(residuals(eqx.combine(trained, rest), (X, Y)) ** 2)

    def step(_, trained):
        gradient = jax.grad(loss)(trained)
        return jax.tree.map(lambda p, g: p - eta * g, trained, gradient)

    @jax.jit
    def after(num_steps):
        there = jax.lax.fori_loop(0, num_steps, step, trained)
        return outputs(eqx.combine(there, rest), GRID)

    return jnp.stack([after(k) for k in periods])


def difference(a, b):
    """Root mean square difference."""
    return jnp.sqrt(jnp.mean((a - b) ** 2, axis=(1, 2)))


def draw(found, widths, path):
    figure = Figure(figsize=(10, 3.4), dpi=150, layout="constrained")
    colours = ["#56B4E9", "#0072B2", "#009E73", "#D55E00"]
    for axes, width in zip(figure.subplots(1, 2, sharey=True), widths, strict=True):
        linearised, trained = found[width]
        for k, curve, colour in zip(PERIODS, linearised, colours, strict=True):
            axes.plot(GRID, curve, color=colour, label=f"linearised, K = {k:,}")
        for curve, colour in zip(trained, colours, strict=False):
            axes.plot(GRID, curve, "--", color=colour)
        axes.plot(X, Y, "k.")
        axes.set(title=f"width {width:,} (dashed: the network itself)", xlabel="x")
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path)


def main(out: Path, quick: bool):
    widths = (16, 128) if quick else (16, 1024)
    literal = PERIODS[:2] if quick else PERIODS[:3]
    found = {}
    print("| width | " + " | ".join(f"K = {k:,}" for k in literal) + " |")
    print("|---" * (1 + len(literal)) + "|")
    for width in widths:
        network = eqx.nn.MLP(
            1, 1, width, 1, activation=jnp.tanh, key=jax.random.key(0), dtype=float
        )
        # Features that bend within the interval, and outputs that start near zero.
        where = lambda m: m.layers[0].weight
        network = eqx.tree_at(where, network, replace_fn=lambda w: 3 * w)
        linearised, eta = linearised_predictions(network, PERIODS)
        trained = trained_predictions(network, eta, literal)
        found[width] = linearised, trained
        apart = difference(linearised[: len(literal)], trained)
        print(f"| {width:,} | " + " | ".join(f"{x:.1e}" for x in apart) + " |")
    out.mkdir(parents=True, exist_ok=True)
    draw(found, widths, out / "linearised.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="narrower, fewer steps")
    parser.add_argument("--out", type=Path, default=Path("results/tutorials"))
    arguments = parser.parse_args()
    main(arguments.out, arguments.quick)
