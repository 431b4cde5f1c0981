"""Damped Gauss-Newton."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree, ScalarLike

from .._checks import as_scalar, check_finite_nonnegative, nonnegative
from .._problem import Quadratic
from .._schedules import Schedule, value_at
from .._spectrum import Filter
from .._subproblem import AbstractSubproblem, check_method, ProxLinear
from ..filters import Tikhonov
from ._scaling import check_scaling, choose_scaled, first_scale, Scaling
from ._stepping import AbstractFilteredGaussNewton


class DampedGaussNewton(AbstractFilteredGaussNewton):
    r"""Gauss-Newton on the damped problem: $\delta$ minimises
    $\frac12\lVert\phi\delta + r\rVert^2 + \frac\lambda2\lVert\delta\rVert^2$.

    For a damping that adapts use [`gnlin.LevenbergMarquardt`][].

    **Arguments:**

    - `damping`: $\lambda \ge 0$, in units of the curvature's eigenvalues: a number, a
        traced scalar, or a schedule, a function of the outer step (0, 1, ...), such as
        optax's.
    - `rtol`, `atol`: it has converged when a step changes each parameter `y` by less
        than `atol + rtol * |y|`, and the residuals, in `norm`, likewise.
    - `norm`: `optimistix.max_norm` by default.
    - `scaling`: `"identity"` damps $\lVert\delta\rVert^2$; `"marquardt"` and `"more"`
        damp $\lVert D\delta\rVert^2$ with the norms of the Jacobian's columns (the
        present ones, or the largest lately: earlier ones fade by 0.8 an outer step), so
        that the parameters' units do not matter.
    - `form`, `search`: as in [`gnlin.GaussNewton`][]. In the prox-linear form $\delta$
        minimises $L(f + \phi\delta) + \frac\lambda2\lVert\delta\rVert^2$, and `scaling`
        must be `"identity"`.
    - `method`: how a step is computed: `"auto"`, `"svd"`, `"eigh"`, `"kernel"` (Cholesky
        on the m x m side), `"curvature"` (on the p x p side), `"matrix-free"`
        (conjugate gradients), `"products-first"` (those while they are cheap, else by
        Cholesky); a [`gnlin.MixedPrecision`][], for a kernel in lower precision; or any
        solver of lineax, such as `lineax.QR()`.
    - `memory_budget`: bytes that the largest matrix may take.

    !!! example

        ```python
        solution = gnlin.solve(model, (x, y), gnlin.DampedGaussNewton(damping=1.0))
        solution = gnlin.solve(
            model, (x, y), gnlin.DampedGaussNewton(damping=lambda step: 10 * 0.9**step)
        )
        ```
    """

    damping: ScalarLike | Schedule = eqx.field(converter=as_scalar)
    scaling: Scaling = eqx.field(default="identity", kw_only=True)

    def __check_init__(self):
        check_finite_nonnegative("damping", self.damping)
        check_method(self.method)
        check_scaling(self.scaling, self.method, self.form)

    def first_memory(self, y: PyTree[Array], dtype: jnp.dtype) -> PyTree[Array]:
        return first_scale(self.scaling, y)

    def filter_at(self, num_steps: Int[Array, ""]) -> Filter:
        return Tikhonov(value_at(self.damping, num_steps, nonnegative))

    def prepared(
        self, problem: Quadratic | ProxLinear, filter: Filter, memory: PyTree[Array]
    ) -> tuple[AbstractSubproblem, PyTree[Array]]:
        scaling = self.scaling, memory
        norms, subproblem = choose_scaled(scaling, problem, filter, 1, self.method)
        return subproblem, norms
