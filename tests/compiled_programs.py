"""Print as JSON what a first call of each named program compiles: the number of copies of
a function before XLA optimises the program, and of fusions afterwards. This runs in a
separate process, in which XLA fuses as it does for users."""

import json
import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx

import gnlin
from gnlin._fit import _step


jax.config.update("jax_enable_x64", True)


def counted(lowered, operation: str, in_each: int = 1) -> dict[str, int]:
    """Count the fusions, and the copies of a function that has `operation` `in_each`
    times."""
    found = re.findall(rf"stablehlo\.{operation} ", lowered.as_text())
    fusions = lowered.compile().as_text().count(" fusion(")
    return {"copies": len(found) // in_each, "fusions": fusions}


def of_a_fit(solver) -> dict[str, int]:
    def residuals(b, data):
        x, y = data
        return b[0] * jnp.exp(-b[1] * x) + b[2] - y

    def fit(b, data):
        return optx.least_squares(residuals, solver, b, data, throw=False).value

    x = jnp.linspace(0.0, 2.0, 30)
    return counted(jax.jit(fit).lower(jnp.ones(3), (x, x)), "exponential")


def network(num_outputs: int):
    key = jax.random.key(0)
    return eqx.nn.MLP(2, num_outputs, 16, 3, jnp.tanh, dtype=float, key=key)


def of_solve(num_outputs: int, targets, loss) -> dict[str, int]:
    arrays, rest = eqx.partition(network(num_outputs), eqx.is_array)

    def solve(arrays, data):
        return gnlin.solve(eqx.combine(arrays, rest), data, loss=loss).loss

    return counted(jax.jit(solve).lower(arrays, (jnp.ones((50, 2)), targets)), "tanh", 3)


def of_fit(loss, **settings) -> dict[str, int]:
    """Return the program of a step on a batch."""
    found, made = [], _step._jitted

    def spied(fn, *static):
        program = made(fn, *static)

        def call(*args):
            if fn is _step.step and not found:
                found.append(counted(program.lower(*args), "tanh", 3))
            return program(*args)

        return call

    _step._jitted = spied
    data = jnp.ones((64, 2)), jnp.arange(64) % 3
    gnlin.fit(network(3), data, loss=loss, batch_size=32, steps=1, **settings)
    _step._jitted = made
    return found[0]


softmax = gnlin.SoftmaxCrossEntropy()
programs = {
    "a fit": lambda: of_a_fit(gnlin.LevenbergMarquardt()),
    "a damped fit": lambda: of_a_fit(gnlin.DampedGaussNewton(1e-3)),
    "solve": lambda: of_solve(1, jnp.ones((50, 1)), gnlin.SquaredError()),
    "solve, softmax": lambda: of_solve(3, jnp.arange(50) % 3, softmax),
    "fit, softmax": lambda: of_fit(softmax, progress=False),
}
print(json.dumps({name: programs[name]() for name in sys.argv[1:]}))
