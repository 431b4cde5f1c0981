"""A transformer on sequences whose least possible loss is known.

    python docs/examples/transformer.py [--quick] [--out FOLDER]

In sequences of several lengths, symbols follow a rule nine times out of ten. The model
predicts each symbol from the earlier ones. This draws `transformer.png` and prints a
table.
"""

import argparse
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import gnlin


SYMBOLS, LENGTH, NOISE = 5, 16, 0.1


# --8<-- [start:data]
def make_sequences(rng, number):
    """Sequences and their targets. A symbol is the sum of the last two, modulo five, or
    sometimes another one. A target is the next symbol, or -1 if there is nothing to
    predict."""
    x = rng.integers(SYMBOLS, size=(number, LENGTH + 1))
    for t in range(2, LENGTH + 1):
        shift = rng.integers(1, SYMBOLS, number) * (rng.random(number) < NOISE)
        x[:, t] = (x[:, t - 1] + x[:, t - 2] + shift) % SYMBOLS
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, number)
    position = np.arange(LENGTH)
    counts = (position >= 1) & (position < lengths[:, None])
    return x[:, :-1], np.where(counts, x[:, 1:], -1)


# The least possible loss, in nats a symbol: the entropy of the rule.
FLOOR = -(1 - NOISE) * np.log(1 - NOISE) - NOISE * np.log(NOISE / (SYMBOLS - 1))
# --8<-- [end:data]


# --8<-- [start:model]
class Transformer(eqx.Module):
    """One block: attention to earlier symbols, and two dense layers."""

    symbols: eqx.nn.Embedding
    positions: jax.Array
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    dense: eqx.nn.MLP
    out: eqx.nn.Linear

    def __init__(self, width, heads, key):
        keys = jax.random.split(key, 5)
        self.symbols = eqx.nn.Embedding(SYMBOLS, width, key=keys[0])
        self.positions = jax.random.normal(keys[1], (LENGTH, width))
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(3)]
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[2])
        self.dense = eqx.nn.MLP(width, width, 2 * width, 1, jax.nn.gelu, key=keys[3])
        self.out = eqx.nn.Linear(width, SYMBOLS, key=keys[4])

    def __call__(self, x):
        before = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        y = jax.vmap(self.symbols)(x) + self.positions
        z = jax.vmap(self.norms[0])(y)
        y = y + self.attention(z, z, z, mask=before)
        y = y + jax.vmap(self.dense)(jax.vmap(self.norms[1])(y))
        return jax.vmap(self.out)(jax.vmap(self.norms[2])(y))


# --8<-- [end:model]


# --8<-- [start:fit]
def accuracy(outputs, targets):
    """The accuracy over the symbols that count."""
    right = (outputs.argmax(-1) == targets) & (targets >= 0)
    return right.sum() / (targets >= 0).sum()


def train(train_data, validation_data, epochs, **how):
    return gnlin.fit(
        Transformer(width=16, heads=2, key=jax.random.key(0)),
        train_data,
        loss=gnlin.SoftmaxCrossEntropy(ignore_index=-1),
        batch_size=64,
        epochs=epochs,
        validation=validation_data,
        metrics={"accuracy": accuracy},
        callbacks=[gnlin.callbacks.EarlyStop()],  # returns the best model
        progress=False,
        **how,
    )


# --8<-- [end:fit]


def whole_loss(model, data):
    """The mean loss over all symbols that count, as on the validation data."""
    x, targets = data
    log_p = jax.nn.log_softmax(jax.vmap(model)(x))
    right = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    counts = targets >= 0
    return float(-jnp.where(counts, right, 0).sum() / counts.sum())


def draw(result, path):
    history = result.history
    figure = Figure(figsize=(6, 3.4), dpi=150, layout="constrained")
    axes = figure.subplots()
    loss, seen = history["loss"], np.isfinite(history["validation_loss"])
    per_epoch = len(loss) // seen.sum()
    step = (1 + np.arange(len(loss))) / per_epoch
    axes.plot(step, loss, color="#BBBBBB", label="each batch")
    axes.plot(
        step[seen],
        history["validation_loss"][seen],
        ".-",
        color="#0072B2",
        label="validation",
    )
    axes.axhline(FLOOR, color="k", linestyle=":", label="entropy of the rule")
    axes.set(xlabel="epoch", ylabel="loss, nats a symbol")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main(out: Path, quick: bool):
    rng = np.random.default_rng(0)
    training, validation = make_sequences(rng, 512), make_sequences(rng, 256)
    result = train(training, validation, 5 if quick else 60)
    print("| | loss | accuracy |")
    print("|---|---|---|")
    for name, data in {"training": training, "validation": validation}.items():
        right = accuracy(jax.vmap(result.model)(data[0]), data[1])
        print(f"| {name} | {whole_loss(result.model, data):.3f} | {right:.1%} |")
    print(f"| the rule itself | {FLOOR:.3f} | {1 - NOISE:.1%} |")
    passes = sum(result.stats[x] for x in ("num_steps", "num_jvps", "num_vjps"))
    print(f"{result.stats['num_steps']} steps, {passes:.0f} passes")
    out.mkdir(parents=True, exist_ok=True)
    draw(result, out / "transformer.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="five epochs")
    parser.add_argument("--out", type=Path, default=Path("results/tutorials"))
    arguments = parser.parse_args()
    main(arguments.out, arguments.quick)
