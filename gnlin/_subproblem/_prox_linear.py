r"""The linearised problem with the loss itself, $\min_\delta L(f + \phi\,\delta)$."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from jaxtyping import Array, PyTree, Scalar, ScalarLike

from .. import _tree
from .._linearisation import Linearisation
from .._objective import AbstractObjective
from ..filters import (
    Damped,
    GradientDescent,
    GradientFlow,
    HeavyBall,
    Nesterov,
    PseudoInverse,
    Tikhonov,
)
from ._base import AbstractSubproblem, Answer
from ._descent import descend, optimise
from ._flow import flow
from ._newton import minimise
from ._spaces import AbstractSpace, Parameters


# Of the local error of gradient flow.
_FLOW_TOLERANCE = {"float32": 1e-4, "float64": 1e-6}


class ProxLinear(AbstractSubproblem):
    """What a filter asks of a quadratic problem is here asked of the loss itself: the
    minimiser, damped or not; K steps; gradient flow for a time."""

    objective: AbstractObjective
    linearisation: Linearisation
    space: AbstractSpace
    tolerance: ScalarLike | None  # of a damped solution; `None` for an exact one
    _gradient: PyTree[Array]
    gradient_norm: Scalar
    num_jvps: int = eqx.field(static=True)
    num_vjps: int = eqx.field(static=True)

    def __init__(
        self,
        objective: AbstractObjective,
        linearisation: Linearisation,
        space: AbstractSpace,
        num_jvps: int = 0,
        num_vjps: int = 0,
    ):
        self.objective = objective
        self.linearisation = linearisation
        self.space = space
        self.tolerance = None
        self._gradient = linearisation.vjp(objective.gradient(linearisation.outputs))
        self.gradient_norm = _tree.norm(self._gradient)
        self.num_jvps = num_jvps
        self.num_vjps = num_vjps + 1

    def truncated(self, tolerance: ScalarLike) -> "ProxLinear":
        return eqx.tree_at(
            lambda s: s.tolerance, self, tolerance, is_leaf=lambda x: x is None
        )

    def gradient(self) -> PyTree[Array]:
        return self._gradient

    def curvature_along_gradient(self) -> Scalar:
        dtype = self.gradient_norm.dtype
        pushed = self.linearisation.jvp(self._gradient)
        curved = self.objective.curvature(self.linearisation.outputs)(pushed)
        return _tree.dot(pushed, curved).astype(dtype) / self.gradient_norm**2

    def largest_curvature(self) -> Scalar:
        return self.curvature_along_gradient()

    def with_residual(self, residual: PyTree[Array]) -> AbstractSubproblem:
        raise ValueError(
            'The "prox-linear" form has no geodesic acceleration; pass '
            "`acceleration=False`."
        )

    def solve(self, filter) -> Answer:
        damping = 0.0
        if isinstance(filter, Damped):
            filter, damping = filter.filter, filter.damping
        match filter:
            case Tikhonov(damping=more):
                tolerance = self.tolerance
                tolerance = self._exactly() if tolerance is None else tolerance
                return self.to_tolerance(tolerance, damping + more)
            case PseudoInverse(rcond=None):
                return self.to_tolerance(self._exactly(), damping)
            case GradientDescent() | HeavyBall() | Nesterov():
                return self._descend(filter, damping)
            case GradientFlow(time=time):
                return self._flow(time, damping)
        raise ValueError(
            f"`{type(filter).__name__}` is a filter of quadratic problems only; use "
            '`form="quadratic"`.'
        )

    def _exactly(self) -> float:
        """The relative gradient that stands for an exact solution."""
        return 10 * float(jnp.finfo(_tree.dtype(self._gradient)).eps) ** (2 / 3)

    def to_tolerance(
        self,
        tolerance: ScalarLike,
        damping: ScalarLike,
        max_steps: int | None = None,
        start: PyTree[Array] | None = None,
    ) -> Answer:
        """The minimiser, to where the gradient is `tolerance` times what it was.

        One that the precision does not allow is met as far as it does; one that is not
        met in `max_steps` Newton steps, too.
        """
        solved = minimise(
            self.space,
            self.objective,
            self.linearisation.outputs,
            damping,
            tolerance,
            max_steps,
            start,
        )
        # A tangent and a transposed pass for each product, and for each Newton step.
        num_passes = self.space.num_passes * (solved.num_products + 2 * solved.num_steps)
        return Answer(
            self.space.parameters(solved.z),
            solved.num_products + solved.num_steps,
            num_passes,
            num_passes,
            solved.decrease,
            result=optx.RESULTS.promote(
                lx.RESULTS.where(solved.stuck, lx.RESULTS.singular, lx.RESULTS.successful)
            ),
        )

    def _descend(
        self, filter: GradientDescent | HeavyBall | Nesterov, damping: ScalarLike
    ) -> Answer:
        period = filter.period
        if isinstance(period, float) and math.isinf(period):
            return self._limit(damping)
        if isinstance(period, int | float):
            return self._literally(filter, period, damping)
        endless = jnp.isinf(period)
        finite = jnp.where(endless, 1, jnp.asarray(period, float))

        def parts(answer: Answer):
            counts = answer.num_inner_steps, answer.num_jvps, answer.num_vjps
            return answer.step, [jnp.asarray(n, float) for n in counts], answer.result

        step, counts, result = jax.lax.cond(
            endless,
            lambda: parts(self._limit(damping)),
            lambda: parts(self._literally(filter, finite, damping)),
        )
        return Answer(step, *counts, result=result)

    def _limit(self, damping: ScalarLike) -> Answer:
        """What the steps converge to, if they do."""
        there = ProxLinear(
            self.objective, self.linearisation, Parameters(self.linearisation)
        )
        return there.to_tolerance(self._exactly(), damping)

    def _literally(
        self,
        filter: GradientDescent | HeavyBall | Nesterov,
        period: ScalarLike,
        damping: ScalarLike,
    ) -> Answer:
        end = descend(
            self.space,
            self.objective,
            self.linearisation.outputs,
            period,
            filter.learning_rate,
            getattr(filter, "momentum", 0.0),
            nesterov=isinstance(filter, Nesterov),
            damping=damping,
        )
        num_passes = self.space.num_passes * (end.num_steps - 1)
        step = self.space.parameters(end.z)
        return Answer(
            step, period, num_passes, num_passes, result=self._verdict(end.diverged)
        )

    def _flow(self, time: ScalarLike, damping: ScalarLike) -> Answer:
        tolerance = _FLOW_TOLERANCE[_tree.dtype(self._gradient).name]
        end = flow(
            self.space,
            self.objective,
            self.linearisation.outputs,
            time,
            damping,
            tolerance,
        )
        num_passes = self.space.num_passes * end.num_products
        return Answer(
            self.space.parameters(end.z),
            end.num_products,
            num_passes,
            num_passes,
            result=self._verdict(~end.met),
        )

    def optimise(
        self,
        optimiser: Any,
        state: PyTree,
        period: ScalarLike,
        damping: ScalarLike,
        rest: PyTree[Array] | None = None,
    ) -> tuple[Answer, PyTree]:
        """`period` steps of an optax optimiser on the parameters, and its state."""
        end = optimise(
            Parameters(self.linearisation),
            self.objective,
            self.linearisation.outputs,
            period,
            optimiser,
            state,
            damping=damping,
            rest=rest,
        )
        period = jnp.asarray(float(period) if isinstance(period, int) else period)
        answer = Answer(
            end.step, period, period, period, result=self._verdict(end.diverged)
        )
        return answer, end.optimiser_state

    def _verdict(self, diverged: Array) -> optx.RESULTS:
        return optx.RESULTS.where(
            diverged & jnp.isfinite(self.gradient_norm),
            optx.RESULTS.nonlinear_divergence,
            optx.RESULTS.successful,
        )
