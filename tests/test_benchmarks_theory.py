"""Bias, variance and effective dimension of a linearised network, compared with dense
formulas and with drawn noise; and the columns of `lambda-sweep`."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy import stats
from scipy.linalg import expm

import gnlin
from benchmarks.experiment import Runs
from benchmarks.experiments import lambda_sweep
from benchmarks.linear_theory import linear_problem, Repeated, ridge_and_flow
from benchmarks.thresholds import FLOW_AGAINST_RIDGE


DAMPING, TIMES = 0.3, 7
rng = np.random.default_rng(3)
make = lambda seed: eqx.nn.MLP(3, 2, 8, 2, jnp.tanh, key=jax.random.key(seed))
model, initial = make(0), make(1)
train, test = (
    tuple(jnp.asarray(rng.normal(size=(number, size))) for size in (3, 2))
    for number in (6, 9)
)


def dense(inputs):
    """Return the initial outputs and the Jacobian as a vector and a matrix."""
    return map(np.asarray, outputs_and_jacobian(inputs))


@jax.jit
def outputs_and_jacobian(inputs):
    parameters, frozen = eqx.partition(model, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(parameters)
    fn = lambda y: jax.vmap(eqx.combine(unravel(y), frozen))(inputs).ravel()
    return jax.vmap(initial)(inputs).ravel(), jax.jacobian(fn)(flat)


def smoother(phi, phi_test):
    """Return the matrix from training targets to predictions on the test inputs."""
    kernel, across = phi @ phi.T, phi_test @ phi.T
    identity = np.eye(len(kernel))
    return {
        "ridge": across @ np.linalg.inv(kernel + DAMPING * identity),
        "flow": across @ (identity - expm(-kernel / DAMPING)) @ np.linalg.inv(kernel),
        "repeated": repeated(kernel, across),
    }


def repeated(kernel, across):
    """Solve in a loop for targets that are one at one output and zero elsewhere."""
    size = len(kernel)
    learnt, weights = np.zeros((size, size)), np.zeros((size, size))
    for _ in range(TIMES):
        left = np.eye(size) - learnt
        weights += np.linalg.solve(kernel + DAMPING * np.eye(size), left)
        learnt = kernel @ weights
    return across @ weights


@functools.partial(jax.jit, static_argnums=2)
def in_theory(test, damping, times):
    return ridge_and_flow(linear_problem(model, initial, train, test), damping, times)


@pytest.fixture(scope="module")
def found():
    return in_theory(test, DAMPING, TIMES)


@pytest.mark.parametrize("filter", ["ridge", "flow", "repeated"])
def test_bias_and_variance_match_the_dense_smoother(filter, found):
    (f, phi), (f_test, phi_test) = dense(train[0]), dense(test[0])
    h = smoother(phi, phi_test)[filter]
    off = f_test - h @ (f - train[1].ravel()) - test[1].ravel()
    assert found[f"squared_bias_{filter}"] == pytest.approx(np.mean(off**2))
    if filter != "repeated":
        variance = np.trace(h @ h.T) / len(h)
        assert found[f"variance_{filter}"] == pytest.approx(variance)


def test_the_effective_dimension_is_the_trace_of_the_dense_hat_matrix(found):
    _, phi = dense(train[0])
    hat = smoother(phi, phi)["ridge"]
    assert found["effective_dimension"] == pytest.approx(np.trace(hat))


def test_bias_and_variance_match_drawn_noise(found):
    """Solve ridge regression with rows for the damping, once for each draw of the
    targets."""
    (f, phi), (f_test, phi_test) = dense(train[0]), dense(test[0])
    p = phi.shape[1]
    stacked = np.concatenate([phi, np.sqrt(DAMPING) * np.eye(p)])
    size, draws = 0.5, 20_000
    noise = size * np.random.default_rng(5).normal(size=(len(f), draws))
    targets = train[1].ravel()[:, None] + noise - f[:, None]
    targets = np.concatenate([targets, np.zeros((p, draws))])
    steps = np.linalg.lstsq(stacked, targets, rcond=None)[0]
    errors = f_test[:, None] + phi_test @ steps - test[1].ravel()[:, None]
    bias, variance = found["squared_bias_ridge"], found["variance_ridge"]
    assert np.mean(errors.mean(axis=1) ** 2) == pytest.approx(float(bias), rel=0.02)
    assert np.mean(errors.var(axis=1)) / size**2 == pytest.approx(
        float(variance), rel=0.02
    )
    risk = float(bias + size**2 * variance)
    assert np.mean(errors**2) == pytest.approx(risk, rel=0.02)


@pytest.mark.parametrize("damping", [1e-3, 30.0])
def test_the_risk_of_flow_keeps_to_its_bound_on_the_training_inputs(damping):
    found = in_theory(train, damping, 1)
    bound = FLOW_AGAINST_RIDGE.below
    assert found["squared_bias_flow"] <= found["squared_bias_ridge"]
    assert found["variance_flow"] <= bound * found["variance_ridge"]


def test_the_bound_is_the_largest_ratio_of_the_two_filters():
    flow, ridge = gnlin.filters.GradientFlow(1.0), gnlin.filters.Tikhonov(1.0)
    ratio = jax.jit(lambda w: jnp.max((flow(w) / ridge(w)) ** 2))
    largest = float(ratio(np.geomspace(1e-4, 1e4, 100_000)))
    assert FLOW_AGAINST_RIDGE.below - 1e-3 < largest < FLOW_AGAINST_RIDGE.below


@pytest.mark.parametrize("times", [5, 150])
def test_flow_and_ridge_of_many_solutions_are_nearly_equal(times):
    flow, ridge = gnlin.filters.GradientFlow(float(times)), Repeated(1.0, times)
    difference = jax.jit(lambda w: jnp.max(w * jnp.abs(flow(w) - ridge(w))))
    apart = float(difference(np.geomspace(1e-6, 1e4, 100_000)))
    assert apart == pytest.approx(0.27 / times, rel=0.2)
    assert float(ridge(jnp.zeros(1))[0]) == times


def judged(dimension, error):
    shape = error.shape
    columns = {
        "damping": np.broadcast_to(np.logspace(-2, 2, shape[1]), shape),
        "train_rmse": np.full(shape, 0.05),
        "test_rmse": error,
        "roughness": error,
        "effective_dimension": dimension,
    }
    return lambda_sweep._judge("outputs in [-4, 4]", Runs({}, columns))


def test_rank_correlations_over_dampings_and_over_seeds_are_scipys():
    generator = np.random.default_rng(0)
    both = generator.normal(size=(7, 2, 5))
    both[2, :, 3] = np.nan
    of_seed = [stats.spearmanr(d, e, nan_policy="omit").statistic for e, d in both]
    np.testing.assert_allclose(lambda_sweep.over_dampings(both), of_seed)
    of_damping = [
        stats.spearmanr(both[:, 1, i], both[:, 0, i], nan_policy="omit").statistic
        for i in range(5)
    ]
    assert lambda_sweep.over_seeds(both) == pytest.approx(np.mean(of_damping))


@pytest.mark.exhaustive
def test_an_error_that_goes_with_damping_alone_follows_over_the_dampings_alone():
    generator = np.random.default_rng(1)
    falls = 10 ** (-np.linspace(0, 1, 6) + generator.normal(0, 0.02, (12, 6)))
    dimension = np.linspace(20, 2, 6) + generator.normal(0, 0.5, (12, 6))
    over_dampings, over_seeds = judged(dimension, falls)[5:]
    assert over_dampings.outcome == "confirmed"
    assert over_seeds.outcome == "undecided"
    both = judged(dimension, 10 ** (dimension / 10))[5:]
    assert [verdict.outcome for verdict in both] == ["confirmed", "confirmed"]
