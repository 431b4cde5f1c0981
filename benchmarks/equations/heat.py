"""The heat equation, with a known and with an unknown conductivity."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ._base import (
    along,
    equals,
    Equation,
    Function,
    grid,
    group,
    Groups,
    inside,
    Interval,
    Point,
    UNIT,
)


CONDUCTIVITY = 0.25


def heat(u: Function, x: Point, conductivity: Any = CONDUCTIVITY) -> Float[Array, ""]:
    """u_t = kappa u_xx"""
    return along(u, 0)(x) - conductivity * along(u, 1, 2)(x)


def cooling(x: Point) -> Float[Array, ""]:
    decay = jnp.exp(-CONDUCTIVITY * jnp.pi**2 * x[0])
    return decay * jnp.sin(jnp.pi * x[1])


def in_time(residual: Callable, exact: Callable, ends: Interval) -> Callable:
    """Groups of an equation whose values at the start and at both ends are known."""

    def groups(number: int) -> Groups:
        side = round(number**0.5)
        times, places = np.linspace(*UNIT, side + 1)[1:], inside(ends, side)
        return {
            "interior": group(residual, grid(times, places)),
            "start": group(equals(exact), grid(np.zeros(1), places)),
            "ends": group(equals(exact), grid(times, np.array(ends))),
        }

    return groups


COOLING = Equation(
    "Heat equation",
    jax.vmap(cooling),
    in_time(heat, cooling, UNIT),
    (UNIT, UNIT),
    in_time=True,
)


def _conducting(model: PyTree, x: Point) -> Float[Array, ""]:
    return heat(model["u"], x, model["coefficient"])


def _measured(model: PyTree, example: Mapping[str, Array]) -> Float[Array, ""]:
    return model["u"](example["x"]) - example["value"]


def _measurements(number: int) -> Groups:
    """Exact measurements anywhere, a sixth as many as points: neither the start nor the
    ends are known otherwise."""
    side = round(number**0.5)
    x = jnp.asarray(np.random.default_rng(0).uniform(size=(-(-number // 6), 2)))
    measured = {"x": x, "value": jax.vmap(cooling)(x)}
    interior = grid(np.linspace(*UNIT, side), inside(UNIT, side))
    return {
        "interior": group(_conducting, interior),
        "measured": group(_measured, measured),
    }


CONDUCTIVITY_UNKNOWN = Equation(
    "Unknown conductivity",
    jax.vmap(cooling),
    _measurements,
    (UNIT, UNIT),
    coefficient=CONDUCTIVITY,
    in_time=True,
)
