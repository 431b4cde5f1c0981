"""The compiled part of a fit: the run to the minimum, and the statistics there."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._common import _tree
from .._common._checks import is_traced
from .._common._quickly import quickly
from .._linearisation._linearisation import linearise
from ..losses._robust import AbstractRobust
from ._curve import Data
from ._likelihood import Likelihood
from ._not_finite import NonFinite
from ._problem import FitSettings, Posed, with_bounds
from ._run import run
from ._statistics import as_fitted, Fitted, Misfit
from ._structure import in_structure
from ._undetermined import seen


def fitted(
    setting: FitSettings,
    data: Data,
    start: PyTree[Array],
    levels: tuple[Any, ...] = (),
    held: tuple[PyTree[Array], PyTree[Array]] | None = None,
) -> tuple[Fitted, dict[str, Any]]:
    """Run a fit; return its end, and the results in the structure of the parameters.

    - `levels`: nested `jax.vmap` axes of the data, the start and the bounds, outermost
        first: a level for several data sets, then one for several starts, of which the
        best is chosen. The starts of one data set run one after the other instead, by
        the program of a single fit: together all would take the steps of the longest, by
        a program of their own.
    - `held`: the held parameters of a single fit, as in `Data`.
    """
    inside = is_traced([jnp.zeros(()), *jax.tree.leaves((setting, data, start))])
    if levels == _OF_STARTS and not inside:
        number = len(jax.tree.leaves(start)[0])
        each = (jax.tree.map(lambda s, k=k: s[k], start) for k in range(number))
        return _best_of(fitted(setting, data, one) for one in each)
    alone = not levels and not inside
    if alone:
        if held is None:
            held = jax.tree.map(lambda x: jnp.zeros(x.shape, bool), start), start
        data = data._replace(held=held)
    program = _program(alone, alone and setting.curve.has_loops)
    try:
        return program(setting, data, start, levels)
    except eqx.EquinoxRuntimeError as error:
        error.add_note(
            "`f` raised this at parameters that the fit tried. Let it return numbers "
            "that are not finite instead, by `throw=False` of diffrax's `diffeqsolve`: "
            "the fit then takes a shorter step."
        )
        raise


# The levels of one data set with several starts.
_OF_STARTS = ((None, 0, None),)


def _best_of(
    ends: Iterable[tuple[Fitted, dict[str, Any]]],
) -> tuple[Fitted, dict[str, Any]]:
    losses, least, best = [], np.inf, None
    for end, parts in ends:
        loss = float(jnp.where(jnp.isnan(end.loss), jnp.inf, end.loss))
        if best is None or loss < least:
            least, best = loss, (end, parts)
        losses.append(loss)
    assert best is not None  # there is at least one start
    end, parts = best
    sorted_losses = jnp.asarray(np.sort(losses), end.loss.dtype)
    return end._replace(losses=sorted_losses, history=None), parts


@functools.cache
def _program(alone: bool, has_loops: bool) -> Callable:
    """Return the compiled program. A single fit takes longer to compile than to run."""
    if alone:
        return quickly(_all_fitted, has_loops=has_loops)
    return eqx.filter_jit(_all_fitted)


def _all_fitted(
    setting: FitSettings, data: Data, start: PyTree[Array], levels: tuple[Any, ...]
) -> tuple[Fitted, dict[str, Any]]:

    def one(data, start, bounds):
        solver = with_bounds(setting.solver, bounds)
        alone = not levels
        return _fitted(setting._replace(solver=solver), data, start, history=alone)

    for of_level in reversed(levels):
        one = jax.vmap(one, in_axes=of_level)
    end = one(data, start, setting.solver.bounds)
    if len(levels) > setting.many:
        end = _best(end, setting.many)
    structured = lambda end: in_structure(setting, end)
    return end, jax.vmap(structured)(end) if setting.many else structured(end)


def _best(end: Fitted, many: bool) -> Fitted:
    """Choose the start of least loss, for each data set."""

    def of_one(end: Fitted) -> Fitted:
        losses = jnp.where(jnp.isnan(end.loss), jnp.inf, end.loss)
        chosen = jax.tree.map(lambda x: x[jnp.argmin(losses)], end)
        return chosen._replace(losses=jnp.sort(losses))

    return jax.vmap(of_one)(end) if many else of_one(end)


def _fitted(
    setting: FitSettings, data: Data, start: PyTree[Array], *, history: bool
) -> Fitted:
    end = run(setting, data, start, history=history)
    posed, variables, loss = Posed.of(setting, data), end.variables, setting.loss
    parameters, is_robust = variables["curve"], isinstance(loss, AbstractRobust)
    lin = linearise(posed.outputs, variables, posed.given)
    here, matrix = Misfit.of(posed, lin.outputs, has_noise=is_robust), lin.matrix()
    slope = lin.jacobian.domain.unravel(_tree.matmul(matrix.T, here.pull))["curve"]
    jacobian, of_x = jnp.split(matrix, [_tree.size(parameters)], axis=1)
    nonfinite = NonFinite.of(lin.outputs, jacobian)
    unit = here.root if isinstance(loss, Likelihood) else jnp.ones_like(here.root)
    jacobian *= unit[:, None]
    outputs_at = lambda y: unit * posed.outputs(variables | {"curve": y}, posed.given)
    totals, bounds = here.totals, setting.solver.bounds
    is_seen = seen(outputs_at, parameters, start, here.outputs, jacobian, totals, bounds)
    if data.sigma_x is not None:  # Project out what a shift of x can compensate.
        q, _ = jnp.linalg.qr(of_x)
        jacobian -= _tree.matmul(q, _tree.matmul(q.T, jacobian))
    residuals = here.residuals
    if data.spread is not None:  # of a robust loss: back to units of sigma
        residuals *= data.spread
        totals = totals._replace(
            chi_squared=data.spread**2 * totals.chi_squared,
            noise=data.spread * totals.noise,
        )
    return as_fitted(
        setting,
        parameters,
        slope,
        jacobian,
        is_seen,
        totals,
        loss=end.loss,
        residuals=residuals[: data.y.size],
        nonfinite=nonfinite,
        history=end.history,
        result=end.result,
        num_steps=end.num_steps,
        x=None if data.sigma_x is None else data.moved(variables["x"]),
    )
