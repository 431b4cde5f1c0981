"""Gauss-Newton, with the pseudo-inverse or with any other spectral filter."""

from collections.abc import Callable

import equinox as eqx
import lineax as lx
import optimistix as optx
from jaxtyping import Array, Int, PyTree, Scalar, ScalarLike

from .._common._checks import as_scalar, check_callable, check_nonnegative
from .._linearisation._spectrum import Filter
from .._subproblem import check_method
from .._subproblem._lineax import needs_full_rank
from ..filters import PseudoInverse, Tikhonov
from ._stepping import AbstractFilteredGaussNewton


class GaussNewton(AbstractFilteredGaussNewton):
    r"""Gauss-Newton, which solves each linearised problem exactly.

    If the Jacobian is rank-deficient or has fewer rows than columns, the step is the
    minimum-norm solution, $\delta = -\phi^+ r$. The method converges fast near a solution
    with small residuals; far from one, [`gnlin.LevenbergMarquardt`][] is the safe choice.

    **Arguments:**

    - `rcond`: singular values at or below `rcond` times the largest count as zero. With
        `None` those indistinguishable from zero at working precision do.
    - `form`: the linearised problem for a loss other than squared error. `"quadratic"`
        expands the loss to second order (generalised Gauss-Newton); `"prox-linear"` keeps
        the loss, and linearises the model only.
    - `search`: a line search, such as `optimistix.BacktrackingArmijo()` or a
        [`gnlin.methods.GridSearch`][]; `None` takes the whole step. `"auto"` backtracks
        for a loss other than squared error and on mini-batches, where in addition the
        next batch judges each step.
    - `method`: the way to compute a step: `"auto"`, `"svd"`, `"eigh"`, `"matrix-free"`,
        or any linear solver of lineax, such as `lineax.QR()`. With bounds, or if the
        Jacobian is rank-deficient, it has to be one for singular problems, such as
        `lineax.SVD()`. For sparse residuals in double precision, `"auto"` first tries a
        sparse factorisation or a Schur complement. If the Jacobian is rank-deficient, or
        nearly so, each step then takes a dense decomposition, and conjugate gradients if
        that does not fit into the memory budget: use [`gnlin.LevenbergMarquardt`][]`()`
        for large problems of this kind.
    - `rtol`, `atol`, `norm`, `memory_budget`, `bounds`, `retraction`, `verbose`: as in
        [`gnlin.authoring.AbstractGaussNewton`][].

    !!! example

        ```python
        solution = optx.least_squares(residuals, gnlin.GaussNewton(), y0, args)
        ```

    ??? cite "Reference"

        J. Nocedal and S. J. Wright, *Numerical Optimization*, section 10.3 (2006).
    """

    rtol: float = 1e-9
    atol: float = 1e-12
    norm: Callable[[PyTree], Scalar] = optx.max_norm
    rcond: ScalarLike | None = eqx.field(default=None, converter=as_scalar, kw_only=True)

    def __check_init__(self):
        if self.rcond is not None:
            check_nonnegative("rcond", self.rcond)
            if isinstance(self.method, lx.AbstractLinearSolver):
                raise ValueError(
                    "`rcond` cannot be used with a solver of lineax: pass it to that "
                    "solver, as in `method=lineax.SVD(rcond=1e-10)`."
                )
        check_method(self.method, damped=False)
        if self.bounds is not None and needs_full_rank(self.method):
            raise ValueError(
                "The column of a parameter at a bound is zero, but `method="
                f"{self.method!r}` needs a Jacobian of full rank: use `lineax.SVD()`, or "
                "leave `method` out."
            )

    def filter_at(self, num_steps: Int[Array, ""]) -> Filter:
        return PseudoInverse(self.rcond)


class FilteredGaussNewton(AbstractFilteredGaussNewton):
    r"""Gauss-Newton with a spectral filter of your choice:
    $\delta = -\phi^\top U g(w) U^\top r$.

    Every solver of quadratic linearised problems has this form; see `gnlin.filters`.

    **Arguments:**

    - `filter`: any function of the kernel's eigenvalues, such as
        [`gnlin.filters.GradientFlow`][]`(time)`.
    - The others are as in [`gnlin.GaussNewton`][].

    !!! example

        ```python
        solver = gnlin.methods.FilteredGaussNewton(gnlin.filters.GradientFlow(time=100.0))
        ```
    """

    filter: Filter

    def __check_init__(self):
        example = "gnlin.filters.Tikhonov(1.0)"
        check_callable("filter", self.filter, "a function of the eigenvalues", example)
        check_method(self.method, damped=isinstance(self.filter, Tikhonov))

    def filter_at(self, num_steps: Int[Array, ""]) -> Filter:
        return self.filter
