"""The wave equation, in slabs, and Helmholtz's equation of a high frequency."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..networks.points import Coordinates, Fourier, PointMLP
from ._base import (
    along,
    edges,
    equals,
    Equation,
    Function,
    grid,
    group,
    Groups,
    laplacian,
    Point,
    spread,
    UNIT,
)
from ._slabs import begins


#
# The wave equation
#

SPEED = 2.0


def wave(u: Function, x: Point) -> Float[Array, ""]:
    """u_tt = c^2 u_xx"""
    return along(u, 0, 2)(x) - SPEED**2 * along(u, 1, 2)(x)


def standing(x: Point) -> Float[Array, ""]:
    """The solution from sin(pi x) + sin(4 pi x) / 2 at rest, between walls."""
    t, place = jnp.pi * x
    low = jnp.sin(place) * jnp.cos(SPEED * t)
    return low + 0.5 * jnp.sin(4 * place) * jnp.cos(4 * SPEED * t)


def _wall(u: Function, x: Point) -> Float[Array, ""]:
    return u(x)


def moves(u: Function, example: dict[str, Array]) -> Float[Array, ""]:
    """How far the rate of change differs from the last slab's end, at one point."""
    return along(u, 0)(example["x"]) - example["value"]


def _at_rest(x: Array) -> tuple[Array, Array]:
    return standing(jnp.stack([0 * x, x])), 0 * x


def _in_slabs(number: int, length: float, before: Function | None = None) -> Groups:
    """The groups of a slab, with an eighth as many points at the start and on the walls.
    `before` gives the value and the rate of change."""
    start = grid(np.zeros(1), np.linspace(*UNIT, number // 8))
    walls = grid(np.linspace(0.0, length, number // 16), np.array(UNIT))
    value, rate = jax.vmap(before or _at_rest)(start[:, 1])
    return {
        "interior": group(wave, spread(number, (0.0, length), UNIT), 1e-4),
        "start": group(begins, {"x": start, "value": value}),
        "rate": group(moves, {"x": start, "value": rate}, 1e-2),
        "walls": group(_wall, walls),
    }


WAVE = Equation(
    "Wave equation",
    jax.vmap(standing),
    _in_slabs,
    (UNIT, UNIT),
    network=functools.partial(
        PointMLP, features=Coordinates(2), activation=jnp.sin, spread=4.0
    ),
    in_time=True,
    slabs=(0.0, 0.5, 1.0),
    state=lambda u, x: (u(x), along(u, 0)(x)),
)


#
# Helmholtz
#

FREQUENCY = 8.0


def ripples(x: Point) -> Float[Array, ""]:
    return jnp.prod(jnp.sin(FREQUENCY * jnp.pi * x))


def helmholtz(u: Function, x: Point) -> Float[Array, ""]:
    """laplacian(u) + k^2 u = - k^2 sin(k x) sin(k y), k = 8 pi"""
    square = (FREQUENCY * jnp.pi) ** 2
    return laplacian(u, x) + square * (u(x) + ripples(x))


def _helmholtz(number: int) -> Groups:
    return {
        "interior": group(helmholtz, spread(number, UNIT, UNIT), 1e-6),
        "boundary": group(equals(ripples), edges(3 * round(number**0.5))),
    }


HELMHOLTZ = Equation(
    "Helmholtz",
    jax.vmap(ripples),
    _helmholtz,
    (UNIT, UNIT),
    network=functools.partial(
        PointMLP, features=Fourier(2, (1, 2, 4)), activation=jnp.sin
    ),
)
