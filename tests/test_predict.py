"""Predictions of linearised models, compared with literal training and dense formulas."""

import copy
import functools
import math
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_problems import Normalised
from hypothesis import given, strategies as st
from scipy import integrate, linalg, optimize, stats
from scipy.special import expit, logsumexp, softmax

import gnlin
from gnlin.predict import _eigenbasis


RNG = np.random.default_rng(0)
TEST = jnp.asarray(RNG.normal(size=(5, 3)))
# Fewer outputs than parameters, and more outputs
CASES = {"wide": (16, 7), "tall": (3, 60), "one": (4, 1)}
STEPS = [0, 1, 7, 500, 1e3]


def case(name, dtype=float):
    width, n = CASES[name]
    rng = np.random.default_rng(n)
    model = network(width)
    cast = lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf
    inputs, targets = (jnp.asarray(rng.normal(size=(n, k)), dtype) for k in (3, 2))
    return jax.tree.map(cast, model), (inputs, targets)


@functools.cache
def network(width):
    return eqx.nn.MLP(3, 2, width, 2, activation=jnp.tanh, key=jax.random.key(0))


@eqx.filter_jit
def outputs_and_rows(model, inputs):
    lin = gnlin.features.linearise_model(model, inputs)
    return lin.outputs, lin.matrix()


def dense(model, inputs):
    return [np.asarray(x, float) for x in outputs_and_rows(model, inputs)]


def rate(model, inputs):
    _, rows = dense(model, inputs)
    return 0.5 / np.linalg.norm(rows, 2) ** 2


def literal(
    model,
    data,
    learning_rate,
    steps,
    gradient,
    damping=0.0,
    start=1.0,
    momentum=0.0,
    nesterov=False,
):
    """Take steps on the linearised model; return its outputs on the test inputs."""
    outputs, rows = dense(model, data[0])
    on_test, rows_of_test = dense(model, TEST)
    delta, velocity, found = np.zeros(rows.shape[1]), 0.0, {}
    for k in range(int(max(steps)) + 1):
        if k in steps:
            moved = (rows_of_test @ delta).reshape(on_test.shape)
            found[k] = start * on_test + moved
        at = start * outputs + (rows @ delta).reshape(outputs.shape)
        slope = rows.T @ gradient(at).ravel() + damping * delta
        velocity = momentum * velocity + slope
        ahead = slope + momentum * velocity if nesterov else velocity
        delta = delta - learning_rate * ahead
    return np.stack([found[int(k)] for k in steps])


def least_squares(targets):
    targets = np.asarray(targets)
    return lambda outputs: outputs - targets


@pytest.mark.parametrize(
    ("name", "nesterov"),
    [pytest.param("tall", False, marks=pytest.mark.slow), ("one", True)],
)
def test_descent_is_literal_training(name, nesterov):
    model, data = case(name)
    learning_rate = rate(model, data[0])
    options = {"momentum": 0.9, "nesterov": nesterov}
    predict = gnlin.predict.gradient_descent(
        model, data, learning_rate=learning_rate, **options
    )
    found = predict(TEST, steps=STEPS)
    gradient = least_squares(data[1])
    expected = literal(model, data, learning_rate, STEPS, gradient, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(predict(TEST, steps=7), expected[2], rtol=1e-10)


@pytest.mark.parametrize("options", [{"damping": 0.3, "weights": 1}, {"from_zero": True}])
def test_descent_with(options):
    model, data = case("wide")
    learning_rate = 0.3 * rate(model, data[0])
    damping, start = options.get("damping", 0.0), float("from_zero" not in options)
    gradient = least_squares(data[1])
    if options.pop("weights", None):
        weights = np.arange(7.0)
        data = *data, jnp.asarray(weights)
        plain, weighted = gradient, weights[:, None]
        gradient = lambda outputs: weighted * plain(outputs)
        learning_rate /= 6
    predict = gnlin.predict.gradient_descent(
        model, data, learning_rate=learning_rate, **options
    )
    expected = literal(model, data, learning_rate, STEPS, gradient, damping, start)
    np.testing.assert_allclose(predict(TEST, steps=STEPS), expected, rtol=1e-8, atol=1e-9)


def test_infinite_time_interpolates():
    model, data = case("wide")
    predict = gnlin.predict.gradient_descent(
        model, data, learning_rate=rate(model, data[0])
    )
    np.testing.assert_allclose(predict(), data[1], atol=1e-8)
    np.testing.assert_allclose(predict(data[0]), data[1], atol=1e-8)
    losses = predict.loss([0, 10, math.inf])
    outputs, _ = dense(model, data[0])
    assert losses[0] == pytest.approx(0.5 * np.sum((outputs - data[1]) ** 2))
    assert losses[0] > losses[1] > losses[2]
    assert predict.loss(math.inf) < 1e-15
    other = TEST, jnp.ones((5, 2))
    expected = 0.5 * np.sum((predict(TEST, steps=10) - 1.0) ** 2)
    assert predict.loss(10, other) == pytest.approx(expected)


def test_flow_is_the_differential_equation():
    model, data = case("tall")
    outputs, rows = dense(model, data[0])
    on_test, rows_of_test = dense(model, TEST)
    time = 20 * rate(model, data[0])
    residual = lambda d: (outputs + (rows @ d).reshape(outputs.shape)) - data[1]
    end = integrate.solve_ivp(
        lambda _, d: -rows.T @ np.ravel(residual(d)),
        (0, time),
        np.zeros(rows.shape[1]),
        rtol=1e-10,
        atol=1e-12,
    ).y[:, -1]
    expected = on_test + (rows_of_test @ end).reshape(on_test.shape)
    predict = gnlin.predict.gradient_flow(model, data)
    np.testing.assert_allclose(predict(TEST, times=time), expected, rtol=1e-7, atol=1e-8)
    shapes = predict(TEST, times=jnp.array([0.0, time, math.inf])).shape
    assert shapes == (3, 5, 2)


def test_regression_with_the_kernel_alone():
    model, data = case("wide")
    rows, of_test = (dense(model, x)[1] for x in (data[0], TEST))
    ridge = gnlin.predict.gradient_flow(model, data, damping=0.1, from_zero=True)
    weights = np.linalg.solve(rows @ rows.T + 0.1 * np.eye(14), np.ravel(data[1]))
    expected = of_test @ rows.T @ weights
    np.testing.assert_allclose(ridge(TEST).ravel(), expected, rtol=1e-9)


def softmax_gradient(labels):
    targets = np.eye(2)[np.asarray(labels)]
    return lambda outputs: softmax(outputs, -1) - targets


def classified(name):
    model, (inputs, targets) = case(name)
    return model, (inputs, jnp.argmax(targets, axis=1))


def test_cross_entropy_by_literal_steps():
    model, data = classified("wide")
    learning_rate, loss = rate(model, data[0]), gnlin.SoftmaxCrossEntropy()
    predict = gnlin.predict.gradient_descent(
        model, data, learning_rate=learning_rate, momentum=0.5, loss=loss
    )
    steps = [100, 3, 0, 3]
    gradient = softmax_gradient(data[1])
    expected = literal(model, data, learning_rate, steps, gradient, momentum=0.5)
    np.testing.assert_allclose(predict(TEST, steps=steps), expected, rtol=1e-8)


@pytest.mark.slow
def test_cross_entropy_by_flow():
    model, data = classified("tall")
    (inputs, labels), learning_rate = data, rate(model, data[0])
    # Very small steps approximate the flow
    flow = gnlin.predict.gradient_flow(
        model, data, loss=gnlin.SoftmaxCrossEntropy(), damping=0.01
    )
    small, gradient = learning_rate / 20, softmax_gradient(labels)
    along = literal(model, data, small, [200, 2000], gradient, 0.01)
    times = [10 * learning_rate, 100 * learning_rate]
    np.testing.assert_allclose(flow(TEST, times=times), along, atol=2e-2)
    outputs, rows = dense(model, inputs)
    # At the end, the slope along each parameter is that of the damping
    end = np.asarray(flow())
    slope = softmax(end, -1) - np.eye(2)[np.asarray(labels)]
    pulled = rows @ rows.T @ np.ravel(slope)
    moved = np.ravel(end - outputs)
    np.testing.assert_allclose(pulled, -0.01 * moved, atol=1e-6)


@pytest.mark.slow
def test_flow_in_any_unit():
    """Huber's loss is squared error here, whose flow has a formula."""
    rng, unit = np.random.default_rng(0), 1e-8
    inputs = rng.normal(size=(60, 4)).astype(np.float32)
    targets = unit * inputs @ [1, -2, 0.5, 3]
    data = jnp.asarray(inputs), jnp.asarray(targets, jnp.float32)
    model = lambda w, x: jnp.vdot(w, x), jnp.zeros(4, jnp.float32)
    loss = gnlin.losses.Huber(10 * unit)
    found = gnlin.predict.gradient_flow(model, data, loss=loss)(times=0.01)
    w, v = np.linalg.eigh(inputs.T.astype(float) @ inputs)
    filtered = v @ np.diag(-np.expm1(-0.01 * w) / w) @ v.T
    expected = inputs @ filtered @ inputs.T @ targets
    np.testing.assert_allclose(found, expected, atol=1e-3 * unit)


def test_without_memory_the_steps_are_literal():
    model, data = case("wide")
    settings = {"learning_rate": rate(model, data[0]), "momentum": 0.9}
    predict = gnlin.predict.gradient_descent(model, data, **settings, memory_budget=100)
    steps, gradient = [500, 7, 7, 0], least_squares(data[1])
    expected = literal(model, data, steps=steps, gradient=gradient, **settings)
    np.testing.assert_allclose(predict(TEST, steps=steps), expected, rtol=1e-9)


def test_an_ensemble_is_one_program():
    _, data = case("wide")
    traced = []

    def of_seed(key):
        traced.append(key)
        model = eqx.nn.MLP(3, 2, 16, 2, activation=jnp.tanh, key=key)
        predict = gnlin.predict.gradient_descent(model, data, learning_rate=1e-3)
        return predict(TEST, steps=[10, math.inf])

    keys = jax.random.split(jax.random.key(0), 4)
    found = eqx.filter_jit(eqx.filter_vmap(of_seed))(keys)
    assert len(traced) == 1
    assert found.shape == (4, 2, 5, 2)
    np.testing.assert_allclose(found[2], of_seed(keys[2]), rtol=1e-6)


def gaussian_process(model, data, noise, prior, zero=False):
    (outputs, rows), (on_test, of_test) = dense(model, data[0]), dense(model, TEST)
    outputs, on_test = (0 * x if zero else x for x in (outputs, on_test))
    covariance = prior**2 * rows @ rows.T + noise**2 * np.eye(len(rows))
    cross = prior**2 * of_test @ rows.T
    residual = np.ravel(outputs - data[1])
    mean = np.ravel(on_test) - cross @ np.linalg.solve(covariance, residual)
    after = prior**2 * of_test @ of_test.T - cross @ np.linalg.solve(covariance, cross.T)
    evidence = stats.multivariate_normal(cov=covariance).logpdf(residual)
    return mean, np.diag(after), evidence


@pytest.mark.parametrize(("name", "zero"), [("wide", False), ("tall", True)])
def test_the_posterior_is_a_gaussian_process(name, zero):
    model, data = case(name)
    posterior = gnlin.predict.posterior(model, data, noise=0.3, prior=2.0, from_zero=zero)
    mean, variance, evidence = gaussian_process(model, data, 0.3, 2.0, zero)
    found = posterior(TEST)
    np.testing.assert_allclose(np.ravel(found.mean), mean, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(np.ravel(found.variance), variance, rtol=1e-8, atol=1e-10)
    assert posterior.log_evidence() == pytest.approx(evidence, rel=1e-9)
    other = posterior.at(noise=0.7, prior=0.5)
    again = gaussian_process(model, data, 0.7, 0.5, zero)
    np.testing.assert_allclose(np.ravel(other(TEST).mean), again[0], rtol=1e-8)
    assert other.log_evidence() == pytest.approx(again[2], rel=1e-9)
    slope = jax.jit(jax.grad(lambda s: posterior.at(noise=s).log_evidence()))(0.3)
    ends = [gaussian_process(model, data, 0.3 + h, 2.0, zero)[2] for h in (1e-6, -1e-6)]
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)


def test_the_evidence_finds_the_noise():
    """The data are drawn from the prior."""
    model, (_, _) = case("wide")
    inputs = jnp.asarray(np.random.default_rng(1).normal(size=(150, 3)))
    outputs, rows = dense(model, inputs)
    rng = np.random.default_rng(2)
    signal = outputs.ravel() + rows @ (0.5 * rng.normal(size=rows.shape[1]))
    targets = (signal + 0.2 * rng.normal(size=signal.size)).reshape(outputs.shape)
    posterior = gnlin.predict.posterior(model, (inputs, targets), noise=3.0).tuned()
    assert posterior.noise == pytest.approx(0.2, rel=0.2)
    assert posterior.prior == pytest.approx(0.5, rel=0.4)
    # The evidence has its maximum there in both directions
    best = posterior.log_evidence()
    for factor in (0.97, 1.03):
        assert posterior.at(noise=factor * posterior.noise).log_evidence() < best
        assert posterior.at(prior=factor * posterior.prior).log_evidence() < best
    # Intervals have their nominal coverage
    low, high = posterior().interval(0.9, noise=posterior.noise)
    assert np.mean((low < targets) & (targets < high)) == pytest.approx(0.93, abs=0.06)


def test_laplace_about_a_classifier():
    model, data = classified("wide")
    loss = gnlin.SoftmaxCrossEntropy()
    posterior = gnlin.predict.posterior(model, data, loss=loss, prior=0.5)
    with warnings.catch_warnings(action="ignore"):  # the model is not trained
        _against_the_curvature(model, *data, posterior)


@pytest.mark.slow
def test_laplace_of_the_last_layer():
    model, data = classified("tall")
    loss = gnlin.SoftmaxCrossEntropy()
    last = jax.tree.map(lambda _: False, model)
    last = eqx.tree_at(lambda m: m.layers[-1], last, True)
    posterior = gnlin.predict.posterior(
        model, data, loss=loss, prior=0.5, filter_spec=last
    )
    num_parameters = 2 * (CASES["tall"][0] + 1)
    with pytest.warns(UserWarning, match="standard deviations of the posterior"):
        _against_the_curvature(model, *data, posterior, num_parameters)


def _against_the_curvature(model, inputs, labels, posterior, last=0):
    """Compare with dense formulas; `last` is the number of uncertain parameters, at the
    end, and 0 if all are."""
    (outputs, rows), (on_test, of_test) = dense(model, inputs), dense(model, TEST)
    rows, of_test = rows[:, -last:], of_test[:, -last:]
    p = softmax(outputs, -1)
    hessian = np.zeros((len(rows), len(rows)))
    for i, q in enumerate(p):
        hessian[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = np.diag(q) - np.outer(q, q)
    precision = rows.T @ hessian @ rows + 4.0 * np.eye(rows.shape[1])
    variance = np.diag(of_test @ np.linalg.solve(precision, of_test.T))
    found = posterior(TEST)
    np.testing.assert_allclose(np.ravel(found.variance), variance, rtol=1e-8)
    np.testing.assert_allclose(found.mean, on_test, rtol=1e-12)
    flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(posterior_point(model))])
    flat = flat[-last:]
    evidence = (
        np.sum(np.log(p[np.arange(len(p)), labels]))
        - 2.0 * np.sum(flat**2)
        - 0.5 * np.linalg.slogdet(precision / 4.0)[1]
    )
    assert posterior.log_evidence() == pytest.approx(evidence, rel=1e-9)
    best = posterior.tuned()
    assert best.log_evidence() >= posterior.log_evidence()
    flatter = posterior.probabilities(TEST)
    np.testing.assert_allclose(flatter.sum(axis=1), 1.0)
    assert np.all(np.max(flatter, axis=1) <= np.max(softmax(on_test, -1), axis=1))


@pytest.mark.slow
def test_a_classifier_that_is_trained_with_its_prior():
    """SciPy trains it. For any other model, a warning says how far it is from the minimum
    of loss plus prior."""
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.normal(size=(30, 2)))
    noise = 0.3 * rng.normal(size=30)
    labels = jnp.asarray(np.prod(inputs, axis=1) + noise > 0, int)
    model = eqx.nn.MLP(2, 2, 4, 1, jnp.tanh, key=jax.random.key(0))
    loss, prior = gnlin.SoftmaxCrossEntropy(), 0.7
    start, static = eqx.partition(model, eqx.is_inexact_array)
    flat, unravel = jax.flatten_util.ravel_pytree(start)
    right = np.eye(2)[np.asarray(labels)]

    def objective(flat):
        outputs, phi = dense(eqx.combine(unravel(jnp.asarray(flat)), static), inputs)
        value = np.sum(logsumexp(outputs, -1)) - np.sum(outputs * right)
        slope = phi.T @ np.ravel(softmax(outputs, -1) - right) + flat / prior**2
        return value + flat @ flat / (2 * prior**2), slope

    best = optimize.minimize(objective, flat, jac=True, tol=1e-9)
    trained = eqx.combine(unravel(jnp.asarray(best.x)), static)

    def posterior(model):
        return gnlin.predict.posterior(model, (inputs, labels), loss=loss, prior=prior)

    posterior(trained).probabilities(inputs)  # without a warning
    outputs, phi = dense(model, inputs)
    p, rows = softmax(outputs, -1), phi.reshape(30, 2, -1)
    hessians = p[:, :, None] * np.eye(2) - p[:, :, None] * p[:, None]
    curvature = np.einsum("ncp,ncd,ndq->pq", rows, hessians, rows)
    curvature += np.eye(flat.size) / prior**2
    _, slope = objective(np.asarray(flat))
    distance = np.sqrt(slope @ np.linalg.solve(curvature, slope))
    with pytest.warns(UserWarning, match=f"is {distance:.2g} standard deviations"):
        posterior(model)(inputs)
    with pytest.warns(UserWarning, match="train it, or train it further, with `prior="):
        posterior(model).tuned()
    small = gnlin.predict.posterior(
        model, (inputs, labels), loss=loss, prior=prior, memory_budget=phi.nbytes - 1
    )
    with pytest.warns(UserWarning, match=f"is {distance:.2g} standard deviations"):
        small(inputs)


@pytest.mark.slow
def test_a_solution_with_state_as_it_is_in_inference():
    """The state stays fixed, and the prior is that of the training."""
    model, state = eqx.nn.make_with_state(Normalised)(jax.random.key(0), 0.5)
    rng = np.random.default_rng(0)
    data = rng.normal(size=(9, 3)), rng.normal(size=(9, 2))
    solver = gnlin.DampedGaussNewton(0.1, search=None)
    trained = gnlin.solve(model, data, solver, state=state, prior=0.7, max_steps=3)
    after = trained.state
    pair = (lambda m, x: m(x, after)[0], eqx.nn.inference_mode(trained.model))
    zero = jax.tree.map(lambda x: x * 0 if eqx.is_inexact_array(x) else x, pair)
    known = {"noise": 0.1, "prior": 0.07, "about": zero}
    expected = gnlin.predict.posterior(pair, data, **known)(TEST)
    found = gnlin.predict.posterior(trained, data, noise=0.1)(TEST)
    for ours, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-6)


@pytest.mark.slow
def test_a_solution_with_dropout_is_used_without_it():
    keys = jax.random.split(jax.random.key(0))
    first, last = eqx.nn.Linear(3, 4, key=keys[0]), eqx.nn.Linear(4, 2, key=keys[1])
    model = eqx.nn.Sequential([first, eqx.nn.Dropout(0.5), last])
    rng = np.random.default_rng(0)
    data = rng.normal(size=(9, 3)), rng.normal(size=(9, 2))
    solver = gnlin.DampedGaussNewton(0.1, search=None)
    trained = gnlin.solve(model, data, solver, prior=0.7, max_steps=3)
    found = gnlin.predict.posterior(trained, data, noise=0.1)(TEST)
    plain = eqx.nn.inference_mode(trained.model)
    zero = jax.tree.map(lambda x: x * 0 if eqx.is_inexact_array(x) else x, plain)
    known = {"noise": 0.1, "prior": 0.07, "about": zero}
    expected = gnlin.predict.posterior(plain, data, **known)(TEST)
    for ours, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-9)


def posterior_point(model):
    return eqx.filter(model, eqx.is_inexact_array)


@given(st.floats(0.05, 0.95), st.floats(0.0, 2.0))
def test_intervals(confidence, noise):
    gaussian = gnlin.predict.Gaussian(jnp.array([1.0]), jnp.array([0.49]))
    low, high = gaussian.interval(confidence, noise)
    expected = stats.norm(1.0, math.hypot(0.7, noise)).interval(confidence)
    np.testing.assert_allclose((low[0], high[0]), expected, rtol=1e-6)
    np.testing.assert_allclose(gaussian.standard_deviation, [0.7])


def solved(matrix, right):
    """Solve by Cholesky in the matrix's own precision, which LAPACK may not support."""
    n, rows = len(matrix), np.zeros_like(matrix)
    for j in range(n):
        rows[j, j] = np.sqrt(matrix[j, j] - rows[j, :j] @ rows[j, :j])
        below = slice(j + 1, n)
        rows[below, j] = (matrix[below, j] - rows[below, :j] @ rows[j, :j]) / rows[j, j]
    x = right.copy()
    for i in range(n):
        x[i] = (x[i] - rows[i, :i] @ x[:i]) / rows[i, i]
    for i in reversed(range(n)):
        x[i] = (x[i] - rows[i + 1 :, i] @ x[i + 1 :]) / rows[i, i]
    return x


def mean_by_cholesky(phi, of_test, residual, noise):
    """Return the posterior mean less the outputs."""
    m, p = phi.shape
    damping = phi.dtype.type(noise) ** 2
    if m <= p:
        damped = phi @ phi.T + damping * np.eye(m, dtype=phi.dtype)
        return -of_test @ (phi.T @ solved(damped, residual))
    damped = phi.T @ phi + damping * np.eye(p, dtype=phi.dtype)
    return -of_test @ solved(damped, phi.T @ residual)


FAR = np.array([[3.0], [-2.0], [0.3]])


def on_a_line(width, n, dtype):
    model = eqx.nn.MLP(1, 1, width, 2, jnp.tanh, key=jax.random.key(0))
    cast = lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf
    model, x = jax.tree.map(cast, model), np.linspace(-1, 1, n)[:, None]
    y = np.sin(3 * x) + 0.1 * np.random.default_rng(0).normal(size=x.shape)
    x, y, far = (jnp.asarray(value, dtype) for value in (x, y, FAR))
    outputs, phi, on_far, seen = (
        np.asarray(part) for at in (x, far) for part in outputs_and_rows(model, at)
    )
    residual = (outputs - np.asarray(y)).ravel()
    change = lambda found: (np.asarray(found.mean) - on_far).ravel()
    return model, (x, y), far, (phi, seen, residual), change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "n", "dtype"),
    [(16, 30, np.float64), (4, 60, np.float32)],
)
def test_the_mean_far_from_the_data(width, n, dtype):
    """Small eigenvalues matter there, down to the noise variance. The error is no larger
    than that of Cholesky, judged by Cholesky in more digits."""
    model, data, far, arrays, change = on_a_line(width, n, dtype)
    posterior = gnlin.predict.posterior(model, data, noise=1.0)
    small = [1e-4, 1e-5, 1e-6] if dtype == np.float64 else [1e-4]
    for noise in [1e-1, 1e-2, 1e-3, *small]:
        exact = mean_by_cholesky(*(a.astype(np.longdouble) for a in arrays), noise)
        with np.errstate(invalid="ignore"):
            plain = mean_by_cholesky(*arrays, noise)
        found = change(posterior.at(noise=noise)(far))
        size = np.max(np.abs(exact))
        if np.all(np.isfinite(plain)):
            assert np.max(np.abs(found - exact)) <= np.max(np.abs(plain - exact))
        assert np.max(np.abs(found - exact)) <= 0.02 * size


@pytest.mark.parametrize(
    ("width", "n"), [(16, 30), pytest.param(4, 60, marks=pytest.mark.slow)]
)
def test_only_the_smaller_matrix_fits(width, n):
    """Eigenvalues of the smaller matrix are used, of either side. They are nearly as
    accurate as Cholesky on that side, and a warning says where they are not."""
    model, data, far, arrays, change = on_a_line(width, n, np.float64)
    budget = arrays[0].nbytes - 1
    posterior, whole = (
        gnlin.predict.posterior(model, data, noise=1.0, **options)
        for options in ({"memory_budget": budget}, {})
    )
    for noise in [1e-1, 1e-3, 1e-4, 1e-5]:
        exact = mean_by_cholesky(*(a.astype(np.longdouble) for a in arrays), noise)
        found, same = (p.at(noise=noise) for p in (posterior, whole))
        error = np.max(np.abs(change(found(far)) - exact))
        assert error <= 1e-3 * (1e-5 / noise) ** 2 * np.max(np.abs(exact)) + 1e-10
        np.testing.assert_allclose(found(far).variance, same(far).variance, rtol=2e-3)
        assert found.log_evidence() == pytest.approx(float(same.log_evidence()), rel=1e-4)
    with pytest.warns(UserWarning, match="where rounding decides the mean: use more"):
        posterior.at(noise=1e-7)(far)


def test_weights_are_inverse_variances():
    """An example of weight 0 has no effect, and one of weight 4 has half of the noise."""
    model, (inputs, targets) = case("tall")
    n = len(inputs)
    few = n // 2
    options = {"noise": 0.4, "prior": 2.0}
    weights = jnp.where(jnp.arange(n) < few, 4.0, 0.0)
    weighted = gnlin.predict.posterior(model, (inputs, targets, weights), **options)
    # The reduction is of training; a likelihood is of all examples.
    options |= {"noise": 0.2, "loss": gnlin.SquaredError(reduction="mean")}
    fewer = gnlin.predict.posterior(model, (inputs[:few], targets[:few]), **options)
    np.testing.assert_allclose(weighted(TEST).mean, fewer(TEST).mean, rtol=1e-7)
    np.testing.assert_allclose(weighted(TEST).variance, fewer(TEST).variance, rtol=1e-7)
    assert weighted.log_evidence() == pytest.approx(float(fewer.log_evidence()), rel=1e-8)
    assert weighted.tuned().noise == pytest.approx(
        2 * float(fewer.tuned().noise), rel=1e-3
    )


@pytest.mark.slow
def test_examples_that_contradict_each_other():
    """No parameter separates them. Their difference contains only rounding, which long
    times and little damping must not amplify."""
    model, (inputs, targets) = case("wide")
    both = jnp.concatenate([inputs] * 2), jnp.concatenate([targets, targets + 0.1])
    between = inputs, targets + 0.05
    found, expected = (
        gnlin.predict.gradient_flow(model, data)(TEST, times=[1e6, 1e9, math.inf])
        for data in (both, between)
    )
    np.testing.assert_allclose(found, expected, atol=1e-6)
    found, expected = (
        gnlin.predict.posterior(model, data, noise=noise)(TEST)
        for data, noise in ((both, 1e-6), (between, 1e-6 / 2**0.5))
    )
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-6)


@pytest.mark.parametrize("noise", [1e-2, 1e-8])
def test_the_evidence_of_little_noise(noise):
    """The model has few parameters and fits; compare with the integral over the
    parameters."""
    rng = np.random.default_rng(0)
    inputs, weights = rng.normal(size=(50, 3)), rng.normal(size=3)
    model = (lambda w, x: w @ x, jnp.zeros(3))
    off = noise * rng.normal(size=50)
    data = jnp.asarray(inputs), jnp.asarray(inputs @ weights + off)
    posterior = gnlin.predict.posterior(model, data, noise=noise)
    precision = inputs.T @ inputs / noise**2 + np.eye(3)
    best = np.linalg.solve(precision, inputs.T @ (inputs @ weights + off)) / noise**2
    left = (inputs @ (weights - best) + off) / noise
    expected = -0.5 * (
        left @ left
        + best @ best
        + np.linalg.slogdet(precision)[1]
        + 50 * np.log(2 * np.pi * noise**2)
    )
    assert posterior.log_evidence() == pytest.approx(expected, rel=1e-6)
    assert posterior.tuned().noise == pytest.approx(
        np.linalg.norm(off) / 50**0.5, rel=0.2
    )


@pytest.mark.slow
def test_the_evidence_of_outputs_whose_squares_nearly_underflow():
    inputs, unit = jnp.linspace(0, 1, 8, dtype=jnp.float32), 1e-15
    found = []
    for size in (1, unit):
        network = lambda w, x, size=size: size * w[0] * jnp.sin(3 * x * w[1:])
        targets = size * jnp.sin(2 * inputs)[:, None]
        model = network, jnp.array([1, 0.5], jnp.float32)
        posterior = gnlin.predict.posterior(model, (inputs, targets), noise=0.1 * size)
        tuned = posterior.tuned()
        found.append([tuned.noise / size, tuned.prior])
    np.testing.assert_allclose(found[1], found[0], rtol=5e-3)


def test_the_evidence_of_counts_has_all_constants():
    """Compare with the integral over one parameter. The weight 2 repeats an example."""
    loss = gnlin.losses.BinomialNLL(30)
    inputs, counts = jnp.array([1.0, 0.5, 0.8]), np.array([3, 12, 20])
    weights, prior = np.array([1.0, 2.0, 1.0]), 0.7
    data = inputs, jnp.asarray(counts), jnp.asarray(weights)

    def joint(w):
        shares = expit(2 + w * np.asarray(inputs))
        likelihood = weights @ stats.binom(30, shares).logpmf(counts)
        return likelihood + stats.norm(0, prior).logpdf(w)

    best = optimize.minimize_scalar(lambda w: -joint(w)).x
    model = lambda w, x: 2 + w * x, jnp.asarray(best)
    posterior = gnlin.predict.posterior(model, data, loss=loss, prior=prior)
    found = jax.jit(lambda: posterior.log_evidence())()
    exact = np.log(integrate.quad(lambda w: np.exp(joint(w)), -5, 5)[0])
    assert float(found) == pytest.approx(exact, abs=0.01)  # Laplace's approximation


class Scaled(gnlin.authoring.AbstractLoss):
    scale: float
    reduction: str | None = eqx.field(static=True)

    def __init__(self, unit):
        self.scale = 2 * unit
        self.reduction = "mean"

    def value(self, outputs, target):
        return self.scale * gnlin.SigmoidCrossEntropy().value(outputs, target)


@pytest.mark.slow
def test_a_loss_with_its_own_init():
    """All outputs are 0, where each has the loss 2 log 2 and the curvature 2/4."""
    inputs = np.random.default_rng(0).normal(size=(20, 3))
    model = lambda w, x: w @ x, jnp.zeros((1, 3))
    data = jnp.asarray(inputs), jnp.ones((20, 1))
    posterior = gnlin.predict.posterior(model, data, loss=Scaled(1.0))
    log_det = np.linalg.slogdet(np.eye(3) + inputs.T @ inputs / 2)[1]
    expected = -40 * np.log(2) - log_det / 2
    assert float(posterior.log_evidence()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_flow_from_where_it_ends():
    """At a minimum the flow does not diverge, however long it lasts."""
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(40, 3)), rng.integers(0, 2, size=40)

    def objective(flat):
        outputs = inputs @ flat.reshape(2, 3).T
        slope = softmax(outputs, -1) - np.eye(2)[labels]
        value = np.sum(logsumexp(outputs, -1)) - np.sum(outputs[np.arange(40), labels])
        return value, (slope.T @ inputs).ravel()

    best = optimize.minimize(objective, np.zeros(6), jac=True, options={"gtol": 1e-9})
    data, loss = (jnp.asarray(inputs), jnp.asarray(labels)), gnlin.SoftmaxCrossEntropy()
    outputs = lambda w, x: w @ x
    for weights in (np.zeros((2, 3)), best.x.reshape(2, 3)):
        model = outputs, jnp.asarray(weights)
        losses = gnlin.predict.gradient_flow(model, data, loss=loss).loss([1.0, 1e3, 1e6])
        assert losses[-1] == pytest.approx(best.fun, rel=1e-6)


def test_descent_from_where_it_ends():
    """Rounding may raise the loss, but the steps do not diverge."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(50, 3)) / 10
    counts = rng.poisson(1e4, size=50)

    def objective(w):
        rates = np.exp(9 + inputs @ w)
        return np.sum(rates - counts * (inputs @ w)), inputs.T @ (rates - counts)

    best = optimize.minimize(objective, np.zeros(3), jac=True, options={"gtol": 1e-6})
    start = jnp.asarray(best.x + 3e-5, jnp.float32)
    model = lambda w, x: 9 + jnp.vdot(w, x), start
    predict = gnlin.predict.gradient_descent(
        model,
        (jnp.asarray(inputs, jnp.float32), jnp.asarray(counts)),
        learning_rate=1e-5,
        loss=gnlin.losses.PoissonNLL(),
    )
    moved = predict(steps=[1, 2, 3, 10, 30, 100])
    expected = np.tile(9 + inputs @ best.x, (6, 1))
    np.testing.assert_allclose(moved, expected, atol=1e-4)


def test_momentum_may_swing():
    model, data = classified("wide")
    settings = {"momentum": 0.9, "loss": gnlin.SoftmaxCrossEntropy()}
    learning_rate = 20 * rate(model, data[0])
    predict = gnlin.predict.gradient_descent(
        model, data, learning_rate=learning_rate, **settings
    )
    together = predict(TEST, steps=[1, 3, 500])
    np.testing.assert_allclose(together[-1], predict(TEST, steps=500), rtol=1e-9)


@pytest.mark.slow
def test_other_arguments_are_not_compiled_again():
    traced = []

    def network(w, x):
        traced.append(x)
        return jnp.tanh(w @ x)

    def used(w):
        data = jnp.ones((6, 3)), jnp.ones((6, 2))
        predict = gnlin.predict.gradient_flow((network, w), data)
        posterior = gnlin.predict.posterior((network, w), data, noise=0.1)
        kernel = gnlin.TangentKernel((network, w), outputs="trace")
        found = predict(TEST, times=[1.0, 2.0]), predict.loss([1.0, 2.0]), posterior(TEST)
        return found, posterior.log_evidence(), kernel(TEST), kernel(TEST, data[0])

    used(jnp.ones((2, 3)))
    number = len(traced)
    used(jnp.zeros((2, 3)))
    assert len(traced) == number


@pytest.mark.slow
def test_single_precision():
    model, data = case("wide", jnp.float32)
    double, same = case("wide")
    settings = {"learning_rate": float(rate(double, same[0]))}
    single = TEST.astype(jnp.float32)
    found = gnlin.predict.gradient_descent(model, data, **settings)(single, steps=STEPS)
    assert found.dtype == jnp.float32
    gradient = least_squares(same[1])
    expected = literal(double, same, steps=STEPS, gradient=gradient, **settings)
    np.testing.assert_allclose(found, expected, atol=2e-3)
    posterior = gnlin.predict.posterior(model, data, noise=0.3)
    mean, variance, _ = gaussian_process(double, same, 0.3, 1.0)
    found = posterior(single)
    np.testing.assert_allclose(np.ravel(found.mean), mean, atol=5e-3)
    np.testing.assert_allclose(np.ravel(found.variance), variance, atol=5e-3)


def test_errors_of_arguments(unchecked):
    model, data = case("wide")
    inputs, targets = data
    descent = lambda *args, **options: gnlin.predict.gradient_descent(
        *args, **{"learning_rate": 1e-4, **options}
    )
    posterior = gnlin.predict.posterior
    labels = jnp.arange(7) % 2
    cross_entropy = gnlin.SoftmaxCrossEntropy()
    predict = descent(model, data)
    growing = descent(model, (inputs, labels), learning_rate=1e3, loss=cross_entropy)
    cases = {
        "it must be less than": lambda: descent(model, data, learning_rate=10.0),
        "diverged by step 50": lambda: growing(TEST, steps=[0, 50]),
        "`learning_rate` must be greater": lambda: descent(
            model, data, learning_rate=0.0
        ),
        "less than 1": lambda: descent(model, data, momentum=1.0),
        "`nesterov` must be `True`": lambda: descent(model, data, nesterov=0.9),
        "`damping` must not be negative": lambda: descent(model, data, damping=-1.0),
        "targets must have the shape": lambda: descent(model, (inputs, targets[:, 0])),
        "same number of examples": lambda: descent(model, (inputs, targets[:3])),
        "must be a pair": lambda: descent(model, inputs),
        "but groups of `gnlin.Residuals`": lambda: posterior(
            model, {"data": gnlin.Residuals(model, inputs, targets=targets)}, noise=1.0
        ),
        "not finite": lambda: descent(model, (inputs, targets * jnp.nan)),
        "0 examples": lambda: predict(inputs[:0]),
        "the input of one example": lambda: predict(inputs[:, :2]),
        "whole numbers of at least 0": lambda: predict(TEST, steps=[1.5]),
        "but -1 was given": lambda: predict(TEST, steps=-1),
        "but 'all' was given": lambda: predict(TEST, steps="all"),
        "must be known": lambda: jax.jit(lambda k: predict(TEST, steps=k))(3),
        "`times` must be numbers": lambda: gnlin.predict.gradient_flow(model, data)(
            TEST, times=-0.5
        ),
        "`loss` must be one of": lambda: descent(model, data, loss="mse"),
        "needs `noise`": lambda: posterior(model, data),
        "`noise` must be greater": lambda: posterior(model, data, noise=0.0),
        "`prior` must be greater": lambda: posterior(model, data, noise=1.0, prior=-1.0),
        "`noise` is for squared": lambda: posterior(
            model, (inputs, labels), noise=1.0, loss=cross_entropy
        ),
        "`from_zero` is for": lambda: posterior(
            model, (inputs, labels), from_zero=True, loss=cross_entropy
        ),
        "does not fit": lambda: posterior(model, data, noise=1.0, memory_budget=100),
        "must be one number": lambda: posterior(model, data, noise=jnp.ones(7)),
        "`damping` must be one number": lambda: descent(model, data, damping=[0.1, 1.0]),
        "leave one of them out": lambda: posterior(
            model, data, noise=1.0, about=model, from_zero=True
        ),
        "`loss` must be": lambda: posterior(model, data, loss="mse"),
        "of classes": lambda: posterior(model, data, noise=1.0).probabilities(TEST),
        "outputs, its Jacobian or the data are not finite": lambda: predict(
            TEST * jnp.nan
        ),
        "same structure": lambda: posterior(
            model, data, noise=1.0, about=case("tall")[0]
        ),
        "strictly between 0 and 1": lambda: posterior(model, data, noise=1.0)(
            TEST
        ).interval(95),
    }
    for said, call in cases.items():
        with pytest.raises(ValueError, match=said):
            call()


def redundant(p, x):
    """A curve that depends on the sum of the first two parameters."""
    return jnp.tanh((p[0] + p[1]) * x[0] + p[2] * x[1]) * p[2] + p[3]


@pytest.mark.slow
@pytest.mark.parametrize("order", [[0, 1, 0], [0, 1, 2, 3, 4, 5]])
def test_derivatives_where_eigenvalues_are_zero(order):
    """Eigenvectors have no derivatives for equal examples, or for parameters of which
    only the sum matters. Predictions have, also in directions that separate them."""
    rng, point = np.random.default_rng(0), np.array([0.3, 0.2, -0.7, 0.1])
    inputs, change = jnp.asarray(rng.normal(size=(2, 6, 2)))
    inputs, change, targets = inputs[np.array(order)], change[: len(order)], 0.4
    noise, prior, time, m = 0.3, 1.2, 0.7, len(order)

    def found(inputs):
        data = inputs, jnp.full(m, targets)
        posterior = gnlin.predict.posterior(
            (redundant, point), data, noise=noise, prior=prior
        )
        flow = gnlin.predict.gradient_flow((redundant, point), data)
        evidence = posterior.log_evidence()
        return *posterior(TEST[:, :2]), evidence, flow(TEST[:, :2], times=time)

    def outputs_and_rows(x):
        bent = np.tanh((point[0] + point[1]) * x[:, 0] + point[2] * x[:, 1])
        by_sum, slope = (1 - bent**2) * point[2] * x[:, 0], (1 - bent**2) * point[2]
        rows = [by_sum, by_sum, slope * x[:, 1] + bent, np.ones(len(x))]
        return bent * point[2] + point[3], np.stack(rows, axis=1)

    def expected(inputs):
        (f, phi), (there, phi_there) = map(outputs_and_rows, (inputs, TEST[:, :2]))
        residual, kernel, cross = f - targets, phi @ phi.T, phi_there @ phi.T
        damped = kernel + (noise / prior) ** 2 * np.eye(m)
        mean = there - cross @ np.linalg.solve(damped, residual)
        left = phi_there @ phi_there.T - cross @ np.linalg.solve(damped, cross.T)
        variance, covariance = prior**2 * np.diagonal(left), prior**2 * damped
        misfit = residual @ np.linalg.solve(covariance, residual)
        log_det = np.log(np.linalg.det(2 * np.pi * covariance))
        # The integral of exp(-K t) r is a corner of the exponential of a larger matrix.
        larger = np.zeros((m + 1, m + 1), kernel.dtype)
        larger[:m, :m], larger[:m, m] = -kernel, residual
        whole = linalg.expm(time * larger)
        return mean, variance, -0.5 * (misfit + log_det), there - cross @ whole[:m, m]

    values, slopes = jax.jit(lambda x: jax.jvp(found, (x,), (change,)))(inputs)
    # A step along the imaginary axis has the derivative as its imaginary part.
    exact = expected(np.asarray(inputs) + 1e-30j * np.asarray(change))
    for value, slope, both in zip(values, slopes, exact, strict=True):
        np.testing.assert_allclose(value, both.real, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(slope, both.imag / 1e-30, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("copies", [2, 3])
def test_derivatives_of_the_limit_of_equal_examples(copies, monkeypatch):
    """Eigenvalues that are only rounding take no part in the limit, nor in its
    derivatives, whether singular values (two copies) or eigenvalues were computed."""
    if copies == 3:  # another shape, and so another program
        module = "gnlin.predict._eigenbasis._singular_values_pay"
        monkeypatch.setattr(module, lambda cost: False)
    model, (inputs, targets) = case("wide")
    inputs, targets = (jnp.tile(x, (copies, 1)) for x in (inputs, targets))
    targets += jnp.linspace(0, 1, len(targets))[:, None]

    def limit(targets):
        return gnlin.predict.gradient_flow(model, (inputs, targets))(TEST)

    found = jax.jacobian(limit)(targets).reshape(TEST.shape[0] * 2, -1)
    (_, rows), (_, there) = dense(model, inputs), dense(model, TEST)
    expected = there @ rows.T @ np.linalg.pinv(rows @ rows.T, 1e-10, hermitian=True)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_derivatives_of_a_classifiers_variance():
    """The curvature of the softmax is zero where all logits change alike."""
    model, (inputs, labels) = classified("one")
    loss, change = gnlin.SoftmaxCrossEntropy(), jnp.ones_like(inputs)

    def found(inputs):
        data = inputs, labels
        posterior = gnlin.predict.posterior(model, data, loss=loss, prior=0.5)
        return posterior(TEST).variance

    def expected(inputs):
        linearised = lambda x: gnlin.features.linearise_model(model, x)
        lin, rows_there = linearised(inputs), linearised(TEST).matrix()
        p, rows = jax.nn.softmax(lin.outputs), lin.matrix()
        of_each = jax.vmap(lambda p: jnp.diag(p) - jnp.outer(p, p))(p)
        hessian = jax.scipy.linalg.block_diag(*of_each)
        precision = rows.T @ hessian @ rows + 4 * jnp.eye(rows.shape[1])
        solved = jnp.linalg.solve(precision, rows_there.T)
        return jnp.sum(rows_there.T * solved, 0).reshape(len(TEST), -1)

    one, two = (
        jax.jit(lambda x, of=of: jax.jvp(of, (x,), (change,)))(inputs)
        for of in (found, expected)
    )
    np.testing.assert_allclose(one, two, rtol=1e-8, atol=1e-12)


def test_whole_numbers_beyond_32_bits_do_not_wrap():
    """In single precision, JAX's integers have 32 bits."""
    model = lambda p, x: p * x.astype(jnp.float32), jnp.float32(1.0)
    x = np.array([2**33 + 1, 3])
    with jax.enable_x64(False):
        lin = gnlin.features.linearise_model(model, x)
    np.testing.assert_allclose(lin.outputs, [2.0**33, 3])


def test_a_negative_variance_is_refused():
    lin = gnlin.linearise(lambda p, x: p * x, jnp.ones(2), jnp.ones(2))
    with pytest.raises(ValueError, match="`variance` must"):
        gnlin.predict.predictive_variance(lin, lin, damping=1.0, variance=-1.0)


@pytest.mark.slow
def test_copies_predict_the_same():
    x = jnp.linspace(0, 1, 5)
    model = lambda p, x: jnp.sin(p * x), jnp.array(1.0)
    posterior = gnlin.predict.posterior(model, (x, x), noise=0.1)
    lin = gnlin.features.linearise_model(model, x)
    flow = gnlin.predict.gradient_flow(model, (x, x))
    assert copy.deepcopy(posterior)(x).mean.tolist() == posterior(x).mean.tolist()
    assert copy.deepcopy(lin).kernel().tolist() == lin.kernel().tolist()
    assert copy.deepcopy(flow)(x, 1.0).tolist() == flow(x, 1.0).tolist()


#
# What rounding hides
#


def wide_network(num_examples):
    x = jax.random.uniform(jax.random.key(1), (num_examples, 4), jnp.float32, -1, 1)
    y = jnp.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    key = jax.random.key(0)
    model = eqx.nn.MLP(4, 1, 32, 2, jnp.tanh, dtype=jnp.float32, key=key)
    return model, (x, y)


def flow_losses(model, data, times):
    """The losses of the linearised model under gradient flow, by NumPy's singular
    values in double precision."""
    arrays, rest = eqx.partition(model, eqx.is_array)
    x, y = data
    rows = jax.vmap(jax.jacrev(lambda p, x: eqx.combine(p, rest)(x)), (None, 0))
    rows = [
        np.asarray(r, float).reshape(len(x), -1) for r in jax.tree.leaves(rows(arrays, x))
    ]
    u, s, _ = np.linalg.svd(np.concatenate(rows, axis=1), full_matrices=False)
    along = u.T @ np.asarray(jax.vmap(model)(x) - y, float)[:, 0]
    left = np.exp(-np.outer(times, s**2)) * along
    return 0.5 * np.sum(left**2, axis=1)


@pytest.mark.slow
def test_long_times_in_single_precision():
    model, data = wide_network(150)
    times = np.array([1e2, 1e3, 1e4, 1e6])
    found = gnlin.predict.gradient_flow(model, data).loss(times)
    np.testing.assert_allclose(found, flow_losses(model, data, times), rtol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["flow", "descent"])
def test_what_eigenvalues_do_not_resolve_is_told(monkeypatch, way):
    monkeypatch.setattr(_eigenbasis, "_singular_values_pay", lambda cost: False)
    model, data = wide_network(140)  # another shape is compiled anew
    if way == "flow":
        predict = gnlin.predict.gradient_flow(model, data)
        short, long = 1.0, [1.0, math.inf]
    else:
        predict = gnlin.predict.gradient_descent(model, data, learning_rate=1e-4)
        short, long = 10_000, 10**9
    exact = flow_losses(model, data, [1.0])[0]
    np.testing.assert_allclose(predict.loss(short), exact, rtol=0.01)  # no warning
    for call in (predict.loss, lambda amounts: predict(data[0][:2], amounts)):
        with pytest.warns(
            UserWarning, match="Rounding hides .* double precision"
        ) as told:
            call(long)
        assert told[0].filename == __file__


@pytest.mark.slow
def test_singular_values_that_single_precision_does_not_resolve_are_told():
    x = jax.random.uniform(jax.random.key(1), (120, 1), jnp.float32, -1, 1)
    noise = jax.random.normal(jax.random.key(2), (120, 1), jnp.float32)
    data = x, jnp.sin(3 * x) + 0.3 * noise
    model = eqx.nn.MLP(1, 1, 100, 1, jnp.tanh, dtype=jnp.float32, key=jax.random.key(0))
    predict = gnlin.predict.gradient_flow(model, data)
    exact = flow_losses(model, data, [1e3])[0]
    np.testing.assert_allclose(predict.loss(1e3), exact, rtol=0.01)  # no warning
    with pytest.warns(UserWarning, match="Unless these eigenvalues are zero"):
        predict.loss()


@pytest.mark.slow
def test_predictions_within_a_program():
    model, (x, y) = wide_network(20)
    predict = gnlin.predict.gradient_flow(model, (x, y))
    for times in ([1.0, 5.0], math.inf):
        inside = jax.jit(lambda x, times=times: predict(x, times))(x)
        np.testing.assert_allclose(inside, predict(x, times), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_eigenvalues_that_are_zero_are_no_reason_to_warn(monkeypatch):
    monkeypatch.setattr(_eigenbasis, "_singular_values_pay", lambda cost: False)
    model, (x, y) = wide_network(10)
    double = jax.tree.map(lambda a: a.astype(float) if eqx.is_array(a) else a, model)
    x, y = jnp.tile(x.astype(float), (2, 1)), y.astype(float)
    y = jnp.concatenate([y, y + 1])  # labels that contradict each other
    predict = gnlin.predict.gradient_flow(double, (x, y))
    np.testing.assert_allclose(predict.loss(), 20 * 0.5 * 0.5**2, rtol=1e-6)
