"""User-defined solvers, as in the documentation's example."""

import importlib.util
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from problems import as_jax, sines, sines_data, sines_numpy

import gnlin


EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "own_solver.py"


@pytest.fixture(scope="module")
def own():
    spec = importlib.util.spec_from_file_location("own_solver", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ProportionalDamping


class Cooled(gnlin.authoring.AbstractFilteredGaussNewton):
    damping: float

    def filter_at(self, num_steps):
        return gnlin.filters.Tikhonov(self.damping * 0.5**num_steps)


def test_in_under_forty_lines():
    assert len(EXAMPLE.read_text().splitlines()) < 40


def test_a_step_is_its_formula(own):
    y, args = sines_data((7, 3))
    solution = optx.least_squares(
        sines, own(0.5), *as_jax((y, args)), max_steps=1, throw=False
    )
    r, jacobian = sines_numpy(y, args)
    gradient = jacobian.T @ r
    damped = jacobian.T @ jacobian + 0.5 * np.linalg.norm(gradient) * np.eye(3)
    step = -np.linalg.solve(damped, gradient)
    np.testing.assert_allclose(solution.value, y + step, rtol=1e-10)
    assert int(solution.stats["num_feature_updates"]) == 1


def test_convergence_is_reported(own):
    y, args = sines_data((7, 3))
    solution = optx.least_squares(sines, own(), *as_jax((y, args)), throw=False)
    assert solution.result == optx.RESULTS.successful
    r, jacobian = sines_numpy(np.asarray(solution.value), args)
    assert np.linalg.norm(jacobian.T @ r) < 1e-7


@pytest.mark.slow
def test_on_a_model_and_on_batches(own):
    key = jax.random.key(0)
    model = eqx.nn.MLP(1, 1, 8, 1, jnp.tanh, key=key, dtype=float)
    x = jnp.linspace(-1, 1, 40)[:, None]
    data = x, jnp.sin(3 * x)
    whole = gnlin.solve(model, data, own(), max_steps=30)
    assert whole.history.loss[-1] < 0.01 * whole.history.loss[0]
    batches = gnlin.fit(model, data, own(), batch_size=20, steps=40, progress=False)
    assert batches.history["loss"][-5:].mean() < 0.1 * batches.history["loss"][0]


def test_a_filter_is_enough():
    y, args = sines_data((7, 3))
    with jax.numpy_dtype_promotion("standard"):  # user code may leave promotion to JAX
        solution = optx.least_squares(
            sines, Cooled(1.0, search=None), *as_jax((y, args)), max_steps=2, throw=False
        )
    for damping in (1.0, 0.5):
        r, jacobian = sines_numpy(y, args)
        curvature = jacobian.T @ jacobian + damping * np.eye(3)
        y = y - np.linalg.solve(curvature, jacobian.T @ r)
    np.testing.assert_allclose(solution.value, y, rtol=1e-10)
    with pytest.raises(ValueError, match="`form` must be"):
        Cooled(1.0, form="cubic")
    with pytest.raises(ValueError, match="`rtol` must not be negative"):
        Cooled(1.0, rtol=-1.0)
