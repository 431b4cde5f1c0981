"""Solve Burgers' equation by a network, and correct the solution.

    python docs/examples/burgers.py [--quick]

The equation is u_t + u u_x = 0.01 u_xx for 0 < t < 1, with the period 2 in x, from
-sin(pi x). Every thirty steps the script prints the relative L2 error, its estimate
without a reference, and the error after the correction.
"""

import argparse
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import qmc

import gnlin


jax.config.update("jax_enable_x64", True)
VISCOSITY = 0.01
NODES, WEIGHTS = np.polynomial.hermite.hermgauss(100)


class Periodic(eqx.Module):
    """A tanh network of (t, cos pi x, sin pi x). Its weights are larger than usual, so
    that more of the Jacobian's singular values are above rounding."""

    mlp: eqx.nn.MLP

    def __init__(self, width, key):
        mlp = eqx.nn.MLP(3, "scalar", width, 3, jnp.tanh, key=key)
        times = lambda x: 3**0.5 * x if eqx.is_array(x) else x
        self.mlp = jax.tree.map(times, mlp)

    def __call__(self, point):
        t, angle = point[0], jnp.pi * point[1]
        return self.mlp(jnp.stack([t, jnp.cos(angle), jnp.sin(angle)]))


def along(u, axis):
    def derivative(point):
        return jax.jvp(u, (point,), (jnp.zeros(2).at[axis].set(1),))[1]

    return derivative


def burgers(u, point):
    diffused = VISCOSITY * along(along(u, 1), 1)(point)
    return along(u, 0)(point) + u(point) * along(u, 1)(point) - diffused


def from_a_sine(u, point):
    return u(point) + jnp.sin(jnp.pi * point[1])


def groups(number):
    """Return the residuals at `number` points of a Sobol sequence, and at an eighth as
    many at the start."""
    inside = qmc.Sobol(2, rng=0).random(number) * [1, 2] - [0, 1]
    places = np.linspace(-1, 1, number // 8, endpoint=False)
    start = np.stack([np.zeros_like(places), places], axis=1)
    return {
        "equation": gnlin.Residuals(burgers, jnp.asarray(inside), weight=0.01 / number),
        "start": gnlin.Residuals(from_a_sine, jnp.asarray(start), weight=8 / number),
    }


def exact(points):
    """Return the solution by Cole and Hopf's transformation, a quotient of integrals."""
    t, x = points[:, :1], points[:, 1:]
    place = np.pi * (x - np.sqrt(4 * VISCOSITY * t) * NODES)
    weights = WEIGHTS * np.exp(-np.cos(place) / (2 * np.pi * VISCOSITY))
    return -np.sum(weights * np.sin(place), axis=1) / np.sum(weights, axis=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small network")
    quick = parser.parse_args().quick
    width, number, rounds = (16, 1024, 1) if quick else (30, 8192, 2)
    net = Periodic(width, jax.random.key(0))
    test = np.random.default_rng(1).uniform([0, -1], [1, 1], (10_000, 2))
    true, norm = exact(test), np.linalg.norm

    print("| steps | error | estimate | after the correction | CPU seconds |")
    print("|---|---|---|---|---|", flush=True)
    for k in range(rounds):
        net = gnlin.fit(net, groups(number), steps=30, progress=False).model
        correction = gnlin.predict.correction(net, groups(2 * number))
        before, change = jax.vmap(net)(jnp.asarray(test)), correction(test)
        errors = [norm(x) / norm(true) for x in (before - true, change)]
        errors.append(norm(before + change - true) / norm(true))
        cells = " | ".join(f"{error:.1e}" for error in errors)
        print(f"| {30 * (k + 1)} | {cells} | {time.process_time():.0f} |", flush=True)


if __name__ == "__main__":
    main()
