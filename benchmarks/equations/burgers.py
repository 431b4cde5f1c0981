"""Burgers' equation from -sin(pi x), between walls and with a period."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..networks.points import Periodic, PointMLP
from ._base import along, Equation, Function, grid, group, Groups, Point, spread, UNIT
from .heat import in_time


VISCOSITY, LOW_VISCOSITY = 0.1 / np.pi, 0.01
_NODES, _WEIGHTS = np.polynomial.hermite.hermgauss(100)
_PERIOD = (-1.0, 1.0)


def burgers(u: Function, x: Point, viscosity: Any = VISCOSITY) -> Float[Array, ""]:
    """u_t + u u_x = nu u_xx"""
    convected = along(u, 0)(x) + u(x) * along(u, 1)(x)
    return convected - viscosity * along(u, 1, 2)(x)


def steepening(x: Point, viscosity: float = VISCOSITY) -> Float[Array, ""]:
    """The solution by Cole and Hopf's transformation: a quotient of two integrals against
    a Gaussian (C. Basdevant et al., Comput. Fluids 14 (1986))."""
    t, place = x
    from_there = place - jnp.sqrt(4 * viscosity * t) * _NODES
    exponent = -jnp.cos(jnp.pi * from_there) / (2 * jnp.pi * viscosity)
    weights = _WEIGHTS * jnp.exp(exponent)
    return -jnp.sum(weights * jnp.sin(jnp.pi * from_there)) / jnp.sum(weights)


BETWEEN_WALLS = Equation(
    "Burgers",
    jax.vmap(steepening),
    in_time(burgers, steepening, _PERIOD),
    (UNIT, _PERIOD),
    in_time=True,
)


def _of_low_viscosity(u: Function, x: Point) -> Float[Array, ""]:
    return burgers(u, x, LOW_VISCOSITY)


def _from_a_sine(u: Function, x: Point) -> Float[Array, ""]:
    return u(x) + jnp.sin(jnp.pi * x[1])


def _periodic(number: int) -> Groups:
    """The groups of the periodic problem, with an eighth as many points at the start."""
    start = grid(np.zeros(1), np.linspace(*_PERIOD, number // 8, endpoint=False))
    return {
        # With this weight the equation and its start fall together.
        "interior": group(_of_low_viscosity, spread(number, UNIT, _PERIOD), 1e-2),
        "start": group(_from_a_sine, start),
    }


PERIODIC = Equation(
    "Burgers with low viscosity",
    jax.vmap(functools.partial(steepening, viscosity=LOW_VISCOSITY)),
    _periodic,
    (UNIT, _PERIOD),
    network=functools.partial(PointMLP, features=Periodic(2.0)),
    in_time=True,
)
