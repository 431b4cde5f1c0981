"""Damped Gauss-Newton."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, ScalarLike

from .._common import _tree
from .._common._checks import (
    as_scalar,
    check_finite_nonnegative,
    check_less_than_one,
    is_zero,
    nan_unless,
    nonnegative,
    unless_zero,
)
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from .._subproblem import AbstractSubproblem, check_method, ProxLinear, pulled, way_of
from ..filters import Tikhonov
from ._scaling import check_scaling, first_scale, Measured, Scaling
from ._schedules import returned_at, Schedule
from ._state import Update
from ._stepping import AbstractFilteredGaussNewton, step_taken


class _Memory(eqx.Module):
    scale: Float[Array, " p"] | None
    last: PyTree[Array] | None  # the last step; None without momentum


class DampedGaussNewton(AbstractFilteredGaussNewton):
    r"""Gauss-Newton with damping: $\delta$ minimises
    $\frac12\lVert\phi\delta + r\rVert^2 + \frac\lambda2\lVert\delta\rVert^2$.

    For a damping that adapts use [`gnlin.LevenbergMarquardt`][].

    **Arguments:**

    - `damping`: $\lambda \ge 0$, in units of the curvature's eigenvalues: a number, a
        traced scalar, or a schedule. A schedule is a function of the outer step (0, 1,
        ...), such as optax's.
    - `scaling`: `"identity"` damps $\lVert\delta\rVert^2$. The others damp
        $\lVert D\delta\rVert^2$ with a diagonal D: `"marquardt"` uses the norms of the
        Jacobian's columns; `"more"` their maxima, which decay by 0.8 per outer step
        (Moré, 1978); `"root"` the square roots of the norms divided by the largest norm,
        or, for columns below a millionth of the largest, a thousand times that quotient.
        These fall by at most 3 % in an outer step.
        These three need the dense Jacobian. With `"marquardt"` and `"more"` the
        parameters' units do not matter.
    - `momentum`: $\mu$ below 1, as in SPRING: the damping is
        $\frac\lambda2\lVert\delta - \mu\delta_{k-1}\rVert^2$, so that the step follows
        the last one in directions that one batch or draw of points does not determine.
    - `form`, `search`: as in [`gnlin.GaussNewton`][]. In the prox-linear form $\delta$
        minimises $L(f + \phi\delta) + \frac\lambda2\lVert\delta\rVert^2$, and `scaling`
        must be `"identity"`.
    - `method`: the way to compute a step: `"auto"`, `"svd"`, `"eigh"`, `"kernel"`
        (Cholesky on the m x m side), `"curvature"` (on the p x p side),
        `"cholesky-qr"` (the same in two stages, which resolve small singular values),
        `"schur"` (the curvature with an array of parameters eliminated), `"sparse"` (a
        sparse factorisation), `"matrix-free"` (conjugate gradients), or
        `"products-first"` (conjugate gradients while they are cheap, else Cholesky). It
        may also be a [`gnlin.methods.NystromKernel`][] for a kernel of lower rank, one of
        [`gnlin.preconditioners`][] for conjugate gradients, or any linear solver of
        lineax, such as `lineax.QR()`.
    - `rtol`, `atol`, `norm`, `memory_budget`, `bounds`, `retraction`, `verbose`: as in
        [`gnlin.authoring.AbstractGaussNewton`][].

    !!! example

        ```python
        solution = gnlin.solve(model, (x, y), gnlin.DampedGaussNewton(damping=1.0))
        solution = gnlin.solve(
            model, (x, y), gnlin.DampedGaussNewton(damping=lambda step: 10 * 0.9**step)
        )
        ```

    ??? cite "Reference"

        For the momentum: G. Goldshlager, N. Abrahamsen and L. Lin, *A Kaczmarz-inspired
        approach to accelerate the optimization of neural network wavefunctions*, J.
        Comput. Phys. 516 (2024), equation 27.
    """

    damping: ScalarLike | Schedule = eqx.field(converter=unless_zero)
    scaling: Scaling = eqx.field(default="identity", kw_only=True)
    momentum: ScalarLike | None = eqx.field(
        default=None, converter=as_scalar, kw_only=True
    )

    def __check_init__(self):
        if not callable(self.damping):
            check_finite_nonnegative("damping", self.damping)
        check_method(self.method)
        check_scaling(self.scaling, self.method, self.form)
        if self.momentum is not None:
            check_less_than_one("momentum", self.momentum)
            if self.form == "prox-linear":
                raise ValueError(
                    'The "prox-linear" form has no `momentum`: leave it out, or use '
                    '`form="quadratic"`.'
                )

    def first_memory(self, y: PyTree[Array], dtype: jnp.dtype) -> _Memory:
        last = None if self.momentum is None else _tree.zeros_like(y)
        return _Memory(first_scale(self.scaling, y), last)

    def filter_at(self, num_steps: Int[Array, ""]) -> Filter:
        damping = returned_at(self.damping, num_steps)
        if not is_zero(damping):
            damping = nan_unless(nonnegative(damping), damping)
        return Tikhonov(damping)

    def prepared(self, problem, filter, memory) -> tuple[AbstractSubproblem, _Memory]:
        rows = problem.jacobian.cost().rows
        measured = Measured.of(problem, self.scaling, memory.scale, rows)
        new_memory = _Memory(measured.memory, memory.last)

        def ready(problem: Quadratic | ProxLinear) -> AbstractSubproblem:
            return measured.chosen(problem, filter, 1, self.method)

        problem = measured.problem
        if memory.last is None:
            return ready(problem), new_memory
        momentum = jnp.asarray(self.momentum)
        momentum = nan_unless((momentum >= 0) & (momentum < 1), momentum)
        towards = _tree.scale(momentum, memory.last)
        way = way_of(problem, filter, 1, self.method)
        return pulled(problem, towards, way, ready), new_memory

    def update(self, objective, lin, evaluate, memory, num_steps) -> Update:
        update = super().update(objective, lin, evaluate, memory, num_steps)
        if self.momentum is None:
            return update
        return eqx.tree_at(lambda u: u.memory.last, update, step_taken(update, lin))
