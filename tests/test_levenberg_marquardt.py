"""Levenberg-Marquardt: steps compared with dense formulas, and small hard problems."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
import scipy.optimize
import scipy.sparse.linalg
from jax.flatten_util import ravel_pytree
from problems import (
    as_jax,
    damped_step,
    deficient,
    half_squares,
    least_squares,
    linear,
    powell_singular,
    rosenbrock,
    sines,
    sines_data,
    sines_numpy,
)

import gnlin


VARIANTS = {
    "default": gnlin.LevenbergMarquardt(),
    "marquardt": gnlin.LevenbergMarquardt(scaling="marquardt"),
    "identity": gnlin.LevenbergMarquardt(scaling="identity"),
    "no acceleration": gnlin.LevenbergMarquardt(acceleration=False),
    "kernel": gnlin.LevenbergMarquardt(method="kernel"),
    "curvature": gnlin.LevenbergMarquardt(method="curvature"),
    "matrix-free": gnlin.LevenbergMarquardt(scaling="identity", method="matrix-free"),
}


#
# One step
#


def first_step(r, jacobian, second, *, relative, scaled, accelerated):
    """Return the first step of a fresh solver; `second(v)` is r'' along v."""
    p = jacobian.shape[1]
    scale = np.linalg.norm(jacobian, axis=0) if scaled else np.ones(p)
    gradient = jacobian.T @ r / scale
    pushed = (jacobian / scale) @ gradient
    damping = relative * (pushed @ pushed) / (gradient @ gradient)
    velocity = damped_step(r, jacobian, damping, scale)
    if not accelerated:
        return velocity
    return velocity + 0.5 * damped_step(second(velocity), jacobian, damping, scale)


@pytest.mark.parametrize(
    ("shape", "accelerated", "scaling", "method"),
    [
        ((7, 3), True, "more", "svd"),
        ((7, 3), False, "marquardt", "eigh"),
        ((7, 3), False, "more", "curvature"),
        ((3, 7), True, "identity", "kernel"),
    ],
)
def test_first_step(shape, accelerated, scaling, method):
    y, args = sines_data(shape, seed=5)
    r, jacobian = sines_numpy(y, args)
    expected = first_step(
        r,
        jacobian,
        lambda v: 20 * ((sines_numpy(y + 0.1 * v, args)[0] - r) / 0.1 - jacobian @ v),
        relative=0.5,
        scaled=scaling != "identity",
        accelerated=accelerated,
    )
    solver = gnlin.LevenbergMarquardt(
        damping=0.5, scaling=scaling, acceleration=accelerated, method=method
    )
    solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=1)
    assert int(solution.stats["num_rejected_steps"]) == 0, "the first trial is taken"
    np.testing.assert_allclose(solution.value, y + expected, rtol=1e-9)


def test_a_rejected_trial_is_more_damped_and_leaves_the_point():
    """From a far start, each outer step ends below the loss at which it began."""
    y = np.array([-1.2, 1.0])
    residuals = lambda y: np.array([10 * (y[1] - y[0] ** 2), 1 - y[0]])
    solver = gnlin.LevenbergMarquardt(damping=1e-8, scaling="more", acceleration=False)
    solution = least_squares(rosenbrock, solver, jnp.asarray(y), max_steps=1)
    rejected = int(solution.stats["num_rejected_steps"])
    assert rejected > 0
    assert int(solution.stats["num_accepted_steps"]) == 1
    assert int(solution.stats["num_feature_updates"]) == 1
    # The damping is doubled, then times 4, 8, ...: it has been found from the outside.
    r, jacobian = residuals(y), np.array([[-20 * y[0], 10.0], [-1.0, 0.0]])
    scale = np.linalg.norm(jacobian, axis=0)
    gradient = jacobian.T @ r / scale
    pushed = (jacobian / scale) @ gradient
    damping = 1e-8 * (pushed @ pushed) / (gradient @ gradient)
    for i in range(rejected + 1):
        step = damped_step(r, jacobian, damping, scale)
        after = half_squares(residuals(y + step))
        assert (after < half_squares(r)) == (i == rejected)
        damping *= 2 ** (i + 1)
    np.testing.assert_allclose(solution.value, y + step, rtol=1e-9)


class Valley(eqx.Module):
    """Rosenbrock's residuals as a model with targets of zero."""

    y: jax.Array

    def __call__(self, x):
        return rosenbrock(self.y, None) + 0 * x


def test_the_loss_never_increases():
    start, data = Valley(jnp.asarray([-1.2, 1.0])), (jnp.zeros((1, 1)), jnp.zeros((1, 2)))
    solution = gnlin.solve(start, data, gnlin.LevenbergMarquardt())
    loss = np.append(solution.history.loss, solution.loss)
    assert np.all(np.diff(loss) <= 1e-12 * loss[:-1])
    assert loss[-1] < 1e-20


#
# Problems
#


def scaled_rosenbrock(y, scale):
    return scale * rosenbrock(y, None)


@pytest.mark.parametrize(
    "name",
    [
        "default",
        "matrix-free",
        pytest.param("marquardt", marks=pytest.mark.exhaustive),
        pytest.param("curvature", marks=pytest.mark.exhaustive),
    ],
)
def test_rosenbrock_in_any_units_of_the_residuals(name):
    for scale in (1.0, 1e-6, 1e6):
        start = jnp.asarray([-1.2, 1.0])
        solution = least_squares(
            scaled_rosenbrock, VARIANTS[name], start, jnp.asarray(scale)
        )
        assert solution.result == optx.RESULTS.successful
        np.testing.assert_allclose(solution.value, 1, rtol=1e-8)
        assert int(solution.stats["num_rejected_steps"]) > 0
        assert int(solution.stats["num_steps"]) < 60


@pytest.mark.parametrize(
    "dtype", [pytest.param(jnp.float32, marks=pytest.mark.exhaustive), jnp.float64]
)
def test_powell_singular(dtype):
    """The Jacobian is singular at the solution, 0: convergence is linear only."""
    start = jnp.asarray([3.0, -1.0, 0.0, 1.0], dtype)
    solver = gnlin.LevenbergMarquardt()
    solution = least_squares(powell_singular, solver, start, max_steps=1000)
    assert solution.value.dtype == dtype
    assert solution.result == optx.RESULTS.successful
    size = np.linalg.norm(powell_singular(solution.value, None))
    assert size < (1e-3 if dtype == jnp.float32 else 1e-8)


def test_wide():
    """There are fewer residuals than parameters, so all residuals can be zero."""
    solver = gnlin.LevenbergMarquardt()
    y, (a, _) = sines_data((3, 7))
    args = as_jax((a, np.sin(a @ np.cos(np.arange(7.0)))))
    solution = least_squares(sines, solver, jnp.asarray(y), args)
    assert solution.result == optx.RESULTS.successful
    np.testing.assert_allclose(sines(solution.value, args), 0, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("default", (6, 4)),
        ("kernel", (6, 4)),
        ("curvature", (4, 6)),
    ],
)
def test_rank_deficient(name, shape):
    solver = VARIANTS[name]
    y, args = deficient(shape, rank=2)
    solution = least_squares(linear, solver, *as_jax((y, args)))
    assert solution.result == optx.RESULTS.successful
    a, b = args
    best = half_squares(a @ np.linalg.pinv(a, rcond=1e-10) @ b - b)
    assert half_squares(linear(np.asarray(solution.value), args)) <= best * (1 + 1e-12)
    assert np.linalg.norm(solution.value) < 1e3


def test_the_same_minimum_as_scipy():
    y, args = sines_data((7, 3), seed=5)
    solution = least_squares(sines, VARIANTS["default"], *as_jax((y, args)))
    expected = scipy.optimize.least_squares(
        lambda y: sines_numpy(y, args)[0],
        y,
        lambda y: sines_numpy(y, args)[1],
        xtol=1e-15,
        ftol=1e-15,
        gtol=1e-15,
    )
    assert solution.result == optx.RESULTS.successful
    np.testing.assert_allclose(solution.value, expected.x, rtol=1e-6)


def test_counts():
    y, args = as_jax(sines_data((7, 3), seed=5))
    solver = gnlin.LevenbergMarquardt()
    stats = least_squares(sines, solver, y, args, max_steps=4).stats
    trials = int(stats["num_accepted_steps"]) + int(stats["num_rejected_steps"])
    assert int(stats["num_feature_updates"]) == 4
    # Rows by forward mode: accelerations take evaluations and no passes.
    assert float(stats["num_jvps"]) == 4 * 3
    assert trials >= 4


def test_a_parameter_without_influence_stays():
    def fn(y, args):
        return rosenbrock(y[:2], args)

    solution = least_squares(
        fn, gnlin.LevenbergMarquardt(), jnp.asarray([-1.2, 1.0, 5.0])
    )
    assert solution.result == optx.RESULTS.successful
    np.testing.assert_allclose(solution.value, [1, 1, 5], rtol=1e-8)


def test_it_converges_where_gauss_newton_does_not():
    """arctan from afar: full steps overshoot by more each time."""

    def fn(y, args):
        return jnp.arctan(y)

    assert np.arctan(3.0) * (1 + 3.0**2) > 2 * 3
    solution = least_squares(fn, gnlin.LevenbergMarquardt(), jnp.asarray([3.0]))
    assert solution.result == optx.RESULTS.successful
    np.testing.assert_allclose(solution.value, 0, atol=1e-9)


def test_success_is_claimed_at_stationary_points_only():
    """Large damping makes small steps, which are not convergence."""
    start = jnp.asarray([-1.2, 1.0])
    for first in (1e3, 1e8, 1e12):
        solver = gnlin.LevenbergMarquardt(damping=first)
        solution = least_squares(scaled_rosenbrock, solver, start, jnp.asarray(1.0))
        if solution.result == optx.RESULTS.successful:
            np.testing.assert_allclose(solution.value, 1, rtol=1e-6)
    assert solution.result == optx.RESULTS.successful


def test_without_finite_steps_the_run_does_not_succeed():
    """Every step leads to a NaN: no damping helps, and the gradient is not zero."""

    def fn(y, args):
        return jnp.where(y == 1.0, 1.0 * y, jnp.nan)

    solution = least_squares(fn, gnlin.LevenbergMarquardt(), jnp.ones(2))
    assert solution.result != optx.RESULTS.successful
    np.testing.assert_array_equal(solution.value, 1)


@pytest.mark.slow
def test_acceleration_shortens_the_way_through_a_narrow_valley():
    def fn(y, args):
        return jnp.stack([1e4 * (y[1] - y[0] ** 2), 1 - y[0]])

    start = jnp.asarray([-1.2, 1.0])
    steps = [
        int(
            least_squares(
                fn,
                gnlin.LevenbergMarquardt(acceleration=acceleration),
                start,
                max_steps=5000,
            ).stats["num_steps"]
        )
        for acceleration in (True, False)
    ]
    assert 3 * steps[0] < steps[1]


#
# The verdict
#


@pytest.mark.parametrize(
    ("fn", "start"),
    [
        pytest.param(lambda y, args: 1 + y**4, 1.0, id="quartic"),
        pytest.param(
            *(lambda y, args: 1e3 + y**2, 1e-3),
            id="large constant",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_minimum_with_a_large_residual_is_success(fn, start):
    """The Jacobian is singular there."""
    solution = least_squares(fn, VARIANTS["default"], jnp.array([start]))
    assert half_squares(np.asarray(fn(solution.value, None))) <= half_squares(
        np.asarray(fn(np.zeros(1), None))
    ) * (1 + 1e-9)
    assert solution.result == optx.RESULTS.successful


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        # a function with steps, a wrong derivative, and a kink at the minimum
        ("default", lambda y, args: jnp.floor(10 * y) / 10 + 1e-3 * y + 2),
        ("default", lambda y, args: jax.lax.stop_gradient(-2 * y) + y + 5),
        ("identity", lambda y, args: 1 + jnp.abs(y - 1)),
    ],
    ids=["steps", "wrong derivative", "kink, identity"],
)
def test_without_a_descent_step_the_run_does_not_succeed(fn, name):
    solution = least_squares(fn, VARIANTS[name], jnp.array([3.0]))
    assert solution.result == optx.RESULTS.stagnation


@pytest.mark.slow
@pytest.mark.parametrize("method", ["svd", "matrix-free"])
def test_an_enormous_damping_is_not_convergence(method):
    solver = gnlin.LevenbergMarquardt(scaling="identity", damping=1e14, method=method)
    solution = least_squares(lambda y, args: jnp.exp(y) - 2, solver, jnp.array([3.0]))
    assert solution.result == optx.RESULTS.successful
    np.testing.assert_allclose(solution.value, np.log(2), rtol=1e-9)


@pytest.mark.slow
def test_an_infinite_residual_that_does_not_depend_on_the_parameters():
    fn = lambda y, args: jnp.concatenate([y - 1, jnp.array([jnp.inf])])
    for name in ("default", "matrix-free"):
        solution = least_squares(fn, VARIANTS[name], jnp.array([3.0]))
        assert solution.result == optx.RESULTS.nonfinite
        np.testing.assert_array_equal(solution.value, [3.0])


def test_an_exact_prediction_lowers_the_damping_by_ten():
    nielsen = gnlin.LevenbergMarquardt(damping=1e-3)
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)))
    fn = lambda y, a: a @ y - 1
    end = least_squares(
        fn, nielsen, jnp.zeros(3), matrix, max_steps=2, options={"history": 2}
    )
    first, second = end.stats["history"]["damping"]
    np.testing.assert_allclose(second / first, 1 / 10)


#
# Across batches
#


class Neuron(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return jnp.tanh(self.w @ x)[None]


@pytest.mark.exhaustive
def test_across_batches_it_never_ends_as_diverged():
    """Near the solution many steps do not lower the loss of their batch of 8."""
    truth = np.array([1.0, -1.0, 0.5])
    for seed in range(10):
        generator = np.random.default_rng(seed)
        x = generator.normal(size=(800, 3)).astype(np.float32)
        noise = 0.1 * generator.normal(size=800)
        y = (np.tanh(x @ truth) + noise)[:, None].astype(np.float32)
        result = gnlin.fit(
            Neuron(jnp.zeros(3, jnp.float32)),
            (x, y),
            gnlin.LevenbergMarquardt(),
            batch_size=8,
            steps=1000,
            key=jax.random.key(seed),
            progress=False,
        )
        assert result.result == optx.RESULTS.nonlinear_max_steps_reached
        np.testing.assert_allclose(result.model.w, truth, atol=0.1)


@pytest.mark.slow
def test_rows_that_do_not_fit_where_their_factors_do():
    """The default scaling needs the rows, and manages without them."""
    model = eqx.nn.MLP(60, 1, 60, 1, jnp.tanh, key=jax.random.key(0), dtype=float)
    x = np.random.default_rng(0).normal(size=(60, 60))
    solver = gnlin.LevenbergMarquardt(memory_budget=200_000)
    solution = gnlin.solve(model, (x, np.sin(x[:, :1])), solver, max_steps=10)
    assert solution.loss < 0.1 * solution.history.loss[0]


@pytest.mark.slow
def test_conjugate_gradients_that_cannot_converge_have_a_limit():
    """A classifier with singular values over twenty decades in single precision."""
    n = 200
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, n)))[0] for _ in range(2))
    a = jnp.asarray(left * np.logspace(2, -18, n) @ right, jnp.float32)
    labels = jnp.asarray(rng.integers(0, 2, n))
    model = lambda y, x: jnp.stack([x @ y, -x @ y]), jnp.zeros(n, jnp.float32)

    def iterations_a_trial(solver, num_steps):
        loss, data = gnlin.SoftmaxCrossEntropy(), (a, labels)
        stats = gnlin.solve(model, data, solver, loss=loss, max_steps=num_steps).stats
        trials = stats["num_accepted_steps"] + stats["num_rejected_steps"]
        return stats["num_inner_steps"] / trials

    default = gnlin.LevenbergMarquardt(method="matrix-free")
    precise = gnlin.LevenbergMarquardt(method="matrix-free", tolerance=1e-6)
    assert 200 < iterations_a_trial(default, 40) <= 300
    assert iterations_a_trial(precise, 12) > 300


@pytest.mark.slow
def test_limit_of_conjugate_gradients_rises_while_steps_lower_the_loss():
    """Bratu's equation on a grid, whose steps take more than 300 iterations."""
    n, h = 32, 1 / 33

    def residuals(u, _):
        u_ = jnp.pad(u, 1)
        around = u_[:-2, 1:-1] + u_[2:, 1:-1] + u_[1:-1, :-2] + u_[1:-1, 2:]
        return (around - 4 * u) / h**2 + 6 * jnp.exp(u)

    start = jnp.zeros((n, n), jnp.float64)
    solver = gnlin.LevenbergMarquardt(method="matrix-free")
    solution = gnlin.solve(start, gnlin.Residuals(residuals), solver, max_steps=30)
    assert solution.reason.endswith("converged")

    line = scipy.sparse.diags([1.0, -2.0, 1.0], [-1, 0, 1], (n, n)) / h**2
    laplacian = scipy.sparse.kronsum(line, line).tocsc()
    known = np.zeros(n * n)
    for _ in range(10):  # Newton's method
        slope = laplacian + scipy.sparse.diags(6 * np.exp(known))
        residual = laplacian @ known + 6 * np.exp(known)
        known -= scipy.sparse.linalg.spsolve(slope.tocsc(), residual)
    np.testing.assert_allclose(solution.model.ravel(), known, rtol=1e-10)


def test_any_units_by_products_alone():
    """In single precision, squares of the gradient under- or overflow."""
    x = jnp.linspace(0.0, 3.0, 30, dtype=jnp.float32)
    two, noise = jnp.float32(2), jnp.float32(0.1) * jnp.sin(9 * x)
    solver = gnlin.LevenbergMarquardt(
        damping=gnlin.damping.Nielsen(), method="matrix-free"
    )

    @jax.jit
    def fit(scale):
        def fn(y, _):
            curve = y[0] * jnp.exp(-y[1] * x) - two * jnp.exp(-x / two)
            return scale * (curve + noise)

        start = jnp.array([0.1, 3.0], jnp.float32)
        return optx.least_squares(fn, solver, start, max_steps=100, throw=False).value

    known = fit(jnp.float32(1))
    for scale in (1e-12, 1e10):
        np.testing.assert_allclose(fit(jnp.float32(scale)), known, rtol=1e-4)


@pytest.mark.slow
def test_a_root_in_single_precision():
    """Optimistix compares the function itself with `atol`."""

    def root(**tolerances):
        solver, start = gnlin.LevenbergMarquardt(**tolerances), jnp.float32(1)
        square = lambda y, _: y**2 - 2
        return optx.root_find(square, solver, start, max_steps=20, throw=False)

    found = root(rtol=1e-6, atol=1e-6)
    assert found.result == optx.RESULTS.successful
    np.testing.assert_allclose(found.value, 2**0.5, rtol=1e-6)
    assert root().result != optx.RESULTS.successful  # which docs/choosing.md says


@pytest.mark.slow
def test_a_loss_that_is_nearly_linear_far_off():
    """Its curvature at the start is 1e-68, and its gradient is 0.01."""
    x = jnp.linspace(0, 3, 40)
    line = lambda p, x: p[0] + p[1] * x, jnp.zeros(2)
    loss = gnlin.losses.LogCosh(0.01)
    solution = gnlin.solve(line, (x, 1 + 2 * x), loss=loss, progress=False)
    assert solution.result == optx.RESULTS.successful
    np.testing.assert_allclose(solution.model[1], [1, 2], rtol=1e-6)


@pytest.mark.slow
def test_a_column_that_vanishes_at_the_minimum():
    # The derivative by a depth is zero at the surface. If its scale fell, the damping
    # that its own curvature needs would hold back all other parameters.
    rng = np.random.default_rng(0)
    stations, epicentres = rng.uniform(-5, 5, (8, 2)), rng.uniform(-3, 3, (5, 2))
    squared_depths = np.array([-1.0, 1.0, 4.0, 9.0, 2.0])  # the first is as if above
    delays = rng.normal(0, 0.3, 8)
    apart = np.sum((epicentres[:, None] - stations[None]) ** 2, axis=-1)
    distances = np.sqrt(np.maximum(apart + squared_depths[:, None], 0.01))
    observed = distances + delays

    def misfits(p, _):
        place, time, delay = p["place"], p["time"], p["delay"]
        apart = jnp.sum((place[:, None, :2] - stations[None]) ** 2, axis=-1)
        distances = jnp.sqrt(apart + place[:, None, 2] ** 2)
        arrivals = distances + time[:, None] + delay[None]
        return {"arrivals": (arrivals - observed) / 0.05, "delays": delay / 0.3}

    start = {
        "place": jnp.tile(jnp.array([0.0, 0.0, 2.0]), (5, 1)),
        "time": jnp.zeros(5),
        "delay": jnp.zeros(8),
    }
    solver = gnlin.LevenbergMarquardt()
    solution = optx.least_squares(misfits, solver, start, max_steps=100, throw=False)
    assert solution.result == optx.RESULTS.successful
    flat, unravel = ravel_pytree(start)
    by_scipy = scipy.optimize.least_squares(
        lambda y: np.asarray(ravel_pytree(misfits(unravel(y), None))[0]),
        flat,
        method="lm",
        xtol=1e-12,
        ftol=1e-14,
    )
    loss = 0.5 * np.sum(ravel_pytree(misfits(solution.value, None))[0] ** 2)
    np.testing.assert_allclose(loss, by_scipy.cost, rtol=1e-8)
    assert abs(solution.value["place"][0, 2]) < 1e-6
