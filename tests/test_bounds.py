"""Bounds on the parameters, compared with SciPy's bounded least squares."""

import classical_problems
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
import pytest
import scipy.optimize
from jax.flatten_util import ravel_pytree
from problems import least_squares, rosenbrock

import gnlin
from gnlin._curve_fit._parameters import limits
from gnlin._linearisation._bounds import Box
from gnlin._solver._between_bounds import between_bounds


SOLVERS = {
    "levenberg-marquardt": gnlin.LevenbergMarquardt,
    "gauss-newton": gnlin.GaussNewton,
    "damped": lambda **kw: gnlin.DampedGaussNewton(0.01, **kw),
    "damped, by the kernel": lambda **kw: gnlin.DampedGaussNewton(
        0.01, method="kernel", **kw
    ),
    "truncated": lambda **kw: gnlin.TruncatedGaussNewton(0.01, **kw),
    "by steps": lambda **kw: gnlin.IterativeLinearisation(1000, 1e-2, **kw),
}


def linear(y, args):
    a, b = args
    return a @ y - b


def linear_problems(m, n, number):
    rng = np.random.default_rng(m + n)
    for _ in range(number):
        a, b = rng.normal(size=(m, n)), 3 * rng.normal(size=m)
        yield a, b, -rng.uniform(0, 0.3, n), rng.uniform(0, 0.3, n)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("levenberg-marquardt", (6, 10)),
        pytest.param("damped, by the kernel", (9, 1), marks=pytest.mark.slow),
        pytest.param("truncated", (1, 1), marks=pytest.mark.slow),
        ("by steps", (20, 5)),
    ],
)
def test_a_linear_problems_constrained_minimum(name, shape):
    m, n = shape

    @eqx.filter_jit
    def run(args, bounds):
        solver = SOLVERS[name](bounds=bounds)
        return optx.least_squares(linear, solver, jnp.zeros(n), args, max_steps=1000)

    for a, b, lower, upper in linear_problems(m, n, 5):
        ours = run((a, b), (lower, upper)).value
        theirs = scipy.optimize.lsq_linear(a, b, (lower, upper), "bvls", tol=1e-14)
        cost = 0.5 * np.sum((a @ ours - b) ** 2)
        np.testing.assert_allclose(cost, theirs.cost, rtol=1e-7, atol=1e-14)
        assert np.all((lower <= ours) & (ours <= upper))


def test_a_parameter_at_its_bound_stays_there():
    """Otherwise rounding would leave no step that lowers the loss, and the run would
    fail."""
    (problem,) = (p for p in classical_problems.PROBLEMS if p.name == "box-3")
    free = scipy.optimize.least_squares(problem.residuals, problem.start, method="lm")
    lower, upper = problem.in_a_box(free.x).bounds
    solver = gnlin.LevenbergMarquardt(bounds=(lower, upper))
    start = jnp.asarray(problem.in_a_box(free.x).from_far(1.0))
    found = optx.least_squares(problem.residuals, solver, start, max_steps=200)
    expected = scipy.optimize.least_squares(
        problem.residuals, np.asarray(start), bounds=(lower, upper), xtol=1e-15
    )
    y = np.asarray(found.value)
    assert np.sum(problem.residuals(y) ** 2) <= 2 * expected.cost * (1 + 1e-9)
    assert np.any(y == upper)


def decrease_of(lin):
    """Return the decrease of half the sum of squares, as a function of the step."""
    half = lambda outputs: jnp.sum(outputs**2) / 2
    return lambda step: half(lin.outputs) - half(lin.outputs + lin.jvp(step))


@pytest.mark.parametrize("shape", [(30, 12), (6, 12)])
def test_a_trial_between_bounds_inverts_one_matrix_however_many_faces(shape):
    """Count in the compiled trial: the loop over faces contains no factorisation."""
    m, p = shape
    rng = np.random.default_rng(p)
    a = rng.normal(size=(m, p))
    damped = a.T @ a + 0.1 * np.eye(p)
    b = 3 * rng.normal(size=m)
    lower, upper = -rng.uniform(0, 0.3, p), rng.uniform(0, 0.3, p)
    lin = gnlin.linearise(lambda y, _: a @ y - b, jnp.zeros(p))
    lin = lin.within(Box.of((lower, upper), lin.point), jnp.zeros(p, bool))

    num_asked = 0

    def inverse():
        nonlocal num_asked
        num_asked += 1
        return jnp.linalg.inv(jnp.asarray(damped))

    free = jnp.linalg.solve(damped, a.T @ b)
    step, _ = between_bounds(decrease_of(lin), lin, free, inverse=inverse)
    assert num_asked == 1
    # On the final faces the step minimises the damped problem.
    step = np.asarray(step)
    held = (step == lower) | (step == upper)
    assert np.sum(held) > 1
    assert np.all((lower <= step) & (step <= upper))
    slope = damped @ step - a.T @ b
    np.testing.assert_allclose(slope[~held], 0, atol=1e-10)


def test_few_steps_where_many_bounds_are_active():
    """Each outer step solves the bounded linear problem, moving from face to face."""
    for a, b, lower, upper in linear_problems(50, 30, 2):
        solver = gnlin.GaussNewton(bounds=(lower, upper))
        solution = optx.least_squares(linear, solver, jnp.zeros(30), (a, b))
        assert solution.stats["num_feature_updates"] <= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "m", "p", "number"), [("damped", 40, 20, 8), ("gauss-newton", 150, 110, 2)]
)
def test_ill_conditioned_problems_where_half_of_the_bounds_are_active(name, m, p, number):
    """Against SciPy. Steps that hold all violated parameters at once would cycle or jam
    here, and a path that misses a bound by rounding would end as NaN."""
    rng = np.random.default_rng(0)
    values = np.logspace(0, -3, p)

    @jax.jit
    def run(args, bounds):
        solver = SOLVERS[name](bounds=bounds)
        start = 0.5 * (bounds[0] + bounds[1])
        return optx.least_squares(linear, solver, start, args, max_steps=50, throw=False)

    for _ in range(number):
        u, _ = np.linalg.qr(rng.normal(size=(m, p)))
        v, _ = np.linalg.qr(rng.normal(size=(p, p)))
        a = np.sqrt(m) * (u * values) @ v.T
        b = a @ rng.normal(size=p) + 0.1 * rng.normal(size=m)
        bounds = -rng.uniform(0, 1, p), rng.uniform(0, 1, p)
        ours = run((a, b), bounds)
        theirs = scipy.optimize.lsq_linear(a, b, bounds, "bvls", tol=1e-14)
        assert np.sum(theirs.active_mask != 0) > 5
        assert ours.result == optx.RESULTS.successful
        assert ours.stats["num_steps"] < 30
        np.testing.assert_allclose(ours.value, theirs.x, atol=1e-7)


@jax.jit
def rosenbrock_between(lower, upper, start):
    """One program for all bounds."""
    solver = gnlin.LevenbergMarquardt(bounds=(lower, upper))
    return optx.least_squares(rosenbrock, solver, start, max_steps=3000, throw=False)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        (-np.inf, 0.5),
        ([-1.5, 0.3], np.inf),
        ([0.0, 0.0], [0.0, 2.0]),  # a parameter that stays
        (-2.0, [0.2, np.inf]),
    ],
)
def test_rosenbrock(lower, upper):
    low, high = (np.broadcast_to(np.asarray(b, float), 2) for b in (lower, upper))
    start = np.clip([-1.2, 1.0], low, high)
    solution = rosenbrock_between(low, high, start)
    room = np.where(low == high, 1e-15, 0)
    reference = scipy.optimize.least_squares(
        lambda y: np.array([10 * (y[1] - y[0] ** 2), 1 - y[0]]),
        start,
        bounds=(low - room, high + room),
        xtol=1e-15,
        ftol=1e-15,
        gtol=1e-15,
    )
    np.testing.assert_allclose(solution.value, reference.x, rtol=1e-6, atol=1e-8)
    assert np.all((low <= solution.value) & (solution.value <= high))


def test_the_function_is_never_asked_beyond():
    def logarithm(y, x):
        return jnp.log(y) * x - 1.0  # NaN below zero

    x = jnp.linspace(-3.0, -1.0, 5)  # towards exp(-0.5) and beyond
    solver = gnlin.LevenbergMarquardt(bounds=(0.5, None))
    solution = optx.least_squares(logarithm, solver, jnp.array([10.0]), x)
    unbounded = np.exp(np.sum(x) / np.sum(x**2))
    np.testing.assert_allclose(solution.value[0], max(unbounded, 0.5), rtol=1e-6)


def test_infinite_bounds_have_no_effect():
    start = np.array([-1.2, 1.0])
    solver = gnlin.LevenbergMarquardt()
    without = least_squares(rosenbrock, solver, start, max_steps=3000)
    infinite = rosenbrock_between(np.full(2, -np.inf), np.full(2, np.inf), start)
    np.testing.assert_allclose(infinite.value, without.value, rtol=1e-12)
    assert infinite.stats["num_steps"] == without.stats["num_steps"]


def test_a_method_for_full_rank_is_refused(unchecked):
    """The column of a parameter at a bound is zero."""
    for method in (lx.QR(), lx.Normal(lx.Cholesky())):
        with pytest.raises(ValueError, match="Jacobian of full rank: use `lineax"):
            gnlin.GaussNewton(method=method, bounds=(0.0, None))
    gnlin.GaussNewton(method=lx.SVD(), bounds=(0.0, None))
    solver, x = gnlin.GaussNewton(method=lx.QR()), np.arange(3.0)
    with pytest.raises(ValueError, match="needs a Jacobian of full rank"):
        gnlin.curve_fit(lambda p, x: p * x, x, x, 1.0, solver, bounds=(0.0, None))


def test_a_start_beyond_is_moved_to_the_bounds_by_optimistix():
    most = np.full(2, 0.5)
    solution = rosenbrock_between(np.full(2, -np.inf), most, np.array([3.0, 3.0]))
    np.testing.assert_allclose(solution.value, [0.5, 0.25], rtol=1e-8)


def test_bounds_on_part_of_a_dictionary():
    def decay(p, x):
        return p["a"] * jnp.exp(-p["rate"] * x)

    x = np.linspace(0, 3, 30)
    data = x[None], (2 * np.exp(-1.5 * x))[None]
    start = {"a": jnp.array(1.0), "rate": jnp.array(0.5)}
    solver = gnlin.LevenbergMarquardt(bounds=(None, {"rate": 1.0}))
    _, parameters = gnlin.solve((decay, start), data, solver).model
    assert parameters["rate"] == 1.0
    shape = np.exp(-x)
    a = shape @ data[1][0] / (shape @ shape)
    np.testing.assert_allclose(parameters["a"], a, rtol=1e-8)


def test_many_bounds_in_one_program():
    upper = np.array([[0.2, 0.2], [0.5, 0.5], [np.inf, np.inf]])
    run = lambda upper: rosenbrock_between(np.full(2, -np.inf), upper, np.ones(2) / 5)
    values = jax.vmap(run)(upper).value
    np.testing.assert_allclose(values[:, 0], [0.2, 0.5, 1.0], rtol=1e-6)
    run(np.array([0.3, 0.6]))
    before = rosenbrock_between._cache_size()
    run(np.array([0.4, 0.7]))
    assert rosenbrock_between._cache_size() == before


@pytest.mark.slow
def test_in_single_precision():
    a, b, lower, upper = next(linear_problems(20, 5, 1))
    args = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    bounds = jnp.asarray(lower, jnp.float32), jnp.asarray(upper, jnp.float32)
    solver = gnlin.LevenbergMarquardt(bounds=bounds)
    y = optx.least_squares(linear, solver, jnp.zeros(5, jnp.float32), args).value
    theirs = scipy.optimize.lsq_linear(a, b, (lower, upper), "bvls", tol=1e-14)
    np.testing.assert_allclose(y, theirs.x, atol=1e-5)


@pytest.mark.parametrize(
    "solver",
    [
        gnlin.LevenbergMarquardt(bounds=(0.0, 0.3)),
        gnlin.IterativeLinearisation(5, 0.1, bounds=(0.0, 0.3)),
    ],
)
def test_a_network_on_batches_stays_inside(solver):
    x = np.random.default_rng(0).normal(size=(40, 3))
    y = x @ np.array([[1.0], [0.2], [-1.0]])
    model = lambda w, x: w @ x, jnp.full((1, 3), 0.1)
    result = gnlin.fit(model, (x, y), solver, epochs=20, batch_size=20, progress=False)
    weight = np.asarray(result.model[1])
    assert np.all((weight >= 0) & (weight <= 0.3))
    np.testing.assert_allclose(weight[0, [0, 2]], [0.3, 0.0], atol=0.02)


def decay_with(bounds, start=1.0):
    x = jnp.linspace(0, 1, 5)
    solver = gnlin.LevenbergMarquardt(bounds=bounds)
    model = (lambda p, x: p["a"] * x, {"a": jnp.array(start)})
    return gnlin.solve(model, (x, 2 * x), solver)


@pytest.mark.parametrize(
    ("bounds", "start", "message"),
    [
        ((0.0, 0.5), 1.0, "start of the parameter `a` .* within its bounds, but is 1"),
        ((1.0, 0.5), 1.0, "lower bound must not be above the upper one, but 1 and 0.5"),
        ((np.nan, 0.5), 0.2, "lower bound must not be above"),
        (({"a": 1.0}, 0.5), 1.0, "lower bound of the parameter `a` must not be above"),
        ((0.0, np.array([2.0])), 1.0, "upper bounds must be a number, or have"),
        (({"b": 0.0}, None), 1.0, "no parameter 'b' to have a lower bound: .* are 'a'"),
        ((None, {"a": np.ones(3)}), 1.0, "upper bounds must be a number, or have"),
        ((0.0, 1.0, 2.0), 1.0, "must be a pair"),
        ([(0.0, 5.0), (0.0, 1.0)], 1.0, r"may mean a pair for each parameter"),
        (3.0, 1.0, "must be a pair"),
    ],
)
def test_errors_of_bounds(bounds, start, message):
    with pytest.raises(ValueError, match=message):
        decay_with(bounds, start)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((1.0, 0.5), "lower bound must not be above the upper one, but 1 and 0.5"),
        ((np.array([0.0, 2.0]), 1.0), "must not be above the upper one, but 2 and 1"),
        ((np.array([0.0]), None), r"have the shapes \(1,\)"),
        ((np.zeros((1, 2)), None), "lower bounds must be a number, or have"),
    ],
)
def test_errors_of_bounds_through_optimistix(bounds, message):
    def run():
        solver = gnlin.LevenbergMarquardt(bounds=bounds)
        return optx.least_squares(rosenbrock, solver, jnp.array([0.5, 0.5]))

    with pytest.raises(ValueError, match=message):
        run()


def test_empty_traced_bounds_end_as_not_finite():
    end = rosenbrock_between(np.ones(2), np.zeros(2), np.array([-1.2, 1.0]))
    assert end.result == optx.RESULTS.nonfinite


@pytest.mark.slow
def test_the_curvature_between_bounds_is_summed_over_parts():
    powers = jnp.arange(1.0, 11.0)
    fn = gnlin.PerExample(lambda w, x: jnp.tanh(x @ w) ** powers)
    x = jax.random.normal(jax.random.key(0), (20_000, 30))
    point = jnp.full(30, 0.1)
    blocked = jnp.arange(30) < 3

    def curvature(point, x):
        lin = gnlin.linearise(fn, point, x)
        return lin.within(Box.of((0.1, None), point), blocked).curvature()

    compiled = jax.jit(curvature).lower(point, x).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    rows = np.array(gnlin.linearise(fn, point, x).matrix())
    assert memory.temp_size_in_bytes < rows.nbytes / 4
    rows[:, :3] = 0
    np.testing.assert_allclose(compiled(point, x), rows.T @ rows, rtol=1e-9)


@pytest.mark.parametrize(
    "solver",
    [
        gnlin.LevenbergMarquardt(bounds=(0, 1), method="matrix-free"),
        gnlin.TruncatedGaussNewton(0.1, bounds=(0, 1)),
        gnlin.DampedGaussNewton(1e-9, bounds=(0, 1), method="curvature"),
    ],
)
def test_many_bounds_that_bind(solver):
    """Against SciPy. Half of 100 parameters end at a bound, and are held many at a
    time."""
    rng = np.random.default_rng(0)
    matrix, b = rng.normal(size=(130, 100)), 8 * rng.normal(size=130)
    exact = scipy.optimize.lsq_linear(matrix, b, (0, 1), method="bvls", tol=1e-14).x
    assert np.sum((exact == 0) | (exact == 1)) > 50
    args = jnp.asarray(matrix), jnp.asarray(b)
    solution = least_squares(linear, solver, jnp.full(100, 0.5), args, max_steps=50)
    np.testing.assert_allclose(solution.value, exact, atol=1e-7)
    assert solution.stats["num_steps"] < 20


def test_many_bounds_take_few_solutions():
    """If the parameters do not affect one another, one solution holds all of them."""
    p = 200
    b = np.linspace(2, 3, p) * np.where(np.arange(p) % 2 == 0, 1, -1)
    lin = gnlin.linearise(lambda y, _: y - b, jnp.zeros(p))
    lin = lin.within(Box.of((-1.0, 1.0), lin.point), jnp.zeros(p, bool))
    calls = []

    def again(lin):
        jax.debug.callback(lambda: calls.append(1))
        return -lin.outputs

    step, decrease = between_bounds(decrease_of(lin), lin, jnp.asarray(b), again)
    jax.effects_barrier()
    np.testing.assert_array_equal(step, np.sign(b))
    np.testing.assert_allclose(decrease, 0.5 * np.sum(b**2 - (b - np.sign(b)) ** 2))
    assert len(calls) == 1


T = np.linspace(0, 4, 50)


def decay(p, t):
    return p[0] * jnp.exp(-p[1] * t) + p[2]


LISTS = {
    "lists": ([0, 0, 0], [2, 3, 1]),
    "tuples": ((0, 0, 0), (2, 3, 1)),
    "None": ([0, None, 0], [2, None, 1]),
    "beside an array": ([0, 1.0, 0], np.array([2, 3, 0.9])),
    "beside a number": (0, [2, 3, 1]),
    "arrays": (np.zeros(3), np.array([2.0, 3.0, 1.0])),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_are_the_bounds_of_each_entry(name):
    bounds = LISTS[name]
    lower = {"None": [0, -np.inf, 0], "beside an array": [0, 1, 0]}.get(name, [0, 0, 0])
    upper = {"None": [2, np.inf, 1], "beside an array": [2, 3, 0.9]}.get(name, [2, 3, 1])
    for start in (jnp.ones(3), [jnp.asarray(1.0)] * 3):
        for each in (bounds, limits(bounds, start)):
            box = Box.of(each, start)
            assert jax.tree.structure(box.upper) == jax.tree.structure(start)
            np.testing.assert_array_equal(ravel_pytree(box.lower)[0], lower)
            np.testing.assert_array_equal(ravel_pytree(box.upper)[0], upper)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "None" else pytest.mark.exhaustive) for n in LISTS],
)
def test_bounds_may_be_lists(name):
    y, start = 2.5 * np.exp(-1.3 * T) + 0.3, np.array([1.0, 1.1, 0.1])
    residuals = lambda p, _: decay(p, T) - y
    tight = {"xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-14}
    expected = scipy.optimize.least_squares(
        lambda p: np.asarray(residuals(p, None)),
        start,
        bounds=([0, 0, 0], [2, 3, 1]),
        **tight,
    ).x
    solver = gnlin.LevenbergMarquardt(bounds=LISTS[name])
    start = jnp.asarray(start)
    found = (
        optx.least_squares(residuals, solver, start).value,
        gnlin.solve(start, gnlin.Residuals(residuals), solver).model,
        gnlin.curve_fit(decay, T, y, start, bounds=LISTS[name]).parameters,
        jnp.stack(
            optx.least_squares(
                lambda p, _: residuals(jnp.stack(p), None), solver, list(start)
            ).value
        ),
    )
    for each in found:
        np.testing.assert_allclose(each, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (([0, 0], [2, 3, 1]), r"lower bounds must be a number, or .* shapes, \(3,\)"),
        (([0, 4, 0], [2, 3, 1]), "must not be above the upper one, but 4 and 3"),
        (scipy.optimize.Bounds([0] * 3, [1] * 3), r"pass `\(bounds.lb, bounds.ub\)`"),
    ],
)
def test_errors_of_lists_and_of_scipys_bounds(bounds, message):
    start = jnp.array([1.0, 1.1, 0.1])

    def run():
        solver = gnlin.LevenbergMarquardt(bounds=bounds)
        return optx.least_squares(lambda p, _: decay(p, T), solver, start)

    with pytest.raises(ValueError, match=message):
        run()
    message = message.replace("one, but 4 and 3", "")
    with pytest.raises(ValueError, match=message):
        gnlin.curve_fit(decay, T, np.ones(50), start, bounds=bounds)


@pytest.mark.slow
@pytest.mark.parametrize("solver", [gnlin.LevenbergMarquardt, gnlin.GaussNewton])
def test_traced_bounds_without_a_point_end_at_a_finite_point(solver):
    start = jnp.array([0.5, 0.5])

    @jax.jit
    def run(lower):
        residuals = lambda p, _: p**2 - 3
        found = optx.least_squares(
            residuals, solver(bounds=(lower, 1.0)), start, throw=False
        )
        return found.value, found.result == optx.RESULTS.nonfinite

    value, has_failed = run(jnp.array([0.0, 2.0]))
    assert has_failed
    assert np.isfinite(value).all()
    value, has_failed = run(jnp.array([0.0, 0.2]))
    np.testing.assert_allclose(value, 1.0, rtol=1e-9)
    assert not has_failed
