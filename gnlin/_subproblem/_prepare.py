"""Which way a subproblem is solved: chosen from static shapes and a memory budget."""

from typing import get_args, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial
from jaxtyping import Array, PyTree, Scalar

from .. import _rows, _tree
from .._linearisation import Linearisation, svd_is_cheap
from .._spectrum import Filter
from .._tree import matmul
from ._base import AbstractSubproblem, Answer
from ._direct import OnOutputs, OnParameters
from ._matrix_free import MatrixFree
from ._spectral import Spectral


Method = Literal["auto", "svd", "eigh", "kernel", "curvature", "matrix-free"]


def check_method(method: str, *, damped: bool = True) -> None:
    """`damped`: whether the problem is, so that Cholesky factorisations serve."""
    methods = get_args(Method)
    if not damped:
        methods = tuple(m for m in methods if m not in ("kernel", "curvature"))
    if method not in methods:
        raise ValueError(
            f"`method` must be one of {', '.join(map(repr, methods))} here, but "
            f"{method!r} was given."
        )


# Below this size of the smaller side a singular value decomposition takes seconds at
# most, and its accuracy is worth them where no damping hides small singular values.
_SVD_SIDE = 1000


def choose_method(
    shape: tuple[int, int],
    itemsize: int,
    memory_budget: int,
    *,
    damped: bool,
    reuse: bool,
) -> Method:
    """The default method for an m x p linearisation.

    - `damped`: whether small singular values are damped away, so that forming
        phi phi^T, which squares the condition number, does no harm.
    - `reuse`: whether one factorisation serves several filters, or a filter that needs
        the spectrum; otherwise a Cholesky factorisation is cheaper than `eigh`.
    """
    m, p = shape
    jacobian_fits = m * p * itemsize <= memory_budget
    gram_fits = min(m, p) ** 2 * itemsize <= memory_budget
    if jacobian_fits and svd_is_cheap(m, p):
        return "svd"
    if jacobian_fits and not damped and min(m, p) <= _SVD_SIDE:
        return "svd"
    if jacobian_fits:
        return "eigh" if reuse or not damped else "kernel" if m <= p else "curvature"
    if reuse and gram_fits and m <= p:
        return "eigh"
    return "matrix-free"


def prepare(
    lin: Linearisation,
    method: Method,
    memory_budget: int,
    *,
    damped: bool,
    reuse: bool,
    scale: PyTree[Array] | None = None,
    rows: PyTree[Array] | None = None,
) -> AbstractSubproblem:
    """Make a linearised problem ready for filters.

    With `scale` D (and the dense `rows`), in the variables `D delta`.
    """
    itemsize = _tree.dtype(lin.point).itemsize
    if method == "auto":
        method = choose_method(
            lin.shape, itemsize, memory_budget, damped=damped, reuse=reuse
        )
    if scale is not None and rows is not None:
        rows = jax.tree.map(lambda row, d: row / d, rows, scale)
        return Scaled(_dense(lin, rows, method), scale)
    if method == "matrix-free":
        return MatrixFree(lin)
    if lin.num_bytes() > memory_budget and method in ("eigh", "kernel"):
        return _without_jacobian(lin, method, memory_budget)
    return _dense(lin, lin.rows(memory_budget), method)


def _dense(lin, rows, method) -> AbstractSubproblem:
    num_passes = lin.num_row_passes()
    residual, _ = ravel_pytree(lin.outputs)
    if method in ("svd", "eigh"):
        return Spectral(_rows.spectrum(rows, residual, method), *num_passes)
    if method == "kernel":
        pull_back = Partial(_rows.pull_back, rows)
        return OnOutputs(_rows.gram(rows), residual, pull_back, *num_passes)
    unravel = Partial(ravel_pytree(lin.point)[1])
    matrix = _rows.matrix(rows)
    curvature = matmul(matrix.T, matrix)
    return OnParameters(matrix, curvature, residual, unravel, *num_passes)


def _without_jacobian(lin, method, memory_budget) -> AbstractSubproblem:
    """The kernel in chunks: each row pulled back and pushed forward again."""
    m, _ = lin.shape
    if method == "eigh":
        return Spectral(lin.spectrum("eigh", memory_budget=memory_budget), m, m)
    residual, _ = ravel_pytree(lin.outputs)
    return OnOutputs(lin.kernel(memory_budget), residual, lin.pull_back, m, m)


class Scaled(AbstractSubproblem):
    """A subproblem in the variables `D delta`, answered in `delta`."""

    inner: AbstractSubproblem
    scale: PyTree[Array]
    gradient_norm: Scalar
    num_jvps: int = eqx.field(static=True)
    num_vjps: int = eqx.field(static=True)

    def __init__(self, inner: AbstractSubproblem, scale: PyTree[Array]):
        self.inner = inner
        self.scale = scale
        self.gradient_norm = _tree.norm(self.gradient())
        self.num_jvps = inner.num_jvps
        self.num_vjps = inner.num_vjps

    def gradient(self) -> PyTree[Array]:
        return jax.tree.map(jnp.multiply, self.scale, self.inner.gradient())

    def scaled_gradient_norm(self) -> Scalar:
        return self.inner.gradient_norm

    def curvature_along_gradient(self) -> Scalar:
        return self.inner.curvature_along_gradient()

    def largest_curvature(self) -> Scalar:
        return self.inner.largest_curvature()

    def attainable_decrease(self) -> Scalar:
        return self.inner.attainable_decrease()

    def with_residual(self, residual: PyTree[Array]) -> "Scaled":
        return Scaled(self.inner.with_residual(residual), self.scale)

    def solve(self, filter: Filter) -> Answer:
        answer = self.inner.solve(filter)
        step = jax.tree.map(jnp.divide, answer.step, self.scale)
        return eqx.tree_at(lambda a: a.step, answer, step)
