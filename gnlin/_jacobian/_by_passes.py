"""The Jacobian of a function without known structure."""

import dataclasses
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, PyTree

from .._common._complex import check_real
from .._common._convolutions import channels_last
from .._common._cost import num_flops
from .._common._passes import Passes
from .._common._tree import Structure
from ._at_hand import AtHand
from ._base import AbstractJacobian, multiplied, summed_over
from ._block import AbstractBlock, Rows
from ._cost import Cost
from ._directions import Direction


class AbstractByPasses(AbstractJacobian):
    """A matrix-free Jacobian. The forward pass at the point is stored; each product is
    one tangent or one transposed pass. The dense matrix takes passes in the direction
    that needs fewer, unless `jac` fixes it."""

    _jvp: Callable[[PyTree[Array]], PyTree[Array]]
    jac: Direction | None = eqx.field(static=True)

    @property
    def shape_of_passes(self) -> tuple[int, int]:
        """How many transposed, and how many tangent passes make the dense matrix."""
        return self.shape

    @property
    def is_by_forward(self) -> bool:
        """Whether the dense matrix is made by forward mode."""
        return is_by_forward(self.jac, self.shape_of_passes)

    def mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        check_real("A vector that a Jacobian multiplies", vector)
        return channels_last(self._jvp)(vector)

    def rmv(self, vector: PyTree[Array]) -> PyTree[Array]:
        check_real("A vector that a Jacobian multiplies", vector)
        (out,) = channels_last(jax.linear_transpose(self._jvp, self.domain.tree))(vector)
        return out

    def blocks(self, wanted: Sequence[int] | None = None) -> Sequence[AbstractBlock]:
        if self.is_by_forward:
            p = self.domain.size
            column = lambda v: self.push_forward(self.domain.unravel(v))
            basis = jnp.eye(p, dtype=self.domain.dtype)
            columns = self.chunked(column, basis)
            blocks = AtHand.of_columns(self, columns).blocks()
        else:
            basis = jnp.eye(self.codomain.size, dtype=self.codomain.dtype)
            rows = self.chunked(self.pull_back, basis)
            blocks = [Rows(x) for x in jax.tree.leaves(rows)]
        return blocks if wanted is None else [blocks[k] for k in wanted]

    def at_hand(self) -> AtHand:
        return AtHand.of(self, self.blocks())

    def transformed(
        self, matrices: PyTree[Array], codomain: Structure
    ) -> "AbstractByPasses":
        jvp = Partial(_transformed, matrices, self._jvp)
        return dataclasses.replace(self, codomain=codomain, _jvp=jvp)

    def cost(self) -> Cost:
        m, p = self.shape
        num_vjps, num_jvps = self.shape_of_passes
        rows = Passes(jvps=num_jvps) if self.is_by_forward else Passes(vjps=num_vjps)
        program = jax.make_jaxpr(self._jvp)(self.domain.tree).jaxpr
        return Cost(
            shape=(m, p),
            itemsize=self.domain.dtype.itemsize,
            rows=rows,
            gram=self._gram_passes(rows),
            one_pass=num_flops(program),
            gram_operations=2.0 * float(m) ** 2 * p,
            num_bytes=sum(self.block_bytes()),
            memory_budget=self.memory_budget,
        )


class ByPasses(AbstractByPasses):
    """A matrix-free Jacobian of a function without known structure."""

    def summed(self, of_blocks, part_bytes):
        if self.fits() or self.jac == "fwd":
            return of_blocks(self.blocks())
        m, dtype = self.codomain.size, self.codomain.dtype
        size = self.passes_at_once(dtype.itemsize)

        def of_part(start):
            # Rows beyond the last are zero.
            basis = start + jnp.arange(size)[:, None] == jnp.arange(m)[None]
            rows = jax.vmap(self.pull_back)(basis.astype(dtype))
            return of_blocks([Rows(x) for x in jax.tree.leaves(rows)])

        return summed_over(of_part, jnp.arange(0, m, size))

    def of_one_array(self) -> "ByPasses":
        flat = jax.ShapeDtypeStruct((self.domain.size,), self.domain.dtype)
        jvp = Partial(_of_raveled, self._jvp, Partial(self.domain.unravel))
        return dataclasses.replace(self, domain=Structure.of(flat), _jvp=jvp)

    def bytes_at_once(self) -> int:
        return sum(self.block_bytes())  # every pass makes a part of all blocks


def is_by_forward(jac: Direction | None, shape: tuple[int, int]) -> bool:
    """Whether to make a dense m x p Jacobian by forward mode: as `jac` says, or, if it is
    `None`, if forward mode takes fewer passes."""
    num_outputs, num_parameters = shape
    return num_parameters < num_outputs if jac is None else jac == "fwd"


def _of_raveled(jvp, unravel, tangent):
    return jvp(unravel(tangent))


def _transformed(matrices, jvp, tangent):
    return multiplied(matrices, jvp(tangent))
