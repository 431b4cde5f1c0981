"""A curvature of one Kronecker product for each array of parameters."""

from collections.abc import Sequence
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Scalar

from .._common import _tree
from .._common._tree import einsum, matmul
from .._jacobian import AbstractBlock, AbstractJacobian, grouped, Layer, Rows
from .._linear_algebra import _lapack
from .._linearisation._quadratic import Quadratic


class Factors(eqx.Module):
    r"""The curvature $(A \otimes B)/\mathrm{tr}\,A$ of one array, where $A$ and $B$ are
    the partial traces of the exact curvature, by eigenvectors of both.

    - `eigenvalues`: of the product.
    - `axes`: the axes of the array that belong to A, then those that belong to B.
    """

    eigenvalues: Float[Array, "o q"]
    left: Float[Array, "o o"]
    right: Float[Array, "q q"]
    axes: tuple[int, ...] = eqx.field(static=True)

    @staticmethod
    def of(
        traces: tuple[Float[Array, "o o"], Float[Array, "q q"]], axes: tuple[int, ...]
    ) -> "Factors":
        (w, left), (v, right) = (_lapack.eigh(x) for x in traces)
        trace = jnp.sum(w)
        safe = jnp.where(trace > 0, trace, 1)
        w, v = jnp.maximum(w, 0) / safe, jnp.maximum(v, 0)
        return Factors(w[:, None] * v[None], left, right, axes)

    def rotated(self, array: Array) -> Float[Array, "o q"]:
        """Return an array of parameters in the basis of the eigenvectors."""
        matrix = array.transpose(self.axes).reshape(self.eigenvalues.shape)
        return matmul(matmul(self.left.T, matrix), self.right)


class Kronecker(eqx.Module):
    r"""Eigenpairs of a curvature of Kronecker products, in place of an `Eigenbasis`.

    They do not move the mean: the model is where it was trained.

    - `squared_residual`, `squared_distance`: the squared norms of the residual, and of
        the parameters relative to the mean of the prior.
    """

    factors: Sequence[Factors]
    squared_residual: Scalar
    squared_distance: Scalar

    moves: ClassVar[bool] = False

    @staticmethod
    def fits(jacobian: AbstractJacobian) -> bool:
        """Whether the factors of each array fit into the memory budget."""
        blocks = jax.eval_shape(lambda: [_factored(x) for x in jacobian.blocks()])
        squares = (n**2 for block in blocks for n in _sizes(block))
        return max(squares) * jacobian.domain.dtype.itemsize <= jacobian.memory_budget

    @staticmethod
    def of(problem: Quadratic, distance: PyTree[Array]) -> "Kronecker":
        """`distance`: the parameters relative to the mean of the prior."""
        jacobian = problem.jacobian

        def traces(blocks: Sequence[AbstractBlock]) -> list:
            return [_factored(block).partial_traces() for block in blocks]

        found = jacobian.summed(traces, jacobian.memory_budget)
        kinds = jax.eval_shape(lambda: [_factored(x) for x in jacobian.blocks()])
        pairs = zip(found, kinds, strict=True)
        factors = [Factors.of(traces, block.axes) for traces, block in pairs]
        dtype = factors[0].eigenvalues.dtype
        squares = (_tree.dot(x, x).astype(dtype) for x in (problem.residual, distance))
        return Kronecker(factors, *squares)

    @property
    def eigenvalues(self) -> Float[Array, " p"]:
        return jnp.concatenate([x.eigenvalues.ravel() for x in self.factors])

    def predicted(
        self, other: AbstractJacobian, damping: Scalar
    ) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
        """Return the change of the mean, which is zero, and the variance of the outputs
        of another Jacobian, as an `Eigenbasis` does."""
        groups, left = grouped(other.block_bytes(), other.memory_budget)
        total = jnp.zeros(other.codomain.size, self.squared_residual.dtype)
        for group in (*groups, *([k] for k in left)):
            other, total = other.in_turn(total)
            for k, block in zip(group, other.blocks(group), strict=True):
                factors = self.factors[k]
                unknown = damping / (factors.eigenvalues + damping)
                bases = factors.left, factors.right
                total += _factored(block).weighted_squares(*bases, unknown)
        return jnp.zeros_like(total), total

    def inverse_norm(self, vector: PyTree[Array], damping: Scalar) -> Scalar:
        r"""Return $\lambda\,g^\top(C + \lambda I)^{-1} g$ for a `vector` $g$ like the
        parameters, where $C$ is the curvature."""
        return _tree.summed(
            einsum("oq,oq->", x.rotated(g) ** 2, damping / (x.eigenvalues + damping))
            for x, g in zip(self.factors, jax.tree.leaves(vector), strict=True)
        )

    def misfit(self, damping: Scalar) -> Scalar:
        r"""Return $\lVert r\rVert^2/\lambda + \lVert\theta\rVert^2$."""
        return self.squared_residual / damping + self.squared_distance


def _factored(block: AbstractBlock) -> Layer | Rows:
    return block if isinstance(block, Layer) else Rows(block.rows())


def _sizes(block: Layer | Rows) -> tuple[int, int]:
    a, b = jax.eval_shape(lambda x: x.partial_traces(), block)
    return len(a), len(b)
