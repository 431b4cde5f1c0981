"""Differential equations: exact solutions leave no residuals, and are independent
references' too."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

from benchmarks import equations
from benchmarks.equations import EQUATIONS


def solved(equation):
    """The exact solution as the model."""
    if equation.coefficient is None:
        return equation.exact
    return {"u": equation.exact, "coefficient": equation.coefficient}


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_exact_solution_leaves_no_residuals(name):
    equation = EQUATIONS[name]
    for kind, group in equation.groups(64).items():
        each = jax.vmap(lambda x, fn=group.fn: fn(solved(equation), x))
        residuals = jax.jit(each)(group.data)
        assert np.abs(residuals).max() < 1e-9, kind
    assert equation.error(solved(equation)) == 0
    assert equation.coefficient_error(solved(equation)) == 0


@pytest.mark.parametrize("name", EQUATIONS)
def test_points_are_where_they_belong(name):
    equation = EQUATIONS[name]
    groups = equation.groups(64)
    low, high = np.array(equation.axes).T
    for group in groups.values():
        x = np.asarray(group.data["x"] if isinstance(group.data, dict) else group.data)
        assert np.all((low <= x) & (x <= high))
        assert group.weight == pytest.approx(1 / len(x))
    assert len(groups["interior"].data) == 64
    if "boundary" in groups:
        x = np.asarray(groups["boundary"].data)
        assert np.all(np.any((x == low) | (x == high), axis=1))
    if "start" in groups:
        assert np.all(np.asarray(groups["start"].data)[:, 0] == 0)
        assert np.all(np.isin(np.asarray(groups["ends"].data)[:, 1], equation.axes[1]))


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_error_is_relative(name):
    equation = EQUATIONS[name]
    model = solved(equation)
    off = lambda x: 1.01 * equation.exact(x)
    model = off if equation.coefficient is None else model | {"u": off}
    np.testing.assert_allclose(equation.error(model), 0.01, rtol=1e-9)


def test_derivatives_are_those_of_the_hessian():
    net = EQUATIONS["poisson-5d"].model((7, 6), jax.random.key(0))
    x = jnp.linspace(0.1, 0.9, 5)

    @jax.jit
    def run(x):
        mixed = equations.along(equations.along(net, 1), 3)(x)
        return jax.hessian(net)(x), equations.laplacian(net, x), mixed

    hessian, laplacian, mixed = run(x)
    np.testing.assert_allclose(laplacian, np.trace(hessian))
    np.testing.assert_allclose(mixed, hessian[1, 3])


def test_burgers_is_that_of_the_method_of_lines():
    """In Fourier modes on the periodic interval, integrated in time by SciPy."""
    n = 256
    x = np.linspace(-1, 1, n, endpoint=False)
    wave = np.pi * np.fft.rfftfreq(n, 1 / n)

    def slope(t, u):
        modes = np.fft.rfft(u)
        gradient = np.fft.irfft(1j * wave * modes, n)
        curvature = np.fft.irfft(-(wave**2) * modes, n)
        return -u * gradient + equations.VISCOSITY * curvature

    times = np.array([0.0, 0.3, 1.0])
    tight = {"rtol": 1e-10, "atol": 1e-12}
    found = solve_ivp(slope, (0, 1), -np.sin(np.pi * x), t_eval=times, **tight)
    exact = jax.vmap(EQUATIONS["burgers"].exact)(equations.grid(times, x))
    np.testing.assert_allclose(found.y.T, exact.reshape(3, n), atol=1e-7)


def test_an_unknown_coefficient_is_a_part_of_the_model():
    equation = EQUATIONS["conductivity"]
    model = equation.model((3,), jax.random.key(0))
    assert eqx.is_inexact_array(model["coefficient"])
    np.testing.assert_allclose(equation.coefficient_error(model), 3.0)
