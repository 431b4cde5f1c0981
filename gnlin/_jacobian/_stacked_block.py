"""Blocks of several groups of residuals, stacked."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._common._tree import promoted, summed
from ._block import AbstractBlock


class StackedBlock(AbstractBlock):
    """Stacked blocks of the same array of parameters; their kinds may differ."""

    parts: Sequence[AbstractBlock]

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    def rows(self) -> Float[Array, "m ..."]:
        return jnp.concatenate(promoted([part.rows() for part in self.parts]))

    def gram_with(self, other: AbstractBlock) -> Float[Array, "m k"]:
        others = other.parts if isinstance(other, StackedBlock) else [other]
        products: dict[tuple[int, int], Array] = {}
        for i, part in enumerate(self.parts):
            for j, another in enumerate(others):
                mirrored = other is self and j < i
                products[i, j] = products[j, i].T if mirrored else part.gram_with(another)

        def line(i: int) -> Array:
            blocks = promoted([products[i, j] for j in range(len(others))])
            return jnp.concatenate(blocks, axis=1)

        return jnp.concatenate(promoted([line(i) for i in range(len(self.parts))]))

    def merged(self, num_outputs: int) -> "StackedBlock":
        return StackedBlock([part.merged(num_outputs) for part in self.parts])

    def of_output(self, k: int | Int[Array, ""], num_outputs: int) -> "StackedBlock":
        return StackedBlock([part.of_output(k, num_outputs) for part in self.parts])

    def squared_rows(self) -> Float[Array, " m"]:
        return jnp.concatenate(promoted([part.squared_rows() for part in self.parts]))

    def squared_columns(self) -> Float[Array, "..."]:
        return summed(part.squared_columns() for part in self.parts)

    def row_grams(self) -> Float[Array, "k d d"]:
        return summed(part.row_grams() for part in self.parts)

    def push_forward(self, tangent: Float[Array, "..."]) -> Float[Array, " m"]:
        pushed = [part.push_forward(tangent) for part in self.parts]
        return jnp.concatenate(promoted(pushed))

    def pull_back(self, a: Float[Array, " m"]) -> Float[Array, "..."]:
        ends = np.cumsum([part.num_rows for part in self.parts])[:-1]
        pairs = zip(self.parts, jnp.split(a, ends), strict=True)
        return summed(b.pull_back(x) for b, x in pairs)

    def transformed(self, transform: Callable[[Array], Array]) -> AbstractBlock:
        raise NotImplementedError("Transform the blocks of each group instead.")

    def scaled(self, scale: Float[Array, "..."]) -> "StackedBlock":
        return StackedBlock([part.scaled(scale) for part in self.parts])
