"""Training a linearised model step by step, where no formula gives the result."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, Scalar

from .._common import _tree
from .._common._tree import matmul
from .._linearisation._linearisation import Linearisation
from .._linearisation._spectrum import Filter
from .._subproblem import OnSpace, Outputs
from .._subproblem._base import Descent, undamped
from .._subproblem._descent import descend, Descended, Momentum
from .._subproblem._flow import flow
from ..filters import GradientFlow


@eqx.filter_jit
def step_by_step(
    way: OnSpace, filter: Filter, on: Linearisation, amounts: Float[Array, " s"]
) -> Float[Array, "s n"]:
    """Return the changes of the flat outputs after several finite numbers of steps, or
    times, in ascending order. They are NaN if the steps have diverged or, without
    momentum, have raised the loss by more than its rounding."""
    jacobian = on.jacobian
    seen = lambda z: jacobian.push_forward(way.space.parameters(z))
    if isinstance(way.space, Outputs):
        cross = jacobian.gram_with(way.problem.jacobian)
        seen = lambda z: matmul(cross, z)
    filter, damping = undamped(filter)
    problem = way.in_space()
    objective, outputs, zero = problem.objective, problem.outputs, problem.space.zero()

    if isinstance(filter, GradientFlow):

        def later(start, time: Scalar):
            z, before = start
            end = flow(problem, time - before, damping, z)
            return (end.z, time), jnp.where(end.met, seen(end.z), jnp.nan)

        start = zero, jnp.zeros((), amounts.dtype)
        return jax.lax.scan(later, start, amounts)[1]
    assert isinstance(filter, Descent)
    problem = problem._replace(first=problem.first_gradient())
    loss = objective.value(outputs)
    rounding = jnp.finfo(loss.dtype).eps ** 0.5 * jnp.abs(loss)

    def has_risen(z):
        at = _tree.axpy(1, problem.space.push(z), outputs)
        return ~(objective.decrease(outputs, at) >= -rounding)

    def further(start: Descended, period: Scalar):
        end = descend(problem, filter, period, damping, start)
        # Convergent steps without momentum do not raise a convex loss.
        momentum = jnp.asarray(getattr(filter, "momentum", 0.0))
        worse = has_risen(end.z) & (momentum == 0)
        return end, jnp.where(end.diverged | worse, jnp.nan, seen(end.z))

    at_rest = Momentum.of(filter).init(zero)
    start = Descended(zero, at_rest, jnp.zeros((), float), jnp.array(False))
    return jax.lax.scan(further, start, amounts)[1]


@eqx.filter_jit
def in_the_limit(way: OnSpace, filter: Filter, on: Linearisation) -> Float[Array, " n"]:
    """Return the change of the flat outputs after infinitely many steps, or NaN if they
    do not converge."""
    answer = way.solve(filter)
    change = on.jacobian.push_forward(answer.step)
    return jnp.where(answer.result == optx.RESULTS.successful, change, jnp.nan)
