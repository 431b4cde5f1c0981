"""Parameters, outputs and derivatives that a solver admits."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


def check_parameters(y: PyTree) -> None:
    leaves = jax.tree.leaves(y)
    if sum(leaf.size for leaf in leaves) == 0:
        raise ValueError("There are no parameters: `y` must hold at least one number.")
    for leaf in leaves:
        if leaf.dtype not in (jnp.float32, jnp.float64):
            is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
            remedy = (
                "keep its real and its imaginary part as two arrays, and put them "
                "together by `jax.lax.complex` in the function"
                if is_complex
                else "convert it with `astype(float)`"
            )
            raise ValueError(
                "Parameters must be real floating-point arrays, of single or double "
                f"precision, but one has dtype {leaf.dtype}: {remedy}."
            )


def check_derivative(is_flat: bool) -> None:
    """Raise if the derivative is zero whatever the numbers are."""
    if is_flat:
        raise ValueError(
            "The residuals, or outputs, have no derivative with respect to any "
            "parameter: the second derivatives of a ReLU, the default activation of "
            "`eqx.nn.MLP`, are zero, so use `jnp.tanh` in a differential equation; "
            "`jnp.round`, `astype(int)`, comparisons, roots found by bisection and "
            "`jax.lax.stop_gradient` have no derivative, so compute without them, and "
            "take roots by `optimistix.root_find`."
        )


def check_outputs(outputs: PyTree) -> None:
    leaves = jax.tree.leaves(outputs)
    if sum(leaf.size for leaf in leaves) == 0:
        raise ValueError("There are no residuals: the function returned no numbers.")
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            remedy = (
                "whole numbers and booleans have no derivative, so compute with floats"
            )
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                remedy = (
                    "pass `gnlin.Residuals(fn)` in place of a function `fn(y, args)`, or "
                    "split complex residuals into real and imaginary parts"
                )
            raise ValueError(
                "Residuals must be real floating-point arrays, but the function returned "
                f"one of dtype {leaf.dtype}: {remedy}."
            )
