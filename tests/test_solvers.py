"""Behaviour that all solvers share, through `optimistix.least_squares`."""

import functools
import math
import subprocess
import sys
import textwrap

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
import scipy.linalg
from problems import (
    as_jax,
    damped_step,
    descent_step,
    gauss_newton_step,
    least_squares,
    literal_loop,
    rosenbrock,
    sines,
    sines_data,
    sines_numpy,
    truncated_step,
)

import gnlin
from gnlin.filters import GradientFlow, Tikhonov


def flow_step(r, jacobian, time):
    """Compute the flow delta' = -phi^T (r + phi delta) by a matrix exponential."""
    p = jacobian.shape[1]
    system = np.zeros((p + 1, p + 1))
    system[:p, :p] = -jacobian.T @ jacobian
    system[:p, p] = -jacobian.T @ r
    return scipy.linalg.expm(time * system)[:p, p]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "solver", [gnlin.LevenbergMarquardt, gnlin.IterativeLinearisation]
)
def test_a_class_is_no_solver(solver):
    with pytest.raises(ValueError, match="of a solver was given: write brackets after"):
        optx.least_squares(sines, solver, *as_jax(sines_data((3, 2))))


# Each solver, with its step in NumPy from (r, J, number of the outer step).
SOLVERS = {
    "gauss-newton": (gnlin.GaussNewton(), lambda r, j, k: gauss_newton_step(r, j)),
    "damped": (gnlin.DampedGaussNewton(0.3), lambda r, j, k: damped_step(r, j, 0.3)),
    "damped, marquardt": (
        gnlin.DampedGaussNewton(0.3, scaling="marquardt"),
        lambda r, j, k: damped_step(r, j, 0.3, np.linalg.norm(j, axis=0)),
    ),
    "truncated": (
        gnlin.TruncatedGaussNewton(0.2, damping=0.1),
        lambda r, j, k: truncated_step(r, j, 0.2, 0.1)[0],
    ),
    "iterative linearisation": (
        gnlin.IterativeLinearisation(50, 0.03),
        lambda r, j, k: descent_step(r, j, 50, 0.03),
    ),
    "heavy ball": (
        gnlin.IterativeLinearisation(50, 0.03, 0.5),
        lambda r, j, k: descent_step(r, j, 50, 0.03, 0.5),
    ),
    "filtered": (
        gnlin.methods.FilteredGaussNewton(GradientFlow(5.0)),
        lambda r, j, k: flow_step(r, j, 5.0),
    ),
}
LM = {"levenberg-marquardt": (gnlin.LevenbergMarquardt(), None)}
FEW = ["gauss-newton", "truncated", "iterative linearisation", "levenberg-marquardt"]
few_solvers = pytest.mark.parametrize(
    "solver", [(SOLVERS | LM)[name][0] for name in FEW], ids=FEW
)


def result_is(solution, name):
    return bool(solution.result == getattr(optx.RESULTS, name))


#
# Steps
#


@pytest.mark.parametrize("name", SOLVERS)
def test_n_steps_are_n_updates(name):
    (solver, step), n = SOLVERS[name], 3
    y, args = sines_data((7, 3))
    solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=n)
    expected = literal_loop(step, y, args, n)
    np.testing.assert_allclose(solution.value, expected, rtol=1e-9, atol=1e-11)
    assert result_is(solution, "nonlinear_max_steps_reached")
    assert int(solution.stats["num_steps"]) == n
    assert int(solution.stats["num_feature_updates"]) == n
    assert int(solution.stats["num_accepted_steps"]) == n
    assert int(solution.stats["num_rejected_steps"]) == 0


def split(y):
    return {"pair": y[:2].reshape(1, 2), "scalar": y[2]}


def split_sines(y, args):
    r = sines(jnp.append(y["pair"].ravel(), y["scalar"]), args)
    return (r[0], {"rest": r[1:].reshape(2, 3)})


def test_pytrees_of_parameters_and_residuals():
    solver = gnlin.LevenbergMarquardt()
    y, args = as_jax(sines_data((7, 3)))
    flat = least_squares(sines, solver, y, args, max_steps=3)
    solution = least_squares(split_sines, solver, split(y), args, max_steps=3)
    assert jax.tree.structure(solution.value) == jax.tree.structure(split(y))
    for leaf, expected in zip(
        jax.tree.leaves(solution.value), jax.tree.leaves(split(flat.value)), strict=True
    ):
        assert leaf.shape == expected.shape
        np.testing.assert_allclose(leaf, expected, rtol=1e-10)


def oriented(y, args):
    """Return `sines` with permuted parameters and rotated residuals."""
    data, order, rotation = args
    return rotation @ sines(y[order], data)


@pytest.mark.slow
@hypothesis.given(st.integers(0, 2**32 - 1))
def test_order_of_parameters_and_rotation_of_residuals_do_not_matter(seed):
    solver = gnlin.LevenbergMarquardt()
    generator = np.random.default_rng(seed)
    y, data = sines_data((7, 3), seed=5)
    order = generator.permutation(3)
    rotation, _ = np.linalg.qr(generator.normal(size=(7, 7)))
    shuffled = np.empty(3)
    shuffled[order] = y
    data = as_jax(data)
    plain = least_squares(
        oriented, solver, jnp.asarray(y), (data, jnp.arange(3), jnp.eye(7)), max_steps=2
    )
    turned = least_squares(
        oriented,
        solver,
        jnp.asarray(shuffled),
        (data, jnp.asarray(order), jnp.asarray(rotation)),
        max_steps=2,
    )
    np.testing.assert_allclose(turned.value[order], plain.value, rtol=1e-8, atol=1e-9)


SCALED = {
    "damped, marquardt": gnlin.DampedGaussNewton(0.3, scaling="marquardt"),
    "lm, more": gnlin.LevenbergMarquardt(scaling="more"),
}


def rescaled(y, args):
    data, units = args
    return sines(units * y, data)


@pytest.mark.parametrize("solver", SCALED.values(), ids=SCALED)
@hypothesis.given(st.lists(st.floats(-3, 3), min_size=3, max_size=3))
def test_units_of_the_parameters_do_not_matter(solver, exponents):
    y, data = as_jax(sines_data((7, 3), seed=6))
    units = 10.0 ** jnp.asarray(exponents)
    plain = least_squares(rescaled, solver, y, (data, jnp.ones(3)), max_steps=4)
    scaled = least_squares(rescaled, solver, y / units, (data, units), max_steps=4)
    np.testing.assert_allclose(units * scaled.value, plain.value, rtol=1e-8)
    for name in ("num_accepted_steps", "num_rejected_steps"):
        assert int(scaled.stats[name]) == int(plain.stats[name])


def test_without_scaling_units_do_matter():
    y, data = as_jax(sines_data((7, 3), seed=6))
    units = jnp.asarray([100.0, 1.0, 0.01])
    solver = gnlin.DampedGaussNewton(0.3)
    plain = least_squares(rescaled, solver, y, (data, jnp.ones(3)), max_steps=4)
    scaled = least_squares(rescaled, solver, y / units, (data, units), max_steps=4)
    assert not np.allclose(units * scaled.value, plain.value, rtol=1e-2)


#
# How a run ends
#


@few_solvers
def test_converges_to_a_stationary_point(solver):
    y, args = sines_data((7, 3), seed=5)
    solution = least_squares(sines, solver, *as_jax((y, args)), max_steps=3000)
    assert result_is(solution, "successful")
    r, jacobian = sines_numpy(np.asarray(solution.value), args)
    assert np.linalg.norm(jacobian.T @ r) < 1e-6 * np.linalg.norm(r)
    assert int(solution.stats["num_steps"]) < 3000


@few_solvers
def test_a_start_without_residuals_ends_with_success(solver):
    """The run ends within as many steps as the criterion needs."""
    y, (a, _) = sines_data((7, 3))
    args = as_jax((a, np.sin(a @ y)))
    solution = least_squares(sines, solver, jnp.asarray(y), args, max_steps=3000)
    assert result_is(solution, "successful")
    assert int(solution.stats["num_steps"]) <= 4
    np.testing.assert_allclose(solution.value, y, rtol=1e-14)


@few_solvers
def test_a_start_with_residuals_of_exactly_zero_ends_with_success(solver):
    _, (a, _) = sines_data((7, 3))
    args = as_jax((a, np.zeros(7)))
    # The same program as above
    exactly = least_squares(sines, solver, jnp.zeros(3), args, max_steps=3000)
    assert result_is(exactly, "successful")
    np.testing.assert_array_equal(exactly.value, np.zeros(3))


def test_squares_that_underflow_are_no_success():
    """In single precision the square of 1e-25 is zero, and so is every loss."""
    solver = gnlin.LevenbergMarquardt()
    y, args = jax.tree.map(lambda x: x.astype(np.float32), sines_data((7, 3)))

    def tiny(y, args):
        return np.float32(1e-25) * sines(y, args)

    solution = least_squares(tiny, solver, *as_jax((y, args), jnp.float32), max_steps=100)
    assert not result_is(solution, "successful")


@few_solvers
def test_a_vanishing_gradient_ends_with_success(solver):
    """The residual is constant: nothing can be gained, and nothing may divide by zero."""
    args = as_jax((np.zeros((7, 3)), np.ones(7)))
    solution = least_squares(sines, solver, jnp.ones(3), args, max_steps=3000)
    assert result_is(solution, "successful")
    np.testing.assert_array_equal(solution.value, np.ones(3))


def test_throw():
    solver = gnlin.DampedGaussNewton(0.3)
    y, args = as_jax(sines_data((7, 3)))
    with pytest.raises(RuntimeError, match="maximum number of steps"):
        optx.least_squares(sines, solver, y, args, max_steps=1, throw=True)


def sines_with_aux(y, args):
    return sines(y, args), {"point": y, "constant": 3}


def test_aux_is_of_the_point_that_is_returned():
    solver = gnlin.LevenbergMarquardt()
    y, args = as_jax(sines_data((7, 3)))
    solution = least_squares(sines_with_aux, solver, y, args, max_steps=3, has_aux=True)
    np.testing.assert_array_equal(solution.aux["point"], solution.value)
    assert solution.aux["constant"] == 3
    assert not np.array_equal(solution.value, y)


@pytest.mark.exhaustive
def test_best_so_far():
    solver = gnlin.GaussNewton()
    y, args = as_jax(sines_data((7, 3)))
    best = least_squares(
        sines_with_aux,
        optx.BestSoFarLeastSquares(solver),
        y,
        args,
        max_steps=4,
        has_aux=True,
    )
    # optimistix examines the points at which steps start.
    starts = [y] + [
        least_squares(sines, solver, y, args, max_steps=n).value for n in (1, 2, 3)
    ]
    losses = [float(jnp.sum(sines(start, args) ** 2)) for start in starts]
    expected = starts[int(np.argmin(losses))]
    np.testing.assert_allclose(best.value, expected, rtol=1e-12)
    np.testing.assert_array_equal(best.aux["point"], best.value)


def test_best_so_far_returns_an_earlier_point_than_a_diverging_run():
    y, args = as_jax(sines_data((7, 3), seed=1))
    solver = gnlin.IterativeLinearisation(jnp.array(3), 2.0)
    run = least_squares(sines, solver, y, args, max_steps=4)
    best = least_squares(sines, optx.BestSoFarLeastSquares(solver), y, args, max_steps=4)
    assert jnp.sum(sines(best.value, args) ** 2) < jnp.sum(sines(run.value, args) ** 2)


#
# Numbers that are not finite
#


def logarithm(y, args):
    return jnp.log(y) + 5


def root(y, args):
    return jnp.sqrt(y) - 2 + 0 * jnp.sum(y)


# The first step from here leaves the logarithm's domain.
FAR = {
    "gauss-newton": gnlin.GaussNewton(),
    "damped, curvature": gnlin.DampedGaussNewton(1e-8, method="curvature"),
    "truncated, matrix-free": gnlin.TruncatedGaussNewton(0.1, method="matrix-free"),
    "matrix-free": gnlin.IterativeLinearisation(1000, 0.5, method="matrix-free"),
    "infinite period": gnlin.IterativeLinearisation(math.inf, 0.5),
    "eigh": gnlin.GaussNewton(method="eigh"),
}
FAR_LM = {
    "levenberg-marquardt": gnlin.LevenbergMarquardt(),
    "lm, matrix-free": gnlin.LevenbergMarquardt(scaling="identity", method="matrix-free"),
}


# The others of the solvers end in the same way, by the same code.
OFTEN = "gauss-newton", "truncated, matrix-free", "infinite period", "levenberg-marquardt"


@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(
            solver, id=name, marks=() if name in OFTEN else pytest.mark.exhaustive
        )
        for name, solver in (FAR | FAR_LM).items()
    ],
)
def test_residuals_not_finite_at_the_start_or_at_the_next_point(solver):
    for start in ([2.0, -1.0], [2.0, 0.0], [3.0, 2.0]):
        start = jnp.asarray(start)
        if start[1] > 0 and isinstance(solver, gnlin.LevenbergMarquardt):
            continue  # it steps back: see below
        solution = least_squares(logarithm, solver, start)
        assert result_is(solution, "nonfinite")
        np.testing.assert_array_equal(solution.value, start)
        assert int(solution.stats["num_steps"]) == 1
        assert int(solution.stats["num_accepted_steps"]) == 0


@pytest.mark.parametrize("name", ["damped, curvature", "levenberg-marquardt"])
def test_jacobian_not_finite_at_the_start(name):
    solver = (FAR | FAR_LM)[name]
    start = jnp.asarray([1.0, 0.0])
    assert np.all(np.isfinite(root(start, None)))
    solution = least_squares(root, solver, start)
    assert result_is(solution, "nonfinite")
    np.testing.assert_array_equal(solution.value, start)


@pytest.mark.parametrize("solver", FAR_LM.values(), ids=FAR_LM)
def test_levenberg_marquardt_steps_back_from_points_that_are_not_finite(solver):
    solution = least_squares(logarithm, solver, jnp.asarray([3.0, 2.0]))
    assert result_is(solution, "successful")
    np.testing.assert_allclose(solution.value, np.exp(-5.0), rtol=1e-7)
    assert int(solution.stats["num_rejected_steps"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("solver", [FAR["gauss-newton"], FAR["infinite period"]])
def test_the_last_finite_point_is_kept_later_on_too(solver):
    def valley(y, args):  # the first steps are fine, a later one leaves the domain
        return jnp.stack([jnp.log(y[0]), jnp.where(y[0] < 2, jnp.nan, y[1])])

    solution = least_squares(valley, solver, jnp.asarray([2.5, 1.0]))
    assert result_is(solution, "nonfinite")
    assert np.all(np.isfinite(valley(solution.value, None)))


#
# Transformations
#


GRIDS = {
    "period, to infinity": (
        lambda period: gnlin.IterativeLinearisation(period, 0.05),
        [1.0, 1e5, math.inf],
    ),
    "first damping": (
        lambda damping: gnlin.LevenbergMarquardt(damping=damping),
        [1e-6, 1e-3, 10.0],
    ),
}


@pytest.mark.parametrize(
    ("build", "values"),
    [
        pytest.param(
            *case, id=name, marks=pytest.mark.slow if name == "first damping" else ()
        )
        for name, case in GRIDS.items()
    ],
)
def test_vmap_over_a_grid_and_starts_is_one_program(build, values):
    y, args = as_jax(sines_data((7, 3), seed=5))
    values, starts = jnp.asarray(values), jnp.stack([y, 0.5 * y, -y])
    num_traces = 0

    def counted(y, args):
        nonlocal num_traces
        num_traces += 1
        return sines(y, args)

    @jax.jit
    def run(value, y, args):
        solver = build(value)
        solution = optx.least_squares(counted, solver, y, args, max_steps=3, throw=False)
        return solution.value, solution.stats["num_steps"]

    grid = jax.jit(jax.vmap(run, (0, 0, None)))
    together, num_steps = grid(values, starts, args)
    after_grid = num_traces
    for i in range(len(values)):
        alone, alone_steps = run(values[i], starts[i], args)
        np.testing.assert_allclose(together[i], alone, rtol=1e-9)
        assert num_steps[i] == alone_steps
        assert np.all(np.isfinite(alone))
    after_first = num_traces
    grid(values[::-1], starts, args)
    run(values[0], y, args)
    assert num_traces == after_first
    assert after_first <= 2 * after_grid, "one trace for the grid, one alone"
    assert len(np.unique(np.asarray(together)[:, 0])) >= len(values) - 1


NEIGHBOURS = {
    "truncated": [gnlin.TruncatedGaussNewton(v, damping=v) for v in (0.1, 0.2)],
    "learning rate": [gnlin.IterativeLinearisation(9, v) for v in (0.1, 0.2)],
    "levenberg-marquardt": [gnlin.LevenbergMarquardt(damping=v) for v in (1e-3, 1)],
}


@pytest.mark.parametrize("solvers", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_another_number_of_the_same_solver_does_not_compile_again(solvers):
    y, args = as_jax(sines_data((7, 3)))
    num_traces = []

    def counted(y, args):
        num_traces.append(0)
        return sines(y, args)

    values = []
    for solver in solvers:
        values.append(least_squares(counted, solver, y, args, max_steps=2).value)
        if len(values) == 1:
            first = len(num_traces)
    assert len(num_traces) == first
    assert not np.allclose(values[0], values[1])


def test_derivative_of_the_solution_with_respect_to_the_data():
    solver = gnlin.LevenbergMarquardt()
    y, (a, b) = as_jax(sines_data((7, 3), seed=5, size=0.4))
    b = 0.5 * b

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def first(b):
        solution = optx.least_squares(sines, solver, y, (a, b), max_steps=2000)
        return solution.value @ jnp.asarray([1.0, 2.0, 3.0]), solution.value

    (_, y_star), gradient = first(b)
    gradient = np.asarray(gradient)
    for i in (0, 4):
        h = 1e-4 * np.eye(7)[i]
        ahead, behind = (float(first(b + step)[0][0]) for step in (h, -h))
        slope = (ahead - behind) / 2e-4
        np.testing.assert_allclose(gradient[i], slope, rtol=1e-5, atol=1e-7)

    # The implicit function theorem: d theta = -H^-1 phi^T d r, and dr = -db.
    half_squares = lambda y: 0.5 * jnp.sum(sines(y, (a, b)) ** 2)
    hessian = jax.jit(jax.hessian(half_squares))(y_star)
    jacobian = sines_numpy(np.asarray(y_star), (a, b))[1]
    expected = jacobian @ np.linalg.solve(hessian, np.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)


#
# Single precision
#


@pytest.mark.parametrize("name", ["gauss-newton", "levenberg-marquardt"])
def test_single_precision(name):
    solver, _ = (SOLVERS | LM)[name]
    y, args = sines_data((7, 3), seed=5)
    single = as_jax((y, args), jnp.float32)
    converged = least_squares(sines, solver, *single, max_steps=3000)
    assert converged.value.dtype == jnp.float32
    assert result_is(converged, "successful")


def test_a_few_steps_in_single_precision():
    solver, step = SOLVERS["iterative linearisation"]
    y, args = sines_data((7, 3), seed=5)
    solution = least_squares(sines, solver, *as_jax((y, args), jnp.float32), max_steps=3)
    expected = literal_loop(step, y, args, 3)
    np.testing.assert_allclose(solution.value, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.exhaustive
def test_mixed_precision():
    y, args = sines_data((7, 3), seed=5)
    solver = gnlin.LevenbergMarquardt()
    single = as_jax(y, jnp.float32)
    solution = least_squares(sines, solver, single, as_jax(args))
    assert solution.value.dtype == jnp.float32
    assert result_is(solution, "successful")
    tree = {"a": jnp.asarray(1.5, jnp.float32), "b": jnp.asarray(1.5)}
    solution = least_squares(
        lambda y, args: rosenbrock(jnp.stack([y["a"].astype(float), y["b"]]), args),
        solver,
        tree,
    )
    assert solution.value["a"].dtype == jnp.float32
    assert solution.value["b"].dtype == jnp.float64
    np.testing.assert_allclose(solution.value["b"], 1, rtol=1e-5)


@pytest.mark.slow
def test_with_double_precision_disabled():
    script = """
        import warnings
        warnings.simplefilter("error")
        import gnlin, jax, jax.numpy as jnp, math, numpy as np

        assert not jax.config.jax_enable_x64
        warnings.filterwarnings("ignore", ".*loss has risen")
        model = lambda w, x: w @ x, jnp.full((1, 1), 0.3)
        x = np.linspace(-1, 1, 6, dtype=np.float32)[:, None]
        solution = gnlin.solve(model, (x, 2 * x), max_steps=3)
        assert jnp.allclose(solution.model[1], 2, atol=1e-2)
        for period in (10**8, math.inf):
            solver = gnlin.IterativeLinearisation(period, 1e-2)
            solution = gnlin.solve(model, (x, np.sin(x)), solver, max_steps=1)
            assert solution.stats["num_accepted_steps"] == 1
            assert jnp.all(jnp.isfinite(solution.history.loss))
            assert solution.history.loss.dtype == jnp.float32

        labels, loss = np.array([0, 1, 2, 1, 0, 2]), gnlin.SoftmaxCrossEntropy()
        model = lambda w, x: w @ x, jnp.full((3, 1), 0.3)
        solver = gnlin.IterativeLinearisation(10, 0.1, damping=0.1)
        solution = gnlin.solve(model, (x, labels), solver, loss=loss, max_steps=2)
        assert solution.stats["num_accepted_steps"] == 2
        assert solution.history.loss.dtype == jnp.float32
        assert solution.loss < solution.history.loss[0]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


#
# Mistakes
#


@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(gnlin.LevenbergMarquardt(), marks=pytest.mark.exhaustive),
        gnlin.DampedGaussNewton(0.3),
    ],
    ids=lambda solver: type(solver).__name__,
)
def test_the_history_through_optimistix_is_that_of_solve(solver):
    x = np.linspace(0.0, 1.0, 12)
    curve = lambda b, x: b[0] * jnp.exp(-b[1] * x)
    y = 2 * np.exp(-3 * x) + 0.01 * np.sin(40 * x)
    start = jnp.array([1.0, 1.0])
    # Stop before rounding decides the value of a step.
    expected = gnlin.solve((curve, start), (x, y), solver, max_steps=4).history

    def run(start, num_rows):
        return optx.least_squares(
            lambda b, _: curve(b, x) - y,
            solver,
            start,
            max_steps=4,
            throw=False,
            options={"history": num_rows},
        ).stats["history"]

    found = run(start, 40)
    assert isinstance(found, gnlin.History)
    assert list(found) == list(expected)
    assert len(found) == len(found.columns)
    np.testing.assert_array_equal(found.loss, found["loss"])
    for name, column in found.items():
        np.testing.assert_allclose(column, expected[name], rtol=1e-6, atol=1e-12)
    if not isinstance(solver, gnlin.DampedGaussNewton):
        return
    # Steps beyond the last row are not recorded; each of several runs has its own
    # history.
    several = jax.vmap(lambda start: run(start, 2))(jnp.stack([start, 2 * start]))
    np.testing.assert_allclose(several["loss"][0], expected["loss"][:2], rtol=1e-9)
    assert several["loss"].shape == (2, 2)
    assert (np.ptp(several["loss"], axis=0) > 0).all()


def test_without_rows_there_is_no_history():
    y0 = jnp.ones(2)
    solution = optx.least_squares(rosenbrock, gnlin.LevenbergMarquardt(), y0)
    assert "history" not in solution.stats
    for wrong in (0, 2.5, "all"):
        with pytest.raises(ValueError, match="`history` must be a whole number"):
            optx.least_squares(
                rosenbrock, gnlin.LevenbergMarquardt(), y0, options={"history": wrong}
            )


@few_solvers
def test_options_are_refused(solver):
    with pytest.raises(ValueError, match=r'"history" and "jac", but \[\'lower\'\]'):
        optx.least_squares(lambda y, args: y, solver, jnp.ones(3), None, {"lower": 0})


@few_solvers
@pytest.mark.filterwarnings("ignore:Complex support in Optimistix")
def test_parameters_and_residuals_must_be_real_numbers(solver):
    for y, fn in (
        (jnp.ones(3, complex), lambda y, args: jnp.real(y)),
        (jnp.ones((0,)), lambda y, args: jnp.ones(3)),
        (jnp.ones(3), lambda y, args: y.astype(complex)),
        (jnp.ones(3), lambda y, args: y[:0]),
    ):
        with pytest.raises(ValueError, match=r"[Pp]arameters|[Rr]esiduals"):
            optx.least_squares(fn, solver, y)


@pytest.mark.filterwarnings("ignore:Complex support in Optimistix")
def test_complex_residuals_as_the_error_says():
    """Compared with the closed form: the real part of the mean."""
    fn = lambda y, args: y.astype(complex) - jnp.array([1 + 2j, 3 - 4j])
    y0, solver = jnp.array(0.0), gnlin.GaussNewton()
    with pytest.raises(ValueError, match=r"pass `gnlin.Residuals\(fn\)` in place of"):
        optx.least_squares(fn, solver, y0)
    found = optx.least_squares(gnlin.Residuals(fn), solver, y0).value
    np.testing.assert_allclose(found, 2, rtol=1e-12)


@pytest.mark.parametrize("verbose", [frozenset({"loss"}), 1, "loss", None])
def test_verbose_may_be_a_function(verbose):
    with pytest.raises(ValueError, match=r"must be `True`, `False` or a function"):
        gnlin.LevenbergMarquardt(verbose=verbose)


nan, inf = math.nan, math.inf
MISTAKES = {
    "damping": [
        *(lambda v=v: gnlin.DampedGaussNewton(v) for v in (-1.0, nan, inf)),
        *(lambda v=v: gnlin.LevenbergMarquardt(damping=v) for v in (-1.0, 0.0, nan, inf)),
        *(lambda v=v: gnlin.TruncatedGaussNewton(0.1, v) for v in (-1.0, nan, inf)),
        lambda: gnlin.DampedGaussNewton(jnp.array(-1.0)),
    ],
    "tolerance": [
        *(lambda v=v: gnlin.TruncatedGaussNewton(v) for v in (0, 1, 1.0, 1.5, -0.1, nan)),
    ],
    "max_inner_steps": [
        lambda: gnlin.TruncatedGaussNewton(0.1, max_inner_steps=0),
        lambda: gnlin.TruncatedGaussNewton(0.1, max_inner_steps=jnp.inf),
    ],
    "period": [
        *(
            lambda v=v: gnlin.IterativeLinearisation(v, 0.1)
            for v in (0, 2.5, -1, nan, -inf)
        ),
        lambda: gnlin.IterativeLinearisation(jnp.array(0), 0.1),
    ],
    "learning_rate": [
        *(lambda v=v: gnlin.IterativeLinearisation(1, v) for v in (0, 0.0, -1, nan, inf)),
    ],
    "momentum": [
        *(
            lambda v=v: gnlin.IterativeLinearisation(1, 0.1, v)
            for v in (1, 1.0, -0.1, nan)
        ),
    ],
    "rcond": [lambda: gnlin.GaussNewton(rcond=-1.0)],
    "initial": [lambda: gnlin.methods.EisenstatWalker(initial=1.0)],
    "gamma": [lambda: gnlin.methods.EisenstatWalker(gamma=0.0)],
    "exponent": [lambda: gnlin.methods.EisenstatWalker(exponent=-1.0)],
    "maximum": [lambda: gnlin.methods.EisenstatWalker(maximum=1.0)],
    "minimum": [
        lambda: gnlin.methods.EisenstatWalker(minimum=0.0),
        lambda: gnlin.methods.EisenstatWalker(minimum=0.5, maximum=0.1),
    ],
    "max_steps": [lambda: gnlin.methods.ConjugateGradients(0.1, max_steps=0)],
    "method": [
        lambda: gnlin.GaussNewton(method="qr"),
        lambda: gnlin.DampedGaussNewton(1.0, method="cg"),
        lambda: gnlin.LevenbergMarquardt(method=""),
        lambda: gnlin.TruncatedGaussNewton(0.1, method="svd"),
        lambda: gnlin.IterativeLinearisation(1, 0.1, method="cg"),
        lambda: gnlin.IterativeLinearisation(1, 0.1, method="curvature"),
        lambda: gnlin.methods.FilteredGaussNewton(Tikhonov(1.0), method="cg"),
    ],
    "scaling": [
        lambda: gnlin.DampedGaussNewton(1.0, scaling="none"),
        lambda: gnlin.LevenbergMarquardt(scaling=""),
    ],
    "filter": [lambda: gnlin.methods.FilteredGaussNewton(0.1)],
}


def test_a_forcing_sequence_is_made_inside_a_compiled_program():
    made = jax.jit(lambda x: gnlin.methods.EisenstatWalker(0.3).initial * x)
    assert made(1.0) == 0.3


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "build"), [(name, build) for name in MISTAKES for build in MISTAKES[name]]
)
def test_errors_of_hyperparameters(name, build):
    with pytest.raises(ValueError, match=f"`{name}`") as caught:
        build()
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert ". " not in message


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: gnlin.GaussNewton(method="kernel"), "must be one of"),
        (lambda: gnlin.IterativeLinearisation(1, 0.1, method="curvature"), "one of"),
        (
            lambda: gnlin.LevenbergMarquardt(method="matrix-free", scaling="more"),
            "needs the dense",
        ),
        (
            lambda: gnlin.DampedGaussNewton(1.0, scaling="more", method="matrix-free"),
            "needs the dense Jacobian",
        ),
        (
            lambda: gnlin.GaussNewton(rcond=0.1, method="matrix-free"),
            "cannot be used for",
        ),
        (
            lambda: gnlin.methods.FilteredGaussNewton(
                jnp.ones_like, method="matrix-free"
            ),
            "cannot be used for",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_errors_of_methods(build, words):
    y, args = as_jax(sines_data((4, 4)))
    with pytest.raises(ValueError, match=words):
        optx.least_squares(sines, build(), y, args)


def test_a_solver_is_a_pytree_of_its_numbers():
    a, b = gnlin.DampedGaussNewton(1.0), gnlin.DampedGaussNewton(2)
    assert jax.tree.structure(eqx.filter(a, eqx.is_array)) == jax.tree.structure(
        eqx.filter(b, eqx.is_array)
    )
    assert float(jax.tree.map(lambda x: 2 * x, eqx.filter(a, eqx.is_array)).damping) == 2
