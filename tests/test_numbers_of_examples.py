"""Losses with a number for each target, compared with SciPy's minimiser."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
import scipy.optimize
import scipy.special
import scipy.stats

import gnlin


T = np.linspace(0, 4, 8)
NOISE = 0.05
RNG = np.random.default_rng(0)
VALUES = np.maximum(np.exp(-T) + NOISE * RNG.normal(size=(5, 8)), 0.1)
CENSORED = np.where(VALUES <= 0.1, -1, 0)  # different flags in each row
TRIALS = RNG.integers(1, 20, (5, 8))
SUCCESSES = RNG.binomial(TRIALS, 0.4)
PATIENTS = {"number": jnp.arange(5)}
START = {"height": jnp.ones(5), "rate": jnp.full(1, 0.5)}


def curve(rows, patient):
    return rows["height"] * jnp.exp(-rows["rate"] * T) / NOISE


def reads(patient):
    return {"height": patient["number"], "rate": 0}


def tobit(outputs):
    z = outputs - VALUES / NOISE
    return np.where(CENSORED == 0, z**2 / 2, -scipy.stats.norm.logcdf(-z)).sum()


def minimum(of_outputs, start=(1, 1, 1, 1, 1, 0.5)):
    def value(v):
        return of_outputs(v[:5, None] * np.exp(-v[5] * T) / NOISE)

    return scipy.optimize.minimize(value, start, method="BFGS", options={"gtol": 1e-4})


EXPECTED = minimum(tobit)


def as_group(**options):
    given = {"targets": VALUES / NOISE, "loss": gnlin.losses.TobitNLL(CENSORED)}
    return gnlin.Residuals(curve, PATIENTS, select=reads, **(given | options))


def near_expected(parameters):
    np.testing.assert_allclose(parameters["height"], EXPECTED.x[:5], rtol=1e-5)
    np.testing.assert_allclose(parameters["rate"], EXPECTED.x[5:], rtol=1e-5)


@pytest.mark.parametrize(
    "with_targets", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_flags_of_each_value_in_groups(with_targets):
    group = as_group()
    if not with_targets:
        group = gnlin.Residuals(
            lambda rows, p: curve(rows, p) - p["y"],
            PATIENTS | {"y": jnp.asarray(VALUES / NOISE)},
            loss=gnlin.losses.TobitNLL(CENSORED),
            select=reads,
        )
    solution = gnlin.solve(START, group)
    near_expected(solution.model)
    np.testing.assert_allclose(solution.loss, EXPECTED.fun)


@pytest.mark.slow
def test_flags_in_optimistix_and_in_standard_errors():
    solution = optx.least_squares(as_group(), gnlin.LevenbergMarquardt(), START)
    near_expected(solution.value)
    covariance = gnlin.predict.covariance(solution.value, as_group())

    # By Gauss and Newton: the outputs are linearised, and the loss is not.
    outputs = lambda v: jnp.outer(v[:5], jnp.exp(-v[5] * T)).ravel() / NOISE
    jacobian = np.asarray(jax.jacfwd(outputs)(jnp.asarray(EXPECTED.x)))
    z = np.asarray(outputs(EXPECTED.x)) - VALUES.ravel() / NOISE
    hazard = np.exp(scipy.stats.norm.logpdf(z) - scipy.stats.norm.logcdf(-z))
    curvature = np.where(CENSORED.ravel() == 0, 1, hazard * (hazard - z))
    inverse = np.linalg.inv(jacobian.T * curvature @ jacobian)
    errors = covariance.standard_errors
    found = np.append(errors["height"], errors["rate"])
    np.testing.assert_allclose(found, np.sqrt(np.diagonal(inverse)), rtol=1e-4)


@pytest.mark.slow
def test_flags_are_drawn_with_their_targets():
    # Flags of other examples would move the minimum, which all examples share.
    exact = 2.0 * np.exp(-0.7 * T) / NOISE
    flags = np.where(np.arange(5)[:, None] % 2 == np.arange(8) % 2, -1, 0)
    above = np.where(flags < 0, exact + 100, exact)  # the limits say nothing
    group = as_group(targets=above, loss=gnlin.losses.TobitNLL(flags))
    exact_model = {"height": jnp.full(5, 2.0), "rate": jnp.full(1, 0.7)}
    solution = gnlin.fit(exact_model, group, batch_size=2, steps=5)
    np.testing.assert_allclose(solution.history["loss"], 0, atol=1e-20)


def log_odds(p, x):
    return p[0] + p[1] * x


def binomial(p):
    chance = scipy.special.expit(p[0] + p[1] * T)
    return -scipy.stats.binom.logpmf(SUCCESSES, TRIALS, chance).sum()


@pytest.mark.parametrize("batch_size", [pytest.param(None, marks=pytest.mark.slow), 5])
def test_trials_of_each_value_on_a_batch(batch_size):
    model = lambda p, t: p[0] + p[1] * t, jnp.zeros(2)
    data, loss = (np.tile(T, (5, 1)), SUCCESSES), gnlin.losses.BinomialNLL(TRIALS)
    if batch_size is None:
        solution = gnlin.solve(model, data, loss=loss)
    else:  # a batch of all examples, in shuffled orders
        solution = gnlin.fit(model, data, loss=loss, batch_size=batch_size, epochs=25)
    expected = scipy.optimize.minimize(binomial, np.zeros(2), options={"gtol": 1e-7})
    np.testing.assert_allclose(solution.model[1], expected.x, rtol=1e-4)


def test_flags_of_one_number_for_each_example():
    flags, y = CENSORED[0], VALUES[0] / NOISE
    model = lambda p, t: p[0] + p[1] * t, jnp.zeros(2)

    def value(p):
        z = p[0] + p[1] * T - y
        return np.where(flags == 0, z**2 / 2, -scipy.stats.norm.logcdf(-z)).sum()

    expected = scipy.optimize.minimize(value, np.zeros(2), options={"gtol": 1e-7})
    solve = lambda c: gnlin.solve(model, (T, y), loss=gnlin.losses.TobitNLL(c))
    np.testing.assert_allclose(solve(flags).model[1], expected.x, rtol=1e-5)
    both = jax.vmap(lambda c: solve(c).loss)(jnp.stack([flags, 0 * flags]))
    np.testing.assert_allclose(both[0], expected.fun)


@pytest.mark.slow
def test_evidence_of_trials_has_their_number_of_ways():
    """By Laplace's approximation at the minimum that SciPy finds."""
    model = lambda p, t: p[0] + p[1] * t
    data, loss = (np.tile(T, (5, 1)), SUCCESSES), gnlin.losses.BinomialNLL(TRIALS)
    best = scipy.optimize.minimize(
        lambda p: binomial(p) + p @ p / 200, np.zeros(2), options={"gtol": 1e-7}
    )
    chance = scipy.special.expit(best.x[0] + best.x[1] * T)
    design = np.stack([np.ones(8), T])
    trials = np.sum(TRIALS * chance * (1 - chance), axis=0)
    precision = (design * trials) @ design.T + np.eye(2) / 100
    expected = -best.fun - np.linalg.slogdet(100 * precision)[1] / 2
    posterior = gnlin.predict.posterior(
        (model, jnp.asarray(best.x)), data, loss=loss, prior=10.0
    )
    np.testing.assert_allclose(posterior.log_evidence(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            lambda: gnlin.solve(START, as_group(loss=gnlin.losses.TobitNLL(CENSORED.T))),
            r"In the group 'residuals': `censored` must .* \(5, 8\), .* one example, "
            r"\(8,\), but has the shape \(8, 5\)",
        ),
        (
            lambda: gnlin.fit(
                (log_odds, jnp.zeros(2)),
                [(T, VALUES[0])],
                loss=gnlin.losses.TobitNLL(CENSORED[0]),
                steps=1,
            ),
            "`censored` of the shape of all targets, .* whose targets hold them",
        ),
        (
            lambda: gnlin.fit(
                (log_odds, jnp.zeros(2)),
                (T, VALUES[0]),
                loss=gnlin.losses.TobitNLL(CENSORED[0]),
                validation=(T, VALUES[0]),
                steps=1,
            ),
            "`censored` of the loss .* training targets, and says nothing about other",
        ),
        (
            lambda: gnlin.solve(
                (log_odds, jnp.zeros(2)),
                (T, SUCCESSES[0]),
                loss=gnlin.losses.BinomialNLL(SUCCESSES[0] - 1 + (SUCCESSES[0] == 0)),
            ),
            "no more successes than trials",
        ),
        (
            lambda: gnlin.solve(
                (log_odds, jnp.zeros(2)),
                (T, VALUES[0][:, None]),
                loss=gnlin.losses.TobitNLL(CENSORED[0][:, None]),
            ),
            r"shape of the model's outputs, \(8,\), but have \(8, 1\)",
        ),
    ],
)
def test_errors(train, message):
    with pytest.raises(ValueError, match=message):
        train()


@pytest.mark.parametrize("given", [{"y": np.zeros((12, 12), int)}, [[0, 1], [0]]])
@pytest.mark.parametrize("loss", [gnlin.losses.TobitNLL, gnlin.losses.BinomialNLL])
def test_a_loss_takes_one_array(loss, given):
    with pytest.raises(ValueError, match="number, or one array of numbers") as told:
        loss(given)
    assert len(str(told.value)) < 200
    assert ("concatenate" in str(told.value)) == isinstance(given, dict)


@pytest.mark.parametrize(
    ("changes", "select", "words"),
    [
        ({"height": jnp.ones(5, int)}, reads, "'height' is not trained, because its ent"),
        (
            {"height": [1.0] * 5},
            reads,
            "'height' holds lists or several arrays: pass one",
        ),
        ({"third": jnp.ones(5)}, reads, "returns nothing for 'third': return `jnp.zeros"),
        ({}, lambda p: reads(p) | {"far": 0}, "the model has no 'far'"),
        ({}, lambda p: p["number"], "returns PyTreeDef"),
    ],
)
@pytest.mark.filterwarnings("ignore:The parameter 'height' holds whole numbers")
def test_a_selection_of_another_structure(changes, select, words):
    group = gnlin.Residuals(curve, PATIENTS, select=select)
    with pytest.raises(
        ValueError, match="must return the structure .* arrays, but " + words
    ):
        gnlin.solve(START | changes, group)


def test_a_selection_of_what_is_not_trained():
    group = gnlin.Residuals(curve, PATIENTS, select=reads)
    with pytest.raises(ValueError, match="'height' is not trained: return `None`"):
        gnlin.solve(START, group, filter_spec={"height": False, "rate": True})


def test_a_network_as_the_start_of_a_fit():
    network = eqx.nn.MLP("scalar", "scalar", 4, 1, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"of a network, .*`gnlin.solve` trains it"):
        gnlin.curve_fit(lambda net, x: jax.vmap(net)(x), T, VALUES[0], network)
