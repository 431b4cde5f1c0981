"""The equations of Korteweg and de Vries, and of Kuramoto and Sivashinsky, in slabs."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..networks.points import Periodic, PointMLP
from . import _spectral
from ._base import along, Equation, Function, grid, group, Groups, Interval, Point, spread
from ._slabs import begins


#
# Korteweg and de Vries
#

SPEED, DISPERSION = 1.0, 0.022


def korteweg_de_vries(u: Function, x: Point) -> Float[Array, ""]:
    """u_t + eta u u_x + mu^2 u_xxx = 0"""
    convected = along(u, 0)(x) + SPEED * u(x) * along(u, 1)(x)
    return convected + DISPERSION**2 * along(u, 1, 3)(x)


#
# Kuramoto and Sivashinsky
#

ALPHA, BETA, GAMMA = 100 / 16, 100 / 16**2, 100 / 16**4
_WAVES = (1, 2, 4)  # in the features of the network


def kuramoto_sivashinsky(u: Function, x: Point) -> Float[Array, ""]:
    """u_t + alpha u u_x + beta u_xx + gamma u_xxxx = 0"""
    convected = along(u, 0)(x) + ALPHA * u(x) * along(u, 1)(x)
    return convected + BETA * along(u, 1, 2)(x) + GAMMA * along(u, 1, 4)(x)


def _in_slabs(
    residual: Callable, first: Callable, ends: Interval, share: float
) -> Callable[..., Groups]:
    """The groups of a slab, with an eighth as many points at the start, which is `first`
    or the end of the last slab."""

    def groups(number: int, length: float, before: Function | None = None) -> Groups:
        places = np.linspace(*ends, number // 8, endpoint=False)
        start = grid(np.zeros(1), places)
        values = jax.vmap(first if before is None else before)(start[:, 1])
        interior = spread(number, (0.0, length), ends)
        return {
            "interior": group(residual, interior, share),
            "start": group(begins, {"x": start, "value": values}),
        }

    return groups


KORTEWEG_DE_VRIES = Equation(
    "Korteweg-de Vries",
    functools.partial(
        _spectral.evolved,
        symbol=lambda k: 1j * DISPERSION**2 * k**3,
        speed=SPEED,
        start=lambda x: np.cos(np.pi * x),
        period=2.0,
    ),
    _in_slabs(korteweg_de_vries, lambda x: jnp.cos(jnp.pi * x), (-1.0, 1.0), 1e-3),
    ((0.0, 1.0), (-1.0, 1.0)),
    network=functools.partial(
        PointMLP, features=Periodic(2.0), activation=jnp.sin, spread=2.0
    ),
    in_time=True,
    slabs=(0.0, 0.25, 0.5, 0.75, 1.0),
)

KURAMOTO_SIVASHINSKY = Equation(
    "Kuramoto-Sivashinsky",
    functools.partial(
        _spectral.evolved,
        symbol=lambda k: BETA * k**2 - GAMMA * k**4,
        speed=ALPHA,
        start=lambda x: np.cos(x) * (1 + np.sin(x)),
        period=2 * np.pi,
    ),
    _in_slabs(
        kuramoto_sivashinsky,
        lambda x: jnp.cos(x) * (1 + jnp.sin(x)),
        (0.0, 2 * np.pi),
        1e-4,
    ),
    ((0.0, 1.0), (0.0, 2 * np.pi)),
    network=functools.partial(
        PointMLP, features=Periodic(2 * np.pi, _WAVES), activation=jnp.sin, spread=2.0
    ),
    in_time=True,
    # On a first slab of 0.2 a network of 941 parameters ends at 9e-3, of 0.05 at 2e-8.
    slabs=tuple(k / 20 for k in range(21)),
)
