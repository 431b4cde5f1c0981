"""A prior in training, against dense formulas and SciPy."""

import functools
import warnings
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import optimize

import gnlin
from gnlin._training._model import make_network
from gnlin._training._prior import Prior
from gnlin._training._pulled import only_pulled
from gnlin._training._step import StepSettings


RNG = np.random.default_rng(0)
INPUTS = jnp.asarray(RNG.normal(size=(30, 2)))
LABELS = jnp.asarray(np.prod(INPUTS, axis=1) + 0.3 * RNG.normal(size=30) > 0, int)
LOSS = gnlin.SoftmaxCrossEntropy()
PRIOR = 2.0


def network(num_outputs=2):
    return eqx.nn.MLP(2, num_outputs, 4, 1, jnp.tanh, key=jax.random.key(0))


def parameters_of(model):
    return eqx.filter(model, eqx.is_inexact_array)


def flat(model):
    return jax.flatten_util.ravel_pytree(parameters_of(model))


@eqx.filter_jit
def objective(model):
    chosen = jax.nn.log_softmax(jax.vmap(model)(INPUTS))[jnp.arange(30), LABELS]
    return -jnp.sum(chosen) + jnp.sum(flat(model)[0] ** 2) / (2 * PRIOR**2)


@functools.cache
def trained():
    data = INPUTS, LABELS
    return gnlin.solve(network(), data, loss=LOSS, prior=PRIOR, max_steps=100)


@pytest.mark.slow
def test_training_finds_the_minimum_of_loss_plus_prior():
    start, unravel = flat(network())
    static = eqx.filter(network(), eqx.is_inexact_array, inverse=True)
    value = jax.jit(
        jax.value_and_grad(lambda x: objective(eqx.combine(unravel(x), static)))
    )
    solution = trained()
    found, _ = flat(solution.model)
    best = optimize.minimize(value, found, jac=True, tol=1e-9).fun
    assert best < value(start)[0] - 5
    assert solution.loss == pytest.approx(best, rel=1e-7)
    assert solution.prior == PRIOR
    history = solution.history
    np.testing.assert_allclose(history["loss/data"] + history["loss/prior"], history.loss)
    # `fit` minimises a thirtieth of it.
    options = {"loss": LOSS, "prior": PRIOR, "batch_size": 10}
    of_prior = first_losses(network(), (INPUTS, LABELS), **options)[1]
    assert of_prior == pytest.approx(start @ start / (2 * PRIOR**2) / 30)


def first_losses(model, data, **kwargs):
    """Return the parts of the loss before the first step."""
    history = gnlin.fit(model, data, optax.sgd(1e-3), steps=1, **kwargs).history
    return history["loss/data"][0], history["loss/prior"][0]


@pytest.mark.slow
def test_the_weight_of_the_prior():
    """It is such that the loss of the data and the prior sum to the whole objective, or
    to the part of it that a batch is."""
    model = network()
    whole = jnp.sum(flat(model)[0] ** 2) / (2 * PRIOR**2)
    data, options = (INPUTS, LABELS), {"prior": PRIOR, "loss": LOSS}
    assert first_losses(model, data, **options)[1] == pytest.approx(whole / 30)
    batches = {**options, "batch_size": 10}
    assert first_losses(model, data, **batches)[1] == pytest.approx(whole / 30)
    batches["loss"] = gnlin.SoftmaxCrossEntropy(reduction="sum")
    assert first_losses(model, data, **batches)[1] == pytest.approx(whole / 3)
    weights = jnp.linspace(0.0, 2.0, 30)
    found = first_losses(model, (*data, weights), **options)
    assert found[1] == pytest.approx(whole / jnp.sum(weights))
    ignoring = gnlin.SoftmaxCrossEntropy(ignore_index=-1)
    labels = LABELS.at[:6].set(-1)
    found = first_losses(model, (INPUTS, labels), prior=PRIOR, loss=ignoring)
    assert found[1] == pytest.approx(whole / 24)
    solution = gnlin.solve(model, data, max_steps=1, **options)
    assert solution.history["loss/prior"][0] == pytest.approx(whole)
    last = jax.tree.map(lambda _: False, model)
    last = eqx.tree_at(lambda m: m.layers[-1], last, True)
    found = first_losses(model, data, filter_spec=last, **options)
    of_last = jnp.sum(flat(model.layers[-1])[0] ** 2) / (2 * PRIOR**2)
    assert found[1] == pytest.approx(of_last / 30)


class Normalised(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(2, 4, key=keys[0])
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.last = eqx.nn.Linear(4, 2, key=keys[1])

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(jnp.tanh(x)), state


@pytest.mark.slow
def test_a_prior_beside_other_options():
    """Batch normalisation, validation, a larger batch for the curvature, and iterative
    linearisation across batches. The loss of validation data has no prior."""
    model, state = eqx.nn.make_with_state(Normalised)(jax.random.key(0))
    data = INPUTS, LABELS
    options = {"loss": LOSS, "prior": PRIOR, "batch_size": 10, "validation": data}
    solution = gnlin.fit(
        model, data, state=state, epochs=2, curvature_batch_size=20, **options
    )
    rows = len(solution.history.step)
    whole = jnp.sum(flat(model)[0] ** 2) / (2 * PRIOR**2)
    assert rows == 6
    assert solution.history["loss/prior"][0] == pytest.approx(whole / 30)
    plain = gnlin.fit(model, data, state=state, steps=6, **{**options, "prior": None})
    assert jnp.linalg.norm(flat(solution.model)[0]) < jnp.linalg.norm(
        flat(plain.model)[0]
    )
    solver = gnlin.IterativeLinearisation(5, learning_rate=0.1)
    solution = gnlin.fit(network(), data, solver, epochs=30, **options)
    mean = np.mean(jax.vmap(lambda x, y: LOSS.value(x, y))(outputs(solution), LABELS))
    assert solution.history.validation_loss[-1] == pytest.approx(mean)
    assert objective(solution.model) < objective(network()) - 1


def outputs(solution):
    return jax.vmap(solution.model)(INPUTS)


@pytest.mark.slow
def test_priors_under_vmap():
    def smaller(prior):
        solution = gnlin.solve(
            network(), (INPUTS, LABELS), loss=LOSS, prior=prior, max_steps=10
        )
        return jnp.linalg.norm(flat(solution.model)[0]), solution.prior

    norms, priors = jax.vmap(smaller)(jnp.array([0.1, 1.0]))
    assert norms[0] < 0.5 * norms[1]
    np.testing.assert_array_equal(priors, [0.1, 1.0])


@pytest.mark.slow
def test_the_posterior_knows_the_prior_of_the_training():
    data, solution = (INPUTS, LABELS), trained()
    with warnings.catch_warnings(action="error"):
        found = gnlin.predict.posterior(solution, data, loss=LOSS)(INPUTS)
        told = gnlin.predict.posterior(solution.model, data, loss=LOSS, prior=PRIOR)
    np.testing.assert_array_equal(found.variance, told(INPUTS).variance)
    other = gnlin.predict.posterior(solution, data, loss=LOSS, prior=0.1 * PRIOR)
    with pytest.warns(UserWarning, match="train it further, with `prior=0.2`"):
        other(INPUTS)


@pytest.mark.slow
def test_the_posterior_of_a_regression_trained_with_its_prior():
    """In training the prior is in units of the noise. The posterior's mean is the trained
    model, whose parameters have zero as their prior's mean."""
    targets = jnp.asarray(np.prod(INPUTS, axis=1, keepdims=True))
    data, noise = (INPUTS, targets), 0.2
    solution = gnlin.solve(network(1), data, prior=PRIOR / noise, max_steps=100)
    posterior = gnlin.predict.posterior(solution, data, noise=noise)
    assert posterior.prior == pytest.approx(PRIOR)
    np.testing.assert_allclose(posterior(INPUTS).mean, outputs(solution), atol=1e-6)
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x), parameters_of(solution.model))
    zeros = eqx.combine(zeros, solution.model)
    same = gnlin.predict.posterior(
        solution.model, data, noise=noise, prior=PRIOR, about=zeros
    )
    assert same.log_evidence() == pytest.approx(float(posterior.log_evidence()), rel=1e-9)


# Any solver does where only the settings of the training matter; this one compiles fast.
DAMPED = gnlin.DampedGaussNewton(0.1, search=None)


@pytest.mark.parametrize(
    "train", [pytest.param(gnlin.solve, marks=pytest.mark.slow), gnlin.fit]
)
def test_a_prior_about_fitted_parameters_warns(train):
    """For another loss the prior is about zero, and a prediction warns instead."""
    data, model = (INPUTS, jnp.prod(INPUTS, axis=1, keepdims=True)), network(1)
    options = {"max_steps": 5} if train is gnlin.solve else {"steps": 5, "batch_size": 10}
    solution = train(model, data, DAMPED, **options)
    with pytest.warns(UserWarning, match="counts data twice .* pass `about`"):
        twice = gnlin.predict.posterior(solution, data, noise=0.1)
    once = gnlin.predict.posterior(solution, data, noise=0.1, about=model)
    assert twice.log_evidence() > once.log_evidence() + 1
    gnlin.predict.posterior(solution, data, noise=0.1, from_zero=True)
    gnlin.predict.posterior(solution.model, data, noise=0.1)


def test_mistakes():
    data, model = (INPUTS, LABELS), network()
    with pytest.raises(ValueError, match="`prior` must be greater than 0"):
        gnlin.solve(model, data, loss=LOSS, prior=-1.0)
    with pytest.raises(ValueError, match="`prior` needs to know the number of examples"):
        gnlin.fit(model, [data], loss=LOSS, prior=1.0, epochs=1)
    group = gnlin.Residuals(lambda model, x: model(x), INPUTS)
    with pytest.raises(ValueError, match="`prior` is not for groups of residuals: add"):
        gnlin.solve(model, group, prior=1.0)
    with pytest.raises(ValueError, match="`prior` is not for groups of residuals: add"):
        gnlin.fit(model, group, prior=1.0, steps=1)


@pytest.mark.parametrize(("train", "as_pair"), [(gnlin.solve, True), (gnlin.fit, False)])
def test_a_posterior_takes_the_parameters_that_were_trained(train, as_pair):
    x = jnp.linspace(-1.0, 1.0, 20)
    own = {"slope": jnp.ones(1), "offset": jnp.ones(2)}
    line = lambda p, x: jnp.sum(p["slope"] * x + p["offset"] * x**2)
    model = (line, own) if as_pair else Line(own["slope"], own["offset"])
    if as_pair:
        spec = {"slope": True, "offset": False}
    else:
        spec = eqx.tree_at(lambda m: (m.slope, m.offset), model, (True, False))
    options = {"steps": 2, "batch_size": 10} if train is gnlin.fit else {"max_steps": 2}
    solution = train(
        model, (x, 2 * x), DAMPED, filter_spec=spec, prior=3.0, progress=False, **options
    )
    posteriors = (
        gnlin.predict.posterior(solution, (x, 2 * x), noise=0.1, **given)
        for given in ({}, {"filter_spec": spec})
    )
    found, expected = (each.log_evidence() for each in posteriors)
    np.testing.assert_allclose(found, expected)


@pytest.mark.slow
def test_a_pair_whose_function_has_no_leaves():
    model = jax.tree_util.Partial(lambda p, x: p * x), jnp.ones(())
    data = INPUTS[:, 0], 2 * INPUTS[:, 0]
    solution = gnlin.solve(model, data)
    posterior = gnlin.predict.posterior(solution, data, noise=0.1, about=model)
    assert posterior.prior == 1  # not trained with another one
    assert np.isfinite(posterior.log_evidence())


class Line(eqx.Module):
    slope: jax.Array
    offset: jax.Array

    def __call__(self, x):
        return jnp.sum(self.slope * x + self.offset * x**2)


@pytest.mark.slow
def test_a_posterior_of_groups_is_refused_without_a_warning():
    group = gnlin.Residuals(lambda p, x: p * x - 1, jnp.ones(3))
    solution = gnlin.solve(jnp.array(2.0), group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"but groups of `gnlin\.Residuals` were"):
            gnlin.predict.posterior(solution, group, noise=1.0)


class Behind(eqx.Module):
    """A head on a body that has no derivative, or that it does not read."""

    body: eqx.nn.MLP
    head: eqx.nn.Linear
    behind: Callable = eqx.field(static=True)

    def __call__(self, x):
        return self.head(self.behind(self.body, x))


def with_body(behind):
    body = eqx.nn.MLP(2, 3, 4, 1, jnp.tanh, key=jax.random.key(1))
    return Behind(body, eqx.nn.Linear(3, 2, key=jax.random.key(2)), behind)


def said_of(model, behind=None, **state):
    """Return what is said of a model; nothing is compiled."""
    model = with_body(behind) if model is None else model
    x = jnp.ones((12, 2))
    parameters, network = make_network(model, eqx.is_inexact_array, **state)
    of_prior = Prior.of(PRIOR, LOSS.reduced("sum"), (x, jnp.zeros(12, int), None))
    setting = StepSettings(None, LOSS, network, prior=of_prior)
    return only_pulled(setting, parameters, state.get("state"), (x,))


@pytest.mark.parametrize(
    "behind",
    [
        lambda body, x: jax.lax.stop_gradient(body(x)),
        eqx.filter_jit(lambda body, x: jax.lax.stop_gradient(body(x))),
        lambda body, x: jnp.sign(body(x)),
        lambda body, x: jnp.ones(3),
    ],
    ids=["stopped", "compiled", "signs", "not read"],
)
def test_parameters_without_a_derivative_are_named(behind):
    said = said_of(None, behind)
    assert "derivative by 'body.layers.0.weight' and 3 other arrays, so" in said
    assert "leave them out by `filter_spec`" in said


def frozen(m, x):
    return m["w"] @ x + jax.lax.stop_gradient(m["b"])


@pytest.mark.parametrize("driver", ["solve", "fit"])
def test_a_prior_that_pulls_is_told_once(driver):
    start, data = {"w": jnp.eye(2), "b": jnp.ones(2)}, (INPUTS, INPUTS)
    train = functools.partial(gnlin.solve, max_steps=2)
    if driver == "fit":
        train = functools.partial(gnlin.fit, solver=optax.sgd(0.1), steps=2)
    said = "derivative by 'b', so that `prior` pulls"
    with pytest.warns(UserWarning, match=said) as caught:
        solution = train((frozen, start), data, prior=1.0)
    assert [w.filename for w in caught if said in str(w.message)] == [__file__]
    assert jnp.all(solution.model[1]["b"] < start["b"])  # the warning is about this
    spec = {"w": True, "b": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The outputs have no derivative")
        solution = train((frozen, start), data, prior=1.0, filter_spec=spec)
    np.testing.assert_array_equal(solution.model[1]["b"], start["b"])


def _loop(body, x):
    """A function with forward mode only, of all parameters of the body."""
    step = lambda state: (state[0] + 1, jnp.tanh(state[1] + body(x)))
    return jax.lax.while_loop(lambda s: s[0] < 3, step, (0, jnp.zeros(3)))[1]


@jax.custom_vjp
def _own(x):
    return jnp.sin(x)


_own.defvjp(lambda x: (jnp.sin(x), x), lambda x, u: (u * jnp.cos(x),))


@pytest.mark.parametrize(
    "behind",
    [
        lambda body, x: body(x),
        lambda body, x: 0 * body(x),  # zero, but by its numbers
        _loop,
        lambda body, x: _own(body(x)),
        lambda body, x: jax.lax.scan(
            lambda c, _: (c + body(x), None), jnp.zeros(3), None, 2
        )[0],
    ],
    ids=["network", "times zero", "loop", "reverse only", "scan"],
)
def test_parameters_with_a_derivative_are_not(behind):
    assert said_of(None, behind) == ""


def test_batch_normalisation_has_derivatives():
    model, state = eqx.nn.make_with_state(Normalised)(jax.random.key(0))
    assert said_of(model, state=state) == ""
