r"""The linearised problem with the loss itself, $\min_\delta L(f + \phi\,\delta)$."""

import math
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from jaxtyping import Array, Float, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._cost import rates
from .._common._passes import Passes
from .._jacobian import AbstractJacobian, Cost
from .._linearisation._objective import AbstractObjective
from .._linearisation._spectrum import Filter
from ..filters import GradientFlow
from ._base import Answer, Descent, num_steps_of, undamped, vanishes
from ._iteration import AbstractIteration
from ._newton import minimise
from ._spaces import AbstractSpace, Linearised, Outputs, Parameters


class ProxLinear(eqx.Module):
    r"""A linearised problem with the loss itself, $\min_\delta L(f + \phi\,\delta)$.

    - `jacobian`: $\phi$.
    - `outputs`: $f$.
    - `objective`: $L$, a function of the outputs.
    """

    jacobian: AbstractJacobian
    outputs: PyTree[Array]
    objective: AbstractObjective

    def gradient(self) -> PyTree[Array]:
        return self.jacobian.rmv(self.objective.gradient(self.outputs))

    def decrease(self, step: PyTree[Array]) -> Scalar:
        """Return by how much a step lowers the objective of the problem."""
        outputs = _tree.axpy(1, self.jacobian.mv(step), self.outputs)
        return self.objective.decrease(self.outputs, outputs)

    def curvature_along(self, vector: PyTree[Array]) -> Scalar:
        r"""Return $(\phi v)^\top H\phi v / \lVert v\rVert^2$, or zero if v is zero."""
        norm = _tree.norm(vector)
        pushed = self.jacobian.mv(_tree.direction(vector, norm))
        curved = self.objective.curvature(self.outputs)(pushed)
        return _tree.dot(pushed, curved).astype(norm.dtype)

    def at_hand(self) -> "ProxLinear":
        return ProxLinear(self.jacobian.at_hand(), self.outputs, self.objective)


class OnSpace(AbstractIteration):
    """Ways to solve a prox-linear problem. Depending on the filter, they compute its
    minimiser, take K steps, or follow gradient flow for a time."""

    problem: ProxLinear
    space: AbstractSpace

    def __init__(self, problem: ProxLinear, space: AbstractSpace, passes: Passes):
        super().__init__(problem, passes)
        self.space = space

    @classmethod
    def fits(cls, problem, filter: Filter) -> bool:
        return isinstance(problem, ProxLinear) and super().fits(problem, filter)

    def exactly(self) -> float:
        """Return the relative gradient at which a solution counts as exact."""
        return 10 * float(jnp.finfo(_tree.dtype(self._gradient)).eps) ** (2 / 3)

    def to_tolerance(
        self, tolerance, damping, max_steps=None, *, is_damped=False
    ) -> Answer:
        """Minimise until the gradient is `tolerance` times its initial norm, or as small
        as the precision and `max_steps` Newton steps allow."""
        solved = minimise(self.in_space(), damping, tolerance, max_steps)
        # A product with the curvature costs one product each way, a Newton step two.
        num_steps = solved.num_products + 2 * solved.num_steps
        return Answer(
            self.space.parameters(solved.z),
            solved.num_products + solved.num_steps,
            self.space.a_step() * num_steps,
            solved.decrease,
            result=optx.RESULTS.promote(
                lx.RESULTS.where(solved.stuck, lx.RESULTS.singular, lx.RESULTS.successful)
            ),
        )

    def in_space(self) -> Linearised:
        return Linearised(self.space, self.problem.objective, self.problem.outputs)

    def limit(self, filter: Descent | GradientFlow, damping: ScalarLike) -> Answer:
        on_parameters = ProxLinearOnParameters(self.problem)
        return on_parameters.to_tolerance(self.exactly(), damping)


# Typical numbers of Newton steps, and of products in a Newton step on parameters.
_NEWTON_STEPS, _NEWTON_PRODUCTS = 10, 10
# Typical numbers of products of gradient flow, and of steps of descent if it is traced.
_FLOW_PRODUCTS, _MANY_STEPS = 1_000.0, 10_000.0


def _num_steps(filter: Filter) -> float | None:
    """Estimate the number of steps that a filter takes; `None` for Newton's method."""
    if isinstance(filter, GradientFlow):
        return _FLOW_PRODUCTS
    if isinstance(filter, Descent) and not vanishes(filter):
        return min(num_steps_of(filter), _MANY_STEPS)
    return None


class ProxLinearOnOutputs(OnSpace):
    """A way for coefficients of outputs: a step takes one product with the kernel."""

    method: ClassVar[str] = "kernel"

    def __init__(self, problem: ProxLinear, kernel: Float[Array, "m m"], passes: Passes):
        super().__init__(problem, Outputs(problem.jacobian, kernel), passes)

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        filter, _ = undamped(filter)
        m, p = cost.shape
        num_steps = _num_steps(filter)
        # With a singular kernel, the coefficients of Newton's method are undetermined.
        singular = vanishes(filter) or (num_steps is None and m > p)
        if singular or not cost.holds(m**2):
            return math.inf
        if num_steps is None:
            once = _NEWTON_STEPS * 2 / 3 * float(m) ** 3 * rates().product
        else:
            once = num_steps * (rates().step + 2.0 * m**2 * rates().passed)
        return cost.whole_gram + num_trials * once

    @classmethod
    def of(cls, problem: ProxLinear, cost: Cost) -> "ProxLinearOnOutputs":
        kernel = problem.jacobian.gram().astype(_tree.dtype(problem.outputs))
        return cls(problem, kernel, cost.gram)


class ProxLinearOnParameters(OnSpace):
    """A way for parameters: a step takes a product with the Jacobian each way."""

    method: ClassVar[str] = "matrix-free"

    def __init__(self, problem: ProxLinear):
        super().__init__(problem, Parameters(problem.jacobian), Passes())

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        filter, _ = undamped(filter)
        num_steps = _num_steps(filter)
        newton = _NEWTON_STEPS * _NEWTON_PRODUCTS
        once = newton if num_steps is None else num_steps
        return num_trials * once * cost.one_product

    @classmethod
    def of(cls, problem: ProxLinear, cost: Cost) -> "ProxLinearOnParameters":
        return cls(problem)
