"""Ways that iterate: to a tolerance, for K literal steps, or along a flow."""

import abc
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import as_float, forwards_only
from .._common._passes import Passes
from .._linearisation._spectrum import Filter
from ..filters import GradientFlow, Tikhonov
from ._base import (
    AbstractMethod,
    Answer,
    Descent,
    does_not_serve,
    InexactTikhonov,
    is_plain_inverse,
    undamped,
    unless_endless,
)
from ._descent import descend, updated
from ._flow import flow
from ._spaces import Linearised


class AbstractIteration(AbstractMethod):
    """A way that iterates: to a tolerance, for K literal steps, or along a flow.

    - `tolerance`: the tolerance of a damped solution, by default that of an exact one.
    - `max_steps`: the most iterations of a damped solution; `None` for no limit.
    """

    stops_early: ClassVar[bool] = True
    residuals_are_dear: ClassVar[bool] = True
    tolerance: ScalarLike
    max_steps: ScalarLike | None

    def __init__(self, problem: Any, passes: Passes):
        super().__init__(problem, passes)
        self.tolerance, self.max_steps = self.exactly(), None

    @classmethod
    def fits(cls, problem: Any, filter: Filter) -> bool:
        filter, _ = undamped(filter)
        kinds = Tikhonov | Descent | GradientFlow
        return is_plain_inverse(filter) or isinstance(filter, kinds)

    def truncated(self, tolerance, max_steps=None) -> "AbstractIteration":
        return eqx.tree_at(
            lambda s: (s.tolerance, s.max_steps),
            self,
            (tolerance, max_steps),
            is_leaf=lambda x: x is None,
        )

    def least_damping(self, size: ScalarLike = 1.0) -> Scalar:
        # Products round the curvature to eps times the largest.
        largest = self.largest_curvature()
        return largest * _tree.eps(largest)

    @abc.abstractmethod
    def exactly(self) -> float:
        """Return the tolerance at which a solution counts as exact."""

    @abc.abstractmethod
    def to_tolerance(
        self,
        tolerance: ScalarLike,
        damping: ScalarLike,
        max_steps: ScalarLike | None = None,
        *,
        is_damped: bool = False,
    ) -> Answer:
        """Solve until the gradient is `tolerance` times its initial norm.

        - `is_damped`: whether the damping is known not to be zero.
        """

    @abc.abstractmethod
    def in_space(self) -> Linearised:
        """Return the problem, for literal steps and for gradient flow."""

    @abc.abstractmethod
    def limit(self, filter: Descent | GradientFlow, damping: ScalarLike) -> Answer:
        """Return the point that infinitely many steps converge to."""

    def along(self, filter: Descent | GradientFlow, damping: ScalarLike) -> Answer:
        """Take literal steps, each of one product, or follow the gradient flow."""
        problem = self.in_space()

        def finitely(length):
            if isinstance(filter, GradientFlow):
                end = flow(problem, length, damping)
                number = taken = end.num_products
                diverged = ~end.met
            else:
                end = descend(problem, filter, length, damping)
                number, taken, diverged = length, end.num_steps - 1, end.diverged
            step, passes = problem.space.parameters(end.z), problem.space.a_step() * taken
            return Answer(step, number, passes, result=self.verdict(diverged))

        is_flow = isinstance(filter, GradientFlow)
        length = filter.time if is_flow else filter.period
        return unless_endless(length, lambda: self.limit(filter, damping), finitely)

    def optimise(
        self,
        optimiser: Any,
        point: PyTree[Array],
        state: PyTree,
        period: ScalarLike,
        damping: ScalarLike,
    ) -> tuple[Answer, PyTree]:
        """Take `period` steps of an optax optimiser from a point; return its state, too.
        The coordinates must be the parameters. The optimiser is passed the parameters,
        not the steps from the linearisation point."""
        problem, period = self.in_space(), as_float(period)
        most = jnp.asarray(period, float)

        def body(carry):
            k, step, state = carry
            g = problem.gradient(step, damping)
            at, loss = _tree.axpy(1, step, point), problem.value(step, damping)
            updates, state = updated(optimiser, g, state, at, loss)
            return k + 1, _tree.axpy(1, updates, step), state

        def unfinished(carry):
            k, step, _ = carry
            return (k < most) & _tree.all_finite(step)

        start = jnp.zeros((), most.dtype), problem.space.zero(), state
        _, step, state = forwards_only(jax.lax.while_loop(unfinished, body, start))
        result = self.verdict(~_tree.all_finite(step))
        passes = problem.space.a_step() * period
        return Answer(step, period, passes, result=result), state

    def solve(self, filter: Filter) -> Answer:
        filter, damping = undamped(filter)
        if isinstance(filter, Tikhonov):
            settings = self.tolerance, damping + filter.damping, self.max_steps
            is_damped = isinstance(filter, InexactTikhonov)
            return self.to_tolerance(*settings, is_damped=is_damped)
        if is_plain_inverse(filter):
            # Started at zero, conjugate gradients stay in the range of phi^T, so that
            # their limit is the minimum-norm solution.
            return self.to_tolerance(self.exactly(), damping)
        if isinstance(filter, Descent | GradientFlow):
            return self.along(filter, damping)
        raise does_not_serve(type(self), filter)

    def verdict(self, diverged: Array) -> optx.RESULTS:
        """Return divergence, unless the first gradient was not finite."""
        return optx.RESULTS.where(
            diverged & jnp.isfinite(self.gradient_norm),
            optx.RESULTS.nonlinear_divergence,
            optx.RESULTS.successful,
        )
