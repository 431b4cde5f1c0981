"""Small transformers, for images and for sequences, as models of one example."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


_POSITION_SCALE = 0.02  # as in the vision transformer
_WIDENING = 4  # of the dense layers between attentions, likewise


class Block(eqx.Module):
    """Attention, then two dense layers; each acts on the normalised activations, and its
    result is added to those before normalisation (Xiong et al. 2020, On Layer
    Normalization in the Transformer Architecture: it needs no warm-up)."""

    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    dense: eqx.nn.MLP

    def __init__(self, key: Key[Array, ""], width: int, heads: int):
        attention, dense = jax.random.split(key)
        self.norms = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=attention)
        self.dense = eqx.nn.MLP(
            width, width, _WIDENING * width, 1, activation=jax.nn.gelu, key=dense
        )

    def __call__(
        self,
        x: Float[Array, "patches width"],
        mask: Bool[Array, "patches patches"] | None = None,
    ) -> Float[Array, "patches width"]:
        """`mask`: for each token, as a row, the tokens that it may see; by default
        all."""
        before_attention, before_dense = self.norms
        y = jax.vmap(before_attention)(x)
        x = x + self.attention(y, y, y, mask=mask)
        y = jax.vmap(before_dense)(x)
        return x + jax.vmap(self.dense)(y)


class Transformer(eqx.Module):
    """Square patches, each embedded linearly with its position; blocks; the mean over
    patches; a dense layer (Dosovitskiy et al. 2021, An Image is Worth 16x16 Words; the
    mean instead of a class token as in Beyer et al. 2022, Better plain ViT baselines for
    ImageNet-1k)."""

    embedding: eqx.nn.Linear
    positions: Float[Array, "patches width"]
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    dense: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(
        self,
        key: Key[Array, ""],
        image: tuple[int, int, int],
        patch: int,
        width: int,
        depth: int,
        heads: int,
        num_classes: int,
    ):
        channels, height, image_width = image
        if height % patch or image_width % patch:
            raise ValueError(
                f"patches of {patch} x {patch} do not tile an image of "
                f"{height} x {image_width}; choose a divisor of both sides"
            )
        if width % heads:
            raise ValueError(
                f"{heads} heads do not share a width of {width} evenly; choose a "
                "multiple of their number"
            )
        embedding, positions, dense, *blocks = jax.random.split(key, 3 + depth)
        num_patches = (height // patch) * (image_width // patch)
        self.embedding = eqx.nn.Linear(channels * patch**2, width, key=embedding)
        self.positions = _POSITION_SCALE * jax.random.normal(
            positions, (num_patches, width)
        )
        self.blocks = [Block(block, width, heads) for block in blocks]
        self.norm = eqx.nn.LayerNorm(width)
        self.dense = eqx.nn.Linear(width, num_classes, key=dense)
        self.patch = patch

    def __call__(
        self, x: Float[Array, "channels height width"]
    ) -> Float[Array, " classes"]:
        x = jax.vmap(self.embedding)(patches(x, self.patch)) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.dense(jnp.mean(jax.vmap(self.norm)(x), axis=0))


class TokenTransformer(eqx.Module):
    """Tokens, each embedded with its position; blocks, in which each token sees all
    tokens, or, if `causal`, those up to itself; and the classes of each token."""

    embedding: Float[Array, "tokens width"]
    positions: Float[Array, "length width"]
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    dense: eqx.nn.Linear
    causal: bool = eqx.field(static=True)

    def __init__(
        self,
        key: Key[Array, ""],
        num_tokens: int,
        length: int,
        width: int,
        depth: int,
        heads: int,
        causal: bool = False,
    ):
        embedding, positions, dense, *blocks = jax.random.split(key, 3 + depth)
        self.embedding = jax.random.normal(embedding, (num_tokens, width))
        self.positions = jax.random.normal(positions, (length, width))
        self.blocks = [Block(block, width, heads) for block in blocks]
        self.norm = eqx.nn.LayerNorm(width)
        self.dense = eqx.nn.Linear(width, num_tokens, key=dense)
        self.causal = causal

    def __call__(self, tokens: Int[Array, " length"]) -> Float[Array, "length tokens"]:
        x = self.embedding[tokens] + self.positions
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool)) if self.causal else None
        for block in self.blocks:
            x = block(x, mask)
        return jax.vmap(self.dense)(jax.vmap(self.norm)(x))


def patches(
    x: Float[Array, "channels height width"], side: int
) -> Float[Array, "patches pixels"]:
    """The image's squares, row by row, each as one vector."""
    channels, height, width = x.shape
    x = x.reshape(channels, height // side, side, width // side, side)
    return x.transpose(1, 3, 0, 2, 4).reshape(-1, channels * side**2)


def transformer(
    key: Key[Array, ""],
    image: tuple[int, int, int] = (1, 8, 8),
    patch: int = 2,
    width: int = 32,
    depth: int = 2,
    heads: int = 4,
    num_classes: int = 10,
) -> Transformer:
    """26,218 parameters by default. The heads share `width` equally."""
    return Transformer(key, image, patch, width, depth, heads, num_classes)
