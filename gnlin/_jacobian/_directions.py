"""Which ways a function can be differentiated: forwards, backwards, or both."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.extend.core import Primitive, primitives
from jaxtyping import Array, PyTree

from .._common._cost import primitives_of
from .._common._tree import Structure


Direction = Literal["fwd", "bwd"]

# JAX's own primitives have a transposed pass, but for these: loops of unknown length have
# none, and linear solves only where they were given one.
_IN_DOUBT = primitives.while_p, primitives.linear_solve_p
_TRANSPOSED = {p for p in vars(primitives).values() if isinstance(p, Primitive)}
_TRANSPOSED -= set(_IN_DOUBT)


def only_direction(
    jvp: Callable[[PyTree[Array]], PyTree[Array]], domain: Structure, codomain: Structure
) -> Direction | None:
    """The only direction of a linear function, as `jax.linearize` returns it; `None` if
    it has both. Nothing of this stays in a compiled program.

    **Raises:** `ValueError` if it has none.
    """
    found = primitives_of(jax.make_jaxpr(jvp)(domain.tree).jaxpr)
    # What `jax.linearize` leaves in the place of a `jax.custom_vjp`.
    forward = primitives.custom_lin_p not in found
    backward = found <= _TRANSPOSED or _is_transposed(jvp, domain, codomain)
    if not forward and not backward:
        raise ValueError(
            "The function has no derivative: a part of it has no forward one (a "
            "`jax.custom_vjp`, as in diffrax's `RecursiveCheckpointAdjoint`) and another "
            "no reverse one (a `lax.while_loop`, as in diffrax's `ForwardMode`), so give "
            "both parts the same."
        )
    if forward and backward:
        return None
    return "fwd" if forward else "bwd"


def _is_transposed(jvp, domain: Structure, codomain: Structure) -> bool:
    # Libraries differ in what they raise here.
    try:
        jax.eval_shape(jax.linear_transpose(jvp, domain.tree), codomain.tree)
    except Exception:
        return False
    return True


def check_jac(jac: Any, only: Direction | None = None) -> None:
    """`only`: the only direction that the function has."""
    if jac not in (None, "fwd", "bwd"):
        raise ValueError(
            f'`jac` must be "fwd", "bwd" or `None`, for whichever takes fewer passes, '
            f"but {jac!r} was given."
        )
    if None not in (jac, only) and jac != only:
        mode, other = ("forward", "bwd") if jac == "fwd" else ("reverse", "fwd")
        raise ValueError(
            f'The function has no {mode}-mode derivative, as `jac="{jac}"` asks for: '
            f'leave `jac` out, or pass `jac="{other}"`.'
        )
