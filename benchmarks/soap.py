r"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

For each matrix of parameters with gradients $G$, SOAP averages $L = \overline{GG^\top}$
and $R = \overline{G^\top G}$, and runs Adam on $Q_L^\top G Q_R$, where $Q_L$ and $Q_R$
are their eigenvectors. These are exact at first, and are updated at a fixed frequency by
a step of power iteration. The first gradient is used for the eigenvectors only, as in
the authors' program. Vectors are left to Adam. optax does not provide SOAP.

??? cite "Reference"

    N. Vyas, D. Morwani, R. Zhao, M. Kwun, I. Shapira, D. Brandfonbrener, L. Janson and
    S. Kakade, *SOAP: Improving and Stabilizing Shampoo using Adam*, arXiv:2409.11321
    (2024), algorithms 3 and 4.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, ScalarLike


class _Basis(NamedTuple):
    """Eigenvectors of the averaged products of a matrix's gradients."""

    left: Float[Array, "m m"]
    right: Float[Array, "n n"]
    q_left: Float[Array, "m m"]
    q_right: Float[Array, "n n"]

    def to(self, g: Float[Array, "m n"]) -> Float[Array, "m n"]:
        return self.q_left.T @ g @ self.q_right

    def back(self, g: Float[Array, "m n"]) -> Float[Array, "m n"]:
        return self.q_left @ g @ self.q_right.T

    def gathered(self, g: Float[Array, "m n"], b2: ScalarLike) -> "_Basis":
        left = b2 * self.left + (1 - b2) * g @ g.T
        right = b2 * self.right + (1 - b2) * g.T @ g
        return self._replace(left=left, right=right)

    def exact(self) -> "_Basis":
        q_left, q_right = (jnp.linalg.eigh(m)[1] for m in (self.left, self.right))
        return self._replace(q_left=q_left, q_right=q_right)

    def iterated(self) -> "_Basis":
        q_left = jnp.linalg.qr(self.left @ self.q_left)[0]
        q_right = jnp.linalg.qr(self.right @ self.q_right)[0]
        return self._replace(q_left=q_left, q_right=q_right)


class _Moments(NamedTuple):
    mean: Array
    square: Array  # moments of the gradient in its basis
    basis: _Basis | None  # None for a vector


class SoapState(NamedTuple):
    count: Int[Array, ""]
    moments: list[_Moments]


def soap(
    learning_rate: ScalarLike,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    frequency: int = 10,
) -> optax.GradientTransformation:
    """Return SOAP with its authors' defaults, except that there is no weight decay. The
    eigenvectors are updated every `frequency` steps."""

    def start(x: Array) -> _Moments:
        basis = None
        if x.ndim == 2:
            squares = [jnp.eye(size, dtype=x.dtype) for size in x.shape]
            basis = _Basis(*squares, *squares)
        return _Moments(jnp.zeros_like(x), jnp.zeros_like(x), basis)

    def init(params: Any) -> Any:
        leaves = jax.tree.leaves(params)
        return SoapState(jnp.zeros((), jnp.int32), [start(x) for x in leaves])

    def first(g: Array, moments: _Moments, count: Array) -> tuple[Array, _Moments]:
        basis = moments.basis
        if basis is not None:
            basis = basis.gathered(g, 0.0).exact()
        return jnp.zeros_like(g), moments._replace(basis=basis)

    def later(g: Array, moments: _Moments, count: Array) -> tuple[Array, _Moments]:
        mean, square, basis = moments
        to = back = lambda g: g
        if basis is not None:
            to, back = basis.to, basis.back
        mean = b1 * mean + (1 - b1) * g
        square = b2 * square + (1 - b2) * to(g) ** 2
        t = count.astype(g.dtype)
        unbiased = to(mean) / (1 - b1**t), square / (1 - b2**t)
        step = back(unbiased[0] / (jnp.sqrt(unbiased[1]) + eps))
        if basis is not None:
            basis = basis.gathered(g, b2)
            basis = jax.lax.cond(
                count % frequency == 0, _Basis.iterated, lambda b: b, basis
            )
        return step, _Moments(mean, square, basis)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(updates)

        def on_all(step):
            pairs = zip(leaves, state.moments, strict=True)
            found = [step(g, moments, state.count) for g, moments in pairs]
            return [step for step, _ in found], [moments for _, moments in found]

        steps, moments = jax.lax.cond(
            state.count == 0, lambda: on_all(first), lambda: on_all(later)
        )
        steps = [-jnp.asarray(learning_rate, step.dtype) * step for step in steps]
        return jax.tree.unflatten(structure, steps), SoapState(state.count + 1, moments)

    return optax.GradientTransformation(init, update)


def on_matrices(optimiser: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap an optimiser that treats matrices specially. The kernel of a convolution
    becomes a matrix with one row for each output channel, and an array with one column
    becomes a vector."""

    def flat(tree):
        def of_one(x):
            if x.ndim < 2:
                return x
            rows = x.reshape(len(x), -1)
            return rows[:, 0] if rows.shape[1] == 1 else rows

        return jax.tree.map(of_one, tree)

    def init(params: Any) -> Any:
        return optimiser.init(flat(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        steps, state = optimiser.update(flat(updates), state, flat(params))
        return jax.tree.map(lambda x, g: x.reshape(g.shape), steps, updates), state

    return optax.GradientTransformation(init, update)
