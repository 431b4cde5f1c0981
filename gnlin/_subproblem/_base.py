"""What is asked of the linearised problem is a filter; how it is answered is here."""

import abc

import equinox as eqx
import jax.numpy as jnp
import optimistix as optx
from equinox import AbstractVar
from jaxtyping import Array, PyTree, Scalar, ScalarLike

from .._spectrum import Filter


class Answer(eqx.Module):
    """The step that solves a subproblem as far as asked, and what it took.

    Counts are of this answer alone, beyond what setting the subproblem up took.
    `decrease` is what the linearised objective, without damping, falls by; `None` where
    the step solves a damped quadratic problem, and two products tell. `damped_norm` is
    the step's in the variables in which the subproblem is damped; `None` where it is not
    known without a look at the step. Both are of the numerical range of phi.
    """

    step: PyTree[Array]
    num_inner_steps: ScalarLike = 0
    num_jvps: ScalarLike = 0
    num_vjps: ScalarLike = 0
    decrease: Scalar | None = None
    damped_norm: Scalar | None = None
    result: optx.RESULTS = eqx.field(default_factory=lambda: optx.RESULTS.successful)


class AbstractSubproblem(eqx.Module):
    """A linearised problem made ready for any number of filters.

    - `gradient_norm`: of the objective, NaN where the linearisation is not finite.
    - `num_jvps`, `num_vjps`: the products that setting it up took.
    """

    gradient_norm: AbstractVar[Scalar]
    num_jvps: AbstractVar[int]
    num_vjps: AbstractVar[int]

    @abc.abstractmethod
    def solve(self, filter: Filter) -> Answer:
        """The step of a filter."""

    def truncated(self, tolerance: ScalarLike) -> "AbstractSubproblem":
        """The same, to be solved so well only where it is solved by iteration: until the
        linear residual is `tolerance` times the gradient."""
        return self

    @abc.abstractmethod
    def gradient(self) -> PyTree[Array]:
        """Of the objective at the linearisation point; phi^T r for least squares."""

    def scaled_gradient_norm(self) -> Scalar:
        """The gradient's norm in the variables in which the subproblem is damped."""
        return self.gradient_norm

    @abc.abstractmethod
    def curvature_along_gradient(self) -> Scalar:
        """|phi g|^2 / |g|^2: an eigenvalue that the gradient g points to, for scale."""

    @abc.abstractmethod
    def largest_curvature(self) -> Scalar:
        """The largest eigenvalue of phi^T phi, or what is known to be near it."""

    def attainable_decrease(self) -> Scalar:
        """What the undamped step is predicted to lower the loss by, |U^T r|^2 / 2 over
        the numerical range; infinity where that is not known without solving for it."""
        return jnp.full_like(self.gradient_norm, jnp.inf)

    @abc.abstractmethod
    def with_residual(self, residual: PyTree[Array]) -> "AbstractSubproblem":
        """The same linearisation with other residuals, set up already."""
