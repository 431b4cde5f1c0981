"""The costs of operations on this device, by which `method="auto"` chooses."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..networks.mlp import digits_mlp
from .report import Comparison, Row
from .task import in_double
from .timing import alternate, Case, Timing


SIZES = (16, 64, 256, 768)
LARGE_SIZES = (16, 64, 256, 1024, 2048)
"""Sizes that also fill a GPU."""
_NUM_STEPS = 1_000

_FACTORISATIONS: dict[str, Callable[[jax.Array], Any]] = {
    "cholesky": jnp.linalg.cholesky,
    "eigh": jnp.linalg.eigh,
    "svd": lambda a: jnp.linalg.svd(a, full_matrices=False),
}


def comparisons(quick: bool) -> Iterator[Comparison]:
    large = jax.default_backend() != "cpu" and not quick
    num_rounds = 5 if quick or large else 30
    sizes = LARGE_SIZES if large else SIZES[:3] if quick else SIZES
    rows = [
        _product(4096 if large else 1000, num_rounds),
        _passed(65_536 if large else 256, num_rounds),
        _looped(num_rounds),
    ]
    for name, factorise in _FACTORISATIONS.items():
        rows.extend(_factorisation(name, factorise, sizes, num_rounds))
    yield Comparison("Rates, in double precision", rows, "itself")


def _least(timing: Timing) -> float:
    """Return the least time, since other work on the machine can only increase it."""
    return min(timing.seconds)


def _timed(name: str, fn: Callable, *args: Any, num_rounds: int) -> float:
    compiled = jax.jit(fn)
    (timing,) = alternate([Case("jax", name, lambda: compiled(*args))], num_rounds)
    return _least(timing)


def _product(n: int, num_rounds: int) -> Row:
    a = jax.random.normal(jax.random.key(0), (n, n), float)
    seconds = _timed("product", lambda a: a @ a.T, a, num_rounds=num_rounds)
    return Row("rates", "jax", "an operation of a matrix product", seconds / (2.0 * n**3))


def _passed(num_examples: int, num_rounds: int) -> Row:
    """Measure a tangent pass over many digits."""
    model = in_double(digits_mlp(jax.random.key(0)))
    parameters, rest = eqx.partition(model, eqx.is_inexact_array)
    x = jax.random.normal(jax.random.key(1), (num_examples, 64), float)

    def passed(parameters, x):
        fn = lambda p: jax.vmap(eqx.combine(p, rest))(x)
        return jax.jvp(fn, (parameters,), (parameters,))[1]

    seconds = _timed("pass", passed, parameters, x, num_rounds=num_rounds)
    size = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    # Each layer takes three products: its outputs, and two for their tangents.
    return Row(
        "rates", "jax", "an operation of a pass", seconds / (6.0 * num_examples * size)
    )


def _looped(num_rounds: int) -> Row:
    many = lambda x: jax.lax.fori_loop(0, _NUM_STEPS, lambda _, x: jnp.sin(x) @ x, x)
    step = _timed("loop", many, jnp.ones((8, 8)), num_rounds=num_rounds) / _NUM_STEPS
    return Row("rates", "jax", "an iteration of a loop", step)


def _factorisation(
    name: str, factorise: Callable, sizes: tuple[int, ...], num_rounds: int
) -> Iterator[Row]:
    """Time a factorisation at each size, and fit the costs of a call, n^2 and n^3."""
    seconds = []
    for n in sizes:
        a = jax.random.normal(jax.random.key(n), (n, n), float)
        matrix = a @ a.T + n * jnp.eye(n)
        seconds.append(_timed(name, factorise, matrix, num_rounds=num_rounds))
        yield Row("rates", "jax", f"{name}, n = {n}", seconds[-1])
    powers = np.array([[1.0, n**2.0, n**3.0] for n in sizes])
    weights = 1 / np.array(seconds)
    costs = _nonnegative(powers * weights[:, None], np.ones(len(sizes)))
    for what, cost in zip(("a call", "n^2 times", "n^3 times"), costs, strict=True):
        yield Row("rates", "jax", f"{name}, {what}", float(cost))


def _nonnegative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Solve the least-squares problem without the terms that would be negative."""
    kept = np.arange(a.shape[1])
    while True:
        x, *_ = np.linalg.lstsq(a[:, kept], b)
        if np.all(x >= 0):
            solution = np.zeros(a.shape[1])
            solution[kept] = x
            return solution
        kept = kept[x >= 0]
