"""Which way a subproblem is solved: chosen from static shapes and a memory budget."""

from typing import get_args, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, PyTree, Scalar

from .. import _rows, _tree
from .._cost import loops_slowly, num_flops
from .._linearisation import Linearisation, svd_is_cheap
from .._objective import AbstractObjective, Quadratic
from .._sharding import is_spread
from .._spectrum import Filter
from .._tree import matmul, ravel_pytree
from ._base import AbstractSubproblem, Answer
from ._direct import OnOutputs, OnParameters
from ._matrix_free import MatrixFree
from ._products_first import ProductsFirst
from ._prox_linear import ProxLinear
from ._spaces import Outputs, Parameters
from ._spectral import Spectral


Method = Literal["auto", "svd", "eigh", "kernel", "curvature", "matrix-free"]

Form = Literal["quadratic", "prox-linear"]


def check_method(method: str, *, damped: bool = True, also: tuple[str, ...] = ()) -> None:
    """`damped`: whether the problem is, so that Cholesky factorisations serve."""
    methods = get_args(Method)
    if not damped:
        methods = tuple(m for m in methods if m not in ("kernel", "curvature"))
    methods = (*methods, *also)
    if method not in methods:
        raise ValueError(
            f"`method` must be one of {', '.join(map(repr, methods))} here, but "
            f"{method!r} was given."
        )


def check_form(form: str, method: str) -> None:
    if form not in get_args(Form):
        raise ValueError(
            f'`form` must be "quadratic" or "prox-linear", but {form!r} was given.'
        )
    if form == "prox-linear" and method in ("svd", "eigh", "curvature"):
        raise ValueError(
            f"The method {method!r} is for quadratic problems: with "
            '`form="prox-linear"` use "auto", "kernel" or "matrix-free".'
        )


# Below this size of the smaller side a singular value decomposition takes seconds at
# most, and its accuracy is worth them where no damping hides small singular values.
_SVD_SIDE = 1000


# A Jacobian of up to this many bytes is at hand for the gradient, too; of a larger one
# the curvature is summed over parts.
_SMALL_JACOBIAN = 2**20


def choose_method(
    shape: tuple[int, int],
    itemsize: int,
    memory_budget: int,
    *,
    blocks_fit: bool,
    damped: bool,
    reuse: bool,
) -> Method:
    """The default method for an m x p linearisation.

    - `damped`: whether small singular values are damped away, so that forming
        phi phi^T, which squares the condition number, does no harm.
    - `blocks_fit`: whether the Jacobian's blocks do, which take less than its rows.
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
    if gram_fits and m > p and damped and not reuse:
        return "curvature"
    if gram_fits and m <= p and (reuse or blocks_fit):
        return "eigh" if reuse or not damped else "kernel"
    return "matrix-free"


def prepare(
    quadratic: Quadratic,
    method: Method,
    memory_budget: int,
    *,
    damped: bool,
    reuse: bool,
    scale: PyTree[Array] | None = None,
    blocks: PyTree | None = None,
) -> AbstractSubproblem:
    """Make a quadratic problem ready for filters.

    With `scale` D (and the Jacobian's `blocks`), in the variables `D delta`.
    """
    lin, rest = quadratic.lin, quadratic.rest
    itemsize = _tree.dtype(lin.point).itemsize
    if method == "auto":
        method = choose_method(
            lin.shape,
            itemsize,
            memory_budget,
            blocks_fit=lin.blocks_fit(memory_budget),
            damped=damped,
            reuse=reuse,
        )
    if scale is not None and blocks is not None:
        rows = jax.tree.map(lambda row, d: row / d[None], _rows.dense(blocks), scale)
        if rest is not None:
            rest = jax.tree.map(jnp.divide, rest, scale)
        pull_back = Partial(_scaled_pull_back, blocks, scale)
        return Scaled(_dense(lin, rest, rows, method, pull_back), scale)
    if method == "matrix-free":
        return MatrixFree(lin, rest)
    m, p = lin.shape
    if method == "kernel" or (method == "eigh" and m <= p):
        if not lin.blocks_fit(memory_budget):
            return _without_jacobian(lin, rest, method, memory_budget)
        return _dense(lin, rest, lin.blocks(memory_budget), method)
    if method == "curvature" and lin.num_bytes() > _SMALL_JACOBIAN:
        num_jvps, num_vjps = lin.num_row_passes()
        residual, _ = ravel_pytree(lin.outputs)
        curvature = lin.curvature(memory_budget)
        passes = num_jvps, num_vjps + 1
        return OnParameters(curvature, residual, lin.pull_back, *passes, rest=rest)
    return _dense(lin, rest, lin.rows(memory_budget), method)


# An operation of a Cholesky factorisation takes about as long as so many of a network's
# passes, and one of the kernel's products as half of one.
_CHOLESKY_COST = 4.0
_GRAM_COST = 0.5
# A direct solution of fewer operations (about ten milliseconds) is made without further
# ado: what could be saved is less than what compiling both ways takes.
_CHEAP_DIRECT = 1e8
# Of its price, so much is spent on trying to do without; where fewer products than these
# come of it, nothing is.
_SHARE_TRIED = 0.5
_FEWEST_TRIED = 10


def prepare_once(
    quadratic: Quadratic, method: Method, memory_budget: int
) -> AbstractSubproblem:
    """Make a quadratic problem ready for one damping."""
    lin = quadratic.lin
    directly = Partial(
        _prepared_once, quadratic, method=method, memory_budget=memory_budget
    )
    if method != "auto" or is_spread() or not lin.blocks_fit(memory_budget):
        return directly()
    m, p = lin.shape
    one_pass = num_flops(lin.jvp, lin.point)
    rows = sum(lin.num_row_passes()) * one_pass
    gram = lin.num_kernel_multiplications() if m <= p else float(m) * p**2
    cholesky = min(m, p) ** 3 / 3
    direct = rows + _GRAM_COST * 2 * gram + _CHOLESKY_COST * cholesky
    if loops_slowly(lin.jvp, lin.point):
        one_pass *= _LOOPED_CONVOLUTION
    most = int(_SHARE_TRIED * direct / (2 * one_pass))
    if direct < _CHEAP_DIRECT or most < _FEWEST_TRIED:
        return directly()
    return ProductsFirst(MatrixFree(lin, quadratic.rest), directly, most)


def _prepared_once(quadratic, *, method, memory_budget):
    return prepare(quadratic, method, memory_budget, damped=True, reuse=False)


def _scaled_pull_back(blocks, scale, a):
    return jax.tree.map(jnp.divide, _rows.pull_back(blocks, a), scale)


def _dense(lin, rest, rows, method, pull_back=None) -> AbstractSubproblem:
    """From the Jacobian at hand; `pull_back` where there is a faster one than by rows."""
    pull_back = Partial(_rows.pull_back, rows) if pull_back is None else pull_back
    num_passes = lin.num_row_passes()
    residual, _ = ravel_pytree(lin.outputs)
    push_forward = Partial(_rows.push_forward, rows)
    if method in ("svd", "eigh"):
        spectrum = _rows.spectrum(rows, residual, method, pull_back)
        return Spectral(spectrum, *num_passes, rest=rest, push_forward=push_forward)
    if method == "kernel":
        kernel = _rows.gram(rows)
        return OnOutputs(
            kernel, residual, pull_back, *num_passes, rest=rest, push_forward=push_forward
        )
    matrix = _rows.matrix(rows)
    curvature = matmul(matrix.T, matrix)
    return OnParameters(curvature, residual, pull_back, *num_passes, rest=rest)


def _without_jacobian(lin, rest, method, memory_budget) -> AbstractSubproblem:
    """The kernel alone, of more of the Jacobian than fits at once."""
    num_passes = lin.num_kernel_passes(memory_budget)
    push_forward = lin.push_forward
    if method == "eigh":
        spectrum = lin.spectrum("eigh", memory_budget=memory_budget)
        return Spectral(spectrum, *num_passes, rest=rest, push_forward=push_forward)
    residual, _ = ravel_pytree(lin.outputs)
    kernel = lin.kernel(memory_budget)
    return OnOutputs(
        kernel, residual, lin.pull_back, *num_passes, rest=rest, push_forward=push_forward
    )


def prepare_prox_linear(
    objective: AbstractObjective,
    lin: Linearisation,
    method: Method,
    memory_budget: int,
    *,
    damped: bool,
    num_steps: float | None = None,
) -> ProxLinear:
    """Make a linearised problem with the loss itself ready for filters.

    - `damped`: whether it is, or steps are taken on it, so that m coefficients do.
    - `num_steps`: the number of steps that will be taken on it; `None` for Newton's.
    """
    m, p = lin.shape
    itemsize = _tree.dtype(lin.point).itemsize
    if method == "auto":
        # Steps are the same in both, but a kernel of less than full rank leaves Newton's
        # method with coefficients that say nothing.
        fits = m**2 * itemsize <= memory_budget and damped
        fits = fits and (m <= p or num_steps is not None)
        cheaper = fits and _outputs_are_cheaper(lin, num_steps)
        method = "kernel" if cheaper else "matrix-free"
    if method == "matrix-free":
        return ProxLinear(objective, lin, Parameters(lin))
    kernel = lin.kernel(memory_budget).astype(_tree.dtype(lin.outputs))
    outputs = Outputs(lin, kernel)
    num_passes = lin.num_kernel_passes(memory_budget)
    return ProxLinear(objective, lin, outputs, *num_passes)


# A matrix product takes about this part of the time of as many operations in a network's
# passes, and a Newton step about this many of them.
_MATMUL_COST = 1 / 8
_NEWTON_PRODUCTS = 10
_LOOPED_CONVOLUTION = 14
_NEWTON_STEPS = 10


def _outputs_are_cheaper(lin: Linearisation, num_steps: float | None) -> bool:
    """Whether steps with the kernel, its making included, take fewer operations than
    steps with two passes each."""
    m, _ = lin.shape
    one_pass = num_flops(lin.jvp, lin.point)
    rows = sum(lin.num_row_passes()) * one_pass
    if loops_slowly(lin.jvp, lin.point):
        one_pass *= _LOOPED_CONVOLUTION
    kernel = rows + 2 * lin.num_kernel_multiplications() * _MATMUL_COST
    if num_steps is None:
        newton = 2 / 3 * m**3 * _MATMUL_COST
        passes = _NEWTON_PRODUCTS * 2 * one_pass
        return kernel + _NEWTON_STEPS * newton <= _NEWTON_STEPS * passes
    return kernel + num_steps * 2 * m**2 <= num_steps * 2 * one_pass


def prepare_form(
    form: Form,
    objective: AbstractObjective,
    lin: Linearisation,
    method: Method,
    memory_budget: int,
    *,
    damped: bool,
    reuse: bool,
    num_steps: float | None = None,
) -> AbstractSubproblem:
    """The linearised problem in either form; for squared error they are one."""
    if form == "prox-linear" and not objective.is_quadratic:
        return prepare_prox_linear(
            objective, lin, method, memory_budget, damped=damped, num_steps=num_steps
        )
    return prepare(
        objective.expand(lin), method, memory_budget, damped=damped, reuse=reuse
    )


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
