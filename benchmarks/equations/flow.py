"""Steady flows of an incompressible fluid: Kovasznay's, and in a cavity with a lid."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy import ndarray

from ..networks.points import Coordinates, PointMLP
from ._base import (
    along,
    edges,
    Equation,
    Function,
    group,
    Groups,
    Interval,
    Point,
    spread,
    UNIT,
)


def navier_stokes(flow: Function, x: Point, reynolds: float) -> Float[Array, "3"]:
    """The residuals of both momenta and of the divergence, for a flow (u, v, p)."""
    u = flow(x)
    by_x, by_y = along(flow, 0)(x), along(flow, 1)(x)
    laplacian = along(flow, 0, 2)(x) + along(flow, 1, 2)(x)
    momenta = (u[0] * by_x + u[1] * by_y - laplacian / reynolds)[:2]
    momenta += jnp.stack([by_x[2], by_y[2]])
    return jnp.append(momenta, by_x[0] + by_y[1])


#
# Kovasznay
#

_REYNOLDS = 40.0
_DECAY = _REYNOLDS / 2 - np.sqrt(_REYNOLDS**2 / 4 + 4 * np.pi**2)
_WIDE: tuple[Interval, Interval] = ((-0.5, 1.0), (-0.5, 1.5))


def kovasznay(point: Point) -> Float[Array, "3"]:
    """The flow behind a grid (L. Kovasznay, Proc. Camb. Phil. Soc. 44, 1948)."""
    x, y = point
    decay, angle = jnp.exp(_DECAY * x), 2 * jnp.pi * y
    u = 1 - decay * jnp.cos(angle)
    v = _DECAY / (2 * jnp.pi) * decay * jnp.sin(angle)
    return jnp.stack([u, v, (1 - decay**2) / 2])


def _behind_a_grid(flow: Function, x: Point) -> Float[Array, "3"]:
    return navier_stokes(flow, x, _REYNOLDS)


def _velocity(flow: Function, x: Point) -> Float[Array, "2"]:
    return (flow(x) - kovasznay(x))[:2]


def _pressure(flow: Function, x: Point) -> Float[Array, ""]:
    return flow(x)[2] - kovasznay(x)[2]


def _in_a_rectangle(number: int) -> Groups:
    """Groups in a rectangle: the velocity is known on the sides, the pressure at a
    corner."""
    sides = edges(round(1.5 * number**0.5), *_WIDE)
    return {
        "interior": group(_behind_a_grid, spread(number, *_WIDE), 1e-2),
        "sides": group(_velocity, sides),
        "pressure": group(_pressure, sides[:1]),
    }


KOVASZNAY = Equation(
    "Kovasznay's flow",
    jax.vmap(kovasznay),
    _in_a_rectangle,
    _WIDE,
    network=functools.partial(PointMLP, features=Coordinates(2), outputs=3, spread=3.0),
    compared=2,
)


#
# A cavity
#

_IN_CAVITY = 100.0


def _in_cavity(flow: Function, x: Point) -> Float[Array, "3"]:
    return navier_stokes(flow, x, _IN_CAVITY)


def _at_walls(flow: Function, example: dict[str, Array]) -> Float[Array, "2"]:
    return flow(example["x"])[:2] - example["velocity"]


def _no_pressure(flow: Function, x: Point) -> Float[Array, ""]:
    return flow(x)[2]


def _cavity(number: int) -> Groups:
    """Groups in the cavity, whose lid, at the top, moves at 4 x (1 - x)."""
    sides = np.asarray(edges(2 * round(number**0.5)))
    x, y = sides.T
    lid = np.where(y == 1, 4 * x * (1 - x), 0.0)
    moving = {"x": jnp.asarray(sides), "velocity": jnp.asarray(np.stack([lid, 0 * x], 1))}
    return {
        "interior": group(_in_cavity, spread(number, UNIT, UNIT), 1e-2),
        "sides": group(_at_walls, moving),
        "pressure": group(_no_pressure, jnp.zeros((1, 2))),
    }


def driven(points: Float[ndarray, "n 2"], number: int = 40) -> Float[ndarray, "n 2"]:
    """The velocity in the cavity, by the stream function at Chebyshev points and Newton's
    method: nu laplacian^2 psi = psi_y laplacian psi_x - psi_x laplacian psi_y."""
    x, once = _chebyshev(number)
    eye = np.eye(number + 1)
    by_x, by_y = np.kron(once, eye), np.kron(eye, once)
    laplacian = by_x @ by_x + by_y @ by_y
    both = laplacian @ laplacian / _IN_CAVITY
    third_x, third_y = laplacian @ by_x, laplacian @ by_y
    # Rows of the sides: psi = 0. Rows of the points next to them: its normal derivative.
    i, j = (k.ravel() for k in np.meshgrid(*[np.arange(number + 1)] * 2, indexing="ij"))
    ends = (0, number)
    on_side = np.isin(i, ends) | np.isin(j, ends)
    near_y = ~on_side & np.isin(j, (1, number - 1))
    near_x = ~on_side & ~near_y & np.isin(i, (1, number - 1))
    conditions, known = np.zeros_like(both), np.zeros(len(i))
    conditions[on_side] = np.eye(len(i))[on_side]
    index = lambda i, j: i * (number + 1) + j
    sideways = np.where(j[near_y] == 1, 0, number)
    conditions[near_y] = by_y[index(i[near_y], sideways)]
    known[near_y] = np.where(sideways == 0, 4 * x[i[near_y]] * (1 - x[i[near_y]]), 0)
    conditions[near_x] = by_x[index(np.where(i[near_x] == 1, 0, number), j[near_x])]
    given = on_side | near_x | near_y
    psi = np.zeros(len(i))
    for _ in range(12):
        d_x, d_y, t_x, t_y = (m @ psi for m in (by_x, by_y, third_x, third_y))
        residual = both @ psi - d_y * t_x + d_x * t_y
        slope = both - t_x[:, None] * by_y - d_y[:, None] * third_x
        slope += t_y[:, None] * by_x + d_x[:, None] * third_y
        residual = np.where(given, conditions @ psi - known, residual)
        slope[given] = conditions[given]
        psi -= np.linalg.solve(slope, residual)
    velocity = np.stack([by_y @ psi, -by_x @ psi], axis=-1).reshape(*[number + 1] * 2, 2)
    at = [_interpolation(x, np.asarray(points)[:, k]) for k in (0, 1)]
    return np.einsum("ni,nj,ijk->nk", *at, velocity)


def _chebyshev(number: int) -> tuple[Float[ndarray, " n"], Float[ndarray, "n n"]]:
    """Points from 1 down to 0, and the differentiation matrix there (L. N. Trefethen,
    *Spectral Methods in MATLAB*, 2000, chapter 6)."""
    x = np.cos(np.pi * np.arange(number + 1) / number)
    weights = np.r_[2, np.ones(number - 1), 2] * (-1.0) ** np.arange(number + 1)
    apart = x[:, None] - x[None] + np.eye(number + 1)
    once = np.outer(weights, 1 / weights) / apart
    once -= np.diag(once.sum(axis=1))
    return (x + 1) / 2, 2 * once


def _interpolation(nodes: Float[ndarray, " k"], at: Float[ndarray, " n"]) -> ndarray:
    """The barycentric formula, as a matrix (n, k)."""
    weights = (-1.0) ** np.arange(len(nodes))
    weights[[0, -1]] /= 2
    apart = at[:, None] - nodes[None]
    here = np.isclose(apart, 0, atol=1e-15)
    terms = weights / np.where(here, 1.0, apart)
    terms = np.where(here.any(axis=1, keepdims=True), here, terms)
    return terms / terms.sum(axis=1, keepdims=True)


CAVITY = Equation(
    "Lid-driven cavity",
    driven,
    _cavity,
    (UNIT, UNIT),
    network=functools.partial(PointMLP, features=Coordinates(2), outputs=3),
    compared=2,
)
