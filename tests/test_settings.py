"""How solvers and their parts print, and which arguments they refuse."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest

import gnlin
from gnlin._common import _checks


NET = eqx.nn.MLP(2, 3, 8, 1, jnp.tanh, key=jax.random.key(0))
DATA = jnp.ones((8, 2)), jnp.zeros((8, 3))
DECAYING = optax.linear_schedule(0.5, 0.01, 10)


@pytest.mark.parametrize(
    "check",
    [
        _checks.check_positive,
        _checks.check_nonnegative,
        _checks.check_finite_nonnegative,
        _checks.check_finite_positive,
        _checks.check_fraction,
        _checks.check_less_than_one,
        _checks.check_period,
    ],
)
@pytest.mark.parametrize("given", [DECAYING, gnlin.damping.TrustRegion])
def test_a_function_is_refused_as_a_number(check, given):
    """The message when types are not checked, as in these tests."""
    with pytest.raises(ValueError, match="`rate` must be a real number, but <"):
        check("rate", given)


def test_a_schedule_that_is_refused_names_those_that_are_supported():
    with pytest.raises(ValueError, match=r"`DampedG.* `optax.sgd\(schedule\)`"):
        gnlin.IterativeLinearisation(10, 0.1, momentum=DECAYING)


def test_settings_that_accept_schedules():
    gnlin.IterativeLinearisation(DECAYING, DECAYING)
    gnlin.DampedGaussNewton(DECAYING)
    gnlin.TruncatedGaussNewton(DECAYING, DECAYING)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (gnlin.LevenbergMarquardt(), "LevenbergMarquardt()"),
        (gnlin.DampedGaussNewton(0.1), "DampedGaussNewton(damping=0.1)"),
        (
            gnlin.LevenbergMarquardt(damping=gnlin.damping.TrustRegion(2.0)),
            "LevenbergMarquardt(damping=TrustRegion(factor=2.0))",
        ),
        (
            gnlin.filters.Damped(gnlin.filters.HeavyBall(10, 0.1, 0.9), 0.2),
            "Damped(filter=HeavyBall(period=10, learning_rate=0.1, momentum=0.9), "
            "damping=0.2)",
        ),
        (
            gnlin.TruncatedGaussNewton(gnlin.methods.EisenstatWalker(0.3)),
            "TruncatedGaussNewton(tolerance=EisenstatWalker(initial=0.3))",
        ),
    ],
)
def test_settings_are_printed(printed, expected):
    assert repr(printed) == expected


def test_traced_values_print_as_their_type():
    said = []

    def look(damping):
        said.append(repr(gnlin.DampedGaussNewton(damping)))
        return damping

    jax.jit(look)(jnp.array(0.1, jnp.float32))
    assert said == ["DampedGaussNewton(damping=f32[])"]


def test_a_linearisation_prints_its_size():
    lin = gnlin.linearise(lambda y, _: jnp.outer(y, y).ravel(), jnp.arange(3.0))
    assert repr(lin) == "Linearisation(9 outputs, 3 parameters)"


def line(p, x):
    return p["a"] * x


def test_parameters_that_are_pythons_numbers():
    x = jnp.linspace(0, 1, 5)
    group = gnlin.Residuals(lambda p, x: line(p, x) - 2 * x, x)
    for solution in (
        gnlin.solve((line, {"a": 1.0}), (x, 2 * x), gnlin.GaussNewton()).model[1],
        gnlin.solve({"a": 1.0}, group, gnlin.GaussNewton()).model,
    ):
        assert solution["a"] == pytest.approx(2)
    with pytest.raises(ValueError, match="Python floats, but no trainable array: conv"):
        gnlin.solve(eqx.nn.Dropout(0.5), (x, 2 * x))
    with pytest.raises(ValueError, match=r"the dtype int\d\d: convert them by"):
        gnlin.solve(jnp.arange(3), gnlin.Residuals(lambda u, _: u))
    with pytest.raises(ValueError, match="`filter_spec` selects none of its leaves"):
        gnlin.solve((line, {"a": jnp.ones(())}), (x, 2 * x), filter_spec=lambda _: False)


def test_fit_inside_of_a_compiled_program():
    x = jnp.linspace(0, 1, 5)

    def trained(damping):
        solver = gnlin.DampedGaussNewton(damping)
        model = line, {"a": jnp.ones(())}
        return gnlin.fit(model, (x, 2 * x), solver, steps=2, progress=False).loss

    with pytest.raises(ValueError, match="inside of a compiled program"):
        jax.jit(trained)(1.0)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (lambda: gnlin.TangentKernel(NET), "TangentKernel(51 parameters, outputs='all')"),
        (
            lambda: gnlin.predict.posterior(NET, DATA, noise=0.1),
            "Posterior(noise=0.1, prior=1.0)",
        ),
        (
            lambda: gnlin.predict.gradient_descent(NET, DATA, learning_rate=0.01),
            "Descent(of Linearisation(24 outputs, 51 parameters))",
        ),
    ],
)
def test_derived_objects_print_in_one_line(printed, expected):
    assert repr(printed()) == expected


@pytest.mark.slow
def test_outputs_that_do_not_depend_on_the_parameters():
    data = jnp.ones((8, 1)), jnp.zeros((8, 1))
    model = (lambda p, x: jax.lax.stop_gradient(p) * x), jnp.ones(())
    for run in (gnlin.solve, functools.partial(gnlin.fit, batch_size=4, epochs=2)):
        with pytest.raises(ValueError, match="no derivative with respect to any param"):
            run(model, data, progress=False)
    model = (lambda p, x: 0 * p * x + 1), jnp.ones(())
    with pytest.warns(UserWarning, match="`gnlin.solve` made no step: the gradient is"):
        gnlin.solve(model, data)
    with pytest.warns(UserWarning, match="`gnlin.fit` made no step: the gradient is ex"):
        gnlin.fit(model, data, batch_size=4, epochs=2, progress=False)


class OfATuple(gnlin.authoring.AbstractGaussNewton):
    def update(self, objective, lin, evaluate, memory, num_steps):
        return lin.point, lin.outputs


@pytest.mark.usefixtures("unchecked")
def test_errors_of_updates():
    with pytest.raises(
        TypeError,
        match=r"OfATuple must return a .*, but returns a tuple",
    ):
        gnlin.solve(NET, DATA, OfATuple())


class Table(eqx.Module):
    """A schedule, or a filter, with an array of its own."""

    values: jax.Array

    def __call__(self, number):
        return self.values[jnp.minimum(number, 2)]


class Line(eqx.Module):
    ends: jax.Array

    def __call__(self, w):
        return 1 / (self.ends[0] + self.ends[1] * w)


@pytest.mark.slow
def test_schedules_and_filters_may_hold_arrays():
    for solver in (
        gnlin.DampedGaussNewton(Table(jnp.array([1.0, 0.1, 1e-6]))),
        gnlin.methods.FilteredGaussNewton(Line(jnp.array([1e-6, 1.0]))),
    ):
        fit = optx.least_squares(lambda y, _: 3 * y - 6, solver, jnp.zeros(2))
        np.testing.assert_allclose(fit.value, 2 * np.ones(2), rtol=1e-8)


@pytest.mark.usefixtures("unchecked")
def test_numpys_false_prints_nothing(capfd):
    solver = gnlin.LevenbergMarquardt(verbose=np.False_)
    optx.least_squares(lambda y, _: y - 1, solver, jnp.zeros(2))
    assert capfd.readouterr().out == ""
