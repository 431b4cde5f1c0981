"""Six reactors with a recycle, a system of 19 equations, from random starts.

    python docs/examples/reactors.py

The equations are balances of moles, of order 1e3, and of energy, 1e9. The table says how
many of 40 starts each solver brings to a root, and in how many steps or evaluations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import scipy.optimize
from jax.flatten_util import ravel_pytree

import gnlin


jax.config.update("jax_enable_x64", True)

NUM_STARTS = 40
RANGES = {
    "near": {
        "a": (200, 900),
        "b": (50, 500),
        "temperature": (305, 390),
        "recycle": (0, 1),
    },
    "far": {"a": (0, 1000), "b": (0, 1000), "temperature": (280, 600), "recycle": (0, 3)},
}
SIZES = {"a": 1e3, "b": 1e3, "heat": 1e9, "split": 1.0}


def reactors(u, feed=310.0):
    """Return the balances of a and b (mol/s), of energy (W), and of the last split, for
    six stirred reactors in a row. The feed has a temperature in K."""
    a, b, temperature, recycle = u["a"], u["b"], u["temperature"], u["recycle"]
    first = 1e8 * jnp.exp(-7000 / temperature) * a
    second = 1e9 * jnp.exp(-8500 / temperature) * b
    flow = 1 + recycle

    def entering(fresh, x):
        mixed = (fresh + recycle * x[-1]) / flow
        return jnp.concatenate([mixed[None], x[:-1]])

    heat = 4e6 * flow * (entering(feed, temperature) - temperature)
    return {
        "a": flow * (entering(1000.0, a) - a) - 0.5 * first,
        "b": flow * (entering(0.0, b) - b) + 0.5 * (first - second),
        "heat": heat + 4e4 * first + 5e4 * second - 6e5 * (temperature - 300),
        "split": recycle - 0.3 * flow,
    }


def random_starts(where, num_starts=NUM_STARTS):
    """Return starts that are uniform in their ranges, with a leading axis."""
    ranges = RANGES[where]
    keys = jax.random.split(jax.random.key(0), len(ranges))
    return {
        name: jax.random.uniform(
            key, (num_starts, 6)[: 1 + (name != "recycle")], float, *ranges[name]
        )
        for name, key in zip(ranges, keys, strict=True)
    }


def is_root(u):
    """Return whether all balances are met to 1e-8 of their sizes."""
    left = jax.tree.map(lambda r, size: jnp.abs(r) / size, reactors(u), SIZES)
    return jnp.max(ravel_pytree(left)[0]) < 1e-8


def by_optimistix(solver, starts):
    """Return which starts reach a root, and in how many steps."""

    def solved(start):
        fn = lambda u, _: reactors(u)
        run = optx.least_squares(fn, solver, start, max_steps=300, throw=False)
        return is_root(run.value), run.stats["num_steps"]

    return map(np.asarray, jax.vmap(solved)(starts))


def by_scipy(method, starts):
    """Return which starts reach a root, and in how many evaluations."""
    one = jax.tree.map(lambda x: x[0], starts)
    _, unravel = ravel_pytree(one)
    f = jax.jit(lambda u: ravel_pytree(reactors(unravel(u)))[0])
    jacobian = jax.jit(jax.jacfwd(f))
    ends = []
    for start in np.asarray(jax.vmap(lambda u: ravel_pytree(u)[0])(starts)):
        found = scipy.optimize.root(f, start, jac=jacobian, method=method)
        ends.append((bool(is_root(unravel(jnp.asarray(found.x)))), found.nfev))
    return map(np.array, zip(*ends, strict=True))


SOLVERS = {
    "gnlin.LevenbergMarquardt()": gnlin.LevenbergMarquardt(),
    "gnlin.GaussNewton()": gnlin.GaussNewton(),
    "gnlin.GaussNewton(search=optx.BacktrackingArmijo())": gnlin.GaussNewton(
        search=optx.BacktrackingArmijo()
    ),
    "optimistix.Dogleg": optx.Dogleg(1e-9, 1e-9),
    "optimistix.LevenbergMarquardt": optx.LevenbergMarquardt(1e-9, 1e-9),
}


def main():
    print(f"| starts | solver | solved of {NUM_STARTS} | median steps or evaluations |")
    print("|---|---|---|---|")
    for where in RANGES:
        starts = random_starts(where)
        runs = {name: by_optimistix(solver, starts) for name, solver in SOLVERS.items()}
        runs |= {f"MINPACK's {name}": by_scipy(name, starts) for name in ("hybr", "lm")}
        for name, (are_solved, numbers) in runs.items():
            median = f"{np.median(numbers[are_solved]):g}" if are_solved.any() else "-"
            print(f"| {where} | {name} | {are_solved.sum()} | {median} |", flush=True)


if __name__ == "__main__":
    main()
