"""Damped Gauss-Newton: the damping is set, not adapted."""

from collections.abc import Callable

import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Int, PyTree, Scalar, ScalarLike

from .._checks import (
    as_scalar,
    check_finite_nonnegative,
    check_settings,
    nonnegative,
)
from .._linearisation import DEFAULT_MEMORY_BUDGET, Linearisation
from .._objective import AbstractObjective
from .._schedules import Schedule, value_at
from .._subproblem import (
    check_form,
    check_method,
    Form,
    Method,
    MixedPrecision,
    prepare_once,
    prepare_refined,
)
from ..filters import Tikhonov
from ._base import AbstractGaussNewton, Evaluate, Search, step_if_finite, Update
from ._scaling import check_scaling, first_scale, prepare_scaled, Scaling


class DampedGaussNewton(AbstractGaussNewton):
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
    - `mixed_precision`: a [`gnlin.MixedPrecision`][], for a kernel in lower precision.
    - `method`: how a step is computed: `"auto"`, `"svd"`, `"eigh"`, `"kernel"` (Cholesky
        on the m x m side), `"curvature"` (on the p x p side) or `"matrix-free"`
        (conjugate gradients).
    - `memory_budget`: bytes that the largest matrix may take.

    !!! example

        ```python
        solution = gnlin.solve(model, (x, y), gnlin.DampedGaussNewton(damping=1.0))
        solution = gnlin.solve(
            model, (x, y), gnlin.DampedGaussNewton(damping=lambda step: 10 * 0.9**step)
        )
        ```
    """

    damping: ScalarLike | Schedule
    rtol: float
    atol: float
    norm: Callable[[PyTree], Scalar]
    scaling: Scaling
    form: Form
    search: Search
    mixed_precision: MixedPrecision | None
    method: Method
    memory_budget: int

    def __init__(
        self,
        damping: ScalarLike | Schedule,
        rtol: float = 1e-9,
        atol: float = 1e-12,
        norm: Callable[[PyTree], Scalar] = optx.max_norm,
        *,
        scaling: Scaling = "identity",
        form: Form = "quadratic",
        search: Search = "auto",
        mixed_precision: MixedPrecision | None = None,
        method: Method = "auto",
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ):
        check_finite_nonnegative("damping", damping)
        check_method(method)
        check_form(form, method)
        check_scaling(scaling, method, form)
        if not isinstance(mixed_precision, MixedPrecision | None):
            raise ValueError(
                "`mixed_precision` must be a `gnlin.MixedPrecision`, but "
                f"{mixed_precision!r} was given."
            )
        plain = scaling == "identity" and form == "quadratic"
        if mixed_precision is not None and not (plain and method in ("auto", "kernel")):
            raise ValueError(
                "`mixed_precision` is of the kernel of a quadratic problem: use "
                '`method="kernel"` or "auto", `form="quadratic"` and '
                '`scaling="identity"` with it.'
            )
        self.damping = as_scalar(damping)
        check_settings(rtol, atol, norm, memory_budget, search)
        self.rtol = rtol
        self.atol = atol
        self.norm = norm
        self.scaling = scaling
        self.form = form
        self.search = search
        self.mixed_precision = mixed_precision
        self.method = method
        self.memory_budget = memory_budget

    def first_memory(self, y: PyTree[Array], dtype: jnp.dtype) -> PyTree[Array]:
        return first_scale(self.scaling, y)

    def update(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        memory: PyTree[Array],
        num_steps: Int[Array, ""],
    ) -> Update:
        damping = value_at(self.damping, num_steps, nonnegative)
        norms, budget = None, self.memory_budget
        quadratic = self.form == "quadratic" or objective.is_quadratic
        if self.mixed_precision is not None:
            subproblem = prepare_refined(
                objective.expand(lin), self.mixed_precision, budget
            )
        elif quadratic and self.scaling == "identity":
            subproblem = prepare_once(objective.expand(lin), self.method, budget)
        else:
            norms, subproblem = prepare_scaled(
                self.scaling,
                memory,
                self.form,
                objective,
                lin,
                self.method,
                budget,
                damped=True,
                reuse=False,
            )
        answer = subproblem.solve(Tikhonov(damping))
        return step_if_finite(
            self,
            objective,
            lin,
            evaluate,
            subproblem,
            answer,
            search=self.search,
            memory=norms,
            damping=damping,
        )
