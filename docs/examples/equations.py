"""Systems of as many equations as unknowns, beside `scipy.optimize.root`.

    python docs/examples/equations.py

The systems are a mole fraction and a pressure, a flash of five components, and the
equilibrium of a synthesis of methanol. Each has amounts and pascals, and is solved from a
near and a far start. SciPy gets the exact Jacobian.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import scipy.optimize
from jax.flatten_util import ravel_pytree

import gnlin


jax.config.update("jax_enable_x64", True)

# Antoine's equation: log10 of the pressure in mmHg, of the temperature in degrees Celsius
ANTOINE = np.array(
    [
        [8.07131, 1730.63, 233.426],  # water
        [8.11220, 1592.864, 226.184],  # ethanol
        [7.96681, 1668.21, 228.0],
        [6.90565, 1211.033, 220.79],  # benzene
        [6.95464, 1344.8, 219.482],  # toluene
    ]
)
FEED = np.array([0.2, 0.25, 0.15, 0.2, 0.2])
VAPOUR = 133.322 * 10 ** (ANTOINE[:, 0] - ANTOINE[:, 1] / (ANTOINE[:, 2] + 92))  # Pa
PRESSURE = 101325.0  # Pa


def fraction_and_pressure(u, _=None):
    """Return two equations in Pa."""
    x, p = u["x"], u["p"]
    return {"law": x * PRESSURE - p, "line": p - 47000 * x**2 - 1e4}


def flash(u, _=None):
    """Return balances in mole fractions, and equilibria in Pa."""
    v, x, y, p = u["v"], u["x"], u["y"], u["p"]
    return {
        "balance": FEED - (1 - v) * x - v * y,
        "equilibrium": p - x * VAPOUR,
        "dalton": y * PRESSURE - p,
        "sum": jnp.sum(x) - jnp.sum(y),
    }


def methanol(n, _=None):
    """Return balances in mol, and equilibria in Pa^3 and Pa^2, from 1 mol of CO, 1 mol
    of CO2 and 4 mol of H2 at 5 MPa."""
    p = 5e6 * n / jnp.sum(n)
    co, co2, h2, water, alcohol = n
    p_co, p_co2, p_h2, p_water, p_alcohol = p
    return {
        "carbon": co + co2 + alcohol - 2,
        "hydrogen": 2 * h2 + 2 * water + 4 * alcohol - 8,
        "oxygen": co + 2 * co2 + water + alcohol - 3,
        "alcohol": p_co * p_h2**2 - p_alcohol / 6e-13,
        "shift": p_co * p_water - 8e-3 * p_co2 * p_h2,
    }


def scaled(equations, sizes):
    """Return the equations in units of their sizes."""

    def fn(u, _=None):
        return jax.tree.map(lambda r, size: r / size, equations(u), sizes)

    return fn


OF_FLASH = {"balance": 1.0, "equilibrium": 1e5, "dalton": 1e5, "sum": 1.0}
OF_METHANOL = {
    "carbon": 1.0,
    "hydrogen": 1.0,
    "oxygen": 1.0,
    "alcohol": 1e18,
    "shift": 1e12,
}
FLASH = {
    "v": jnp.array(0.5),
    "x": jnp.full(5, 0.2),
    "y": jnp.full(5, 0.2),
    "p": jnp.full(5, 2e4),
}
FAR = {
    "v": jnp.array(0.99),
    "x": jnp.array([1.0, 0, 0, 0, 0]),
    "y": jnp.array([0, 0, 0, 0, 1.0]),
    "p": jnp.ones(5),
}
FRACTIONS = (0.0, {"v": 1.0, "x": 1.0, "y": 1.0, "p": None})

# A name, the equations in their own units and scaled, the start, and the bounds
SYSTEMS = (
    (
        "a fraction and a pressure",
        fraction_and_pressure,
        scaled(fraction_and_pressure, {"law": 1e5, "line": 1e5}),
        {"x": jnp.array(0.5), "p": jnp.array(5e4)},
        (0.0, {"x": 1.0, "p": None}),
    ),
    ("a flash", flash, scaled(flash, OF_FLASH), FLASH, FRACTIONS),
    ("the same, far", flash, scaled(flash, OF_FLASH), FAR, FRACTIONS),
    (
        "methanol",
        methanol,
        scaled(methanol, OF_METHANOL),
        jnp.array([0.5, 0.8, 2.5, 0.2, 0.7]),
        (0.0, None),
    ),
    (
        "the same, far",
        methanol,
        scaled(methanol, OF_METHANOL),
        jnp.array([1e-3, 1e-3, 1e-3, 5.0, 5.0]),
        (0.0, None),
    ),
)


def by_scipy(equations, start, tol=None):
    """Return the root, flat, the evaluations, and whether SciPy is content."""
    flat, unravel = ravel_pytree(start)
    f = jax.jit(lambda u: ravel_pytree(equations(unravel(u)))[0])
    found = scipy.optimize.root(f, flat, jac=jax.jit(jax.jacfwd(f)), tol=tol)
    return found.x, found.nfev, found.success


def by_gnlin(equations, start, solver):
    """Return the root, flat, the steps, and whether the run has converged."""
    found = gnlin.solve(start, gnlin.Residuals(equations), solver)
    steps = found.stats["num_feature_updates"]
    return (
        ravel_pytree(found.model)[0],
        int(steps),
        found.result == optx.RESULTS.successful,
    )


def solvers(bounds):
    region = gnlin.damping.TrustRegion()
    return {
        "default": gnlin.LevenbergMarquardt(),
        "with bounds": gnlin.LevenbergMarquardt(bounds=bounds),
        "trust region": gnlin.LevenbergMarquardt(bounds=bounds, damping=region),
        "Gauss-Newton": gnlin.GaussNewton(bounds=bounds),
    }


def runs_of(own, in_sizes, start, bounds):
    """Return the results of all solvers, and those in the equations' own units."""
    runs = {"SciPy": by_scipy(in_sizes, start)}
    for name, solver in solvers(bounds).items():
        runs[name] = by_gnlin(in_sizes, start, solver)
    runs["SciPy, own units"] = by_scipy(own, start)
    solver = gnlin.LevenbergMarquardt(bounds=bounds)
    runs["with bounds, own units"] = by_gnlin(own, start, solver)
    return runs


def main():
    print("| system | solver | steps or evaluations | relative error | is content |")
    print("|---|---|---|---|---|")
    for name, own, in_sizes, start, bounds in SYSTEMS:
        near = next(system[3] for system in SYSTEMS if system[1] is own)
        root, *_ = by_scipy(in_sizes, near, tol=1e-15)
        for solver, run in runs_of(own, in_sizes, start, bounds).items():
            found, steps, is_well = run
            error = np.max(np.abs(found - root) / np.abs(root))
            print(
                f"| {name} | {solver} | {steps} | {error:.0e} | {is_well} |", flush=True
            )


if __name__ == "__main__":
    main()
