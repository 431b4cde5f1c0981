"""A damped step by products if they are cheap, and otherwise by a factorisation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gnlin
from gnlin._linearisation._quadratic import Quadratic
from gnlin._subproblem import choose


N, P = 600, 610
DRAW = np.random.default_rng(0)
# Singular values span six orders of magnitude, eigenvalues twelve.
LEFT, _ = np.linalg.qr(DRAW.normal(size=(N, N)))
RIGHT, _ = np.linalg.qr(DRAW.normal(size=(P, N)))
INPUTS = LEFT @ np.diag(np.logspace(0, -6, N)) @ RIGHT.T
TARGETS = DRAW.normal(size=(N, 1))
START = 0.01 * DRAW.normal(size=(1, P))


def products_first(damping):
    return gnlin.DampedGaussNewton(jnp.asarray(damping), method="products-first")


def of_tanh(w, x):
    return w @ jnp.tanh(x)


def model(dtype):
    return of_tanh, jnp.asarray(START, dtype)


@eqx.filter_jit
def solve(solver, model, data):
    return gnlin.solve(model, data, solver, max_steps=1, throw=False)


def damped_step(solver, dtype):
    data = jnp.asarray(INPUTS, dtype), jnp.asarray(TARGETS, dtype)
    return solve(solver, (of_tanh, jnp.asarray(START, dtype)), data)


def by_hand(damping, rows=N, columns=P):
    jacobian, start = np.tanh(INPUTS[:rows, :columns]), START[0, :columns]
    residual = jacobian @ start - TARGETS[:rows, 0]
    kernel = jacobian @ jacobian.T + damping * np.eye(rows)
    return start - jacobian.T @ np.linalg.solve(kernel, residual)


# Every method errs by rounding divided by the damping. In single precision the smallest
# damping would leave no correct digit.
@pytest.mark.parametrize(
    ("dtype", "damping", "rtol"),
    [
        (jnp.float64, 0.1, 1e-9),
        (jnp.float64, 1e-7, 1e-8),
        (jnp.float32, 0.1, 1e-4),
        (jnp.float32, 1e-3, 2e-3),
    ],
)
def test_the_step_does_not_depend_on_how(dtype, damping, rtol):
    solution = damped_step(products_first(damping), dtype)
    _, found = solution.model
    error = np.linalg.norm(np.asarray(found[0]) - by_hand(damping))
    assert error < rtol * np.linalg.norm(by_hand(damping) - START[0])


def test_both_ways_are_counted():
    easy, hard = (
        damped_step(products_first(damping), jnp.float64).stats for damping in (0.1, 1e-7)
    )
    # Only a few eigenvalues are above the damping.
    assert 5 < easy["num_inner_steps"] < 45
    assert easy["num_jvps"] <= easy["num_inner_steps"] + 3
    # If many are, the attempts add to the passes for the rows of the factorisation.
    assert hard["num_inner_steps"] > easy["num_inner_steps"]
    forced = gnlin.DampedGaussNewton(jnp.asarray(0.1), method="kernel")
    forced = damped_step(forced, jnp.float64).stats
    assert forced["num_inner_steps"] == 0
    besides = easy["num_vjps"] - easy["num_inner_steps"] + forced["num_vjps"]
    # Attempts that are given up do not look at the residual in the end.
    assert hard["num_vjps"] == hard["num_inner_steps"] + besides - 1


@pytest.mark.slow
@pytest.mark.parametrize("memory_budget", [2**30, 1000])
def test_a_factorisation_that_is_cheap_or_exceeds_the_budget(memory_budget):
    """Conjugate gradients are then given a single iteration."""
    rows, columns = 20, 12
    data = jnp.asarray(INPUTS[:rows, :columns]), jnp.asarray(TARGETS[:rows])
    solver = gnlin.DampedGaussNewton(
        0.1, method="products-first", memory_budget=memory_budget
    )
    start = of_tanh, jnp.asarray(START[:, :columns])
    found = gnlin.solve(start, data, solver, max_steps=1).model[1]
    np.testing.assert_allclose(found[0], by_hand(0.1, rows, columns), rtol=1e-9)


@pytest.mark.slow
def test_nonfinite_data_leave_the_model():
    data = jnp.asarray(INPUTS).at[3, 4].set(jnp.nan), jnp.asarray(TARGETS)
    with pytest.warns(UserWarning, match="is not finite"):
        solution = gnlin.solve(model(float), data, products_first(0.1))
    _, found = solution.model
    np.testing.assert_array_equal(found, START)


@pytest.mark.slow
def test_many_dampings_at_once():
    data = jnp.asarray(INPUTS), jnp.asarray(TARGETS)

    @jax.vmap
    def sweep(damping):
        solver = products_first(damping)
        solution = gnlin.solve(model(float), data, solver, max_steps=1)
        return solution.model[1]

    dampings = np.array([0.1, 1e-7])
    for damping, found in zip(dampings, sweep(jnp.asarray(dampings)), strict=True):
        expected = by_hand(damping)
        error = np.linalg.norm(found[0] - expected)
        assert error < 1e-9 * np.linalg.norm(expected - START[0])


@pytest.mark.parametrize(
    ("method", "filter", "rtol"),
    [
        ("products-first", gnlin.filters.Tikhonov(1e-9), 1e-6),
        ("eigh-first", gnlin.filters.PseudoInverse(), 1e-9),
    ],
)
def test_a_further_residual_has_the_direct_way_too(method, filter, rtol):
    further = DRAW.normal(size=N)
    lin = gnlin.linearise(lambda y, _: INPUTS @ y, jnp.ones(P))
    problem = Quadratic(lin.jacobian, lin.outputs)

    @jax.jit
    def step(residual):
        ready = choose(problem, filter, method=method)
        return ready.with_residual(residual).solve(filter).step

    s, damping = np.logspace(0, -6, N), getattr(filter, "damping", 0.0)
    expected = -RIGHT @ (s / (s**2 + damping) * (LEFT.T @ further))
    error = np.linalg.norm(step(jnp.asarray(further)) - expected)
    assert error < rtol * np.linalg.norm(expected)
