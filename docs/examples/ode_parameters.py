"""A fit of the parameters of an ordinary differential equation, by each diffrax adjoint.

    python docs/examples/ode_parameters.py [--quick]

The equations are Lotka and Volterra's, with six parameters and forty measurements. This
prints a table of the CPU time of the first fit, with its compilation, and of a later
one, also relative to SciPy's `least_squares` with a residual and a Jacobian that JAX
compiles.
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

# For each adjoint: the function that makes its Jacobian, and the solver.
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
    """A new function in each call, so that nothing is compiled yet."""

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
    """The result of `fit`, and the CPU seconds of its first call and of a later one (the
    median of seven)."""
    seconds, found = [], None
    for _ in range(8):
        began = time.process_time()
        found = fit()
        seconds.append(time.process_time() - began)
    return found, np.array([seconds[0], np.median(seconds[1:])])


def compared(name, times, data):
    """A fit, and its row of the table."""
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


if __name__ == "__main__":
    main()
