"""Gauss-Newton and damped Gauss-Newton, compared with dense formulas."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from problems import (
    as_jax,
    damped_step,
    deficient,
    descent_step,
    gauss_newton_step,
    least_squares,
    linear,
    literal_loop,
    SHAPES,
    sines,
    sines_data,
    sines_numpy,
)

import gnlin
from gnlin.filters import GradientDescent, GradientFlow, PseudoInverse, Tikhonov


def one_step(fn, solver, y, args):
    solution = least_squares(fn, solver, *as_jax((y, args)), max_steps=1)
    return np.asarray(solution.value) - y


#
# Gauss-Newton
#


@eqx.filter_jit
def steps_by_each_method(fn, filter, methods, y, args):
    """Return {method: step} from one program that serves all filters of one kind."""
    lin = gnlin.linearise(fn, y, args)
    problem = gnlin.authoring.Quadratic(lin.jacobian, lin.outputs)
    return {
        method: gnlin.authoring.choose(problem, filter, method=method).solve(filter).step
        for method in methods
    }


@pytest.mark.parametrize("name", ["tall", "wide", "one parameter"])
def test_step_is_the_minimum_norm_one(name):
    y, args = sines_data(SHAPES[name])
    expected = gauss_newton_step(*sines_numpy(y, args))
    scale = np.max(np.abs(expected))
    methods = ["auto", "svd", "eigh", "matrix-free"]
    steps = steps_by_each_method(sines, PseudoInverse(), methods, *as_jax((y, args)))
    for method, step in steps.items():
        tolerance = {"matrix-free": 1e-7, "eigh": 1e-9}.get(method, 1e-10)
        np.testing.assert_allclose(
            step, expected, rtol=0, atol=tolerance * scale, err_msg=method
        )


@pytest.mark.parametrize(
    ("method", "shape"),
    [("svd", (6, 4)), ("eigh", (4, 6)), ("matrix-free", (4, 6))],
)
def test_rank_deficient(shape, method):
    y, args = deficient(shape, rank=2)
    solver = gnlin.GaussNewton(method=method)
    solution = least_squares(linear, solver, *as_jax((y, args)))
    assert solution.result == optx.RESULTS.successful
    a, b = args
    expected = y - np.linalg.pinv(a, rcond=1e-10) @ (a @ y - b)
    np.testing.assert_allclose(solution.value, expected, rtol=1e-7, atol=1e-8)
    assert int(solution.stats["num_steps"]) <= 3


def test_small_singular_values_are_kept_unless_rcond_drops_them():
    a = np.diag([1.0, 1e-6, 1e-9])
    y, b = np.zeros(3), np.array([1.0, 1e-6, 1e-9])
    step = one_step(linear, gnlin.GaussNewton(), y, (a, b))
    np.testing.assert_allclose(step, np.ones(3), rtol=1e-6)
    step = one_step(linear, gnlin.GaussNewton(rcond=1e-7), y, (a, b))
    np.testing.assert_allclose(step, [1, 1, 0], rtol=1e-9)


def test_a_linear_problem_is_solved_in_one_step_and_recognised_in_the_next():
    y, args = deficient((6, 3), rank=3)
    solution = least_squares(linear, gnlin.GaussNewton(), *as_jax((y, args)))
    expected = np.linalg.lstsq(*args, rcond=None)[0]
    np.testing.assert_allclose(solution.value, expected, rtol=1e-12)
    assert int(solution.stats["num_steps"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_linear_problem_converges_by_products_in_single_precision(noise):
    rng = np.random.default_rng(0)
    matrix = jnp.asarray(rng.standard_normal((60, 40)), jnp.float32)
    true = jnp.asarray(rng.standard_normal(40), jnp.float32)
    y = matrix @ true + noise * jnp.asarray(rng.standard_normal(60), jnp.float32)
    solution = gnlin.solve(
        (lambda p, _: matrix @ p, jnp.zeros(40, jnp.float32)),
        (jnp.zeros((1, 1), jnp.float32), y[None]),
        gnlin.GaussNewton(method="matrix-free"),
    )
    assert solution.result == optx.RESULTS.successful
    assert int(solution.stats["num_steps"]) <= 4
    expected = np.linalg.lstsq(np.float64(matrix), np.float64(y))[0]
    np.testing.assert_allclose(solution.model[1], expected, atol=2e-5)


def test_counts():
    y, args = as_jax(sines_data((7, 3)))
    solution = least_squares(sines, gnlin.GaussNewton(), y, args, max_steps=2)
    assert float(solution.stats["num_jvps"]) == 6
    assert float(solution.stats["num_vjps"]) == 0
    y, args = as_jax(sines_data((3, 7)))
    solution = least_squares(sines, gnlin.GaussNewton(), y, args, max_steps=2)
    assert float(solution.stats["num_jvps"]) == 0
    assert float(solution.stats["num_vjps"]) == 6


def test_filtered():
    y, args = sines_data((7, 3))
    solver = gnlin.methods.FilteredGaussNewton(PseudoInverse(0.5))
    step = one_step(sines, solver, y, args)
    expected = gauss_newton_step(*sines_numpy(y, args), rcond=0.5)
    np.testing.assert_allclose(step, expected, rtol=1e-10)


def test_a_user_defined_filter():
    y, args = sines_data((7, 3))
    r, jacobian = sines_numpy(y, args)
    # g = eta for every eigenvalue: this is one step of gradient descent.
    solver = gnlin.methods.FilteredGaussNewton(lambda w: jnp.full_like(w, 0.1))
    step = one_step(sines, solver, y, args)
    np.testing.assert_allclose(step, descent_step(r, jacobian, 1, 0.1), rtol=1e-10)


def test_a_filter_that_explodes_ends_in_divergence():
    y, args = as_jax(sines_data((7, 3)))
    solver = gnlin.methods.FilteredGaussNewton(GradientDescent(10**6, 10.0))
    solution = least_squares(sines, solver, y, args)
    assert solution.result == optx.RESULTS.nonlinear_divergence
    np.testing.assert_array_equal(solution.value, y)


def test_gradient_flow_of_any_time_is_stable():
    y, args = as_jax(sines_data((7, 3)))
    for time in (1e-300, 1e300):
        solver = gnlin.methods.FilteredGaussNewton(GradientFlow(jnp.asarray(time)))
        solution = least_squares(sines, solver, y, args, max_steps=1)
        assert np.all(np.isfinite(solution.value))
        assert solution.result == optx.RESULTS.nonlinear_max_steps_reached or (
            time < 1 and solution.result == optx.RESULTS.successful
        )


#
# Damped Gauss-Newton
#


METHODS = ["svd", "eigh", "kernel", "curvature", "matrix-free"]


@pytest.mark.parametrize("name", ["tall", "wide", "one residual"])
def test_damped_step(name):
    y, args = sines_data(SHAPES[name])
    r, jacobian = sines_numpy(y, args)
    for damping in (1e-6, 1e-3, 1.0, 1e3):
        filter = Tikhonov(jnp.asarray(damping))
        steps = steps_by_each_method(sines, filter, METHODS, *as_jax((y, args)))
        for method, step in steps.items():
            expected = damped_step(r, jacobian, damping)
            # Forming phi phi^T or phi^T phi squares the condition number.
            condition = np.linalg.norm(jacobian, 2) ** 2 / damping + 1
            tolerance = 1e-10
            if method in ("kernel", "curvature", "eigh"):
                tolerance += 1e-15 * condition
            if method == "matrix-free":
                tolerance = 1e-9 * min(condition, 1e3)
            size = np.max(np.abs(expected)) + 1e-16 / tolerance
            np.testing.assert_allclose(
                step, expected, rtol=0, atol=tolerance * size, err_msg=method
            )


def test_damped_step_of_a_rank_deficient_jacobian():
    y, args = deficient((6, 4), rank=2)
    steps = steps_by_each_method(linear, Tikhonov(1e-3), METHODS, *as_jax((y, args)))
    expected = damped_step(linear(y, args), args[0], 1e-3)
    for method, step in steps.items():
        np.testing.assert_allclose(step, expected, rtol=1e-7, atol=1e-8, err_msg=method)


def test_zero_damping_equals_gauss_newton():
    y, args = sines_data((7, 3))
    methods = ["auto", "svd", "eigh", "matrix-free"]
    steps = steps_by_each_method(sines, Tikhonov(0.0), methods, *as_jax((y, args)))
    steps["solver"] = one_step(sines, gnlin.DampedGaussNewton(0.0), y, args)
    expected = gauss_newton_step(*sines_numpy(y, args))
    for method, step in steps.items():
        np.testing.assert_allclose(step, expected, rtol=1e-8, err_msg=method)


@pytest.mark.parametrize("method", ["kernel", "curvature"])
def test_a_singular_matrix_is_reported_and_no_step_taken(method):
    y, (a, b) = deficient((4, 4), rank=1)
    args = (np.round(a), b)  # in whole numbers, for which the Cholesky factor is exact
    args[0][1:] = 0
    solver = gnlin.DampedGaussNewton(0.0, method=method)
    solution = least_squares(linear, solver, *as_jax((y, args)))
    assert solution.result not in (
        optx.RESULTS.successful,
        optx.RESULTS.nonlinear_max_steps_reached,
    )
    np.testing.assert_array_equal(solution.value, y)


@pytest.mark.parametrize(
    ("method", "scaling"),
    [
        ("svd", "marquardt"),
        ("kernel", "more"),
        ("curvature", "marquardt"),
    ],
)
def test_scaled_step(method, scaling):
    y, args = sines_data((7, 3))
    memory = np.zeros(3)

    def step(r, jacobian, k):
        nonlocal memory
        norms = np.linalg.norm(jacobian, axis=0)
        memory = norms if scaling == "marquardt" else np.maximum(norms, 0.8 * memory)
        return damped_step(r, jacobian, 0.3, memory)

    solver = gnlin.DampedGaussNewton(0.3, scaling=scaling, method=method)
    solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=4)
    expected = literal_loop(step, y, args, 4)
    np.testing.assert_allclose(solution.value, expected, rtol=1e-9)


def test_a_column_of_zeros_is_left_alone_by_the_scaling():
    args = (np.array([[1.0, 0.0], [2.0, 0.0]]), np.ones(2))
    for scaling in ("marquardt", "more"):
        solver = gnlin.DampedGaussNewton(0.1, scaling=scaling)
        step = one_step(linear, solver, np.ones(2), args)
        assert step[1] == 0
        assert np.all(np.isfinite(step))


def test_damping_by_a_schedule():
    y, args = sines_data((7, 3))
    solver = gnlin.DampedGaussNewton(lambda step: 2.0 * 0.5**step)
    solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=4)
    expected = literal_loop(lambda r, j, k: damped_step(r, j, 2.0 * 0.5**k), y, args, 4)
    np.testing.assert_allclose(solution.value, expected, rtol=1e-10)


@pytest.mark.parametrize("method", ["kernel", "eigh"])
def test_a_budget_too_small_for_the_jacobian_changes_nothing(method):
    y, args = sines_data((3, 7))
    r, jacobian = sines_numpy(y, args)
    solver = gnlin.DampedGaussNewton(0.3, method=method, memory_budget=100)
    step = one_step(sines, solver, y, args)
    np.testing.assert_allclose(step, damped_step(r, jacobian, 0.3), rtol=1e-10)


def test_auto_falls_back_on_products_when_nothing_fits():
    y, args = as_jax(sines_data((7, 3)))
    solver = gnlin.DampedGaussNewton(0.3, memory_budget=1)
    solution = least_squares(sines, solver, y, args, max_steps=1)
    assert float(solution.stats["num_inner_steps"]) == 3
    assert float(solution.stats["num_vjps"]) >= 4


def test_single_precision_of_each_method():
    y, args = sines_data((7, 3))
    expected = damped_step(*sines_numpy(y, args), 0.3)
    single = as_jax((y, args), jnp.float32)
    for method, step in steps_by_each_method(
        sines, Tikhonov(0.3), METHODS, *single
    ).items():
        assert step.dtype == jnp.float32
        np.testing.assert_allclose(step, expected, rtol=1e-4, err_msg=method)


def test_methods_agree_under_vmap():
    y, args = sines_data((7, 3))
    dampings = np.array([1e-3, 1.0])

    def end(damping):
        solver = gnlin.DampedGaussNewton(damping)
        steps = steps_by_each_method(sines, Tikhonov(damping), METHODS, y, args)
        solved = least_squares(sines, solver, *as_jax((y, args)), max_steps=1)
        return {**steps, "solver": solved.value - y}

    expected = [damped_step(*sines_numpy(y, args), damping) for damping in dampings]
    for method, steps in jax.vmap(end)(dampings).items():
        np.testing.assert_allclose(steps, expected, rtol=1e-6, err_msg=method)


def test_parameters_that_still_move_have_not_converged():
    """The residuals change by less than `rtol` of their size, but the parameter changes
    by 100 %."""
    fn = lambda y, args: jnp.concatenate([jnp.array([1e6]), 1e-4 * (y - 1)])
    solution = least_squares(fn, gnlin.GaussNewton(), jnp.array([0.0]))
    assert int(solution.stats["num_steps"]) == 2
    np.testing.assert_allclose(solution.value, 1)


@pytest.mark.parametrize("time", [0.5, 100.0, np.inf])
def test_gradient_flow_by_products_is_that_by_the_spectrum(time):
    """This also holds for a traced time, which may be infinite."""
    filter, methods = GradientFlow(jnp.asarray(time)), ["svd", "matrix-free"]
    steps = steps_by_each_method(sines, filter, methods, *as_jax(sines_data((7, 3))))
    error = np.linalg.norm(steps["matrix-free"] - steps["svd"])
    assert error < 1e-5 * np.linalg.norm(steps["svd"])


@pytest.mark.slow
@pytest.mark.parametrize("damping", [0.0, 1e-13])
def test_tiny_damping_on_a_singular_problem(damping):
    """Directions with little damping are resolved as long as this is cheap."""
    generator = np.random.default_rng(0)
    matrix = generator.normal(size=(30, 5)) @ generator.normal(size=(5, 30))
    target = jnp.asarray(matrix @ generator.normal(size=30))
    residual = lambda y, a: a @ y - target
    solver = gnlin.DampedGaussNewton(damping)
    solution = optx.least_squares(residual, solver, jnp.zeros(30), jnp.asarray(matrix))
    assert np.linalg.norm(residual(solution.value, matrix)) < 1e-10


def test_preparation_for_other_filters_is_an_error():
    def solve(prepared, filter, method):
        def step(y, args):
            lin = gnlin.linearise(sines, y, args)
            problem = gnlin.authoring.Quadratic(lin.jacobian, lin.outputs)
            ready = gnlin.authoring.choose(problem, prepared, method=method)
            return ready.solve(filter).step

        with pytest.raises(ValueError, match="choose another method for this filter"):
            jax.eval_shape(step, *sines_data((7, 3)))

    for method in ("kernel", "curvature", "products-first"):
        solve(Tikhonov(1.0), PseudoInverse(), method)
    solve(PseudoInverse(), PseudoInverse(), gnlin.methods.NystromKernel(3))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "least"), [("svd", 3e-4), ("eigh", 1e-3)])
def test_damped_steps_use_small_singular_values_in_single_precision(method, least):
    """Singular values above the usual rounding move a damped step even where they are
    below max(m, p) eps, and so do not count as nonzero without damping."""
    rng, (m, p) = np.random.default_rng(0), (20_000, 40)
    left, right = (np.linalg.qr(rng.normal(size=(n, p)))[0] for n in (m, p))
    s = np.geomspace(1, least, p)
    phi = ((left * s) @ right.T).astype(np.float32)
    target = phi.astype(float) @ rng.normal(size=p)
    damping = float(least**2)
    expected = np.linalg.solve(
        phi.T.astype(float) @ phi + damping * np.eye(p), phi.T.astype(float) @ target
    )

    def residuals(y, args):
        return args[0] @ y - args[1]

    args, y = (jnp.asarray(phi), jnp.asarray(target, jnp.float32)), jnp.zeros(p, "f4")
    solver = gnlin.DampedGaussNewton(damping, method=method)
    taken = optx.least_squares(residuals, solver, y, args, max_steps=1, throw=False).value
    error = np.asarray(taken) - expected
    assert np.linalg.norm(error) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("shape", [(300, 20), (40, 30)])
def test_parameters_that_are_not_used_stay(shape):
    """Singular values of columns of zeros are rounding, and must not become steps."""
    rng = np.random.default_rng(0)
    a, b = jnp.asarray(rng.normal(size=shape)), jnp.asarray(rng.normal(size=shape[0]))
    solution = optx.least_squares(
        lambda y, _: jnp.tanh(a @ y[: shape[1]] / 10) - b,
        gnlin.GaussNewton(),
        jnp.full(2 * shape[1], 0.1),
        max_steps=8,
        throw=False,
    )
    unused = solution.value[shape[1] :]
    np.testing.assert_allclose(unused, 0.1, atol=1e-6)


@pytest.mark.parametrize(
    "damping", [0.0, 0, np.float64(0), np.zeros(()), lambda num_steps: 0.0]
)
def test_a_damping_of_zero_is_no_damping(damping):
    """The problem is large enough that damped ones are solved by Cholesky."""
    generator = np.random.default_rng(0)
    half, target = generator.standard_normal((100, 30)), generator.standard_normal(100)
    matrix = np.hstack([half, half])
    least = np.linalg.lstsq(matrix, target, rcond=None)[0]
    residuals = lambda y, data: data[0] @ y - data[1]
    solvers = [gnlin.DampedGaussNewton(damping)]
    if not callable(damping):
        solvers += [gnlin.methods.FilteredGaussNewton(Tikhonov(damping))]
        solvers += [gnlin.DampedGaussNewton(damping, momentum=0.5)]
    for solver in solvers:
        data = as_jax((matrix, target))
        solution = least_squares(residuals, solver, jnp.zeros(60), data)
        assert solution.result == optx.RESULTS.successful
        np.testing.assert_allclose(solution.value, least, rtol=0, atol=1e-10)


def test_larger_problems_without_damping_are_no_damped_ones():
    """For these, a factorisation would be cheaper."""
    filters = []

    class Spied(gnlin.DampedGaussNewton):
        def prepared(self, problem, filter, memory):
            filters.append(filter)
            return super().prepared(problem, filter, memory)

    for method, kind in (("auto", PseudoInverse), ("kernel", Tikhonov)):
        solver = Spied(0.0, method=method)
        least_squares(lambda y, _: y - 1, solver, jnp.zeros(3), max_steps=2)
        assert {type(filter) for filter in filters} == {kind}
        filters.clear()


@pytest.mark.parametrize("inner", [GradientFlow(1.0), Tikhonov(0.25), PseudoInverse()])
def test_history_of_a_filter_with_damping(inner):
    solver = gnlin.methods.FilteredGaussNewton(gnlin.filters.Damped(inner, 0.5))
    x = jnp.linspace(0.0, 1.0, 10)
    fn = lambda p, x: p * x
    solution = gnlin.solve((fn, jnp.ones(())), (x, 2 * x), solver, max_steps=2)
    expected = 0.75 if isinstance(inner, Tikhonov) else 0.5
    np.testing.assert_allclose(solution.history.damping, expected)
