"""Derivatives of steps, and through them, also where singular values are equal; against
dense formulas that JAX differentiates, and differences."""

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import gnlin
from gnlin.filters import GradientDescent, GradientFlow, PseudoInverse, Tikhonov


dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
shapes = pytest.mark.parametrize("shape", [(3, 3), (5, 3), (3, 5)])
methods = pytest.mark.parametrize("method", ["svd", "eigh"])
modes = pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])


def jacobian(a, shape):
    """At `a = 0` its singular values are 2, 1 and 1; `a` moves it every way."""
    m, p = shape
    rng = np.random.default_rng(0)
    u = np.linalg.qr(rng.normal(size=(m, m)))[0]
    v = np.linalg.qr(rng.normal(size=(p, p)))[0]
    first = u[:, :3] @ np.diag([2.0, 1.0, 1.0]) @ v[:, :3].T
    ways = rng.normal(size=(len(a), m, p))
    moved = jnp.tensordot(a, jnp.asarray(ways, a.dtype), 1)
    return jnp.asarray(first, a.dtype) + moved


def damped(phi, r, damping):
    identity = jnp.eye(phi.shape[1], dtype=phi.dtype)
    return jnp.linalg.solve(phi.T @ phi + damping * identity, -phi.T @ r)


def exact(phi, r):
    if phi.shape[0] <= phi.shape[1]:
        return -phi.T @ jnp.linalg.solve(phi @ phi.T, r)
    return jnp.linalg.solve(phi.T @ phi, -phi.T @ r)


def descent(phi, r, num_steps, learning_rate):
    step = jnp.zeros_like(phi[0])
    for _ in range(num_steps):
        step -= learning_rate * phi.T @ (phi @ step + r)
    return step


def flow(phi, r, time):
    """The last column of an exponential."""
    p = phi.shape[1]
    affine = jnp.zeros((p + 1, p + 1), phi.dtype)
    affine = affine.at[:p, :p].set(-phi.T @ phi).at[:p, p].set(-phi.T @ r)
    return jax.scipy.linalg.expm(time * affine)[:p, p]


FILTERS = {
    "damped": (Tikhonov, damped, 0.3),
    "exact": (lambda _: PseudoInverse(), lambda phi, r, _: exact(phi, r), 0.0),
    "descent": (lambda eta: GradientDescent(7, eta), lambda *x: descent(*x[:2], 7, x[2]),
                0.1),
    "flow": (GradientFlow, flow, 0.7),
    "a function": (lambda t: lambda w: 1 / (w + t), damped, 0.3),
}  # fmt: skip


@dtypes
@methods
@modes
@shapes
@pytest.mark.parametrize("name", FILTERS)
def test_the_step_of_a_filter_where_singular_values_are_equal(
    name, shape, mode, method, dtype
):
    make, formula, number = FILTERS[name]
    b = jnp.asarray(np.random.default_rng(1).normal(size=shape[0]), dtype)

    def problem(a):
        return jacobian(a[:4], shape), b + a[4:7].sum() * jnp.arange(len(b), dtype=dtype)

    def ours(a):
        phi, r = problem(a)
        lin = gnlin.linearise(lambda y, _: phi @ y + r, jnp.zeros(shape[1], dtype))
        return lin.spectrum(method).step(make(number + a[7]))

    def expected(a):
        return formula(*problem(a), number + a[7])

    zero = jnp.zeros(8, dtype)
    tolerance = 1e-9 if dtype == jnp.float64 else 2e-4
    wanted = jax.jacfwd(expected)(zero)
    found = jax.jit(mode(ours))(zero)
    size = float(jnp.max(jnp.abs(wanted)))
    np.testing.assert_allclose(found, wanted, atol=tolerance * size, rtol=0)
