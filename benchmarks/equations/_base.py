"""The parts of every equation: groups of residuals, a known solution, and a network."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import folx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree
from scipy.stats import qmc

import gnlin

from ..networks.mlp import TanhMLP


Point = Float[Array, " d"]
Function = Callable[[Any], Array]
"""A function of one point."""
Groups = Mapping[str, gnlin.Residuals]
Interval = tuple[float, float]

UNIT: Interval = (0.0, 1.0)
_TEST_POINTS = 10_000
"""Number of random test points where a grid would be too large."""


def along(u: Function, axis: int, order: int = 1) -> Function:
    """The partial derivative of a function by one coordinate.

    It is taken forwards, so that a layer's weights remain a layer's. Once compiled,
    nested calls share their work: with a sine network of four layers, the rows of an
    equation of third order took 0.6 of the time that `jax.experimental.jet` needs, and
    those of fourth order 0.54.
    """
    if order == 0:
        return u

    def derivative(x):
        direction = jnp.zeros_like(x).at[axis].set(1)
        return jax.jvp(u, (x,), (direction,))[1]

    return along(derivative, axis, order - 1)


def laplacian(u: Function, x: Point) -> Float[Array, ""]:
    """The sum of the second derivatives in one sweep (R. Li et al., *A computational
    framework for neural network-based variational Monte Carlo with Forward Laplacian*,
    2024)."""
    with jax.numpy_rank_promotion("allow"):  # folx needs it, and the tests forbid it
        return folx.forward_laplacian(u)(x).laplacian


@dataclasses.dataclass(frozen=True)
class Equation:
    """A differential equation, with its solution.

    - `solution`: maps points of shape (n, d) to values of shape (n,) or (n, k).
    - `groups`: `groups(number)` returns the residuals at about `number` interior points,
        and at others in proportion. Where there are `slabs`, it takes the length of the
        slab, and the function that the slab begins with, too.
    - `axes`: the ends of the domain in each coordinate.
    - `network`: `network(hidden, key)`, with hidden layers of these widths.
    - `coefficient`: the true value of an unknown coefficient. The model is then a
        dictionary of a `u` and a `coefficient`.
    - `in_time`: whether the first coordinate is the time.
    - `slabs`: the times that separate the slabs, the first and the last time included.
        Each slab has a network of its own, whose time begins at 0.
    - `state`: `state(u, point)` returns what the next slab has to know where one ends, by
        default the value.
    - `compared`: how many of the solution's first components count in the error.
    """

    name: str
    solution: Callable[[Any], Any]
    groups: Callable[..., Groups]
    axes: tuple[Interval, ...]
    network: Callable[[Sequence[int], Key[Array, ""]], PyTree] | None = None
    coefficient: float | None = None
    in_time: bool = False
    slabs: tuple[float, ...] = ()
    state: Callable[[Function, Point], PyTree] = lambda u, x: u(x)
    compared: int | None = None

    def model(self, hidden: Sequence[int], key: Key[Array, ""]) -> PyTree:
        if self.network is not None:
            return self.network(hidden, key)
        network = TanhMLP((len(self.axes), *hidden), key)
        if self.coefficient is None:
            return network
        return {"u": network, "coefficient": jnp.array(1.0, float)}

    def u(self, model: PyTree) -> Function:
        return model if self.coefficient is None else model["u"]

    def state_at(self, u: Function, time: float) -> Function:
        """The state at the end of a slab, as a function of the place."""
        return lambda x: self.state(u, jnp.stack([jnp.asarray(time, x.dtype), x]))

    def test_points(self, side: int = 101) -> Float[Array, "n d"]:
        """A grid, or random points in more than two dimensions."""
        if len(self.axes) <= 2:
            return grid(*(np.linspace(*ends, side) for ends in self.axes))
        low, high = np.array(self.axes).T
        drawn = np.random.default_rng(1).uniform(low, high, (_TEST_POINTS, low.size))
        return jnp.asarray(drawn)

    @property
    def coordinates(self) -> tuple[str, str]:
        """Names of the first two coordinates, for the axes of a picture."""
        return ("t", "x") if self.in_time else ("$x_1$", "$x_2$")

    def plane(self, side: int) -> Float[Array, "n d"]:
        """A grid in the first two coordinates; the others have their middle values."""
        points = grid(*(np.linspace(*ends, side) for ends in self.axes[:2]))
        middle = [np.full((side**2, 1), np.mean(ends)) for ends in self.axes[2:]]
        return jnp.concatenate([points, *map(jnp.asarray, middle)], axis=1)

    def error(self, model: PyTree) -> Float[Array, ""]:
        """The relative error in L2, at points that are not trained on."""
        return self._error(model, self.test_points(), _solved(self))

    def error_between(
        self, begin: float, end: float
    ) -> Callable[[PyTree], Float[Array, ""]]:
        """The error of one slab's network, within that slab."""
        points = np.asarray(self.test_points())
        within = (begin <= points[:, 0]) & (points[:, 0] <= end)
        here = jnp.asarray(points[within] - np.array([begin, 0.0]))
        return lambda model: self._error(model, here, _solved(self)[within])

    def distance(self, first: Function, second: Function) -> Float[Array, ""]:
        """The L2 distance of two functions, relative to the solution, at points that are
        not trained on."""
        points, true = self.test_points(), self._cut(_solved(self))
        difference = self._at(first, points) - self._at(second, points)
        return jnp.linalg.norm(difference) / jnp.linalg.norm(true)

    def _error(self, model: PyTree, points: Array, true: Any) -> Float[Array, ""]:
        found, true = self._at(self.u(model), points), self._cut(true)
        return jnp.linalg.norm(found - true) / jnp.linalg.norm(true)

    def _at(self, u: Function, points: Array) -> Array:
        return self._cut(jax.vmap(u)(points))

    def _cut(self, values: Any) -> Any:
        return values if self.compared is None else values[:, : self.compared]

    def coefficient_error(self, model: PyTree) -> Float[Array, ""]:
        """The relative error of the coefficient; 0 if none is unknown."""
        if self.coefficient is None:
            return jnp.zeros(())
        return jnp.abs(model["coefficient"] / self.coefficient - 1)


@functools.cache  # some references take seconds
def _solved(equation: Equation) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        return np.asarray(equation.solution(equation.test_points()))


def grid(*axes: Any) -> Float[Array, "n d"]:
    return jnp.asarray(np.stack(np.meshgrid(*axes, indexing="ij"), -1)).reshape(
        -1, len(axes)
    )


def group(fn: Callable, data: PyTree, share: float = 1.0) -> gnlin.Residuals:
    """Half the mean square, by `gnlin.fit` and `gnlin.solve` alike, times `share`."""
    number = jax.tree.leaves(data)[0].shape[0]
    loss = gnlin.SquaredError(reduction="sum")
    return gnlin.Residuals(fn, data, weight=share / number, loss=loss)


@functools.cache  # the same function is compiled once
def equals(exact: Callable) -> Callable:
    return lambda u, x: u(x) - exact(x)


def inside(ends: Interval, number: int) -> np.ndarray:
    """Equidistant points between the ends."""
    return np.linspace(*ends, number + 2)[1:-1]


def spread(number: int, *axes: Interval) -> Float[Array, "n d"]:
    """Points of a Sobol sequence: evenly spread in every coordinate."""
    low, high = np.array(axes, float).T
    drawn = qmc.Sobol(len(axes), rng=1).random(number)
    return jnp.asarray(low + drawn * (high - low))


def edges(number: int, x: Interval = UNIT, y: Interval = UNIT) -> Float[Array, "n 2"]:
    """Equidistant points on each side of a rectangle, `number` of them."""
    ends = np.array([0.0, 1.0])
    at = np.linspace(*UNIT, number)
    low, width = np.array([x[0], y[0]]), np.array([x[1] - x[0], y[1] - y[0]])
    unit = np.concatenate([grid(at, ends), grid(ends, at)])
    return jnp.asarray(unit * width + low)
