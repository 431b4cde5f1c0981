"""The compiled part of a fit: the run to the minimum, and the statistics there."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from .._common import _tree
from .._common._checks import is_traced
from .._common._quickly import quickly
from .._common._tree import matmul
from .._linearisation._linearisation import linearise
from .._training._full_batch import rows_for
from ._arrays import unstacked
from ._curve import Data
from ._likelihood import is_of_rates, point_at_edge
from ._not_finite import NonFinite
from ._problem import FitSettings, Posed
from ._run import Run, run
from ._statistics import as_fitted, Fitted, Misfit
from ._undetermined import doubts, seen


# A fit is brief if its Jacobian has at most this many entries, and its function computes
# at most this many values. Later calls then take at most 2 ms longer without
# optimisations, and the first one 1 s less.
_BRIEF = 2**12


def fitted(
    setting: FitSettings,
    data: Data,
    start: PyTree[Array],
    has_starts: bool = False,
    num_steps: int | None = None,
) -> tuple[Fitted, dict[str, Any]]:
    """Run a fit; return its end, and the fields of `CurveFit`.

    - `has_starts`: whether parameters have an axis over starts, after the one over data
        sets. The best start is chosen. The starts of one data set run one after the
        other, by the program of a single fit. Run together, they would need a program of
        their own, and each would take as long as the slowest.
    - `num_steps`: a smaller number of steps than `max_steps`, for the same program.
    """
    inside = is_traced([jnp.zeros(()), *jax.tree.leaves((setting, data, start))])
    alone = not setting.many and not inside
    if alone and has_starts:
        return _best_of(fitted(setting, data, one) for one in unstacked(start))
    if alone and data.held is None:
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, bool), start)
        data = data._replace(held=(none, start))
    shifts = None if data.sigma_x is None else data.x
    num_entries = data.y.shape[-1] * _tree.size((start, shifts))
    is_brief = alone and max(num_entries, setting.curve.num_values) <= _BRIEF
    most = int(setting.max_steps)
    num_rows = most if inside else rows_for(most)
    if setting.many or has_starts:
        num_rows = 0
    is_refit = num_steps is not None  # only the end of the run is wanted
    if is_refit:
        limit = min(most, num_steps)
        setting = setting._replace(max_steps=np.full_like(setting.max_steps, limit))
    try:
        if alone and setting.curve.has_loops:
            return _in_two(setting, data, start, num_rows, is_refit)
        program = _program(inside, setting.curve.has_loops, is_brief)
        end, found, ended = program(setting, data, start, has_starts, num_rows)
        if not (inside or is_refit) and np.any(end.is_doubtful):
            # This is rare, so that the programs of other fits stay small.
            end, sure = _surely(setting, data, *ended)
            found |= sure | {name: found[name] for name in ("losses", "ends")}
        return end, found
    except eqx.EquinoxRuntimeError as error:
        error.add_note(
            "`f` raised this at parameters that the fit tried. Let it return numbers "
            "that are not finite instead, by `throw=False` of diffrax's `diffeqsolve`: "
            "the fit then takes a shorter step."
        )
        raise


def _best_of(
    ends: Iterable[tuple[Fitted, dict[str, Any]]],
) -> tuple[Fitted, dict[str, Any]]:
    losses, each, best = [], [], None
    for end, found in ends:
        loss = np.nan_to_num(float(end.loss), nan=np.inf, posinf=np.inf, neginf=-np.inf)
        if best is None or loss < min(losses):
            best = end, found
        losses.append(loss)
        each.append(found["parameters"])
    assert best is not None  # there is at least one start
    end, found = best
    order = np.argsort(losses, kind="stable")
    ascending = jnp.asarray(np.array(losses)[order], end.loss.dtype)
    in_order = jax.tree.map(lambda *p: np.stack([p[k] for k in order]), *each)
    return end, found | {"losses": ascending, "ends": in_order, "history": None}


@functools.cache
def _program(inside: bool, has_loops: bool, is_brief: bool) -> Callable:
    """Return the compiled program, which takes longer to compile than to run."""
    if inside:
        return eqx.filter_jit(_all_fitted)
    return quickly(_all_fitted, has_loops=has_loops, is_brief=is_brief)


def _all_fitted(
    setting: FitSettings,
    data: Data,
    start: PyTree[Array],
    has_starts: bool,
    num_rows: int,
) -> tuple[Fitted, dict[str, Any], tuple[PyTree[Array], Run]]:
    def of_start(data, start):
        end = run(setting, data, start, num_rows=num_rows)
        return *_statistics(setting, data, start, end), (start, end)

    def of_starts(data, starts):
        each = jax.vmap(of_start, in_axes=(None, 0))(data, starts)
        losses = jnp.where(jnp.isnan(each[0].loss), jnp.inf, each[0].loss)
        order = jnp.argsort(losses)
        end, found, ended = jax.tree.map(lambda x: x[order[0]], each)
        ends = jax.tree.map(lambda x: x[order], each[1]["parameters"])
        return end, found | {"losses": losses[order], "ends": ends}, ended

    fit = of_starts if has_starts else of_start
    if setting.many:
        fit = jax.vmap(fit, in_axes=(setting.axes, 0))
    return fit(data, start)


def _run_first(
    setting: FitSettings, data: Data, start: PyTree[Array], num_rows: int
) -> tuple[Run, Bool[Array, ""], Fitted, dict[str, Any]]:
    """Run a fit; return the run with its last linearisation, whether it ended at another
    point than this linearisation's, and the statistics that follow from this."""
    end = run(setting, data, start, num_rows=num_rows, keeps=True)
    fitted, found = _statistics(setting, data, start, end, is_tested=False)
    assert end.kept is not None
    return end, ~end.kept.is_at(end.variables), fitted, found


_first = quickly(_run_first, has_loops=True)


def _in_two(
    setting: FitSettings,
    data: Data,
    start: PyTree[Array],
    num_rows: int,
    is_refit: bool,
) -> tuple[Fitted, dict[str, Any]]:
    """Run a fit of a function with loops, which takes long to compile. The first program
    has no copies of the function but those of the solver. The second one has one or two
    more, and is made only if it is needed.
    """
    end, is_elsewhere, fitted, found = _first(setting, data, start, num_rows)
    is_doubtful = bool(fitted.is_doubtful)
    if not is_elsewhere and (is_refit or not (is_doubtful or fitted.is_open)):
        return fitted, found
    end = end._replace(kept=None if is_elsewhere else end.kept)
    return _second(setting, data, start, end, True, is_doubtful)


def _statistics(
    setting: FitSettings,
    data: Data,
    start: PyTree[Array],
    end: Run,
    is_tested: bool = True,
    is_doubtful: bool = False,
) -> tuple[Fitted, dict[str, Any]]:
    """Return the end of a fit, and the fields of `CurveFit`.

    - `is_tested`: whether the curve is evaluated where the linearisation does not tell
        whether each parameter affects it.
    - `is_doubtful`: whether a second Jacobian is evaluated, which shows the rounding of
        the first.
    """
    posed, variables = Posed.of(setting, data), end.variables
    parameters = variables["curve"]
    tangents, other = setting.tangents(parameters), None
    # Entries of a start do not tell how large a turn on a curved space is.
    first = start if tangents is None else _tree.zeros_like(start)
    if end.kept is None:
        lin = linearise(posed.outputs, variables)
        outputs, matrix = lin.outputs, lin.matrix()
    else:
        outputs, matrix = end.kept.outputs[0], end.kept.matrix
    if is_doubtful:
        near = jax.lax.stop_gradient(setting.nearby(parameters, first))
        other = linearise(posed.outputs, variables | {"curve": near}).matrix()
    here = Misfit.of(posed, outputs, has_noise=setting.is_robust)
    pull = _tree.Structure.of(variables).unravel(matmul(matrix.T, here.pull))
    slope = pull["curve"]
    num_free = _tree.size(parameters)
    nonfinite = NonFinite.of(outputs, matrix[:, :num_free])
    unit = jnp.ones_like(here.root) if setting.likelihood is None else here.root

    def by_steps(matrix: Float[Array, "m n"]) -> Float[Array, "m k"]:
        of_curve = matrix[:, :num_free]
        return of_curve if tangents is None else matmul(of_curve, tangents)

    def of_residuals(matrix: Float[Array, "m n"]) -> Float[Array, "m k"]:
        jacobian = unit[:, None] * by_steps(matrix)
        if data.sigma_x is not None:  # Project out what a shift of x can compensate.
            q, _ = jnp.linalg.qr(matrix[:, num_free:])
            jacobian -= matmul(q, matmul(q.T, jacobian))
        return jacobian

    concave, of_outputs = None, by_steps(matrix)
    if here.concave is not None:
        concave = matmul(of_outputs.T, here.concave[:, None] * of_outputs)
    outputs_at = lambda y: unit * posed.outputs(variables | {"curve": y})
    totals = here.totals
    doubted = doubts(setting, parameters, first, unit[:, None] * of_outputs, totals)
    is_seen, is_open = ~doubted.is_lost, jnp.any(doubted.asked)
    if is_tested:
        is_seen = seen(setting, outputs_at, parameters, unit * outputs, doubted)
        is_open = False
    residuals = here.residuals
    if data.spread is not None:  # convert a robust loss back to units of sigma
        residuals *= data.spread
        totals = totals._replace(
            chi_squared=data.spread**2 * totals.chi_squared,
            noise=data.spread * totals.noise,
        )
    nearby = None if other is None else of_residuals(jax.lax.stop_gradient(other))
    jacobian = of_residuals(matrix)
    known = slope, jacobian, is_seen, totals, nonfinite, concave, tangents, nearby
    loss = posed.loss.value(outputs, posed.target)
    fitted, found = as_fitted(setting, parameters, start, loss, *known)
    doubtful = False if other is not None else fitted.covariance.is_doubtful
    fitted = fitted._replace(is_open=is_open, is_doubtful=doubtful)
    if is_of_rates(setting.likelihood):
        of_rates = unit[:, None] * matrix[:, :num_free]
        spread = matmul(of_rates, fitted.covariance.factor)
        fitted = fitted._replace(edge=point_at_edge(outputs, data, spread))
    found |= {
        "residuals": residuals[: data.y.size],
        "x": None if data.sigma_x is None else data.moved(variables["x"]),
        "result": fitted.judged(setting, end.result),
        "history": end.history,
        "num_steps": end.num_steps,
    }
    return fitted, found


_second = quickly(_statistics, has_loops=True)


@quickly
def _surely(
    setting: FitSettings, data: Data, start: PyTree[Array], end: Run
) -> tuple[Fitted, dict[str, Any]]:
    """Return the statistics of runs that have ended, with a second Jacobian."""

    def of_one(data, start, end):
        return _statistics(setting, data, start, end, is_doubtful=True)

    each = jax.vmap(of_one, in_axes=(setting.axes, 0, 0)) if setting.many else of_one
    return each(data, start, end)
