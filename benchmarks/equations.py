"""Differential equations with known solutions, as groups of residuals of a network.

A point is (x_1, ..., x_d), or (t, x) where there is a time. Derivatives by its
coordinates are taken forwards: there are few of them, and a layer's weights stay a
layer's.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import folx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

import gnlin

from .networks.mlp import TanhMLP


Point = Float[Array, " d"]
Function = Callable[[Any], Float[Array, ""]]
"""Of a point."""
Groups = Mapping[str, gnlin.Residuals]

CONDUCTIVITY, FIRST_CONDUCTIVITY = 0.25, 1.0
"""Of the heat equation, and where a search for it begins."""
VISCOSITY = 0.1 / np.pi
_TEST_POINTS = 10_000
"""Of those drawn, where a grid would be too large."""


def along(u: Function, axis: int) -> Function:
    """The partial derivative of a function."""

    def derivative(x):
        direction = jnp.zeros_like(x).at[axis].set(1)
        return jax.jvp(u, (x,), (direction,))[1]

    return derivative


def laplacian(u: Function, x: Point) -> Float[Array, ""]:
    """In one sweep, of which only the sum over coordinates is kept (R. Li et al., *A
    computational framework for neural network-based variational Monte Carlo with Forward
    Laplacian*, 2024)."""
    with jax.numpy_rank_promotion("allow"):  # which the tests forbid, and it makes use of
        return folx.forward_laplacian(u)(x).laplacian


#
# Residuals: of a model, at a point
#


def _sines(x: Point) -> Float[Array, ""]:
    return jnp.prod(jnp.sin(jnp.pi * x))


def _cosines(x: Point) -> Float[Array, ""]:
    return jnp.sum(jnp.cos(jnp.pi * x))


def poisson_of_sines(u: Function, x: Point) -> Float[Array, ""]:
    """- laplacian(u) = d pi^2 sin(pi x_1) ... sin(pi x_d)"""
    return -laplacian(u, x) - x.size * jnp.pi**2 * _sines(x)


def poisson_of_cosines(u: Function, x: Point) -> Float[Array, ""]:
    """- laplacian(u) = pi^2 (cos(pi x_1) + ... + cos(pi x_d))"""
    return -laplacian(u, x) - jnp.pi**2 * _cosines(x)


def heat(u: Function, x: Point, conductivity: Any = CONDUCTIVITY) -> Float[Array, ""]:
    """u_t = kappa u_xx"""
    return along(u, 0)(x) - conductivity * along(along(u, 1), 1)(x)


def _cooling(x: Point) -> Float[Array, ""]:
    decay = jnp.exp(-CONDUCTIVITY * jnp.pi**2 * x[0])
    return decay * jnp.sin(jnp.pi * x[1])


def burgers(u: Function, x: Point, viscosity: Any = VISCOSITY) -> Float[Array, ""]:
    """u_t + u u_x = nu u_xx"""
    convected = along(u, 0)(x) + u(x) * along(u, 1)(x)
    return convected - viscosity * along(along(u, 1), 1)(x)


_NODES, _WEIGHTS = np.polynomial.hermite.hermgauss(100)


def _steepening(x: Point) -> Float[Array, ""]:
    """Burgers' from -sin(pi x), by Cole and Hopf's transformation: a quotient of two
    integrals against a Gaussian (C. Basdevant et al., Comput. Fluids 14 (1986))."""
    t, place = x
    from_there = place - jnp.sqrt(4 * VISCOSITY * t) * _NODES
    potential = jnp.exp(-jnp.cos(jnp.pi * from_there) / (2 * jnp.pi * VISCOSITY))
    weights = _WEIGHTS * potential
    return -jnp.sum(weights * jnp.sin(jnp.pi * from_there)) / jnp.sum(weights)


#
# Equations
#


@dataclasses.dataclass(frozen=True)
class Equation:
    """`groups(number)`: as many interior points, or a few less, and others in proportion.

    The model is a network, or, where a coefficient is unknown, a dictionary of a `u` and
    a `coefficient`.
    """

    name: str
    exact: Callable[[Point], Float[Array, ""]]
    groups: Callable[[int], Groups]
    axes: tuple[tuple[float, float], ...]
    """The ends of the domain in each coordinate."""
    coefficient: float | None = None

    def model(self, hidden: Sequence[int], key: Key[Array, ""]) -> PyTree:
        network = TanhMLP((len(self.axes), *hidden), key)
        if self.coefficient is None:
            return network
        first = jnp.array(FIRST_CONDUCTIVITY, float)
        return {"u": network, "coefficient": first}

    def u(self, model: PyTree) -> Function:
        return model if self.coefficient is None else model["u"]

    def test_points(self, side: int = 101) -> Float[Array, "n d"]:
        """A grid, or those of one draw."""
        if len(self.axes) <= 2:
            return grid(*(np.linspace(*ends, side) for ends in self.axes))
        low, high = np.array(self.axes).T
        drawn = np.random.default_rng(1).uniform(low, high, (_TEST_POINTS, low.size))
        return jnp.asarray(drawn)

    def error(self, model: PyTree) -> Float[Array, ""]:
        """The relative one in L2, on points that are not trained on."""
        points = self.test_points()
        exact = jax.vmap(self.exact)(points)
        wrong = jax.vmap(self.u(model))(points) - exact
        return jnp.linalg.norm(wrong) / jnp.linalg.norm(exact)

    def coefficient_error(self, model: PyTree) -> Float[Array, ""]:
        """The relative one; 0 where none is unknown."""
        if self.coefficient is None:
            return jnp.zeros(())
        return jnp.abs(model["coefficient"] / self.coefficient - 1)


def grid(*axes: Any) -> Float[Array, "n d"]:
    return jnp.asarray(np.stack(np.meshgrid(*axes, indexing="ij"), -1)).reshape(
        -1, len(axes)
    )


def _group(fn: Callable, data: PyTree) -> gnlin.Residuals:
    """Half the mean square, by `gnlin.fit` and `gnlin.solve` alike."""
    number = jax.tree.leaves(data)[0].shape[0]
    loss = gnlin.SquaredError(reduction="sum")
    return gnlin.Residuals(fn, data, weight=1 / number, loss=loss)


@functools.cache  # the same function is compiled once
def _equals(exact: Callable) -> Callable:
    return lambda u, x: u(x) - exact(x)


def _inside(ends: tuple[float, float], number: int) -> np.ndarray:
    return np.linspace(*ends, number + 2)[1:-1]


_UNIT = (0.0, 1.0)


def _in_a_square(number: int) -> Groups:
    side, ends = round(number**0.5), np.array(_UNIT)
    along_edge = np.linspace(*_UNIT, max(2, side + 1))[:-1] + 0.5 / max(1, side)
    edges = [grid(along_edge, ends), grid(ends, along_edge)]
    return {
        "interior": _group(
            poisson_of_sines, grid(_inside(_UNIT, side), _inside(_UNIT, side))
        ),
        "boundary": _group(_equals(_sines), jnp.concatenate(edges)),
    }


def _in_a_cube(number: int) -> Groups:
    """Of five dimensions; a sixth as many points on its sides."""
    rng = np.random.default_rng(0)
    inside = rng.uniform(size=(number, 5))
    sides = rng.uniform(size=(-(-number // 6), 5))
    which = rng.integers(5, size=len(sides))
    sides[np.arange(len(sides)), which] = rng.integers(2, size=len(sides))
    return {
        "interior": _group(poisson_of_cosines, jnp.asarray(inside)),
        "boundary": _group(_equals(_cosines), jnp.asarray(sides)),
    }


def _in_time(residual: Callable, exact: Callable, ends: tuple[float, float]) -> Callable:
    """Whose values at the start and at both ends are known."""

    def groups(number: int) -> Groups:
        side = round(number**0.5)
        times, places = np.linspace(*_UNIT, side + 1)[1:], _inside(ends, side)
        return {
            "interior": _group(residual, grid(times, places)),
            "start": _group(_equals(exact), grid(np.zeros(1), places)),
            "ends": _group(_equals(exact), grid(times, np.array(ends))),
        }

    return groups


def _conducting(model: PyTree, x: Point) -> Float[Array, ""]:
    return heat(model["u"], x, model["coefficient"])


def _measured(model: PyTree, example: Mapping[str, Array]) -> Float[Array, ""]:
    return model["u"](example["x"]) - example["value"]


def _measurements(number: int) -> Groups:
    """The heat equation of unknown conductivity, and a sixth as many exact measurements,
    anywhere: neither the start nor the ends are known otherwise."""
    side = round(number**0.5)
    x = jnp.asarray(np.random.default_rng(0).uniform(size=(-(-number // 6), 2)))
    measured = {"x": x, "value": jax.vmap(_cooling)(x)}
    return {
        "interior": _group(
            _conducting, grid(np.linspace(*_UNIT, side), _inside(_UNIT, side))
        ),
        "measured": _group(_measured, measured),
    }


EQUATIONS = {
    "poisson-2d": Equation(
        "Poisson in 2 dimensions", _sines, _in_a_square, (_UNIT, _UNIT)
    ),
    "poisson-5d": Equation("Poisson in 5 dimensions", _cosines, _in_a_cube, (_UNIT,) * 5),
    "heat": Equation(
        "heat in 1+1", _cooling, _in_time(heat, _cooling, _UNIT), (_UNIT, _UNIT)
    ),
    "burgers": Equation(
        "Burgers",
        _steepening,
        _in_time(burgers, _steepening, (-1.0, 1.0)),
        (_UNIT, (-1.0, 1.0)),
    ),
    "conductivity": Equation(
        "an unknown conductivity",
        _cooling,
        _measurements,
        (_UNIT, _UNIT),
        coefficient=CONDUCTIVITY,
    ),
}
