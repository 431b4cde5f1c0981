"""The Lanczos process for a positive semidefinite matrix that is given by its products:
the largest eigenvalues, and quadrature.

Every vector is orthogonalised against all before it, and the coefficients form the
projected matrix. Restarts and random new vectors therefore need no formulas of their own.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import forwards_only
from .._common._tree import matmul
from . import _lapack


Product = Callable[[Float[Array, " n"]], Float[Array, " n"]]

# A vector with a norm below this many eps after orthogonalisation was in the span.
_ROUNDINGS = 100
# Eigenvalues below this many eps of the largest count as zero.
ZERO_ROUNDINGS = 10
# Number of products between two tests of convergence.
_STRIDE = 8
# Number of products from a random vector that search for further eigenvalues. They find
# one that is 5 % above all others: its share grows as exp(2 * 24 * sqrt(0.05)), from
# n^-1/2.
_LOOK = 24


class Basis(eqx.Module):
    r"""A Lanczos basis: orthonormal rows $V$ with
    $A V^\top = V^\top H + \beta\,q\,e^\top + D$."""

    vectors: Float[Array, "c n"]  # V; rows from `size` on are zero
    projected: Float[Array, "c c"]  # H = V A V^T
    size: Int[Array, ""]
    following: Float[Array, " n"]  # q
    coupling: Scalar  # beta; 0 if q is random
    dropped: Float[Array, " c"]  # the norms of the columns of D
    key: Key[Array, ""]

    @staticmethod
    def of(start: Float[Array, " n"], capacity: int, key: Key[Array, ""]) -> "Basis":
        dtype = start.dtype
        return Basis(
            jnp.zeros((capacity, start.size), dtype),
            jnp.zeros((capacity, capacity), dtype),
            jnp.array(0),
            start / jnp.linalg.norm(start),
            jnp.zeros((), dtype),
            jnp.zeros(capacity, dtype),
            key,
        )

    def extended(self, product: Product) -> "Basis":
        """Add the next vector, which takes one product."""
        image = product(self.following)
        vectors = self.vectors.at[self.size].set(self.following)
        rest, along = _orthogonalised(vectors, image)
        projected = self.projected.at[self.size].set(along)
        projected = projected.at[:, self.size].set(along)
        size = _tree.norm(rest)
        spanned = size <= _ROUNDINGS * _tree.eps(rest) * _tree.norm(image)
        key, subkey = jax.random.split(self.key)
        following = jax.lax.cond(
            spanned,
            lambda: _random_beside(vectors, subkey),
            lambda: rest / jnp.where(spanned, 1, size),
        )
        coupling = jnp.where(spanned, 0, size)
        new = vectors, projected, self.size + 1, following, coupling
        return Basis(*new, self.dropped, key)

    def pairs(self) -> tuple[Float[Array, " c"], Float[Array, "c c"]]:
        """Return the eigenvalues of H, largest first, and its eigenvectors in columns.
        Eigenvalues of rows beyond `size` are negative."""
        places = jnp.arange(self.dropped.size)
        beyond = jnp.where(places < self.size, 0, -_tree.unit(self.projected))
        values, rotation = _lapack.eigh(self.projected + jnp.diag(beyond))
        return values[::-1], rotation[:, ::-1]

    def residuals(self, rotation: Float[Array, "c c"]) -> Float[Array, " c"]:
        r"""Return $\lVert A x - \theta x\rVert$ of each pair."""
        by_last = jnp.abs(self.coupling * rotation[self.size - 1])
        return jnp.hypot(by_last, _norms_in(rotation, self.dropped))

    def restarted(
        self, values: Float[Array, " c"], rotation: Float[Array, "c c"], kept: int
    ) -> "Basis":
        """Restart from the first eigenpairs (Wu and Simon, 2000)."""
        first, zeros = rotation[:, :kept], jnp.zeros_like
        diagonal, norms = jnp.diag(values[:kept]), _norms_in(first, self.dropped)
        return dataclasses.replace(
            self,
            vectors=zeros(self.vectors).at[:kept].set(matmul(first.T, self.vectors)),
            projected=zeros(self.projected).at[:kept, :kept].set(diagonal),
            size=jnp.array(kept),
            dropped=zeros(self.dropped).at[:kept].set(norms),
        )

    def reseeded(
        self, values: Float[Array, " c"], rotation: Float[Array, "c c"], kept: int
    ) -> "Basis":
        """Restart from the first eigenpairs, and replace the next vector, whose coupling
        to them is small, by a random one."""
        first = self.restarted(values, rotation, kept)
        key, subkey = jax.random.split(self.key)
        left = jnp.where(
            jnp.arange(self.dropped.size) < kept, self.residuals(rotation), 0
        )
        return dataclasses.replace(
            first,
            following=_random_beside(first.vectors, subkey),
            coupling=jnp.zeros_like(self.coupling),
            dropped=left,
            key=key,
        )


def _norms_in(
    rotation: Float[Array, "c k"], norms: Float[Array, " c"]
) -> Float[Array, " k"]:
    # This assumes that the columns of D are nearly orthogonal to each other.
    unit = _tree.unit(norms)
    return unit * jnp.linalg.norm((norms / unit)[:, None] * rotation, axis=0)


def _orthogonalised(
    vectors: Float[Array, "c n"], image: Float[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, " c"]]:
    """Orthogonalise a vector twice; return the remainder, and the coefficients of what
    was subtracted."""
    along = matmul(vectors, image)
    rest = image - matmul(along, vectors)
    more = matmul(vectors, rest)
    return rest - matmul(more, vectors), along + more


def _random_beside(
    vectors: Float[Array, "c n"], key: Key[Array, ""]
) -> Float[Array, " n"]:
    random = jax.random.normal(key, vectors.shape[1:], vectors.dtype)
    rest, _ = _orthogonalised(vectors, random)
    return rest / jnp.linalg.norm(rest)


def _unless_rounding(eigenvalues: Float[Array, " k"]) -> Float[Array, " k"]:
    """Replace eigenvalues by zero if they are rounding; the first one is the largest."""
    known = eigenvalues > ZERO_ROUNDINGS * _tree.eps(eigenvalues) * eigenvalues[0]
    return jnp.where(known | jnp.isnan(eigenvalues), eigenvalues, 0)


class Leading(NamedTuple):
    """The largest eigenvalues, their residual norms, and their eigenvectors in rows."""

    eigenvalues: Float[Array, " k"]
    residuals: Float[Array, " k"]
    num_products: Int[Array, ""]
    converged: Bool[Array, ""]
    vectors: Float[Array, "k n"]


class _State(eqx.Module):
    basis: Basis
    values: Float[Array, " c"]
    rotation: Float[Array, "c c"]
    num_products: Int[Array, ""]
    since: Int[Array, ""]  # products since the last random vector
    novel: Bool[Array, ""]  # whether it has found further eigenvalues
    done: Bool[Array, ""]
    converged: Bool[Array, ""]


def leading(
    product: Product,
    start: Float[Array, " n"],
    num_pairs: int,
    capacity: int,
    tolerance: ScalarLike,
    max_products: int,
    key: Key[Array, ""],
) -> Leading:
    r"""Find the largest eigenpairs by thick-restart Lanczos, until $\lVert A x - \theta
    x\rVert \le \tau\,\theta$ for each.

    A start vector finds only one eigenvector of each eigenvalue. Once the pairs have
    converged, the process continues from a random vector orthogonal to them, and from
    another one as long as these find further pairs.
    """
    k, n = num_pairs, start.size
    kept = k + (capacity - k) // 2
    tolerance = jnp.asarray(tolerance, start.dtype)

    def sweep(state: _State) -> _State:
        full = state.basis.size == capacity
        basis = jax.lax.cond(
            full,
            lambda: state.basis.restarted(state.values, state.rotation, kept),
            lambda: state.basis,
        )
        least = jnp.where(basis.size < k, k, basis.size + _STRIDE)
        target = jnp.minimum(least, capacity)
        num_new = target - basis.size
        basis = jax.lax.while_loop(
            lambda basis: basis.size < target,
            lambda basis: basis.extended(product),
            basis,
        )
        values, rotation = basis.pairs()
        residuals = basis.residuals(rotation)
        since, num_products = state.since + num_new, state.num_products + num_new

        # Before a random vector is taken, meet half the tolerance, as it may add error.
        rounding = ZERO_ROUNDINGS * _tree.eps(values) * values[0]
        bound = jnp.where(state.novel, tolerance / 2, tolerance) * values[:k]
        met = jnp.all(residuals[:k] <= jnp.maximum(bound, rounding))
        risen = values[:k] - state.values[:k] > tolerance * values[:k] + rounding
        novel = state.novel | ~met | jnp.any(risen)
        whole = basis.size == n
        converged = met & ((~novel & (since >= _LOOK)) | whole)
        ended = whole | (num_products >= max_products) | ~jnp.isfinite(values[0])
        # If few vectors complete the basis, add them and do not restart.
        rest = n - basis.size if capacity == n else jnp.array(n)
        reseeding = met & novel & ~ended & (rest > _LOOK)
        basis = jax.lax.cond(
            reseeding, lambda: basis.reseeded(values, rotation, k), lambda: basis
        )
        return _State(
            basis,
            values,
            rotation,
            num_products,
            jnp.where(reseeding, 0, since),
            novel & ~reseeding,
            converged | ended,
            converged,
        )

    zero = jnp.array(0)
    state = jax.lax.while_loop(
        lambda state: ~state.done,
        sweep,
        _State(
            Basis.of(start, capacity, key),
            jnp.zeros(capacity, start.dtype),
            jnp.zeros((capacity, capacity), start.dtype),
            zero,
            zero,
            novel=jnp.array(True),
            done=jnp.array(False),
            converged=jnp.array(False),
        ),
    )
    state = forwards_only(state)
    return Leading(
        _unless_rounding(state.values[:k]),
        state.basis.residuals(state.rotation)[:k],
        state.num_products,
        state.converged,
        matmul(state.rotation[:, :k].T, state.basis.vectors),
    )


def quadrature(
    product: Product, start: Float[Array, " n"], num_steps: int, key: Key[Array, ""]
) -> tuple[Float[Array, " s"], Float[Array, " s"]]:
    r"""Return nodes $\theta_i$ and weights $c_i$ with $z^\top f(A)\,z \approx \sum_i c_i
    f(\theta_i)$, where $z$ is `start`."""
    basis = jax.lax.fori_loop(
        0,
        num_steps,
        lambda _, basis: basis.extended(product),
        Basis.of(start, num_steps, key),
    )
    nodes, rotation = basis.pairs()
    return _unless_rounding(nodes), jnp.sum(start**2) * rotation[0] ** 2
