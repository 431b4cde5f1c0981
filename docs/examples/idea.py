"""The meaning of K: gradient steps along a tangent, and then along the next tangent.

    python docs/examples/idea.py [--quick] [--out FOLDER]

The outputs of a network with one parameter, on two examples, are a curve in the plane,
and its linearisation is a tangent of that curve. This draws `idea.png`.
"""

import argparse
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import gnlin


jax.config.update("jax_enable_x64", True)
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#888888"
INPUTS, TARGETS = jnp.array([0.7, 2.0]), jnp.array([1.1, 1.6])
START, RATE = jnp.array(-0.8), 0.02


def network(theta, x):
    return jnp.sin(x * theta) + 0.4 * x * theta


def residual(theta, targets):
    return network(theta, INPUTS) - targets


def outer_step(theta, period):
    """The next parameter, and the outputs of the linearised network on the way to it."""
    spectrum = gnlin.linearise(residual, theta, TARGETS).spectrum()
    inner = np.unique(np.geomspace(1, min(period, 1000), 25).astype(int)).tolist()
    steps = [
        spectrum.step(gnlin.filters.GradientDescent(k, RATE)) for k in (*inner, period)
    ]
    outputs, change = jax.jvp(lambda y: network(y, INPUTS), (theta,), (jnp.ones(()),))
    return theta + steps[-1], np.array([outputs + change * s for s in (0.0, *steps)])


def draw(axes, period, num_updates):
    curve = np.array([network(t, INPUTS) for t in jnp.linspace(-1.5, 1.6, 120)])
    axes.plot(*curve.T, color=GREY, linewidth=3, alpha=0.5)
    axes.plot(*TARGETS, "k*", markersize=11)
    theta = START
    for _ in range(num_updates):
        axes.plot(*network(theta, INPUTS), "o", color=BLUE, markersize=5)
        theta, on_tangent = outer_step(theta, period)
        axes.plot(*on_tangent.T, ".-", color=ORANGE, markersize=4, linewidth=1)
        if not math.isinf(period):
            back = np.array([on_tangent[-1], network(theta, INPUTS)])
            axes.plot(*back.T, ":", color=BLUE, linewidth=1)
    axes.set(xlabel="output of one example", aspect="equal")
    axes.spines[["top", "right"]].set_visible(False)
    return float(jnp.linalg.norm(residual(theta, TARGETS)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path())
    given = parser.parse_args()
    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    for axes, period in zip(panels, (1, 30, math.inf), strict=True):
        updates = 1 if math.isinf(period) else 600 // period
        distance = draw(axes, period, min(updates, 40) if given.quick else updates)
        name = "infinity" if math.isinf(period) else f"{period}"
        axes.set_title("K = " + name.replace("infinity", r"$\infty$"))
        print(f"K = {name}: linearised {updates} times, {distance:.3f} from the targets")
    panels[0].set_ylabel("output of another")
    figure.savefig(given.out / "idea.png")


if __name__ == "__main__":
    main()
