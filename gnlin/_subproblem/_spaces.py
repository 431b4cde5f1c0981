r"""Coordinates for the steps on a linearised problem.

Descent from the linearisation point stays in $\theta_s + \mathrm{range}(\phi^\top)$. Its
iterates are $\phi^\top a$ with m coefficients $a$, and a step takes one product with the
m x m kernel. On p parameters, it takes a tangent and a transposed pass. The same
algorithm takes the same steps in both spaces.
"""

import abc
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._passes import Passes
from .._common._tree import matmul, ravel_pytree
from .._jacobian import AbstractJacobian
from .._linear_algebra._conjugate_gradients import conjugate_gradients
from .._linearisation._objective import AbstractObjective


class AbstractSpace(eqx.Module):
    r"""Coordinates `z` of steps $\delta$."""

    jacobian: eqx.AbstractVar[AbstractJacobian]

    @abc.abstractmethod
    def a_step(self) -> Passes:
        """Return the passes that one step takes."""

    @abc.abstractmethod
    def zero(self) -> PyTree[Array]:
        """Return the coordinates of the linearisation point."""

    @abc.abstractmethod
    def push(self, z: PyTree[Array]) -> PyTree[Array]:
        r"""Return the change of the linearised outputs, $\phi\,\delta$."""

    @abc.abstractmethod
    def pull(self, cotangent: PyTree[Array]) -> PyTree[Array]:
        r"""Return the coordinates of $\phi^\top u$."""

    @abc.abstractmethod
    def parameters(self, z: PyTree[Array]) -> PyTree[Array]:
        r"""Return the step $\delta$."""

    @abc.abstractmethod
    def dot(self, a: PyTree[Array], b: PyTree[Array], pushed: PyTree[Array]) -> Scalar:
        """Return the inner product of two steps; `pushed` is `push(b)`."""

    def norm(self, z: PyTree[Array]) -> Scalar:
        """Return the 2-norm of a step, without overflow of its square."""
        unit = _tree.unit(z)
        scaled = _tree.scale(1 / unit, z)
        squared = self.dot(scaled, scaled, self.push(scaled))
        return unit * jnp.sqrt(jnp.where(squared < 0, 0, squared))

    def power_method(
        self,
        product: Callable[[PyTree[Array]], PyTree[Array]],
        start: PyTree[Array],
        num_steps: int,
    ) -> tuple[Scalar, PyTree[Array]]:
        """Estimate the largest eigenvalue of a positive semidefinite operator, and its
        eigenvector, from a start of norm 1."""

        def body(_, carry):
            v, _ = carry
            v = product(v)
            size = self.norm(v)
            return _tree.scale(1 / jnp.where(size > 0, size, 1), v), size

        first = start, jnp.zeros((), _tree.dtype(start))
        v, size = jax.lax.fori_loop(0, num_steps, body, first)
        return size, v

    @abc.abstractmethod
    def newton(
        self,
        objective: AbstractObjective,
        outputs: PyTree[Array],
        gradient: PyTree[Array],
        damping: ScalarLike,
        tolerance: Scalar,
    ) -> tuple[PyTree[Array], Array]:
        r"""Return the Newton step, $-(\phi^\top H\phi + \lambda I)^{-1}$ times the
        gradient, with the objective's Hessian $H$ at `outputs`, and the number of
        products that it took."""


class Parameters(AbstractSpace):
    """The parameters themselves: a step takes two passes, and needs no matrix."""

    jacobian: AbstractJacobian

    def a_step(self) -> Passes:
        return self.jacobian.a_product()

    def zero(self) -> PyTree[Array]:
        return _tree.zeros_like(self.jacobian.domain.tree)

    def push(self, z: PyTree[Array]) -> PyTree[Array]:
        return self.jacobian.mv(z)

    def pull(self, cotangent: PyTree[Array]) -> PyTree[Array]:
        return self.jacobian.rmv(cotangent)

    def parameters(self, z: PyTree[Array]) -> PyTree[Array]:
        return z

    def dot(self, a: PyTree[Array], b: PyTree[Array], pushed: PyTree[Array]) -> Scalar:
        return _tree.dot(a, b)

    def norm(self, z: PyTree[Array]) -> Scalar:
        return _tree.norm(z)

    def newton(self, objective, outputs, gradient, damping, tolerance):
        curvature = objective.curvature(outputs)
        solution = conjugate_gradients(
            lambda v: _tree.axpy(damping, v, self.pull(curvature(self.push(v)))),
            _tree.scale(-1, gradient),
            tolerance,
        )
        return solution.value, solution.stats["num_products"]


class Outputs(AbstractSpace):
    r"""Coefficients $a$ of $\delta = \phi^\top a$: a step takes a product with the
    kernel."""

    jacobian: AbstractJacobian
    kernel: Float[Array, "m m"]

    def a_step(self) -> Passes:
        return Passes()

    def zero(self) -> Float[Array, " m"]:
        return jnp.zeros(self.kernel.shape[0], self.kernel.dtype)

    def push(self, z: Float[Array, " m"]) -> PyTree[Array]:
        return self.jacobian.codomain.unravel(matmul(self.kernel, z))

    def pull(self, cotangent: PyTree[Array]) -> Float[Array, " m"]:
        return ravel_pytree(cotangent)[0]

    def parameters(self, z: Float[Array, " m"]) -> PyTree[Array]:
        return self.jacobian.pull_back(z)

    def dot(self, a: PyTree[Array], b: PyTree[Array], pushed: PyTree[Array]) -> Scalar:
        return matmul(a, ravel_pytree(pushed)[0])

    def newton(self, objective, outputs, gradient, damping, tolerance):
        # Solve (H K + lambda I) z = -gradient, which needs no factor of a singular H.
        # H K is similar to a semidefinite matrix.
        curvature = objective.curvature(outputs)
        unravel = self.jacobian.codomain.unravel
        columns = jax.vmap(
            lambda column: ravel_pytree(curvature(unravel(column)))[0], 1, 1
        )
        identity = jnp.eye(self.kernel.shape[0], dtype=self.kernel.dtype)
        damped = columns(self.kernel) + jnp.asarray(damping, identity.dtype) * identity
        finite = _tree.all_finite((damped, gradient))
        operator = lx.MatrixLinearOperator(jnp.where(finite, damped, identity))
        solution = lx.linear_solve(operator, -gradient, lx.LU(), throw=False)
        return jnp.where(finite, solution.value, jnp.nan), jnp.array(0)


class Linearised(NamedTuple):
    r"""The problem $\min_\delta L(f + \phi\,\delta) + g_0^\top\delta$ in the coordinates
    of a space.

    - `objective`, `outputs`, `rest`: $L$, $f$ and $g_0$; a rest of `None` is zero.
    - `first`: the gradient at the linearisation point, if it is known.
    """

    space: AbstractSpace
    objective: AbstractObjective
    outputs: PyTree[Array]
    rest: PyTree[Array] | None = None
    first: PyTree[Array] | None = None

    def first_gradient(self) -> PyTree[Array]:
        """Return the gradient at the linearisation point."""
        return self._gradient(self.outputs) if self.first is None else self.first

    def value(self, z: PyTree[Array], damping: ScalarLike) -> Scalar:
        """Return the value of the damped problem, in the space of the parameters."""
        value = self.objective.value(_tree.axpy(1, self.space.push(z), self.outputs))
        linear = _tree.scale(0.5 * damping, z)
        if self.rest is not None:
            linear = _tree.axpy(1, self.rest, linear)
        return value + _tree.dot(linear, z).astype(value.dtype)

    def gradient(self, z: PyTree[Array], damping: ScalarLike) -> PyTree[Array]:
        """Return the gradient of the damped problem."""
        at = _tree.axpy(1, self.space.push(z), self.outputs)
        return _tree.axpy(damping, z, self._gradient(at))

    def _gradient(self, outputs: PyTree[Array]) -> PyTree[Array]:
        g = self.space.pull(self.objective.gradient(outputs))
        return g if self.rest is None else _tree.axpy(1, self.rest, g)
