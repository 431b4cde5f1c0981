"""Arguments in the wrong order, and groups of residuals without a derivative."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import gnlin


POINTS = jnp.linspace(0.0, 1.0, 9)
ENDS = gnlin.Residuals(lambda u, x: u(x), jnp.array([0.0, 1.0]))
BENT = gnlin.Residuals(lambda u, x: jax.grad(jax.grad(u))(x) + 1.0, POINTS)


def network(activation=jax.nn.relu):
    return eqx.nn.MLP("scalar", "scalar", 8, 1, activation, key=jax.random.key(0))


@pytest.mark.parametrize("driver", [gnlin.solve, gnlin.fit])
@pytest.mark.parametrize(
    "data",
    [
        ENDS,
        {"ends": ENDS},
        [ENDS, BENT],
        gnlin.Groups({"ends": ENDS}),
        (POINTS, POINTS),
        [np.asarray(POINTS), np.asarray(POINTS)],
        (POINTS, POINTS, jnp.ones(9)),
    ],
)
def test_swapped_arguments_are_told(driver, data):
    named = rf"`gnlin\.{driver.__name__}` are swapped: pass the model first"
    steps = {"max_steps": 2} if driver is gnlin.solve else {"steps": 2}
    with pytest.raises(ValueError, match=named):
        driver(data, network(), **steps)


def test_a_relu_is_named_where_no_residual_has_a_derivative():
    with pytest.raises(ValueError, match=r"parameter: the second derivatives of a ReLU"):
        gnlin.solve(network(), BENT)


def test_a_run_that_cannot_change_a_group_is_not_successful():
    """The solution of -u'' = 1 is x (1 - x) / 2. A ReLU meets the ends alone."""
    groups = {"bent": BENT, "ends": ENDS}
    with pytest.warns(UserWarning, match=r"group 'bent'.*ReLU.*jnp\.tanh"):
        bent = gnlin.solve(network(), groups)
    assert bent.result == optx.RESULTS.stagnation
    assert "converged" not in bent.reason
    assert "'bent'" in bent.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smooth = gnlin.solve(network(jnp.tanh), groups, max_steps=60)
    exact = POINTS * (1 - POINTS) / 2
    np.testing.assert_allclose(jax.vmap(smooth.model)(POINTS), exact, atol=1e-5)
    assert smooth.result != optx.RESULTS.stagnation
