"""The rows of `docs/from-optimistix.md`: both sides of each reach the same point."""

import warnings

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
import pytest
import scipy.optimize

import gnlin


T = jnp.linspace(0.0, 4.0, 50)
Y = (2.5 * jnp.exp(-1.3 * T) + 0.3).at[jnp.array([5, 20, 41])].add(0.4)
START = jnp.array([1.0, 0.5, 0.0])


@pytest.fixture(autouse=True)
def as_a_user():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def residuals(p, args):
    t, y = args
    return p[0] * jnp.exp(-p[1] * t) + p[2] - y


def found(solver, fn=residuals, args=(T, Y), **options):
    return optx.least_squares(fn, solver, START, args, **options)


def scipys(**options):
    tight = {"xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-14} | options
    fun = lambda p, t, y: np.asarray(residuals(p, (t, y)))
    return scipy.optimize.least_squares(fun, START, args=(T, Y), **tight)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (optx.LevenbergMarquardt, gnlin.LevenbergMarquardt()),
        (optx.GaussNewton, gnlin.GaussNewton()),
        pytest.param(
            optx.IndirectLevenbergMarquardt,
            gnlin.LevenbergMarquardt(damping=gnlin.damping.TrustRegion()),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda *tol: optx.LevenbergMarquardt(*tol, linear_solver=lx.QR()),
            gnlin.LevenbergMarquardt(method=lx.QR()),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            optx.LevenbergMarquardt,
            gnlin.LevenbergMarquardt(1e-8, 1e-8, optx.two_norm),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_solvers_of_optimistix(theirs, ours):
    expected = found(theirs(1e-10, 1e-10), max_steps=1000).value
    for options in ({}, {"options": {"jac": "bwd"}}):
        np.testing.assert_allclose(found(ours, **options).value, expected, rtol=1e-6)


def test_options_of_bounds_are_ignored_by_optimistix_and_refused_here():
    limits = {"lower": jnp.zeros(3), "upper": jnp.array([2.0, 2.0, 2.0])}
    theirs = found(optx.LevenbergMarquardt(1e-8, 1e-8), options=limits)
    assert theirs.value[0] > 2
    with pytest.raises(ValueError, match="and its `bounds` for limits"):
        found(gnlin.LevenbergMarquardt(), options=limits)
    expected = scipys(bounds=([0, 0, 0], [2, 2, 2])).x
    ours = found(gnlin.LevenbergMarquardt(bounds=([0, 0, 0], [2, 2, 2])))
    np.testing.assert_allclose(ours.value, expected, atol=1e-6)


@pytest.mark.slow
def test_adjoints():
    def of_data(solver, **options):
        return jax.grad(lambda y: found(solver, args=(T, y), **options).value[1])(Y)

    expected = of_data(optx.LevenbergMarquardt(1e-10, 1e-10))
    for adjoint in (optx.ImplicitAdjoint(), gnlin.methods.ImplicitAdjoint()):
        ours = of_data(gnlin.LevenbergMarquardt(), adjoint=adjoint)
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    steps = optx.RecursiveCheckpointAdjoint()
    with pytest.raises(Exception, match="no reverse-mode derivative"):
        of_data(gnlin.LevenbergMarquardt(), adjoint=steps)


@pytest.mark.slow
def test_jaxopts_levenberg_marquardt():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jaxopt = pytest.importorskip("jaxopt")
        of_each = lambda p, t, y: residuals(p, (t, y))
        theirs = jaxopt.LevenbergMarquardt(of_each, maxiter=200, tol=1e-10)
        expected = theirs.run(START, T, Y).params
    settings = (
        {},
        {"damping": 1e-6},
        {"method": "curvature"},
        {"method": "svd"},
        {"method": "matrix-free"},
        {"acceleration": True},
    )
    for setting in settings:
        solver = gnlin.LevenbergMarquardt(**setting)
        ours = found(solver, lambda p, args: of_each(p, *args), max_steps=100).value
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("loss", "ours"),
    [
        ("soft_l1", gnlin.losses.PseudoHuber),
        pytest.param("huber", gnlin.losses.Huber, marks=pytest.mark.slow),
        pytest.param("cauchy", gnlin.losses.Cauchy, marks=pytest.mark.slow),
        pytest.param("arctan", gnlin.losses.Arctan, marks=pytest.mark.slow),
    ],
)
def test_losses_of_scipy(loss, ours):
    expected = scipys(loss=loss, f_scale=0.3)
    robust = gnlin.Residuals(residuals, loss=ours(0.3))
    value = found(gnlin.LevenbergMarquardt(), robust).value
    np.testing.assert_allclose(value, expected.x, atol=1e-6)


@pytest.mark.slow
def test_other_arguments_of_scipy():
    expected = scipys(x_scale="jac")
    fn = lambda p, _: residuals(p, (T, Y))
    solvers = (
        gnlin.LevenbergMarquardt(scaling="more"),
        gnlin.LevenbergMarquardt(method="matrix-free", verbose=False),
        gnlin.LevenbergMarquardt(rtol=1e-12, atol=1e-12),
    )
    for solver in solvers:
        np.testing.assert_allclose(found(solver).value, expected.x, rtol=1e-6)
    solved = gnlin.solve(START, gnlin.Residuals(fn))
    np.testing.assert_allclose(solved.loss, expected.cost, rtol=1e-9)
    lin = gnlin.linearise(residuals, solved.model, (T, Y))
    np.testing.assert_allclose(lin.outputs, expected.fun, atol=1e-6)
    theirs = jax.jacfwd(residuals)(solved.model, (T, Y))
    np.testing.assert_allclose(lin.matrix(), theirs, rtol=1e-12)
    scale = jnp.array([2.0, 1e-3, 5.0])
    scaled = found(gnlin.LevenbergMarquardt(), lambda p, a: residuals(scale * p, a))
    np.testing.assert_allclose(scale * scaled.value, expected.x, rtol=1e-6)


def test_rounded_residuals_end_at_the_start_elsewhere():
    whole = lambda p, args: jnp.round(100 * residuals(p, args)).astype(int)
    theirs = found(optx.LevenbergMarquardt(1e-8, 1e-8), whole)
    np.testing.assert_array_equal(theirs.value, START)
    assert theirs.result == optx.RESULTS.successful
    with pytest.raises(ValueError, match="compute with floats"):
        found(gnlin.LevenbergMarquardt(), whole)


WHOLE = np.array([1, 2, 3])


CONSTANTS = {
    "data": lambda p, n: n.astype(float),
    "closure": lambda p, n: jnp.asarray(WHOLE),
    "mask": lambda p, n: (n > 1).astype(float),
    "zero": lambda p, n: jnp.zeros((), int).astype(float),
    "jit": lambda p, n: jax.jit(lambda p, n: (p, n + 1))(p, n)[1].astype(float),
    "callback": lambda p, n: (jax.debug.callback(lambda p: None, p), n)[1].astype(float),
}


def test_constant_whole_numbers_beside_residuals():
    """They add to the loss and move nothing: compared with the closed formula."""
    constants = lambda p, n: {name: of(p, n) for name, of in CONSTANTS.items()}
    fn = lambda p, n: {"a": p - 3, "m": constants(p, n)}
    start, n = jnp.array([1.0, 0.5]), jnp.asarray(WHOLE)
    found = optx.least_squares(fn, gnlin.LevenbergMarquardt(), start, n)
    np.testing.assert_allclose(found.value, 3, rtol=1e-12)


@pytest.mark.parametrize(
    "whole",
    [
        lambda p: jnp.round(p).astype(int),
        lambda p: (p > 2).astype(float),
        lambda p: jax.jit(lambda p: jnp.round(p).astype(int))(p).astype(float),
        lambda p: jax.pure_callback(
            lambda p: np.asarray(p).round().astype(np.int32),
            jax.ShapeDtypeStruct((2,), jnp.int32),
            jax.lax.stop_gradient(p),
        ),
    ],
    ids=["round", "mask", "jit", "callback"],
)
def test_whole_numbers_of_the_parameters_are_refused(whole):
    fn = lambda p, n: (p - 3, n.astype(float), whole(p))
    with pytest.raises(ValueError, match="compute with floats"):
        optx.least_squares(
            fn, gnlin.LevenbergMarquardt(), jnp.array([1.0, 0.5]), jnp.asarray(WHOLE)
        )


def test_a_loss_in_place_of_residuals():
    """A least-squares solver looks for a zero of a loss, as optimistix's own do."""
    loss = lambda y, _: jnp.sum((y - 1) ** 2) - 3
    for run in (optx.minimise, optx.least_squares):
        with pytest.warns(UserWarning, match="returns one number.*BFGS") as caught:
            end = run(loss, gnlin.LevenbergMarquardt(), jnp.zeros(2)).value
        assert caught[0].filename == __file__
        np.testing.assert_allclose(loss(end, None), 0, atol=1e-6)
    group = gnlin.Residuals(loss)
    for run in (
        lambda: optx.least_squares(group, gnlin.LevenbergMarquardt(), jnp.zeros(2)),
        lambda: gnlin.solve(jnp.zeros(2), group),
        lambda: gnlin.curve_fit(loss, None, 0.0, jnp.zeros(2)),
    ):
        with pytest.warns(UserWarning, match="one number|not determine") as caught:
            run()
        assert "returns one number" in str(caught[0].message)
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solver, two = gnlin.LevenbergMarquardt(), jnp.zeros(2)
        optx.root_find(lambda y, _: y**2 - 2, solver, jnp.array(1.0))
        gnlin.solve(two, gnlin.Residuals(lambda y, _: jnp.sum(y - 1)[None]))
        optx.least_squares(lambda y, _: jnp.sum(y - 1)[None], solver, two)


@pytest.mark.parametrize("has_aux", [False, True])
def test_one_equation_in_several_unknowns(has_aux):
    """`root_find` says that its function is to be zero, and not a loss. A user's own
    auxiliary data say no such thing."""
    number = lambda y: jnp.sum(y**2) - 2
    equation = lambda y, _: (number(y), y) if has_aux else number(y)
    solver, two = gnlin.LevenbergMarquardt(atol=1e-6), jnp.array([1.0, 2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = optx.root_find(equation, solver, two, has_aux=has_aux)
    np.testing.assert_allclose(np.sum(np.square(found.value)), 2, atol=1e-6)
    pair = lambda y, _: (number(y), (jnp.sum(y), y))
    with pytest.warns(UserWarning, match="returns one number"):
        optx.least_squares(pair, solver, two, has_aux=True)


def pascals_and_fractions(u, _=None):
    """A mole fraction u[0] and a pressure u[1], by two equations in Pa."""
    return jnp.stack([u[0] * 101325 - u[1], u[1] - 47000 * u[0] ** 2 - 1e4])


def test_a_root_is_judged_in_the_units_of_the_function():
    """The smaller root of a quadratic equation, in closed form. `root_find` compares f
    with `atol`, and f cannot fall below the rounding of 1e4."""
    start, solver = jnp.array([0.5, 5e4]), gnlin.LevenbergMarquardt
    fraction = 2e4 / (101325 + np.sqrt(101325**2 - 4 * 47000 * 1e4))
    root = [fraction, 101325 * fraction]
    judged = optx.root_find(pascals_and_fractions, solver(), start, throw=False)
    found = [
        judged.value,
        optx.root_find(pascals_and_fractions, solver(atol=1e-6), start).value,
        optx.least_squares(pascals_and_fractions, solver(), start).value,
        gnlin.solve(start, gnlin.Residuals(pascals_and_fractions)).model,
    ]
    for each in found:
        np.testing.assert_allclose(each, root, rtol=1e-14)
