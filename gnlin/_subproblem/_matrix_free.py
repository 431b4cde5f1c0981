"""Conjugate gradients, or literal steps, by products with the Jacobian alone."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Bool, PyTree, ScalarLike

from .._common import _tree
from .._common._checks import nan_unless, nonnegative, stopped_early
from .._common._passes import Passes
from .._jacobian import Cost
from .._linear_algebra._conjugate_gradients import conjugate_gradients
from .._linearisation._objective import SumOfSquares
from .._linearisation._quadratic import Quadratic
from .._linearisation._spectrum import Filter
from ..filters import GradientFlow
from ..preconditioners import AbstractPreconditioner, BlockDiagonal
from ._base import Answer, Descent, InexactTikhonov, num_steps_of, undamped, vanishes
from ._iteration import AbstractIteration
from ._spaces import Linearised, Parameters


# A gradient below this many eps of its terms' norm counts as zero.
_ROUNDINGS = 10
_POWER_STEPS = 50
# Number of products that makes this way cost more than any other.
_LAST_RESORT = 1e15


class MatrixFree(AbstractIteration):
    """A way that forms no m x p, m x m or p x p matrix.

    - `preconditioner`: the preconditioner of conjugate gradients. `None` is replaced by
        `BlockDiagonal` if each example reads few of the parameters.
    - `towards`: the step that the damping pulls towards; `None` for zero.
    """

    method: ClassVar[str] = "matrix-free"
    problem: Quadratic
    preconditioner: AbstractPreconditioner | None
    towards: PyTree[Array] | None

    def __init__(
        self, problem: Quadratic, preconditioner: AbstractPreconditioner | None = None
    ):
        super().__init__(problem, Passes())
        if preconditioner is None and problem.jacobian.is_sparse:
            preconditioner = BlockDiagonal()
        self.preconditioner, self.towards = preconditioner, None

    @classmethod
    def fits(cls, problem, filter: Filter) -> bool:
        return isinstance(problem, Quadratic) and super().fits(problem, filter)

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        last_resort = _LAST_RESORT * num_trials * cost.one_product
        if isinstance(filter, InexactTikhonov):
            # The price is infinite if an exact solution is preferred at any cost.
            return min(filter.price(cost), last_resort)
        filter, _ = undamped(filter)
        if isinstance(filter, Descent) and not vanishes(filter):
            num_steps = min(num_steps_of(filter), _LAST_RESORT)
            return num_trials * num_steps * cost.one_product
        # The number of products depends on the spectrum, which is not known here.
        return last_resort

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost, *preconditioner) -> "MatrixFree":
        return cls(problem, *preconditioner)

    def exactly(self) -> float:
        """Return the relative linear residual at which a solution counts as exact."""
        return float(jnp.finfo(_tree.dtype(self._gradient)).eps) ** (3 / 4)

    def to_tolerance(
        self, tolerance, damping, max_steps=None, *, is_damped=False
    ) -> Answer:
        r"""Solve $(\phi^\top\phi + \lambda I)\delta = -\phi^\top r$ by conjugate
        gradients, until the linear residual is at most `tolerance` times the gradient
        (2-norms), or as small as the precision allows."""
        return self.attempt(tolerance, damping, max_steps, is_damped=is_damped)[0]

    def attempt(
        self, tolerance, damping, max_steps=None, *, is_damped=False
    ) -> tuple[Answer, Bool[Array, ""]]:
        """Solve as `to_tolerance` does; return also whether the tolerance was met."""
        jacobian, dtype = self.problem.jacobian, _tree.dtype(self._gradient)
        gradient = self._gradient if is_damped else self._reachable_gradient(damping)
        if not (isinstance(tolerance, float) and tolerance <= self.exactly()):
            gradient = stopped_early(gradient)
        norm = _tree.norm(gradient)
        down = _tree.scale(-1, gradient)
        if self.towards is not None:
            down = _tree.axpy(damping, self.towards, down)
        least = jnp.zeros((), dtype)
        if not is_damped or max_steps is None:
            # A gradient within rounding of zero counts as zero: it may point into the
            # null space of phi, or no number of steps reduces it. Its rounding is
            # estimated by phi^T r with random signs of r, so that the terms of the sum do
            # not cancel.
            residual = self.problem.residual
            signed = jax.tree.map(jnp.multiply, residual, random_signs(residual))
            terms = _tree.norm(jacobian.rmv(signed))
            unit = jnp.where(norm > 0, norm, 1)
            least = _ROUNDINGS * jnp.finfo(dtype).eps * terms / unit
        tolerance = nan_unless(
            nonnegative(tolerance), jnp.fmax(jnp.asarray(tolerance, dtype), least)
        )
        each = jacobian.a_product()
        passes, options = Passes(vjps=each.vjps), {}
        if self.towards is not None:
            options["y0"] = self.towards
        if self.preconditioner is not None:
            inverse = self.preconditioner.inverse(jacobian, damping)
            if not isinstance(inverse, lx.AbstractLinearOperator):
                raise TypeError(
                    f"`inverse` of {type(self.preconditioner).__name__} must return a "
                    "linear operator of lineax, such as a `lx.FunctionLinearOperator`, "
                    f"but returns {inverse!r}."
                )
            options["preconditioner"] = inverse
            passes += self.preconditioner.passes(jacobian)
        solution = conjugate_gradients(
            lambda v: _tree.axpy(damping, v, jacobian.curvature_mv(v)),
            down,
            # The tolerance and the options do not change the solution, and so are
            # constants to derivatives.
            _tree.fixed(tolerance),
            max_steps,
            _tree.fixed(options),
        )
        passes += each * solution.stats["num_products"]
        answer = Answer(solution.value, solution.stats["num_steps"], passes)
        return answer, solution.result == lx.RESULTS.successful

    def _reachable_gradient(self, damping: ScalarLike) -> PyTree[Array]:
        r"""Return the gradient, and without damping only its part in the range of
        $\phi^\top$, for which there is a solution: the rest is then projected to
        $\phi^\top(\phi\phi^\top)^+\phi\,g_0$."""
        jacobian, rest = self.problem.jacobian, self.problem.rest
        if rest is None:
            return self._gradient

        def projected():
            kernel_mv = lambda u: jacobian.mv(jacobian.rmv(u))
            pushed = jacobian.mv(rest)
            solution = conjugate_gradients(kernel_mv, pushed, self.exactly())
            return jacobian.rmv(_tree.axpy(1, solution.value, self.problem.residual))

        undamped = jnp.asarray(damping) == 0
        return jax.lax.cond(
            undamped & _tree.any_nonzero(rest), projected, lambda: self._gradient
        )

    def in_space(self) -> Linearised:
        space, problem = Parameters(self.problem.jacobian), self.problem
        fixed = problem.residual, problem.rest, self._gradient
        return Linearised(space, SumOfSquares(), *fixed)

    def limit(self, filter: Descent | GradientFlow, damping: ScalarLike) -> Answer:
        """Return the minimum-norm solution, by conjugate gradients."""
        exact = self.to_tolerance(self.exactly(), damping)
        if isinstance(filter, GradientFlow):
            return exact
        jacobian = self.problem.jacobian
        start = _tree.direction(self._gradient, self.gradient_norm)
        power, _ = Parameters(jacobian).power_method(
            jacobian.curvature_mv, start, _POWER_STEPS
        )
        rate, added, stable = (
            jnp.asarray(x, power.dtype)
            for x in (filter.learning_rate, damping, filter.largest_stable())
        )
        diverged = rate * (power + added) >= stable
        passes = exact.passes + jacobian.a_product() * _POWER_STEPS
        return Answer(exact.step, jnp.inf, passes, result=self.verdict(diverged))


def random_signs(like: PyTree[Array]) -> PyTree[Array]:
    generator = np.random.default_rng(0)  # the same signs in every program
    signs = lambda x: jnp.asarray(generator.choice([-1.0, 1.0], x.shape), x.dtype)
    return jax.tree.map(signs, like)
