"""A task for the benchmarks: a small transformer predicts the next of five symbols.

python -m benchmarks k-vs-lambda --task docs/examples/token_task.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


# --8<-- [start:task]
class Transformer(eqx.Module):
    symbols: jax.Array
    positions: jax.Array
    attention: eqx.nn.MultiheadAttention
    dense: eqx.nn.MLP

    def __init__(self, key, width=16, length=8):
        keys = jax.random.split(key, 4)
        self.symbols = jax.random.normal(keys[0], (5, width))
        self.positions = jax.random.normal(keys[1], (length, width))
        self.attention = eqx.nn.MultiheadAttention(2, width, key=keys[2])
        self.dense = eqx.nn.MLP(width, 5, width, 1, jax.nn.gelu, key=keys[3])

    def __call__(self, tokens):
        x = self.symbols[tokens] + self.positions
        earlier = jnp.tril(jnp.ones((len(x), len(x)), bool))
        return jax.vmap(self.dense)(x + self.attention(x, x, x, mask=earlier))


def model(key):
    return Transformer(key)


def data(seed):  # each symbol is the sum of the last two, modulo five
    x = np.random.default_rng(seed).integers(5, size=(150, 9))
    for t in range(2, 9):
        x[:, t] = (x[:, t - 1] + x[:, t - 2]) % 5
    inputs, targets = x[:, :-1], x[:, 1:]
    return tuple((inputs[i:j], targets[i:j]) for i, j in ((0, 12), (12, 50), (50, 150)))


# --8<-- [end:task]
