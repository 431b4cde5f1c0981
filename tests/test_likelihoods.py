"""Fits of counts, successes and censored values, compared with iteratively reweighted
least squares and SciPy's distributions."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optimistix as optx
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
from problems import num_compiled

import gnlin
from gnlin._curve_fit._residuals import runs_test, signs_of


RNG = np.random.default_rng(0)
X = np.linspace(-1, 2, 40)
DESIGN = np.stack([np.ones(40), X], 1)
START = {"a": 0.0, "b": 0.0}
COUNTS = RNG.poisson(np.exp(1 + 0.8 * X))
TRIALS = RNG.integers(0, 30, 40)
SUCCESSES = RNG.binomial(TRIALS, scipy.special.expit(0.3 + 1.2 * X))
NORMAL = 1 + 0.5 * X + 0.3 * RNG.normal(size=40)
SIDES = np.where(NORMAL < 0.8, -1, np.where(NORMAL > 1.7, 1, 0))
CENSORED = np.clip(NORMAL, 0.8, 1.7)


def line(p, x):
    return p["a"] + p["b"] * x


def rate(p, x):
    return p["a"] * jnp.exp(p["b"] * x) + 1.0


def values(tree):
    return np.array([float(v) for v in jax.tree.leaves(tree)])


POISSON = scipy.stats.poisson
BINOMIAL = scipy.stats.binom


def negative_binomial(mean, dispersion=0.5):
    return scipy.stats.nbinom(1 / dispersion, 1 / (1 + dispersion * mean))


class Own(gnlin.authoring.AbstractElementwiseLoss):
    """A user-defined Poisson loss of one example."""

    reduction: str | None = None

    def elementwise(self, outputs, target):
        return jnp.exp(outputs) - target * outputs


# The loss, y, the mean and its derivative by the outputs, the variance, and the logarithm
# of the probability.
GLMS = {
    "poisson": (
        gnlin.losses.PoissonNLL(),
        COUNTS,
        lambda f: (np.exp(f), np.exp(f), np.exp(f)),
        lambda mean: POISSON.logpmf(COUNTS, mean),
    ),
    "binomial": (
        gnlin.losses.BinomialNLL(TRIALS),
        SUCCESSES,
        lambda f: (
            TRIALS * scipy.special.expit(f),
            *(2 * (TRIALS * scipy.special.expit(f) * scipy.special.expit(-f),)),
        ),
        lambda mean: BINOMIAL.logpmf(SUCCESSES, TRIALS, mean / np.maximum(TRIALS, 1)),
    ),
    "negative binomial": (
        gnlin.losses.NegativeBinomialNLL(0.5),
        COUNTS,
        lambda f: (np.exp(f), np.exp(f), np.exp(f) + 0.5 * np.exp(2 * f)),
        lambda mean: negative_binomial(mean).logpmf(COUNTS),
    ),
    "own": (
        Own(),
        COUNTS,
        lambda f: (np.exp(f), np.exp(f), np.exp(f)),
        None,
    ),
}


@functools.cache
def fit_of(name):
    loss, y, *_ = GLMS[name]
    return gnlin.curve_fit(line, X, y, START, loss=loss)


@pytest.mark.parametrize(
    "name",
    [
        "poisson",
        pytest.param("binomial", marks=pytest.mark.slow),
        pytest.param("negative binomial", marks=pytest.mark.slow),
        "own",
    ],
)
def test_by_iteratively_reweighted_least_squares(name):
    _, y, mean_of, logarithm = GLMS[name]
    fit, p = fit_of(name), np.zeros(2)
    for _ in range(100):
        mean, slope, variance = mean_of(DESIGN @ p)
        weights = slope**2 / np.maximum(variance, 1e-300)
        information = DESIGN.T @ (weights[:, None] * DESIGN)
        score = slope / np.maximum(variance, 1e-300) * (y - mean)
        p = p + np.linalg.solve(information, DESIGN.T @ score)
    np.testing.assert_allclose(values(fit.parameters), p, rtol=1e-5)
    covariance = np.linalg.inv(information)
    np.testing.assert_allclose(fit.covariance_matrix, covariance, rtol=1e-4)
    errors = np.sqrt(np.diagonal(covariance))
    np.testing.assert_allclose(values(fit.standard_errors), errors, rtol=1e-4)
    used = variance > 0
    pearson = np.sum((y - mean)[used] ** 2 / variance[used])
    np.testing.assert_allclose(fit.chi_squared, pearson, rtol=1e-4)
    assert fit.scale == 1
    assert fit.degrees_of_freedom == 38
    if logarithm is not None:
        deviance = 2 * np.sum(logarithm(y) - logarithm(mean))
        np.testing.assert_allclose(fit.deviance, deviance, rtol=1e-6)
        # The criteria have all constants, so that different losses can be compared.
        misfit = -2 * np.sum(logarithm(mean))
        np.testing.assert_allclose(fit.aic, misfit + 4, rtol=1e-6)
        np.testing.assert_allclose(fit.bic, misfit + 2 * np.log(40), rtol=1e-6)


def test_profiles_follow_the_likelihood():
    """By Wilks's theorem the deviance rises by the quantile of chi-squared."""
    interval = fit_of("poisson").confidence_intervals(0.9)
    loss = lambda a, b: -np.sum(POISSON.logpmf(COUNTS, np.exp(a + b * X)))

    def profile(a):
        return scipy.optimize.minimize_scalar(
            lambda b: loss(a, b), bracket=(0, 1), tol=1e-12
        ).fun

    best = values(fit_of("poisson").parameters)
    rise = scipy.stats.chi2.ppf(0.9, 1) / 2
    above = lambda a: profile(a) - loss(*best) - rise
    low = scipy.optimize.brentq(above, best[0] - 1, best[0])
    high = scipy.optimize.brentq(above, best[0], best[0] + 1)
    np.testing.assert_allclose([interval.low["a"], interval.high["a"]], [low, high], 1e-4)
    band = fit_of("poisson").band(np.array([0.0, 2.0]), 0.9)
    covariance = np.asarray(fit_of("poisson").covariance_matrix)
    error = np.sqrt(covariance[0, 0]), np.sqrt([1, 2] @ covariance @ [1, 2])
    width = scipy.stats.norm.ppf(0.95) * np.array(error)
    np.testing.assert_allclose(band.high - band.mean, width, rtol=1e-6)


@pytest.mark.slow
def test_the_edge_of_rates_does_not_depend_on_the_unit_of_steps():
    x, start = np.linspace(0, 1, 8), np.array([0.5, 3.0])
    counts = np.array([0, 1, 3, 2, 5, 4, 7, 6])
    loss = gnlin.losses.PoissonNLL(log_input=False)
    solver = gnlin.LevenbergMarquardt(retraction=lambda p, step: p + 1e-3 * step)
    line = lambda p, x: p[0] + p[1] * x
    with pytest.warns(UserWarning, match="the rate falls to 0 at point 0"):
        gnlin.curve_fit(line, x, counts, start, solver, loss=loss)


@pytest.mark.slow
def test_a_rate_that_falls_to_zero_at_a_point_without_counts():
    x, start = np.linspace(0, 1, 8), {"a": 0.5, "b": 3.0}
    counts = np.array([0, 1, 3, 2, 5, 4, 7, 6])
    loss = gnlin.losses.PoissonNLL(log_input=False)
    with pytest.warns(UserWarning, match="the rate falls to 0 at point 0"):
        fit = gnlin.curve_fit(line, x, counts, start, loss=loss)
    assert fit.reason in fit.complaint()
    gnlin.curve_fit(line, x, counts, start, loss=loss, bounds={"a": (1e-3, None)})
    # In the tail of a peak the rate is as small, but no parameter lowers it.
    gnlin.curve_fit(
        lambda p, x: p["h"] * jnp.exp(-((4 * x / p["w"]) ** 2)),
        x,
        counts[::-1] * (x < 0.5),
        {"h": 5.0, "w": 1.0},
        loss=loss,
    )


@pytest.mark.slow
def test_a_curve_that_is_the_rate_itself():
    """The curve is the rate itself, also between bounds."""
    fit = gnlin.curve_fit(
        rate,
        X,
        COUNTS,
        {"a": 1.0, "b": 0.5},
        loss=gnlin.losses.PoissonNLL(log_input=False),
    )
    mean = lambda p: p[0] * np.exp(p[1] * X) + 1
    best = scipy.optimize.minimize(
        lambda p: -np.sum(POISSON.logpmf(COUNTS, mean(p))), [1, 0.5], method="BFGS"
    ).x
    np.testing.assert_allclose(values(fit.parameters), best, rtol=1e-4)
    shape = np.exp(best[1] * X)
    slopes = np.stack([shape, best[0] * X * shape], 1)
    information = slopes.T @ (slopes / mean(best)[:, None])
    np.testing.assert_allclose(
        fit.covariance_matrix, np.linalg.inv(information), rtol=1e-3
    )
    held = gnlin.curve_fit(
        rate,
        X,
        COUNTS,
        {"a": 1.0, "b": 0.5},
        loss=gnlin.losses.PoissonNLL(log_input=False),
        bounds={"b": (0.0, 0.6)},
    )
    assert held.parameters["b"] == 0.6
    alone = scipy.optimize.minimize_scalar(
        lambda a: -np.sum(POISSON.logpmf(COUNTS, mean((a, 0.6)))),
        bounds=(0.5, 5),
        method="bounded",
        options={"xatol": 1e-9},
    ).x
    np.testing.assert_allclose(held.parameters["a"], alone, rtol=1e-6)
    assert held.deviance > fit.deviance


@pytest.mark.slow
def test_an_interval_where_the_likelihood_is_not_defined():
    """At this confidence the lower end is close to 0, and a rate below it has none."""
    f = lambda p, x: p["rate"] + 0 * x
    loss = gnlin.losses.PoissonNLL(log_input=False)
    fit = gnlin.curve_fit(f, np.arange(3.0), [1, 0, 0], {"rate": 0.5}, loss=loss)
    with pytest.warns(UserWarning, match="rate was not found: the loss is not finite"):
        interval = fit.confidence_intervals(0.999999)
    assert np.isnan(interval.low["rate"])


@pytest.mark.slow
def test_censored_values():
    """Tobin's likelihood, with its second derivative by differences."""
    fit = gnlin.curve_fit(
        line, X, CENSORED, START, sigma=0.3, loss=gnlin.losses.TobitNLL(SIDES)
    )

    def loss(p):
        z = (CENSORED - DESIGN @ p) / 0.3
        each = np.where(SIDES == 0, 0.5 * z**2, -scipy.stats.norm.logcdf(-SIDES * z))
        return np.sum(each)

    best = scipy.optimize.minimize(loss, [1, 0.5], method="BFGS", tol=1e-9).x
    np.testing.assert_allclose(values(fit.parameters), best, rtol=1e-5)
    h, curvature = 1e-4, np.zeros((2, 2))
    for i, j in np.ndindex(2, 2):
        ends = [
            s * t * loss(best + h * (s * np.eye(2)[i] + t * np.eye(2)[j]))
            for s in (1, -1)
            for t in (1, -1)
        ]
        curvature[i, j] = sum(ends) / (4 * h**2)
    np.testing.assert_allclose(fit.covariance_matrix, np.linalg.inv(curvature), rtol=1e-4)
    assert abs(fit.parameters["b"] - 0.5) < 3 * fit.standard_errors["b"]
    naive, _ = np.polyfit(X, CENSORED, 1)
    assert naive < fit.parameters["b"] - fit.standard_errors["b"]


@pytest.mark.slow
def test_missing_counts_and_many_of_them():
    loss = gnlin.losses.PoissonNLL()
    counts = COUNTS.astype(float)
    counts[[3, 17]] = np.nan
    fit = gnlin.curve_fit(line, X, counts, START, loss=loss, nan_policy="omit")
    known = ~np.isnan(counts)
    fewer = gnlin.curve_fit(line, X[known], COUNTS[known], START, loss=loss)
    np.testing.assert_allclose(
        values(fit.parameters), values(fewer.parameters), rtol=1e-7
    )
    np.testing.assert_allclose(fit.covariance_matrix, fewer.covariance_matrix, rtol=1e-6)
    np.testing.assert_allclose(fit.deviance, fewer.deviance, rtol=1e-7)
    assert fit.residuals[3] == 0
    assert fit.degrees_of_freedom == 36
    both = gnlin.curve_fit(
        line, X, np.stack([COUNTS, counts]), START, **{"loss": loss, "nan_policy": "omit"}
    )
    of_each = [fit_of("poisson").standard_errors["b"], fit.standard_errors["b"]]
    np.testing.assert_allclose(both.standard_errors["b"], of_each, rtol=1e-6)


@pytest.mark.slow
def test_derivatives_by_the_data():
    loss = gnlin.losses.PoissonNLL()
    y = jnp.asarray(COUNTS, float)

    @jax.jit
    def slope(y):
        return gnlin.curve_fit(line, X, y, START, loss=loss).parameters["b"]

    found = jax.jit(jax.grad(slope))(y)
    ends = [slope(y.at[5].add(h)) for h in (1e-3, -1e-3)]
    np.testing.assert_allclose(found[5], (ends[0] - ends[1]) / 2e-3, rtol=1e-4)


@pytest.mark.slow
def test_in_single_precision():
    fit = gnlin.curve_fit(
        line,
        X.astype(np.float32),
        COUNTS.astype(np.float32),
        {name: np.float32(0) for name in START},
        loss=gnlin.losses.PoissonNLL(),
    )
    assert fit.covariance_matrix.dtype == jnp.float32
    expected = fit_of("poisson")
    np.testing.assert_allclose(
        values(fit.parameters), values(expected.parameters), rtol=1e-3
    )
    np.testing.assert_allclose(
        fit.covariance_matrix, expected.covariance_matrix, rtol=1e-2
    )


def test_runs_of_one_sign():
    """Use the formula, in the order of x, and detect data that are too smooth."""
    order = np.random.default_rng(1).permutation(40)
    mixed = gnlin.curve_fit(
        line, X[order], COUNTS[order], START, loss=gnlin.losses.PoissonNLL()
    )
    fit = fit_of("poisson")
    assert mixed.runs_test() == pytest.approx(fit.runs_test())
    of_y = POISSON(np.exp(line(fit.parameters, X)))
    draws = np.random.default_rng(0).uniform(size=40)
    signs = np.sign(of_y.cdf(COUNTS - 1) + draws * of_y.pmf(COUNTS) - 0.5)
    runs = 1 + np.sum(signs[1:] != signs[:-1])
    n, m = np.sum(signs > 0), np.sum(signs < 0)
    mean = 2 * n * m / 40 + 1
    variance = 2 * n * m * (2 * n * m - 40) / (40**2 * 39)
    z = max(abs(runs - mean) - 0.5, 0) / np.sqrt(variance)
    assert fit.runs_test() == pytest.approx(2 * scipy.stats.norm.sf(z))
    bent = np.round(20 * (X - 0.5) ** 2)
    bent = gnlin.curve_fit(line, X, bent, START, loss=gnlin.losses.PoissonNLL())
    assert bent.runs_test() < 1e-4
    said = "`runs_test` needs the distribution of y.*define `cdf` of `Own`"
    with pytest.raises(ValueError, match=said):
        fit_of("own").runs_test()
    assert "runs test" not in str(fit_of("own"))


@pytest.mark.slow
def test_runs_of_successes_of_a_steep_curve():
    """The signs of Pearson's residuals are those of `2 y - 1`, which have few runs."""
    y = np.random.default_rng(4).binomial(1, scipy.special.expit(6 * X))
    assert runs_test(2 * y - 1) < 1e-3
    loss = gnlin.losses.BinomialNLL(np.ones(40, int))
    assert gnlin.curve_fit(line, X, y, START, loss=loss).runs_test() > 0.05


@pytest.mark.parametrize("name", ["poisson", "binomial", "negative binomial", "tobit"])
def test_the_runs_test_of_the_true_model_gives_few_alarms(name):
    """Of 1,000 data sets of 100 small counts, single trials or censored values, about
    5 % have a p below 0.05, less the correction for continuity."""
    rng, f = np.random.default_rng(2), np.linspace(-3, 1, 100)
    mean, shape = np.exp(f), (1000, 100)
    normal = f + rng.normal(size=shape)
    at_most = gnlin.losses.TobitNLL((normal > -0.5) * 1)
    loss, y = {
        "poisson": (gnlin.losses.PoissonNLL(), rng.poisson(mean, shape)),
        "binomial": (
            gnlin.losses.BinomialNLL(1),
            rng.binomial(1, scipy.special.expit(2 * f), shape),
        ),
        "negative binomial": (
            gnlin.losses.NegativeBinomialNLL(0.5),
            negative_binomial(mean).rvs(shape, rng),
        ),
        "tobit": (at_most, np.minimum(normal, -0.5)),
    }[name]
    f = 2 * f if name == "binomial" else f
    signs = signs_of(loss, f, y, rng.uniform(size=shape))
    share = np.mean([runs_test(row) < 0.05 for row in signs])
    assert 0.02 < share < 0.06


@pytest.mark.parametrize("size", [1e3, 1e6, 1e8])
def test_the_deviance_of_large_counts_does_not_cancel_in_single_precision(size):
    """It was -128 for 60 counts of 1e7, where 36 is right, and profiles followed it."""
    rng = np.random.default_rng(0)
    means = size * np.exp(0.1 * np.linspace(0, 4, 60))
    counts = np.float32(rng.poisson(means)).astype(float)
    tries = np.full(60, 3 * size)
    successes = np.float32(rng.binomial(int(3 * size), means / tries)).astype(float)
    log_of = lambda a, b: a * np.log(a / b)

    def of_binomial(log_odds):
        p = scipy.special.expit(log_odds)
        failures = tries - successes
        return log_of(successes, tries * p) + log_of(failures, tries * (1 - p))

    def of_negative_binomial(log_mean):
        mean, z = np.exp(log_mean), 1 / 0.1
        return log_of(counts, mean) + (counts + z) * np.log((mean + z) / (counts + z))

    of_poisson = lambda mean: log_of(counts, mean) + mean - counts
    cases = [
        (
            gnlin.losses.PoissonNLL(),
            counts,
            np.log(means),
            lambda f: of_poisson(np.exp(f)),
        ),
        (gnlin.losses.PoissonNLL(log_input=False), counts, means, of_poisson),
        (
            gnlin.losses.BinomialNLL(tries),
            successes,
            scipy.special.logit(means / tries),
            of_binomial,
        ),
        (
            gnlin.losses.NegativeBinomialNLL(0.1),
            counts,
            np.log(means),
            of_negative_binomial,
        ),
    ]
    for loss, target, outputs, formula in cases:
        single = jnp.asarray(outputs, jnp.float32)
        found = jnp.sum(loss.elementwise(single, jnp.asarray(target, jnp.float32)))
        assert found.dtype == jnp.float32
        expected = np.sum(formula(np.asarray(single, float)))
        assert found == pytest.approx(expected, rel=1e-5 if size == 1e3 else 0.02)


@pytest.mark.parametrize(
    "loss",
    [
        gnlin.losses.PoissonNLL(),
        gnlin.losses.PoissonNLL(log_input=False),
        gnlin.losses.BinomialNLL(10.0),
        gnlin.losses.NegativeBinomialNLL(1.0),
        gnlin.losses.NegativeBinomialNLL(0.3),
    ],
)
def test_derivatives_by_outputs_do_not_depend_on_the_formula(loss):
    """Also at log-odds of 0, where an absolute value would have no derivative, for no
    successes, for no failures, and on both sides of where formulas change."""
    f = jnp.array([0.0, 1e-12, -1e-12, -np.log(0.3), 0.7, 1.5, 3.0, -2.0])
    if isinstance(loss, gnlin.losses.PoissonNLL) and not loss.log_input:
        f = jnp.exp(f)

    @jax.jit
    def both(f, target):
        """Return the first two derivatives, by differentiation and by the formula."""
        slope = jax.vmap(jax.grad(loss.elementwise))(f, target)
        bend = jax.vmap(jax.grad(jax.grad(loss.elementwise)))(f, target)
        of_formula = jax.vmap(jax.grad(loss.derivative))(f, target)
        return slope, loss.derivative(f, target), bend, of_formula

    for y in (0.0, 1.0, 4.0, 10.0):
        slope, derivative, bend, exact = both(f, jnp.full_like(f, y))
        np.testing.assert_allclose(slope, derivative, atol=1e-9)
        np.testing.assert_allclose(bend, exact, atol=1e-8)


class Exponential(gnlin.authoring.AbstractElementwiseLoss):
    """Waiting times, whose mean is the exponential of the output."""

    reduction: str | None = None

    def elementwise(self, output, target):
        return output + target * jnp.exp(-output) - 1 - jnp.log(target)

    def mean(self, output):
        return jnp.exp(output)

    def cdf(self, output, target):
        below = scipy.stats.expon(scale=np.exp(output)).cdf(target)
        return below, below


@pytest.mark.slow
def test_a_likelihood_of_your_own_may_have_a_runs_test_and_a_picture():
    matplotlib.use("Agg")
    rng = np.random.default_rng(1)
    bent = rng.exponential(np.exp(3 * np.cos(3 * X)))  # not a line
    fit = gnlin.curve_fit(line, X, bent, START, loss=Exponential())
    below = scipy.stats.expon.cdf(bent / np.exp(line(fit.parameters, X)))
    assert fit.runs_test() == runs_test(np.sign(below - 0.5)) < 0.05
    assert "runs test of the residuals' signs: p = " in str(fit)
    assert "Pearson" not in str(fit)
    assert "Pearson" in str(fit_of("poisson"))
    (curve,) = (drawn for drawn in fit.plot().lines if drawn.get_label() == "fit")
    expected = np.exp(line(fit.parameters, X[-1]))
    assert curve.get_ydata()[-1] == pytest.approx(float(expected))


def test_the_report_and_the_picture():
    matplotlib.use("Agg")
    report = str(fit_of("poisson"))
    assert "deviance" in report
    assert "runs test of the residuals' signs: p = " in report
    assert "reduced" not in report
    ax = fit_of("binomial").plot()
    (curve,) = (drawn for drawn in ax.lines if drawn.get_label() == "fit")
    expected = scipy.special.expit(line(fit_of("binomial").parameters, 2.0))
    assert curve.get_ydata()[-1] == pytest.approx(float(expected))
    matplotlib.pyplot.close("all")


@pytest.mark.slow
def test_data_sets_with_trials_and_censored_values_of_their_own():
    def of_successes(y, trials):
        loss = gnlin.losses.BinomialNLL(trials)
        return gnlin.curve_fit(line, X, y, START, loss=loss).parameters

    def of_limits(y, censored):
        loss = gnlin.losses.TobitNLL(censored)
        return gnlin.curve_fit(line, X, y, START, sigma=1.0, loss=loss).parameters

    rng = np.random.default_rng(0)
    trials = rng.integers(5, 20, (2, len(X)))
    values, limits = rng.normal(size=(2, *trials.shape))
    sides = np.where(values < limits, -1, 0)
    for fit, y, own in (
        (of_successes, rng.binomial(trials, 0.3), trials),
        (of_limits, np.maximum(values, limits), sides),
    ):
        expected = [fit(*each) for each in zip(y, own, strict=True)]
        expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
        jax.tree.map(np.testing.assert_allclose, jax.vmap(fit)(y, own), expected)


def test_missing_successes_may_have_any_number_of_trials():
    y = np.where(np.arange(len(X)) == 3, np.nan, SUCCESSES)
    fits = [
        gnlin.curve_fit(
            line,
            X,
            y,
            START,
            loss=gnlin.losses.BinomialNLL(np.where(np.isnan(y), number, 1_000)),
            nan_policy="omit",
        )
        for number in (0, 7)
    ]
    jax.tree.map(np.testing.assert_allclose, *(fit.parameters for fit in fits))
    np.testing.assert_allclose(fits[0].aic, fits[1].aic)


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        (-COUNTS, {}, "counts must lie between 0 and inf, but one is -"),
        (
            SUCCESSES,
            {"loss": gnlin.losses.BinomialNLL(3)},
            "no more successes than trials, but",
        ),
        (
            SUCCESSES,
            {"loss": gnlin.losses.BinomialNLL([3, 4])},
            "one number, or have the shape of y",
        ),
        (
            SUCCESSES / 1_000,
            {"loss": gnlin.losses.BinomialNLL(1_000)},
            "like fractions of the trials: pass their number",
        ),
        (COUNTS, {"sigma": 1.0}, "already implies the spread.*make its y NaN"),
        (COUNTS, {"sigma_x": 1.0}, "`sigma_x` needs squared error"),
        (COUNTS, {"loss": gnlin.losses.TobitNLL(0)}, "Censored values need `sigma`"),
        (
            COUNTS,
            {"loss": gnlin.losses.TobitNLL([0, 1]), "sigma": 1.0},
            "`censored` must be one number, or have the shape",
        ),
        (
            COUNTS,
            {"loss": gnlin.losses.TobitNLL(0), "sigma": np.eye(40)},
            "pass standard deviations as `sigma`",
        ),
        (
            COUNTS,
            {"loss": gnlin.losses.PoissonNLL(log_input=False)},
            r"is the rate of the counts, which must be positive, .* is 0 at point 0",
        ),
        *[
            (COUNTS, {"loss": loss}, "a loss of one number for each .* use `gnlin.solve`")
            for loss in (
                gnlin.SoftmaxCrossEntropy(),
                gnlin.losses.Isotropic(gnlin.losses.Huber()),
            )
        ],
        (
            np.stack([COUNTS, COUNTS]),
            {"loss": gnlin.losses.TobitNLL(np.zeros((2, 40), int)), "sigma": 1.0},
            r"\(of one data set.*\), \(40,\), but has the shape \(2, 40\): .*`jax.vmap`",
        ),
        (
            np.stack([COUNTS, COUNTS]),
            {"loss": gnlin.losses.BinomialNLL(np.full((2, 40), 99))},
            r"\(of one data set.*\), \(40,\), but has the shape \(2, 40\): .*`jax.vmap`",
        ),
        (COUNTS, {"loss": "poisson"}, "`loss` must be one of gnlin's"),
    ],
)
def test_errors_of_arguments(y, options, message, unchecked):
    options = {"loss": gnlin.losses.PoissonNLL(), **options}
    with pytest.raises(ValueError, match=message):
        gnlin.curve_fit(line, X, y, START, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gnlin.losses.PoissonNLL(log_input="no"), "`log_input` must be `True`"),
        (lambda: gnlin.losses.BinomialNLL(-1), "`trials` must be a number"),
        (lambda: gnlin.losses.BinomialNLL("many"), "`trials` must be a number"),
        (
            lambda: gnlin.losses.BinomialNLL(np.array([3, np.nan])),
            r"but one is nan: where y is missing, any number will do\.$",
        ),
        (lambda: gnlin.losses.NegativeBinomialNLL(0.0), "`dispersion` must be greater"),
        (
            lambda: gnlin.losses.NegativeBinomialNLL([1.0, 2.0]),
            "`dispersion` must be one",
        ),
        (lambda: gnlin.losses.TobitNLL([0, 2]), "`censored` must hold .* but one is 2"),
        (lambda: gnlin.losses.TobitNLL([True]), "one is True: multiply the flags by 1"),
        (
            lambda: fit_of("poisson").band(X, sigma=1.0),
            "`sigma` of a band is for normal noise",
        ),
    ],
)
def test_errors_of_losses(make, message, unchecked):
    with pytest.raises(ValueError, match=message):
        make()


LOSSES = {
    "rate": (
        gnlin.losses.PoissonNLL(log_input=False),
        np.array([0.3, 2.0, 30.0]),
        lambda f: POISSON(f),
        lambda y: POISSON(np.maximum(y, 1e-300)),
    ),
    "poisson": (
        gnlin.losses.PoissonNLL(),
        np.array([-2.0, 0.5, 3.0]),
        lambda f: POISSON(np.exp(f)),
        lambda y: POISSON(np.maximum(y, 1e-300)),
    ),
    "binomial": (
        gnlin.losses.BinomialNLL(7),
        np.array([-8.0, 0.5, 3.0]),
        lambda f: BINOMIAL(7, scipy.special.expit(f)),
        lambda y: BINOMIAL(7, y / 7),
    ),
    "negative binomial": (
        gnlin.losses.NegativeBinomialNLL(0.25),
        np.array([-2.0, 0.5, 3.0]),
        lambda f: negative_binomial(np.exp(f), 0.25),
        lambda y: negative_binomial(np.maximum(y, 1e-300), 0.25),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_losses_are_scipys_distributions(name):
    """Compare the value, its slope, and the mean second derivative as the curvature."""
    loss, outputs, distribution, best = LOSSES[name]
    elementwise, derivative_of, root_of, decrease = (
        jax.jit(lambda *given, of=of: of(*given))
        for of in (loss.elementwise, loss.derivative, loss.root, loss.decrease)
    )
    most = 7 if name == "binomial" else 2000
    every = np.arange(most + 1)
    for f in outputs:
        chosen = np.array([0, 1, 5])
        at = lambda f, y=chosen: elementwise(jnp.full(y.size, f), jnp.asarray(1.0 * y))
        expected = best(chosen).logpmf(chosen) - distribution(f).logpmf(chosen)
        np.testing.assert_allclose(at(f), expected, rtol=1e-9, atol=1e-12)
        h = 1e-5 * max(abs(f), 1)
        slope = derivative_of(jnp.full(3, f), jnp.asarray(1.0 * chosen))
        np.testing.assert_allclose(slope, (at(f + h) - at(f - h)) / (2 * h), rtol=1e-6)
        derivative = lambda f: derivative_of(
            jnp.full(every.size, f), jnp.asarray(1.0 * every)
        )
        second = (derivative(f + h) - derivative(f - h)) / (2 * h)
        root = root_of(jnp.array([f]), jnp.array([1.0]))
        mean = np.sum(distribution(f).pmf(every) * second)
        np.testing.assert_allclose(root**2, mean, rtol=1e-6)
        for new in (f + 1e-3, f + 3.0):
            fall = [decrease(*(jnp.array([v]) for v in (f, new, y))) for y in (0.0, 5)]
            expected = at(f)[jnp.array([0, 2])] - at(new)[jnp.array([0, 2])]
            np.testing.assert_allclose(fall, expected, rtol=1e-9, atol=1e-12)
    tiny = [jnp.array([v]) for v in (2.0, 2.0 + 1e-12, 5.0)]
    slope = derivative_of(tiny[0], tiny[2])[0]
    fall = decrease(*tiny)
    np.testing.assert_allclose(fall, -slope * (tiny[1] - tiny[0])[0], rtol=1e-6)


def test_large_overdispersed_counts_in_single_precision():
    """Beside a count of a million, the third of a failure must not be lost."""
    count, change = 1e6, np.array([-1.0, -0.1, 0.0, 0.1, 1.0])
    loss = gnlin.losses.NegativeBinomialNLL(3.0)
    given = jnp.asarray(np.log(count) + change, jnp.float32)
    counts = jnp.full(change.size, count, jnp.float32)
    mean = np.exp(np.asarray(given, float))
    logpmf = lambda mean: negative_binomial(mean, 3.0).logpmf(count)
    found = loss.elementwise(given, counts)
    np.testing.assert_allclose(found, logpmf(count) - logpmf(mean), atol=3e-6)
    slope = (mean - count) / (1 + 3 * mean)
    np.testing.assert_allclose(loss.derivative(given, counts), slope, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_loss_of_a_limit(dtype):
    """Compare slope and curvature with the scaled complementary error function."""
    z = np.array([-2000.0, -60.0, -31.0, -29.0, -10.5, -9.0, -3.0, 0.0, 2.0, 6.0], dtype)
    loss, zero = gnlin.losses.TobitNLL(1), jnp.zeros(z.size, dtype)
    wide = z.astype(float)
    hazard = np.sqrt(2 / np.pi) / scipy.special.erfcx(-wide / np.sqrt(2))
    rtol = 1e-9 if dtype == np.float64 else 1e-4

    @jax.jit
    def run(z):
        upper, lower = (gnlin.losses.TobitNLL(side).elementwise for side in (1, -1))
        slope, root = loss.derivative(z, zero), loss.root(z, zero)
        return upper(z, zero), lower(-z, zero), slope, root

    value, below, slope, found = map(np.asarray, run(z))
    np.testing.assert_allclose(value, -scipy.stats.norm.logcdf(wide), rtol, 1e-15)
    np.testing.assert_allclose(slope, -hazard, rtol=rtol)
    with np.errstate(all="ignore"):
        far = 1 - 1 / wide**2 + 6 / wide**4 - 50 / wide**6
    curvature = np.where(wide < -29, far, hazard * (hazard + wide))
    np.testing.assert_allclose(found**2, curvature, rtol=max(rtol, 1e-6))
    np.testing.assert_array_equal(below, value)


@pytest.mark.slow
def test_many_parameters_take_exact_steps():
    """Twenty spots on an image of counts. By conjugate gradients that stop early, as for
    networks, the fit takes 81 steps."""
    rng, n = np.random.default_rng(1), 48
    across, down = np.meshgrid(np.arange(n) * 1.0, np.arange(n) * 1.0)
    x, y = (
        each.ravel() for each in np.meshgrid(np.linspace(6, 42, 5), np.linspace(6, 42, 4))
    )
    true = {"size": rng.uniform(200, 600, 20), "x": x, "y": y}
    true["width"] = rng.uniform(2, 4, 20)

    def image(p, at):
        def spot(p):
            squares = (at["x"] - p["x"]) ** 2 + (at["y"] - p["y"]) ** 2
            return p["size"] * jnp.exp(-0.5 * squares / p["width"] ** 2)

        return 5.0 + jnp.sum(jax.vmap(spot)(p), 0)

    at = {"x": across, "y": down}
    counts = rng.poisson(np.asarray(image(true, at)))
    start = {"size": np.full(20, 300.0), "width": np.full(20, 3.0)}
    start |= {"x": x + rng.normal(0, 0.7, 20), "y": y + rng.normal(0, 0.7, 20)}
    loss = gnlin.losses.PoissonNLL(log_input=False)
    fit = gnlin.curve_fit(image, at, counts, start, loss=loss)
    assert fit.result == optx.RESULTS.successful
    assert fit.num_steps <= 20


def test_a_rate_in_place_of_its_logarithm():
    x = np.linspace(0, 3, 30)
    counts = np.random.default_rng(0).poisson(2000 * np.exp(-x))
    rate = lambda p, x: p["a"] * jnp.exp(-p["k"] * x)
    start = {"a": 1500.0, "k": 0.5}
    with pytest.warns(UserWarning, match="pass `log_input=False` if `f` is a rate"):
        gnlin.curve_fit(rate, x, counts, start, loss=gnlin.losses.PoissonNLL())


def test_separated_successes():
    y, loss = (X > 0.1) * 1, gnlin.losses.BinomialNLL(np.ones(40, int))
    with pytest.warns(UserWarning, match="the curve separates successes from failures"):
        fit = gnlin.curve_fit(line, X, y, START, loss=loss)
    assert str(fit).startswith("the curve separates successes")


def test_a_group_of_zeros():
    """The likelihood of the group's rate has no maximum. The upper end of its profile
    interval has a closed form up to a root."""
    group, y = (X > 0) * 1.0, np.where(X > 0, 0, COUNTS)
    options = {"loss": gnlin.losses.PoissonNLL()}
    said = "has no maximum, and `b` falls without end, as for a group whose counts are"
    with pytest.warns(UserWarning, match=said):
        fit = gnlin.curve_fit(line, group, y, START, **options)
    assert "no maximum" in str(fit)
    total, empty = np.sum(y), np.sum(group)

    def rise(b):
        """Return by how much the deviance exceeds its least value, over all `a`."""
        return 2 * total * np.log1p(empty / (40 - empty) * np.exp(b))

    allowed = scipy.stats.chi2.ppf(0.95, 1)
    end = scipy.optimize.brentq(lambda b: rise(b) - allowed, -20, 0)
    low, high = fit.confidence_intervals()
    np.testing.assert_allclose(high["b"], end, rtol=1e-4)
    assert low["b"] == -np.inf
    with pytest.warns(UserWarning, match="has no maximum, and `a` falls without end"):
        gnlin.curve_fit(line, X, 0 * COUNTS, START, **options)
    few = np.where(np.arange(40) % 13 == 0, 1, 0)
    assert not gnlin.curve_fit(line, X, few, START, **options).complaint()


@pytest.mark.slow
def test_groups_of_successes_and_of_censored_values():
    group = (X > 0) * 1.0
    y, loss = np.where(X > 0, 1, np.arange(40) % 2), gnlin.losses.BinomialNLL(1)
    with pytest.warns(UserWarning, match="has no maximum, and `b` rises without end"):
        gnlin.curve_fit(line, group, y, START, loss=loss)
    sides = gnlin.losses.TobitNLL(group.astype(int))
    with pytest.warns(UserWarning, match="has no maximum, and `b` rises without end"):
        gnlin.curve_fit(line, group, NORMAL, START, sigma=0.3, loss=sides)
    many = np.stack([y, group, SUCCESSES > 5])
    said = "1 of 3 data sets have successes that the .*1 of 3 .* a likelihood without a"
    with pytest.warns(UserWarning, match=said):
        gnlin.curve_fit(line, group, many, START, loss=loss)


@pytest.mark.slow
def test_a_rate_of_zero_is_a_maximum():
    group, loss = (X > 0) * 1.0, gnlin.losses.PoissonNLL(log_input=False)
    rates = lambda p, x: p["a"] * (1 - x) + p["b"] * x
    start = {"a": 1.0, "b": 1.0}
    y = np.where(X > 0, 0, COUNTS)
    fit = gnlin.curve_fit(rates, group, y, start, bounds=(0, None), loss=loss)
    assert not fit.complaint()


def test_shares_that_are_met_exactly_are_not_separated():
    x, y = np.tile([0.0, 1.0], 20), np.tile([3, 7], 20)
    loss = gnlin.losses.BinomialNLL(np.full(40, 10))
    fit = gnlin.curve_fit(line, x, y, START, loss=loss)
    shares = scipy.special.expit(line(fit.parameters, x))
    np.testing.assert_allclose(shares, y / 10, rtol=1e-12)


class StudentT(gnlin.authoring.AbstractLoss):
    """Two degrees of freedom, and the scale 0.3."""

    reduction: str | None = None

    def value(self, outputs, target):
        return 1.5 * jnp.log1p(((outputs - target) / 0.3) ** 2 / 2)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "is_at_bound"), [(2, True), (4, False), (15, False)])
def test_the_upper_limit_of_a_rate_at_or_near_its_bound(seed, is_at_bound):
    """By rounding, the lower ends of the last two were -2e-16 and 3e-17."""
    x = np.linspace(0, 10, 50)
    line = np.exp(-0.5 * ((x - 4) / 0.4) ** 2)
    y = np.random.default_rng(seed).poisson(5, 50)
    if is_at_bound:
        y[18:23] = 2
    fit = gnlin.curve_fit(
        lambda p, line: p["area"] * line + p["back"],
        line,
        y,
        {"area": 1.0, "back": 4.0},
        bounds={"area": (0, None), "back": (0, None)},
        loss=gnlin.losses.PoissonNLL(log_input=False),
    )
    said = "The upper end of back lies where area is at its lower bound"
    ends_there = pytest.warns(UserWarning, match=said)
    with ends_there if seed == 15 else contextlib.nullcontext():
        low, high = fit.confidence_intervals()

    def profile(area):
        def nll(back):
            rate = area * line + back
            return np.sum(rate - y * np.log(rate))

        options = {"xatol": 1e-10}
        found = scipy.optimize.minimize_scalar(
            nll, bounds=(0.1, 20), method="bounded", options=options
        )
        return found.fun

    rise = 0.5 * scipy.stats.chi2.ppf(0.95, 1)
    best = float(fit.parameters["area"])
    above = lambda area: profile(area) - profile(best) - rise
    expected = scipy.optimize.brentq(above, best, 20)
    assert fit.at_bound["area"] == -is_at_bound
    assert low["area"] == 0
    np.testing.assert_allclose(high["area"], expected, rtol=1e-4)
    assert low["back"] < fit.parameters["back"] < high["back"]


@pytest.mark.slow
@pytest.mark.parametrize("start", [1.0, 0.01])
def test_the_upper_limit_of_a_rate_without_counts(start):
    """The likelihood is exp(-60 a), and steps only approach its maximum at 0."""
    fit = gnlin.curve_fit(
        lambda p, x: p["a"] + 0 * x,
        np.linspace(0, 1, 60),
        np.zeros(60),
        {"a": start},
        bounds={"a": (0, None)},
        loss=gnlin.losses.PoissonNLL(log_input=False),
    )
    assert fit.parameters["a"] == 0
    assert fit.at_bound["a"] == -1
    assert np.isnan(fit.standard_errors["a"])
    low, high = fit.confidence_intervals()
    assert low["a"] == 0
    limit = 0.5 * scipy.stats.chi2.ppf(0.95, 1) / 60
    np.testing.assert_allclose(high["a"], limit, rtol=1e-5)


class OwnCauchy(gnlin.authoring.AbstractElementwiseLoss):
    reduction: str | None = None

    def elementwise(self, output, target):
        return jnp.log1p((output - target) ** 2)


class ExpectedCauchy(OwnCauchy):
    def root(self, output, target):
        return jnp.ones_like(output)


def straight(p, x):
    return p[0] + p[1] * x


@pytest.mark.slow
def test_errors_of_a_loss_that_is_not_convex_and_their_derivatives():
    """They are those of the whole curvature, which is negative at the outlier."""
    x = np.linspace(0, 1, 12)
    y = 1 + x + 0.2 * np.sin(40 * x)
    y[3] += 1.0

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def error(y):
        start, loss = jnp.array([1.0, 1.0]), StudentT()
        fit = gnlin.curve_fit(straight, x, y, start, loss=loss)
        return fit.standard_errors[1], (fit.parameters, fit.covariance_matrix)

    (_, (parameters, covariance)), slope = error(y)
    rows = np.stack([np.ones(12), x], axis=1)
    u = (y - rows @ parameters) / 0.3
    second = 1.5 * (1 - u**2 / 2) / (1 + u**2 / 2) ** 2 / 0.09
    assert np.any(second < 0)
    exact = np.linalg.inv(rows.T @ (second[:, None] * rows))
    np.testing.assert_allclose(covariance, exact, rtol=1e-7)
    step = 1e-4
    for k in (0, 3, 7):
        change = step * np.eye(12)[k]
        ends = [error(y + sign * change)[0][0] for sign in (1, -1)]
        expected = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(slope[k], expected, rtol=1e-4, atol=1e-9)


BENT = np.arange(3.0), np.array([1.5, 1.5, 0.0]), np.array(0.05)


def bent(p, x):
    return jnp.stack([p, -p - p**2 / 2, 0.3 * p])


@pytest.mark.slow
def test_a_negative_curvature_that_is_too_large_is_left_out_and_told():
    with pytest.warns(UserWarning, match="leave out the negative curvature"):
        fit = gnlin.curve_fit(bent, *BENT, loss=OwnCauchy())
    assert np.isfinite(fit.standard_errors)
    low, high = fit.confidence_intervals(0.3)
    assert low < fit.parameters < high


@pytest.mark.slow
def test_a_large_negative_curvature_of_many_data_sets_is_told():
    x, y, start = BENT
    with pytest.warns(UserWarning, match="2 of 2 data sets have a large negative"):
        gnlin.curve_fit(bent, x, np.stack([y, y]), start, loss=OwnCauchy())


@pytest.mark.slow
def test_an_expected_curvature_of_ones_own_is_kept():
    x = np.linspace(0, 1, 12)
    y = 1 + x + 0.2 * np.sin(40 * x)
    y[[3, 8]] += 5.0
    fit = gnlin.curve_fit(straight, x, y, jnp.array([1.0, 1.0]), loss=ExpectedCauchy())
    rows = np.stack([np.ones(12), x], axis=1)
    np.testing.assert_allclose(fit.covariance_matrix, np.linalg.inv(rows.T @ rows), 1e-9)


def test_a_dispersion_of_double_precision_keeps_the_outputs_precision():
    loss = gnlin.losses.NegativeBinomialNLL(jnp.asarray(0.5, jnp.float64))
    output = jnp.ones(3, jnp.float32)
    for of in (loss.elementwise, loss.derivative, loss.root):
        assert of(output, output).dtype == jnp.float32


@pytest.mark.slow
def test_criteria_in_single_precision_at_any_dispersion_by_one_program():
    """Logarithms of factorials are large, and cancel."""
    fits = []

    def run(dispersion):
        loss = gnlin.losses.NegativeBinomialNLL(dispersion)
        fits.append(gnlin.curve_fit(line, X, COUNTS, START, loss=loss))

    with jax.enable_x64(False):
        run(0.5)
        assert num_compiled(lambda: run(1e-6)) == 0
        run(jnp.asarray(0.5))
    for dispersion, fit in zip((0.5, 1e-6, 0.5), fits, strict=True):
        mean = np.exp(DESIGN @ values(fit.parameters))
        exact = -2 * np.sum(negative_binomial(mean, dispersion).logpmf(COUNTS)) + 4
        np.testing.assert_allclose(float(fit.aic), exact, rtol=1e-5)
    found = np.stack([values(fit.standard_errors) for fit in fits])
    np.testing.assert_allclose(found[2], found[0], rtol=1e-6)
    assert np.all(found[1] < found[0])


@pytest.mark.slow
def test_derivatives_of_the_criteria_by_the_dispersion():
    def found(dispersion):
        loss = gnlin.losses.NegativeBinomialNLL(dispersion)
        fit = gnlin.curve_fit(line, X, COUNTS, START, loss=loss)
        return (fit.deviance, fit.aic, fit.bic), fit.parameters

    slopes, parameters = jax.jit(jax.jacfwd(found, has_aux=True))(0.5)
    mean, best = np.exp(DESIGN @ values(parameters)), np.maximum(COUNTS, 1e-300)

    def criterion(dispersion):  # of the best parameters, where its slope is zero
        return -2 * np.sum(negative_binomial(mean, dispersion).logpmf(COUNTS))

    def deviance(dispersion):
        perfect = negative_binomial(best, dispersion).logpmf(COUNTS)
        return criterion(dispersion) + 2 * np.sum(perfect)

    h = 1e-4
    of_deviance, of_criterion = (
        (of(0.5 + h) - of(0.5 - h)) / (2 * h) for of in (deviance, criterion)
    )
    expected = of_deviance, of_criterion, of_criterion
    np.testing.assert_allclose(slopes, expected, rtol=1e-6)


def test_the_derivative_by_a_count_of_zero():
    """The loss and what it leaves out have infinite slopes there, which cancel."""
    y, n, f = np.array([0.0, 3.0, 9.0, 0.0]), np.array([9.0, 3.0, 30.0, 0.0]), 0.3
    digamma = scipy.special.digamma
    of_odds = digamma(y + 1) - digamma(y + 2) + np.log1p(2 * np.exp(-f))
    expected = (
        (gnlin.losses.PoissonNLL(), digamma(y + 1) - f),
        (gnlin.losses.BinomialNLL(n), digamma(y + 1) - digamma(n - y + 1) - f),
        (gnlin.losses.NegativeBinomialNLL(0.5), of_odds),
    )
    for loss, exact in expected:

        @jax.jit
        @jax.grad
        def slope(y, of=loss):
            return jnp.sum(of.elementwise(jnp.full(4, f), y) - of.saturated(y))

        np.testing.assert_allclose(slope(y), exact, rtol=1e-10)


def test_what_the_loss_leaves_out_takes_integers():
    loss, counts = gnlin.losses.NegativeBinomialNLL(0.7), np.arange(12)
    found = loss.saturated(jnp.asarray(counts))
    alpha = 0.7
    best = scipy.stats.nbinom.logpmf(counts, 1 / alpha, 1 / (1 + alpha * counts))
    np.testing.assert_allclose(found, best, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_points_without_trials_are_missing():
    rng = np.random.default_rng(0)
    x = np.stack([np.ones(50), rng.normal(size=50)], axis=1)
    trials = rng.integers(0, 4, size=50)
    successes, some = rng.binomial(trials, 0.4), trials > 0

    def fit(which):
        loss = gnlin.losses.BinomialNLL(trials[which])
        line = lambda p, x: x @ p
        return gnlin.curve_fit(line, x[which], successes[which], np.zeros(2), loss=loss)

    every, told = fit(slice(None)), fit(some)
    assert every.degrees_of_freedom == told.degrees_of_freedom == int(some.sum()) - 2
    for name in (
        "parameters",
        "standard_errors",
        "chi_squared",
        "aic",
        "bic",
        "deviance",
    ):
        np.testing.assert_allclose(getattr(every, name), getattr(told, name), rtol=1e-9)


@pytest.mark.slow
def test_a_fit_of_counts_from_afar_does_not_run_off_to_infinity():
    x = np.linspace(0, 4, 300)
    log_rate = lambda p, t: p["h"] * jnp.exp(-p["r"] * t) + p["b"] - 1
    for seed in range(3):
        rates = 25 * np.exp(-1.3 * x) + 4
        counts = np.random.default_rng(seed).poisson(rates)
        start = {"h": 1.0, "r": 0.5, "b": 0.5}
        fit = gnlin.curve_fit(log_rate, x, counts, start, loss=gnlin.losses.PoissonNLL())
        assert fit.parameters["r"] > 0.5
        assert fit.num_steps < 25


def test_a_bound_that_is_never_active_does_not_change_the_steps():
    """The linearised rates are negative along some steps, where Poisson's loss is
    infinite."""
    t = 0.2 * (np.arange(64) + 0.5)
    response = np.exp(-0.5 * ((t - 1.5) / 0.15) ** 2)
    response = response / np.sum(response)
    delays = np.subtract.outer(np.arange(64), np.arange(64))
    convolution = np.where(delays >= 0, response[delays], 0)

    def lifetime(p, t):
        decay = jnp.exp(-t / p["tau"]) / p["tau"]
        return p["N"] * 0.2 * (convolution @ decay) + p["b"]

    truth = {"N": 3000.0, "tau": 0.86, "b": 0.3}
    counts = np.random.default_rng(4).poisson(lifetime(truth, t))
    start, loss = (
        {"N": 500.0, "tau": 2.0, "b": 0.5},
        gnlin.losses.PoissonNLL(log_input=False),
    )
    free, bounded = (
        gnlin.curve_fit(lifetime, t, counts, start, loss=loss, bounds=bounds)
        for bounds in (None, {"N": (0, 1e6)})
    )
    assert bounded.num_steps == free.num_steps < 60
    np.testing.assert_allclose(bounded.deviance, free.deviance, rtol=1e-12)


class Pinball(gnlin.authoring.AbstractElementwiseLoss):
    reduction: str | None = None
    rounded: float = 0.0

    def elementwise(self, outputs, targets):
        r = targets - outputs
        if self.rounded == 0:
            return jnp.maximum(0.8 * r, -0.2 * r)
        return 0.8 * r + self.rounded * jax.nn.softplus(-r / self.rounded)


def test_a_loss_of_straight_pieces_does_not_converge_and_a_rounded_one_does():
    x = np.linspace(0, 1, 40)
    y = 1 + 2 * x + np.random.default_rng(0).standard_t(3, size=40)
    line = lambda p, x: p[0] + p[1] * x
    # Some of these fits end with small steps, and some stand still.
    many = 1 + 2 * x + np.random.default_rng(0).normal(size=(3, 40))
    for data, in_parts in ((y, False), (many[0], False), (many[0], True)):
        with pytest.warns(UserWarning, match="`Pinball` has no curvature.*round the ki"):
            fit = gnlin.curve_fit(
                line, x, data, np.zeros(2), loss=Pinball(), in_parts=in_parts
            )
        assert not fit.converged
        assert np.all(np.isnan(fit.standard_errors))
        assert fit.degrees_of_freedom == 38
    with pytest.warns(UserWarning, match="3 data sets have not converged"):
        fits = gnlin.curve_fit(line, x, many, np.zeros(2), loss=Pinball())
    assert not fits.converged.any()
    rounded = gnlin.curve_fit(line, x, y, np.zeros(2), loss=Pinball(rounded=1e-3))
    # The least sum lies on a line through two points.
    pairs = [(i, j) for i in range(40) for j in range(i)]
    slopes = np.array([(y[i] - y[j]) / (x[i] - x[j]) for i, j in pairs])
    firsts = np.array([y[i] for i, _ in pairs]) - slopes * [x[i] for i, _ in pairs]
    r = y - firsts[:, None] - slopes[:, None] * x
    best = np.argmin(np.sum(np.maximum(0.8 * r, -0.2 * r), axis=1))
    assert rounded.converged
    np.testing.assert_allclose(
        rounded.parameters, [firsts[best], slopes[best]], atol=0.02
    )
