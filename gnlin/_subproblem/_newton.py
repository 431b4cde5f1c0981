"""The linearised problem with the loss itself, solved to a tolerance by Newton's method.

Unlike the minimisers of optimistix, optax and jaxopt, this one stops on the norm of the
gradient, as truncated Gauss-Newton requires. It also uses that the linearised outputs are
linear along a direction, so that its line search costs no pass.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import forwards_only
from ._spaces import Linearised


_MAX_NEWTON_STEPS = 100
# The constant of Armijo's condition.
_SUFFICIENT_DECREASE = 1e-4
_MAX_HALVINGS = 40
# Changes of the loss below this many eps of its terms are rounding.
_ROUNDINGS = 10


class Solved(NamedTuple):
    z: PyTree[Array]
    decrease: Scalar  # of the loss on the linearised outputs
    num_steps: Array  # Newton steps
    num_products: Array  # products with the curvature
    stuck: Bool[Array, ""]  # no finite direction was found


class _Iterate(NamedTuple):
    z: PyTree[Array]
    pushed: PyTree[Array]
    gradient: PyTree[Array]
    norm: Scalar
    proximal: Scalar  # added to the curvature of the next step
    num_steps: Array
    num_products: Array
    broken: Bool[Array, ""]  # the direction was not finite
    stalled: Bool[Array, ""]  # rounding prevents further progress


def minimise(
    problem: Linearised,
    damping: ScalarLike,
    tolerance: ScalarLike,
    max_steps: ScalarLike | None = None,
) -> Solved:
    r"""Minimise $L(f + \phi\delta) + \frac\lambda2\lVert\delta\rVert^2$, a convex
    function, until the 2-norm of its gradient is at most `tolerance` times the norm at
    the linearisation point. The problem has no rest.

    This is an inexact Newton method (Eisenstat and Walker, 1996) with a backtracking line
    search. Along the outliers of a robust loss there is a slope but no curvature. If the
    gradient does not fall, a proximal term $\frac\mu2\lVert\delta - \delta_k\rVert^2$ is
    added, first with the $\mu = \lVert g\rVert^2/L$ of a Polyak step; $\mu$ decreases
    with every full step.
    """
    space, objective, outputs, *_ = problem
    max_steps = _MAX_NEWTON_STEPS if max_steps is None else max_steps
    dtype = _tree.dtype((outputs, space.zero()))
    eps = _tree.eps(outputs)
    tolerance, damping = jnp.asarray(tolerance, dtype), jnp.asarray(damping, dtype)

    def at(pushed):
        return _tree.axpy(1, pushed, outputs)

    def gradient_at(z, pushed):
        g = _tree.axpy(damping, z, space.pull(objective.gradient(at(pushed))))
        return g, space.norm(g)

    zero = space.zero()
    at_zero = _tree.zeros_like(outputs)
    first_gradient, first_norm = gradient_at(zero, at_zero)
    target = tolerance * first_norm

    def iterate(it: _Iterate) -> _Iterate:
        so_far = it.norm / jnp.where(first_norm > 0, first_norm, 1)
        last = 0.5 * target / jnp.where(it.norm > 0, it.norm, 1)
        forcing = jnp.maximum(last, jnp.minimum(0.5, so_far))
        here = at(it.pushed)
        direction, num_products = space.newton(
            objective, here, it.gradient, damping + it.proximal, forcing
        )
        pushed = space.push(direction)
        slope = space.dot(it.gradient, direction, pushed)
        along = space.dot(it.z, direction, pushed)
        squared = space.dot(direction, direction, pushed)
        value = jnp.abs(objective.value(here)).astype(dtype)
        # The rounding of the outputs changes the loss by its gradient times theirs.
        uncertain = jax.tree.map(jnp.multiply, objective.gradient(here), here)
        rounding = _ROUNDINGS * eps * (value + _tree.norm(uncertain).astype(dtype))

        def fall(t):
            of_loss = objective.decrease(here, _tree.axpy(t, pushed, here)).astype(dtype)
            damped = damping * t * (along + 0.5 * t * squared)
            return of_loss - damped + _SUFFICIENT_DECREASE * t * slope

        def too_long(carry):
            t, halvings = carry
            return ~(fall(t) >= -rounding) & (halvings < _MAX_HALVINGS)

        t, halvings = jax.lax.while_loop(
            too_long, lambda c: (c[0] / 2, c[1] + 1), (jnp.ones((), dtype), 0)
        )
        z = _tree.axpy(t, direction, it.z)
        total = space.push(z)
        gradient, norm = gradient_at(z, total)
        # A rise within rounding counts as progress only if the gradient falls.
        progress = (fall(t) >= 0) | (norm < it.norm)
        sound = _tree.all_finite((z, norm)) & (halvings < _MAX_HALVINGS) & progress
        sound &= slope < 0
        halved = norm <= 0.5 * it.norm
        polyak = it.norm * (it.norm / jnp.where(value > 0, value, 1))
        more = jnp.maximum(16 * it.proximal, polyak)
        fading = jnp.where(t < 1, it.proximal, it.proximal / 4)
        proximal = jnp.where(sound & (halved | (it.proximal > 0)), fading, more)
        # Rounding hides any further decrease from the line search.
        lost = ~(-slope > rounding) & (it.proximal > 0)
        stalled = ~(sound & halved) & lost
        there = it._replace(z=z, pushed=total, gradient=gradient, norm=norm)
        return _tree.where(sound, there, it)._replace(
            proximal=proximal,
            num_steps=it.num_steps + 1,
            num_products=it.num_products + num_products,
            broken=~jnp.isfinite(slope),
            stalled=stalled,
        )

    def unfinished(it: _Iterate) -> Bool[Array, ""]:
        return (it.norm > target) & ~it.stalled & (it.num_steps < max_steps)

    count = jnp.array(0)
    begin = _Iterate(
        zero,
        at_zero,
        first_gradient,
        first_norm,
        proximal=jnp.zeros((), dtype),
        num_steps=count,
        num_products=count,
        broken=~jnp.isfinite(first_norm),
        stalled=~jnp.isfinite(first_norm),
    )
    it = forwards_only(jax.lax.while_loop(unfinished, iterate, begin))
    decrease = objective.decrease(outputs, at(it.pushed))
    stuck = it.stalled & it.broken
    return Solved(it.z, decrease, it.num_steps, it.num_products, stuck)
