"""Poisson's and Laplace's equations, in two to ten dimensions."""

import functools
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from ..networks.points import Fourier, PointMLP, Separable
from ._base import (
    edges,
    equals,
    Equation,
    Function,
    grid,
    group,
    Groups,
    inside,
    laplacian,
    Point,
    spread,
    UNIT,
)


def sines(x: Point) -> Float[Array, ""]:
    return jnp.prod(jnp.sin(jnp.pi * x))


def cosines(x: Point) -> Float[Array, ""]:
    return jnp.sum(jnp.cos(jnp.pi * x))


def poisson_of_sines(u: Function, x: Point) -> Float[Array, ""]:
    """- laplacian(u) = d pi^2 sin(pi x_1) ... sin(pi x_d)"""
    return -laplacian(u, x) - x.size * jnp.pi**2 * sines(x)


def poisson_of_cosines(u: Function, x: Point) -> Float[Array, ""]:
    """- laplacian(u) = pi^2 (cos(pi x_1) + ... + cos(pi x_d))"""
    return -laplacian(u, x) - jnp.pi**2 * cosines(x)


def _in_a_square(number: int) -> Groups:
    side, ends = round(number**0.5), np.array(UNIT)
    along_edge = np.linspace(*UNIT, max(2, side + 1))[:-1] + 0.5 / max(1, side)
    boundary = [grid(along_edge, ends), grid(ends, along_edge)]
    interior = grid(inside(UNIT, side), inside(UNIT, side))
    return {
        "interior": group(poisson_of_sines, interior),
        "boundary": group(equals(sines), jnp.concatenate(boundary)),
    }


def _on_sides(number: int, dimensions: int, rng: np.random.Generator) -> np.ndarray:
    """Random points on the sides of a cube."""
    points = rng.uniform(size=(number, dimensions))
    which = rng.integers(dimensions, size=number)
    points[np.arange(number), which] = rng.integers(2, size=number)
    return points


def _in_a_cube(number: int) -> Groups:
    """Groups in five dimensions, with a sixth as many points on the cube's sides."""
    rng = np.random.default_rng(0)
    interior = rng.uniform(size=(number, 5))
    return {
        "interior": group(poisson_of_cosines, jnp.asarray(interior)),
        "boundary": group(
            equals(cosines), jnp.asarray(_on_sides(-(-number // 6), 5, rng))
        ),
    }


IN_A_SQUARE = Equation(
    "Poisson in 2 dimensions", jax.vmap(sines), _in_a_square, (UNIT, UNIT)
)
IN_A_CUBE = Equation(
    "Poisson in 5 dimensions", jax.vmap(cosines), _in_a_cube, (UNIT,) * 5
)


#
# Four scales
#

SCALES = np.array([4.0, 8.0, 12.0, 16.0])


def _scales(x: Point) -> Float[Array, "4"]:
    return jnp.prod(jnp.sin(jnp.pi * SCALES[:, None] * x[None]), axis=1)


def of_scales(x: Point) -> Float[Array, ""]:
    """The mean of sin(w pi x) sin(w pi y), w = 4, 8, 12, 16"""
    return jnp.mean(_scales(x))


def poisson_of_scales(u: Function, x: Point) -> Float[Array, ""]:
    source = jnp.mean(2 * (jnp.pi * SCALES) ** 2 * _scales(x))
    return -laplacian(u, x) - source


def _of_scales(number: int) -> Groups:
    boundary = edges(2 * round(number**0.5))
    return {
        # The second derivatives are larger than the solution by this factor.
        "interior": group(poisson_of_scales, spread(number, UNIT, UNIT), 1e-7),
        "boundary": group(equals(of_scales), boundary),
    }


OF_FOUR_SCALES = Equation(
    "Poisson with four scales",
    jax.vmap(of_scales),
    _of_scales,
    (UNIT, UNIT),
    network=functools.partial(
        PointMLP, features=Fourier(2, (1, 2, 4, 8)), activation=jnp.sin
    ),
)


#
# Harmonic in ten dimensions
#


def pairs(x: Point) -> Float[Array, ""]:
    """x_1 x_2 + x_3 x_4 + ..., which is harmonic"""
    return jnp.sum(x[::2] * x[1::2])


def laplace(u: Function, x: Point) -> Float[Array, ""]:
    return laplacian(u, x)


def _harmonic(number: int) -> Groups:
    """Groups with as many points on the sides of the cube as inside."""
    sides = _on_sides(number, 10, np.random.default_rng(0))
    return {
        "interior": group(laplace, spread(number, *[UNIT] * 10), 1e-3),
        "boundary": group(equals(pairs), jnp.asarray(sides)),
    }


def _separable(hidden: Sequence[int], key: Key[Array, ""]) -> eqx.Module:
    """A separable network; the hidden widths are that of each coordinate's network, and
    the rank."""
    width, rank = hidden
    return Separable(10, width, rank, key)


HARMONIC = Equation(
    "Harmonic in 10 dimensions",
    jax.vmap(pairs),
    _harmonic,
    (UNIT,) * 10,
    network=_separable,
)
