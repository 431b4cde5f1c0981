"""Scale-invariant damping: lambda |D delta|^2 in place of lambda |delta|^2."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .. import _rows, _tree
from .._linearisation import Linearisation
from .._objective import AbstractObjective
from .._subproblem import AbstractSubproblem, Form, Method, prepare, prepare_form


# More's scales never fall. After one steep place they then damp a column for ever (on
# NIST's MGH10 until its direction is lost to rounding), so here they fade, by this
# factor an outer step.
_FADING = 0.8
# Where the damping adapts, only what is above the present norm, divided by this power of
# eps. Were all of it to fade, a thousand steps would not get through a valley with a
# large residual (Brown and Dennis's). NIST is solved for all ratios up to 1e4.
_LASTING_POWER = 1 / 4

Scaling = Literal["identity", "marquardt", "more"]


def check_scaling(scaling: str, method: str, form: str) -> None:
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


def prepare_scaled(
    scaling: Scaling,
    scale: PyTree[Array] | None,
    form: Form,
    objective: AbstractObjective,
    lin: Linearisation,
    method: Method,
    memory_budget: int,
    *,
    damped: bool,
    reuse: bool,
    lasting: bool = False,
) -> tuple[PyTree[Array] | None, AbstractSubproblem]:
    """The new memory of the scales, and the subproblem in the variables `D delta`."""
    if scaling == "identity":
        subproblem = prepare_form(
            form, objective, lin, method, memory_budget, damped=damped, reuse=reuse
        )
        return None, subproblem
    quadratic = objective.expand(lin)
    norms, blocks = next_scale(scaling, scale, quadratic.lin, memory_budget, lasting)
    subproblem = prepare(
        quadratic,
        method,
        memory_budget,
        damped=damped,
        reuse=reuse,
        scale=without_zeros(norms),
        blocks=blocks,
    )
    return norms, subproblem


def next_scale(
    scaling: Scaling,
    scale: PyTree[Array] | None,
    lin: Linearisation,
    memory_budget: int,
    lasting: bool,
) -> tuple[PyTree[Array], PyTree[Array]]:
    """The diagonal of D, and the Jacobian's blocks that it was read off.

    Marquardt (1963): the norms of the Jacobian's columns. More (1978): the largest that
    they have been lately, so that a column that vanishes for a while stays damped;
    `lasting`: the largest ever, unless the present ones are next to nothing beside them.
    """
    if lin.num_bytes() > memory_budget:
        raise ValueError(
            f"`scaling={scaling!r}` needs the dense Jacobian, and its "
            f"{lin.num_bytes():,} bytes exceed the memory budget of {memory_budget:,}: "
            'use `scaling="identity"`, or raise `memory_budget`.'
        )
    blocks = lin.blocks(memory_budget)
    norms = jax.tree.map(jnp.sqrt, _rows.squared_columns(blocks))
    if scaling == "more":
        ratio = _tree.eps(lin.point) ** -_LASTING_POWER if lasting else 1.0

        def largest(norm, before):
            kept = jnp.maximum(ratio * norm, _FADING * before)
            return jnp.maximum(norm, jnp.minimum(before, kept))

        norms = jax.tree.map(largest, norms, scale)
    return norms, blocks


def without_zeros(scale: PyTree[Array] | None) -> PyTree[Array] | None:
    """The scale 1 for a column that has always been zero."""
    return jax.tree.map(lambda d: jnp.where(d == 0, 1, d), scale)
