"""The Jacobian of any function, by passes through it."""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float, PyTree

from .._cost import loops_slowly, num_flops
from .._passes import Passes
from .._tree import Structure
from ._at_hand import AtHand
from ._base import AbstractJacobian, Cost
from ._block import AbstractBlock
from ._rows import Rows


class ByPasses(AbstractJacobian):
    """One forward pass is kept; a product is a tangent or a transposed pass, and the
    matrix takes the fewer of m and p of them."""

    _jvp: Callable[[PyTree[Array]], PyTree[Array]]

    def mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        return self._jvp(vector)

    def rmv(self, vector: PyTree[Array]) -> PyTree[Array]:
        (out,) = jax.linear_transpose(self._jvp, self.domain.tree)(vector)
        return out

    def a_product(self) -> Passes:
        return Passes(1, 1)

    def blocks(self, wanted: Sequence[int] | None = None) -> Sequence[AbstractBlock]:
        m, p = self.shape
        if forward_is_cheaper(m, p):
            columns = self.chunked(
                lambda v: self.push_forward(self.domain.unravel(v)),
                jnp.eye(p, dtype=self.domain.dtype),
            )
            rows = jax.vmap(self.domain.unravel)(columns.T)
        else:
            rows = self.chunked(self.pull_back, jnp.eye(m, dtype=self.codomain.dtype))
        blocks = [Rows(x) for x in jax.tree.leaves(rows)]
        return blocks if wanted is None else [blocks[k] for k in wanted]

    def gram(self) -> Float[Array, "m m"]:
        if self.fits():
            return self.at_hand().gram()
        return self.chunked_gram(range(len(self.domain.leaves)))

    def chunked_gram(self, wanted: Sequence[int]) -> Float[Array, "m m"]:
        """The kernel by some of the arrays of parameters, each chunk of rows pulled back
        and pushed forward again."""

        def row(u: Float[Array, " m"]) -> Float[Array, " m"]:
            pulled, structure = jax.tree.flatten(self.pull_back(u))
            kept = [x if k in wanted else jnp.zeros_like(x) for k, x in enumerate(pulled)]
            return self.push_forward(structure.unflatten(kept))

        m, _ = self.shape
        return self.chunked(row, jnp.eye(m, dtype=self.codomain.dtype))

    def chunked(
        self, fn: Callable[[Array], PyTree[Array]], basis: Float[Array, "k k"]
    ) -> PyTree[Array]:
        """`fn`, which is a pass, on each row of `basis`: as many at once as the budget
        allows."""
        # What the transposed pass holds is of the size of what the forward pass left.
        forward = sum(x.nbytes for x in jax.tree.leaves(self._jvp) if eqx.is_array(x))
        one_pass = forward + sum(self.shape) * basis.dtype.itemsize
        chunk = max(1, self.memory_budget // one_pass)
        if chunk >= basis.shape[0]:
            return jax.vmap(fn)(basis)
        return jax.lax.map(fn, basis, batch_size=chunk)

    def at_hand(self) -> AtHand:
        return AtHand.of(self, self.blocks())

    def transformed(self, matrices: PyTree[Array], codomain: Structure) -> "ByPasses":
        jvp = Partial(_transformed, matrices, self._jvp)
        return ByPasses(self.domain, codomain, self.memory_budget, jvp)

    def fits(self) -> bool:
        return self._num_bytes() <= self.memory_budget

    def within(self, memory_budget: int) -> "ByPasses":
        return ByPasses(self.domain, self.codomain, memory_budget, self._jvp)

    def cost(self) -> Cost:
        m, p = self.shape
        rows = Passes(jvps=p) if forward_is_cheaper(m, p) else Passes(vjps=m)
        return Cost(
            shape=(m, p),
            itemsize=self.domain.dtype.itemsize,
            rows=rows,
            gram=rows if self.fits() else Passes(m, m),
            one_pass=num_flops(self._jvp, self.domain.tree),
            gram_operations=2.0 * float(m) ** 2 * p,
            num_bytes=self._num_bytes(),
            memory_budget=self.memory_budget,
            loops_slowly=loops_slowly(self._jvp, self.domain.tree),
        )

    def _num_bytes(self) -> int:
        return self.codomain.size * self.domain.nbytes


def forward_is_cheaper(num_outputs: int, num_parameters: int) -> bool:
    """Whether a dense Jacobian takes fewer passes by forward mode."""
    return num_parameters < num_outputs


def _transformed(matrices, jvp, tangent):
    return jax.vmap(lambda matrix, v: matrix.mv(v))(matrices, jvp(tangent))
