"""A damped problem by products, as far as they are cheap; else by a factorisation."""

import operator
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Scalar

from .._spectrum import Filter
from ._base import AbstractSubproblem, Answer
from ._direct import damping_of
from ._matrix_free import MatrixFree


class ProductsFirst(AbstractSubproblem):
    """Conjugate gradients take about as many steps as there are distinct eigenvalues
    above the damping. How many these are is known only when they have been taken: so
    they are, up to a number whose price is a part of the factorisation's, and the
    factorisation is made where that has not been enough."""

    products: MatrixFree
    # The same problem, ready to be solved directly; called where it is needed.
    directly: Callable[[], AbstractSubproblem]
    most: int = eqx.field(static=True)
    gradient_norm: Scalar
    num_jvps: int = eqx.field(static=True)
    num_vjps: int = eqx.field(static=True)

    def __init__(
        self,
        products: MatrixFree,
        directly: Callable[[], AbstractSubproblem],
        most: int,
    ):
        self.products = products
        self.directly = directly
        self.most = most
        self.gradient_norm = products.gradient_norm
        self.num_jvps = products.num_jvps
        self.num_vjps = products.num_vjps

    def gradient(self) -> PyTree[Array]:
        return self.products.gradient()

    def curvature_along_gradient(self) -> Scalar:
        return self.products.curvature_along_gradient()

    def largest_curvature(self) -> Scalar:
        return self.products.largest_curvature()

    def with_residual(self, residual: PyTree[Array]) -> AbstractSubproblem:
        return self.products.with_residual(residual)

    def solve(self, filter: Filter) -> Answer:
        damping = damping_of(filter)
        tolerance = self.products.exactly()
        tried, arrived = self.products.attempt(tolerance, damping, self.most)

        def counts(answer):
            taken = answer.num_inner_steps, answer.num_jvps, answer.num_vjps
            return [jnp.asarray(n, float) for n in taken]

        def factorised():
            direct = self.directly()
            answer = direct.solve(filter)
            made = 0, direct.num_jvps, direct.num_vjps
            more = map(operator.add, counts(answer), made)
            return answer.step, list(map(operator.add, spent, more)), answer.result

        def iterated():
            return tried.step, spent, tried.result

        spent = counts(tried)
        step, taken, result = jax.lax.cond(arrived, iterated, factorised)
        return Answer(step, *taken, result=result)
