"""Counts of passes through the function."""

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
        return Passes(_sum(self.jvps, other.jvps), _sum(self.vjps, other.vjps))

    def __mul__(self, times: ScalarLike) -> "Passes":
        return Passes(_product(self.jvps, times), _product(self.vjps, times))

    def number(self) -> float:
        """Return the number of both kinds together, which must not be traced."""
        jvps: Any = self.jvps
        vjps: Any = self.vjps
        return float(jvps + vjps)

    def traced(self) -> "Passes":
        """Return the counts as arrays of one dtype, for a loop to carry."""
        return Passes(jnp.asarray(self.jvps, float), jnp.asarray(self.vjps, float))


# Traced counts are floats, because they may exceed 2^31.


def _sum(a: ScalarLike, b: ScalarLike) -> ScalarLike:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return jnp.asarray(a, float) + jnp.asarray(b, float)


def _product(a: ScalarLike, b: ScalarLike) -> ScalarLike:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    return jnp.asarray(a, float) * jnp.asarray(b, float)
