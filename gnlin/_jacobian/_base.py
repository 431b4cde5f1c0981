"""The interface of every Jacobian."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PyTree

from .._common import _tree
from .._common._canonical import of_one_example
from .._common._passes import Passes
from .._common._sharding import by_columns, is_sharded
from .._common._tree import gram_of_columns, matmul, ravel_pytree, Structure
from ._block import AbstractBlock
from ._cost import Cost, Reads


DEFAULT_MEMORY_BUDGET = 2**31
"""Default limit, in bytes, on the largest matrix made from one Jacobian."""

# The curvature is summed over parts of the Jacobian. A part takes at least `_PART_BYTES`,
# and at least `_ROWS_A_SUM` times the bytes of the sum, so that the additions are cheap.
_PART_BYTES = 2**20
_ROWS_A_SUM = 8

Of = TypeVar("Of")


class AbstractJacobian(lx.AbstractLinearOperator):
    r"""$\phi$, the m x p Jacobian of a function at a point, as a
    [lineax](https://docs.kidger.site/lineax) operator from parameters to outputs. Each
    subclass exploits one kind of structure.

    - `domain`, `codomain`: structures of the parameters and of the outputs.
    - `memory_budget`: limit, in bytes, on the largest matrix made from the Jacobian.
    """

    domain: Structure = eqx.field(static=True)
    codomain: Structure = eqx.field(static=True)
    memory_budget: int = eqx.field(static=True)

    def __deepcopy__(self, memo: dict) -> "AbstractJacobian":
        """Return itself, which is immutable. Programs that it holds cannot be copied."""
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """(m, p): the numbers of outputs and of parameters."""
        return self.codomain.size, self.domain.size

    def reads(self) -> tuple[Reads, ...]:
        """Return how many parameters each example reads, one entry for each group of
        examples; empty unless every example reads only a few of the parameters."""
        return ()

    @property
    def is_sparse(self) -> bool:
        """Whether each row reads few of the parameters. The curvature's diagonal blocks
        are then cheap, and precondition conjugate gradients."""
        return bool(self.reads())

    #
    # Products
    #

    @abc.abstractmethod
    def mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        r"""Return the Jacobian-vector product $\phi\,v$."""

    @abc.abstractmethod
    def rmv(self, vector: PyTree[Array]) -> PyTree[Array]:
        r"""Return the vector-Jacobian product $\phi^\top u$."""

    def push_forward(self, tangent: PyTree[Array]) -> Float[Array, " m"]:
        r"""Return $\phi\,v$ as a flat vector, in `ravel_pytree` order of the outputs."""
        return ravel_pytree(self.mv(tangent))[0]

    def pull_back(self, cotangent: Float[Array, " m"]) -> PyTree[Array]:
        r"""Return $\phi^\top a$ for a flat vector $a$ in `ravel_pytree` order."""
        return self.rmv(self.codomain.unravel(cotangent))

    def curvature_mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        r"""Return the curvature-vector product $\phi^\top\phi\,v$."""
        return self.rmv(self.mv(vector))

    def a_product(self) -> Passes:
        """Return the passes that one `mv` and one `rmv` take together: by default one
        each."""
        return Passes(1, 1)

    @property
    def is_at_hand(self) -> bool:
        """Whether products need no passes."""
        return self.a_product().number() == 0

    #
    # Matrices
    #

    @abc.abstractmethod
    def blocks(self, wanted: Sequence[int] | None = None) -> Sequence[AbstractBlock]:
        """Return one block for each array of parameters (or each `wanted` one)."""

    def rows(self) -> PyTree[Array]:
        """Return the dense Jacobian: the parameters' structure, with a leading axis of
        length m on each array."""
        rows = [block.rows() for block in self.blocks()]
        return self.domain.treedef.unflatten(rows)

    def as_matrix(self) -> Float[Array, "m p"]:
        """Return the dense Jacobian as one matrix, parameters in `ravel_pytree` order."""
        return matrix_of(self.blocks())

    def gram(self) -> Float[Array, "m m"]:
        r"""Return $\phi\phi^\top$, the empirical neural tangent kernel."""
        return self.gram_with(self)

    def gram_with(self, other: "AbstractJacobian") -> Float[Array, "m k"]:
        r"""Return $\phi\phi'^\top$, the kernel between two data sets, where `other` is a
        Jacobian of the same parameters.

        The kernel is summed over groups of arrays of parameters whose blocks fit in the
        memory budget. An array whose block alone does not fit contributes by passes:
        chunks of the identity are pulled back by $\phi$ and pushed forward by $\phi'$."""
        groups, left = self.groups(other)
        ours, theirs = self, other
        shape = self.codomain.size, other.codomain.size
        kernel = jnp.zeros(shape, _tree.dtype((self.codomain.dtype, self.domain.dtype)))
        for group in groups:
            # Groups must run in sequence: otherwise XLA may hold several at once.
            ours, kernel = ours.in_turn(kernel)
            if other is not self:
                theirs, kernel = theirs.in_turn(kernel)
            blocks = ours.blocks(group)
            others = blocks if other is self else theirs.blocks(group)
            kernel += gram_of(blocks, others).astype(kernel.dtype)
        if left:
            kernel += self._chunked_gram(other, left).astype(kernel.dtype)
        return kernel

    def groups(
        self, other: "AbstractJacobian | None" = None
    ) -> tuple[list[list[int]], list[int]]:
        """Return groups of arrays whose blocks, with those of `other`, fit in the memory
        budget, and the arrays that are too large."""
        sizes, at_once = self.block_bytes(), self.bytes_at_once()
        if other is not None and other is not self:
            sizes = [a + b for a, b in zip(sizes, other.block_bytes(), strict=True)]
            at_once += other.bytes_at_once()
        if sum(sizes) <= self.memory_budget:
            at_once = 0
        return grouped(sizes, self.memory_budget - at_once)

    def _gram_passes(self, rows: Passes) -> Passes:
        """Return the passes of the kernel, if making all blocks takes `rows`."""
        groups, left = self.groups()
        by_passes = self.a_product() * self.codomain.size
        return rows * len(groups) + (by_passes if left else Passes())

    def _chunked_gram(
        self, other: "AbstractJacobian", wanted: Sequence[int]
    ) -> Float[Array, "m k"]:
        def row(u: Float[Array, " m"]) -> Float[Array, " k"]:
            pulled, structure = jax.tree.flatten(self.pull_back(u))
            kept = [x if k in wanted else jnp.zeros_like(x) for k, x in enumerate(pulled)]
            return other.push_forward(structure.unflatten(kept))

        return self.chunked(row, jnp.eye(self.codomain.size, dtype=self.codomain.dtype))

    def chunked(
        self, fn: Callable[[Array], PyTree[Array]], basis: Float[Array, "k n"]
    ) -> PyTree[Array]:
        """Map `fn`, one pass through the function, over the rows of `basis`, in batches
        that fit in the memory budget."""
        at_once = self.passes_at_once(basis.dtype.itemsize)
        if at_once >= basis.shape[0]:
            return jax.vmap(fn)(basis)
        return jax.lax.map(fn, basis, batch_size=at_once)

    def passes_at_once(self, itemsize: int) -> int:
        """Return how many passes fit in the memory budget at once."""
        # A transposed pass takes about as much memory as the forward pass saved.
        forward = sum(x.nbytes for x in jax.tree.leaves(self) if eqx.is_array(x))
        return max(1, self.memory_budget // (forward + sum(self.shape) * itemsize))

    def in_turn(self, array: Array) -> tuple["AbstractJacobian", Array]:
        """Return the same Jacobian, with its blocks made only after `array`."""
        return self, array

    def block_bytes(self) -> list[int]:
        """Return the size in bytes of the block of each array of parameters. By default
        the blocks are rows."""
        m, _ = self.shape
        return [m * x.size * x.dtype.itemsize for x in self.domain.leaves]

    def bytes_at_once(self) -> int:
        """Return the bytes of blocks that are made even if others are wanted."""
        return 0

    def curvature(self) -> Float[Array, "p p"]:
        r"""Return $\phi^\top\phi$, parameters in `ravel_pytree` order. It is summed over
        batches of examples where these are independent, to stay in the caches."""

        def of_part(blocks: Sequence[AbstractBlock]) -> Float[Array, "p p"]:
            return gram_of_columns(matrix_of(blocks))

        sum_bytes = self.domain.size**2 * self.domain.dtype.itemsize
        return self.summed(of_part, max(_PART_BYTES, _ROWS_A_SUM * sum_bytes))

    def squared_rows(self) -> Float[Array, " m"]:
        """Return the squared norms of the rows, which are the kernel's diagonal."""
        groups, left = self.groups()
        ours, total = self, jnp.zeros(self.codomain.size, self.domain.dtype)
        for group in groups:
            ours, total = ours.in_turn(total)
            of_group = _tree.summed(block.squared_rows() for block in ours.blocks(group))
            total += of_group.astype(total.dtype)
        if left:

            def square(u: Float[Array, " m"]) -> Float[Array, ""]:
                pulled = jax.tree.leaves(self.pull_back(u))
                kept = [pulled[k] for k in left]
                return _tree.dot(kept, kept).astype(total.dtype)

            total += self.chunked(square, jnp.eye(len(total), dtype=self.codomain.dtype))
        return total

    def squared_columns(self) -> PyTree[Array]:
        """Return the squared norms of the columns."""

        def squares(blocks):
            return [block.squared_columns() for block in blocks]

        squared = self.summed(squares, self.memory_budget)
        return _tree.cast_like(self.domain.treedef.unflatten(squared), self.domain.tree)

    def summed(
        self, of_blocks: Callable[[Sequence[AbstractBlock]], Of], part_bytes: int
    ) -> Of:
        """Return `of_blocks(blocks)`, a sum over rows. Where examples are independent, it
        is the sum of `of_blocks` over batches of examples whose rows take about
        `part_bytes` each."""
        return of_blocks(self.blocks())

    #
    # Other Jacobians
    #

    @abc.abstractmethod
    def at_hand(self) -> "AbstractJacobian":
        """Return the same Jacobian with its blocks in memory."""

    def of_one_array(self) -> "AbstractJacobian":
        """Return the Jacobian with respect to the raveled parameters (one array), or
        `self` if its blocks are more than rows."""
        return self

    def at_hand_if_it_fits(self) -> "AbstractJacobian":
        """Return `at_hand()` if the blocks fit in the memory budget, else `self`."""
        return self.at_hand() if self.fits() else self

    @abc.abstractmethod
    def transformed(
        self, matrices: PyTree[Array], codomain: Structure
    ) -> "AbstractJacobian":
        r"""Return $R\phi$, where $R$ multiplies each example's outputs by a matrix.

        - `matrices`: an object with a method `mv`. Its arrays and the outputs have a
            leading axis over the examples. For groups of residuals, a mapping from names
            to such objects, or to `None` for the identity.
        - `codomain`: structure of the transformed outputs.
        """

    def fits(self) -> bool:
        """Whether all blocks fit in the memory budget."""
        return sum(self.block_bytes()) <= self.memory_budget

    @abc.abstractmethod
    def cost(self) -> Cost:
        """Return the costs of products, of the blocks and of the kernel."""

    #
    # The interface of lineax
    #

    def transpose(self) -> lx.AbstractLinearOperator:
        return lx.FunctionLinearOperator(self.rmv, self.codomain.tree)

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.domain.tree

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.codomain.tree


def matrix_of(blocks: Sequence[AbstractBlock]) -> Float[Array, "m p"]:
    """Return blocks as one matrix, parameters in `ravel_pytree` order."""
    rows = [block.rows() for block in blocks]
    flat = [x.reshape(x.shape[0], -1) for x in rows if x.size > 0]
    return jnp.concatenate(_tree.promoted(flat), axis=1)


def summed_over(of_part: Callable[[PyTree[Array]], Of], parts: PyTree[Array]) -> Of:
    """Return the sum of a function of each part, one after the other; parts have a
    leading axis."""
    zero = _tree.zeros_like(jax.eval_shape(of_part, of_one_example(parts)))
    add = lambda total, part: (jax.tree.map(jnp.add, total, of_part(part)), None)
    return jax.lax.scan(add, zero, parts)[0]


def multiplied(matrices: PyTree[Array], outputs: PyTree[Array]) -> PyTree[Array]:
    """Return each example's outputs multiplied by its matrix."""
    if matrices is None:
        return outputs
    if isinstance(matrices, Mapping):
        return {name: multiplied(m, outputs[name]) for name, m in matrices.items()}
    return jax.vmap(lambda matrix, v: matrix.mv(v))(matrices, outputs)


def gram_of(
    blocks: Sequence[AbstractBlock], others: Sequence[AbstractBlock]
) -> Float[Array, "m k"]:
    """Return the matrix of inner products between rows, each given as blocks."""
    if others is not blocks or not is_sharded():
        pairs = zip(blocks, others, strict=True)
        return _tree.summed(a.gram_with(b) for a, b in pairs)
    # Sum over leaves on each device first, so that devices communicate only once.
    rows = [block.rows() for block in blocks]
    parts = [by_columns(x.reshape(x.shape[0], -1)) for x in rows if x.size > 0]
    products = _tree.summed(matmul(x, x.swapaxes(1, 2)) for x in parts)
    return jnp.sum(products, axis=0)


def grouped(sizes: Sequence[int], most: int) -> tuple[list[list[int]], list[int]]:
    """Return indices in groups whose sizes sum to at most `most`, and the indices of
    items that alone are larger."""
    groups: list[list[int]] = []
    left, room = [], 0
    for k, size in enumerate(sizes):
        if size > most:
            left.append(k)
        elif groups and size <= room:
            groups[-1].append(k)
            room -= size
        else:
            groups.append([k])
            room = most - size
    return groups, left


def plain_operator(kind: type[lx.AbstractLinearOperator]) -> None:
    """Register `kind` with lineax as an operator without special structure."""
    as_function = lambda op: lx.FunctionLinearOperator(op.mv, op.in_structure())
    for has in (
        lx.is_symmetric,
        lx.is_diagonal,
        lx.is_tridiagonal,
        lx.is_lower_triangular,
        lx.is_upper_triangular,
        lx.is_positive_semidefinite,
        lx.is_negative_semidefinite,
        lx.has_unit_diagonal,
    ):
        has.register(kind)(lambda operator: False)
    for of in (lx.linearise, lx.conj):
        of.register(kind)(lambda operator: operator)
    lx.materialise.register(kind)(lambda op: lx.materialise(as_function(op)))
    lx.diagonal.register(kind)(lambda op: lx.diagonal(as_function(op)))
    lx.tridiagonal.register(kind)(lambda op: lx.tridiagonal(as_function(op)))


plain_operator(AbstractJacobian)
