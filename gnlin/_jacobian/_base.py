"""What every Jacobian can be asked."""

import abc
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PyTree

from .._common import _tree
from .._common._cost import rates
from .._common._passes import Passes
from .._common._tree import gram_of_columns, ravel_pytree, Structure
from ._block import AbstractBlock


DEFAULT_MEMORY_BUDGET = 2**31
"""Bytes that one Jacobian's largest matrix may take, unless told otherwise."""

# The curvature is summed from parts of the Jacobian of so many bytes, or so many times as
# many as the sum takes, so that summing costs little.
_PART_BYTES = 2**20
_ROWS_A_SUM = 8

# A Jacobian of up to this many bytes stays in the nearest cache: products with it cost
# less than passes through any function.
_SMALL = 2**16
# All columns of so few parameters are fewer passes than conjugate gradients' products:
# with 100,000 rows of four it takes 0.6 of the time.
_FEW_PARAMETERS = 16

Of = TypeVar("Of")


class Reads(NamedTuple):
    """What each of some examples reads of the parameters.

    - `num_examples`, `num_outputs`: how many there are, and the outputs of one.
    - `arrays`: of each array of parameters how many rows it has, how many of them one
        example reads, and the entries of a row.
    - `factor_operations`: that a sparse Cholesky factorisation of the curvature takes at
        most, where it is known which rows they read.
    """

    num_examples: int
    num_outputs: int
    arrays: tuple[tuple[int, int, int], ...]
    factor_operations: float = math.inf


class Cost(NamedTuple):
    """What there is to pay for, known from shapes and programs before anything runs.

    - `shape`, `itemsize`: (m, p), and the bytes of a number.
    - `rows`: the passes that all blocks together take.
    - `gram`: those that the kernel takes, within the memory budget.
    - `one_pass`: operations of a product with the Jacobian, or with its transpose.
    - `gram_operations`: of the kernel, once the passes are made.
    - `num_bytes`: that the blocks take in memory.
    - `memory_budget`: that they, and the matrices made of them, are to stay within.
    - `in_parts`: whether the curvature can be summed over parts of the rows.
    - `reads`: where each example reads few of the parameters, what; by groups.
    """

    shape: tuple[int, int]
    itemsize: int
    rows: Passes
    gram: Passes
    one_pass: float
    gram_operations: float
    num_bytes: int
    memory_budget: int
    in_parts: bool = False
    reads: tuple[Reads, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the blocks stay within the budget."""
        return self.num_bytes <= self.memory_budget

    @property
    def rows_fit(self) -> bool:
        """Whether the m x p matrix does."""
        m, p = self.shape
        return m * p * self.itemsize <= self.memory_budget

    @property
    def columns_fit(self) -> bool:
        """Whether the norms of its columns can be had within the budget."""
        return self.rows_fit or bool(self.reads)

    @property
    def is_cheaper_at_hand(self) -> bool:
        """Whether many products are, with the matrix in memory."""
        m, p = self.shape
        small = m * p * self.itemsize <= _SMALL or p <= _FEW_PARAMETERS
        return self.fits and small

    @property
    def one_product(self) -> float:
        """Seconds for a product each way, inside a loop."""
        rate = rates()
        slower = rate.gathered if self.reads else 1.0
        return rate.step + 2 * self.one_pass * rate.passed * slower

    @property
    def all_rows(self) -> float:
        """Seconds for the blocks."""
        return self._seconds(self.rows)

    @property
    def whole_gram(self) -> float:
        """Seconds for the kernel, its passes included."""
        return self._seconds(self.gram) + self.gram_operations * rates().product

    @property
    def whole_curvature(self) -> float:
        """Seconds for the curvature, its passes included."""
        m, p = self.shape
        return self.all_rows + 2.0 * m * float(p) ** 2 * rates().product

    def _seconds(self, passes: Passes) -> float:
        return passes.number() * self.one_pass * rates().passed


class AbstractJacobian(lx.AbstractLinearOperator):
    r"""$\phi$, the m x p Jacobian of a function at a point: a
    [lineax](https://docs.kidger.site/lineax) operator from the structure of the
    parameters to that of the outputs, which knows how its rows depend on the parameters.

    - `domain`, `codomain`: of the parameters and of the outputs.
    - `memory_budget`: bytes that the largest matrix may take.
    """

    domain: Structure = eqx.field(static=True)
    codomain: Structure = eqx.field(static=True)
    memory_budget: int = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, int]:
        """(m, p): the numbers of outputs and of parameters."""
        return self.codomain.size, self.domain.size

    def reads(self) -> tuple[Reads, ...]:
        """Where each example reads few of the parameters, what; by groups."""
        return ()

    @property
    def is_sparse(self) -> bool:
        """Whether each row reads few of the parameters: conjugate gradients then take the
        curvature's diagonal blocks, which cost next to nothing."""
        return bool(self.reads())

    #
    # Products
    #

    @abc.abstractmethod
    def mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        r"""$\phi\,v$: a Jacobian-vector product."""

    @abc.abstractmethod
    def rmv(self, vector: PyTree[Array]) -> PyTree[Array]:
        r"""$\phi^\top u$: a vector-Jacobian product."""

    def push_forward(self, tangent: PyTree[Array]) -> Float[Array, " m"]:
        r"""$\phi\,v$ as a flat vector, in `ravel_pytree` order of the outputs."""
        return ravel_pytree(self.mv(tangent))[0]

    def pull_back(self, cotangent: Float[Array, " m"]) -> PyTree[Array]:
        r"""$\phi^\top a$ for a flat vector, in `ravel_pytree` order of the outputs."""
        return self.rmv(self.codomain.unravel(cotangent))

    def curvature_mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        r"""$\phi^\top\phi\,v$."""
        return self.rmv(self.mv(vector))

    @abc.abstractmethod
    def a_product(self) -> Passes:
        """The passes that a product each way takes: one each, or none."""

    @property
    def is_at_hand(self) -> bool:
        """Whether a product takes no pass."""
        return self.a_product().number() == 0

    #
    # Matrices
    #

    @abc.abstractmethod
    def blocks(self, wanted: Sequence[int] | None = None) -> Sequence[AbstractBlock]:
        """By each array of parameters, or the `wanted` ones, in the order of leaves."""

    def rows(self) -> PyTree[Array]:
        r"""The dense Jacobian, as the parameters' structure with a leading axis of length
        m: m x p numbers."""
        rows = [block.rows() for block in self.blocks()]
        return self.domain.treedef.unflatten(rows)

    def as_matrix(self) -> Float[Array, "m p"]:
        r"""The same as one m x p matrix, parameters in `ravel_pytree` order."""
        return _as_matrix(self.blocks())

    def gram(self) -> Float[Array, "m m"]:
        r"""$\phi\phi^\top$, the empirical neural tangent kernel."""
        return self.gram_with(self)

    def gram_with(self, other: "AbstractJacobian") -> Float[Array, "m k"]:
        r"""$\phi\phi'^\top$, with another Jacobian of the same parameters: the kernel
        between two sets. By so many arrays of parameters at a time as the budget allows;
        for those too large by themselves each chunk of rows is pulled back by one and
        pushed forward by the other."""
        sizes = self.block_bytes()
        if other is not self:
            sizes = [a + b for a, b in zip(sizes, other.block_bytes(), strict=True)]
        groups, left = grouped(sizes, self.memory_budget)
        these, those = self, other
        shape = self.codomain.size, other.codomain.size
        kernel = jnp.zeros(shape, _tree.dtype((self.codomain.dtype, self.domain.dtype)))
        for group in groups:
            # One group after the other, so that they share their memory.
            these, kernel = these.in_turn(kernel)
            if other is not self:
                those, kernel = those.in_turn(kernel)
            blocks = these.blocks(group)
            others = blocks if other is self else those.blocks(group)
            kernel += gram_of(blocks, others).astype(kernel.dtype)
        if left:
            kernel += self._chunked_gram(other, left).astype(kernel.dtype)
        return kernel

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
        """`fn`, which is a pass, on each row of `basis`: as many at once as the budget
        allows."""
        at_once = self.passes_at_once(basis.dtype.itemsize)
        if at_once >= basis.shape[0]:
            return jax.vmap(fn)(basis)
        return jax.lax.map(fn, basis, batch_size=at_once)

    def passes_at_once(self, itemsize: int) -> int:
        """How many passes the budget allows at once, of numbers of so many bytes."""
        # What the transposed pass holds is of the size of what the forward pass left.
        forward = sum(x.nbytes for x in jax.tree.leaves(self) if eqx.is_array(x))
        return max(1, self.memory_budget // (forward + sum(self.shape) * itemsize))

    def in_turn(self, array: Array) -> tuple["AbstractJacobian", Array]:
        """The same, its blocks not made before an array is."""
        return self, array

    @abc.abstractmethod
    def block_bytes(self) -> list[int]:
        """What the block of each array of parameters takes in memory."""

    def curvature(self) -> Float[Array, "p p"]:
        r"""$\phi^\top\phi$, parameters in `ravel_pytree` order.

        Of independent examples by some at a time, so that no more of the Jacobian is held
        than the nearer memories take."""

        def of_part(blocks: Sequence[AbstractBlock]) -> Float[Array, "p p"]:
            return gram_of_columns(_as_matrix(blocks))

        of_sum = self.domain.size**2 * self.domain.dtype.itemsize
        return self.summed(of_part, max(_PART_BYTES, _ROWS_A_SUM * of_sum))

    def squared_rows(self) -> Float[Array, " m"]:
        """The squared norms of the rows: the kernel's diagonal, without the kernel."""
        groups, left = grouped(self.block_bytes(), self.memory_budget)
        these = self
        total = jnp.zeros(self.codomain.size, self.domain.dtype)
        for group in groups:
            these, total = these.in_turn(total)
            squares = [block.squared_rows() for block in these.blocks(group)]
            total += functools.reduce(jnp.add, _tree.promoted(squares)).astype(
                total.dtype
            )
        if left:

            def square(u: Float[Array, " m"]) -> Float[Array, ""]:
                pulled = jax.tree.leaves(self.pull_back(u))
                kept = [pulled[k] for k in left]
                return _tree.dot(kept, kept).astype(total.dtype)

            total += self.chunked(square, jnp.eye(len(total), dtype=self.codomain.dtype))
        return total

    def squared_columns(self) -> PyTree[Array]:
        """The squared norms of the columns."""
        squares = [block.squared_columns() for block in self.blocks()]
        return self.domain.treedef.unflatten(squares)

    def summed(
        self, of_blocks: Callable[[Sequence[AbstractBlock]], Of], part_bytes: int
    ) -> Of:
        """What a function makes of the blocks; summed over parts of the examples, of so
        many bytes each, where these are independent."""
        return of_blocks(self.blocks())

    #
    # Other Jacobians
    #

    @abc.abstractmethod
    def at_hand(self) -> "AbstractJacobian":
        """The same with its blocks in memory: products with it are products of
        matrices."""

    def at_hand_if_it_fits(self) -> "AbstractJacobian":
        """The same, where the blocks stay within the memory budget."""
        return self.at_hand() if self.fits() else self

    @abc.abstractmethod
    def transformed(
        self, matrices: PyTree[Array], codomain: Structure
    ) -> "AbstractJacobian":
        r"""$R\phi$, where each example's outputs are multiplied by a matrix of its own.

        - `matrices`: an object with a method `mv`, all of whose arrays have a leading
            axis over the examples; so must have the outputs. Of several groups one for
            each name, and `None` for the identity.
        - `codomain`: of what comes out.
        """

    def fits(self) -> bool:
        """Whether the blocks stay within the memory budget."""
        return sum(self.block_bytes()) <= self.memory_budget

    @abc.abstractmethod
    def within(self, memory_budget: int) -> "AbstractJacobian":
        """The same, within another budget."""

    @abc.abstractmethod
    def cost(self) -> Cost:
        """What products with it, its blocks and its kernel cost."""

    #
    # As an operator of lineax
    #

    def transpose(self) -> lx.AbstractLinearOperator:
        return lx.FunctionLinearOperator(self.rmv, self.codomain.tree)

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.domain.tree

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return self.codomain.tree


def _as_matrix(blocks: Sequence[AbstractBlock]) -> Float[Array, "m p"]:
    rows = [block.rows() for block in blocks]
    flat = [x.reshape(x.shape[0], -1) for x in rows if x.size > 0]
    return jnp.concatenate(_tree.promoted(flat), axis=1)


def multiplied(matrices: PyTree[Array], outputs: PyTree[Array]) -> PyTree[Array]:
    """Each example's outputs by its matrix."""
    if matrices is None:
        return outputs
    if isinstance(matrices, Mapping):
        return {name: multiplied(m, outputs[name]) for name, m in matrices.items()}
    return jax.vmap(lambda matrix, v: matrix.mv(v))(matrices, outputs)


def gram_of(
    blocks: Sequence[AbstractBlock], others: Sequence[AbstractBlock]
) -> Float[Array, "m k"]:
    """The inner products of rows that consist of blocks."""
    pairs = zip(blocks, others, strict=True)
    products = [a.gram() if a is b else a.gram_with(b) for a, b in pairs]
    return functools.reduce(jnp.add, _tree.promoted(products))


def grouped(sizes: Sequence[int], most: int) -> tuple[list[list[int]], list[int]]:
    """Indices in groups of at most that size together, and those that are larger."""
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
    """An operator of lineax with no structure that a solver could use."""
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
