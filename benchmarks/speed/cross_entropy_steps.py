"""K inner steps on cross-entropy at one linearisation: literal, by flow, by formula."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import gnlin

from ..data import digits
from ..networks.mlp import digits_mlp
from .oracle import relative_error
from .report import Row, timed_row
from .task import in_double
from .timing import alternate, Case


LEARNING_RATE = 1e-4
NUM_IMAGES = 50
PERIODS = {
    "one by one, with the kernel": range(6),
    "gradient flow": range(4, 9),
    "by formula, the loss expanded": range(9),
}
"""The ways to take the steps, and the powers of ten of K for each."""
SETTINGS: dict[str, dict[str, Any]] = {
    "one by one, with the kernel": {"method": "kernel"},
    "gradient flow": {"method": "flow"},
    "by formula, the loss expanded": {"form": "quadratic", "method": "eigh"},
}


def rows(largest: int, num_rounds: int, num_images: int = NUM_IMAGES) -> list[Row]:
    """Time the whole outer step. The error of gradient flow is relative to the same
    number of literal steps, if those are also run. Ratios are to the first row of each
    kind."""
    (images, labels), _ = digits.classification()
    data = jnp.asarray(images[:num_images]), jnp.asarray(labels[:num_images])
    model = in_double(digits_mlp(jax.random.key(0)))
    cases = [
        _case(model, data, how, 10**power)
        for how, powers in PERIODS.items()
        for power in powers
        if 10**power <= largest
    ]
    timings = alternate(cases, num_rounds)
    steps = {(case.note, case.variant): case.step for case in cases}
    literally = cases[0].note
    first, found = {}, []
    for timing in timings:
        case = timing.case
        reference = first.setdefault(case.note, timing)
        error = {}
        exact = steps.get((literally, case.variant))
        if case.note == "gradient flow" and exact is not None:
            assert case.step is not None
            error["step_error"] = relative_error(case.step(), exact())
        found.append(timed_row("K steps, cross-entropy", timing, reference, **error))
    return found


def _case(model, data, how: str, period: int) -> Case:
    solver = gnlin.IterativeLinearisation(
        jnp.array(float(period)), LEARNING_RATE, **SETTINGS[how]
    )
    start = _flat(model)

    def run():
        return gnlin.solve(
            model,
            data,
            solver,
            loss=gnlin.SoftmaxCrossEntropy(reduction="sum"),
            max_steps=1,
        ).model

    return Case(
        "gnlin",
        f"K = {period:,}",
        run,
        step=lambda: _flat(run()) - start,
        max_rounds=None if period <= 1000 else 1,
        note=how,
    )


def _flat(model) -> np.ndarray:
    return np.asarray(ravel_pytree(eqx.filter(model, eqx.is_inexact_array))[0])
