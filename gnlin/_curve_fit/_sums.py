"""Sums over the points of a part: the loss to second order, and the statistics."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar

from .._common import _tree
from .._common._quickly import quickly
from .._jacobian import AtHand, Rows
from .._linearisation._linearisation import Linearisation, linearise
from ._arrays import in_each_leaf
from ._curve import broadcast, Data, flat, wholly_missing
from ._parts import Part
from ._points import by_point
from ._problem import FitSettings, Posed
from ._statistics import Misfit
from ._undetermined import Totals


# Kinds of faults of a point: a missing x or y, an infinite y, a `sigma` that is not
# positive, and a curve or only a derivative that is not finite.
MISSING, INFINITE, SIGMA, CURVE, DERIVATIVE = range(5)


class Faults(NamedTuple):
    """For each kind of fault, the number of points that have it, and the first of them by
    its part and its place in the part."""

    number: Int[Array, " 5"]
    part: Int[Array, " 5"]
    place: Int[Array, " 5"]

    def plus(
        self, flags: list[Bool[Array, " n"]], part: Int[Array, ""], start: Int[Array, ""]
    ) -> "Faults":
        """Add the faults of a block, which starts at this place of this part."""
        stacked = jnp.stack(flags)
        number, place = jnp.sum(stacked, axis=1), start + jnp.argmax(stacked, axis=1)
        is_first = (self.number == 0) & (number > 0)
        return Faults(
            self.number + number,
            jnp.where(is_first, part, self.part),
            jnp.where(is_first, place, self.place),
        )


class Sums(NamedTuple):
    r"""Sums over the points, which give the second-order expansion of the loss of p
    parameters at one point.

    - `triangle`: the triangular factor $T$ of all whitened rows, with the residual as one
        more column: $T^\top T = [\phi\ r]^\top[\phi\ r]$. Its first p columns stand for
        the Jacobian, and its last one for the residual.
    - `losses`: the sum of the losses, and its accumulated rounding error.
    """

    triangle: Float[Array, "p+1 p+1"]
    losses: Float[Array, " 2"]
    totals: Totals
    faults: Faults

    @property
    def loss(self) -> Scalar:
        return jnp.sum(self.losses)

    @property
    def jacobian(self) -> Float[Array, "p p"]:
        return self.triangle[:-1, :-1]

    @property
    def residual(self) -> Float[Array, " p"]:
        return self.triangle[:-1, -1]

    def outputs(self) -> PyTree[Array]:
        """Return outputs whose loss, by `HalfSquares`, is `loss`."""
        rest = self.loss - 0.5 * _tree.dot(self.residual, self.residual)
        return {"residual": self.residual, "rest": rest}

    def at(self, point: PyTree[Array], memory_budget: int) -> Linearisation:
        """Return the linearisation of these outputs."""
        outputs, domain = self.outputs(), _tree.Structure.of(point)
        matrix = jnp.pad(self.jacobian, ((0, 1), (0, 0)))  # the rest is constant
        rows = jax.tree.leaves(jax.vmap(domain.unravel)(matrix))
        blocks = [Rows(x) for x in rows]
        jacobian = AtHand(domain, _tree.Structure.of(outputs), memory_budget, blocks)
        return Linearisation(point, outputs, jacobian)

    @staticmethod
    def of_nothing(num_parameters: int, dtype: jnp.dtype) -> "Sums":
        zero, none = jnp.zeros((), dtype), jnp.zeros(5, int)
        return Sums(
            jnp.zeros((num_parameters + 1, num_parameters + 1), dtype),
            jnp.zeros(2, dtype),
            Totals(*(zero for _ in Totals._fields)),
            Faults(none, none, none),
        )


@quickly
def added(
    sums: Sums,
    setting: FitSettings,
    free: PyTree[Array],
    part: Part,
    number: Int[Array, ""],
    unweighted: bool = False,
) -> Sums:
    """Add the points of a part, which has this number.

    - `unweighted`: whether to leave the weights of a robust loss out of the triangle, as
        standard errors require, and to estimate the noise.
    """
    is_in_blocks = lambda leaf: jnp.ndim(leaf) > 0
    blocks, others = eqx.partition((part.x, part.y, part.sigma), is_in_blocks)

    def step(sums_and_start, block):
        sums, start = sums_and_start
        x, y, sigma = eqx.combine(block, others)
        data, flags = _data(x, y, sigma, part.num_points - start)
        rows, loss, totals, not_finite = _of_block(setting, free, data, y, unweighted)
        is_own = jnp.arange(flags[0].size) < part.num_points - start
        flags = [is_own & flag for flag in (*flags, *not_finite)]
        new = Sums(
            jnp.linalg.qr(jnp.concatenate([sums.triangle, rows]), mode="r"),
            _compensated(sums.losses, loss),
            jax.tree.map(jnp.add, sums.totals, totals),
            sums.faults.plus(flags, number, start),
        )
        return (new, start + flags[0].size), None

    (sums, _), _ = jax.lax.scan(step, (sums, jnp.array(0)), blocks)
    return sums


def _compensated(total: Float[Array, " 2"], value: Scalar) -> Float[Array, " 2"]:
    """Add a number to a sum that keeps its rounding error (A. Neumaier, 1974)."""
    new = total[0] + value
    larger = jnp.abs(total[0]) >= jnp.abs(value)
    error = jnp.where(larger, (total[0] - new) + value, (value - new) + total[0])
    return jnp.stack([new, total[1] + error])


def _data(
    x: PyTree[Array], y: PyTree[Array], sigma: PyTree[Array], num_points: Int[Array, ""]
) -> tuple[Data, list[Bool[Array, " n"]]]:
    """Return the data of a block, and the first three faults of each point. Points after
    `num_points` are padding, and missing."""
    size = len(jax.tree.leaves(y)[0])
    # Integers and booleans are never missing.
    unknown = [jnp.any((v != v).reshape(size, -1), axis=1) for v in jax.tree.leaves(x)]
    is_unknown = functools.reduce(jnp.logical_or, unknown, jnp.zeros(size, bool))
    is_used = (jnp.arange(size) < num_points) & ~is_unknown

    def used(value: Array, otherwise: Any) -> Array:
        return jnp.where(is_used.reshape(-1, *(1,) * (value.ndim - 1)), value, otherwise)

    # A missing x is replaced by that of another point.
    x = jax.tree.map(lambda v: used(v, v[jnp.argmax(is_used)]), x)
    is_float = lambda v: jnp.issubdtype(v.dtype, jnp.inexact)
    floats = jax.tree.map(lambda v: v if is_float(v) else v.astype(float), y)
    values = flat(jax.tree.map(lambda v: wholly_missing(used(v, jnp.nan)), floats))
    errors, wrong = jnp.ones((), values.dtype), jnp.zeros(size, bool)
    if sigma is not None:
        each = jax.tree.map(broadcast, in_each_leaf(sigma, y), y)
        errors = flat(each).astype(values.dtype)
        values = jnp.where(jnp.isinf(errors), 0, values)  # left out, whatever its y
        # Entry by entry, since another one of the same point may be missing.
        wrong = _by_point(~(errors > 0) & ~jnp.isnan(values), y)
    is_missing = is_unknown | _by_point(jnp.isnan(values), y)
    flags = [is_missing, _by_point(jnp.isinf(values), y), wrong]
    counted = ~jnp.isnan(values) & jnp.isfinite(errors)
    if sigma is not None:
        errors = jnp.where(counted, errors, 1)
    values = jnp.where(counted, values, 0)
    return Data(x, values, errors, counted.astype(values.dtype)), flags


def _of_block(
    setting: FitSettings,
    free: PyTree[Array],
    data: Data,
    y: PyTree[Array],
    unweighted: bool,
) -> tuple[Float[Array, "m p+1"], Scalar, Totals, list[Bool[Array, " n"]]]:
    """Return the whitened rows of a block with their residual, its loss and totals, and
    the last two faults of each point."""
    posed = Posed.of(setting, data)
    lin = linearise(posed.at, free)
    here, jacobian = Misfit.of(posed, lin.outputs, has_noise=unweighted), lin.matrix()
    of_derivative = jnp.any(~jnp.isfinite(jacobian), axis=1)
    flags = [_by_point(flag, y) for flag in (~jnp.isfinite(lin.outputs), of_derivative)]
    rows = jacobian if unweighted else here.root[:, None] * jacobian
    both = jnp.concatenate([rows, here.reduced[:, None]], axis=1)
    return both, posed.loss.value(lin.outputs, posed.target), here.totals, flags


def _by_point(flags: Bool[Array, " m"], y: PyTree[Array]) -> Bool[Array, " n"]:
    """Return the points that have a marked entry in the flattened y."""
    return functools.reduce(jnp.logical_or, jax.tree.leaves(by_point(flags, y)))
