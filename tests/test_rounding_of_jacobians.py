"""What data determine, where the Jacobian has more rounding than its numbers."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats

import gnlin


def stiffness(n):
    second = 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    second[-1, -1] /= 2
    return second @ second


def of_solve(product, matrix):
    load = jnp.zeros(len(matrix)).at[-1].set(1.0)
    return jnp.linalg.solve(product * matrix, load)


def of_eigenvalues(product, matrix):
    return jnp.linalg.eigvalsh(product * matrix)


def of_loop(product, matrix):
    """A product through the steps of a differential equation."""
    load = jnp.ones(len(matrix))

    def step(u, _):
        return u + 0.05 * (load - product * jnp.asarray(matrix) @ u), None

    return jax.lax.scan(step, jnp.zeros(len(matrix)), length=30)[0]


def product_known(model, n):
    """Fit two factors, and compare with the closed formula for their product alone."""
    matrix = stiffness(n)
    f = lambda p, x: model(p["a"] * p["b"], matrix)
    at = lambda product: np.asarray(model(product, matrix))
    sigma = 0.005 * np.abs(at(1.0))
    y = at(1.0) + sigma * np.random.default_rng(0).normal(size=n)
    start = {"a": 0.7, "b": 1.6}
    with pytest.warns(UserWarning, match="do not determine all parameters: moving"):
        fit = gnlin.curve_fit(f, np.zeros(1), y, start, sigma=sigma, absolute_sigma=True)
    # The derivative by the product, from central differences.
    product = float(fit.parameters["a"] * fit.parameters["b"])
    change = (at(product * (1 + 1e-5)) - at(product * (1 - 1e-5))) / (2e-5 * product)
    return fit, product, 1 / np.linalg.norm(change / sigma), sigma, y


@pytest.mark.parametrize(
    ("model", "n"),
    [(of_solve, 10)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            (of_solve, 3),
            (of_solve, 6),
            (of_solve, 20),
            (of_solve, 40),
            (of_eigenvalues, 10),
            (of_eigenvalues, 40),
            (of_loop, 10),
        ]
    ],
)
def test_only_the_product_of_two_factors_is_known(model, n):
    fit, product, expected, _, _ = product_known(model, n)
    assert np.isinf(fit.standard_errors["a"])
    assert np.isinf(fit.standard_errors["b"])
    assert len(fit.undetermined()) == 1
    assert fit.degrees_of_freedom == n - 1
    value, error = fit.derived(lambda p: p["a"] * p["b"])
    np.testing.assert_allclose(value, product)
    np.testing.assert_allclose(error, expected, rtol=1e-5)


def test_groups_know_only_the_product_too():
    fit, _, expected, sigma, y = product_known(of_solve, 10)
    matrix = stiffness(10)
    residuals = lambda p, _: (of_solve(p["a"] * p["b"], matrix) - y) / sigma
    known = gnlin.predict.covariance(fit.parameters, gnlin.Residuals(residuals))
    assert np.all(np.isinf(jax.tree.leaves(known.standard_errors)))
    _, error = known.derived(lambda p: p["a"] * p["b"])
    np.testing.assert_allclose(error, expected, rtol=1e-5)


X = np.linspace(0.0, 3.0, 40)


def exponentials(p, x):
    return p[0] * jnp.exp(-p[1] * x) + p[2] * jnp.exp(-p[3] * x)


def polynomial(p, x):
    return jnp.polyval(jnp.exp(p), x)


def gaussians(p, x):
    shape = lambda a, m, s: a * jnp.exp(-(((x - m) / s) ** 2))
    return shape(*p[:3]) + shape(*p[3:])


def of_exponentials(p, x):
    one, other = np.exp(-p[1] * x), np.exp(-p[3] * x)
    return [one, -p[0] * x * one, other, -p[2] * x * other]


def of_polynomial(p, x):
    return [np.exp(p[k]) * x ** (len(p) - 1 - k) for k in range(len(p))]


def of_gaussians(p, x):
    columns = []
    for a, m, s in (p[:3], p[3:]):
        shape, away = np.exp(-(((x - m) / s) ** 2)), x - m
        columns += [shape, a * shape * 2 * away / s**2, a * shape * 2 * away**2 / s**3]
    return columns


def inverse_triangle(columns):
    """Return the inverse of the triangular factor, by Gram and Schmidt, repeated."""
    k, q = len(columns), []
    r = np.eye(k, dtype=columns[0].dtype)
    for j, column in enumerate(columns):
        r[j, j] = 0
        for _ in range(2):
            for i, unit in enumerate(q):
                part = np.sum(unit * column)
                r[i, j] += part
                column = column - part * unit
        r[j, j] = np.sqrt(np.sum(column**2))
        q.append(column / r[j, j])
    inverse = np.zeros_like(r)
    for j in range(k):
        for i in range(j, -1, -1):
            rest = (i == j) - np.sum(r[i, i + 1 :] * inverse[i + 1 :, j])
            inverse[i, j] = rest / r[i, i]
    return inverse


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "columns", "p"),
    [
        (exponentials, of_exponentials, [1.1, 1.3, 0.7, 1.301]),
        (polynomial, of_polynomial, np.linspace(-1, 1, 9)),
        (gaussians, of_gaussians, [1.0, 1.5, 0.5, 0.8, 1.51, 0.5]),
    ],
)
def test_what_is_determined_stays_so(f, columns, p):
    """Errors from derivatives and a factorisation in extended precision."""
    p, x = np.asarray(p), X / (3 if f is polynomial else 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = gnlin.curve_fit(
            f, x, np.asarray(f(p, x)), p, sigma=1e-3, absolute_sigma=True
        )
    assert not fit.undetermined()
    exact = columns(np.asarray(fit.parameters, np.longdouble), x.astype(np.longdouble))
    inverse = inverse_triangle([column * 1000 for column in exact])
    errors = np.sqrt(np.sum(inverse**2, axis=1)).astype(float)
    np.testing.assert_allclose(fit.standard_errors, errors, rtol=1e-3)


def test_a_kink_is_no_rounding():
    """At its end the derivative by the time of a break jumps, and the polynomial in years
    is ill-conditioned."""
    years = np.arange(1950.0, 2021.0)

    def trend(p, x):
        powers = jnp.polyval(p["powers"], x)
        return powers + p["slope"] * jnp.maximum(x - p["time"], 0)

    p = {"powers": np.array([0.0, 0, 0, 0.02, 1.0]), "slope": 0.5, "time": 1990.0}
    y = np.asarray(trend(p, years))
    fit = gnlin.curve_fit(trend, years, y, p, sigma=0.3, absolute_sigma=True)
    assert fit.degrees_of_freedom == 64
    x = years.astype(np.longdouble)
    after = np.where(x == 1990, 0.5, x > 1990)
    columns = [*(x**k for k in (4, 3, 2, 1, 0)), after * (x - 1990), -0.5 * after]
    inverse = inverse_triangle([column / 0.3 for column in columns])
    errors = np.sqrt(np.sum(inverse**2, axis=1)).astype(float)
    found = np.concatenate([np.ravel(x) for x in jax.tree.leaves(fit.standard_errors)])
    np.testing.assert_allclose(found, errors, rtol=1e-4)


@pytest.mark.slow
def test_unknown_shifts_beside_a_fast_wave():
    """Rounding of a frequency changes its own column, and the common shift of a hundred
    groups stays undetermined."""
    t = np.linspace(0, 100, 400)
    group = np.arange(400) % 100

    def wave(p, x):
        level = p["mean"] + p["shifts"][group]
        return level + p["size"] * jnp.cos(p["rate"] * x + p["phase"])

    p = {"mean": 0.5, "shifts": np.zeros(100), "size": 1.0, "rate": 1e11, "phase": 0.3}
    y = np.asarray(wave(p, t)) + 1e-3 * np.random.default_rng(0).normal(size=400)
    with pytest.warns(UserWarning, match="all 100 of shifts by 1 and mean by -1|mean"):
        fit = gnlin.curve_fit(wave, t, y, p, sigma=1e-3, absolute_sigma=True)
    assert np.all(np.isinf(fit.standard_errors["shifts"]))
    assert np.isinf(fit.standard_errors["mean"])
    assert np.isfinite(fit.standard_errors["size"])


SHARES = np.linspace(-3, 3, 9)


def psychometric(p, x):
    rate = p["lapse"] / 2 + (1 - p["lapse"]) * jax.scipy.stats.norm.cdf(
        (x - p["mu"]) * jnp.exp(-p["ls"])
    )
    return jnp.log(rate) - jnp.log1p(-rate)


@pytest.mark.parametrize(
    ("counts", "name"),
    [
        (np.where(SHARES > 0.1, 40, 0), "mu"),
        pytest.param(np.full(9, 40), "ls", marks=pytest.mark.slow),
        pytest.param(20 + 20 * np.sign(np.round(SHARES)), "ls", marks=pytest.mark.slow),
    ],
)
def test_a_plateau_of_a_likelihood_has_no_error(counts, name):
    """The likelihood is flat about the end of the fit, by SciPy."""
    start = {"mu": 0.0, "ls": 0.0, "lapse": 0.02}
    bounds = {"lapse": (1e-6, 0.2), "ls": (-3, 3), "mu": (-4, 4)}
    loss = gnlin.losses.BinomialNLL(40.0)
    with pytest.warns(UserWarning, match=f"moving {name} by 1 does not change"):
        fit = gnlin.curve_fit(
            psychometric, SHARES, counts, start, bounds=bounds, loss=loss
        )
    assert np.isinf(fit.standard_errors[name])
    assert fit.undetermined() == [f"{name} by 1"]
    assert "standard errors" not in fit.reason

    def log_likelihood(p):
        rate = p["lapse"] / 2 + (1 - p["lapse"]) * scipy.stats.norm.cdf(
            (SHARES - p["mu"]) * np.exp(-p["ls"])
        )
        return scipy.stats.binom.logpmf(counts, 40, rate).sum()

    best, moved = {k: float(v) for k, v in fit.parameters.items()}, []
    for step in (-0.05, 0.05):
        value = np.clip(best[name] + step, *bounds[name])
        moved.append(log_likelihood(best | {name: value}) - log_likelihood(best))
    assert np.min(np.abs(moved)) < 1e-4


def test_narrow_bounds_are_no_plateau():
    """Of counts, whose errors are the same as without bounds."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=30)
    y = rng.poisson(np.exp(0.5 + 0.8 * x)).astype(float)
    curve = lambda p, x: p["a"] + p["b"] * x + p["c"] * x**2
    start, loss = {"a": 0.5, "b": 1.0, "c": -0.195}, gnlin.losses.PoissonNLL()
    free = gnlin.curve_fit(curve, x, y, start, loss=loss)
    assert -0.2 < free.parameters["c"] < -0.18
    bounds = {"c": -0.2}, {"c": -0.18}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = gnlin.curve_fit(curve, x, y, start, loss=loss, bounds=bounds)
    errors, expected = (
        np.array(jax.tree.leaves(each.standard_errors)) for each in (fit, free)
    )
    assert np.all(expected[2] > 10 * 0.02)
    np.testing.assert_allclose(errors, expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["logistic", "poisson"])
def test_ordinary_likelihoods_stay_determined(kind):
    rng = np.random.default_rng(0)
    x = rng.normal(size=20)
    rates = 0.3 + rng.normal(size=(50, 1)) * 0.5 * x
    if kind == "logistic":
        loss, y = (
            gnlin.losses.BinomialNLL(10.0),
            rng.binomial(10, 1 / (1 + np.exp(-rates))),
        )
    else:
        loss, y = gnlin.losses.PoissonNLL(), rng.poisson(np.exp(rates))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = gnlin.curve_fit(lambda p, x: p[0] + p[1] * x, x, y, np.zeros(2), loss=loss)

    def negative(p):
        eta = p[0] + p[1] * x
        if kind == "logistic":
            return -scipy.stats.binom.logpmf(y[0], 10, 1 / (1 + np.exp(-eta))).sum()
        return -scipy.stats.poisson.logpmf(y[0], np.exp(eta)).sum()

    best = scipy.optimize.minimize(negative, np.zeros(2), tol=1e-10).x
    eta = best[0] + best[1] * x
    rate = np.exp(eta)
    weight = 10 * rate / (1 + rate) ** 2 if kind == "logistic" else rate
    design = np.stack([np.ones(20), x], axis=1)
    errors = np.sqrt(np.diag(np.linalg.inv(design.T * weight @ design)))
    np.testing.assert_allclose(fit.standard_errors[0], errors, rtol=1e-4)
