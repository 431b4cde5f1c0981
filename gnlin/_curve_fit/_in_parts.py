"""Fits of data that are read in parts, by passes through the data from the host."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._common import _tree
from .._common._checks import is_traced, to_jax
from .._common._progress import Bar
from .._common._quickly import quickly
from .._common._words import how_many
from .._solver import LevenbergMarquardt
from ..losses._robust import AbstractRobust
from ._arrays import as_x
from ._by_passes import minimise, Minimum
from ._curve import Curve, flat
from ._likelihood import check_values
from ._not_finite import NonFinite
from ._parts import Part, Parts
from ._problem import FitSettings, flat_box
from ._statistics import as_fitted, Fitted
from ._sums import added, CURVE, DERIVATIVE, INFINITE, MISSING, SIGMA, Sums
from ._undetermined import doubts, UNMOVED
from ._values import as_y


# A block has about this many numbers of the Jacobian, so that it stays in the caches.
_BLOCK = 2**15


def read_in_parts(
    curve: Curve, x: Any, y: Any, sigma: Any, free: PyTree[Array]
) -> tuple[Curve, Parts]:
    """Return the curve for a block of the data, and the data as parts, after a check that
    the points are independent."""
    data = sigma if y is None else (x, y, sigma)
    if is_traced((jnp.zeros(()), data, free, curve.fixed)):  # also if only `f` is
        raise ValueError(
            "A fit in parts reads the data from the host, so it cannot be inside "
            "`jax.jit`, `jax.vmap` or a derivative: call it outside, or pass all data "
            "at once."
        )

    def block_size(x: PyTree, y: PyTree) -> int:
        few = as_x(x)
        values = as_y(curve, free, few, y)
        if values.many:
            raise ValueError(
                "A fit in parts is of one data set, but `f(start, x)` has one axis less "
                "than `y`: fit each data set separately."
            )
        _check_independence(curve, free, few)
        outputs = values.flat().size // len(jax.tree.leaves(y)[0])
        return max(1, _BLOCK // (outputs * (_tree.size(free) + 1)))

    parts = Parts(x, y, sigma, block_size)
    x, *_ = parts.example
    block = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct((parts.block, *v.shape[1:]), to_jax(v).dtype),
        x,
    )
    return curve.on(free, block), parts


def _check_independence(curve: Curve, free: PyTree, x: PyTree) -> None:
    size = len(jax.tree.leaves(x)[0])
    if size < 2:
        return
    f = lambda x: curve.on(free, x).values(free, x)
    whole = f(x)
    for half in (slice(None, size // 2), slice(size // 2, None)):
        part = f(jax.tree.map(lambda v, half=half: v[half], x))
        for one, other in zip(jax.tree.leaves(part), jax.tree.leaves(whole), strict=True):
            tolerance = jnp.finfo(jnp.result_type(one, float)).eps ** 0.5
            wanted = np.asarray(other[half])
            least = tolerance * np.max(np.abs(other), initial=0, where=other == other)
            if one.shape != wanted.shape or not np.allclose(
                one, wanted, rtol=tolerance, atol=least, equal_nan=True
            ):
                raise ValueError(
                    "`f` of some of the points differs from these values of `f` of all "
                    "points: data can be read in parts only if `f` computes each point "
                    "from its own x."
                )


def check_in_parts(solver: Any, loss: Any, parts: Parts) -> None:
    """Refuse what a fit in parts cannot do."""
    if not isinstance(solver, LevenbergMarquardt) or solver.form != "quadratic":
        raise ValueError(
            "A fit in parts needs `gnlin.LevenbergMarquardt()` as `solver`, in its "
            "quadratic form."
        )
    if solver.retraction is not None:
        raise ValueError("A fit in parts adds its steps: leave the `retraction` out.")
    if isinstance(loss, AbstractRobust) and not parts.has_sigma:
        raise ValueError(
            "A robust loss on data in parts needs `sigma`, the scale of its `delta`."
        )
    if any(np.ndim(leaf) for leaf in jax.tree.leaves(loss) if eqx.is_array(leaf)):
        raise ValueError(
            f"`{type(loss).__name__}` has numbers of its own for each point, which a fit "
            "in parts cannot read: leave `in_parts` out."
        )


def fitted_in_parts(
    setting: FitSettings, parts: Parts, start: PyTree[Array], nan_policy: str
) -> tuple[Fitted, dict[str, Any]]:
    """Run a fit; return its end, and the fields of `CurveFit`."""
    most = int(setting.max_steps)
    passes, solver = _Passes(setting, parts, start, nan_policy), setting.solver
    assert isinstance(solver, LevenbergMarquardt)
    first = solver.admissible(start)
    with Bar(most, True) as bar:
        minimum = minimise(solver, passes.sums, first, most, bar.show)
    sums = unweighted = minimum.last
    if setting.is_robust:
        unweighted = passes.sums(minimum.y, unweighted=True)
    is_seen = _seen(passes, minimum, start, unweighted)
    kind = CURVE if sums.faults.number[CURVE] > 0 else DERIVATIVE
    number = int(sums.faults.number[kind])
    point = passes.point(sums, kind) if number else -1
    nonfinite = NonFinite(*map(jnp.array, (point, number, kind == CURVE)))
    end, found = _fitted(setting, minimum.y, first, sums, unweighted, is_seen, nonfinite)
    rows = minimum.rows
    return end, found | {
        "result": end.judged(setting, minimum.result),
        "history": rows and {"step": rows["num_feature_updates"], **rows},
        "num_steps": jnp.array(len(rows["loss"]) if rows else 0),
    }


class _Passes:
    """Passes through the data at a point. The first one looks for faults of the data."""

    def __init__(
        self, setting: FitSettings, parts: Parts, start: PyTree[Array], nan_policy: str
    ):
        self.setting, self.parts, self.nan_policy = setting, parts, nan_policy
        # The sums do not use the solver, and another one would compile them again.
        self.of_sums = setting._replace(solver=None)  # type: ignore
        x, y = jax.tree.map(to_jax, parts.example)
        outputs = setting.curve.shapes(start, x)
        dtype = jax.eval_shape(flat, (outputs, y, start)).dtype
        self.nothing = Sums.of_nothing(_tree.size(start), dtype)

    def sums(self, free: PyTree[Array], unweighted: bool = False) -> Sums:
        is_first = self.parts.num_points is None
        sums = self.nothing
        for number, part in enumerate(self.parts):
            if is_first:
                self._check_targets(part)
            part = jax.tree.map(to_jax, part)
            before = sums
            sums = added(sums, self.of_sums, free, part, jnp.array(number), unweighted)
            jax.block_until_ready(before)  # at most two parts are on the device
        if is_first:
            self._check(sums)
        return sums

    def _check_targets(self, part: Part) -> None:
        loss = self.setting.likelihood
        if loss is not None:
            values = np.concatenate([np.ravel(v) for v in jax.tree.leaves(part.y)])
            is_missing = np.isnan(values)  # refused or left out with the whole pass
            check_values(loss, part.y, [np.where(is_missing, 0, values)])

    def _check(self, sums: Sums) -> None:
        missing, infinite, sigma, *_ = (int(n) for n in sums.faults.number)
        many = lambda number, what: how_many(f"{number:,}", what)
        where = lambda kind: f"first at point {self.point(sums, kind):,}"
        if missing and self.nan_policy == "raise":
            raise ValueError(
                f"`x` or `y` has {many(missing, 'missing value')} (NaN), "
                f"{where(MISSING)}: "
                'leave them out, or pass `nan_policy="omit"`.'
            )
        if infinite:
            raise ValueError(
                f"`y` must be finite, but has {many(infinite, 'infinite value')}, "
                f"{where(INFINITE)}."
            )
        if sigma:
            raise ValueError(
                f"`sigma` must be positive, but is not at {many(sigma, 'point')}, "
                f"{where(SIGMA)}."
            )
        if sums.totals.num_points == 0:
            raise ValueError(
                "There is no data: all points are missing, or have an infinite `sigma`."
            )

    def point(self, sums: Sums, kind: int) -> int:
        """Return the index of the first point with a kind of fault."""
        part, place = int(sums.faults.part[kind]), int(sums.faults.place[kind])
        return self.parts.starts[part] + place


@quickly
def _fitted(
    setting: FitSettings,
    parameters: PyTree[Array],
    start: PyTree[Array],
    sums: Sums,
    unweighted: Sums,
    is_seen: Array,
    nonfinite: NonFinite,
) -> tuple[Fitted, dict[str, Any]]:
    gradient = _tree.matmul(sums.jacobian.T, sums.residual)
    slope, totals = _tree.Structure.of(parameters).unravel(gradient), unweighted.totals
    known = sums.loss, slope, unweighted.jacobian, is_seen, totals, nonfinite
    return as_fitted(setting, parameters, start, *known)


_doubts = quickly(doubts)


def _seen(
    passes: _Passes, minimum: Minimum, start: PyTree[Array], unweighted: Sums
) -> Array:
    """Whether each parameter affects the curve. Where the linearisation does not tell,
    one or two passes do: a parameter without effect on the curve does not change the
    loss."""
    parameters, loss = minimum.y, minimum.last.loss
    box = flat_box(passes.setting.solver.bounds, parameters)
    known = unweighted.jacobian, unweighted.totals
    found = _doubts(passes.setting, parameters, start, *known)
    y, unravel = _tree.ravel_pytree(parameters)
    stay = np.zeros(y.size, bool)
    for k in np.flatnonzero(found.asked):
        for size in (-found.steps[k], found.steps[k]):
            step = jnp.zeros_like(y).at[k].set(size)
            if not stay[k] and not box.is_left(y, step):
                change = passes.sums(unravel(y + step)).loss - loss
                stay[k] = abs(change) <= UNMOVED * 0.5 * found.promised[k] ** 2
    return jnp.asarray(~np.asarray(found.is_lost) & ~stay)
