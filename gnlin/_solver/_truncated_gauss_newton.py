"""Truncated Gauss-Newton: conjugate gradients, stopped early."""

from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, Int, PyTree, Scalar, ScalarLike

from .. import _tree
from .._checks import (
    as_scalar,
    check_between,
    check_finite_nonnegative,
    check_fraction,
    check_period,
    check_settings,
    fraction,
    nan_unless,
    nonnegative,
)
from .._cost import loops_slowly
from .._linearisation import DEFAULT_MEMORY_BUDGET, Linearisation
from .._objective import AbstractObjective
from .._schedules import EisenstatWalker, Schedule, value_at
from .._subproblem import (
    check_form,
    Form,
    MatrixFree,
    Parameters,
    ProxLinear,
)
from ..preconditioners import AbstractPreconditioner
from ._base import AbstractGaussNewton, Evaluate, Search, step_if_finite, Update


# A Jacobian of up to this many bytes stays in the nearest cache: products with it cost
# less than passes through any function.
_SMALL_JACOBIAN = 2**16


class _Memory(eqx.Module):
    tolerance: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    step: PyTree[Array] | None  # the last, for a warm start


class TruncatedGaussNewton(AbstractGaussNewton):
    r"""Gauss-Newton whose linearised problem is solved to a tolerance: conjugate
    gradients stop at the first $\delta$ with

    $$\lVert\phi^\top\phi\,\delta + \phi^\top r + \lambda\delta\rVert
    \le \beta\,\lVert\phi^\top r\rVert$$

    in the 2-norm.

    **Arguments:**

    - `tolerance`: $\beta$, strictly between 0 and 1: a number, a traced scalar, a
        schedule (a function of the outer step), or [`gnlin.EisenstatWalker`][]. One that
        the precision does not allow is met as far as it does.
    - `damping`: $\lambda \ge 0$, likewise a number, a traced scalar or a schedule.
    - `rtol`, `atol`: it has converged when a step changes each parameter `y` by less
        than `atol + rtol * |y|`, and the residuals, in `norm`, likewise.
    - `norm`: `optimistix.max_norm` by default.
    - `form`, `search`: as in [`gnlin.GaussNewton`][]. In the prox-linear form the
        loss on the linearised model is minimised by Newton's method with conjugate
        gradients, until its gradient is $\beta$ times what it was.
    - `warm_start`: begin each linearised problem at this part of the last step, between
        0 and 1 (Martens, 2010). It costs a product each way, and is for small
        `max_inner_steps`: where subproblems are solved to a tolerance it mostly does not
        pay.
    - `preconditioner`: of [`gnlin.preconditioners`][], for the quadratic form.
    - `max_inner_steps`: the most iterations at one linearisation (of Newton's method, in
        the prox-linear form); `None` for ten times the number of parameters (for 100).
    - `method`: `"matrix-free"` multiplies by Jacobian-vector and vector-Jacobian
        products, `"dense"` by the Jacobian itself, and `"auto"` chooses: dense where
        that is a small matrix.
    - `memory_budget`: bytes that the Jacobian may take.

    !!! example

        ```python
        gnlin.TruncatedGaussNewton(tolerance=0.1)
        gnlin.TruncatedGaussNewton(tolerance=gnlin.EisenstatWalker())
        ```

    ??? cite "Reference"

        R. S. Dembo, S. C. Eisenstat and T. Steihaug, *Inexact Newton methods*, SIAM J.
        Numer. Anal. 19 (1982).

        J. Martens, *Deep learning via Hessian-free optimization*, ICML (2010).
    """

    tolerance: ScalarLike | Schedule | EisenstatWalker
    damping: ScalarLike | Schedule
    rtol: float
    atol: float
    norm: Callable[[PyTree], Scalar]
    form: Form
    search: Search
    warm_start: float
    preconditioner: AbstractPreconditioner | None
    max_inner_steps: int | None
    method: Literal["auto", "dense", "matrix-free"]
    memory_budget: int

    def __init__(
        self,
        tolerance: ScalarLike | Schedule | EisenstatWalker,
        damping: ScalarLike | Schedule = 0.0,
        rtol: float = 1e-9,
        atol: float = 1e-12,
        norm: Callable[[PyTree], Scalar] = optx.max_norm,
        *,
        form: Form = "quadratic",
        search: Search = "auto",
        warm_start: float = 0.0,
        preconditioner: AbstractPreconditioner | None = None,
        max_inner_steps: int | None = None,
        method: Literal["auto", "dense", "matrix-free"] = "auto",
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ):
        if not isinstance(tolerance, EisenstatWalker):
            check_fraction("tolerance", tolerance)
        check_finite_nonnegative("damping", damping)
        if max_inner_steps is not None:
            check_period("max_inner_steps", max_inner_steps)
        if method not in ("auto", "dense", "matrix-free"):
            raise ValueError(
                '`method` must be "auto", "dense" or "matrix-free", but '
                f"{method!r} was given; to solve exactly use `gnlin.DampedGaussNewton`."
            )
        self.tolerance = as_scalar(tolerance)
        self.damping = as_scalar(damping)
        check_settings(rtol, atol, norm, memory_budget, search)
        self.rtol = rtol
        self.atol = atol
        self.norm = norm
        check_form(form, method)
        check_between("warm_start", warm_start, 0.0, 1.0)
        if not isinstance(preconditioner, AbstractPreconditioner | None):
            raise ValueError(
                "`preconditioner` must be one of `gnlin.preconditioners`, but "
                f"{preconditioner!r} was given."
            )
        if preconditioner is not None and form == "prox-linear":
            raise ValueError(
                'The "prox-linear" form has no preconditioner: leave `preconditioner` '
                'out, or use `form="quadratic"`.'
            )
        self.form = form
        self.search = search
        self.warm_start = warm_start
        self.preconditioner = preconditioner
        self.max_inner_steps = max_inner_steps
        self.method = method
        self.memory_budget = memory_budget

    def first_memory(self, y: PyTree[Array], dtype: jnp.dtype) -> _Memory:
        step = _tree.zeros_like(y) if self.warm_start > 0 else None
        return _Memory(jnp.zeros((), dtype), jnp.zeros((), dtype), step)

    def update(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        memory: _Memory,
        num_steps: Int[Array, ""],
    ) -> Update:
        num_jvps, num_vjps, given = 0, 0, lin
        dense = self.method == "dense" or (
            self.method == "auto" and self._dense_is_cheaper(lin)
        )
        if dense:
            num_jvps, num_vjps = lin.num_row_passes()
            lin = lin.materialise(self.memory_budget)
        options = {}
        damping = value_at(self.damping, num_steps, nonnegative)
        if self.form == "prox-linear" and not objective.is_quadratic:
            subproblem = ProxLinear(objective, lin, Parameters(lin))
        else:
            quadratic = objective.expand(lin)
            subproblem = MatrixFree(quadratic.lin, quadratic.rest)
            if self.preconditioner is not None:
                # Of the linearisation as it came, whose examples are known
                of_examples = objective.expand(given).lin
                inverse = self.preconditioner.inverse(of_examples, damping)
                options["preconditioner"] = inverse
                more_jvps, more_vjps = self.preconditioner.num_passes(of_examples)
                num_jvps, num_vjps = num_jvps + more_jvps, num_vjps + more_vjps
        norm = subproblem.gradient_norm.astype(memory.gradient_norm.dtype)
        tolerance = self._tolerance(memory, norm, num_steps)
        damping = nan_unless(~jnp.isnan(tolerance), damping)
        start = None
        if memory.step is not None:
            start = _tree.scale(self.warm_start, memory.step)
        answer = subproblem.to_tolerance(
            tolerance, damping, self.max_inner_steps, start, **options
        )
        if dense:  # products with a matrix are no passes through the function
            num_vjps -= 1
        else:
            num_jvps, num_vjps = num_jvps + answer.num_jvps, num_vjps + answer.num_vjps
        answer = eqx.tree_at(
            lambda a: (a.num_jvps, a.num_vjps), answer, (num_jvps, num_vjps)
        )
        update = step_if_finite(
            self,
            objective,
            lin,
            evaluate,
            subproblem,
            answer,
            search=self.search,
            memory=_Memory(tolerance, norm, None),
            damping=damping,
        )
        if memory.step is None:
            return update
        step = jax.tree.map(jnp.subtract, update.y, lin.point)
        memory = _Memory(tolerance, norm, step)
        return eqx.tree_at(lambda u: u.memory, update, memory)

    def _dense_is_cheaper(self, lin: Linearisation) -> bool:
        if not lin.blocks_fit(self.memory_budget):
            return False
        return lin.num_bytes() <= _SMALL_JACOBIAN or loops_slowly(lin.jvp, lin.point)

    def _tolerance(
        self, memory: _Memory, gradient_norm: Scalar, num_steps: Int[Array, ""]
    ) -> Float[Array, ""]:
        dtype = memory.tolerance.dtype
        if isinstance(self.tolerance, EisenstatWalker):
            later = self.tolerance.next_tolerance(
                memory.tolerance, gradient_norm, memory.gradient_norm
            )
            first = jnp.asarray(self.tolerance.initial, dtype)
            return jnp.where(num_steps == 0, first, later)
        return jnp.asarray(value_at(self.tolerance, num_steps, fraction), dtype)
