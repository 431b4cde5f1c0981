"""Gradient flow on the linearised problem, for any loss.

The equation is as stiff as the kernel is ill-conditioned, and its Jacobian's eigenvalues
are real and not positive. An implicit method would factorise an m x m matrix in each
step. A stabilised explicit method needs products only: s stages are stable over a length
that grows as s^2, so that the flow over K steps of descent costs about sqrt(K) products.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar, ScalarLike

from .._common import _tree
from .._common._checks import forwards_only
from ._spaces import Linearised


_MAX_STEPS = 10_000
# Bounds on the factor between two step sizes, and a safety factor on it.
_MOST, _LEAST, _MARGIN = 5.0, 0.1, 0.8
# Damping of the Chebyshev polynomials, and the constant of their stability, as in the
# paper cited in `flow`.
_EPSILON = 2 / 13
_STABILITY = 1.54
# Safety factor on the spectral radius, which the power method underestimates.
_SAFETY = 1.2
_POWER_STEPS = 3
# A velocity below this many eps of the gradient's terms counts as zero.
_ROUNDINGS = 4

# Tolerance of the local error, relative to the norm of the step.
_TOLERANCE = {"float32": 1e-4, "float64": 1e-6}


class Flowed(NamedTuple):
    z: PyTree[Array]
    num_products: Array
    met: Bool[Array, ""]


class _Iterate(NamedTuple):
    time: Scalar
    step_size: Scalar
    z: PyTree[Array]
    velocity: PyTree[Array]
    eigenvector: PyTree[Array]
    num_steps: Int[Array, ""]
    num_products: Int[Array, ""]


def flow(
    problem: Linearised,
    time: ScalarLike,
    damping: ScalarLike,
    start: PyTree[Array] | None = None,
) -> Flowed:
    r"""Integrate $\dot\delta = -\phi^\top\nabla L(f + \phi\delta) - g_0 - \lambda\delta$
    for a time, from zero or from `start`, by the Runge-Kutta-Chebyshev method of order 2.

    B. P. Sommeijer, L. F. Shampine and J. G. Verwer, *RKC: An explicit solver for
    parabolic PDEs*, J. Comput. Appl. Math. 88 (1998), equations (2.2) to (2.8).
    """
    space, norm = problem.space, problem.space.norm
    begin = space.zero() if start is None else start
    dtype = _tree.dtype(begin)
    tolerance = _TOLERANCE[space.jacobian.domain.dtype.name]
    eps = jnp.finfo(dtype).eps
    time = jnp.asarray(time, dtype)
    max_stages = max(10, int((tolerance / (10 * eps)) ** 0.5))

    def velocity_at(z):
        return _tree.scale(-1, problem.gradient(z, damping))

    def spectral_radius(z, v):
        """Estimate the Jacobian's spectral radius by the power method from `v`."""
        at = _tree.axpy(1, space.push(z), problem.outputs)
        curvature = problem.objective.curvature(at)

        def product(v):
            return _tree.axpy(damping, v, space.pull(curvature(space.push(v))))

        size, v = space.power_method(product, v, _POWER_STEPS)
        return _SAFETY * size, v

    def advance(it: _Iterate) -> _Iterate:
        radius, eigenvector = spectral_radius(it.z, it.eigenvector)
        longest = 0.65 * max_stages**2 / jnp.where(radius > 0, radius, eps)
        h = jnp.minimum(jnp.minimum(it.step_size, longest), time - it.time)
        s = 1 + jnp.ceil(jnp.sqrt(1 + _STABILITY * h * radius)).astype(int)
        s = jnp.clip(s, 2, max_stages)
        z = _chebyshev(velocity_at, it.z, it.velocity, h, s)
        velocity = velocity_at(z)
        ends = it.z, z, it.velocity, velocity
        error = jax.tree.map(lambda a, b, u, v: 0.8 * (a - b) + 0.4 * h * (u + v), *ends)
        size = tolerance * jnp.maximum(norm(it.z), norm(z)) + h * rounding
        relative = norm(error) / jnp.where(size > 0, size, 1)
        relative = jnp.where(jnp.isfinite(relative), relative, jnp.inf)
        good = relative <= 1
        factor = _MARGIN * jnp.maximum(relative, 1e-10) ** (-1 / 3)
        step_size = h * jnp.clip(factor, _LEAST, _MOST)
        return _Iterate(
            jnp.where(good, it.time + h, it.time),
            step_size,
            _tree.where(good, z, it.z),
            _tree.where(good, velocity, it.velocity),
            eigenvector,
            it.num_steps + 1,
            it.num_products + s + _POWER_STEPS + 3,
        )

    def unfinished(it: _Iterate) -> Bool[Array, ""]:
        moves = norm(it.velocity) > rounding
        return (it.time < time * (1 - 4 * eps)) & moves & (it.num_steps < _MAX_STEPS)

    # The rounding of the velocity, from the rounding of each output's gradient g: the
    # outputs f are known to eps, and so g to about eps (|g| + |H f|).
    outputs, objective = problem.outputs, problem.objective
    curved = objective.curvature(outputs)(jax.tree.map(jnp.abs, outputs))
    gradient = objective.gradient(outputs)
    sizes = jax.tree.map(lambda g, h: jnp.abs(g) + jnp.abs(h), gradient, curved)
    rounding = _ROUNDINGS * eps * norm(space.pull(sizes))
    velocity = velocity_at(begin)
    size = norm(velocity)
    eigenvector = _tree.scale(1 / jnp.where(size > 0, size, 1), velocity)
    radius, eigenvector = spectral_radius(begin, eigenvector)
    first = jnp.minimum(time, tolerance**0.5 / jnp.where(radius > 0, radius, 1))
    count = jnp.array(0)
    now = _Iterate(
        jnp.zeros((), dtype), first, begin, velocity, eigenvector, count, count
    )
    finite = _tree.all_finite(velocity)
    end = jax.lax.while_loop(lambda it: unfinished(it) & finite, advance, now)
    end = forwards_only(end)
    arrived = (end.time >= time * (1 - 4 * eps)) | (norm(end.velocity) <= rounding)
    met = arrived & finite & _tree.all_finite(end.z)
    return Flowed(end.z, end.num_products, met)


def _chebyshev(
    velocity_at,
    z: PyTree[Array],
    velocity: PyTree[Array],
    h: Float[Array, ""],
    s: Int[Array, ""],
) -> PyTree[Array]:
    """Take one step of s stages: a three-term recurrence of Chebyshev polynomials, with
    their values T and their derivatives T' and T'' at w0."""
    dtype = h.dtype
    stages = s.astype(dtype)
    w0 = 1 + _EPSILON / stages**2
    root = jnp.sqrt(w0**2 - 1)
    angle = stages * jnp.log1p(w0 - 1 + root)  # arccosh
    w1 = jnp.sinh(angle) * root**2
    w1 = w1 / (jnp.cosh(angle) * stages * root - w0 * jnp.sinh(angle))

    b1 = 1 / (2 * w0) ** 2  # b_0 = b_1 = b_2 = T_2'' / T_2'^2 = 4 / (4 w0)^2
    first = b1 * w1
    y1 = _tree.axpy(first * h, velocity, z)
    one, nil = jnp.ones((), dtype), jnp.zeros((), dtype)
    # (T, T', T'', b, y) of the last stage and of the stage before it
    start = (w0, one, nil, b1, y1), (one, nil, nil, b1, z)

    def stage(j, carry):
        (t1, d1, e1, b_1, y_1), (t0, d0, e0, b_0, y_0) = carry
        t = 2 * w0 * t1 - t0
        d = 2 * w0 * d1 - d0 + 2 * t1
        e = 2 * w0 * e1 - e0 + 4 * d1
        b = e / d**2
        mu = 2 * w0 * b / b_1
        nu = -b / b_0
        mu_h = 2 * w1 * b / b_1 * h
        gamma_h = -mu_h * (1 - t1 * b_1)

        def next_stage(z, y_1, y_0, v_1, v):
            y = (1 - mu - nu) * z + mu * y_1 + nu * y_0 + mu_h * v_1 + gamma_h * v
            return y.astype(z.dtype)

        y = jax.tree.map(next_stage, z, y_1, y_0, velocity_at(y_1), velocity)
        return (t, d, e, b, y), (t1, d1, e1, b_1, y_1)

    (*_, y), _ = jax.lax.fori_loop(2, s + 1, stage, start)
    return y
