"""A fit with its confidence band, and a fit with outliers.

    python docs/examples/curve_fit.py [--out FOLDER]

The data are forty measurements of a decay with a background. This draws
`curve_fit.png`.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import gnlin


jax.config.update("jax_enable_x64", True)


def decay(p, t):
    return p["height"] * jnp.exp(-p["rate"] * t) + p["background"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    out = parser.parse_args().out
    t = np.linspace(0, 4, 40)
    noise = 0.15 * np.random.default_rng(0).normal(size=40)
    y = decay({"height": 2.5, "rate": 1.3, "background": 0.4}, t) + noise
    wrong = y.at[jnp.array([8, 30])].add(2.0)

    start = {"height": 1.0, "rate": 0.1, "background": 0.0}
    fit = gnlin.curve_fit(decay, t, y, start)
    robust = gnlin.curve_fit(decay, t, wrong, start, loss=gnlin.losses.Huber(1.345))
    squares = gnlin.curve_fit(decay, t, wrong, start)
    print(fit, robust, sep="\n\n")

    figure = Figure(figsize=(9, 3.4), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    fit.plot(left)
    robust.plot(right)
    right.plot(t, decay(squares.parameters, t), "--", color="C3", label="squared error")
    right.legend()
    for ax in left, right:
        ax.set(xlabel="t", ylabel="y")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "curve_fit.png")


if __name__ == "__main__":
    main()
