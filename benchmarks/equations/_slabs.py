"""Long times, in slabs: each has its own network, which begins where the last ends."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


class InSlabs(eqx.Module):
    """The networks of consecutive slabs, as one function of a point (t, x)."""

    networks: tuple[PyTree, ...]
    begins: tuple[float, ...] = eqx.field(static=True)

    def __call__(self, point: Float[Array, " d"]) -> Array:
        values = [
            network(point.at[0].add(-begin))
            for network, begin in zip(self.networks, self.begins, strict=True)
        ]
        last = jnp.sum(point[0] >= jnp.asarray(self.begins)) - 1
        return jnp.stack(values)[jnp.maximum(last, 0)]


def begins(u: PyTree, example: dict[str, Array]) -> Float[Array, ""]:
    """How far a slab starts from where the last one ended, at one point."""
    return u(example["x"]) - example["value"]
