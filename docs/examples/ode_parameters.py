"""Time fits of the parameters of ordinary differential equations, with each adjoint.

    python docs/examples/ode_parameters.py [--quick]

The first table fits Lotka and Volterra's equations, with six parameters and forty
measurements. For each diffrax adjoint it has the CPU times of the first fit, which
includes compilation, and of a later one. It also divides them by the times of SciPy's
`least_squares`, whose residual and Jacobian JAX compiles. The second table times an
epidemic in two cities: a fit, its profiles, and a fit from several starts.
"""

import argparse
import time

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.optimize import least_squares

import gnlin


jax.config.update("jax_enable_x64", True)

# For each adjoint: the JAX function that computes the Jacobian, and the solver.
ADJOINTS = {
    "ForwardMode": (diffrax.ForwardMode(), jax.jacfwd, gnlin.LevenbergMarquardt()),
    "DirectAdjoint": (diffrax.DirectAdjoint(), jax.jacfwd, gnlin.LevenbergMarquardt()),
    "RecursiveCheckpointAdjoint": (
        diffrax.RecursiveCheckpointAdjoint(),
        jax.jacrev,
        gnlin.LevenbergMarquardt(),
    ),
}
TRUE = {"birth": 1.1, "catch": 0.4, "death": 0.4, "first": [10.0, 5.0], "growth": 0.1}
START = {"birth": 1.0, "catch": 0.5, "death": 0.5, "first": [8.0, 4.0], "growth": 0.15}


def populations(adjoint):
    """Return the curve as a new function, so that JAX has not compiled it yet."""

    def rates(t, y, p):
        prey, predators = y
        caught = prey * predators
        return jnp.stack(
            [
                p["birth"] * prey - p["catch"] * caught,
                p["growth"] * caught - p["death"] * predators,
            ]
        )

    def curve(p, times):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(rates),
            diffrax.Tsit5(),
            t0=0.0,
            t1=15.0,
            dt0=0.1,
            y0=jnp.asarray(p["first"]),
            args=p,
            saveat=diffrax.SaveAt(ts=times),
            stepsize_controller=diffrax.PIDController(rtol=1e-7, atol=1e-7),
            adjoint=adjoint,
            max_steps=512,
        )
        return solution.ys

    return curve


def timed(fit):
    """Return the result of `fit`, the CPU seconds of its first call, and the median of
    seven later ones."""
    seconds, found = [], None
    for _ in range(8):
        began = time.process_time()
        found = fit()
        seconds.append(time.process_time() - began)
    return found, np.array([seconds[0], np.median(seconds[1:])])


def compared(name, times, data):
    """Return a fit with the adjoint `name`, and its row of the first table."""
    adjoint, derivative, solver = ADJOINTS[name]
    curve, again = populations(adjoint), populations(adjoint)
    start, unravel = ravel_pytree(jax.tree.map(float, START))
    residual = jax.jit(lambda q: (again(unravel(q), times) - data).ravel())
    jacobian = jax.jit(derivative(residual))

    fit, ours = timed(lambda: gnlin.curve_fit(curve, times, data, START, solver))
    other, theirs = timed(
        lambda: least_squares(residual, start, jacobian, x_scale="jac", method="lm")
    )
    np.testing.assert_allclose(ravel_pytree(fit.parameters)[0], other.x, rtol=1e-4)
    cells = [f"{x:.2g}" for x in (*ours, *(ours / theirs))]
    return fit, f"| `{name}` | {' | '.join(cells)} |"


def in_two_cities():
    """Return a new function that solves an epidemic in two cities with shared rates."""

    def spread(t, y, p):
        susceptible, infected = y
        new = p["contact"] * susceptible * infected
        return jnp.stack([-new, new - p["recovery"] * infected])

    def infected(p, first, days):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(spread),
            diffrax.Tsit5(),
            t0=0.0,
            t1=days[-1],
            dt0=0.1,
            y0=jnp.stack([1 - first, first]),
            args=p,
            saveat=diffrax.SaveAt(ts=days),
            stepsize_controller=diffrax.PIDController(rtol=1e-7, atol=1e-9),
            adjoint=diffrax.ForwardMode(),
            max_steps=512,
            throw=False,
        )
        return solution.ys[:, 1]

    def cities(p, days):
        return jax.vmap(infected, in_axes=(None, 0, 0))(p, p["first"], days)

    return cities


def compared_in_two_cities():
    """Return the row of the second table."""
    cities, again = in_two_cities(), in_two_cities()
    days = jnp.stack([jnp.arange(1.0, 40, 2), jnp.arange(3.0, 61, 3)])
    true = {"contact": 0.5, "first": jnp.array([0.01, 0.001]), "recovery": 0.2}
    noise = 0.005 * np.random.default_rng(0).normal(size=(2, 20))
    counted = in_two_cities()(true, days) + noise
    start = {"contact": 0.8, "first": jnp.array([0.02, 0.002]), "recovery": 0.3}
    bounds = {"contact": (0.1, 2.0), "first": (1e-5, 0.05), "recovery": (0.05, 1.0)}
    seconds = [time.process_time()]
    fit = gnlin.curve_fit(cities, days, counted, start, bounds=bounds)
    seconds.append(time.process_time())
    fit.confidence_intervals()
    seconds.append(time.process_time())
    gnlin.curve_fit(cities, days, counted, start, bounds=bounds, starts=16)
    seconds.append(time.process_time())

    flat, unravel = ravel_pytree(start)
    residual = jax.jit(lambda q: (again(unravel(q), days) - counted).ravel())
    jacobian = jax.jit(jax.jacfwd(residual))
    other = least_squares(residual, flat, jacobian, x_scale="jac")
    np.testing.assert_allclose(ravel_pytree(fit.parameters)[0], other.x, rtol=1e-4)
    seconds.append(time.process_time())
    cells = [f"{x:.2g}" for x in np.diff(seconds)]
    return f"| two cities | {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one adjoint only")
    names = list(ADJOINTS)[: 1 if parser.parse_args().quick else None]
    times = jnp.linspace(0.75, 15, 20)
    noise = 0.3 * np.random.default_rng(0).normal(size=(20, 2))
    data = populations(diffrax.ForwardMode())(TRUE, times) + noise

    print("| adjoint | first fit, s | later, s | first, over SciPy's | later, over it |")
    print("|---|---|---|---|---|")
    fit = None
    for name in names:
        fit, row = compared(name, times, data)
        print(row, flush=True)
    print(fit)
    print("\n| | fit, s | its profiles, s | 16 starts, s | SciPy's fit, s |")
    print("|---|---|---|---|---|")
    print(compared_in_two_cities())


if __name__ == "__main__":
    main()
