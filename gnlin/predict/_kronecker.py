"""A curvature of one Kronecker product for each array of parameters."""

from collections.abc import Sequence
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, Scalar

from .._common import _tree
from .._common._tree import matmul
from .._jacobian import AbstractBlock, AbstractJacobian, grouped, Layer, Rows
from .._linear_algebra import _lapack
from .._linear_algebra._derivatives import with_derivative_of
from .._linearisation._quadratic import Quadratic


class Factors(eqx.Module):
    r"""The curvature $(A \otimes B)/\mathrm{tr}\,A$ of one array, where $A$ and $B$ are
    the partial traces of the exact curvature, by eigenvectors of both.

    - `eigenvalues`: of the product.
    - `traces`: A and B.
    - `axes`: the axes of the array that belong to A, then those that belong to B.
    """

    eigenvalues: Float[Array, "o q"]
    left: Float[Array, "o o"]
    right: Float[Array, "q q"]
    traces: tuple[Float[Array, "o o"], Float[Array, "q q"]]
    axes: tuple[int, ...] = eqx.field(static=True)

    @staticmethod
    def of(
        traces: tuple[Float[Array, "o o"], Float[Array, "q q"]], axes: tuple[int, ...]
    ) -> "Factors":
        (w, left), (v, right) = (_lapack.eigh(x) for x in traces)
        trace = jnp.sum(w)
        safe = jnp.where(trace > 0, trace, 1)
        w, v = jnp.maximum(w, 0) / safe, jnp.maximum(v, 0)
        return Factors(w[:, None] * v[None], left, right, traces, axes)

    def narrowed(self, array: Array, damping: Scalar) -> Array:
        """Return what `Eigenbasis.narrowed` does, for an array of the shape of the
        parameters."""
        ordered = array.transpose(self.axes)
        matrix = ordered.reshape(self.eigenvalues.shape)
        rotated = matmul(matmul(self.left.T, matrix), self.right)
        rotated = rotated * jnp.sqrt(damping / (self.eigenvalues + damping))
        matrix = matmul(matmul(self.left, rotated), self.right.T)
        return matrix.reshape(ordered.shape).transpose(np.argsort(self.axes))

    def inverse_norm(self, array: Array, damping: Scalar) -> Scalar:
        r"""Return $\lambda\,g^\top(C + \lambda I)^{-1} g$ for an array g of the shape of
        the parameters. Eigenvectors have no derivatives where eigenvalues are equal, so
        the solution is differentiated as that of a linear system."""
        matrix = array.transpose(self.axes).reshape(self.eigenvalues.shape)
        a, b = self.traces
        trace = jnp.trace(a)
        safe = jnp.where(trace > 0, trace, 1)

        def damped(x: Float[Array, "o q"]) -> Float[Array, "o q"]:
            return matmul(matmul(a, x), b) / safe + damping * x

        def solve(_, x: Float[Array, "o q"]) -> Float[Array, "o q"]:
            rotated = matmul(matmul(self.left.T, x), self.right)
            rotated = rotated / (self.eigenvalues + damping)
            return matmul(matmul(self.left, rotated), self.right.T)

        solution = jax.lax.custom_linear_solve(damped, matrix, solve, symmetric=True)
        return damping * jnp.sum(matrix * solution)


class Kronecker(eqx.Module):
    r"""Eigenpairs of a curvature of Kronecker products, in place of an `Eigenbasis`.

    The posterior's mean is then the output of the trained model.

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
                factors, block = self.factors[k], _factored(block)
                unknown = damping / (factors.eigenvalues + damping)
                bases = factors.left, factors.right
                found = block.weighted_squares(*bases, unknown)
                args = block, factors, damping
                total += with_derivative_of(_variance, found, *args)
        return jnp.zeros_like(total), total

    def narrowed(self, normal: PyTree[Array], damping: Scalar) -> PyTree[Array]:
        """Return what `Eigenbasis.narrowed` does."""
        leaves, structure = jax.tree.flatten(normal)
        pairs = zip(self.factors, leaves, strict=True)
        return structure.unflatten([x.narrowed(leaf, damping) for x, leaf in pairs])

    def inverse_norm(self, vector: PyTree[Array], damping: Scalar) -> Scalar:
        r"""Return $\lambda\,g^\top(C + \lambda I)^{-1} g$ for a `vector` $g$ like the
        parameters, where $C$ is the curvature."""
        return _tree.summed(
            x.inverse_norm(g, damping)
            for x, g in zip(self.factors, jax.tree.leaves(vector), strict=True)
        )

    def misfit(self, damping: Scalar) -> Scalar:
        r"""Return $\lVert r\rVert^2/\lambda + \lVert\theta\rVert^2$."""
        return self.squared_residual / damping + self.squared_distance


def _variance(
    block: Layer | Rows, factors: Factors, damping: Scalar
) -> Float[Array, " m"]:
    """Return what `weighted_squares` does in `predicted`, as a formula to be
    differentiated. It makes the rows of one example at a time."""

    @jax.checkpoint
    def of_example(example: Layer | Rows) -> Float[Array, " c"]:
        rows = jax.tree.map(lambda x: x[None], example).rows()
        return jax.vmap(lambda row: factors.inverse_norm(row, damping))(rows)

    return jax.lax.map(of_example, block).reshape(-1)


def _factored(block: AbstractBlock) -> Layer | Rows:
    return block if isinstance(block, Layer) else Rows(block.rows())


def _sizes(block: Layer | Rows) -> tuple[int, int]:
    a, b = jax.eval_shape(lambda x: x.partial_traces(), block)
    return len(a), len(b)
