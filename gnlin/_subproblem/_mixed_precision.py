"""A damped problem whose kernel is made in a lower precision than its solution."""

import contextlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from jax.tree_util import Partial
from jaxtyping import Array, Float, PyTree, Scalar

from .. import _rows, _tree
from .._checks import check_finite_positive
from .._conjugate_gradients import ConjugateGradients
from .._objective import Quadratic
from .._spectrum import Filter
from .._tree import ravel_pytree
from ._base import AbstractSubproblem, Answer
from ._direct import damping_of, Solved, through_outputs


_DTYPES = ("float32", "bfloat16", "float16")
_MAX_SHIFTS = 10


class MixedPrecision(eqx.Module):
    r"""The kernel in a lower precision, the step in that of the parameters.

    The products of the kernel, and its Cholesky factorisation (in single precision at
    least), are most of the work of a damped step of many outputs. Made in a lower
    precision they cost half as much on a CPU, and a small part on many GPUs. What they
    give is refined: conjugate gradients on
    $(\phi\phi^\top + \lambda I)a = r$, with products in full precision, preconditioned by
    that factorisation, until the linear residual is at most `tolerance` times
    $\lVert r\rVert$. That takes a few products, more the smaller the damping is beside
    the kernel's rounding.

    **Arguments:**

    - `kernel_dtype`: `"float32"`, `"bfloat16"` or `"float16"` (which ends at 65,504).
    - `tolerance`: of the refinement, relative. One that is not met ends a run as a failed
        linear solve; so may a small damping of a loss whose gradient the curvature does
        not reach, such as Huber's. By default 1e-10, and in single precision as near
        to $\varepsilon^{3/4}$ as rounding allows, and no worse than
        $\varepsilon^{1/2}$.

    **Raises:** `ValueError` for another dtype, or a tolerance that is not positive.

    !!! example

        ```python
        gnlin.DampedGaussNewton(1.0, mixed_precision=gnlin.MixedPrecision("float32"))
        ```

    ??? cite "Reference"

        E. Carson and N. J. Higham, *Accelerating the solution of linear systems by
        iterative refinement in three precisions*, SIAM J. Sci. Comput. 40 (2018).
    """

    kernel_dtype: str = eqx.field(static=True)
    tolerance: float | None

    def __init__(self, kernel_dtype: Any = "float32", tolerance: float | None = None):
        name = kernel_dtype
        with contextlib.suppress(TypeError):
            name = jnp.dtype(kernel_dtype).name
        if name not in _DTYPES:
            raise ValueError(
                f"`kernel_dtype` must be one of {', '.join(_DTYPES)}, but "
                f"{kernel_dtype!r} was given."
            )
        if tolerance is not None:
            check_finite_positive("tolerance", tolerance)
        self.kernel_dtype = name
        self.tolerance = tolerance

    def aim(self, dtype: jnp.dtype) -> float:
        """The relative linear residual at which refinement stops."""
        least = float(jnp.finfo(dtype).eps) ** (3 / 4)
        return max(1e-10, least) if self.tolerance is None else self.tolerance

    def worst(self, dtype: jnp.dtype) -> float:
        """That at which its result is taken, where rounding stops it before."""
        accepted = float(jnp.finfo(dtype).eps) ** (1 / 2)
        return accepted if self.tolerance is None else self.tolerance


def prepare_refined(
    quadratic: Quadratic, precision: MixedPrecision, memory_budget: int
) -> "Refined":
    """Make a quadratic problem ready for dampings."""
    lin = quadratic.lin
    dtype = jnp.dtype(precision.kernel_dtype)
    num_passes = lin.num_kernel_passes(memory_budget)
    if lin.blocks_fit(memory_budget):
        rows = lin.blocks(memory_budget)
        kernel = _rows.gram(jax.tree.map(lambda x: x.astype(dtype), rows))
        pull_back, push_forward = (
            Partial(_rows.pull_back, rows),
            Partial(_rows.push_forward, rows),
        )
    else:
        kernel = lin.kernel(memory_budget).astype(dtype)
        pull_back, push_forward = lin.pull_back, lin.push_forward
    single = _tree.dtype((dtype, jnp.float32))
    residual, _ = ravel_pytree(lin.outputs)
    return Refined(
        kernel.astype(single),
        residual,
        pull_back,
        push_forward,
        precision,
        quadratic.rest,
        *num_passes,
    )


class Refined(AbstractSubproblem):
    r"""$\delta = -\phi^\top(\phi\phi^\top + \lambda I)^{-1} r$, as `OnOutputs`, with the
    inverse refined."""

    kernel: Float[Array, "m m"]
    residual: Float[Array, " m"]
    pull_back: Callable[[Float[Array, " m"]], PyTree[Array]]
    push_forward: Callable[[PyTree[Array]], Float[Array, " m"]]
    precision: MixedPrecision
    rest: PyTree[Array] | None
    _gradient: PyTree[Array]
    gradient_norm: Scalar
    num_jvps: int = eqx.field(static=True)
    num_vjps: int = eqx.field(static=True)

    def __init__(
        self,
        kernel,
        residual,
        pull_back,
        push_forward,
        precision,
        rest,
        num_jvps,
        num_vjps,
    ):
        self.kernel = kernel
        self.residual = residual
        self.pull_back = pull_back
        self.push_forward = push_forward
        self.precision = precision
        self.rest = rest
        gradient = pull_back(residual)
        self._gradient = gradient if rest is None else _tree.axpy(1, rest, gradient)
        self.gradient_norm = _tree.norm(self._gradient)
        self.num_jvps = num_jvps
        self.num_vjps = num_vjps

    def gradient(self) -> PyTree[Array]:
        return self._gradient

    def curvature_along_gradient(self) -> Scalar:
        pushed = self.push_forward(self._gradient)
        return _tree.dot(pushed, pushed) / self.gradient_norm**2

    def largest_curvature(self) -> Scalar:
        return jnp.max(jnp.diagonal(self.kernel)).astype(self.gradient_norm.dtype)

    def with_residual(self, residual: PyTree[Array]) -> "Refined":
        flat, _ = ravel_pytree(residual)
        passes = self.pull_back, self.push_forward
        return Refined(self.kernel, flat, *passes, self.precision, None, 0, 0)

    def solve(self, filter: Filter) -> Answer:
        damping = jnp.asarray(damping_of(filter), self.residual.dtype)
        pushed = None if self.rest is None else self.push_forward(self.rest)
        return through_outputs(
            lambda vector: self._solve(vector, damping, pushed),
            self.residual,
            self.pull_back,
            damping,
            None if pushed is None else (self.rest, pushed),
        )

    def _solve(self, vector, damping, pushed) -> Solved:
        dtype = vector.dtype
        tolerance, worst = self.precision.aim(dtype), self.precision.worst(dtype)
        if pushed is not None:
            # Of what 1/lambda blows up the most is taken back in the step.
            whole, part, stray, largest = _tree.promoted(
                (
                    _tree.norm(vector),
                    _tree.norm(self.residual),
                    _tree.norm(pushed),
                    self.largest_curvature(),
                )
            )
            size = jnp.fmax(part, stray / largest)
            share = jnp.fmin(size / whole, 1)
            tolerance, worst = tolerance * share, worst * share
        finite = _tree.all_finite((self.kernel, vector, damping))
        factor = self._factor(damping, finite)

        def product(u):
            pushed = self.push_forward(self.pull_back(u))
            return _tree.axpy(damping, u, pushed.astype(u.dtype))

        def precondition(u):
            solved = jax.scipy.linalg.cho_solve((factor, True), u.astype(factor.dtype))
            return solved.astype(u.dtype)

        def operator(fn):
            structure = jax.ShapeDtypeStruct(vector.shape, vector.dtype)
            return lx.FunctionLinearOperator(fn, structure, lx.positive_semidefinite_tag)

        solution = lx.linear_solve(
            operator(product),
            jnp.where(finite, vector, 0),
            ConjugateGradients(tolerance),
            options={"preconditioner": operator(precondition)},
            throw=False,
        )
        left = _tree.norm(_tree.axpy(-1, product(solution.value), vector))
        good = left <= worst * _tree.norm(vector)
        result = lx.RESULTS.where(good, lx.RESULTS.successful, solution.result)
        a = jnp.where(finite, solution.value, jnp.nan)
        return a, solution.stats["num_steps"], optx.RESULTS.promote(result)

    def _factor(self, damping: Scalar, finite: Array) -> Float[Array, "m m"]:
        """Of Cholesky, shifted by as much of the kernel's rounding as it takes."""
        m, dtype = self.residual.size, self.kernel.dtype
        identity = jnp.eye(m, dtype=dtype)
        kernel = jnp.where(finite, self.kernel, identity)
        eps = jnp.finfo(self.precision.kernel_dtype).eps.astype(dtype)
        rounding = eps * jnp.max(jnp.diagonal(kernel))

        def shifted(carry):
            _, shift, num_shifts = carry
            total = damping.astype(dtype) + shift
            factor = jnp.linalg.cholesky(kernel + total * identity)
            return factor, 10 * shift, num_shifts + 1

        def failed(carry):
            factor, _, num_shifts = carry
            return ~jnp.all(jnp.isfinite(factor)) & (num_shifts < _MAX_SHIFTS)

        start = jnp.full_like(kernel, jnp.nan), rounding, jnp.array(0)
        factor, _, _ = jax.lax.while_loop(failed, shifted, start)
        return factor
