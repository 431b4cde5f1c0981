"""Damped problems whose kernel is computed in a lower precision than the step."""

import contextlib
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from jaxtyping import Array, Float, Scalar

from .._common import _tree
from .._common._checks import check_fraction, check_one_of
from .._common._passes import Passes
from .._jacobian import AtHand, Cost
from .._linear_algebra._conjugate_gradients import conjugate_gradients, semidefinite
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ._base import AbstractMethod, Answer
from ._cholesky import Solved, through_outputs


_DTYPES = ("float32", "bfloat16", "float16")
_MAX_SHIFTS = 10


class MixedPrecision(eqx.Module):
    r"""The kernel in a lower precision, the step in the precision of the parameters.

    Forming the kernel and factorising it (in single precision at least) is most of the
    work of a damped step with many outputs. In a lower precision this costs half as much
    on a CPU, and a small fraction on many GPUs. The factorisation then preconditions
    conjugate gradients on $(\phi\phi^\top + \lambda I)a = r$, with products in full
    precision, until the linear residual is at most `tolerance` times $\lVert r\rVert$.
    This takes a few products; the smaller the damping is compared with the kernel's
    rounding, the more it takes.

    **Arguments:**

    - `kernel_dtype`: `"float32"`, `"bfloat16"` or `"float16"` (at most 65,504).
    - `tolerance`: the relative tolerance of the refinement. A run that does not meet it
        ends as a failed linear solve. This can happen with a small damping if the loss
        has a rest, as Huber's has. The default is 1e-10, in single precision
        $\varepsilon^{3/4}$; if rounding stops the refinement earlier, up to
        $\varepsilon^{1/2}$ is accepted.

    **Raises:** `ValueError` for another dtype, or a tolerance that is not positive.

    !!! example

        ```python
        gnlin.DampedGaussNewton(1.0, method=gnlin.methods.MixedPrecision("float32"))
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
        check_one_of("kernel_dtype", name, _DTYPES)
        if tolerance is not None:
            check_fraction("tolerance", tolerance)
        self.kernel_dtype = name
        self.tolerance = tolerance

    def tolerances(self, dtype: jnp.dtype) -> tuple[float, float]:
        """Return the relative linear residual at which refinement stops, and the largest
        one that is accepted if rounding stops it earlier."""
        if self.tolerance is not None:
            return self.tolerance, self.tolerance
        eps = float(jnp.finfo(dtype).eps)
        return max(1e-10, eps ** (3 / 4)), eps ** (1 / 2)


class Refined(AbstractMethod):
    r"""The step of `OnOutputs`, $-\phi^\top(\phi\phi^\top + \lambda I)^{-1} r$, refined
    from a factorisation in a lower precision."""

    method: ClassVar[str] = "mixed-precision"
    problem: Quadratic
    kernel: Float[Array, "m m"]
    precision: MixedPrecision

    def __init__(self, problem, kernel, precision, passes):
        super().__init__(problem, passes)
        self.kernel = kernel
        self.precision = precision

    @classmethod
    def of(cls, problem, cost: Cost, precision: MixedPrecision) -> "Refined":
        dtype = jnp.dtype(precision.kernel_dtype)
        problem = problem.at_hand_if_it_fits()
        jacobian = problem.jacobian
        if cost.fits:
            blocks = [block.astype(dtype) for block in jacobian.blocks()]
            kernel = AtHand.of(jacobian, blocks).gram()
        else:
            kernel = jacobian.gram().astype(dtype)
        kernel = kernel.astype(_tree.dtype((dtype, jnp.float32)))
        return cls(problem, kernel, precision, cost.gram)

    def largest_curvature(self) -> Scalar:
        return jnp.max(jnp.diagonal(self.kernel)).astype(self.gradient_norm.dtype)

    def solve(self, filter: Filter) -> Answer:
        problem = self.problem
        damping = jnp.asarray(self.damping_of(filter), _tree.dtype(problem.residual))
        products = problem.jacobian.a_product()
        pushed, passes = None, Passes()
        if problem.rest is not None:
            pushed = problem.jacobian.push_forward(problem.rest)
            passes = Passes(jvps=products.jvps)
        answer = through_outputs(
            lambda vector: self._solve(vector, damping, pushed), problem, pushed, damping
        )
        # One product for each refinement, and one for the last residual.
        passes += products * (answer.num_inner_steps + 1)
        return eqx.tree_at(lambda a: a.passes, answer, answer.passes + passes)

    def _solve(self, vector, damping, pushed) -> Solved:
        dtype = vector.dtype
        tolerance, worst = self.precision.tolerances(dtype)
        if pushed is not None:
            # In the step, most of the part that is divided by lambda cancels, and so a
            # smaller tolerance is needed.
            whole, part, of_rest, largest = _tree.promoted(
                (
                    _tree.norm(vector),
                    _tree.norm(self.problem.residual),
                    _tree.norm(pushed),
                    self.largest_curvature(),
                )
            )
            size = jnp.fmax(part, of_rest / largest)
            share = jnp.fmin(size / whole, 1)
            tolerance, worst = tolerance * share, worst * share
        finite = _tree.all_finite((self.kernel, vector, damping))
        # The preconditioner and the tolerance do not change the solution, and so are
        # constants to derivatives.
        factor = _tree.fixed(self._factor(damping, finite))
        tolerance = _tree.fixed(tolerance)

        def product(u):
            pushed = self.problem.jacobian.push_forward(
                self.problem.jacobian.pull_back(u)
            )
            return _tree.axpy(damping, u, pushed.astype(u.dtype))

        def precondition(u):
            solved = jax.scipy.linalg.cho_solve((factor, True), u.astype(factor.dtype))
            return solved.astype(u.dtype)

        solution = conjugate_gradients(
            product,
            jnp.where(finite, vector, 0),
            tolerance,
            options={"preconditioner": semidefinite(precondition, vector)},
        )
        left = _tree.norm(_tree.axpy(-1, product(solution.value), vector))
        good = left <= worst * _tree.norm(vector)
        result = lx.RESULTS.where(good, lx.RESULTS.successful, solution.result)
        a = jnp.where(finite, solution.value, jnp.nan)
        return a, solution.stats["num_steps"], optx.RESULTS.promote(result)

    def _factor(self, damping: Scalar, finite: Array) -> Float[Array, "m m"]:
        """Return the Cholesky factor of the damped kernel. If the kernel's rounding made
        it indefinite, add a multiple of that rounding to the diagonal."""
        m, dtype = self.kernel.shape[0], self.kernel.dtype
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
