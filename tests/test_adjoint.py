"""Derivatives of minima at bounds and on curved spaces, compared with finite differences
and formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import gnlin


TIMES = np.linspace(0.0, 4.0, 30)
SIGNAL = 2.5 * np.exp(-1.3 * TIMES) + 0.01 * np.sin(20 * TIMES)


def minimum(fn, solver, start, args):
    adjoint = gnlin.methods.ImplicitAdjoint()
    return optx.least_squares(fn, solver, start, args, adjoint=adjoint).value


def chained(p, a):
    return jnp.stack([p[0] - a, p[1] - p[0]])


@pytest.mark.parametrize(
    "derivative", [jax.jacfwd, pytest.param(jax.jacrev, marks=pytest.mark.slow)]
)
def test_parameters_at_a_bound_move_with_it_and_not_with_the_data(derivative):
    def value(of):
        solver = gnlin.GaussNewton(bounds=(-jnp.inf, of["bound"]))
        return minimum(chained, solver, jnp.zeros(2), of["data"])

    slopes = jax.jit(derivative(value))
    for data, of_data, of_bound in ((3.0, 0.0, 1.0), (0.5, 1.0, 0.0)):
        found = slopes({"data": data, "bound": 1.0})
        np.testing.assert_allclose(found["data"], [of_data] * 2, atol=1e-12)
        np.testing.assert_allclose(found["bound"], [of_bound] * 2, atol=1e-12)


def decay(p, y):
    return p["a"] * jnp.exp(-p["rate"] * TIMES) - y


@pytest.mark.parametrize("most", [2.0, pytest.param(9.0, marks=pytest.mark.slow)])
def test_free_parameters_move_as_if_the_others_were_fixed(most):
    bounds = {"a": 0.0, "rate": None}, {"a": most, "rate": None}
    solver = gnlin.LevenbergMarquardt(bounds=bounds)

    def rate(y):
        return minimum(decay, solver, {"a": 1.0, "rate": 0.5}, y)["rate"]

    step = 1e-4 * (np.arange(30) == 3)
    with_slope = jax.jit(jax.value_and_grad(rate))
    ahead, behind = (float(with_slope(SIGNAL + h)[0]) for h in (step, -step))
    expected = (ahead - behind) / 2e-4
    along = jax.jit(lambda y, v: jax.jvp(rate, (y,), (v,))[1])(SIGNAL, step / 1e-4)
    np.testing.assert_allclose(along, expected, rtol=1e-5)
    np.testing.assert_allclose(with_slope(SIGNAL)[1][3], expected, rtol=1e-5)


@pytest.mark.xfail(
    jax.__version_info__ < (0, 10, 2),
    raises=TypeError,
    reason="JAX cannot differentiate the linearisation of such a loop.",
)
def test_of_a_function_with_forward_mode_only():
    """The number of turns of the loop depends on the data, so it has no reverse mode."""

    def powers(p, y):
        once = jnp.exp(-p["rate"] * TIMES / 4)
        turns = jnp.where(y[0] < 100, 4, 5)
        turn = lambda carry: (carry[0] + 1, carry[1] * once)
        _, fourth = jax.lax.while_loop(lambda c: c[0] < turns, turn, (0, once**0))
        return p["a"] * fourth - y

    def slopes(fn):
        solver, start = gnlin.LevenbergMarquardt(), {"a": 1.0, "rate": 0.5}
        return jax.jit(jax.jacfwd(lambda y: minimum(fn, solver, start, y)))(SIGNAL)

    found, expected = slopes(powers), slopes(decay)
    for name in ("a", "rate"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, atol=1e-9)


def turned(row, step):
    c, s = jnp.cos(step[0]), jnp.sin(step[0])
    return jnp.stack([c * row[0] - s * row[1], s * row[0] + c * row[1]])


@pytest.mark.slow
def test_on_a_circle():
    """The point of the circle nearest to 2 (cos a, sin a) is (cos a, sin a)."""

    def misfit(p, a):
        return p["row"][0] - p["length"] * jnp.stack([jnp.cos(a), jnp.sin(a)])

    def value(a):
        retraction = {"row": turned, "length": None}
        solver = gnlin.LevenbergMarquardt(retraction=retraction)
        start = {"row": jnp.array([[1.0, 0.0]]), "length": jnp.array(2.0)}
        return minimum(misfit, solver, start, a)

    found = jax.jit(jax.jacrev(value))(0.5)
    expected = [[-np.sin(0.5), np.cos(0.5)]]
    np.testing.assert_allclose(found["row"], expected, atol=1e-6)
    np.testing.assert_allclose(found["length"], 0.0, atol=1e-6)


def along_the_circle(row, step):
    """A circle's exponential map whose second derivative at a step of zero is wrong, as
    is usual where the limits at zero are constants."""
    step = step - jnp.sum(step * row) * row
    square = jnp.sum(step**2)
    length = jnp.sqrt(jnp.where(square > 0, square, 1))
    c = jnp.where(square > 0, jnp.cos(length), 1)
    return c * row + jnp.where(square > 0, jnp.sin(length) / length, 1) * step


@pytest.mark.slow
@pytest.mark.parametrize("retraction", [turned, along_the_circle])
def test_second_derivatives_along_a_retraction(retraction):
    """The point of the circle nearest to t is t / |t|."""

    def nearest(t):
        solver = gnlin.LevenbergMarquardt(retraction=retraction, rtol=1e-9, atol=1e-9)
        value = minimum(lambda y, t: y[0] - t, solver, jnp.array([[1.0, 0.0]]), t)[0, 0]
        return value, value

    def slopes(t):
        slope, value = jax.grad(nearest, has_aux=True)(t)
        return slope, (slope, value)

    t = jnp.array([1.0, 2.0])
    curvature, (slope, value) = jax.jit(jax.jacfwd(slopes, has_aux=True))(t)
    expected = lambda t: t[0] / jnp.sqrt(jnp.sum(t**2))
    np.testing.assert_allclose(value, expected(t), rtol=1e-8)
    np.testing.assert_allclose(slope, jax.grad(expected)(t), rtol=1e-7)
    np.testing.assert_allclose(curvature, jax.hessian(expected)(t), rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_second_derivatives_at_a_bound():
    """One parameter follows its upper bound b, and the other one is sqrt(a / b)."""

    def value(args):
        solver = gnlin.GaussNewton(
            bounds=({"b": None, "y": None}, {"b": args[1], "y": None})
        )
        fn = lambda p, a: jnp.stack([p["b"] - 9.0, p["y"] ** 2 * p["b"] - a])
        start = {"b": jnp.array(1.0), "y": jnp.array(1.0)}
        return minimum(fn, solver, start, args[0])["y"]

    at = jnp.array([3.0, 2.0])
    found = jax.jit(jax.jacfwd(jax.jacrev(value)))(at)
    expected = jax.hessian(lambda args: jnp.sqrt(args[0] / args[1]))(at)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_unconstrained_derivatives_are_those_of_the_implicit_function():
    def rate(y):
        solver, start = gnlin.LevenbergMarquardt(), {"a": 1.0, "rate": 0.5}
        p = minimum(decay, solver, start, y)
        return p["rate"], p

    found, p = jax.jit(jax.grad(rate, has_aux=True))(SIGNAL)
    a, shape = float(p["a"]), np.exp(-float(p["rate"]) * TIMES)
    jacobian = np.stack([shape, -a * TIMES * shape], axis=1)
    residual, by_both = a * shape - SIGNAL, -TIMES * shape
    curved = [[0 * TIMES, by_both], [by_both, a * TIMES**2 * shape]]
    hessian = jacobian.T @ jacobian + curved @ residual
    expected = np.linalg.solve(hessian, jacobian.T)[1]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_other_minimisations_equal_optimistix():
    def value(a):
        solver, start = optx.BFGS(1e-8, 1e-8), jnp.ones(2)
        adjoint = gnlin.methods.ImplicitAdjoint()
        fn = lambda y, a: jnp.sum((y - a) ** 2)
        return optx.minimise(fn, solver, start, a, adjoint=adjoint).value

    found = jax.jit(jax.jacrev(value))(jnp.array([2.0, 3.0]))
    np.testing.assert_allclose(found, np.eye(2), atol=1e-9)


def test_a_run_without_end_does_not_block_the_others():
    def fn(y, never):
        return jnp.where(never == 0, y - 2.0, jnp.exp(-y))

    def run(never):
        solver = gnlin.GaussNewton()
        start = jnp.array(0.1)
        solution = optx.least_squares(fn, solver, start, never, max_steps=40, throw=False)
        return solution.result == optx.RESULTS.successful, solution.stats["num_steps"]

    runs = jax.jit(jax.vmap(run))
    well, num_steps = runs(jnp.array([0.0, 0.0, 1.0]))
    assert well.tolist() == [True, True, False]
    alone = runs(jnp.zeros(3))[1][0]
    assert num_steps.tolist() == [alone, alone, 40]


@pytest.mark.slow
def test_solve_inside_transformations_of_closed_over_values():
    def found(a):
        group = gnlin.Residuals(lambda p, _: p - a)
        return gnlin.solve(jnp.zeros(1), group, gnlin.GaussNewton(), max_steps=9).model[0]

    values, along = jax.jvp(jax.vmap(found), (np.array([2.0, 3.0]),), (np.ones(2),))
    np.testing.assert_allclose([values, along], [[2.0, 3.0], [1.0, 1.0]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("derivative", "has_data"),
    [(jax.jacfwd, False), (jax.jacrev, True)],
)
def test_groups_whose_function_closes_over_a_differentiated_value(derivative, has_data):
    def line(p, x, y, slope):
        return p[0] * jnp.exp(-p[1] * x) + slope * x - y

    def found(slope):
        def fn(p, example):
            return line(p, *(example if has_data else (TIMES, SIGNAL)), slope)

        loss = gnlin.losses.Huber(0.1)
        data = (TIMES, SIGNAL) if has_data else None
        group = gnlin.Residuals(fn, data, loss=loss)
        solver = gnlin.LevenbergMarquardt(rtol=1e-12)
        return optx.least_squares(group, solver, jnp.array([1.0, 1.0])).value

    both = jax.jit(derivative(lambda slope: (found(slope),) * 2, has_aux=True))
    (ahead, behind), step = (both(0.1 + h)[1] for h in (1e-5, -1e-5)), 1e-5
    expected = (ahead - behind) / (2 * step)
    np.testing.assert_allclose(both(0.1)[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "derivative", [pytest.param(jax.jacfwd, marks=pytest.mark.slow), jax.jacrev]
)
def test_a_direction_without_data_has_derivative_zero(derivative):
    def places(apart):
        solver = gnlin.LevenbergMarquardt()
        return minimum(lambda p, d: jnp.diff(p) - d, solver, jnp.zeros(4), apart)

    found = jax.jit(derivative(places))(jnp.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(found, np.linalg.pinv(np.diff(np.eye(4), axis=0)))


@pytest.mark.slow
def test_the_rank_does_not_depend_on_units():
    @jax.jit
    @functools.partial(jax.jacrev, argnums=1)
    def slopes(units, y):
        fn = lambda p, y: decay({"a": p[0] / units[0], "rate": p[1] / units[1]}, y)
        return minimum(fn, gnlin.LevenbergMarquardt(), units, y) / units

    found, expected = (slopes(np.array(u), SIGNAL) for u in ([1e-9, 1e9], [1.0, 1.0]))
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)
