"""The methods, and the seven values of each one's parameter."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax
from jaxtyping import Array

import gnlin

from ...figures import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from ...soap import on_matrices, soap


PERIOD = 10
"""K of iterative linearisation."""
MOMENTUM = 0.9
"""Momentum of SGD."""
TOLERANCE = 0.1
"""Tolerance of prox-linear Gauss-Newton: its problem is solved until the gradient has
fallen to this part. Solving to rounding would take several times as many passes."""
FREQUENCY = 1
"""SOAP updates its eigenvectors after this many steps. With 10, its authors' value, the
loss jumps up at each update, and on the MLP's large batch SOAP takes three times as many
steps."""
GREY = "#888888"


@dataclasses.dataclass(frozen=True)
class Method:
    name: str
    parameter: str
    values: tuple[float, ...]
    make: Callable[[Array], Any]
    """Creates a solver of gnlin, or an optimiser of optax, from the value."""
    colour: str
    by_fit: bool = True
    """Whether `gnlin.fit` trains with it, as with all solvers of gnlin."""
    updates: bool = True
    """Whether each step is a feature update whose problem is solved."""


_DAMPINGS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 0.3, 1.0)


def _first_order(name: str, values: tuple[float, ...], make: Any, colour: str) -> Method:
    return Method(name, "rate", values, make, colour, by_fit=False, updates=False)


_METHODS = (
    Method(
        "prox-linear Gauss-Newton",
        "lambda",
        _DAMPINGS,
        lambda damping: gnlin.TruncatedGaussNewton(
            TOLERANCE, damping, form="prox-linear", method="matrix-free"
        ),
        BLUE,
    ),
    Method(
        "damped Gauss-Newton",
        "lambda",
        _DAMPINGS,
        lambda damping: gnlin.DampedGaussNewton(damping, method="matrix-free"),
        SKY,
    ),
    Method(
        "truncated Gauss-Newton",
        "beta",
        (0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8),
        lambda tolerance: gnlin.TruncatedGaussNewton(tolerance, method="matrix-free"),
        GREEN,
    ),
    Method(
        f"iterative linearisation, K = {PERIOD}",
        "rate",
        (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
        lambda rate: gnlin.IterativeLinearisation(PERIOD, rate),
        PURPLE,
        updates=False,
    ),
    _first_order(
        "SGD",
        (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
        lambda r: optax.sgd(r, MOMENTUM),
        GREY,
    ),
    _first_order("AdamW", _RATES, optax.adamw, BLACK),
    _first_order("Muon", _RATES, lambda r: on_matrices(optax.contrib.muon(r)), ORANGE),
    _first_order(
        "SOAP",
        _RATES,
        lambda rate: on_matrices(soap(rate, frequency=FREQUENCY)),
        VERMILION,
    ),
)

METHODS = {method.name: method for method in _METHODS}
