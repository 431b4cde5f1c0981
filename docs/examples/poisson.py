"""A network that solves the differential equation -u'' = f to nine digits.

    python docs/examples/poisson.py [--quick] [--out FOLDER]

A network of 673 parameters solves the one-dimensional Poisson equation, with u = 0 at
both ends, in double precision. It is trained by Levenberg-Marquardt, by L-BFGS, and by
Adam at the best of five learning rates, from the same start. This draws `poisson.png`
and prints a table.
"""

import argparse
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
from matplotlib.figure import Figure

import gnlin


jax.config.update("jax_enable_x64", True)

RATES = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]


# --8<-- [start:problem]
def exact(x):
    return jnp.sin(jnp.pi * x)


def source(x):
    return jnp.pi**2 * jnp.sin(jnp.pi * x)


def residuals(network, points):
    """Residuals of the equation at the points, and of the boundary."""
    second = jax.vmap(jax.grad(jax.grad(network)))(points)
    equation = (second + source(points)) / jnp.sqrt(len(points))
    return equation, network(0.0), network(1.0)


# --8<-- [end:problem]


def make_network():
    return eqx.nn.MLP(
        "scalar", "scalar", 24, 2, activation=jnp.tanh, key=jax.random.key(0)
    )


# --8<-- [start:levenberg]
def levenberg_marquardt(network, points, steps):
    trained, rest = eqx.partition(network, eqx.is_inexact_array)
    solution = optx.least_squares(
        lambda trained, points: residuals(eqx.combine(trained, rest), points),
        gnlin.LevenbergMarquardt(),
        trained,
        points,
        max_steps=steps,
        throw=False,
    )
    return eqx.combine(solution.value, rest)


# --8<-- [end:levenberg]


def loss(network, points):
    return 0.5 * sum(jnp.sum(r**2) for r in residuals(network, points))


def first_order(network, points, steps, optimiser):
    """Train by an optimiser of optax; a line search gets the value of the loss."""
    trained, rest = eqx.partition(network, eqx.is_inexact_array)

    @jax.jit
    def run(trained, points):
        value = lambda trained: loss(eqx.combine(trained, rest), points)

        def step(carry, _):
            trained, state = carry
            now, gradient = jax.value_and_grad(value)(trained)
            extra = {"value": now, "grad": gradient, "value_fn": value}
            update, state = optimiser.update(gradient, state, trained, **extra)
            return (optax.apply_updates(trained, update), state), None

        carry = trained, optimiser.init(trained)
        return jax.lax.scan(step, carry, None, length=steps)[0][0]

    return eqx.combine(run(trained, points), rest)


def error(network):
    x = jnp.linspace(0, 1, 1001)
    wrong = jax.vmap(network)(x) - exact(x)
    return float(jnp.linalg.norm(wrong) / jnp.linalg.norm(exact(x)))


def draw(found, path):
    figure = Figure(figsize=(9, 3.4), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    x = jnp.linspace(0, 1, 401)
    left.plot(x, exact(x), color="#999999", linewidth=5, label="exact")
    colours = {"Levenberg": "#0072B2", "L-BFGS": "#E69F00", "Adam": "#D55E00"}
    for name, network in found.items():
        colour = colours[name.split("-Marq")[0].split(",")[0]]
        u = jax.vmap(network)(x)
        if "Levenberg" in name:
            left.plot(x, u, color=colour, label="network")
        right.plot(x, np.maximum(abs(u - exact(x)), 1e-14), color=colour, label=name)
    left.set(xlabel="x", ylabel="u")
    right.set(yscale="log", xlabel="x", ylabel="|error|", ylim=(1e-13, 1))
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main(out: Path, quick: bool):
    points, network = jnp.linspace(0, 1, 50), make_network()
    contenders = {
        "Levenberg-Marquardt, {} steps": (levenberg_marquardt, 40 if quick else 200),
        "L-BFGS, {} steps": (
            lambda *a: first_order(*a, optax.lbfgs()),
            100 if quick else 1000,
        ),
        "Adam, {} steps": (
            lambda *a: min(
                (first_order(*a, optax.adam(rate)) for rate in RATES), key=error
            ),
            300 if quick else 3000,
        ),
    }
    found = {}
    print("| | relative error | seconds of CPU time |")
    print("|---|---|---|")
    for name, (method, steps) in contenders.items():
        begin = time.process_time()
        name = name.format(f"{steps:,}")
        found[name] = method(network, points, steps)
        seconds = time.process_time() - begin
        print(f"| {name} | {error(found[name]):.1e} | {seconds:.1f} |", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    draw(found, out / "poisson.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--out", type=Path, default=Path("results/tutorials"))
    arguments = parser.parse_args()
    main(arguments.out, arguments.quick)
