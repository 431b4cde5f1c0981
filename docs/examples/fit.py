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


# --8<-- [start:model]
def curve(parameters, t):
    decay = jnp.exp(-parameters["rate"] * t)
    return parameters["height"] * decay + parameters["background"]


def residuals(parameters, data):
    t, y = data
    return curve(parameters, t) - y


def fit(y, t):
    start = {"height": 1.0, "rate": 0.1, "background": 0.0}
    return optx.least_squares(residuals, gnlin.LevenbergMarquardt(), start, (t, y))


# --8<-- [end:model]


# --8<-- [start:errors]
def standard_errors(parameters, data):
    """Standard errors from the covariance at the solution, sigma^2 (phi^T phi)^-1."""
    lin = gnlin.linearise(residuals, parameters, data)
    num_residuals, num_parameters = lin.shape
    variance = jnp.sum(lin.outputs**2) / (num_residuals - num_parameters)
    covariance = variance * jnp.linalg.inv(lin.curvature())
    # JAX sorts the keys of dictionaries, so the errors are in this order.
    return dict(zip(sorted(parameters), jnp.sqrt(jnp.diag(covariance)), strict=True))


# --8<-- [end:errors]


# --8<-- [start:many]
def many(parameters, t, key, number):
    """Fit `number` repetitions of the experiment, in one compiled program."""
    noise = NOISE * jax.random.normal(key, (number, len(t)))
    measured = curve(parameters, t) + noise
    return jax.jit(jax.vmap(lambda y: fit(y, t).value))(measured)


# --8<-- [end:many]


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
    solution = fit(y, t)
    errors = standard_errors(solution.value, (t, y))
    repeated = many(solution.value, t, jax.random.key(1), 100 if quick else 1000)

    print(f"{solution.stats['num_feature_updates']} steps")
    print("| | true | found | standard error | spread of the refits |")
    print("|---|---|---|---|---|")
    for name, value in solution.value.items():
        spread = jnp.std(repeated[name])
        print(
            f"| {name} | {TRUE[name]} | {value:.4f} | {errors[name]:.4f} | {spread:.4f} |"
        )
    out.mkdir(parents=True, exist_ok=True)
    draw(t, y, solution.value, repeated, out / "fit.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a hundred refits")
    parser.add_argument("--out", type=Path, default=Path("results/tutorials"))
    arguments = parser.parse_args()
    main(arguments.out, arguments.quick)
