"""Scale-invariant damping: lambda |D delta|^2 in place of lambda |delta|^2."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import _tree
from .._jacobian import AbstractJacobian
from .._problem import Quadratic
from .._spectrum import Filter
from .._subproblem import AbstractSubproblem, choose, ProxLinear, Rescaled


# More's scales never fall. After one steep place they then damp a column for ever (on
# NIST's MGH10 until its direction is lost to rounding), so here they fade, by this
# factor an outer step.
_FADING = 0.8
# Where the damping adapts, only what is above the present norm, divided by this power of
# eps. Were all of it to fade, a thousand steps would not get through a valley with a
# large residual (Brown and Dennis's). NIST is solved for all ratios up to 1e4.
_LASTING_POWER = 1 / 4
# Nor does it where the damping holds the steps, relative to the scaled columns: with less
# of a scale more damping would be asked for, by which the others stop. NIST is solved for
# all values from 0.001 to 1.
_HOLDS = 0.1

Scaling = Literal["identity", "marquardt", "more"]


class Lasting(NamedTuple):
    """Of scales that last: the damping of the last step, and the point."""

    damping: Float[Array, ""]
    point: PyTree[Array]


def check_scaling(scaling: str, method: Any, form: str) -> None:
    if scaling not in ("identity", "marquardt", "more"):
        raise ValueError(
            '`scaling` must be "identity", "marquardt" or "more", but '
            f"{scaling!r} was given."
        )
    if scaling != "identity" and form == "prox-linear":
        raise ValueError(
            f'`scaling={scaling!r}` is for quadratic problems: with `form="prox-linear"` '
            'use `scaling="identity"`.'
        )
    if scaling != "identity" and method == "matrix-free":
        raise ValueError(
            f"`scaling={scaling!r}` needs the dense Jacobian, and the method "
            '"matrix-free" does without it: use `scaling="identity"`, or another method.'
        )


def first_scale(scaling: Scaling, y: PyTree[Array]) -> PyTree[Array] | None:
    """The memory of the scales: none for the identity, which needs no Jacobian."""
    return None if scaling == "identity" else _tree.zeros_like(y)


def choose_scaled(
    scaling: tuple[Scaling, PyTree[Array] | None],
    problem: Quadratic | ProxLinear,
    filter: Filter,
    num_trials: int,
    method: Any,
    lasting: "Lasting | None" = None,
) -> tuple[PyTree[Array] | None, AbstractSubproblem]:
    """The new memory of the scales, and the problem made ready in the variables
    `D delta`.

    - `scaling`: which, and the memory.
    - the others as for `choose`, and `lasting` as for `next_scale`.
    """
    if scaling[0] == "identity" or isinstance(problem, ProxLinear):
        return None, choose(problem, filter, num_trials, method)
    cost = problem.jacobian.cost()
    if not cost.columns_fit:
        m, p = cost.shape
        raise ValueError(
            f"`scaling={scaling[0]!r}` needs the dense Jacobian, and its "
            f"{m * p * cost.itemsize:,} bytes exceed the memory budget of "
            f'{cost.memory_budget:,}: use `scaling="identity"`, or raise `memory_budget`.'
        )
    problem = problem.at_hand()
    norms = next_scale(*scaling, problem.jacobian, lasting)
    scale = without_zeros(norms)
    if lasting is not None:
        scale = jax.tree.map(jnp.maximum, scale, _least(problem, lasting.point))
    ready = choose(problem.scaled(scale), filter, num_trials, method)
    return norms, Rescaled(ready, scale, cost.rows)


def next_scale(
    scaling: Scaling,
    scale: PyTree[Array] | None,
    jacobian: AbstractJacobian,
    lasting: "Lasting | None",
) -> PyTree[Array]:
    """The diagonal of D.

    Marquardt (1963): the norms of the Jacobian's columns. More (1978): the largest that
    they have been lately, so that a column that vanishes for a while stays damped;
    `lasting`: the largest ever, unless the present ones are next to nothing beside them
    while steps are free.
    """
    norms = jax.tree.map(jnp.sqrt, jacobian.squared_columns())
    if scaling == "marquardt":
        return norms
    ratio = 1.0 if lasting is None else jacobian.domain.eps**-_LASTING_POWER
    held = False if lasting is None else lasting.damping > _HOLDS

    def largest(norm, before):
        kept = jnp.maximum(ratio * norm, _FADING * before)
        kept = jnp.where(held, before, jnp.minimum(before, kept))
        return jnp.maximum(norm, kept)

    return jax.tree.map(largest, norms, scale)


def _least(problem: Quadratic, point: PyTree[Array]) -> PyTree[Array]:
    """Of a parameter whose change by all of itself is lost in the residuals' rounding:
    the scale at which it is not."""
    size, eps = _tree.norm(problem.residual), _tree.eps((point, problem.residual))

    def each(y):
        lost = (eps * size).astype(y.dtype) / jnp.where(y == 0, 1, jnp.abs(y))
        return jnp.where((y == 0) | ~jnp.isfinite(lost), 0, lost)

    return jax.tree.map(each, point)


def without_zeros(scale: PyTree[Array] | None) -> PyTree[Array] | None:
    """The scale 1 for a column that has always been zero."""
    return jax.tree.map(lambda d: jnp.where(d == 0, 1, d), scale)
