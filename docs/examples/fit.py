"""A fit: three parameters, their standard errors, and a thousand fits at once.

    python docs/examples/fit.py [--quick] [--out FOLDER]

The data are forty noisy measurements of a decay with a background. This draws
`fit.png` and prints a table.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import optimistix as optx
from matplotlib.figure import Figure

import gnlin


jax.config.update("jax_enable_x64", True)

TRUE = {"height": 2.5, "rate": 1.3, "background": 0.4}
NOISE = 0.05


# --8<-- [start:fit]
START = {"height": 1.0, "rate": 0.1, "background": 0.0}


def curve(parameters, t):
    decay = jnp.exp(-parameters["rate"] * t)
    return parameters["height"] * decay + parameters["background"]


def fit(t, y):
    return gnlin.curve_fit(curve, t, y, START)


# --8<-- [end:fit]


# --8<-- [start:many]
def refits(parameters, t, key, number):
    """Fit `number` repetitions of the experiment, in one compiled program."""
    noise = NOISE * jax.random.normal(key, (number, len(t)))
    return gnlin.curve_fit(curve, t, curve(parameters, t) + noise, START).parameters


# --8<-- [end:many]


# --8<-- [start:by_hand]
def residuals(parameters, data):
    t, y = data
    return curve(parameters, t) - y


def by_hand(t, y):
    """The parameters, and their standard errors from sigma^2 (phi^T phi)^-1."""
    solver = gnlin.LevenbergMarquardt()
    found = optx.least_squares(residuals, solver, START, (t, y)).value
    lin = gnlin.linearise(residuals, found, (t, y))
    num_residuals, num_parameters = lin.shape
    variance = jnp.sum(lin.outputs**2) / (num_residuals - num_parameters)
    errors = jnp.sqrt(jnp.diag(variance * jnp.linalg.inv(lin.curvature())))
    # JAX sorts the keys of dictionaries, so the errors are in this order.
    return found, dict(zip(sorted(found), errors, strict=True))


# --8<-- [end:by_hand]


def draw(t, y, solution, repeated, path):
    figure = Figure(figsize=(9, 3.4), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    fine = jnp.linspace(0, 4, 200)
    curves = jax.vmap(lambda p: curve(p, fine))(repeated)
    low, high = jnp.percentile(curves, jnp.array([2.5, 97.5]), axis=0)
    left.fill_between(fine, low, high, color="#56B4E9", alpha=0.4, label="95 % of refits")
    left.plot(fine, curve(solution, fine), color="#0072B2", label="fit")
    left.plot(t, y, "k.", label="measured")
    left.set(xlabel="t", ylabel="y")
    left.legend(frameon=False)
    right.scatter(repeated["rate"], repeated["background"], s=4, color="#56B4E9")
    right.plot(TRUE["rate"], TRUE["background"], "k+", markersize=12, label="true")
    right.set(xlabel="rate", ylabel="background")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main(out: Path, quick: bool):
    t = jnp.linspace(0.0, 4.0, 40)
    y = curve(TRUE, t) + NOISE * jax.random.normal(jax.random.key(0), t.shape)
    found = fit(t, y)
    repeated = refits(found.parameters, t, jax.random.key(1), 100 if quick else 1000)
    _, errors = by_hand(t, y)

    print(found)
    print("| | true | found | standard error | by hand | spread of the refits |")
    print("|---|---|---|---|---|---|")
    for name, value in found.parameters.items():
        each = found.standard_errors[name], errors[name], jnp.std(repeated[name])
        said = " | ".join(f"{x:.4f}" for x in (value, *each))
        print(f"| {name} | {TRUE[name]} | {said} |")
    out.mkdir(parents=True, exist_ok=True)
    draw(t, y, found.parameters, repeated, out / "fit.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a hundred refits")
    parser.add_argument("--out", type=Path, default=Path("results/tutorials"))
    arguments = parser.parse_args()
    main(arguments.out, arguments.quick)
