"""Truncated Gauss-Newton: conjugate gradients, stopped early."""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, Scalar, ScalarLike

from .._common._checks import (
    as_scalar,
    check_count,
    check_finite_nonnegative,
    check_fraction,
    check_one_of,
    fraction,
    is_traced,
    nan_unless,
    nonnegative,
)
from .._linearisation._linearisation import Linearisation
from .._linearisation._objective import AbstractObjective
from .._subproblem import AbstractIteration, by_products, problem_of
from ..preconditioners import AbstractPreconditioner
from ._schedules import EisenstatWalker, Schedule, value_at
from ._state import Update
from ._stepping import AbstractSearchedGaussNewton, take_step


class _Memory(eqx.Module):
    tolerance: Float[Array, ""]
    gradient_norm: Float[Array, ""]


class TruncatedGaussNewton(AbstractSearchedGaussNewton):
    r"""Gauss-Newton that solves the linearised problem to a tolerance: conjugate
    gradients stop at the first $\delta$ with

    $$\lVert\phi^\top\phi\,\delta + \phi^\top r + \lambda\delta\rVert
    \le \beta\,\lVert\phi^\top r\rVert$$

    in the 2-norm.

    **Arguments:**

    - `tolerance`: $\beta$, strictly between 0 and 1: a number, a traced scalar, a
        schedule (a function of the outer step), or [`gnlin.methods.EisenstatWalker`][].
        Conjugate gradients also stop when rounding keeps them from getting closer.
    - `damping`: $\lambda \ge 0$, also a number, a traced scalar or a schedule.
    - `form`, `search`: as in [`gnlin.GaussNewton`][]. In the prox-linear form Newton's
        method with conjugate gradients minimises the loss of the linearised model, until
        its gradient is at most $\beta$ times the first.
    - `preconditioner`: one of [`gnlin.preconditioners`][], for the quadratic form.
    - `max_inner_steps`: the most iterations at one linearisation, by default ten times
        the number of parameters. In the prox-linear form it limits Newton's method, by
        default to 100.
    - `method`: `"matrix-free"` computes Jacobian-vector and vector-Jacobian products,
        `"dense"` multiplies by the Jacobian in memory, and `"auto"` uses `"dense"` if the
        Jacobian is small.
    - `rtol`, `atol`, `norm`, `memory_budget`, `bounds`, `retraction`, `verbose`: as in
        [`gnlin.authoring.AbstractGaussNewton`][].

    !!! example

        ```python
        gnlin.TruncatedGaussNewton(tolerance=0.1)
        gnlin.TruncatedGaussNewton(tolerance=gnlin.methods.EisenstatWalker())
        ```

    ??? cite "Reference"

        R. S. Dembo, S. C. Eisenstat and T. Steihaug, *Inexact Newton methods*, SIAM J.
        Numer. Anal. 19 (1982).
    """

    tolerance: ScalarLike | Schedule | EisenstatWalker = eqx.field(converter=as_scalar)
    damping: ScalarLike | Schedule = eqx.field(default=0.0, converter=as_scalar)
    preconditioner: AbstractPreconditioner | None = eqx.field(default=None, kw_only=True)
    max_inner_steps: int | None = eqx.field(default=None, kw_only=True)
    method: Literal["auto", "dense", "matrix-free"] = eqx.field(
        default="auto", kw_only=True
    )

    def __check_init__(self):
        if not (isinstance(self.tolerance, EisenstatWalker) or callable(self.tolerance)):
            check_fraction("tolerance", self.tolerance)
        if not callable(self.damping):
            check_finite_nonnegative("damping", self.damping)
        if not is_traced(self.max_inner_steps) and self.max_inner_steps is not None:
            check_count("max_inner_steps", self.max_inner_steps)
        hint = "; to solve exactly use `gnlin.DampedGaussNewton`"
        check_one_of("method", self.method, ("auto", "dense", "matrix-free"), hint)
        if not isinstance(self.preconditioner, AbstractPreconditioner | None):
            raise ValueError(
                "`preconditioner` must be one of `gnlin.preconditioners`, but "
                f"{self.preconditioner!r} was given."
            )
        if self.preconditioner is not None and self.form == "prox-linear":
            raise ValueError(
                'The "prox-linear" form has no preconditioner: leave `preconditioner` '
                'out, or use `form="quadratic"`.'
            )

    def first_memory(self, y: PyTree[Array], dtype: jnp.dtype) -> _Memory:
        return _Memory(jnp.zeros((), dtype), jnp.zeros((), dtype))

    def update(self, objective, lin, evaluate, memory, num_steps) -> Update:
        damping = value_at(self.damping, num_steps, nonnegative)
        subproblem = self._subproblem(objective, lin)
        norm = subproblem.gradient_norm.astype(memory.gradient_norm.dtype)
        tolerance = self._tolerance(memory, norm, num_steps)
        damping = nan_unless(~jnp.isnan(tolerance), damping)
        settings = tolerance, damping, self.max_inner_steps
        answer = subproblem.to_tolerance(*settings)

        def again(lin: Linearisation) -> PyTree[Array]:
            return self._subproblem(objective, lin).to_tolerance(*settings).step

        given = objective, lin, evaluate, subproblem, answer
        new = _Memory(tolerance, norm)
        return take_step(
            *given, search=self.search, memory=new, damping=damping, again=again
        )

    def _subproblem(
        self, objective: AbstractObjective, lin: Linearisation
    ) -> AbstractIteration:
        problem = problem_of(self.form, objective, lin)
        cost = problem.jacobian.cost()
        if self.method == "dense" or (self.method == "auto" and cost.is_cheaper_at_hand):
            subproblem = by_products(problem.at_hand(), self.preconditioner)
            passes = subproblem.passes + cost.rows
            return eqx.tree_at(lambda s: s.passes, subproblem, passes)
        return by_products(problem, self.preconditioner)

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
