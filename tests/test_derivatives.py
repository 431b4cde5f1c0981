"""Derivatives of steps and through steps, also at equal singular values, compared with
dense formulas that JAX differentiates and with finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from problems import each_once

import gnlin
from gnlin.filters import GradientDescent, GradientFlow, PseudoInverse, Tikhonov


SHAPES, DTYPES = [(3, 3), (5, 3), (3, 5)], [jnp.float32, jnp.float64]
MODES = [jax.jacfwd, jax.jacrev]


def jacobian(a, shape):
    """At `a = 0` its singular values are 2, 1 and 1; `a` changes it in all directions."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "mode", "shape", "dtype"),
    [
        (name, method, MODES[(i + j) % 2], SHAPES[(i + j) % 3], DTYPES[i % 2])
        for i, name in enumerate(FILTERS)
        for j, method in enumerate(["svd", "eigh"])
    ],
)
def test_the_step_of_a_filter_where_singular_values_are_equal(
    name, method, mode, shape, dtype
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
    both = jax.jit(lambda a: (mode(ours)(a), jax.jacfwd(expected)(a)))
    found, wanted = map(np.asarray, both(zero))
    size = np.max(np.abs(wanted))
    np.testing.assert_allclose(found, wanted, atol=tolerance * size, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "shape", "dtype"),
    [
        (first, second, SHAPES[1 + i], DTYPES[j])
        for i, first in enumerate(MODES)
        for j, second in enumerate(MODES)
        if i != j
    ],
)
def test_second_derivatives_where_singular_values_are_equal(first, second, shape, dtype):
    b = jnp.arange(1, shape[0] + 1, dtype=dtype) / 3

    def ours(a):
        phi, r = jacobian(a[:2], shape), b * (1 + a[2])
        lin = gnlin.linearise(lambda y, _: phi @ y + r, jnp.zeros(shape[1], dtype))
        return jnp.sum(jnp.sin(lin.spectrum().step(Tikhonov(0.3 + a[3]))))

    def expected(a):
        step = damped(jacobian(a[:2], shape), b * (1 + a[2]), 0.3 + a[3])
        return jnp.sum(jnp.sin(step))

    zero = jnp.zeros(4, dtype)
    both = jax.jit(lambda a: (second(first(ours))(a), jax.hessian(expected)(a)))
    found, wanted = map(np.asarray, both(zero))
    tolerance = 1e-11 if dtype == jnp.float64 else 1e-4
    np.testing.assert_allclose(
        found, wanted, atol=tolerance * np.abs(wanted).max(), rtol=0
    )


def residuals(y, a):
    """Nonlinear in `y`; at the start with `a = 0` it has equal singular values."""
    phi = jacobian(a[:4], (5, 3))
    bent = phi @ (y + 0.1 * y**2) + a[4] - jnp.arange(5, dtype=y.dtype)
    return bent.astype(y.dtype)


def two_steps(step):
    def after(a):
        y = jnp.zeros(3, a.dtype)
        for _ in range(2):
            r, phi = residuals(y, a), jax.jacfwd(residuals)(y, a)
            y = y + step(phi, r)
        return y

    return after


def by_solve(solver, fn=residuals, num_steps=2):
    def after(a):
        model = (lambda y, _: fn(y, a)), jnp.zeros(3, a.dtype)
        data = jnp.zeros((1, 1), a.dtype), jnp.zeros((1, 5), a.dtype)
        return gnlin.solve(model, data, solver, max_steps=num_steps).model[1]

    return after


def by_optimistix(solver):
    def after(a):
        adjoint, start = optx.RecursiveCheckpointAdjoint(), jnp.zeros(3, a.dtype)
        given = {"adjoint": adjoint, "max_steps": 2, "throw": False}
        return optx.least_squares(residuals, solver, start, a, **given).value

    return after


def damped_by_one(phi, r):
    return damped(phi, r, 1.0)


SOLVERS = {
    "exact": (gnlin.GaussNewton(), exact),
    "damped": (gnlin.DampedGaussNewton(1.0), damped_by_one),
    "by Cholesky": (gnlin.DampedGaussNewton(1.0, method="curvature"), damped_by_one),
    "for K steps": (
        gnlin.IterativeLinearisation(period=7, learning_rate=0.1),
        lambda phi, r: descent(phi, r, 7, 0.1),
    ),
    "by products": (gnlin.DampedGaussNewton(1.0, method="matrix-free"), damped_by_one),
}
DRIVERS = {
    "solve, forwards": (by_solve, jax.jacfwd),
    "optimistix, backwards": (by_optimistix, jax.jacrev),
}


@functools.cache
def derivative_of_two_steps(step, dtype):
    return np.asarray(jax.jit(jax.jacfwd(two_steps(step)))(jnp.zeros(5, dtype)))


@pytest.mark.parametrize(
    ("name", "way", "dtype"),
    [
        *each_once(["exact", "by Cholesky"], list(DRIVERS)[::2], [jnp.float64]),
        *(
            pytest.param(
                name, "optimistix, backwards", jnp.float32, marks=pytest.mark.slow
            )
            for name in ("for K steps", "damped", "by products")
        ),
    ],
)
def test_derivatives_through_the_steps_of_a_solver(name, way, dtype):
    solver, step = SOLVERS[name]
    driver, mode = DRIVERS[way]
    wanted = derivative_of_two_steps(step, dtype)
    found = jax.jit(mode(driver(solver)))(jnp.zeros(5, dtype))
    tolerance = 1e-9 if dtype == jnp.float64 else 5e-4
    size = np.max(np.abs(wanted))
    np.testing.assert_allclose(found, wanted, atol=tolerance * size, rtol=0)


def check_by_differences(after):
    # One program computes both the derivative and the value for the differences.
    both = jax.jit(jax.jacfwd(lambda a: (after(a),) * 2, has_aux=True))
    value, h = lambda a: np.asarray(both(jnp.asarray(a))[1]), 1e-6
    wanted = [(value(h * e) - value(-h * e)) / (2 * h) for e in np.eye(5)]
    found = np.asarray(both(jnp.zeros(5))[0])
    size = np.max(np.abs(found))
    np.testing.assert_allclose(found, np.stack(wanted, 1), atol=1e-7 * size, rtol=0)


@pytest.mark.slow
def test_derivatives_through_the_trials_of_levenberg_marquardt():
    check_by_differences(by_solve(gnlin.LevenbergMarquardt()))


@pytest.mark.slow
def test_derivatives_through_steps_that_a_retraction_does_not_use():
    """A column is zero, and scales are roots, which have no derivative at zero."""

    def turn(row, step):
        c, s = jnp.cos(step[0]), jnp.sin(step[0])
        return jnp.stack([c * row[0] - s * row[1], s * row[0] + c * row[1]])

    def after(target):
        solver = gnlin.LevenbergMarquardt(retraction=turn)
        model = (lambda y, x: y[0] + 0 * jnp.sum(x)), jnp.array([[1.0, 0.0]])
        data = jnp.zeros((1, 1)), target[None]
        return gnlin.solve(model, data, solver, max_steps=2).model[1][0]

    at, along = jnp.array([1.0, 2.0]), jnp.array([1.0, 0.0])
    compiled, h = jax.jit(after), 1e-5
    found = jax.jit(jax.jacfwd(after))(at)[:, 0]
    expected = (compiled(at + h * along) - compiled(at - h * along)) / (2 * h)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
def test_the_minimum_that_forward_mode_leads_to_is_that_of_the_implicit_function():
    solver = gnlin.LevenbergMarquardt()

    def implicit(a):
        start, adjoint = jnp.zeros(3), gnlin.methods.ImplicitAdjoint()
        return optx.least_squares(residuals, solver, start, a, adjoint=adjoint).value

    zero = jnp.zeros(5)
    found = jax.jit(jax.jacfwd(by_solve(solver, num_steps=50)))(zero)
    expected = jax.jit(jax.jacrev(implicit))(zero)
    np.testing.assert_allclose(found, expected, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "target", "solver"),
    [
        (
            gnlin.SoftmaxCrossEntropy(),
            np.array([2]),
            gnlin.DampedGaussNewton(0.1, search=None),
        ),
        (
            gnlin.losses.Huber(1.0),
            np.array([[0.3, 1.4, 2.2, -0.7, 3.3]]),
            gnlin.DampedGaussNewton(1.0),
        ),
    ],
    ids=["softmax", "Huber"],
)
def test_through_the_steps_on_another_loss(loss, target, solver):
    def after(a):
        model = (lambda y, _: residuals(y, a)), jnp.zeros(3)
        data = jnp.zeros((1, 1)), jnp.asarray(target)
        return gnlin.solve(model, data, solver, loss=loss, max_steps=2).model[1]

    check_by_differences(after)


@pytest.mark.parametrize(
    "solver",
    [
        gnlin.LevenbergMarquardt(acceleration=False, scaling="identity"),
        pytest.param(
            gnlin.DampedGaussNewton(1.0, bounds=(-9.0, 9.0)), marks=pytest.mark.slow
        ),
    ],
)
def test_backwards_through_a_loop_of_unknown_length_is_an_error_that_says_so(solver):
    with pytest.raises(
        RuntimeError, match=r"use `jax.jvp` .*gnlin.methods.ImplicitAdjoint"
    ):
        jax.eval_shape(jax.jacrev(by_optimistix(solver)), jnp.zeros(5))


def test_backwards_through_solve_is_an_error_that_says_so():
    with pytest.raises(
        RuntimeError, match=r"use `jax.jvp` .*gnlin.methods.ImplicitAdjoint"
    ):
        jax.eval_shape(jax.jacrev(by_solve(gnlin.GaussNewton())), jnp.zeros(5))


def test_conjugate_gradients_that_stop_early_have_no_derivative_and_say_so():
    solver = gnlin.TruncatedGaussNewton(tolerance=0.1)
    for driver, mode in (by_solve, jax.jacfwd), (by_optimistix, jax.jacrev):
        with pytest.raises(RuntimeError, match=r"stop early .*ImplicitAdjoint"):
            jax.eval_shape(mode(driver(solver)), jnp.zeros(5))
