"""Whether a function has forward-mode derivatives, reverse-mode derivatives, or both."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.extend.core import Jaxpr, Primitive, primitives
from jaxtyping import Array, PyTree

from .._common._canonical import are_read
from .._common._checks import check_one_of
from .._common._cost import primitives_of
from .._common._tree import Structure


Direction = Literal["fwd", "bwd"]

# JAX's own primitives can be transposed, except `while` loops, and linear solves that
# were given no transposed solve.
_TRANSPOSED = {p for p in vars(primitives).values() if isinstance(p, Primitive)}
_TRANSPOSED -= {primitives.while_p, primitives.linear_solve_p}


def is_zero_map(program: Jaxpr) -> bool:
    """Whether no result of a program depends on its arguments, as in the derivative of a
    function that rounds."""
    return not any(are_read(program))


def only_direction(
    jvp: Callable[[PyTree[Array]], PyTree[Array]],
    program: Jaxpr,
    domain: Structure,
    codomain: Structure,
) -> Direction | None:
    """Return the only mode in which the linear function `jvp`, made by `jax.linearize`,
    can be evaluated, or `None` if it has both.

    - `program`: the program of `jvp`.

    **Raises:** `ValueError` if it has neither.
    """
    found = primitives_of(program)
    # `jax.linearize` leaves this primitive in place of a `jax.custom_vjp`.
    forward = primitives.custom_lin_p not in found
    backward = found <= _TRANSPOSED or _is_transposed(jvp, domain, codomain)
    if not forward and not backward:
        raise ValueError(
            "The function has no derivative: one part of it supports only reverse mode "
            "(a `jax.custom_vjp`, as in diffrax's `RecursiveCheckpointAdjoint`) and "
            "another only forward mode (a `lax.while_loop`, as in diffrax's "
            "`ForwardMode`), so use parts that support the same mode."
        )
    if forward and backward:
        return None
    return "fwd" if forward else "bwd"


def _is_transposed(jvp, domain: Structure, codomain: Structure) -> bool:
    # Libraries raise different exceptions here.
    try:
        jax.eval_shape(jax.linear_transpose(jvp, domain.tree), codomain.tree)
    except Exception:
        return False
    return True


def check_jac(jac: Any, only: Direction | None = None) -> None:
    """Raise `ValueError` if `jac` is invalid, or is not the function's `only` mode."""
    if jac is not None:
        hint = "; leave it out for the mode that takes fewer passes"
        check_one_of("jac", jac, ("fwd", "bwd"), hint)
    if None not in (jac, only) and jac != only:
        mode, other = ("forward", "bwd") if jac == "fwd" else ("reverse", "fwd")
        raise ValueError(
            f'The function has no {mode}-mode derivative, but `jac="{jac}"` was given: '
            f'leave `jac` out, or pass `jac="{other}"`.'
        )
