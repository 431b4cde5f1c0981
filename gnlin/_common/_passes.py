"""Counts of passes through the function."""

import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import ScalarLike


class Passes(eqx.Module):
    """Numbers of Jacobian-vector (tangent) and vector-Jacobian (transposed) products.

    They add up, and can be multiplied: `Passes(1, 1) * num_steps + Passes(vjps=1)`.
    """

    jvps: ScalarLike = 0
    vjps: ScalarLike = 0

    def __add__(self, other: "Passes") -> "Passes":
        jvps = _applied(operator.add, self.jvps, other.jvps)
        return Passes(jvps, _applied(operator.add, self.vjps, other.vjps))

    def __mul__(self, times: ScalarLike) -> "Passes":
        jvps = _applied(operator.mul, self.jvps, times)
        return Passes(jvps, _applied(operator.mul, self.vjps, times))

    def number(self) -> float:
        """Return the number of both kinds together, which must not be traced."""
        jvps: Any = self.jvps
        vjps: Any = self.vjps
        return float(jvps + vjps)

    def traced(self) -> "Passes":
        """Return the counts as arrays of one dtype, for a loop to carry."""
        return Passes(jnp.asarray(self.jvps, float), jnp.asarray(self.vjps, float))


def _applied(operation: Callable, a: ScalarLike, b: ScalarLike) -> ScalarLike:
    if isinstance(a, int) and isinstance(b, int):
        return operation(a, b)
    # Traced counts are floats, because they may exceed 2^31.
    return operation(jnp.asarray(a, float), jnp.asarray(b, float))
