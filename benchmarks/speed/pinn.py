"""A network for Poisson's equation: a step beside one by hand, times to an accuracy."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

import gnlin

from .. import timed_training as by_the_clock
from ..equations import EQUATIONS, Groups
from .report import Comparison, Figure, Row, timed_row
from .timing import alternate, Case


EQUATION = EQUATIONS["poisson-2d"]
DEEP, SHALLOW = (64, 64, 48, 48), (32,)
BY_LAYERS: dict[str, Any] = {
    "method": "kernel",
    "scaling": "identity",
    "acceleration": False,
}
"""Settings that need no rows of the Jacobian."""
ENOUGH, MOST_SECONDS = 1e-4, 120.0
FINE = 1e-6
_FIRST_DAMPING = 1e-3
_STEPS = 16
"""The number of steps of a timed run."""
_LOOKS = 400
_MANY = 2500
"""A number of interior points at which a kernel is expensive."""
_RANKS = 25, 50, 100, 200


def comparisons(quick: bool) -> Iterator[Comparison]:
    hidden, number = ((8, 8), 64) if quick else (DEEP, 900)
    rows = steps(hidden, number, 2 if quick else 3)
    yield Comparison(
        f"One Levenberg-Marquardt step, {rows[0].note}",
        rows,
        figures=[
            Figure("a step by layers over the one by hand", "<= 1.2", rows[1].ratio),
            Figure("... which would be faster", "< 1", rows[1].ratio),
            Figure("... by default", "<= 1.2", rows[2].ratio),
        ],
    )
    jax.clear_caches()
    for n in (number,) if quick else (number, _MANY):
        rows = by_low_rank(hidden, n, 2 if quick else 3)
        what = f"Relative L2 error after {_STEPS} damped steps with momentum"
        yield Comparison(f"{what}, {rows[0].note}", rows)
        jax.clear_caches()
    rows = to_an_accuracy(hidden, number, 1.0 if quick else MOST_SECONDS)
    what = f"seconds to a relative error of {ENOUGH:g}, p = 9,873"
    yield Comparison(
        f"Relative L2 error after as many seconds, {rows[0].note}",
        rows,
        figures=[
            Figure(what, f"<= {MOST_SECONDS:g}", None if quick else rows[0].seconds)
        ],
    )
    jax.clear_caches()
    errors = of_seeds(*((2, 0.3) if quick else (5, 10.0)))
    what = "log10 of the least relative error, p = 129, median of five seeds"
    least = math.log10(statistics.median(row.step_error or 1.0 for row in errors))
    yield Comparison(
        "Least relative L2 error on the way, network 2-32-1, 784 interior points",
        errors,
        figures=[Figure(what, f"<= {math.log10(FINE):g}", None if quick else least)],
    )


#
# A step
#


def steps(hidden: Sequence[int], number: int, num_rounds: int) -> list[Row]:
    model, groups = _problem(hidden, number, 0)
    cases = [
        Case("hand-written", "rows, Cholesky", lambda: by_hand(model, groups), _count),
        _by_gnlin("LM, by layers", model, groups, BY_LAYERS),
        _by_gnlin("LM", model, groups, {}),
        _by_gnlin('LM, "kernel"', model, groups, {"method": "kernel"}),
    ]
    timings = alternate(cases, num_rounds)
    said = _size(model, groups)
    rows = [timed_row(f"a step: {said}", t, timings[0]) for t in timings]
    return [dataclasses.replace(row, note=said) for row in rows]


def _count(output: Any) -> int:
    del output
    return _STEPS


@eqx.filter_jit
def by_hand(model: PyTree, groups: Groups) -> tuple[jax.Array, jax.Array]:
    """Form rows by reverse passes at each point, and their products, and solve by
    Cholesky. The damping falls after a step that lowers the objective, and otherwise
    rises."""
    trained, frozen = eqx.partition(model, eqx.is_inexact_array)
    start, unravel = ravel_pytree(trained)
    model_at = lambda v: eqx.combine(unravel(v), frozen)

    def step(_, carry):
        v, value, damping = carry
        residual, rows = by_the_clock.rows_of(model_at, v, groups)
        kernel = rows @ rows.T + damping * jnp.eye(residual.size)
        solved = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(kernel), True), residual)
        new = v - rows.T @ solved
        new_value = by_the_clock.objective(model_at(new), groups)
        lower = new_value < value
        return (
            jnp.where(lower, new, v),
            jnp.where(lower, new_value, value),
            damping * jnp.where(lower, 1 / 3, 2.0),
        )

    value = by_the_clock.objective(model, groups)
    carry = start, value, jnp.array(_FIRST_DAMPING)
    return jax.lax.fori_loop(0, _STEPS, step, carry)[:2]


def _by_gnlin(variant: str, model: PyTree, groups: Groups, settings: dict) -> Case:
    @eqx.filter_jit
    def run(model, groups):
        solver = gnlin.LevenbergMarquardt(0.0, 0.0, **settings)
        solution = gnlin.solve(model, groups, solver, max_steps=_STEPS, divergence=None)
        return eqx.filter(solution.model, eqx.is_array), solution.loss

    return Case("gnlin", variant, lambda: run(model, groups), _count)


def by_low_rank(hidden: Sequence[int], number: int, num_rounds: int) -> list[Row]:
    """Compare the kernel with approximations of lower rank."""
    model, groups = _problem(hidden, number, 0)
    methods: dict[str, Any] = {"the kernel": "kernel"}
    methods |= {f"Nystrom, rank {k}": gnlin.methods.NystromKernel(k) for k in _RANKS}
    said, errors = _size(model, groups), []
    for method in methods.values():
        trained = eqx.combine(_damped(model, groups, method)[0], model)
        errors.append(float(EQUATION.error(trained)))
    cases = [
        Case("gnlin", name, lambda method=method: _damped(model, groups, method), _count)
        for name, method in methods.items()
    ]
    timings = alternate(cases, num_rounds)
    rows = [timed_row(f"a step: {said}", t, timings[0]) for t in timings]
    return [
        dataclasses.replace(row, step_error=error, tolerance=math.inf, note=said)
        for row, error in zip(rows, errors, strict=True)
    ]


@eqx.filter_jit
def _damped(model: PyTree, groups: Groups, method: Any) -> tuple[PyTree, jax.Array]:
    solver = gnlin.DampedGaussNewton(
        _FIRST_DAMPING, momentum=0.9, search=gnlin.methods.GridSearch(), method=method
    )
    solution = gnlin.solve(model, groups, solver, max_steps=_STEPS, divergence=None)
    return eqx.filter(solution.model, eqx.is_array), solution.loss


#
# Errors
#


def to_an_accuracy(hidden: Sequence[int], number: int, seconds: float) -> list[Row]:
    """Measure the time at which gnlin reaches the accuracy, or all the time that it is
    given. The other optimisers run for as long."""
    model, groups = _problem(hidden, number, 0)
    said, error_of = _size(model, groups), eqx.filter_jit(EQUATION.error)
    ours = by_the_clock.by_gnlin(gnlin.LevenbergMarquardt(**BY_LAYERS))
    looks = ours(model, groups, seconds, _LOOKS)
    there = next((x for x in looks if error_of(x.model) <= ENOUGH), looks[-1])
    rows = [_row("gnlin", "LM, by layers", said, there, error_of)]
    for library, variant, trainer in (
        ("optax", "Adam, 3e-3", by_the_clock.adam(3e-3)),
        ("optax", "Adam, 1e-2", by_the_clock.adam(1e-2)),
        ("optax", "L-BFGS", by_the_clock.lbfgs()),
    ):
        last = trainer(model, groups, there.seconds, _LOOKS)[-1]
        rows.append(_row(library, variant, said, last, error_of))
    return rows


def of_seeds(num_seeds: int, seconds: float) -> list[Row]:
    error_of, rows = eqx.filter_jit(EQUATION.error), []
    for seed in range(num_seeds):
        model, groups = _problem(SHALLOW, 784, seed)
        train = by_the_clock.by_gnlin(gnlin.LevenbergMarquardt())
        looks = train(model, groups, seconds, 60)
        least = min(looks, key=lambda look: float(error_of(look.model)))
        rows.append(_row("gnlin", f"LM, seed {seed}", "", least, error_of))
    return rows


def _row(
    library: str, variant: str, said: str, look: by_the_clock.Look, error_of: Callable
) -> Row:
    return Row(
        "a network for Poisson's equation",
        library,
        variant,
        seconds=look.seconds,
        step_error=float(error_of(look.model)),
        tolerance=ENOUGH,
        note=", ".join(filter(None, [said, f"{look.steps:,} steps"])),
    )


def _problem(hidden: Sequence[int], number: int, seed: int) -> tuple[PyTree, Groups]:
    return EQUATION.model(hidden, jax.random.key(seed)), EQUATION.groups(number)


def _size(model: PyTree, groups: Groups) -> str:
    p = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    m = " + ".join(str(group.data.shape[0]) for group in groups.values())
    return f"p = {p:,}, {m} points"
