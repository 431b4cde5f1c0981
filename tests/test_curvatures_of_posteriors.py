"""Curvatures of posteriors beside the full one, against dense formulas in NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

import gnlin


def mlp():
    return eqx.nn.MLP(3, 2, 4, 1, jnp.tanh, key=jax.random.key(0))


class Convolution(eqx.Module):
    """Weights with several positions."""

    conv: eqx.nn.Conv1d
    last: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(1))
        self.conv = eqx.nn.Conv1d(3, 4, 3, key=keys[0])
        self.last = eqx.nn.Linear(8, 2, key=keys[1])

    def __call__(self, x):
        return self.last(jnp.tanh(self.conv(x.reshape(3, 4))).ravel())


MODELS = {"dense": (mlp, 3), "convolution": (Convolution, 12)}
TEST = np.random.default_rng(1).normal(size=(5, 12))


def case(name, n=7):
    make, size = MODELS[name]
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.normal(size=(n, size)))
    return make(), inputs, jnp.asarray(rng.integers(0, 2, n)), jnp.asarray(TEST[:, :size])


@eqx.filter_jit
def outputs_of(model, inputs):
    return jax.vmap(model)(inputs)


def rows_of(model, inputs):
    """Return one matrix of all rows for each array of parameters."""
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    outputs = lambda p: jax.vmap(eqx.combine(p, static))(inputs)
    found = jax.tree.leaves(jax.jit(jax.jacobian(outputs))(parameters))
    shapes = [x.shape for x in jax.tree.leaves(parameters)]
    return [np.asarray(x).reshape(-1, *s) for x, s in zip(found, shapes, strict=True)]


def hessian(outputs):
    """Return the Hessian of the cross-entropy in the outputs of all examples."""
    p = softmax(np.asarray(outputs), -1)
    n, c = p.shape
    found = np.zeros((n * c, n * c))
    for i, q in enumerate(p):
        place = slice(c * i, c * (i + 1))
        found[place, place] = np.diag(q) - np.outer(q, q)
    return found


def root(matrix):
    w, v = np.linalg.eigh(matrix)
    return np.sqrt(np.maximum(w, 0))[:, None] * v.T


def kronecker(rows):
    """Return the dense curvature by partial traces of the dense block of each array."""
    blocks = []
    for x in rows:
        m, o = len(x), x.shape[1] if x.ndim > 2 else x[0].size
        x = x.reshape(m, o, -1)
        whole = np.einsum("moq,mpr->oqpr", x, x)
        left, right = np.einsum("oqpq->op", whole), np.einsum("oqor->qr", whole)
        blocks.append(np.kron(left, right) / np.trace(left))
    sizes = np.cumsum([0, *(len(b) for b in blocks)])
    found = np.zeros((sizes[-1], sizes[-1]))
    for start, end, block in zip(sizes, sizes[1:], blocks, strict=False):
        found[start:end, start:end] = block
    return found


def flat(rows):
    return np.concatenate([x.reshape(len(x), -1) for x in rows], axis=1)


def parameters_of(model):
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    return np.concatenate([np.ravel(x) for x in leaves])


def slightly_wrong(function, *args, **kwargs):
    """The models here are not trained, and a prediction says so."""
    with pytest.warns(UserWarning, match="standard deviations of the posterior"):
        return function(*args, **kwargs)


@pytest.mark.slow
def test_kronecker_factors():
    model, inputs, labels, test = case("convolution")
    prior, loss = 0.5, gnlin.SoftmaxCrossEntropy()
    posterior = gnlin.predict.posterior(
        model, (inputs, labels), loss=loss, prior=prior, curvature="kronecker"
    )
    outputs, rows = outputs_of(model, inputs), rows_of(model, inputs)
    half = root(hessian(outputs))
    curvature = kronecker([np.tensordot(half, x, 1) for x in rows])
    precision = curvature + np.eye(len(curvature)) / prior**2
    of_test = flat(rows_of(model, test))
    variance = np.diag(of_test @ np.linalg.solve(precision, of_test.T))
    found = slightly_wrong(posterior, test)
    np.testing.assert_allclose(np.ravel(found.variance), variance, rtol=1e-9)
    np.testing.assert_allclose(found.mean, outputs_of(model, test), rtol=1e-12)
    p, theta = softmax(outputs, -1), parameters_of(model)
    evidence = np.sum(np.log(p[np.arange(len(p)), labels])) - theta @ theta / 2 / prior**2
    evidence -= np.linalg.slogdet(prior**2 * precision)[1] / 2
    assert posterior.log_evidence() == pytest.approx(evidence, rel=1e-9)
    slope = flat(rows).T @ np.ravel(p - np.eye(2)[labels]) + theta / prior**2
    distance = np.sqrt(slope @ np.linalg.solve(precision, slope))
    with pytest.warns(UserWarning, match=f"is {distance:.2g} standard deviations"):
        posterior(test)


@pytest.mark.slow
def test_kronecker_factors_of_one_example_are_exact():
    """The curvature of a linear model's weights is then a Kronecker product."""
    model = eqx.nn.Linear(3, 4, use_bias=False, key=jax.random.key(0))
    data = jnp.array([[0.3, -1.0, 2.0]]), jnp.array([2])
    options = {"loss": gnlin.SoftmaxCrossEntropy(), "prior": 2.0}
    exact = gnlin.predict.posterior(model, data, **options)
    found = gnlin.predict.posterior(model, data, curvature="kronecker", **options)
    test = jnp.asarray(TEST[:, :3])
    np.testing.assert_allclose(
        slightly_wrong(found, test).variance,
        slightly_wrong(exact, test).variance,
        rtol=1e-9,
    )
    assert found.log_evidence() == pytest.approx(float(exact.log_evidence()), rel=1e-9)


def test_kronecker_factors_of_a_regression():
    """The noise is known, the mean is that of the model, and the prior is about zero."""
    model, inputs, _, test = case("dense")
    targets = jnp.asarray(np.random.default_rng(2).normal(size=(7, 2)))
    noise, prior = 0.3, 0.5
    posterior = gnlin.predict.posterior(
        model, (inputs, targets), noise=noise, prior=prior, curvature="kronecker"
    )
    outputs, rows = outputs_of(model, inputs), rows_of(model, inputs)
    theta = parameters_of(model)
    precision = kronecker(rows) / noise**2 + np.eye(theta.size) / prior**2
    of_test = flat(rows_of(model, test))
    found = slightly_wrong(posterior, test)
    variance = np.diag(of_test @ np.linalg.solve(precision, of_test.T))
    np.testing.assert_allclose(np.ravel(found.variance), variance, rtol=1e-9)
    np.testing.assert_allclose(found.mean, outputs_of(model, test), rtol=1e-12)
    residual = np.ravel(outputs - targets)
    evidence = -residual @ residual / 2 / noise**2 - theta @ theta / 2 / prior**2
    evidence -= 7 * np.log(2 * np.pi * noise**2)
    evidence -= np.linalg.slogdet(prior**2 * precision)[1] / 2
    assert posterior.log_evidence() == pytest.approx(evidence, rel=1e-9)
    slope = flat(rows).T @ residual / noise**2 + theta / prior**2
    distance = np.sqrt(slope @ np.linalg.solve(precision, slope))
    with pytest.warns(UserWarning, match=f"is {distance:.2g} standard deviations"):
        posterior(test)
    best = slightly_wrong(posterior.tuned)
    for factor in (0.97, 1.03):
        for name in ("noise", "prior"):
            other = best.at(**{name: factor * getattr(best, name)})
            assert other.log_evidence() < best.log_evidence()


# Fewer outputs than parameters, and more
@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "rank"), [pytest.param(7, 14, marks=pytest.mark.slow), (40, 3)]
)
def test_leading_eigenpairs(n, rank):
    model, inputs, labels, test = case("dense", n)
    prior, loss = 0.5, gnlin.SoftmaxCrossEntropy()
    posterior = gnlin.predict.posterior(
        model, (inputs, labels), loss=loss, prior=prior, curvature=rank
    )
    outputs = outputs_of(model, inputs)
    phi = root(hessian(outputs)) @ flat(rows_of(model, inputs))
    w, v = np.linalg.eigh(phi.T @ phi)
    w[:-rank] = 0
    precision = v @ np.diag(w + 1 / prior**2) @ v.T
    of_test = flat(rows_of(model, test))
    variance = np.diag(of_test @ np.linalg.solve(precision, of_test.T))
    found = slightly_wrong(posterior, test)
    np.testing.assert_allclose(np.ravel(found.variance), variance, rtol=1e-4)
    p, theta = softmax(outputs, -1), parameters_of(model)
    evidence = np.sum(np.log(p[np.arange(n), labels])) - theta @ theta / 2 / prior**2
    evidence -= np.linalg.slogdet(prior**2 * precision)[1] / 2
    assert posterior.log_evidence() == pytest.approx(evidence, rel=1e-6)


def test_all_eigenpairs_of_a_regression_are_the_full_curvature():
    model, inputs, _, test = case("dense", 40)
    targets = jnp.asarray(np.random.default_rng(2).normal(size=(40, 2)))
    options = {"noise": 0.3, "prior": 0.5}
    exact = gnlin.predict.posterior(model, (inputs, targets), **options)
    num_parameters = parameters_of(model).size
    found = gnlin.predict.posterior(
        model, (inputs, targets), curvature=num_parameters, **options
    )
    np.testing.assert_allclose(found(test).mean, exact(test).mean, rtol=1e-6)
    np.testing.assert_allclose(found(test).variance, exact(test).variance, rtol=1e-6)
    assert found.log_evidence() == pytest.approx(float(exact.log_evidence()), rel=1e-8)


# By the kernel, by singular values, by some eigenpairs, and by factors
@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "curvature", "budget"),
    [
        (3, "full", 1_000),
        pytest.param(3, "full", 10**6, marks=pytest.mark.slow),
        (40, 3, 10**6),
        (7, "kronecker", 10**6),
    ],
)
def test_draws_have_the_posterior_covariance(n, curvature, budget):
    """Draws are linear in standard normal numbers. The matrix that maps these to the
    outputs, times its transpose, is the covariance."""
    model, inputs, labels, test = case("dense", n)
    prior, loss = 0.5, gnlin.SoftmaxCrossEntropy()
    posterior = gnlin.predict.posterior(
        model,
        (inputs, labels),
        loss=loss,
        prior=prior,
        curvature=curvature,
        memory_budget=budget,
    )
    if curvature == "full":
        assert (posterior._basis.vectors.right is None) == (budget == 1_000)
    parameters, _ = eqx.partition(model, eqx.is_inexact_array)
    theta, unravel = jax.flatten_util.ravel_pytree(parameters)
    narrowed = lambda e: posterior._basis.narrowed(unravel(e), posterior.damping)
    of_each = jax.vmap(lambda e: jax.flatten_util.ravel_pytree(narrowed(e))[0])
    square = of_each(jnp.eye(theta.size)) @ of_each(jnp.eye(theta.size)).T

    outputs, rows = outputs_of(model, inputs), rows_of(model, inputs)
    half = root(hessian(outputs))
    if curvature == "kronecker":
        dense = kronecker([np.tensordot(half, x, 1) for x in rows])
    else:
        phi = half @ flat(rows)
        w, v = np.linalg.eigh(phi.T @ phi)
        w[: 0 if curvature == "full" else -curvature] = 0
        dense = v @ np.diag(w) @ v.T
    expected = np.linalg.inv(np.eye(theta.size) + prior**2 * dense)
    np.testing.assert_allclose(square, expected, atol=1e-4 if curvature == 3 else 1e-9)

    draws = slightly_wrong(posterior.sample, test, 4_000, key=jax.random.key(3))
    of_test = flat(rows_of(model, test))
    covariance = prior**2 * of_test @ expected @ of_test.T
    deviations = np.asarray(draws) - np.asarray(outputs_of(model, test))
    deviations = deviations.reshape(4_000, -1)
    found = deviations.T @ deviations / 4_000
    # Five standard errors of each number
    scale = np.sqrt(np.diag(covariance))
    assert np.max(np.abs(found - covariance) / np.outer(scale, scale)) < 5 * np.sqrt(
        2 / 4_000
    )


@pytest.mark.slow
def test_draws_of_a_regression_are_about_its_mean():
    model, inputs, _, test = case("dense")
    targets = jnp.asarray(np.random.default_rng(2).normal(size=(7, 2)))
    posterior = gnlin.predict.posterior(model, (inputs, targets), noise=0.3)
    mean, variance = posterior(test)
    draws = posterior.sample(test, 4_000, key=jax.random.key(0))
    assert draws.shape == (4_000, 5, 2)
    errors = jnp.abs(jnp.mean(draws, 0) - mean) / jnp.sqrt(variance / 4_000)
    assert jnp.max(errors) < 5
    other = posterior.sample(test, 4_000, key=jax.random.key(1))
    assert not jnp.allclose(draws, other)
    assert posterior.sample(key=jax.random.key(0)).shape == (1, 7, 2)
    by_input = jax.grad(lambda x: jnp.sum(posterior.sample(x, key=jax.random.key(0))))
    h = 1e-5 * jnp.ones_like(test)
    ends = (posterior.sample(test + s * h, key=jax.random.key(0)) for s in (1, -1))
    slope = (jnp.sum(next(ends)) - jnp.sum(next(ends))) / 2e-5
    assert jnp.sum(by_input(test)) == pytest.approx(float(slope), rel=1e-6)
    with pytest.raises(ValueError, match="num_samples"):
        posterior.sample(test, 0, key=jax.random.key(0))
    with pytest.raises(ValueError, match="key"):
        posterior.sample(test, key=0)


@pytest.mark.slow
@pytest.mark.parametrize("num_classes", [2, 3])
def test_probabilities_are_of_each_logit_less_the_mean_of_the_others(num_classes):
    """A constant added to all logits has no effect, although its variance is the
    prior's, as the data say nothing about it."""
    c = num_classes
    model = eqx.nn.Linear(2, c, key=jax.random.key(0))
    rng = np.random.default_rng(0)
    data = jnp.asarray(rng.normal(size=(40, 2))), jnp.asarray(rng.integers(0, c, 40))
    loss = gnlin.SoftmaxCrossEntropy()
    solver = gnlin.DampedGaussNewton(1e-6, method="curvature", search=None)
    trained = gnlin.solve(model, data, solver, loss=loss, prior=3.0)
    posterior = gnlin.predict.posterior(trained, data, loss=loss)
    far = jnp.asarray(3 * rng.normal(size=(20, 2)))
    logits = np.asarray(posterior.sample(far, 4_000, key=jax.random.key(0)))
    less = (c * logits - np.sum(logits, axis=-1, keepdims=True)) / (c - 1)
    mean, variance = np.mean(less, axis=0), np.var(less, axis=0)
    expected = softmax((1 - 1 / c) * mean / np.sqrt(1 + np.pi / 8 * variance), axis=-1)
    found = posterior.probabilities(far)
    np.testing.assert_allclose(found, expected, atol=0.01)
    if c == 2:  # The formula is then close to the integral.
        integral = np.mean(softmax(logits, axis=-1), axis=0)
        np.testing.assert_allclose(found, integral, atol=0.02)


def test_mistakes():
    model, inputs, labels, _ = case("dense")
    data, loss = (inputs, labels), gnlin.SoftmaxCrossEntropy()
    for curvature in ("diagonal", 0, 2.5, True):
        with pytest.raises(ValueError, match='must be "full", "kronecker" or a whole'):
            gnlin.predict.posterior(model, data, loss=loss, curvature=curvature)
    with pytest.raises(ValueError, match="has 14 eigenpairs, but 15 were asked for"):
        gnlin.predict.posterior(model, data, loss=loss, curvature=15)
    with pytest.raises(ValueError, match="factors of an array do not fit"):
        gnlin.predict.posterior(
            model, data, loss=loss, curvature="kronecker", memory_budget=100
        )
    with pytest.raises(ValueError, match="`from_zero` is for squared error only"):
        gnlin.predict.posterior(
            model,
            (inputs, jnp.zeros((7, 2))),
            noise=1.0,
            curvature="kronecker",
            from_zero=True,
        )


@pytest.mark.slow
@pytest.mark.parametrize("curvature", ["full", "kronecker"])
def test_derivatives_of_a_variance_where_eigenvalues_are_zero(curvature):
    """By the model, which moves the curvature, by new inputs, and by both."""
    model, inputs, labels, test = case("convolution", n=3)

    def variance(scale, along):
        scaled = jax.tree.map(lambda x: scale * x if eqx.is_array(x) else x, model)
        posterior = gnlin.predict.posterior(
            scaled,
            (inputs, labels),
            loss=gnlin.SoftmaxCrossEntropy(),
            prior=0.7,
            curvature=curvature,
        )
        return jnp.sum(jnp.sin(posterior(along * test).variance))

    @jax.jit
    def run(s, t):
        """Return the value, its slopes, and their derivatives by the scale."""
        slopes = jax.value_and_grad(variance, (0, 1))
        (value, by_each), (_, by_both) = jax.jvp(lambda s: slopes(s, t), (s,), (1.0,))
        return value, jnp.stack(by_each), jnp.stack(by_both)

    h = 1e-5
    ends = [run(1.1 + h, 1.0), run(1.1 - h, 1.0), run(1.1, 1.0 + h), run(1.1, 1.0 - h)]
    _, by_each, by_both = run(1.1, 1.0)
    differences = [(a[0] - b[0]) / (2 * h) for a, b in (ends[:2], ends[2:])]
    np.testing.assert_allclose(by_each, differences, rtol=1e-6)
    expected = (ends[0][1] - ends[1][1]) / (2 * h)
    np.testing.assert_allclose(by_both, expected, rtol=1e-6)
