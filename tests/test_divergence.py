"""Runs that diverge: which steps are refused, and how the run ends."""

import math
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest

import gnlin


def task():
    x = np.random.default_rng(0).normal(size=(30, 8))
    model = eqx.nn.MLP(8, 2, 16, 2, activation=jnp.tanh, key=jax.random.key(0))
    return model, (x, np.tanh(x[:, :2]))


MODEL, DATA = task()


def largest_eigenvalue():
    lin = gnlin.features.linearise_model(MODEL, DATA[0])
    return float(lin.spectrum().eigenvalues[0])


def loss_of(model):
    residual = np.asarray(jax.vmap(model)(jnp.asarray(DATA[0]))) - DATA[1]
    return 0.5 * np.sum(residual**2)


def run(solver, *, driver=gnlin.solve, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        solution = driver(MODEL, DATA, solver, **options)
    return solution, " ".join(str(each.message) for each in caught)


def linear_problem(component):
    """Eigenvalues 1 and 0.01, and a residual with a component along each."""
    phi = np.diag([1.0, 0.1])
    model = lambda p, row: row @ p, jnp.zeros(2)
    return model, (phi, -np.array([component, 1.0])), phi


@pytest.mark.parametrize("method", ["svd", "eigh", "kernel", "matrix-free"])
@pytest.mark.parametrize("component", [1e-3, 1.0])
def test_steps_that_raise_the_linearised_loss_are_refused(method, component):
    """Thirty steps at eta w = 3 multiply one part of the residual by 2^30. The literal
    loop in NumPy says what becomes of the loss."""
    model, data, phi = linear_problem(component)
    r, z = -data[1], np.zeros(2)
    for _ in range(30):
        z -= 3.0 * phi.T @ (phi @ z + r)
    first, last = 0.5 * r @ r, 0.5 * np.sum((phi @ z + r) ** 2)
    solver = gnlin.IterativeLinearisation(30, 3.0, method=method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solution = gnlin.solve(model, data, solver, max_steps=1, divergence=None)
    most = first / np.finfo(float).eps
    if last > most:
        assert solution.result == optx.RESULTS.nonlinear_divergence
        np.testing.assert_array_equal(solution.model[1], 0)
    else:
        np.testing.assert_allclose(solution.model[1], z, rtol=1e-9)
    assert (last > most) == (component == 1.0)


@pytest.mark.parametrize(
    ("rate", "period", "num_steps"),
    [(1.9, 10, 6), (55.8, 1, 6), (55.8, 10, 2), (55.8, 10, 1)],
)
@pytest.mark.parametrize("divergence", [pytest.param(100.0, marks=pytest.mark.slow), 3.0])
def test_a_run_that_diverges_returns_its_best_model(rate, period, num_steps, divergence):
    solver = gnlin.IterativeLinearisation(period, rate / largest_eigenvalue())
    solution, said = run(solver, max_steps=num_steps, divergence=divergence)
    assert solution.result == optx.RESULTS.nonlinear_divergence
    assert "it diverged" in said
    assert "batches" not in said
    assert "`search`" not in said
    assert ("fewer inner steps" in said) == (period > 1)
    best = min(solution.history.loss)
    np.testing.assert_allclose(solution.loss, best, rtol=1e-9)
    np.testing.assert_allclose(loss_of(solution.model), best, rtol=1e-9)


@pytest.mark.slow
def test_many_runs_of_which_some_diverge():
    rates = jnp.array([0.5, 1.9, 55.8]) / largest_eigenvalue()

    def final(rate, period):
        solver = gnlin.IterativeLinearisation(period, rate)
        solution = gnlin.solve(MODEL, DATA, solver, max_steps=3)
        diverged = solution.result == optx.RESULTS.nonlinear_divergence
        return solution.loss, diverged, solution.model

    losses, diverged, models = eqx.filter_vmap(final, in_axes=(0, None))(rates, 10)
    np.testing.assert_array_equal(diverged, [False, True, True])
    for k, loss in enumerate(losses):
        one = jax.tree.map(lambda x, k=k: x[k] if eqx.is_array(x) else x, models)
        np.testing.assert_allclose(loss_of(one), loss, rtol=1e-9)
    # A traced number of steps is judged in the same way.
    _, diverged, _ = eqx.filter_vmap(final)(
        rates[jnp.array([1, 2])], jnp.array([10.0, 1])
    )
    np.testing.assert_array_equal(diverged, [True, True])


@pytest.mark.slow
@pytest.mark.parametrize("period", [1, 10])
def test_a_full_batch_of_fit_ends_in_the_same_way(period):
    rate = 55.8 * len(DATA[0]) / largest_eigenvalue()
    solver = gnlin.IterativeLinearisation(period, rate)
    solution, said = run(solver, driver=gnlin.fit, steps=3)
    assert solution.result == optx.RESULTS.nonlinear_divergence
    assert "it diverged" in said
    assert "it diverged" in solution.reason
    np.testing.assert_allclose(loss_of(solution.model) / 30, solution.loss, rtol=1e-9)
    np.testing.assert_allclose(solution.loss, min(solution.history.loss), rtol=1e-9)


def test_what_stays_possible():
    w = largest_eigenvalue()
    # Gradient descent at the edge of stability
    edge, _ = run(gnlin.IterativeLinearisation(1, 2.1 / w), max_steps=6)
    # An optimiser that is not descent, on a loss that is almost zero
    near, ones = (lambda p, x: p * x, jnp.full(1, 2.0 + 1e-9)), jnp.ones((1, 1))
    adam = gnlin.IterativeLinearisation(2, optimiser=optax.adam(1e-5))
    with pytest.warns(UserWarning, match="the loss has risen from 5e-19"):
        risen = gnlin.solve(near, (ones, 2 * ones), adam, max_steps=3, divergence=None)
    for solution in (edge, risen):
        assert solution.result == optx.RESULTS.nonlinear_max_steps_reached
    assert edge.loss < 13
    # Without a limit there is no verdict, but a warning.
    far, said = run(gnlin.IterativeLinearisation(1, 1.0), max_steps=3, divergence=None)
    assert far.result == optx.RESULTS.nonlinear_max_steps_reached
    assert "the loss has risen" in said


@pytest.mark.slow
def test_the_advice_names_what_the_solver_has():
    _, said = run(gnlin.IterativeLinearisation(10, 1.0), max_steps=2)
    assert "Use a smaller learning rate, fewer inner steps or `gnlin.Leve" in said
    _, said = run(optax.sgd(1.0), max_steps=3)
    assert "Use a smaller learning rate or `gnlin.LevenbergMarquardt()`" in said
    solution, said = run(
        gnlin.IterativeLinearisation(math.inf, 0.9 / largest_eigenvalue())
    )
    assert (
        "the linearised model has converged, but the loss of the model" in solution.reason
    )
    assert solution.result == optx.RESULTS.successful


SETTINGS = {
    "`period` is 0.391354, and must be at least 0.5": (
        lambda: gnlin.IterativeLinearisation(optax.exponential_decay(100, 1, 0.33), 1e-3)
    ),
    "`period` is nan": lambda: gnlin.IterativeLinearisation(lambda k: k * jnp.nan, 1e-3),
    "`learning_rate` is 0, and must be positive": (
        lambda: gnlin.IterativeLinearisation(3, lambda k: 1e-3 * (2 - k))
    ),
    "`damping` is -1, and must be at least 0": (
        lambda: gnlin.DampedGaussNewton(lambda k: 1.0 - k)
    ),
    "`tolerance` is 1, and must be between": (
        lambda: gnlin.TruncatedGaussNewton(lambda k: 0.5 * (k + 1))
    ),
}


@pytest.mark.parametrize(
    "said",
    [pytest.param(s, marks=() if "damping" in s else pytest.mark.slow) for s in SETTINGS],
)
def test_a_setting_that_leaves_its_range_is_named(said):
    solution, warning = run(SETTINGS[said](), max_steps=8)
    assert solution.result == optx.RESULTS.nonfinite
    assert said in solution.reason
    assert said in warning
    if "nan" in said:
        with pytest.raises(ValueError, match=f"After 0 linearisations {said}"):
            run(SETTINGS[said](), driver=gnlin.fit, steps=1, batch_size=15)
        return
    if "rate" in said or "tolerance" in said:
        return
    solution, _ = run(SETTINGS[said](), driver=gnlin.fit, steps=160, batch_size=15)
    assert solution.result == optx.RESULTS.nonfinite
    assert said in solution.reason


@pytest.mark.slow
def test_schedules_of_the_period_are_rounded():
    schedule = lambda k: 10 * 1.5**k
    solution, _ = run(gnlin.IterativeLinearisation(schedule, 1e-3), max_steps=5)
    expected = [round(10 * 1.5**k) for k in range(5)]
    np.testing.assert_array_equal(solution.history["num_inner_steps"], expected)
    whole = lambda k: jnp.array(expected)[k]
    same, _ = run(gnlin.IterativeLinearisation(whole, 1e-3), max_steps=5)
    np.testing.assert_allclose(solution.loss, same.loss, rtol=1e-12)
    half = gnlin.IterativeLinearisation(lambda k: 0.5, 1e-3)
    assert int(half.at(0).period) == 1


@pytest.mark.slow
def test_a_schedule_of_the_period_may_be_infinite():
    rate = 0.1 / largest_eigenvalue()
    kind = {"max_steps": 3, "divergence": None}
    endless, _ = run(gnlin.IterativeLinearisation(math.inf, rate, method="svd"), **kind)
    schedule = lambda k: jnp.where(k < 1000, jnp.inf, 1)
    same, _ = run(gnlin.IterativeLinearisation(schedule, rate, method="svd"), **kind)
    np.testing.assert_allclose(same.history.loss, endless.history.loss, rtol=1e-9)


@pytest.mark.slow
def test_periods_that_are_no_number_of_steps_are_in_the_result():
    def ended(period):
        solver = gnlin.IterativeLinearisation(period, 1e-3)
        return (
            gnlin.solve(MODEL, DATA, solver, max_steps=2).result == optx.RESULTS.nonfinite
        )

    found = jax.vmap(ended)(jnp.array([0.0, -1.0, 2.5, jnp.nan, 1.0, 3.0]))
    np.testing.assert_array_equal(found, [True, True, True, True, False, False])


@pytest.mark.slow
def test_inner_steps_that_diverge_are_told_also_far_above_the_start():
    keys = jax.random.split(jax.random.key(0), 3)
    model = eqx.nn.MLP(3, 2, 16, 1, jnp.tanh, dtype=float, key=keys[0])
    x, y = jax.random.normal(keys[1], (8, 3)), jax.random.normal(keys[2], (8, 2))
    kernel = np.asarray(gnlin.TangentKernel(model)(x)).reshape(16, 16)
    rate = 2.05 / np.linalg.eigvalsh(kernel)[-1]
    with pytest.warns(UserWarning, match="inner steps diverge on the linearised model"):
        solution = gnlin.solve(
            model, (x, y), gnlin.IterativeLinearisation(10, rate), max_steps=30
        )
    losses = solution.history.loss
    assert losses[-1] > 100 * losses[0], "a case without this is tested elsewhere"
