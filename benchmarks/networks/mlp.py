"""Fully connected ReLU networks."""

import equinox as eqx
import jax
from jaxtyping import Array, Key


def quintic_mlp(key: Key[Array, ""]) -> eqx.nn.MLP:
    """Five layers, the four hidden ones 50 wide: 7,801 parameters."""
    return eqx.nn.MLP(1, 1, width_size=50, depth=4, key=key)


def digits_mlp(key: Key[Array, ""]) -> eqx.nn.MLP:
    """64-40-10: 3,010 parameters, the least that is many for a few hundred outputs."""
    return eqx.nn.MLP(64, 10, width_size=40, depth=1, key=key)


def xor_mlp(key: Key[Array, ""]) -> eqx.nn.MLP:
    """2-50-1, from weights 0.3 times as large as Equinox's: 201 parameters."""
    model = eqx.nn.MLP(2, 1, width_size=50, depth=1, key=key)
    smaller = lambda leaf: 0.3 * leaf if eqx.is_inexact_array(leaf) else leaf
    return jax.tree.map(smaller, model)
