r"""Preconditioners for conjugate gradients on $(\phi^\top\phi + \lambda I)\delta = b$.

A preconditioner is computed at every linearisation. It pays if it saves more iterations
than it costs; "How is a step computed?" in the documentation has cases of both. Without
damping, parameters may drift in directions that the data do not determine: give some.

!!! example

    ```python
    solver = gnlin.TruncatedGaussNewton(
        1e-3, damping=1e-2, preconditioner=gnlin.preconditioners.Nystrom(rank=50)
    )
    ```
"""

import abc
import functools
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PyTree, Scalar, ScalarLike

from ._common import _tree
from ._common._checks import check_count, check_whole
from ._common._passes import Passes
from ._common._tree import einsum, matmul, ravel_pytree
from ._jacobian import AbstractBlock, AbstractJacobian, Rows
from ._linear_algebra import _nystrom
from ._linear_algebra._conjugate_gradients import semidefinite


__all__ = [
    "AbstractPreconditioner",
    "BlockDiagonal",
    "Nystrom",
]


# Bytes of the rows from which blocks are summed at a time, so that they fit into a cache.
_PART_BYTES = 2**24


class AbstractPreconditioner(eqx.Module):
    """An approximate inverse of the damped curvature."""

    @abc.abstractmethod
    def inverse(
        self, jacobian: AbstractJacobian, damping: ScalarLike
    ) -> lx.FunctionLinearOperator:
        r"""Return a positive definite operator near $(\phi^\top\phi + \lambda I)^{-1}$,
        on the parameters' structure. It is not finite if the Jacobian is not."""

    @abc.abstractmethod
    def passes(self, jacobian: AbstractJacobian) -> Passes:
        """Return the passes that computing the inverse takes."""


class Nystrom(AbstractPreconditioner):
    r"""A low-rank approximation of the curvature, from random products with it.

    With $\phi^\top\phi \approx U\hat\Lambda U^\top$ of rank $\ell$ by the randomised
    Nyström method, the preconditioner is

    $$P^{-1} = (\hat\lambda_\ell + \lambda)\,U(\hat\Lambda + \lambda I)^{-1}U^\top
    + (I - UU^\top).$$

    It pays if few eigenvalues are large, the others are below the damping or of similar
    size, and the subproblem is solved to a small tolerance. It does not pay if a few
    iterations suffice. It takes `rank` products with $\phi$ and with $\phi^\top$, as many
    at once as fit in the memory budget, and stores p x `rank` numbers.

    **Arguments:**

    - `rank`: $\ell$, at least 1. If it is larger than p, the number of parameters, p is
        used.
    - `seed`: the seed of the random vectors, which are the same at each linearisation.

    **Raises:** `ValueError` if `rank` is not a whole number of at least 1.

    ??? cite "Reference"

        Z. Frangella, J. A. Tropp and M. Udell, *Randomized Nyström preconditioning*, SIAM
        J. Matrix Anal. Appl. 44 (2023), Algorithm 2.1 and equation (1.3).
    """

    rank: int = eqx.field(static=True)
    seed: int = eqx.field(static=True, default=0)

    def __check_init__(self):
        check_count("rank", self.rank)
        check_whole("seed", self.seed)

    def passes(self, jacobian: AbstractJacobian) -> Passes:
        return Passes(1, 1) * self._rank(jacobian)

    def _rank(self, jacobian: AbstractJacobian) -> int:
        _, p = jacobian.shape
        return min(self.rank, p)

    def inverse(self, jacobian, damping) -> lx.FunctionLinearOperator:
        unravel, (_, p) = jacobian.domain.unravel, jacobian.shape
        dtype, rank = jacobian.domain.dtype, self._rank(jacobian)

        def product(v):
            return ravel_pytree(jacobian.curvature_mv(unravel(v)))[0]

        products = functools.partial(jacobian.chunked, product)
        u, eigenvalues = _nystrom.eigenpairs(products, p, rank, self.seed, dtype)

        # Equation (1.3).
        damped = eigenvalues + jnp.asarray(damping, dtype)
        largest = jnp.max(damped)
        least = _least_part(eigenvalues, damping) * largest
        damped = jnp.where(largest > 0, jnp.maximum(damped, least), 1)
        weights = damped[-1] / damped - 1

        def apply(v: PyTree[Array]) -> PyTree[Array]:
            x = ravel_pytree(v)[0]
            return unravel(x + matmul(u, weights * matmul(u.T, x)))

        return semidefinite(apply, jacobian.domain.tree)


class BlockDiagonal(AbstractPreconditioner):
    r"""The inverses of diagonal blocks of the curvature.

    An array of parameters is one block if it is small enough. Otherwise each of its rows
    (the weights of a neuron or of a channel) is one block, if these are small enough;
    otherwise each of its entries is one. It pays if parameters in different blocks have
    nearly independent effects of very different scale, such as features in different
    units. For networks with hidden layers it rarely pays, nor if the damping hides the
    scales. It takes as many passes as the dense Jacobian, some examples or outputs at a
    time (forward mode makes the whole Jacobian), and stores p numbers times the size of a
    block.

    **Arguments:**

    - `max_size`: the largest size of a block, at least 1; 1 is the diagonal alone.

    **Raises:** `ValueError` if `max_size` is not a whole number of at least 1.
    """

    max_size: int = eqx.field(static=True, default=256)

    def __check_init__(self):
        check_count("max_size", self.max_size)

    def passes(self, jacobian: AbstractJacobian) -> Passes:
        return jacobian.cost().rows

    def inverse(self, jacobian, damping) -> lx.FunctionLinearOperator:
        domain = jacobian.domain
        shapes = [_blocks(leaf.shape, self.max_size) for leaf in domain.leaves]

        def grams(blocks: Sequence[AbstractBlock]) -> list[Array]:
            return [
                block.row_grams()
                if leaf.shape[:1] == shape[:1]
                else Rows(block.rows().reshape(block.num_rows, *shape)).row_grams()
                for block, leaf, shape in zip(blocks, domain.leaves, shapes, strict=True)
            ]

        inverses = [
            _inverses(gram, damping) for gram in jacobian.summed(grams, _PART_BYTES)
        ]

        def apply(v: PyTree[Array]) -> PyTree[Array]:
            solved = [
                einsum("kij,kj...->ki...", inverse, x.reshape(shape)).reshape(x.shape)
                for inverse, x, shape in zip(
                    inverses, jax.tree.leaves(v), shapes, strict=True
                )
            ]
            return domain.treedef.unflatten(solved)

        return semidefinite(apply, jacobian.domain.tree)


def _least_part(curvature: Array, damping: ScalarLike) -> Scalar:
    """Return the least eigenvalue of an approximated curvature, relative to the largest.
    Without damping an inverse would enlarge the rounding of a gradient beyond all bounds,
    in directions that no output depends on."""
    eps = _tree.eps(curvature)
    part = jnp.where(jnp.asarray(damping) > 0, eps, eps ** (2 / 3))
    return part.astype(curvature.dtype)


def _blocks(shape: tuple[int, ...], max_size: int) -> tuple[int, int]:
    """Return the number of blocks of an array of parameters, and their size."""
    size = math.prod(shape)
    if size <= max_size:
        return 1, size
    first = shape[0]
    return (first, size // first) if size // first <= max_size else (size, 1)


def _inverses(gram: Float[Array, "k i i"], damping: ScalarLike) -> Float[Array, "k i i"]:
    """Return the inverse of each damped block, positive definite by construction from
    Cholesky factors. (Triangular solves are slow for many small blocks.)"""
    halves = inverse_factors(gram, damping, _least_part(gram, damping))
    return einsum("kij,kj...->ki...", halves.swapaxes(1, 2), halves)


def inverse_factors(
    gram: Float[Array, "k i i"], damping: ScalarLike, part: Any = None
) -> Float[Array, "k i i"]:
    r"""Return $L^{-1}$ of each damped block $LL^\top$, NaN if the blocks are not finite.
    A part of each block's trace, by default its rounding, is added to the damping, so
    that none is singular."""
    size = gram.shape[-1]
    identity = jnp.eye(size, dtype=gram.dtype)
    traces = jnp.trace(gram, axis1=-2, axis2=-1)
    part = size * _tree.eps(gram) if part is None else part
    shift = jnp.asarray(damping, gram.dtype) + part * traces
    # The shift is zero without damping if no output depends on a block's parameters.
    shift = jnp.where(shift > 0, shift, 1)
    finite = _tree.all_finite(gram)
    damped = jnp.where(finite, gram + shift[:, None, None] * identity[None], identity)
    if size == 1:
        return jnp.where(finite, 1 / jnp.sqrt(damped), jnp.nan)
    factors = jnp.linalg.cholesky(damped)
    halves = jax.vmap(
        lambda factor: jax.scipy.linalg.solve_triangular(factor, identity, lower=True)
    )(factors)
    return jnp.where(finite, halves, jnp.nan)
