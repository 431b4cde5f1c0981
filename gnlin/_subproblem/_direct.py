"""By a Cholesky factorisation on the smaller side: damping only, one solve each."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from jax.tree_util import Partial
from jaxtyping import Array, Float, PyTree, Scalar, ScalarLike

from .. import _tree
from .._spectrum import Filter
from .._tree import matmul, ravel_pytree
from ..filters import Tikhonov
from ._base import AbstractSubproblem, Answer


def damping_of(filter: Filter) -> ScalarLike:
    if not isinstance(filter, Tikhonov):
        raise ValueError(
            'The methods "kernel" and "curvature" solve a damped problem only; use '
            f'"svd", "eigh" or "auto" for `{type(filter).__name__}`.'
        )
    return filter.damping


def _solve_damped(
    matrix: Float[Array, "n n"], vector: Float[Array, " n"], damping: ScalarLike
) -> tuple[Float[Array, " n"], optx.RESULTS]:
    """`(matrix + lambda I)^-1 vector`; NaN in, NaN out, and none of it to LAPACK."""
    dtype = _tree.dtype((matrix, vector))
    matrix, vector = matrix.astype(dtype), vector.astype(dtype)
    identity = jnp.eye(vector.size, dtype=dtype)
    damped = matrix + jnp.asarray(damping, matrix.dtype) * identity
    finite = _tree.all_finite((damped, vector))
    operator = lx.MatrixLinearOperator(
        jnp.where(finite, damped, identity), lx.positive_semidefinite_tag
    )
    solution = lx.linear_solve(operator, vector, lx.Cholesky(), throw=False)
    return jnp.where(finite, solution.value, jnp.nan), optx.RESULTS.promote(
        solution.result
    )


def _norm_by(kernel: Float[Array, "m m"], residual: Float[Array, " m"]) -> Scalar:
    r"""$\lVert\phi^\top r\rVert$, without squares that leave the floating-point range."""
    residual = residual.astype(_tree.dtype((kernel, residual)))
    unit = _tree.unit(residual)
    r = residual / unit
    product = matmul(kernel, r)
    size = _tree.unit(product)
    squared = matmul(r, product / size)
    return unit * jnp.sqrt(size) * jnp.sqrt(jnp.where(squared < 0, 0, squared))


Solved = tuple[Float[Array, " m"], ScalarLike, optx.RESULTS]
"""Coefficients, the inner steps that they took, and whether they solve."""


def through_outputs(
    solve: Callable[[Float[Array, " m"]], Solved],
    residual: Float[Array, " m"],
    pull_back: Callable[[Float[Array, " m"]], PyTree[Array]],
    damping: ScalarLike,
    rest: tuple[PyTree[Array], Float[Array, " m"]] | None,
) -> Answer:
    r"""The step, with `solve` for products with $(\phi\phi^\top + \lambda I)^{-1}$:
    $-\phi^\top(\phi\phi^\top + \lambda I)^{-1} r$, and for a part $g_0$ of the gradient
    that is no $\phi^\top r$, `rest`, by Woodbury's identity
    $-\frac1\lambda(g_0 - \phi^\top(\phi\phi^\top + \lambda I)^{-1}\phi g_0)$, with
    one solution for both; `rest` is $g_0$ and $\phi g_0$."""
    if rest is None:
        a, num_steps, result = solve(residual)
        return Answer(pull_back(-a), num_steps, result=result)
    stray, pushed = rest
    inverse = 1 / jnp.asarray(damping, residual.dtype)
    inverse = jnp.where(_tree.any_nonzero(stray), inverse, 0)
    right = _tree.axpy(-inverse, *_tree.promoted((pushed, residual)))
    a, num_steps, result = solve(right)
    step = _tree.axpy(-inverse, stray, pull_back(-a))
    return Answer(step, num_steps, result=result)


class OnOutputs(AbstractSubproblem):
    r"""$\delta = -\phi^\top(\phi\phi^\top + \lambda I)^{-1} r$: see
    `through_outputs`."""

    kernel: Float[Array, "m m"]
    residual: Float[Array, " m"]
    pull_back: Callable[[Float[Array, " m"]], PyTree[Array]]  # a -> phi^T a
    rest: PyTree[Array] | None
    pushed: Float[Array, " m"]  # phi g_0
    gradient_norm: Scalar
    num_jvps: int = eqx.field(static=True)
    num_vjps: int = eqx.field(static=True)

    def __init__(
        self,
        kernel,
        residual,
        pull_back,
        num_jvps,
        num_vjps,
        *,
        rest=None,
        push_forward=lambda _: None,
    ):
        self.kernel = kernel
        self.residual = residual
        self.pull_back = pull_back
        self.rest = rest
        if rest is None:
            self.pushed = jnp.zeros_like(residual)
            self.gradient_norm = _norm_by(kernel, residual)
        else:
            self.pushed = push_forward(rest)
            self.gradient_norm = _tree.norm(self.gradient())
        self.num_jvps = num_jvps
        self.num_vjps = num_vjps

    def gradient(self) -> PyTree[Array]:
        gradient = self.pull_back(self.residual)
        return gradient if self.rest is None else _tree.axpy(1, self.rest, gradient)

    def curvature_along_gradient(self) -> Scalar:
        pushed = _tree.axpy(1, self.pushed, matmul(self.kernel, self.residual))
        return _tree.dot(pushed, pushed) / self.gradient_norm**2

    def largest_curvature(self) -> Scalar:
        return jnp.max(jnp.diagonal(self.kernel))

    def with_residual(self, residual: PyTree[Array]) -> "OnOutputs":
        flat, _ = ravel_pytree(residual)
        return OnOutputs(self.kernel, flat, self.pull_back, 0, 0)

    def solve(self, filter: Filter) -> Answer:
        damping = damping_of(filter)

        def solve(vector):
            a, result = _solve_damped(self.kernel, vector, damping)
            return a, 0, result

        rest = None if self.rest is None else (self.rest, self.pushed)
        return through_outputs(solve, self.residual, self.pull_back, damping, rest)


class OnParameters(AbstractSubproblem):
    r"""$\delta = -(\phi^\top\phi + \lambda I)^{-1}(\phi^\top r + g_0)$."""

    curvature: Float[Array, "p p"]
    flat_gradient: Float[Array, " p"]
    pull_back: Callable[[Float[Array, " m"]], PyTree[Array]]  # a -> phi^T a
    unravel: Callable[[Float[Array, " p"]], PyTree[Array]]
    gradient_norm: Scalar
    num_jvps: int = eqx.field(static=True)
    num_vjps: int = eqx.field(static=True)

    def __init__(self, curvature, residual, pull_back, num_jvps, num_vjps, *, rest=None):
        self.curvature = curvature
        self.pull_back = pull_back
        gradient = pull_back(residual)
        if rest is not None:
            gradient = _tree.axpy(1, rest, gradient)
        self.flat_gradient, unravel = ravel_pytree(gradient)
        self.unravel = Partial(unravel)
        self.gradient_norm = _tree.norm(self.flat_gradient)
        self.num_jvps = num_jvps
        self.num_vjps = num_vjps

    def gradient(self) -> PyTree[Array]:
        return self.unravel(self.flat_gradient)

    def curvature_along_gradient(self) -> Scalar:
        g = self.flat_gradient
        return matmul(g, matmul(self.curvature, g)) / self.gradient_norm**2

    def largest_curvature(self) -> Scalar:
        return jnp.max(jnp.diagonal(self.curvature))

    def with_residual(self, residual: PyTree[Array]) -> "OnParameters":
        flat, _ = ravel_pytree(residual)
        return OnParameters(self.curvature, flat, self.pull_back, 0, 0)

    def solve(self, filter: Filter) -> Answer:
        damping = damping_of(filter)
        step, result = _solve_damped(self.curvature, self.flat_gradient, damping)
        return Answer(self.unravel(-step), result=result)
