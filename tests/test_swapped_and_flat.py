"""Arguments in the wrong order, and groups of residuals without a derivative."""

import warnings
from typing import NamedTuple

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


def test_a_group_that_a_run_cannot_change_is_told():
    """The solution of -u'' = 1 is x (1 - x) / 2. A ReLU meets the ends alone."""
    groups = {"bent": BENT, "ends": ENDS}
    with pytest.warns(UserWarning, match=r"group 'bent'.*ReLU.*jnp\.tanh"):
        gnlin.solve(network(), groups)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smooth = gnlin.solve(network(jnp.tanh), groups, max_steps=60)
    exact = POINTS * (1 - POINTS) / 2
    np.testing.assert_allclose(jax.vmap(smooth.model)(POINTS), exact, atol=1e-5)


def test_a_group_that_is_at_its_minimum_is_no_stagnation():
    x = jnp.linspace(0.0, 1.0, 5)
    groups = {
        "a": gnlin.Residuals(
            lambda p, d: jnp.exp(p["a"] * d[0]) - d[1], (x, jnp.exp(0.7 * x))
        ),
        "b": gnlin.Residuals(lambda p, y: p["b"] - y, x),
    }
    start = {"a": jnp.array(0.0), "b": jnp.mean(x)}
    for history in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = gnlin.solve(start, groups, history=history).result
        assert result == optx.RESULTS.successful


def test_a_model_that_is_a_tuple_of_arrays_and_can_be_called_is_no_data():
    class Line(NamedTuple):
        slope: jax.Array

        def __call__(self, x):
            return self.slope * x

    class Loader(eqx.Module):
        def __iter__(self):
            return iter([(POINTS[:, None], 2 * POINTS[:, None])])

    solution = gnlin.fit(Line(jnp.ones(1)), Loader(), steps=3)
    assert solution.model.slope[0] > 1.5
