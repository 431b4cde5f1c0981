"""A damped problem by products, as far as they are cheap; else by a factorisation."""

import math
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
from jax.tree_util import Partial
from jaxtyping import Array, PyTree, Scalar

from .._jacobian import Cost
from .._passes import Passes
from .._problem import Quadratic
from .._sharding import is_spread
from .._spectrum import Filter
from ..filters import Tikhonov
from ._base import AbstractSubproblem, AbstractWay, Answer
from ._cholesky import damping_of
from ._matrix_free import MatrixFree
from ._on_outputs import OnOutputs
from ._on_parameters import OnParameters


# Of the price of the factorisation, so much is spent on trying to do without; where fewer
# products than these come of it, nothing is.
_SHARE_TRIED = 0.5
_FEWEST_TRIED = 10
# What compiling both ways is worth, of every step.
_BOTH_COMPILED = 1e-3


class ProductsFirst(AbstractWay):
    """Conjugate gradients take about as many steps as there are distinct eigenvalues
    above the damping. How many these are is known only when they have been taken: so
    they are, up to a number whose price is a part of the factorisation's, and the
    factorisation is made where that has not been enough."""

    method: ClassVar[str] = "products-first"
    problem: Quadratic
    products: MatrixFree
    # The same problem, ready to be solved directly; called where it is needed.
    directly: Callable[[], AbstractSubproblem]
    most: int = eqx.field(static=True)
    gradient_norm: Scalar
    passes: Passes

    def __init__(
        self, products: MatrixFree, directly: Callable[[], AbstractSubproblem], most: int
    ):
        self.problem = products.problem
        self.products = products
        self.directly = directly
        self.most = most
        self.gradient_norm = products.gradient_norm
        self.passes = products.passes

    @classmethod
    def fits(cls, problem, filter: Filter) -> bool:
        quadratic = isinstance(problem, Quadratic) and isinstance(filter, Tikhonov)
        return quadratic and not is_spread()

    @classmethod
    def cost(cls, cost: Cost, filter: Filter, num_trials: int) -> float:
        if num_trials > 1 or _most_tried(cost) < _FEWEST_TRIED:
            return math.inf
        return _BOTH_COMPILED + _SHARE_TRIED * _direct(cost).cost(cost, filter, 1)

    @classmethod
    def of(cls, problem: Quadratic, cost: Cost) -> "ProductsFirst":
        directly = Partial(_direct(cost).of, problem, cost)
        return cls(MatrixFree(problem), directly, _most_tried(cost))

    def gradient(self) -> PyTree[Array]:
        return self.products.gradient()

    def curvature_along_gradient(self) -> Scalar:
        return self.products.curvature_along_gradient()

    def largest_curvature(self) -> Scalar:
        return self.products.largest_curvature()

    def with_residual(self, residual: PyTree[Array]) -> AbstractSubproblem:
        return self.products.with_residual(residual)

    def solve(self, filter: Filter) -> Answer:
        tolerance = self.products.exactly()
        tried, arrived = self.products.attempt(tolerance, damping_of(filter), self.most)

        def factorised():
            direct = self.directly()
            answer = direct.solve(filter)
            taken = tried.passes + direct.passes + answer.passes
            return answer.step, taken.traced(), answer.result

        def iterated():
            return tried.step, tried.passes.traced(), tried.result

        step, passes, result = jax.lax.cond(arrived, iterated, factorised)
        return Answer(step, tried.num_inner_steps, passes, result=result)


def _direct(cost: Cost) -> type[OnOutputs] | type[OnParameters]:
    m, p = cost.shape
    return OnOutputs if m <= p else OnParameters


def _most_tried(cost: Cost) -> int:
    direct = _direct(cost).cost(cost, Tikhonov(1.0), 1)
    if math.isinf(direct):
        return 0
    return int(_SHARE_TRIED * direct / cost.one_product)
