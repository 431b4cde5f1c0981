"""A recurrent classifier of sequences, as a model of one example."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


class Recurrent(eqx.Module):
    """A gated recurrent unit (Cho et al. 2014, Learning Phrase Representations using RNN
    Encoder-Decoder), and a dense layer on its last state."""

    cell: eqx.nn.GRUCell
    dense: eqx.nn.Linear

    def __init__(self, key: Key[Array, ""], size: int, width: int, num_classes: int):
        cell, dense = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(size, width, key=cell)
        self.dense = eqx.nn.Linear(width, num_classes, key=dense)

    def __call__(self, x: Float[Array, "length size"]) -> Float[Array, " classes"]:
        start = jnp.zeros(self.cell.hidden_size, x.dtype)
        last, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), start, x)
        return self.dense(last)
