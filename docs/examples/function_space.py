"""A tangent kernel before and after training, and the uncertainty of a network.

    python docs/examples/function_space.py [--quick] [--out FOLDER]

This draws two figures: `tangent_kernel.png`, the kernel and spectrum of a classifier of
handwritten digits, and `uncertainty.png`, the posterior of a network of one input and
the calibration of its intervals.
"""

import argparse
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import sklearn.datasets
from matplotlib.figure import Figure

import gnlin


jax.config.update("jax_enable_x64", True)
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#888888"


def digits(num_images):
    """Equally many images of each digit, in the order of their labels."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    chosen = [np.flatnonzero(labels == k)[: num_images // 10] for k in range(10)]
    chosen = np.concatenate(chosen)
    return images[chosen] / 16.0, labels[chosen]


def kernels(num_images, num_steps, path):
    images, labels = digits(num_images)
    start = eqx.nn.MLP(64, 10, 64, 2, key=jax.random.key(0), dtype=float)
    loss = gnlin.SoftmaxCrossEntropy(reduction="mean")
    solver = gnlin.DampedGaussNewton(0.01)
    trained = gnlin.solve(start, (images, labels), solver, loss=loss, max_steps=num_steps)
    figure = Figure(figsize=(10, 3.2), dpi=150, layout="constrained")
    before, after, spectrum = figure.subplots(1, 3)
    one_hot = np.eye(10)[labels]
    for axes, model, name, colour in (
        (before, start, "at the start", GREY),
        (after, trained.model, "after training", BLUE),
    ):
        kernel = gnlin.TangentKernel(model, outputs="trace")(images)
        unit = jnp.sqrt(jnp.diagonal(kernel))
        axes.imshow(kernel / unit[:, None] / unit[None], cmap="magma", vmin=0, vmax=1)
        middles = (np.arange(10) + 0.5) * len(labels) / 10
        axes.set(title=name, xticks=middles, yticks=middles)
        axes.set_xticklabels(range(10))
        axes.set_yticklabels(range(10))
        w, u = np.linalg.eigh(kernel)
        order = np.argsort(w)[::-1]
        share = np.cumsum(np.sum((u[:, order].T @ one_hot) ** 2, axis=1)) / one_hot.sum()
        spectrum.loglog(np.arange(1, len(w) + 1), w[order] / w.sum(), color=colour)
        print(f"| {name} | {100 * share[9]:.0f} % |")
    spectrum.set(title="eigenvalues, of their sum", xlabel="rank", ylim=(1e-7, 1))
    spectrum.legend(["at the start", "after training"], frameon=False)
    spectrum.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def line(key, n):
    """Noisy points in two clusters."""
    there, noise = jax.random.split(key)
    x = jax.random.uniform(there, (n, 1), minval=-1, maxval=1)
    x = jnp.where(x > 0, 0.4 + 0.9 * x, -0.5 + 0.8 * x)
    return x, jnp.sin(4 * x) + 0.15 * jax.random.normal(noise, (n, 1))


def uncertainty(num_points, num_draws, path):
    start = eqx.nn.MLP(1, 1, 64, 2, jnp.tanh, key=jax.random.key(0), dtype=float)
    where = lambda m: m.layers[0].weight
    start = eqx.tree_at(where, start, replace_fn=lambda w: 2 * w)
    data = line(jax.random.key(1), num_points)
    # --8<-- [start:posterior]
    model = gnlin.solve(start, data, gnlin.DampedGaussNewton(1.0), max_steps=20).model
    posterior = gnlin.predict.posterior(model, data, noise=0.3, about=start).tuned()
    grid = jnp.linspace(-2, 2, 201)[:, None]
    known = posterior(grid)
    low, high = known.interval(0.95)
    lowest, highest = known.interval(0.95, noise=posterior.noise)
    draws = posterior.sample(grid, 5, key=jax.random.key(3))
    # --8<-- [end:posterior]
    print(f"noise found: {posterior.noise:.3f}, drawn with 0.15")

    def covered(key, confidence):
        test = line(key, 200)
        low, high = posterior(test[0]).interval(confidence, noise=posterior.noise)
        return jnp.mean((low < test[1]) & (test[1] < high))

    levels = np.linspace(0.05, 0.95, 19)
    keys = jax.random.split(jax.random.key(2), num_draws)
    found = [[float(covered(key, float(level))) for key in keys] for level in levels]
    figure = Figure(figsize=(10, 3.4), dpi=150, layout="constrained")
    bands, calibration = figure.subplots(1, 2, width_ratios=(2, 1))
    x = grid[:, 0]
    light = {"alpha": 0.15, "color": BLUE, "linewidth": 0}
    bands.fill_between(x, lowest[:, 0], highest[:, 0], **light, label="a measurement")
    bands.fill_between(x, low[:, 0], high[:, 0], **{**light, "alpha": 0.35}, label="95 %")
    bands.plot(x, draws[..., 0].T, color=BLUE, linewidth=0.6)
    bands.plot(x, known.mean[:, 0], color=BLUE, linewidth=2)
    bands.plot(x, jnp.sin(4 * x), "--", color=GREY, label="the truth")
    bands.plot(*data, "k.", markersize=4)
    bands.set(ylim=(-3.6, 3), xlabel="x", title="what is known of a network's outputs")
    bands.legend(frameon=False, loc="lower center", ncols=3)
    calibration.plot([0, 1], [0, 1], color=GREY, linewidth=1)
    calibration.plot(levels, np.mean(found, axis=1), color=ORANGE)
    calibration.set(xlabel="confidence", ylabel="share of new points inside", aspect=1)
    for axes in (bands, calibration):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    print(f"share inside 95 %: {np.mean(found[-1]):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer images and steps")
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    few = arguments.quick
    kernels(100 if few else 300, 10 if few else 50, arguments.out / "tangent_kernel.png")
    uncertainty(40, 2 if few else 20, arguments.out / "uncertainty.png")
