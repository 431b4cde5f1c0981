"""Any lineax solver can solve the linearised problem; compared with augmented least
squares in NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
import pytest
import scipy.optimize
from problems import (
    as_jax,
    damped_step,
    deficient,
    drawn,
    each_once,
    gauss_newton_step,
    least_squares,
    linear,
    numbers,
    SHAPES,
    sines,
    sines_data,
    sines_numpy,
)

import gnlin


SOLVERS = {
    "QR": lx.QR(),
    "SVD": lx.SVD(),
    "LSMR": lx.LSMR(1e-12, 1e-12),
    "auto": lx.AutoLinearSolver(well_posed=None),
    "CG": lx.CG(1e-10, 1e-10),
    "Cholesky": lx.Cholesky(),
    "LU": lx.LU(),
    "GMRES": lx.GMRES(1e-10, 1e-10),
    "normal equations": lx.Normal(lx.Cholesky()),
}
ALIKE = "SVD", "LU", "GMRES"  # are called as QR, Cholesky and CG are


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive if case[0] in ALIKE else ())
            for case in each_once(list(SOLVERS), ["tall", "wide"])
        ),
        ("LSMR", "one residual"),
    ],
)
def test_a_damped_step(name, shape):
    y0, args = sines_data(SHAPES[shape])
    expected = y0 + damped_step(*sines_numpy(y0, args), 0.1)
    solver = gnlin.DampedGaussNewton(0.1, method=SOLVERS[name])
    solution = least_squares(sines, solver, *as_jax((y0, args)), max_steps=1)
    np.testing.assert_allclose(solution.value, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        # lineax's LSMR uses double-precision numbers in single precision if x64 is
        # enabled.
        ("QR", jnp.float32, "tall"),
        ("CG", jnp.float32, "wide"),
        ("Cholesky", jnp.float64, "wide"),
    ],
)
def test_an_undamped_step(name, dtype, shape):
    y0, args = sines_data(SHAPES[shape])
    expected = y0 + gauss_newton_step(*sines_numpy(y0, args))
    method = SOLVERS[name]
    if dtype == jnp.float32 and name == "CG":
        method = lx.CG(1e-5, 1e-5)
    solver = gnlin.GaussNewton(method=method)
    solution = least_squares(sines, solver, *as_jax((y0, args), dtype), max_steps=1)
    tolerance = 2e-3 if dtype == jnp.float32 else 1e-6
    np.testing.assert_allclose(solution.value, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["SVD", "LSMR"])
def test_the_minimum_norm_step_of_a_deficient_problem(name):
    y0, args = deficient((6, 5), rank=2)
    a, b = args
    expected = y0 + gauss_newton_step(a @ y0 - b, a)
    solver = gnlin.GaussNewton(method=SOLVERS[name])
    solution = least_squares(linear, solver, *as_jax((y0, args)), max_steps=1)
    np.testing.assert_allclose(solution.value, expected, rtol=1e-6, atol=1e-8)


def test_a_singular_matrix_is_reported():
    y0, args = deficient((6, 5), rank=2)
    solver = gnlin.GaussNewton(method=lx.Cholesky())
    solution = least_squares(linear, solver, *as_jax((y0, args)))
    assert solution.result != optx.RESULTS.successful


def test_iterations_that_do_not_converge_are_reported():
    y0, args = sines_data((30, 20))
    solver = gnlin.DampedGaussNewton(1e-6, method=lx.CG(1e-12, 1e-12, max_steps=2))
    solution = least_squares(sines, solver, *as_jax((y0, args)))
    assert solution.result == optx.RESULTS.max_steps_reached
    assert int(solution.stats["num_steps"]) == 1


@pytest.mark.parametrize("name", ["QR", "CG"])
def test_levenberg_marquardt(name):
    y0, args = sines_data((7, 3))
    residuals = lambda y: sines_numpy(y, args)[0]
    expected = scipy.optimize.least_squares(residuals, y0, xtol=1e-12, ftol=1e-12).x
    solver = gnlin.LevenbergMarquardt(method=SOLVERS[name], scaling="identity")
    solution = least_squares(sines, solver, *as_jax((y0, args)))
    np.testing.assert_allclose(solution.value, expected, rtol=1e-5, atol=1e-6)


X = jnp.asarray(np.random.default_rng(1).normal(size=(15, 3)))
NETWORK = drawn(eqx.nn.Linear, 3, 4)


SOFTMAX = gnlin.SoftmaxCrossEntropy(), np.arange(15) % 4
HUBER = gnlin.losses.Huber(0.1), np.sin(X[:, :1] * np.arange(4.0)[None])  # has a rest


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "problem"),
    [("LSMR", SOFTMAX), ("QR", HUBER)],
    ids=["LSMR, softmax", "QR, Huber"],
)
def test_of_a_network_with_another_loss(name, problem):
    loss, targets = problem
    ends = [
        numbers(
            gnlin.solve(
                NETWORK,
                (X, targets),
                gnlin.DampedGaussNewton(1.0, method=method, search=None),
                loss=loss,
                max_steps=1,
            ).model
        )
        for method in ("svd", SOLVERS[name])
    ]
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-6, atol=1e-7)


def test_products_are_counted():
    solver = gnlin.DampedGaussNewton(0.5, method=lx.LSMR(1e-12, 1e-12))
    y0, args = sines_data((30, 20))
    solution = least_squares(sines, solver, *as_jax((y0, args)), max_steps=1)
    steps = int(solution.stats["num_inner_steps"])
    assert steps > 3
    assert int(solution.stats["num_vjps"]) >= steps


@pytest.mark.usefixtures("unchecked")
def test_mistakes():
    with pytest.raises(ValueError, match="or a solver of lineax here, but 3 was given"):
        gnlin.DampedGaussNewton(1.0, method=3)
    with pytest.raises(ValueError, match="here, but QR"):
        gnlin.IterativeLinearisation(10, 0.1, method=lx.QR())
    with pytest.raises(ValueError, match="`rcond` cannot be used with a solver of lin"):
        gnlin.GaussNewton(method=lx.SVD(), rcond=1e-10)
    with pytest.raises(ValueError, match="for quadratic problems"):
        gnlin.DampedGaussNewton(1.0, method=lx.QR(), form="prox-linear")
    data, solver = (X, jnp.zeros((15, 4))), gnlin.GaussNewton(method=lx.QR())
    with pytest.raises(ValueError, match="cannot be used"):
        gnlin.solve(NETWORK, data, solver, loss=gnlin.losses.Huber(0.1))


@pytest.mark.usefixtures("unchecked")
def test_qr_in_single_precision():
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
    solver = gnlin.DampedGaussNewton(1e-3, method=lx.QR())
    ones = jnp.ones(3, jnp.float32)
    fit = optx.least_squares(lambda y, _: matrix @ (y - ones), solver, 0 * ones)
    assert fit.value.dtype == jnp.float32
    np.testing.assert_allclose(fit.value, ones, atol=1e-5)


def test_no_damping_and_a_rest_of_zero():
    matrix, b = (np.random.default_rng(0).normal(size=n) for n in ((6, 3), 6))

    @jax.jit
    def step(rest):
        lin = gnlin.linearise(lambda y, _: jnp.asarray(matrix) @ y + b, jnp.zeros(3))
        problem = gnlin.authoring.Quadratic(lin.jacobian, lin.outputs, rest)
        undamped = gnlin.filters.Tikhonov(0.0)
        ready = gnlin.authoring.choose(problem, undamped, method=lx.SVD())
        return ready.solve(undamped).step

    expected = np.linalg.lstsq(matrix, -b)[0]
    np.testing.assert_allclose(step(jnp.zeros(3)), expected, rtol=1e-10)


@pytest.mark.slow
def test_parameters_of_two_precisions_by_a_direct_solver():
    a = np.random.default_rng(0).normal(size=(7, 5))
    y = {"a": jnp.zeros(3, jnp.float32), "b": jnp.zeros(2)}
    flat = lambda y: jnp.concatenate([y["a"].astype(float), y["b"]])
    lin = gnlin.linearise(lambda y, _: a @ flat(y) - 1, y)
    quadratic = gnlin.authoring.SumOfSquares().expand(lin)
    ready = gnlin.authoring.choose(quadratic, gnlin.filters.Tikhonov(0.1), method=lx.QR())
    with jax.numpy_dtype_promotion("standard"):  # lineax needs it here
        step = ready.solve(gnlin.filters.Tikhonov(0.1)).step
    expected = np.linalg.solve(a.T @ a + 0.1 * np.eye(5), a.T @ np.ones(7))
    np.testing.assert_allclose(flat(step), expected, rtol=1e-5)
