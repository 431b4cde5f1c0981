"""Systems of as many equations as unknowns in mixed units, of the example script."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from problems import example

import gnlin


@pytest.fixture(scope="module")
def equations():
    return example("equations")


def test_a_flash_from_a_far_start(equations):
    """The fraction of vapour is the root of the equation of Rachford and Rice."""
    ratio = equations.VAPOUR / equations.PRESSURE - 1
    of_balance = lambda v: np.sum(equations.FEED * ratio / (1 + v * ratio))
    vapour = scipy.optimize.brentq(of_balance, 0, 1, xtol=1e-15)
    solver = gnlin.LevenbergMarquardt(bounds=equations.FRACTIONS)
    found = gnlin.solve(equations.FAR, gnlin.Residuals(equations.flash), solver)
    assert found.reason.endswith("converged")
    assert found.stats["num_feature_updates"] < 30
    np.testing.assert_allclose(found.model["v"], vapour, rtol=1e-12)
    liquid = equations.FEED / (1 + vapour * ratio)
    np.testing.assert_allclose(found.model["x"], liquid, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 4])
def test_an_equilibrium(equations, at):
    """The root of two equations for the extents of the reactions, by SciPy, with the
    amounts of substance in closed form."""
    _, _, in_sizes, start, bounds = equations.SYSTEMS[at]

    def amounts(extents):
        a, b = extents  # CO + 2 H2 = methanol, and CO2 + H2 = CO + H2O
        return np.array([1 - a + b, 1 - b, 4 - 2 * a - b, b, a])

    def laws(extents):
        n = amounts(extents)
        p = n / n.sum() * 5  # in MPa
        return [p[0] * p[2] ** 2 - p[4] / 0.6, p[0] * p[3] - 8e-3 * p[1] * p[2]]

    extents = scipy.optimize.fsolve(laws, [0.7, 0.2], xtol=1e-14)
    solver = gnlin.LevenbergMarquardt(bounds=bounds)
    found = gnlin.solve(jnp.asarray(start), gnlin.Residuals(in_sizes), solver)
    assert found.reason.endswith("converged")
    np.testing.assert_allclose(found.model, amounts(extents), rtol=1e-9)
