"""Residuals whose derivative leaves something out, which the loss does not follow."""

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import gnlin


DISCOUNT = 0.9


def walk():
    """Return moves of a random walk over nine states, as arrays."""
    rng = np.random.default_rng(0)
    chances = np.zeros((9, 9))
    for i in range(9):
        chances[i, max(i - 1, 0)] += 0.5
        chances[i, min(i + 1, 8)] += 0.5
    features, s = rng.normal(size=(9, 4)), rng.integers(0, 9, 500)
    s2 = np.array([rng.choice(9, p=chances[i]) for i in s])
    reward = np.linspace(-1, 1, 9)[s] + 0.1 * rng.normal(size=500)
    return {"x": features[s], "x2": features[s2], "r": reward}


def temporal_difference(weights, data):
    target = data["r"] + DISCOUNT * data["x2"] @ weights
    return data["x"] @ weights - jax.lax.stop_gradient(target)


def lstd(moves):
    """Return the weights of least-squares temporal differences, by NumPy."""
    x, x2, r = moves["x"], moves["x2"], moves["r"]
    return np.linalg.solve(x.T @ (x - DISCOUNT * x2), x.T @ r)


def test_the_default_stands_still():
    residuals = gnlin.Residuals(temporal_difference, walk())
    with pytest.warns(UserWarning, match=r"stands still .*stop_gradient"):
        solution = gnlin.solve(jnp.full(4, 2.0), residuals)
    assert solution.result == optx.RESULTS.stagnation


@pytest.mark.parametrize(
    "solver", [gnlin.GaussNewton(), gnlin.DampedGaussNewton(1.0)], ids=repr
)
def test_a_fixed_point_with_a_larger_loss_is_told_apart(solver):
    moves = walk()
    residuals = gnlin.Residuals(temporal_difference, moves)
    with pytest.warns(UserWarning, match=r"has converged, but .* may be the solution"):
        solution = gnlin.solve(jnp.zeros(4), residuals, solver)
    assert solution.result == optx.RESULTS.successful
    np.testing.assert_allclose(solution.model, lstd(moves), atol=1e-8)
