"""Implicit derivatives of a minimum with bounds or a retraction."""

from typing import Any

import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, PyTree

from .._common import _tree
from .._linearisation._bounds import Box
from .._linearisation._retraction import Retraction


class ImplicitAdjoint(optx.ImplicitAdjoint):
    r"""Derivatives of a minimum with bounds or a retraction by the implicit function
    theorem, for `optimistix.least_squares(..., adjoint=...)`.

    `optimistix.ImplicitAdjoint`, the default there, differentiates
    $\nabla L(\theta) = 0$. At a bound the gradient is not zero: a parameter at a bound
    that descent would cross moves with the bound, and the others move as if it were
    fixed. A parameter at a bound with zero gradient counts as free. With a retraction the
    gradient along the manifold is zero. For a solver with neither, the two classes agree.

    **Arguments:**

    - `linear_solver`: a linear solver of lineax, as in `optimistix.ImplicitAdjoint`.

    !!! example

        ```python
        def minimum(args):
            solver = gnlin.LevenbergMarquardt(bounds=(0.0, 1.0))
            adjoint = gnlin.methods.ImplicitAdjoint()
            return optx.least_squares(residuals, solver, y0, args, adjoint=adjoint).value

        jax.jacfwd(minimum)(args)
        ```

    ??? cite "Reference"

        J. Nocedal and S. Wright, *Numerical optimization* (2006), section 12.8, on the
        sensitivity of a solution with active constraints.
    """

    def apply(self, primal_fn, rewrite_fn, inputs, tags):
        _, solver, *_ = inputs
        given = (getattr(solver, name, None) for name in ("bounds", "retraction"))
        if any(x is not None for x in given):
            rewrite_fn = _stationary
        return super().apply(primal_fn, rewrite_fn, inputs, tags)


def _stationary(optimum, _, inputs):
    """Return a value that is zero at the optimum, with an invertible derivative there."""
    fn, solver, _, args, *_ = inputs
    here = jax.lax.stop_gradient(optimum)

    def objective(y):
        residual, _ = fn(y, args)
        return 0.5 * _tree.dot(residual, residual)

    if solver.retraction is not None:
        retraction = Retraction.of(solver.retraction, here)
        return _along(objective, retraction, here, optimum)
    slope = jax.grad(objective)(optimum)
    box = Box.of(solver.bounds, optimum)
    blocked = box.blocked(here, jax.lax.stop_gradient(slope))

    def each(is_blocked, y, now, low, high, g):
        return jnp.where(is_blocked, y - jnp.where(now <= low, low, high), g)

    return jax.tree.map(each, blocked, optimum, here, box.lower, box.upper, slope)


# Remove a type checker's wrapper, because optimistix requires a plain function.
_stationary = getattr(_stationary, "__wrapped__", _stationary)


def _along(
    objective: Any, retraction: Retraction, here: PyTree[Array], y: PyTree[Array]
) -> PyTree[Array]:
    """Return the gradient along the manifold at `here`, plus the part of `y - here` that
    is normal to the manifold, which has to stay zero."""
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.subtract, y, here))
    tangents = retraction.tangents(here)

    def led_to(tangents, rows):
        return jax.vmap(_tree.matmul)(tangents, rows)

    def step_of(tangent, change):
        if tangent is None:
            return change
        rows = change.reshape(len(tangent), -1)
        return led_to(jnp.linalg.pinv(tangent), rows)

    def as_leaves(rows):
        parts = [x.reshape(leaf.shape) for x, leaf in zip(rows, leaves, strict=True)]
        return structure.unflatten(parts)

    steps = list(map(step_of, tangents, leaves))
    slopes = jax.grad(lambda s: objective(retraction.moved(here, as_leaves(s))))(steps)

    def each(tangent, change, step, slope):
        if tangent is None:
            return slope
        normal = change.reshape(step.shape) - led_to(tangent, step)
        return led_to(tangent, slope) + normal

    return as_leaves(list(map(each, tangents, leaves, steps, slopes)))
