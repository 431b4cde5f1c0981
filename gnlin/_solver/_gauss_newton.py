"""Gauss-Newton, and the same with any other filter."""

from collections.abc import Callable

import optimistix as optx
from jaxtyping import Array, Int, PyTree, Scalar, ScalarLike

from .._checks import (
    as_scalar,
    check_nonnegative,
    check_settings,
    nan_unless,
    nonnegative,
)
from .._linearisation import DEFAULT_MEMORY_BUDGET, Linearisation
from .._objective import AbstractObjective
from .._spectrum import Filter
from .._subproblem import (
    check_form,
    check_method,
    Form,
    Method,
    prepare_form,
)
from ..filters import PseudoInverse, Tikhonov
from ._base import AbstractGaussNewton, Evaluate, Search, step_if_finite, Update


class GaussNewton(AbstractGaussNewton):
    r"""Gauss-Newton: each linearised problem is solved exactly.

    Where the Jacobian is rank-deficient, or has fewer rows than columns, the step is the
    minimum-norm one, $\delta = -\phi^+ r$. It converges fast near a solution with small
    residuals; far from one, [`gnlin.LevenbergMarquardt`][] is the safe choice.

    **Arguments:**

    - `rtol`, `atol`: it has converged when a step changes each parameter `y` by less
        than `atol + rtol * |y|`, and the residuals, in `norm`, likewise.
    - `norm`: `optimistix.max_norm` by default.
    - `rcond`: singular values at or below `rcond` times the largest count as zero;
        `None` for those that rounding cannot tell from zero.
    - `form`: of a loss that is not squared error: `"quadratic"`, expanded to second order
        (generalised Gauss-Newton), or `"prox-linear"`, the loss itself on the linearised
        model.
    - `search`: how much of a step to take, such as `optimistix.BacktrackingArmijo()`;
        `None` for all of it. `"auto"` backtracks where nothing else checks a step: with a
        loss that is not squared error, and on mini-batches, where the next batch judges
        a step, too.
    - `method`: how a step is computed: `"auto"`, `"svd"`, `"eigh"` or `"matrix-free"`.
    - `memory_budget`: bytes that the largest matrix may take.

    !!! example

        ```python
        solution = optx.least_squares(residuals, gnlin.GaussNewton(), y0, args)
        ```

    ??? cite "Reference"

        J. Nocedal and S. J. Wright, *Numerical Optimization*, section 10.3 (2006).
    """

    rtol: float
    atol: float
    norm: Callable[[PyTree], Scalar]
    rcond: ScalarLike | None
    form: Form
    search: Search
    method: Method
    memory_budget: int

    def __init__(
        self,
        rtol: float = 1e-9,
        atol: float = 1e-12,
        norm: Callable[[PyTree], Scalar] = optx.max_norm,
        *,
        rcond: ScalarLike | None = None,
        form: Form = "quadratic",
        search: Search = "auto",
        method: Method = "auto",
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ):
        if rcond is not None:
            check_nonnegative("rcond", rcond)
        check_method(method, damped=False)
        check_form(form, method)
        check_settings(rtol, atol, norm, memory_budget, search)
        self.rtol = rtol
        self.atol = atol
        self.norm = norm
        self.rcond = as_scalar(rcond)
        self.form = form
        self.search = search
        self.method = method
        self.memory_budget = memory_budget

    def update(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        memory: PyTree[Array],
        num_steps: Int[Array, ""],
    ) -> Update:
        subproblem = prepare_form(
            self.form,
            objective,
            lin,
            self.method,
            self.memory_budget,
            damped=False,
            reuse=True,
        )
        answer = subproblem.solve(PseudoInverse(self.rcond))
        sound = nonnegative(0.0 if self.rcond is None else self.rcond)
        return step_if_finite(
            self,
            objective,
            lin,
            evaluate,
            subproblem,
            answer,
            search=self.search,
            damping=nan_unless(sound, 0.0),
        )


class FilteredGaussNewton(AbstractGaussNewton):
    r"""Gauss-Newton with a spectral filter of your choice:
    $\delta = -\phi^\top U g(w) U^\top r$.

    All solvers of quadratic linearised problems are of this form, each with a filter of
    its own; see `gnlin.filters`.

    **Arguments:**

    - `filter`: any function of the kernel's eigenvalues, such as
        [`gnlin.filters.GradientFlow`][]`(time)`.
    - the others: as in [`gnlin.GaussNewton`][].

    !!! example

        ```python
        solver = gnlin.FilteredGaussNewton(gnlin.filters.GradientFlow(time=100.0))
        ```
    """

    filter: Filter
    rtol: float
    atol: float
    norm: Callable[[PyTree], Scalar]
    form: Form
    search: Search
    method: Method
    memory_budget: int

    def __init__(
        self,
        filter: Filter,
        rtol: float = 1e-9,
        atol: float = 1e-12,
        norm: Callable[[PyTree], Scalar] = optx.max_norm,
        *,
        form: Form = "quadratic",
        search: Search = "auto",
        method: Method = "auto",
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ):
        if not callable(filter):
            raise ValueError(
                "`filter` must be a function of the eigenvalues, such as "
                f"`gnlin.filters.Tikhonov(1.0)`, but {filter!r} was given."
            )
        check_method(method, damped=isinstance(filter, Tikhonov))
        check_form(form, method)
        self.filter = filter
        self.form = form
        self.search = search
        check_settings(rtol, atol, norm, memory_budget, search)
        self.rtol = rtol
        self.atol = atol
        self.norm = norm
        self.method = method
        self.memory_budget = memory_budget

    def update(
        self,
        objective: AbstractObjective,
        lin: Linearisation,
        evaluate: Evaluate,
        memory: PyTree[Array],
        num_steps: Int[Array, ""],
    ) -> Update:
        damped = not isinstance(self.filter, PseudoInverse)
        subproblem = prepare_form(
            self.form,
            objective,
            lin,
            self.method,
            self.memory_budget,
            damped=damped,
            reuse=True,
        )
        answer = subproblem.solve(self.filter)
        return step_if_finite(
            self, objective, lin, evaluate, subproblem, answer, search=self.search
        )
